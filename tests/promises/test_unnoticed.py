"""What torch's FSDP ignores without a word works here, or is refused by name: hooks on sharded parameters, ``backward(inputs=...)``,
optimizers over the wrong tensors, modules that join late, weights that change between forward and backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard import (
    ConfigurationError,
    DivergenceError,
    FullyShardedDataParallel,
    LifecycleError,
    fully_shard,
)
from fullshard.optim import AdamW8bit, Muon, ShardedOptimizer
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.training import whole

CPU = torch.device("cpu")


def make_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))


def functional() -> Any:
    net = make_net()
    for index in (0, 2):
        fully_shard(net[index])
    return fully_shard(net)


def wrapped(**options: Any) -> Any:
    net = make_net()
    for index in (0, 2):
        net[index] = FullyShardedDataParallel(net[index], device_id=CPU, **options)
    return FullyShardedDataParallel(net, device_id=CPU, **options)


def with_orig_params() -> Any:
    return wrapped(use_orig_params=True)


def with_flat_params() -> Any:
    return wrapped(use_orig_params=False)


APIS: Sequence[Callable[[], Any]] = (functional, with_orig_params, with_flat_params)
OF_PARAMS: Sequence[Callable[[], Any]] = (functional, with_orig_params)
"""Apis after which every parameter still is one."""


def inputs(rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 + rank))


def loss_of(model: nn.Module) -> Tensor:
    return model(inputs(dist.get_rank())).square().mean()


def reference(**options: Any) -> dict[str, Tensor | None]:
    """Gradients of one process that sees the inputs of all ranks."""
    net = make_net()
    chosen = options.get("inputs")
    losses = [net(inputs(rank)).square().mean() for rank in range(dist.get_world_size())]
    loss = torch.stack(losses).mean()
    loss.backward(inputs=None if chosen is None else [net.get_parameter(name) for name in chosen])
    return {name: param.grad for name, param in net.named_parameters()}


def whole_of(gradient: Tensor | None, shape: torch.Size) -> Tensor | None:
    """A gradient as one process has it."""
    if isinstance(gradient, DTensor):
        return whole(gradient)
    pieces: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, gradient)
    found = [piece for piece in pieces if piece is not None]
    return torch.cat(found).view(shape) if found else None


def clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


# --- weights that are read without a call of their module -------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale


def read_without_a_call() -> None:
    expected = Scaled()
    sum(
        (expected.body(inputs(rank)) * expected.scale).square().mean()
        for rank in range(dist.get_world_size())
    ).div(dist.get_world_size()).backward()
    for wraps in (False, True):
        model: Any = Scaled()
        if wraps:
            options: dict[str, Any] = {"use_orig_params": True, "device_id": CPU}
            model.body = FullyShardedDataParallel(model.body, **options)
            model = FullyShardedDataParallel(model, **options)
        else:
            fully_shard(model.body)
            fully_shard(model)
        params = dict(model.named_parameters())
        for _ in range(2):
            model.zero_grad()
            handle = model._unshard(async_op=True) if wraps else model.unshard(async_op=True)
            handle.wait()
            (model.body(inputs(dist.get_rank())) * model.scale).square().mean().backward()
        for name, param in params.items():
            whole_param = expected.get_parameter(clean(name))
            assert whole_param.grad is not None
            assert_close(
                whole_of(param.grad, whole_param.shape), whole_param.grad, rtol=1e-5, atol=1e-7
            )
        loss_of(model).backward()  # the model is its own root still


def test_weights_that_are_read_without_a_call_of_their_module_get_gradients(world) -> None:
    world(2).run(read_without_a_call)


# --- hooks ----------------------------------------------------------------------------------------


def hooks_before_and_after_sharding() -> None:
    for api in OF_PARAMS:
        model = api()
        expected = reference()
        seen: list[str] = []
        for name, param in model.named_parameters():
            param.register_hook(lambda gradient, seen=seen, name=name: seen.append(clean(name)))
            handle = param.register_hook(lambda gradient: gradient * 100)
            handle.remove()
            param.register_hook(lambda gradient: gradient * 3)
        shapes = {name: param.shape for name, param in make_net().named_parameters()}
        for times in (1, 2):
            loss_of(model).backward()
            got = {
                clean(name): whole_of(param.grad, shapes[clean(name)])
                for name, param in model.named_parameters()
            }
            assert_close(got, {k: g * 3 * times for k, g in expected.items()}, rtol=1e-5, atol=1e-7)
        held = {clean(n) for n, p in model.named_parameters() if p.numel()}
        assert set(seen) == held, (seen, held)
    # Hooks of the original come along, and its handle still removes them.
    net, seen = make_net(), []
    handle = net[0].weight.register_hook(lambda gradient: seen.append(type(gradient)))
    net[0].bias.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad is None))
    fully_shard(net)
    loss_of(net).backward()
    assert seen == [DTensor, False]
    handle.remove()
    loss_of(net).backward()
    assert seen == [DTensor, False, False]


def test_hooks_on_sharded_parameters_run_on_reduced_gradients(world):
    world(3).run(hooks_before_and_after_sharding)


def hook_of_a_flat_parameter() -> list[tuple[int, ...]]:
    model, seen = with_flat_params(), []
    for param in model.parameters():
        param.register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
    loss_of(model).backward()
    assert seen == [tuple(param.shape) for param in reversed(list(model.parameters()))] or seen
    return sorted(seen)


def refused_hooks() -> None:
    net = make_net()
    net[2].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(
        ConfigurationError, match=r"hooks on their gradients.*2\.weight.*use_orig_params"
    ):
        FullyShardedDataParallel(net, device_id=CPU, use_orig_params=False)
    model = functional()
    model[2].weight.register_hook(lambda gradient: torch.zeros(2, 2))
    with pytest.raises(
        ConfigurationError, match=r"for 2\.weight it got a DTensor of shape \(3, 5\)"
    ):
        loss_of(model).backward()


def test_hooks_on_flat_parameters_run_and_those_that_cannot_are_refused(world):
    assert all(len(shapes) == 3 for shapes in world(2).run(hook_of_a_flat_parameter))
    world(2).run(refused_hooks)


def optimizers_in_backward() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward  # compiles for a second

    for api in OF_PARAMS:
        model, twin = api(), make_net()
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        before = {name: param.detach().clone() for name, param in twin.named_parameters()}
        gradients = reference()
        loss_of(model).backward()
        for name, param in model.named_parameters():
            assert param.grad is None
            expected = before[clean(name)] - 0.1 * gradients[clean(name)]
            assert_close(whole_of(param.detach(), expected.shape), expected, rtol=1e-5, atol=1e-6)


def test_optimizers_applied_in_backward_step_when_gradients_arrive(world):
    world(2).run(optimizers_in_backward)


# --- backward(inputs=...) -------------------------------------------------------------------------


def backward_into_some() -> None:
    names = ["0.weight", "2.bias", "4.weight"]
    expected = reference(inputs=names)
    for api in OF_PARAMS:
        model = api()
        for _ in range(2):  # the second time, parameters have been gathered and given back before
            loss = loss_of(model)
            loss.backward(inputs=[p for n, p in model.named_parameters() if clean(n) in names])
            for name, param in model.named_parameters():
                got, wanted = param.grad, expected[clean(name)]
                if wanted is None:
                    # Of parameters that are reduced together, those without a gradient take part as zeros.
                    assert got is None or (api is not functional and not got.any()), name
                else:
                    assert_close(whole_of(got, wanted.shape), wanted, rtol=1e-5, atol=1e-7)
            model.zero_grad()
        with pytest.raises(LifecycleError, match=r"without reducing .*0\.weight|weight"):
            torch.autograd.grad(loss_of(model), list(model.parameters()))
    model = with_flat_params()
    loss_of(model).backward(inputs=list(model.parameters()))
    every = reference()
    flat = [param.grad for param in model.parameters()]
    assert_close(
        torch.stack([whole_of(g, torch.Size([-1])).square().sum() for g in flat]).sum(),
        torch.stack([g.square().sum() for g in every.values()]).sum(),
        rtol=1e-5,
        atol=1e-7,
    )


def test_backward_accumulates_into_the_sharded_parameters_that_are_named(world):
    world(2).run(backward_into_some)


def foreign_inputs() -> None:
    model, x = functional(), inputs(0).requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    model(x).sum().backward(inputs=[x])
    assert x.grad is not None
    assert all(param.grad is None for param in model.parameters())


def test_other_inputs_of_backward_are_left_alone(world):
    world(1).run(foreign_inputs)


# --- optimizers over the wrong tensors ------------------------------------------------------------


def wrong_optimizers() -> None:
    model = functional()
    loss_of(model)  # the root stays unsharded for backward
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    with pytest.raises(
        LifecycleError, match=r"SGD was made while .*unsharded.*'4\.weight', '4\.bias'"
    ):
        optimizer.step()
    # Made before sharding; also if it has taken steps, and its parameters have gradients.
    for num_steps in (0, 1):
        for wrap in (fully_shard, partial(FullyShardedDataParallel, device_id=CPU)):
            net = make_net()
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
            for _ in range(num_steps):
                loss_of(net).backward()
                optimizer.step()
            model = wrap(net)
            loss_of(model).backward()
            with pytest.raises(
                LifecycleError,
                match=r"AdamW was made before the model was sharded.*'0\.weight \(of .*after fully_sh",
            ):
                optimizer.step()
    # Made in time, for both APIs, also after a whole step, and after forward without gradients.
    for api in APIS:
        model = api()
        with torch.no_grad():
            loss_of(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model).backward()
        optimizer.step()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def optimizers_over_lists_that_differ() -> None:
    """As from a set, whose order is another one in each process."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    first, divided = dist.get_rank() == 0, {"shard_over_replicas": True}
    sharded_adamw = partial(ShardedOptimizer, torch.optim.AdamW)
    dtype = torch.float32 if first else torch.bfloat16
    cases: Sequence[tuple[Any, Any, str]] = (
        (None, Muon, "0.weight to 1.weight"),
        (None, partial(AdamW8bit, block_size=16), "0.weight to 1.weight"),
        (mesh, partial(sharded_adamw, **divided), "0.weight to 1.weight"),
        (mesh, partial(AdamW8bit, **divided), "1.weight to 0.weight"),
        (None, partial(Muon, dtype=dtype), "in bfloat16"),
        (None, partial(AdamW8bit, block_size=16 if first else 32), "blocks of 32 elements"),
    )
    for on_mesh, make, said in cases:
        model: Any = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
        for layer in model:
            fully_shard(layer, mesh=on_mesh)
        fully_shard(model, mesh=on_mesh)
        weights = [layer.weight for layer in model]
        alike = "in" in said.split() or "blocks" in said
        optimizer = make(weights if first or alike else weights[::-1])
        model(torch.ones(2, 9)).sum().backward()
        with pytest.raises(DivergenceError, match=said):
            optimizer.step()


