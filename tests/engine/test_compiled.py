"""Compiled modules that are sharded, in all forms: no breaks in a block, no recompilation, and the numbers of torch's FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch.profiler import profile

import fullshard
from benchmarks import compiled_forms
from benchmarks.compiled_forms import Form

STEPS = 16  # the first 12 have all that is compiled


def agree(form: Form, library: str, backend: str) -> None:
    """Train a form with our functions, and with others, or another backend: numbers and graphs are the same."""
    ours = compiled_forms.train(form, compiled_forms.library("fullshard"), STEPS)
    assert ours == compiled_forms.train(form, compiled_forms.library(library), STEPS, backend)
    assert ours.graphs > 0
    assert ours.new_graphs == 0


@pytest.mark.parametrize(
    "form",
    [
        compiled_forms.block_compile_then_shard,
        compiled_forms.shard_then_block_compile,
        compiled_forms.shard_then_torch_compile,
        compiled_forms.lists_of_compiled_blocks,
        compiled_forms.torch_compile_of_the_root,
    ],
)
def test_compiled_blocks_train_as_in_torch_and_are_compiled_once(world, form: Form) -> None:
    world(2).run(agree, form, "torch", "aot_eager")


@pytest.mark.parametrize("form", ["block.compile()", "torch.compile(block)"])
def test_compiled_blocks_of_wrappers_train_as_without_compiler(world, form: str) -> None:
    world(2).run(agree_wrapped, form)


def agree_wrapped(form: str) -> None:
    for use_orig_params in (True, False):
        agree(compiled_forms.wrapped(use_orig_params, form), "fullshard", "eager")


def compiled_between_steps(compiled: bool) -> list[float]:
    """Losses of a model whose blocks are compiled after two steps, profiled, and left to the interpreter again."""
    torch.manual_seed(0)
    net = compiled_forms.Net()
    blocks = [fullshard.fully_shard(block, fuse_gradients=True) for block in net.blocks]
    model: Any = fullshard.fully_shard(net)
    found = []
    for step in range(6):
        if compiled and step == 2:
            for block in blocks:
                block.compile(fullgraph=True, backend="aot_eager")
        if compiled and step == 4:
            for block in blocks:
                block._compiled_call_impl = None
        with profile() if step == 3 else contextlib.nullcontext():
            loss = model(compiled_forms.batch(step))
            loss.backward()
        found.append(loss.item())
    return found


def test_blocks_may_be_compiled_between_steps(world) -> None:
    assert world(2).run(compiled_between_steps, True) == world(2).run(compiled_between_steps, False)


# --- control flow ---------------------------------------------------------------------------------


class Layers(nn.Module):
    """Two layers, both in one group."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)


class Either(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(
            x.sum() > 0, lambda x: self.one(x).relu(), lambda x: self.two(x).tanh(), (x,)
        )


class Repeated(Layers):
    def forward(self, x: Tensor) -> Tensor:
        def again(count: Tensor, _x: Tensor) -> Tensor:
            return count < 3

        def body(count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return count + 1, self.two(torch.tanh(self.one(x)))

        y: Tensor = while_loop(again, body, (torch.tensor(0), x))[1]
        return y


class Recurrent(Layers):
    def forward(self, x: Tensor) -> Tensor:
        def combine(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.tanh(self.one(state) + self.two(x))
            return state, state.clone()

        y: Tensor = scan(combine, torch.zeros_like(x[0]), x)[1]
        return y


def losses(
    kind: type[Layers], shard: Callable[[nn.Module], Any], *, is_compiled: bool
) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), shard(kind()))
    if is_compiled:
        model[1].compile(backend="eager")
    model = shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        with torch.set_grad_enabled(kind is not Repeated):  # torch cannot differentiate it
            loss = model(x).square().mean()
        if loss.requires_grad:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    return found


def wrapped(module: nn.Module, **options: Any) -> nn.Module:
    return fullshard.FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


def flow(kind: type[Layers], *, in_all_ways: bool) -> None:
    expected = losses(kind, lambda module: module, is_compiled=False)
    ways: list[Callable[[nn.Module], Any]] = [fullshard.fully_shard]
    if in_all_ways:
        ways += [partial(wrapped, use_orig_params=flag) for flag in (True, False)]
    for shard in ways:
        for is_compiled in (False, True) if in_all_ways else (False,):
            found = losses(kind, shard, is_compiled=is_compiled)
            assert found == pytest.approx(expected, rel=1e-5), (shard, is_compiled)


@pytest.mark.parametrize("kind", [Either, Repeated, Recurrent])
def test_control_flow_may_use_several_weights_of_a_group(world, kind: type[Layers]) -> None:
    world(2).run(flow, kind, in_all_ways=kind is Either)
