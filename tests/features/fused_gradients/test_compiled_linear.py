"""`fuse_gradients` in compiled modules: an operator writes weight gradients into the reduce buffer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import profile

import fullshard
from fullshard.errors import UnsupportedError
from fullshard.features.fused_gradients import fused_linear
from tests.helpers.compare import assert_close
from tests.helpers.training import gradients

WIDTH, DEPTH, STEPS = 6, 3, 4


class Block(nn.Module):
    """Two products, used in a way."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH, bias=False)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def once(block: Block, x: Tensor) -> Tensor:
    return x + block.down(torch.relu(block.up(x)))


def twice(block: Block, x: Tensor) -> Tensor:
    return once(block, once(block, x))


def in_two_equal_calls(block: Block, x: Tensor) -> Tensor:
    """Compilers make one call of equal ones."""
    hidden = torch.relu(block.up(x))
    y: Tensor = x + block.down(hidden) + block.down(hidden)
    return y


def by_other_operators_too(block: Block, x: Tensor) -> Tensor:
    return once(block, x) + 0.1 * block.up.weight.square().sum()


def with_an_input_that_needs_no_gradient(block: Block, x: Tensor) -> Tensor:
    return once(block, x) + block.down(torch.relu(block.up(x.detach())))


USES = [
    once,
    twice,
    in_two_equal_calls,
    by_other_operators_too,
    with_an_input_that_needs_no_gradient,
]


def wrapped(module: nn.Module, use_orig_params: bool, fuse_gradients: bool = False) -> nn.Module:
    return fullshard.FullyShardedDataParallel(
        module,
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
        fuse_gradients=fuse_gradients,
    )


Shard = Callable[..., Any]
SHARD: dict[str, Shard] = {
    "fully_shard": fullshard.fully_shard,
    "wrapper": lambda module, **options: wrapped(module, True, **options),
    "flat": lambda module, **options: wrapped(module, False, **options),
}


def build(use: Callable[[Any, Tensor], Tensor], shard: Shard, *, fused: bool) -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    layers: list[Any] = [nn.Linear(WIDTH, WIDTH), *(Block(use) for _ in range(DEPTH))]
    for index, block in enumerate(layers[1:], 1):
        if fused:
            block.compile(fullgraph=True, backend="aot_eager")
            layers[index] = shard(block, fuse_gradients=True)
        else:
            layers[index] = shard(block)
    return shard(nn.Sequential(*layers))


def batch(step: int) -> Tensor:
    return torch.randn(
        4, WIDTH, generator=torch.Generator().manual_seed(9 * step + dist.get_rank())
    )


