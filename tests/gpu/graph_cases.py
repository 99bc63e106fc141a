"""Steps to be captured in CUDA graphs: models, optimizers and ways to accumulate, and the results to compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import clip_grad_norm_
from fullshard.optim import Muon, ShardedOptimizer
from tests.gpu.test_streams import SETTERS, WIDTH, Layer, equal, make_model, plain_local
from tests.gpu.test_wrapper import (
    FULLSHARD,
    make_model as make_plain_model,
    options_here,
    wrapped,
)

WARMUP, REPLAYED = 3, 4
BATCH = 64


class Case(NamedTuple):
    """A model with its optimizer, and one step of it."""

    model: Any
    optimizer: optim.Optimizer | None
    step: Callable[[Tensor], Tensor]
    """From an input to the loss, with everything in between."""


def local(value: Any) -> Tensor:
    return plain_local(value) if hasattr(value, "to_local") else value.detach().clone()


def results(case: Case, loss: Tensor) -> list[Tensor]:
    """What a step has left: the loss, gradients, shards."""
    params = list(case.model.parameters())
    gradients = [local(p.grad) for p in params if p.grad is not None]
    return [loss.detach().clone(), *gradients, *map(local, params)]


def inputs(count: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    return [torch.randn(BATCH, WIDTH, device="cuda", generator=generator) for _ in range(count)]


def eager_results(case: Case) -> list[list[Tensor]]:
    found = []
    for x in inputs(WARMUP + REPLAYED):
        clear(case)
        found.append(results(case, case.step(x)))
    return found


def clear(case: Case) -> None:
    case.model.zero_grad(set_to_none=True)


class Captured:
    """A step in a graph, with its static input."""

    def __init__(self, case: Case, pool: Any = None) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.x = torch.zeros(BATCH, WIDTH, device="cuda")
        clear(case)
        with torch.cuda.graph(self.graph, pool=pool):
            self.loss = case.step(self.x)
        self.gradients = [(param, param.grad) for param in case.model.parameters()]

    def __call__(self, x: Tensor) -> Tensor:
        self.x.copy_(x)
        self.graph.replay()
        for param, gradient in self.gradients:
            param.grad = gradient
        return self.loss


def replayed_results(case: Case) -> list[list[Tensor]]:
    found = []
    batches = inputs(WARMUP + REPLAYED)
    for x in batches[:WARMUP]:
        clear(case)
        found.append(results(case, case.step(x)))
    captured = Captured(case)
    for x in batches[WARMUP:]:
        found.append(results(case, captured(x)))
    return found


def assert_replays_equal(make: Callable[[], Case]) -> None:
    expected, found = eager_results(make()), replayed_results(make())
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert equal(ours, theirs), f"step {number}"


# --- kinds of steps ---------------------------------------------------------------------------------


def loss_of(model: Any, x: Tensor) -> Tensor:
    return model(x).float().pow(2).mean()  # type: ignore[no-any-return]


def plain_step(model: Any) -> Case:
    def step(x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        loss.backward()
        return loss

    return Case(model, None, step)


def optimizer_step(
    model: Any, make: Callable[..., optim.Optimizer], max_norm: float | None = 0.5, **options: Any
) -> Case:
    """Forward, backward, clipping and the optimizer; the rate is a tensor."""
    rate = torch.tensor(0.01, device="cuda")
    optimizer = make(model.parameters(), lr=rate, **options)

    def step(x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        loss.backward()
        if max_norm is not None:
            clip_grad_norm_(model, max_norm)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"].mul_(0.9)
        return loss

    return Case(model, optimizer, step)


def accumulating_step(model: Any) -> Case:
    def step(x: Tensor) -> Tensor:
        first, second = x.chunk(2)
        model.set_requires_gradient_sync(False)
        loss_of(model, first).backward()
        model.set_requires_gradient_sync(True)
        loss = loss_of(model, second)
        loss.backward()
        return loss

    return Case(model, None, step)


def twice_reduced_step(model: Any) -> Case:
    def step(x: Tensor) -> Tensor:
        first, second = x.chunk(2)
        loss_of(model, first).backward()
        loss = loss_of(model, second)
        loss.backward()
        return loss

    return Case(model, None, step)


def no_sync_step(model: Any) -> Case:
    def step(x: Tensor) -> Tensor:
        first, second = x.chunk(2)
        with model.no_sync():
            loss_of(model, first).backward()
        loss = loss_of(model, second)
        loss.backward()
        return loss

    return Case(model, None, step)


def partial_sums_step(model: Any) -> Case:
    """HSDP: the all-reduce comes after two microbatches."""

    def step(x: Tensor) -> Tensor:
        for microbatch, part in enumerate(x.chunk(2)):
            model.set_requires_all_reduce(microbatch == 1)
            model.set_is_last_backward(microbatch == 1)
            loss = loss_of(model, part)
            loss.backward()
        return loss

    return Case(model, None, step)


def evaluating_step(model: Any) -> Case:
    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            before = loss_of(model, x)
        loss = loss_of(model, x)
        loss.backward()
        return loss + before.detach()

    return Case(model, None, step)


def unsharding_step(model: Any) -> Case:
    """The user gathers a layer early, in the captured step."""

    def step(x: Tensor) -> Tensor:
        handle = model[2].unshard(async_op=True)
        loss = loss_of(model, x)
        handle.wait()
        loss.backward()
        return loss

    return Case(model, None, step)


def event_step(model: Any) -> Case:
    """The optimizer's event is set within the step, and used by the next one, captured or not."""
    case = optimizer_step(model, sharded_sgd, fused=True)

    def step(x: Tensor) -> Tensor:
        loss = case.step(x)
        event = torch.Event("cuda")
        event.record()
        model.set_post_optim_event(event)
        return loss

    return Case(model, case.optimizer, step)


