"""All ranks skip a step, or none; otherwise ours is torch's scaler."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchScaler
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard import ConfigurationError, LifecycleError, MixedPrecisionPolicy, fully_shard
from fullshard.sharded_grad_scaler import ShardedGradScaler
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.groups import alone
from tests.helpers.models import make_decoder, tokens_for
from tests.helpers.training import batch_of, gradients, mine, weights

INF, NAN = math.inf, math.nan
SCALERS = {"fullshard": ShardedGradScaler, "torch": TorchScaler}


def started(library: str = "fullshard", **options: Any) -> Any:
    """A scaler on the CPU that has scaled something, as each step begins; scale 4 if nothing else is said."""
    if library == "torch":  # its default is the group there was when its file was imported
        options["process_group"] = dist.group.WORLD
    scaler: Any = SCALERS[library]("cpu", **{"init_scale": 4.0, **options})
    scaler.scale(torch.ones(()))
    return scaler


def parameter(gradient: Any, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """1-D zeros whose gradient is given; None for no gradient."""
    param = nn.Parameter(torch.zeros(3, dtype=dtype))
    if gradient is not None:
        param.grad = torch.full((3,), float(gradient), dtype=dtype)
    return param


class Step(NamedTuple):
    """What a rank saw of one step."""

    scale: float
    tracker: int
    gradients: list[list[float]]
    """Unscaled, before the step."""
    params: list[list[float]]


def run_steps(
    library: str,
    steps: Sequence[Sequence[Sequence[float | None]]],
    dtypes: Sequence[torch.dtype],
    explicit: bool,
    optimizer_options: dict[str, Any] | None = None,
    **options: Any,
) -> list[Step]:
    """Step with gradients given by step, rank and parameter; there is a parameter for each dtype."""
    scaler = started(library, growth_interval=2, **options)
    params = [parameter(None, dtype) for dtype in dtypes]
    kwargs = {"lr": 0.5, **(optimizer_options or {})}
    kind = torch.optim.Adam if "fused" in kwargs else torch.optim.SGD
    optimizer: Any = kind(params, **kwargs)
    seen = []
    for by_rank in steps:
        for param, value in zip(params, by_rank[dist.get_rank()], strict=True):
            param.grad = parameter(value, param.dtype).grad
        scaler.scale(torch.ones(()))
        if explicit:
            scaler.unscale_(optimizer)
        unscaled = [[] if p.grad is None else p.grad.tolist() for p in params]
        scaler.step(optimizer)
        scaler.update()
        seen.append(
            Step(
                scaler.get_scale(),
                scaler.state_dict()["_growth_tracker"],
                unscaled,
                [p.tolist() for p in params],
            )
        )
    return seen


# --- ranks agree -------------------------------------------------------------------------------------


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_one_rank_overflows_and_all_skip_and_back_off(world, bad: float, explicit: bool) -> None:
    steps = [[[8.0], [8.0], [bad]], [[8.0], [8.0], [8.0]]]
    for skipped, stepped in world(3).run(
        run_steps, "fullshard", steps, [torch.float32], explicit=explicit
    ):
        assert (skipped.scale, skipped.tracker, skipped.params) == (2.0, 0, [[0.0] * 3])
        assert (stepped.scale, stepped.tracker, stepped.params) == (2.0, 1, [[-2.0] * 3])


def test_a_rank_without_gradients_takes_part(world) -> None:
    steps = [[[None], [8.0]], [[None], [INF]], [[None], [None]]]
    without, with_ = world(2).run(run_steps, "fullshard", steps, [torch.float32], explicit=False)
    assert [step.scale for step in without] == [step.scale for step in with_] == [4.0, 2.0, 2.0]
    assert [step.tracker for step in without] == [step.tracker for step in with_] == [1, 0, 1]
    assert [step.params for step in without] == [[[0.0] * 3]] * 3
    assert [step.params for step in with_] == [[[-1.0] * 3]] * 3


def test_a_finite_step_is_taken_by_all(world) -> None:
    for (step,) in world(3).run(
        run_steps, "fullshard", [[[8.0], [4.0], [0.0]]], [torch.float32], explicit=True
    ):
        assert (step.scale, step.tracker) == (4.0, 1)
        assert step.params == [[-g / 2 for g in step.gradients[0]]]


def in_subgroups(passed: bool) -> tuple[float, float]:
    """Rank 2 overflows; ranks 0 and 1 have a group of their own, which the scaler is told of or not."""
    pair, single = dist.new_group([0, 1]), dist.new_group([2])
    group = (single if dist.get_rank() == 2 else pair) if passed else None
    scaler = started(process_group=group)
    param = parameter(INF if dist.get_rank() == 2 else 8.0)
    scaler.step(torch.optim.SGD([param], lr=1.0))
    scaler.update()
    return scaler.get_scale(), param[0].item()


def test_only_the_given_group_skips_together(world) -> None:
    assert world(3).run(in_subgroups, passed=True) == [(4.0, -2.0), (4.0, -2.0), (2.0, 0.0)]
    assert world(3).run(in_subgroups, passed=False) == [(2.0, 0.0)] * 3


def two_optimizers() -> tuple[list[float], float]:
    """Rank 0 overflows in the first of two optimizers, rank 1 in none."""
    scaler = started()
    params = [parameter(INF if dist.get_rank() == 0 else 8.0), parameter(8.0)]
    optimizers = [torch.optim.SGD([param], lr=1.0) for param in params]
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return [param[0].item() for param in params], scaler.get_scale()


def test_optimizers_skip_one_by_one_and_the_scale_backs_off_once(world) -> None:
    assert world(2).run(two_optimizers) == [([0.0, -2.0], 2.0)] * 2


FUSED = {"fused": True}


@pytest.mark.parametrize("explicit", [True, False])
def test_fused_optimizers_skip_together_too(world, explicit: bool) -> None:
    steps = [[[8.0], [INF]], [[8.0], [8.0]]]
    for skipped, stepped in world(2).run(
        run_steps, "fullshard", steps, [torch.float32], explicit, FUSED
    ):
        assert (skipped.scale, skipped.params) == (2.0, [[0.0] * 3])
        assert stepped.scale == 2.0 and stepped.params[0][0] != 0.0


# --- gradients ---------------------------------------------------------------------------------------

ALL_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_gradients_of_every_dtype_are_unscaled_and_checked(world, dtype: torch.dtype) -> None:
    steps = [[[6.0]], [[NAN]]]
    ((stepped, skipped),) = world(1).run(run_steps, "fullshard", steps, [dtype], explicit=True)
    assert stepped.gradients == [[1.5] * 3] and stepped.params == [[-0.75] * 3]
    assert (skipped.scale, skipped.params) == (2.0, stepped.params)


@pytest.mark.parametrize("bad", range(4))
def test_mixed_dtypes_are_all_unscaled_and_all_checked(world, bad: int) -> None:
    overflow = [INF if index == bad else 8.0 for index in range(4)]
    steps = [[[8.0] * 4], [overflow]]
    ((stepped, skipped),) = world(1).run(run_steps, "fullshard", steps, ALL_DTYPES, explicit=True)
    assert stepped.gradients == [[2.0] * 3] * 4
    assert (skipped.scale, skipped.params) == (2.0, stepped.params)


# torch 2.11 warns that it does not check sparse tensors, whatever it was asked for.
@pytest.mark.filterwarnings("default:Sparse invariant checks")
def test_sparse_gradients_are_unscaled_and_checked() -> None:
    with alone():
        for values, expected, scale in (([4.0, 8.0], -3.0, 4.0), ([INF, 8.0], 0.0, 2.0)):
            scaler, param = started(), parameter(None)
            # The same element, twice.
            param.grad = torch.sparse_coo_tensor([[1, 1]], values, (3,), check_invariants=True)
            scaler.step(torch.optim.SGD([param], lr=1.0))
            scaler.update()
            assert (param.tolist(), scaler.get_scale()) == ([0.0, expected, 0.0], scale)


def dtensor_gradients(overflow_on: int | None) -> tuple[float, list[float], list[float]]:
    """A sharded and a replicated parameter beside a plain one; rank 0 has a gradient of the last only."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    params = [
        nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [placement]))
        for placement in (Shard(0), Replicate())
    ]
    plain = parameter(8.0)
    if rank != 0:
        for param, placement in zip(params, (Shard(0), Replicate()), strict=True):
            value = torch.full((2,), INF if rank == overflow_on else 8.0)
            param.grad = DTensor.from_local(value, mesh, [placement])
    scaler = started()
    optimizer = torch.optim.SGD([*params, plain], lr=1.0, foreach=False)
    scaler.unscale_(optimizer)
    found: list[Any] = [param.grad for param in params]
    local = [grad.to_local()[0].item() for grad in found if grad is not None]
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), local, [plain[0].item(), params[0].to_local()[0].item()]


