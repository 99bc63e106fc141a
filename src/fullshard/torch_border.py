"""Every touch of a private torch name, and every difference between the torch versions we support.

When a torch release moves something, this is the one file to change. What each function promises is
said here; how torch spells it is nobody else's business.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    ReduceOp,
    ReduceScatterOptions,
    Work,
)
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.modules.batchnorm import _BatchNorm

P = ParamSpec("P")
R = TypeVar("R")
TensorT = TypeVar("TensorT", bound=Tensor)

BatchNorm: type[nn.Module] = _BatchNorm
"""What all batch norms derive from, synchronised ones too."""

# torch 2.13 renamed the coalesced collectives of ProcessGroup; 2.11 has only the older names.
_RENAMED = hasattr(ProcessGroup, "all_gather_single_coalesced")
_ALL_GATHER = "all_gather_single_coalesced" if _RENAMED else "allgather_into_tensor_coalesced"
_REDUCE_SCATTER = (
    "reduce_scatter_single_coalesced" if _RENAMED else "reduce_scatter_tensor_coalesced"
)


@contextlib.contextmanager
def fake_process_group(world: int) -> Iterator[None]:
    """Be rank 0 of a default process group whose other ranks are not there, and whose collectives do nothing."""
    # Importing it is what makes the backend known; nothing else that trains needs it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def all_gather_options(*, async_op: bool) -> AllgatherOptions:
    """Options to reuse for every all-gather; with ``async_op`` False, NCCL runs on the current stream."""
    options = AllgatherOptions()
    options.asyncOp = async_op
    return options


def reduce_scatter_options(op: ReduceOp.RedOpType, *, async_op: bool) -> ReduceScatterOptions:
    """Options to reuse for every reduce-scatter with this ``op``."""
    options = ReduceScatterOptions()
    options.reduceOp = cast(ReduceOp, op)  # the enum converts; the stub does not say so
    options.asyncOp = async_op
    return options


def all_gather_coalesced(
    group: ProcessGroup,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    options: AllgatherOptions,
) -> Work:
    """Gather ``inputs[i]`` of every rank into ``outputs[i]``, all in one call; inputs may lie in the outputs."""
    return cast(Work, getattr(group, _ALL_GATHER)(outputs, inputs, options))


def reduce_scatter_coalesced(
    group: ProcessGroup,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    options: ReduceScatterOptions,
) -> Work:
    """Reduce ``inputs[i]`` over ranks and leave this rank's piece in ``outputs[i]``, all in one call."""
    return cast(Work, getattr(group, _REDUCE_SCATTER)(outputs, inputs, options))


def all_gather_single(
    group: ProcessGroup, output: Tensor, tensor: Tensor, options: AllgatherOptions
) -> Work:
    """Gather one tensor of every rank into one output."""
    name = "all_gather_single" if _RENAMED else "_allgather_base"
    return cast(Work, getattr(group, name)(output, tensor, options))


def reduce_scatter_single(
    group: ProcessGroup, output: Tensor, tensor: Tensor, options: ReduceScatterOptions
) -> Work:
    """Reduce one tensor over ranks and leave this rank's piece in the output."""
    name = "reduce_scatter_single" if _RENAMED else "_reduce_scatter_base"
    return cast(Work, getattr(group, name)(output, tensor, options))


def all_to_all_options(*, async_op: bool) -> AllToAllOptions:
    """Options to reuse for every all-to-all."""
    options = AllToAllOptions()
    options.asyncOp = async_op
    return options


def all_to_all_single(
    group: ProcessGroup, output: Tensor, tensor: Tensor, options: AllToAllOptions
) -> Work:
    """Send part r of ``tensor`` to rank r; ``output`` has what all ranks sent, in their order."""
    name = "all_to_all_single" if _RENAMED else "alltoall_base"
    return cast(Work, getattr(group, name)(output, tensor, [], [], options))


def allocates_tensors(group: ProcessGroup, device: torch.device) -> bool:
    """Whether a group's backend has an allocator of its own for memory on ``device``."""
    return group._get_backend(device).supports_tensor_alloc(device)


