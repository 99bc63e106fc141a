"""One step of one root's model, readable from the top to the bottom.

    forward of a state       enter    memory: what was gathered is kept, or gathered now; the gather of the next state is issued
                                      wait, unsharded parameters on the modules
                             leave    sharded parameters back; memory back, now or later (`Retention`)
    backward of a state      reach    states that backward has left are finished; memory as above, and the next gather
                             finish   parameters off, memory back; gradients reduced or added up
    end of a pass                     states that were not finished are; unused gathers are given back, streams joined

`hooks` calls this for modules; autograd calls `Step.reach`, `gradient_arrived` and `end_of_pass`. `Schedule` answers what comes
next. What a plain step does not run is elsewhere: the model and its check (`root_model`), failed steps (`interruption`), gradients
of gradients (`second_order`), CUDA graphs (`captures`).

[Note: two gather buffers]
The gather of the next state overlaps with this state's compute, so two gather buffers live at any time, not three. With
a forecast, the next gather is issued before the compute, into other memory, and this state's memory is released right
after its forward. Without one (the first forward, or one that leaves the order), a state only gets its sharded
parameters back after its forward; its memory is released once the next state has been gathered
(`Step._left_last`), so that this gather need not wait for it.

[Note: writes in forward]
Users may write sharded parameters within a forward, before the module that has them runs: momentum encoders (MoCo, BYOL),
hooks that write a later block. Such a write may come after a gather on a forecast. So a forward asks whether the shards
are what was gathered when it uses a gather, not when it issues one, and gathers again if not. All ranks write, so all of them
do; one that does not is told of as in any divergence. The module is not gathered on a forecast again: the forecast
of a step would be in vain. Backward does not ask: it needs the weights of forward, and refuses others.

A module may also write its own parameters in its forward, while they are gathered (normalised weights). When they leave the
modules, each rank writes its part of them to its shards (`FSDPParamGroup._keep_writes`). The shards' version stays: it is
that of the weights which the rest of this forward, and so backward, uses.

Torch does not count writes through ``param.data``. Data that are assigned to it are found by their address; what an operator
writes there is not seen.

[Note: memory first]
Gradients could be sent off as soon as all of a state have arrived. But its unsharded parameters are in memory then,
and may still be needed. A moment later backward reaches the output of the state before it, and they are not needed any
more. So their memory is released first, and only then is memory for the reduction allocated: memory often peaks here.
The first state of forward has no state before it, and does not wait. Gathers, too, take memory as late as they can
while memory peaks: at the beginning of backward, when all activations are there. When backward has left the first
`LEFT_AT_PEAK` states, their activations are released, and small gathers may take memory early (`has_room` of the context):
that saves host time.

[Note: recomputation]
Activation checkpointing runs forward again within backward. If backward has reached the state, recomputation finds it
unsharded and leaves it so. If not (reentrant checkpointing, or several states in one checkpoint), recomputation is a forward
of its own, whose outputs get hooks of their own. A reentrant checkpoint runs a backward pass within the backward
pass; each pass finishes the states it reached.

[Note: whose backward is over]
Autograd executes, among the nodes that are ready, the one created last. So when the node that produced the output of
call c runs, every reachable node created after it has run: a ready one would have been preferred, and one that was not
ready waits for nodes that were created even later, and the last of these is ready. Therefore, when backward reaches the
output of call c, the work of all calls that began after c ended is done. A unit that backward reached only through such
calls is not needed any more, and gradients of those calls that have not arrived never will. If another, earlier call of
the unit is reached later, it is gathered again. This holds whether or not inputs require gradients, and with frozen and
unused parameters. (Forward passes run on several threads at once are outside of it; what arrives late is then still
reduced at the end of backward.)
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fullshard import torch_border
from fullshard.engine import (
    backward_inputs,
    captures,
    interruption,
    profiler_ranges,
    second_order,
)
from fullshard.engine.model_changes import CHANGES
from fullshard.engine.schedule import FORWARD, Call, Schedule, Unit
from fullshard.engine.second_order import SecondOrder, parts_with_graph
from fullshard.engine.sharded_state import Retention, ShardedState
from fullshard.engine.training_state import TrainingState
from fullshard.errors import ConfigurationError, LifecycleError
from fullshard.storage.param import FSDPParam
from fullshard.transport.monitor import POSITION, monitor
from fullshard.transport.observer import Part
from fullshard.transport.streams import CONTEXTS, FSDPCommContext

if TYPE_CHECKING:
    from fullshard.engine.root_model import RootModel
    from fullshard.engine.state import FSDPState

LEFT_AT_PEAK = 2
"""States that backward leaves while a step's memory is about at its peak."""