def test_dtensors_and_plain_tensors_mix_and_a_rank_may_lack_them(world) -> None:
    first, *others = world(3).run(dtensor_gradients, None)
    assert first == (4.0, [], [-2.0, 0.0])
    assert others == [(4.0, [2.0, 2.0], [-2.0, -2.0])] * 2
    for scale, _, params in world(3).run(dtensor_gradients, 1):
        assert (scale, params) == (2.0, [0.0, 0.0])


# --- the scale ---------------------------------------------------------------------------------------


def test_the_scale_grows_after_so_many_steps_without_a_skipped_one(world) -> None:
    steps = [[[g]] for g in (8.0, 8.0, 8.0, INF, 8.0, 8.0)]
    (seen,) = world(1).run(run_steps, "fullshard", steps, [torch.float32], explicit=False)
    assert [step.scale for step in seen] == [4.0, 8.0, 8.0, 4.0, 4.0, 8.0]
    assert [step.tracker for step in seen] == [1, 0, 1, 0, 1, 0]


def test_the_factors_are_those_given() -> None:
    with alone():
        scaler = started(growth_factor=3.0, backoff_factor=0.25, growth_interval=1)
        scales = []
        for gradient in (8.0, INF):
            scaler.step(torch.optim.SGD([parameter(gradient)]))
            scaler.update()
            scales.append(scaler.get_scale())
    assert scales == [12.0, 3.0]


