"""Meshes beyond one axis of shards: parts kept after forward, several meshes in a module, replicas,
tensor parallelism, one mesh for everything.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fullshard import (
    ConfigurationError,
    DataParallelMeshDims,
    FullyShardedDataParallel,
    ShardingStrategy,
    checkpoint,
    fully_shard,
    replicate,
)
from fullshard.engine.sharded_state import ShardedState
from fullshard.mesh import axes as mesh
from fullshard.transport.transports import Coalesced
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.models import ModelOptions, make_decoder
from tests.helpers.training import (
    FULLSHARD,
    ONE_PROCESS,
    TORCH,
    Run,
    ShardOptimizer,
    batch_of,
    gradients,
    mine,
    needs_torch_2_13,
    of_both,
    shard,
    train,
    weights,
    whole,
)


def recorded_gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of ranks of every gather from now on."""
    sizes: list[int] = []
    original = Coalesced.gather

    def gather(transport: Any, *args: Any, **options: Any) -> Any:
        sizes.append(transport.group.size())
        return original(transport, *args, **options)

    monkeypatch.setattr(Coalesced, "gather", gather)
    return sizes


# --- a part is kept after forward --------------------------------------------------------------------


PARTS = {
    "plain": Run(reshard_after_forward=2, model=ModelOptions(depth=2)),
    "bf16, accumulation, checkpointing": Run(
        reshard_after_forward=2,
        param_dtype=torch.bfloat16,
        microbatches=2,
        model=ModelOptions(depth=2, checkpointing="non_reentrant"),
    ),
    "one group": Run(
        reshard_after_forward=2, group_blocks=False, steps=1, model=ModelOptions(depth=1)
    ),
}


@pytest.mark.parametrize("run", PARTS.values(), ids=PARTS)
def test_parts_kept_after_forward_change_no_result(world, run: Run) -> None:
    ours, theirs = world(4).run(of_both, train, run)[0]
    assert_equal(ours.gradients, theirs.gradients)
    assert_equal(ours.params, theirs.params)


@pytest.mark.parametrize(
    "run",
    [
        Run(reshard_after_forward=2, model=ModelOptions(depth=2, scalar=True, repeat=2)),
        Run(
            reshard_after_forward=2,
            model=ModelOptions(depth=2, checkpointing="reentrant", tied=True),
        ),
    ],
    ids=["0-d parameters, blocks run twice", "reentrant checkpoints, tied"],
)
def test_parts_work_where_torch_cannot(world, run: Run) -> None:
    ours, expected = world(4).run(train, FULLSHARD, run)[0], train(ONE_PROCESS, run, 4)
    assert_close(ours.params, expected.params, rtol=1e-5, atol=1e-6)


def backward_gathers_over_fewer_ranks() -> tuple[list[int], list[int], list[int]]:
    """Ranks of the gathers of forward and of backward; of backward after the parts were switched off."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        model = shard(make_decoder(), FULLSHARD, Run(reshard_after_forward=2))
        sizes = recorded_gathers(monkeypatch)
        loss = model(mine(batch_of(0)))
        forward = list(sizes)
        sizes.clear()
        loss.backward()
        backward = list(sizes)
        model.set_reshard_after_forward(True)
        loss = model(mine(batch_of(0)))
        sizes.clear()
        loss.backward()
    return forward, backward, sizes


def test_backward_gathers_over_fewer_ranks(world) -> None:
    for forward, backward, after in world(4).run(backward_gathers_over_fewer_ranks):
        assert set(forward) == {4}
        assert set(backward) == {2}
        assert len(backward) == len(forward)
        assert set(after) == {4}


def parts_are_never_stale() -> None:
    """Weights change between a forward without backward, or a validation, and the next forward."""
    model = shard(make_decoder(), FULLSHARD, Run(reshard_after_forward=2))
    reference = make_decoder()
    model(mine(batch_of(0)))  # no backward
    for change in (0.5, 0.25):
        with torch.no_grad():
            for each in (model, reference):
                for param in each.parameters():
                    param.mul_(change)
            validation = whole(model(mine(batch_of(1))))
            assert_close(validation, reference(mine(batch_of(1))), rtol=1e-5, atol=1e-6)
        model(mine(batch_of(2))).backward()
        reference(batch_of(2)).backward()
    assert_close(gradients(model), gradients(reference), rtol=1e-4, atol=1e-6)


def test_parts_are_never_stale(world) -> None:
    world(4).run(parts_are_never_stale)


def parts_held(model: nn.Module) -> int:
    states = fully_shard.state(model).step.states
    return sum(
        group.sharded_state is ShardedState.SHARDED_POST_FORWARD
        for state in states
        for group in state.groups
    )


class FirstOfThree(nn.Module):
    """Computes with three layers, and returns what the first of them gave."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        results: list[Tensor] = [layer(x) for layer in self.layers]
        return results[0]


