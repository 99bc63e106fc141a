"""What users do with wrapped models besides plain steps, and that it ends as with torch's FSDP1.

A situation is a function of a library that returns what is compared, on this rank; where torch cannot
do it, or is wrong, the expectation is one process, and the test says so.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks

from fullshard.sharded_grad_scaler import ShardedGradScaler
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.models import tokens_for
from tests.helpers.training import FULLSHARD, TORCH, mine
from tests.helpers.wrapping import (
    copied,
    full_params,
    library,
    named_gradients,
    two_blocks,
    wrap_blocks,
)
from tests.promises.test_wrapper_numerics import (
    BF16,
    FP16,
    FP32,
    Mixed,
    decoder,
    mixed_strategies,
    precision,
    strategy,
    vectors,
    whole,
)

SITUATIONS: dict[str, Callable[..., Any]] = {}


def situation(function: Callable[..., Any]) -> Callable[..., Any]:
    SITUATIONS[function.__name__.replace("_", " ")] = function
    return function


class Trainer:
    """A wrapped model and its optimizer; remembers everything it sees."""

    def __init__(self, lib: Any, model: Any, optimizer: str = "AdamW", **options: Any) -> None:
        self.lib = lib
        self.model = model
        self.optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2)
        self.seen: list[Any] = []

    def batch(self, step: int) -> Tensor:
        batch = tokens_for(step, 2 * dist.get_world_size())
        return batch if self.lib is None else mine(batch)

    def loss(self, step: int) -> Tensor:
        loss: Tensor = self.model(self.batch(step))
        self.seen.append(copied(loss))
        return loss

    def update(self) -> None:
        self.seen.append(named_gradients(self.model))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen.append({name: copied(param) for name, param in self.model.named_parameters()})

    def step(self, step: int) -> None:
        self.loss(step).backward()
        self.update()


def trainer(lib: Any, build: Any = two_blocks, **options: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(lib, build() if lib is None else wrap_blocks(lib, build(), **options))


@situation
def forwards_without_backward_between_steps(lib: Any, **options: Any) -> Any:
    run = trainer(lib, **options)
    for step in range(2):
        run.step(step)
        run.model.eval()
        with torch.no_grad():
            run.loss(10 + step)
        run.loss(20 + step)
        run.model.train()
        run.loss(30 + step)
        with torch.inference_mode():
            run.loss(40 + step)
    return run.seen


@situation
def forwards_without_backward_between_steps_of_SHARD_GRAD_OP(lib: Any, **options: Any) -> Any:
    return forwards_without_backward_between_steps(lib, **options, **strategy("SHARD_GRAD_OP")(lib))


@situation
def forwards_without_backward_between_steps_of_NO_SHARD(lib: Any, **options: Any) -> Any:
    return forwards_without_backward_between_steps(lib, **options, **strategy("NO_SHARD")(lib))


@situation
def no_sync_around_backward_only(lib: Any, **options: Any) -> Any:
    run = trainer(lib, **options)
    for step in range(2):
        loss = run.loss(step)
        with run.model.no_sync():
            loss.backward()
        run.step(10 + step)
    return run.seen


@situation
def no_sync_around_forward_only(lib: Any, **options: Any) -> Any:
    run = trainer(lib, **options)
    for step in range(2):
        with run.model.no_sync():
            loss = run.loss(step)
        loss.backward()
        run.update()
    return run.seen


@situation
def several_forwards_one_backward(lib: Any, **options: Any) -> Any:
    run = trainer(lib, **options)
    for step in range(2):
        (run.loss(step) + 2 * run.loss(10 + step)).backward()
        run.update()
    return run.seen


@situation
def several_forwards_then_their_backwards(lib: Any, **options: Any) -> Any:
    run = trainer(lib, **options)
    for step in range(2):
        losses = [run.loss(step), run.loss(10 + step)]
        for loss in losses:
            loss.backward()
        run.update()
    return full_params(lib, run.model)


@situation
def backward_twice_through_a_retained_graph(lib: Any, **options: Any) -> Any:
    run = trainer(lib, **options)
    for step in range(2):
        loss = run.loss(step)
        loss.backward(retain_graph=True)
        loss.backward()
        run.update()
    return full_params(lib, run.model)


@situation
def gradients_kept_over_steps(lib: Any, **options: Any) -> Any:
    run = trainer(lib, **options)
    for step in range(2):
        run.loss(step).backward()
    run.update()
    run.optimizer.zero_grad(set_to_none=False)
    run.step(5)
    return run.seen


@situation
def zeroed_in_place(lib: Any, **options: Any) -> Any:
    run = trainer(lib, **options)
    for step in range(2):
        run.step(step)
        run.optimizer.zero_grad(set_to_none=False)
    return run.seen


@situation
def low_precision_gradients_kept(lib: Any, **options: Any) -> Any:
    seen = []
    for name, dtypes in (
        ("FULL_SHARD", {"param_dtype": BF16}),
        ("NO_SHARD", {"param_dtype": BF16}),
        ("FULL_SHARD", {"param_dtype": BF16, "reduce_dtype": FP32}),
        ("NO_SHARD", {"reduce_dtype": BF16}),
    ):
        mixed = precision(keep_low_precision_grads=True, **dtypes)(lib)
        run = trainer(lib, **options, **mixed, **strategy(name)(lib))
        run.loss(0).backward()
        seen.append(named_gradients(run.model))
    return seen


@situation
def full_precision_in_eval(lib: Any, **options: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
        mixed = precision(
            param_dtype=BF16, reduce_dtype=FP32, buffer_dtype=BF16, cast_forward_inputs=True
        )(lib)
        run = trainer(lib, **options, **mixed)
        for step in range(2):
            run.step(step)
            run.model.eval()
            with torch.no_grad():
                run.loss(10 + step)
            run.loss(20 + step).backward()
            run.update()
            run.model.train()
        return run.seen


@situation
def norms_of_nothing(lib: Any, **options: Any) -> Any:
    run = trainer(lib, **options)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        return [run.model.clip_grad_norm_(1.0), run.model.clip_grad_norm_(1.0, float("inf"))]


@situation
def norms_with_ignored_parameters(lib: Any, **options: Any) -> Any:
    seen = []
    for norm_type in (1, 2, 3.5, float("inf")):
        torch.manual_seed(0)
        model: Any = Mixed()
        model = mixed_strategies(lib, model, **options, ignored_states=[model.last.bias])
        batch = mine(vectors(5)(0, 2 * dist.get_world_size()))
        model(batch).backward()
        if dist.get_rank() == 0:
            assert model.last.bias.grad is not None
        # Gradients of ignored parameters are not reduced: let them be equal.
        dist.all_reduce(model.last.bias.grad)
        seen += [model.clip_grad_norm_(0.05, norm_type), named_gradients(model)]
    return seen


@situation
def low_precision_norms(lib: Any, **options: Any) -> Any:
    mixed = precision(param_dtype=BF16, keep_low_precision_grads=True)(lib)
    run = trainer(lib, **options, **mixed)
    run.loss(0).backward()
    return [run.model.clip_grad_norm_(0.1), named_gradients(run.model)]


def _hooked(lib: Any, name: str, hook: Any, state: Any, **options: Any) -> Any:
    run = trainer(lib, **options, **strategy(name)(lib))
    run.model.register_comm_hook(state, hook)
    for step in range(2):
        run.step(step)
    return run.seen


@situation
def default_comm_hooks(lib: Any, **options: Any) -> Any:
    state = default_hooks.DefaultState(dist.group.WORLD)
    return [
        _hooked(lib, "FULL_SHARD", default_hooks.reduce_scatter_hook, state, **options),
        _hooked(lib, "SHARD_GRAD_OP", default_hooks.reduce_scatter_hook, state, **options),
        _hooked(lib, "NO_SHARD", default_hooks.allreduce_hook, state, **options),
    ]


@situation
def compressing_comm_hooks(lib: Any, **options: Any) -> Any:
    state = default_hooks.LowPrecisionState(dist.group.WORLD)
    with streams_of_the_host():
        return [
            _hooked(lib, name, hook, state, **options)
            for name in ("FULL_SHARD", "NO_SHARD")
            for hook in (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)
        ]


@contextlib.contextmanager
def streams_of_the_host() -> Iterator[None]:
    """Let torch's compressing hooks run on the CPU, whose streams tensors do not know."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
        yield


