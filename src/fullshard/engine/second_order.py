"""Gradients of gradients: the work that backward passes add to graphs, and the passes that come through it later.

[Note: gradients of gradients]
A backward pass with ``create_graph=True`` makes new nodes, and these use the parameters of the unit
whose backward made them. A later pass that executes them comes to them through gradients: those that
flowed out of the unit in the first pass. So in such a pass

    a `Call` is made for every unit that backward reaches, for the work it adds to the graph;
    every gradient that passes an input or output of a unit is watched, and those that the pass returns;
    when a later pass comes through one, the units that were in backward then are gathered again.

The order of [Note: whose backward is over] does not hold for such a later pass: autograd counts nodes per thread, and
on accelerators a thread of its own may have run backward. While a pass may execute calls of another
(`SecondOrder.awaited`), no unit counts as left before the end of the pass.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fullshard import torch_border
from fullshard.engine.schedule import Call

if TYPE_CHECKING:
    from fullshard.engine.state import FSDPState
    from fullshard.engine.step import Step


class SecondOrder:
    """The work that passes of one model have added to graphs, and no pass has executed yet."""

    def __init__(self, step: Step) -> None:
        self._step = weakref.ref(step)
        self._awaited: weakref.WeakSet[Call[FSDPState]] = weakref.WeakSet()
        self._of_pass: dict[FSDPState, Call[FSDPState]] = {}
        self._latest: Call[FSDPState] | None = None
        """The latest call of the running pass."""

    @staticmethod
    def of(step: Step) -> SecondOrder:
        """Return the step's instance, made at the first pass that makes a graph."""
        if step.second_order is None:
            step.second_order = SecondOrder(step)
        return step.second_order

    @property
    def step(self) -> Step:
        """The step whose passes these are."""
        step = self._step()
        assert step is not None, "it owns this"
        return step

    def awaited(self, backward_pass: int) -> bool:
        """Whether the pass may execute work that another pass has added."""
        return any(call.made_in != backward_pass for call in self._awaited)

    def add(self, state: FSDPState, this_pass: int) -> None:
        """Note that the pass now running adds the work of ``state`` to the graph."""
        if state in self._of_pass:
            return
        call = self.step.schedule.in_backward(state, this_pass, self._latest)
        call.weight_versions = tuple([group.weight_version for group in state.groups])
        self._of_pass[state] = self._latest = call
        self._awaited.add(call)

    def reach(self, call: Call[FSDPState]) -> None:
        """Begin to execute work that an earlier pass has added for ``call``, maybe not for the first time.

        That may have been a pass of the module alone, before a root around it took its state over.
        """
        self._awaited.add(call)
        self.step.reach(call)

    def finish(
        self, state: FSDPState, calls: Sequence[Call[FSDPState]], *, any_arrived: bool
    ) -> None:
        """Note that backward has left ``state``; the graphs of ``calls`` may be gone, or be executed again."""
        if state in self._of_pass and any_arrived:
            warnings.warn(
                "backward(create_graph=True) makes no graph for the gradients of sharded parameters, because they are "
                "reduced over ranks: a second backward treats what is computed from them as constant. The first such "
                f"module: {state.name}. Differentiate with respect to inputs (torch.autograd.grad), or leave "
                "create_graph out.",
                stacklevel=2,
            )
        self._awaited.difference_update(calls)

    def end_pass(self) -> None:
        """The outermost pass has ended."""
        self._of_pass.clear()
        self._latest = None

    # --- watched gradients --------------------------------------------------------------------------

    def watch(self, parts: Sequence[Tensor], state: FSDPState | None) -> None:
        """Have states reached again when a later pass comes through a gradient of this one.

        That pass then executes the work that states have added to the graph up to here: those in backward now,
        those in whose forward this pass runs, and the given one.
        """
        self._watch(parts, self._added(torch_border.backward_pass_id(), state))

    def _watch(self, parts: Sequence[Tensor], calls: Sequence[Call[FSDPState]]) -> None:
        """Have ``calls`` reached when a later pass comes through one of ``parts``, gradients of this pass."""
        hook = functools.partial(_reach_again, self._step, calls)
        for part in parts:
            part.register_hook(hook)

    def _added(self, this_pass: int, state: FSDPState | None = None) -> list[Call[FSDPState]]:
        """Return the calls for the work that the states in backward now have added to the graph; see `watch`."""
        step, calls = self.step, []
        for each in step.states:
            if each.in_forward:
                self.add(each, this_pass)
            if (each is state or each.in_forward or each in step.reached) and each in self._of_pass:
                calls.append(self._of_pass[each])
        return calls

    def note_added_at_end(self, this_pass: int) -> None:
        """Have the results of the pass that ends now watched, for the work that states have added to the graph."""
        if self._latest is not None:
            ADDED_AT_END.extend(self._added(this_pass))


ADDED_AT_END: list[Call[FSDPState]] = []
"""Calls for the work that states in backward at the end of a pass have added to the graph, until its results are watched."""


def watch_results(gradients: Sequence[Tensor | None]) -> None:
    """Watch the gradients that a pass returns, for all its inputs, also inside of modules."""
    calls = list(ADDED_AT_END)
    ADDED_AT_END.clear()
    parts = [part for each in gradients if each is not None for part in parts_with_graph(each)]
    for step in {call.unit.step for call in calls}:
        if step is not None and parts:
            SecondOrder.of(step)._watch(parts, [call for call in calls if call.unit.step is step])


def _reach_again(
    step_ref: weakref.ref[Step], calls: Sequence[Call[FSDPState]], gradient: Tensor
) -> None:
    step = step_ref()
    if step is None:
        return
    parts = parts_with_graph(gradient) if torch.is_grad_enabled() else []
    with torch_border.outside_transforms():
        if parts:
            SecondOrder.of(step).watch(parts, None)
        for call in calls:
            state = call.living_unit()
            if state is not None and state.step is not None:
                SecondOrder.of(state.step).reach(call)


def parts_with_graph(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that make up this one and have a graph."""
    return [part for part in torch_border.graph_tensors(tensor) if part.grad_fn is not None]