# Read on the hot path, where an enum's own lookup takes longer than what it decides.
_SHARDED = ShardedState.SHARDED
_SHARDED_POST_FORWARD = ShardedState.SHARDED_POST_FORWARD
_FORWARD = TrainingState.FORWARD
_NONE = Retention.NONE
_FORECAST = Retention.FORECAST


class ReachedState:
    """A state that backward has reached and not left."""

    def __init__(self, backward_pass: int, state: FSDPState) -> None:
        self.backward_pass = backward_pass
        self.calls: list[Call[FSDPState]] = []
        """Calls through whose outputs backward came."""
        changes, trainable = state.trainable_ids
        if changes != CHANGES.count:
            params = (param for group in state.groups for param in group.params)
            trainable = tuple(id(param) for param in params if param.trainable)
            state.trainable_ids = CHANGES.count, trainable
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


class Step:
    """The steps of one root's model: their gathers, waits, releases and reductions, and the order of these.

    Made at the first forward of the outermost state, the root, and shared by all states below it.
    """

    def __init__(self, model: RootModel, context: FSDPCommContext) -> None:
        self.model = model
        self.root, self.states = model.root, model.states
        self.context = context
        self.schedule: Schedule[FSDPState] = Schedule()
        self._forwards: list[tuple[FSDPState, list[FSDPState]]] = []
        """Forwards now running, one inside the other, each with the states used within it so far: for `ObservedUse`."""
        self._left_last: FSDPState | None = None
        """The state whose memory is given back when the next state has been gathered, if any: [Note: two gather buffers]."""
        self.has_run = False
        """Whether a forward has ended."""
        self.passes: list[int] = []
        """Ids of the backward passes that are running and have reached a state; more than one if they are nested."""
        self.reached: dict[FSDPState, ReachedState] = {}
        """States that backward has reached and not left, in that order."""
        self._reduced: set[FSDPState] = set()
        """States that have sent gradients off since the outermost pass began."""
        self._to_be_reduced: set[FSDPState] = set()
        """States that backward has left, to come back to them, while gradients that it has written wait."""
        self.postponed: set[FSDPState] = set()
        """States whose gradients a pass has only added up, of those that the user will finalize."""
        self._num_left = 0
        """States that were left since the outermost pass began."""
        self._has_run_backward = False
        """Whether a pass has ended."""
        self.second_order: SecondOrder | None = None
        """Work that passes have added to graphs; None until one adds some, as with ``create_graph=True``."""
        self.awaits_finalization = False
        """Whether passes have ended whose backward the user has not finalized."""
        self.num_resets = 0
        self._broke_off = False
        """Whether an exception has ended work of the engine's own halfway: see `break_off`."""

    @property
    def busy(self) -> bool:
        """Whether a forward or backward is running."""
        return bool(self.passes) or any(state.call is not None for state in self.states)

    # --- forward ----------------------------------------------------------------------------------

    def enter(self, state: FSDPState) -> None:
        """A module of ``state`` begins its forward: unshard it, and prefetch the state that comes next."""
        if torch_border.backward_pass_id() != -1:
            self._enter_recomputation(state)
            return
        POSITION.phase = "forward"
        root = self.root
        if (state is root or root.call is None) and (
            self._broke_off
            or self.passes
            # Torch calls no hooks after a `KeyboardInterrupt`, so such a forward counts as running still.
            or (state.depth and torch_border.num_running(state.modules) < 2)
        ):
            interruption.reset_unfinished(self)
        if state.depth == 0:
            if state is root:
                self._begin_forward()
            elif root.call is None:  # a part of the model is run on its own
                self._begin_gathers((state,))
                if self.model.changes_seen != CHANGES.count:
                    self.model.agree()
        state.depth += 1
        if state.depth == 1:
            if self._forwards:
                self._forwards[-1][1].append(state)
            self._forwards.append((state, []))
        if state.call is not None:
            return  # a module inside a module of the same state, or another module of a shared group
        call, expected = self.schedule.enter(state, self.needs_gather)
        self._begin_call(state, call)
        for group in state.groups:
            if group.reshard_if_written():
                state.written_in_forward = True
        call.weight_versions = self._use(state, gives_back=True)
        following = state.options.forward_prefetch
        if following is not None:
            self.gather(following)
        elif expected is not None:
            self.gather((expected,))

    def _enter_recomputation(self, state: FSDPState) -> None:
        """A module of ``state`` begins its forward again, within backward: [Note: recomputation]."""
        state.recomputes = True
        if state in self.reached:
            return  # unsharded, and stays so
        state.depth += 1
        if state.call is None:
            call = self.schedule.recompute(state, torch_border.backward_pass_id())
            self._begin_call(state, call)
            call.weight_versions = self._use(state, gives_back=True)
            self.gather(self.before(state, call))

    def _begin_forward(self) -> None:
        POSITION.raised = None
        self._give_back_last()
        for state in self.states:
            if state.call is not None or state.depth or state.modules_run:
                end_call(state)  # of a forward that an exception ended
        self._forwards.clear()
        if self.context.observer is not None:
            self.context.observer.abandoned(self.states)
        self._begin_gathers(self.states)
        model = self.model
        if (
            model.changes_seen != CHANGES.count
            or model.tree_changed
            or (model.may_drop and not torch.is_grad_enabled())
        ):
            model.look()
        self.schedule.begin_forward()

    def _begin_gathers(self, states: Sequence[FSDPState]) -> None:
        """Between steps the shards may have been written: gather from what they are now.

        What a user keeps gathered (by `unshard`, or by options) is gathered again if a write to the
        shards was counted; fused optimizers and writes to ``param.data`` do not count theirs, so what
        was merely left from a forward is not trusted.
        """
        if not self.model.observes_stages and torch_border.pipelining_is_imported():
            self.model.observe_stages()
        options, context = self.root.options, self.context
        event, options.post_optim_event = options.post_optim_event, None  # counts once
        if context.asynchronous:
            if context.at_border():
                captures.begin_forward(self, states)
                if options.event_is_captured is not context.in_capture:
                    event = None  # [Note: borders of a capture]
            context.gathers_wait_for(event)
        for state in states:
            left = state.retention is Retention.BACKWARD
            for group in state.groups:
                group.begin_forward(left_unsharded=left)
            if left:
                state.retention = _NONE

    def _begin_call(self, state: FSDPState, call: Call[FSDPState]) -> None:
        """Note that ``state`` begins a forward, or its recomputation."""
        POSITION.module = state.name
        state.call = call
        state.training_state = _FORWARD

    def leave(self, state: FSDPState) -> None:
        """A module of ``state`` has ended its forward: reshard the state if it was the last one."""
        if state.call is None:
            return  # recomputed after backward had reached the state
        state.depth -= 1
        if state.depth > 0:
            return
        in_forward = torch_border.backward_pass_id() == -1
        if in_forward:
            self._note_inner(state)
        # Outside of the model's forward it is unknown whether a group's other modules follow.
        alone = in_forward and self.root.call is None
        if alone or len(state.modules_run) == len(state.modules):
            self._finish_call(state, in_forward=in_forward)
            if state is self.root and in_forward:
                self._end_forward()

    def _note_inner(self, state: FSDPState) -> None:
        """Note the states used within a forward that has ended; one that an exception ended tells nothing."""
        while self._forwards:
            running, inner = self._forwards.pop()
            if running is state:
                if sys.exception() is None:
                    state.use.inner = tuple(inner)
                return

    def _finish_call(self, state: FSDPState, *, in_forward: bool) -> None:
        assert state.call is not None, "only a running call can end"
        is_done = self.schedule.leave(state.call)
        end_call(state)
        self.has_run = True
        options = state.options
        if not options.reshard_after_forward:
            state.retention = _NONE
            if options.kept_for_backward_only:
                state.retention = Retention.BACKWARD
                state.use_sharded_params()
        elif not state.groups:
            pass  # there is nothing to release, now or later
        elif in_forward and is_done:
            for group in state.groups:
                group.reshard_after_forward()
        else:
            if self._left_last is not state:
                self._give_back_last()
            state.use_sharded_params()
            self._left_last = state

    def _end_forward(self) -> None:
        for state in self.states:
            if state.call is not None:  # not all modules of a shared group were used
                self._finish_call(state, in_forward=True)
        self._drop_forecast()  # it was wrong
        # The last state of forward is the first of backward, and could stay. But between the two
        # comes the loss, where the memory of a step usually peaks, and the first gather of backward
        # hides behind it.
        self._give_back_last()
        has_backward = self.schedule.end_forward() and torch.is_grad_enabled()
        for state in self.states:
            options = state.options
            kept = not options.reshard_after_forward and (
                options.auto_reshard or options.kept_for_backward_only
            )
            if (
                state.step is self
            ):  # memory of one that has gone to another root is that one's to answer for
                state.retention = Retention.BACKWARD if kept and state.gathered else _NONE
            if not has_backward:
                # No backward will put the sharded parameters back, and users who write them or build an optimizer must
                # find them. The memory is kept where a graph may be hidden in an output.
                if state.retention is Retention.BACKWARD and not torch.is_grad_enabled():
                    state.reshard()
                    state.retention = _NONE
                else:
                    state.use_sharded_params()
        if self.context.host_reads_results and not torch.is_grad_enabled():
            self.context.synchronize()  # no backward will; the host may write the shards now
        POSITION.phase = "outside"

    # --- gathers and releases, in both passes ------------------------------------------------------

    def needs_gather(self, state: FSDPState) -> bool:
        """Whether the next use of ``state`` needs a gather, or one that has been issued on a forecast.

        See [Note: one order of collectives]. A state in forward that is resharded after it needs one for its next use.
        """
        if state.step is not self:
            return False  # it has gone to another root
        if state.retention is _FORECAST or state is self._left_last:
            return True
        if state.call is not None and state.options.reshard_after_forward:
            return bool(state.groups)
        for group in state.groups:  # on the hot path: cheaper than any()
            if (found := group.sharded_state) is _SHARDED or found is _SHARDED_POST_FORWARD:
                return True
        return False

    def gather(self, states: Sequence[FSDPState]) -> None:
        """Issue the gathers of states that are needed soon: `Retention.FORECAST`."""
        observer = self.context.observer
        for state in states:
            if state.step is not self:
                continue  # it has gone to another root
            if state.written_in_forward and not self.passes:
                continue  # [Note: writes in forward]
            for group in state.groups:  # on the hot path: cheaper than any()
                if group.sharded_state is not _SHARDED and (
                    group.sharded_state is not _SHARDED_POST_FORWARD
                ):
                    break  # one is gathered
            else:
                part: Part = "backward_prefetch" if self.passes else "forward_prefetch"
                if observer is not None:
                    observer.begins(part, state)
                for group in state.groups:
                    group.unshard(may_stay=_stays(state))
                state.retention = _FORECAST
                if observer is not None:
                    observer.ends(part, state)

    def _use(self, state: FSDPState, *, gives_back: bool = False) -> tuple[int, ...]:
        """Put the unsharded parameters on the modules; return the versions of these weights.

        With ``gives_back``, what was kept until the next gather is given back when that has been issued.
        """
        groups, last, stays = state.groups, self._left_last, _stays(state)
        gives_back = (
            gives_back and last is not None and last is not state and self.needs_gather(state)
        )
        self._claim(state)
        for group in groups:  # all of them, before the first is waited for
            if (found := group.sharded_state) is _SHARDED or found is _SHARDED_POST_FORWARD:
                group.unshard(may_stay=stays)
        if gives_back:
            self._give_back_last()
        if len(groups) == 1:  # as of most states
            return (groups[0].ensure_unsharded(may_stay=stays),)
        return tuple([group.ensure_unsharded(may_stay=stays) for group in groups])

    def _claim(self, state: FSDPState) -> None:
        """Let memory that was gathered on a forecast, or kept until the next gather, be used now."""
        if state.retention is _FORECAST:
            state.retention = _NONE
        if state is self._left_last:
            self._left_last = None

    def _backward_needs_gather(self, call: Call[FSDPState]) -> bool:
        """Whether the backward of ``call``, which comes later, needs a gather."""
        state = call.living_unit()
        return (
            state is not None
            and (call.has_backward or state.recomputes)
            and state.options.unshard_in_backward
            and self.needs_gather(state)
        )

    def before(self, state: FSDPState, call: Call[FSDPState]) -> Sequence[FSDPState]:
        """Return the states whose backward comes after that of ``call``, to gather while ``state`` computes."""
        chosen = state.options.backward_prefetch
        if chosen is not None:
            return chosen
        found = call.gathered_before
        if found is not None and not self._backward_needs_gather(found):
            found = look_past(call, self._backward_needs_gather)
        unit = None if found is None else found.living_unit()
        return () if unit is None else (unit,)

    def unshard_for_weights(self, states: Sequence[FSDPState]) -> None:
        """Unshard states for a backward that starts within their graphs; see `pipelines`."""
        needed = [state for state in states if state.options.unshard_in_backward]
        self.gather(needed)  # all of them, before the first is waited for
        for state in needed:
            self._use(state)

    def _drop_forecast(self) -> None:
        for state in self.states:
            if state.retention is _FORECAST and state.step is self:
                state.retention = _NONE
                state.reshard()

    def _give_back_last(self) -> None:
        """Give back memory kept until the next gather, which has been issued or does not come."""
        state, self._left_last = self._left_last, None
        if state is not None:
            for group in state.groups:
                group.reshard_after_forward()

    def hand_over(self, states: Collection[FSDPState]) -> None:
        """Let another root have these of our states: a model was wrapped again, or one of its parts ran first.

        Between steps. A backward that is still to come finds its states by itself. Our own root, if it is not
        among them, runs as before, and knows all its states still; those handed over then run as parts of the
        other's model.
        """
        self._give_back_last()
        for state in states:
            if state.step is self and state.retention is _FORECAST:
                state.retention = _NONE
                state.reshard()
        self.context.join()
        with self.context.all_gather:
            # From now on groups gather on streams that know nothing of our releases: rule 1 for our memory.
            self.context.wait_for_releases()

    # --- backward: a state is reached ---------------------------------------------------------------

    @staticmethod
    def reach(call: Call[FSDPState], gradient: Tensor | None = None) -> None:
        """Backward has reached an output of ``call``: bring the state's parameters. A hook of that output.

        The graph that holds it must not keep the model, so it looks the state up. The state may belong to another root by then.
        """
        state = call.living_unit()
        step = None if state is None else state.step
        if state is None or step is None:
            return
        if torch.is_grad_enabled() or torch_border.innermost_transform() is not None:
            if gradient is not None:
                step._reach_aside(call, gradient)
                return
            if torch.is_grad_enabled():
                SecondOrder.of(step)
        if not step._arrive(state, call):
            return  # by another output
        observer = step.context.observer
        if observer is not None:
            observer.begins("pre_backward", state)
        # Asked for before this state is gathered: of one that was used twice, an earlier call may come next.
        following = () if state.options.prefetches_late else step.before(state, call)
        if state.options.unshard_in_backward:
            step._use(state)
        else:
            step._claim(state)
        if following:
            step.gather(following)
        if observer is not None:
            observer.ends("pre_backward", state)
            observer.backward_begins(state, call.begin)

    def _reach_aside(self, call: Call[FSDPState], gradient: Tensor) -> None:
        """Reach a call outside of transforms, which run backward passes of their own; or in one that makes a graph."""
        parts = parts_with_graph(gradient) if torch.is_grad_enabled() else ()
        with torch_border.outside_transforms():
            if parts:
                SecondOrder.of(self).watch(parts, None)
            self.reach(call)

    def _arrive(self, state: FSDPState, call: Call[FSDPState]) -> bool:
        """Note that backward has reached ``call``, and finish what it has left; return False if it was reached before."""
        this_pass = torch_border.backward_pass_id()
        reached = self.reached.get(state)
        if (reached is not None and call in reached.calls) or call.finished_in == this_pass:
            return False
        if state.options.unshard_in_backward:
            for group, version in zip(state.groups, call.weight_versions, strict=True):
                if group.weight_version != version:
                    raise _weights_have_changed(state)
        if this_pass not in self.passes:
            self._begin_pass(this_pass)
        graphs = self.second_order
        if graphs is None or not graphs.awaited(this_pass):  # the order of calls says nothing then
            for other, theirs in tuple(self.reached.items()):
                if has_left(theirs.calls, call):
                    self._finish(other)
        if graphs is not None and torch.is_grad_enabled():
            graphs.add(state, this_pass)
        use = state.use
        use.returns_inner_output = bool(use.inner) and any(
            encloses(call, other) for each in self.reached.values() for other in each.calls
        )
        reached = self.reached.get(state)  # it may have been left by a later call
        if reached is None:
            reached = self.reached[state] = ReachedState(this_pass, state)
        state.training_state = TrainingState.PRE_BACKWARD
        reached.calls.append(call)
        use.reached_at, use.num_trainable = call.begin, reached.expected
        POSITION.module = state.name
        return True

    def _begin_pass(self, this_pass: int) -> None:
        """Note that a pass has reached this model, and ask for a call at its end."""
        context = self.context
        if torch_border.profiler_enabled() is not (context.profiler_ranges is not None):
            profiler_ranges.follow(context)
        if not self.passes:
            self._num_left, context.has_room = 0, False
            if context.asynchronous:
                if context.at_border():
                    captures.cross_border(self, is_known=self._has_run_backward)
                context.gathers_wait_for()
        POSITION.phase = "backward"
        self.passes.append(this_pass)
        torch_border.queue_end_of_backward(
            functools.partial(end_of_pass, weakref.ref(self), this_pass)
        )

    # --- backward: gradients arrive -----------------------------------------------------------------

    def gradient_arrived(self, state: FSDPState, param_id: int) -> None:
        """Autograd has accumulated the gradient of the unsharded parameter with this id, maybe the state's last one."""
        reached = self.reached.get(state)
        if reached is None:
            # Backward came without passing an output we know of, or once more after the state was
            # finished.
            this_pass = torch_border.backward_pass_id()
            if this_pass not in self.passes:
                self._begin_pass(this_pass)
            reached = self.reached[state] = ReachedState(this_pass, state)
            state.training_state = TrainingState.PRE_BACKWARD
        elif not reached.awaited:
            state.training_state = TrainingState.PRE_BACKWARD  # one more, to be sent off again
            return
        reached.awaited.discard(param_id)
        if reached.awaited or state is self.root:
            return
        if state.options.prefetches_late and reached.calls:
            self.gather(self.before(state, reached.calls[-1]))
        graphs = self.second_order
        if (graphs is not None and graphs.awaited(reached.backward_pass)) or _is_first(
            reached.calls
        ):
            # Nothing comes before it in forward, or a graph of an earlier pass is executed: backward
            # leaves it at its end only. [Note: memory first]
            self._reduce(state)
            state.training_state = TrainingState.POST_BACKWARD

    def _reduce(self, state: FSDPState) -> None:
        observer = self.context.observer
        if observer is not None:
            observer.begins("post_backward_reduce", state)
        for group in state.groups:
            if state.options.requires_gradient_sync:
                group.reduction.reduce(include_unused=state not in self._reduced)
            else:
                group.reduction.accumulate()
        self._reduced.add(state)
        if observer is not None:
            observer.ends("post_backward_reduce", state)

    # --- backward: a state is left ------------------------------------------------------------------

    def _finish(self, state: FSDPState, *, at_end: bool = False) -> None:
        """Backward has left ``state``: give the memory back, reduce what has not been sent off.

        Gradients of a module that backward comes back to, for an earlier call of it, have not arrived then. What
        `fused_linear` has written of them waits, too, unless the pass is ``at_end``.
        """
        context = self.context
        if context.observer is not None:
            context.observer.backward_ends(state)
        self._num_left += 1
        if self._num_left == LEFT_AT_PEAK:
            context.has_room = True
        reached = self.reached.pop(state)
        for call in reached.calls:
            call.finished_in = reached.backward_pass
        any_arrived = len(reached.awaited) < reached.expected
        if self.second_order is not None:
            self.second_order.finish(state, reached.calls, any_arrived=any_arrived)
        unused = reached.take_unused(state)
        if any_arrived:
            state.use.unused = unused
        unsent = state.training_state is TrainingState.PRE_BACKWARD
        if state.call is not None and state.call.made_in == FORWARD:
            # A forward that ran this backward pass goes on.
            state.training_state = _FORWARD
        else:
            if state.call is not None:
                end_call(state)  # of a recomputation that stopped early
            state.training_state = TrainingState.POST_BACKWARD
            self._leave_memory(state)
        if unsent and (any_arrived or at_end or not _has_products(state)):
            self._reduce(state)
        elif unsent:
            self._to_be_reduced.add(state)

    def _leave_memory(self, state: FSDPState) -> None:
        """Put the sharded parameters on the modules behind a backward; give the memory back unless the user keeps it."""
        state.retention = _NONE
        for group in state.groups:
            if state.options.reshard_after_backward:
                group.reshard()
            else:
                group.use_sharded_params()

    def _end_pass(self) -> None:
        """The outermost pass has ended: reduce what other ranks may reduce, and end backward unless the user does."""
        if self.second_order is not None:
            self.second_order.end_pass()
        for state in self.states:
            if state.step is not self:
                continue
            # No hook has told of its last products; or backward did not reach it here, but may have on other ranks.
            if (state in self._to_be_reduced and _has_products(state)) or (
                state not in self._reduced
                and any(group.reduction.settings.zero_unused for group in state.groups)
            ):
                self._reduce(state)
            if state.training_state is TrainingState.POST_BACKWARD:
                state.training_state = TrainingState.IDLE
        if self.root.options.manual_finalization:
            self.postponed.update(
                state for state in self.states if not state.options.requires_gradient_sync
            )
        self._reduced.clear()
        self._to_be_reduced.clear()
        self._has_run_backward = True
        self.context.has_room = True
        if self.root.options.manual_finalization:
            self.awaits_finalization = True
            self._give_back(is_last=False)
            POSITION.phase = "outside"
        else:
            self._end_backward()

    def end_backward(self) -> None:
        """No pass of this backward comes any more: give back what was left, and join the streams."""
        try:
            self._end_backward()
        except BaseException as error:
            self.break_off(error)
            raise

    def _end_backward(self) -> None:
        observer, options = self.context.observer, self.root.options
        if observer is not None:
            observer.begins("root_post_backward_callback", None)
        self._give_back(is_last=options.is_last_backward or options.manual_finalization)
        # Always: code that reads `.grad` after a backward, the last one or not, does not know that it must wait.
        self.context.join()
        self.awaits_finalization = False
        POSITION.phase = "outside"
        if observer is not None:
            observer.ends("root_post_backward_callback", None)

    def _give_back(self, *, is_last: bool) -> None:
        """Give back memory that was gathered and not used, and if the backward was the last one, memory kept for it."""
        self._give_back_last()
        self._drop_forecast()
        for state in self.states:
            if state.call is not None:
                if not state.in_forward:
                    end_call(state)  # of a recomputation that stopped early
                    state.reshard()
            elif not state.options.reshard_after_forward and self.root.call is None:
                # Backward did not come to it. Between steps users find sharded parameters: what they write to others is lost.
                if state.options.reshard_after_backward and is_last:
                    state.reshard()
                    state.retention = _NONE
                else:
                    state.use_sharded_params()
        if is_last:
            for state in self.states:
                for group in state.groups:
                    # One that backward did not reach, or whose parameters it did not need.
                    if group.sharded_state is _SHARDED_POST_FORWARD:
                        group.drop_post_forward_shard()

    def reduce_microbatches(self, states: Sequence[FSDPState]) -> None:
        """Reduce gradients that several backwards have added up; `end_backward` comes next."""
        POSITION.phase = "backward"
        try:
            # About the order of a backward pass, and the same on all ranks.
            for state in reversed(states):
                POSITION.module = state.name
                self._leave_memory(state)  # [Note: memory first]
                self._reduce(state)
        except BaseException as error:
            self.break_off(error)
            raise
        self._reduced.clear()
        self.postponed.difference_update(states)

    # --- a step that failed -------------------------------------------------------------------------

    def break_off(self, error: BaseException) -> None:
        """Note an exception that leaves the engine's own code: the next forward resets the model before it begins.

        It can come at any line (a signal handler's, `KeyboardInterrupt` for example), and then records are half of one
        state and half of another. Only misuse is refused before anything has changed.
        """
        if not isinstance(error, (ConfigurationError, LifecycleError)):
            self._broke_off = True

    def forget(self, *, together: bool) -> None:
        """Forget the forward and the passes that are running, and their order if all ranks do: see `interruption.reset`."""
        self.passes.clear()
        self.context.has_room = True
        for state in self.reached:
            state.awaited.clear()
        self.reached.clear()
        self._reduced.clear()
        self._to_be_reduced.clear()
        self.postponed.clear()
        self.second_order = None
        self.awaits_finalization = False
        self.num_resets += 1
        self._left_last = None
        for state in self.states:
            end_call(state)
            state.training_state = TrainingState.IDLE
            if state.step is self:
                state.retention = _NONE
        self.schedule.abandon_forward()
        if together:
            self.schedule = Schedule()
        self._broke_off = False