@pytest.mark.parametrize("new", [16.0, torch.tensor(16.0)], ids=repr)
def test_a_new_scale_can_be_set(new: float | Tensor) -> None:
    scaler = started()
    scaler.update(new)
    assert scaler.get_scale() == 16.0
    assert scaler.scale(torch.ones(())) == 16.0


def test_state_travels_to_another_scaler_and_on() -> None:
    with alone():
        scaler = started(growth_interval=2, growth_factor=3.0)
        scaler.step(torch.optim.SGD([parameter(8.0)]))
        scaler.update()
        state = scaler.state_dict()
        assert state["_growth_tracker"] == 1
        fresh, used = ShardedGradScaler("cpu"), started(init_scale=1.0)
        pickled = pickle.loads(pickle.dumps(scaler))
        for other in (fresh, used, pickled, copy.deepcopy(scaler)):
            other.load_state_dict(state)
            assert other.state_dict() == state
            other.scale(torch.ones(()))
            other.step(torch.optim.SGD([parameter(8.0)]))
            other.update()
            assert (other.get_scale(), other.state_dict()["_growth_tracker"]) == (12.0, 0)


def test_state_is_torch_s_state() -> None:
    theirs, ours = TorchScaler("cpu", init_scale=32.0), ShardedGradScaler("cpu")
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == theirs.state_dict()


# --- outputs -----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (2,)])
def test_a_scaled_tensor_keeps_its_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    one = torch.ones(shape, dtype=dtype)
    assert_equal(started().scale(one), 4 * one)
    assert_equal(started().scale([one]), [4 * one])