def train(model: Any) -> list[dict[str, Tensor]]:
    """Return the gradients of all steps; every second one only accumulates."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(STEPS):
        reduced = step % 2 == 1
        accumulating: Any = contextlib.nullcontext()
        if isinstance(model, fullshard.FSDPModule):
            model.set_requires_gradient_sync(reduced)
        elif not reduced:
            accumulating = model.no_sync()
        with accumulating:
            model(batch(step)).square().mean().backward()
        if reduced:
            seen.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
    return seen


@contextlib.contextmanager
def counted_writes() -> Any:
    writes: list[Tensor] = []
    write = fused_linear._write_product

    def counted(one: Tensor, other: Tensor, target: Tensor, **options: Any) -> None:
        writes.append(target)
        write(one, other, target, **options)

    with patch.object(fused_linear, "_write_product", counted):
        yield writes


def compare(use: Callable[[Any, Tensor], Tensor], how: str) -> None:
    model = build(use, SHARD[how], fused=True)
    with counted_writes() as writes:
        found = train(model)
    expected = train(build(use, SHARD[how], fused=False))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=1e-5, atol=1e-6)
    # Parts of a `FlatParameter` are no parameters: autograd gets their gradients.
    per_step = {"fully_shard": DEPTH * 2, "wrapper": DEPTH * 2, "flat": 0}[how]
    steps = STEPS if how == "fully_shard" else STEPS // 2  # no_sync shows ordinary gradients
    assert len(writes) >= per_step * steps
    if use is once:
        assert len(writes) == per_step * steps


@pytest.mark.parametrize("use", USES)
def test_compiled_blocks_have_the_ordinary_gradients(world, use: Any) -> None:
    for how in SHARD if use in (once, in_two_equal_calls) else ["fully_shard"]:
        world(2).run(compare, use, how)


def compile_once() -> None:
    model = build(once, fullshard.fully_shard, fused=True)
    train(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "all blocks are alike"
    found = model.fused_gradients()
    assert {name for name, reason in found.items() if not reason} == {
        f"{block}.{part}.weight" for block in range(1, DEPTH + 1) for part in ("up", "down")
    }


def test_one_graph_serves_all_blocks(world) -> None:
    world(1).run(compile_once)
    world(2).run(compile_once)


def other_passes() -> None:
    model = build(once, fullshard.fully_shard, fused=True)
    expected = build(once, fullshard.fully_shard, fused=False)
    for each in (model, expected):
        each(batch(0)).square().mean().backward()  # so that both have sharded gradients
        each.zero_grad()
    # A pass for the gradient of an input leaves no other.
    found = []
    with counted_writes() as writes:
        for each in (model, expected):
            x = batch(1).requires_grad_()
            (of_x,) = torch.autograd.grad(each(x).square().mean(), [x])
            found.append(of_x)
    assert not writes
    torch.testing.assert_close(found[0], found[1])
    # A pass for some weights leaves the others without.
    for each in (model, expected):
        each(batch(1)).square().mean().backward(inputs=[each[1].up.weight, each[2].down.weight])
    assert_close(gradients(model), gradients(expected), rtol=1e-5, atol=1e-6)
    assert gradients(model).keys() == gradients(expected).keys()
    # Hooks of the sharded weight see what was reduced.
    for each in (model, expected):
        each.zero_grad()
        each[1].up.weight.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(2))
        each(batch(2)).square().mean().backward()
    assert_close(gradients(model), gradients(expected), rtol=1e-5, atol=1e-6)


def test_passes_that_need_ordinary_gradients_have_them(world) -> None:
    world(2).run(other_passes)


def hook_on_the_unsharded_weight() -> str:
    model = build(once, fullshard.fully_shard, fused=True)
    model[1].unshard()
    model[1].up.weight.register_hook(lambda gradient: 2 * gradient)
    try:
        model(batch(0)).square().mean().backward()
    except UnsupportedError as error:
        return str(error)
    return "no error"


def test_a_hook_that_would_see_no_gradient_is_refused(world) -> None:
    messages = world(2).run(hook_on_the_unsharded_weight)
    assert len(set(messages)) == 1
    assert "parameter 'up.weight' of 1 would see None" in messages[0]


REDUCTIONS = {f"FSDP::post_backward_reduce ({block})" for block in range(1, DEPTH + 1)}


def is_of_a_gradient(event: Any) -> bool:
    """Whether an event of a trace happened in a compiled graph, or copied what it returned into the reduce buffer."""
    inside = ""
    while (event := event.cpu_parent) is not None:
        if event.name == "CompiledFunctionBackward":
            return True
        if inside == "aten::_foreach_copy_" and event.name in REDUCTIONS:
            return True
        inside = event.name
    return False


def copies_of_a_backward(*, fused: bool) -> list[int]:
    """How many numbers are copied at a time in compiled graphs, and into the reduce buffer, by the trace of a backward."""
    model = build(once, fullshard.fully_shard, fused=fused)
    if not fused:
        for block in model[1:]:
            block.compile(fullgraph=True, backend="aot_eager")
    model(batch(0)).square().mean().backward()  # compiles
    model.zero_grad()
    loss = model(batch(0)).square().mean()
    with profile(record_shapes=True) as profiled:
        loss.backward()
    return [
        math.prod(event.input_shapes[0])
        for event in profiled.events() or ()
        if event.name == "aten::copy_" and is_of_a_gradient(event)
    ]


def trace() -> None:
    block = Block(once)
    weights = [block.up.weight.numel(), block.down.weight.numel()]
    bias = block.up.out_features
    assert copies_of_a_backward(fused=True) == [bias] * DEPTH
    assert sum(copies_of_a_backward(fused=False)) == (sum(weights) + bias) * DEPTH


def test_a_trace_has_no_copy_of_a_written_gradient(world) -> None:
    world(2).run(trace)