# --- models -----------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = Layer(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


def checkpointing_model(reentrant: bool) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Checkpointed(reentrant) for _ in range(3)))
    for layer in model[1:]:
        fullshard.fully_shard(layer)
    return fullshard.fully_shard(model)


def planned_model() -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Layer() for _ in range(6)))
    fullshard.plan_groups(model, min_bytes=1 << 20).apply()
    return model


class Gated(Layer):
    """Two linear layers read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(torch.relu(self.up(y)) * self.gate(y))  # type: ignore[no-any-return]


def fused_model() -> Any:
    """Backward of linear layers writes into the reduce buffer."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Gated() for _ in range(3)))
    policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model[1:]:
        fullshard.fully_shard(layer, mp_policy=policy, fuse_gradients=True)
    return fullshard.fully_shard(model, mp_policy=policy, fuse_gradients=True)


def kept_model(keep: bool) -> Any:
    """Nothing is resharded after forward."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Layer() for _ in range(3)))
    for layer in model[1:]:
        fullshard.fully_shard(layer, reshard_after_forward=not keep)
    return fullshard.fully_shard(model, reshard_after_forward=not keep)


def compiled_model(**options: Any) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Layer() for _ in range(2)))
    for layer in model[1:]:
        layer.compile()
        fullshard.fully_shard(layer, **options)
    return fullshard.fully_shard(model)


def set_up(setter: Callable[[Any], None], **options: Any) -> Any:
    model = make_model(**options)
    setter(model)
    return model


def wrapper_model(**options: Any) -> Any:
    return wrapped(FULLSHARD, make_plain_model(), **options_here(options))


CASES: dict[str, Callable[[], Case]] = {
    "plain": lambda: plain_step(make_model()),
    "hsdp": lambda: plain_step(make_model(hsdp=True)),
    "bf16 reduction": lambda: plain_step(make_model(reduce_dtype=torch.bfloat16)),
    "post-forward mesh": lambda: plain_step(make_model(part=2)),
    "int8 extension": lambda: plain_step(make_model(int8=True)),
    "replicated": lambda: plain_step(make_model(replicated=True)),
    "wire dtype": lambda: plain_step(make_model(wire=True)),
    "wire dtype, hsdp": lambda: plain_step(make_model(wire=True, hsdp=True)),
    "kept after forward": lambda: plain_step(kept_model(keep=True)),
    "fp32": lambda: plain_step(kept_model(keep=False)),
    "accumulation": lambda: accumulating_step(make_model()),
    "accumulation, kept": lambda: accumulating_step(set_up(SETTERS[4])),
    "reduced twice": lambda: twice_reduced_step(make_model()),
    "partial sums": lambda: partial_sums_step(make_model(hsdp=True)),
    "evaluation": lambda: evaluating_step(make_model()),
    "unshard by the user": lambda: unsharding_step(make_model()),
    "event of the optimizer": lambda: event_step(make_model()),
    "checkpointing": lambda: plain_step(checkpointing_model(reentrant=False)),
    "reentrant checkpointing": lambda: plain_step(checkpointing_model(reentrant=True)),
    "planned groups": lambda: plain_step(planned_model()),
    "fused gradients": lambda: accumulating_step(fused_model()),
    "fused sharded sgd": lambda: optimizer_step(make_model(), sharded_sgd, fused=True),
    "adamw": lambda: optimizer_step(make_model(), optim.AdamW, capturable=True, foreach=True),
    "fused adamw": lambda: optimizer_step(make_model(), optim.AdamW, capturable=True, fused=True),
    "sharded adamw": lambda: optimizer_step(
        make_model(), sharded_adamw, capturable=True, foreach=True
    ),
    "fused sharded adamw": lambda: optimizer_step(
        make_model(), sharded_adamw, capturable=True, fused=True
    ),
    "hsdp, sharded adamw": lambda: optimizer_step(
        make_model(hsdp=True), sharded_adamw, capturable=True, fused=True
    ),
    "muon": lambda: muon_case(make_model()),
    "hsdp, muon": lambda: muon_case(make_model(hsdp=True)),
    "wrapper, muon": lambda: muon_case(wrapper_model(use_orig_params=True)),
    "wrapper, flat": lambda: no_sync_step(wrapper_model()),
    "wrapper": lambda: no_sync_step(wrapper_model(use_orig_params=True)),
    "wrapper, flat, fused gradients": lambda: no_sync_step(wrapper_model(fuse_gradients=True)),
    "wrapper, fused gradients": lambda: no_sync_step(
        wrapper_model(use_orig_params=True, fuse_gradients=True)
    ),
    "wrapper, grad op": lambda: plain_step(
        wrapper_model(use_orig_params=True, sharding_strategy="SHARD_GRAD_OP")
    ),
    "wrapper, no shard": lambda: plain_step(wrapper_model(sharding_strategy="NO_SHARD", low=False)),
    "wrapper, hybrid": lambda: plain_step(
        wrapper_model(use_orig_params=True, sharding_strategy="HYBRID_SHARD")
    ),
    "wrapper, adamw": lambda: optimizer_step(
        wrapper_model(use_orig_params=True), optim.AdamW, capturable=True, foreach=True
    ),
    "wrapper, sharded adamw": lambda: optimizer_step(
        wrapper_model(use_orig_params=True), sharded_adamw, capturable=True, fused=True
    ),
    **{
        setter.__name__.replace("_", " "): (lambda s=setter: plain_step(set_up(s)))  # type: ignore[misc]
        for setter in SETTERS
    },
}


def sharded_sgd(params: Any, **options: Any) -> optim.Optimizer:
    return ShardedOptimizer(optim.SGD, params, **options)


def sharded_adamw(params: Any, **options: Any) -> optim.Optimizer:
    return ShardedOptimizer(optim.AdamW, params, **options)


def muon_case(model: Any) -> Case:
    """Muon with several buckets, so that exchanges overlap."""

    def make(_: Any, **options: Any) -> optim.Optimizer:
        return Muon(model, bucket_numel=1 << 19, **options)

    return optimizer_step(model, make, capturable=True)


def graphed_of(case: Case, **options: Any) -> Any:
    return fullshard.graphed(
        case.step, inputs(1), model=case.model, optimizer=case.optimizer, **options
    )


def adamw_case(**options: Any) -> Case:
    return optimizer_step(make_model(**options), sharded_adamw, capturable=True, fused=True)
