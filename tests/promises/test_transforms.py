"""Derivatives beyond one backward: `torch.func`, forward-mode differentiation, gradients of gradients.

A program computes a loss, values, or both, with a model that it takes as a function. It runs for two
steps on every API, and weights and values must be those of one process: a gradient that does not
arrive shows in the weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fullshard import (
    ConfigurationError,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    replicate,
)
from fullshard.engine.state import state_of
from fullshard.wrap import ModuleWrapPolicy
from tests.helpers.compare import assert_close
from tests.helpers.training import FULLSHARD, ShardOptimizer, gradients, weights
from tests.helpers.wrapping import full_params, library

WIDTH = 5
Result = tuple[Tensor | None, Any]
"""A loss to go backward from, and values to compare."""
Program = Callable[[nn.Module, Tensor, Tensor], Result]


class Layer(nn.Module):
    """A residual layer; ``scale`` is saved by autograd as it is, the matrices as views."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.side = nn.Linear(WIDTH, 7)
        self.scale = nn.Parameter(torch.rand(7) + 0.5)
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x: Tensor, start: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.side(start) + self.up(x)) * self.scale)


class Flow(nn.Module):
    """A velocity field: two layers, which both see the input, and a head.

    With ``forces``, its own derivative is part of what it computes, as in models of molecules.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, forces: bool = False, checkpointed: bool = False) -> Tensor:
        start = x = x.detach().requires_grad_() if forces else x
        for layer in self.layers:
            if checkpointed:
                x = checkpoint(layer, x, start, use_reentrant=False)
            else:
                x = layer(x, start)
        out: Tensor = self.head(torch.sin(x))
        if forces:
            out = out + torch.autograd.grad(out.square().sum(), start, create_graph=True)[0]
        return out


def make_flow() -> Flow:
    torch.manual_seed(0)
    return Flow()


# --- apis ----------------------------------------------------------------------------------------


def sharded(model: Flow, **options: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def replicated(model: Flow) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        replicate(layer, mesh=mesh)
    return replicate(model, mesh=mesh)


def wrapped(model: Flow, **options: Any) -> nn.Module:
    policy = ModuleWrapPolicy({Layer})
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, **options)


APIS: dict[str, Callable[[Flow], nn.Module]] = {
    "fully_shard": sharded,
    "fully_shard, kept after forward": partial(sharded, reshard_after_forward=False),
    "replicate": replicated,
    "wrapper": partial(wrapped, use_orig_params=True),
    "wrapper, flat parameters": wrapped,
    "wrapper, SHARD_GRAD_OP": partial(
        wrapped, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True
    ),
}


# --- programs -------------------------------------------------------------------------------------


def tangent_loss(model: nn.Module, x: Tensor, v: Tensor) -> Result:
    out, tangent = torch.func.jvp(model, (x,), (v,))[:2]
    return tangent.square().mean(), (out, tangent)


def consistency_loss(model: nn.Module, x: Tensor, v: Tensor) -> Result:
    """As consistency and mean-flow models are trained: the tangent makes the target."""
    out, tangent = torch.func.jvp(model, (x,), (v,))[:2]
    return (out - (v - 0.5 * tangent.detach())).square().mean(), None


def several_calls(model: nn.Module, x: Tensor, v: Tensor) -> Result:
    plain = model(x)
    tangents = [torch.func.jvp(model, (x + shift,), (v,))[1] for shift in (0.0, 1.0)]
    return (plain * tangents[0] + tangents[1]).square().mean(), None


def second_tangent(model: nn.Module, x: Tensor, v: Tensor) -> Result:
    def first(x: Tensor) -> Tensor:
        return torch.func.jvp(model, (x,), (v,))[1]  # type: ignore[no-any-return]

    curvature = torch.func.jvp(first, (x,), (v,))[1]
    return curvature.square().mean(), curvature


def dual_numbers(model: nn.Module, x: Tensor, v: Tensor) -> Result:
    with forward_ad.dual_level():
        out, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, v)))
    assert tangent is not None
    return (tangent * out).square().mean(), tangent


def batched(model: nn.Module, x: Tensor, v: Tensor) -> Result:
    out = torch.func.vmap(model)(x)
    return (out * v).square().mean(), out


def batched_tangents(model: nn.Module, x: Tensor, v: Tensor) -> Result:
    def tangent(x: Tensor, v: Tensor) -> Tensor:
        return torch.func.jvp(model, (x,), (v,))[1]  # type: ignore[no-any-return]

    out = torch.func.vmap(tangent)(x, v)
    return out.square().mean(), out


def derivatives(model: nn.Module, x: Tensor, v: Tensor) -> Result:
    """No loss: all kinds of derivatives by inputs, with weights as constants."""

    def scalar(x: Tensor) -> Tensor:
        return model(x).square().sum()  # type: ignore[no-any-return]

    one = x[0]
    return None, {
        "grad": torch.func.grad(scalar)(x),
        "vjp": torch.func.vjp(model, x)[1](v)[0],
        "per row": torch.func.vmap(torch.func.grad(scalar))(x),
        "jacrev": torch.func.jacrev(model)(one),
        "jacfwd": torch.func.jacfwd(model)(one),
        "hessian": torch.func.hessian(scalar)(one),
    }


# --- gradients of gradients -----------------------------------------------------------------------


def gradient_of(out: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]


def gradient_penalty(model: nn.Module, x: Tensor, v: Tensor) -> Result:
    x.requires_grad_()
    out = model(x)
    gradient = gradient_of(out, x)
    return (out * v).mean() + (gradient.norm(dim=1) - 1).square().mean(), gradient


def nothing_but_a_penalty(model: nn.Module, x: Tensor, v: Tensor) -> Result:
    x.requires_grad_()
    return (gradient_of(model(x), x) - v).square().mean(), None


def penalty_before_another_forward(model: nn.Module, x: Tensor, v: Tensor) -> Result:
    x.requires_grad_()
    penalty = gradient_of(model(x), x).square().mean()
    return penalty - model(v).mean(), None


def penalty_of_a_layer_on_its_own(model: Any, x: Tensor, v: Tensor) -> Result:
    """The layer is run before the model, whose root takes it over while its graph lives."""
    x.requires_grad_()
    penalty = gradient_of(model.layers[0](x, x), x).square().mean()
    return penalty + model(v).mean(), None


def penalty_checkpointed(model: nn.Module, x: Tensor, v: Tensor) -> Result:
    x.requires_grad_()
    out = model(x, checkpointed=True)
    return out.mean() + gradient_of(out, x).square().mean(), None


def penalty_of_a_hidden_state(model: Any, x: Tensor, v: Tensor) -> Result:
    seen = []
    handle = model.layers[0].register_forward_hook(lambda *args: seen.append(args[-1]))
    out = model(x)
    handle.remove()
    return gradient_of(out, seen[0]).square().mean(), None


def penalty_inside_of_a_layer(model: Any, x: Tensor, v: Tensor) -> Result:
    seen = []
    handle = model.layers[0].up.register_forward_hook(lambda *args: seen.append(args[-1]))
    out = model(x)
    handle.remove()
    return gradient_of(out, seen[0]).square().mean(), None


def loss_of_a_vjp(model: nn.Module, x: Tensor, v: Tensor) -> Result:
    pulled_back = torch.func.vjp(model, x)[1](v)[0]
    return pulled_back.square().mean(), pulled_back


def batched_jacobian(model: nn.Module, x: Tensor, v: Tensor) -> Result:
    jacobian = torch.autograd.functional.jacobian(  # type: ignore[no-untyped-call]
        model, x[:1], create_graph=True, vectorize=True
    )
    return jacobian.square().mean(), jacobian


def forces_of_an_energy(model: nn.Module, x: Tensor, v: Tensor) -> Result:
    out = model(x, forces=True)
    return (out - v).square().mean(), out


def graph_of_another_thread(model: nn.Module, x: Tensor, v: Tensor) -> Result:
    """Autograd counts nodes by thread. On accelerators backward has its own, so its nodes count as older."""
    x.requires_grad_()
    first = model(v)
    out = model(x)
    with ThreadPoolExecutor() as thread:
        gradient = thread.submit(gradient_of, out, x).result()
    return first.square().mean() + out.mean() + gradient.square().mean(), None


def third_derivatives(model: nn.Module, x: Tensor, v: Tensor) -> Result:
    x.requires_grad_()
    derivative = model(x)
    for _ in range(3):
        derivative = gradient_of(derivative, x).tanh()
    return derivative.square().mean(), derivative


def hessians(model: nn.Module, x: Tensor, v: Tensor) -> Result:
    def scalar(x: Tensor) -> Tensor:
        return model(x).square().sum()  # type: ignore[no-any-return]

    return (
        None,
        {
            "hessian": torch.autograd.functional.hessian(scalar, x[:1]),  # type: ignore[no-untyped-call]
            "jacobian": torch.autograd.functional.jacobian(model, x[:1], vectorize=True),  # type: ignore[no-untyped-call]
            "forward mode": torch.autograd.functional.jacobian(  # type: ignore[no-untyped-call]
                model, x[:1], vectorize=True, strategy="forward-mode"
            ),
            "product": torch.autograd.functional.hvp(scalar, x, v)[1],  # type: ignore[no-untyped-call]
            "reverse over reverse": torch.func.jacrev(torch.func.jacrev(scalar))(x[0]),
        },
    )


# --- running them ---------------------------------------------------------------------------------


def rows_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, v = torch.randn(2, 3, WIDTH, generator=generator)
    return x, v


def in_one_process(program: Program) -> tuple[list[Any], dict[str, Tensor]]:
    """This rank's values in every step, and the weights after two."""
    model = make_flow()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(2):
        for rank in range(dist.get_world_size()):
            loss, values = program(model, *rows_of(step, rank))
            if loss is not None:
                (loss / dist.get_world_size()).backward()
            if rank == dist.get_rank():
                seen.append(values)
        optimizer.step()
        optimizer.zero_grad()
    return seen, weights(model)