def allocate_tensor(
    group: ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A flat tensor from the backend's allocator, cached by stream as ordinary memory is.

    NCCL's wants a group that has communicated.
    """
    return group._get_backend(device).allocate_tensor(numel, dtype=dtype, device=device)


def choose_symmetric_backend(name: str) -> None:
    """Take symmetric memory from ``name`` in this process; RuntimeError if it cannot be had, or not any more."""
    import torch.distributed._symmetric_memory as symmetric_memory  # slow, and rarely needed

    symmetric_memory.set_backend(cast(Any, name))


def symmetric_bytes(nbytes: int, device: torch.device, group: ProcessGroup) -> Tensor:
    """New symmetric memory, known to all ranks of a group that has communicated. Collective and slow."""
    import torch.distributed._symmetric_memory as symmetric_memory

    tensor = symmetric_memory.empty((nbytes,), dtype=torch.uint8, device=device)
    symmetric_memory.rendezvous(tensor, group.group_name)
    return tensor


def current_stream_id(device: torch.device) -> int:
    """A number for the stream that work on ``device`` is issued to; 0 where there are none."""
    return 0 if device.type == "cpu" else torch.accelerator.current_stream(device).stream_id


def dtensor_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> DTensorSpec:
    """How a contiguous tensor of ``shape`` is spread over a mesh; made once per parameter."""
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(size, stride, dtype))


# Asked for every parameter in every step, so these are calls without a Python frame of their own.

dtensor: Callable[[Tensor, DTensorSpec], DTensor] = functools.partial(
    # Without the compiler's guard around the constructor, which takes as long as the construction.
    cast(Any, inspect.unwrap(DTensor.__new__)),
    DTensor,
    requires_grad=False,
)
"""Wraps this rank's piece without communication, checks or autograd."""

spec_of: Callable[[Tensor], DTensorSpec] = operator.attrgetter("_spec")
"""The spec of a DTensor."""

local_of: Callable[[Tensor], Tensor] = operator.attrgetter("_local_tensor")
"""This rank's piece of a DTensor, itself and not an autograd view of it."""

parameter_table: Callable[[nn.Module], dict[str, nn.Parameter | None]] = operator.attrgetter(
    "_parameters"
)
"""Where a module keeps its own parameters; writing here has no side effects."""

post_accumulate_grad_hooks: Callable[[Tensor], dict[int, Callable[[Tensor], None]] | None] = (
    operator.attrgetter("_post_accumulate_grad_hooks")
)
"""What the user registered to run once a parameter's gradient is complete."""

tensor_hooks: Callable[[Tensor], dict[int, Callable[[Tensor], Tensor | None]] | None] = (
    operator.attrgetter("_backward_hooks")
)
"""What the user registered with `Tensor.register_hook`: to see or replace a gradient before it is accumulated."""

backward_pass_id: Callable[[], int] = torch._C._current_graph_task_id
"""A number that is unique to the backward pass running on this thread, or -1 outside of one."""


def locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same of several DTensors, in less time."""
    return [tensor._local_tensor for tensor in cast("Sequence[DTensor]", tensors)]


def local_gradients_of(params: Sequence[Tensor]) -> list[Tensor | None]:
    """This rank's pieces of the gradients of DTensors, spread as these are."""
    pieces: list[Tensor | None] = []
    for param in cast("Sequence[Any]", params):
        gradient = param.grad
        if gradient is None:
            pieces.append(None)
        elif gradient._spec is param._spec:
            pieces.append(gradient._local_tensor)
        else:
            pieces.append(redistributed_local(gradient, param.placements))
    return pieces


def replace_local(tensor: Tensor, local: Tensor) -> None:
    """Let a DTensor keep its identity and stand for another local tensor of the same shape and dtype."""
    cast(DTensor, tensor)._local_tensor = local


def dtensor_parameter(local: Tensor, spec: DTensorSpec, *, requires_grad: bool) -> nn.Parameter:
    """A DTensor parameter over ``local`` itself."""
    param = nn.Parameter(dtensor(local, spec), requires_grad=requires_grad)
    replace_local(param, local)  # the Parameter was made over an alias of it
    return param


def redistributed_local(
    tensor: Tensor, placements: Sequence[Placement], *, untouched_axes: Collection[int] = ()
) -> Tensor:
    """This rank's piece of a DTensor once it has ``placements``, on all axes but ``untouched_axes``."""
    found = cast(DTensor, tensor)
    target = [
        old if axis in untouched_axes else new
        for axis, (old, new) in enumerate(zip(found.placements, placements, strict=True))
    ]
    if tuple(target) != found.placements:
        found = found.redistribute(placements=target)
    return arrived(found._local_tensor)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Sharding of a dimension that other axes have cut into ``split_factor`` parts before."""
    return _StridedShard(dim, split_factor=split_factor)


def sharded_dim(placement: Placement) -> int | None:
    """Which dimension a placement cuts, if any."""
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else None


def split_factor(placement: Placement) -> int:
    """Into how many parts other axes have cut a dimension before this placement does."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def joined_mesh(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh of the axes of several, which must be axes of the same larger mesh."""
    return DeviceMesh._concatenate(meshes)


def timeout_of(group: ProcessGroup) -> timedelta | None:
    """How long a collective of a group waits for other ranks; None if its backends do not say."""
    timeouts = []
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):  # a device for which the group has no backend
            options = getattr(group._get_backend(device), "options", None)
            timeouts.append(getattr(options, "_timeout", None))
    return min((timeout for timeout in timeouts if timeout is not None), default=None)


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Let the collectives of a group wait for other ranks so long."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def flat_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """A mesh with one axis made of all axes of ``mesh``."""
    return mesh._flatten(name)


def version_sum(tensors: Sequence[Tensor]) -> int:
    """How often tensors have been written in place, by operators that count; inference tensors have no count."""
    return sum(map(_version, tensors))


_version = operator.attrgetter("_version")


def versions_kept(tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Within it, writing to tensors does not look to autograd like a change of them."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


def table_for(module: nn.Module, value: Tensor) -> dict[str, Any]:
    """Where a module keeps ``value`` and its like: parameters apart from other tensors."""
    return parameter_table(module) if isinstance(value, nn.Parameter) else module.__dict__


def tensor_without_memory(
    cls: type[TensorT], shape: Sequence[int], strides: Sequence[int], like: Tensor
) -> TensorT:
    """A tensor of a subclass with the dtype and device of another, and no data."""
    return Tensor._make_wrapper_subclass(
        cls, torch.Size(shape), strides=tuple(strides), dtype=like.dtype, device=like.device
    )


def storage_id(tensor: Tensor) -> int:
    """The same for tensors over the same storage, whatever memory that has now."""
    return int(tensor.untyped_storage()._cdata)


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of as many elements are at the same place of the same storage, in the same dtype."""
    return (
        storage_id(one) == storage_id(other)
        and one.storage_offset() == other.storage_offset()
        and one.dtype == other.dtype
    )


