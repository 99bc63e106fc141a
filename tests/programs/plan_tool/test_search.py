"""The search for better configurations: what it tries, what it leaves out, and what it finds."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fullshard.errors import ConfigurationError
from fullshard.programs.plan_tool import (
    changes,
    parallel_plans,
    scaling as scaled,
    search as searching,
)
from fullshard.programs.plan_tool.changes import (
    ACCUMULATE,
    BATCH,
    COMPILE,
    FUSE,
    OFFLOAD,
    OPTIMIZER,
    RECOMPUTE,
    REPLICAS,
    RESHARD,
    WEIGHTS,
    changed,
    replica_sizes,
    single_changes,
)
from fullshard.programs.plan_tool.output import print_search
from fullshard.programs.plan_tool.parallel_plans import one_by_one, several_at_a_time
from fullshard.programs.plan_tool.planned_step import PlannedStep
from fullshard.programs.plan_tool.planning import planned
from fullshard.programs.plan_tool.profile_file import load_profile
from fullshard.programs.plan_tool.question import Question, read_machine, read_question
from fullshard.programs.plan_tool.scaling import (
    crossover_text,
    fewest_gpus,
    next_size,
    scaling,
    size_before,
)
from fullshard.programs.plan_tool.search import Search, reason, search
from fullshard.programs.plan_tool.search_answers import fewest_text, tried_rows, untried_text
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.config_file import read_config, to_short_toml
from fullshard.programs.train.model_source import open_model

SMALL = ("model.layers=2", "model.width=64", "model.heads=2", "data.context=16")
GIB = 1 << 30


def question(*settings: str, gpus: int = 16, network: str | None = None) -> Question:
    return read_question("tiny", gpus, read_machine("h100", None, network), [*SMALL, *settings])


def real_step(asked: Question) -> PlannedStep:
    return planned(asked, open_model(asked.config))


@pytest.fixture(scope="module")
def template() -> PlannedStep:
    """A real plan, whose times and bytes are replaced."""
    return real_step(question())


Cost = Callable[[RunConfig], tuple[float, float]]
"""Returns seconds and GiB of a configuration."""


def searched(
    template: PlannedStep,
    monkeypatch: pytest.MonkeyPatch,
    cost: Cost,
    *settings: str,
    gpus: int = 16,
    held_gib: float = 1.0,
    state_gib: float = 0.0,
    whole: Cost | None = None,
    given: PlannedStep | None = None,
) -> tuple[Search, list[RunConfig]]:
    """Search with steps that take what `cost` says, and `whole` with all layers; return also what was planned."""
    asked = question(*settings, gpus=gpus)
    plans: list[RunConfig] = []

    def make(one: Question, _: object, takes: Cost = cost) -> PlannedStep:
        plans.append(one.config)
        seconds, gib = takes(one.config)
        held: Any = {"parameters": int(held_gib * GIB), "optimizer": int(state_gib * GIB)}
        memory = replace(template.memory, reserved=int(gib * GIB), at_peak=held)
        idle: Any = defaultdict(float)
        playback = replace(template.playback, seconds=seconds, idle=idle)
        return replace(
            template, config=one.config, world=one.world, memory=memory, playback=playback
        )

    monkeypatch.setattr(searching, "estimated", make)
    monkeypatch.setattr(searching, "planned", lambda one, _: make(one, _, whole or cost))
    source: Any = None
    return search(asked, source, given or make(asked, None)), plans


def test_gains_of_several_fields_are_combined_and_the_best_comes_first(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost(config: RunConfig) -> tuple[float, float]:
        seconds = 1.0
        seconds *= 0.8 if config.sharding.replicas == 2 else 1.0
        seconds *= 1.0 if config.sharding.reshard_after_forward else 0.9
        return seconds, 10.0

    found, _ = searched(template, monkeypatch, cost)
    first = found.best[0]
    assert dict(first.change.values) == {REPLICAS: 2, RESHARD: False}
    assert first.change in [each.change for each in found.tried]  # which the table shows
    assert first.is_confirmed and first.reason.startswith("1.39 x tokens/s")
    assert [each.step.seconds for each in found.best] == sorted(
        each.step.seconds for each in found.best
    )


@pytest.mark.parametrize("fails_in", ["estimated", "planned"])
def test_a_candidate_that_cannot_be_planned_is_listed_and_the_search_goes_on(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch, fails_in: str
) -> None:
    def cost(config: RunConfig) -> tuple[float, float]:
        two_replicas = config.sharding.replicas == 2
        return (
            0.8 if two_replicas else 1.0 if config.sharding.reshard_after_forward else 0.9
        ), 10.0

    def failing(config: RunConfig) -> tuple[float, float]:
        if config.sharding.replicas == 2:
            raise RuntimeError("aten.index_select.out:\nnot found in storage")
        return cost(config)

    first = failing if fails_in == "estimated" else cost
    found, _ = searched(template, monkeypatch, first, whole=failing)
    assert {each.reason for each in found.failed} == {
        "RuntimeError: aten.index_select.out: not found in storage"
    }
    assert all(dict(each.change.values)[REPLICAS] == 2 for each in found.failed)
    assert found.best[0].is_confirmed and dict(found.best[0].change.values) == {RESHARD: False}
    assert not any(dict(each.change.values).get(REPLICAS) == 2 for each in found.best)
    output = io.StringIO()
    print_search(Console(file=output, width=200), question(), template, found)
    [line, *_] = [each for each in output.getvalue().splitlines() if "not planned" in each]
    assert line.startswith(found.failed[0].change.settings)
    assert "not planned: RuntimeError: aten.index_select.out: not found in storage" in line


def test_the_next_best_is_confirmed_if_the_first_turns_out_not_to_fit(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost(config: RunConfig) -> tuple[float, float]:
        kept = not config.sharding.reshard_after_forward
        return (0.8 if config.sharding.replicas == 2 else 1.0) * (0.9 if kept else 1.0), 10.0

    def whole(config: RunConfig) -> tuple[float, float]:
        seconds, gib = cost(config)
        return seconds, 1000.0 if seconds < 0.75 else gib

    found, _ = searched(template, monkeypatch, cost, whole=whole)
    first = found.best[0]
    assert dict(first.change.values) == {REPLICAS: 2} and first.is_confirmed
    assert not any(each.is_confirmed for each in found.best[1:])


def test_microbatches_are_as_large_as_memory_allows(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost(config: RunConfig) -> tuple[float, float]:
        micro = 16 / config.train.accumulate
        return 1 + 1 / micro, 20.0 * micro + 1

    monkeypatch.setattr(searching, "_activations_of", lambda memory: 320 * GIB)
    found, _ = searched(template, monkeypatch, cost, "train.batch=256")
    assert dict(found.best[0].change.values) == {ACCUMULATE: 8}
    assert found.fits and all(each.step.fits for each in found.best)

    def whole(config: RunConfig) -> tuple[float, float]:
        seconds, gib = cost(config)
        return seconds, 2 * gib

    found, _ = searched(template, monkeypatch, cost, "train.batch=256", whole=whole)
    assert dict(found.best[0].change.values) == {ACCUMULATE: 16}
    assert all(each.step.fits for each in found.best)


def test_plans_of_several_processes_are_the_same() -> None:
    asked = [question(), question("sharding.replicas=2")]
    source = open_model(asked[0].config)
    expected = [(step.memory, step.seconds) for step in one_by_one(source)(planned, asked)]
    with several_at_a_time(source) as planner:
        found = [(step.memory, step.seconds) for step in planner(planned, asked)]
    assert found == expected


def test_what_only_saves_memory_is_not_tried_where_there_is_enough(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, plans = searched(
        template, monkeypatch, lambda _: (1.0, 10.0), "train.batch=64", "train.accumulate=2"
    )
    assert not found.best and found.num_pruned >= 3
    assert all(
        config.compute.checkpoint_activations == "none" or config.train.batch > 64
        for config in plans
    )
    assert {config.train.accumulate for config in plans if config.train.batch == 64} == {1, 2}


def test_a_model_that_does_not_fit_is_made_to_fit_at_the_least_cost(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost(config: RunConfig) -> tuple[float, float]:
        recomputed = {"none": (1.0, 100.0), "selective": (1.1, 90.0), "blocks": (1.3, 60.0)}
        seconds, gib = recomputed[config.compute.checkpoint_activations]
        if config.train.accumulate > 1:
            seconds, gib = seconds * 1.05, gib - 20.0
        return seconds, gib

    found, _ = searched(template, monkeypatch, cost, "train.batch=64")
    first = dict(found.best[0].change.values)
    assert first[RECOMPUTE] == "selective" and first[ACCUMULATE] > 1
    assert found.best[0].reason.startswith("fits; ")
    assert all(each.step.fits for each in found.best[:2])


def test_another_optimizer_comes_after_all_else_that_fits(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost(config: RunConfig, only_blocks: float) -> tuple[float, float]:
        small = config.optimizer.name == "adamw8bit"
        recomputed = {"none": (1.0, 100.0), "selective": (1.2, 90.0), "blocks": (1.4, only_blocks)}
        seconds, gib = recomputed[config.compute.checkpoint_activations]
        return seconds, gib - (50.0 if small else 0.0)

    for only_blocks, first in (
        (60.0, {RECOMPUTE: "blocks"}),
        (95.0, {OPTIMIZER: "adamw8bit"}),
    ):
        found, plans = searched(template, monkeypatch, partial(cost, only_blocks=only_blocks))
        assert dict(found.best[0].change.values) == first and found.fits
    # Parameters and state do not fit, and do with state in 8 bits.
    large = partial(cost, only_blocks=95.0)
    found, _ = searched(template, monkeypatch, large, held_gib=40.0, state_gib=80.0)
    assert dict(found.best[0].change.values) == {OPTIMIZER: "adamw8bit"} and found.fits
    roomy, plans = searched(template, monkeypatch, lambda _: (1.0, 10.0))
    assert {config.optimizer.name for config in plans} == {"adamw"}
    assert {config.model.dtype for config in plans} == {"fp32"}
    assert OPTIMIZER in untried_text(question(), roomy)
    assert OPTIMIZER not in untried_text(question(), found)


def test_weights_in_bf16_are_tried_where_memory_is_short(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost(config: RunConfig) -> tuple[float, float]:
        return 1.0, 70.0 if config.model.dtype == "bf16" else 100.0

    found, _ = searched(template, monkeypatch, cost, held_gib=45.0, state_gib=90.0)
    assert dict(found.best[0].change.values) == {WEIGHTS: "bf16"} and found.fits
    assert "bf16" not in untried_text(question(), found)
    in_fp32 = question("compute.precision=fp32")
    assert not any(change.axis == WEIGHTS for change in single_changes(in_fp32))


def test_compiled_blocks_are_tried(template: PlannedStep, monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(config: RunConfig) -> tuple[float, float]:
        return (0.9 if config.compute.compile == "blocks" else 1.0), 10.0

    found, _ = searched(template, monkeypatch, cost)
    assert dict(found.best[0].change.values) == {COMPILE: "blocks"}


def test_fused_gradients_are_tried_where_they_are_not_on_already(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost(config: RunConfig) -> tuple[float, float]:
        return (0.9 if config.compute.fuse_gradients else 1.0), 10.0

    found, _ = searched(template, monkeypatch, cost)
    assert dict(found.best[0].change.values) == {FUSE: True}
    for asked in (
        question("compute.graph=true"),
        question("compute.fuse_gradients=true"),
    ):
        assert all(FUSE != change.axis for change in single_changes(asked))


def test_larger_batches_are_tried_with_the_best_configuration(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost(config: RunConfig) -> tuple[float, float]:
        """A step has a part that does not grow with the batch, and 60 GiB hold four windows."""
        rows = config.train.batch / 16
        fixed = 0.5 if config.sharding.reshard_after_forward else 0.4
        seconds = (fixed + 0.5 * rows) / rows  # the template has the same tokens always
        return seconds, 15.0 * rows / config.train.accumulate

    found, plans = searched(template, monkeypatch, cost)
    assert dict(found.best[0].change.values) == {RESHARD: False}
    assert {each.change.values for each in found.better_larger} == {
        ((RESHARD, False), (BATCH, 32)),
        ((RESHARD, False), (BATCH, 64)),
        ((RESHARD, False), (BATCH, 64), (ACCUMULATE, 4)),
        ((RESHARD, False), (BATCH, 64), (RECOMPUTE, "blocks")),
    }
    assert found.better_larger[0].gain == pytest.approx(0.9 / 0.6)
    assert all(config.train.batch <= 16 for config in plans[: -len(found.larger)])
    names = [each.name for each in tried_rows(template, found)]
    assert "1. and train.batch=32" in names and "as given" in names


def test_a_larger_batch_that_brings_nothing_is_not_recommended(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = searched(template, monkeypatch, lambda _: (1.0, 10.0))
    assert found.larger and not found.better_larger
    found, _ = searched(template, monkeypatch, lambda _: (1.0, 1000.0))
    assert not found.larger  # nothing fits at all


def test_a_step_that_cannot_be_estimated_does_not_end_the_search(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(config: RunConfig) -> tuple[float, float]:
        if config == question().config:
            raise ConfigurationError("no layers")
        return (0.5 if config.sharding.replicas == 2 else 1.0), 10.0

    given = replace(template, playback=replace(template.playback, seconds=1.0))
    found, _ = searched(template, monkeypatch, failing, given=given)
    assert dict(found.best[0].change.values) == {REPLICAS: 2}


class DyingPool:
    """Processes of which one is killed after the first answer."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def map(self, plan: Callable[[Question], int], asked: list[Question]) -> Iterator[int]:
        yield -asked[0].world
        raise BrokenProcessPool

    def shutdown(self, **_: object) -> None:
        pass


