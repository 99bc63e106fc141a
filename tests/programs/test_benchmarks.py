"""The benchmark programs besides step.py run, and say what they mean to say."""

import inspect
import json
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from benchmarks import (
    gloo_step,
    graphs,
    host_profile,
    plots,
    power,
    scaling,
    targets,
    watchdog_cost,
)
from benchmarks.clock import Clock, silent_collectives
from benchmarks.contestants import Setting
from benchmarks.estimate import Ratio, Spread, of_some, over
from benchmarks.measure import Record
from benchmarks.transformer import PRESETS, Shape
from fullshard import torch_border
from fullshard.divergence.watchdog import thread as watchdog_thread
from tests.helpers.fake import fake_world
from tests.helpers.groups import leave_group

SMALLEST = Shape(layers=2, width=32, head_width=16, batch=1, context=8, vocab=64)


def records(**steps: Sequence[float]) -> dict[str, Record]:
    return {
        name: Record(name=name, samples={"step_s": list(samples)})
        for name, samples in steps.items()
    }


def test_a_ratio_is_taken_within_rounds() -> None:
    # Two steps a round: a neighbour slows the second round down, and hits one side of the third.
    found = records(ours=[30, 30, 45, 45, 31, 89], torchs=[60, 60, 90, 90, 60, 60])
    ratio = Ratio.of(over("ours", "torchs", "step_s"), found, 3)
    assert ratio.by_round.median == 0.5
    assert ratio.of_medians == 38 / 60
    assert ratio.of_lower_quartiles == 30.25 / 60


def test_a_reference_that_noise_made_negative_is_no_success() -> None:
    ratio = Ratio.of(lambda typical: (1.0, typical("a", "step_s")), records(a=[-1.0]), 1)
    assert ratio.by_round.median == math.inf


def test_the_clock_adds_up_collectives_and_leaves_the_group_as_it_was() -> None:
    before = dict(vars(ProcessGroup))
    clock = Clock("collective_s", torch.device("cpu"))
    with fake_world(64):
        outputs = list(torch.zeros(64, 1000).unbind())
        with clock.running():
            dist.all_gather(outputs, outputs[0])
        assert clock.take_s() > 0
        dist.all_gather(outputs, outputs[0])
        assert clock.take_s() == 0
    assert dict(vars(ProcessGroup)) == before


def test_silent_collectives_leave_their_outputs_alone() -> None:
    with fake_world(2):
        outputs = [torch.zeros(1), torch.zeros(1)]
        with silent_collectives():
            dist.all_gather(outputs, torch.ones(1))
        assert [output.item() for output in outputs] == [0, 0]
        dist.all_gather(outputs, torch.ones(1))
        assert [output.item() for output in outputs] == [1, 1]


def test_every_target_is_read_from_a_run_that_is_there() -> None:
    assert {target.run for target in targets.TARGETS.values()} == set(targets.RUNS)
    for run in targets.RUNS.values():
        assert run.preset in PRESETS
        assert set(run.contestants) >= {targets.OURS, targets.RIVAL}


def test_targets_measures_the_chosen_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "PRESETS", {**PRESETS, "tiny": SMALLEST})
    file = tmp_path / "targets.json"
    optimizers = ["optimizer-12x768", "torch-optimizer-12x768"]
    rows = ["host-12x768", "own-12x768", *optimizers, "memory-12x768"]
    try:
        status = targets.main(
            ["--rehearse", "--rounds", "8", "--rows", *rows, "--json", str(file), "--commit", "abc"]
        )
    finally:
        leave_group()
    assert status == 0
    results = json.loads(file.read_text())["results"]
    assert list(results["rows"]) == rows
    for row in rows[:-1]:
        assert results["rows"][row]["value"] > 0
    samples = results["records"]["12x768"]["fullshard"]["samples"]
    assert len(samples["host_s"]) == len(samples["collective_s"]) == 8
    assert all(0 < c < h for c, h in zip(samples["collective_s"], samples["host_s"], strict=True))
    printed = capsys.readouterr().out
    assert "commit abc" in printed
    assert (
        results["rows"]["memory-12x768"]["met"] == "not measured"
    )  # there is no GPU in a rehearsal


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot choose cores")
def test_a_run_on_one_core_keeps_all_threads_there_and_gives_all_cores_back() -> None:
    allowed = os.sched_getaffinity(0)
    meet, seen = threading.Barrier(2), []

    def look() -> None:
        for _ in range(3):
            meet.wait()
            seen.append(os.sched_getaffinity(0))
            meet.wait()

    def looked() -> set[int]:
        meet.wait()
        meet.wait()
        return seen[-1]

    threading.Thread(target=look, daemon=True).start()
    assert looked() == allowed
    with targets.on_one_core():
        assert looked() == os.sched_getaffinity(0) == {max(allowed)}
    assert looked() == os.sched_getaffinity(0) == allowed