def child_table(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's children under all their names; None where there is none yet, or no longer."""
    return module._modules


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """A module's own buffers that are saved."""
    hidden = module._non_persistent_buffers_set
    return {
        name: buffer
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in hidden
    }


def without_activation_wrapper(module: nn.Module) -> nn.Module:
    """The module inside torch's wrapper for activation checkpointing, or the module itself."""
    return child_table(module).get("_checkpoint_wrapped_module") or module


def in_optimizer_state_dict() -> bool:
    """Whether the caller runs within a function of `torch.distributed.checkpoint.state_dict` that was given optimizers."""
    functions = {
        f"{verb}_{what}state_dict" for verb in ("get", "set") for what in ("", "optimizer_")
    }
    frame = inspect.currentframe()
    while frame is not None:
        if (
            frame.f_code.co_name in functions
            and frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"
        ):
            return bool(frame.f_locals.get("optimizers"))
        frame = frame.f_back
    return False


def opaque_to_compiler(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, at which the compiler breaks its graph instead of looking inside.

    The guard takes longer than some functions do, so nobody else goes through it.
    """
    guarded = cast("Callable[P, R]", torch._disable_dynamo(function))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return guarded(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def arrived(tensor: Tensor) -> Tensor:
    """The tensor itself; one that a collective is still filling is waited for."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def versions_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """What autograd compares to notice that a tensor it saved is not what it was."""
    return tuple(map(_version, tensors))


set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)
"""Set them."""


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of, or None."""
    return tensor._base if tensor._is_view() else None


# --- function transforms: torch.func and forward-mode differentiation ------------------------------


_innermost_transform: Callable[[], Any] = _functorch.peek_interpreter_stack
"""The transform of `torch.func` that operations go through first, or None outside of all."""


class _OutsideTransforms:
    """Takes the transforms of `torch.func` off this thread's stack, and puts them back."""

    def __init__(self) -> None:
        self._layers: list[Any] = []

    def __enter__(self) -> None:
        while _innermost_transform() is not None:
            self._layers.append(_functorch.pop_dynamic_layer_stack())

    def __exit__(self, *_: object) -> None:
        while self._layers:
            _functorch.push_dynamic_layer_stack(self._layers.pop())


_NO_TRANSFORM = contextlib.nullcontext()


def outside_transforms() -> contextlib.AbstractContextManager[None]:
    """Within it, operations on tensors that no transform made are ordinary ones.

    A transform (`torch.func.jvp`, `grad`, `vmap`, ...) forbids in-place writes to tensors from outside
    of it, and makes wrapped tensors of new ones. Tensors that it has wrapped must not be touched within.
    """
    if _innermost_transform() is None:
        return _NO_TRANSFORM
    return _OutsideTransforms()


def with_tangent(tensor: Tensor) -> Sequence[Tensor]:
    """The tensor, and its tangent if it is a dual number of forward-mode differentiation."""
    if forward_ad._current_level < 0:
        return (tensor,)
    tangent = forward_ad.unpack_dual(tensor).tangent
    return (tensor,) if tangent is None else (tensor, tangent)


def graph_tensors(tensor: Tensor) -> Sequence[Tensor]:
    """All tensors that make up one: each may have a backward graph of its own.

    Outside of transforms these are the tensor and its tangent. A transform wraps tensors; it builds its
    graph on the wrapper, and the transforms outside of it, or ordinary autograd, build theirs on what is
    wrapped.
    """
    if _innermost_transform() is None:
        parts = with_tangent(tensor)
        if any(map(_functorch.is_legacy_batchedtensor, parts)):
            parts = [*parts, *map(_without_batch_dimension, parts)]
        return parts
    found: dict[int, Tensor] = {}
    layers: list[Any] = []
    tensors: Sequence[Tensor] = (tensor,)
    try:
        while True:
            top = _innermost_transform()
            if top is None or top.key() == _functorch.TransformType.Jvp:
                tensors = [part for whole in tensors for part in with_tangent(whole)]
            found.update((id(part), part) for part in tensors)
            if top is None:
                return tuple(found.values())
            level = top.level()
            layers.append(_functorch.pop_dynamic_layer_stack())
            tensors = [
                _functorch.get_unwrapped(part)
                if _functorch.maybe_get_level(part) == level
                else part
                for part in tensors
            ]
    finally:
        while layers:
            _functorch.push_dynamic_layer_stack(layers.pop())


def _without_batch_dimension(tensor: Tensor) -> Tensor:
    """What a tensor of the older vmap wraps: `is_grads_batched` and `vectorize` of torch.autograd use it.

    The very tensor if its batch dimension is the first one, as it is unless an operator has moved it.
    """
    if not _functorch.is_legacy_batchedtensor(tensor):
        return tensor
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return torch._remove_batch_dim(tensor, level, 0, 0)


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Of `graph_tensors`, those that have memory of their own: no wrapper, and of no other class."""
    return [
        part
        for part in graph_tensors(tensor)
        if type(part) in (Tensor, nn.Parameter)
        and not _functorch.is_functorch_wrapped_tensor(part)
        and not _functorch.is_legacy_batchedtensor(part)
    ]


class OpenGradScaler(torch.amp.GradScaler):
    """torch's loss scaler; a derived class says what happens to the gradients."""

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, factor: Tensor, found_inf: Tensor
    ) -> None:
        """Multiply an optimizer's gradients by ``factor``, and make ``found_inf`` 1 if one is not finite.

        For `unscale_`, and with a factor of 1 for optimizers that unscale in their own step.
        """
        raise NotImplementedError

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        self.unscale_gradients(optimizer, inv_scale, found_inf)
        return {found_inf.device: found_inf}


def unscale_and_check(tensors: list[Tensor], factor: Tensor, found_inf: Tensor) -> None:
    """Multiply tensors of one device and dtype by ``factor``; make ``found_inf`` 1 if one was not finite."""
    with torch.no_grad():
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, factor)


