"""Arguments that are collections may be generators, though some are read more than once.

Each case calls the API with a function that makes a collection of what it is given, once with `list` and
once with `iter`, and returns what came of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from fullshard import (
    ConfigurationError,
    DataParallelMeshDims,
    FullyShardedDataParallel,
    fully_shard,
    plan_groups,
    replicate,
    share_comm_ctx,
)
from fullshard.optim import ShardedOptimizer
from fullshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _module_wrap_policy,
    _or_policy,
    always_wrap_policy,
    enable_wrap,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from tests.helpers.groups import alone

Collect = Callable[[Iterable[Any]], Any]


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))


def kinds(model: nn.Module) -> list[str]:
    """Types of the parameters, by name: what is sharded, and what is not."""
    return [f"{name}: {type(param.data).__name__}" for name, param in model.named_parameters()]


def ignored_by_fully_shard(collect: Collect) -> Any:
    model = make_model()
    fully_shard(model, ignored_params=collect(model[0].parameters()))
    return kinds(model)


def ignored_by_replicate(collect: Collect) -> Any:
    model = make_model()
    replicate(model, ignored_params=collect(model[0].parameters()))
    return kinds(model)


def prefetched(collect: Collect) -> Any:
    model = make_model()
    blocks = [fully_shard(model[0]), fully_shard(model[2])]
    fully_shard(model)
    model.set_modules_to_forward_prefetch(collect(blocks))  # type: ignore[operator]
    model.set_modules_to_backward_prefetch(collect(blocks))  # type: ignore[operator]
    state = fully_shard.state(model)  # type: ignore[attr-defined]
    return len(state.options.forward_prefetch), len(state.options.backward_prefetch)


def shared_context(collect: Collect) -> Any:
    models = [fully_shard(make_model()), fully_shard(make_model())]
    share_comm_ctx(collect(models))
    first, second = (fully_shard.state(model) for model in models)  # type: ignore[attr-defined]
    return first.shared_context is second.shared_context is not None


def planned(collect: Collect) -> Any:
    model = make_model()
    plan = plan_groups(
        model, ignored_params=collect(model[0].parameters()), keep_with_parent=collect([model[2]])
    )
    plan.apply()
    return kinds(model), str(plan)


def mesh_dims(collect: Collect) -> Any:
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("r", "s", "t"))
    model = nn.Linear(2, 2)
    for name, param in list(model.named_parameters()):
        whole = distribute_tensor(param.data, mesh, [Replicate()] * 3)
        setattr(model, name, nn.Parameter(whole))
    dims = DataParallelMeshDims(shard=collect(["s"]), replicate=collect(["r"]))
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    return str(model.weight.placements), dims.shard_names, dims.replicate_names


def on_cpu(model: nn.Module, **options: Any) -> Any:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def wrapped(model: nn.Module, **options: Any) -> Any:
    """What is wrapped, and the sizes of the flat parameters."""
    model = on_cpu(model, **options)
    return str(model), [param.shape for param in model.parameters()]


def ignored_states_of_wrappers(collect: Collect) -> Any:
    model = make_model()
    states = collect(model[0].parameters())
    return wrapped(model, ignored_states=states, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


def ignored_modules_of_wrappers(collect: Collect) -> Any:
    model: Any = nn.Sequential(make_model(), make_model())
    inner = [model[0][0], model[1][0]]
    policy = ModuleWrapPolicy({nn.Sequential})
    return wrapped(model, ignored_modules=collect(inner), auto_wrap_policy=policy)


def classes_of_a_policy(collect: Collect) -> Any:
    policy = ModuleWrapPolicy(collect([nn.Linear]))
    return wrapped(make_model(), auto_wrap_policy=policy)


def answers_of_a_policy(collect: Collect) -> Any:
    model: Any = nn.Sequential(make_model(), make_model())
    answer = {"ignored_modules": collect([model[0][0], model[1][0]])}
    policy = CustomPolicy(lambda module: answer if isinstance(module, nn.Sequential) else False)
    return wrapped(model, auto_wrap_policy=policy, ignored_modules=[model[0][0], model[1][0]])


def wrapped_by_hand(collect: Collect) -> Any:
    model: Any = nn.Sequential(make_model(), make_model())
    inner = collect([model[0][0], model[1][0]])
    with enable_wrap(
        wrapper_cls=FullyShardedDataParallel,
        device_id=torch.device("cpu"),
        ignored_modules=inner,
    ):
        both = [wrap(model[0]), wrap(model[1])]
    return [[param.shape for param in each.parameters()] for each in both]


def optimized(collect: Collect) -> Any:
    model = fully_shard(make_model())
    optimizer = ShardedOptimizer(optim.SGD, collect(model.parameters()), lr=1.0)
    other = ShardedOptimizer(optim.SGD, [{"params": collect(model.parameters())}], lr=1.0)
    return [[len(group["params"]) for group in each.param_groups] for each in (optimizer, other)]


@pytest.mark.parametrize(
    "case",
    [
        ignored_by_fully_shard,
        ignored_by_replicate,
        prefetched,
        shared_context,
        planned,
        mesh_dims,
        ignored_states_of_wrappers,
        ignored_modules_of_wrappers,
        classes_of_a_policy,
        answers_of_a_policy,
        wrapped_by_hand,
        optimized,
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_generator_is_as_good_as_a_list(case):
    with alone():
        from_list = case(lambda values: list(values))
        from_generator = case(lambda values: (value for value in values))
    assert from_generator == from_list


@pytest.mark.parametrize(
    "policy",
    [
        partial(transformer_auto_wrap_policy, transformer_layer_cls=iter([nn.Linear])),
        partial(_module_wrap_policy, module_classes=iter([nn.Linear])),
        partial(
            size_based_auto_wrap_policy, min_num_params=1, exclude_wrap_modules=iter([nn.ReLU])
        ),
        partial(size_based_auto_wrap_policy, min_num_params=1, force_leaf_modules=iter([nn.ReLU])),
        partial(_or_policy, policies=iter([always_wrap_policy])),
    ],
)
def test_policy_functions_refuse_what_can_be_read_once(policy):
    # They are called for every module, and a partial function is the user's: it cannot be read once for all.
    with alone(), pytest.raises(ConfigurationError, match="can be read only once"):
        on_cpu(make_model(), auto_wrap_policy=policy)
