"""The arithmetic of AdamW on rows of elements whose state is in 8 bits.

All of it is elementwise, but for the largest magnitude of each row. Sums and products are rounded one by one, in fp32: the result
does not depend on how elements are laid out in rows. `compiled` makes one kernel of it.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fullshard import torch_border
from fullshard.optim.eight_bit.codes import (
    SMALLEST_SCALE,
    coded_means,
    coded_squares,
    decoded_means,
    decoded_squares,
    largest,
    noise_of,
)


def step_numbers(group: Mapping[str, Any], step: int, device: torch.device) -> Tensor:
    """Return the factors of a step, in a tensor on the device: a compiled kernel takes new numbers so without compiling anew.

    Nothing waits for the device, unless the learning rate is a tensor of another one.
    """
    beta1, beta2 = map(float, group["betas"])
    lr, decay = group["lr"], group["weight_decay"]
    on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
    rate = 1.0 if on_device else float(lr)
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    numbers = torch.tensor(
        [
            1 - rate * decay,
            rate / correction1,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            correction2**0.5,
            group["eps"],
            0.0,
        ]
    )
    # The seed of the noise, as bits: steps that follow each other have seeds that are far apart.
    numbers.view(torch.int32)[8] = (step * 0x85EBCA6B + (1 << 31)) % (1 << 32) - (1 << 31)
    numbers = numbers.to(device, non_blocking=True)
    if on_device:
        numbers[0] = 1 - lr * decay
        numbers[1] = lr / correction1
    return numbers


def moments(
    gradient: Tensor, means: Tensor, squares: Tensor, numbers: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the new averages of gradients and of their squares."""
    gradient = gradient.to(torch.float32)
    new_means = means * numbers[2] + gradient * numbers[3]
    return new_means, squares * numbers[4] + gradient * gradient * numbers[5]


def updated(param: Tensor, means: Tensor, squares: Tensor, numbers: Tensor) -> Tensor:
    """Return the new values of a parameter, in fp32 or what is wider."""
    param = param.to(torch.promote_types(param.dtype, torch.float32))
    change = means / (squares.sqrt() / numbers[6] + numbers[7])
    return param * numbers[0] - change * numbers[1]


def stored_values(
    mean_codes: Tensor, square_codes: Tensor, mean_scale: Tensor, square_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Return averages from their codes; there is one scale for each row."""
    return (
        decoded_means(mean_codes) * mean_scale[:, None],
        decoded_squares(square_codes) * square_scale[:, None],
    )


def codes(
    means: Tensor, squares: Tensor, scales: tuple[Tensor, Tensor], indices: Tensor, numbers: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the codes of averages; ``indices`` are those of the elements in the whole tensor, modulo 2**32."""
    noise = noise_of(indices, numbers[8:].view(torch.int32))
    return (
        coded_means(means, scales[0][:, None], noise),
        coded_squares(squares, scales[1][:, None], noise),
    )


def update_rows(
    param: Tensor,
    gradient: Tensor,
    old: tuple[Tensor, Tensor] | None,
    mean_codes: Tensor,
    square_codes: Tensor,
    mean_scale: Tensor,
    square_scale: Tensor,
    blocks: Tensor,
    numbers: Tensor,
) -> None:
    """Update whole blocks, one in each row, in place. ``old`` are averages in fp32 that replace what the codes say."""
    means, squares = old or stored_values(mean_codes, square_codes, mean_scale, square_scale)
    means, squares = moments(gradient, means, squares, numbers)
    param.copy_(updated(param, means, squares, numbers))
    scales = (
        largest(means).clamp(min=SMALLEST_SCALE),
        largest(squares).clamp(min=SMALLEST_SCALE),
    )
    size = param.shape[1]
    columns = torch.arange(size, dtype=torch.int32, device=param.device)
    found = codes(means, squares, scales, blocks[:, None] * size + columns, numbers)
    mean_codes.copy_(found[0])
    square_codes.copy_(found[1])
    mean_scale.copy_(scales[0])
    square_scale.copy_(scales[1])


@functools.cache
def compiled() -> torch_border.CompiledKernel:
    """Return `update_rows` as one kernel, for any number of rows."""
    # Row counts become dynamic by themselves, and the size of blocks stays a constant.
    return torch_border.CompiledKernel(update_rows)


def can_compile(device: torch.device) -> bool:
    """Return whether kernels for the device can be compiled here."""
    if torch_border.device_for(device).note_kernel is not None:
        return True
    return device.type == "cuda" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