# --- what autograd calls: by weak references, as a graph that outlives its model must not keep it -------------------------


def run_backward(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run a backward pass of any model with autograd's own ``run``; sharded parameters are seen to."""
    if any(torch_border.inputs_of_backward(args)):
        run, args = backward_inputs.with_unsharded(run, args, options)
    try:
        # A backward pass may come through a model whose latest graph is alive; not through one that is recomputed as a whole.
        graphs = [context.latest_graph for context in CONTEXTS]
        if any(graph is not None and graph() is not None for graph in graphs):
            # By default, autograd runs the work of a device in a thread of its own.
            with torch.autograd.set_multithreading_enabled(False):
                gradients = run(*args, **options)
        else:
            gradients = run(*args, **options)
    except BaseException as error:
        monitor().exception_left(error)
        captures.end_failed_pass()
        told = backward_inputs.needed_too_late(error)
        if told is None:
            raise
        raise told from error
    if second_order.ADDED_AT_END:
        second_order.watch_results(gradients or ())
    return gradients


def gradient_arrived(
    awaited: set[int], param_id: int, state_ref: weakref.ref[FSDPState], _: Tensor
) -> None:
    """Note that a gradient has been accumulated; tell the step if it is one it has to act on."""
    if len(awaited) > 1:  # for every parameter in every step
        awaited.discard(param_id)  # others are still to come
        return
    state = state_ref()
    if state is not None and state.step is not None:
        state.step.gradient_arrived(state, param_id)


def watch_gradient(state_ref: weakref.ref[FSDPState], param: FSDPParam) -> None:
    """Have `gradient_arrived` run when the gradient of an unsharded parameter has been accumulated."""
    state = state_ref()
    assert state is not None, "a state outlives its groups"
    assert param.unsharded_param is not None, "watched once it is on a module"
    # The hook refers to the parameter by its id: it must not keep it alive.
    param.unsharded_param.register_post_accumulate_grad_hook(
        functools.partial(gradient_arrived, state.awaited, id(param), state_ref)
    )
    param.watched = True


def end_of_pass(step_ref: weakref.ref[Step], this_pass: int) -> None:
    """End a backward pass, which has executed its last node."""
    step = step_ref()
    if step is None:
        return
    if torch_border.innermost_transform() is not None:
        with torch_border.outside_transforms():
            end_of_pass(step_ref, this_pass)
        return
    try:
        if step.second_order is not None:
            step.second_order.note_added_at_end(this_pass)
        # The state reached last is finished first. It is the first of forward, whose gradients are sent before the end
        # where all of them have arrived. Ranks may differ in that, but must reduce in one order.
        for state, reached in reversed(tuple(step.reached.items())):
            if reached.backward_pass == this_pass:
                step._finish(state, at_end=True)
        step.passes.remove(this_pass)
        if not step.passes:
            step._end_pass()
    except BaseException as error:
        step.break_off(error)
        raise


def leave_call(state_ref: weakref.ref[FSDPState], gradient: Tensor) -> None:
    """Watch the gradient of an input of one of the state's calls: [Note: gradients of gradients]."""
    if not torch.is_grad_enabled():
        return  # no later pass comes through it
    state = state_ref()
    if state is not None and state.step is not None:
        parts = parts_with_graph(gradient)
        if parts:
            with torch_border.outside_transforms():
                SecondOrder.of(state.step).watch(parts, state)


def has_left(calls: Sequence[Call[Unit]], reached: Call[Unit]) -> bool:
    """Whether the work of ``calls`` is done when backward reaches the output of ``reached``: [Note: whose backward is over]."""
    end = reached.end
    if end is None or not calls:
        return False
    for call in calls:  # on the hot path: cheaper than all()
        if call.begin <= end:
            return False
    return True


def encloses(outer: Call[Unit], inner: Call[Unit]) -> bool:
    """Whether ``inner`` ran within ``outer``."""
    return (
        outer.end is not None
        and inner.end is not None
        and outer.begin < inner.begin
        and inner.end < outer.end
    )


def look_past(call: Call[Unit], needs_gather: Callable[[Call[Unit]], bool]) -> Call[Unit] | None:
    """Return the latest of the calls before this one whose backward needs a gather, or None.

    `gathered_before` is that call from now on. Calls that need no gather are looked at once in a backward, not once
    for each call after them.
    """
    found, passed = call.gathered_before, [call]
    while found is not None and not needs_gather(found):
        passed.append(found)
        found = found.gathered_before
    for each in passed:
        each.gathered_before = found
    return found


def _stays(state: FSDPState) -> bool:
    """Whether memory that is gathered now may be used by later forwards, too."""
    return not (state.options.reshard_after_forward and state.options.reshard_after_backward)


def end_call(state: FSDPState) -> None:
    """Forget the forward of ``state`` that is running, if any: it has ended, or never will."""
    state.call, state.depth = None, 0
    state.modules_run.clear()
    if state.training_state is _FORWARD:
        state.training_state = TrainingState.IDLE


def _weights_have_changed(state: FSDPState) -> LifecycleError:
    return LifecycleError(
        f"Weights must not change between a forward and its backward, but those of {state.name!r} have: by an "
        "optimizer step, a load or another write. Gradients would mix old weights with new ones. Run backward "
        "before the weights are changed, or forward again after it; then reset_iter_state() on the root module."
    )


def _has_products(state: FSDPState) -> bool:
    """Whether backward has written gradients of the state that have not been sent off."""
    return any(group.reduction.has_products for group in state.groups)


def _is_first(calls: Sequence[Call[FSDPState]]) -> bool:
    """Whether nothing comes before the calls in forward."""
    for call in calls:  # on the hot path: cheaper than all()
        if call.previous is not None:
            return False
    return True
