"""Hooks: what happens around forward and backward of every sharded module.

    forward, per state     pre_forward    gather (unless issued earlier), wait, unsharded
                                          parameters on the modules, gather of the next one issued
                           post_forward   hooks on the outputs, sharded parameters back, memory
                                          given back
    backward, per state    pre_backward   (an output's gradient is there) wait, unsharded parameters
                                          on the modules, gather of the one before issued
                           passed         backward has left the state: memory given back, gradients
                                          into the reduce buffer, reduce-scatter issued
    end of backward        states not finished are finished, streams joined, everything is sharded

[Note: two gather buffers]
The gather of the next state runs beside this state's compute, so two gather buffers live at any
time, not three. With a forecast, the next gather is issued before the compute, into other memory,
and this state's memory is given back right after its forward. Without one (the first forward, or
one that leaves the order), a state is only hidden after its forward and kept (`_kept`) until the
next one has been gathered, so that this gather need not wait for it.

[Note: memory first]
Gradients could be sent off as soon as all of a state have arrived. But its unsharded parameters are
in memory then, and may be needed still; a moment later backward reaches the output of the state
before, and they are not. So their memory is given back first, and only then memory for the reduction
is taken: a step's peak is often here. The first state of forward, which has none before it, does not wait.

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
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fullshard import torch_border
from fullshard.comm.streams import FSDPCommContext
from fullshard.engine import process_hooks
from fullshard.engine.installed_full_params import InstalledFullParams
from fullshard.engine.module_outputs import without_parameters
from fullshard.engine.param_group import FSDPParamGroup, ShardedState
from fullshard.engine.tensor_trees import cast_floating, tensors_in, to_device
from fullshard.errors import ConfigurationError, LifecycleError, UsageError
from fullshard.names import clean_name
from fullshard.plan.policies import MixedPrecisionPolicy
from fullshard.plan.schedule import FORWARD, BackwardGraphs, Call, Schedule, has_left
from fullshard.storage.sharded_params import group_of, unsharded_name


class _Labels(NamedTuple):
    """Names of a state's ranges in a profiler's trace."""

    pre_forward: str
    post_forward: str
    forward_prefetch: str
    backward_prefetch: str
    pre_backward: str
    reduce: str


class FSDPState:
    """What one `fully_shard` call put on a module, or on several that share a group.

    Lives as long as the modules. Knows its groups and options; the order of things is the
    `Runtime`'s.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[FSDPParamGroup],
        mp_policy: MixedPrecisionPolicy,
        device: torch.device,
        *,
        reshard_after_forward: bool,
        auto_reshard: bool,
        kept_for_backward_only: bool = False,
        cast_root_inputs: bool = False,
        ignored: IgnoredParams | None = None,
    ) -> None:
        self.modules = tuple(modules)
        self.groups = tuple(groups)
        self.mp_policy = mp_policy
        self.device = device
        self.set_name("")
        self.ignored: IgnoredParams = {} if ignored is None else ignored
        """Parameters below the modules that the user wants to be left alone."""
        self.reshard_after_forward = reshard_after_forward
        self.auto_reshard = auto_reshard
        """Whether the user left `reshard_after_forward` open, so that the root may decide otherwise."""
        self.kept_for_backward_only = kept_for_backward_only
        """Whether what forward leaves gathered is backward's alone: meanwhile the modules have their sharded
        parameters, and the next forward gathers anew, written to or not."""
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.forward_prefetch: tuple[FSDPState, ...] | None = None
        self.backward_prefetch: tuple[FSDPState, ...] | None = None
        self.prefetches_late = False
        """Whether backward gathers the next when this one's gradients are there, and not before."""
        self.cast_root_inputs = cast_root_inputs
        """Whether inputs are cast if this is the root, whatever its policy says."""
        self.unshard_in_backward = True
        self.is_last_backward = True
        """Of the root: whether the end of backward gives back what was kept for it."""
        self.post_optim_event: Any = None
        """Of the root: what the next forward's gathers wait for, instead of the current stream."""
        self.max_reductions = 1
        self.shared_context: FSDPCommContext | None = None
        """Of a root: streams it shares with other models."""
        self.runtime: Runtime | None = None
        self.summoned = False
        """Whether the modules are within `summon_full_params`."""
        self.installed_full_params = InstalledFullParams()
        """Full parameters that are on the modules while a state dict is made or loaded."""
        self.original_buffer_dtypes: Mapping[tuple[nn.Module, str], torch.dtype] = {}
        """By owner and name, the dtypes of buffers before they were cast for compute."""

        self.call: Call[FSDPState] | None = None
        """The forward now running."""
        self.depth = 0
        """Forwards of this state's modules now running, one inside the other."""
        self.modules_run: set[nn.Module] = set()
        self.left_gathered = False
        """Whether the last forward left the parameters gathered for a backward, and none has come."""
        self.recomputes = False
        """Whether a backward has been seen to run this state's forward again."""
        self._watched_leaves: weakref.WeakValueDictionary[int, Tensor] = (
            weakref.WeakValueDictionary()
        )
        """Inputs without a graph whose gradients are watched already, by their ids: such may come again."""
        self._input_hook = functools.partial(_left_call, weakref.ref(self))

    def set_name(self, name: str) -> None:
        """Take the full name, known at the first forward."""
        self.name = name
        self.labels = _Labels(
            f"FSDP::pre_forward ({name})",
            f"FSDP::post_forward ({name})",
            f"FSDP::forward_prefetch for {name}",
            f"FSDP::backward_prefetch for {name}",
            f"FSDP::pre_backward ({name})",
            f"FSDP::post_backward_reduce ({name})",
        )

    # --- groups -----------------------------------------------------------------------------------

    @property
    def gathered(self) -> bool:
        """Whether the whole parameters are in memory or on their way."""
        return any(group.gathered for group in self.groups)

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Of the weights that forward and backward compute with now: others after each write that counts."""
        return tuple([group.weight_version for group in self.groups])

    def unshard(self) -> None:
        """Issue the gathers."""
        stays = not (self.reshard_after_forward and self.reshard_after_backward)
        for group in self.groups:
            if not group.gathered:
                group.unshard()
                if stays:
                    group.remember_shards()

    def wait(self) -> None:
        """Put the unsharded parameters on the modules."""
        for group in self.groups:
            group.wait()
            while group.unwatched:
                _watch_gradient(self, group.unwatched.pop())

    def use_sharded_params(self) -> None:
        """Put the sharded parameters on the modules, keep the memory."""
        for group in self.groups:
            group.use_sharded_params()

    def reshard(self) -> None:
        """Put the sharded parameters on the modules, give the memory back."""
        for group in self.groups:
            group.reshard()

    def reshard_after_call(self) -> None:
        """The same after a forward, from which something may be kept for backward."""
        for group in self.groups:
            group.reshard_after_forward()

    @property
    def in_forward(self) -> bool:
        """Whether a forward is running that is no recomputation."""
        return self.call is not None and self.call.made_in == FORWARD

    def abandon_call(self) -> None:
        """Forget the forward now running, if any."""
        self.call, self.depth = None, 0
        self.modules_run.clear()

    # --- hooks ------------------------------------------------------------------------------------
    # Guarded against the compiler here, at the border to user code, and nowhere below.

    @torch_border.opaque_to_compiler
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before a module's forward: unsharded parameters on the modules, inputs in the compute dtype.

        The outermost module's inputs are moved to its device, too.
        """
        with torch_border.outside_transforms():
            runtime = self.runtime or lazy_init(self)
        with torch_border.profiler_range(self.labels.pre_forward):
            if runtime.root.call is None and self.device.type != "cpu":
                with torch_border.profiler_range("FSDP::inputs_to_device"):
                    args, kwargs = to_device(args, self.device), to_device(kwargs, self.device)
            with torch_border.outside_transforms():
                runtime.enter(self)
            dtype = self.mp_policy.param_dtype
            if dtype is not None and (
                self.mp_policy.cast_forward_inputs
                or (self.cast_root_inputs and runtime.root is self)
            ):
                args, kwargs = cast_floating(args, dtype), cast_floating(kwargs, dtype)
            if torch.is_grad_enabled() and torch_border.backward_pass_id() == -1:
                self._watch_inputs((args, kwargs))
            if runtime.context.recorder is not None:
                runtime.context.recorder.forward_begins(self)
            return args, kwargs

    def _watch_inputs(self, inputs: Any) -> None:
        """Have `_left_call` run when the gradient of an input is there: [Note: gradients of gradients]."""
        for tensor in tensors_in(inputs):
            for part in torch_border.graph_tensors(tensor):
                if not part.requires_grad:
                    continue
                if part.is_leaf:
                    if self._watched_leaves.get(id(part)) is part:
                        continue
                    self._watched_leaves[id(part)] = part
                part.register_hook(self._input_hook)

    @torch_border.opaque_to_compiler
    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """After a module's forward: outputs watched for backward, sharded parameters on the modules.

        After an exception, too; the output is None then.
        """
        runtime = self.runtime
        if runtime is None:
            return output  # the first forward was refused
        if runtime.context.recorder is not None:
            runtime.context.recorder.forward_ends(self)
        with torch_border.profiler_range(self.labels.post_forward):
            if self.mp_policy.output_dtype is not None:
                output = cast_floating(output, self.mp_policy.output_dtype)
            self.modules_run.add(module)
            returned = without_parameters(output, self.groups, self.name)
            outputs = _with_graph(returned.tensors) if torch.is_grad_enabled() else []
            with torch_border.outside_transforms():
                runtime.leave(self, outputs)
            if returned.refusal is not None:
                raise returned.refusal
            return returned.output


