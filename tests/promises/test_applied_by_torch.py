"""Functions of torch that change modules and parameters, on both APIs: activation checkpointing, optimizers in backward."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from fullshard import ConfigurationError, LifecycleError, UnsupportedError, wrap as policies
from tests.helpers.training import FULLSHARD, TORCH
from tests.helpers.wrapped_nets import TOKENS, Layer, library, make_net, wrap

FUNCTION, ORIG, FLAT = "fully_shard", "use_orig_params=True", "use_orig_params=False"
APIS = (FUNCTION, ORIG, FLAT)


def sharded(api: str, how: str, model: Any) -> Any:
    if how != FUNCTION:
        return wrap(api, model, use_orig_params=how == ORIG)
    fully_shard = library(api).fully_shard
    for layer in (model.first, model.second):
        fully_shard(layer)
    return fully_shard(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None, steps: int = 2) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randint(11, TOKENS.shape)).square().mean()
        loss.backward()
        losses.append(loss.item())
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return losses


# --- apply_activation_checkpointing ---------------------------------------------------------------

POLICIES: list[dict[str, Any]] = [
    {"auto_wrap_policy": policies.ModuleWrapPolicy({Layer})},
    {"auto_wrap_policy": policies.CustomPolicy(lambda each: isinstance(each, Layer))},
    {
        "auto_wrap_policy": functools.partial(
            policies.lambda_auto_wrap_policy, lambda_fn=lambda each: isinstance(each, Layer)
        )
    },
    {
        "auto_wrap_policy": functools.partial(
            policies.transformer_auto_wrap_policy, transformer_layer_cls={Layer}
        )
    },
    {"check_fn": lambda each: isinstance(each, Layer)},
]


def checkpointed(api: str, how: str, *, first: bool, by: dict[str, Any]) -> tuple[list[float], Any]:
    """Train a model of which a policy has chosen the checkpointed layers; returns losses and names of modules."""
    model: Any = make_net(tied=False)
    if first:
        apply_activation_checkpointing(model, **by)
    model = sharded(api, how, model)
    if not first:
        apply_activation_checkpointing(model, **by)
    chosen = [n for n, module in model.named_modules() if isinstance(module, CheckpointWrapper)]
    assert len(chosen) == 2
    runs: list[int] = []
    for module in model.modules():
        if isinstance(module, Layer):
            module.register_forward_pre_hook(lambda *_: runs.append(1))
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert len(runs) == 2 * 2 * 2, "each layer runs twice in each of two steps"
    return losses, [*chosen, *dict(model.named_parameters())]


def checkpointing() -> None:
    for index, (how, first) in enumerate(itertools.product(APIS, (True, False))):
        theirs = checkpointed(TORCH, how, first=first, by=POLICIES[-1])
        for number in (index, index + 2):  # each policy with each order
            by = POLICIES[number % len(POLICIES)]
            assert checkpointed(FULLSHARD, how, first=first, by=by) == theirs, (how, first, by)


def test_activation_checkpointing_takes_our_policies_before_and_after_sharding(world) -> None:
    world(2).run(checkpointing)


def test_a_policy_asked_about_one_module_takes_no_keyword_arguments() -> None:
    policy = policies.CustomPolicy(
        lambda each: {"preserve_rng_state": False} if isinstance(each, Layer) else False
    )
    with pytest.raises(UnsupportedError, match=r"keyword arguments for a Layer: .*preserve_rng"):
        apply_activation_checkpointing(
            make_net(), checkpoint_wrapper_fn=checkpoint_wrapper, auto_wrap_policy=policy
        )


# --- _apply_optimizer_in_backward -----------------------------------------------------------------


def in_backward(api: str, how: str, *, first: bool) -> list[float]:
    from torch.distributed.optim import _apply_optimizer_in_backward  # compiles for a second

    def apply(params: Any) -> None:
        _apply_optimizer_in_backward(torch.optim.SGD, params, {"lr": 0.1, "momentum": 0.9})

    model: Any = make_net(tied=False)
    if first:
        apply(list(model.parameters()))
    model = sharded(api, how, model)
    if not first:
        apply(list(model.parameters()))
    losses = train(model, None, steps=3)
    assert all(param.grad is None for param in model.parameters())
    return losses


def optimizers_in_backward() -> None:
    for how in APIS:
        model = sharded(TORCH, how, make_net(tied=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        expected = train(model, optimizer, steps=3)
        # Torch trains nothing with fully_shard, and refuses use_orig_params=False.
        assert in_backward(FULLSHARD, how, first=False) == expected
        if how == ORIG:
            assert in_backward(TORCH, how, first=False) == expected
            assert in_backward(FULLSHARD, how, first=True) == expected
        else:  # torch trains nothing, and says nothing
            with pytest.raises(
                (LifecycleError, ConfigurationError),
                match=r"afterwards|hooks|made before the model was sharded",
            ):
                in_backward(FULLSHARD, how, first=True)


def test_optimizers_in_backward_train_as_outside_of_it(world) -> None:
    world(2).run(optimizers_in_backward)