def parts_are_given_back() -> list[int]:
    """Parts held after a validation, after a forward, after its backward."""
    model = FirstOfThree()
    for module in (*model.layers, model):
        fully_shard(module, reshard_after_forward=2)
    x = torch.ones(1, 4)
    with torch.no_grad():
        model(x)
    held = [parts_held(model)]
    loss = model(x).sum()
    held.append(parts_held(model))
    loss.backward()
    return [*held, parts_held(model)]


def test_parts_are_given_back(world) -> None:
    for held in world(4).run(parts_are_given_back):
        assert held == [0, 3, 0]


def columns_in_parts() -> None:
    """Sharded along the second dimension, over replicas, with a part kept."""
    axes = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
    model, reference = make_decoder(), make_decoder()
    for module in (*model.blocks, model):
        fully_shard(
            module,
            mesh=axes,
            reshard_after_forward=2,
            shard_placement_fn=lambda param: Shard(param.ndim - 1),
        )
    for each, batch in ((model, mine(batch_of(0))), (reference, batch_of(0))):
        each(batch).backward()
    assert_close(gradients(model), gradients(reference), rtol=1e-4, atol=1e-6)


def test_parts_of_parameters_sharded_along_columns(world) -> None:
    world(4).run(columns_in_parts)


# --- several meshes in a module ----------------------------------------------------------------------


