"""Whatever a program does with a sharded model, it computes what it computes with a plain one.

Models and programs are drawn from a seed. A program is a list of operations, the methods of `Pair`;
each is done to a sharded model and to a plain one, and their results are compared. A failure says
the seed and prints model and program. There is one rank, where a sharded model goes the same way as
with many and where collectives need nobody else. Some programs run on three ranks, with the same data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fullshard.layout.segments
from fullshard import FSDPModule, fully_shard
from tests.helpers.compare import assert_close
from tests.helpers.groups import alone
from tests.helpers.random_models import (
    WIDTH,
    BlownFuse,
    Branch,
    Leaf,
    draw_model,
    fuse_of,
    has_reentrant_checkpoint,
    tensor_in,
)

NUM_PROGRAMS = 40
NUM_FUSED = 20
NUM_ON_RANKS = 12
NUM_STEPS = 4
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
"""Sums over several calls or backwards may be added in another order, and Adam magnifies that."""


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with alone():
        yield


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
# 68: recomputation after a forward that was shorter than the one before.
# 469: a group kept gathered over a step, then a backward of another part; its age was forgotten.
@pytest.mark.parametrize("seed", [*range(NUM_PROGRAMS), 68, 469])
def test_a_random_program_computes_what_it_does_unsharded(seed: int, monkeypatch) -> None:
    run(seed, monkeypatch, fuse_gradients=False)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("seed", range(1000, 1000 + NUM_FUSED))
def test_so_does_one_whose_gradients_are_written_once(seed: int, monkeypatch) -> None:
    run(seed, monkeypatch, fuse_gradients=True)


def run_all(seeds: Sequence[int]) -> None:
    for number, seed in enumerate(seeds):
        with pytest.MonkeyPatch.context() as monkeypatch:
            run(seed, monkeypatch, fuse_gradients=number % 2 == 1)


def test_so_do_some_on_three_ranks(world) -> None:
    world(3).run(run_all, range(2000, 2000 + NUM_ON_RANKS))


def run(seed: int, monkeypatch: pytest.MonkeyPatch, *, fuse_gradients: bool) -> None:
    draw = Random(seed)
    if draw.random() < 0.5:
        monkeypatch.setattr(fullshard.layout.segments, "IN_PLACE_FROM", 0)
    plain = draw_model(draw, gated=fuse_gradients)
    sharding = [
        replace(sharded, fuse_gradients=fuse_gradients) for sharded in draw_sharding(draw, plain)
    ]
    program = draw_program(draw, sharding, plain, penalties=fuse_gradients)
    try:
        pair = Pair(plain, sharding)
        for operation in program:
            operation.apply(pair)
    except Exception as error:
        lines = [f"seed {seed}", str(plain), *map(str, sharding), *map(str, program)]
        error.add_note("\n".join(lines))
        raise


# --- sharding -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """One call of `fully_shard`."""

    part: str
    """Name of the module."""
    reshard_after_forward: bool | None
    last_dim: bool
    """Cut matrices along their last dimension."""
    unshard_in_backward: bool
    """Whether to say again that it is."""
    fuse_gradients: bool = False

    def apply(self, model: nn.Module) -> None:
        module = model.get_submodule(self.part)
        fully_shard(
            module,
            mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
            reshard_after_forward=self.reshard_after_forward,
            shard_placement_fn=_along_last_dim if self.last_dim else None,
            fuse_gradients=self.fuse_gradients,
        )
        if self.unshard_in_backward:
            module.set_unshard_in_backward(True)


def _along_last_dim(param: nn.Parameter) -> Shard | None:
    return Shard(param.ndim - 1) if param.ndim > 1 else None


def draw_sharding(draw: Random, model: nn.Module) -> list[Sharded]:
    """Calls for some modules and for the model itself, children before their parents."""
    names = [name for name, module in model.named_modules() if isinstance(module, (Branch, Leaf))]
    return [
        Sharded(
            part=name,
            reshard_after_forward=draw.choice([None, True, False]),
            last_dim=draw.random() < 0.3,
            unshard_in_backward=draw.random() < 0.2,
        )
        for name in reversed(names)
        if name == "" or draw.random() < 0.6
    ]


# --- programs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """A method of `Pair` and its arguments."""

    verb: str
    arguments: dict[str, Any]

    def apply(self, pair: Pair) -> None:
        getattr(pair, self.verb)(**self.arguments)

    def __str__(self) -> str:
        return (
            f"{self.verb}({', '.join(f'{key}={value!r}' for key, value in self.arguments.items())})"
        )


def draw_program(
    draw: Random, sharding: list[Sharded], model: nn.Module, *, penalties: bool
) -> list[Operation]:
    of_inputs = ["input_gradient", "penalty"] if penalties else ["input_gradient"]
    author = Author(draw, [sharded.part for sharded in sharding if sharded.part])
    verbs = [
        *(["forward"] * 4),
        *(["backward"] * 3),
        *["drop", "evaluate", "forward_that_fails", "load", "reset", "gradient_sync", "keep"],
        *([] if has_reentrant_checkpoint(model) else of_inputs),  # refused by torch
    ]
    for _ in range(NUM_STEPS):
        for _ in range(draw.randint(1, 8)):
            getattr(author, draw.choice(verbs))()
        author.step()
    return author.program


class Author:
    """Writes a program, and knows enough of what it does to write nothing that torch forbids."""

    def __init__(self, draw: Random, parts: list[str]) -> None:
        self.program: list[Operation] = []
        self._draw = draw
        self._parts = parts
        self._num_losses = 0
        self._forwards: dict[int, dict[str, Any]] = {}
        """Arguments of the forward of each loss that is left."""
        self._unreduced: list[dict[str, Any]] = []
        """Arguments of forwards whose gradients wait for a backward that reduces them."""
        self._sync = True
        self._has_run = False
        """Whether the whole model has been run, which has to happen before a part of it is."""

    def _write(self, verb: str, **arguments: Any) -> None:
        self.program.append(Operation(verb, arguments))

    def _flip(self) -> bool:
        return self._draw.random() < 0.5

    def forward(self) -> None:
        whole = not self._parts or not self._has_run or self._draw.random() < 0.7
        part = "" if whole else self._draw.choice(self._parts)
        self._forward(part=part, route=self._draw.randrange(2), input_gradient=self._flip())

    def _forward(self, **arguments: Any) -> int:
        loss = self._num_losses
        self._write("forward", loss=loss, **arguments)
        self._forwards[loss] = arguments
        self._num_losses += 1
        self._has_run = True
        return loss

    def backward(self) -> None:
        if self._forwards:
            retain = self._draw.random() < 0.3
            self._backward(self._draw.choice(list(self._forwards)), retain)

    def _backward(self, loss: int, retain: bool) -> None:
        self._write("backward", loss=loss, retain=retain)
        if not self._sync:
            self._unreduced.append(self._forwards[loss])
        if not retain:
            del self._forwards[loss]

    def drop(self) -> None:
        if self._forwards:
            loss = self._draw.choice(list(self._forwards))
            del self._forwards[loss]
            self._write("drop", loss=loss)

    def evaluate(self) -> None:
        self._write("evaluate", inference_mode=self._flip())
        self._has_run = True

    def forward_that_fails(self) -> None:
        self._write("forward_that_fails", at_leaf=self._draw.randint(1, 4))
        self._has_run = True

    def input_gradient(self) -> None:
        self._write("input_gradient")
        self._has_run = True

    def penalty(self) -> None:
        if self._sync:
            self._write("penalty", route=self._draw.randrange(2))
            self._has_run = True

    def load(self) -> None:
        self._write("load")
        self._forwards.clear()  # what they saved has changed

    def reset(self) -> None:
        if not self._unreduced:  # it would drop them
            self._write("reset")
            self._forwards.clear()

    def gradient_sync(self) -> None:
        self._sync = self._flip()
        self._write("gradient_sync", enabled=self._sync)

    def keep(self) -> None:
        self._write("keep_after_backward", enabled=self._flip())

    def step(self) -> None:
        """An optimizer step, before which all gradients are reduced."""
        if self._unreduced:
            self._sync = True
            self._write("gradient_sync", enabled=True)
            for arguments in self._unreduced:
                self._backward(self._forward(**arguments), retain=False)
            self._unreduced.clear()
        self._write("step", then=self._draw.choice(["clear", "clear", "zero", "accumulate"]))
        self._forwards.clear()


class Pair:
    """A sharded model and a plain one, to which the same is done."""

    def __init__(self, plain: nn.Module, sharding: list[Sharded]) -> None:
        self._sharded, self._plain = copy.deepcopy(plain), plain
        for sharded in sharding:
            sharded.apply(self._sharded)
        self._models = (self._sharded, self._plain)
        # Taken once: while a module is unsharded, it has other parameters.
        self._params = [dict(model.named_parameters()) for model in self._models]
        self._optimizers = [torch.optim.Adam(list(p.values()), lr=0.05) for p in self._params]
        self._losses: dict[int, list[Tensor]] = {}
        self._generator = torch.Generator().manual_seed(0)

    def forward(self, loss: int, part: str, route: int, input_gradient: bool) -> None:
        inputs = self._inputs(input_gradient)
        losses = [
            tensor_in(model.get_submodule(part)(x, route)).square().sum()
            for model, x in zip(self._models, inputs, strict=True)
        ]
        assert losses[0].requires_grad == losses[1].requires_grad
        assert_close(*losses, **TOLERANCE)
        self._losses[loss] = losses

    def backward(self, loss: int, retain: bool) -> None:
        for each in self._losses[loss]:
            if each.requires_grad:
                each.backward(retain_graph=retain)
        if not retain:
            self.drop(loss)

    def drop(self, loss: int) -> None:
        del self._losses[loss]

    def evaluate(self, inference_mode: bool) -> None:
        mode: Callable[[], AbstractContextManager[Any]]
        mode = torch.inference_mode if inference_mode else torch.no_grad
        inputs = self._inputs(requires_grad=False)
        with mode():
            outputs = [model(x) for model, x in zip(self._models, inputs, strict=True)]
            assert_close(*outputs, **TOLERANCE)

    def forward_that_fails(self, at_leaf: int) -> None:
        """Or does not, if so many leaves are never run."""
        failed = []
        for model, x in zip(self._models, self._inputs(requires_grad=True), strict=True):
            fuse_of(model).remaining = at_leaf
            try:
                model(x)
                failed.append(False)
            except BlownFuse:
                failed.append(True)
            fuse_of(model).remaining = None
        assert failed[0] == failed[1]

    def input_gradient(self) -> None:
        inputs = self._inputs(requires_grad=True)
        gradients = [
            torch.autograd.grad(model(x).square().sum(), x)
            for model, x in zip(self._models, inputs, strict=True)
        ]
        assert_close(*gradients, **TOLERANCE)

    def penalty(self, route: int) -> None:
        """A backward through the gradient of the input."""
        for model, x in zip(self._models, self._inputs(requires_grad=True), strict=True):
            (slope,) = torch.autograd.grad(model(x, route).square().sum(), x, create_graph=True)
            slope.square().sum().backward()

    def load(self) -> None:
        self._losses.clear()
        for model in self._models:
            state = {name: value.detach() * 0.9 for name, value in model.state_dict().items()}
            model.load_state_dict(state)

    def reset(self) -> None:
        self._losses.clear()
        self._sharded.reset_iter_state()

    def gradient_sync(self, enabled: bool) -> None:
        self._sharded.set_requires_gradient_sync(enabled)

    def keep_after_backward(self, enabled: bool) -> None:
        self._sharded.set_reshard_after_backward(not enabled)

    def step(self, then: str) -> None:
        self._losses.clear()
        gradients = [
            {name: _whole(param.grad) for name, param in params.items() if param.grad is not None}
            for params in self._params
        ]
        assert_close(*gradients, **TOLERANCE)
        for optimizer in self._optimizers:
            optimizer.step()
            if then != "accumulate":
                optimizer.zero_grad(set_to_none=then == "clear")
        params = [{name: _whole(param) for name, param in p.items()} for p in self._params]
        assert_close(*params, **TOLERANCE)

    def _inputs(self, requires_grad: bool) -> list[Tensor]:
        x = torch.randn(2, WIDTH, dtype=torch.float64, generator=self._generator)
        return [x.clone().requires_grad_(requires_grad) for _ in self._models]


def _whole(tensor: Tensor) -> Tensor:
    """What all ranks hold of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_every_sharded_module_of_a_pair_is_one() -> None:
    draw = Random(0)
    plain = draw_model(draw)
    sharding = draw_sharding(draw, plain)
    pair = Pair(plain, sharding)
    found = {n for n, m in pair._sharded.named_modules() if isinstance(m, FSDPModule)}
    assert found == {sharded.part for sharded in sharding}
    assert not any(isinstance(module, FSDPModule) for module in plain.modules())
