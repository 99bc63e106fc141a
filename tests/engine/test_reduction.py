"""One group's gradients are taken, reduced over ranks and accumulated; no model, no API, real ranks.

Gradients are small whole numbers unless a test is about rounding, so every sum is exact.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.divergence import monitor
from fullshard.divergence.journal import journal_of
from fullshard.engine.reduction import Reduction
from fullshard.engine.reduction_state import DivideRule, ReduceEvents, divide_rule
from fullshard.engine.state import state_of
from fullshard.engine.unreduced_gradients import gradients_were_cleared
from fullshard.layout.placement import ParamPlacement
from fullshard.mesh.axes import sharding_mesh_info
from fullshard.storage.param import FSDPParam
from fullshard.storage.reduce_buffer import ReduceBuffer
from fullshard.storage.shard_formats import RowFormat
from fullshard.storage.shard_storage import ShardStorage
from fullshard.storage.sharded_params import ParamModuleInfo
from fullshard.transport.observer import StepObserver
from fullshard.transport.streams import FSDPCommContext
from tests.helpers.compare import assert_equal
from tests.helpers.fake import fake_world

CPU = torch.device("cpu")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = ((3, 2), (4,), ())


class Named:
    """What a recorder would ask of a group."""

    name, held_bytes = "group", 0


@dataclass
class Group:
    """Parameters with unsharded and sharded forms, as a group has them in backward, and their reduction."""

    params: Sequence[FSDPParam]
    reduction: Reduction
    context: FSDPCommContext
    named: Named

    def backward(self, *gradients: float | None) -> None:
        """Give each unsharded parameter a gradient that is one number everywhere, or none."""
        for param, value in zip(self.params, gradients, strict=True):
            unsharded: Any = param.unsharded_param
            assert unsharded.grad is None, "taken by the reduction"
            if value is not None:
                unsharded.grad = torch.full_like(unsharded, value)

    @property
    def sharded(self) -> list[Tensor | None]:
        """This rank's gradients."""
        found: list[Any] = [param.sharded_param.param.grad for param in self.params]
        return [None if each is None else each.to_local() for each in found]

    def has(self, *values: float | None) -> None:
        """Check that each sharded gradient has this rank's rows of one number, or that there is none."""
        expected = [
            None if value is None else torch.full_like(param.sharded_param.local, value)
            for param, value in zip(self.params, values, strict=True)
        ]
        assert [each is None for each in self.sharded] == [each is None for each in expected]
        assert_equal(
            [e for e in self.sharded if e is not None], [e for e in expected if e is not None]
        )

    def buffer(self) -> ReduceBuffer | None:
        return self.reduction._buffer

    def has_memory(self) -> bool:
        """Return whether the reduce buffer has memory now."""
        buffer = self.reduction._buffer
        return buffer is not None and buffer.allocated

    def reduce_now(self, *gradients: float | None) -> None:
        self.backward(*gradients)
        self.reduction.reduce()
        self.context.join()


