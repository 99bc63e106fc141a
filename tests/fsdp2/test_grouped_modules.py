"""Groups of several modules, outputs that are views, inputs without gradients, methods beside forward."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from fullshard import ConfigurationError
from fullshard.engine.state import state_of
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.fake import fake_world
from tests.helpers.training import (
    FULLSHARD,
    ONE_PROCESS,
    TORCH,
    gradients,
    mine,
    needs_torch_2_13,
)

WIDTH = 6


def library(api: str) -> Any:
    return importlib.import_module("torch.distributed.fsdp" if api == TORCH else "fullshard")


def rows(api: str, seed: int = 1) -> Tensor:
    """The global batch, or this rank's rows of it."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(2 * dist.get_world_size(), WIDTH, generator=generator)
    return whole if api == ONE_PROCESS else mine(whole)


def assert_all_agree(steps: Callable[..., list[dict[str, Tensor]]], *args: Any) -> None:
    """Gradients after every step: of one process within rounding, of torch to the last bit."""
    ours = steps(FULLSHARD, *args)
    assert_close(ours, steps(ONE_PROCESS, *args), rtol=1e-5, atol=1e-6)
    assert_equal(ours, steps(TORCH, *args))


def assert_at_rest(model: nn.Module) -> None:
    states = {state_of(module) for module in model.modules()} - {None}
    assert states and not any(state.gathered for state in states)


# --- several modules in one group --------------------------------------------------------------------


