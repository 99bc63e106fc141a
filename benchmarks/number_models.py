"""The model that `same_numbers.py` trains, its batches, and a weight that gathers itself.

Shapes are small and awkward: no number of ranks divides them, some ranks hold nothing of some parameters,
and blocks have a parameter without dimensions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Block", "Decoder", "DecoderOptions", "TwoPartWeight", "batch_of"]

VOCABULARY = 11
_aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderOptions:
    """What varies between configurations."""

    width: int = 6
    hidden: int = 13
    depth: int = 3
    tied: bool = False
    """Head and embedding are one parameter."""
    frozen: tuple[str, ...] = ()
    """Endings of the names of parameters that are not trained."""
    checkpointing: str = "none"
    """none, reentrant or non_reentrant, around each block."""
    extension: bool = False
    """Weights of linear layers in blocks have the all-gather extension."""
    scale: bool = True
    """Each block has a parameter without dimensions."""
    unused_scale: bool = False
    """Blocks have it, and do not use it."""


class Block(nn.Module):
    """A residual block; its buffer is added, too."""

    bias: Tensor

    def __init__(self, options: DecoderOptions) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(options.width)
        self.up = nn.Linear(options.width, options.hidden)
        self.down = nn.Linear(options.hidden, options.width)
        self.scale = nn.Parameter(torch.tensor(0.7)) if options.scale else None
        self.register_buffer("bias", torch.linspace(-0.1, 0.1, options.width))
        self.unused_scale = options.unused_scale
        if options.extension:
            for linear in (self.up, self.down):
                linear.weight = nn.Parameter(TwoPartWeight(linear.weight.detach().clone()))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` and what the block adds to it."""
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        if self.scale is not None and not self.unused_scale:
            y = y * self.scale
        return x + y + self.bias.to(x.dtype)


class Decoder(nn.Module):
    """Embedding, blocks, head; returns the loss of predicting the next token."""

    def __init__(self, options: DecoderOptions) -> None:
        super().__init__()
        self.options = options
        self.embed = nn.Embedding(VOCABULARY, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.depth))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, VOCABULARY, bias=False)
        if options.tied:
            self.head.weight = self.embed.weight
        for name, param in self.named_parameters():
            if options.frozen and name.endswith(options.frozen):
                param.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of one batch."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = self._run(block, x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    def _run(self, block: nn.Module, x: Tensor) -> Any:
        if self.options.checkpointing == "none":
            return block(x)
        return checkpoint(block, x, use_reentrant=self.options.checkpointing == "reentrant")


def batch_of(step: int, microbatch: int, rank: int, device: torch.device) -> Tensor:
    """Return the tokens of one microbatch of one rank."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * microbatch + rank)
    return torch.randint(0, VOCABULARY, (2, 7), generator=generator).to(device)


class TwoPartWeight(Tensor):
    """A weight with the all-gather extension: it travels as two bf16 tensors, the number and the rest of it."""

    data_: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> "TwoPartWeight":
        """Make a tensor without memory of its own."""
        return Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: Tensor) -> None:
        self.data_ = data

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TwoPartWeight({self.data_})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute with the data; wrap what is still a weight."""
        tree = torch.utils._pytree
        plain, options = tree.tree_map_only(cls, lambda w: w.data_, (tuple(args), kwargs or {}))
        result = func(*plain, **options)
        if func in _STILL_A_WEIGHT:
            return tree.tree_map_only(Tensor, cls, result)
        changes_first = func._schema.name.endswith("_") and func._schema.returns
        return args[0] if changes_first else result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return what this rank sends."""
        high = self.data_.bfloat16()
        return (high, (self.data_ - high).bfloat16()), outer_size

    def fsdp_post_all_gather(
        self, outputs: Any, outer_size: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Put the parts of all ranks together, without the padding at the end."""
        high, low = (output[: outer_size[0]].float() for output in outputs)
        if out is not None:
            with torch.no_grad():
                out.data.copy_(high + low)
            return None
        whole = (high + low).to(param_dtype)
        return whole, (whole,)


_STILL_A_WEIGHT = {
    _aten.detach.default,
    _aten.clone.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.view.default,
    _aten.as_strided.default,
    _aten.new_zeros.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
}
"""Operators that cut, copy or move a weight. All others compute with its data."""