@situation
def comm_hooks_and_mixed_precision(lib: Any, **options: Any) -> Any:
    low = default_hooks.LowPrecisionState(dist.group.WORLD)
    state = default_hooks.DefaultState(dist.group.WORLD)
    mixed = precision(param_dtype=BF16, reduce_dtype=FP32)(lib)
    with streams_of_the_host():
        return [
            _hooked(
                lib, "FULL_SHARD", default_hooks.reduce_scatter_hook, state, **mixed, **options
            ),
            _hooked(lib, "FULL_SHARD", default_hooks.bf16_compress_hook, low, **mixed, **options),
            _hooked(lib, "NO_SHARD", default_hooks.bf16_compress_hook, low, **mixed, **options),
        ]


@situation
def hook_that_keeps_local_gradients(lib: Any, **options: Any) -> Any:
    def keep(state: Any, gradient: Tensor, output: Tensor) -> None:
        state.append(gradient.sum().detach().clone())
        output.copy_(gradient.chunk(dist.get_world_size())[dist.get_rank()])

    sums: list[Tensor] = []
    seen = _hooked(lib, "FULL_SHARD", keep, sums, **options)
    return [seen, len(sums)]


@situation
def accumulation_with_comm_hooks(lib: Any, **options: Any) -> Any:
    state = default_hooks.DefaultState(dist.group.WORLD)
    seen = []
    for name, hook in (
        ("FULL_SHARD", default_hooks.reduce_scatter_hook),
        ("NO_SHARD", default_hooks.allreduce_hook),
    ):
        run = trainer(lib, **options, **strategy(name)(lib))
        run.model.register_comm_hook(state, hook)
        for step in range(2):
            with run.model.no_sync():
                run.loss(step).backward()
            run.step(10 + step)
        seen.append(run.seen)
    return seen


