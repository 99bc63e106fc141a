"""Gradients written once: those of the ordinary way, from products that go into the reduce buffer, where that is possible."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from fullshard import (
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from fullshard.engine.state import state_of
from fullshard.features.fused_gradients import fused_linear
from fullshard.layout.placement import local_tensor
from fullshard.transport.transports import Coalesced
from tests.helpers.compare import assert_close

WIDTH, INNER = 6, 7
"""Neither is a multiple of the ranks, so slots have padding."""
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """Two linear layers, used in a way that a case chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down: nn.Module = nn.Linear(INNER, WIDTH, bias=False)
        self.use: Callable[[Block, Tensor], Tensor] = Block.plain

    def plain(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())  # type: ignore[no-any-return]

    def twice(self, x: Tensor) -> Tensor:
        return self.plain(self.plain(x))

    def penalised(self, x: Tensor) -> Tensor:
        return self.plain(x) + self.up.weight.square().mean()

    def recomputed(self, x: Tensor, reentrant: bool) -> Tensor:
        return checkpoint(self.plain, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    def hooked(self, x: Tensor) -> Tensor:
        handle = self.up.weight.register_hook(lambda gradient: 2 * gradient)
        try:
            return self.plain(x)
        finally:
            if not torch.is_grad_enabled():
                handle.remove()

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


class Chain(nn.Sequential):
    """A layer, and blocks that are run one after the other, all of them several times."""

    times = 1

    def forward(self, x: Tensor) -> Tensor:
        first, *blocks = self
        x = first(x)
        for block in blocks * self.times:
            x = block(x)
        return x


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def doubled(module: nn.Linear, input: Tensor) -> Tensor:
    return 2 * nn.Linear.forward(module, input)


@dataclass
class Net:
    """A root with two sharded blocks, and the gradients it had."""

    fuse: bool
    seen: list[Tensor]

    def build(
        self,
        use: Callable[[Block, Tensor], Tensor] = Block.plain,
        change: Callable[[Block], object] = lambda _: None,
        **options: Any,
    ) -> Any:
        torch.manual_seed(0)
        self.model: Any = Chain(nn.Linear(WIDTH, WIDTH), Block(), Block())
        for block in self.model[1:]:
            block.use = use
            change(block)
            fully_shard(block, fuse_gradients=self.fuse, **options)
        return fully_shard(self.model, fuse_gradients=self.fuse, **options)

    def batch(self, step: int) -> Tensor:
        """This rank's rows; each rank has others."""
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        return torch.randn(2, 3, WIDTH, generator=generator)

    def loss(self, step: int) -> Tensor:
        loss: Tensor = self.model(self.batch(step)).float().square().sum()
        return loss

    def look(self) -> None:
        grads = [param.grad for param in self.model.parameters()]
        self.seen += [local_tensor(grad).clone() for grad in grads if grad is not None]
        self.seen.append(torch.tensor([float(grad is not None) for grad in grads]))

    def step(self, number: int = 0) -> None:
        self.loss(number).backward()
        self.look()


class WrappedNet(Net):
    """The same with wrappers over original parameters."""

    use_orig_params = True

    def build(
        self,
        use: Callable[[Block, Tensor], Tensor] = Block.plain,
        change: Callable[[Block], object] = lambda _: None,
        mp_policy: MixedPrecisionPolicy | None = None,
        **options: Any,
    ) -> Any:
        torch.manual_seed(0)
        if mp_policy is not None:
            options["mixed_precision"] = MixedPrecision(
                param_dtype=mp_policy.param_dtype, reduce_dtype=mp_policy.reduce_dtype
            )
        wrap: Any = functools.partial(
            FSDP, use_orig_params=self.use_orig_params, fuse_gradients=self.fuse, **options
        )
        blocks = [Block(), Block()]
        for block in blocks:
            block.use = use
            change(block)
        self.model = wrap(Chain(nn.Linear(WIDTH, WIDTH), *map(wrap, blocks)))
        return self.model


class FlatNet(WrappedNet):
    """The same with a `FlatParameter` for each wrapper."""

    use_orig_params = False


# --- what users do: each case returns how many products are written on the way -----------------------


def added_up(net: Net) -> int:
    """Gradients of a second backward are added to sharded ones."""
    net.build()
    net.step(0)
    net.step(1)
    return 8


def mixed_precision(net: Net) -> int:
    net.build(mp_policy=BF16)
    net.step()
    return 4


def accumulated(net: Net) -> int:
    """Sums of microbatches; some are dropped."""
    model = net.build(mp_policy=BF16)
    model.set_requires_gradient_sync(False)
    net.loss(0).backward()
    model.zero_grad()
    net.loss(1).backward()
    net.loss(2).backward()
    net.look()
    model.set_requires_gradient_sync(True)
    net.step(3)
    return 16


def synchronised_by_chance(net: Net) -> int:
    """Whether gradients are reduced changes within a backward, after the first products."""
    model = net.build()
    last = model[2].down.register_full_backward_hook(
        lambda *_: model.set_requires_gradient_sync(False)
    )
    net.loss(0).backward()
    last.remove()
    net.look()
    model.set_requires_gradient_sync(True)
    net.step(1)
    return 8


def frozen(net: Net) -> int:
    model = net.build(change=lambda block: block.up.weight.requires_grad_(False))
    net.step(0)
    model.zero_grad()
    for block in model[1:]:
        block.up.weight.requires_grad_(True)
    net.step(1)
    return 2 + 4


def used_twice(net: Net) -> int:
    net.build(Block.twice)
    net.step()
    return 8


def used_again_later(net: Net) -> int:
    """Backward leaves a module and comes back; it is reduced once, when all its calls are done."""
    model = net.build()
    (model.module if isinstance(net, WrappedNet) else model).times = 3
    net.step(0)
    net.step(1)
    return 24


def untold(net: Net) -> int:
    """Nobody is told of arrivals: what was written is reduced at the end of backward."""
    model = net.build()
    net.step(0)
    for block in model[1:]:
        for group in state_of(block).groups:  # type: ignore[union-attr]
            for param in group.params:
                param.unsharded_param._post_accumulate_grad_hooks.clear()  # type: ignore[union-attr]
    net.step(1)
    return 8


def used_otherwise(net: Net) -> int:
    """A weight has an ordinary gradient besides."""
    net.build(Block.penalised)
    net.step()
    return 4


def recomputed(net: Net) -> int:
    for reentrant in (False, True):
        net.build(functools.partial(Block.recomputed, reentrant=reentrant))
        net.step()
    return 8


def without_gradients(net: Net) -> int:
    net.build()
    with torch.no_grad():
        net.seen.append(net.loss(0))
    net.step()
    return 4


def with_unused_parameters(net: Net) -> int:
    """What is written is not taken for unused, and zeroed."""
    model = net.build(lambda block, x: x + block.up(x).mean())
    model.set_reduce_scatter_unused_params(True)
    net.step()
    return 2


def one_row(net: Net) -> int:
    model = net.build()
    model(net.batch(0)[0, 0]).sum().backward()
    net.look()
    return 4


def hybrid(net: Net) -> int:
    """Replicas are summed by the last microbatch."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("r", "s"))
    model = net.build(mesh=mesh)
    model.set_requires_all_reduce(False)
    net.loss(0).backward()
    model.set_requires_all_reduce(True)
    net.step(1)
    return 8


def sharded_by_themselves(net: Net) -> int:
    """Linear layers that are groups of their own, and have the class of sharded modules."""
    net.build(change=lambda block: fully_shard(block.up, fuse_gradients=net.fuse))
    net.step()
    return 4


def after_a_failed_step(net: Net) -> int:
    """Products of a backward that did not end are forgotten."""
    model = net.build()

    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    handle = model[2].up.register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        net.loss(0).backward()
    handle.remove()
    model.reset_iter_state()
    net.step(1)
    return 2 + 4


WRITTEN: list[Callable[[Net], int]] = [
    added_up,
    mixed_precision,
    accumulated,
    synchronised_by_chance,
    frozen,
    used_twice,
    used_again_later,
    used_otherwise,
    recomputed,
    without_gradients,
    with_unused_parameters,
    one_row,
    hybrid,
    sharded_by_themselves,
    after_a_failed_step,
]


def autocast(net: Net) -> int:
    net.build(lambda block, x: block.plain(x.float()))
    with torch.autocast("cpu", torch.bfloat16):
        loss = net.loss(0)
    loss.backward()
    net.look()
    return 0


def named_inputs(net: Net) -> int:
    """Only some parameters are to have gradients."""
    model = net.build()
    net.loss(0).backward(inputs=[model[1].up.weight, model[2].norm.weight])
    net.look()
    return 0


def of_gradients(net: Net) -> int:
    """The penalty is differentiated; the first pass is only for the input."""
    model = net.build()
    x = net.batch(0).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    net.look()
    return 4  # of the second pass, beside ordinary gradients of the same weights


def with_a_graph(net: Net) -> int:
    net.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gradients of sharded parameters have none
        net.loss(0).backward(create_graph=True)
    net.look()
    return 0


def transformed(net: Net) -> int:
    model = net.build()
    _, pull_back = torch.func.vjp(model, net.batch(0))
    net.seen.append(pull_back(torch.ones(2, 3, WIDTH))[0].detach())
    return 0


def sparse(net: Net) -> int:
    """Products with sparse inputs are other operators."""
    net.build(lambda block, x: x + block.up(x.flatten(0, 1).to_sparse()).mean())
    net.step()
    return 0


def hooked(net: Net) -> int:
    net.build(Block.hooked)
    net.step()
    return 2  # of the other weight


def not_synchronised(net: Net) -> int:
    """`.grad` shows what is not reduced yet, so it goes the ordinary way; the last backward adds to it."""
    model = net.build()
    with model.no_sync():
        net.step(0)
        net.step(1)
    net.step(2)
    return 4


def not_synchronised_and_cleared(net: Net) -> int:
    model = net.build()
    with model.no_sync():
        net.loss(0).backward()
    model.zero_grad()
    net.step(1)
    return 4


def nothing_sharded(net: Net) -> int:
    model = net.build(sharding_strategy=ShardingStrategy.NO_SHARD)
    with model.no_sync():
        net.step(0)
    net.step(1)
    return 4


def kept_after_forward(net: Net) -> int:
    net.build(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    net.step(0)
    net.step(1)
    return 8


def wrapped_hybrid(net: Net) -> int:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("r", "s"))
    net.build(device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    net.step()
    return 4


def in_low_precision(net: Net) -> int:
    """Sharded gradients stay in the compute dtype."""
    dtype = torch.bfloat16
    net.build(mixed_precision=MixedPrecision(param_dtype=dtype, keep_low_precision_grads=True))
    net.step()
    return 4


def sent_in_bf16(net: Net) -> int:
    net.build(
        mixed_precision=MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, wire_dtype=torch.bfloat16
        )
    )
    net.step()
    return 4


def reduced_by_a_hook(net: Net) -> int:
    def reduce(_: object, gradient: Tensor, output: Tensor) -> None:
        dist.reduce_scatter_tensor(output, gradient)

    net.build().register_comm_hook(None, reduce)
    net.step()
    return 4


def without_some(net: Net) -> int:
    """A wrapper sends all its gradients: those of unused parameters are zero."""
    net.build(lambda block, x: x + block.up(x).mean())
    net.step()
    return 2


WRAPPED: list[Callable[[Net], int]] = [
    added_up,
    mixed_precision,
    used_twice,
    used_again_later,
    used_otherwise,
    recomputed,
    without_gradients,
    one_row,
    not_synchronised,
    not_synchronised_and_cleared,
    nothing_sharded,
    kept_after_forward,
    wrapped_hybrid,
    in_low_precision,
    sent_in_bf16,
    reduced_by_a_hook,
    without_some,
]


ORDINARY: list[Callable[[Net], int]] = [
    autocast,
    named_inputs,
    of_gradients,
    with_a_graph,
    transformed,
    sparse,
    hooked,
]


@contextmanager
def counted_products() -> Iterator[list[int]]:
    """Yield a list with one entry for every product that is written."""
    written: list[int] = []
    original = fused_linear._write_product

    def count(one: Tensor, other: Tensor, target: Tensor, *, add: bool) -> None:
        written.append(target.numel())
        original(one, other, target, add=add)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_linear, "_write_product", count)
        yield written


@contextmanager
def counted_reductions() -> Iterator[list[str]]:
    """Yield a list with the tag of every reduce-scatter."""
    called: list[str] = []
    original = Coalesced.reduce

    def count(transport: Any, outputs: Any, inputs: Any, op: Any, tag: Any, **options: Any) -> Any:
        called.append(tag.text)
        return original(transport, outputs, inputs, op, tag, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Coalesced, "reduce", count)
        yield called


def compare(
    cases: list[Callable[[Net], int]], kind: type[Net] = Net, *, in_any_order: bool = False
) -> None:
    for case in cases:
        ordinary, fused = kind(fuse=False, seen=[]), kind(fuse=True, seen=[])
        with counted_products() as written:
            with counted_reductions() as usual:
                case(ordinary)
            assert not written, case.__name__
            with counted_reductions() as called:
                expected = case(fused)
        assert len(written) == expected, f"{case.__name__}: {len(written)} products"
        # Models of a process are numbered in tags.
        plain = [[tag.partition(" (model ")[0] for tag in tags] for tags in (called, usual)]
        if in_any_order:
            plain = [*map(sorted, plain)]
        assert plain[0] == plain[1], case.__name__
        assert_close(fused.seen, ordinary.seen, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_written_gradients_are_the_ordinary_ones(world: Any, size: int) -> None:
    world(size).run(compare, WRITTEN if size == 2 else WRITTEN[:3])


def test_gradients_that_nobody_tells_of_are_reduced_at_the_end(world: Any) -> None:
    world(2).run(functools.partial(compare, in_any_order=True), [untold])


def test_wrappers_have_the_ordinary_gradients(world: Any) -> None:
    world(2).run(compare, [*WRAPPED, frozen], WrappedNet)
    world(3).run(compare, WRAPPED[:4], WrappedNet)


def test_flat_parameters_have_the_ordinary_gradients(world: Any) -> None:
    world(2).run(compare, WRAPPED, FlatNet)
    world(3).run(compare, WRAPPED[:4], FlatNet)


def test_what_cannot_be_written_goes_the_ordinary_way(world: Any) -> None:
    world(2).run(compare, ORDINARY)


# --- which weights ---------------------------------------------------------------------------------


def share(block: Block) -> None:
    block.down = nn.Linear(WIDTH, INNER)
    block.down.weight = block.up.weight
    block.use = lambda self, x: x + (self.up(x) * self.down(x)).sum(-1, keepdim=True)


def replace_forward(block: Block) -> None:
    block.up.forward = functools.partial(doubled, block.up)  # type: ignore[method-assign]


def derive(block: Block) -> None:
    block.down = Doubled(INNER, WIDTH)


def compile_it(block: Block) -> None:
    block.up.compile(backend="eager")


def check_reasons() -> None:
    cases: list[tuple[Callable[[Block], object], dict[str, Any], str, str]] = [
        (lambda _: None, {}, "", ""),
        (share, {}, "several modules share it", "-"),
        (replace_forward, {}, "the forward of its module was replaced", ""),
        (derive, {}, "", "its module is a Doubled, which has a forward of its own"),
        (compile_it, {}, "", ""),
        (lambda block: block.up.weight.requires_grad_(False), {}, "it is frozen", ""),
        (
            lambda _: None,
            {"shard_placement_fn": lambda param: Shard(param.ndim - 1)},
            "it is not one piece in the reduce buffer: its shard dimension is not 0",
            "it is not one piece in the reduce buffer: its shard dimension is not 0",
        ),
    ]
    for change, options, up, down in cases:
        ordinary, fused = Net(fuse=False, seen=[]), Net(fuse=True, seen=[])
        with torch.compiler.set_stance("force_eager"):
            for net in (ordinary, fused):
                net.build(change=change, **options)
                net.step()
        assert_close(fused.seen, ordinary.seen, rtol=1e-5, atol=2e-5)
        assert ordinary.model.fused_gradients() == {}
        found = fused.model.fused_gradients()
        assert found["0.weight"].startswith("it belongs to the outermost module")
        assert found["1.up.weight"].startswith(up) and bool(found["1.up.weight"]) == bool(up)
        other = found.get("1.down.weight", "-")
        assert other.startswith(down) and bool(other) == bool(down)
        assert fused.model[2].fused_gradients() == {
            name: reason for name, reason in found.items() if name.startswith("2.")
        }


def check_reasons_of_wrappers() -> None:
    for kind in (WrappedNet, FlatNet):
        net = kind(fuse=True, seen=[])
        net.build(change=derive)
        net.step()
        found = net.model.fused_gradients()
        assert found.pop("0.weight").startswith("it belongs to the outermost module")
        assert found == {
            f"{block}.{name}.weight": reason
            for block in (1, 2)
            for name, reason in (
                ("up", ""),
                ("down", "its module is a Doubled, which has a forward of its own"),
            )
        }


def test_a_summary_says_which_weights_and_why(world: Any) -> None:
    world(2).run(check_reasons)
    world(2).run(check_reasons_of_wrappers)


def check_modules_look_the_same() -> None:
    net = Net(fuse=True, seen=[])
    model = net.build()
    before = (repr(model), type(model[1].up), [*model.state_dict()])
    net.step()
    unused = [state_of(module).use.unused for module in model[1:]]  # type: ignore[union-attr]
    assert unused == [(), ()], "autograd has told of all weights, though they got no gradient"
    layer = model[1].up
    assert (repr(model), type(layer), [*model.state_dict()]) == before
    weight, bias = layer.weight.full_tensor(), layer.bias.full_tensor()
    layer.weight = layer.bias = None  # copies of DTensors are not what this is about
    for each in (copy.deepcopy(layer), pickle.loads(pickle.dumps(nn.ModuleList([layer])))[0]):
        each.weight, each.bias = nn.Parameter(weight), nn.Parameter(bias)
        x = net.batch(0)
        assert torch.equal(each(x), nn.functional.linear(x, weight, bias))
        each(x).sum().backward()
        assert each.weight.grad is not None


def test_modules_look_the_same_and_copies_are_ordinary(world: Any) -> None:
    world(2).run(check_modules_look_the_same)
