"""What backward passes add to graphs is awaited by later passes, until these have executed it or the graph is gone."""

from __future__ import annotations

from typing import Any

import pytest

from fullshard.engine.schedule import Schedule
from fullshard.engine.second_order import SecondOrder


class Unit:
    """A state without groups."""

    groups = ()
    in_forward = False


class StepOf:
    """A step that has reached all of its states."""

    def __init__(self, *states: Unit) -> None:
        self.schedule: Schedule[Any] = Schedule()
        self.states, self.reached = states, {*states}
        self.second_order: SecondOrder | None = None


@pytest.fixture
def units() -> tuple[Unit, Unit]:
    return Unit(), Unit()


def test_a_later_pass_awaits_what_an_earlier_one_has_added(units: tuple[Unit, Unit]) -> None:
    a, b = units
    step: Any = StepOf(a, b)
    graphs = SecondOrder.of(step)
    assert SecondOrder.of(step) is graphs and not graphs.awaited(7)
    for unit in (b, a):
        graphs.add(unit, 7)  # type: ignore[arg-type]
    second, first = graphs._added(7)
    assert second.previous is first  # a later pass comes to a first, then to b
    assert not graphs.awaited(7) and graphs.awaited(8)
    graphs.end_pass()
    assert not graphs._added(7)
    graphs.finish(b, [first, second], any_arrived=False)  # type: ignore[arg-type]
    assert not graphs.awaited(8)
    graphs._awaited.add(second)  # reached once more, of a graph that was retained
    assert graphs.awaited(9)


def test_what_belongs_to_a_graph_that_is_gone_is_not_awaited(units: tuple[Unit, Unit]) -> None:
    step: Any = StepOf(*units)
    graphs = SecondOrder.of(step)
    graphs.add(units[0], 7)  # type: ignore[arg-type]
    graphs.end_pass()
    assert not graphs.awaited(8)