class Experts(nn.Module):
    """A router for everybody, and experts that only some ranks share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.router = nn.Linear(6, 6)
        self.experts = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(F.gelu(self.router(x)))
        return y


def sharded_experts(api: str, kind: str) -> Any:
    """The experts' parameters over two ranks, the others' over four."""
    library = importlib.import_module("torch.distributed.fsdp" if api == TORCH else "fullshard")
    mesh_infos = importlib.import_module(
        "torch.distributed.fsdp._fully_shard._fsdp_common" if api == TORCH else "fullshard.mesh"
    )
    everybody = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    infos = {
        "all": mesh_infos.FSDPMeshInfo(everybody, shard_mesh_dim=0),
        "pairs": mesh_infos.FSDPMeshInfo(pairs["shard"], shard_mesh_dim=0),
        "replicated pairs": mesh_infos.HSDPMeshInfo(pairs, shard_mesh_dim=1, replicate_mesh_dim=0),
    }
    model = nn.Sequential(Experts(), nn.Linear(5, 6), Experts())

    def place(param: nn.Parameter) -> Any:
        is_expert = any(param is p for m in (model[0], model[2]) for p in m.experts.parameters())
        if kind == "both pairs":  # the same ranks share shards, but not all of them gradients
            return mesh_infos.ShardPlacementResult(
                None, infos["pairs" if is_expert else "replicated pairs"]
            )
        return mesh_infos.ShardPlacementResult(None, infos[kind if is_expert else "all"])

    for module in (model[0], model[2], model):
        library.fully_shard(module, mesh=everybody, shard_placement_fn=place)
    return model


def experts_step(api: str, kind: str) -> dict[str, Tensor]:
    model = sharded_experts(api, kind)
    optimizer = ShardOptimizer("SGD", list(model.parameters()))
    for step in range(2):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 6, generator=generator)
        model(mine(x)).square().sum().backward()
        optimizer.step()
    assert isinstance(model[0].experts.weight, DTensor)
    assert model[0].experts.weight.device_mesh.size() == (4 if kind == "replicated pairs" else 2)
    return {
        **gradients(model),
        **{f"{name} itself": param for name, param in weights(model).items()},
    }


@needs_torch_2_13
@pytest.mark.parametrize("kind", ["pairs", "replicated pairs", "both pairs"])
def test_parameters_of_one_module_on_several_meshes(world, kind: str) -> None:
    for ours, theirs in world(4).run(of_both, experts_step, kind):
        assert_equal(ours, theirs)


def equal_mesh_infos() -> int:
    """Two mesh infos of the same ranks, which torch refuses, are one group."""
    axis = init_device_mesh("cpu", (2,))
    layer = fully_shard(
        nn.Linear(4, 4),
        mesh=axis,
        shard_placement_fn=lambda param: mesh.ShardPlacementResult(
            None, mesh.FSDPMeshInfo(axis, shard_mesh_dim=0)
        ),
    )
    layer(torch.ones(1, 4)).sum().backward()
    return len(fully_shard.state(layer).groups)


def test_mesh_infos_of_the_same_ranks_make_one_group(world) -> None:
    assert world(2).run(equal_mesh_infos) == [1, 1]


# --- replicas ----------------------------------------------------------------------------------------


def replicated_training(api: str, policy: dict[str, torch.dtype], microbatches: int) -> Any:
    library = importlib.import_module(
        "torch.distributed._composable.replicate_with_fsdp" if api == TORCH else "fullshard"
    )
    policies = importlib.import_module("torch.distributed.fsdp" if api == TORCH else "fullshard")
    model = make_decoder()
    for module in (*model.blocks, model):
        library.replicate(module, mp_policy=policies.MixedPrecisionPolicy(**policy))
    assert isinstance(model, library.ReplicateModule) and isinstance(model, policies.FSDPModule)
    assert type(model).__name__ == "ReplicateDecoder"
    assert model.head.weight.placements == (Replicate(),)
    optimizer = ShardOptimizer("AdamW", list(model.parameters()))
    for step in range(2):
        optimizer.zero_grad()
        for index, rows in enumerate(mine(batch_of(step)).chunk(microbatches)):
            model.set_requires_gradient_sync(index == microbatches - 1)
            (model(rows) / microbatches).backward()
        optimizer.step()
    return gradients(model), weights(model)


@pytest.mark.parametrize(
    ("ranks", "policy"),
    [(2, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}), (3, {})],
    ids=["2, bf16", "3, fp32"],
)
def test_replicas_train_like_torch_s(world, ranks: int, policy: Any) -> None:
    results = world(ranks).run(of_both, replicated_training, policy, microbatches=2)
    ours, theirs = zip(*results, strict=True)
    assert_equal(ours[0], ours[-1])
    if ranks == 2:
        assert_equal(ours[0], theirs[0])
    else:  # gloo adds three numbers in an order that depends on where they lie
        assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-7)


def replicated_and_sharded() -> None:
    model, reference = make_decoder(), make_decoder()
    replicate(model.blocks[0])
    for module in (model.blocks[1], model.blocks[2], model):
        fully_shard(module)
    model(mine(batch_of(0))).backward()
    reference(batch_of(0)).backward()
    assert_close(gradients(model), gradients(reference), rtol=1e-4, atol=1e-6)
    assert model.blocks[0].up.weight.placements == (Replicate(),)
    assert model.blocks[1].up.weight.placements == (Shard(0),)


def test_a_model_may_have_replicated_and_sharded_modules(world) -> None:
    world(3).run(replicated_and_sharded)


def gathers_of_replicas() -> int:
    with pytest.MonkeyPatch.context() as monkeypatch:
        sizes = recorded_gathers(monkeypatch)
        model = make_decoder()
        for module in (*model.blocks, model):
            replicate(module)
        loss = model(mine(batch_of(0)))
        assert replicate.state(model.blocks[0]).gathered  # type: ignore[attr-defined]
        loss.backward()
        assert not replicate.state(model.blocks[0]).gathered  # type: ignore[attr-defined]
    return len(sizes)


def test_replicas_gather_nothing(world) -> None:
    assert world(2).run(gathers_of_replicas) == [0, 0]


# --- the order of ranks ------------------------------------------------------------------------------


def sharded_over(rows: list[Any], api: str) -> Any:
    ranks = DeviceMesh("cpu", torch.tensor(rows))
    model = make_decoder(ModelOptions(depth=1))
    if api == "replicate":
        return replicate(model, mesh=ranks)
    if api == FULLSHARD:
        return fully_shard(model, mesh=ranks)
    strategy = ShardingStrategy.HYBRID_SHARD if ranks.ndim == 2 else ShardingStrategy.FULL_SHARD
    return FullyShardedDataParallel(
        model, device_mesh=ranks, sharding_strategy=strategy, use_orig_params=True
    )


@pytest.mark.parametrize("api", [FULLSHARD, "wrapper"])
@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([[3, 1], [0, 2]], "order: [[3, 1]]. Sort"),
        ([[2, 0], [3, 1]], "order: [[2, 0], [3, 1]]. Sort"),
        ([3, 1, 0, 2], "order: [[3, 1, 0, 2]]. Sort"),
    ],
    ids=str,
)
def test_ranks_that_a_mesh_shards_over_out_of_order_are_named_on_all_ranks(
    world, rows: list[Any], named: str, api: str
) -> None:
    """Torch averages different shards of the first two, and saves checkpoints of all with rows at wrong places."""
    outcomes = world(4).outcomes(sharded_over, rows, api)
    assert all(isinstance(outcome, ConfigurationError) for outcome in outcomes), outcomes
    assert all(named in str(outcome) for outcome in outcomes), outcomes


def trained_over(rows: list[Any], api: str, folder: str) -> None:
    model, reference = sharded_over(rows, api), make_decoder(ModelOptions(depth=1))
    for net, batch in ((model, mine(batch_of(0))), (reference, batch_of(0))):
        net(batch).backward()
        torch.optim.SGD(net.parameters(), 0.1).step()
    checkpoint.save(folder, model)
    loaded = make_decoder(ModelOptions(depth=1), seed=1)
    checkpoint.load(folder, loaded)
    assert_close(loaded.state_dict(), reference.state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "api"),
    [
        ([[2, 3], [0, 1]], FULLSHARD),
        ([[0, 2], [1, 3]], "wrapper"),
        ([[3], [1], [0], [2]], FULLSHARD),
        ([3, 1, 0, 2], "replicate"),
    ],
    ids=str,
)
def test_replicas_may_have_any_order(world, rows: list[Any], api: str, tmp_path: Path) -> None:
    world(4).run(trained_over, rows, api, str(tmp_path / "saved"))


def ordered_by_their_group(folder: str) -> None:
    group = dist.new_group([1, 0], sort_ranks=False)
    model = make_decoder(ModelOptions(depth=1))
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    model(mine(batch_of(0))).backward()
    expected = {name: param.full_tensor() for name, param in model.named_parameters()}
    checkpoint.save(folder, model)
    loaded = make_decoder(ModelOptions(depth=1), seed=1)
    checkpoint.load(folder, loaded)
    assert_equal(loaded.state_dict(), expected)


@needs_torch_2_13
def test_a_mesh_may_have_the_order_of_its_process_group(world, tmp_path: Path) -> None:
    world(2).run(ordered_by_their_group, str(tmp_path / "saved"))


# --- tensor parallelism ------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + y


def layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(Layer(), nn.Linear(6, 4))


def parallelize(model: nn.Sequential, axis: DeviceMesh, sequence: bool) -> None:
    """Columns, then rows; with ``sequence``, between them each rank has its part of the sequence only."""
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "up": ColwiseParallel(input_layouts=between),
        "down": RowwiseParallel(output_layouts=between),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    parallelize_module(model[0], axis, plan)
    parallelize_module(
        model[1], axis, ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    )


def tensor_parallel(
    api: str,
    shape: tuple[int, ...],
    names: tuple[str, ...],
    sequence: bool,
    options: dict[str, Any],
) -> dict[str, Tensor]:
    """Train layers under tensor parallelism within data parallelism; gradients and weights, whole."""
    library = importlib.import_module("torch.distributed.fsdp" if api == TORCH else "fullshard")
    axes = init_device_mesh("cpu", shape, mesh_dim_names=names)
    data, tensor = axes[names[:-1] if len(names) > 2 else names[0]], axes[names[-1]]
    model = layers()
    parallelize(model, tensor, sequence)
    policy = library.MixedPrecisionPolicy(**options.pop("policy", {}))
    for module in (model[0], model):
        library.fully_shard(module, mesh=data, mp_policy=policy, **options)
    optimizer = ShardOptimizer("AdamW", list(model.parameters()))
    ranks, rank = data.size(), torch.tensor(data.get_coordinate()).tolist()
    position = rank[0] if len(rank) == 1 else rank[0] * data.size(1) + rank[1]
    for step in range(2):
        optimizer.zero_grad()
        x = torch.randn(2 * ranks, 4, 6, generator=torch.Generator().manual_seed(step))
        rows = x.chunk(ranks)[position]
        if sequence:
            rows = rows.chunk(tensor.size(), dim=1)[tensor.get_local_rank()]
        model(rows).square().mean().backward()
        optimizer.step()
    params = {f"{name} itself": param for name, param in weights(model).items()}
    placements = {n: str(p.placements) for n, p in model.named_parameters()}  # type: ignore[attr-defined]
    return {**gradients(model), **params, **{n: _text(p) for n, p in placements.items()}}


def _text(text: str) -> Tensor:
    return torch.tensor(list(text.encode()))


def one_process(ranks: int) -> dict[str, Tensor]:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        optimizer.zero_grad()
        x = torch.randn(2 * ranks, 4, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
    return {f"{name} itself": param for name, param in weights(model).items()}


TENSOR_PARALLEL: dict[str, tuple[tuple[int, ...], tuple[str, ...], bool, dict[str, Any]]] = {
    "hsdp": ((2, 1, 2), ("replicate", "shard", "tp"), False, {}),
    "sequence, bf16": (
        (2, 2),
        ("dp", "tp"),
        True,
        {"policy": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}},
    ),
}


@pytest.mark.parametrize("case", TENSOR_PARALLEL.values(), ids=TENSOR_PARALLEL)
def test_tensor_parallel_models_train_like_torch_s(world, case: Any) -> None:
    ours, theirs = (world(4).run(tensor_parallel, api, *case) for api in (FULLSHARD, TORCH))
    for mine_, theirs_ in zip(ours, theirs, strict=True):
        assert_equal(mine_, theirs_)
    if "policy" not in case[3]:
        expected = one_process(2)
        weights = {name: ours[0][name] for name in expected}
        assert_close(weights, expected, rtol=1e-4, atol=1e-5)


def column_sharded_uneven() -> None:
    """Tensor and data parallelism along the same dimension, which neither divides evenly, and parts kept."""
    axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(7)
    layer, reference = nn.Linear(6, 7), nn.Linear(6, 7)
    reference.load_state_dict(layer.state_dict())
    parallelize_module(layer, axes["tp"], ColwiseParallel(output_layouts=Replicate()))
    fully_shard(layer, mesh=axes["dp"])
    before = weights(layer)
    assert_equal(before, weights(reference))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    layer(x.chunk(2)[axes["dp"].get_local_rank()]).square().mean().backward()
    reference(x).square().mean().backward()
    assert_close(gradients(layer), gradients(reference), rtol=1e-5, atol=1e-7)


def test_a_dimension_divided_twice_and_unevenly(world) -> None:
    world(4).run(column_sharded_uneven)


def tensor_parallel_parts() -> None:
    """Parts over two of four data-parallel ranks, of parameters that are DTensors on another axis."""
    axes = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    model, reference = layers(), layers()
    parallelize(model, axes["tp"], sequence=False)
    for module in (model[0], model):
        fully_shard(module, mesh=axes["dp"], reshard_after_forward=2)
    x = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(1))
    for each, batch in ((model, x.chunk(4)[dist.get_rank()]), (reference, x)):
        each(batch).square().mean().backward()
    assert_close(gradients(model), gradients(reference), rtol=1e-4, atol=1e-6)


def test_parts_of_tensor_parallel_parameters(world) -> None:
    world(4).run(tensor_parallel_parts)


# --- one mesh for everything -------------------------------------------------------------------------


class Factors(nn.Module):
    """Multiplies: DTensor takes long to plan products of matrices for three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def on_one_mesh(
    api: str, shape: tuple[int, ...], names: tuple[str, ...], dims: dict[str, Any], entry: str
) -> dict[str, Tensor]:
    """All parameters and activations are DTensors on one mesh, of which some axes are data-parallel."""
    library = importlib.import_module("torch.distributed.fsdp" if api == TORCH else "fullshard")
    entries = library
    if entry == "replicate" and api == TORCH:
        entries = importlib.import_module("torch.distributed._composable.replicate_with_fsdp")
    axes = init_device_mesh("cpu", shape, mesh_dim_names=names)
    data_axes = [
        name for role in dims.values() for name in ([role] if isinstance(role, str) else role)
    ]
    torch.manual_seed(5)
    model: Any = nn.Sequential(Factors(), Factors())
    for layer, cut in zip(model, (Shard(0), Shard(1)), strict=True):
        placements = [cut if axis == "tp" else Replicate() for axis in names]
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), axes, placements))
    named = library.DataParallelMeshDims(**dims)
    for module in (model[0], model):
        getattr(entries, entry)(module, mesh=axes, dp_mesh_dims=named)
    optimizer = ShardOptimizer("SGD", list(model.parameters()))
    for step in range(2):
        optimizer.zero_grad()
        x = torch.randn(8, 10, 6, generator=torch.Generator().manual_seed(step))
        rows = distribute_tensor(
            x, axes, [Shard(0) if axis in data_axes else Replicate() for axis in names]
        )
        model(rows).to_local().square().mean().backward()
        optimizer.step()
    params = {f"{name} itself": param for name, param in weights(model).items()}
    texts = {n: _text(str(p.placements)) for n, p in model.named_parameters()}  # type: ignore[attr-defined]
    return {**{f"{n}.grad": g for n, g in gradients(model).items()}, **params, **texts}


