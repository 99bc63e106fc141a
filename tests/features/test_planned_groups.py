"""Models sharded by a plan train like others, whatever they are made of."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fullshard import FullyShardedDataParallel, GroupPlan, MixedPrecisionPolicy, plan_groups
from fullshard.engine.state import FSDPState, state_of
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.fake import fake_world
from tests.helpers.models import Block, ModelOptions, make_decoder, tokens_for
from tests.helpers.module_trees import Net, models
from tests.helpers.traffic import GATHER, REDUCE_SCATTER, Traffic
from tests.helpers.training import ONE_PROCESS, TORCH, gradients, mine, weights

PLAN, BY_HAND = "plan", "by hand"

# --- models of several kinds ----------------------------------------------------------------------


class Router(nn.Module):
    """Experts in a list, of which a row uses one; a rank may use few of them, and another one others."""

    def __init__(self, width: int = 6, num_experts: int = 5) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 9), nn.GELU(), nn.Linear(9, width))
            for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.detach()[:, 0] * 100).long() % len(self.experts)
        y = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            y = y.index_add(
                0, (chosen == index).nonzero().flatten(), self.experts[index](x[chosen == index])
            )
        return y


class MoELayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dense, self.moe = nn.LayerNorm(6), nn.Linear(6, 6), Router()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.dense(self.norm(x)))
        result: Tensor = x + y + self.moe(y)
        return result


class Rows(nn.Module):
    """Reduces the output of a body to a loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


class NanoGPT(nn.Module):
    """Attention of torch's, its parts in a dict, the head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        embedding = nn.Embedding(11, 8)
        self.transformer = nn.ModuleDict(
            {
                "wte": embedding,
                "h": nn.ModuleList(
                    nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
                    for _ in range(9)
                ),
                "ln_f": nn.LayerNorm(8),
            }
        )
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.lm_head.weight = embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.transformer["wte"](tokens)
        for layer in self.transformer["h"].children():
            x = layer(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Checkpointed(nn.Module):
    """Small layers, each within a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Block(ModelOptions()) for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.square().mean()


def cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for channels in range(1, 13):
        layers += [
            nn.Conv2d(channels, channels + 1, 3, padding=1),
            nn.GroupNorm(1, channels + 1),
            nn.ReLU(),
        ]
    return Rows(nn.Sequential(*layers))


def floats(step: int, rows: int) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(step))


def images(step: int, rows: int) -> Tensor:
    return torch.randn(rows, 1, 4, 4, generator=torch.Generator().manual_seed(step))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its batches, and what is to be planned for it."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Tensor] = floats
    options: dict[str, Any] = field(default_factory=dict)
    """Of `plan_groups`."""
    num_modules: list[int]
    """Modules of each planned group, the root's first."""
    differs: bool = False
    """Whether ranks use different parameters."""


CASES = {
    "tied decoder": Case(
        build=lambda: make_decoder(ModelOptions(depth=11, tied=True)),
        batch=tokens_for,
        num_modules=[1, 2, 2, 3, 2, 2],
    ),
    "nanoGPT": Case(build=NanoGPT, batch=tokens_for, num_modules=[1, 2, 2, 3, 2]),
    "CNN": Case(build=cnn, batch=images, num_modules=[1, 12, 3, 3, 2, 2, 2]),
    "MoE": Case(
        build=lambda: Rows(nn.Sequential(*[MoELayer() for _ in range(9)])),
        num_modules=[1, 2, 2, 3, 2],
        differs=True,
    ),
    "MoE, divided": Case(
        build=lambda: Rows(nn.Sequential(*[MoELayer() for _ in range(3)])),
        options={"min_bytes": 160, "max_bytes": 1000},
        num_modules=[1] * 10,
        differs=True,
    ),
    "checkpoints": Case(build=lambda: Checkpointed(False), num_modules=[1, 2, 2, 2, 2, 2]),
    "reentrant checkpoints": Case(build=lambda: Checkpointed(True), num_modules=[1, 2, 2, 2, 2, 2]),
}


