"""What a plan takes where the question leaves something open."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fullshard.programs.plan_tool import starting_point
from fullshard.programs.plan_tool.planned_step import PlannedStep
from fullshard.programs.plan_tool.planning import planned
from fullshard.programs.plan_tool.question import Question, read_machine, read_question
from fullshard.programs.plan_tool.starting_point import chosen_text, first_plan
from fullshard.programs.train.model_source import open_model

SMALL = ("model.layers=2", "model.width=64", "model.heads=2")
GIB = 1 << 30


def question(*settings: str, model: str = "tiny", gpu: str = "h100", gpus: int = 8) -> Question:
    small = SMALL if model == "tiny" else ()
    return read_question(model, gpus, read_machine(gpu, None, None), [*small, *settings])


def shown(asked: Question) -> tuple[str, int, int, str]:
    config = asked.config
    return (
        config.compute.precision,
        config.data.context,
        config.train.batch,
        config.compute.checkpoint_activations,
    )


def test_a_gpu_computes_in_bf16_with_windows_as_long_as_the_model_takes(tmp_path: Path) -> None:
    assert shown(question()) == ("bf16", 2048, 8, "none")
    for context, windows in ((1024, 1024), (8192, 8192), (131072, 8192)):
        content = {"model_type": "llama", "max_position_embeddings": context}
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert shown(question(model=str(tmp_path))) == ("bf16", windows, 8, "none")
    assert shown(question(model="llama3-8b"))[1] == 8192
    assert shown(question(model="gpt2"))[1] == 1024


def test_what_is_asked_for_is_taken(tmp_path: Path) -> None:
    settings = ("compute.precision=fp32", "data.context=64", "train.batch=32")
    assert shown(question(*settings)) == ("fp32", 64, 32, "none")
    file = tmp_path / "run.toml"
    file.write_text("[train]\nbatch = 24\nsteps = 10\n")
    asked = question(model=str(file))
    assert shown(asked) == ("fp32", 128, 24, "none") and not asked.open_fields
    assert asked.tokens_of_run == 10 * 24 * 128
    assert chosen_text(asked) is None and question().tokens_of_run is None


@pytest.fixture(scope="module")
def template() -> PlannedStep:
    asked = question("data.context=16")
    return planned(asked, open_model(asked.config))


Needed = Callable[[int, str], float]
"""Returns GiB for so many windows of a GPU, and what is recomputed."""


def first(
    template: PlannedStep,
    monkeypatch: pytest.MonkeyPatch,
    asked: Question,
    needed: Needed,
    **whole: Any,
) -> tuple[Question, list[tuple[int, str]]]:
    tried = []

    def step(one: Question, *, is_whole: bool = False) -> PlannedStep:
        rows = one.config.train.batch // one.world // one.config.train.accumulate
        again = one.config.compute.checkpoint_activations
        tried.append((rows, again))
        more = whole.get("more", 0) if is_whole else 0
        held: Any = {
            "parameters": int(whole.get("held", 1) * GIB),
            "activations": int(whole.get("activations", 0) * GIB),
        }
        reserved = int((needed(rows, again) + more) * GIB)
        memory = replace(template.memory, reserved=reserved, at_peak=held)
        return replace(template, config=one.config, memory=memory)

    monkeypatch.setattr(starting_point, "estimated", lambda one, _: step(one))
    monkeypatch.setattr(starting_point, "planned", lambda one, _: step(one, is_whole=True))
    source: Any = None
    early: list[PlannedStep] = []
    answered, answer = first_plan(asked, source, early.append)
    assert answer.config == answered.config
    # Where a plan takes long, there is an estimate of what is then planned.
    is_long = asked.world > starting_point.MANY_RANKS
    assert [each.config for each in early[-1:]] == ([answer.config] if is_long else [])
    return answered, tried


def test_windows_have_8192_tokens_together_and_as_little_is_recomputed_as_fits(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = {"none": 10.0, "selective": 5.0, "blocks": 2.0}

    def needed(scale: float, rows: int, again: str) -> float:
        return scale * rows * factors[again]

    for scale, expected in (
        (1, (4, "none")),
        (3, (4, "selective")),
        (7, (4, "blocks")),
        (15, (2, "blocks")),
        (30, (1, "blocks")),
        (60, (1, "blocks")),  # it does not fit at all
    ):
        answered, tried = first(template, monkeypatch, question(), partial(needed, scale))
        assert tried[-1] == expected
        assert answered.config.train.batch == 8 * expected[0]
    asked = question("train.accumulate=3")
    answered, _ = first(template, monkeypatch, asked, partial(needed, 1))
    assert answered.config.train.batch == 8 * 3 * 4


def test_a_batch_or_recomputation_that_was_asked_for_stays(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needed(rows: int, again: str) -> float:
        return 1000.0

    _, tried = first(template, monkeypatch, question("train.batch=64"), needed)
    assert tried == [(8, "none")]
    _, tried = first(template, monkeypatch, question("train.batch=512", gpus=512), needed)
    assert tried == [(1, "none")] * 2
    asked = question("compute.checkpoint_activations=selective")
    _, tried = first(template, monkeypatch, asked, needed)
    assert tried == [(4, "selective"), (2, "selective"), (1, "selective")]


def test_an_estimate_that_was_too_low_is_not_the_end(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needed(rows: int, again: str) -> float:
        return 77.0 if again == "none" else 60.0

    answered, tried = first(template, monkeypatch, question(), needed, more=2, activations=60)
    assert answered.config.compute.checkpoint_activations == "selective"
    assert tried == [(4, "none"), (4, "none"), (4, "selective")]


def needed_by(needs: dict[str, float], rows: int, again: str) -> float:
    return needs[again]


def test_what_is_certain_to_fit_is_not_estimated(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the memory without recomputation all but 10 GiB are activations here."""
    for kept, selective, expected in (
        (100.0, 40.0, [(4, "none"), (4, "selective")]),
        (200.0, 70.0, [(4, "none"), (4, "selective"), (4, "selective")]),
        (100.0, 80.0, [(4, "none"), (4, "selective"), (4, "blocks"), (4, "blocks")]),
    ):
        needs = {"none": kept, "selective": selective, "blocks": 20.0}
        needed = partial(needed_by, needs)
        _, tried = first(template, monkeypatch, question(), needed, activations=kept - 10)
        assert tried == expected
    many = question(gpus=512)
    needs = {"none": 100.0, "selective": 40.0}
    _, tried = first(template, monkeypatch, many, partial(needed_by, needs), activations=90)
    assert tried == [(4, "none"), (4, "selective"), (4, "selective")]


def test_where_shards_alone_do_not_fit_nothing_else_is_tried(
    template: PlannedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tried = first(template, monkeypatch, question(), lambda *_: 200.0, held=100)
    assert tried == [(4, "none"), (1, "blocks")]


def test_what_was_chosen_is_said_with_its_reason() -> None:
    assert chosen_text(question(model="llama3.1-8b")) == (
        "compute in bf16; windows of 8,192 tokens (of at most 131,072 that the model takes); one window at a time"
    )
    again = question(model="gpt2")
    config = replace(
        again.config,
        compute=replace(again.config.compute, checkpoint_activations="blocks"),
        train=replace(again.config.train, batch=64),
    )
    assert chosen_text(replace(again, config=config)) == (
        "compute in bf16; windows of 1,024 tokens (the most that the model takes); 8 windows at a time; all blocks recomputed, as "
        "it would not fit with less"
    )
    assert chosen_text(question("train.batch=8", "data.context=16")) == "compute in bf16"
