"""Private names of torch that a virtual device needs, and nothing else does.

A device that runs nothing must see more than operations, and answer where torch asks for hardware. Each function changes torch for the
duration of a block, in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.library
from torch import Tensor, UntypedStorage
from torch.distributed import ProcessGroup, Store
from torch.distributed.device_mesh import _MeshEnv
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim import optimizer
from torch.utils import checkpoint

_SUPPORTED_DEVICES = (
    "_get_fused_kernels_supported_devices",
    "_get_foreach_kernels_supported_devices",
)

KINDS = {
    # torch 2.13 renamed some of them; 2.11 has only the older names.
    "all_gather_single_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "_allgather_base": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "alltoall_base": "all_to_all",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}
"""Methods of a process group, and the kind of their collectives."""


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let a class or module have another attribute within the block."""
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)  # its base class has it


@contextmanager
def devices_per_host_on_meta() -> Iterator[None]:
    """Let the meta device have eight devices on a host: since 2.15 DTensor asks when it weighs ways to compute."""
    known = _MeshEnv.num_devices_per_host

    def answer(device_type: str) -> int:
        return 8 if device_type == "meta" else known(device_type)

    with _replaced(_MeshEnv, "num_devices_per_host", staticmethod(answer)):
        yield


@contextmanager
def watched_resizes(resized: Callable[[UntypedStorage], None]) -> Iterator[None]:
    """Call ``resized`` after a storage was given another size, which is no operation and so nothing else sees."""
    resize = UntypedStorage.resize_

    def watched(storage: UntypedStorage, size: int) -> UntypedStorage:
        resize(storage, size)
        resized(storage)
        return storage

    with _replaced(UntypedStorage, "resize_", watched):
        yield


@contextmanager
def watched_recomputation(
    checkpointed: Callable[[], None],
    recomputed: Callable[[], None],
    decided: Callable[[], None],
) -> Iterator[None]:
    """Call functions when recomputation takes the host's time beside its operations.

    Args:
        checkpointed: Called when a call's activations are not kept, in forward.
        recomputed: Called when they are computed again, in backward.
        decided: Called for each operation that a policy decides about.
    """
    with ExitStack() as stack:
        watch = partial(_called_before, stack)
        watch(checkpoint._CheckpointFrame, "__init__", checkpointed)
        watch(checkpoint._recomputation_hook, "__init__", recomputed)
        for mode in (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode):
            watch(mode, "__torch_dispatch__", decided)
        yield


def _called_before(stack: ExitStack, owner: type, name: str, call: Callable[[], None]) -> None:
    """Let a method call something first, as long as the stack is open."""
    method = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        call()
        return method(*args, **kwargs)

    stack.enter_context(_replaced(owner, name, watched))


@contextmanager
def watched_propagation(around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter ``around`` wherever DTensor finds out the shape of a result, with tensors that no device has."""
    name = "_propagate_tensor_meta_non_cached"
    propagate = getattr(ShardingPropagator, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        with around():
            return propagate(*args, **kwargs)

    with _replaced(ShardingPropagator, name, watched):
        yield


@contextmanager
def fast_optimizers_on_meta() -> Iterator[None]:
    """Let torch's optimizers choose the same kernels for the meta device as for an accelerator: fused, or on lists."""
    with ExitStack() as stack:
        for name in _SUPPORTED_DEVICES:
            found = [*getattr(optimizer, name)(), "meta"]
            stack.enter_context(_replaced(optimizer, name, partial(list, found)))
        yield


@contextmanager
def fused_rms_norm_on_meta() -> Iterator[None]:
    """Let ``rms_norm`` be one operation on the meta device too, as it is on accelerators."""
    name = "_fused_rms_norm"
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    # Its own `impl` refuses operators that torch takes apart on devices which have no kernel for them.
    kernels: Any = library.m
    kernels.impl(name, "Meta", _rms_norm_without_values, False)
    try:
        yield
    finally:
        library._destroy()


def _rms_norm_without_values(
    given: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    rows = given.shape[: given.dim() - len(normalized_shape)]
    dtype = torch.promote_types(given.dtype, torch.float32)
    scales = given.new_empty((*rows, *(1 for _ in normalized_shape)), dtype=dtype)
    return torch.empty_like(given), scales


@contextmanager
def grouped_products_on_meta() -> Iterator[None]:
    """Let products of experts take all dtypes on the meta device, as kernels do; torch's own function takes bfloat16 only."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_grouped_mm", _grouped_product_without_values, "Meta", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _grouped_product_without_values(
    one: Tensor,
    other: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    if one.dtype is torch.bfloat16 or one.dtype is not other.dtype:
        own: Any = torch._meta_registrations.meta_grouped_mm
        result: Tensor = own(one, other, offs, bias, out_dtype)
        return result
    size: tuple[int, ...] = (one.shape[-2], other.shape[-1])
    if one.dim() == other.dim():  # a product for each expert, not rows of all of them
        size = (one.shape[0] if offs is None else offs.shape[0], *size)
    return one.new_empty(size, dtype=out_dtype)


def fake_store() -> Store:
    """Return a store for ranks that do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def name_of(group: ProcessGroup) -> Any:
    """Return the name under which torch knows a group."""
    return dist.distributed_c10d._world.pg_names[group]
