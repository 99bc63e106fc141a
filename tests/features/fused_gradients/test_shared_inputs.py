"""Gradients of a tensor that several fused linear layers read: the ordinary sums, added up by the products."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.features.fused_gradients.fused_linear import FusedWeight
from fullshard.features.fused_gradients.shared_inputs import SharedInput
from fullshard.layout.placement import local_tensor
from tests.helpers.compare import assert_close

WIDTH = 6
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class CountedAdditions(TorchDispatchMode):
    """Counts the products that are added to what is there."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.out
        return func(*args, **(kwargs or {}))


class WithoutGradient(torch.autograd.Function):
    """Something whose backward has no gradient for its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        return None


class Block(nn.Module):
    """Three linear layers that read one tensor, in a way that a case chooses."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        self.key = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        self.use: Callable[[Block, Tensor], Any] = Block.plain
        self.shared: list[Tensor] = []

    def plain(self, x: Tensor) -> Tensor:
        y = self.first(x) * 2
        return x + self.query(y) * self.key(y) + self.value(y)

    def forward(self, x: Tensor) -> Any:
        return self.use(self, x)


class Case:
    """A model with one block, the gradients that it had, and how many of them products added up."""

    def __init__(self, *, fuse: bool) -> None:
        self.fuse = fuse
        self.seen: list[Tensor] = []

    def build(
        self,
        use: Callable[[Block, Tensor], Any] = Block.plain,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Any:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(Block(dtype))
        block: Any = self.model[0]
        block.use = use
        fully_shard(self.model[0], fuse_gradients=self.fuse, **options)
        fully_shard(self.model, fuse_gradients=self.fuse, **options)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.x = torch.randn(2, 3, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
        return self.model

    def look(self) -> None:
        for tensor in (self.x, *self.model.parameters()):
            if tensor.grad is not None:
                self.seen.append(local_tensor(tensor.grad).clone())

    def step(self) -> None:
        self.model(self.x).abs().square().sum().backward()
        self.look()


# --- cases: each returns how many products are added to others -----------------------------------


def plainly(case: Case) -> int:
    case.build()
    case.step()
    case.step()
    return 4


def with_complex_numbers(case: Case) -> int:
    case.build(dtype=torch.complex64)
    case.step()
    return 2


def one_is_not_used(case: Case) -> int:
    def use(block: Block, x: Tensor) -> Tensor:
        y = block.first(x) * 2
        outputs = block.query(y), block.key(y), block.value(y)
        return outputs[0] + outputs[2]

    case.build(use)
    case.step()
    return 1


def one_has_no_gradient(case: Case, without: str) -> int:
    """Backward executes the layer, but nothing arrives there."""

    def use(block: Block, x: Tensor) -> Tensor:
        y = block.first(x) * 2
        outputs = {name: getattr(block, name)(y) for name in ("query", "key", "value")}
        outputs[without] = WithoutGradient.apply(outputs[without])  # type: ignore[no-untyped-call]
        return outputs["query"] * outputs["key"] + outputs["value"]

    case.build(use)
    case.step()
    return 1


def of_different_tensors(case: Case) -> int:
    """A tensor that autograd knows as two, and one that comes in between."""

    def use(block: Block, x: Tensor) -> Tensor:
        y = block.first(x) * 2
        return block.query(y) + block.key(y.view(y.shape)) * block.value(y)

    case.build(use)
    case.step()
    return 0


def of_one_operator(case: Case) -> int:
    """Several outputs of one node are several tensors."""

    def use(block: Block, x: Tensor) -> Tensor:
        one, other = torch.cat([block.first(x), x], dim=-1).split(WIDTH, dim=-1)
        return block.query(one) * block.key(other) + block.value(other)

    case.build(use)
    case.step()
    return 1


def by_a_layer_twice(case: Case) -> int:
    def use(block: Block, x: Tensor) -> Tensor:
        y = block.first(x) * 2
        return block.query(y) * block.query(y) + block.key(y) * block.value(y)

    case.build(use)
    case.step()
    return 3 + 1  # of inputs, and of the weight that is used twice


def in_two_passes(case: Case) -> int:
    """Each pass executes some of the layers."""

    def use(block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
        y = block.first(x) * 2
        query, key, value = block.query(y), block.key(y), block.value(y)
        return query * key, value

    model = case.build(use)
    product, value = model(case.x)
    product.sum().backward(retain_graph=True)
    case.look()
    value.square().sum().backward()
    case.look()
    return 1


def in_the_same_pass_twice(case: Case) -> int:
    model = case.build()
    loss = model(case.x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    case.look()
    return 4


def recomputed(case: Case, *, reentrant: bool) -> int:
    def use(block: Block, x: Tensor) -> Tensor:
        return checkpoint(block.plain, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    case.build(use)
    case.step()
    return 2


def differentiated(case: Case) -> int:
    """The first pass makes a graph, and adds nothing in place; the second one executes the layers again."""
    model = case.build()
    (slope,) = torch.autograd.grad(model(case.x).square().sum(), case.x, create_graph=True)
    slope.square().sum().backward()
    case.look()
    return 2


def for_the_tensor_itself(case: Case) -> int:
    """Somebody asks for the shared tensor's gradient, and somebody looks at it on the way: both get the sum."""

    def use(block: Block, x: Tensor) -> Tensor:
        y = block.first(x) * 2
        block.shared = [y]
        y.register_hook(lambda gradient: case.seen.append(gradient.clone()))
        return block.query(y) * block.key(y) + block.value(y)

    model = case.build(use)
    loss = model(case.x).square().sum()
    case.seen += torch.autograd.grad(loss, model[0].shared, retain_graph=True)
    loss.backward()
    case.look()
    return 4


def after_a_failed_pass(case: Case) -> int:
    """What the layers had added up when a pass failed is not added to the next one."""
    fails = [True]

    def fail(gradient: Tensor) -> None:
        if fails.pop() if fails else False:
            raise ValueError("on purpose")

    def use(block: Block, x: Tensor) -> Tensor:
        y = block.first(x) * 2
        query, key, value = block.query(y), block.key(y), block.value(y)
        query.register_hook(fail)
        return query.tanh() * key + value

    model = case.build(use)
    loss = model(case.x).square().sum()
    with pytest.raises(ValueError, match="on purpose"):
        loss.backward(retain_graph=True)
    model.reset_iter_state()
    loss.backward()  # of the same layers
    case.look()
    return 1 + 2


CASES: list[Callable[[Case], int]] = [
    plainly,
    with_complex_numbers,
    one_is_not_used,
    *(functools.partial(one_has_no_gradient, without=name) for name in ("query", "key", "value")),
    of_different_tensors,
    of_one_operator,
    by_a_layer_twice,
    in_two_passes,
    in_the_same_pass_twice,
    functools.partial(recomputed, reentrant=False),
    functools.partial(recomputed, reentrant=True),
    differentiated,
    for_the_tensor_itself,
    after_a_failed_pass,
]


def compare() -> None:
    for run in CASES:
        ordinary, fused = Case(fuse=False), Case(fuse=True)
        run(ordinary)
        with CountedAdditions() as additions:
            expected = run(fused)
        assert additions.count == expected, f"{run}: {additions.count} additions"
        assert_close(fused.seen, ordinary.seen, rtol=1e-5, atol=1e-5)


def test_products_add_up_the_gradients_of_an_input_that_layers_share(world: Any) -> None:
    world(2).run(compare)


def sum_of_three(block: Block, x: Tensor) -> Tensor:
    y = x * 2
    return block.query(y) * 1.1 + block.key(y) * 1.3 + block.value(y)


def check_rounding() -> None:
    rows = torch.randn(500, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    gradients = []
    for fuse, options in (
        (False, {"dtype": torch.float64}),
        (False, {"mp_policy": BF16}),
        (True, {"mp_policy": BF16}),
    ):
        case = Case(fuse=fuse)
        model = case.build(sum_of_three, **options)
        with torch.no_grad():
            for shard in map(local_tensor, model.parameters()):
                # Rounded, so that all have the same weights.
                shard.copy_(torch.arange(shard.numel()).view(shard.shape).sin().bfloat16())
        case.x = rows.to(model[0].query.weight.dtype).requires_grad_()
        model(case.x).sum().backward()
        assert case.x.grad is not None
        gradients.append(case.x.grad.double())
    exact, ordinary, fused = gradients
    assert 0 < (fused - exact).norm() < (ordinary - exact).norm()


def test_sums_in_bf16_are_closer_to_exact_ones(world: Any) -> None:
    world(2).run(check_rounding)


def check_nothing_stays() -> None:
    case = Case(fuse=True)
    model = case.build()
    case.step()
    gc.collect()
    gc.disable()
    try:
        loss = model(case.x).square().sum()
        fused = model[0].query._fullshard_fused
        assert isinstance(fused, FusedWeight)
        latest: weakref.ref[SharedInput] | None = fused._inputs._latest
        assert latest is not None and latest() is not None
        loss.backward()
        del loss
        assert latest() is None, "it goes with the graph"
    finally:
        gc.enable()


def test_what_layers_share_goes_with_the_graph(world: Any) -> None:
    world(2).run(check_nothing_stays)