ONE_MESH: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, Any], str]] = {
    "hsdp": ((2, 2), ("a", "b"), {"replicate": "a", "shard": "b"}, "fully_shard"),
    "two shard axes": ((2, 2), ("a", "b"), {"shard": ("a", "b")}, "fully_shard"),
    "two shard axes, tp": ((2, 1, 2), ("a", "b", "tp"), {"shard": ("a", "b")}, "fully_shard"),
    "hsdp with two shard axes": (
        (2, 2, 1),
        ("a", "b", "c"),
        {"replicate": "a", "shard": ("b", "c")},
        "fully_shard",
    ),
    "replicas, tp": ((2, 2), ("dp", "tp"), {"replicate": "dp"}, "replicate"),
    "replicas through fully_shard": ((4,), ("dp",), {"replicate": "dp"}, "fully_shard"),
}


@needs_torch_2_13
@pytest.mark.parametrize("case", ONE_MESH.values(), ids=ONE_MESH)
def test_parameters_on_one_mesh_for_everything(world, case: Any) -> None:
    ours, theirs = (world(4).run(on_one_mesh, api, *case) for api in (FULLSHARD, TORCH))
    for mine_, theirs_ in zip(ours, theirs, strict=True):
        assert_close(mine_, theirs_, rtol=1e-5, atol=1e-7)