def test_lists_tuples_and_iterables_are_scaled_in_their_shape() -> None:
    one, half, scaler = torch.ones(()), torch.ones(2, dtype=torch.float16), started()
    scaled = scaler.scale([one, (half, [one]), Pair(one, half), []])
    assert_equal(scaled, [4 * one, (4 * half, [4 * one]), Pair(4 * one, 4 * half), []])
    assert [type(item) for item in scaled[1:]] == [tuple, Pair, list]
    assert_equal(list(scaler.scale(x for x in [one, half])), [4 * one, 4 * half])
    lazy, stray = scaler.scale([(x for x in [one])]), iter([one, half])
    assert_equal(list(lazy[0]), [4 * one])
    next(scaler.scale(stray))
    assert next(stray) is half, "an iterator is read as its result is"


def test_scaling_is_differentiable() -> None:
    leaf = torch.ones((), requires_grad=True)
    sum(started().scale([leaf, 2 * leaf])).backward()
    assert leaf.grad == 12.0


@pytest.mark.parametrize("wrong", [3.0, None, "loss", {"loss": torch.ones(())}], ids=repr)
def test_what_has_no_tensors_is_refused(wrong: object) -> None:
    for outputs in (wrong, [wrong]):
        with pytest.raises(ConfigurationError) as caught:
            started().scale(outputs)
        assert str(caught.value) == (
            f"scale takes a tensor or an iterable of tensors, got {type(wrong).__name__}. Pass the tensor that backward() is "
            "called on, usually the loss."
        )


# --- off, and without a group ------------------------------------------------------------------------


