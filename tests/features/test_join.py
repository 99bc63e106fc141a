"""`fullshard.join`: ranks run out of batches at different times, and only those that have data count."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    replicate,
)
from fullshard.engine.state import named_states
from fullshard.errors import DivergenceError
from fullshard.mesh.axes import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.threads import run_threads
from tests.helpers.training import gradients, weights
from tests.helpers.wrapping import CPU

BF16, FP32 = torch.bfloat16, torch.float32


class Net(nn.Module):
    """Two groups when sharded, and a 0-d parameter, which all ranks hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        generator = torch.Generator().manual_seed(0)  # threads share torch's own
        for param in (*self.first.parameters(), *self.second.parameters()):
            nn.init.uniform_(param, -0.5, 0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.tanh(self.first(x))) * self.scale
        return result


def batch_of(rank: int, number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return {"x": torch.randn(2, 3, generator=generator)}


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    result: Tensor = model(batch.pop("x")).float().square().mean()  # a repeated batch has it again
    return result


# --- ways to shard ----------------------------------------------------------------------------------


def grid() -> Any:
    shape = (2, dist.get_world_size() // 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("r", "s"))


def sharded(**options: Any) -> Any:
    model = Net()
    mesh = options.pop("mesh", None) or init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.first, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def on_two_meshes() -> Any:
    over_all = FSDPMeshInfo(init_device_mesh("cpu", (dist.get_world_size(),)), shard_mesh_dim=0)
    hybrid = HSDPMeshInfo(grid(), shard_mesh_dim=1, replicate_mesh_dim=0)
    placements = {(5,): ShardPlacementResult(None, over_all)}
    return sharded(
        mesh=grid(),
        shard_placement_fn=lambda p: placements.get(p.shape, ShardPlacementResult(None, hybrid)),
    )


def replicated() -> Any:
    model = Net()
    replicate(model.first)
    return replicate(model)


def wrapped(**options: Any) -> Any:
    model: Any = Net()
    del model.scale  # a flat parameter holds none that is 0-d
    model.scale = nn.Parameter(torch.full((1,), 1.5))
    model.first = FullyShardedDataParallel(model.first, device_id=CPU, **options)
    return FullyShardedDataParallel(model, device_id=CPU, **options)


def averaging_hook(state: object, gradient: Tensor, output: Tensor) -> None:
    dist.reduce_scatter_tensor(output, gradient)
    output.div_(dist.get_world_size())


def wrapped_with_hook() -> Any:
    model = wrapped(use_orig_params=True)
    model.register_comm_hook(None, averaging_hook)
    return model


NARROW = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
NARROW_WIRE = MixedPrecisionPolicy(reduce_dtype=FP32, wire_dtype=BF16)
NARROW_WRAPPED = MixedPrecision(param_dtype=BF16, reduce_dtype=FP32)
HALF_SUMS = MixedPrecisionPolicy(reduce_dtype=torch.float16)


@dataclass(frozen=True)
class Way:
    """How a model is sharded."""

    make: Callable[[], Any]
    tolerance: float = 1e-6
    partial_sums: bool = False
    """Whether accumulation reduces over shards each time, and over replicas in the end."""


WAYS = {
    "fully_shard": Way(sharded),
    "offloaded": Way(lambda: sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "mixed precision": Way(lambda: sharded(mp_policy=NARROW), 3e-2),
    "narrow wire": Way(lambda: sharded(mp_policy=NARROW_WIRE), 3e-2),
    "half sums": Way(lambda: sharded(mp_policy=HALF_SUMS), 3e-3),
    "replicate": Way(replicated),
    "wrapper": Way(wrapped),
    "wrapper, original parameters": Way(lambda: wrapped(use_orig_params=True)),
    "wrapper, mixed precision": Way(lambda: wrapped(mixed_precision=NARROW_WRAPPED), 3e-2),
    "NO_SHARD": Way(lambda: wrapped(sharding_strategy=ShardingStrategy.NO_SHARD)),
    "communication hook": Way(wrapped_with_hook),
    "hybrid": Way(lambda: sharded(mesh=grid())),
    "hybrid, partial sums": Way(lambda: sharded(mesh=grid()), partial_sums=True),
    "two meshes": Way(on_two_meshes),
    "HYBRID_SHARD": Way(
        lambda: wrapped(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=grid())
    ),
}
WAYS_BY_WORLD = {
    2: ["offloaded", "mixed precision", "wrapper", "wrapper, mixed precision", "NO_SHARD"],
    3: ["fully_shard", "narrow wire", "half sums", "replicate", "NO_SHARD", "communication hook"],
    4: [
        "wrapper, original parameters",
        "hybrid",
        "hybrid, partial sums",
        "two meshes",
        "HYBRID_SHARD",
    ],
}

# --- training ---------------------------------------------------------------------------------------


def own_batches(counts: Sequence[int]) -> Iterator[dict[str, Tensor]]:
    rank = dist.get_rank()
    return (batch_of(rank, number) for number in range(1, counts[rank] + 1))


def whole_weights(model: Any) -> dict[str, Tensor]:
    if not isinstance(model, FullyShardedDataParallel):
        return weights(model)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        found = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in model.named_parameters()}
        return {name: param.detach().clone() for name, param in found.items()}


def accumulating(model: Any, last: bool, partial_sums: bool) -> AbstractContextManager[None]:
    """Let the next backward reduce if it is the last of a step, and otherwise only add up."""
    if isinstance(model, FullyShardedDataParallel):
        return nullcontext() if last else model.no_sync()
    if partial_sums:
        model.set_requires_all_reduce(last)
    else:
        model.set_requires_gradient_sync(last)
    return nullcontext()


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    lr = {"SGD": 0.3, "AdamW": 0.03}[name]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(model.parameters(), lr=lr)
    return optimizer


ADDED_UP = (1, 4)
"""Numbers of batches whose gradients are only added up; a step is taken after each of the others."""


def train(
    model: Any,
    batches: Any,
    added_up: Sequence[int] = (),
    name: str = "SGD",
    way: Way | None = None,
) -> list[dict[str, Tensor]]:
    """Train on all batches; return the gradients of each step where they are not flat, and the weights at the end."""
    optimizer = optimizer_of(model, name)
    found = []
    for number, batch in enumerate(batches, 1):
        with accumulating(model, number not in added_up, way is not None and way.partial_sums):
            loss_of(model, batch).backward()
        if number not in added_up:
            if not isinstance(model, FullyShardedDataParallel):
                found.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
    return [*found, whole_weights(model)]


def train_alone(
    counts: Sequence[int], added_up: Sequence[int] = (), name: str = "SGD"
) -> list[dict[str, Tensor]]:
    """The same in one process, which sees the data of all ranks that have any."""
    model = Net()
    optimizer = optimizer_of(model, name)
    found = []
    for number in range(1, max(counts) + 1):
        having = [rank for rank, count in enumerate(counts) if number <= count]
        for rank in having:
            (loss_of(model, batch_of(rank, number)) / len(having)).backward()
        if number not in added_up:
            found.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
    return [*found, weights(model)]


def check(found: list[Any], expected: list[Any], tolerance: float, *case: object) -> None:
    """Compare the last steps: all of them, or the weights alone."""
    expected = expected[-len(found) :]
    assert len(found) == len(expected), case
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        try:
            shaped = {key: ours[key].reshape_as(theirs[key]) for key in theirs}
            assert_close(shaped, theirs, rtol=tolerance, atol=tolerance)
        except AssertionError as error:
            raise AssertionError(f"{case}, step {step}") from error


# --- the same as one process ------------------------------------------------------------------------

COUNTS = {2: (1, 5), 3: (1, 5, 4), 4: (4, 5, 1, 0)}
"""Numbers of batches by rank: ranks run out between batches whose gradients are added up, too."""


def join_equals_one_process(ways: Sequence[str]) -> None:
    counts = COUNTS[dist.get_world_size()]
    expected = train_alone(counts, ADDED_UP)
    for name in ways:
        way = WAYS[name]
        model = way.make()
        with fullshard.join(model, own_batches(counts)) as batches:
            found = train(model, batches, ADDED_UP, way=way)
        check(found, expected, way.tolerance, name, counts)


@pytest.mark.parametrize(("ranks", "ways"), WAYS_BY_WORLD.items())
def test_gradients_are_those_of_one_process_that_saw_the_same_data(
    world: Any, ranks: int, ways: list[str]
) -> None:
    world(ranks).run(join_equals_one_process, ways)


RANDOM_COUNTS = {2: [(0, 3), (4, 2)], 3: [(0, 2, 0), (3, 0, 1), (2, 4, 4)], 4: [(0, 0, 3, 1)]}


def join_equals_one_process_with_adamw() -> None:
    for counts in RANDOM_COUNTS[dist.get_world_size()]:
        expected = train_alone(counts, name="AdamW")
        model = sharded()
        with fullshard.join(model, own_batches(counts)) as batches:
            found = train(model, batches, name="AdamW")
        check(found, expected, 1e-5, counts)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_rank_may_have_any_number_of_batches(world: Any, ranks: int) -> None:
    world(ranks).run(join_equals_one_process_with_adamw)


def without_a_difference() -> None:
    counts = (3,) * dist.get_world_size()
    for name in ("fully_shard", "half sums", "wrapper", "replicate"):
        plain, joined = WAYS[name].make(), WAYS[name].make()
        expected = train(plain, own_batches(counts), ADDED_UP)
        with fullshard.join(joined, own_batches(counts)) as batches:
            assert_equal(train(joined, batches, ADDED_UP), expected)


def test_with_equally_many_batches_every_bit_is_the_same(world: Any) -> None:
    world(3).run(without_a_difference)


# --- what counts ------------------------------------------------------------------------------------


class Poisoned(Net):
    """Gives NaN for a batch that it has seen before."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[float] = set()

    def forward(self, x: Tensor) -> Tensor:
        key = float(x.flatten()[0])
        again = key in self.seen
        self.seen.add(key)
        return super().forward(x) * (float("nan") if again else 1.0)


def nan_does_not_count() -> None:
    model = fully_shard(Poisoned())
    counts = (1, 3)
    with fullshard.join(model, own_batches(counts)) as batches:
        found = train(model, batches, added_up=(2,))
    check(found, train_alone(counts, (2,)), 1e-6)


def test_nan_of_a_repeated_batch_does_not_count(world: Any) -> None:
    world(2).run(nan_does_not_count)


def reduced_gradients_stay() -> None:
    """A gradient that is there already is not averaged anew over fewer ranks."""
    counts = (2, 1, 1)
    for name in ("NO_SHARD", "fully_shard", "wrapper, original parameters"):
        model = WAYS[name].make()
        with fullshard.join(model, own_batches(counts)) as batches:
            for number, batch in enumerate(batches, 1):
                with accumulating(model, number == 1, False):
                    loss_of(model, batch).backward()
        with accumulating(model, True, False):
            (0 * loss_of(model, batch_of(0, 1))).backward()
        optimizer_of(model, "SGD").step()
        check([whole_weights(model)], train_alone(counts, added_up=(1,)), 1e-6, name)


def test_reduced_gradients_are_not_averaged_over_fewer_ranks_again(world: Any) -> None:
    world(3).run(reduced_gradients_stay)


def clipped_and_hooked() -> None:
    counts, alone, seen = (1, 0, 1), Net(), []
    for rank in (0, 2):
        (loss_of(alone, batch_of(rank, 1)) / 2).backward()
    expected = gradients(alone)
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9)
    model = sharded()
    for factor, times in ((None, 1), (1.0, 2), (6.0, 1 / 3)):
        if factor is not None:
            model.set_gradient_divide_factor(factor)
            model.first.set_gradient_divide_factor(factor)
        with fullshard.join(model, own_batches(counts)) as batches:
            for batch in batches:
                loss_of(model, batch).backward()
        if factor is None:
            assert_close(fullshard.clip_grad_norm_(model.parameters(), 1e9), norm, 1e-6, 1e-6)
        check([gradients(model)], [{k: g * times for k, g in expected.items()}], 1e-6, factor)
        model.zero_grad()
    hooked = sharded(mesh=init_device_mesh("cpu", (3, 1), mesh_dim_names=("r", "s")))
    hooked.set_all_reduce_hook(lambda reduced: seen.append(reduced.sum()))
    with fullshard.join(hooked, own_batches(counts)) as batches:
        for batch in batches:
            loss_of(hooked, batch).backward()
    check([gradients(hooked)], [expected], 1e-6, "hook")
    mean_of_all = sum(g.sum() for n, g in expected.items() if "first" not in n) * 2 / 3
    assert_close(seen, [mean_of_all], 1e-5, 1e-6)


def test_clipping_divide_factors_and_reduce_hooks_do_as_documented(world: Any) -> None:
    world(3).run(clipped_and_hooked)


def joined_and_guarded() -> None:
    """Steps of two batches, drawn within the guarded step. In the second one, rank 0 fails when it has drawn one."""
    model, counts = sharded(), (6, 3)
    optimizer = optimizer_of(model, "SGD")
    with fullshard.join(model, own_batches(counts)) as batches:
        source = iter(batches)
        for number in range(3):
            with fullshard.guarded_step(model, on_error="skip") as step:
                for last in (False, True):
                    batch = next(source)
                    with accumulating(model, last, False):
                        loss_of(model, batch).backward()
                    if number == 1 and dist.get_rank() == 0:
                        raise MemoryError
            assert step.failed == (number == 1)
            if not step.failed:
                optimizer.step()
                optimizer.zero_grad()
        assert len(list(source)) == 1
    alone = Net()
    optimizer = optimizer_of(alone, "SGD")
    for step_ in [[(0, 1), (1, 1)], [(0, 2), (1, 2)]], [[(0, 4)], [(0, 5)]]:
        for microbatch in step_:
            for rank, number in microbatch:
                (loss_of(alone, batch_of(rank, number)) / len(microbatch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    check([whole_weights(model)], [weights(alone)], 1e-6)


def test_guarded_steps_that_fail_are_left_out(world: Any) -> None:
    world(2).run(joined_and_guarded)


# --- the block --------------------------------------------------------------------------------------


def what_a_program_is_told() -> tuple[Any, ...]:
    model, told = sharded(), []
    data = [[batch_of(0, 1), batch_of(0, 2)], [batch_of(1, 1)]][dist.get_rank()]
    with fullshard.join(model, data) as batches:
        for _epoch in range(2):
            for batch in batches:
                told.append((batches.active, batches.active_ranks, float(batch["x"].sum())))
        told.append((batches.active, batches.active_ranks))
    return tuple(told)


def test_programs_are_told_whose_batches_count_in_every_epoch(world: Any) -> None:
    sums = [[float(batch_of(rank, n)["x"].sum()) for n in (1, 2)] for rank in (0, 1)]
    first, second = world(2).run(what_a_program_is_told)
    assert first == (*[(True, 2, sums[0][0]), (True, 1, sums[0][1])] * 2, (False, 0))
    assert second == (*[(True, 2, sums[1][0]), (False, 1, sums[1][0])] * 2, (False, 0))


def settings_of(model: nn.Module) -> list[Any]:
    return [group.reduction.settings for state in named_states(model) for group in state.groups]


def leave_in_several_ways() -> None:
    model, counts = sharded(), (3, 1)
    before = settings_of(model)
    with pytest.raises(KeyError), fullshard.join(model, own_batches(counts)) as batches:
        for _ in batches:
            if batches.active_ranks < 2:
                raise KeyError("in the program")
    assert settings_of(model) == before
    with pytest.raises(fullshard.LifecycleError, match="in its block only"):
        next(iter(batches))
    with fullshard.join(model, own_batches((0, 0))) as batches:
        assert not list(batches)
    with fullshard.join(model, own_batches((2, 1))) as outer:
        for batch in outer:
            with fullshard.join(model, own_batches((1, 2))) as inner:
                for _ in inner:
                    pass
            model.zero_grad()
            loss_of(model, batch).backward()
            with pytest.raises(fullshard.LifecycleError, match="entered again"):
                outer.__enter__()
    alone = Net()
    loss_of(alone, batch_of(0, 2)).backward()
    check([gradients(model)], [gradients(alone)], 1e-6)
    with pytest.raises(fullshard.ConfigurationError, match="no parameter of this Linear"):
        fullshard.join(nn.Linear(1, 1), [])


def test_models_are_as_before_however_a_block_is_left(world: Any) -> None:
    world(2).run(leave_in_several_ways)


def faulty(rank: int) -> Iterator[dict[str, Tensor]]:
    yield batch_of(rank, 1)
    if rank == 1:
        raise ValueError("a bad sample")
    yield batch_of(rank, 2)


def faulty_data() -> None:
    model = sharded()
    with fullshard.join(model, faulty(dist.get_rank())) as batches:
        for batch in batches:
            loss_of(model, batch).backward()


def unpicklable() -> None:
    lock: list[Any] = [] if dist.get_rank() in (1, 3) else [threading.Lock()]
    with fullshard.join(sharded(mesh=grid()), lock) as batches:
        next(iter(batches))


def test_data_that_fails_on_one_rank_ends_all(world: Any) -> None:
    first, second, third = world(3).outcomes(faulty_data)
    assert isinstance(second, ValueError)
    for other in (first, third):
        assert isinstance(other, DivergenceError)
        assert "rank 1: ValueError: a bad sample" in str(other)


def test_a_batch_that_cannot_be_lent_ends_all(world: Any) -> None:
    outcomes = world(4).outcomes(unpicklable)
    assert {type(each) for each in outcomes} == {fullshard.UsageError}
    assert all("picklable; that of rank " in str(each) for each in outcomes)


def in_threads() -> None:
    counts = (2, 1)
    model = sharded()
    with fullshard.join(model, own_batches(counts)) as batches:
        found = train(model, batches)
    check(found, train_alone(counts), 1e-6)


def test_ranks_without_a_control_channel_join_too() -> None:
    run_threads(2, in_threads)
