"""`AdamW8bit` has the same bits of state on every mesh, and AdamW's state in checkpoints."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard.checkpoint
from fullshard import (
    ConfigurationError,
    FullyShardedDataParallel,
    LifecycleError,
    ShardingStrategy,
    UnsupportedError,
    fully_shard,
    replicate,
)
from fullshard.optim import AdamW8bit
from fullshard.optim.eight_bit import step as block_step
from fullshard.optim.eight_bit.codes import (
    SMALLEST_SCALE,
    coded_means,
    coded_squares,
    decoded_means,
    decoded_squares,
    noise_of,
)
from fullshard.wrap import ModuleWrapPolicy

STEPS = 3
SIZE = 16
"""Of blocks."""
KEYS = ("", ".exp_avg", ".exp_avg_sq")


class Part(nn.Module):
    """A matrix whose rows are no multiple of blocks, one with less rows than ranks, and fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(7, 11))
        self.stack = nn.Parameter(torch.randn(3, 5, 4))
        self.narrow = nn.Parameter(torch.randn(2, 9))
        self.one = nn.Parameter(torch.randn(1))

    def forward(self, step: int) -> Tensor:
        return product(self, ("wide", "stack", "narrow", "one"), step)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Part()
        self.second = Part()
        self.rows = nn.Parameter(torch.randn(6, 32))  # two blocks each
        self.up = nn.Linear(5, 12)
        self.down = nn.Linear(12, 5)

    def forward(self, step: int) -> Tensor:
        linears = sum(product(each, ("weight", "bias"), step) for each in (self.up, self.down))
        return self.first(step) + self.second(step) + product(self, ("rows",), step) + linears


def product(module: Any, names: tuple[str, ...], step: int) -> Tensor:
    """Return a loss whose gradients are `gradient_of`. The wrapper's flat parameters leave no parameters on modules."""
    total = torch.zeros(())
    for name in names:
        tensor = getattr(module, name)
        factor = gradient_of(name, tensor.shape, step)
        if isinstance(tensor, DTensor):
            factor = DTensor.from_local(factor, tensor.device_mesh, (Replicate(),), run_check=False)
        found = (tensor * factor).sum()
        total = total + (found.full_tensor() if isinstance(found, DTensor) else found)
    return total


def gradient_of(name: str, shape: Any, step: int) -> Tensor:
    """Return values with few bits, so that averages over ranks are exact."""
    seed = torch.Generator().manual_seed(1000 * step + len(name))
    values = (
        torch.randn(tuple(shape), generator=seed) * torch.randn(tuple(shape), generator=seed).exp()
    )
    return values.bfloat16().float()


