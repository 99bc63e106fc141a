"""Tensors that forward keeps for backward, measured on the meta device: no memory is used, and nothing is computed.

Autograd says which tensors it saves. Each storage counts once. Parameters and buffers do not count: they are counted elsewhere.

    outside of blocks     the embedding's, the head's, the loss's
    in a block            all that the block saves; with recomputing only what goes into it, and all of the largest block,
                          since backward recomputes one block at a time

Two kinds are not measured: temporary tensors of a single operation, and gradients of activations, which backward has one layer at
a time. Attention, RMSNorm and dropout count as those of accelerators (`without_values`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from fullshard.virtual.without_values import without_values


def kept_bytes(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    forward: Callable[[], object],
    *,
    dtype: torch.dtype | None,
    recomputes: bool,
) -> int:
    """Return the bytes that a forward keeps for backward.

    Args:
        model: On the meta device. Its parameters get the dtype, if there is one.
        blocks: Its layers.
        forward: Calls the model with inputs on the meta device.
        dtype: That of compute.
        recomputes: Whether the activations of blocks are recomputed.
    """
    if dtype is not None:
        for param in model.parameters():
            param.data = param.data.to(dtype)
    # Storages are kept here, so that none gets the identity of another one that has gone.
    fixed = {id(s): s for s in map(Tensor.untyped_storage, (*model.parameters(), *model.buffers()))}
    record = _Record(fixed)
    with ExitStack() as stack:
        for block in blocks:
            for handle in record.watch(block):
                stack.callback(handle.remove)
        stack.enter_context(without_values())
        stack.enter_context(saved_tensors_hooks(record.save, lambda tensor: tensor))
        result = forward()
    del result
    return record.bytes_kept(recomputes=recomputes)


class _Record:
    """The storages that autograd saves, by the block that runs."""

    def __init__(self, fixed: Mapping[int, torch.UntypedStorage]) -> None:
        self._fixed = fixed
        self._outside: dict[int, torch.UntypedStorage] = {}
        self._inputs: dict[int, torch.UntypedStorage] = {}
        self._in_block: dict[nn.Module, dict[int, torch.UntypedStorage]] = {}
        self._running: nn.Module | None = None

    def watch(self, block: nn.Module) -> Iterator[RemovableHandle]:
        """Note when a block runs and what goes into it; yield what ends that."""

        def enter(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._running = block
            for each in (*args, *kwargs.values()):
                if isinstance(each, Tensor):
                    self._add(self._inputs, each)

        def leave(*_: object) -> None:
            self._running = None

        yield block.register_forward_pre_hook(enter, with_kwargs=True)
        yield block.register_forward_hook(leave)

    def save(self, tensor: Tensor) -> Tensor:
        """Note a tensor that autograd saves."""
        block = self._running
        self._add(self._outside if block is None else self._in_block.setdefault(block, {}), tensor)
        return tensor

    def _add(self, storages: dict[int, torch.UntypedStorage], tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self._fixed:
            storages[id(storage)] = storage

    def bytes_kept(self, *, recomputes: bool) -> int:
        """Return the bytes of all storages that are kept until backward; with recomputing, at its worst moment."""
        blocks = self._in_block.values()
        if not recomputes:
            return _size({**self._outside, **{k: s for each in blocks for k, s in each.items()}})
        kept = {**self._outside, **self._inputs}
        inner = [{k: s for k, s in each.items() if k not in kept} for each in blocks]
        return _size(kept) + max(map(_size, inner), default=0)


def _size(storages: Mapping[int, torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages.values())
