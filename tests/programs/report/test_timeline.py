"""Times of made-up steps whose answers follow from how they were made."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fullshard.programs.report.intervals import length, union, without
from fullshard.programs.report.timeline import StepTimes, latest_rank, mean_waits, steps_of, typical
from fullshard.tracing.schema import parse_trace
from tests.helpers.run_folders import Machine, simulated_trace


def steps(machine: Machine, *, num_steps: int = 1) -> list[StepTimes]:
    """Of all ranks."""
    traces = (simulated_trace(machine, rank, num_steps=num_steps) for rank in range(machine.world))
    return [step for trace in traces for step in steps_of(parse_trace(trace))]


def test_intervals_count_every_moment_once():
    assert union([(5, 7), (0, 2), (1, 3), (3, 3)]) == [(0, 3), (5, 7)]
    assert without([(0, 10), (12, 14)], [(2, 3), (9, 13)]) == [(0, 2), (3, 9), (13, 14)]
    assert length([(0, 2), (3, 9)]) == 8


def test_gathers_longer_than_compute_leave_the_difference_exposed():
    """4 layers, compute 2 ms, gather 3 ms: each layer of forward waits 1 ms, the root all of its 3 ms."""
    step = steps(Machine(layers=4, compute_us=2000, gather_us=3000))[0]
    waits = {
        (wait.group, wait.phase): wait.duration_us
        for wait in step.of("wait")
        if wait.awaited == "gather"
    }
    assert waits == {
        ("root", "forward"): 3000,
        **{(f"layers.{i}", "forward"): 1000 for i in range(4)},
    }
    gathers = step.lane("gather")
    assert gathers.count == 9
    assert gathers.wire_us == 9 * 3000
    assert gathers.wire_us - gathers.hidden_us == 7000
    reductions = step.lane("reduce")
    # The last layer's and the root's come after all compute, one after the other.
    assert reductions.wire_us - reductions.hidden_us == 2000
    assert step.exposed_us == 9000
    assert step.exposed_share == pytest.approx(9000 / step.duration_us)


def test_what_compute_does_adds_up_to_the_step():
    step = steps(Machine(layers=4, compute_us=2000, optimizer_us=4000))[0]
    assert step.compute_us("forward") == 5 * 2000  # root and layers
    assert step.compute_us("backward") == 5 * 4000
    assert step.compute_us("outside") == 4000
    total = step.compute_us("forward", "backward", "outside") + step.exposed_us
    assert total == pytest.approx(step.duration_us)


def test_a_moment_belongs_to_the_innermost_group_and_to_none_while_it_waits():
    step = steps(Machine(layers=2))[0]
    edges = [(stretch.start_us, stretch.end_us) for stretch in step.compute]
    assert edges == sorted(edges)
    assert all(end <= start for (_, end), (start, _) in pairwise(edges))
    forward = [stretch.group for stretch in step.compute if stretch.phase == "forward"]
    assert forward == ["root", "layers.0", "layers.1"]
    assert length(without(edges, step.waits)) == pytest.approx(length(edges))


def test_the_wire_is_idle_when_nothing_is_on_it():
    machine = Machine(layers=1, compute_us=2000, gather_us=500, reduce_us=100, optimizer_us=1000)
    step = steps(machine)[0]
    assert step.idle_wire_us == pytest.approx(step.duration_us - 3 * 500 - 2 * 100)


def test_bytes_are_those_on_the_wire():
    machine = Machine(layers=3, layer_numel=1000, world=2)
    step = steps(machine)[0]
    # bf16, half of it comes from the other rank; the root is twice as large and gathered once.
    assert step.lane("gather").nbytes == (2 * 3 + 2) * 1000 * 2 / 2


def test_waits_are_means_over_steps_and_ranks():
    machine = Machine(layers=4, slow_gathers={"layers.2": 6000})
    found = steps(machine, num_steps=3)
    assert len(found) == 6
    longest = mean_waits(found)[0]
    assert (longest.group, longest.phase, longest.awaited) == ("layers.2", "forward", "gather")
    assert longest.mean_us == pytest.approx(7000)


def test_the_rank_that_is_shortest_on_the_wire_came_last():
    late = latest_rank(steps(Machine(world=3, late_rank=1, late_us=500, layers=4), num_steps=2))
    assert late is not None
    assert late.rank == 1
    assert late.share == 1.0 and late.steps_share == 1.0
    assert late.waited_us == pytest.approx(500 * (9 + 5))  # gathers and reductions of a step
    assert latest_rank(steps(Machine(world=1))) is None


def test_the_typical_step_is_the_median_of_the_lowest_rank():
    machine = Machine(jitter=0.2)
    found = steps(machine, num_steps=3)
    times = sorted(step.duration_us for step in found if step.rank == 0)
    assert typical(found).duration_us == times[1]


def test_memory_begins_with_the_level_before_the_step():
    first, second = (step for step in steps(Machine(), num_steps=2) if step.rank == 0)
    assert first.memory[-1].gathered == 0
    assert second.memory[0].time_us <= second.start_us
    machine = Machine()
    # The root and, at depth 1, the layer that computes and the next one.
    peak = machine.gathered_bytes("root") + 2 * machine.gathered_bytes("layers.0")
    assert max(sample.gathered for sample in first.memory) == peak


@pytest.mark.parametrize(("device", "lead_us"), [("cuda", 30_000), ("cpu", 0)])
def test_memory_is_that_of_the_step_though_the_host_is_ahead_of_the_gpu(device: str, lead_us: int):
    trace = simulated_trace(Machine(device=device), num_steps=3)
    together = [step.memory for step in steps_of(parse_trace(trace))]
    for event in trace["traceEvents"]:
        if event["ph"] == "C":
            event["ts"] -= lead_us
        elif "issued" in event.get("args", {}):
            event["args"]["issued"] -= lead_us
    ahead = steps_of(parse_trace(trace))
    assert [step.start_us - step.host[0] for step in ahead] == [lead_us] * 3
    for step, samples in zip(ahead, together, strict=True):
        assert [s.gathered for s in step.memory] == [s.gathered for s in samples]
