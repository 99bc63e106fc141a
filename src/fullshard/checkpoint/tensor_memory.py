"""Tensors that are plain memory, and those that only look like it.

A file is read into memory of a tensor directly if every element has memory of its own, and the memory has the
element's value as it is. That is not so for

    expanded tensors, overlapping windows (`unfold`)    several elements share memory
    conjugate and negative views                        the memory has other values than the elements

torch refuses to write into some of these, and writes others wrongly if only their memory is looked at. So they are
saved as dense copies, and loaded beside and filled afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullshard.checkpoint.blocks import row_major_strides


def stores_each_element(tensor: Tensor) -> bool:
    """Whether every element of a strided tensor has memory of its own, with the element's value in it."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    # From the smallest stride to the largest: each steps over all that the smaller ones reach.
    reach = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dims if size != 1):
        if stride < reach:
            return not tensor.numel()
        reach += (size - 1) * stride
    return True


def contiguous_values(tensor: Tensor) -> Tensor:
    """A contiguous tensor with the same values, in the tensor's memory if that is one."""
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    # One element is contiguous with any strides, and not all of torch's functions know that.
    return dense.as_strided(dense.shape, row_major_strides(dense.shape))


@torch.no_grad()
def fill(tensor: Tensor, value: Tensor) -> None:
    """Let a tensor have the values of a dense one, whatever its memory is like.

    Elements that share memory keep sharing it, if they have the same value; so whoever else has this memory sees the
    new values, too. If they have different values, which their memory cannot hold, the tensor gets new memory.
    """
    if stores_each_element(tensor):
        tensor.copy_(value)
        return
    trial = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    value = value.to(trial)
    _copy_once(trial, value)
    if _has_bytes_of(trial, value):
        _copy_once(tensor, value)
    else:
        tensor.data = value.to(tensor.device)


def _copy_once(tensor: Tensor, value: Tensor) -> None:
    """Write every element; of those along an expanded dimension, the first one only: torch refuses to write them all."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, value = tensor.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    tensor.copy_(value)


def _has_bytes_of(tensor: Tensor, value: Tensor) -> bool:
    """Whether both have the same bits: a NaN is the same as itself."""
    both = [contiguous_values(each).reshape(-1).view(torch.uint8) for each in (tensor, value)]
    return torch.equal(*both)
