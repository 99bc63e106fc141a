"""Gradients of inputs that several fused linear layers read: the products add them up.

    ordinary   each layer writes its product, and autograd reads two of them and writes their sum
    fused      the first layer writes its product, the others add theirs to it, and the last returns the sum

Query, key and value of attention read one tensor, and so do gate and up of many MLPs. A layer that is not the last in a
backward pass returns no gradient for its input. What depends on this gradient comes after all of these layers, so
a part of the sum is never read.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullshard import torch_border


class _Sum(NamedTuple):
    """The input's gradient in one backward pass, until all layers have added to it."""

    missing: int
    """Layers that the pass has still to execute."""
    gradient: Tensor | None
    """Of shape (rows, features); None if no layer has added to it."""


class SharedInput:
    """One tensor that linear layers read; their nodes in the graph hold it."""

    def __init__(self, input: Tensor, stream: int) -> None:
        # What autograd knows a tensor by: one that was changed in place since has another node.
        self._node, self._output = input.grad_fn, input.output_nr
        self._stream = stream
        self._readers: list[weakref.ref[Any]] = []
        self._sums: dict[int, _Sum] = {}
        """Sums of backward passes, by the pass."""

    def is_of(self, input: Tensor, stream: int) -> bool:
        """Return whether it is this tensor that a layer reads on a stream, on which its backward will run, too."""
        return (
            self._node is input.grad_fn
            and self._output == input.output_nr
            and self._stream == stream
        )

    def add_reader(self, node: Any) -> None:
        """Note the node of a layer."""
        self._readers.append(weakref.ref(node))

    def add_product(self, gradients: Tensor | None, weight: Tensor | None) -> Tensor | None:
        """Add what a layer contributes, (rows, outputs) times its weight; None for nothing.

        Return the sum if the layer is the last one of this pass, and None if others will come.
        """
        this_pass = torch_border.backward_pass_id()
        found = self._sums.pop(this_pass, None)
        missing, total = found or (self._num_readers_in_pass(), None)
        if gradients is not None:
            assert weight is not None, "it was saved, as the input needs a gradient"
            if total is None:
                total = gradients.mm(weight)
            else:
                torch.addmm(total, gradients, weight, out=total)
        if missing > 1:
            self._sums[this_pass] = _Sum(missing - 1, total)
            return None
        return total

    def _num_readers_in_pass(self) -> int:
        """Return how many of the layers this pass executes; each of them once."""
        nodes = [reader() for reader in self._readers]
        return sum(node is not None and torch_border.pass_executes(node) for node in nodes)


class SharedInputs:
    """Finds the layers of a model that read the same tensor one after the other."""

    def __init__(self) -> None:
        self._latest: weakref.ref[SharedInput] | None = None

    def of(self, input: Tensor) -> SharedInput | None:
        """Return what the readers of this tensor share; None if it needs no gradient from them, or is a leaf of the graph."""
        if input.grad_fn is None:
            return None
        stream = torch_border.current_stream_id(input.device)
        latest = None if self._latest is None else self._latest()
        if latest is None or not latest.is_of(input, stream):
            latest = SharedInput(input, stream)
            self._latest = weakref.ref(latest)
        return latest
