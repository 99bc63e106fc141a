"""DTensors, their specs and placements, and meshes, without communication, checks or autograd."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from fullshard.torch_border.process_groups import arrived


def dtensor_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> DTensorSpec:
    """Return the spec of a contiguous tensor of ``shape`` on a mesh; made once per parameter."""
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
"""Makes a DTensor of this rank's local tensor without communication, checks or autograd."""

spec_of: Callable[[Tensor], DTensorSpec] = operator.attrgetter("_spec")
"""The spec of a DTensor."""

local_of: Callable[[Tensor], Tensor] = operator.attrgetter("_local_tensor")
"""The local tensor of a DTensor itself, not an autograd view of it."""


def locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the local tensors of several DTensors, in less time."""
    return [tensor._local_tensor for tensor in cast("Sequence[DTensor]", tensors)]


def local_gradients_of(params: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the local gradients of DTensors, with the placements of the DTensors."""
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


def local_lists(params: Sequence[Tensor], lists: Sequence[Sequence[Any]]) -> list[list[Any]] | None:
    """Return lists, parallel to ``params``, with local tensors in the place of DTensors.

    None unless the local tensors of each parameter belong together: all are placed like the parameter, and all that is
    not a number is a DTensor if the parameter is.
    """
    specs = [param._spec if isinstance(param, DTensor) else None for param in params]
    found = []
    for tensors in lists:
        local: list[Any] = []
        for spec, tensor in zip(specs, tensors, strict=False):
            if type(tensor) is DTensor:
                own = tensor._spec
                if own is not spec and (spec is None or not _placed_alike(own, spec)):
                    return None
                tensor = tensor._local_tensor
            elif spec is not None and isinstance(tensor, Tensor) and tensor.numel() != 1:
                return None
            local.append(tensor)
        found.append(local)
    return found


def _placed_alike(one: DTensorSpec, other: DTensorSpec) -> bool:
    return (one.mesh is other.mesh or one.mesh == other.mesh) and one.placements == other.placements


def replace_local(tensor: Tensor, local: Tensor) -> None:
    """Give a DTensor another local tensor of the same shape and dtype; it stays the same object."""
    cast(DTensor, tensor)._local_tensor = local


def like_param(param: Tensor, local: Tensor) -> Tensor:
    """Return a tensor of the parameter's type over a local part."""
    if not isinstance(param, DTensor):
        return local
    spec = param._spec
    if local.dtype != param.dtype:
        spec = dtensor_spec(spec.mesh, spec.placements, param.shape, local.dtype)
    return dtensor(local, spec)


def dtensor_parameter(local: Tensor, spec: DTensorSpec, *, requires_grad: bool) -> nn.Parameter:
    """Make a DTensor parameter over ``local`` itself."""
    _let_dtensors_have_no_memory()
    param = nn.Parameter(dtensor(local, spec), requires_grad=requires_grad)
    replace_local(param, local)  # the Parameter was made over an alias of it
    return param


def _no_memory(tensor: DTensor) -> int:
    """Return 0, the address of a DTensor, which has no memory of its own.

    By itself a DTensor has the storage offset of its local tensor, but no storage, and so the offset for its address. Torch
    then takes it for a tensor with memory, and fails to copy, pickle or stage it. Ours have offsets: the shards of a
    group lie in one storage.
    """
    return 0


@functools.cache
def _let_dtensors_have_no_memory() -> None:
    if "data_ptr" not in vars(DTensor):
        cast(Any, DTensor).data_ptr = _no_memory


def redistributed_local(
    tensor: Tensor, placements: Sequence[Placement], *, untouched_axes: Collection[int] = ()
) -> Tensor:
    """Redistribute a DTensor to ``placements`` on all axes but ``untouched_axes``, and return its local tensor."""
    found = cast(DTensor, tensor)
    target = [
        old if axis in untouched_axes else new
        for axis, (old, new) in enumerate(zip(found.placements, placements, strict=True))
    ]
    if tuple(target) != found.placements:
        found = found.redistribute(placements=target)
    return arrived(found._local_tensor)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return the placement that shards a dimension which other axes have cut into ``split_factor`` parts before."""
    return _StridedShard(dim, split_factor=split_factor)


def sharded_dim(placement: Placement) -> int | None:
    """Return the dimension that a placement shards, if any."""
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else None


def split_factor(placement: Placement) -> int:
    """Return into how many parts other axes have cut a dimension before this placement does."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def joined_mesh(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Make one mesh of the axes of several, which must be axes of the same larger mesh."""
    return DeviceMesh._concatenate(meshes)


def flat_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Make a mesh with one axis of all axes of ``mesh``."""
    return mesh._flatten(name)