def train(case: Case, how: str, **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of the second step, and the weights before it, whole."""
    torch.manual_seed(0)
    model: Any = case.build()
    plan = plan_groups(model, **case.options)
    assert [len(group.modules) for group in plan.groups] == case.num_modules, str(plan)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if how == PLAN:
        plan.apply(mesh=mesh, **options)
    elif how != ONE_PROCESS:
        name = "torch.distributed.fsdp" if how == TORCH else "fullshard"
        fully_shard = importlib.import_module(name).fully_shard
        for group in reversed(plan.groups):
            for name in group.modules:  # nothing merged
                fully_shard(model.get_submodule(name), mesh=mesh, **options)
    if case.differs and how != ONE_PROCESS:
        model.set_reduce_scatter_unused_params(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    for step in range(2):
        optimizer.step()
        optimizer.zero_grad()
        batch = case.batch(step, 2 * dist.get_world_size())
        model(batch if how == ONE_PROCESS else mine(batch)).backward()
    return gradients(model), weights(model)


def agree(name: str, *others: str, **options: Any) -> None:
    case = CASES[name]
    ours, expected = train(case, PLAN, **options), train(case, ONE_PROCESS)
    if case.differs:  # what no rank used has a gradient of zero here, and none in one process
        unused = ours[0].keys() - expected[0].keys()
        assert not any(ours[0].pop(key).any() for key in unused)
    assert_close(ours, expected, rtol=2e-5, atol=1e-6)
    for other in others:
        assert_equal(ours, train(case, other, **options))


@pytest.mark.parametrize("name", CASES)
def test_a_planned_model_trains_as_one_process_by_hand_and_torch_do(world, name: str) -> None:
    others: tuple[str, ...] = () if CASES[name].differs else (BY_HAND,)
    if name in ("nanoGPT", "checkpoints"):
        others = (TORCH,)  # equal to sharding by hand, so one of the two is enough
    world(2).run(agree, name, *others)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_planned_model_trains_on_any_number_of_ranks(world, num_ranks: int) -> None:
    world(num_ranks).run(agree, "tied decoder")


def test_options_are_passed_on(world) -> None:
    world(2).run(agree, "tied decoder", reshard_after_forward=False)


# --- what it saves --------------------------------------------------------------------------------


def test_a_merged_group_communicates_once_with_the_planned_bytes() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    with fake_world(2):
        model: Any = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(16)])
        plan = plan_groups(model, mp_policy=policy)
        plan.apply(mesh=init_device_mesh("cpu", (2,)))
        for _ in range(2):
            with Traffic() as traffic:
                model(torch.ones(2, 64)).sum().backward()
    num_bytes = plan.groups[1].num_bytes
    assert num_bytes == 2 * 64 * 64 * 2
    assert traffic.sizes(GATHER) == {num_bytes: 2 * 8}
    assert traffic.sizes(REDUCE_SCATTER) == {2 * num_bytes: 8}


# --- the wrapper ----------------------------------------------------------------------------------


def wrapped_equals_one_process(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    inner = case.build()
    policy = plan_groups(inner, **case.options).wrap_policy()
    model: Any = FullyShardedDataParallel(
        inner, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )
    assert len(FullyShardedDataParallel.fsdp_modules(model)) == sum(case.num_modules)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(mine(case.batch(0, 2 * dist.get_world_size()))).backward()
    optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        whole = {
            key.replace("_fsdp_wrapped_module.", ""): param.detach().clone()
            for key, param in model.named_parameters()
        }
    assert_close(whole, train(case, ONE_PROCESS)[1], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["nanoGPT", "CNN"])
def test_a_plan_is_a_policy_of_the_wrapper(world, name: str) -> None:
    world(2).run(wrapped_equals_one_process, name)


# --- all kinds of models, in a world of two ranks that is not there -------------------------------

quickly = settings(max_examples=15)
thresholds = (st.integers(1, 400), st.integers(0, 800))


def planned(model: Net, min_bytes: int, more: int) -> tuple[GroupPlan, list[FSDPState]]:
    """A plan, applied; and the states of its groups."""
    plan = plan_groups(model, min_bytes=min_bytes, max_bytes=min_bytes + more)
    assert plan == plan_groups(model, min_bytes=min_bytes, max_bytes=min_bytes + more)
    plan.apply(mesh=init_device_mesh("cpu", (2,)))
    states = []
    for group in plan.groups:
        (state,) = {state_of(model.get_submodule(name)) for name in group.modules}
        assert state is not None
        assert sum(len(g.params) for g in state.groups) == group.num_params
        states.append(state)
    return plan, states


def train_twice(model: Net) -> None:
    for _ in range(2):
        model(torch.ones(2, requires_grad=True)).sum().backward()


@quickly
@given(models(shared=True), *thresholds)
def each_parameter_is_in_one_group_and_there_when_it_is_used(
    model: Net, min_bytes: int, more: int
) -> None:
    params = {id(param): param for param in model.parameters()}
    plan, states = planned(model, min_bytes, more)
    assert sum(group.num_params for group in plan.groups) == len(params)
    assert plan.num_bytes == sum(4 * param.numel() for param in params.values())
    train_twice(model)
    assert not any(state.gathered for state in states)


def test_each_parameter_is_in_one_group_and_there_when_it_is_used() -> None:
    with fake_world(2):
        each_parameter_is_in_one_group_and_there_when_it_is_used()


@quickly
@given(models(shared=False), *thresholds)
def groups_have_the_target_stand_in_order_and_peak_as_planned(
    model: Net, min_bytes: int, more: int
) -> None:
    plan, states = planned(model, min_bytes, more)
    target = min(min_bytes, -(-plan.num_bytes // 8))
    for group in plan.groups[1:]:
        assert group.num_bytes >= target or "what is left" in group.reason
    order: list[FSDPState] = []

    def watch(module: nn.Module, *_: Any) -> None:
        state = state_of(module)
        if state is not None and state not in order:
            order.append(state)
        gathered = [
            group for state, group in zip(states, plan.groups, strict=True) if state.gathered
        ]
        assert sum(group.num_bytes for group in gathered) <= plan.peak_bytes, gathered

    for module in model.modules():
        module.register_forward_pre_hook(watch)
        module.register_full_backward_hook(watch)
    train_twice(model)
    assert order == states


def test_groups_have_the_target_stand_in_order_and_peak_as_planned() -> None:
    with fake_world(2):
        groups_have_the_target_stand_in_order_and_peak_as_planned()
