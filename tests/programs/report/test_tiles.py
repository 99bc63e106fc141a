"""The numbers at the top of the page, and which steps are compared with which."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.diagnosis import diagnose
from fullshard.programs.report.peak_flops import peak_flops
from fullshard.programs.report.run_files import Metrics, Run
from fullshard.programs.report.tiles import tiles_of
from fullshard.programs.run_events import Start, Step


def start(**changes: Any) -> Start:
    facts: dict[str, Any] = {
        "world": 2,
        "device": "cuda",
        "device_name": "NVIDIA H200",
        "parameters": 10**9,
        "unsharded_bytes": 4 * 10**9,
        "rank_bytes": (),
        "tokens_per_step": 100_000,
        "steps": 100,
        "model": "",
        "data": "",
        "training_tokens": 0,
        "held_out_tokens": 0,
        "versions": {},
        "resumed_from": None,
    }
    return Start(**(facts | changes))


def steps(times: list[float], *, first: int = 1, memory: int = 7 << 30) -> list[Step]:
    return [
        Step(
            step=first + i,
            loss=1.0,
            grad_norm=1.0,
            lr=1.0,
            tokens=0,
            step_s=seconds,
            memory_bytes=memory,
        )
        for i, seconds in enumerate(times)
    ]


def tiles(starts: list[Start], taken: list[Step], precision: str = "bf16") -> dict[str, str]:
    metrics = Metrics(starts=tuple(starts), steps=tuple(taken))
    run = Run(name="made up", metrics=metrics, config={"compute": {"precision": precision}})
    return {tile.label: f"{tile.value} | {tile.note}" for tile in tiles_of(Analysis(run))}


def test_mfu_is_told_with_all_that_it_assumes() -> None:
    # 6 * 1e9 * 1e5 operations in 1 s, on two ranks: 300 TFLOP/s each
    shown = tiles([start()], steps([1.0] * 10))["MFU"]
    assert shown.startswith("30 % | 300 TFLOP/s of 989 TFLOP/s a rank")
    assert "6 FLOPs per parameter and token" in shown
    assert "NVIDIA H200 in bf16, data sheet, dense" in shown


@pytest.mark.parametrize(
    "changes", [{"device": "cpu", "device_name": ""}, {"device_name": "Future GPU"}]
)
def test_there_is_no_mfu_where_no_peak_is_known(changes: dict[str, Any]) -> None:
    shown = tiles([start(**changes)], steps([1.0] * 10))
    assert "MFU" not in shown and "Speed" in shown


def test_resident_memory_is_divided_into_what_was_there_and_what_came() -> None:
    on_cpu = start(device="cpu", baseline_bytes=5 << 30)
    assert tiles([on_cpu], steps([1.0]))["Peak memory"] == (
        "7 GiB | resident, of rank 0: 5 GiB by Python, torch and the data before the model was made, 2 GiB since"
    )
    unknown = start(device="cpu")
    assert tiles([unknown], steps([1.0]))["Peak memory"] == "7 GiB | resident, of rank 0"


def test_a_gpu_is_known_by_the_beginning_of_its_name() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12
    assert peak_flops("NVIDIA L40", "bf16") is None
    assert peak_flops("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16") is None
    assert peak_flops("NVIDIA H200", "") is None


def test_time_left_speed_and_memory_are_those_of_the_newest_start() -> None:
    taken = [*steps([8.0] * 20, memory=9 << 30), *steps([2.0] * 20, first=21)]
    shown = tiles([start(), start(world=8, resumed_from=20)], taken)
    assert shown["Time left"].startswith("2 min | 60 of 100 steps, 2 s each")
    assert shown["Speed"] == "50 K tokens/s | median step 2 s"
    assert shown["Peak memory"] == "7 GiB | allocated, of rank 0"


def test_the_optimizer_is_told_with_its_share_of_the_step_and_its_bytes() -> None:
    taken = [
        replace(step, optimizer_s=0.05 * step.step_s, optimizer_bytes=3 << 30)
        for step in steps([1.0, 2.0, 3.0])
    ]
    unknown = replace(taken[0], optimizer_s=0.0)  # of a first step on CUDA
    shown = tiles([start()], [unknown, *taken[1:]])
    assert shown["Optimizer"] == "5.0 % of the step | its step: 125 ms, 3 GiB of state on rank 0"
    stateless = [replace(step, optimizer_bytes=0) for step in taken]
    assert shown_note(stateless) == "no state"
    assert "Optimizer" not in tiles([start()], steps([1.0]))


def shown_note(taken: list[Step]) -> str:
    return tiles([start()], taken)["Optimizer"].rpartition(", ")[2]


def test_a_run_without_steps_left_has_no_time_left() -> None:
    assert "Time left" not in tiles([start(steps=10)], steps([1.0] * 10))


def slower(starts: list[Start], taken: list[Step]) -> list[str]:
    metrics = Metrics(starts=tuple(starts), steps=tuple(taken))
    findings = diagnose(Analysis(Run(name="made up", metrics=metrics)))
    return [finding.title for finding in findings if "slower" in finding.title]


def test_a_restart_on_fewer_ranks_is_no_run_that_becomes_slower() -> None:
    taken = [*steps([0.1] * 60), *steps([0.2] * 60, first=61)]
    again = start(world=1, resumed_from=60)
    assert slower([start(), again], taken) == []
    assert slower([start()], taken) != []
    # The second start becomes slower by itself, the first does not.
    later = [*steps([0.1] * 60), *steps([0.2] * 30 + [0.3] * 30, first=61)]
    (title,) = slower([start(), again], later)
    assert title == "The run becomes slower: 200 ms a step at first, 300 ms at the end"


def test_steps_that_vary_by_more_than_they_become_slower_are_noise() -> None:
    noisy = [0.1, 0.2, 0.1, 0.2] * 10 + [0.1, 0.2, 0.2, 0.2] * 10
    assert slower([start()], steps(noisy)) == []
