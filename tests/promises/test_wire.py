"""Gradients that travel in bf16 and are summed in fp32 are those of fp32 reductions, for half of the bytes.

Expected values are made by hand: every rank's gradients of an unsharded model, rounded to the wire's
dtype and added up in fp32 in the order of ranks. All comparisons are bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fullshard.layout.segments
from fullshard import (
    ConfigurationError,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    replicate,
)
from fullshard.mesh.axes import FSDPMeshInfo
from fullshard.mesh.backends import backend_named
from fullshard.transport import collectives, comm_objects
from fullshard.wrap import ModuleWrapPolicy
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.fake import fake_world
from tests.helpers.models import Block, ModelOptions, make_decoder
from tests.helpers.traffic import ALL_REDUCE, EXCHANGE, REDUCE_SCATTER, Traffic
from tests.helpers.training import (
    FULLSHARD,
    TORCH,
    Run,
    batch_of,
    gradients,
    mine,
    shard,
    train,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIRE = Run(model=ModelOptions(depth=2), param_dtype=BF16, reduce_dtype=FP32, wire_dtype=BF16)
TOGETHER, ALONE = 1 << 20, 0
"""From how many bytes a segment is exchanged by itself: none or all of a small model's are."""


def local_gradients(
    options: ModelOptions, dtype: torch.dtype, steps: int, sum_in: torch.dtype = FP32
) -> dict[str, Tensor]:
    """Of an unsharded model that computes in ``dtype``, on this rank's rows, summed over steps."""
    model = make_decoder(options).to(dtype)
    sums = {name: torch.zeros_like(p, dtype=sum_in) for name, p in model.named_parameters()}
    for step in range(steps):
        model.zero_grad()
        model(mine(batch_of(step))).backward()
        for name, gradient in gradients(model).items():
            sums[name] += gradient
    return sums