def through(api: str, program: Program) -> tuple[list[Any], dict[str, Tensor]]:
    model = APIS[api](make_flow())
    optimizer = ShardOptimizer("SGD", list(model.parameters()), lr=0.1)
    seen = []
    for step in range(2):
        loss, values = program(model, *rows_of(step, dist.get_rank()))
        if loss is not None:
            loss.backward()
        seen.append(values)
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(model, FullyShardedDataParallel):
        return seen, full_params(library(FULLSHARD), model)
    return seen, weights(model)


def entries(seen: list[Any]) -> list[Any]:
    return [values for values in seen if values is not None]


def check(programs: Sequence[Program], apis: Sequence[str] = tuple(APIS)) -> None:
    faults = []
    for program in programs:
        expected_values, expected_weights = in_one_process(program)
        for api in apis:
            try:
                values, found = through(api, program)
                assert_close(found, expected_weights, rtol=1e-4, atol=1e-6)
                assert_close(entries(values), entries(expected_values), rtol=1e-4, atol=1e-6)
            except Exception as error:
                faults.append(f"{program.__name__}, {api}: {type(error).__name__}: {error}")
    assert not faults, "\n".join(faults)


BOTH_DOORS = ("fully_shard", "wrapper, flat parameters")


def test_gradients_of_tangents_are_those_of_one_process(world: Any) -> None:
    world(2).run(check, [tangent_loss])


