"""A layer of which a policy says what is recomputed may have groups inside: the policy never sees what the engine does."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fullshard import fully_shard
from tests.helpers.compare import assert_close
from tests.helpers.training import whole

WIDTH = 8
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x).sigmoid()
        return x + gate * self.experts[0](x).tanh() + (1 - gate) * self.experts[1](x).tanh()


def make_net(seen: list[Any], *, keeps_all: bool) -> nn.Sequential:
    torch.manual_seed(0)

    def policy(context: Any, operation: Any, *_: object, **__: object) -> CheckpointPolicy:
        seen.append(operation)
        saved = keeps_all or operation in PRODUCTS
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    net = nn.Sequential(Layer(), Layer(), Layer())
    for layer in net:
        layer.forward = partial(  # type: ignore[method-assign]
            checkpoint,
            layer.forward,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, policy),
        )
    return net


def gradients(net: nn.Sequential) -> dict[str, Tensor]:
    for _ in range(2):
        net.zero_grad()
        net(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)).square().sum().backward()
    return {name: whole(param.grad) for name, param in net.named_parameters()}


def train(keeps_all: bool) -> None:
    seen_alone: list[Any] = []
    expected = gradients(make_net(seen_alone, keeps_all=keeps_all))
    for reshard in (True, False):
        seen: list[Any] = []
        net = make_net(seen, keeps_all=keeps_all)
        for layer in net:
            for expert in layer.experts:  # type: ignore[union-attr]
                fully_shard(expert, reshard_after_forward=reshard)
            fully_shard(layer)
        found = gradients(fully_shard(net))
        assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert seen == seen_alone


def test_layers_with_groups_inside_are_recomputed(world) -> None:
    world(2).run(train, False)


def test_policies_may_keep_everything(world) -> None:
    world(3).run(train, True)