def make_group(
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    policy: MixedPrecisionPolicy | None = None,
    *,
    replicas: int = 1,
) -> Group:
    policy = policy or MixedPrecisionPolicy()
    world = dist.get_world_size()
    sizes = (world,) if replicas == 1 else (replicas, world // replicas)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    info = sharding_mesh_info(mesh)
    module, params = nn.Module(), []
    for index, shape in enumerate(shapes):
        original = nn.Parameter(torch.zeros(shape))
        module.register_parameter(f"p{index}", original)
        placements = (Replicate(),) * (mesh.ndim - 1) + ((Shard(0) if shape else Replicate()),)
        owners = [ParamModuleInfo(module, f"p{index}")]
        placement = ParamPlacement(shape=shape, mesh=mesh, placements=placements)
        params.append(FSDPParam(f"p{index}", owners, original, placement))
    storage = ShardStorage(params, RowFormat(), info, CPU, "group", pinned=False)
    for param, shape in zip(params, shapes, strict=True):
        param.make_unsharded_param(torch.zeros(shape, dtype=policy.param_dtype or FP32))
    reduction = Reduction(
        params, storage.layout, info, CPU, by_segment=False, low_precision=False, pinned=False
    )
    reduction.derive_dtypes(policy, [policy.param_dtype or FP32] * len(params))
    context, named = FSDPCommContext(CPU), Named()
    reduction.connect(context, named, "group")
    return Group(params, reduction, context, named)


# --- one reduction --------------------------------------------------------------------------------


def averages_and_stays_in_flight_until_joined() -> None:
    rank, group = dist.get_rank(), make_group()
    group.backward(2.0 + 4 * rank, 10.0 * rank, 7.0)
    group.reduction.reduce()
    # The gradients are taken. Their buffer is the reduction's until somebody waits for it.
    assert all(param.unsharded_param.grad is None for param in group.params)  # type: ignore[union-attr]
    buffer = group.buffer()
    assert group.has_memory()
    assert len(group.context.reduce_inputs) == 1
    group.has(None, None, None)
    group.context.join()
    assert not group.has_memory() and not group.context.reduce_inputs
    group.has(4.0, 5.0, 7.0)
    # The next gradients are added, in the same buffer.
    group.reduce_now(1.0, None, 1.0)
    assert group.buffer() is buffer
    group.has(5.0, 5.0, 8.0)
    # Nothing to reduce is no reduction.
    group.backward(None, None, None)
    group.reduction.reduce()
    assert not group.context.reduce_inputs and not group.has_memory()


def rows_go_to_their_ranks() -> None:
    rank, group = dist.get_rank(), make_group()
    weight: Any = group.params[0].unsharded_param
    weight.grad = torch.arange(6.0).view(3, 2) * (rank + 1)
    group.reduction.reduce()
    group.context.join()
    mean = torch.arange(6.0).view(3, 2) * 1.5
    assert_equal(group.sharded[0], mean[:2] if rank == 0 else mean[2:])


def divides_by_what_the_settings_say() -> None:
    group = make_group()
    group.reduction.settings = replace(group.reduction.settings, divide_by=0.5, force_sum=True)
    group.reduce_now(1.0, 3.0, 5.0)
    group.has(4.0, 12.0, 20.0)


def sums_in_the_reduce_dtype() -> None:
    rank = dist.get_rank()
    # 257 is not a bf16 number: a sum in bf16 would be 256.
    values = (256.0, 1.0)[rank]
    narrow = make_group(policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16))
    narrow.reduce_now(values, values, None)
    narrow.has(128.0, 128.0, None)
    for wire_dtype in (None, BF16):
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, wire_dtype=wire_dtype)
        wide = make_group(policy=policy)
        wide.reduce_now(values, values, None)
        wide.has(128.5, 128.5, None)
        assert all(each is None or each.dtype == FP32 for each in wide.sharded)


def test_a_reduction_averages_over_ranks_and_each_rank_gets_its_rows(world) -> None:
    cases = (
        averages_and_stays_in_flight_until_joined,
        rows_go_to_their_ranks,
        divides_by_what_the_settings_say,
        sums_in_the_reduce_dtype,
    )
    world(2).run(each_of, cases)


def each_of(cases: Sequence[Any]) -> None:
    for case in cases:
        case()


# --- its marks in the streams -----------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """An event that logs what is done with it, and whether the gradients are final then."""

    name: str
    group: Group
    log: list[str]

    def record(self) -> None:
        final = all(each is not None for each in self.group.sharded)
        self.log.append(f"{self.name}{', final' * final}")

    def wait(self) -> None:
        self.log.append(f"wait for {self.name}")

    def query(self) -> bool:
        return True


ALONE = ["ready", "wait for ready", "input_read, final", "wait for input_read"]
FOLLOWED = ["ready", "wait for ready", "input_read", "done, final"]
FOLLOWED += ["wait for input_read", "wait for done"]
COPIED = [*FOLLOWED[:3], "wait for input_read"]
"""The host waits for all streams then."""
REPLICATED = [*FOLLOWED[:3], "wait for input_read", *FOLLOWED[3:]]