class Planned(nn.Module):
    """Runs its layers in the order of a plan; `a` and `b` are one group, `c` is another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, plan: str) -> Tensor:
        for name in plan:
            x = torch.tanh(self.get_submodule(name)(x))
        result: Tensor = self.head(x)
        return result


def planned(api: str, reshard_after_forward: bool | None = None) -> Any:
    torch.manual_seed(0)
    model = Planned()
    if api != ONE_PROCESS:
        shard = library(api).fully_shard
        for group in ([model.a, model.b], model.c, model):
            shard(group, reshard_after_forward=reshard_after_forward)
    return model


def follow_plans(
    api: str, plans: tuple[str, ...], reshard_after_forward: bool | None
) -> list[dict[str, Tensor]]:
    model, record = planned(api, reshard_after_forward), []
    for plan in plans:
        model.zero_grad()
        model(rows(api), plan).square().mean().backward()
        record.append(gradients(model))
    if api == FULLSHARD and reshard_after_forward is not False:
        assert_at_rest(model)
    return record


PLANS = {
    "both, then one": ("ab", "a", "b", "ab"),
    "other order": ("ab", "ba", "ab"),
    "one of them twice": ("abb", "abb", "bab", "bb"),
    "others between": ("acb", "bca", "acab", "cac"),
    "none of them": ("ab", "c", "ab"),
}


@pytest.mark.parametrize(
    ("name", "reshard_after_forward"),
    [*((name, None) for name in PLANS), ("one of them twice", False), ("others between", False)],
)
def test_modules_of_a_group_run_in_any_order_and_number(
    world, name: str, reshard_after_forward: bool | None
) -> None:
    world(2).run(assert_all_agree, follow_plans, PLANS[name], reshard_after_forward)


def gathers(api: str, plan: str) -> list[tuple[int, int, bool]]:
    """All-gathers of forward and of backward per step, and whether the group is sharded between them."""
    from torch.distributed.tensor.debug import (
        CommDebugMode,
    )  # seconds, which not every worker needs

    model, record = planned(api, True), []
    for _ in range(3):
        with CommDebugMode() as forward:
            loss = model(rows(api), plan).square().mean()
        sharded = isinstance(model.a.weight, DTensor) and isinstance(model.b.weight, DTensor)
        with CommDebugMode() as backward:
            loss.backward()
        record.append((num_gathers(forward), num_gathers(backward), sharded))
    return record


def num_gathers(comm: Any) -> int:
    return sum(count for op, count in comm.get_comm_counts().items() if "gather" in str(op))


@needs_torch_2_13
@pytest.mark.parametrize("plan", ["ab", "ba", "a", "acb"])
def test_a_group_is_gathered_once_for_all_its_modules(world, plan: str) -> None:
    ours = world(2).run(gathers, FULLSHARD, plan)
    assert ours == world(2).run(gathers, TORCH, plan)
    num_groups = 3 if "c" in plan else 2  # with the root's
    assert ours == [[(num_groups, num_groups, True)] * 3] * 2


def run_parts_alone(api: str, plans: tuple[str, ...]) -> list[dict[str, Tensor]]:
    """After a step of the whole model, modules of the group are called without it."""
    model, record = planned(api), []
    model(rows(api), "ab").square().mean().backward()
    for parts in plans:
        model.zero_grad()
        x = rows(api)
        for name in parts:
            x = torch.tanh(model.get_submodule(name)(x))
        x.square().mean().backward()
        record.append(gradients(model))
    model.zero_grad()
    model(rows(api), "ab").square().mean().backward()
    return [*record, gradients(model)]


def parts_alone_equal_one_process(plans: tuple[str, ...]) -> None:
    # torch 2.13 leaves a group unsharded, and its gradients unreduced, when only a part of it ran.
    ours, expected = (run_parts_alone(api, plans) for api in (FULLSHARD, ONE_PROCESS))
    assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plans", [("a", "b", "a"), ("ab", "ba"), ("bb", "a")], ids=" ".join)
def test_modules_of_a_group_run_without_their_model(world, plans: tuple[str, ...]) -> None:
    world(2).run(parts_alone_equal_one_process, plans)


def evaluate_parts_between_steps() -> None:
    """A module of a group alone, without gradients, whose weights change in between."""
    model, reference = planned(FULLSHARD), planned(ONE_PROCESS)
    params = [*model.parameters(), *reference.parameters()]
    model(rows(FULLSHARD), "ab").square().mean().backward()
    for _ in range(3):
        with torch.no_grad():
            x = rows(FULLSHARD)
            assert_close(model.a(x), reference.a(x), rtol=1e-5, atol=1e-6)
            for param in params:
                param.mul_(0.9)


def test_a_module_of_a_group_is_evaluated_alone_with_the_weights_of_now(world) -> None:
    world(2).run(evaluate_parts_between_steps)


def test_a_group_of_several_modules_cannot_be_the_root() -> None:
    with fake_world(2):
        for api, error in ((FULLSHARD, ConfigurationError), (TORCH, RuntimeError)):
            pair = [nn.Linear(3, 3), nn.Linear(3, 3)]
            library(api).fully_shard(pair)
            with pytest.raises(error):
                pair[0](torch.ones(1, 3))


def materialise_a_group(dtype: torch.dtype | None) -> None:
    """Both modules of a group come from the meta device with their model, or are cast with it."""
    expected = planned(ONE_PROCESS).to(dtype)
    with torch.device("meta"):
        model: Any = Planned()
    for group in ([model.a, model.b], model.c, model):
        library(FULLSHARD).fully_shard(group)
    model.to_empty(device="cpu").to(dtype)
    whole = expected.state_dict()
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(rows(FULLSHARD).to(dtype), "ab").square().mean().backward()
        expected(rows(ONE_PROCESS).to(dtype), "ab").square().mean().backward()
        assert_close(gradients(model), gradients(expected), rtol=1e-5, atol=1e-6)
        optimizer.step()
        optimizer.zero_grad()
        torch.optim.SGD(expected.parameters(), lr=0.1).step()
        expected.zero_grad()
    assert_at_rest(model)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_group_of_several_modules_is_materialised_and_cast(
    world, dtype: torch.dtype | None
) -> None:
    world(2).run(materialise_a_group, dtype)


def test_a_group_of_which_only_a_part_was_moved_is_refused() -> None:
    with fake_world(2):
        with torch.device("meta"):
            model: Any = Planned()
        for group in ([model.a, model.b], model):
            library(FULLSHARD).fully_shard(group)
        model.a.to_empty(device="cpu")
        with pytest.raises(ConfigurationError, match="must be on one device; group 'Linear' has"):
            model(torch.ones(1, WIDTH), "ab")


# --- inputs that need no gradient --------------------------------------------------------------------


class Stem(nn.Module):
    """Integer input, a layer behind a detach, and one that sees a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.first, self.behind, self.constant, self.last = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )

    def forward(self, tokens: Tensor, cut: bool) -> Tensor:
        x = torch.tanh(self.first(self.embed(tokens)))
        y = torch.tanh(self.behind(x.detach() if cut else x))
        z = self.constant(torch.ones(1, WIDTH))
        result: Tensor = self.last(y + z) if cut else self.last(x + y + z)
        return result


def train_stem(api: str, reshard_after_forward: bool | None) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    model: Any = Stem()
    if api != ONE_PROCESS:
        for module in (*model.children(), model):
            library(api).fully_shard(module, reshard_after_forward=reshard_after_forward)
    tokens = (torch.arange(2 * dist.get_world_size()) * 3) % 7
    record = []
    for cut in (False, True, True, False):
        model.zero_grad()
        model(tokens if api == ONE_PROCESS else mine(tokens), cut).square().mean().backward()
        record.append(gradients(model))
        if cut:
            assert model.embed.weight.grad is None and model.first.weight.grad is None
    return record


@pytest.mark.parametrize("reshard_after_forward", [None, False])
def test_inputs_need_no_gradient(world, reshard_after_forward: bool | None) -> None:
    world(2).run(assert_all_agree, train_stem, reshard_after_forward)


# --- outputs that are views, or written to -----------------------------------------------------------


