"""State that outlasts a group's reductions, and code that plain steps do not run; `reduction` is the step's half.

ReduceSettings, DivideRule   values that users set, replaced whole; how a sum becomes a mean
GradientDtypes               dtypes in which gradients wait, travel, are summed and end
Part; staged, bring_out, ..  memory of a reduction; ways that copy once more, users' functions, the way to host memory
ReductionState               the reduce buffer, and what backward has written into it
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from fullshard import torch_border
from fullshard.engine.unreduced_gradients import UnreducedGradients
from fullshard.layout.segments import Layout
from fullshard.mesh.axes import DataParallelAxes
from fullshard.policies import MixedPrecisionPolicy
from fullshard.storage.param import FSDPParam
from fullshard.storage.reduce_buffer import (
    Arrangement,
    Order,
    ReduceBucket,
    ReduceBuffer,
    arrangement,
    cause_of_pieces,
)
from fullshard.storage.sharded_params import PlainShardedParam, ShardedParam, reads_gradients
from fullshard.transport.observer import StepObserver
from fullshard.transport.streams import Event, FSDPCommContext
from fullshard.transport.tags import Tag
from fullshard.transport.transports import Transport
from fullshard.transport.works import as_real


@dataclass(frozen=True, slots=True)
class ActiveRanks:
    """The ranks with data, among those that reduce a group's gradients; see `fullshard.join`."""

    this_rank: bool
    """Whether this rank has data. If not, its gradients are zeros."""
    number: int
    """Number of ranks with data; at least one."""
    of: int
    """Number of ranks that reduce these gradients."""

    @property
    def fraction(self) -> float:
        """The part of the ranks that have data: a mean over all ranks, divided by it, is a mean over the active ones."""
        return self.number / self.of


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceSettings:
    """Settings for combining one group's gradients across ranks; replaced whole when a user changes one."""

    process_group: ProcessGroup | None
    """The group of the reduce-scatter; None if nothing is sharded over several ranks."""
    divide_by: float | None = None
    """Total divisor; None means the number of data-parallel ranks."""
    force_sum: bool = False
    """Whether collectives only sum, so that division is a step of its own."""
    all_reduce: bool = True
    """Whether reduce-scatter outputs are summed over replicas now, or kept as partial sums for a later reduction."""
    zero_unused: bool = False
    """Whether trainable parameters without a gradient take part as zeros."""
    transport: Transport | None = None
    """The user's transport over the process group; None for the process group's own collectives."""
    replacement: Callable[[Tensor, Tensor | None], None] | None = None
    """A user's function that does the whole reduction. It gets the unsharded gradients of a segment, rank after rank,
    and the output for this rank's shard. If nothing is sharded, it gets gradients to change in place, and None."""
    hook: Callable[[Tensor], None] | None = None
    """A user's function that gets the reduced gradients of a bucket before they are accumulated."""
    hook_stream: Any = None
    """The stream in which `hook` runs; None for the stream of the reduction."""
    active: ActiveRanks | None = None
    """The ranks whose gradients count; None for all ranks."""
    pinned: bool = False
    """Whether gradients that go to host memory go to page-locked memory."""

    @property
    def custom(self) -> Any:
        """The user's comm object or transport; None for the process group's own collectives."""
        return None if self.transport is None else self.transport.identity

    @property
    def active_fraction(self) -> float:
        """Divisor of a reduced gradient besides the number of ranks; 1 if the user has set a divisor (`divide_by`)."""
        return 1.0 if self.active is None or self.divide_by is not None else self.active.fraction


# --- division -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DivideRule:
    """A rule that makes a sum over ranks a mean without leaving the range of its dtype."""

    before: float
    """Divisor before the sum; 1 for none."""
    after: float
    """Divisor after the sum; 1 for none."""
    op: ReduceOp.RedOpType
    """The operation of the collectives."""


UNDIVIDED = DivideRule(1, 1, ReduceOp.SUM)
"""The rule where a user's function does the whole reduction."""