class Runtime:
    """One sharded model in training: who is gathered, who is in backward, what is in flight.

    Made at the first forward of the outermost state, the root, and shared by all states below it.
    """

    def __init__(self, root: FSDPState, states: Sequence[FSDPState], context: FSDPCommContext):
        self.root = root
        self.states = tuple(states)
        self.context = context
        self.schedule: Schedule[FSDPState] = Schedule()
        self._kept: FSDPState | None = None
        self._prefetched: set[FSDPState] = set()
        """Gathered on a forecast and not used yet."""
        self._passes: list[int] = []
        """Backward passes now running in which a state was reached; more than one if they are nested."""
        self._reached: dict[FSDPState, _Reached] = {}
        """States that backward has reached and not left."""
        self._reduced: set[FSDPState] = set()
        """States whose gradients this backward has sent off."""
        self._tree_changed = True
        """Whether modules or parameters may have joined the model since it was last checked."""
        self._graphs: BackwardGraphs[FSDPState] = BackwardGraphs()

    def connect(self) -> None:
        """Let all groups use the model's streams."""
        for state in self.states:
            for group in state.groups:
                group.connect(self.context, state.name)
        self.limit_reductions()

    def limit_reductions(self) -> None:
        """Let as many reductions be in flight as the most demanding state asks for."""
        self.context.max_reductions = max(state.max_reductions for state in self.states)

    def hand_over(self, states: Collection[FSDPState]) -> None:
        """Let another root have these of our states: a model was wrapped again, or one of its parts ran first.

        Between steps. A backward that is still to come finds its states by itself. Our own root, if it is not
        among them, runs as before, and knows all its states still; those handed over then run as parts of the
        other's model.
        """
        self._release_kept()
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
        return bool(self._passes) or any(state.call is not None for state in self.states)

    # --- forward ----------------------------------------------------------------------------------

    def enter(self, state: FSDPState) -> None:
        """A module of ``state`` begins its forward."""
        if torch_border.backward_pass_id() != -1:
            self._enter_recomputation(state)
            return
        if state is self.root and state.depth == 0:
            self._begin_forward()
        elif self.root.call is None and state.depth == 0:  # a part of the model is run on its own
            self._begin_gathers((state,))
        state.depth += 1
        if state.call is not None:
            return  # a module inside a module of the same state, or another module of a shared group
        state.call, expected = self.schedule.enter(state)
        self._bring(state)
        state.call.weight_versions = state.weight_versions
        following = state.forward_prefetch
        if following is None:
            following = (expected,) if expected is not None else ()
        self._prefetch(following)

    def _begin_forward(self) -> None:
        if self._passes:
            warnings.warn(
                "The last backward pass did not finish (an exception?): its gradients that were not reduced "
                "are dropped. Call reset_iter_state() on the root module after a failed step.",
                stacklevel=2,
            )
            self.reset()
        self._release_kept()
        for state in self.states:
            state.abandon_call()  # of a forward that an exception ended
        if self.context.recorder is not None:
            self.context.recorder.abandon(self.states)
        self._begin_gathers(self.states)
        if self._tree_changed:
            self._check_tree()
        self.schedule.begin_forward()

    def _begin_gathers(self, states: Sequence[FSDPState]) -> None:
        """Between steps the shards may have been written: gather from what they are now.

        What a user keeps gathered (by `unshard`, or by options) is gathered again if a write to the
        shards was counted; fused optimizers and writes to ``param.data`` do not count theirs, so what
        was merely left from a forward is not trusted.
        """
        event, self.root.post_optim_event = self.root.post_optim_event, None
        self.context.gathers_wait_for(event)
        for state in states:
            for group in state.groups:
                group.drop_post_forward_shard()
                group.notice_replacements()
                if state.left_gathered or group.outdated:
                    group.reshard()
            state.left_gathered = False

    def _check_tree(self) -> None:
        """Refuse trainable parameters that joined the model after it was sharded: nobody would reduce them."""
        if any(group.full_params_installed for state in self.states for group in state.groups):
            return  # the modules have other parameters for a while
        root = self.root.modules[0]
        strangers = unmanaged_params(root, [state.ignored for state in self.states])
        if strangers:
            raise ConfigurationError(
                "All trainable parameters of a sharded model must be sharded or ignored, or their gradients stay "
                f"different on every rank; these joined it afterwards: {strangers}. Call fully_shard (or replicate) on "
                "the new modules, too, or replace modules before the model is sharded."
            )
        self._tree_changed = False
        process_hooks.watch(root.modules(), functools.partial(_tree_changed, weakref.ref(self)))

    def _bring(self, state: FSDPState) -> None:
        """Put the unsharded parameters of ``state`` on its modules; whoever was kept until now is released."""
        self._prefetched.discard(state)
        state.unshard()
        if self._kept is not state:
            self._release_kept()
        self._kept = None
        state.wait()

    def _prefetch(self, states: Sequence[FSDPState]) -> None:
        for state in states:
            if not state.gathered and state.runtime is self:  # and has not gone to another root
                labels = state.labels
                label = labels.backward_prefetch if self._passes else labels.forward_prefetch
                with torch_border.profiler_range(label):
                    state.unshard()
                    self._prefetched.add(state)

    def _keep(self, state: FSDPState) -> None:
        """Hide ``state`` and keep its memory until another has been gathered: [Note: two gather buffers]."""
        if self._kept is not state:
            self._release_kept()
        state.use_sharded_params()
        self._kept = state

    def _release_kept(self) -> None:
        if self._kept is not None:
            self._kept.reshard_after_call()
            self._kept = None

    def leave(self, state: FSDPState, outputs: Sequence[Tensor]) -> None:
        """A module of ``state`` has ended its forward."""
        if state.call is None:
            return  # recomputed after backward had reached the state
        self._watch_outputs(state.call, outputs)
        state.depth -= 1
        in_forward = torch_border.backward_pass_id() == -1
        # Outside of the model's forward there is no telling whether a group's other modules follow.
        alone = in_forward and self.root.call is None
        if state.depth == 0 and (alone or len(state.modules_run) == len(state.modules)):
            self._finish_call(state)
            if state is self.root and in_forward:
                self._end_forward()

    def _finish_call(self, state: FSDPState) -> None:
        assert state.call is not None, "only a running call can end"
        self.schedule.leave(state.call)
        state.abandon_call()
        if not state.reshard_after_forward:
            state.left_gathered = state.kept_for_backward_only
            if state.kept_for_backward_only:
                state.use_sharded_params()
            return
        if self.schedule.on_track and torch_border.backward_pass_id() == -1:
            state.reshard_after_call()
        else:
            self._keep(state)

    def _end_forward(self) -> None:
        for state in self.states:
            if state.call is not None:  # not all modules of a shared group were used
                self._finish_call(state)
        for state in tuple(self._prefetched):
            state.reshard()  # the forecast was wrong
        self._prefetched.clear()
        # The last state of forward is the first of backward, and could stay. But between the two
        # comes the loss, where the memory of a step usually peaks, and the first gather of backward
        # hides behind it.
        self._release_kept()
        for state in self.states:
            kept = not state.reshard_after_forward and (
                state.auto_reshard or state.kept_for_backward_only
            )
            state.left_gathered = kept and state.gathered
            if not torch.is_grad_enabled():
                # No backward will put the sharded parameters back, and an optimizer built now must
                # find them.
                if state.left_gathered:
                    state.reshard()
                else:
                    state.use_sharded_params()
        if self.context.host_reads_results and not torch.is_grad_enabled():
            self.context.synchronize()  # no backward will; the host may write the shards now
        self.schedule.end_forward()

    # --- backward ---------------------------------------------------------------------------------

    def _watch_outputs(self, call: Call[FSDPState], outputs: Sequence[Tensor]) -> None:
        """Have `_pre_backward` run when the gradient of any output is there, before backward goes on from it."""
        if not outputs:
            return
        hook = functools.partial(_pre_backward, call)
        call.has_backward = True
        for tensor in outputs:
            tensor.register_hook(hook)
            # If the caller changes a view in place, backward comes through its base instead.
            base = torch_border.base_of(tensor)
            if base is not None and base.grad_fn is not None:
                base.register_hook(hook)

    def watch_gradient(self, parts: Sequence[Tensor], state: FSDPState | None) -> None:
        """Have `_pre_backward_of_backward` run when a later pass comes through a gradient of this one.

        That pass then executes what states have added to the graph up to here: those in backward now,
        those in whose forward this pass runs, and the given one.
        """
        calls = self._added_to_graph(torch_border.backward_pass_id(), state)
        _watch_graph(self, parts, calls)

    def _added_to_graph(
        self, this_pass: int, state: FSDPState | None = None
    ) -> list[Call[FSDPState]]:
        """What the states that are in backward now have added to the graph; see `watch_gradient`."""
        calls = []
        for each in self.states:
            if each.in_forward:
                self._add_to_graph(each, this_pass)
            if each is state or each.in_forward or each in self._reached:
                added = self._graphs.of(each)
                if added is not None:
                    calls.append(added)
        return calls

    def _add_to_graph(self, state: FSDPState, this_pass: int) -> None:
        if self._graphs.of(state) is None:
            call = self.schedule.in_backward(state, this_pass, self._graphs.latest)
            call.weight_versions = state.weight_versions
            self._graphs.add(state, call)

    def _enter_recomputation(self, state: FSDPState) -> None:
        state.recomputes = True
        if state in self._reached:
            return  # in use, and stays so
        state.depth += 1
        if state.call is not None:
            return
        state.call = self.schedule.recompute(state, torch_border.backward_pass_id())
        self._bring(state)
        state.call.weight_versions = state.weight_versions
        self._prefetch_backward(state, state.call)

    def pre_backward(self, call: Call[FSDPState]) -> None:
        """Backward has reached an output of ``call``."""
        state, this_pass = call.unit, torch_border.backward_pass_id()
        reached = self._reached.get(state)
        if (reached is not None and call in reached.calls) or call.finished_in == this_pass:
            return  # by another output
        if state.unshard_in_backward and state.weight_versions != call.weight_versions:
            raise LifecycleError(
                f"Weights must not change between a forward and its backward, but those of {state.name!r} have: by an "
                "optimizer step, a load or another write. Gradients would mix old weights with new ones. Run backward "
                "before the weights are changed, or forward again after it; then reset_iter_state() on the root module."
            )
        self._begin_pass(this_pass)
        if not self._graphs.awaited(this_pass):
            for other, theirs in tuple(self._reached.items()):
                if has_left(theirs.calls, call):
                    self._finish_state(other)
        if torch.is_grad_enabled():
            self._add_to_graph(state, this_pass)
        with torch_border.profiler_range(state.labels.pre_backward):
            self._reach(state, call, this_pass)
            if self._kept is state:
                self._kept = None
            self._prefetched.discard(state)
            if state.unshard_in_backward:
                state.unshard()
                state.wait()
            if not state.prefetches_late:
                self._prefetch_backward(state, call)
        if self.context.recorder is not None:
            self.context.recorder.backward_begins(state, call.begin)

    def pre_backward_of_backward(self, call: Call[FSDPState]) -> None:
        """A pass is about to execute what an earlier one has added to the graph for ``call``."""
        self._graphs.reach(call)
        self.pre_backward(call)

    def _begin_pass(self, this_pass: int) -> None:
        if this_pass in self._passes:
            return
        if not self._passes:
            self.context.gathers_wait_for()
        self._passes.append(this_pass)
        torch_border.queue_end_of_backward(
            functools.partial(_end_of_pass, weakref.ref(self), this_pass)
        )

    def _reach(self, state: FSDPState, call: Call[FSDPState] | None, this_pass: int) -> _Reached:
        reached = self._reached.get(state)
        if reached is None:
            reached = self._reached[state] = _Reached(this_pass, state)
        if call is not None:
            reached.calls.append(call)
        return reached

    def _prefetch_backward(self, state: FSDPState, call: Call[FSDPState]) -> None:
        if state.backward_prefetch is not None:
            self._prefetch(state.backward_prefetch)
            return
        previous = call.previous
        if previous is None or not previous.unit.unshard_in_backward:
            return
        if previous.has_backward or previous.unit.recomputes:
            self._prefetch((previous.unit,))

    def gradient_arrived(self, state: FSDPState, param: Any) -> None:
        """Autograd has accumulated the gradient of an unsharded parameter."""
        reached = self._reached.get(state)
        if reached is None:
            # Backward came without passing an output we know of, or once more after the state was
            # finished.
            this_pass = torch_border.backward_pass_id()
            self._begin_pass(this_pass)
            reached = self._reach(state, None, this_pass)
        reached.awaited.discard(param)
        if reached.complete:
            reached.to_send = True
        elif not reached.awaited and state is not self.root:
            reached.complete = True
            if state.prefetches_late and reached.calls:
                self._prefetch_backward(state, reached.calls[-1])
            if all(call.previous is None for call in reached.calls) or self._graphs.awaited(
                reached.backward_pass
            ):
                # Nothing comes before it in forward, or a graph of an earlier pass is executed: backward
                # leaves it at its end only.
                self._reduce(state)
                reached.to_send = False

    def _reduce(self, state: FSDPState) -> None:
        with torch_border.profiler_range(state.labels.reduce):
            for group in state.groups:
                if state.requires_gradient_sync:
                    group.reducer.reduce(include_unused=state not in self._reduced)
                else:
                    group.reducer.accumulate()
            self._reduced.add(state)

    def _finish_state(self, state: FSDPState) -> None:
        """Backward has left ``state``: reduce what has arrived, give the memory back."""
        if self.context.recorder is not None:
            self.context.recorder.backward_ends(state)
        reached = self._reached.pop(state)
        if self._graphs.of(state) is not None and len(reached.awaited) < reached.expected:
            warnings.warn(
                "backward(create_graph=True) gives the gradients of sharded parameters no graph, as they are reduced over "
                f"ranks: what is computed of them is constant to a second backward. The first such module: {state.name}. "
                "Differentiate by inputs (torch.autograd.grad), or leave create_graph out.",
                stacklevel=2,
            )
        for call in reached.calls:
            call.finished_in = reached.backward_pass
            self._graphs.finish(call)
        if not state.in_forward:  # which may run a backward pass of its own
            state.abandon_call()  # of a recomputation that stopped early
            state.left_gathered = False
            if state.reshard_after_backward:
                state.reshard()
            else:
                state.use_sharded_params()
        if reached.to_send:
            self._reduce(state)

    def end_of_pass(self, this_pass: int) -> None:
        """A backward pass has executed its last node."""
        if self._graphs.latest is not None:
            _ADDED_AT_END.extend(self._added_to_graph(this_pass))
        for state, reached in tuple(self._reached.items()):
            if reached.backward_pass == this_pass:
                self._finish_state(state)
        self._passes.remove(this_pass)
        if not self._passes:
            self._graphs.end_pass()
            # Those that backward did not reach, but other ranks' may have.
            for state in self.states:
                if (
                    state.runtime is self
                    and state not in self._reduced
                    and any(group.reducer.settings.zero_unused for group in state.groups)
                ):
                    self._reduce(state)
            self._reduced.clear()
            self._end_backward()

    def _end_backward(self) -> None:
        with torch_border.profiler_range("FSDP::root_post_backward_callback"):
            self._release_kept()
            for state in tuple(self._prefetched):
                state.reshard()
            self._prefetched.clear()
            for state in self.states:
                if state.call is not None and not state.in_forward:
                    state.abandon_call()  # a recomputation that stopped early
                    state.reshard()
            if self.root.is_last_backward:
                self._drop_post_forward_shards()
            # Always: nobody can be told to wait who reads `.grad` after a backward, the last one or not.
            self.context.join()

    def _drop_post_forward_shards(self) -> None:
        """Give back what was kept for a backward that did not come by."""
        for state in self.states:
            for group in state.groups:
                group.drop_post_forward_shard()

    def reset(self) -> None:
        """Return to the state between steps, whatever happened: see `FSDPModule.reset_iter_state`."""
        if self.context.recorder is not None:
            self.context.recorder.abandon(self.states)
        self.context.join(accumulate=False)
        self._passes.clear()
        self._reached.clear()
        self._reduced.clear()
        self._prefetched.clear()
        self._graphs = BackwardGraphs()
        self._kept = None
        for state in self.states:
            state.abandon_call()
            state.reshard()
            for group in state.groups:
                group.reducer.drop()
        self.schedule = Schedule()