@situation
def scaled_fp16(lib: Any, **options: Any) -> Any:
    mixed = precision(param_dtype=FP16, reduce_dtype=FP16)(lib)
    run = trainer(lib, **options, **mixed)
    # Ours for both: torch's has hung on gloo. test_sharded_grad_scaler.py compares the two.
    scaler = ShardedGradScaler(device="cpu", init_scale=2.0**17, growth_interval=2)
    for step in range(5):
        loss = run.loss(step)
        scaler.scale(loss).backward()
        scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        run.seen += [scaler.get_scale(), {n: copied(p) for n, p in run.model.named_parameters()}]
    return run.seen


@situation
def ignored_modules(lib: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Mixed()
    model = whole(lib, model, ignored_modules=[model.last], **options)
    batch = mine(vectors(5)(0, 2 * dist.get_world_size()))
    model(batch).backward()
    return [named_gradients(model), {n: copied(p) for n, p in model.named_parameters()}]


# use_orig_params=True only

ORIGINAL: dict[str, Callable[..., Any]] = {}


def of_originals(function: Callable[..., Any]) -> Callable[..., Any]:
    ORIGINAL[function.__name__.replace("_", " ")] = function
    return function


@of_originals
def data_replaced(lib: Any, **options: Any) -> Any:
    run = trainer(lib, **options)
    for step in range(2):
        run.step(step)
        for param in run.model.parameters():
            param.data = param.data * 0.9
    return run.seen


@of_originals
def parameter_replaced(lib: Any, **options: Any) -> Any:
    run = trainer(lib, **options)
    for step in range(2):
        run.step(step)
        head = run.model.module.head
        head.weight = nn.Parameter(head.weight.detach() * 0.9)
        run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    return run.seen


@of_originals
def frozen_between_steps(lib: Any, **options: Any) -> Any:
    run = trainer(lib, **options)
    wholes = []
    for step in range(4):
        for name, param in run.model.named_parameters():
            if "up.weight" in name or "embed" in name:
                param.requires_grad_(step % 2 == 0)
        run.step(step)
        wholes.append(full_params(lib, run.model))
    return wholes


@of_originals
def frozen_among_others(lib: Any, **options: Any) -> Any:
    run = trainer(lib, build=decoder(frozen=("up.weight", "norm.bias")), **options)
    wholes = []
    for step in range(2):
        run.step(step)
        wholes.append(full_params(lib, run.model))
    return wholes


# Torch fails here: its unsharded parameters are gone after the first backward.
OURS: dict[str, Callable[..., Any]] = {
    "several forwards then their backwards": several_forwards_then_their_backwards,
    "backward twice through a retained graph": backward_twice_through_a_retained_graph,
}
for name in OURS:
    del SITUATIONS[name]


def of_ours(function: Callable[..., Any]) -> Callable[..., Any]:
    OURS[function.__name__.replace("_", " ")] = function
    return function


class Fails(nn.Module):
    """Goes into a block and raises there, if told to."""

    armed = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = two_blocks()
        self.inner.blocks[1].up.register_forward_hook(self._fail)

    def _fail(self, *_: Any) -> None:
        if self.armed:
            raise ArithmeticError

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.inner(tokens)
        return loss


@of_ours
def forward_that_raises(lib: Any, **options: Any) -> Any:
    run = trainer(lib, build=Fails, **options)
    for step in range(2):
        run.step(step)
        Fails.armed = True
        with pytest.raises(ArithmeticError):
            run.model(run.batch(10 + step))
        Fails.armed = False
    return full_params(lib, run.model)


def _forward_before_the_optimizer(lib: Any, name: str, optimizer: str, **options: Any) -> Any:
    """What a forward left gathered is outdated when the optimizer has stepped."""
    if lib is not None:
        options |= strategy(name)(lib)
    run = trainer(lib, **options)
    # A fused optimizer does not tell autograd what it changes.
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, fused=optimizer == "fused")
    for step in range(2):
        run.loss(step).backward()
        run.loss(10 + step)
        run.update()
        with torch.no_grad():
            run.loss(20 + step)
        for param in run.model.parameters():
            param.data.mul_(0.9)
    return full_params(lib, run.model)


