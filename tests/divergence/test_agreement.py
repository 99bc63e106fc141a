"""Ranks compare their models before the first collective, and name what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fullshard import (
    CPUOffloadPolicy,
    DivergenceError,
    FullyShardedDataParallel as FSDP,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
    replicate,
)
from fullshard.api import MixedPrecision
from fullshard.wrap import ModuleWrapPolicy
from tests.helpers.ranks import World
from tests.helpers.threads import run_threads

WIDTH = 4


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH, *, first: str = "up") -> None:
        super().__init__()
        for name in ("up", "down") if first == "up" else ("down", "up"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))
        if width != WIDTH:
            self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x))
        return y


class Net(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y


def shard(net: nn.Module, **options: Any) -> Any:
    for layer in net.layers:  # type: ignore[union-attr]
        fully_shard(layer, **options)
    return fully_shard(net, **options)


def wrap(net: nn.Module, **options: Any) -> Any:
    options = {"use_orig_params": True, "device_id": torch.device("cpu")} | options
    return FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Layer}), **options)


# --- models of which one rank has another --------------------------------------------------------------


def of_another_shape(odd: bool, finish: Callable[..., Any]) -> Any:
    net = Net()
    if odd:
        net.layers[1] = Layer(6)
    return finish(net)


def of_another_dtype(odd: bool, finish: Callable[..., Any]) -> Any:
    net = Net()
    if odd:
        net.layers[1].to(torch.float64)
    return finish(net)


def in_another_order(odd: bool, finish: Callable[..., Any]) -> Any:
    net = Net()
    net.layers[1] = Layer(first="down" if odd else "up")
    return finish(net)


def with_another_name(odd: bool, finish: Callable[..., Any]) -> Any:
    net = Net()
    if odd:
        layer = net.layers[1]
        layer.register_parameter("scale", nn.Parameter(torch.ones(WIDTH)))
    return finish(net)


def with_another_layer(odd: bool, finish: Callable[..., Any]) -> Any:
    return finish(Net(depth=3 if odd else 2))


def frozen(odd: bool, finish: Callable[..., Any]) -> Any:
    net = Net()
    net.layers[1].up.weight.requires_grad_(not odd)  # type: ignore[union-attr, operator]
    return finish(net)


def of_another_torch(odd: bool, finish: Callable[..., Any]) -> Any:
    return finish(Net())  # see `first_forward`


def along_another_dimension(odd: bool, finish: Callable[..., Any]) -> Any:
    return finish(Net(), shard_placement_fn=lambda p: Shard(p.ndim - 1 if odd else 0))


def with_another_policy(odd: bool, finish: Callable[..., Any]) -> Any:
    return finish(Net(), mp_policy=MixedPrecisionPolicy(torch.bfloat16 if odd else None))


def with_another_wire_dtype(odd: bool, finish: Callable[..., Any]) -> Any:
    policy = MixedPrecisionPolicy(
        reduce_dtype=torch.float32, wire_dtype=torch.bfloat16 if odd else None
    )
    return finish(Net(), mp_policy=policy)


def kept_after_forward(odd: bool, finish: Callable[..., Any]) -> Any:
    return finish(Net(), reshard_after_forward=not odd)


def offloaded(odd: bool, finish: Callable[..., Any]) -> Any:
    policy = CPUOffloadPolicy(pin_memory=False) if odd else OffloadPolicy()
    return finish(Net(), offload_policy=policy)


def replicated(odd: bool, finish: Callable[..., Any]) -> Any:
    net = Net()
    for layer in net.layers:
        if odd:
            replicate(layer)
        else:
            fully_shard(layer)
    return fully_shard(net)


def in_another_precision(odd: bool, finish: Callable[..., Any]) -> Any:
    return finish(
        Net(), mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16 if odd else None)
    )


def by_another_strategy(odd: bool, finish: Callable[..., Any]) -> Any:
    return finish(
        Net(),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP if odd else ShardingStrategy.FULL_SHARD,
    )


def as_flat_parameter(odd: bool, finish: Callable[..., Any]) -> Any:
    return finish(Net(), use_orig_params=not odd)


OF_BOTH_APIS: dict[Callable[..., Any], list[str]] = {
    of_another_shape: ["layers.1.up.weight is (6, 4), others (4, 4)", "layers.1.up.bias is (6,)"],
    of_another_dtype: ["dtype of layers.1.up.weight is float64, others float32"],
    in_another_order: [
        "the order of parameters in layers.1 is layers.1.down.weight, layers.1.up.weight, others layers.1.up.weight"
    ],
    with_another_name: ["layers.1.scale is (4,), others missing"],
    with_another_layer: ["group layers.2 is there, others missing"],
    frozen: ["requires_grad of layers.1.up.weight is False, others True"],
    of_another_torch: ["version of torch is 1.0, others 2."],
}
OF_FULLY_SHARD: dict[Callable[..., Any], list[str]] = {
    along_another_dimension: ["shard dimension of layers.1.up.weight is 1, others 0"],
    with_another_policy: ["param_dtype of layers.1 is bfloat16, others None"],
    with_another_wire_dtype: ["wire_dtype of root is bfloat16, others None"],
    kept_after_forward: ["reshard_after_forward of layers.0 is False, others True"],
    offloaded: ["offload_policy of layers.1 is CPUOffloadPolicy, others OffloadPolicy"],
    replicated: ["mesh of layers.0 is [[0], [1], [2]], others [[0, 1, 2]]"],
}
OF_THE_WRAPPER: dict[Callable[..., Any], list[str]] = {
    in_another_precision: ["reduce_dtype of layers.0 is bfloat16, others None"],
    by_another_strategy: ["reshard_after_forward of layers.1 is False, others True"],
    as_flat_parameter: ["shard format of layers.0 is FlatParameterFormat, others FlatFormat"],
}
CASES = {
    "fully_shard": (shard, OF_BOTH_APIS | OF_FULLY_SHARD),
    "wrapper": (wrap, OF_BOTH_APIS | OF_THE_WRAPPER),
}


def error_of(run: Callable[[], object]) -> str | None:
    """Return the divergence that is found, after showing that the ranks can go on together."""
    message = None
    try:
        run()
    except DivergenceError as error:
        message = str(error)
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == dist.get_world_size()
    return message


def first_forward(build: Callable[..., Any], finish: Callable[..., Any], odd: bool) -> str | None:
    if build is of_another_torch and odd:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "__version__", "1.0")
            return error_of(lambda: build(odd, finish)(torch.ones(2, WIDTH)))
    return error_of(lambda: build(odd, finish)(torch.ones(2, WIDTH)))


def errors_of_first_forwards(
    builds: Sequence[Callable[..., Any]], finish: Callable[..., Any], odd_rank: int
) -> list[str | None]:
    return [first_forward(build, finish, dist.get_rank() == odd_rank) for build in builds]


@pytest.mark.parametrize("api", CASES)
def test_a_rank_with_another_model_is_named_on_all_ranks(
    world: Callable[[int], World], api: str
) -> None:
    finish, cases = CASES[api]
    messages, *of_others = world(3).run(errors_of_first_forwards, [*cases], finish, 1)
    assert all(theirs == messages for theirs in of_others)
    for case, message in zip(cases, messages, strict=True):
        assert message is not None, case.__name__
        for text in cases[case]:
            assert f"rank 1: {text}" in message, f"{case.__name__}: {message}"
        assert "others" in message and "Build the same model" in message


def wrapped_differently(odd: bool, finish: Callable[..., Any]) -> Any:
    net = Net()
    for layer in list(net.layers)[: 1 if odd else 2]:
        fully_shard(layer)
    return fully_shard(net)


def test_two_ranks_that_differ_are_both_named(world: Callable[[int], World]) -> None:
    builds = [of_another_shape, with_another_layer, wrapped_differently, in_another_order]
    messages, theirs = world(2).run(errors_of_first_forwards, builds, shard, 1)
    assert messages == theirs
    assert "rank 0: layers.1.up.weight is (4, 4), rank 1: (6, 4)" in messages[0]
    assert "rank 0: group layers.2 is missing, rank 1: there" in messages[1]
    assert "rank 0: group layers.1 is there, rank 1: missing" in messages[2]
    assert "rank 0: layers.1.up.weight is missing, rank 1: (4, 4)" in messages[2]
    assert "rank 0: the order of parameters in layers.1 is layers.1.up.weight" in messages[3]


# --- meshes --------------------------------------------------------------------------------------------


def over_other_axes() -> str | None:
    """Rank 3 shards over all ranks; the others have two replicas."""
    mesh = init_device_mesh("cpu", (2, 2))
    return error_of(
        lambda: shard(Net(), mesh=None if dist.get_rank() == 3 else mesh)(torch.ones(2, WIDTH))
    )


def over_fewer_ranks() -> str | None:
    """Ranks 1 and 3 shard over two ranks; the others over all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["outer"]
    return error_of(
        lambda: shard(Net(), mesh=mesh if dist.get_rank() == 1 else None)(torch.ones(2, WIDTH))
    )


