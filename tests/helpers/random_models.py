"""Models drawn at random: trees of modules with the habits that make sharding hard.

    Branch      calls its children in a drawn order, some more than once, some within a checkpoint,
                some only on route 0; may have a layer of its own
    Leaf        a layer, a 0-d parameter, perhaps one that is never used and one without elements;
                returns its output in one of several containers

Two models of one seed are equal, and what a model does depends on its inputs only.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 3
DEPTH = 2


class BlownFuse(Exception):
    """What a leaf raises when its turn has come to fail."""


class Fuse:
    """Shared by all leaves of a model: lets one of the next forwards of a leaf raise."""

    def __init__(self) -> None:
        self.remaining: int | None = None

    def burn(self) -> None:
        if self.remaining is not None:
            self.remaining -= 1
            if self.remaining == 0:
                raise BlownFuse


class Leaf(nn.Module):
    def __init__(self, draw: Random, fuse: Fuse) -> None:
        super().__init__()
        self.fuse = fuse
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gate: nn.Linear | None = None
        """Reads what the layer reads, if there is one."""
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.unused = nn.Parameter(torch.ones(2)) if draw.random() < 0.3 else None
        self.empty = nn.Parameter(torch.empty(0, 2)) if draw.random() < 0.2 else None
        self.container = draw.choice(["none", "dict", "tuple", "list in a dict"])
        self.in_place = draw.random() < 0.25

    def forward(self, x: Tensor, route: int = 0) -> Any:
        self.fuse.burn()
        y = torch.tanh(self.linear(x)) * self.scale
        if self.gate is not None:
            y = y * self.gate(x)
        if self.in_place:
            y = y.clone().mul_(1.5)
        containers: dict[str, Any] = {
            "none": y,
            "dict": {"y": y, "count": 3},
            "tuple": (y, None),
            "list in a dict": {"y": [y, 0.3 * x * self.scale]},
        }
        return containers[self.container]

    def extra_repr(self) -> str:
        return f"container={self.container!r}, in_place={self.in_place}"


@dataclass(frozen=True, kw_only=True)
class Call:
    """How a branch calls one of its children."""

    child: int
    checkpointing: str
    """none, reentrant or non_reentrant."""
    only_route_0: bool
    in_place: bool
    """The branch changes the output in place."""

    @classmethod
    def drawn(cls, draw: Random, children: nn.ModuleList) -> Call:
        child = draw.randrange(len(children))
        return cls(
            child=child,
            checkpointing=draw.choice(["none", "none", "reentrant", "non_reentrant"]),
            only_route_0=draw.random() < 0.2,
            # A branch may return its input, which is not its caller's to change.
            in_place=isinstance(children[child], Leaf) and draw.random() < 0.2,
        )


class Branch(nn.Module):
    def __init__(self, draw: Random, fuse: Fuse, depth: int = DEPTH) -> None:
        super().__init__()
        self.children_ = nn.ModuleList(
            Branch(draw, fuse, depth - 1) if depth and draw.random() < 0.4 else Leaf(draw, fuse)
            for _ in range(draw.randint(1, 3))
        )
        self.calls = [Call.drawn(draw, self.children_) for _ in range(draw.randint(1, 4))]
        self.own = nn.Linear(WIDTH, WIDTH) if draw.random() < 0.6 else None

    def forward(self, x: Tensor, route: int = 0) -> Tensor:
        for call in self.calls:
            if route and call.only_route_0:
                continue
            y = self._run(call, x, route)
            x = x + (y.mul_(0.5) if call.in_place else y)
        return x if self.own is None else self.own(x)

    def _run(self, call: Call, x: Tensor, route: int) -> Tensor:
        child = self.children_[call.child]
        if call.checkpointing == "none" or not torch.is_grad_enabled():
            return tensor_in(child(x, route))
        reentrant = call.checkpointing == "reentrant"
        return tensor_in(checkpoint(child, x, route, use_reentrant=reentrant))

    def extra_repr(self) -> str:
        return "\n".join(map(str, self.calls))


def draw_model(draw: Random, *, gated: bool = False) -> Branch:
    """A model in float64, some of whose parameters are frozen; all leaves have a gate, or none has.

    In float64, what is equal but for the order of sums stays far closer than what is not.
    """
    model = Branch(draw, Fuse())
    for module in model.modules():
        if gated and isinstance(module, Leaf):
            module.gate = nn.Linear(WIDTH, WIDTH)
    model.double()
    for param in model.parameters():
        # Drawn here and not by torch, so that the model depends on nothing but `draw`.
        values = [draw.uniform(-0.6, 0.6) for _ in range(param.numel())]
        param.detach().copy_(torch.tensor(values, dtype=param.dtype).view_as(param))
        param.requires_grad_(draw.random() >= 0.15)
    return model


def fuse_of(model: nn.Module) -> Fuse:
    return next(module.fuse for module in model.modules() if isinstance(module, Leaf))


def has_reentrant_checkpoint(model: nn.Module) -> bool:
    return any(
        call.checkpointing == "reentrant"
        for module in model.modules()
        if isinstance(module, Branch)
        for call in module.calls
    )


def tensor_in(output: Any) -> Tensor:
    """What a leaf or branch returned, without its container; several tensors are added up."""
    if isinstance(output, dict):
        return tensor_in(output["y"])
    if isinstance(output, list):
        return torch.stack(output).sum(dim=0)
    return output[0] if isinstance(output, tuple) else output
