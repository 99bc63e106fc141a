"""`skip_forward`: ranks without images take part in a vision tower's collectives, and gradients are those of one process.

Every case trains a text model with a tower for three steps. In each step some ranks, chosen at random, or all, have no
images and skip the tower. One process computes the mean of all ranks' losses. On gloo the ranks compare every collective before they
call it, so a gather or reduction in another order fails, too.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fullshard import (
    BackwardPrefetch,
    ConfigurationError,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    UnsupportedError,
    fully_shard,
)
from fullshard.errors import DivergenceError
from tests.helpers.compare import assert_close
from tests.helpers.training import ShardOptimizer, all_whole
from tests.promises.test_one_order import recorded

WIDTH = 6


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Tower(nn.Module):
    """Own parameters before and after the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList([Layer(4 + i) for i in range(3)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        x = self.patch(x)
        for layer in self.layers:
            x = layer(x)
        return x


class ReturnsLayer(Tower):
    """The output is the last layer's, the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        del self.norm

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)


class Bare(nn.Module):
    """No parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.layers = nn.Sequential(Layer(4), Layer(5))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(self.first(x))
        return result


class Whole(Bare):
    """Nothing within it is sharded."""


class Checkpointed(Tower):
    """Each layer is recomputed in backward."""

    def features(self, x: Tensor) -> Tensor:
        x = self.patch(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Irregular(Tower):
    """Nothing of this can be seen from outside: the order, a layer used twice, another of which only one parameter is
    used, one whose output is not used, and a norm that is not used."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x)
        for index in (2, 0, 2):
            x = self.layers[index](x)
        self.layers[1](x)
        return x * self.norm.weight


class Grouped(Tower):
    """The first two layers share a group."""


class Twice(Tower):
    """Everything within it runs twice."""

    def features(self, x: Tensor) -> Tensor:
        x = self.patch(x)
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return x


class Unused(Tower):
    """What is registered after the layers is not used."""

    def forward(self, x: Tensor) -> Tensor:
        return super().features(x)


class Deep(nn.Module):
    """A tower in a tower."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Tower()
        self.layer = Layer(7)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(self.inner(x))
        return result


TOWERS: dict[str, type[nn.Module]] = {
    tower.__name__: tower
    for tower in (
        Tower,
        ReturnsLayer,
        Bare,
        Whole,
        Checkpointed,
        Irregular,
        Deep,
        Grouped,
        Twice,
        Unused,
    )
}


UNKNOWN = ("Irregular", "Twice", "Unused")
"""Towers that a rank must have computed before it skips them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    tower: str = "Tower"
    api: str = "fully_shard"
    options: dict[str, Any] = field(default_factory=dict)
    """Of `fully_shard`, or of the wrapper."""
    replicas: int = 1
    frozen: tuple[str, ...] = ()
    """Prefixes of parameters in the tower."""
    microbatches: int = 1
    learns: bool = False
    """Whether all ranks compute in the first step."""
    tower_first: bool = False
    whole_checkpoint: bool = False
    adapter: bool = False
    """Whether a trainable module comes before the tower."""
    thaws: bool = False
    """Whether frozen parameters are trained from the second step on."""
    calls: int = 1
    """Forwards of the model in one backward."""
    tolerance: float = 1e-5


class Net(nn.Module):
    """Text through layers; features of images are added where there are images."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.embed = nn.Linear(4, WIDTH)
        self.vision = TOWERS[case.tower]()
        if case.adapter:
            self.adapter = nn.Linear(3, 3)
        self.layers = nn.ModuleList([Layer(8), Layer(9)])
        self.head = nn.Linear(WIDTH, 1)

    def see(self, images: Tensor | None, h: Tensor | None) -> Any:
        """The tower's output, or what the tower's skipped forward returns."""
        tower: Any = self.vision
        if images is not None:
            images = self.adapter(images) if self.case.adapter else images
            return self.maybe_checkpointed(tower, images)
        if h is None:
            return tower.skip_forward()
        if self.case.adapter:
            adapter: Any = self.adapter
            return tower.skip_forward(adapter.skip_forward(h), inputs_require_grad=True)
        return self.maybe_checkpointed(tower.skip_forward, h)

    def maybe_checkpointed(self, function: Any, *inputs: Tensor) -> Any:
        if self.case.whole_checkpoint:
            return checkpoint(function, *inputs, use_reentrant=False)
        return function(*inputs)

    def forward(self, text: Tensor, images: Tensor | None) -> Tensor:
        if self.case.tower_first:
            seen = self.see(images, None)
            h = self.embed(text) + seen
        else:
            h = self.embed(text)
            seen = self.see(images, h)
            h = seen if images is None else h + seen
        for layer in self.layers:
            h = layer(h)
        result: Tensor = self.head(h.to(self.head.weight.dtype)).square().mean()
        return result


class Alone(Net):
    """One process: the tower of a rank without images gives zero."""

    def see(self, images: Tensor | None, h: Tensor | None) -> Any:
        if images is not None:
            return super().see(images, h)
        skipped = [self.vision, *([self.adapter] if self.case.adapter else [])]
        params = (param for module in skipped for param in module.parameters())
        zero = sum(0.0 * param.sum() for param in params if param.requires_grad)
        return zero if h is None else h + zero


def shard(net: Net, case: Case) -> Any:
    mesh = None
    if case.replicas > 1:
        shape = (case.replicas, dist.get_world_size() // case.replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    sharded: list[nn.Module] = [each for each in net.modules() if isinstance(each, Layer)]
    if case.tower == "Whole":
        sharded = [module for module in sharded if module not in set(net.vision.modules())]
    if case.tower == "Deep":
        sharded.append(net.vision.inner)  # type: ignore[arg-type]
    sharded += [net.embed, *([net.adapter] if case.adapter else []), net.vision]
    if case.api == "fully_shard":
        for module in (*_grouped(sharded, case), net):
            fully_shard(module, mesh=mesh, **case.options)
        return net
    names = {module: name for name, module in net.named_modules()}
    options = {"device_id": torch.device("cpu"), "device_mesh": mesh, **case.options}
    for module in sharded:
        path, _, name = names[module].rpartition(".")
        parent = net.get_submodule(path)
        setattr(parent, name, FullyShardedDataParallel(module, **options))
    return FullyShardedDataParallel(net, **options)


def _grouped(sharded: list[nn.Module], case: Case) -> list[Any]:
    if case.tower == "Grouped":
        first, second, *rest = sharded  # the tower's layers come first
        return [[first, second], *rest]
    return sharded


def data(step: int, microbatch: int, rank: int, world: int, case: Case) -> list[Tensor | None]:
    """Text and images of one rank; the images are None if it has none."""
    seed = (step * 10 + microbatch) * 10 + rank
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn(2, 4, generator=generator)
    images = torch.randn(2, 3, generator=generator)
    # One, all but one, or all.
    number = [1, world - 1, world][(step + microbatch) % 3]
    skipping = random.Random(step * 100 + microbatch).sample(range(world), number)
    if case.learns and step == 0:
        skipping = []
    return [text, None if rank in skipping else images]


def loss_of(net: Any, step: int, microbatch: int, rank: int, world: int, case: Case) -> Tensor:
    """The loss of one rank, of one or more forwards."""
    losses = [
        net(*data(step, microbatch + 5 * call, rank, world, case)) for call in range(case.calls)
    ]
    return torch.stack(losses).sum() / case.microbatches


@contextlib.contextmanager
def synchronised(net: Any, sync: bool) -> Iterator[None]:
    if isinstance(net, FullyShardedDataParallel):
        with contextlib.nullcontext() if sync else net.no_sync():
            yield
    else:
        net.set_requires_gradient_sync(sync)
        yield


def train_as_one_process(case: Case) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    net, alone = Net(case), Alone(case)
    for name, param in net.vision.named_parameters():
        if name.startswith(case.frozen) and case.frozen:
            param.requires_grad_(False)
    alone.load_state_dict(net.state_dict())
    for mine, its in zip(alone.parameters(), net.parameters(), strict=True):
        mine.requires_grad_(its.requires_grad)
    model = shard(net, case)
    optimizers = [ShardOptimizer("SGD", list(each.parameters()), lr=0.1) for each in (model, alone)]
    for step in range(3):
        for microbatch in range(case.microbatches):
            with synchronised(model, microbatch == case.microbatches - 1):
                loss_of(model, step, microbatch, rank, world, case).backward()
            for each in range(world):
                (loss_of(alone, step, microbatch, each, world, case) / world).backward()
        if case.api == "fully_shard" and step == 1:
            compare(model, alone, case, gradients=True)
        if case.thaws:
            model.requires_grad_(True)
            alone.requires_grad_(True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compare(model, alone, case)


def compare(model: Any, alone: nn.Module, case: Case, *, gradients: bool = False) -> None:
    expected = {
        name: param.grad if gradients else param.detach()
        for name, param in alone.named_parameters()
        if not gradients or (param.requires_grad and param.grad is not None and param.grad.any())
    }
    if case.api == "fully_shard":
        params = dict(model.named_parameters())
        actual = all_whole(
            {name: params[name].grad if gradients else params[name].detach() for name in expected}
        )
    else:
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            actual = {name: param.detach().clone() for name, param in model.named_parameters()}
    assert_close(actual, expected, rtol=case.tolerance, atol=case.tolerance)


def train_all(cases: list[Case]) -> list[list[str]]:
    events = []
    for case in cases:
        try:
            events.append(recorded(lambda case=case: train_as_one_process(case)))  # type: ignore[misc]
        except Exception as error:
            error.add_note(f"in {case}")
            raise
    return events


def check(world: Any, ranks: int, cases: list[Case]) -> None:
    first, *others = world(ranks).run(train_all, cases)
    for other in others:
        for case, mine, theirs in zip(cases, first, other, strict=True):
            assert mine == theirs, case


def bf16(output_dtype: torch.dtype | None = None) -> dict[str, Any]:
    return {
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=output_dtype)
    }


def wrapped(**options: Any) -> dict[str, Any]:
    return {"api": "wrapper", "options": {"use_orig_params": True, **options}}


def test_towers_of_all_shapes_train_as_in_one_process(world: Any) -> None:
    check(world, 3, [Case(), Case(tower="Bare"), Case(tower_first=True)])
    others = [tower for tower in TOWERS if tower not in ("Tower", "Bare", *UNKNOWN)]
    check(world, 2, [Case(tower=tower) for tower in others])


def test_what_cannot_be_seen_from_outside_is_learned_from_one_forward_and_backward(
    world: Any,
) -> None:
    cases = [Case(tower=tower, learns=True) for tower in UNKNOWN]
    check(world, 2, cases)
    check(world, 3, [Case(tower="Twice", learns=True, calls=2, tower_first=True)])


def test_skipping_goes_with_every_option(world: Any) -> None:
    check(
        world,
        2,
        [
            Case(options={"reshard_after_forward": False}),
            Case(options=bf16(), tolerance=5e-2),
            Case(options=bf16(torch.float32), tower="ReturnsLayer", tolerance=5e-2),
            Case(options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}, microbatches=2),
            Case(microbatches=2, tower="Bare"),
            Case(calls=2),
            Case(whole_checkpoint=True),
        ],
    )


def test_skipping_goes_with_frozen_parameters(world: Any) -> None:
    check(
        world,
        2,
        [
            Case(frozen=("patch", "layers.0")),
            Case(frozen=("layers",), tower_first=True),
            Case(frozen=("",)),
            Case(frozen=("",), adapter=True),
            Case(frozen=("patch", "layers.0"), thaws=True),
        ],
    )


def test_skipping_goes_with_replicas_and_post_forward_meshes(world: Any) -> None:
    check(
        world,
        4,
        [
            Case(replicas=2, microbatches=2),
            Case(options={"reshard_after_forward": 2}, tower="ReturnsLayer"),
            Case(replicas=2, **wrapped(sharding_strategy=ShardingStrategy.HYBRID_SHARD)),
        ],
    )


def test_wrappers_skip_as_sharded_modules_do(world: Any) -> None:
    check(
        world,
        2,
        [
            Case(**wrapped(use_orig_params=False), tower="Deep", microbatches=2),
            Case(**wrapped(), frozen=("patch", "layers.0"), microbatches=2),
            Case(**wrapped(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)),
            Case(**wrapped(sharding_strategy=ShardingStrategy.NO_SHARD), tower="ReturnsLayer"),
            Case(**wrapped(), tower="Irregular", learns=True),
        ],
    )


def test_wrappers_skip_with_every_way_to_prefetch(world: Any) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    check(
        world,
        2,
        [
            Case(**wrapped(backward_prefetch=BackwardPrefetch.BACKWARD_POST)),
            Case(**wrapped(backward_prefetch=BackwardPrefetch.BACKWARD_POST), tower="ReturnsLayer"),
            Case(**wrapped(backward_prefetch=None), calls=2),
            Case(**wrapped(backward_prefetch=None), tower="ReturnsLayer"),
            Case(**wrapped(backward_prefetch=None), tower="Unused", learns=True),
            Case(**wrapped(mixed_precision=precision), tolerance=5e-2),
        ],
    )


# --- what is returned, and what is refused --------------------------------------------------------------


def outputs_of_a_skipped_forward() -> None:
    tower: Any = fully_shard(nn.Sequential(nn.Linear(2, 2)))
    h = torch.ones(2, 3)
    zero = tower.skip_forward()
    assert zero.shape == () and zero == 0 and zero.requires_grad
    count = torch.ones(3, dtype=torch.int64)
    nested = tower.skip_forward({"h": h, "count": count, "more": (h.clone(),)})
    assert (
        nested["count"] is count and nested["h"].requires_grad and nested["more"][0].requires_grad
    )
    nested["h"][0] = 5.0  # may be written to, and is a copy
    assert h.eq(1).all() and nested["more"][0].eq(1).all()
    nested["h"].sum().backward()
    assert all(param.grad.to_local().eq(0).all() for param in tower.parameters())
    with torch.no_grad():
        assert tower.skip_forward(h) is h
    tower.requires_grad_(False)
    assert tower.skip_forward(h) is h
    assert tower.skip_forward(h, inputs_require_grad=True).requires_grad


def test_what_is_skipped_returns_what_it_is_given(world: Any) -> None:
    world(2).run(outputs_of_a_skipped_forward)


def skip_wrongly() -> None:
    tower: Any = fully_shard(nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="must contain a floating-point tensor; got int"):
        tower.skip_forward(3)
    with pytest.raises(UnsupportedError, match="within a transform"):
        torch.func.grad(lambda x: tower.skip_forward(x).sum())(torch.ones(2))
    tower.skip_forward().backward()


def test_wrong_skips_are_refused_before_a_collective(world: Any) -> None:
    world(2).run(skip_wrongly)


def skip_what_was_never_computed() -> None:
    train_as_one_process(Case(tower="Irregular"))


def test_an_order_that_cannot_be_known_is_an_error_that_names_the_modules(world: Any) -> None:
    for error in world(2).outcomes(skip_what_was_never_computed):
        assert isinstance(error, DivergenceError)
        assert "all-gather of vision.layers.0" in str(error)
        assert "all-gather of vision.layers.2" in str(error)