def of_another_shape_in_one_replica() -> str | None:
    mesh = init_device_mesh("cpu", (2, 2))
    net = of_another_shape(dist.get_rank() == 2, lambda net: shard(net, mesh=mesh))
    return error_of(lambda: net(torch.ones(2, WIDTH)))


def on_another_post_forward_mesh() -> str | None:
    size = 2 if dist.get_rank() in (0, 3) else True
    return error_of(lambda: shard(Net(), reshard_after_forward=size)(torch.ones(2, WIDTH)))


def with_another_tensor_parallel_plan() -> str | None:
    """Ranks 1 and 3 are data-parallel. Rank 3 has a plain layer; ranks 0 and 2 learn of it along the other axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = Net()
    for layer in net.layers:
        parallelize_module(
            layer, mesh["tensor"], {"up": ColwiseParallel(output_layouts=Replicate())}
        )
    if dist.get_rank() == 3:
        net.layers[1] = Layer()
    return error_of(lambda: shard(net, mesh=mesh["data"])(torch.ones(2, WIDTH)))


def over_other_meshes() -> list[str | None]:
    return [
        over_other_axes(),
        over_fewer_ranks(),
        of_another_shape_in_one_replica(),
        on_another_post_forward_mesh(),
        with_another_tensor_parallel_plan(),
    ]


def test_ranks_with_other_meshes_are_named_on_all_ranks(world: Callable[[int], World]) -> None:
    axes, fewer, replica, post_forward, parallel = (
        set(each) for each in zip(*world(4).run(over_other_meshes), strict=True)
    )
    assert len(axes) == len(fewer) == len(replica) == len(post_forward) == 1
    assert len(parallel) == 1
    assert "rank 1: layers.1.up.weight is (2, 4), rank 3: (4, 4)" in parallel.pop()
    assert "rank 3: mesh of layers.0 is [[0, 1, 2, 3]], others [[0, 1], [2, 3]]" in axes.pop()
    assert "rank 2: layers.1.up.weight is (6, 4), others (4, 4)" in replica.pop()
    text = post_forward.pop()
    assert "ranks 0, 3: post-forward mesh size of layers.0 is 2, ranks 1, 2: 4" in text
    text = fewer.pop()
    assert "rank 1: shards over ranks 1, 3\n" in text
    assert "over ranks 0-3\n" in text


def as_replicas_of_another_shard() -> str | None:
    rank = dist.get_rank()
    shards = [dist.new_group(ranks) for ranks in ([1, 3], [0, 2])][rank % 2 - 1]
    replicas = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])][rank in (1, 2)]
    model = wrap(
        Net(),
        process_group=(shards, replicas),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )
    return error_of(lambda: model(torch.ones(2, WIDTH)))


def test_replicas_of_different_shards_are_named(world: Callable[[int], World]) -> None:
    messages = world(4).run(as_replicas_of_another_shard)
    for message, (first, second) in zip(messages, [(0, 3), (1, 2), (1, 2), (0, 3)], strict=True):
        assert f"rank {first}: shard of layers.0 is 0, rank {second}: 1" in str(message)


# --- what differs by right --------------------------------------------------------------------------------


def stages_of_a_pipeline() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    stage = Net(depth=1 + mesh.get_local_rank("stage"))
    shard(stage, mesh=mesh["data"])(torch.ones(2, WIDTH)).sum().backward()


def shards_of_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = Net()
    for layer in net.layers:
        layer.up, layer.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)  # 5 rows on two ranks
        parallelize_module(
            layer, mesh["tensor"], {"up": ColwiseParallel(output_layouts=Replicate())}
        )
    shard(net, mesh=mesh["data"])(torch.ones(2, WIDTH)).sum().backward()


def two_models_in_another_order() -> None:
    """Ranks 0 and 1 run a model of two ranks before, and ranks 2 and 3 after, one of four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["inner"]
    models = [shard(Net(depth=1), mesh=mesh), shard(Net())]
    for model in models if dist.get_rank() < 2 else models[::-1]:
        model(torch.ones(2, WIDTH)).sum().backward()