def test_optimizers_whose_parameters_or_options_differ_between_ranks_do_not_mix_them(world):
    world(2).run(optimizers_over_lists_that_differ)


def test_an_optimizer_over_tensors_that_never_get_gradients_is_refused(world):
    world(2).run(wrong_optimizers)


# --- forgotten eval() ------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Drops inputs by a number of its own, as attention of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.attention_dropout, self.training)


def forwards_with_dropout() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), Dropping(), nn.Dropout(0.0))
    model: Any = fully_shard(net)
    loss_of(model).backward()
    with torch.no_grad():
        loss_of(model.eval())
        with pytest.warns(UserWarning, match=r"eval\(\) was not called: .*active \(1, 2\)"):
            loss_of(model.train())
        loss_of(model)  # said once
    quiet: Any = fully_shard(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0)))
    with torch.no_grad():
        loss_of(quiet)


def test_dropout_without_gradients_is_named_before_ranks_generate_different_texts(world):
    world(2).run(forwards_with_dropout)


# --- torch's FSDP in the same model ----------------------------------------------------------------


def half_sharded_by_torch() -> None:
    from torch.distributed.fsdp import (
        FullyShardedDataParallel as TorchWrapper,
        fully_shard as torch_fully_shard,
    )

    wrap = partial(FullyShardedDataParallel, device_id=CPU)
    for ours in (fully_shard, wrap):
        net = make_net()
        torch_fully_shard(net[0])
        torch_fully_shard(net[2])
        with pytest.raises(ConfigurationError, match=r"^A model is sharded by .* modules: 0, 2\.$"):
            ours(net)
        net = make_net()
        net[0] = TorchWrapper(net[0], device_id=CPU)
        with pytest.raises(ConfigurationError, match=r"^A model is sharded by .* modules: 0\.$"):
            ours(net)
    net = make_net()
    torch_fully_shard(net)
    with pytest.raises(ConfigurationError, match=r"^A model is sharded by .*tensor: weight, bias"):
        fully_shard(net[2])


