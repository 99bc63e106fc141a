"""The page of a plan, and how a step scales."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("plotly")

from fullshard.programs.plan_tool import scaling as scaled
from fullshard.programs.plan_tool.answers import About
from fullshard.programs.plan_tool.changes import BATCH, REPLICAS, RESHARD, Change
from fullshard.programs.plan_tool.page import Planned, render, scaling_chart
from fullshard.programs.plan_tool.planned_step import PlannedStep
from fullshard.programs.plan_tool.planning import planned
from fullshard.programs.plan_tool.question import Question, read_machine, read_question
from fullshard.programs.plan_tool.scaling import (
    ScalePoint,
    Scaling,
    crossover_text,
    recommended_text,
    scaling,
    worlds_up_to,
)
from fullshard.programs.plan_tool.search import Failed, Found, Search
from fullshard.programs.train.model_source import open_model

SETTINGS = ("model.layers=2", "model.width=64", "model.heads=2", "data.context=16")


def question(gpus: int) -> Question:
    return read_question("tiny", gpus, read_machine("h100", None, None), SETTINGS)


@pytest.fixture(scope="module")
def step() -> PlannedStep:
    """A small step on 16 GPUs."""
    asked = question(16)
    return planned(asked, open_model(asked.config))


def lasting(step: PlannedStep, seconds: float) -> PlannedStep:
    return replace(step, playback=replace(step.playback, seconds=seconds))


def planned_page(step: PlannedStep, points: Scaling) -> Planned:
    return Planned(
        question=question(16),
        step=step,
        about=About(description="a <model>", parameters=1000, chosen="compute in bf16"),
        found=Search(best=[], tried=[], num_plans=1, num_pruned=0),
        fewest=replace(step, world=4),
        scaling=points,
    )


def test_numbers_of_gpus_rise_in_equal_ratios_of_whole_hosts() -> None:
    assert worlds_up_to(1, 8) == [1]
    assert worlds_up_to(8, 8) == [1, 8]
    assert worlds_up_to(128, 8) == [1, 8, 16, 32, 64, 128]
    many = worlds_up_to(100_000, 8)
    assert many[-1] == 100_000 and len(many) <= 6
    assert all(world % 8 == 0 for world in many[1:])


def test_every_gpu_keeps_its_windows_and_replicas_are_hosts(
    step: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Question] = []

    def note(one: Question, _: object) -> PlannedStep:
        asked.append(one)
        return step

    monkeypatch.setattr(scaled, "estimated", note)
    source: Any = None
    points = scaling(question(64), source)
    assert [point.world for point in points.points] == worlds_up_to(64, 8)
    assert all(one.config.train.batch == one.world for one in asked)
    hybrid = [one for one in asked if one.config.sharding.replicas > 1]
    assert hybrid and all(one.world // one.config.sharding.replicas == 8 for one in hybrid)


def test_the_crossover_is_where_replicas_become_faster(step: PlannedStep) -> None:
    slow, fast = lasting(step, 2.0), lasting(step, 1.0)
    points = [
        ScalePoint(8, fast, None),
        ScalePoint(16, fast, slow),
        ScalePoint(64, slow, fast),
    ]
    assert crossover_text(points).startswith("From about 64 GPUs on, a replica on each host")
    assert crossover_text(points[:2]).startswith("Full sharding is faster up to 16 GPUs")
    assert "one host" in crossover_text(points[:1])
    barely = [ScalePoint(16, slow, lasting(step, 1.999))]
    assert crossover_text(barely).startswith("Full sharding is faster up to 16 GPUs")


def test_replicas_that_do_not_fit_are_not_said_to_be_better(step: PlannedStep) -> None:
    slow, fast = lasting(step, 2.0), lasting(step, 1.0)
    large = too_large(fast)
    said = crossover_text([ScalePoint(16, slow, large), ScalePoint(64, slow, large)])
    assert said.startswith(
        "A replica on each host (HSDP) would be faster from about 16 GPUs on, and does not fit"
    )
    fitting = [ScalePoint(16, slow, large), ScalePoint(64, slow, fast)]
    assert crossover_text(fitting).startswith("From about 64 GPUs on")
    assert crossover_text([ScalePoint(16, fast, too_large(slow))]).endswith(
        "They would not fit, either."
    )


def test_curves_say_how_the_best_configuration_is_sharded(step: PlannedStep) -> None:
    change = Change(((REPLICAS, 2),))
    best = replace(step, config=change.of(step.config))
    found = Search(best=[Found(change, best, "")], tried=[], num_plans=1, num_pruned=0)
    assert " for 16 GPUs has 2 replicas of 8 GPUs" in recommended_text(question(16), found)
    nothing = Search(best=[], tried=[], num_plans=0, num_pruned=0)
    assert " for 16 GPUs is sharded over all GPUs" in recommended_text(question(16), nothing)


def too_large(step: PlannedStep) -> PlannedStep:
    return replace(step, memory=replace(step.memory, reserved=1 << 40))


def test_what_does_not_fit_is_no_point_of_a_curve(step: PlannedStep) -> None:
    points = [
        ScalePoint(8, too_large(replace(step, world=8)), None),
        ScalePoint(16, replace(step, world=16), too_large(replace(step, world=16))),
    ]
    chart = scaling_chart(planned_page(step, Scaling(points)))
    [figure] = chart.views.values()
    drawn = {trace.name: (list(trace.x), list(trace.y)) for trace in figure.data}
    speed = round(step.tokens_per_second, 1)
    assert drawn["full sharding"] == ([8, 16], [None, speed])
    assert drawn["a replica on each host (HSDP)"] == ([16], [None])
    assert drawn["does not fit"] == ([8, 16], [speed, speed])


def test_the_page_has_everything_and_needs_nothing_else(step: PlannedStep) -> None:
    step = replace(step, memory=replace(step.memory, host_at_peak={"optimizer": 3 << 20}))
    change = Change(((RESHARD, False),))
    faster = replace(lasting(step, step.seconds / 2), config=change.of(step.config))
    found = Found(change, faster, "2.00 x tokens/s")
    more = Change((*change.values, (BATCH, 32)))
    larger = Found(more, faster, "1.50 x tokens/s", gain=1.5)
    points = [ScalePoint(1, step, None), ScalePoint(16, step, lasting(step, 9.0))]
    page = planned_page(step, Scaling(points, ["64 GPUs: RuntimeError: no room"]))
    failed = Failed(Change(((REPLICAS, 2),)), "RuntimeError: not found")
    search = replace(page.found, best=[found], tried=[found], larger=[larger], failed=[failed])
    text = render(replace(page, found=search))
    assert "a &lt;model&gt;" in text and "<model>" not in text
    [figures] = re.findall(r'id="figures">(.*?)</script>', text)
    assert set(json.loads(figures)) == {"timeline", "memory", "scaling"}
    for words in (
        "It fits: ",
        "compute in bf16",
        "Smallest number of GPUs that fits: 4, ",
        "not planned: RuntimeError: not found",
        "Not planned: 64 GPUs: RuntimeError: no room.",
        "Not tried: context, expert and tensor parallelism",
        "Not validated",
        "sharding.reshard_after_forward=false",
        "reshard_after_forward = false",
        "2.00 x",
        "With a larger batch",
        "1. and train.batch=32",
        "Full sharding is faster up to 16 GPUs",
        "matmul.efficiency",
        "Host memory for a GPU",
        "3 MiB",
    ):
        assert words in text, words
    without_plotly = text.partition('id="figures"')[0]
    assert not re.search(r'(src|href)="(https?:)?//', without_plotly)