def with_legal_differences() -> None:
    stages_of_a_pipeline()
    shards_of_tensor_parallelism()


def test_pipelines_and_tensor_parallelism_may_differ(world: Callable[[int], World]) -> None:
    world(4).run(with_legal_differences)


# --- options that change between steps --------------------------------------------------------------------


def change_reshard(net: Any) -> None:
    net.set_reshard_after_forward(False)


def change_divide_factor(net: Any) -> None:
    net.layers[1].set_gradient_divide_factor(3.0)


def change_prefetch(net: Any) -> None:
    net.layers[0].set_modules_to_forward_prefetch([net])


def freeze(net: Any) -> None:
    net.layers[1].up.weight.requires_grad_(False)


def cast(net: Any) -> None:
    net.layers[1].to(torch.float64)
    net.layers[1].to(torch.bfloat16)


def change_nothing(net: Any) -> None:
    net.set_reshard_after_forward(True)
    net.set_requires_gradient_sync(False)
    net.set_requires_gradient_sync(True)


CHANGES: dict[Callable[[Any], None], str] = {
    change_reshard: "reshard_after_forward of layers.0 is now False",
    change_divide_factor: "gradient divide factor of layers.1 is now 3.0",
    change_prefetch: "forward prefetch of layers.0 is now [root]",
    freeze: "requires_grad of layers.1.up.weight is now False",
    cast: "dtype of layers.1.up.weight is now bfloat16",
}


