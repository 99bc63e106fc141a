"""The order in which units are used, and what follows from it.

A unit is whatever is gathered and released together (here: an `FSDPState`). A `Call` is one use of
a unit in forward, with the ticks of a clock at which it began and ended. All schedules have one clock,
so that calls of units that went from one schedule to another can be compared.

    forward    tick  1     2      3      4      5      6
               unit  root( block0        block1         )
                           begin  end    begin  end    end of root

From this record `Schedule.enter` answers which unit is gathered next, without tensors, streams or hooks: the one that followed
here in the previous forward. `step` asks calls alone what comes next in backward (`look_past`: what was used before, in this
forward), and whose backward is over (`has_left`).

[Note: one order of collectives]
Ranks must issue the same collectives in the same order. What follows is what this order depends on:

    forward     the units that this forward and the previous one have used, in order
    backward    the units that this forward has used, in order

Nothing else counts, and only units that need a gather when they are used. A unit that needs none (it has no parameters,
or it was kept) may be used on some ranks and not on others, any number of times: `enter` and `look_past` look past it,
and it does not end a forecast. Otherwise such a unit would delay the next gather on some ranks until after a reduction,
or after a collective of the user.

A forecast that holds issues the same gathers, in the same order, as no forecast: it only issues them earlier. So a
rank without one (after its first forward failed, say) still agrees with the others, if no collective of the user comes
in between. For this a unit that is used twice in a row is gathered once, with a forecast and without (`leave`). A reset
keeps the previous order, since other ranks may not have been reset.

A forecast that is wrong issues one gather that a rank with another previous order does not issue. Ranks whose orders
differ have used different units, and so differ by a gather anyway, maybe of equal size; comparing tags of collectives finds out.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

Unit = TypeVar("Unit", bound=Hashable)


FORWARD = -1
"""The pass number of calls that were made in forward, not in a backward pass."""


class Call(Generic[Unit]):
    """One use of a unit in forward, or the work that its backward adds to the graph: [Note: gradients of gradients].

    Lives as long as backward may reach it: the hooks on the call's outputs hold it, and the graph holds the hooks. It
    refers to its unit weakly, so that a graph that outlives its model does not keep the model.
    """

    def __init__(
        self,
        unit: Unit,
        begin: int,
        previous: Call[Unit] | None = None,
        made_in: int = FORWARD,
    ) -> None:
        self.living_unit = weakref.ref(unit)
        """Returns the unit that was called, or None if the model is gone."""
        self.begin = begin
        self.made_in = made_in
        """The backward pass that made it: by recomputation, or by adding to the graph. Or `FORWARD`."""
        self.end: int | None = None
        """None while running."""
        self.previous = previous
        """The call that ended just before this one, in the same forward."""
        self.gathered_before = previous
        """As `previous`, without calls that `look_past` has found to need no gather in backward."""
        self.has_backward = False
        """Whether an output can receive a gradient."""
        self.finished_in = -1
        """The backward pass that has left this call behind."""
        self.weight_versions: tuple[int, ...] = ()
        """Versions of the weights that this call computes with, one for each group of the unit."""

    @property
    def unit(self) -> Unit:
        """The unit that was called. It is read only while its schedule lives, and then its units live, too."""
        unit = self.living_unit()
        assert unit is not None, "a schedule belongs to the model whose units it orders"
        return unit


_CLOCK = itertools.count(1)


def _always(_: object) -> bool:
    return True


class Schedule(Generic[Unit]):
    """The order in which units are used, in this forward and in the one before."""

    def __init__(self) -> None:
        self._order: list[Unit] = []
        self._previous_order: list[Unit] = []
        self.on_track = False
        """Whether this forward has used units in the order of the previous one so far."""
        self._in_forward = False
        self._place = 0
        """The place in the previous order, behind the unit that was entered last."""
        self._next = 0
        """The place of the unit to be gathered next, not before `_place`."""
        self._last_ended: Call[Unit] | None = None
        self._latest: dict[Unit, Call[Unit]] = {}

    def begin_forward(self) -> None:
        """A forward of the whole model begins."""
        self._order = []
        self._latest = {}
        self._last_ended = None
        self._place = self._next = 0
        self._in_forward = True
        self.on_track = bool(self._previous_order)

    @property
    def forecast(self) -> Sequence[Unit]:
        """The order of the previous forward; empty before the first has ended."""
        return self._previous_order

    def enter(
        self, unit: Unit, needs_gather: Callable[[Unit], bool] = _always
    ) -> tuple[Call[Unit], Unit | None]:
        """A unit's forward begins; returns its call and the unit to gather next, if the order holds so far.

        ``needs_gather`` tells whether a unit's next use needs a gather, or did need one that has been issued on a
        forecast: [Note: one order of collectives].
        """
        call = self._latest[unit] = Call(unit, next(_CLOCK))
        if self._in_forward:
            self._order.append(unit)
        else:
            self.on_track = False
        if self.on_track:
            place = self._place
            if place < len(self._previous_order) and self._previous_order[place] is unit:
                self._place = place + 1  # as in most steps
            else:
                self.on_track = self._find_place(unit, needs_gather)
        return call, self._find_next(unit, needs_gather) if self.on_track else None

    def _find_place(self, unit: Unit, needs_gather: Callable[[Unit], bool]) -> bool:
        """Find ``unit`` in the previous order, behind units that need no gather; return whether the order still holds."""
        previous, place = self._previous_order, self._place
        while place < len(previous) and previous[place] is not unit:
            if needs_gather(previous[place]):
                return not needs_gather(unit)
            place += 1
        if place == len(previous):
            return not needs_gather(unit)
        self._place = place + 1
        return True

    def _find_next(self, unit: Unit, needs_gather: Callable[[Unit], bool]) -> Unit | None:
        """Return the unit that the previous order gathers after ``unit``, maybe the same unit once more."""
        previous, following = self._previous_order, self._next
        if following < self._place:
            following = self._place
        while following < len(previous):
            expected = previous[following]
            if expected is unit or needs_gather(expected):
                break
            following += 1
        self._next = following
        return previous[following] if following < len(previous) else None

    def recompute(self, unit: Unit, backward_pass: int) -> Call[Unit]:
        """A unit's forward begins again, within backward; its place in the order is that of its latest call."""
        latest = self._latest.get(unit)
        previous = latest.previous if latest else None
        return Call(unit, next(_CLOCK), previous, made_in=backward_pass)

    def in_backward(
        self, unit: Unit, backward_pass: int, previous: Call[Unit] | None
    ) -> Call[Unit]:
        """A unit's backward begins, and adds to the graph; ``previous`` is the one that did so before it."""
        call = Call(unit, next(_CLOCK), previous, made_in=backward_pass)
        call.has_backward = True
        return call

    def leave(self, call: Call[Unit]) -> bool:
        """A call's forward has ended; return whether its unit is known not to repeat.

        A unit repeats if it is the next to be gathered, too, so that it can stay. Without a forecast nothing is known.
        """
        call.end = next(_CLOCK)
        unit = call.living_unit()
        assert unit is not None, "a unit is alive while its forward runs"
        if not self._in_forward:
            return False  # recomputed, or alone; after a forward, places are not those of its order
        if self._latest.get(unit) is call:
            call.previous = call.gathered_before = self._last_ended
            self._last_ended = call
        if not self.on_track:
            return False
        previous, following = self._previous_order, max(self._place, self._next)
        return following == len(previous) or previous[following] is not unit

    def end_forward(self) -> bool:
        """The forward of the whole model has ended; its order is the forecast for the next.

        Return whether an output of it can receive a gradient; of a unit that was used twice, the latest counts.
        """
        self._previous_order, self._order = self._order, []
        self._in_forward = False
        for call in self._latest.values():  # the root's comes first, and mostly has one
            if call.has_backward:
                return True
        return False

    def abandon_forward(self) -> None:
        """Forget the forward that is running, and all calls; the order of the last one that ended stays."""
        self._order = []
        self._latest = {}
        self._last_ended = None
        self._in_forward = self.on_track = False
