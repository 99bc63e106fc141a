"""Fused gradients in compiled modules: a product whose backward is an operator that the compiler knows.

    forward     F.linear, which the compiler sees as such
    backward    fullshard::linear_backward  computes the input's gradient, and writes the weight's into the reduce buffer

The operator finds the weight by a number, its ticket, which is a tensor: the compiled graph of one layer serves all layers
that are alike, and a number would be a constant of one.

[Note: what keeps the write]
The graph returns no gradient for the weight, and compilers drop what no output depends on. So one operator computes both
gradients: that of the input is an output. A layer whose input needs no gradient returns an ordinary one for its weight. Two
calls with the same arguments must not become one, since each of them adds; `site` tells them apart.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard import torch_border


class Receiver(Protocol):
    """Receiver of a weight's gradient: `fused_linear.FusedWeight`."""

    def give(self, gradients: Tensor, inputs: Tensor) -> None:
        """Take the factors of the gradient, (rows, outputs) and (rows, inputs)."""


_RECEIVERS: weakref.WeakValueDictionary[int, Receiver] = weakref.WeakValueDictionary()
_TICKETS: Iterator[int] = itertools.count()
_SITES: Iterator[int] = itertools.count()


def ticket_of(receiver: Receiver) -> Tensor:
    """Return a ticket for a weight; the caller keeps the receiver alive."""
    number = next(_TICKETS)
    _RECEIVERS[number] = receiver
    return torch.tensor(number, device="cpu")


def product(input: Tensor, weight: Tensor, bias: Tensor | None, ticket: Tensor) -> Tensor:
    """Return `F.linear`, as the compiler traces it."""
    if (
        torch.is_grad_enabled()
        and isinstance(weight, nn.Parameter)
        and weight.requires_grad
        and input.requires_grad
        and input.dtype == weight.dtype
        and not weight.is_complex()
        and not torch_border.is_autocast_on(input.device.type)
    ):
        output: Tensor = torch.ops.fullshard.linear(input, weight, bias, ticket)
        return output
    return F.linear(input, weight, bias)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, ticket: Tensor
    ) -> Tensor:
        ctx.save_for_backward(input, weight, ticket)
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        input, weight, ticket = ctx.saved_tensors
        of_bias = None
        if ctx.needs_input_grad[2]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        of_input = torch.ops.fullshard.linear_backward(
            gradient, input, weight, ticket, next(_SITES)
        )
        return of_input, None, of_bias, None


def _forward(input: Tensor, weight: Tensor, bias: Tensor | None, ticket: Tensor) -> Tensor:
    return F.linear(input, weight, bias)


def _forward_with_graph(
    input: Tensor, weight: Tensor, bias: Tensor | None, ticket: Tensor
) -> Tensor:
    output: Tensor = _Product.apply(input, weight, bias, ticket)  # type: ignore[no-untyped-call]
    return output


def _backward(gradient: Tensor, input: Tensor, weight: Tensor, ticket: Tensor, site: int) -> Tensor:
    rows, inputs = gradient.reshape(-1, gradient.shape[-1]), input.reshape(-1, input.shape[-1])
    receiver = _RECEIVERS.get(int(ticket))
    if receiver is not None:  # otherwise the model is no more
        receiver.give(rows, inputs)
    return rows.mm(weight).view(input.shape)


def _shape_of_backward(
    gradient: Tensor, input: Tensor, weight: Tensor, ticket: Tensor, site: int
) -> Tensor:
    return gradient.new_empty(input.shape)


_OPERATORS = torch.library.Library("fullshard", "DEF")
_OPERATORS.define("linear(Tensor input, Tensor weight, Tensor? bias, Tensor ticket) -> Tensor")
_OPERATORS.define(
    "linear_backward(Tensor gradient, Tensor input, Tensor weight, Tensor ticket, int site) -> Tensor"
)
_OPERATORS.impl("linear", _forward, "CompositeExplicitAutograd")
_OPERATORS.impl("linear", _forward_with_graph, "Autograd")
_OPERATORS.impl("linear_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("fullshard::linear_backward", _shape_of_backward, lib=_OPERATORS)
