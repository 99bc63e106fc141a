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
from fullshard.programs.plan_tool.changes import REPLICAS, RESHARD, Change
from fullshard.programs.plan_tool.page import Planned, render
from fullshard.programs.plan_tool.planned_step import PlannedStep
from fullshard.programs.plan_tool.planning import planned
from fullshard.programs.plan_tool.question import Question, read_machine, read_question
from fullshard.programs.plan_tool.scaling import (
    ScalePoint,
    Scaling,
    crossover_text,
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


def test_the_page_has_everything_and_needs_nothing_else(step: PlannedStep) -> None:
    step = replace(step, memory=replace(step.memory, host_at_peak={"optimizer": 3 << 20}))
    change = Change(((RESHARD, False),))
    faster = replace(lasting(step, step.seconds / 2), config=change.of(step.config))
    found = Found(change, faster, "2.00 x tokens/s")
    text = render(
        Planned(
            question=question(16),
            step=step,
            about=About(description="a <model>", parameters=1000, chosen="compute in bf16"),
            found=Search(
                best=[found],
                tried=[found],
                num_plans=1,
                num_pruned=0,
                failed=[Failed(Change(((REPLICAS, 2),)), "RuntimeError: not found")],
            ),
            fewest=replace(step, world=4),
            scaling=Scaling(
                [ScalePoint(1, step, None), ScalePoint(16, step, lasting(step, 9.0))],
                ["64 GPUs: RuntimeError: no room"],
            ),
        )
    )
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
        "Full sharding is faster up to 16 GPUs",
        "matmul.efficiency",
        "Host memory for a GPU",
        "3 MiB",
    ):
        assert words in text, words
    without_plotly = text.partition('id="figures"')[0]
    assert not re.search(r'(src|href)="(https?:)?//', without_plotly)