def mistakes_on_one_mesh(kind: str) -> None:
    axes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    layer = nn.Linear(4, 4)
    dims = DataParallelMeshDims(shard="dp")
    if kind == "sharded already":
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, axes, [Shard(0), Replicate()]))
    if kind == "unknown axis":
        dims = DataParallelMeshDims(shard="pp")
    if kind == "replicate":
        replicate(layer, mesh=axes, dp_mesh_dims=dims)
    elif kind == "foreign mesh":
        other = init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, other, [Replicate()]))
        fully_shard(layer, mesh=axes["dp"])
    else:
        fully_shard(layer, mesh=axes, dp_mesh_dims=dims)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("plain", ["weight: is plain", "bias: is plain", "parallelize before sharding"]),
        ("sharded already", ["weight: is (Shard(dim=0)", "Replicate() along ['dp']"]),
        ("unknown axis", ["('dp', 'tp')", "['pp']"]),
        ("replicate", ["shards nothing", "fully_shard"]),
        ("foreign mesh", ["weight: lies on a mesh", "axes of one mesh"]),
    ],
)
def test_mistakes_are_the_same_clear_error_on_every_rank(
    world, kind: str, words: list[str]
) -> None:
    outcomes = world(2).outcomes(mistakes_on_one_mesh, kind)
    assert all(isinstance(outcome, ConfigurationError) for outcome in outcomes), outcomes
    assert len({str(outcome) for outcome in outcomes}) == 1
    for word in words:
        assert word in str(outcomes[0]), outcomes[0]
