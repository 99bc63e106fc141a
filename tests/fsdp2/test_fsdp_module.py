"""The setters of `FSDPModule` and the functions beside it: torch's semantics, on the same ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard import (
    ConfigurationError,
    FSDPModule,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fullshard.engine.state import state_of
from fullshard.transport.transports import Coalesced
from tests.helpers.compare import assert_close
from tests.helpers.fake import fake_world
from tests.helpers.models import Decoder, ModelOptions, make_decoder, tokens_for
from tests.helpers.training import (
    FULLSHARD,
    TORCH,
    Run,
    batch_of,
    gradients,
    mine,
    needs_torch_2_13,
    shard,
    weights,
    whole,
)


def all_modules(model: Decoder) -> list[Any]:
    return [*model.blocks, model]


# --- one step under both, changed by a setter, with equal gradients --------------------------------


def nothing(model: Any) -> None:
    pass


def divide_by_three(model: Any) -> None:
    for module in all_modules(model):
        module.set_gradient_divide_factor(3.0)


def divide_by_world(model: Any) -> None:
    for module in all_modules(model):
        module.set_gradient_divide_factor(float(dist.get_world_size()))


def sum_only(model: Any) -> None:
    for module in all_modules(model):
        module.set_force_sum_reduction_for_comms(True)


def separate_group(model: Any) -> None:
    model.set_separate_reduce_scatter_group()


def separate_group_and_back(model: Any) -> None:
    model.set_separate_reduce_scatter_group(True)
    model.set_separate_reduce_scatter_group(False)


def three_inputs_in_flight(model: Any) -> None:
    model.set_reduce_scatter_max_input_buffers(3)


def double_in_hook(model: Any) -> None:
    for module in all_modules(model):
        module.set_all_reduce_hook(lambda reduced: reduced.mul_(2.0))


def embedding_not_gathered_in_backward(model: Any) -> None:
    model.blocks[0].set_reshard_after_forward(False)


def keep_all(model: Any) -> None:
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)


SETTERS = [
    nothing,
    sum_only,
    separate_group,
    separate_group_and_back,
    three_inputs_in_flight,
    double_in_hook,
    embedding_not_gathered_in_backward,
    keep_all,
]


def step_of(api: str, setter: Callable[[Any], None], replicas: int) -> dict[str, Tensor]:
    model = shard(make_decoder(ModelOptions(depth=2)), api, Run(replicas=replicas))
    # torch 2.11 lacks some setters of 2.13, of those that change no number.
    with suppress(AttributeError) if api == TORCH else nullcontext():
        setter(model)
    sharded = list(model.parameters())
    for step in range(2):
        for param in sharded:
            param.grad = None
        model(mine(batch_of(step))).backward()
    model.reshard()  # kept ones show their unsharded face
    for block in model.blocks:
        block.reshard()
    return gradients(model)


def both(setter: Callable[[Any], None], replicas: int) -> None:
    assert_close(
        step_of(FULLSHARD, setter, replicas),
        step_of(TORCH, setter, replicas),
        rtol=1e-5,
        atol=1e-7,
    )


@pytest.mark.parametrize("setter", SETTERS, ids=[s.__name__ for s in SETTERS])
def test_a_setter_does_what_torch_s_does(world, setter: Callable[[Any], None]) -> None:
    world(2).run(both, setter, 1)


@pytest.mark.parametrize("setter", [sum_only, double_in_hook])
def test_a_setter_does_what_torch_s_does_with_hsdp(world, setter: Callable[[Any], None]) -> None:
    world(4).run(both, setter, 2)


def divided(replicas: int) -> None:
    # gloo cannot scale while it sums, so torch cannot run this one; the sum is known.
    plain = step_of(FULLSHARD, nothing, replicas)
    world = dist.get_world_size()
    for setter, scale in ((divide_by_three, world / 3), (divide_by_world, 1.0)):
        expected = {name: gradient * scale for name, gradient in plain.items()}
        assert_close(step_of(FULLSHARD, setter, replicas), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2)])
def test_the_divide_factor_replaces_the_number_of_ranks(world, ranks: int, replicas: int) -> None:
    world(ranks).run(divided, replicas)


# --- accumulation ----------------------------------------------------------------------------------


def accumulate_without_all_reduce(api: str) -> dict[str, Tensor]:
    model = shard(make_decoder(), api, Run(replicas=2))
    for step in range(3):
        model.set_requires_all_reduce(step == 2)
        model.set_is_last_backward(step == 2)
        model(mine(batch_of(step))).backward()
        if step < 2:
            assert all(param.grad is None for param in model.parameters())
    return gradients(model)


def accumulation_like_torch() -> None:
    ours = accumulate_without_all_reduce(FULLSHARD)
    assert_close(ours, accumulate_without_all_reduce(TORCH), rtol=1e-5, atol=1e-7)
    reference = make_decoder()
    for step in range(3):
        reference(batch_of(step)).backward()
    assert_close(ours, gradients(reference), rtol=1e-5, atol=1e-6)


def test_hsdp_accumulates_without_all_reduce(world) -> None:
    world(4).run(accumulation_like_torch)


class Halves(nn.Module):
    """Uses one of two layers, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, side: str) -> Tensor:
        result: Tensor = self.right(x) if side == "right" else self.left(x)
        return result + self.right(x) if side == "both" else result