def test_the_watchdog_of_its_benchmark_works_in_every_second_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_border, "default_store", torch_border.default_store)  # it is replaced
    for name in ("REST_S", "LOOK_S"):  # a pace changes them
        monkeypatch.setattr(watchdog_thread, name, getattr(watchdog_thread, name))
    monkeypatch.setattr(watchdog_cost, "PRESETS", {**PRESETS, "tiny": SMALLEST})
    watchdogs, in_rest, take_turn = [], [], watchdog_cost.take_turn

    class Known(watchdog_cost.RestingWatchdog):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            watchdogs.append(self)

    def turn_with_a_look(*args: Any) -> tuple[float, float]:
        """Take a turn. On a busy machine it can be over before the watchdog has had a processor: wait for its look."""
        (watchdog,) = watchdogs
        before = watchdog.looks
        found = take_turn(*args)
        if not watchdog.awake.is_set():
            in_rest.append(watchdog.looks - before)
        while watchdog.awake.is_set() and watchdog.looks == before:
            time.sleep(0.001)
        return found

    monkeypatch.setattr(watchdog_cost, "RestingWatchdog", Known)
    monkeypatch.setattr(watchdog_cost, "take_turn", turn_with_a_look)
    file = tmp_path / "watchdog.json"
    try:
        watchdog_cost.main(
            [
                *("--device", "cpu", "--rounds", "3", "--steps", "10"),
                *("--pace", "100", "--json", str(file)),
            ]
        )
    finally:
        leave_group()
    results = json.loads(file.read_text())["results"]
    assert len(results["samples"]["on"]) == len(results["samples"]["off"]) == 3
    assert len(results["shares"]) == 3
    assert results["looks"] > 0
    assert len(in_rest) == 3
    assert max(in_rest) <= 1, "but for a look that had begun, it rests in every second turn"
    assert "host on / off" in capsys.readouterr().out


LIBRARY = """
def entered(look): look()
def outer(look):
    inner(look)
def inner(look):
    look()
def on_calling_thread(look):
    entered(look)
"""


def test_samples_are_of_the_library_of_autograd_or_of_the_model() -> None:
    samples, library = host_profile.Samples(), dict[str, Any]()
    exec(compile(LIBRARY, "/somewhere/fullshard/hooks.py", "exec"), library)
    exec(compile("def model(f, look): f(look)", "/somewhere/model.py", "exec"), library)

    def look() -> None:
        samples.take(inspect.currentframe().f_back)  # type: ignore[union-attr]

    look()
    library["entered"](look)  # a hook's first line: what came before has just ended
    library["on_calling_thread"](look)  # which runs the pass in whose midst a hook is entered
    library["outer"](look)
    library["model"](library["outer"], look)
    assert samples.own == {host_profile.MODEL: 1, host_profile.AUTOGRAD: 2, "hooks.inner": 2}
    assert samples.whole == {"hooks.inner": 2, "hooks.outer": 2}


def test_host_profile_says_what_it_sampled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_profile, "PRESETS", {**PRESETS, "tiny": SMALLEST})
    handler = signal.getsignal(signal.SIGPROF)
    try:
        status = host_profile.main(["--steps", "8", "--commit", "abc"])
    finally:
        leave_group()
    assert status == 0 and signal.getsignal(signal.SIGPROF) is handler
    printed = capsys.readouterr().out
    assert "commit abc" in printed and "samples of 8 steps" in printed


def test_a_contestant_that_failed_leaves_its_rows_unmeasured() -> None:
    run = targets.RUNS["gloo"]
    failed = {name: Record(name=name, status="failed", reason="-") for name in run.contestants}
    assert targets.rows_of("gloo", run, failed) == {"gloo": None, "gloo-cost": None}


