"""Streams, events and memory of a device: torch's, or those of a virtual device.

A virtual device plans a step without hardware. Its tensors are on the meta device, which has neither memory nor streams;
the planner supplies the streams and records what happens. At most one exists at a time, for the duration of its block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.device_mesh import _MeshEnv
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim import optimizer
from torch.utils import checkpoint

from fullshard.torch_border.cuda_streams import CUDAStream

_SUPPORTED_DEVICES = (
    "_get_fused_kernels_supported_devices",
    "_get_foreach_kernels_supported_devices",
)


class VirtualDevice(Protocol):
    """Requests of the engine to a device, besides running operations."""

    has_streams: bool
    """Whether work is issued now and done later; otherwise the host does it, as on the CPU."""

    def new_stream(self, *, priority: int, name: str) -> Any:
        """Return a stream like `torch.Stream`."""

    def new_event(self) -> Any:
        """Return an event like `torch.Event`."""

    def current_stream(self) -> Any:
        """Return the stream to which operations go now."""

    def new_clock(self) -> Any:
        """Return the clock of a trace: `comm.spans`; None for the host's clock."""

    def allocated_bytes(self) -> int:
        """Return the bytes that tensors have now."""

    def pin(self, memory: Tensor) -> None:
        """Note that host memory is page-locked."""

    def note_kernel(self, name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Note a kernel that passes over tensors once. Nothing is computed."""


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


class _Active:
    device: VirtualDevice | None = None


@contextmanager
def virtual_device(device: VirtualDevice) -> Iterator[None]:
    """Let the meta device be ``device`` within the block."""
    assert _Active.device is None, "one at a time"
    _Active.device = device
    try:
        with _replaced(_MeshEnv, "num_devices_per_host", staticmethod(_devices_per_host)):
            yield
    finally:
        _Active.device = None


_num_devices_per_host = _MeshEnv.num_devices_per_host


def _devices_per_host(device_type: str) -> int:
    """Answer for the meta device, too: since 2.15 DTensor asks when it weighs ways to compute, and torch has no answer."""
    return 8 if device_type == "meta" else _num_devices_per_host(device_type)


def the_virtual_device() -> VirtualDevice | None:
    """Return the virtual device, if a step is being planned."""
    return _Active.device


def _virtual(device: torch.device) -> VirtualDevice | None:
    return _Active.device if device.type == "meta" else None


def planned_accelerator(device: torch.device) -> VirtualDevice | None:
    """Return the virtual device if it stands for an accelerator, where functions are compiled into one kernel."""
    virtual = _virtual(device)
    return virtual if virtual is not None and virtual.has_streams else None


def has_streams(device: torch.device) -> bool:
    """Return whether work on a device is issued now and done later."""
    virtual = _virtual(device)
    return device.type != "cpu" if virtual is None else virtual.has_streams


def new_stream(device: torch.device, *, priority: int, name: str = "other") -> Any:
    """Return a new stream of a device; only a virtual device knows its name."""
    virtual = _virtual(device)
    if virtual is not None:
        return virtual.new_stream(priority=priority, name=name)
    kind = CUDAStream if device.type == "cuda" else torch.Stream
    return kind(device, priority=priority)


def new_event(device: torch.device) -> Any:
    """Return a new event for streams of a device."""
    virtual = _virtual(device)
    return torch.Event(device.type) if virtual is None else virtual.new_event()


def current_stream(device: torch.device) -> Any:
    """Return the current stream of a device."""
    virtual = _virtual(device)
    if virtual is None:
        return torch.accelerator.current_stream(device)
    return virtual.current_stream()


def allocated_bytes(device: torch.device) -> int | None:
    """Return the bytes of a device's memory that are in use, where it is cheap to ask; otherwise None."""
    virtual = _virtual(device)
    if virtual is not None:
        return virtual.allocated_bytes()
    if device.type != "cuda":
        return None
    statistics = torch.cuda.memory_stats_as_nested_dict(device)
    return int(statistics["allocated_bytes"]["all"]["current"])


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