def partial_sums_of_different_parameters() -> None:
    torch.manual_seed(0)
    reference = Halves()
    torch.manual_seed(0)
    model: Any = shard_halves(Halves(), replicas=2)
    x = torch.randn(2 * dist.get_world_size(), 4)
    for side, last in (("left", False), ("right", True)):
        model.set_requires_all_reduce(last)
        model(mine(x), side).square().mean().backward()
        reference(x, side).square().mean().backward()
    assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-7)


def shard_halves(model: nn.Module, replicas: int = 1) -> nn.Module:
    world = dist.get_world_size()
    if replicas == 1:
        return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    shape = (replicas, world // replicas)
    return fully_shard(
        model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    )


def test_partial_sums_survive_a_microbatch_that_does_not_use_the_parameter(world) -> None:
    world(4).run(partial_sums_of_different_parameters)


def after_every_backward(api: str) -> list[dict[str, Tensor]]:
    """Gradients and weights in three steps, no backward of which is said to be the last."""
    model = shard(make_decoder(), api, Run())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(3):
        model.set_is_last_backward(False)
        model(mine(batch_of(step))).backward()
        seen.append({name: gradient.clone() for name, gradient in gradients(model).items()})
        optimizer.step()
        seen.append(weights(model))
    return seen


def is_last_backward() -> None:
    ours, torchs = (after_every_backward(api) for api in (FULLSHARD, TORCH))
    for one, other in zip(ours, torchs, strict=True):
        assert len(one) == len(other) > 10
        assert_close(one, other, rtol=1e-5, atol=1e-6)
    model, reference = shard(make_decoder(), FULLSHARD, Run()), make_decoder()
    for step in range(3):
        model.set_is_last_backward(step == 2)
        model(mine(batch_of(step))).backward()
        reference(batch_of(step)).backward()
    assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-6)


def test_gradients_are_there_after_every_backward_the_last_or_not(world) -> None:
    world(2).run(is_last_backward)


def ranks_use_different_parameters() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model: Any = shard_halves(Halves())
    model.set_reduce_scatter_unused_params(True)
    x = torch.randn(2 * dist.get_world_size(), 4)
    side = "left" if dist.get_rank() == 0 else "right"
    model(mine(x), side).square().mean().backward()
    torch.manual_seed(0)
    reference = Halves()
    for rank, part in enumerate(x.chunk(dist.get_world_size())):
        loss = reference(part, "left" if rank == 0 else "right").square().mean()
        (loss / dist.get_world_size()).backward()
    assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-7)
    return gradients(model)


