"""What forward keeps for backward, measured on the meta device: no memory is used, and nothing is computed.

Autograd says which tensors it saves. Each storage counts once. Parameters and buffers do not count: they are counted elsewhere.

    outside of blocks     the embedding's, the head's, the loss's
    in a block            all that the block saves; with recomputing only what goes into it, and all of the largest block,
                          since backward recomputes one block at a time

What is not measured: temporary tensors of a single operation, and gradients of activations, which backward has one layer at
a time. Attention counts as that of fused kernels, which save no matrix of scores. On the meta device torch would choose the
kernel that does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

ATTENTION = F.scaled_dot_product_attention


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
        # The mode does not see calls inside of functions that it has seen, such as that of nn.MultiheadAttention.
        stack.callback(setattr, F, ATTENTION.__name__, ATTENTION)
        setattr(F, ATTENTION.__name__, fused_attention)
        stack.enter_context(WithoutValues())
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


class WithoutValues(TorchFunctionMode):
    """What replaces operations that need values, or do something else where there are none.

    Attention saves what fused kernels save: inputs, outputs, and a number for each row of scores. A question about values is
    answered with yes: models of transformers ask whether all windows are whole.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace these two, and call everything else."""
        kwargs = kwargs or {}
        if func is torch.Tensor.__bool__ and args[0].is_meta:
            return True
        return fused_attention(*args, **kwargs) if func is ATTENTION else func(*args, **kwargs)


def fused_attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    """Return a tensor like that of torch's function, and save what fused kernels save."""
    output: Tensor = _FusedAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return output


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Kernels lay the output out like the query; whether the layer after it needs a copy depends on that.
        output = torch.empty_like(query)
        if value.shape[-1] != query.shape[-1]:
            output = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("only forward is measured")
