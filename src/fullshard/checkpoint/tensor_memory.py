"""Tensors whose memory has each of their elements, and tensors that need a copy to be saved or loaded.

A file can be read into a tensor's memory if each element has memory of its own, and that has the element's value.
That is not so for

    expanded tensors, overlapping windows (`unfold`)    several elements share memory
    conjugate and negative views                        the memory has other values than the elements

torch refuses to write into some of these, and bytes that are written into others are wrong values. So they are saved
as contiguous copies; to load them, a file is read into a copy, and then they are filled from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fullshard.layout.blocks import row_major_strides


def stores_each_element(tensor: Tensor) -> bool:
    """Return whether each element of a strided tensor has memory of its own, with the element's value in it."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    # From the smallest stride to the largest: each must step over all elements that the smaller ones reach.
    reach = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dims if size != 1):
        if stride < reach:
            return not tensor.numel()
        reach += (size - 1) * stride
    return True


def contiguous_values(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor with the same values; it shares the tensor's memory if that is contiguous."""
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    # One element is contiguous with any strides, and not all of torch's functions know that.
    return dense.as_strided(dense.shape, row_major_strides(dense.shape))


@torch.no_grad()
def fill(tensor: Tensor, value: Tensor) -> None:
    """Copy the values of a contiguous tensor into a tensor of any memory.

    Elements that share memory keep sharing it if they have the same new value; other owners of this memory see the new
    values, too. If they have different new values, which shared memory cannot hold, the tensor gets new memory.
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
    """Write every element, but only the first one along an expanded dimension: torch refuses to write all of them."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, value = tensor.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    tensor.copy_(value)


def _has_bytes_of(tensor: Tensor, value: Tensor) -> bool:
    """Return whether both have the same bits. So a NaN equals itself."""
    both = [contiguous_values(each).reshape(-1).view(torch.uint8) for each in (tensor, value)]
    return torch.equal(*both)