def test_ranks_may_use_different_parameters_of_a_group(world) -> None:
    world(3).run(ranks_use_different_parameters)


class FirstLayerAndHead(nn.Module):
    """Uses the halves of its first layer that it is told to; the head is in the root's group."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = Halves(), nn.Linear(4, 3)

    def forward(self, x: Tensor, side: str) -> Tensor:
        y: Tensor = self.head(self.first(x, side))
        return y


def side_of_rank(rank: int) -> str:
    return "both" if rank == 0 else "left"


def first_layer_is_complete_on_one_rank() -> None:
    """Only rank 0 has all gradients of the first layer, and could send them before backward ends."""
    torch.manual_seed(0)
    model: Any = FirstLayerAndHead()
    fully_shard(model.first)
    fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    ranks = dist.get_world_size()
    x = torch.randn(2 * ranks, 4)
    model(mine(x), side_of_rank(dist.get_rank())).square().mean().backward()
    torch.manual_seed(0)
    reference = FirstLayerAndHead()
    for rank, part in enumerate(x.chunk(ranks)):
        (reference(part, side_of_rank(rank)).square().mean() / ranks).backward()
    assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-7)


def test_ranks_reduce_in_one_order_whatever_they_used_of_the_first_layer(world) -> None:
    world(2).run(first_layer_is_complete_on_one_rank)


def unused_everywhere(enabled: bool) -> list[str]:
    model: Any = shard_halves(Halves())
    model.set_reduce_scatter_unused_params(enabled)
    model(torch.ones(2, 4), "left").sum().backward()
    zeros = [
        n for n, p in model.named_parameters() if p.grad is not None and not whole(p.grad).any()
    ]
    return zeros


class Some(nn.Module):
    """Uses the layers it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.later, self.never = Halves(), Halves(), Halves()

    def forward(self, x: Tensor, names: list[str]) -> Tensor:
        return torch.stack([getattr(self, name)(x, "left").sum() for name in names]).sum()


def kinds_of_gradients(api: str, replicas: int) -> list[dict[str, str]]:
    """Per step, which gradients there are; of two modules, one runs from the second step on and one never."""
    torch.manual_seed(0)
    model: Any = Some()
    lib = importlib.import_module("fullshard" if api == FULLSHARD else "torch.distributed.fsdp")
    mesh = init_device_mesh(
        "cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("r", "s")
    )
    for module in (*model.children(), model):
        lib.fully_shard(module, mesh=mesh if replicas > 1 else mesh["s"])
    model.set_reduce_scatter_unused_params(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    before = weights(model)
    seen = []
    for names in (["always"], ["always", "later"], ["always"]):
        model(torch.ones(2, 4), names).backward()
        kinds = {name: param.grad for name, param in model.named_parameters()}
        seen.append(
            {
                name: "none" if grad is None else "value" if whole(grad).any() else "zero"
                for name, grad in kinds.items()
            }
        )
        optimizer.step()
        optimizer.zero_grad()
    for name, param in model.named_parameters():
        if name.startswith("never"):
            assert torch.equal(whole(param), before[name]), name
    return seen


def unused_like_torch() -> None:
    for replicas in (1, dist.get_world_size()):
        ours = kinds_of_gradients(FULLSHARD, replicas)
        assert ours == kinds_of_gradients(TORCH, replicas)
        assert [step["never.left.weight"] for step in ours] == ["none"] * 3
        assert [step["later.left.weight"] for step in ours] == ["none", "value", "zero"]
        assert [step["always.right.bias"] for step in ours] == ["zero"] * 3


@needs_torch_2_13
def test_parameters_of_a_module_that_never_ran_get_no_zeros(world) -> None:
    world(2).run(unused_like_torch)


def test_unused_parameters_get_zeros_only_if_asked_for(world) -> None:
    assert world(2).run(unused_everywhere, True) == [["right.weight", "right.bias"]] * 2
    assert world(2).run(unused_everywhere, False) == [[]] * 2


# --- gathering ---------------------------------------------------------------------------------------


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def gathers_of_the_embedding(unshard_in_backward: bool) -> int:
    torch.manual_seed(0)
    reference = Embedder()
    torch.manual_seed(0)
    model: Any = Embedder()
    fully_shard(model.embed).set_unshard_in_backward(unshard_in_backward)
    fully_shard(model.head)
    fully_shard(model)
    count = 0
    group: Any = state_of(model.embed).groups[0]
    unshard = group.unshard

    def counted(**options: bool) -> bool:
        nonlocal count
        was_issued = bool(unshard(**options))
        count += was_issued
        return was_issued

    group.unshard = counted
    tokens = batch_of(0)
    model(mine(tokens)).square().mean().backward()
    reference(tokens).square().mean().backward()
    assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-7)
    return count


