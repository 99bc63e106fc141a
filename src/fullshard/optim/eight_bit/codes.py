"""Numbers in 8 bits, with one fp32 scale for each block of a tensor.

A value is divided by its block's scale, which is the largest magnitude in the block. What is left, at most 1, is kept as a
small float: 3 bits of mantissa, so 8 codes for each power of two. So a code is the upper bits of an fp32 number, and coding is
a shift, without a table.

    means (signed)       0 zero   1..127 from 1.2 * 2**-16 to 1   129..255 the same, negative    128 NaN
    squares (unsigned)   0 zero   1..254 from 1.4 * 2**-32 to 1                                  255 NaN

The bits that a shift drops are rounded up or down at random (`noise`), with the right mean. To the nearest code would be wrong
for averages over many steps: a step changes them by less than half the distance of two codes, so they would never move. The
noise is a hash of the element's index in the whole tensor and of the step: the same on every mesh, and after resuming.

A mean below the smallest code becomes zero. A square becomes the smallest code, because an update is divided by its root.
Values that are not finite are coded as NaN, and do not count for the scale, so they do not touch their neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_SCALE = 2.0**-100
"""Scales are not smaller, so that no product of a code and a scale is rounded or flushed to zero."""

_SHIFT = 20
_DROPPED = 4
"""Last bits, of the 20 dropped ones, that are not rounded at random: the hash has 16 bits for each number."""
_ONE = 127 << 3
"""The upper bits of the fp32 number 1."""
_INFINITY, _NAN = 0x7F800000, 0x7FC00000
"""The bits of infinity and NaN. All NaNs have more than infinity, as an integer."""


def decoded_means(codes: Tensor) -> Tensor:
    """Return signed numbers from their codes, before they are multiplied by the scale."""
    code = codes.to(torch.int32)
    magnitude = code & 127
    bits = (magnitude + (_ONE - 127) << _SHIFT) | (code & 128) << 24
    # Only 0 and 128 have no magnitude, and 128 becomes NaN.
    return torch.where(magnitude == 0, code * (_NAN >> 7), bits).view(torch.float32)


def decoded_squares(codes: Tensor) -> Tensor:
    """Return numbers that are not negative from their codes, before they are multiplied by the scale."""
    code = codes.to(torch.int32)
    bits = code + (_ONE - 254) << _SHIFT
    bits = bits.masked_fill_(code == 255, _NAN).masked_fill_(code == 0, 0)
    return bits.view(torch.float32)


def coded_means(values: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
    """Return the codes of signed numbers; of the noise, the lower half is used."""
    bits = (values.abs() / scale).view(torch.int32) + ((noise & 0xFFFF) << _DROPPED)
    code = (bits >> _SHIFT).sub_(_ONE - 127).clamp_(0, 127)
    code.add_((values < 0) & (code > 0), alpha=128)
    return code.masked_fill_(bits >= _INFINITY, 128).to(torch.uint8)


def coded_squares(values: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
    """Return the codes of numbers that are not negative; of the noise, the upper half is used."""
    # A NaN may be negative.
    bits = (values / scale).view(torch.int32) & 0x7FFFFFFF
    bits += (noise >> 16 & 0xFFFF) << _DROPPED
    code = (bits >> _SHIFT).sub_(_ONE - 254).clamp_(1, 254).mul_(values > 0)
    return code.masked_fill_(bits >= _INFINITY, 255).to(torch.uint8)


def largest(values: Tensor) -> Tensor:
    """Return the largest finite magnitude of each row."""
    return values.abs().nan_to_num(nan=0.0, posinf=0.0).amax(-1)


def noise_of(indices: Tensor, seed: Tensor) -> Tensor:
    """Return 32 random bits for each index: a hash of index and seed, both int32."""
    mixed = indices * -1640531527 + seed  # products wrap around
    mixed = (mixed ^ (mixed >> 15 & 0x1FFFF)) * 739982445
    mixed = (mixed ^ (mixed >> 12 & 0xFFFFF)) * 695872825
    return mixed ^ (mixed >> 15 & 0x1FFFF)
