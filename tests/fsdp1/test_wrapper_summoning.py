"""Whole parameters of wrapped models for a while: `summon_full_params` and what is built on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import (
    ConfigurationError,
    FullyShardedDataParallel as FSDP,
    LifecycleError,
    MixedPrecision,
    ShardingStrategy,
    UnsupportedError,
)
from fullshard.engine.state import state_of
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.fake import fake_world
from tests.helpers.training import FULLSHARD
from tests.helpers.wrapped_nets import LIBRARIES, TOKENS, Layer, Net, library, make_net, wrap

LOW = {"param_dtype": torch.bfloat16, "buffer_dtype": torch.bfloat16}
ALL_OPTIONS: list[dict[str, Any]] = [
    {"use_orig_params": False},
    {"use_orig_params": True},
    {"strategy": "SHARD_GRAD_OP", "use_orig_params": True},
    {"strategy": "NO_SHARD"},
    {"strategy": "NO_SHARD", "use_orig_params": True},
    {"precision": LOW, "use_orig_params": True},
]


def params_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def whole(model: nn.Module) -> dict[str, Tensor]:
    with FSDP.summon_full_params(model, writeback=False):
        return params_of(model)


def at_rest(model: nn.Module, before: dict[str, Any]) -> None:
    """The same parameter objects as before are there, and nothing is gathered or shown."""
    now = dict(model.named_parameters())
    assert list(now) == list(before)
    assert all(now[name] is param for name, param in before.items())
    for module in model.modules():
        state = state_of(module)
        for group in state.groups if state else ():
            assert not group.full_params_installed
            assert not group.shards.are_replaced(on_modules=True)


# --- showing --------------------------------------------------------------------------------------


def showing() -> None:
    for options in ALL_OPTIONS:
        model = wrap(FULLSHARD, make_net(), **options)
        original = make_net()
        before = dict(model.named_parameters())
        for ran in (False, True):
            if ran:  # leaves something gathered, or whole, or has gradients
                model(TOKENS).float().sum().backward()
                with torch.no_grad():
                    model(TOKENS)
            for arguments in (
                {},
                {"writeback": False},
                {"writeback": False, "offload_to_cpu": True},
                {"offload_to_cpu": True},
                {"writeback": False, "rank0_only": True},
                {"writeback": False, "rank0_only": True, "offload_to_cpu": True},
            ):
                with FSDP.summon_full_params(model, **arguments):
                    if not arguments.get("rank0_only") or dist.get_rank() == 0:
                        assert_equal(params_of(model), params_of(original))
                        assert all(type(p) is nn.Parameter for p in model.parameters())
                        assert model.head.weight is model.embed.weight
                    else:
                        assert [id(p) for p in model.parameters()] == [
                            id(p) for p in before.values()
                        ]
                    assert not any("_fsdp" in name for name, _ in model.named_buffers())
                at_rest(model, before)
            for arguments in ({}, {"writeback": False}):
                with FSDP.summon_full_params(model, recurse=False, **arguments):
                    inner, outer = model.first.module, model.module
                    assert outer.norm.weight.shape == (5,)
                    if options.get("strategy") != "NO_SHARD" and options.get("use_orig_params"):
                        assert inner.linear.weight.ndim == 1
                    with FSDP.summon_full_params(model.first):
                        assert inner.linear.weight.shape == (7, 5)
                        assert dict(model.first.named_parameters())["linear.bias"].shape == (7,)
                        for again in (model, model.first):
                            with pytest.raises(LifecycleError, match="cannot be nested"):
                                with FSDP.summon_full_params(again):
                                    raise AssertionError("must not get here")
                        assert inner.linear.weight.shape == (7, 5)
                at_rest(model, before)
            around = nn.Sequential(nn.Linear(2, 2), model)
            with FSDP.summon_full_params(around):
                assert_equal(params_of(model), params_of(original))
            with torch.inference_mode(), FSDP.summon_full_params(model, writeback=False):
                assert_equal(params_of(model), params_of(original))
            at_rest(model, before)


def test_whole_parameters_are_shown_in_all_ways(world) -> None:
    world(2).run(showing)


def hybrid() -> None:
    for use_orig_params in (False, True):
        model = wrap(
            FULLSHARD,
            make_net(),
            strategy="HYBRID_SHARD",
            mesh=(2, 2),
            use_orig_params=use_orig_params,
        )
        assert_equal(whole(model), params_of(make_net()))
        with FSDP.summon_full_params(model), torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
        assert_equal(whole(model), {k: v * 2 for k, v in params_of(make_net()).items()})
        model.load_state_dict(make_net().state_dict())
        if use_orig_params:
            model(TOKENS).sum().backward()
            with FSDP.summon_full_params(model, with_grads=True):
                shown = {name: param.grad for name, param in model.named_parameters()}
            assert_close(shown, reference_gradients(make_net()), rtol=1e-5, atol=1e-6)


def reference_gradients(model: nn.Module) -> dict[str, Any]:
    model(TOKENS).sum().backward()
    return {name: param.grad for name, param in model.named_parameters()}


def test_whole_parameters_of_hybrid_strategies(world) -> None:
    world(4).run(hybrid)


# --- writing --------------------------------------------------------------------------------------


def writing() -> None:
    for options in ALL_OPTIONS:
        model = wrap(FULLSHARD, make_net(), **options)
        reference = make_net()
        before = dict(model.named_parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for ran in (False, True):
            if ran:
                model.eval()
                model(TOKENS)  # with SHARD_GRAD_OP, parameters stay gathered
                model.train()
            for writeback in (False, True):
                with FSDP.summon_full_params(model, writeback=writeback):
                    change(model)
                if writeback:
                    change(reference)
                assert_equal(whole(model), params_of(reference))
                at_rest(model, before)
                with torch.no_grad():
                    assert_close(model(TOKENS).float(), reference(TOKENS), rtol=5e-2, atol=2e-1)
                    if "precision" not in options:
                        assert_close(model(TOKENS), reference(TOKENS), rtol=1e-5, atol=1e-5)
        # An optimizer made before goes on, and one made inside is of the parameters that stay.
        model(TOKENS).float().sum().backward()
        optimizer.step()
        assert not torch.equal(whole(model)["norm.bias"], reference.norm.bias)
        if options.get("use_orig_params"):
            with FSDP.summon_full_params(model):
                inside = torch.optim.SGD(model.parameters(), lr=0.1)
            at_rest(model, before)
            assert inside.param_groups[0]["params"] == list(model.parameters())


@torch.no_grad()
def change(model: Any) -> None:
    """In every way in which users change parameters."""
    model.embed.weight.add_(0.25)
    model.first.linear.weight.data = model.first.linear.weight.data * 1.5
    model.first.linear.bias.data = torch.full((7,), 0.125)
    model.second.linear.weight = nn.Parameter(torch.full((7, 5), 0.2))
    model.alias.weight = nn.Parameter(torch.full((5,), 0.8))  # under its second name
    model.norm.weight = model.alias.weight
    nn.init.constant_(model.second.back.weight, -0.1)


def test_what_is_written_is_kept_and_used(world) -> None:
    world(2).run(writing)


def tied_and_removed() -> None:
    for use_orig_params in (False, True):
        model = wrap(FULLSHARD, make_net(), use_orig_params=use_orig_params)
        before = dict(model.named_parameters())
        with FSDP.summon_full_params(model):
            model.head.weight = nn.Parameter(torch.full((11, 5), 3.0))  # tied to the embedding
            del model.module.norm.bias
            model.first.module.linear.weight = nn.Parameter(torch.ones(7, 5, dtype=torch.double))
        at_rest(model, before)
        now, expected = whole(model), params_of(make_net())
        assert_equal(now["embed.weight"], torch.full((11, 5), 3.0))
        assert_equal(now["norm.bias"], expected["norm.bias"])
        assert_equal(now["first.linear.weight"], torch.ones(7, 5))


def test_tied_parameters_can_be_assigned_under_any_name(world) -> None:
    world(2).run(tied_and_removed)


# --- gradients ------------------------------------------------------------------------------------


def gradients() -> None:
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        shown: dict[str, Any] = {}
        for api in LIBRARIES:
            model = wrap(api, make_net(), strategy=strategy, use_orig_params=True)
            model(TOKENS).sum().backward()
            with library(api).FullyShardedDataParallel.summon_full_params(model, with_grads=True):
                shown[api] = {
                    name: param.grad.clone()
                    for name, param in model.named_parameters()
                    if param.grad is not None
                }
        assert_close(shown[FULLSHARD], shown["torch"], rtol=1e-6, atol=1e-7)
        assert_close(shown[FULLSHARD], reference_gradients(make_net()), rtol=1e-5, atol=1e-6)
        gradients_written(model)


def gradients_written(model: Any) -> None:
    """Of a model with gradients."""
    rank = dist.get_rank()
    model.zero_grad()
    calls: list[Tensor] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(calls.append)
    model(TOKENS).sum().backward()
    num_calls = len(calls)
    before = {name: param.grad for name, param in model.named_parameters()}
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        for param in model.parameters():
            param.grad.fill_(9)
    assert {name: param.grad for name, param in model.named_parameters()} == before
    with FSDP.summon_full_params(model, with_grads=True):
        model.norm.weight.grad = None
        model.norm.bias.grad = torch.arange(5.0)
        for param in model.first.parameters():
            param.grad.fill_(7)
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        assert model.norm.weight.grad is None
        assert_equal(model.norm.bias.grad, torch.arange(5.0))
        assert all(bool((param.grad == 7).all()) for param in model.first.parameters())
        assert model.second.linear.bias.grad.shape == (7,)
    # Gradients that were None everywhere, and then are made by hand.
    model.zero_grad()
    with FSDP.summon_full_params(model, with_grads=True):
        assert all(param.grad is None for param in model.parameters())
        for param in model.parameters():
            param.grad = torch.full_like(param, 2.0)
    assert len(calls) == num_calls, "hooks are for backward"
    for param in model.parameters():
        if param.numel():
            assert param.grad.shape == param.shape and bool((param.grad == 2).all())
        else:
            assert param.grad is None
    # What backward makes of whole parameters is not mixed up with sharded gradients.
    kept = [param.grad for param in model.parameters()]
    model.module.norm.weight.grad = kept[-2] = None
    with FSDP.summon_full_params(model):
        model.module.norm.weight.sum().backward()
        assert model.module.norm.weight.grad.shape == (5,)
    assert [param.grad for param in model.parameters()] == kept
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with FSDP.summon_full_params(model):
        model.zero_grad()
    assert all(param.grad is None for param in model.parameters()), rank


def low_precision_gradients() -> None:
    """Ranks that hold nothing of a parameter show its gradient in the same dtype."""
    precision = {**LOW, "keep_low_precision_grads": True}
    model = wrap(FULLSHARD, make_net(), precision=precision, use_orig_params=True)
    model(TOKENS).sum().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        assert {param.grad.dtype for param in model.parameters()} == {torch.bfloat16}
        for param in model.parameters():
            param.grad = torch.ones_like(param.grad)
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    assert grads and all(bool((grad == 1).all()) for grad in grads)
    assert {grad.dtype for grad in grads} == {torch.bfloat16}


def all_gradients() -> None:
    gradients()
    low_precision_gradients()


def test_gradients_are_shown_whole_and_written_back(world) -> None:
    world(2).run(all_gradients)


# --- computing ------------------------------------------------------------------------------------


def computing() -> None:
    """As for generating text: forward within the context, with whole parameters."""
    expected = make_net()(TOKENS)
    for options in (*ALL_OPTIONS[:5], {"layers": False}):
        for ran in (False, True):
            model = wrap(FULLSHARD, make_net(), **options)
            before = dict(model.named_parameters())
            if ran:
                model(TOKENS).sum().backward()
            for recurse in (True, False):
                with FSDP.summon_full_params(model, recurse=recurse, writeback=False):
                    with torch.no_grad():
                        assert_close(model(TOKENS), expected, rtol=1e-6, atol=1e-6)
                        assert_close(model.module(TOKENS), expected, rtol=1e-6, atol=1e-6)
                at_rest(model, before)
            if options.get("layers", True):
                with FSDP.summon_full_params(model.first, writeback=False), torch.no_grad():
                    assert_close(model(TOKENS), expected, rtol=1e-6, atol=1e-6)
                at_rest(model, before)
            model.zero_grad()
            model(TOKENS).sum().backward()
            at_rest(model, before)
    model = wrap(FULLSHARD, make_net())
    with FSDP.summon_full_params(model, rank0_only=True, writeback=False):
        if dist.get_rank() == 0:
            assert_close(model(TOKENS), expected, rtol=1e-6, atol=1e-6)
        else:
            with pytest.raises(LifecycleError, match="only rank 0"):
                model(TOKENS)
    assert_close(model(TOKENS), expected, rtol=1e-6, atol=1e-6)


def test_forward_computes_with_summoned_parameters(world) -> None:
    world(2).run(computing)


def between_forward_and_backward() -> None:
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        model = wrap(FULLSHARD, make_net(), strategy=strategy, use_orig_params=True)
        before = dict(model.named_parameters())
        for step in range(3):
            output = model(TOKENS)
            # The parameters are those that the optimizer knows, also where memory stays gathered.
            assert [id(p) for p in model.parameters()] == [id(p) for p in before.values()]
            model.zero_grad()
            if step == 2:
                assert_equal(whole(model), params_of(make_net()))
            output.sum().backward()
        with FSDP.summon_full_params(model, with_grads=True):
            actual = {name: param.grad for name, param in model.named_parameters()}
            assert_close(actual, reference_gradients(make_net()), rtol=1e-5, atol=1e-6)


def test_between_forward_and_backward_parameters_are_the_sharded_ones(world) -> None:
    world(2).run(between_forward_and_backward)


# --- apply ----------------------------------------------------------------------------------------


def applying() -> None:
    @torch.no_grad()
    def initialise(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            param.copy_(torch.arange(param.numel()).view(param.shape) / 10)
        if isinstance(module, nn.Linear):
            assert module.weight.ndim == 2
            module.bias = None if module.bias is None else nn.Parameter(torch.ones(7))

    expected = make_net().apply(initialise)
    for options in ALL_OPTIONS:
        model = wrap(FULLSHARD, make_net(), **options)
        before = dict(model.named_parameters())
        assert model.apply(initialise) is model
        at_rest(model, before)
        assert_equal(whole(model), params_of(expected))


def test_apply_changes_whole_parameters(world) -> None:
    world(2).run(applying)


# --- refused --------------------------------------------------------------------------------------


def resized() -> list[str]:
    texts = []
    for use_orig_params in (False, True):
        model = wrap(FULLSHARD, make_net(), use_orig_params=use_orig_params)
        before = dict(model.named_parameters())
        with pytest.raises(ConfigurationError) as error:
            with FSDP.summon_full_params(model), torch.no_grad():
                model.embed.weight.zero_()
                model.norm.weight.data = torch.ones(4)
                model.first.linear.weight.data = torch.ones(5, 7)
                model.second.linear.weight.zero_()
        texts.append(str(error.value))
        at_rest(model, before)
        expected = params_of(make_net())
        expected["second.linear.weight"].zero_()  # another wrapper's
        assert_equal(whole(model), expected)
        with pytest.raises(KeyError, match="on purpose"):
            with FSDP.summon_full_params(model), torch.no_grad():
                model.second.linear.weight.fill_(1)
                raise KeyError("on purpose")
        at_rest(model, before)
        expected["second.linear.weight"].fill_(1)
        assert_equal(whole(model), expected)
        model(TOKENS).sum().backward()
    return texts


def test_other_shapes_are_refused_and_everything_is_put_back(world) -> None:
    first, second = world(2).run(resized)
    assert first == second
    for text in first:
        assert "norm.weight: (4,) instead of (5,)" in text
        assert "first.linear.weight: (5, 7) instead of (7, 5)" in text


class Summons(nn.Module):
    """Summons the model's parameters in its own forward, or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.model: list[nn.Module] = []
        self.acts: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.act("forward")
        y: Tensor = self.layer(x)
        y.register_hook(lambda _: self.act("backward"))
        return y * 2

    def act(self, where: str) -> None:
        (model,) = self.model
        for call in (
            lambda: FSDP.summon_full_params(model).__enter__(),
            model.state_dict,
            lambda: model.load_state_dict({}),
            lambda: model.no_sync().__enter__(),
            lambda: model.clip_grad_norm_(1.0),
            lambda: model.apply(lambda module: None),
        ):
            with pytest.raises(LifecycleError, match="within forward or backward"):
                call()
        self.acts.append(where)