@pytest.mark.parametrize(
    ("follows", "expected"),
    [("nothing", ALONE), ("hook", FOLLOWED), ("host", COPIED), ("all-reduce", REPLICATED)],
)
def test_one_mark_ends_a_reduction_unless_something_long_follows_the_read_of_its_input(
    monkeypatch: pytest.MonkeyPatch, follows: str, expected: list[str]
) -> None:
    monkeypatch.setattr(FSDPCommContext, "synchronize", lambda _: None)
    with fake_world(4):
        group = make_group(replicas=2 if follows == "all-reduce" else 1)
        group.context.asynchronous = True
        group.context.host_reads_results = follows == "host"
        if follows == "hook":
            group.reduction.settings = replace(group.reduction.settings, hook=lambda _: None)
        log: list[str] = []
        marks = (Mark(name, group, log) for name in ("ready", "input_read", "done"))
        group.reduction.events = ReduceEvents(*marks)
        group.reduce_now(1.0, 2.0, 3.0)
    assert log == expected


def test_a_reduction_over_another_process_group_is_noted_in_its_journal() -> None:
    monitor.install()  # as the library does when it is first used
    with fake_world(4):
        group = make_group()
        shared, other = group.reduction.settings.process_group, dist.new_group(list(range(4)))
        assert shared is not None
        for process_group in (shared, other, shared):
            counts = journal_of(shared).count, journal_of(other).count
            settings = replace(group.reduction.settings, process_group=process_group)
            group.reduction.settings = settings
            group.reduce_now(1.0, 2.0, 3.0)
            noted = journal_of(shared).count - counts[0], journal_of(other).count - counts[1]
            assert noted == ((1, 0) if process_group is shared else (0, 1))


# --- gradients that backward writes in place --------------------------------------------------------


def write(group: Group, index: int, value: float, *, reduced: bool = True) -> bool:
    """Do what a product does; return whether it was added to another."""
    place = group.reduction.place_for_product(index, reduced=reduced)
    assert place is not None
    target, add = place
    target.copy_(target + value if add else torch.full_like(target, value))
    return add


def products_are_sent_off_with_the_rest() -> None:
    group = make_group(((3, 2), (4,), (5, 2)))
    group.reduction.write_products()
    assert [group.reduction.obstacle_to_product(index) for index in range(3)] == [""] * 3
    group.backward(None, 5.0, 8.0)
    assert not write(group, 0, 2.0)
    assert write(group, 0, 1.0) and not write(group, 2, 4.0)
    group.reduction.reduce()
    group.context.join()
    group.has(3.0, 5.0, 12.0)
    group.reduction.reduce()
    assert not group.context.reduce_inputs, "nothing is left of it"


def only_a_reduction_of_the_same_memory_is_waited_for() -> None:
    one, other = make_group(((3, 2),)), make_group(((3, 2),))
    for group in (one, other):
        group.reduction.write_products()
        group.context = one.context
        group.reduction.connect(one.context, group.named, f"group {group is one}")
    write(one, 0, 1.0)
    one.reduction.reduce()
    write(other, 0, 2.0)
    assert len(one.context.reduce_inputs) == 1, "the other one's products need not wait for it"
    buffer = one.buffer()
    write(one, 0, 4.0)
    assert not one.context.reduce_inputs and one.buffer() is buffer
    other.reduction.reduce()
    one.reduction.reduce()
    one.context.join()
    one.has(5.0)
    other.has(2.0)


def products_are_forgotten_or_withdrawn() -> None:
    group = make_group(((3, 2), (4, 2)))
    group.reduction.write_products()
    write(group, 0, 1.0)
    group.reduction.drop()
    assert not group.has_memory()
    group.reduce_now(None, 3.0)
    group.has(None, 3.0)
    # Backward has written into a buffer that has no room for a parameter that was frozen then.
    group.params[1].trainable = False
    group.reduction.forget_buffer()
    write(group, 0, 2.0)
    group.reduce_now(1.0, 3.0)
    group.has(3.0, 6.0)
    # The gradient waits for another backward, and the next product is added to it.
    write(group, 0, 1.0)
    group.reduction.accumulate()
    assert not group.has_memory()
    assert write(group, 0, 2.0)
    group.reduce_now(None, None)
    group.has(6.0, 6.0)


