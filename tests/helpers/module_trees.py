"""Trees of modules of all kinds, for plans of groups: they run, and notice parameters that are not there."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import assume, strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Leaf(nn.Module):
    """A parameter of so many bytes; its forward finds it whole, or fails."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_bytes // 4))

    def forward(self, x: Tensor) -> Tensor:
        assert not isinstance(self.weight, DTensor), "called while its parameters are sharded"
        return x + self.weight.sum()


class Net(nn.Module):
    """Calls its children in the order of registration, and the entries of containers one after the other."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        for child in self._modules.values():
            x = run(child, x)
        return x


class Bag(Net):
    """Has children, and is not called."""

    forward = nn.Module.forward


class Custom(nn.Sequential):
    """Has a forward of its own, as subclasses sometimes do."""

    def forward(self, x: Tensor) -> Tensor:
        for child in self:
            x = child(x)
        return x


def run(module: Any, x: Tensor) -> Tensor:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, Bag)):
        for child in module.children():
            x = run(child, x)
        return x
    result: Tensor = module(x)
    return result


def layers(count: int, num_bytes: int) -> nn.ModuleList:
    return nn.ModuleList(Net(leaf=Leaf(num_bytes)) for _ in range(count))


sizes = st.integers(0, 60).map(lambda n: 4 * n)


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    """A module: a leaf, a module with children, or a container."""
    kind = draw(st.sampled_from(["leaf", "net", "list", "dict", "bag", "sequential", "custom"]))
    if kind == "leaf" or depth == 0:
        return Leaf(draw(sizes))
    if kind == "list" and draw(st.booleans()):
        size = draw(sizes)
        return layers(draw(st.integers(1, 12)), size)
    below = draw(st.lists(trees(depth=depth - 1), max_size=4))  # type: ignore[call-arg]
    if kind in ("net", "bag"):
        cls = Net if kind == "net" else Bag
        return cls(**{f"child{i}": child for i, child in enumerate(below)})
    if kind == "dict":
        return nn.ModuleDict({f"key{i}": child for i, child in enumerate(below)})
    if kind == "list":
        return nn.ModuleList(below)
    called = [child if is_called(child) else Net(child=child) for child in below]
    return (Custom if kind == "custom" else nn.Sequential)(*called)


def is_called(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict, Bag))


@st.composite
def models(draw: st.DrawFn, shared: bool) -> Net:
    """A model, with parameters and modules that several modules have if ``shared``."""
    children = draw(st.lists(trees(), min_size=1, max_size=4))
    model = Net(**{f"part{i}": child for i, child in enumerate(children)}, end=Leaf(8))
    leaves = [module for module in model.modules() if isinstance(module, Leaf)]
    parents = [module for module in model.modules() if isinstance(module, Net) and module]
    for _ in range(draw(st.integers(0, 3)) if shared else 0):
        one, other = draw(st.sampled_from(leaves)), draw(st.sampled_from(leaves))
        if draw(st.booleans()):
            one.weight = other.weight
        else:
            draw(st.sampled_from(parents)).add_module("shared", other)
    assume(any(param.numel() for param in model.parameters()))
    return model
