"""Bad input gets the same clear error on every rank, before any collective; a failed step can be followed by a good one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from fullshard import (
    ConfigurationError,
    LifecycleError,
    MixedPrecisionPolicy,
    UnsupportedError,
    fully_shard,
)
from fullshard.engine.state import state_of
from tests.helpers.compare import assert_close
from tests.helpers.models import make_decoder, tokens_for
from tests.helpers.training import FULLSHARD, Run, gradients, shard


def three_axes() -> None:
    fully_shard(
        nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=tuple("abc"))
    )


def more_ranks_than_there_are() -> None:
    fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (8,)))


def not_a_mesh() -> None:
    fully_shard(nn.Linear(2, 2), mesh="cpu")


def module_list() -> None:
    fully_shard(nn.ModuleList([nn.Linear(2, 2)]))


def module_without_forward() -> None:
    class Bare(nn.Module):
        pass

    fully_shard([nn.Linear(2, 2), Bare()])


def not_a_module() -> None:
    fully_shard("model")


def empty_list() -> None:
    fully_shard([])


def meta_at_first_forward() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0])
    fully_shard(model)
    model(torch.ones(1, 2))


def some_on_meta() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    fully_shard(model)
    model(torch.ones(1, 2))


def parameter_in_two_groups() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    fully_shard(model[0])
    fully_shard(model[1])


def parameter_in_child_and_parent() -> None:
    model = make_decoder()
    model.head.weight = nn.Parameter(torch.randn(11, 6))
    model.blocks[0].up.weight = nn.Parameter(torch.randn(11, 6))
    model.head.weight = model.blocks[0].up.weight
    fully_shard(model.blocks[0])
    fully_shard(model)


def complex_on_a_real_wire() -> None:
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, wire_dtype=torch.bfloat16)
    fully_shard(layer, mp_policy=policy)


class Wrapped(Tensor):
    """A tensor subclass with a gather of its own."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise AssertionError("must not be called")


def tensor_subclass() -> None:
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Wrapped))
    fully_shard(layer)


def sparse_gradients() -> None:
    fully_shard(nn.Sequential(nn.Embedding(4, 2, sparse=True)))


def wrong_policy() -> None:
    fully_shard(nn.Linear(2, 2), mp_policy=torch.bfloat16)


def wrong_dtype_in_policy() -> None:
    MixedPrecisionPolicy(param_dtype=torch.int8)


def wrong_offload() -> None:
    fully_shard(nn.Linear(2, 2), offload_policy=True)


def smaller_mesh_after_forward() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=3)


def wrong_reshard() -> None:
    fully_shard(nn.Linear(2, 2), reshard_after_forward="yes")


def wrong_ignored() -> None:
    fully_shard(nn.Linear(2, 2), ignored_params=["weight"])  # type: ignore[list-item]


def wrong_placement() -> None:
    fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda _: Replicate())


def placement_out_of_range() -> None:
    fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda _: Shard(5))


def applied_twice() -> None:
    layer = nn.Linear(2, 2)
    fully_shard(layer)
    fully_shard(layer)


def parent_before_child() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model)
    fully_shard(model[0])


def root_in_a_list() -> None:
    pair = fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)])
    pair[0](torch.ones(1, 2))


def reset_below_the_root() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model[0])
    fully_shard(model)
    model(torch.ones(1, 2))
    model[0].reset_iter_state()


def prefetch_of_a_plain_module() -> None:
    layer = fully_shard(nn.Linear(2, 2))
    layer.set_modules_to_forward_prefetch([nn.Linear(2, 2)])


def sync_that_is_not_a_bool() -> None:
    fully_shard(nn.Linear(2, 2)).set_requires_gradient_sync("no")


def comm_of_the_wrong_type() -> None:
    fully_shard(nn.Linear(2, 2)).set_custom_all_gather(print)