def along_the_last_dimension(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


def sharded(kind: str) -> nn.Module:
    model: Any = Model()
    if kind == "plain":
        return model
    mesh, placement = None, None
    if kind.startswith(("replicas", "divided")):
        shape = (2, 2) if dist.get_world_size() == 4 else (dist.get_world_size(), 1)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    if kind.endswith("wrapper"):
        strategy = ShardingStrategy.HYBRID_SHARD if mesh else ShardingStrategy.FULL_SHARD
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Part}),
            device_id=torch.device("cpu"),
            device_mesh=mesh,
            sharding_strategy=strategy,
            use_orig_params="flat" not in kind,
        )
    if kind == "divided, replicate":
        return replicate(model)
    if kind == "tensor parallel":
        axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh = axes["dp"]
        parallelize_module(model, axes["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind.endswith("last dimension"):
        placement = along_the_last_dimension
    for part in (model.first, model.second):
        fully_shard(part, mesh=mesh, shard_placement_fn=placement)
    return fully_shard(model, mesh=mesh, shard_placement_fn=placement)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Any) -> None:
    for step in steps:
        model.zero_grad()
        model(step).backward()
        optimizer.step()


def full(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Return parameters and averages."""
    if isinstance(model, FullyShardedDataParallel):
        states = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)
        found = {f"{n}.{k}": v for n, s in states["state"].items() for k, v in s.items()}
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            found |= {
                name.replace("_fsdp_wrapped_module.", ""): param.detach().clone()
                for name, param in model.named_parameters()
            }
        return found
    found = dict(model.named_parameters())
    for name, param in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[param].items()}
    return {
        n: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone()
        for n, v in found.items()
    }


def trained(kind: str, steps: int = STEPS) -> dict[str, Tensor]:
    model = sharded(kind)
    optimizer = made(model, over=kind.startswith("divided"))
    # With parts of one block in several batches.
    small = {"cpu": 40} if kind.endswith("last dimension") else {}
    with patch.dict(block_step._CHUNK_NUMEL, small):
        train(model, optimizer, range(steps))
        return full(model, optimizer)


def different(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def several(*kinds: str) -> dict[str, dict[str, Tensor]]:
    return {kind: trained(kind) for kind in kinds}


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [
        (1, ("wrapper", "shards")),
        (2, ("wrapper", "shards")),
        (3, ("wrapper", "flat wrapper", "shards", "last dimension", "divided, replicate")),
        (4, ("wrapper", "shards", "last dimension", "replicas", "tensor parallel")),
    ],
    ids=str,
)
def test_every_mesh_has_the_same_bits(world, ranks: int, kinds: tuple[str, ...]) -> None:
    expected = trained("plain")
    for of_rank in world(ranks).run(several, *kinds):
        for kind, found in of_rank.items():
            assert different(found, expected) == [], kind


# --- state that replicas divide ---------------------------------------------------------------------


def divided() -> dict[str, tuple[int, int]]:
    """Train with and without; compare, and return the bytes of state."""
    found = {}
    for api in ("", " wrapper", " flat wrapper", " last dimension"):
        usual, other = ((sharded("divided" + api)) for _ in range(2))
        optimizers = made(usual), made(other, over=True)
        for model, optimizer in zip((usual, other), optimizers, strict=True):
            train(model, optimizer, range(8 if not api else STEPS))
        found[api] = optimizers[0].state_bytes, optimizers[1].state_bytes
        states = [full(usual, optimizers[0]), full(other, optimizers[1])]
        assert different(states[1], states[0]) == [], api
        # State dicts gather, and leave each replica its part.
        saved = optimizers[1].state_dict()
        optimizers[0].load_state_dict(saved)
        for model, optimizer in zip((usual, other), optimizers, strict=True):
            train(model, optimizer, range(8, 9))
        states = [full(usual, optimizers[0]), full(other, optimizers[1])]
        assert different(states[1], states[0]) == [], api
    # Not as small, so that the edges of shards do not count.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    large = fully_shard(nn.Linear(90, 99), mesh=mesh)
    optimizers = made(large), made(large, over=True)
    large(torch.ones(1, 90)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    found["large"] = optimizers[0].state_bytes, optimizers[1].state_bytes
    if dist.get_rank() > 1:  # one replica counts a step more
        strip, number = optimizers[1]._blocks.places[large.bias]
        strip.counts[number] += 1
    with pytest.raises(LifecycleError, match=r"steps by replica \[1, 2\]"):
        optimizers[1].state_dict()
    return found


def test_replicas_divide_the_state_and_have_the_same_bits(world) -> None:
    by_rank = world(4).run(divided)
    for api, (usual, _) in by_rank[0].items():
        parts = [by_rank[rank][api][1] for rank in (0, 2)]
        assert sum(parts) == pytest.approx(usual, rel=0.02), api
        assert api != "large" or max(parts) < 0.51 * usual


# --- checkpoints ------------------------------------------------------------------------------------


def made(model: nn.Module, kind: Any = AdamW8bit, over: bool = False) -> Any:
    options: dict[str, Any] = {}
    if kind is AdamW8bit:
        options = {"block_size": SIZE, "shard_over_replicas": over, "bucket_numel": 500}
    return kind(model.parameters(), lr=0.02, weight_decay=0.1, **options)


def continued(kind: str, folder: Path, first: int, last: int) -> dict[str, Tensor]:
    """Go on with a run from a checkpoint, if there is one, up to a step; save it there."""
    model = sharded(kind)
    optimizer = made(model, over=kind.startswith("divided"))
    if first:
        fullshard.checkpoint.load(folder / str(first), model=model, optimizer=optimizer)
    train(model, optimizer, range(first, last))
    fullshard.checkpoint.save(folder / str(last), model=model, optimizer=optimizer)
    divided = optimizer.shards_over_replicas
    assert optimizer._is_split is not divided, "the states of all replicas would stay in memory"
    return full(model, optimizer)


def test_a_run_goes_on_over_other_ranks_to_the_last_bit(world, tmp_path: Path) -> None:
    world(2).run(continued, "shards", tmp_path, 0, 1)
    world(3).run(continued, "flat wrapper", tmp_path, 1, 2)
    for found in world(4).run(continued, "replicas", tmp_path, 2, STEPS):
        assert different(found, trained("plain")) == []


def test_a_run_goes_on_with_and_without_divided_state(world, tmp_path: Path) -> None:
    world(4).run(continued, "divided", tmp_path, 0, 1)
    world(3).run(continued, "shards", tmp_path, 1, 2)
    for found in world(4).run(continued, "divided flat wrapper", tmp_path, 2, STEPS):
        assert different(found, trained("plain")) == []


def saved_by_torch(folder: Path) -> None:
    model = sharded("divided")
    optimizer = made(model, over=True)
    train(model, optimizer, range(2))
    state = get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=folder)


def loaded_by_torch(folder: Path) -> list[dict[str, Tensor]]:
    """Go on by way of the wrapper's state dicts, and from torch's checkpoint."""
    old = sharded("divided wrapper")
    saving = made(old, over=True)
    train(old, saving, range(2))
    new = sharded("wrapper")
    loading = made(new)
    named = FullyShardedDataParallel.optim_state_dict(old, saving)
    loading.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(new, loading, named))
    new.load_state_dict(old.state_dict())
    train(new, loading, range(2, STEPS))

    model = sharded("divided last dimension")
    optimizer = made(model, over=True)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(model, optimizer, range(2, STEPS))
    return [full(model, optimizer), full(new, loading)]


def test_state_dicts_of_both_apis_and_torch_s_checkpoints_hold_it(world, tmp_path: Path) -> None:
    world(2).run(saved_by_torch, tmp_path)
    for of_rank in world(3).run(loaded_by_torch, tmp_path):
        for found in of_rank:
            assert different(found, trained("plain")) == []


def converted(folder: Path) -> list[list[str]]:
    """Return what differs after a way from one class to the other, in checkpoints and in state dicts."""
    found = []
    for one, other in ((torch.optim.AdamW, AdamW8bit), (AdamW8bit, torch.optim.AdamW)):
        model = sharded("shards")
        saving = made(model, one)
        train(model, saving, range(2))
        expected = full(model, saving)
        fullshard.checkpoint.save(folder / one.__name__, model=model, optimizer=saving)
        loading = made(model, other)
        fullshard.checkpoint.load(folder / one.__name__, model=model, optimizer=loading)
        found.append(different(full(model, loading), expected))
        loading = made(model, other)
        loading.load_state_dict(saving.state_dict())
        found.append(different(full(model, loading), expected))
        train(model, loading, range(2, 3))
    return found


def test_state_of_adamw_is_loaded_as_it_is_and_the_other_way_round(world, tmp_path: Path) -> None:
    for found in world(2).run(converted, tmp_path):
        assert found == [[], [], [], []]


# --- what is not as usual -------------------------------------------------------------------------


def unusual() -> dict[str, Any]:
    """Gradients that are missing, NaN and infinite, at the end of a rank's rows; what a rank finds afterwards."""
    found = {}
    for kind in ("shards", "wrapper", "divided"):
        model = sharded(kind)
        named = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in model.named_parameters()}
        optimizer = made(model, over=kind == "divided")
        train(model, optimizer, range(1))
        model.zero_grad()
        model(1).backward()
        before = full(model, optimizer)
        named["first.narrow"].grad = None
        for name, value in (("first.wide", float("nan")), ("second.wide", float("inf"))):
            gradient = named[name].grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if dist.get_rank() == 0 or kind == "divided":  # replicas have the same gradients
                local.flatten()[-1] = value
        if dist.get_rank() == 1 and kind == "shards":
            named["second.stack"].grad = None  # which others have
        optimizer.step()
        after = full(model, optimizer)
        same = {n for n in before if torch.equal(before[n], after[n])} - {"second.stack.step"}
        train(model, optimizer, range(2, STEPS))
        after = full(model, optimizer)
        nans = {n: int(v.isnan().sum()) for n, v in after.items() if v.isnan().any()}
        found[kind] = (nans, same)
    return found


def test_nan_touches_no_neighbour_and_a_missing_gradient_nothing(world) -> None:
    wide = {f"{part}.wide{key}": 1 for part in ("first", "second") for key in KEYS}
    same = {f"first.narrow{key}" for key in (*KEYS, ".step")}
    for found in world(3).run(unusual):
        assert found == dict.fromkeys(("shards", "wrapper", "divided"), (wide, same))


def loaded(into: Any, source: torch.optim.Optimizer) -> Any:
    into.load_state_dict(source.state_dict())
    return into


def refusals() -> list[str]:
    found = []

    def refuse(make: Any, kind: type[Exception]) -> None:
        with pytest.raises(kind) as caught:
            make()
        found.append(str(caught.value))

    complex_ = fully_shard(nn.Linear(3, 4, dtype=torch.complex64))
    refuse(lambda: AdamW8bit(complex_.parameters()), UnsupportedError)
    for size in (100, 256.0):
        refuse(lambda: AdamW8bit(nn.Linear(3, 4).parameters(), block_size=size), ConfigurationError)  # type: ignore[arg-type]  # noqa: B023
    groups = [{"params": nn.Linear(3, 4).parameters(), "amsgrad": True}]
    refuse(lambda: AdamW8bit(groups), ConfigurationError)
    later = AdamW8bit(nn.Linear(3, 4).parameters())
    refuse(lambda: later.add_param_group({"params": complex_.parameters()}), UnsupportedError)
    assert len(later.param_groups) == 1
    embedding = nn.Embedding(4, 3, sparse=True)
    with pytest.raises(ConfigurationError):
        loaded(later, torch.optim.AdamW(later.param_groups[0]["params"], amsgrad=True)).step()
    sparse = AdamW8bit(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    refuse(sparse.step, UnsupportedError)
    linear = fully_shard(nn.Linear(3, 4))
    wrong = AdamW8bit(linear.parameters())
    wrong.state[linear.weight] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(4, 3)}
    wrong.state[linear.bias] = dict.fromkeys(("step", "exp_avg", "exp_avg_sq"), torch.zeros(4))
    refuse(wrong.step, ConfigurationError)
    return found


def test_what_it_cannot_update_is_refused_with_all_names_on_every_rank(world) -> None:
    first, second = world(2).run(refusals)
    assert first == second
    complex_, size, no_integer, amsgrad, later, sparse, wrong = first
    assert "weight: torch.complex64" in complex_ and "bias: torch.complex64" in complex_
    assert later == complex_
    assert "a power of 2" in size and "100" in size and "got 256.0" in no_integer
    assert "no amsgrad" in amsgrad
    assert "shape (4, 3)" in sparse and "sparse=False" in sparse
    assert "parameter 0" in wrong and "without exp_avg_sq" in wrong and "parameter 1" in wrong


# --- one process ------------------------------------------------------------------------------------


def changes(make: Any, options: dict[str, Any]) -> list[Tensor]:
    """Return what each of two steps has added to the parameters."""
    model = Model()
    optimizer = make(model.parameters(), **copy.deepcopy(options))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    found = [nn.utils.parameters_to_vector(model.parameters()).detach()]
    for number in range(2):
        model.zero_grad()
        assert optimizer.step(closure_of(model, number)) is not None
        schedule.step()
        found.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    return [after - before for before, after in itertools.pairwise(found)]


@pytest.mark.parametrize(
    "options",
    [
        {"lr": torch.tensor(0.02), "maximize": True},
        {"betas": (0.5, 0.5), "weight_decay": 0.5, "eps": 1e-3},
    ],
    ids=str,
)
def test_it_is_near_adamw_with_any_options(options: dict[str, Any]) -> None:
    """The first step is AdamW's, because nothing is in codes yet."""
    expected, found = changes(torch.optim.AdamW, options), changes(AdamW8bit, options)
    errors = [((e - f).norm() / e.norm()).item() for e, f in zip(expected, found, strict=True)]
    assert errors[0] < 1e-5 < errors[1] < 0.05


def closure_of(model: nn.Module, step: int) -> Any:
    def closure() -> Tensor:
        loss = model(step)
        loss.backward()
        return loss

    return closure


def test_state_takes_about_two_bytes_and_16_bit_parameters_keep_theirs_in_fp32() -> None:
    linear = nn.Linear(512, 512, dtype=torch.bfloat16)
    optimizer = AdamW8bit(linear.parameters())
    linear(torch.ones(1, 512, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.step()
    assert optimizer.state_bytes < 2.1 * sum(p.numel() for p in linear.parameters())
    saved = optimizer.state_dict()
    other = AdamW8bit(linear.parameters())
    other.load_state_dict(saved)
    assert torch.equal(other.state[linear.weight]["exp_avg"], saved["state"][0]["exp_avg"])
    assert saved["state"][0]["exp_avg"].dtype == torch.float32
    for each in (optimizer, other, copy.deepcopy(other)):
        weight = each.param_groups[0]["params"][0]
        weight.grad = torch.ones_like(weight)
        each.step()
        assert each.state[weight]["step"] == 3


def test_codes_are_exact_and_their_noise_has_the_right_mean() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    none = torch.zeros(256, dtype=torch.int32)
    for scale in torch.tensor([SMALLEST_SCALE, 1e-12, 0.3, 1.0, 3.7, 1e30, 3.4e38]):
        # Products are not exact, but never wrong by as much as half of what is rounded away.
        nearest = none + (0x8000 << 16 | 0x8000) - (1 << 32)
        means, squares = decoded_means(codes) * scale, decoded_squares(codes) * scale
        assert torch.equal(coded_means(means, scale, nearest.int()), codes)
        assert torch.equal(coded_squares(squares, scale, nearest.int()), codes)
    values, seed = torch.full((1 << 16,), 0.71), torch.tensor(7, dtype=torch.int32)
    noise = noise_of(torch.arange(1 << 16, dtype=torch.int32), seed)
    one = torch.ones(())
    for found in (
        decoded_means(coded_means(-values, one, noise)).neg(),
        decoded_squares(coded_squares(values, one, noise)),
    ):
        assert len(found.unique()) == 2
        assert abs(found.mean().item() - 0.71) < 1e-3
    lost = (
        torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0]) * -one
    )  # NaNs of both signs
    lost[3] = lost[2].view(torch.int32).bitwise_xor(-(1 << 31)).view(torch.float32)
    # Both are rounded by bits of their own: one up, the other down.
    between = torch.tensor([0.7])
    for bits, ups in ((0x0000FFFF, (1, 0)), (-0x10000, (0, 1))):
        for coded, up in zip((coded_means, coded_squares), ups, strict=True):
            found, down = (
                coded(between, one, torch.tensor([each], dtype=torch.int32)) for each in (bits, 0)
            )
            assert int(found) - int(down) == up
    for noise in (none[:4], none[:4] - 1):
        assert coded_means(lost, one, noise).tolist() == [128] * 4
        assert coded_squares(lost.abs(), one, noise).tolist() == [255] * 4
        assert coded_squares(lost[2:], one, noise[2:]).tolist() == [255] * 2
    tiny = torch.tensor([1e-9, 1e-12, 0.0])
    assert coded_means(tiny, one, none[:3]).tolist() == [0, 0, 0]
    assert coded_squares(tiny, one, none[:3]).tolist() == [14, 1, 0]
