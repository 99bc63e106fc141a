"""Programs written by hand, played on a machine whose times are known: streams, events, the host, and what is shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fullshard.programs.plan_tool.machine import Machine
from fullshard.programs.plan_tool.playback import Playback, play
from fullshard.programs.plan_tool.profile_file import load_profile
from fullshard.programs.plan_tool.program import (
    COMPUTE,
    HOST,
    Collective,
    Direction,
    Entry,
    HostCompute,
    HostWork,
    Kernel,
    Launch,
    Program,
    Record,
    Transfer,
    Wait,
)

GATHER, REDUCE = 1, 2
STREAMS = ("compute", "all-gather", "reduce-scatter")
HOOK_S = 1.0


class _Machine:
    """Kernels and collectives take as many seconds as they have bytes; the host needs time for hooks only."""

    def __init__(self, machine: Machine) -> None:
        self.overlap, self.host = machine.overlap, machine.host

    def kernel_seconds(self, kernel: Kernel, *, is_compiled: bool) -> float:
        return kernel.nbytes / (2 if is_compiled else 1)

    def collective_seconds(self, collective: Collective) -> float:
        return float(collective.nbytes)

    def transfer_seconds(self, transfer: Transfer) -> float:
        return float(transfer.nbytes)

    def host_seconds(self, entry: Entry, *, is_compiled: bool) -> float:
        if isinstance(entry, Launch) and isinstance(entry.work, Collective):
            return self.host.collective_us * 1e-6
        if isinstance(entry, HostCompute):
            return float(entry.kernel.nbytes)
        return entry.count * HOOK_S if isinstance(entry, HostWork) else 0.0


def machine(*, slowdown: float = 1.0) -> Any:
    h100 = load_profile("h100")
    h100 = replace(h100, host=replace(h100.host, collective_us=0.0))
    return _Machine(replace(h100, overlap=replace(h100.overlap, compute_slowdown=slowdown)))


def kernel(seconds: int, stream: int = COMPUTE) -> Launch:
    return Launch(stream, Kernel("k", "memory", "float32", 0, seconds), "forward")


def collective(seconds: int, stream: int = GATHER) -> Launch:
    kind = "all_gather" if stream == GATHER else "reduce_scatter"
    return Launch(stream, Collective(kind, seconds, 8, 1, "bfloat16"), "forward")


def transfer(seconds: int, stream: int, direction: Direction) -> Launch:
    return Launch(stream, Transfer(direction, seconds, True, 8), "forward")


def updated(seconds: int) -> HostCompute:
    return HostCompute(Kernel("k", "memory", "float32", 0, seconds), "optimizer", 8)


def played(*entries: Entry, slowdown: float = 1.0) -> Playback:
    program = Program(entries, 0, len(entries), STREAMS, {})
    return play(program, machine(slowdown=slowdown))


def test_streams_run_side_by_side_and_in_order() -> None:
    result = played(collective(5), kernel(2), kernel(2))
    assert result.seconds == 5
    assert result.compute == {"memory": 4}
    assert result.idle == {"other": 1}


def test_compute_waits_for_a_gather_and_the_reason_is_named() -> None:
    result = played(collective(5), Record(GATHER, 7), kernel(2), Wait(COMPUTE, 7), kernel(1))
    assert result.seconds == 6
    assert result.idle == {"gather": 3}
    assert result.of_event(7) == 5


def test_a_wait_is_for_the_mark_of_the_moment_at_which_it_was_issued() -> None:
    later = [Record(GATHER, 7), collective(9), Record(GATHER, 7)]
    result = played(collective(1), later[0], Wait(COMPUTE, 7), *later[1:], kernel(1))
    assert result.idle == {"gather": 1, "other": 8}
    assert result.seconds == 10


def test_a_wait_for_an_event_without_a_mark_is_no_wait() -> None:
    assert played(Wait(COMPUTE, 3), kernel(1)).idle == {}


def test_compute_that_the_host_issues_late_waits_for_the_host() -> None:
    result = played(kernel(1), HostWork(4), kernel(2))
    assert result.seconds == 6
    assert result.idle == {"host": 3}
    assert [result.of_host(entry) for entry in range(3)] == [0, 0, 4]


def test_the_host_waits_for_an_event_and_issues_nothing_meanwhile() -> None:
    result = played(kernel(3), Record(COMPUTE, 1), Wait(HOST, 1), HostWork(1), kernel(1))
    assert result.host_seconds == 4
    assert result.seconds == 5


def test_two_collectives_share_the_wire() -> None:
    # Each at half speed for 4 s; then the longer one has 2 s left.
    result = played(collective(2), collective(4, REDUCE), Record(GATHER, 1), Record(REDUCE, 2))
    assert result.of_event(1) == 4
    assert result.of_event(2) == 6


def test_copies_share_a_direction_and_hold_up_neither_compute_nor_collectives() -> None:
    up, down = transfer(4, GATHER, "to device"), transfer(4, REDUCE, "to host")
    assert played(up, down, slowdown=2.0).seconds == 4
    assert played(up, replace(down, work=up.work)).seconds == 8
    assert played(up, collective(4, REDUCE), slowdown=2.0).seconds == 4
    result = played(up, kernel(4), slowdown=2.0)
    assert result.seconds == 4
    assert result.transfers == {"to device": 4}


def test_compute_waits_for_a_copy_then_for_the_gather_behind_it() -> None:
    up = transfer(3, GATHER, "to device")
    result = played(up, collective(2), Record(GATHER, 7), Wait(COMPUTE, 7), kernel(1))
    assert result.idle == {"copy": 3, "gather": 2}


def test_the_host_waits_for_a_copy_and_updates_while_compute_stands_still() -> None:
    down = [collective(1, REDUCE), transfer(2, REDUCE, "to host"), Record(REDUCE, 1)]
    result = played(kernel(1), *down, Wait(HOST, 1), updated(4), HostWork(1), kernel(1), updated(3))
    assert result.gradient_seconds == 3
    assert result.update_seconds == 7
    # The last update begins with the last kernel, and takes two seconds longer.
    assert result.seconds == 11
    assert result.idle == {"copy": 2, "update": 6, "host": 1}


def test_a_kernel_is_slower_while_a_collective_runs() -> None:
    # 3 s at two thirds of the speed are 2 s of the kernel; 2 s are left.
    result = played(collective(3), kernel(4), slowdown=1.5)
    assert result.seconds == pytest.approx(5)


def test_times_of_compute_and_its_waits_are_the_whole_step() -> None:
    entries: list[Entry] = []
    for layer in range(6):
        entries += [collective(3), Record(GATHER, layer), HostWork(layer % 2)]
        entries += [Wait(COMPUTE, layer), kernel(2), Record(COMPUTE, 100 + layer)]
        entries += [Wait(REDUCE, 100 + layer), collective(2, REDUCE), Record(REDUCE, 200 + layer)]
    entries += [Wait(COMPUTE, 205), kernel(1)]
    result = played(*entries)
    assert sum(result.compute.values()) + sum(result.idle.values()) == pytest.approx(result.seconds)
    assert result.idle["gather"] > 0
    assert result.idle["reduction"] > 0


def test_forward_and_backward_are_over_when_the_optimizer_begins() -> None:
    update = replace(kernel(4), phase="optimizer")
    entries = [kernel(2), collective(5), Record(GATHER, 1), Wait(COMPUTE, 1), update]
    result = played(*entries)
    assert result.gradient_seconds == 5
    assert result.seconds == 9
    assert played(kernel(2)).gradient_seconds == 2


def test_compiled_kernels_take_what_the_machine_says() -> None:
    entries = (kernel(4),)
    program = Program(entries, 0, 1, STREAMS, {})
    assert play(program, machine(), is_compiled=True).seconds == 2