def test_a_model_that_torch_has_sharded_in_part_is_refused_with_the_cause_first(world):
    world(2).run(half_sharded_by_torch)


# --- modules that join late -----------------------------------------------------------------------


def late_modules() -> None:
    for api in APIS:
        model = api()
        inner = model if api is functional else model.module
        loss_of(model).backward()
        inner[4] = nn.Linear(3, 2)
        with pytest.warns(UserWarning, match=r"were added afterwards: \['4\.weight', '4\.bias'\]"):
            loss_of(model).backward()
        inner[4] = nn.Linear(3, 2).requires_grad_(False)  # has no gradients to differ
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss_of(model).backward()
        inner[2].register_parameter("extra", nn.Parameter(torch.zeros(1)))
        with pytest.warns(UserWarning, match=r"\['2\.extra'\]"):
            loss_of(model)
    # Before the first forward, and with the remedy.
    model = functional()
    model[4] = nn.Linear(3, 2)
    with pytest.warns(UserWarning, match=r"4\.weight"):
        loss_of(model)
    torch.manual_seed(0)
    model[4] = fully_shard(nn.Linear(3, 2))
    loss_of(model).backward()
    assert isinstance(model[4].weight.grad, DTensor)


def ignored_parameters_stay_ignored() -> None:
    net = make_net()
    fully_shard(net, ignored_params={net[4].weight, net[4].bias})
    loss_of(net).backward()
    net[4].weight = nn.Parameter(net[4].weight.detach().clone())  # another object, the same place
    loss_of(net).backward()
    model = FullyShardedDataParallel(make_net(), device_id=CPU, use_orig_params=True)
    with FullyShardedDataParallel.summon_full_params(model):
        loss_of(model)
    loss_of(model).backward()
    net = make_net()
    model = FullyShardedDataParallel(net, device_id=CPU, ignored_states=[net[4]])
    loss_of(model).backward()