def a_captured_step_holds_gradients_until_the_input_was_read() -> None:
    for in_capture in (True, False):
        group = make_group()
        group.reduction.write_products()  # or gradients lie rank after rank on the CPU
        group.context.in_capture = in_capture
        group.backward(2.0 + 4 * dist.get_rank(), None, 7.0)
        write(group, 1, 3.0)
        gradient: Any = group.params[0].unsharded_param
        held = weakref.ref(gradient.grad)
        group.reduction.reduce()
        assert (held() is not None) is in_capture
        group.context.finish_inputs()
        assert held() is None
        group.context.join()
        group.has(4.0, 3.0, 7.0)


def test_products_are_written_into_the_buffer_of_their_reduction(world) -> None:
    cases = (
        products_are_sent_off_with_the_rest,
        only_a_reduction_of_the_same_memory_is_waited_for,
        products_are_forgotten_or_withdrawn,
        a_captured_step_holds_gradients_until_the_input_was_read,
    )
    world(2).run(each_of, cases)


def zero_d_gradient() -> Tensor:
    group = make_group(((), (4,)))
    group.reduce_now((1e8, 1.0, -1e8)[dist.get_rank()], 3.0)
    (copy, shard) = group.sharded
    assert shard is not None and torch.equal(shard, torch.full_like(shard, 3.0))
    assert copy is not None
    return copy


def test_copies_of_a_0_d_gradient_are_one_sum_on_all_ranks(world) -> None:
    # In fp32, 1e8 + 1 is 1e8: sums in another order than that of ranks, or in fp32, are others.
    copies = world(3).run(zero_d_gradient)
    assert_equal(copies, [torch.tensor(1.0) / 3] * 3)


# --- several backwards ----------------------------------------------------------------------------


def accumulated_gradients_wait_and_are_reduced_together() -> None:
    rank, group = dist.get_rank(), make_group()
    for value in (1.0, 2.0):
        group.backward(value * (rank + 1), None, value)
        group.reduction.accumulate()
    group.has(None, None, None)
    assert group.reduction.unreduced.held and group.reduction.unreduced.nbytes == 4 * (6 + 1)
    group.reduce_now(4.0, 8.0, None)
    group.has(1.5 * 3 + 4, 8.0, 3.0)
    assert not group.reduction.unreduced.held


def sums_over_backwards_are_rounded_once() -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, wire_dtype=BF16)
    group = make_group(policy=policy)
    for value in (256.0, 1.0):
        group.backward(value, None, None)
        group.reduction.accumulate()
    group.reduce_now(1.0, None, None)
    group.has(258.0, None, None)  # rounded at every backward, it would be 256


def cleared_gradients_are_forgotten() -> None:
    group = make_group()
    group.backward(1.0, 2.0, None)
    group.reduction.accumulate()
    gradients_were_cleared(lambda: [group.params[0].sharded_param.param])
    group.reduce_now(4.0, 4.0, None)
    group.has(4.0, 6.0, None)
    # zero_grad finds the unsharded parameters while they are on the modules.
    unsharded = {id(group.params[1].unsharded_param)}
    group.reduction.clear_sharded_gradients(unsharded, set_to_none=True)
    group.has(4.0, None, None)
    unsharded = {id(group.params[0].unsharded_param)}
    group.reduction.clear_sharded_gradients(unsharded, set_to_none=False)
    group.has(0.0, None, None)


def a_failed_step_leaves_nothing() -> None:
    group = make_group()
    group.reduce_now(1.0, 1.0, 1.0)
    group.backward(5.0, 5.0, 5.0)
    group.reduction.accumulate()
    group.backward(6.0, 6.0, 6.0)
    group.reduction.reduce()
    group.context.join(accumulate=False)  # the reduction's result is dropped
    group.backward(7.0, 7.0, 7.0)
    group.reduction.accumulate()
    group.backward(8.0, 8.0, 8.0)
    group.reduction.drop()
    group.has(1.0, 1.0, 1.0)
    group.reduce_now(2.0, 2.0, 2.0)
    group.has(3.0, 3.0, 3.0)


def test_gradients_of_several_backwards_wait_for_one_reduction(world) -> None:
    cases = (
        accumulated_gradients_wait_and_are_reduced_together,
        sums_over_backwards_are_rounded_once,
        cleared_gradients_are_forgotten,
        a_failed_step_leaves_nothing,
    )
    world(2).run(each_of, cases)


