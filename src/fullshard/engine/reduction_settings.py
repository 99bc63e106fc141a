"""What users choose about a group's reductions, and what runs only if they have chosen it.

    ReduceSettings    values that users set, replaced whole
    DivideRule        how a sum becomes a mean
    GradientDtypes    in which dtypes gradients wait, travel, are summed and end
    call_replacement, run_hook, download    a user's reduction, a user's hook, and the way to host memory

`reduction` reads the values in every step. The rest is called where a policy is new, or by steps that are not plain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from fullshard import torch_border
from fullshard.mesh.axes import DataParallelAxes
from fullshard.policies import MixedPrecisionPolicy
from fullshard.storage.param import FSDPParam
from fullshard.storage.sharded_params import PlainShardedParam, ShardedParam, reads_gradients
from fullshard.transport.streams import FSDPCommContext
from fullshard.transport.transports import Transport
from fullshard.transport.works import as_real


@dataclass(frozen=True, slots=True)
class ActiveRanks:
    """Which of the ranks that reduce a group's gradients have data; see `fullshard.join`."""

    this_rank: bool
    """Whether this rank has. If not, its gradients are zeros."""
    number: int
    """How many have; at least one."""
    of: int
    """How many reduce these gradients."""

    @property
    def fraction(self) -> float:
        """The part of the ranks that have data: a mean over all ranks, divided by it, is a mean over the active ones."""
        return self.number / self.of


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceSettings:
    """How one group's gradients are combined across ranks; replaced whole when a user changes one."""

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
        """Divisor of a reduced gradient besides the number of ranks; 1 if the user has chosen what sums are divided by."""
        return 1.0 if self.active is None or self.divide_by is not None else self.active.fraction


# --- division -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DivideRule:
    """How a sum over ranks becomes a mean without leaving the range of its dtype."""

    before: float
    """Divisor before the sum; 1 for none."""
    after: float
    """Divisor after the sum; 1 for none."""
    op: ReduceOp.RedOpType
    """What the collectives compute."""


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
        # What stays on its rank is not rounded.
        before, self.wire = (
            self.wire,
            policy.wire_dtype if self._mesh_info.shard_mesh_size > 1 else None,
        )
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
        """Return in which dtypes gradients are reduced that are added up in ``dtypes``.

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


# --- functions of the user's, and host memory -----------------------------------------------------


def call_replacement(
    replacement: Callable[[Tensor, Tensor | None], None],
    output: Tensor,
    tensor: Tensor,
    *,
    is_sharded: bool,
) -> None:
    """Let the user's function reduce ``tensor`` into ``output``, or ``output`` itself if nothing is sharded."""
    output, tensor = as_real(output), as_real(tensor)
    result = output.detach()
    if is_sharded:
        replacement(tensor.detach(), result)
    else:
        replacement(result, None)
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