def sum_of_ranks(tensor: Tensor) -> Tensor:
    """In the tensor's dtype, in the order of ranks."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    total = gathered[0]
    for each in gathered[1:]:
        total = total + each
    return total


def by_hand(
    options: ModelOptions,
    dtype: torch.dtype,
    wire_dtype: torch.dtype,
    steps: int,
    sum_in: torch.dtype = FP32,
) -> dict[str, Tensor]:
    """The mean over ranks of gradients rounded once."""
    return {
        name: sum_of_ranks(local.to(wire_dtype).to(FP32)) / dist.get_world_size()
        for name, local in local_gradients(options, dtype, steps, sum_in).items()
    }


def sharded_gradients(run: Run, steps: int, **kwargs: Any) -> dict[str, Tensor]:
    """Reduced in the last of so many steps."""
    model: Any = shard(make_decoder(run.model), FULLSHARD, run, **kwargs)
    for step in range(steps):
        model.set_requires_gradient_sync(step == steps - 1)
        model(mine(batch_of(step))).backward()
    return gradients(model)


# --- the functional API -----------------------------------------------------------------------------

UNEVEN = ModelOptions(depth=2, width=5, hidden=7, scalar=True)
CASES: dict[str, tuple[Run, int]] = {
    "even": (WIRE, 1),
    "uneven, 0-d": (replace(WIRE, model=UNEVEN), 1),
    "one group": (replace(WIRE, model=UNEVEN, group_blocks=False), 1),
    "accumulated": (replace(WIRE, model=UNEVEN), 3),
    "fp32 gradients are rounded": (replace(WIRE, param_dtype=None, model=UNEVEN), 1),
    "fp16": (replace(WIRE, param_dtype=FP16, wire_dtype=FP16, model=UNEVEN), 1),
}


def equals_by_hand(name: str, *thresholds: int, columns: bool) -> None:
    run, steps = CASES[name]
    assert run.wire_dtype is not None
    expected = by_hand(run.model, run.param_dtype or FP32, run.wire_dtype, steps)
    placement = {"shard_placement_fn": last_dimension} if columns else {}
    for threshold in thresholds:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fullshard.layout.segments, "IN_PLACE_FROM", threshold)
            assert_equal(sharded_gradients(run, steps, **placement), expected)


def last_dimension(param: nn.Parameter) -> Shard | None:
    return Shard(param.ndim - 1) if param.ndim > 1 else None


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_summed_by_the_receiver(world, name: str) -> None:
    world(3).run(equals_by_hand, name, TOGETHER, ALONE, columns=False)


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_number_of_ranks_will_do(world, world_size: int) -> None:
    world(world_size).run(equals_by_hand, "uneven, 0-d", TOGETHER, columns=False)


@pytest.mark.parametrize("name", ["uneven, 0-d", "accumulated"])
def test_columns_are_exchanged_too(world, name: str) -> None:
    world(3).run(equals_by_hand, name, TOGETHER, ALONE, columns=True)


def trained_as_with_torch(run: Run) -> None:
    ours, theirs = train(FULLSHARD, run), train(TORCH, run)
    assert_equal([ours.losses, ours.gradients], [theirs.losses, theirs.gradients])
    assert_equal(ours.params, theirs.params)


TRAINED = {
    "plain": WIRE,
    "frozen, tied": replace(WIRE, model=ModelOptions(depth=2, frozen=("up.weight",), tied=True)),
    "every microbatch": replace(WIRE, microbatches=2, sync_every_microbatch=True),
    "checkpointed": replace(WIRE, model=ModelOptions(depth=2, checkpointing="reentrant"), clip=0.5),
    "bf16 masters": replace(WIRE, param_dtype=None, master_dtype=BF16),
}


@pytest.mark.parametrize("name", TRAINED)
def test_two_ranks_train_as_with_torch_s_fp32_reductions_to_the_last_bit(world, name: str) -> None:
    world(2).run(trained_as_with_torch, TRAINED[name])


def test_hsdp_trains_as_with_torch_s_fp32_reductions_to_the_last_bit(world) -> None:
    world(4).run(trained_as_with_torch, replace(WIRE, replicas=2))


def close_to_fp32(steps: int) -> None:
    ours = sharded_gradients(WIRE, steps)
    fp32 = sharded_gradients(replace(WIRE, wire_dtype=None), steps)
    eps = torch.finfo(FP32 if steps == 1 else BF16).eps
    size = max(float(gradient.abs().max()) for gradient in fp32.values())
    assert_close(ours, fp32, rtol=0, atol=2 * eps * size)


@pytest.mark.parametrize("steps", [1, 3])
def test_four_ranks_are_within_rounding_of_fp32_reductions(world, steps: int) -> None:
    world(4).run(close_to_fp32, steps)


def one_rank() -> None:
    run = replace(WIRE, param_dtype=None)
    with Traffic() as traffic:
        ours = sharded_gradients(run, 1)
    assert not traffic.sizes(EXCHANGE)
    assert_equal(ours, local_gradients(run.model, FP32, 1))


def test_one_rank_rounds_nothing(world) -> None:
    world(1).run(one_rank)


# --- range -------------------------------------------------------------------------------------------


def scaled_gradient(wire_dtype: torch.dtype | None, factor: float) -> float:
    """The mean gradient of a weight whose gradient is 49152 everywhere, in fp16."""
    layer = nn.Linear(4, 1, bias=False)
    reduce_dtype = FP16 if wire_dtype is None else FP32
    policy = MixedPrecisionPolicy(FP16, reduce_dtype, wire_dtype=wire_dtype)
    model = fully_shard(layer, mesh=init_device_mesh("cpu", (4,)), mp_policy=policy)
    model.set_gradient_divide_factor(factor)
    (model(torch.ones(1, 4)) * 49152.0).sum().backward()
    return float(gradients(model)["weight"].max())


def test_sums_of_fp16_leave_its_range(world) -> None:
    assert world(4).run(scaled_gradient, FP16, 2.0) == [98304.0] * 4
    assert world(4).run(scaled_gradient, None, 2.0) == [float("inf")] * 4


# --- options -----------------------------------------------------------------------------------------


def settings_of_reductions(*setters: Callable[[Any], float]) -> None:
    """Gradients of a model with a setter called on every group are a multiple of those without."""
    run = replace(WIRE, model=UNEVEN)
    usual = sharded_gradients(run, 1)
    for setter in setters:
        model: Any = shard(make_decoder(run.model), FULLSHARD, run)
        factors = [setter(module) for module in (*model.blocks, model)]
        for _ in range(2):
            model.zero_grad()
            model(mine(batch_of(0))).backward()
        assert_equal(gradients(model), {name: each * factors[0] for name, each in usual.items()})


def divide_by_half(module: Any) -> float:
    module.set_gradient_divide_factor(dist.get_world_size() / 2)
    return 2.0


def force_sum(module: Any) -> float:
    module.set_force_sum_reduction_for_comms(True)
    return 1.0


def separate_group(module: Any) -> float:
    module.set_separate_reduce_scatter_group(recurse=False)
    return 1.0


def three_inputs(module: Any) -> float:
    module.set_reduce_scatter_max_input_buffers(3)
    return 1.0


def hook(module: Any) -> float:
    def multiply(reduced: Tensor) -> None:
        assert reduced.dtype is FP32
        reduced.mul_(4)

    module.set_all_reduce_hook(multiply)
    return 4.0


def test_setters_of_reductions_hold(world) -> None:
    setters = (divide_by_half, force_sum, separate_group, three_inputs, hook)
    world(2).run(settings_of_reductions, *setters)


def partial_sums() -> None:
    """HSDP whose replicas are summed over after the second of two steps."""
    run = replace(WIRE, replicas=2)
    model: Any = shard(make_decoder(), FULLSHARD, run)
    for step in range(2):
        model.set_requires_all_reduce(step == 1)
        model(mine(batch_of(step))).backward()
    steps = []
    for step in range(2):
        alone: Any = shard(make_decoder(), FULLSHARD, run)
        alone(mine(batch_of(step))).backward()
        steps.append(gradients(alone))
    sums = {name: steps[0][name] + steps[1][name] for name in steps[0]}
    assert_close(gradients(model), sums, rtol=1e-6, atol=1e-9)


def test_partial_sums_of_replicas_are_kept_in_fp32(world) -> None:
    world(4).run(partial_sums)


class TwoPaths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).sum()  # type: ignore[no-any-return]


def unused_params(zeros: bool, accumulated: bool) -> None:
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(BF16, FP32, wire_dtype=BF16)
    model: Any = fully_shard(TwoPaths(), mp_policy=policy, mesh=init_device_mesh("cpu", (2,)))
    model.set_reduce_scatter_unused_params(zeros)
    x = torch.full((1, 3), 1.0 + dist.get_rank())
    if accumulated:
        model.set_requires_gradient_sync(False)
        model(x).backward()
        model.set_requires_gradient_sync(True)
    model(x).backward()
    found = gradients(model)
    assert_equal(found.pop("used.weight"), torch.full((3, 3), 3.0 if accumulated else 1.5))
    assert_equal(found.pop("used.bias"), torch.full((3,), 2.0 if accumulated else 1.0))
    nothing = {"unused.weight": torch.zeros(3, 3), "unused.bias": torch.zeros(3)}
    assert_equal(found, nothing if zeros else {})


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
def test_unused_parameters_have_no_gradient_or_zeros(world, zeros: bool, accumulated: bool) -> None:
    world(2).run(unused_params, zeros, accumulated)


def failed_step() -> None:
    """Gradients accumulated before a failure are dropped, in both buffers."""
    model: Any = shard(make_decoder(), FULLSHARD, WIRE)
    model.set_requires_gradient_sync(False)
    model(mine(batch_of(0))).backward()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    model(mine(batch_of(1))).backward()
    alone: Any = shard(make_decoder(), FULLSHARD, WIRE)
    alone(mine(batch_of(1))).backward()
    assert_equal(gradients(model), gradients(alone))


def test_a_reset_drops_what_was_accumulated(world) -> None:
    world(2).run(failed_step)


# --- the wrapper -------------------------------------------------------------------------------------

STRATEGIES = {
    "FULL_SHARD": {},
    "accumulated": {"steps": 3},
    "SHARD_GRAD_OP": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
}


def wrapped_equals_by_hand(name: str, use_orig_params: bool) -> None:
    """One step of SGD: the weights are those of before less the gradient."""
    options: dict[str, Any] = dict(STRATEGIES[name])
    steps = options.pop("steps", 1)
    shapes = ModelOptions(depth=2, width=5, hidden=7)
    model: Any = FullyShardedDataParallel(
        make_decoder(shapes),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(BF16, FP32, wire_dtype=BF16),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
        **options,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(steps):
        with nullcontext() if step == steps - 1 else model.no_sync():
            model(mine(batch_of(step))).backward()
    assert all(param.grad.dtype is FP32 for param in model.parameters() if param.numel())
    optimizer.step()
    expected = {
        name: param.detach() - gradient
        for (name, param), gradient in zip(
            make_decoder(shapes).named_parameters(),
            by_hand(shapes, BF16, BF16, steps, BF16).values(),
            strict=True,
        )
    }
    with FullyShardedDataParallel.summon_full_params(model):
        found = {
            name.replace("_fsdp_wrapped_module.", ""): param.detach().clone()
            for name, param in model.named_parameters()
        }
    assert_equal(found, expected)


@pytest.mark.parametrize(
    ("name", "use_orig_params"),
    [
        ("FULL_SHARD", True),
        ("FULL_SHARD", False),
        ("accumulated", True),
        ("accumulated", False),
        ("SHARD_GRAD_OP", True),
    ],
)
def test_the_wrapper_s_gradients_are_summed_by_the_receiver(
    world, name: str, use_orig_params: bool
) -> None:
    world(3).run(wrapped_equals_by_hand, name, use_orig_params)


def low_precision_gradients() -> None:
    found: list[Tensor] = []
    for wire_dtype in (BF16, None):
        model = FullyShardedDataParallel(
            make_decoder(),
            mixed_precision=MixedPrecision(
                BF16, FP32, keep_low_precision_grads=True, wire_dtype=wire_dtype
            ),
            device_id=torch.device("cpu"),
        )
        model(mine(batch_of(0))).backward()
        (param,) = model.parameters()
        assert param.grad is not None and param.grad.dtype is BF16
        found.append(param.grad)
    assert_equal(found[0], found[1])


def test_the_wrapper_may_keep_gradients_in_low_precision(world) -> None:
    world(2).run(low_precision_gradients)


# --- bytes -------------------------------------------------------------------------------------------


def bytes_of_a_step(run: Run) -> dict[str, list[int]]:
    model: Any = shard(make_decoder(), FULLSHARD, run)
    for _ in range(2):
        with Traffic() as traffic:
            model(mine(batch_of(0))).backward()
    kinds = (EXCHANGE, REDUCE_SCATTER, ALL_REDUCE)
    return {kind: sorted(traffic.sizes(kind).elements()) for kind in kinds}


@pytest.mark.parametrize("replicas", [1, 2])
def test_half_of_the_bytes_travel_in_as_many_messages(world, replicas: int) -> None:
    (narrow, *_) = world(2 * replicas).run(bytes_of_a_step, replace(WIRE, replicas=replicas))
    wide_run = replace(WIRE, wire_dtype=None, replicas=replicas)
    (wide, *_) = world(2 * replicas).run(bytes_of_a_step, wide_run)
    assert len(wide[REDUCE_SCATTER]) == 4 and not wide[EXCHANGE]
    assert [2 * nbytes for nbytes in narrow[EXCHANGE]] == wide[REDUCE_SCATTER]
    assert not narrow[REDUCE_SCATTER]
    assert narrow[ALL_REDUCE] == wide[ALL_REDUCE]  # over replicas, of the sums


# --- refusals ----------------------------------------------------------------------------------------

POLICY = MixedPrecisionPolicy(BF16, FP32, wire_dtype=BF16)
OPTIONS = MixedPrecision(BF16, FP32, wire_dtype=BF16)


class Reducer(comm_objects.DefaultReduceScatter):
    pass


def sharded_layer() -> Any:
    return fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)), mp_policy=POLICY)


def wrapped_layer(**kwargs: Any) -> Any:
    options = {"mixed_precision": OPTIONS, "device_id": torch.device("cpu"), **kwargs}
    return FullyShardedDataParallel(nn.Linear(4, 4), **options)


def custom_reduce_scatter() -> None:
    sharded_layer().set_custom_reduce_scatter(Reducer())


def memory_of_the_group() -> None:
    sharded_layer().set_allocate_memory_from_process_group_for_comm(True)


def summing_symmetric_memory() -> None:
    layer = sharded_layer()
    layer.set_force_sum_reduction_for_comms(True)
    layer.set_symm_mem_for_comm()


def comm_hook() -> None:
    wrapped_layer().register_comm_hook(None, lambda state, gradient, output: None)


def replicas() -> None:
    replicate(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)), mp_policy=POLICY)


def shards_of_one() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(nn.Linear(4, 4), mesh=mesh, mp_policy=POLICY)


def no_shard() -> None:
    wrapped_layer(sharding_strategy=ShardingStrategy.NO_SHARD)


def changed_later() -> None:
    options = MixedPrecision(BF16, FP32, wire_dtype=BF16)
    options.reduce_dtype = None
    wrapped_layer(mixed_precision=options)


NOTHING_SHARDED = "but nothing is sharded here: 2 replicas average whole gradients, in reduce_dtype"
REFUSALS: dict[Callable[[], None], str] = {
    custom_reduce_scatter: "set_custom_reduce_scatter changes the reduce-scatter of a module's group, but this "
    "FSDPLinear has none: with wire_dtype=torch.bfloat16",
    memory_of_the_group: "set_allocate_memory_from_process_group_for_comm changes the reduce-scatter",
    summing_symmetric_memory: "set_symm_mem_for_comm changes the reduce-scatter",
    comm_hook: "A communication hook chooses the dtype in which gradients travel, so it excludes wire_dtype.",
    replicas: NOTHING_SHARDED,
    shards_of_one: NOTHING_SHARDED,
    no_shard: NOTHING_SHARDED,
    changed_later: "got wire_dtype=torch.bfloat16 with reduce_dtype=None",
}


@pytest.mark.parametrize("attempt", REFUSALS, ids=[attempt.__name__ for attempt in REFUSALS])
def test_what_makes_no_sense_is_refused_on_all_ranks(world, attempt: Callable[[], None]) -> None:
    outcomes = world(2).outcomes(attempt)
    assert all(isinstance(outcome, ConfigurationError) for outcome in outcomes), outcomes
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert REFUSALS[attempt] in str(outcomes[0])


def test_gloo_does_not_exchange_memory_of_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "backend_of", lambda group, device: backend_named("gloo"))
    with fake_world(2):
        axes = FSDPMeshInfo(init_device_mesh("cpu", (2,)), shard_mesh_dim=0)
        collectives.check_exchanges(BF16, axes, torch.device("cpu"))
        with pytest.raises(ConfigurationError, match="gloo only exchanges that of CPUs"):
            collectives.check_exchanges(BF16, axes, torch.device("cuda"))


def allowed_on_one_rank() -> None:
    replicate(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)), mp_policy=POLICY)
    wrapped_layer()(torch.ones(1, 4)).sum().backward()
    fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)), mp_policy=POLICY)


def test_one_rank_takes_the_options_of_many(world) -> None:
    world(1).run(allowed_on_one_rank)