class Gives(nn.Module):
    """A layer whose output is a view, or none."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        if self.kind == "view":
            return y.view(-1, WIDTH)
        if self.kind == "slice":
            return y[..., :WIDTH]
        if self.kind == "chunks":
            return y.chunk(2, dim=-1)
        if self.kind == "own input":
            return y, x
        return y


class Takes(nn.Module):
    """Uses, and perhaps writes to, what another module gives."""

    def __init__(self, kind: str, in_place: bool) -> None:
        super().__init__()
        self.gives, self.in_place = Gives(kind), in_place
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = self.gives(torch.sin(x))
        parts = list(out) if isinstance(out, tuple) else [out]
        if self.in_place:
            parts[0] += 1
            parts[0].mul_(2)
        total: Tensor = sum(self.last(part[..., -WIDTH:]).square().mean() for part in parts)
        return total


def train_on_outputs(api: str, kind: str, in_place: bool) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    model: Any = Takes(kind, in_place)
    if api != ONE_PROCESS:
        for module in (model.gives, model.last, model):
            library(api).fully_shard(module, reshard_after_forward=True)
    record = []
    for step in range(2):
        model.zero_grad()
        x = rows(api, step).requires_grad_()
        model(x).backward()
        record.append(gradients(model))
    return record


@pytest.mark.parametrize("kind", ["view", "slice", "chunks", "own input"])
def test_outputs_may_be_views(world, kind: str) -> None:
    world(2).run(assert_all_agree, train_on_outputs, kind, False)


@pytest.mark.parametrize("kind", ["tensor", "own input"])
def test_outputs_may_be_written_to(world, kind: str) -> None:
    world(2).run(assert_all_agree, train_on_outputs, kind, True)


def as_one_process(kind: str) -> None:
    ours, expected = (train_on_outputs(api, kind, True) for api in (FULLSHARD, ONE_PROCESS))
    assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["view", "slice"])
def test_views_may_be_written_to_which_torch_cannot(world, kind: str) -> None:
    world(2).run(as_one_process, kind)


# --- methods beside forward --------------------------------------------------------------------------


class Codec(nn.Module):
    """Two methods, each with its own layer, and a forward that calls both."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))

    def decode(self, code: Tensor, *, scale: float = 1.0) -> Tensor:
        result: Tensor = self.outer(code) * scale
        return result

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x), scale=2.0)


class Uses(nn.Module):
    """Calls a module's methods, its forward, or both; with another layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.codec, self.middle = Codec(), nn.Linear(3, 3)

    def forward(self, x: Tensor, how: str) -> Tensor:
        if how == "forward":
            result: Tensor = self.codec(x)
        elif how == "methods":
            result = self.codec.decode(torch.tanh(self.middle(self.codec.encode(x))))
        elif how == "one":
            result = self.codec.encode(x)
        else:
            result = self.codec(self.codec.decode(self.codec.encode(x)))
        return result


def use_methods(
    api: str, ways: tuple[str, ...], reshard_after_forward: bool | None
) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    model: Any = Uses()
    if api != ONE_PROCESS:
        for module in (model.codec, model.middle, model):
            library(api).fully_shard(module, reshard_after_forward=reshard_after_forward)
        for name in ("encode", "decode"):
            library(api).register_fsdp_forward_method(model.codec, name)
    record = []
    for how in ways:
        model.zero_grad()
        if how == "without the model":
            codec, x = model.codec, rows(api)
            codec.decode(codec.encode(x), scale=3.0).square().mean().backward()
        else:
            model(rows(api), how).square().mean().backward()
        record.append(gradients(model))
    if api == FULLSHARD and reshard_after_forward is not False:
        assert_at_rest(model)
    return record


@pytest.mark.parametrize("reshard_after_forward", [None, False])
@pytest.mark.parametrize(
    "ways",
    [
        ("forward", "forward"),
        ("methods", "methods", "one", "methods"),
        ("forward", "both", "methods", "without the model", "both"),
    ],
    ids=" ".join,
)
def test_methods_call_each_other_and_are_called_by_forward(
    world, ways: tuple[str, ...], reshard_after_forward: bool | None
) -> None:
    world(2).run(assert_all_agree, use_methods, ways, reshard_after_forward)


# --- parameters of a module that is not called ----------------------------------------------------------


class Borrows(nn.Module):
    """Uses the weight of a module without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lender = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) @ self.lender.weight


def borrow(api: str) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    model: Any = Borrows()
    if api != ONE_PROCESS:
        for module in (model.layer, model.lender, model):
            library(api).fully_shard(module)
    record = []
    for step in range(3):
        model.zero_grad()
        if api != ONE_PROCESS:
            model.lender.unshard()
        model(rows(api, step)).square().mean().backward()
        record.append(gradients(model))
    return record


def test_a_module_unsharded_by_hand_stays_so_until_it_is_used(world) -> None:
    world(2).run(assert_all_agree, borrow)