def step(net: Any) -> None:
    net(torch.ones(2, WIDTH)).sum().backward()


def errors_after_changes(
    changes: Sequence[Callable[[Any], None]], changing: Sequence[int]
) -> list[str | None]:
    found = []
    for change in changes:
        net = shard(Net(), reshard_after_forward=True)
        step(net)
        if dist.get_rank() in changing:
            change(net)
        found.append(error_of(lambda net=net: step(net)))  # type: ignore[misc]
    return found


def test_a_rank_that_changes_an_option_alone_is_named(world: Callable[[int], World]) -> None:
    of_all = world(2).run(errors_after_changes, [*CHANGES], [1])
    for change, *messages in zip(CHANGES, *of_all, strict=True):
        for message in messages:
            assert message is not None, change.__name__
            assert "rank 0: all-gather of" in message, message
            assert "rank 1: agreement on the model" in message, message
            assert CHANGES[change] in message, message


def test_options_may_change_on_all_ranks_and_be_set_again_on_one(
    world: Callable[[int], World],
) -> None:
    everything = [change for change in CHANGES if change is not cast]
    assert world(2).run(errors_after_changes, everything, [0, 1]) == [[None] * len(everything)] * 2
    assert world(2).run(errors_after_changes, [change_nothing], [1]) == [[None]] * 2


# --- after an error -----------------------------------------------------------------------------------------


def mended_and_run_again() -> tuple[str | None, str | None, list[int]]:
    net = Net()
    net.layers[1].up.weight.requires_grad_(dist.get_rank() != 1)  # type: ignore[union-attr, operator]
    sharded = shard(net)
    refused = error_of(lambda: step(sharded))
    for param in sharded.parameters():
        param.requires_grad_(True)
    return refused, error_of(lambda: step(sharded)), [*sharded.head.weight.grad.shape]


def test_a_model_can_be_mended_after_the_error(world: Callable[[int], World]) -> None:
    for refused, accepted, shape in world(2).run(mended_and_run_again):
        assert refused is not None and "layers.1.up.weight" in refused
        assert accepted is None
        assert shape == [2, WIDTH]


def unshard_and_step(net: Any) -> None:
    net.layers[1].unshard()
    net.layers[1].reshard()
    step(net)


def unsharded_before_the_first_forward() -> list[str | None]:
    odd = dist.get_rank() == 1
    same, other = shard(Net()), of_another_shape(odd, shard)
    alone = shard(Net())
    return [
        error_of(lambda: unshard_and_step(same)),
        error_of(lambda: other.layers[1].unshard()),
        error_of(lambda: alone.layers[1].unshard() if odd else step(alone)),
    ]


def test_ranks_compare_before_unshard_too(world: Callable[[int], World]) -> None:
    for same, other, alone in world(2).run(unsharded_before_the_first_forward):
        assert same is None
        assert other is not None and "rank 0: up.weight is (4, 4), rank 1: (6, 4)" in other
        assert (
            alone is not None and "rank 0: what comes next is forward, rank 1: unshard()" in alone
        )


def a_part_is_run_first() -> str | None:
    net = shard(Net())
    net.layers[1](torch.ones(2, WIDTH)).sum().backward()
    step(net)
    if dist.get_rank() == 1:
        net.layers[0].set_reshard_after_forward(False)
    return error_of(lambda: net.layers[1](torch.ones(2, WIDTH)))


def test_parts_that_are_run_on_their_own_compare_too(world: Callable[[int], World]) -> None:
    for message in world(2).run(a_part_is_run_first):
        assert message is not None and "reshard_after_forward of layers.0 is now False" in message


def error_of_threads() -> str | None:
    try:
        of_another_shape(dist.get_rank() == 1, shard)(torch.ones(2, WIDTH))
    except DivergenceError as error:
        return str(error)
    return None


def test_ranks_that_are_threads_compare_too() -> None:
    messages = run_threads(3, error_of_threads)
    assert len(set(messages)) == 1
    assert "rank 1: layers.1.up.weight is (6, 4), others (4, 4)" in messages[0]
