"""Storages, views and pinned memory of plain tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from fullshard.torch_border.devices import device_for

TensorT = TypeVar("TensorT", bound=Tensor)


def current_stream_id(device: torch.device) -> int:
    """Return a number for the current stream of ``device``; 0 if it has none."""
    return 0 if device.type == "cpu" else int(device_for(device).current_stream().stream_id)


def tensor_without_memory(
    cls: type[TensorT], shape: Sequence[int], strides: Sequence[int], like: Tensor
) -> TensorT:
    """Make a tensor of a subclass with the dtype and device of another, and no data."""
    return Tensor._make_wrapper_subclass(
        cls, torch.Size(shape), strides=tuple(strides), dtype=like.dtype, device=like.device
    )


def storage_id(tensor: Tensor) -> int:
    """Return a number that is equal for tensors over the same storage, whatever memory it has now."""
    return id_of_storage(tensor.untyped_storage())


def id_of_storage(storage: torch.UntypedStorage) -> int:
    """Return the number of a storage for as long as it lives: `storage_id` of tensors over it."""
    return int(storage._cdata)


def address_of(tensor: Tensor) -> int:
    """Return where a tensor's memory begins. On the meta device, tensors over one storage have the distances that they would have."""
    if tensor.is_meta:
        return storage_id(tensor) + int(tensor.storage_offset()) * tensor.itemsize
    return tensor.data_ptr()


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return where the memory of each tensor begins, in less time; all are on one device."""
    if tensors[0].is_meta:
        return [address_of(tensor) for tensor in tensors]
    return [tensor.data_ptr() for tensor in tensors]


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of equally many elements have the same storage, offset and dtype."""
    return (
        storage_id(one) == storage_id(other)
        and one.storage_offset() == other.storage_offset()
        and one.dtype == other.dtype
    )


def with_own_storage(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory, whose storage has no more than the elements of this contiguous tensor.

    It keeps the memory alive, and its version counter is its own. The tensor itself on devices whose memory torch cannot
    exchange.
    """
    if tensor.device.type not in ("cpu", "cuda", "xpu"):
        return tensor
    if not tensor.numel():
        return torch.empty_like(tensor)
    flat = tensor.detach().view(-1).view(torch.uint8)  # not all dtypes can be exchanged
    return from_dlpack(to_dlpack(flat)).view(tensor.dtype).view(tensor.shape)


base_of: Callable[[Tensor], Tensor | None] = operator.attrgetter("_base")
"""The tensor that another is a view of, or None."""


def sparse_values(tensor: Tensor) -> Tensor:
    """Return the values of a sparse tensor themselves; several may belong to one element."""
    return tensor._values()


def parameter_of_class(cls: type[nn.Parameter], param: nn.Parameter) -> nn.Parameter:
    """Return a parameter over the same memory, of a class that derives from `nn.Parameter`; its constructor is not called."""
    if cls is nn.Parameter or not issubclass(cls, nn.Parameter):
        return param
    return Tensor._make_subclass(cls, param, param.requires_grad)
