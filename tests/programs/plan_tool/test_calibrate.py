"""A profile of measurements, and profiles that traces correct."""

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from fullshard.programs import cli
from fullshard.programs.plan_tool import device_steps
from fullshard.programs.plan_tool.calibrate import (
    _Fit,
    _with_slower_kernels,
    calibrate,
    calibrate_from_trace,
)
from fullshard.programs.plan_tool.device_steps import (
    LEAST,
    LEAST_STEPS,
    LOAD_S,
    MOST,
    TIMED_S,
    WORLD,
    busy_config,
    device_factor,
    steady_seconds,
)
from fullshard.programs.plan_tool.host_measurements import HostRates, update_rates
from fullshard.programs.plan_tool.host_steps import (
    SCALED,
    SmallStep,
    SmallSteps,
    fitted_host,
    recorded_steps,
    typical_seconds,
)
from fullshard.programs.plan_tool.machine import GIB, Machine
from fullshard.programs.plan_tool.measurements import Bench, Timed, TimedCollective
from fullshard.programs.plan_tool.playback import play
from fullshard.programs.plan_tool.profile_file import load_profile, parse_profile, to_toml
from fullshard.programs.plan_tool.program import Collective, CollectiveKind, Kernel, Transfer
from fullshard.programs.plan_tool.step_program import record_step
from fullshard.programs.train.model_source import open_model
from fullshard.tracing.schema import Trace, parse_trace
from tests.helpers.run_folders import Machine as MadeUp, simulated_trace

PROFILE = load_profile("h100")


recorded = functools.cache(recorded_steps)


def steps_of(machine: Machine) -> SmallSteps:
    """What would be measured on a machine."""
    fake = machine.with_fake_group()
    plain, recomputed, selective = (
        SmallStep(sum(map(fake.host_seconds, entries)), entries) for entries in recorded()
    )
    return SmallSteps(plain, recomputed, selective)


def test_the_host_is_known_by_what_small_steps_take() -> None:
    known = {
        **{name: 2 * getattr(PROFILE.host, name) for name in SCALED},
        "checkpoint_us": 1234.0,
        "decision_us": 5.0,
    }
    machine = replace(PROFILE, host=replace(PROFILE.host, **known))
    assert fitted_host(PROFILE, steps_of(machine)) == pytest.approx(known)


def test_a_step_that_keeps_a_gpu_busy_tells_how_long_kernels_take_in_a_model() -> None:
    def slower(factor: float) -> Machine:
        return _with_slower_kernels(PROFILE, factor, "in a step")

    config = busy_config()
    program = record_step(config, WORLD, open_model(config)).program
    seconds = play(program, slower(1.1).with_fake_group()).gradient_seconds
    assert device_factor(seconds, slower) == pytest.approx(1.1, rel=0.005)
    assert device_factor(10 * seconds, slower) == MOST
    assert device_factor(seconds / 10, slower) == LEAST
    # A step that waits for the host tells nothing about the device.
    late = replace(PROFILE, host=replace(PROFILE.host, launch_us=400.0))
    assert device_factor(seconds, lambda factor: _with_slower_kernels(late, factor, "")) == 1.0


