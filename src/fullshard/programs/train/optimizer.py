"""The optimizer, its learning rate over the run, and averages of the parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from fullshard.optim import EMA, AdamW8bit, Muon, ShardedOptimizer
from fullshard.optim.matrices.muon import hidden_matrices
from fullshard.programs.train.config import OptimizerSection, ScheduleSection
from fullshard.programs.train.sharded_model import ShardedModel

LR_FACTOR = "lr_factor"
"""Key in a group of parameters: their learning rate, as a multiple of the run's."""


def build_optimizer(section: OptimizerSection, model: ShardedModel) -> torch.optim.Optimizer:
    """Return an optimizer of the sharded parameters; matrices are decayed, others not.

    Call it while the sharded parameters are on the modules: between steps.
    """
    matrices, others = model.parameters()
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": section.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if section.name == "muon":
        return _build_muon(section, model, groups)
    groups = [group for group in groups if group["params"]]
    if section.name == "adamw8bit":  # it updates whole shards whatever `flat` says
        return AdamW8bit(
            groups,
            lr=section.lr,
            betas=section.betas,
            eps=section.eps,
            shard_over_replicas=section.shard_over_replicas,
        )
    optimizer_class, options = class_and_options(section)
    if section.flat:
        return ShardedOptimizer(
            optimizer_class, groups, shard_over_replicas=section.shard_over_replicas, **options
        )
    return optimizer_class(groups, **options)


def _build_muon(
    section: OptimizerSection, model: ShardedModel, groups: list[dict[str, Any]]
) -> Muon:
    """Return Muon of the hidden matrices, with AdamW for the others: each with its group's decay."""
    hidden = set(map(id, hidden_matrices(model.module)))
    both = [
        {
            **group,
            "params": params,
            "use_muon": use_muon,
            LR_FACTOR: section.muon_lr if use_muon else 1.0,
        }
        for group in groups
        for use_muon in (True, False)
        if (params := [p for p in group["params"] if (id(p) in hidden) is use_muon])
    ]
    return Muon(both, lr=section.lr, betas=section.betas, adamw_eps=section.eps)


def build_ema(section: OptimizerSection, model: nn.Module) -> EMA | None:
    """Return the averages of a sharded model's parameters, or None if there are to be none."""
    if section.ema is None:
        return None
    return EMA(model, decay=section.ema, warmup=section.ema_warmup)


def class_and_options(section: OptimizerSection) -> tuple[type[torch.optim.Optimizer], Any]:
    """Return the class of torch.optim and its arguments."""
    if section.name == "sgd":
        return torch.optim.SGD, {"lr": section.lr, "momentum": section.momentum}
    if section.name == "adagrad":
        return torch.optim.Adagrad, {"lr": section.lr, "eps": section.eps}
    adam = torch.optim.AdamW if section.name == "adamw" else torch.optim.Adam
    # Fused optimizers are fastest, and only these two of them take DTensors.
    return adam, {"lr": section.lr, "betas": section.betas, "eps": section.eps, "fused": True}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(LR_FACTOR, 1.0)


def learning_rate(step: int, *, highest: float, steps: int, section: ScheduleSection) -> float:
    """Return the rate of a step (from 0): it rises linearly, then falls by the kind of the schedule.

    It depends on nothing else, so a resumed run only needs its step.
    """
    warmup = section.warmup * steps if section.warmup < 1 else section.warmup
    warmup_steps = round(warmup)
    if step < warmup_steps:
        return highest * (step + 1) / warmup_steps
    # A run may have fewer steps than its warm-up, and may be prolonged beyond its steps.
    done = min((step - warmup_steps) / max(steps - warmup_steps, 1), 1.0)
    falling = {
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "linear": 1 - done,
        "constant": 1.0,
    }[section.kind]
    return highest * (section.last + (1 - section.last) * falling)
