"""A few elements of a parameter, from before it was sharded.

Ranks that build a model with different seeds shard different parameters, and train a mixture of them. Each rank has the whole
of a parameter only once: before it is sharded. So some elements are kept until the first forward, where ranks compare them
(`divergence.initial_weights`). Random values differ in all elements, so a few are enough, and cost nothing for large models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SAMPLES = 16
"""Number of elements of a parameter, at even distances, that are kept."""


class InitialValues:
    """Some elements of a parameter before it was sharded, and of this rank's shard right after."""

    def __init__(self, whole: Tensor, itemsize: int) -> None:
        self.whole = whole
        """A sample, as bytes."""
        self.itemsize = itemsize
        """Bytes of an element."""
        self.shard: Tensor | None = None
        """A sample; None until there is a shard, and if this rank has no element."""

    @staticmethod
    def of(whole: Tensor) -> InitialValues | None:
        """Take a sample of a parameter; None if it has no values yet."""
        sample = _sample(whole)
        return None if sample is None else InitialValues(sample, whole.element_size())

    def note_shard(self, shard: Tensor) -> None:
        """Take a sample of this rank's shard."""
        self.shard = _sample(shard)


def unchanged(group: Sequence[tuple[InitialValues, Tensor]]) -> list[bytes | None]:
    """Return the samples of a group's parameters, given each with its shard; None for one that has got other values since.

    Of a parameter of which this rank has no element, the group's other shards tell: all that hold different numbers must
    be what they were. Ones and zeros tell nothing, since a checkpoint has them, too.
    """
    before = _bytes([initial.shard for initial, _ in group])
    now = _bytes([_sample(shard) for _, shard in group])
    others = [
        found == same
        for (initial, _), same, found in zip(group, before, now, strict=True)
        if same != same[: initial.itemsize] * (len(same) // initial.itemsize)
    ]
    found = bool(others) and all(others)
    return [
        sample if (same == shard if same else found) else None
        for sample, same, shard in zip(
            _bytes([initial.whole for initial, _ in group]), before, now, strict=True
        )
    ]


def _sample(tensor: Tensor) -> Tensor | None:
    if type(tensor) is not Tensor or tensor.is_meta or not tensor.numel():
        return None
    if not tensor.is_contiguous():
        return None  # to read it in order would copy it
    flat = tensor.detach().view(-1)
    return flat[:: -(-flat.numel() // _SAMPLES)].clone().view(torch.uint8)


def _bytes(listed: Sequence[Tensor | None]) -> list[bytes]:
    """Return samples as bytes, none of None, with one transfer from each device."""
    found = [b""] * len(listed)
    for device in {each.device for each in listed if each is not None}:
        there = [
            (i, each) for i, each in enumerate(listed) if each is not None and each.device == device
        ]
        parts = torch.cat([each for _, each in there]).cpu().split([len(each) for _, each in there])
        for (index, _), part in zip(there, parts, strict=True):
            found[index] = bytes(part.tolist())
    return found
