"""Contents of a checkpoint that `inspect` prints, as JSON: the same for people and for programs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from fullshard.checkpoint import json_values
from fullshard.checkpoint.source import AVERAGES, CLASS, MODEL, OPTIMIZER, Source
from fullshard.checkpoint.sources.stored_checkpoint import StoredCheckpoint
from fullshard.programs.checkpoint_tool.tensor_locations import locate_tensors


def describe(source: Source, *, pieces: bool = False) -> dict[str, Any]:
    """Return everything that is known without reading tensors; with ``pieces``, also the file and bytes of every piece."""
    locations = locate_tensors(source)
    tensors = {}
    for key, info in source.tensors.items():
        numel = math.prod(info.shape)
        tensors[key] = {
            "dtype": str(info.dtype).removeprefix("torch."),
            "shape": list(info.shape),
            "elements": numel,
            "bytes": numel * info.dtype.itemsize,
            "pieces": locations.num_pieces(key),
        }
        if pieces:
            tensors[key]["places"] = [dataclasses.asdict(piece) for piece in locations.pieces(key)]
    optimizer = source.optimizer
    return {
        "path": str(source.path),
        "format": source.format,
        "written": _written(source),
        "files": {
            str(file.relative_to(source.path)): file.stat().st_size for file in locations.files()
        }
        if source.path.is_dir()
        else {source.path.name: source.path.stat().st_size},
        "model": _totals(tensors[key] for key in tensors if key.startswith(MODEL)),
        "optimizer": None
        if optimizer is None
        else {
            **_totals(tensors[key] for key in tensors if key.startswith(OPTIMIZER)),
            "class": next(iter(optimizer.get(CLASS, ())), None),
            "ema_updates": optimizer.get(AVERAGES, {}).get("updates"),
            "groups": [
                {
                    **{
                        name: json_values.encode(value, name, [])
                        for name, value in group.items()
                        if name != "params"
                    },
                    "params": len(group["params"]),
                }
                for group in optimizer["param_groups"]
            ],
        },
        "tied": dict(source.tied),
        "extra": json_values.encode(source.extra, "extra", []),
        "tensors": tensors,
    }


def _totals(tensors: Iterable[dict[str, Any]]) -> dict[str, int]:
    counted = list(tensors)
    return {
        "tensors": len(counted),
        "elements": sum(each["elements"] for each in counted),
        "bytes": sum(each["bytes"] for each in counted),
    }


def _written(source: Source) -> dict[str, Any] | None:
    if not isinstance(source, StoredCheckpoint):
        return None
    manifest = source.manifest
    return {
        "created": manifest.created,
        "fullshard": manifest.fullshard,
        "torch": manifest.torch,
        "world": manifest.world,
        "serial": manifest.serial,
        "base": None if manifest.base is None else manifest.base.path,
    }