class DelegatingOptimizer(torch.optim.Optimizer):
    """torch's base class, for an optimizer whose updates another one makes."""

    inner: torch.optim.Optimizer
    """Who makes them; known to nobody else, and its hooks are not run."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What a loss scaler asks: whether `step` unscales gradients, as fused ones do."""
        return getattr(self.inner, "_step_supports_amp_scaling", False)

    def step_inner(self) -> None:
        """Let the other make a step, with what a loss scaler has told this one."""
        scaling = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        self.inner.__dict__.update(scaling)
        # The constructor of every optimizer wraps its class's step, to run hooks: some are for all optimizers.
        step: Callable[..., Any] = type(self.inner).step
        if getattr(step, "hooked", False):
            step = inspect.getattr_static(step, "__wrapped__")
        step(self.inner)


def observe_zero_grad(
    by_optimizer: Callable[[torch.optim.Optimizer, bool], None],
    by_module: Callable[[nn.Module, bool], None],
) -> None:
    """Have functions called after ``zero_grad`` of every optimizer and module, with it and ``set_to_none``.

    torch has no hook for it. Classes that override it without calling the one they inherit are not observed.
    """
    _tell_of_zero_grad(torch.optim.Optimizer, by_optimizer)
    _tell_of_zero_grad(nn.Module, by_module)