def test_a_gpu_is_timed_when_it_has_been_busy_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(device_steps, "time", SimpleNamespace(monotonic=lambda: now))

    def step(seconds: float) -> float:
        nonlocal now
        now += seconds
        return 1.0 if now <= LOAD_S else 2.0 + now

    quick = steady_seconds(lambda: step(0.125))
    assert quick == pytest.approx(2.0 + LOAD_S + TIMED_S / 2, abs=0.125)
    now = 0.0
    slow = steady_seconds(lambda: step(2 * (LOAD_S + TIMED_S)))
    assert slow == 2.0 + 2 * (LOAD_S + TIMED_S) * (1 + LEAST_STEPS // 2 + 1)


def test_small_steps_are_compared_within_rounds() -> None:
    fast, slow = [1.0, 1.5, 3.0], [2.0, 3.0, 6.0]
    assert typical_seconds([fast, slow, slow]) == [2.0, 3.0, 6.0]
    # The host was slower during one step of a round.
    assert typical_seconds([fast, [1.0, 9.0, 3.0], slow]) == [1.0, 1.5, 3.0]


RATES = HostRates(
    to_device=20e9,
    to_host=10e9,
    unpinned=5e9,
    latency=1e-5,
    core=8e9,
    update=25e9,
    norm=4e9,
    cores=64,
    memory_gib=512.0,
    ranks=8,
)


class _Bench(Bench):
    """Measures, in no time, a machine that is slower than its profile."""

    machine = _with_slower_kernels(PROFILE, 1.25, "in a test")

    def seconds_of(self, run: Callable[[], object]) -> float:
        raise AssertionError("the measurements below take no time")

    def products(self, sizes: Sequence[tuple[int, int, int]], dtype: torch.dtype) -> list[Timed]:
        name = str(dtype).removeprefix("torch.")
        works = [
            Kernel("aten.mm", "matmul", name, 2 * m * n * k, 0, (1, m, n, k)) for m, n, k in sizes
        ]
        return self._timed(works)

    def attention(
        self, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype
    ) -> tuple[list[Timed], list[Timed]]:
        forward, backward = (
            self._timed(
                Kernel(name, "attention", "bfloat16", 2 * h * n * n * w, 0, (h, n, n, w))
                for h, n, w in shapes
            )
            for name in ("attention", "attention_backward")
        )
        return forward, backward

    def copies(self, mebibytes: Sequence[int]) -> list[Timed]:
        return self._timed(Kernel("aten.copy_", "memory", "float32", 0, m << 21) for m in mebibytes)

    def shortest_kernel_seconds(self) -> float:
        return 3e-6

    def collectives(
        self,
        kind: CollectiveKind,
        mebibytes: Sequence[float],
        group: dist.ProcessGroup,
        *,
        stride: int = 1,
    ) -> list[TimedCollective]:
        works = [Collective(kind, int(m) << 20, group.size(), stride, "") for m in mebibytes]
        return [TimedCollective(w, 2 * PROFILE.collective_seconds(w)) for w in works]

    def _timed(self, works: Iterable[Kernel]) -> list[Timed]:
        return [Timed(work, self.machine.kernel_seconds(work)) for work in works]


def calibrated_on_a_gpu(host: SmallSteps) -> tuple[Machine, list[str]]:
    """What `calibrate` makes of the measurements of a slower GPU of the same kind."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
        facts = SimpleNamespace(total_memory=int(PROFILE.memory.capacity_gib * GIB))
        patch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
        patch.setattr("fullshard.programs.plan_tool.calibrate.Bench", _Bench)
        patch.setattr("fullshard.programs.plan_tool.calibrate.measure_host", lambda *_, **__: RATES)
        machine = calibrate(torch.device("cuda", 0), host, report=lines.append)
    return machine, lines


def test_a_calibration_gives_a_profile_that_can_be_read(tmp_path: Path) -> None:
    machine, lines = calibrated_on_a_gpu(steps_of(PROFILE))
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(machine))
    assert load_profile(path) == machine
    assert machine.name == "calibrated"
    slower = PROFILE.matmul.efficiency["bfloat16"] / 1.25
    assert machine.matmul.efficiency["bfloat16"] == pytest.approx(slower, rel=0.05)
    assert machine.host.launch_us == pytest.approx(PROFILE.host.launch_us)
    assert machine.traffic.floor_us == pytest.approx(3.0)
    assert machine.sources["traffic.peak_tb_s"].startswith("measured on NVIDIA H100 ")
    assert machine.sources["compiled.traffic"].startswith("profile h100: ")
    assert any("not measured; start this with torchrun" in line for line in lines)


def test_ranks_measure_collectives_and_agree_on_the_profile(world) -> None:
    (machine, _), (other, _) = world(2).run(calibrated_on_a_gpu, steps_of(PROFILE))
    assert machine == other == parse_profile(to_toml(machine), where="written")
    assert machine.sources["links.all_gather"].startswith("measured on ")
    # The table is that of all ranks of a host; two of them send half, not nearly all.
    work = Collective("all_gather", 32 << 20, 2, 1, "float32")
    twice = 2 * PROFILE.collective_seconds(work)
    assert machine.collective_seconds(work) == pytest.approx(twice, rel=0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_calibration_says_where_to_run_it() -> None:
    result = CliRunner().invoke(cli.build_app(), ["plan", "calibrate"])
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "A profile is that of a GPU, and torch finds none on this machine. Run" in said


def trace_of(made_up: MadeUp) -> Trace:
    return parse_trace(simulated_trace(made_up, num_steps=2))


def test_slow_collectives_of_a_trace_slow_the_links_or_the_network_down() -> None:
    for world, section in ((2, "links"), (64, "network")):
        fast, slow = (
            calibrate_from_trace(
                PROFILE, trace_of(MadeUp(gather_us=t, reduce_us=t, world=world)), report=str
            )
            for t in (2000, 4000)
        )
        whole = Collective("all_gather", 1 << 30, world, 1, "")
        ratio = slow.collective_seconds(whole) / fast.collective_seconds(whole)
        assert ratio == pytest.approx(2, rel=0.05), section
        others = {"links", "network"} - {section}
        assert all(getattr(slow, each) == getattr(PROFILE, each) for each in others)


def issued_ahead(trace: Trace, by_us: float) -> Trace:
    """The same trace of a host that is so much ahead of its device."""
    spans = [
        replace(span, issued_us=span.start_us - by_us) if span.kind == "reduce" else span
        for span in trace.spans
    ]
    return replace(trace, spans=tuple(spans))


def test_slow_compute_and_a_slow_host_are_told_apart() -> None:
    predicted = trace_of(MadeUp(compute_us=2000, gather_us=100, reduce_us=50))
    measured = trace_of(MadeUp(compute_us=3000, gather_us=100, reduce_us=50))
    lines: list[str] = []
    ahead = issued_ahead(measured, 5000)
    machine = calibrate_from_trace(PROFILE, ahead, predicted, report=lines.append)
    efficiency = machine.matmul.efficiency["bfloat16"]
    assert efficiency == pytest.approx(PROFILE.matmul.efficiency["bfloat16"] / 1.5, rel=0.01)
    assert machine.traffic.efficiency == pytest.approx(PROFILE.traffic.efficiency / 1.5, rel=0.01)
    assert machine.sources["matmul.efficiency"].endswith("divided by 1.5 by a trace")
    assert parse_profile(to_toml(machine), where="corrected") == machine

    # A host that is not ahead may be what compute waited for.
    lines.clear()
    machine = calibrate_from_trace(PROFILE, measured, predicted, report=lines.append)
    assert "compute: not corrected; the device waited for the host" in lines
    assert machine.matmul == PROFILE.matmul
    assert machine.host.launch_us == pytest.approx(1.5 * PROFILE.host.launch_us, rel=0.05)


def test_what_several_ranks_measured_of_host_memory_is_what_each_of_them_gets() -> None:
    lines: list[str] = []
    for ranks, shared in ((8, 1), (1, PROFILE.offload.devices_per_link)):
        fit = _Fit(PROFILE, "a GPU", lines.append)
        fit.offload(replace(RATES, ranks=ranks))
        facts = fit.machine.offload
        assert (facts.memory_gb_s, facts.devices_per_link) == (25 * ranks, shared)
        up = Transfer("to device", 10**9, True, ranks)
        assert fit.machine.transfer_seconds(up) == pytest.approx(0.05 + 1e-5)
        update = Kernel("aten._fused_adamw_", "memory", "float32", 0, 10**9)
        assert fit.machine.host_kernel_seconds(update, ranks) == pytest.approx(0.04)
        assert fit.machine.sources["offload.core_gb_s"].startswith("measured on ")
    assert lines[0] == "host memory: 20 GB/s to the GPU, 10 GB/s back"


def test_updates_and_norms_of_host_memory_are_measured() -> None:
    def seconds_of(run: Callable[[], object]) -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    updates, norms = update_rates(seconds_of, 1)
    assert 1e7 < updates < 1e13
    assert 1e7 < norms < 1e13