def test_whole_steps_are_timed_on_real_ranks(world) -> None:
    names = ("fsdp2", "fullshard", "wrapper")
    job = gloo_step.Job(names=names, shape=SMALLEST, ranks=2, rounds=2, steps=1)
    found, also = world(2).run(gloo_step.compare, job)
    assert found == also
    for name in names:
        assert found[name].status == "measured"
        assert len(found[name].samples["step_s"]) == 2
        assert min(found[name].samples["step_processor_s"]) > 0
    assert "| fullshard " in gloo_step.table(job, found)


@pytest.mark.parametrize("silent", [True, False])
def test_scaling_compares_worlds_in_one_process(silent: bool) -> None:
    shape = replace(scaling.EVEN, layers=2, width=4, head_width=4, vocab=64, cut=(64, 4))
    device = torch.device("cpu")
    cases = {
        ("worlds", "even", world, 4): Setting(
            shape=shape, device=device, world=world, precision="fp32", master="fp32"
        )
        for world in (4, 16)
    }
    with fake_world(16):
        points = scaling.measure(cases, rounds=1, steps=1, silent=silent)
    assert [(point.world, point.contestant) for point in points] == [
        (4, "fsdp2"),
        (4, "fullshard"),
        (16, "fsdp2"),
        (16, "fullshard"),
    ]
    # Two blocks of 64 x 4, embedding and head of 64 x 4, a norm of 4; torch pads no empty piece.
    assert points[0].shard_bytes == 4 * (4 * 64 + 1) * 4 // 4
    assert points[0].shard_bytes <= points[1].shard_bytes <= points[0].shard_bytes + 11 * 128
    assert all(point.peak_bytes >= 64 * 4 * 4 for point in points)
    assert all((point.collective_s is None) is silent for point in points)
    assert "| 16 " in scaling.points_table(points, "world")


def test_padding_comes_from_the_layouts() -> None:
    by_preset = {(one.preset, one.world): one for one in scaling.study_padding((8, 4096))}
    assert by_preset["7b", 8].rows_bytes == by_preset["7b", 8].flat_bytes == 0
    at_4096 = by_preset["7b", 4096]
    # Gate and up have 11008 rows: 3 on each rank, 1280 of 12288 are padding. The vocabulary: 8 x 4096.
    rows = 32 * 2 * 1280 + 2 * 768
    assert at_4096.rows_bytes == 4 * 4096 * rows
    assert at_4096.flat_bytes < 1 << 20


def test_the_slope_is_the_cost_of_one_more_parameter() -> None:

    def spread(value: float) -> Spread:
        return of_some([value])

    points = [
        scaling.Point(
            study="parameters",
            model="cut",
            contestant="fullshard",
            world=8,
            params_per_group=n,
            num_groups=9,
            host_s=spread(1e-3 + n * 5e-6),
            copy_s=spread(n * 2e-6),
            collective_s=spread(n * 1e-6),
            build_s=0.0,
            shard_bytes=0,
            peak_bytes=0,
        )
        for n in (4, 16, 64)
    ]
    assert scaling.slope_s(points, part="host_s") == pytest.approx(5e-6)
    assert scaling.slopes_text(points, "fullshard") == (
        "fullshard 7.0 (5.0 host, 2.0 copy), and 1.0 in the fake group"
    )


def test_plots_name_what_they_can_draw() -> None:
    point = {"study": "worlds", "model": "even"}
    found = plots.drawings({"points": [point], "padding": [{"world": 8}]})
    assert [ending for ending, _ in found] == ["-worlds", "-padding"]


