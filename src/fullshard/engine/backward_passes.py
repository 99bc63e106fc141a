"""The backward passes of one model: which states they have reached, and when gradients are sent off.

    pre_backward       an output's gradient has arrived: states behind it are finished, this one is unsharded,
                       the gather of the one before it is issued
    gradient_arrived   the last gradient of a state: sent off now, or when backward has left the state
    finish             backward has left a state: memory released, gradients reduced
    end_of_pass        states not finished are finished; after the outermost pass, streams are joined

[Note: memory first]
Gradients could be sent off as soon as all of a state have arrived. But its unsharded parameters are in memory then,
and may still be needed. A moment later backward reaches the output of the state before it, and they are not needed any
more. So their memory is released first, and only then is memory for the reduction allocated: memory often peaks here.
The first state of forward has no state before it, and does not wait. Gathers, too, take memory as late as they can
while memory peaks: at the beginning of backward, when all activations are there. When backward has left the first
`LEFT_AT_PEAK` states, their activations are released, and small gathers may take memory early (`has_room` of the context):
that saves host time.

[Note: recomputation]
Activation checkpointing runs forward again within backward. If backward has reached the state (its
pre_backward has run), recomputation finds it unsharded and leaves it so. If not (reentrant
checkpointing, or several states in one checkpoint), recomputation is a forward of its own, whose
outputs get hooks of their own. A reentrant checkpoint runs a backward pass within the backward
pass; each pass finishes the states it reached.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fullshard import torch_border
from fullshard.engine import backward_hooks, captures
from fullshard.engine.schedule import BackwardGraphs, Call, has_left
from fullshard.engine.state import FSDPState
from fullshard.engine.training_state import TrainingState
from fullshard.errors import LifecycleError
from fullshard.storage.param import FSDPParam
from fullshard.transport.monitor import POSITION

if TYPE_CHECKING:
    from fullshard.engine.runtime import Runtime

LEFT_AT_PEAK = 2
"""States that backward leaves while a step's memory is about at its peak."""


class ReachedState:
    """A state that backward has reached and not left."""

    def __init__(self, backward_pass: int, state: FSDPState) -> None:
        self.backward_pass = backward_pass
        self.calls: list[Call[FSDPState]] = []
        """Through whose outputs backward came."""
        trainable = state.trainable_ids
        self.awaited = state.awaited
        """Ids of parameters whose gradients have not arrived. Always the same set, which their hooks know."""
        self.awaited.clear()
        self.awaited.update(trainable)
        self.expected = len(trainable)
        self.stream = (
            torch_border.current_stream_id(state.device) if state.options.fuse_gradients else 0
        )
        """The compute stream, for `fused_linear`; not asked for by others."""

    def take_unused(self, state: FSDPState) -> Collection[FSDPParam]:
        """Return the parameters whose gradients have not arrived, and await them no longer."""
        if not self.awaited:
            return ()
        params = [param for group in state.groups for param in group.params]
        unused = frozenset(param for param in params if id(param) in self.awaited)
        self.awaited.clear()
        return unused


