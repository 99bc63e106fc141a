"""The parameters that communicate together: one group, its buffers and its life in a training step.

The hub of the engine: it calls storage, communication and parameters in turn; those do not call
it back. Its verbs stand in the order in which one step uses them:

    unshard              the all-gather is issued
    wait                 the unsharded parameters are on their modules, ready for compute
    use_sharded_params   the sharded parameters are back on their modules, the gathered memory is kept
    reshard              ... and the gathered memory is released

`sharded_state` has the states in between, and the table of what may follow what. Gradients are those of
`reduction`, a `Reduction`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fullshard import torch_border
from fullshard.engine import known_groups
from fullshard.engine.gather import Gather
from fullshard.engine.model_changes import CHANGES
from fullshard.engine.reduction import Reduction
from fullshard.engine.routes import Routes
from fullshard.engine.sharded_state import ShardedState
from fullshard.errors import ConfigurationError
from fullshard.mesh.axes import DataParallelAxes
from fullshard.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.storage.codecs import Recoded
from fullshard.storage.param import FSDPParam, ParamSwap, UnshardedWrites, VersionGuard
from fullshard.storage.shard_formats import ShardFormat
from fullshard.storage.shard_storage import ShardStorage
from fullshard.storage.sharded_params import ShardedParam
from fullshard.transport import comm_objects
from fullshard.transport.observer import StepObserver
from fullshard.transport.staged import Staged
from fullshard.transport.streams import FSDPCommContext
from fullshard.transport.tags import tag
from fullshard.transport.transports import Transport

_SERIAL_NUMBERS = itertools.count()
_NOWHERE = range(0)

# Looked up once: asked several times a step.
_plain_attributes, _version_of = torch_border.plain_attributes, torch_border.version_of
_trainable_of = operator.attrgetter("requires_grad")

# Read on the hot path, where an enum's own lookup takes longer than what it decides.
_SHARDED = ShardedState.SHARDED
_GATHERING = ShardedState.GATHERING
_GATHERED = ShardedState.GATHERED
_UNSHARDED = ShardedState.UNSHARDED
_SHARDED_POST_FORWARD = ShardedState.SHARDED_POST_FORWARD


class FSDPParamGroup:
    """Parameters that are gathered and reduced together; lives as long as their modules."""

    def __init__(
        self,
        params: Sequence[FSDPParam],
        mesh_info: DataParallelAxes,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        name: str,
        *,
        shard_format: ShardFormat,
        post_forward_size: int | None = None,
        low_precision_gradients: bool = False,
    ) -> None:
        """Shard the parameters in the given format: from here on each rank keeps its shard only.

        With ``post_forward_size``, they are kept after forward in shards over so many ranks. With
        ``low_precision_gradients``, sharded gradients are in the compute dtype or, if nothing is sharded,
        in the reduce dtype.
        """
        self.params = tuple(params)
        self.serial_number = next(_SERIAL_NUMBERS)
        """Larger than that of all groups made before, as on every rank."""
        self.mesh_info, self.device, self.mp_policy, self.name = mesh_info, device, mp_policy, name
        self.offload_policy = offload_policy
        self.gather_tag = tag(f"all-gather of {name}")
        """Names the group fully in a model's forward, and the model if its ranks have several: see `Step.agree`."""
        self.shard_device, pinned = device, False
        """The device of the shards between uses."""
        if isinstance(offload_policy, CPUOffloadPolicy) and device.type != "cpu":
            self.shard_device, pinned = torch.device("cpu"), offload_policy.pin_memory
        self.shards = ShardStorage(
            self.params, shard_format, mesh_info, self.shard_device, name, pinned=pinned
        )
        self.sharded_params, self.layout = self.shards.sharded_params, self.shards.layout
        self.routes = Routes(
            self.params, self.shards, mesh_info, device, shard_format, post_forward_size
        )
        self.gather = Gather(self.routes)
        self.reduction = Reduction(
            self.params,
            self.layout,
            mesh_info,
            device,
            by_segment=shard_format.by_segment,
            low_precision=low_precision_gradients,
            pinned=pinned,
        )
        self.full_params_installed = False
        """Whether the modules have full parameters for a while, outside of training: see `full_params`."""
        self.watch_gradient: Callable[[FSDPParam], None] | None = None
        """Called once for each new unsharded parameter that is trainable, to put a hook on it."""
        self._init_life_cycle()
        self._register_params()
        self._prepare_dtypes()
        known_groups.add(self)  # last: other threads ask all there are for their state

    def _init_life_cycle(self) -> None:
        """Begin as SHARDED, with nothing gathered yet."""
        self.sharded_state = ShardedState.SHARDED
        """Changed only as `TRANSITIONS` allows."""
        self._context: FSDPCommContext | None = None
        self._param_swap: ParamSwap | None = None
        """None until the unsharded parameters have been made over the present gather buffer."""
        self._guard: VersionGuard | None = None
        """Guards the unsharded parameters; None also if they are aliases of the shards, whose memory stays."""
        self._writes: UnshardedWrites | None = None
        """Watches the unsharded parameters over the gather buffer, as soon as they are made."""
        self._gathered_version = 0
        """The version of the shards when they were last gathered."""
        self._ordered_version = 0
        """The version of the shards up to which the all-gather stream waits for what writes them."""
        self._may_stay = False
        """Whether the parameters gathered last may be used by later forwards, too; see `outdated`."""

    # --- sharded ----------------------------------------------------------------------------------

    def _prepare_dtypes(self) -> None:
        """Derive compute and reduce dtypes from the shards' dtypes, and drop what was built on older ones."""
        self.drop_unsharded_params()
        CHANGES.note()
        compute_dtypes = self.routes.derive_dtypes(self.mp_policy)
        self.reduction.derive_dtypes(self.mp_policy, compute_dtypes)

    @torch.no_grad()
    def _notice_attributes(self) -> None:
        """Use attributes that users have given the shards after sharding: all-gather extensions, dtypes of gradients.

        Before: any state. After: if there is something new, SHARDED.
        """
        late = self.routes.late_extensions()
        if late is None and not self.reduction.dtypes.are_outdated:
            return
        self.reshard()
        if late is not None:
            self.shards.move_out_of_buffer(late)
        self._prepare_dtypes()

    def set_mp_policy(self, policy: MixedPrecisionPolicy) -> None:
        """Compute and reduce in other dtypes from now on."""
        if policy != self.mp_policy:
            self.reshard()
            self.mp_policy = policy
            self._prepare_dtypes()

    def keep_unsharded_storage(self, keep: bool) -> None:
        """Keep gathered memory from now on, or give it back, at once if nothing is gathered."""
        self.routes.keeps_memory = keep
        if not keep and not self.gathered and self.routes.from_shards is not None:
            self.routes.from_shards.abandon()
        CHANGES.note()

    def set_custom_all_gather(self, comm: comm_objects.AllGather | None) -> None:
        """Gather with a comm object from now on; None for the default."""
        if comm is not self.routes.custom:
            process_group = self.mesh_info.shard_process_group
            assert process_group is not None, "there is something to gather"
            self.gather_with(None if comm is None else Staged(comm, process_group, self.device))

    def gather_with(self, transport: Transport | None) -> None:
        """Gather by a transport over the ranks of the shard axis from now on; None for the default."""
        self._change_routes()
        self.routes.transport = transport

    def set_codec(self, codec: Callable[..., Recoded] | None) -> None:
        """Encode and decode parameters in buffers by a codec, made as `Recoded` is, from now on; None for `Cast`."""
        self._change_routes()
        self.routes.codec = codec

    def _change_routes(self) -> None:
        self.reshard()
        self.drop_unsharded_params()
        CHANGES.note()
        self.routes.forget()

    def set_custom_reduce_scatter(self, comm: comm_objects.ReduceScatter | None) -> None:
        """Reduce with a comm object from the next reduction on; None for the process group's own collectives."""
        if comm is None:
            self.reduce_with(None)
            return
        process_group = self.reduction.settings.process_group or self.mesh_info.shard_process_group
        assert process_group is not None, "what is not sharded is not reduce-scattered"
        self.reduce_with(Staged(comm, process_group, self.device))

    def reduce_with(self, transport: Transport | None) -> None:
        """Reduce by a transport over the group's ranks from the next reduction on; None for the process group's own collectives."""
        self.change_reduction(transport=transport)

    def change_reduction(self, **changes: Any) -> None:
        """Change settings of the reductions, from the next reduction on."""
        self.reduction.settings = replace(self.reduction.settings, **changes)
        if changes.keys() != {"all_reduce"}:  # differs from one microbatch to the next
            CHANGES.note()

    def drop_unsharded_params(self) -> None:
        """Make the unsharded parameters anew: they will be in other memory.

        Before: SHARDED.
        """
        assert self.sharded_state is _SHARDED, "what is in memory would be lost"
        self._param_swap = self._guard = self._writes = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def repack(self) -> None:
        """Read the sharded parameters anew from the modules, and pack them if anything was replaced.

        Before: any state. After: not UNSHARDED and, if something was replaced, SHARDED.
        """
        self.use_sharded_params()
        replacements = self.shards.replacements(self.name)
        if not replacements:
            return
        self.reshard()
        self.shards.adopt(replacements, self.name)
        self._register_params()
        self._prepare_dtypes()

    def _register_params(self) -> None:
        """Let `groups_of` know the sharded parameters, which may be others than before."""
        known_groups.register(self, [each.param for each in self.sharded_params])

    def notice_replacements(self) -> None:
        """Read the shards anew if a parameter, or its data, was replaced by a user: ``param.data = ...``."""
        if self.sharded_state is _UNSHARDED:
            self._notice_sharded_put_back()
        on_modules = self.sharded_state is not _UNSHARDED
        if not self.full_params_installed and self.shards.are_replaced(on_modules=on_modules):
            self.repack()

    def _notice_sharded_put_back(self) -> None:
        """Notice that sharded parameters are back on the modules, put there by other code.

        `torch.func.functional_call` puts back what was there before: sharded parameters, if it was given these.
        """
        if self.sharded_state is _UNSHARDED and self.shards.on_modules:
            self.sharded_state = ShardedState.GATHERED

    @property
    def expects_sharded_params(self) -> bool:
        """Whether the sharded parameters should be on the modules now."""
        return self.sharded_state is not _UNSHARDED and not self.full_params_installed

    def refresh_shards(self) -> None:
        """Adopt users' changes of the sharded parameters, for callers that read or write shards outside of a step.

        Before: any state, but no full parameters are installed. After: SHARDED; the sharded parameters are those
        on the modules, and lie in the shard buffer.
        """
        self.check_nothing_assigned()
        self.notice_replacements()
        self.reshard()

    def check_nothing_assigned(self) -> None:
        """Refuse parameters that users assigned in the place of unsharded ones: they would be lost. What was written is kept."""
        self._notice_sharded_put_back()
        if self.sharded_state is not _UNSHARDED or self._param_swap is None:
            return
        if self._writes is not None and self._writes.seen():
            self._keep_writes(self._writes)
        assigned = self._param_swap.replaced()
        if assigned:
            self.reshard()
            self._param_swap = None
            raise ConfigurationError(
                "Parameters can be replaced only while they are sharded; these were replaced while they were gathered, "
                f"so the assigned values are not kept: {assigned} of group {self.name!r}. Assign them after reshard(), "
                "or, with FullyShardedDataParallel, within summon_full_params."
            )

    def connect(self, context: FSDPCommContext, name: str, *, in_tags: str | None = None) -> None:
        """Join a model's streams, under the group's full name in it. Ranks have ``in_tags`` in common, other groups have not."""
        in_tags = name if in_tags is None else in_tags
        self._wait_for_gather()  # one issued before, on streams of its own
        self._notice_attributes()
        self._context = context
        self.name = name
        self.gather_tag = tag(f"all-gather of {in_tags}")
        self.gather.connect(context)
        self.reduction.connect(context, self, in_tags)

    @property
    def context(self) -> FSDPCommContext:
        """The model's streams; streams of its own for a group used before the model's first forward."""
        if self._context is None:
            self.connect(FSDPCommContext(self.device), self.name)
            assert self._context is not None
        return self._context

    @property
    def observer(self) -> StepObserver | None:
        """The observer of the model's steps; None also before its first forward."""
        return None if self._context is None else self._context.observer

    # --- unshard ----------------------------------------------------------------------------------

    @property
    def gathered(self) -> bool:
        """Whether the full parameters are in memory or on their way."""
        state = self.sharded_state
        return state is not _SHARDED and state is not _SHARDED_POST_FORWARD

    def begin_forward(self, *, left_unsharded: bool) -> None:
        """Let the forward that begins now gather from what the shards are now.

        With ``left_unsharded``, what is in memory was meant for a backward that did not come.

        Before: any state. After: SHARDED, or gathered from these shards.
        """
        if self.sharded_state is _SHARDED_POST_FORWARD:
            self.drop_post_forward_shard()
        self.notice_replacements()
        shards = self.shards
        if self._trainable_now() != shards.trainable:
            self._follow_requires_grad()
        if self._context is not None and self._context.asynchronous:
            self._ordered_version = self._shards_version()
        if self.sharded_state is not _SHARDED and (left_unsharded or self.outdated):
            self.reshard()

    def _shards_version(self) -> int:
        """Return another number after each counted write to the shards, and after they were replaced."""
        shards = self.shards
        with _plain_attributes():
            return shards.num_replaced + sum(map(_version_of, shards.versioned))

    def _trainable_now(self) -> list[bool]:
        """Return whether each sharded parameter is trainable; `ShardStorage.trainable` is what they were before."""
        with _plain_attributes():
            return [*map(_trainable_of, self.shards.leaves)]

    def reshard_if_written(self) -> bool:
        """Reshard parameters gathered from shards that have been written since; return whether there were any.

        Before: any state. After: SHARDED, or gathered from what the shards are now.
        """
        shards, was_gathered = self.shards, self.sharded_state is not _SHARDED
        if shards.are_elsewhere and not self.full_params_installed:
            self.repack()
        elif was_gathered and self._gathered_version != self._shards_version():
            self.reshard()
        return was_gathered and self.sharded_state is _SHARDED

    def ensure_unsharded(self, *, may_stay: bool = False) -> int:
        """Gather as far as needed, and put the unsharded parameters on their modules; return their weight version.

        Before: any state. After: UNSHARDED.
        """
        state = self.sharded_state
        if state is _SHARDED or state is _SHARDED_POST_FORWARD:
            self.unshard(may_stay=may_stay)
        self.wait()
        # Those without a guard are the shards.
        return self.weight_version if self._guard is None else self._gathered_version

    def unshard(self, *, may_stay: bool = False, aside: bool = False) -> bool:
        """Issue the gather, unless that has been done; return whether it was issued now.

        With ``may_stay``, later forwards may use what was gathered, too: see `outdated`. With ``aside``, it is gathered
        for another reason than a step, which observers are told.

        Before: any state. After: GATHERING, or a state that follows it.
        """
        state = self.sharded_state
        if state is not _SHARDED and state is not _SHARDED_POST_FORWARD:
            return False
        context = self._context or self.context
        observer = context.observer
        if observer is not None:
            observer.begins("all_gather", self)
            observer.issues("gather", self)
        if state is _SHARDED:
            self._gathered_version = version = self._shards_version()
            if version != self._ordered_version:  # written since forward began
                context.gathers_wait_for()
                self._ordered_version = version
        self._may_stay = may_stay
        try:
            kept = state is _SHARDED_POST_FORWARD
            self.gather.start(context, self, self.gather_tag, kept=kept)
        except BaseException:
            if self.gather.unfinished:  # it was issued: `drop_gather` is to find it
                self.sharded_state = _GATHERING
            raise
        self.sharded_state = _GATHERING
        if observer is not None:
            observer.memory_of_gathers(self)
            observer.ends("all_gather", self)
            if aside:
                observer.gathered_aside(self)
        return True

    def not_before(self, event: Any) -> None:
        """Let the next gather from shards wait for an event: the all-gather stream, or the host where there are no streams.

        For what writes the shards on another stream, or on another thread of the host.
        """
        self.gather.not_before(event)

    def _wait_for_gather(self) -> None:
        """Order the compute stream after the gather; staged messages are decoded first.

        Before: any state. After: not GATHERING.
        """
        if self.sharded_state is _GATHERING:
            self.gather.finish(self._context or self.context, self)
            self.sharded_state = _GATHERED
            if self._guard is not None:
                self._guard.memory_is_there()

    def wait(self) -> None:
        """Wait for the all-gather and put the unsharded parameters on their modules.

        Before: GATHERING, GATHERED or UNSHARDED. After: UNSHARDED.
        """
        if self.sharded_state is _GATHERING:
            self._wait_for_gather()
        assert self.sharded_state is _GATHERED or self.sharded_state is _UNSHARDED, (
            "unshard comes before wait"
        )
        swap = self._param_swap or self._make_unsharded_params()
        shards = self.shards
        if self._trainable_now() != shards.trainable:
            self._follow_requires_grad()
        if self.sharded_state is _GATHERED:
            self.sharded_state = _UNSHARDED  # before the swap: half of one is undone as a whole one
            swap.to_unsharded()

    def _make_unsharded_params(self) -> ParamSwap:
        route, buffered = self.routes.from_shards, self.shards.buffered
        assert route is not None, "unsharded parameters lie in gathered memory"
        with torch.inference_mode(False):
            for param, full in zip(buffered, route.codec.params, strict=True):
                param.make_unsharded_param(full)
            for member in () if route.beside is None else route.beside.members:
                assert member.full is not None, "the gather has been finished"
                member.param.make_unsharded_param(member.full)
            self.reduction.dtypes.choose_for_unsharded()
        self._watch_gradients()
        self._param_swap = ParamSwap(self.params)
        self._writes = UnshardedWrites(buffered, route.codec.params)
        if not route.codec.aliases_shards:
            self._guard = VersionGuard(buffered)
            known_groups.note_guarded(self, self._guard.absent_version)
        return self._param_swap

    def _follow_requires_grad(self) -> None:
        """Let the unsharded parameters be trainable where the sharded ones are; other ranks must have changed, too."""
        for sharded_param in self.sharded_params:
            trainable = sharded_param.param.requires_grad
            if trainable is not sharded_param.trainable:
                self._set_trainable(sharded_param, trainable)
        self.shards.remember_trainable()
        CHANGES.note()

    def _set_trainable(self, sharded_param: ShardedParam, trainable: bool) -> None:
        sharded_param.trainable = trainable
        for param in self.params:
            if param.sharded_param is sharded_param:
                param.set_trainable(trainable)
        self.reduction.forget_buffer()
        self._watch_gradients()

    def _watch_gradients(self) -> None:
        if self.watch_gradient is None:
            return
        for param in self.params:
            # Those that have not been gathered yet are watched when they are.
            if param.trainable and not param.watched and param.unsharded_param is not None:
                self.watch_gradient(param)

    # --- reshard ----------------------------------------------------------------------------------

    def use_sharded_params(self) -> None:
        """Put the sharded parameters back on their modules and keep the gathered memory.

        Before: any state. After: GATHERED instead of UNSHARDED; others are as they were.
        """
        if self.sharded_state is _UNSHARDED:
            assert self._param_swap is not None, "a group is unsharded by a swap"
            if not self._param_swap.to_sharded(self._writes):
                assert self._writes is not None, "something was written"
                self._keep_writes(self._writes)
                self._param_swap.to_sharded()
            self.sharded_state = _GATHERED

    def _keep_writes(self, writes: UnshardedWrites) -> None:
        """Let the shards be what users have made of the unsharded parameters: [Note: writes in forward]."""
        # The next gather waits for the release of this memory, which is marked behind these writes.
        self.shards.take_over(writes.take())
        if self._guard is not None:
            self._guard.take_versions()

    def reshard(self) -> None:
        """Put the sharded parameters back on their modules and give all memory for gathering back, unless it is kept.

        Before: any state. After: SHARDED. Tensors that autograd saved stay valid objects and see the data
        again after the next gather.
        """
        if self.sharded_state is not _SHARDED:
            self._give_memory_back(_SHARDED)
        if self.sharded_state is _SHARDED_POST_FORWARD:
            self.drop_post_forward_shard()

    def drop_gather(self) -> None:
        """Give the memory of a gather in flight back after a failed step, without using what it brings.

        Memory may have run out, and to finish a gather can take more of it.

        Before: any state. After: not GATHERING.
        """
        if self.sharded_state is _GATHERING and self.gather.unfinished:
            self.gather.abandon(self.context)

    def reshard_after_forward(self) -> None:
        """Reshard, but keep a post-forward shard for backward to gather from, if the group was told to.

        Before: any state. After: SHARDED_POST_FORWARD or SHARDED.
        """
        kept = self.routes.post_forward
        if kept is None or not self.gathered or not torch.is_grad_enabled():
            self.reshard()
            return
        self._wait_for_gather()
        self.routes.keep(self.context)
        if self.context.observer is not None:
            self.context.observer.memory_of_gathers(self)  # the shard and the full parameters, both
        self._give_memory_back(_SHARDED_POST_FORWARD)

    def disable_post_forward_shard(self) -> None:
        """After forward, keep the full parameters or nothing from now on."""
        self._wait_for_gather()  # it may be reading the post-forward shard
        self.drop_post_forward_shard()
        self.routes.post_forward = None
        CHANGES.note()

    def drop_post_forward_shard(self) -> None:
        """Give back the post-forward shard kept for a backward to gather from, unless it is being gathered.

        Before: any state. After: SHARDED instead of SHARDED_POST_FORWARD; others are as they were.
        """
        if self.sharded_state is _SHARDED_POST_FORWARD:
            self.gather.drop_kept(self.context, self)
            self.sharded_state = _SHARDED

    def _give_memory_back(self, following: ShardedState) -> None:
        """Give gathered memory back, if there is any; ``following`` is the state then."""
        if self.sharded_state is _UNSHARDED:
            self.use_sharded_params()
        elif self.sharded_state is _GATHERING:
            self._wait_for_gather()  # used or not: [Note: memory and streams], rule 3
        if self.sharded_state is not _GATHERED:
            return
        context = self._context or self.context
        self.gather.release(context)
        if self._guard is not None:
            self._guard.memory_is_absent()
        self.sharded_state = following
        if context.observer is not None and not self.gather.aliases_shards:
            context.observer.released(self)

    # --- what is in memory ------------------------------------------------------------------------

    @property
    def gathered_addresses(self) -> range:
        """Addresses of the gathered memory: a tensor that lies there is lost when it is given back."""
        route = self.gather.route
        full = None if route is None else route.codec.full
        begin = 0 if full is None else full.storage.data_ptr()
        return (
            range(begin, begin + full.storage.nbytes()) if full is not None and begin else _NOWHERE
        )

    @property
    def held_bytes(self) -> int:
        """Bytes of memory for gathering that the group has now."""
        return self.gather.held_bytes

    def tell_memory(self, observer: StepObserver) -> None:
        """Tell a new observer what the group holds now."""
        observer.memory_of_gathers(self)
        self.reduction.tell_memory(observer)

    @property
    def weight_version(self) -> int:
        """Tells whether weights changed: of those in memory or kept for backward, or else of the shards.

        A write to the shards changes what a later gather brings, not what has been gathered. Parameters that
        are never gathered are the shards.
        """
        if self.sharded_state is _SHARDED or self.gather.aliases_shards:
            return self._shards_version()
        return self._gathered_version

    @property
    def outdated(self) -> bool:
        """Whether gathered parameters may not be used by another forward: shards were written since, or they may not stay."""
        return self.gathered and not (
            self._may_stay and self._gathered_version == self._shards_version()
        )

    def __repr__(self) -> str:
        return f"FSDPParamGroup({self.name!r}, {len(self.params)} parameters)"