def test_an_embedding_need_not_be_gathered_for_backward(world) -> None:
    assert world(2).run(gathers_of_the_embedding, True) == [2, 2]
    assert world(2).run(gathers_of_the_embedding, False) == [1, 1]


class WithMethods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x).tanh()

    def encode(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result

    def fail(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError


def other_methods() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(WithMethods())
    torch.manual_seed(0)
    model: Any = nn.Sequential(WithMethods())
    fully_shard(model[0])
    fully_shard(model)
    for name in ("encode", "fail"):
        register_fsdp_forward_method(model[0], name)
    register_fsdp_forward_method(reference, "no such method")  # not sharded: nothing happens
    x = torch.randn(2 * dist.get_world_size(), 3)
    model(mine(x)).sum()
    for _ in range(2):
        model.zero_grad()
        reference.zero_grad()
        model[0].encode(mine(x)).square().mean().backward()
        reference[0].encode(x).square().mean().backward()
        assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-7)
        assert isinstance(model[0].linear.weight, DTensor)
    with pytest.raises(ZeroDivisionError):
        model[0].fail(mine(x))
    assert isinstance(model[0].linear.weight, DTensor)
    with pytest.raises(ConfigurationError, match="has no 'decode'"):
        register_fsdp_forward_method(model[0], "decode")


def test_parameters_are_gathered_around_registered_methods(world) -> None:
    world(2).run(other_methods)


@pytest.mark.parametrize("before_first_forward", [True, False])
def test_models_share_streams(before_first_forward: bool) -> None:
    with fake_world(2):
        models = [fully_shard(nn.Linear(3, 3)) for _ in range(2)]
        if not before_first_forward:
            for model in models:
                model(torch.ones(1, 3)).sum().backward()
        share_comm_ctx(models)
        for model in models:
            model(torch.ones(1, 3)).sum().backward()
        runtimes = [state_of(model).step for model in models]
        assert runtimes[0].context is runtimes[1].context
        assert all(
            group.context is runtimes[0].context
            for model in models
            for group in state_of(model).groups
        )


def test_the_largest_number_of_input_buffers_counts() -> None:
    with fake_world(2):
        model = shard(make_decoder(), FULLSHARD, Run())
        model.blocks[1].set_reduce_scatter_max_input_buffers(3)
        model(tokens_for(0, 2)).backward()
        context = state_of(model).step.context
        assert context.max_reductions == 3
        model.set_reduce_scatter_max_input_buffers(2)
        assert context.max_reductions == 2
        model.blocks[0].set_reduce_scatter_max_input_buffers(4)
        assert context.max_reductions == 4


def inputs_in_flight(limit: int) -> int:
    """The most reduce inputs that were in memory at once."""
    model = shard(make_decoder(ModelOptions(depth=5)), FULLSHARD, Run())
    model.set_reduce_scatter_max_input_buffers(limit)
    groups = [state_of(module).groups[0] for module in all_modules(model)]
    most = 0
    reduce = Coalesced.reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal most
        buffers = [group.reduction._buffer for group in groups]
        most = max(most, sum(buffer is not None and buffer.allocated for buffer in buffers))
        return reduce(*args, **kwargs)

    Coalesced.reduce = counted  # type: ignore[method-assign]
    try:
        model(mine(batch_of(0))).backward()
    finally:
        Coalesced.reduce = reduce  # type: ignore[method-assign]
    reference = make_decoder(ModelOptions(depth=5))
    reference(batch_of(0)).backward()
    assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-6)
    return most


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_more_inputs_are_in_flight_than_allowed(world, limit: int) -> None:
    assert world(2).run(inputs_in_flight, limit) == [limit, limit]


