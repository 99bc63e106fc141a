"""One sharded model in training: the order of gathers, prefetches and releases.

    forward, per state     enter          gather (unless issued earlier), wait, unsharded parameters
                                          on the modules, gather of the next state issued
                           leave          sharded parameters back, memory released
    backward, per state    see `backward_passes`, which decides what is needed when
    end of backward        unused prefetches are released, streams are joined

`module_hooks` and `backward_hooks` call this.

[Note: two gather buffers]
The gather of the next state overlaps with this state's compute, so two gather buffers live at any time, not three. With
a forecast, the next gather is issued before the compute, into other memory, and this state's memory is released right
after its forward. Without one (the first forward, or one that leaves the order), a state only gets its sharded
parameters back after its forward; its memory is released (`_reshard_later`) once the next state has been gathered, so
that this gather need not wait for it.

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
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Collection, Sequence

import torch

from fullshard import torch_border
from fullshard.engine import captures, pipelines, process_hooks
from fullshard.engine.backward_passes import BackwardPasses
from fullshard.engine.model_changes import CHANGES
from fullshard.engine.ownership import unmanaged_params
from fullshard.engine.schedule import FORWARD, Call, Schedule
from fullshard.engine.sharded_state import ShardedState
from fullshard.engine.state import FSDPState
from fullshard.engine.training_state import TrainingState
from fullshard.errors import ConfigurationError, LifecycleError
from fullshard.transport.monitor import POSITION, monitor
from fullshard.transport.streams import FSDPCommContext

# Read on the hot path, where an enum's own lookup takes longer than what it decides.
_SHARDED = ShardedState.SHARDED
_SHARDED_POST_FORWARD = ShardedState.SHARDED_POST_FORWARD
_FORWARD = TrainingState.FORWARD


class Runtime:
    """One root's model: who is unsharded, who is in forward, who was prefetched.

    Made at the first forward of the outermost state, the root, and shared by all states below it.
    """

    def __init__(self, root: FSDPState, states: Sequence[FSDPState], context: FSDPCommContext):
        self.root = root
        self.states = tuple(states)
        self.context = context
        self.schedule: Schedule[FSDPState] = Schedule()
        self.backward = BackwardPasses(self)
        self._monitor = monitor().of_model()
        self._running: list[tuple[FSDPState, list[FSDPState]]] = []
        """Forwards now running, one inside the other, each with the states used within it so far: for `ObservedUse`."""
        self._reshard_later: FSDPState | None = None
        """The state whose memory is released after the next gather: [Note: two gather buffers]."""
        self._prefetched: set[FSDPState] = set()
        """Gathered on a forecast and not used yet."""
        self._tree_changed = True
        """Whether modules or parameters may have joined the model since it was last checked."""
        self._has_run = False
        """Whether a forward has ended."""
        self.awaits_finalization = False
        """Whether passes have ended whose backward the user has not finalized."""
        self.num_resets = 0
        self._broke_off = False
        """Whether an exception has ended work of the engine's own halfway: see `break_off`."""

    # --- the model --------------------------------------------------------------------------------

    def connect(self) -> None:
        """Let all groups use the model's streams."""
        for state in self.states:
            for number, group in enumerate(state.groups, 1):
                several = len(state.groups) > 1
                part = f" (group {number} of {len(state.groups)})" if several else ""
                group.connect(self.context, state.name, in_tags=state.name_in_common + part)
        self.limit_reductions()

    def limit_reductions(self) -> None:
        """Let as many reductions be in flight as the most demanding state asks for."""
        self.context.max_reductions = max(state.options.max_reductions for state in self.states)

    def agree(self) -> None:
        """Compare the model with those of other ranks, if something has changed since they were compared."""
        if self._monitor.changes_seen != CHANGES.count:
            self._monitor.agree(self.root, self.states)

    def hand_over(self, states: Collection[FSDPState]) -> None:
        """Let another root have these of our states: a model was wrapped again, or one of its parts ran first.

        Between steps. A backward that is still to come finds its states by itself. Our own root, if it is not
        among them, runs as before, and knows all its states still; those handed over then run as parts of the
        other's model.
        """
        self._reshard_now()
        for state in self._prefetched.intersection(states):
            state.reshard()
        self._prefetched.difference_update(states)
        self.context.join()
        with self.context.all_gather:
            # From now on groups gather on streams that know nothing of our releases: rule 1 for our memory.
            self.context.wait_for_releases()

    @property
    def busy(self) -> bool:
        """Whether a forward or backward is running."""
        return bool(self.backward.running) or any(state.call is not None for state in self.states)

    def break_off(self, error: BaseException) -> None:
        """Note an exception that leaves the engine's own code: the next forward resets the model before it begins.

        It can come at any line (a signal handler's, `KeyboardInterrupt` for example), and then records are half of one
        state and half of another. Only misuse is refused before anything has changed.
        """
        if not isinstance(error, (ConfigurationError, LifecycleError)):
            self._broke_off = True

    def _is_unfinished(self, state: FSDPState) -> bool:
        """Whether the pass before the forward that begins now with ``state`` was left without an end.

        Torch calls no hooks after a `KeyboardInterrupt`, so such a forward counts as running still.
        """
        return (
            self._broke_off
            or bool(self.backward.running)
            or (state.depth > 0 and torch_border.num_running(state.modules) < 2)
        )

    def _reset_unfinished(self) -> None:
        warnings.warn(
            "The last forward or backward pass did not finish (an exception?): gradients that were not reduced are dropped. "
            "Call reset_iter_state() on the root module after a failed step.",
            stacklevel=2,
        )
        self.reset()

    def reset(self, *, together: bool = False) -> None:
        """Return to the state between steps, whatever happened: see `FSDPModule.reset_iter_state`.

        With ``together``, all ranks do so after the same step, though in different places of it. What they have
        learned from it may differ, and is forgotten.
        """
        if self.context.observer is not None:
            self.context.observer.abandoned(self.states)
        if self.context.asynchronous and self.context.at_border():
            self.context.cross_border()  # a capture may have failed, whose events are of no use now
        self.context.join(accumulate=False)
        self.backward.abandon()
        self.awaits_finalization = False
        self.num_resets += 1
        self._prefetched.clear()
        self._reshard_later = None
        for state in self.states:
            self.end_call(state)
            state.training_state = TrainingState.IDLE
            state.left_unsharded = False
            state.options.end_microbatches()
            for group in state.groups:
                group.drop_gather()
                group.reshard()
                group.reducer.drop()
        self.schedule.abandon_forward()
        if together:
            self.schedule = Schedule()
            for state in self.states:
                state.recomputes = False
        self._broke_off = False

    # --- forward ----------------------------------------------------------------------------------

    def enter(self, state: FSDPState) -> None:
        """A module of ``state`` begins its forward: unshard it, and prefetch the state that comes next."""
        if torch_border.backward_pass_id() != -1:
            self.backward.enter_recomputation(state)
            return
        POSITION.phase = "forward"
        if (state is self.root or self.root.call is None) and self._is_unfinished(state):
            self._reset_unfinished()
        if state is self.root and state.depth == 0:
            self._begin_forward()
        elif self.root.call is None and state.depth == 0:  # a part of the model is run on its own
            self._begin_gathers((state,))
            self.agree()
        state.depth += 1
        if state.depth == 1:
            if self._running:
                self._running[-1][1].append(state)
            self._running.append((state, []))
        if state.call is not None:
            return  # a module inside a module of the same state, or another module of a shared group
        call, expected = self.schedule.enter(state, self.needs_gather)
        self.begin_call(state, call)
        following = state.options.forward_prefetch
        if following is not None:
            self.prefetch(following)
        elif expected is not None:
            self.prefetch((expected,))

    def begin_call(self, state: FSDPState, call: Call[FSDPState]) -> None:
        """Unshard ``state`` for a forward or its recomputation."""
        POSITION.module = state.name
        state.call = call
        state.training_state = _FORWARD
        if call.made_in == FORWARD:
            for group in state.groups:
                if group.reshard_if_written():
                    state.written_in_forward = True
        if self._reshard_later is state:
            self._reshard_later = None
        elif self._reshard_later is not None and self.needs_gather(state):
            self._issue_gathers(state)
            self._reshard_now()
        self._prefetched.discard(state)
        call.weight_versions = self._unshard(state)

    def end_call(self, state: FSDPState) -> None:
        """Forget the forward of ``state`` that is running, if any: it has ended, or never will."""
        state.call, state.depth = None, 0
        state.modules_run.clear()
        if state.training_state is _FORWARD:
            state.training_state = TrainingState.IDLE

    def _begin_forward(self) -> None:
        POSITION.raised = None
        self._reshard_now()
        for state in self.states:
            if state.call is not None or state.depth or state.modules_run:
                self.end_call(state)  # of a forward that an exception ended
        self._running.clear()
        if self.context.observer is not None:
            self.context.observer.abandoned(self.states)
        self._begin_gathers(self.states)
        if self._tree_changed:
            self._check_tree()
        if not torch.is_grad_enabled():
            self._monitor.runs_without_gradients(self.root, self.states)
        self.agree()
        self.schedule.begin_forward()

    @property
    def _has_peers(self) -> bool:
        """Whether other ranks have a part of the model, or a replica. Not on the hot path."""
        return any(
            group.mesh_info.shard_mesh_size * group.mesh_info.replicate_mesh_size > 1
            for state in self.states
            for group in state.groups
        )

    def _begin_gathers(self, states: Sequence[FSDPState]) -> None:
        """Between steps the shards may have been written: gather from what they are now.

        What a user keeps gathered (by `unshard`, or by options) is gathered again if a write to the
        shards was counted; fused optimizers and writes to ``param.data`` do not count theirs, so what
        was merely left from a forward is not trusted.
        """
        pipelines.observe()
        options = self.root.options
        event, options.post_optim_event = options.post_optim_event, None  # counts once
        if self.context.asynchronous:
            if self.context.at_border():
                self.cross_border(states)
                if options.event_is_captured is not self.context.in_capture:
                    event = None  # [Note: borders of a capture]
            self.context.gathers_wait_for(event)
        for state in states:
            for group in state.groups:
                group.begin_forward(left_unsharded=state.left_unsharded)
            state.left_unsharded = False

    def cross_border(self, states: Sequence[FSDPState]) -> None:
        """Begin a forward of ``states`` that is captured in a CUDA graph, or comes after such a one: see `captures`."""
        captures.cross_border(self, is_known=self._has_run)
        enters_or_leaves = self.context.enters_or_leaves
        for state in self.states if enters_or_leaves else states:
            if state.runtime is not self:
                continue  # it has gone to another root
            for group in state.groups:
                group.drop_gather()
                group.reshard()
                if enters_or_leaves:
                    group.drop_unsharded_params()

    def _check_tree(self) -> None:
        """Warn of trainable parameters that joined the model after it was sharded: the engine does not reduce them.

        That is legal, since users may average their gradients by hand, where the engine cannot see it.
        """
        if any(group.full_params_installed for state in self.states for group in state.groups):
            return  # the modules have other parameters for a while
        root = self.root.modules[0]
        strangers = unmanaged_params(root, [state.ignored for state in self.states])
        if strangers and self._has_peers:
            warnings.warn(
                "All trainable parameters of a sharded model should be sharded or ignored, or their gradients stay "
                f"different on every rank; these were added afterwards: {strangers}. Call fully_shard (or replicate) on "
                "the new modules, too, or replace modules before the model is sharded. Nothing is wrong if you average "
                "these gradients yourself, before the optimizer's step.",
                stacklevel=2,
            )
        self._tree_changed = False
        process_hooks.watch(root.modules(), functools.partial(_tree_changed, weakref.ref(self)))

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
        """Note what was used within a forward that has ended; one that an exception ended tells nothing."""
        while self._running:
            running, inner = self._running.pop()
            if running is state:
                if sys.exception() is None:
                    state.use.inner = tuple(inner)
                return

    def _finish_call(self, state: FSDPState, *, in_forward: bool) -> None:
        assert state.call is not None, "only a running call can end"
        is_done = self.schedule.leave(state.call)
        self.end_call(state)
        self._has_run = True
        options = state.options
        if not options.reshard_after_forward:
            state.left_unsharded = options.kept_for_backward_only
            if options.kept_for_backward_only:
                state.use_sharded_params()
        elif not state.groups:
            pass  # there is nothing to release, now or later
        elif in_forward and is_done:
            for group in state.groups:
                group.reshard_after_forward()
        else:
            if self._reshard_later is not state:
                self._reshard_now()
            state.use_sharded_params()
            self._reshard_later = state

    def _end_forward(self) -> None:
        for state in self.states:
            if state.call is not None:  # not all modules of a shared group were used
                self._finish_call(state, in_forward=True)
        self._drop_prefetched()  # the forecast was wrong
        # The last state of forward is the first of backward, and could stay. But between the two
        # comes the loss, where the memory of a step usually peaks, and the first gather of backward
        # hides behind it.
        self._reshard_now()
        has_backward = torch.is_grad_enabled() and self.schedule.has_backward
        for state in self.states:
            options = state.options
            kept = not options.reshard_after_forward and (
                options.auto_reshard or options.kept_for_backward_only
            )
            state.left_unsharded = kept and state.gathered
            if not has_backward:
                # No backward will put the sharded parameters back, and users who write them or build an optimizer must
                # find them. The memory is kept where a graph may be hidden in an output.
                if state.left_unsharded and not torch.is_grad_enabled():
                    state.reshard()
                else:
                    state.use_sharded_params()
        if self.context.host_reads_results and not torch.is_grad_enabled():
            self.context.synchronize()  # no backward will; the host may write the shards now
        self.schedule.end_forward()
        POSITION.phase = "outside"

    # --- gathers and releases, in both passes ------------------------------------------------------

    def needs_gather(self, state: FSDPState) -> bool:
        """Whether the next use of ``state`` needs a gather, or one that has been issued on a forecast.

        See [Note: one order of collectives]. A state in forward that is resharded after it needs one for its next use.
        """
        if state.runtime is not self:
            return False  # it has gone to another root
        if state in self._prefetched or state is self._reshard_later:
            return True
        if state.call is not None and state.options.reshard_after_forward:
            return bool(state.groups)
        for group in state.groups:  # on the hot path: cheaper than any()
            if (found := group.sharded_state) is _SHARDED or found is _SHARDED_POST_FORWARD:
                return True
        return False

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
        """Return the states whose backward comes after that of ``call``: what to gather while ``state`` computes."""
        chosen = state.options.backward_prefetch
        if chosen is not None:
            return chosen
        found = call.gathered_before
        if found is not None and not self._backward_needs_gather(found):
            found = call.look_past(self._backward_needs_gather)
        unit = None if found is None else found.living_unit()
        return () if unit is None else (unit,)

    def unshard_for_backward(self, state: FSDPState, call: Call[FSDPState]) -> None:
        """Unshard ``state`` for the backward of ``call``, if it needs that, and prefetch what comes next."""
        POSITION.module = state.name
        # Asked for before this state is gathered: of one that was used twice, an earlier call may come next.
        following = () if state.options.prefetches_late else self.before(state, call)
        if self._reshard_later is state:
            self._reshard_later = None
        self._prefetched.discard(state)
        if state.options.unshard_in_backward:
            self._unshard(state)
        if following:
            self.prefetch(following)

    def unshard_for_weights(self, states: Sequence[FSDPState]) -> None:
        """Unshard states for a backward that starts within their graphs; see `pipelines`."""
        needed = [state for state in states if state.options.unshard_in_backward]
        self.prefetch(needed)  # all of them, before the first is waited for
        for state in needed:
            if self._reshard_later is state:
                self._reshard_later = None
            self._prefetched.discard(state)
            self._unshard(state)

    def _unshard(self, state: FSDPState) -> tuple[int, ...]:
        """Put the unsharded parameters on the modules; return the versions of these weights."""
        groups, options = state.groups, state.options
        stays = not (options.reshard_after_forward and options.reshard_after_backward)
        if len(groups) == 1:  # as of most states
            return (groups[0].ensure_unsharded(may_stay=stays),)
        self._issue_gathers(state)  # all of them, before the first is waited for
        return tuple([group.ensure_unsharded(may_stay=stays) for group in groups])

    def _issue_gathers(self, state: FSDPState) -> None:
        stays = not (state.options.reshard_after_forward and state.options.reshard_after_backward)
        for group in state.groups:
            group.unshard(may_stay=stays)

    def prefetch(self, states: Sequence[FSDPState]) -> None:
        """Issue the gathers of states that are needed soon."""
        for state in states:
            if state.runtime is not self:
                continue  # it has gone to another root
            if state.written_in_forward and not self.backward.running:
                continue  # [Note: writes in forward]
            for group in state.groups:  # on the hot path: cheaper than any()
                if group.sharded_state is not _SHARDED and (
                    group.sharded_state is not _SHARDED_POST_FORWARD
                ):
                    break  # one is gathered
            else:
                if torch_border.profiler_enabled():
                    labels = state.labels
                    with torch_border.profiler_range(
                        labels.backward_prefetch
                        if self.backward.running
                        else labels.forward_prefetch
                    ):
                        self._issue_gathers(state)
                else:
                    self._issue_gathers(state)
                self._prefetched.add(state)

    def _drop_prefetched(self) -> None:
        for state in self._prefetched:
            state.reshard()
        self._prefetched.clear()

    def _reshard_now(self) -> None:
        if self._reshard_later is not None:
            for group in self._reshard_later.groups:
                group.reshard_after_forward()
            self._reshard_later = None

    def end_pass(self) -> None:
        """The outermost backward pass has ended: end backward with it, unless the user does."""
        if self.root.options.manual_finalization:
            self.awaits_finalization = True
            self._give_back(is_last=False)
            POSITION.phase = "outside"
        else:
            self.end_backward()

    def end_backward(self) -> None:
        """No pass of this backward comes any more: give back what was left, and join the streams."""
        try:
            self._end_backward()
        except BaseException as error:
            self.break_off(error)
            raise

    def _end_backward(self) -> None:
        with (
            torch_border.profiler_range("FSDP::root_post_backward_callback")
            if torch_border.profiler_enabled()
            else torch_border.NO_RANGE
        ):
            options = self.root.options
            self._give_back(is_last=options.is_last_backward or options.manual_finalization)
            # Always: code that reads `.grad` after a backward, the last one or not, does not know that it must wait.
            self.context.join()
            self.awaits_finalization = False
            POSITION.phase = "outside"

    def _give_back(self, *, is_last: bool) -> None:
        """Give back what was gathered and not used, and if the backward was the last one, what was kept for it."""
        self._reshard_now()
        self._drop_prefetched()
        for state in self.states:
            if state.call is not None:
                if not state.in_forward:
                    self.end_call(state)  # of a recomputation that stopped early
                    state.reshard()
            elif not state.options.reshard_after_forward and self.root.call is None:
                self._release_unreached(state, is_last=is_last)
        if is_last:
            for state in self.states:
                for group in state.groups:
                    # One that backward did not reach, or whose parameters it did not need.
                    if group.sharded_state is ShardedState.SHARDED_POST_FORWARD:
                        group.drop_post_forward_shard()

    def _release_unreached(self, state: FSDPState, *, is_last: bool) -> None:
        """Give back what was kept for a backward that did not come to ``state``.

        Between steps users find sharded parameters: what they write to others is lost.
        """
        if state.options.reshard_after_backward and is_last:
            state.reshard()
            state.left_unsharded = False
        else:
            state.use_sharded_params()


def _tree_changed(runtime: weakref.ref[Runtime]) -> None:
    alive = runtime()
    if alive is not None:
        alive._tree_changed = True