def test_modules_and_parameters_that_join_a_sharded_model_are_named(world):
    world(2).run(late_modules)
    world(2).run(ignored_parameters_stay_ignored)


# --- weights that change between forward and backward ---------------------------------------------


def changed_weights() -> None:
    options: list[dict[str, Any]] = [{}, {"fused": True}, {"foreach": True}]
    for api in APIS:
        for chosen in options:
            model = api()
            is_refused = api is functional and chosen.get("fused")
            cls = torch.optim.AdamW if is_refused else torch.optim.SGD
            optimizer: torch.optim.Optimizer = cls(model.parameters(), lr=0.1, **chosen)
            loss_of(model).backward()
            pending = loss_of(model)
            optimizer.step()
            with pytest.raises(
                LifecycleError, match=r"must not change between a forward and its backward"
            ):
                pending.backward()
            optimizer.zero_grad()
            loss_of(model).backward()  # the model is usable
            optimizer.step()
    # Several forwards before their backwards, and a step after all of them.
    model, twin = functional(), functional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = loss_of(model), loss_of(model)
    first.backward()
    second.backward()
    for _ in range(2):
        loss_of(twin).backward()
    assert_equal(
        [p.grad.to_local() for p in model.parameters()],
        [p.grad.to_local() for p in twin.parameters()],
    )
    optimizer.step()
    loss_of(model).backward()


@pytest.mark.filterwarnings("ignore:The last forward or backward pass did not finish")
def test_a_step_between_forward_and_backward_is_refused(world):
    world(2).run(changed_weights)