class _Reached:
    """A state in backward."""

    def __init__(self, backward_pass: int, state: FSDPState) -> None:
        self.backward_pass = backward_pass
        self.calls: list[Call[FSDPState]] = []
        self.awaited = {
            param for group in state.groups for param in group.params if param.trainable
        }
        self.expected = len(self.awaited)
        self.complete = False
        """Whether all gradients have arrived."""
        self.to_send = True
        """Whether gradients are to be sent off when backward leaves: see [Note: memory first]."""


def _with_graph(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What of the tensors has a graph, at whatever level of whichever transform."""
    return [part for tensor in tensors for part in _parts_with_graph(tensor)]


def _parts_with_graph(tensor: Tensor) -> list[Tensor]:
    return [part for part in torch_border.graph_tensors(tensor) if part.grad_fn is not None]


# Hooks that autograd holds refer to the model weakly: a graph that outlives it must not keep it. Which
# runtime a state belongs to, they ask when they run: it may have gone to another root meanwhile. Transforms
# run backward passes of their own (`torch.func.grad`, say), so these hooks step out of them as those of
# forward do.


def _pre_backward(call: Call[FSDPState], gradient: Tensor) -> None:
    state = call.living_unit
    if state is not None and state.runtime is not None:
        parts = _parts_with_graph(gradient) if torch.is_grad_enabled() else []
        with torch_border.outside_transforms():
            if parts:
                state.runtime.watch_gradient(parts, None)
            state.runtime.pre_backward(call)


def _left_call(state_ref: weakref.ref[FSDPState], gradient: Tensor) -> None:
    """Backward has the gradient of an input of one of the state's calls."""
    if not torch.is_grad_enabled():
        return  # no later pass comes through it
    state = state_ref()
    if state is not None and state.runtime is not None:
        parts = _parts_with_graph(gradient)
        if parts:
            with torch_border.outside_transforms():
                state.runtime.watch_gradient(parts, state)


def _pre_backward_of_backward(
    runtime: weakref.ref[Runtime], calls: Sequence[Call[FSDPState]], gradient: Tensor
) -> None:
    """A pass comes through a gradient of an earlier pass."""
    alive = runtime()
    if alive is not None:
        parts = _parts_with_graph(gradient) if torch.is_grad_enabled() else []
        with torch_border.outside_transforms():
            if parts:
                alive.watch_gradient(parts, None)
            for call in calls:
                state = call.living_unit
                if state is not None and state.runtime is not None:
                    state.runtime.pre_backward_of_backward(call)


def _watch_graph(
    runtime: Runtime, parts: Sequence[Tensor], calls: Sequence[Call[FSDPState]]
) -> None:
    hook = functools.partial(_pre_backward_of_backward, weakref.ref(runtime), calls)
    for part in parts:
        part.register_hook(hook)


_ADDED_AT_END: list[Call[FSDPState]] = []
"""What states that were in backward when a pass ended have added to the graph, until its results are watched."""


def _watch_results(gradients: Sequence[Tensor]) -> None:
    """A pass has ended, and returns these gradients: of whatever it was asked for, inside of modules, too."""
    if not _ADDED_AT_END:
        return
    calls = list(_ADDED_AT_END)
    _ADDED_AT_END.clear()
    parts = _with_graph(gradients)
    for runtime in {call.unit.runtime for call in calls}:
        if runtime is not None and parts:
            theirs = [call for call in calls if call.unit.runtime is runtime]
            _watch_graph(runtime, parts, theirs)


def _tree_changed(runtime: weakref.ref[Runtime]) -> None:
    alive = runtime()
    if alive is not None:
        alive._tree_changed = True


def _end_of_pass(runtime: weakref.ref[Runtime], this_pass: int) -> None:
    alive = runtime()
    if alive is not None:
        with torch_border.outside_transforms():
            alive.end_of_pass(this_pass)


def _watch_gradient(state: FSDPState, param: Any) -> None:
    """Have `gradient_arrived` run when the gradient of an unsharded parameter has been accumulated."""
    state_ref, param_ref = weakref.ref(state), weakref.ref(param)

    def arrived(_: Tensor) -> None:
        state, param = state_ref(), param_ref()
        if state is not None and param is not None and state.runtime is not None:
            state.runtime.gradient_arrived(state, param)

    assert param.unsharded_param is not None, "watched once it is on a module"
    param.unsharded_param.register_post_accumulate_grad_hook(arrived)
    param.watched = True


# --- lazy initialisation --------------------------------------------------------------------------


def state_of(module: nn.Module) -> FSDPState | None:
    """The state that `fully_shard` put on a module, or None."""
    return module.__dict__.get("_fullshard_state")


def attach_state(module: nn.Module, state: FSDPState) -> None:
    """Make ``state`` the module's."""
    module.__dict__["_fullshard_state"] = state


def named_states(root: nn.Module) -> dict[FSDPState, list[str]]:
    """All states in ``root``, each with the names of its modules; those of the root itself are empty."""
    names: dict[FSDPState, list[str]] = {}
    for name, module in root.named_modules():
        found = state_of(module)
        if found is not None:
            names.setdefault(found, []).append(clean_name(name))
    return names


IgnoredParams = Mapping[nn.Module, Collection[str]]
"""Names of parameters by the module that has them, which is referred to weakly."""


def unmanaged_params(root: nn.Module, ignored: Sequence[IgnoredParams]) -> list[str]:
    """Full names of trainable parameters below ``root`` that are in no group and not ignored."""
    return [
        clean_name(f"{prefix}.{name}" if prefix else name)
        for prefix, module in root.named_modules()
        for name, param in torch_border.parameter_table(module).items()
        if param is not None
        and param.requires_grad
        and not group_of(param)
        and not unsharded_name(param)
        and not any(name in each.get(module, ()) for each in ignored)
    ]


def lazy_init(state: FSDPState) -> Runtime:
    """Make ``state`` the root of a model: find all states below it and connect them.

    At the first forward, since only then it is known which call of `fully_shard` was the outermost.
    """
    if len(state.modules) != 1:
        raise UsageError(
            "The outermost module must be sharded on its own; it was given to fully_shard in a list of "
            f"{len(state.modules)}. Call fully_shard on the module that contains them, too."
        )
    states = {
        found: ", ".join(of_modules) for found, of_modules in named_states(state.modules[0]).items()
    }
    former = _former_runtimes(states)
    for found in states:
        for group in found.groups:
            # Not one the user has unsharded before, or has summoned.
            if group.sharded_state is ShardedState.SHARDED and not group.full_params_installed:
                group.repack()
    _check_ready(states)
    context = state.shared_context or (
        former[0].context if former else FSDPCommContext(state.device)
    )
    runtime = Runtime(state, tuple(states), context)
    for other in former:
        other.hand_over(states)
    for found, name in states.items():
        if found.auto_reshard:  # the root is needed again at once in backward
            found.reshard_after_forward = found is not state
        found.runtime = runtime
        found.set_name(name or "root")
    runtime.connect()
    process_hooks.install(_watch_results)
    return runtime


def _former_runtimes(states: dict[FSDPState, str]) -> list[Runtime]:
    """Those that states have run under before, as a root of their own or below another."""
    former = list(dict.fromkeys(each.runtime for each in states if each.runtime is not None))
    running = [
        name for each, name in states.items() if each.runtime in former and each.runtime.busy
    ]
    if running:
        raise LifecycleError(
            "A sharded module gets its outermost module between steps, but these are part of a model whose forward or "
            f"backward is running: {running}. Call the new outermost module outside of it. (After a failed step, run a "
            "forward of that model first, or call its reset_iter_state().)"
        )
    return former


def _check_ready(states: dict[FSDPState, str]) -> None:
    misplaced = [
        f"{prefix}.{fault}" if prefix else fault
        for state, prefix in states.items()
        for group in state.groups
        if not group.full_params_installed
        for fault in group.shards.misplaced()
    ]
    if misplaced:
        device = next(group.shard_device for state in states for group in state.groups)
        raise UsageError(
            f"Parameters must be on {device} at the first forward:\n  "
            + "\n  ".join(misplaced)
            + "\nMaterialise a model built on the meta device with model.to_empty(device=...) and initialise "
            "it; move others with model.to(device)."
        )
