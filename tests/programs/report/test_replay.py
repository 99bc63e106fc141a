"""A replayed step gives the waits that were measured, and those that another depth would have."""

from __future__ import annotations

import pytest

from fullshard.programs.report.replay import measured_waits, replay, used_depth
from fullshard.programs.report.timeline import StepTimes, steps_of
from fullshard.tracing.schema import parse_trace
from tests.helpers.run_folders import Machine, simulated_trace


def one_step(machine: Machine) -> StepTimes:
    return steps_of(parse_trace(simulated_trace(machine)))[0]


def shown(waits: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    return {key: round(wait, 3) for key, wait in waits.items() if wait > 1e-6}


MACHINES = [
    Machine(),
    Machine(gather_us=500),
    Machine(layers=8, gather_us=1000, slow_gathers={"layers.2": 6000, "layers.5": 3000}),
    Machine(layers=8, gather_us=1800, jitter=0.4),
]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("machine", MACHINES)
def test_at_the_depth_used_the_waits_are_those_measured(machine: Machine, depth: int):
    step = one_step(Machine(**{**vars(machine), "depth": depth}))
    assert shown(replay(step, depth)) == shown(measured_waits(step))


@pytest.mark.parametrize("machine", MACHINES[:3])
def test_another_depth_is_predicted_as_it_then_is(machine: Machine):
    predicted = replay(one_step(machine), 2)
    really = one_step(Machine(**{**vars(machine), "depth": 2}))
    assert shown(predicted) == shown(measured_waits(really))


def test_the_depth_is_recognised_where_it_matters():
    machine = Machine(layers=8, gather_us=1000, slow_gathers={"layers.2": 6000}, depth=2)
    assert used_depth([one_step(machine)], None) == 2


def test_waits_with_another_cause_are_not_explained():
    """Compute waits though the gather has long ended: no depth explains that, and none is recommended."""
    trace = simulated_trace(Machine(gather_us=100))
    for event in trace["traceEvents"]:
        if event.get("cat") == "compute" and event["args"]["group"] == "layers.1":
            event["cat"] = "wait"
            event["args"]["for"] = "gather"
    step = steps_of(parse_trace(trace))[0]
    assert sum(measured_waits(step).values()) > 2000
    assert used_depth([step], 1) is None
    assert used_depth([step], None) is None