# --- who takes part -------------------------------------------------------------------------------


def unused_parameters_take_part_as_zeros_if_asked() -> None:
    rank, group = dist.get_rank(), make_group()
    group.reduction.settings = replace(group.reduction.settings, zero_unused=True)
    group.backward(2.0, 2.0 if rank == 0 else None, None)
    group.reduction.reduce(include_unused=True)
    group.context.join()
    group.has(2.0, 1.0, 0.0)
    # Later in the same backward only what has arrived is sent.
    everything = {id(param.unsharded_param) for param in group.params}
    group.reduction.clear_sharded_gradients(everything, set_to_none=True)
    group.backward(1.0, None, None)
    group.reduction.reduce(include_unused=False)
    group.context.join()
    group.has(1.0, None, None)


def parameters_that_were_never_gathered_get_no_gradient() -> None:
    group = make_group()
    group.params[1].unsharded_param = None
    group.reduction.settings = replace(group.reduction.settings, zero_unused=True)
    group.params[0].unsharded_param.grad = torch.ones(3, 2)  # type: ignore[union-attr]
    group.reduction.reduce(include_unused=True)
    group.context.join()
    group.has(1.0, None, 0.0)


def a_group_waits_for_its_own_buffer() -> None:
    group = make_group()
    group.context.max_reductions = 3
    for value in (1.0, 2.0, 4.0):
        group.backward(value, value, value)
        group.reduction.reduce()
        assert len(group.context.reduce_inputs) == 1  # the one before has been waited for
    group.context.join()
    group.has(7.0, 7.0, 7.0)
    other = make_group()
    other.reduction.connect(group.context, other.named, "other")
    for each in (group, other):
        each.backward(1.0, 1.0, 1.0)
        each.reduction.reduce()
    assert len(group.context.reduce_inputs) == 2
    group.context.max_reductions = 1
    group.context.make_room_for_reduction()
    assert not group.context.reduce_inputs
    group.context.join()
    group.has(8.0, 8.0, 8.0)
    other.has(1.0, 1.0, 1.0)


def test_who_takes_part_and_who_waits(world) -> None:
    cases = (
        unused_parameters_take_part_as_zeros_if_asked,
        parameters_that_were_never_gathered_get_no_gradient,
        a_group_waits_for_its_own_buffer,
    )
    world(2).run(each_of, cases)


# --- replicas -------------------------------------------------------------------------------------


def replicas_are_averaged_too() -> None:
    group = make_group(replicas=2)
    group.reduce_now(float(dist.get_rank()), 1.0, 4.0 * dist.get_rank())
    group.has(1.5, 1.0, 6.0)


def partial_sums_wait_for_their_all_reduce() -> None:
    rank, group = dist.get_rank(), make_group(replicas=2)
    settings = group.reduction.settings
    group.reduction.settings = replace(settings, all_reduce=False)
    for _ in range(2):
        group.reduce_now(float(rank), None, 2.0 * rank)
    group.has(None, None, None)
    assert sorted(group.reduction.unreduced.partial) == [0, 2]
    group.reduction.settings = settings
    # One of them has no gradient now, and takes part as zeros.
    group.reduce_now(None, 1.0, 4.0)
    group.has(3.0, 1.0, 10.0)
    assert not group.reduction.unreduced.partial


def cleared_partial_sums_are_forgotten() -> None:
    group = make_group(replicas=2)
    settings = group.reduction.settings
    group.reduction.settings = replace(settings, all_reduce=False)
    group.reduce_now(1.0, 2.0, None)
    gradients_were_cleared(lambda: [group.params[0].sharded_param.param])
    group.reduction.settings = settings
    group.reduce_now(1.0, 1.0, None)
    group.has(1.0, 3.0, None)


def a_hook_sees_zeros_where_nobody_has_elements() -> None:
    group = make_group(replicas=2)
    seen = []

    def hook(reduced: Tensor) -> None:
        seen.append(float(reduced.sum()))
        reduced.mul_(2)

    group.reduction.settings = replace(group.reduction.settings, hook=hook)
    group.reduce_now(1.0, 1.0, 1.0)
    # Rows of (3, 2) over two ranks have one of padding; then two of four, and one copy.
    elements = (4, 2)[dist.get_rank() % 2] + 2 + 1
    assert seen == [elements]
    group.has(2.0, 2.0, 2.0)