def _tell_of_zero_grad(cls: Any, told: Callable[[Any, bool], None]) -> None:
    original, told = cls.zero_grad, opaque_to_compiler(told)

    @functools.wraps(original)
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        original(self, set_to_none)
        told(self, set_to_none)

    cls.zero_grad = zero_grad


def sparse_values(tensor: Tensor) -> Tensor:
    """The values of a sparse tensor themselves; several may be of the same element."""
    return tensor._values()


@dataclass(frozen=True, slots=True)
class ShardedTensorParts:
    """What a ShardedTensor consists of, flat."""

    local: Tensor | None
    """This rank's part."""
    numels: list[int]
    """Elements of each rank of the group."""
    size: torch.Size
    dtype: torch.dtype
    group: ProcessGroup


def is_sharded_tensor(value: object) -> bool:
    """Whether a value is a ShardedTensor, torch's older class of tensors that are spread over ranks."""
    return type(value).__name__ == "ShardedTensor"  # importing the class takes time


def sharded_tensor(whole: Tensor, shapes: Sequence[Sequence[int]], group: ProcessGroup) -> Any:
    """A ShardedTensor of which rank r of the group has as many rows of ``whole`` as ``shapes[r]`` says.

    The last ranks may have none.
    """
    rows = [shape[0] if shape else 1 for shape in shapes]
    rank = group.rank()
    local = None
    if rank < len(shapes):
        local = whole.narrow(0, sum(rows[:rank]), rows[rank]) if whole.ndim else whole
        local = local.clone(memory_format=torch.contiguous_format)  # the class knows no other
    return _sharded_tensor(whole, local, shapes, whole.shape, group)


def local_sharded_tensor(piece: Tensor, numels: Sequence[int], group: ProcessGroup) -> Any:
    """A ShardedTensor of flat pieces that lie one after the other."""
    local = piece.detach() if piece.numel() else None
    shapes = [(numel,) for numel in numels if numel]
    return _sharded_tensor(piece, local, shapes, (sum(numels),), group)


