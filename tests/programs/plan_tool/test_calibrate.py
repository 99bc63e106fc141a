"""A profile of the machine that runs the tests, and profiles that traces correct."""

import functools
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

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
    LEAST_FACTOR,
    SCALED,
    SmallStep,
    SmallSteps,
    _compute_seconds,
    _factors,
    fitted_host,
    recorded_steps,
    typical_seconds,
)
from fullshard.programs.plan_tool.machine import Machine
from fullshard.programs.plan_tool.measurements import Bench
from fullshard.programs.plan_tool.playback import play
from fullshard.programs.plan_tool.profile_file import load_profile, parse_profile, to_toml
from fullshard.programs.plan_tool.program import Collective, Kernel, Transfer
from fullshard.programs.plan_tool.step_program import record_step
from fullshard.programs.train.model_source import open_model
from fullshard.tracing.schema import Trace, parse_trace
from tests.helpers.run_folders import Machine as MadeUp, simulated_trace

PROFILE = load_profile("h100")


def test_a_quick_calibration_gives_a_profile_that_can_be_read(tmp_path) -> None:
    lines: list[str] = []
    machine = calibrate(device=torch.device("cpu"), quick=True, report=lines.append)
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(machine))
    read = load_profile(path)
    assert read.name == "calibrated"
    assert 0 < read.matmul.peak_tflops["float32"] < 10
    assert 0 < read.bytes_per_second < 1e12
    assert 0 < read.host.launch_us < 1e4
    assert read.sources["traffic.peak_tb_s"].startswith("measured on ")
    assert read.sources["compiled.traffic"].startswith("profile cpu: ")
    assert any("not measured; start this with torchrun" in line for line in lines)


recorded = functools.cache(recorded_steps)


def steps_of(machine: Machine, *, compute: float) -> SmallSteps:
    """What would be measured on a machine whose kernels take longer in a step."""
    fake = machine.with_fake_group()
    found = []
    for entries in recorded(is_cpu=machine.host.is_synchronous):
        step = SmallStep(sum(map(fake.host_seconds, entries)), entries)
        found.append(SmallStep(step.seconds + compute * _compute_seconds(fake, step), entries))
    return SmallSteps(*found)


def test_the_host_is_known_by_what_small_steps_take() -> None:
    known = {
        **{name: 2 * getattr(PROFILE.host, name) for name in SCALED},
        "checkpoint_us": 1234.0,
        "decision_us": 5.0,
    }
    machine = replace(PROFILE, host=replace(PROFILE.host, **known))
    found = fitted_host(PROFILE, steps_of(machine, compute=0.0))
    assert found.times == pytest.approx(known)
    assert found.compute is None


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


def two_ranks(host: SmallSteps | None) -> Machine:
    return calibrate(device=torch.device("cpu"), quick=True, host=host)


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


def test_steps_of_two_widths_tell_operations_of_a_cpu_from_arithmetic(world) -> None:
    profile = load_profile("cpu")
    known = {
        **{name: 3 * getattr(profile.host, name) for name in ("launch_us", "event_us", "hook_us")},
        "checkpoint_us": 1234.0,
        "decision_us": 5.0,
    }
    machine = replace(profile, host=replace(profile.host, **known))
    measured = steps_of(machine, compute=1.5)
    found = fitted_host(profile, measured)
    assert found.times == pytest.approx({**known, "kernel_us": 0.0})
    assert found.compute == pytest.approx(1.5)
    # Ranks that are a process group already use what was measured before.
    for calibrated in world(2).run(two_ranks, measured):
        assert calibrated.sources["matmul.efficiency"].endswith(" in small steps")
        assert calibrated.host.hook_us > calibrated.host.launch_us > 0
        assert calibrated.sources["host.collective_us"].startswith("measured on ")


def test_noise_never_makes_a_time_negative() -> None:
    profile = load_profile("cpu")
    steps = steps_of(profile, compute=1.0)
    assert steps.wide is not None
    fast, slow = (replace(step, seconds=1e-6) for step in (steps.plain, steps.wide))
    assert _factors(profile, fast, steps.wide)[0] == LEAST_FACTOR
    assert _factors(profile, steps.plain, slow)[1] == LEAST_FACTOR


def test_ranks_measure_collectives_and_agree_on_the_profile(world) -> None:
    machine, other = world(2).run(two_ranks, None)
    assert machine == other == parse_profile(to_toml(machine), where="written")
    assert machine.sources["links.all_gather"].startswith("measured on ")
    (size, milliseconds), *_ = machine.links.all_gather
    work = Collective("all_gather", int(size * (1 << 20)), 2, 1, "float32")
    # The table is that of all ranks of a host; two of them send half, not nearly all.
    own = 1 - 1 / machine.links.devices_per_host
    expected = milliseconds * 1e-3 * 0.5 / own
    assert machine.collective_seconds(work) == pytest.approx(expected, rel=0.01)
    # Ranks share cores, and threads of gloo take theirs.
    for name in ("offload.cores", "host.collective_us", "overlap.compute_slowdown"):
        assert machine.sources[name].startswith("measured on "), name
    assert machine.overlap.compute_slowdown > 1
    assert machine.offload.cores <= (os.cpu_count() or 1)


def test_a_cpu_is_measured_in_processor_time_so_other_processes_do_not_count() -> None:
    bench = Bench(torch.device("cpu"), seconds_each=0.001)
    assert bench.seconds_of(lambda: time.sleep(0.005)) < 0.004


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
    rates = HostRates(
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
    lines: list[str] = []
    for ranks, shared in ((8, 1), (1, PROFILE.offload.devices_per_link)):
        fit = _Fit(PROFILE, torch.device("cpu"), lines.append)
        fit.offload(replace(rates, ranks=ranks))
        facts = fit.machine.offload
        assert (facts.memory_gb_s, facts.devices_per_link) == (25 * ranks, shared)
        up = Transfer("to device", 10**9, True, ranks)
        assert fit.machine.transfer_seconds(up) == pytest.approx(0.05 + 1e-5)
        update = Kernel("aten._fused_adamw_", "memory", "float32", 0, 10**9)
        assert fit.machine.host_kernel_seconds(update, ranks) == pytest.approx(0.04)
        assert fit.machine.sources["offload.core_gb_s"].startswith("measured on ")
    assert lines[0] == "host memory: 20 GB/s to the GPU, 10 GB/s back"


def test_updates_and_norms_of_host_memory_are_measured() -> None:
    bench = Bench(torch.device("cpu"), seconds_each=0.001)
    updates, norms = update_rates(bench.seconds_of, 1)
    assert 1e7 < updates < 1e13
    assert 1e7 < norms < 1e13