def reductions_use_their_own_group() -> bool:
    model = shard(make_decoder(), FULLSHARD, Run())
    model.set_separate_reduce_scatter_group()
    groups = {
        state_of(module).groups[0].reduction.settings.process_group for module in all_modules(model)
    }
    shared = state_of(model).groups[0].mesh_info.shard_process_group
    (own,) = groups
    return own is not shared and dist.get_process_group_ranks(own) == dist.get_process_group_ranks(
        shared
    )


def test_one_separate_group_serves_all_modules(world) -> None:
    assert world(2).run(reductions_use_their_own_group) == [True, True]


# --- arguments ---------------------------------------------------------------------------------------

WRONG: list[tuple[str, tuple[Any, ...], str]] = [
    ("set_is_last_backward", ("1",), "is_last_backward"),
    ("set_requires_all_reduce", ("yes",), "requires_all_reduce"),
    ("set_gradient_divide_factor", (0,), "positive"),
    ("set_gradient_divide_factor", ("1",), "positive"),
    ("set_force_sum_reduction_for_comms", ("1",), "enable"),
    ("set_reduce_scatter_unused_params", ("",), "reduce_scatter_unused_params"),
    ("set_reduce_scatter_max_input_buffers", (0,), "at least 1"),
    ("set_reduce_scatter_max_input_buffers", (True,), "int"),
    ("set_separate_reduce_scatter_group", ("1",), "enable"),
    ("set_unshard_in_backward", ("1",), "unshard_in_backward"),
    ("set_post_optim_event", (3,), "torch.Event"),
    ("set_all_reduce_hook", (3,), "callable"),
    ("set_reshard_after_forward", (2,), "reshard_after_forward"),
    ("set_allocate_memory_from_process_group_for_comm", ("1",), "enable"),
    ("set_symm_mem_for_comm", ("CUDA",), "backend must be 'NCCL'"),
    ("_set_unshard_async_op", ("1",), "async_op"),
]


@pytest.mark.parametrize(("method", "args", "words"), WRONG)
def test_wrong_arguments_are_refused(method: str, args: tuple[Any, ...], words: str) -> None:
    with fake_world(2):
        layer = fully_shard(nn.Linear(2, 2))
        with pytest.raises(ConfigurationError, match=words):
            getattr(layer, method)(*args)


def test_the_old_name_of_the_divide_factor_warns() -> None:
    with fake_world(2):
        layer: Any = fully_shard(nn.Linear(2, 2))
        with pytest.warns(FutureWarning, match="set_gradient_divide_factor"):
            layer.set_reduce_scatter_divide_factor(4.0)
        assert state_of(layer).groups[0].reduction.settings.divide_by == 4.0


def test_every_method_of_torch_s_fsdp_module_is_there() -> None:
    theirs = importlib.import_module("torch.distributed.fsdp").FSDPModule
    public = {name for name in vars(theirs) if not name.startswith("__")}
    missing = {name for name in public if not hasattr(FSDPModule, name)}
    # Helpers of torch's own, called by nobody else.
    assert not {name for name in missing if not name.startswith("_")}, missing


def stream_with_hsdp() -> None:
    model = shard(make_decoder(), FULLSHARD, Run(replicas=2))
    with pytest.raises(ConfigurationError, match="stream cannot be chosen"):
        model.set_all_reduce_hook(lambda _: None, stream=object())


def test_a_hook_s_stream_is_refused_with_hsdp(world) -> None:
    world(4).run(stream_with_hsdp)