@functools.cache
def divide_rule(
    dtype: torch.dtype, num_ranks: int, divide_by: float | None = None, force_sum: bool = False
) -> DivideRule:
    """Return the rule for gradients reduced in ``dtype`` over ``num_ranks`` data-parallel ranks.

    The divisor is ``divide_by``, or the number of ranks. With ``force_sum`` collectives only sum.

    Dtypes with the range of float32 let the collective average. float16 would overflow in the sum
    or underflow in the quotient, so about the square root of the number of ranks is divided out
    before the sum, and the rest after it.
    """
    divisor = num_ranks if divide_by is None else divide_by
    real = dtype.to_real()
    wide = real.itemsize > 2 or real is torch.bfloat16
    if wide and num_ranks > 1 and divisor == num_ranks and not force_sum:
        return DivideRule(1, 1, ReduceOp.AVG)
    before = 1 if wide else 2 ** (num_ranks.bit_length() // 2)  # a power of two: exact
    return DivideRule(before, divisor / before, ReduceOp.SUM)


# --- dtypes ---------------------------------------------------------------------------------------


class GradientDtypes:
    """The dtypes of one group's gradients, from autograd to the sharded parameters."""

    def __init__(
        self, params: Sequence[FSDPParam], mesh_info: DataParallelAxes, *, low_precision: bool
    ) -> None:
        """Begin without dtypes; with ``low_precision``, those of sharded gradients are described at `gradient`."""
        self._params, self._mesh_info, self._low_precision = params, mesh_info, low_precision
        self.reduce: list[torch.dtype] = []
        """For each parameter, the dtype in which its gradients are summed over ranks."""
        self.unreduced: list[torch.dtype] = []
        """For each parameter, the dtype in which gradients of several backwards are added up before that."""
        self.gradient: list[torch.dtype] = []
        """For each parameter, the dtype of its sharded gradient: the reduce dtype, or what the user has chosen. With
        ``low_precision``, the compute dtype or, if nothing is sharded, the reduce dtype."""
        self.wire: torch.dtype | None = None
        """The dtype in which gradients travel, if it is not the reduce dtype."""
        self.arrived: dict[int, torch.dtype] = {}
        """Dtypes in which gradients came last, of parameters that take them as they come (`grad_dtype` is None)."""
        self._own: list[torch.dtype | None] = []
        """For each parameter, `grad_dtype` of its sharded parameter."""
        self._given: torch.dtype | None = None
        """The policy's reduce dtype."""
        self._compute: list[torch.dtype] = []

    def derive(self, policy: MixedPrecisionPolicy, compute_dtypes: Sequence[torch.dtype]) -> bool:
        """Derive all from the policy and the parameters' dtypes, and return whether a reduce buffer must be made anew."""
        self._given, self._compute = policy.reduce_dtype, [*compute_dtypes]
        # Gradients that stay on their rank are not rounded.
        before = self.wire
        self.wire = policy.wire_dtype if self._mesh_info.shard_mesh_size > 1 else None
        self._own = [param.sharded_param.grad_dtype for param in self._params]
        self.arrived = {i: dtype for i, dtype in enumerate(compute_dtypes) if self._own[i] is None}
        return self._set() or before is not self.wire

    @property
    def are_outdated(self) -> bool:
        """Whether users have chosen other dtypes of gradients (`Tensor.grad_dtype`) since they were derived."""
        return self._own != [param.sharded_param.grad_dtype for param in self._params]

    def note_arrived(self, gradients: Mapping[int, Tensor]) -> bool:
        """Reduce gradients of parameters whose `grad_dtype` is None in the dtypes in which they have come; see `derive`."""
        arrived = {i: g.dtype for i, g in gradients.items() if i in self.arrived}
        if arrived.items() <= self.arrived.items():
            return False
        self.arrived |= arrived
        return self._set()

    def _set(self) -> bool:
        before = self.reduce, self.gradient
        self.unreduced = self._derived()
        self.reduce = self._summed_together(self.unreduced)
        self.gradient = [own or dtype for own, dtype in zip(self._own, self.reduce, strict=True)]
        if self._low_precision:
            sharded = self._mesh_info.shard_process_group is not None
            self.gradient = [*self._compute] if sharded else self.reduce
        return before != (self.reduce, self.gradient)

    def _derived(self) -> list[torch.dtype]:
        """Return the dtypes of sums: the policy's, or what torch's FSDP2 takes for the parameter if that has none."""
        given = self._given
        if given is not None:
            return [given if dtype.is_floating_point else dtype for dtype in self._compute]
        if not torch_border.REDUCES_IN_GRAD_DTYPE:
            return self._compute
        return [own or self.arrived[index] for index, own in enumerate(self._own)]

    def _summed_together(self, dtypes: list[torch.dtype]) -> list[torch.dtype]:
        """Return the dtypes in which gradients are reduced that are added up in ``dtypes``.

        Parameters of one dtype whose gradients differ are reduced together, in the dtype that holds all of them.
        """
        if self._given is not None or not torch_border.REDUCES_IN_GRAD_DTYPE:
            return dtypes
        together: dict[torch.dtype, torch.dtype] = {}
        for param, own in zip(self._params, dtypes, strict=True):
            together[param.dtype] = torch.promote_types(together.get(param.dtype, own), own)
        return [together[param.dtype] for param in self._params]

    def choose_for_unsharded(self) -> None:
        """Let autograd bring the gradients of unsharded parameters as torch's FSDP2 does; when these have been made.

        Narrower gradients are summed in a wider dtype: they stay as they come, also where a custom autograd function
        returns fp32 for a bf16 parameter. Wider ones are rounded at once, which takes less memory. Parameters that rest
        as plain tensors show unreduced gradients in `.grad`, in the compute dtype.
        """
        if not torch_border.REDUCES_IN_GRAD_DTYPE:
            return
        dtypes = zip(self._compute, self.unreduced, self._own, strict=True)
        for param, (compute, added_up, own) in zip(self._params, dtypes, strict=True):
            unsharded = param.unsharded_param
            assert unsharded is not None, "it has just been made"
            if isinstance(param.sharded_param, PlainShardedParam):
                continue
            if own is None and self._given is None:
                unsharded.grad_dtype = None
            elif compute is not added_up:
                is_wider = torch.promote_types(compute, added_up) is added_up
                unsharded.grad_dtype = None if is_wider else added_up


# --- other ways than in place ---------------------------------------------------------------------


@dataclass(slots=True)
class Part:
    """One bucket in flight, and the memory that its collective reads and writes."""

    bucket: ReduceBucket
    rule: DivideRule
    inputs: Sequence[Tensor]
    """Tensors that the collective reads."""
    outputs: Sequence[Tensor]
    """Tensors that it writes: views of `reduced`, or memory that is brought into `totals`."""
    reduced: Tensor
    """This rank's reduced gradients, in the reduce dtype."""
    lent: Sequence[Tensor] = ()
    """Memory of the transport, to be released when the input has been read."""
    totals: Sequence[Tensor] = ()
    """Views of `reduced` into which `outputs` are brought: summed over ranks, or copied out of memory that is taken back."""
    views: Sequence[Tensor] = ()
    """Views of `final` for each parameter, if there are any yet."""
    final: Tensor = field(init=False)
    """`reduced` in the dtype of the sharded gradients; the same tensor if the dtypes are equal."""


def joined(bucket: ReduceBucket) -> Tensor:
    """Copy messages that do not lie flat into one."""
    rows = bucket.messages[0].new_empty(len(bucket.messages[0]), bucket.numel)
    bucket.copy_into(rows)
    return rows.view(-1)


def staged(bucket: ReduceBucket, rule: DivideRule, transport: Transport, world: int) -> Part:
    """Copy messages into one in memory of the transport, and take memory for what comes back."""
    receives = transport.sums_at_receiver
    dtype = bucket.messages[0].dtype if receives else bucket.reduce_dtype
    output = transport.allocate(bucket.numel * (world if receives else 1), dtype)
    packed = transport.allocate(bucket.numel * world, dtype)
    bucket.copy_into(packed.view(world, bucket.numel))
    if not receives and not transport.recycles:
        return Part(bucket, rule, [packed], [output], output, [packed])
    reduced = torch.empty(bucket.numel, dtype=bucket.reduce_dtype, device=packed.device)
    return Part(bucket, rule, [packed], [output], reduced, [packed, output], [reduced])


def bring_out(transport: Transport | None, parts: Iterable[Part]) -> None:
    """Bring results out of memory that is given back with the input; after the collectives."""
    for part in parts:
        for received, total in zip(part.outputs, part.totals, strict=False):
            if transport is not None and transport.sums_at_receiver:
                rows = received.view(transport.group.size(), -1)
                torch.sum(rows, 0, dtype=total.dtype, out=total)
            else:
                total.copy_(received)


def reduce_here(
    settings: ReduceSettings, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> None:
    """Reduce without a transport: let the user's function do it, or copy what stays on this rank.

    The function gets the output itself if nothing is sharded.
    """
    is_sharded = settings.process_group is not None
    if not is_sharded:
        torch._foreach_copy_(list(outputs), list(inputs))
    if settings.replacement is None:
        return
    for output, tensor in zip(map(as_real, outputs), map(as_real, inputs), strict=True):
        result = output.detach()
        if is_sharded:
            settings.replacement(tensor.detach(), result)
        else:
            settings.replacement(result, None)
        # It may have given the tensor other data: of another dtype, say.
        if not torch_border.same_memory(result, output):
            output.copy_(result)


def run_hook(settings: ReduceSettings, context: FSDPCommContext, reduced: Tensor) -> None:
    """Run the user's hook in the current stream, or in the stream it was given with."""
    assert settings.hook is not None, "it was asked for"
    if settings.hook_stream is None:
        settings.hook(reduced)
        return
    before, after = context.new_event(), context.new_event()
    before.record()
    with settings.hook_stream:
        before.wait()
        settings.hook(reduced)
        after.record()
    after.wait()


def download(gradients: Tensor, sharded_params: Sequence[ShardedParam], *, pinned: bool) -> Tensor:
    """Copy gradients to host memory, where their parameters rest.

    The copy runs beside everything else, and the host waits for it at the end of backward (`FSDPCommContext.join`); but
    at once if the host is about to read it: to add it to a gradient, or in a user's hook. The caller keeps the result until
    then.
    """
    on_host = torch.empty(gradients.shape, dtype=gradients.dtype, pin_memory=pinned)
    on_host.copy_(gradients, non_blocking=True)
    params = [sharded_param.param for sharded_param in sharded_params]
    if any(param.grad is not None or reads_gradients(param) for param in params):
        torch_border.current_stream(gradients.device).synchronize()
    return on_host


def all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """Return the bytes that each of ``ranks`` sends to sum ``nbytes``: all shards but its own, and that once summed to all."""
    return 2 * (ranks - 1) * nbytes // ranks


# --- what outlasts a reduction ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReduceEvents:
    """Marks of one group's reductions in the streams; each reduction records them anew."""

    ready: Event
    """Compute has filled the input."""
    input_read: Event
    """The reduce-scatter has read it; the sharded gradients are final, too, unless something long follows."""
    done: Event
    """The sharded gradients are final; only behind an all-reduce or a user's hook."""

    @classmethod
    def new(cls, context: FSDPCommContext) -> ReduceEvents:
        """Return events of the context's device."""
        return cls(context.new_event(), context.new_event(), context.new_event())


class ReductionState:
    """State that outlasts one group's reductions, and code that plain steps do not run: the other half of `Reduction`."""

    def __init__(
        self,
        params: Sequence[FSDPParam],
        layout: Layout,
        mesh_info: DataParallelAxes,
        device: torch.device,
        *,
        by_segment: bool,
        low_precision: bool,
        pinned: bool,
    ) -> None:
        """Begin without gradients; `derive_dtypes` and `connect` come before the first.

        Args:
            params: The group's parameters.
            layout: The layout of all of them.
            mesh_info: The ranks over which they are sharded and replicated.
            device: The device on which gradients are computed.
            by_segment: Whether all parameters of a segment get one sharded gradient. Then all are always reduced.
            low_precision: Whether sharded gradients are in the compute dtype: see `GradientDtypes.gradient`.
            pinned: Whether gradients that go to host memory go to page-locked memory.
        """
        self.settings = ReduceSettings(process_group=mesh_info.shard_peers, pinned=pinned)
        self.dtypes = GradientDtypes(params, mesh_info, low_precision=low_precision)
        self.unreduced = UnreducedGradients(params, layout)
        self.params, self.mesh_info = params, mesh_info
        self._layout, self._device, self._by_segment = layout, device, by_segment
        self._buffer: ReduceBuffer | None = None
        """None until there are gradients, and after its dtypes or trainable parameters have changed."""
        self._writes_products = False
        """Whether backward may write gradients into the reduce buffer: see `place_for_product`."""
        self._open: ReduceBuffer | None = None
        """The reduce buffer that backward writes gradients into now, until `reduce` sends it off."""
        self._written: set[int] = set()
        """Parameters whose slots in it are written."""
        self._transports: dict[tuple[ProcessGroup, bool], Transport] = {}
        """The process groups' own collectives; by group, which users may change, and whether gradients are exchanged."""
        self._tags: dict[tuple[tuple[int, ...], bool], tuple[Tag, Tag]] = {}
        self._models = "", ""
        self.context: FSDPCommContext
        self.events: ReduceEvents
        self._group: weakref.ref[Any]
        self._name: str

    def connect(self, context: FSDPCommContext, group: Any, name: str) -> None:
        """Join a model's streams; observers are told of ``group``, tags have ``name``, which no other group of the model has."""
        self.context, self._name = context, name
        self._group = weakref.ref(group)  # which holds us
        self.unreduced.connect(context)
        self.events = ReduceEvents.new(context)
        self._transports.clear()
        self.tell_apart("", "")

    def tell_apart(self, model: str, model_among_replicas: str) -> None:
        """Let tags say which model it is, of those over the same shards and over the same replicas."""
        self._models = model, model_among_replicas
        self._tags.clear()

    def derive_dtypes(
        self, policy: MixedPrecisionPolicy, compute_dtypes: Sequence[torch.dtype]
    ) -> None:
        """Derive the dtypes of sums, messages and sharded gradients from the policy and the parameters' dtypes."""
        if self.dtypes.derive(policy, compute_dtypes):
            self.forget_buffer()

    def forget_buffer(self) -> None:
        """Make the reduce buffer anew next time: dtypes, or which parameters are trainable, have changed."""
        self._buffer = None

    def set_active_ranks(self, active: ActiveRanks | None) -> None:
        """Choose the ranks whose gradients count from the next backward on; None for all ranks.

        Gradients that wait were added up when other ranks counted. They are scaled, so that the next reduction divides
        the gradients of each backward by the number of ranks that were active then.
        """
        if active != self.settings.active:
            self.settings = replace(self.settings, active=active)
        self.unreduced.set_active_fraction(self.settings.active_fraction)

    def _without_gradient(self, gradients: Collection[int], *, include_unused: bool) -> set[int]:
        """Return the parameters that take part as zeros: those with partial sums, and unused ones.

        But not those of a group that has never been gathered: no rank has used them, as gathering is collective,
        and zeros would let weight decay shrink them.
        """
        settings, partial = self.settings, self.unreduced.partial
        missing = set(partial) if settings.all_reduce else set()
        if include_unused and settings.zero_unused:
            missing.update(
                index
                for index, param in enumerate(self.params)
                if param.trainable and param.unsharded_param is not None
            )
        return missing.difference(gradients, self._written)

    # --- memory -----------------------------------------------------------------------------------

    def _free_buffer(self, params: set[int]) -> ReduceBuffer:
        """Return a reduce buffer that has no memory, with room for parameters; no reduction in flight reads it."""
        context, buffer = self.context, self._buffer
        if buffer is None or not params <= buffer.targets.keys():
            buffer = self._buffer = self._new_buffer(self._device, params)
            buffer.release()  # it took memory to make its views
        elif context.reduce_inputs and buffer.allocated:
            # Several inputs may be in flight, and this group's previous reduction still reads its own.
            context.finish_inputs()
        return buffer

    def _new_buffer(self, device: torch.device, params: Collection[int] = ()) -> ReduceBuffer:
        """Return a reduce buffer for the parameters that are trainable now, and for ``params``."""
        info = self.mesh_info
        return ReduceBuffer(
            self._layout,
            info.shard_mesh_rank,
            [i for i, param in enumerate(self.params) if param.trainable or i in params],
            self.dtypes.reduce,
            self.dtypes.gradient,
            device,
            by_segment=self._by_segment,
            rank_major=self.arrangement.order is Order.ROWS,
            wire_dtype=self.dtypes.wire,
            replica=(info.replicate_mesh_rank, info.replicate_mesh_size),
        )

    @property
    def arrangement(self) -> Arrangement:
        """The arrangement of gradients from the next buffer on; a row of the table in `reduce_buffer`."""
        transport = self.settings.transport
        return arrangement(
            self._layout,
            self._device,
            wire_dtype=self.dtypes.wire,
            is_written=self._writes_products,
            is_staged=transport is not None and not transport.in_place,
        )

    # --- gradients that backward writes in place --------------------------------------------------

    def write_products(self) -> None:
        """From now on let backward write gradients into the reduce buffer; between steps."""
        if not self._writes_products:
            self._writes_products = True
            self.forget_buffer()

    def obstacle_to_product(self, index: int) -> str:
        """Return why backward may not write a parameter's gradient; "" if it may, since its slot is one piece."""
        rank_major = self.arrangement.order is Order.ROWS
        return cause_of_pieces(self._layout.slots[index], rank_major=rank_major)

    def place_for_product(self, index: int, *, reduced: bool) -> tuple[Tensor, bool] | None:
        """Return the memory that backward is to write a gradient to, and whether it adds to one there; None for no memory.

        On the compute stream, for a parameter without an `obstacle_to_product`. With ``reduced``, this backward reduces the group;
        otherwise the gradient waits with those of other microbatches, and a sum that waits is added to there.

        The place is the slot in the buffer that this backward's `reduce` sends off. It has memory from the first
        gradient on, beside the inputs of reductions in flight: at most one more than `max_reductions` of them, and one for
        each group that backward will come back to. No reduction reads it, since an earlier one of this group is waited
        for here.
        """
        if self.settings.active is not None:
            return None
        if not reduced or self.unreduced.waits(index):
            return self.unreduced.place_for(index, self.dtypes.unreduced[index])
        if self._open is None:
            buffer = self._open = self._free_buffer({index})
            if self.context.observer is not None:
                self.context.observer.memory_of_reductions(buffer, buffer.nbytes)
            buffer.allocate()
        again = index in self._written
        self._written.add(index)
        return self._open.slot(index), again

    def give_ordinary(self, index: int, gradient: Tensor) -> None:
        """Add a gradient to the unsharded parameter's, as autograd does; its hook is still to run."""
        param = self.params[index].unsharded_param
        assert param is not None, "backward has come to it"
        param.grad = gradient if param.grad is None else param.grad + gradient

    @property
    def has_products(self) -> bool:
        """Whether backward has written gradients into a buffer that has not been sent off."""
        return self._open is not None

    def _withdraw_products(self, gradients: dict[int, Tensor]) -> None:
        """Add the gradients written into the open buffer to ``gradients``, and give its memory back."""
        buffer, self._open = self._open, None
        assert buffer is not None, "it was written into"
        for index in sorted(self._written):
            product = buffer.slot(index).clone()
            gradients[index] = product.add_(gradients[index]) if index in gradients else product
        self._written.clear()
        self._release(buffer)

    def _release(self, buffer: ReduceBuffer) -> None:
        buffer.release()
        if self.context.observer is not None:
            self.context.observer.memory_of_reductions(buffer, 0)

    # --- forget -----------------------------------------------------------------------------------

    def clear_sharded_gradients(self, unsharded: Collection[int], *, set_to_none: bool) -> None:
        """Clear `.grad` of sharded parameters: ``zero_grad`` found the unsharded ones, with these ids."""
        for param in self.params:
            if id(param.unsharded_param) in unsharded:
                param.sharded_param.clear_gradient(set_to_none=set_to_none)

    def drop(self) -> None:
        """Forget gradients that were not reduced: after a failed step, when no reduction is in flight."""
        for param in self.params:
            if param.unsharded_param is not None:
                param.unsharded_param.grad = None
        self.unreduced.drop()
        for buffer in self.buffers():
            if buffer.allocated:
                self._release(buffer)
        self._open = None
        self._written.clear()

    # --- for traces and plans ---------------------------------------------------------------------

    def tell_memory(self, observer: StepObserver) -> None:
        """Tell a new observer what memory is held for reductions now."""
        observer.memory_of_reductions(self.unreduced, self.unreduced.nbytes)
        if self._buffer is not None and self._buffer.allocated:
            observer.memory_of_reductions(self._buffer, self._buffer.nbytes)

    def buffers(self) -> list[ReduceBuffer]:
        """Return the buffers that reductions read, with memory or without."""
        return [buffer for buffer in (self._open, self._buffer) if buffer is not None]

    def traffic(self) -> tuple[int, int]:
        """Return the bytes that a reduction of all trainable parameters sends to other ranks, and to other replicas.

        On any device and before there is one: read off a buffer without memory that is made as the real ones are.
        """
        sent = all_reduced = 0
        buffer = self._new_buffer(torch.device("meta"))
        for bucket in buffer.buckets(frozenset(buffer.targets)):
            reduced = bucket.numel * bucket.reduce_dtype.itemsize
            inputs = sum(tensor.nbytes for tensor in bucket.inputs)
            if self.arrangement.is_staged:
                inputs = reduced * self._layout.world  # with what lies between segments
            sent += inputs - inputs // self._layout.world
            all_reduced += all_reduce_bytes(reduced, self.mesh_info.replicate_mesh_size)
        return sent, all_reduced