def test_a_file_that_is_not_theirs_is_refused_by_plots(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    file.write_text(json.dumps({"results": []}))
    with pytest.raises(SystemExit, match=r"step\.json must come from"):
        plots.main([str(file)])


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    spread = {"lower_quartile": 1e-3, "iqr": 1e-4}
    points = [
        {
            "study": study,
            "model": "even",
            "contestant": name,
            "world": 8,
            "params_per_group": 4,
            "host_s": spread,
            "peak_bytes": 1 << 20,
        }
        for study in ("worlds", "parameters")
        for name in ("fsdp2", "fullshard")
    ]
    padding = {
        "preset": "7b",
        "world": 8,
        "parameter_bytes": 100,
        "rows_bytes": 1,
        "flat_bytes": 0,
    }
    rows = {"gloo": {"target": 0.85, "met": "no", "value": 0.9, "ratio": None}}
    for name, results in (
        ("scaling.json", {"points": points, "padding": [padding]}),
        ("targets.json", {"rows": rows}),
    ):
        file = tmp_path / name
        file.write_text(json.dumps({"results": results}))
        plots.main([str(file)])
    written = {file.name for file in tmp_path.glob("*.svg")}
    assert written == {
        "scaling-worlds.svg",
        "scaling-parameters.svg",
        "scaling-padding.svg",
        "targets.svg",
    }


class Counters:
    """Stands for the driver's library; energy is counted in ticks of a second."""

    def __init__(self, watts: float, failing: str = "") -> None:
        self.seconds, self.watts, self.failing = 0.6, watts, failing  # between two ticks

    def clock(self) -> float:
        return self.seconds

    def __getattr__(self, name: str) -> Any:
        def read(handle: object, found: Any) -> int:
            found._obj.value = {
                "nvmlDeviceGetTotalEnergyConsumption": int(self.seconds) * int(1000 * self.watts),
                "nvmlDeviceGetCurrentClocksThrottleReasons": power.POWER_CAP * (self.seconds > 2),
            }.get(name, 1500)
            return int(name == self.failing)

        def read_clock(handle: object, kind: int, found: Any) -> int:
            assert kind == power.SM_CLOCK
            return read(handle, found)

        return read_clock if name == "nvmlDeviceGetClockInfo" else read

    def goes_on_for(self, seconds: float) -> Any:
        """A question that is answered with yes after some time, a quarter of a second at a time."""

        def is_done() -> bool:
            self.seconds += 0.25
            return self.seconds > seconds

        return is_done


def test_power_is_taken_between_ticks_of_the_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "POLL_S", 0)
    for seconds, expected in ((4.9, (600, 1500, True)), (1.9, None), (0.7, None)):
        counters = Counters(watts=600)
        draw = power.PowerMeter(counters, None, counters.clock).watch(counters.goes_on_for(seconds))
        found = draw and (round(draw.watts, 6), draw.megahertz, draw.capped)
        assert found == expected
    counters = Counters(watts=600, failing="nvmlDeviceGetClockInfo")
    assert power.PowerMeter(counters, None).watch(counters.goes_on_for(4.9)) is None


def test_power_is_watched_while_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "POLL_S", 0)
    counters, seen = Counters(watts=600), threading.Event()
    meter = power.PowerMeter(counters, None, counters.clock)

    def megahertz() -> int:  # time passes with every look
        counters.seconds += 0.25
        if counters.seconds > 4:
            seen.set()
        return 1500

    monkeypatch.setattr(meter, "_megahertz", megahertz)
    with meter.watching() as draws:
        assert seen.wait(30)
    (draw,) = draws
    assert (round(draw.watts), draw.megahertz, draw.capped) == (600, 1500, True)
    monkeypatch.setattr(meter, "_megahertz", lambda: None)
    with meter.watching() as draws:
        pass
    assert not draws


def test_graphs_are_compared_by_time_and_energy() -> None:
    found = {name: graphs.Measured() for name in ("unsharded", "ours", "failed")}
    for second, watts in ((0.5, 600.0), (0.25, 700.0)):
        for name, factor in (("unsharded", 1.0), ("ours", 1.1)):
            found[name].replay_s.append(second * factor)
            draw = power.Draw(watts=watts * factor, megahertz=1500, capped=name == "ours")
            found[name].draws.append(draw)
    found["failed"].failure = "RuntimeError: no"
    reference, ours, failed = graphs.rows("fwd+bwd", found)
    assert reference[3:6] == ["1.000", "1.000", "650, 1500"]
    assert ours[3:6] == ["1.100", "1.210", "715, 1500*"]
    assert len(failed) == len(graphs.COLUMNS) == len(ours)
    found["unsharded"].draws.clear()
    assert graphs.rows("fwd+bwd", found)[1][3:6] == ["1.100", "n/a", "715, 1500*"]
