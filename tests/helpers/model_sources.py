"""Models of a `ModelSource` through every API, as a run builds them; on the CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from fullshard import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from fullshard.checkpoint import save
from fullshard.programs.train.export import export_checkpoint
from fullshard.programs.train.model_source import ModelSource
from fullshard.programs.train.weights import materialise
from fullshard.wrap import ModuleWrapPolicy

CPU = torch.device("cpu")


def unsharded(source: ModelSource) -> nn.Module:
    model = source.build()
    materialise(model, CPU)
    return model


def sharded(source: ModelSource, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    policy = MixedPrecisionPolicy() if policy is None else policy
    model = source.build()
    for block in source.blocks(model):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    materialise(model, CPU)
    return model


def wrapped(source: ModelSource, *, use_orig_params: bool = False) -> nn.Module:
    model = source.build()
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(block) for block in source.blocks(model)}),
        param_init_fn=partial(materialise, device=CPU, recurse=False),
        device_id=CPU,
        use_orig_params=use_orig_params,
    )


def wrapped_with_original_params(source: ModelSource) -> nn.Module:
    return wrapped(source, use_orig_params=True)


def export(source: ModelSource, model: nn.Module, folder: Path) -> None:
    """Save a model, and export the checkpoint as a run does."""
    checkpoint = folder.with_name(f"{folder.name}-checkpoint")
    save(checkpoint, model)
    export_checkpoint(checkpoint, source.export_form(), folder)