@of_ours
def forward_before_the_optimizer_of_FULL_SHARD(lib: Any, **options: Any) -> Any:
    return _forward_before_the_optimizer(lib, "FULL_SHARD", "fused", **options)


@of_ours
def forward_before_the_optimizer_of_SHARD_GRAD_OP(lib: Any, **options: Any) -> Any:
    return _forward_before_the_optimizer(lib, "SHARD_GRAD_OP", "plain", **options)


@of_ours
def forward_before_the_fused_optimizer_of_SHARD_GRAD_OP(lib: Any, **options: Any) -> Any:
    return _forward_before_the_optimizer(lib, "SHARD_GRAD_OP", "fused", **options)


@of_ours
def forward_before_the_fused_optimizer_of_NO_SHARD(lib: Any, **options: Any) -> Any:
    return _forward_before_the_optimizer(lib, "NO_SHARD", "fused", **options)


@of_ours
def cast_after_wrapping(lib: Any, **options: Any) -> Any:
    run = trainer(lib, **options)
    run.step(0)
    run.model.double()
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    for step in range(1, 3):
        run.step(step)
    return full_params(lib, run.model)


@of_ours
def cast_before_the_first_forward(lib: Any, **options: Any) -> Any:
    run = trainer(lib, **options)
    run.model.to(torch.float64)
    for step in range(2):
        run.step(step)
    return full_params(lib, run.model)


ALL = {**SITUATIONS, **ORIGINAL, **OURS}