def test_plans_go_on_when_a_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_plans, "ProcessPoolExecutor", DyingPool)
    monkeypatch.setattr(parallel_plans, "_is_safe_to_fork", lambda: True)
    monkeypatch.setattr(parallel_plans, "_num_cores", lambda: 2)
    source: Any = None
    asked = [question(gpus=gpus) for gpus in (1, 2, 4)]
    with several_at_a_time(source) as planner:
        worlds = list(planner(lambda one, _: one.world, asked))
    assert worlds == [-1, 2, 4]


def test_the_smallest_number_of_gpus_is_found(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def frugal(shards: int, rest: int, one: Question, _: object) -> PlannedStep:
        config = one.config
        assert config.train.batch == one.world and config.compute.checkpoint_activations == "blocks"
        assert config.sharding.replicas == 1 and config.train.accumulate == 1
        tried.append(one.world)
        held: Any = {"parameters": shards * GIB // one.world}
        padding = GIB * (one.world == 3 * 8)  # more than is divided among more of them
        memory = replace(
            template.memory, reserved=held["parameters"] + rest * GIB + padding, at_peak=held
        )
        return replace(template, config=config, world=one.world, memory=memory)

    source: Any = None
    for shards, rest, expected in (
        (10, 5, 1),
        (100, 40, 4),  # 77.5 GiB are there
        (300, 3, 8),
        (1600, 10, 24 + 8),  # 24 are nearly enough
        (100_000, 60, 5720),
        (100, 80, None),
    ):
        monkeypatch.setattr(scaled, "estimated", partial(frugal, shards, rest))
        for gpus in (1, 8, 64):
            tried: list[int] = []
            asked = question("train.accumulate=2", gpus=gpus)
            fewest = fewest_gpus(asked, one_by_one(source))
            assert len(tried) <= 8
            if expected is None:
                assert fewest is None
                continue
            assert isinstance(fewest, PlannedStep) and fewest.world == expected, (shards, gpus)
            assert fewest_text(fewest, fewest).startswith(
                f"Smallest number of GPUs that fits: {expected:,}, "
            )
    assert "does not fit on any number of GPUs" in fewest_text(template, None)


def test_the_smallest_number_of_gpus_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> PlannedStep:
        raise ConfigurationError("no room")

    monkeypatch.setattr(scaled, "estimated", fail)
    source: Any = None
    fewest = fewest_gpus(question(), one_by_one(source))
    assert fewest == "ConfigurationError: no room"
    points = scaling(question(gpus=64), source)
    assert not points.points and len(points.failed) == 10
    assert points.failed[-1] == "64 GPUs (HSDP): ConfigurationError: no room"


def test_usual_numbers_of_gpus_are_powers_of_two_and_whole_hosts() -> None:
    sizes = [1, 2, 4, 8, 16, 24, 32]
    assert sorted({next_size(world, 8) for world in range(1, 33)}) == sizes
    assert [size_before(size, 8) for size in sizes] == [0, *sizes[:-1]]
    assert [next_size(world, 6) for world in (3, 5, 6, 7)] == [4, 6, 6, 12]
    assert [size_before(size, 6) for size in (6, 4, 12)] == [4, 2, 6]


def test_shards_go_to_host_memory_only_where_nothing_else_fits(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost(config: RunConfig) -> tuple[float, float]:
        recomputed = config.compute.checkpoint_activations == "blocks"
        if config.sharding.offload:
            return 4.0, 60.0 if recomputed else 90.0
        return 1.0, held_gib

    held_gib = 200.0
    found, plans = searched(template, monkeypatch, cost, held_gib=held_gib)
    assert dict(found.best[0].change.values) == {OFFLOAD: True, RECOMPUTE: "blocks"}
    assert found.fits and found.best[0].reason.startswith("fits; 0.25 x tokens/s")
    for name in ("muon", "adamw8bit"):
        _, plans = searched(template, monkeypatch, cost, f"optimizer.name={name}", held_gib=200.0)
        assert not any(config.sharding.offload for config in plans)
    held_gib = 70.0
    _, plans = searched(template, monkeypatch, cost, held_gib=held_gib)
    assert not any(config.sharding.offload for config in plans)


def test_shards_come_back_from_host_memory_where_there_is_room(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost(config: RunConfig) -> tuple[float, float]:
        return (4.0, 20.0) if config.sharding.offload else (1.0, 60.0)

    found, _ = searched(template, monkeypatch, cost, "sharding.offload=true")
    assert dict(found.best[0].change.values)[OFFLOAD] is False


def test_the_reason_for_host_memory_says_how_much_of_it(template: PlannedStep) -> None:
    moved = replace(template, memory=replace(template.memory, host_allocated=GIB))
    assert reason(template, moved).endswith("take 8 GiB of host memory a host")
    assert "host memory a host" not in reason(moved, moved)


def test_replicas_that_are_too_large_by_parameters_alone_are_not_tried(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, plans = searched(template, monkeypatch, lambda _: (1.0, 50.0), gpus=64, held_gib=30.0)
    assert {config.sharding.replicas for config in plans} == {1, 2}


def test_what_is_tried_keeps_the_batch_and_goes_together() -> None:
    for settings in ((), ("sharding.replicas=2", "optimizer.shard_over_replicas=true")):
        asked = question(
            "train.batch=192", "train.accumulate=2", "compute.precision=bf16", *settings
        )
        possible = single_changes(asked)
        assert len(possible) >= 8
        for change in possible:
            config = change.of(asked.config)
            assert config != asked.config
            config.check(asked.world)
            assert config.train.batch == 192


def test_gradients_of_replicas_that_shard_nothing_stay_as_they_are_on_the_wire(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost(config: RunConfig) -> tuple[float, float]:
        seconds = 0.8 if config.sharding.replicas == 16 else 1.0
        return seconds * (0.9 if config.compute.wire == "bf16" else 1.0), 10.0

    monkeypatch.setattr(changes, "replica_sizes", lambda *_: [1])
    for now in 1, 16:
        settings = ["compute.precision=bf16", f"sharding.replicas={now}"]
        found, plans = searched(template, monkeypatch, cost, *settings)
        for config in plans:
            config.check(16)
        assert dict(found.best[0].change.values) == {REPLICAS: 16} if now == 1 else not found.best


def test_sizes_of_replicas_are_whole_hosts() -> None:
    machine = load_profile("h100")
    assert replica_sizes(8, machine) == []
    assert replica_sizes(64, machine) == [8, 16, 32]
    sizes = replica_sizes(100_000, machine)
    assert 1 <= len(sizes) <= 3 and all(100_000 % size == 0 for size in sizes)


def test_a_found_configuration_is_a_file_that_the_trainer_reads(tmp_path: Path) -> None:
    asked = question("compute.precision=bf16")
    config = changed(asked.config, {REPLICAS: 2, RESHARD: False})
    file = tmp_path / "best.toml"
    file.write_text(to_short_toml(config, "A comment that says\nwhat it is."))
    assert read_config(file) == config
    assert "steps" not in file.read_text()


# --- what theory says about real plans -------------------------------------------------------------------


def test_more_gpus_never_need_more_memory_and_a_faster_network_is_never_slower() -> None:
    peaks = [real_step(question(gpus=gpus)).memory.allocated for gpus in (1, 4, 16)]
    assert peaks == sorted(peaks, reverse=True)
    times = [real_step(question(network=network)).seconds for network in ("5", "50", "400")]
    assert times == sorted(times, reverse=True)


def test_a_gpu_is_never_faster_among_more_of_them_until_replicas_win() -> None:
    """Gathers over thousands of ranks take thousands of hops. Within a host they do not."""
    slow = question().machine.with_network(gbit_per_device=2.0)
    points = scaling(
        replace(question("data.context=64", gpus=4096), machine=slow), open_model(question().config)
    ).points
    of_gradients = [point.full.playback.gradient_seconds for point in points[1:]]
    assert len(of_gradients) == 5 and of_gradients == sorted(of_gradients)
    for steps in (
        [point.full for point in points[1:]],
        [point.replicated for point in points if point.replicated],
    ):
        speeds = [step.tokens_per_second for step in steps]
        assert speeds == sorted(speeds, reverse=True)
        held = [step.memory.at_rest for step in steps]
        assert held == sorted(held, reverse=True)
    gains = [
        point.replicated.tokens_per_second / point.full.tokens_per_second
        for point in points
        if point.replicated
    ]
    assert gains == sorted(gains) and gains[-1] > 2
    assert "a replica on each host (HSDP) is faster" in crossover_text(points)
