"""The recorded order answers which unit comes next, which came before, and whose backward is over.

Units are strings. A forward is written as nested calls:

    run(schedule, ["root", ["a"], ["b", ["c"]]])        root runs a, then b, which runs c
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from typing import Any

import pytest

from fullshard.engine.schedule import FORWARD, Call, Schedule
from fullshard.engine.step import has_left, look_past


class Unit(str):
    """A name that can be referred to weakly."""


unit_of = functools.cache(Unit)
"""The one unit of a name."""

CHAIN = ["root", ["a"], ["b"], ["c"]]


class Recorded:
    """What became of one forward: its calls in the order in which they began, and what was forecast at each."""

    def __init__(self) -> None:
        self.calls: list[Call[str]] = []
        self.forecast: list[str | None] = []

    def __getitem__(self, unit: str) -> Call[str]:
        """The only call of a unit."""
        (call,) = (call for call in self.calls if call.unit == unit)
        return call


def run_part(
    schedule: Schedule[str],
    nested: list[Any],
    recorded: Recorded | None = None,
) -> Recorded:
    """Run a unit and what it contains, without telling that a forward of the whole model begins."""
    recorded = recorded or Recorded()
    unit, *inner = nested
    call, expected = schedule.enter(unit_of(unit))
    recorded.calls.append(call)
    recorded.forecast.append(expected)
    for each in inner:
        run_part(schedule, each, recorded)
    schedule.leave(call)
    return recorded


def run(schedule: Schedule[str], nested: list[Any]) -> Recorded:
    """A forward of the whole model."""
    schedule.begin_forward()
    recorded = run_part(schedule, nested)
    schedule.end_forward()
    return recorded


@pytest.fixture
def schedule() -> Schedule[str]:
    return Schedule()


# --- enter: which unit comes next? -----------------------------------------------------------------------


def test_the_first_forward_has_no_forecast(schedule: Schedule[str]) -> None:
    assert run(schedule, CHAIN).forecast == [None] * 4
    assert not schedule.on_track


def test_the_forecast_is_the_order_of_the_previous_forward(schedule: Schedule[str]) -> None:
    run(schedule, CHAIN)
    assert run(schedule, CHAIN).forecast == ["a", "b", "c", None]
    assert schedule.on_track


def test_nested_calls_are_forecast_in_the_order_in_which_they_begin(
    schedule: Schedule[str],
) -> None:
    nested = ["root", ["outer", ["inner"], ["core"]], ["last"]]
    run(schedule, nested)
    assert run(schedule, nested).forecast == ["outer", "inner", "core", "last", None]


def test_a_unit_called_twice_is_forecast_by_position_not_by_name(schedule: Schedule[str]) -> None:
    nested = ["root", ["a"], ["a"], ["b"], ["a"]]
    run(schedule, nested)
    assert run(schedule, nested).forecast == ["a", "a", "b", "a", None]


def test_leaving_the_order_stops_the_forecast_for_the_rest_of_that_forward(
    schedule: Schedule[str],
) -> None:
    run(schedule, CHAIN)
    assert run(schedule, ["root", ["b"], ["a"], ["c"]]).forecast == ["a", None, None, None]
    assert not schedule.on_track
    # And what was run instead is the forecast for the next.
    assert run(schedule, ["root", ["b"], ["a"], ["c"]]).forecast == ["b", "a", "c", None]


def test_a_unit_more_than_before_stops_the_forecast(schedule: Schedule[str]) -> None:
    run(schedule, ["root", ["a"]])
    assert run(schedule, CHAIN).forecast == ["a", None, None, None]
    assert not schedule.on_track


def test_units_that_need_no_gather_are_passed_over_and_do_not_end_the_forecast(
    schedule: Schedule[str],
) -> None:
    def forecast(*order: str) -> list[str | None]:
        schedule.begin_forward()
        found = []
        for unit in map(unit_of, ("root", *order)):
            call, expected = schedule.enter(unit, lambda each: each != "kept")
            schedule.leave(call)
            found.append(expected)
        schedule.end_forward()
        return found

    forecast("a", "kept", "b", "c")
    assert forecast("a", "kept", "b", "c") == ["a", "b", "b", "c", None]
    assert forecast("a", "b", "c") == ["a", "b", "c", None]
    assert forecast("kept", "kept", "a", "b", "kept", "c") == ["a", "a", "a", "b", "c", "c", None]


def test_a_unit_does_not_repeat_if_another_is_the_next_to_be_gathered(
    schedule: Schedule[str],
) -> None:
    order = ["a", "kept", "a", "b"]
    for ends in ([False] * 4, [False, True, True, True]):
        schedule.begin_forward()
        found = []
        for unit in map(unit_of, order):
            call, _ = schedule.enter(unit, lambda each: each != "kept")
            found.append(schedule.leave(call))
        schedule.end_forward()
        assert found == ends


def test_backward_looks_past_calls_that_need_no_gather_once(schedule: Schedule[str]) -> None:
    recorded = run(schedule, CHAIN)
    asked: list[str] = []

    def needs_gather(call: Call[str]) -> bool:
        asked.append(call.unit)
        return call.unit == "a"

    assert look_past(recorded["root"], needs_gather) is recorded["a"]
    assert look_past(recorded["c"], needs_gather) is recorded["a"]
    assert asked == ["c", "b", "a", "a"]
    assert look_past(recorded["a"], needs_gather) is None
    assert recorded["c"].previous is recorded["b"]


def test_an_abandoned_forward_leaves_the_forecast(schedule: Schedule[str]) -> None:
    run(schedule, CHAIN)
    schedule.begin_forward()
    schedule.enter(unit_of("root"))
    schedule.abandon_forward()
    assert not schedule.on_track
    assert run(schedule, CHAIN).forecast == ["a", "b", "c", None]


def test_a_forward_that_ends_early_was_on_track(schedule: Schedule[str]) -> None:
    run(schedule, CHAIN)
    assert run(schedule, ["root", ["a"]]).forecast == ["a", "b"]
    assert schedule.on_track
    assert run(schedule, CHAIN).forecast == ["a", None, None, None]


def test_what_is_recomputed_after_a_shorter_forward_is_not_looked_for_in_its_order(
    schedule: Schedule[str],
) -> None:
    run(schedule, CHAIN)
    schedule.begin_forward()
    call, expected = schedule.enter(unit_of("root"), lambda unit: unit == "c")
    assert expected == "c", "the others need no gather"
    schedule.leave(call)
    schedule.end_forward()
    assert not schedule.leave(schedule.recompute(unit_of("root"), backward_pass=0))


def test_a_forward_that_never_ended_leaves_the_last_whole_order_as_forecast(
    schedule: Schedule[str],
) -> None:
    run(schedule, CHAIN)
    schedule.begin_forward()
    schedule.enter(unit_of("root"))
    schedule.enter(unit_of("c"))  # an exception ends this forward
    assert run(schedule, CHAIN).forecast == ["a", "b", "c", None]


def test_a_part_run_on_its_own_has_no_forecast_and_does_not_disturb_the_next_one(
    schedule: Schedule[str],
) -> None:
    run(schedule, CHAIN)
    assert run_part(schedule, ["b"]).forecast == [None]
    assert not schedule.on_track
    assert run(schedule, CHAIN).forecast == ["a", "b", "c", None]


def test_parts_run_on_their_own_leave_nothing_behind(schedule: Schedule[str]) -> None:
    run(schedule, CHAIN)
    calls = [weakref.ref(run_part(schedule, ["b"]).calls[0]) for _ in range(10)]
    gc.collect()
    alive = sum(call() is not None for call in calls)
    assert alive <= 1, f"{alive} of 10 calls of a part that nobody holds are still alive"


def test_parts_run_on_their_own_do_not_pile_up_in_the_order(schedule: Schedule[str]) -> None:
    run(schedule, CHAIN)
    before = sys.getrefcount(unit_of("b"))
    for _ in range(100):
        run_part(schedule, ["b"])
    gc.collect()
    assert sys.getrefcount(unit_of("b")) - before < 10


# --- call.previous: which came before this call? ---------------------------------------------------------


def test_previous_is_the_call_that_ended_just_before(schedule: Schedule[str]) -> None:
    calls = run(schedule, CHAIN)
    assert calls["a"].previous is None
    assert calls["b"].previous is calls["a"]
    assert calls["c"].previous is calls["b"]
    assert calls["root"].previous is calls["c"]


def test_previous_of_a_nesting_unit_is_the_last_one_inside_it(schedule: Schedule[str]) -> None:
    calls = run(schedule, ["root", ["a"], ["outer", ["inner"]]])
    assert calls["inner"].previous is calls["a"]
    assert calls["outer"].previous is calls["inner"]


def test_a_unit_called_twice_in_a_row_is_its_own_previous(schedule: Schedule[str]) -> None:
    _, first, second = run(schedule, ["root", ["a"], ["a"]]).calls
    assert second is not first
    assert second.previous is first


def test_previous_does_not_reach_into_an_earlier_forward(schedule: Schedule[str]) -> None:
    run(schedule, CHAIN)
    assert run(schedule, CHAIN)["a"].previous is None


def test_a_recomputation_has_the_place_of_the_latest_call(schedule: Schedule[str]) -> None:
    calls = run(schedule, CHAIN)
    again = schedule.recompute(unit_of("b"), 7)
    assert again is not calls["b"]
    assert again.unit == "b"
    assert again.previous is calls["a"]
    assert again.begin > (calls["root"].end or 0)
    schedule.leave(again)
    assert again.previous is calls["a"]
    # It is no part of the order: neither for who came before ...
    assert schedule.recompute(unit_of("c"), 7).previous is calls["b"]
    # ... nor for the forecast.
    assert run(schedule, CHAIN).forecast == ["a", "b", "c", None]


def test_a_recomputation_of_a_unit_called_twice_has_the_place_of_its_second_call(
    schedule: Schedule[str],
) -> None:
    calls = run(schedule, ["root", ["a"], ["b"], ["c"], ["b"]]).calls
    assert schedule.recompute(unit_of("b"), 7).previous is calls[3]


def test_a_recomputation_of_an_unknown_unit_has_no_place(schedule: Schedule[str]) -> None:
    assert schedule.recompute(unit_of("a"), 7).previous is None


# --- what backward adds to the graph --------------------------------------------------------------


def test_calls_know_whether_a_backward_pass_made_them(schedule: Schedule[str]) -> None:
    assert run(schedule, CHAIN)["a"].made_in == FORWARD
    assert schedule.recompute(unit_of("a"), 7).made_in == 7
    added = schedule.in_backward(unit_of("a"), 8, None)
    assert added.made_in == 8 and added.has_backward


# --- has_left: whose backward is over? ------------------------------------------------------------


def test_the_clock_ticks_at_every_begin_and_end(schedule: Schedule[str]) -> None:
    # The picture in the module docstring.
    calls = run(schedule, ["root", ["block0"], ["block1"]])
    ticks = [tick for call in calls.calls for tick in (call.begin, call.end or 0)]
    assert [sorted(ticks).index(tick) + 1 for tick in ticks] == [1, 6, 2, 3, 4, 5]
    other: Schedule[str] = Schedule()
    assert run(other, CHAIN)["root"].begin > max(ticks), "all schedules have one clock"


def test_backward_through_a_chain_has_left_what_came_after(schedule: Schedule[str]) -> None:
    calls = run(schedule, CHAIN)
    assert not has_left([calls["c"]], calls["c"])
    assert has_left([calls["c"]], calls["b"])
    assert has_left([calls["b"]], calls["a"]) and has_left([calls["c"]], calls["a"])
    assert not has_left([calls["a"]], calls["b"])
    assert not has_left([calls["root"]], calls["a"])


def test_a_parent_is_not_left_while_backward_is_inside_it(schedule: Schedule[str]) -> None:
    calls = run(schedule, ["root", ["a"], ["outer", ["inner"]], ["b"]])
    assert not has_left([calls["outer"]], calls["inner"])
    assert has_left([calls["outer"]], calls["a"]) and has_left([calls["inner"]], calls["a"])


def test_a_unit_reached_through_several_calls_is_left_with_the_first_of_them(
    schedule: Schedule[str],
) -> None:
    calls = run(schedule, ["root", ["a"], ["b"], ["a"], ["c"]]).calls
    _, first_a, b, second_a, _ = calls
    assert has_left([second_a], b)  # the first call gathers again when it is reached
    assert not has_left([second_a, first_a], b)
    assert not has_left([second_a], second_a)


def test_a_unit_is_not_left_because_a_later_forward_used_it_too(schedule: Schedule[str]) -> None:
    nested = ["root", ["outer", ["inner"]]]
    run(schedule, nested)
    second = run(schedule, nested)
    run(schedule, nested)
    assert not has_left([second["outer"]], second["inner"])
    assert not has_left([second["root"]], second["inner"])


def test_backward_that_reaches_a_call_still_running_has_left_nobody(
    schedule: Schedule[str],
) -> None:
    schedule.begin_forward()
    running, _ = schedule.enter(unit_of("root"))
    inner = run_part(schedule, ["a"])
    assert not has_left([inner["a"]], running)


def test_a_unit_reached_through_no_known_call_is_not_left(schedule: Schedule[str]) -> None:
    assert not has_left([], run(schedule, CHAIN)["a"])


def test_a_recomputation_is_later_than_all_calls(schedule: Schedule[str]) -> None:
    calls = run(schedule, CHAIN)
    again = schedule.recompute(unit_of("c"), 7)
    schedule.leave(again)
    assert has_left([again], calls["b"]) and not has_left([calls["c"]], again)


def test_a_call_does_not_keep_its_unit_alive() -> None:
    unit = Unit("mortal")
    schedule: Schedule[str] = Schedule()
    call, _ = schedule.enter(unit)
    schedule.leave(call)
    alive = weakref.ref(unit)
    del schedule, unit
    gc.collect()
    assert alive() is None