def _sharded_tensor(
    like: Tensor,
    local: Tensor | None,
    shapes: Sequence[Sequence[int]],
    size: Sequence[int],
    group: ProcessGroup,
) -> Any:
    from torch.distributed._shard.sharded_tensor import (
        Shard as LocalShard,
        ShardedTensor,
        ShardedTensorMetadata,
        TensorProperties,
    )
    from torch.distributed._shard.sharding_spec import ShardMetadata

    parts, row = [], 0
    for rank, shape in zip(dist.get_process_group_ranks(group), shapes, strict=False):
        offsets = [row, *[0] * (len(size) - 1)] if size else []
        place = f"rank:{rank}/{like.device}"
        parts.append(ShardMetadata(offsets, list(shape), place))
        row += shape[0] if shape else 1
    properties = TensorProperties(dtype=like.dtype)
    metadata = ShardedTensorMetadata(parts, torch.Size(size), properties)
    shards = [] if local is None else [LocalShard(local, parts[group.rank()])]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=group
    )


def parts_of_sharded_tensor(value: Any) -> ShardedTensorParts:
    """The parts of a ShardedTensor that is sharded in rows."""
    group = value._process_group
    numels = dict.fromkeys(dist.get_process_group_ranks(group), 0)
    metadata = value.metadata()  # asking the tensor itself warns
    for part in metadata.shards_metadata:
        numels[part.placement.rank()] += math.prod(part.shard_sizes)
    shards = value.local_shards()
    return ShardedTensorParts(
        shards[0].tensor if shards else None,
        list(numels.values()),
        metadata.size,
        metadata.tensor_properties.dtype,
        group,
    )


def move_hooks(old: Tensor, new: Tensor) -> None:
    """Let the hooks that a user registered on one leaf be those of another; their handles still remove them."""
    if tensor_hooks(old):
        cast(Any, new)._backward_hooks = tensor_hooks(old)
    if post_accumulate_grad_hooks(old):
        cast(Any, new)._post_accumulate_grad_hooks = post_accumulate_grad_hooks(old)


IN_BACKWARD_OPTIMIZERS = "_in_backward_optimizers"
"""Where torch's `_apply_optimizer_in_backward` keeps a parameter's optimizers, among its attributes."""


def observe_backward(
    translate: Callable[[tuple[Any, ...], bool], tuple[Any, ...]],
    explain: Callable[[int], Exception | None],
    returned: Callable[[list[Tensor]], None],
) -> None:
    """From now on, let ``translate`` say which ``inputs`` a backward pass really has, and ``explain`` its errors.

    ``translate`` is called only if inputs were named: with them, and with whether their gradients are
    accumulated (`backward`) or returned (`autograd.grad`). Nothing on a tensor tells this in time:
    parameters that are not in the graph make autograd execute no node, so no hook of ours would run.

    ``explain`` is called if a saved tensor is not at the version it was saved at: with the version it is at.
    ``returned`` is called with the gradients that a pass returns, after it.
    """
    run = torch.autograd._engine_run_backward

    def run_observed(*args: Any, **options: Any) -> Any:
        if len(args) > 4 and args[4]:
            inputs = translate(args[4], bool(options.get("accumulate_grad")))
            args = (*args[:4], inputs, *args[5:])
        try:
            gradients = run(*args, **options)
        except RuntimeError as error:
            version = re.search(r"is at version (\d+); expected version", str(error))
            told = None if version is None else explain(int(version.group(1)))
            if told is None:
                raise
            raise told from error
        returned([gradient for gradient in gradients or () if gradient is not None])
        return gradients

    torch.autograd._engine_run_backward = run_observed


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass now running has executed its last node."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


_NO_RANGE = contextlib.nullcontext()
_profiler_enabled = torch.autograd._profiler_enabled


def profiler_range(label: str) -> contextlib.AbstractContextManager[Any]:
    """A labelled range in the trace while a profiler runs, and next to nothing otherwise."""
    return torch.profiler.record_function(label) if _profiler_enabled() else _NO_RANGE


def dcp_item_place(file: str, offset: int, nbytes: int) -> Any:
    """Where an item of a torch distributed checkpoint is, as its metadata says it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, nbytes)


def pin(memory: Tensor) -> None:
    """Let CUDA write to host memory by itself, without a copy; no other device is known to need it."""
    if memory.numel() and torch.cuda.is_available():
        error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        torch.cuda.check_error(int(error))


def unpin(memory: Tensor) -> None:
    """Undo `pin`, before the memory is given back."""
    if memory.numel() and torch.cuda.is_available():
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())))