def test_not_within_forward_or_backward() -> None:
    with fake_world(2):
        module = Summons()
        model = FSDP(module, use_orig_params=True)
        module.model.append(model)
        model(torch.ones(2, 3)).sum().backward()
        assert module.acts == ["forward", "backward"]
        module.model.clear()


def test_arguments_that_exclude_each_other_are_refused() -> None:
    with fake_world(2):
        for use_orig_params in (False, True):
            model = FSDP(Net(), use_orig_params=use_orig_params)
            before = dict(model.named_parameters())
            with pytest.raises(NotImplementedError, match="writeback=False"):
                FSDP.summon_full_params(model, rank0_only=True).__enter__()
            with pytest.raises(UnsupportedError, match="offload_to_cpu=True exclude"):
                FSDP.summon_full_params(model, with_grads=True, offload_to_cpu=True).__enter__()
            if not use_orig_params:
                with pytest.raises(NotImplementedError, match="use_orig_params=True"):
                    FSDP.summon_full_params(model, with_grads=True).__enter__()
            with FSDP.summon_full_params(model):
                with pytest.raises(LifecycleError, match="moved or cast"):
                    model.half()
            at_rest(model, before)


def test_full_precision_is_shown_whatever_is_computed_in() -> None:
    with fake_world(2):
        model = FSDP(
            Layer(),
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        )
        model(torch.ones(2, 5))
        with FSDP.summon_full_params(model):
            assert {param.dtype for param in model.parameters()} == {torch.float32}