def differences_from_torch(names: list[str], *forms: bool) -> list[str]:
    """In what situations end differently with torch, on this rank."""
    found = []
    for name in names:
        for use_orig_params in forms:
            ours, theirs = (
                ALL[name](library(api), use_orig_params=use_orig_params)
                for api in (FULLSHARD, TORCH)
            )
            try:
                if dist.get_world_size() == 2 and "norms" not in name:
                    assert_equal(ours, theirs)
                else:  # norms are sums of powers, which are computed in float64 here
                    rtol = 1e-2 if "low precision" in name else 1e-4
                    assert_close(ours, theirs, rtol=rtol, atol=1e-5)
            except AssertionError as error:
                found.append(f"{name}, {use_orig_params=}: {error}")
    return found


def differences_from_one_process(names: list[str]) -> list[str]:
    """In what situations end differently without a library and with all ranks' batches, on this rank."""
    found = []
    for name in names:
        expected = ALL[name](None)
        for use_orig_params in forms_of(name):
            ours = ALL[name](library(FULLSHARD), use_orig_params=use_orig_params)
            try:
                assert_close(ours, expected, rtol=1e-5, atol=1e-6)
            except AssertionError as error:
                found.append(f"{name}, {use_orig_params=}: {error}")
    return found


# Whether they have original parameters: other situations with the same hooks and forwards have them in both forms.
IN_ONE_FORM = {
    "forwards without backward between steps of SHARD GRAD OP": True,
    "forwards without backward between steps of NO SHARD": False,
    "compressing comm hooks": False,
    "comm hooks and mixed precision": True,
    "accumulation with comm hooks": True,
    "no sync around forward only": False,
    "zeroed in place": False,
    "forward before the optimizer of FULL SHARD": False,
    "forward before the optimizer of SHARD GRAD OP": False,
    "forward before the fused optimizer of NO SHARD": True,
    "cast before the first forward": True,
}


def forms_of(name: str) -> list[bool]:
    return [IN_ONE_FORM[name]] if name in IN_ONE_FORM else [False, True]


@pytest.mark.parametrize("name", SITUATIONS)
def test_two_ranks_end_as_with_torch_to_the_last_bit(world, name: str) -> None:
    assert not any(world(2).run(differences_from_torch, [name], *forms_of(name)))


def test_situations_in_one_form_are_there() -> None:
    assert IN_ONE_FORM.keys() <= ALL.keys()


@pytest.mark.parametrize("name", ORIGINAL)
def test_original_parameters_end_as_with_torch(world, name: str) -> None:
    assert not any(world(2).run(differences_from_torch, [name], True))


def test_three_ranks_end_as_one_process(world) -> None:
    assert not any(world(3).run(differences_from_one_process, list(OURS)))


class Optional(nn.Module):
    """Uses its second layer only if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 5), nn.Linear(3, 5)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.always(x) + (self.sometimes(x) if both else 0)


def gradients_of_a_layer_that_one_rank_uses() -> dict[str, Tensor]:
    """The layer was frozen when it was wrapped, so it is not where the others are."""
    torch.manual_seed(0)
    lib, model = library(FULLSHARD), Optional()
    model.sometimes.requires_grad_(False)
    wrapped = lib.FSDP(model, use_orig_params=True, device_id=torch.device("cpu"))
    model.sometimes.requires_grad_(True)
    wrapped(torch.ones(2, 3), dist.get_rank() == 0).sum().backward()
    with lib.FSDP.summon_full_params(wrapped, with_grads=True):
        return named_gradients(wrapped)


def test_ranks_may_use_different_parameters_of_all_kinds(world) -> None:
    for gradients in world(2).run(gradients_of_a_layer_that_one_rank_uses):
        assert_equal(
            gradients,
            {
                "always.weight": torch.full((5, 3), 2.0),
                "always.bias": torch.full((5,), 2.0),
                "sometimes.weight": torch.full((5, 3), 1.0),
                "sometimes.bias": torch.full((5,), 1.0),
            },
        )