CASES: list[tuple[Any, type[Exception], list[str]]] = [
    (three_axes, ConfigurationError, ["1-D", "2-D", "3 axes"]),
    (more_ranks_than_there_are, RuntimeError, ["8", "world size"]),
    (not_a_mesh, ConfigurationError, ["DeviceMesh", "str"]),
    (module_list, ConfigurationError, ["forward", "ModuleList"]),
    (module_without_forward, ConfigurationError, ["forward", "Bare"]),
    (not_a_module, ConfigurationError, ["nn.Module", "str"]),
    (empty_list, ConfigurationError, ["empty list"]),
    (meta_at_first_forward, ConfigurationError, ["0.weight is on meta", "1.bias", "to_empty"]),
    (some_on_meta, ConfigurationError, ["1.weight is on meta", "1.bias", "to_empty"]),
    (parameter_in_two_groups, ConfigurationError, ["weight", "[a, b]"]),
    (parameter_in_child_and_parent, ConfigurationError, ["head.weight (by Block)", "[a, b]"]),
    (complex_on_a_real_wire, ConfigurationError, ["weight", "complex", "wire_dtype"]),
    (sparse_gradients, ConfigurationError, ["0.weight", "sparse=True", "ignored_params"]),
    (tensor_subclass, ConfigurationError, ["weight: is a Wrapped", "fsdp_post_all_gather"]),
    (wrong_policy, ConfigurationError, ["mp_policy", "dtype"]),
    (wrong_dtype_in_policy, ConfigurationError, ["param_dtype", "int8"]),
    (wrong_offload, ConfigurationError, ["offload_policy", "bool"]),
    (smaller_mesh_after_forward, ConfigurationError, ["divide", "3"]),
    (wrong_reshard, ConfigurationError, ["reshard_after_forward", "yes"]),
    (wrong_ignored, ConfigurationError, ["ignored_params", "list"]),
    (wrong_placement, ConfigurationError, ["Replicate", "weight"]),
    (placement_out_of_range, ConfigurationError, ["Shard(dim=5)", "weight", "2 dimensions"]),
    (applied_twice, ConfigurationError, ["once", "FSDPLinear"]),
    (parent_before_child, ConfigurationError, ["children before their parents", "weight", "bias"]),
    (root_in_a_list, ConfigurationError, ["outermost", "list of 2"]),
    (reset_below_the_root, LifecycleError, ["root", "'0'"]),
    (prefetch_of_a_plain_module, ConfigurationError, ["Linear"]),
    (sync_that_is_not_a_bool, ConfigurationError, ["requires_gradient_sync", "no"]),
    (comm_of_the_wrong_type, ConfigurationError, ["AllGather"]),
]


@pytest.mark.parametrize(("mistake", "kind", "words"), CASES, ids=[c[0].__name__ for c in CASES])
def test_a_mistake_is_the_same_clear_error_on_every_rank(
    world, mistake: Any, kind: type[Exception], words: list[str]
) -> None:
    outcomes = world(2).outcomes(mistake)
    assert all(isinstance(outcome, kind) for outcome in outcomes), outcomes
    assert str(outcomes[0]) == str(outcomes[1])
    for word in words:
        assert word in str(outcomes[0]), str(outcomes[0])


def test_errors_are_also_the_builtin_kinds() -> None:
    assert issubclass(ConfigurationError, ValueError)
    assert issubclass(LifecycleError, RuntimeError)
    assert issubclass(UnsupportedError, NotImplementedError)


def outside_of_the_mesh() -> str:
    mesh = DeviceMesh("cpu", [0, 1])
    try:
        fully_shard(nn.Linear(2, 2), mesh=mesh)
    except ConfigurationError as error:
        return str(error)
    return "no error"


def test_a_rank_outside_of_the_mesh_is_told_so(world) -> None:
    outcomes = world(3).run(outside_of_the_mesh)
    assert outcomes[:2] == ["no error"] * 2
    assert "rank 2" in outcomes[2] and "[0, 1]" in outcomes[2]


# --- failed steps ---------------------------------------------------------------------------------


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("on purpose")


def fail_then_train(where: str, reset: bool) -> None:
    model = shard(make_decoder(), FULLSHARD, Run())
    world = dist.get_world_size()
    batch = tokens_for(0, 2 * world)
    mine = batch.chunk(world)[dist.get_rank()]

    def failing_forward(module: nn.Module, args: Any) -> None:
        raise RuntimeError("on purpose")

    def failing_backward(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return Failing.apply(output)

    for _ in range(2):
        model(mine).backward()
    model.zero_grad()
    # Inside of the block, so that its parameters are unsharded when it fails.
    if where == "forward":
        handle = model.blocks[1].up.register_forward_pre_hook(failing_forward)
    else:
        handle = model.blocks[1].up.register_forward_hook(failing_backward)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(mine).backward()
    handle.remove()
    assert all(state.call is None for m in model.modules() if (state := state_of(m)))
    if reset:
        model.reset_iter_state()
        assert not any(
            group.gathered
            for module in model.modules()
            if (state := state_of(module))
            for group in state.groups
        )
    model.zero_grad()
    reference = make_decoder()
    for step in range(2):
        batch = tokens_for(step, 2 * world)
        if step == 0 and where == "backward" and not reset:
            with pytest.warns(UserWarning, match="did not finish"):
                loss = model(batch.chunk(world)[dist.get_rank()])
        else:
            loss = model(batch.chunk(world)[dist.get_rank()])
        loss.backward()
        reference(batch).backward()
    actual = gradients(model)
    expected = gradients(reference)
    assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_a_failed_step_the_next_one_works(world, where: str, reset: bool) -> None:
    world(2).run(fail_then_train, where, reset)


def reset_drops_accumulated_gradients() -> None:
    model = shard(make_decoder(), FULLSHARD, Run())
    world = dist.get_world_size()
    batch = tokens_for(0, 2 * world)
    mine = batch.chunk(world)[dist.get_rank()]
    model.set_requires_gradient_sync(False)
    model(mine).backward()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    model(mine).backward()
    reference = make_decoder()
    reference(batch).backward()
    actual = gradients(model)
    expected = gradients(reference)
    assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_reset_drops_gradients_that_were_only_accumulated(world) -> None:
    world(2).run(reset_drops_accumulated_gradients)