def test_replicas(world) -> None:
    cases = (
        replicas_are_averaged_too,
        partial_sums_wait_for_their_all_reduce,
        cleared_partial_sums_are_forgotten,
        a_hook_sees_zeros_where_nobody_has_elements,
    )
    world(4).run(each_of, cases)


# --- rules and numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ((FP32, 8), DivideRule(1, 1, ReduceOp.AVG)),
        ((BF16, 8), DivideRule(1, 1, ReduceOp.AVG)),
        ((torch.complex64, 8), DivideRule(1, 1, ReduceOp.AVG)),
        ((FP32, 1), DivideRule(1, 1, ReduceOp.SUM)),
        ((FP32, 8, None, True), DivideRule(1, 8, ReduceOp.SUM)),
        ((FP32, 8, 2.0), DivideRule(1, 2, ReduceOp.SUM)),
        ((FP32, 8, 8.0), DivideRule(1, 1, ReduceOp.AVG)),
        ((FP16, 8), DivideRule(4, 2, ReduceOp.SUM)),
        ((FP16, 6), DivideRule(2, 3, ReduceOp.SUM)),
        ((FP16, 64, 1.0), DivideRule(8, 1 / 8, ReduceOp.SUM)),
    ],
)
def test_the_rule_divides_where_the_dtype_has_room(
    arguments: tuple[Any, ...], rule: DivideRule
) -> None:
    found = divide_rule(*arguments)
    assert found == rule
    divisor = arguments[2] if arguments[2:] and arguments[2] is not None else arguments[1]
    if found.op is ReduceOp.SUM:
        assert found.before * found.after == divisor


def test_traffic_is_known_before_the_first_reduction() -> None:
    with fake_world(4):
        group = make_group(((8, 2), (16,)), replicas=2)
        # Over two shards half of the 32 elements is sent, over two replicas the reduced half.
        assert group.reduction.traffic() == (64, 64)
        assert group.buffer() is None


def test_a_buffer_is_made_anew_when_dtypes_change_and_not_otherwise() -> None:
    with fake_world(2):
        group = make_group()
        group.reduce_now(1.0, 1.0, 1.0)
        first = group.buffer()
        group.reduction.derive_dtypes(MixedPrecisionPolicy(), [FP32] * 3)
        assert group.buffer() is first
        group.reduction.derive_dtypes(MixedPrecisionPolicy(reduce_dtype=FP64), [FP32] * 3)
        assert group.buffer() is None
        group.reduce_now(1.0, 1.0, 1.0)
        second = group.buffer()
        assert second is not None and first is not None and second.nbytes > first.nbytes


# --- gradients are final ----------------------------------------------------------------------------


class Final(StepObserver):
    """Copies the sharded gradients of a group when they are final."""

    def __init__(self) -> None:
        self.told: dict[str, list[Tensor | None]] = {}

    def gradients_final(self, group: Any, event: Any) -> None:
        assert event is None, "the host has waited"
        grads = [each.param.grad for each in group.sharded_params]
        self.told[group.name] = [None if g is None else g.to_local().clone() for g in grads]


def observers_see_the_gradients_that_backward_leaves(replicas: int) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 5))
    sizes = (dist.get_world_size(),) if replicas == 1 else (replicas, 1)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(x).sum().backward()
    state: Any = state_of(model)
    for is_reduced in (True, False, True):  # gradients of all backwards are added up
        state.step.context.observe(observer := Final())
        model.set_requires_all_reduce(is_reduced)
        model(x).sum().backward()
        groups = [group for each in state.step.states for group in each.groups]
        expected = {
            group.name: [p.param.grad.to_local() for p in group.sharded_params] for group in groups
        }
        assert len(expected) == 2
        if is_reduced or replicas == 1:
            assert_equal(observer.told, expected)
        else:
            assert not observer.told, "partial sums wait for replicas"


def test_observers_are_told_when_gradients_are_final(world) -> None:
    world(2).run(observers_see_the_gradients_that_backward_leaves, 1)
    world(2).run(observers_see_the_gradients_that_backward_leaves, 2)
