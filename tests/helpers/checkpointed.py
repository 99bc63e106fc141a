"""Training that can be saved and loaded: one model and optimizer for both APIs, and all of its state, whole.

What is compared is gathered by other means than checkpoints: DTensors by themselves, the wrapper's by its state
dicts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh

from fullshard import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from fullshard.optim import ShardedOptimizer
from fullshard.wrap import ModuleWrapPolicy
from tests.helpers.models import Block, ModelOptions, make_decoder, tokens_for
from tests.helpers.training import all_whole, batch_of, mine

ODD = ModelOptions(depth=2, scalar=True, tied=True)
"""Uneven rows, ranks without any, 0-d and tied parameters."""

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "AdamW": lambda params: optim.AdamW(params, lr=1e-2, fused=True),
    "SGD": lambda params: optim.SGD(params, lr=1e-2, momentum=0.9, foreach=True),
    "view": lambda params: ShardedOptimizer(optim.AdamW, params, lr=1e-2),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model is sharded and trained; a value, so that it travels to the ranks."""

    api: str = "functional"
    """functional, wrapper (the user's parameters), flat (FlatParameters) or plain (not sharded at all)."""
    replicas: int = 1
    """More than one: HSDP."""
    optimizer: str = "AdamW"
    mixed: bool = False
    """bf16 parameters for compute, fp32 at rest."""
    model: ModelOptions = ODD

    def build(self, seed: int = 0) -> tuple[nn.Module, optim.Optimizer]:
        """The model, sharded, and its optimizer."""
        model: nn.Module = make_decoder(self.model, seed)
        if self.api != "plain":
            model = self._functional(model) if self.api == "functional" else self._wrapped(model)
        trainable = [param for param in model.parameters() if param.requires_grad]
        return model, OPTIMIZERS[self.optimizer](trainable)

    def _mesh(self) -> Any:
        world = dist.get_world_size()
        if self.replicas == 1:
            return init_device_mesh("cpu", (world,))
        return init_device_mesh(
            "cpu", (self.replicas, world // self.replicas), mesh_dim_names=("replicate", "shard")
        )

    def _functional(self, model: Any) -> nn.Module:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if self.mixed else None
        options: dict[str, Any] = {"mesh": self._mesh()}
        if policy is not None:
            options["mp_policy"] = policy
        for block in model.blocks:
            fully_shard(block, **options)
        sharded: nn.Module = fully_shard(model, **options)
        return sharded

    def _wrapped(self, model: nn.Module) -> nn.Module:
        options: dict[str, Any] = {}
        if self.replicas > 1:
            options["device_mesh"] = self._mesh()
            options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
        if self.mixed:
            options["mixed_precision"] = MixedPrecision(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            use_orig_params=self.api == "wrapper",
            **options,
        )


def train(model: nn.Module, optimizer: optim.Optimizer, steps: range) -> list[float]:
    """Losses of this rank's rows."""
    losses = []
    for step in steps:
        batch = mine(batch_of(step)) if dist.is_initialized() else tokens_for(step, 2)
        loss = model(batch)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole_state(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    """Parameters and optimizer state by names, whole, on every rank."""
    if not isinstance(model, FullyShardedDataParallel):
        names: dict[Any, str] = {param: name for name, param in model.named_parameters()}
        tensors: dict[Any, Any] = {("model", k): v for k, v in model.state_dict().items()}
        states: dict[str, dict[str, Any]] = {}
        for param, state in optimizer.state.items():
            states[names[param]] = dict(state)
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[names[param], key] = value
        found: dict[str, dict[str, Any]] = {"model": {}, **states}
        for (name, key), value in all_whole(tensors).items():
            found[name][key] = value
        return {"model": found.pop("model"), "optimizer": found}
    kind = StateDictType.FULL_STATE_DICT
    with FullyShardedDataParallel.state_dict_type(model, kind):
        states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        return {"model": all_whole(model.state_dict()), "optimizer": states}