class BackwardPasses:
    """The backward passes of one root's model that are running; more than one if they are nested."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.running: list[int] = []
        """Ids of the passes in which a state was reached."""
        self.reached: dict[FSDPState, ReachedState] = {}
        """States that backward has reached and not left, in that order."""
        self._reduced: set[FSDPState] = set()
        """States that have sent gradients off since the outermost pass began."""
        self._to_be_reduced: set[FSDPState] = set()
        """States that backward has left, to come back to them, while gradients that it has written wait."""
        self._postponed: set[FSDPState] = set()
        """States whose gradients a pass has only added up, of those that the user will finalize."""
        self._num_left = 0
        """States that were left since the outermost pass began."""
        self._has_run = False
        """Whether a pass has ended."""
        self._graphs: BackwardGraphs[FSDPState] | None = None
        """What passes have added to graphs; None until one does, as with ``create_graph=True``."""

    # --- a state is reached -----------------------------------------------------------------------

    def pre_backward(self, state: FSDPState, call: Call[FSDPState]) -> None:
        """Backward has reached an output of ``call``: bring the state's parameters."""
        this_pass = torch_border.backward_pass_id()
        reached = self.reached.get(state)
        if (reached is not None and call in reached.calls) or call.finished_in == this_pass:
            return  # by another output
        if state.options.unshard_in_backward:
            for group, version in zip(state.groups, call.weight_versions, strict=True):
                if group.weight_version != version:
                    raise _weights_have_changed(state)
        if this_pass not in self.running:
            self._begin_pass(this_pass)
        self._finish_left(call, this_pass)
        if torch.is_grad_enabled():
            self._add_to_graph(state, this_pass)
        inner = state.use.inner and any(
            call.encloses(other) for each in self.reached.values() for other in each.calls
        )
        reached = self.reached.get(state)  # it may have been left by a later call
        if reached is None:
            reached = self.reached[state] = ReachedState(this_pass, state)
        state.training_state = TrainingState.PRE_BACKWARD
        reached.calls.append(call)
        use = state.use
        use.reached_at, use.num_trainable = call.begin, reached.expected
        use.returns_inner_output = bool(inner)
        if torch_border.profiler_enabled():
            with torch_border.profiler_range(state.labels.pre_backward):
                self._runtime.unshard_for_backward(state, call)
        else:
            self._runtime.unshard_for_backward(state, call)
        observer = self._runtime.context.observer
        if observer is not None:
            observer.backward_begins(state, call.begin)

    def pre_backward_of_backward(self, state: FSDPState, call: Call[FSDPState]) -> None:
        """A pass is about to execute what an earlier one has added to the graph for ``call``.

        That may have been a pass of the module alone, before a root around it took its state over.
        """
        if self._graphs is None:
            self._graphs = BackwardGraphs()
        self._graphs.reach(call)
        self.pre_backward(state, call)

    def _begin_pass(self, this_pass: int) -> None:
        """Note that a pass has reached this model, and ask for a call at its end."""
        context = self._runtime.context
        if not self.running:
            self._num_left, context.has_room = 0, False
            if context.asynchronous:
                if context.at_border():
                    captures.cross_border(self._runtime, is_known=self._has_run)
                context.gathers_wait_for()
        POSITION.phase = "backward"
        self.running.append(this_pass)
        torch_border.queue_end_of_backward(
            functools.partial(backward_hooks.end_of_pass, weakref.ref(self), this_pass)
        )

    def _finish_left(self, call: Call[FSDPState], this_pass: int) -> None:
        """Finish the states that backward has left behind, now that it has reached ``call``."""
        if self._graphs is not None and self._graphs.awaited(this_pass):
            return  # the order of calls says nothing then
        for other, theirs in tuple(self.reached.items()):
            if has_left(theirs.calls, call):
                self._finish(other)

    def enter_recomputation(self, state: FSDPState) -> None:
        """A module of ``state`` begins its forward again, within backward: [Note: recomputation]."""
        state.recomputes = True
        if state in self.reached:
            return  # unsharded, and stays so
        state.depth += 1
        if state.call is not None:
            return
        runtime = self._runtime
        call = runtime.schedule.recompute(state, torch_border.backward_pass_id())
        runtime.begin_call(state, call)
        runtime.prefetch(runtime.before(state, call))

    # --- gradients arrive -------------------------------------------------------------------------

    def gradient_arrived(self, state: FSDPState, param_id: int) -> None:
        """Autograd has accumulated the gradient of the unsharded parameter with this id, maybe the state's last one."""
        reached = self.reached.get(state)
        if reached is None:
            # Backward came without passing an output we know of, or once more after the state was
            # finished.
            this_pass = torch_border.backward_pass_id()
            if this_pass not in self.running:
                self._begin_pass(this_pass)
            reached = self.reached[state] = ReachedState(this_pass, state)
            state.training_state = TrainingState.PRE_BACKWARD
        elif not reached.awaited:
            state.training_state = TrainingState.PRE_BACKWARD  # one more, to be sent off again
            return
        reached.awaited.discard(param_id)
        if not reached.awaited and state is not self._runtime.root:
            self._all_arrived(state, reached)

    def _all_arrived(self, state: FSDPState, reached: ReachedState) -> None:
        runtime, graphs = self._runtime, self._graphs
        if state.options.prefetches_late and reached.calls:
            runtime.prefetch(runtime.before(state, reached.calls[-1]))
        awaits_graphs = graphs is not None and graphs.awaited(reached.backward_pass)
        if awaits_graphs or _is_first(reached.calls):
            # Nothing comes before it in forward, or a graph of an earlier pass is executed: backward
            # leaves it at its end only. [Note: memory first]
            self._reduce(state)
            state.training_state = TrainingState.POST_BACKWARD

    def _reduce(self, state: FSDPState) -> None:
        if torch_border.profiler_enabled():
            with torch_border.profiler_range(state.labels.reduce):
                self._reduce_groups(state)
        else:
            self._reduce_groups(state)

    def _reduce_groups(self, state: FSDPState) -> None:
        for group in state.groups:
            if state.options.requires_gradient_sync:
                group.reducer.reduce(include_unused=state not in self._reduced)
            else:
                group.reducer.accumulate()
        self._reduced.add(state)

    # --- a state is left --------------------------------------------------------------------------

    def _finish(self, state: FSDPState, *, at_end: bool = False) -> None:
        """Backward has left ``state``: give the memory back, reduce what has not been sent off.

        Gradients of a module that backward comes back to, for an earlier call of it, have not arrived then. What
        `fused_linear` has written of them waits, too, unless the pass is ``at_end``.
        """
        context = self._runtime.context
        if context.observer is not None:
            context.observer.backward_ends(state)
        self._num_left += 1
        if self._num_left == LEFT_AT_PEAK:
            context.has_room = True
        reached = self.reached.pop(state)
        for call in reached.calls:
            call.finished_in = reached.backward_pass
        if self._graphs is not None:
            self._finish_in_graphs(self._graphs, state, reached)
        any_arrived = len(reached.awaited) < reached.expected
        unused = reached.take_unused(state)
        if any_arrived:
            state.use.unused = unused
        unsent = state.training_state is TrainingState.PRE_BACKWARD
        if state.call is not None and state.in_forward:
            # A forward that ran this backward pass goes on.
            state.training_state = TrainingState.FORWARD
        else:
            if state.call is not None:
                self._runtime.end_call(state)  # of a recomputation that stopped early
            state.training_state = TrainingState.POST_BACKWARD
            state.left_unsharded = False
            for group in state.groups:
                if state.options.reshard_after_backward:
                    group.reshard()
                else:
                    group.use_sharded_params()
        if unsent and (any_arrived or at_end or not _has_products(state)):
            self._reduce(state)
        elif unsent:
            self._to_be_reduced.add(state)

    def _finish_in_graphs(
        self, graphs: BackwardGraphs[FSDPState], state: FSDPState, reached: ReachedState
    ) -> None:
        if graphs.of(state) is not None and len(reached.awaited) < reached.expected:
            warnings.warn(
                "backward(create_graph=True) makes no graph for the gradients of sharded parameters, because they are "
                "reduced over ranks: a second backward treats what is computed from them as constant. The first such "
                f"module: {state.name}. Differentiate with respect to inputs (torch.autograd.grad), or leave "
                "create_graph out.",
                stacklevel=2,
            )
        for call in reached.calls:
            graphs.finish(call)

    def end_of_pass(self, this_pass: int) -> None:
        """A backward pass has executed its last node."""
        try:
            self._end_pass(this_pass)
        except BaseException as error:
            self._runtime.break_off(error)
            raise

    def _end_pass(self, this_pass: int) -> None:
        if self._graphs is not None and self._graphs.latest is not None:
            backward_hooks.note_added_at_end(self._added_to_graph(this_pass))
        # The state reached last is finished first. It is the first of forward, whose gradients are sent before the end
        # where all of them have arrived. Ranks may differ in that, but must reduce in one order.
        for state, reached in reversed(tuple(self.reached.items())):
            if reached.backward_pass == this_pass:
                self._finish(state, at_end=True)
        self.running.remove(this_pass)
        if self.running:
            return
        if self._graphs is not None:
            self._graphs.end_pass()
        runtime = self._runtime
        for state in runtime.states:
            if state.runtime is not runtime:
                continue
            # Backward did not reach it here, but may have on other ranks; or nobody told of its last products.
            if (state in self._to_be_reduced and _has_products(state)) or (
                state not in self._reduced
                and any(group.reducer.settings.zero_unused for group in state.groups)
            ):
                self._reduce(state)
            if state.training_state is TrainingState.POST_BACKWARD:
                state.training_state = TrainingState.IDLE
        if runtime.root.options.manual_finalization:
            self._postponed.update(
                state for state in runtime.states if not state.options.requires_gradient_sync
            )
        self._reduced.clear()
        self._to_be_reduced.clear()
        self._has_run = True
        runtime.context.has_room = True
        runtime.end_pass()

    def reduce_postponed(self) -> None:
        """Reduce what passes have added up before the user finalizes them, of states that reduce now."""
        self.reduce_microbatches(
            [
                state
                for state in self._runtime.states
                if state.options.requires_gradient_sync
                and (
                    state in self._postponed
                    or any(group.reducer.unreduced.partial for group in state.groups)
                )
            ]
        )

    def reduce_microbatches(self, states: Sequence[FSDPState]) -> None:
        """Reduce what several backwards have added up; the runtime's `end_backward` comes next."""
        try:
            self._reduce_microbatches(states)
        except BaseException as error:
            self._runtime.break_off(error)
            raise

    def _reduce_microbatches(self, states: Sequence[FSDPState]) -> None:
        POSITION.phase = "backward"
        # About the order of a backward pass, and the same on all ranks.
        for state in reversed(states):
            POSITION.module = state.name
            state.left_unsharded = False
            for group in state.groups:  # [Note: memory first]
                if state.options.reshard_after_backward:
                    group.reshard()
                else:
                    group.use_sharded_params()
            self._reduce(state)
        self._reduced.clear()
        self._postponed.difference_update(states)

    def abandon(self) -> None:
        """Forget passes that did not end, after a failed step."""
        self.running.clear()
        self._runtime.context.has_room = True
        for state in self.reached:
            state.training_state = TrainingState.IDLE
            state.awaited.clear()
        self.reached.clear()
        self._reduced.clear()
        self._to_be_reduced.clear()
        self._postponed.clear()
        self._graphs = None

    # --- gradients of gradients: see the note in `schedule` ----------------------------------------

    def watch_gradient(self, parts: Sequence[Tensor], state: FSDPState | None) -> None:
        """Have states reached again when a later pass comes through a gradient of this one.

        That pass then executes what states have added to the graph up to here: those in backward now,
        those in whose forward this pass runs, and the given one.
        """
        calls = self._added_to_graph(torch_border.backward_pass_id(), state)
        backward_hooks.watch_graph(self, parts, calls)

    def _added_to_graph(
        self, this_pass: int, state: FSDPState | None = None
    ) -> list[Call[FSDPState]]:
        """Return what the states that are in backward now have added to the graph; see `watch_gradient`."""
        calls = []
        for each in self._runtime.states:
            if each.in_forward:
                self._add_to_graph(each, this_pass)
            if each is state or each.in_forward or each in self.reached:
                added = None if self._graphs is None else self._graphs.of(each)
                if added is not None:
                    calls.append(added)
        return calls

    def _add_to_graph(self, state: FSDPState, this_pass: int) -> None:
        if self._graphs is None:
            self._graphs = BackwardGraphs()
        if self._graphs.of(state) is None:
            call = self._runtime.schedule.in_backward(state, this_pass, self._graphs.latest)
            call.weight_versions = tuple([group.weight_version for group in state.groups])
            self._graphs.add(state, call)


def _weights_have_changed(state: FSDPState) -> LifecycleError:
    return LifecycleError(
        f"Weights must not change between a forward and its backward, but those of {state.name!r} have: by an "
        "optimizer step, a load or another write. Gradients would mix old weights with new ones. Run backward "
        "before the weights are changed, or forward again after it; then reset_iter_state() on the root module."
    )


def _has_products(state: FSDPState) -> bool:
    """Whether backward has written gradients of the state that have not been sent off."""
    return any(group.reducer.has_products for group in state.groups)


def _is_first(calls: Sequence[Call[FSDPState]]) -> bool:
    """Whether nothing comes before the calls in forward."""
    for call in calls:  # on the hot path: cheaper than all()
        if call.previous is not None:
            return False
    return True
