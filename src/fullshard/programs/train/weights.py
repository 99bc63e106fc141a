"""Starting weights: the same on any number of ranks, with either API, on any device.

Full parameters are drawn on the CPU, from generators seeded by the run's seed and the parameter's name, and every rank
keeps its shard. To `checkpoint` they look like a checkpoint to load: it knows what a rank holds, and reads only that. This
costs the memory of one parameter at a time (of one layer, for models of transformers) and no communication. Drawing
directly into the shards would be cheaper, but the values would then depend on how a parameter is sharded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.checkpoint.load_plan import load_source
from fullshard.checkpoint.source import MODEL, TensorInfo
from fullshard.layout.blocks import Block, whole

Draw = Callable[[str], Mapping[str, Tensor]]
"""Returns, for the name of a tensor, that tensor and those that are drawn with it, by name: full and on the CPU."""


class DrawnWeights:
    """A checkpoint `Source` whose tensors are drawn when they are read."""

    format = "starting weights"
    path = Path("starting weights")

    def __init__(self, skeleton: nn.Module, draw: Draw) -> None:
        """Make a source of a model's tensors.

        Args:
            skeleton: A model with the same names and shapes, on any device.
            draw: Draws its tensors. It is called once for tensors that are drawn together, if they are read in the
                model's order.
        """
        self._draw = draw
        self._drawn: Mapping[str, Tensor] = {}
        """The tensors that were drawn last."""
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
        """Copy a block of a tensor; draw the tensor unless it was drawn last."""
        name = key.removeprefix(MODEL)
        if name not in self._drawn:
            self._drawn = {}  # freed first: there may not be memory for both
            self._drawn = self._draw(name)
        tensor = self._drawn[name]
        out.copy_(tensor[wanted.slices_in(whole(tensor.shape))])

    def verify(self, wanted: Iterable[tuple[str, Block]]) -> list[str]:
        """Return no faults: drawn tensors cannot be damaged."""
        return []

    def close(self) -> None:
        """Free the values that were drawn."""
        self._drawn = {}


def fill(model: nn.Module, weights: DrawnWeights) -> None:
    """Fill a model, sharded or not, with its starting weights. All ranks call it."""
    load_source(weights, model, cast=True)


def materialise(module: nn.Module, device: torch.device, *, recurse: bool = True) -> None:
    """Allocate parameters that are on the meta device, without values. Ties stay, and so do buffers, with their values.

    Both APIs move buffers to the device that computes, which is not that of offloaded parameters.

    With `fully_shard`, call it for the sharded model. The wrapper calls it for each module:
    ``param_init_fn=partial(materialise, device=device, recurse=False)``.
    """
    owners = tuple(module.modules()) if recurse else (module,)
    # to_empty would lose the values of non-persistent buffers, which are in no checkpoint, and the ties of parameters.
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
    """Return a seed that is the same in every process. Python's own hashes are salted."""
    return int.from_bytes(hashlib.sha256(label.encode()).digest()[:4], "big")