def test_losses_in_forward_mode_are_those_of_one_process(world: Any) -> None:
    programs = [consistency_loss, several_calls, second_tangent, dual_numbers]
    world(2).run(check, [*programs, batched, batched_tangents], BOTH_DOORS)


def test_derivatives_by_inputs_are_those_of_one_process(world: Any) -> None:
    world(2).run(check, [derivatives], ("replicate", *BOTH_DOORS))


def train_in_low_precision() -> None:
    """The tangents are cast with the inputs; gradients come back through the cast."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model, reference = sharded(make_flow(), mp_policy=policy), make_flow().bfloat16()
    low = partial(torch.Tensor.to, dtype=torch.bfloat16)
    for rank in range(dist.get_world_size()):
        x, v = rows_of(0, rank)
        loss = torch.func.jvp(reference, (low(x),), (low(v),))[1].float().square().mean()
        (loss / dist.get_world_size()).backward()
    x, v = rows_of(0, dist.get_rank())
    torch.func.jvp(model, (x,), (v,))[1].float().square().mean().backward()
    assert_close(gradients(model), gradients(reference), rtol=2e-2, atol=2e-2)


def test_tangents_pass_mixed_precision(world: Any) -> None:
    world(2).run(train_in_low_precision)


def test_gradient_penalties_are_those_of_one_process(world: Any) -> None:
    world(2).run(check, [gradient_penalty])


def test_gradients_of_gradients_are_those_of_one_process(world: Any) -> None:
    programs = [
        nothing_but_a_penalty,
        penalty_before_another_forward,
        penalty_of_a_layer_on_its_own,
        penalty_checkpointed,
        penalty_of_a_hidden_state,
        penalty_inside_of_a_layer,
        loss_of_a_vjp,
        batched_jacobian,
        forces_of_an_energy,
        graph_of_another_thread,
        third_derivatives,
        hessians,
    ]
    world(2).run(check, programs, BOTH_DOORS)


def watch_memory() -> None:
    model: Any = sharded(make_flow())
    gathered: list[list[bool]] = []
    for step in range(2):  # what the first step leaves must not change the second
        x, _ = rows_of(step, dist.get_rank())
        x.requires_grad_()
        out = model(x)
        seen: list[bool] = []
        x.register_hook(lambda _, seen=seen: seen.extend(map(is_gathered, model.layers)))
        gradient = gradient_of(out, x)
        seen.extend(map(is_gathered, model.layers))
        loss = gradient.square().mean()
        loss.backward()
        seen.extend(map(is_gathered, [*model.layers, model]))
        gathered.append(seen)
    first_pass, between, second_pass, after = [True, False], [False] * 2, [True] * 2, [False] * 3
    assert gathered == [first_pass + between + second_pass + after] * 2, gathered


def is_gathered(module: nn.Module) -> bool:
    state = state_of(module)
    assert state is not None
    return state.gathered


def test_memory_of_layers_is_given_back_between_the_passes(world: Any) -> None:
    world(2).run(watch_memory)


def ask_for_a_graph_of_gradients() -> None:
    model = sharded(make_flow())
    x, _ = rows_of(0, dist.get_rank())
    x.requires_grad_()
    with pytest.warns(
        UserWarning, match="no graph for the gradients of sharded parameters.*: layers.1"
    ):
        model(x).sum().backward(create_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # not where a graph of input gradients is all there is
        gradient_of(model(x), x).sum().backward()


def test_gradients_by_parameters_have_no_graph_and_that_is_said(world: Any) -> None:
    world(2).run(ask_for_a_graph_of_gradients)


def call_with_other_parameters() -> None:
    x, _ = rows_of(0, dist.get_rank())
    expected = make_flow()(x)
    for api in ("fully_shard", "fully_shard, kept after forward", "replicate"):
        model = APIS[api](make_flow())
        for _ in range(2):  # before and after the first forward
            own = dict(model.named_parameters())
            out = torch.func.functional_call(model, dict(own), (x,))  # it writes to the dict
            assert_close(out, expected, rtol=1e-5, atol=1e-6)
            out.sum().backward()
            doubled = {name: param.detach() * 2 for name, param in own.items()}
            with pytest.raises(ConfigurationError, match=r"head\.weight.*functional_call"):
                torch.func.functional_call(model, doubled, (x,))
            assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
            assert all(param is own[name] for name, param in on_modules(model).items())


def on_modules(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that an optimizer would find."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return dict(model.named_parameters())


def test_functional_calls_leave_the_model_its_parameters(world: Any) -> None:
    world(2).run(call_with_other_parameters)


def gather_within_a_transform() -> None:
    model: Any = sharded(make_flow())
    x, v = rows_of(0, dist.get_rank())

    def forward(x: Tensor) -> Tensor:
        model.layers[0].unshard()
        model.layers[1].unshard(async_op=True).wait()
        out = model(x)
        model.layers[1].reshard()
        return out  # type: ignore[no-any-return]

    torch.func.jvp(forward, (x,), (v,))[1].square().mean().backward()
    reference = sharded(make_flow())
    torch.func.jvp(reference, (x,), (v,))[1].square().mean().backward()
    assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_modules_may_be_gathered_by_hand_within_a_transform(world: Any, ranks: int) -> None:
    world(ranks).run(gather_within_a_transform)