def test_a_disabled_scaler_does_nothing_and_communicates_nothing() -> None:
    scaler = ShardedGradScaler("cpu", enabled=False)  # there is no process group
    outputs = [torch.ones(()), "anything"]
    assert scaler.scale(outputs) is outputs
    param = parameter(INF)
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert param[0] == -INF
    assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()) == (False, 1.0, {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_without_cuda_a_scaler_for_cuda_is_disabled() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert not ShardedGradScaler().is_enabled()


def test_the_default_group_may_come_after_the_scaler() -> None:
    scaler, param = started(), parameter(8.0)
    optimizer = torch.optim.SGD([param], lr=1.0)
    with pytest.raises(LifecycleError) as caught:
        scaler.unscale_(optimizer)
    assert str(caught.value) == (
        "Ranks need a process group to agree on skipping a step, but there is no default one. Call "
        "init_process_group() before unscale_() and step()."
    )
    assert param.grad is not None and param.grad[0] == 8.0, "nothing has been unscaled"
    with alone():
        scaler.step(optimizer)
    assert param[0] == -2.0


def group_of_others() -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        ShardedGradScaler("cpu", process_group=group)


def test_a_rank_outside_of_the_group_is_told_so(world) -> None:
    inside, outside = world(2).outcomes(group_of_others)
    assert inside is None
    assert isinstance(outside, ConfigurationError)
    assert str(outside).startswith("process_group must be a ProcessGroup that this rank is in")


# --- torch's -----------------------------------------------------------------------------------------


def test_arguments_and_defaults_are_torch_s() -> None:
    def described(cls: Any) -> list[tuple[object, ...]]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(cls).parameters.values()]

    assert described(ShardedGradScaler) == described(TorchScaler)
    assert issubclass(ShardedGradScaler, torch.amp.GradScaler)


HISTORY = [
    [[8.0, 3.0], [8.0, None], [0.1, -5.0]],
    [[8.0, 3.0], [None, None], [1.0, 7.0]],
    [[8.0, INF], [8.0, None], [1.0, 1.0]],
    [[8.0, 1.0], [8.0, NAN], [-INF, 1.0]],
    [[None, None], [None, None], [None, None]],
    [[1e-6, 3.0], [8.0, 2.0], [0.3, -5.0]],
]
"""Gradients by step, rank and parameter."""


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize(
    "dtypes", [[torch.float32, torch.float16], [torch.float16, torch.bfloat16]], ids=str
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_steps_are_torch_s_bit_for_bit(
    world, size: int, dtypes: list[torch.dtype], explicit: bool
) -> None:
    ours, theirs = (
        world(size).run(run_steps, library, HISTORY, dtypes, explicit) for library in SCALERS
    )
    assert str(ours) == str(theirs)  # as text, since NaN is not equal to itself
    assert len({step.scale for step in ours[0]}) > 1


@pytest.mark.parametrize("shape", [(), (2,)])
def test_scaled_outputs_are_torch_s(shape: tuple[int, ...]) -> None:
    outputs = [torch.full(shape, 0.3, dtype=d) for d in (*ALL_DTYPES, torch.int64)]
    nested = [outputs[0], (outputs[1], outputs[2:])]
    for options in ({}, {"init_scale": 3.0}):
        assert_equal(started(**options).scale(nested), started("torch", **options).scale(nested))


# --- sharded models ----------------------------------------------------------------------------------


class Outcome(NamedTuple):
    scales: list[float]
    gradients: dict[str, Tensor]
    """Whole and unscaled, of the first step."""
    params: dict[str, Tensor]


def train_in_fp16(
    master: torch.dtype, overflow_at: int | None = None, fused: bool = False
) -> Outcome:
    """Three steps of a sharded decoder; at one of them the last rank's gradients overflow."""
    model, mesh = make_decoder().to(master), init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    scaler = ShardedGradScaler("cpu", init_scale=1024.0)
    kind = torch.optim.Adam if fused else torch.optim.SGD
    optimizer: Any = kind(model.parameters(), lr=0.1, fused=fused)
    scales: list[float] = []
    first: dict[str, Tensor] = {}
    for step in range(3):
        scaler.scale(model(mine(batch_of(step)))).backward()
        if step == overflow_at and dist.get_rank() == dist.get_world_size() - 1:
            held: Any = model.blocks[0].up.weight.grad
            held.to_local().fill_(INF)  # this rank's shard alone
        if not fused:
            scaler.unscale_(optimizer)
        first = first or gradients(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return Outcome(scales, first, weights(model))


def train_unsharded(world_size: int, steps: Sequence[int]) -> Outcome:
    """The same in one process and in float32."""
    model = make_decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first: dict[str, Tensor] = {}
    for step in steps:
        model(tokens_for(step, 2 * world_size)).backward()
        first = first or gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return Outcome([], first, weights(model))


@pytest.mark.parametrize("master", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_sharded_model_in_fp16_trains_as_one_in_fp32(
    world, size: int, master: torch.dtype
) -> None:
    expected = train_unsharded(size, range(3))
    for outcome in world(size).run(train_in_fp16, master):
        assert outcome.scales == [1024.0] * 3
        assert_close(outcome.gradients, expected.gradients, rtol=0.02, atol=2e-3)
        assert_close(outcome.params, expected.params, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("master", [torch.float32, torch.float16], ids=str)
def test_a_shard_that_overflows_alone_stops_the_step_of_the_whole_model(
    world, master: torch.dtype
) -> None:
    expected = train_unsharded(3, [0, 2])
    for outcome in world(3).run(train_in_fp16, master, overflow_at=1):
        assert outcome.scales == [1024.0, 512.0, 512.0]
        assert_close(outcome.params, expected.params, rtol=0.02, atol=2e-3)


def test_a_sharded_model_trains_with_a_fused_optimizer(world) -> None:
    for outcome in world(2).run(train_in_fp16, torch.float32, overflow_at=1, fused=True):
        assert outcome.scales == [1024.0, 512.0, 512.0]
        assert all(param.isfinite().all() for param in outcome.params.values())


# --- accelerators ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("loss_on", ["cpu", "cuda"])
@pytest.mark.parametrize("bad", [None, "cpu", "cuda"])
def test_gradients_on_host_and_device_are_reduced_over_nccl(loss_on: str, bad: str | None) -> None:
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    try:
        scaler = ShardedGradScaler(init_scale=4.0)
        scaler.scale(torch.ones((), device=loss_on))
        params = [nn.Parameter(torch.zeros(3, device=device)) for device in ("cpu", "cuda")]
        for param in params:
            param.grad = torch.full_like(param, INF if param.device.type == bad else 8.0)
        scaler.step(torch.optim.SGD(params, lr=1.0))
        scaler.update()
        assert [param[0].item() for param in params] == [0.0 if bad else -2.0] * 2
        assert scaler.get_scale() == (2.0 if bad else 4.0)
    finally:
        dist.destroy_process_group()
