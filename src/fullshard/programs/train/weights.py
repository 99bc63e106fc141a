"""Starting weights, the same on any number of ranks, through either door, on any device.

Weights are drawn whole on the CPU, from generators seeded by the run's seed and the weights' names,
and every rank keeps its own piece. To the rest of the package they are a checkpoint that nobody
wrote: `checkpoint` knows what a rank holds, and asks for it. That costs the memory of one parameter
(one layer, for models of transformers) at a time and no communication. (Drawing straight into the
shards would be cheaper, but then the values depend on how the parameter is cut.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.checkpoint.blocks import Block, whole
from fullshard.checkpoint.load_plan import load_source
from fullshard.checkpoint.source import MODEL, TensorInfo

Draw = Callable[[str], Mapping[str, Tensor]]
"""From the name of a tensor to it and those that are drawn together with it, by name; whole and on the CPU."""


class DrawnWeights:
    """A checkpoint `Source` whose tensors are made when they are asked for."""

    format = "starting weights"
    path = Path("starting weights")

    def __init__(self, skeleton: nn.Module, draw: Draw) -> None:
        """Offer what a model has.

        Args:
            skeleton: A model with the same names and shapes; on the meta device, or not.
            draw: Makes its tensors. Called once for each of them, or of those drawn together, if they are
                asked for in the model's order.
        """
        self._draw = draw
        self._drawn: Mapping[str, Tensor] = {}
        """What was drawn last."""
        self.optimizer: Mapping[str, Any] | None = None
        self.extra: Any = None
        state = skeleton.state_dict(keep_vars=True)
        first = {tensor: name for name, tensor in reversed(state.items())}
        self.tensors: Mapping[str, TensorInfo] = {
            MODEL + name: TensorInfo(tensor.dtype, tuple(tensor.shape))
            for name, tensor in state.items()
            if first[tensor] == name
        }
        self.tied: Mapping[str, str] = {
            name: first[tensor] for name, tensor in state.items() if first[tensor] != name
        }

    def read(self, key: str, wanted: Block, out: Tensor) -> None:
        """Copy a block of a tensor, which is drawn if it was not drawn last."""
        name = key.removeprefix(MODEL)
        if name not in self._drawn:
            self._drawn = {}  # before the next ones: there is never memory for both
            self._drawn = self._draw(name)
        tensor = self._drawn[name]
        out.copy_(tensor[wanted.slices_in(whole(tensor.shape))])

    def verify(self, wanted: Iterable[tuple[str, Block]]) -> list[str]:
        """Nothing: what is made here cannot be damaged."""
        return []

    def close(self) -> None:
        """Forget what was drawn."""
        self._drawn = {}


def fill(model: nn.Module, weights: DrawnWeights) -> None:
    """Give a model of either door, or of none, its starting weights. All ranks call it."""
    load_source(weights, model, cast=True)


def materialise(module: nn.Module, device: torch.device, *, recurse: bool = True) -> None:
    """Give parameters on the meta device memory, without values; what is tied stays so, and buffers as and where they are.

    Both doors move buffers to where the model computes, which is not where offloaded parameters rest.

    With `fully_shard`, it is called for the sharded model; the wrapper calls it for each module:
    ``param_init_fn=partial(materialise, device=device, recurse=False)``.
    """
    owners = tuple(module.modules()) if recurse else (module,)
    # Non-persistent buffers have their values from nowhere but here, and to_empty would lose them; also, that two
    # parameters are one.
    buffers = [
        (owner, name, buffer)
        for owner in owners
        for name, buffer in owner.named_buffers(recurse=False)
        if not buffer.is_meta
    ]
    uses: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for owner in owners:
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            uses.setdefault(parameter, []).append((owner, name))
    module.to_empty(device=device, recurse=recurse)
    for owner, name, buffer in buffers:
        setattr(owner, name, buffer)
    for (first, first_name), *others in uses.values():
        for owner, name in others:
            owner.register_parameter(name, first.get_parameter(first_name))


def seed_of(label: str) -> int:
    """Return a seed that is the same in every process: Python salts its own hashes."""
    return int.from_bytes(hashlib.sha256(label.encode()).digest()[:4], "big")
