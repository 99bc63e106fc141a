"""Full state dicts in one file of ``torch.save``: read in parts, without running code, and written whole.

Files have many layouts. These are understood:

    a model's state dict, bare
    {"model": ..., "optimizer": ..., anything else}       also under "state_dict", "model_state_dict" and
                                                          "optimizer_state_dict", "optim"

An optimizer's state may have names of parameters, as ``FSDP.optim_state_dict`` and ``get_optimizer_state_dict`` write
them, or numbers, as ``optimizer.state_dict()`` does.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullshard.checkpoint import json_values
from fullshard.checkpoint.source import (
    MODEL,
    OPTIMIZER,
    Source,
    TensorInfo,
    TensorRef,
    without_class,
)
from fullshard.checkpoint.sources.torch_items import fault_of, refuse_compressed, refuse_expanded
from fullshard.checkpoint.sources.verified_reads import raise_if_damaged, with_tensors
from fullshard.errors import CheckpointError
from fullshard.files import atomic_write, local_path
from fullshard.layout.blocks import Block, whole

_MODEL_NAMES = ("model", "state_dict", "model_state_dict")
_OPTIMIZER_NAMES = ("optimizer", "optimizer_state_dict", "optim")
_EXTRA = "extra"

ALWAYS_BYTES = 64 << 20
"""Bytes that the tensors of the smallest file may have: masks and the like may be expanded."""


class TorchFile:
    """A `Source` of one file. Its data are mapped into memory, and read when they are used."""

    format = "torch"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a file.

        Other entries than model and optimizer become `extra`. Values that a checkpoint cannot hold are left out, with a
        warning.

        Raises:
            CheckpointError: it is damaged, can only be loaded by running code, or has a layout that is not understood.
        """
        self.path = local_path(path)
        content = _content(self.path)
        model, optimizer, others = _sections(content, self.path)
        self._data, tied = _tensors_and_ties(model, self.path)
        self.tied: Mapping[str, str] = tied
        self.optimizer: Mapping[str, Any] | None = None
        if optimizer is not None:
            shapes = {key.removeprefix(MODEL): each.shape for key, each in self._data.items()}
            named = _by_names(optimizer, shapes, self.path)
            self.optimizer = {**named, "state": self._referring(named["state"])}
        self.tensors: Mapping[str, TensorInfo] = {
            key: TensorInfo(tensor.dtype, tuple(tensor.shape)) for key, tensor in self._data.items()
        }
        self.extra: Any = _storable(others, self.path)

    def read(self, key: str, wanted: Block, out: Tensor) -> None:
        """Copy a block from the file."""
        data = self._data[key]
        out.copy_(data[wanted.slices_in(whole(data.shape))])

    def verify(self, wanted: Iterable[tuple[str, Block]]) -> list[str]:
        """Return no faults: torch can be told to write no checksums, and the file does not say whether it did."""
        return []

    def close(self) -> None:
        """Close the file."""
        self._data = {}

    def _referring(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with references in place of tensors."""

        def without_tensors(value: Any, key: str) -> Any:
            if isinstance(value, Mapping):
                return {
                    name: without_tensors(each, f"{key}/{name}") for name, each in value.items()
                }
            if isinstance(value, list | tuple):
                items = [without_tensors(each, f"{key}/{i}") for i, each in enumerate(value)]
                return items if isinstance(value, list) else tuple(items)
            if not isinstance(value, Tensor):
                return value
            if fault := fault_of(value):
                raise CheckpointError(f"{key} in {self.path} {fault}.")
            if not value.ndim:
                return value.detach().clone()
            if key in self._data:
                raise CheckpointError(
                    f"States of an optimizer must have different keys; {self.path} has two with the key {key}."
                )
            self._data[key] = value.detach()
            return TensorRef(key)

        return {name: without_tensors(each, f"{OPTIMIZER}{name}") for name, each in state.items()}


def write_torch_file(source: Source, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint as a full state dict: ``{"model": ..., "optimizer": ..., "extra": ...}``, as far as it has these.

    The optimizer's state has names of parameters. Tied tensors have all their names and are stored once. The whole
    checkpoint must fit into memory. The file appears when it is complete.

    Raises:
        CheckpointError: the checkpoint is damaged, or the file cannot be written.
    """
    path = local_path(path)
    faults = source.verify((key, whole(info.shape)) for key, info in source.tensors.items())
    raise_if_damaged(source.path, faults)
    content: dict[str, Any] = {"model": _whole_model(source)}
    if source.optimizer is not None:
        content["optimizer"] = with_tensors(without_class(source.optimizer), source)
    if source.extra is not None:
        content[_EXTRA] = with_tensors(source.extra, source)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, durable=True) as file:
            torch.save(content, file)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error


def _whole_model(source: Source) -> dict[str, Tensor]:
    names = [key.removeprefix(MODEL) for key in source.tensors if key.startswith(MODEL)]
    model = {name: _whole(source, f"{MODEL}{name}") for name in names}
    return model | {name: model[stored] for name, stored in source.tied.items()}


def _whole(source: Source, key: str) -> Tensor:
    info = source.tensors[key]
    tensor = torch.empty(info.shape, dtype=info.dtype)
    source.read(key, whole(info.shape), tensor)
    return tensor


# --- the content of a file -------------------------------------------------------------------------------


def _content(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            refuse_compressed(file, nbytes)
        content = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
        json_values.check_size(content)
        refuse_expanded(content, nbytes, at_least=ALWAYS_BYTES)
        return content
    except Exception as error:  # a damaged file can raise anything
        # torch's reason, without its advice to load the file in a way that runs code.
        reason = str(error.__context__ or error).rstrip(". \n")
        raise CheckpointError(
            f"A file of torch.save may have only tensors, numbers, strings and containers of them; {path} was refused: "
            f"{reason}. No code in it was run. Save state dicts only, with torch.save of torch 1.6 or later."
        ) from error


def _sections(content: Any, path: Path) -> tuple[Mapping[str, Any], Any, dict[str, Any]]:
    """Return the model's state dict, the optimizer's or None, and all other entries."""
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise CheckpointError(
            f"A file of torch.save must have a state dict, or a dict of state dicts; {path} has a "
            f"{type(content).__name__}. Save model.state_dict()."
        )
    if content and all(isinstance(value, Tensor) for value in content.values()):
        return content, None, {}
    models = [name for name in _MODEL_NAMES if isinstance(content.get(name), Mapping)]
    optimizers = [name for name in _OPTIMIZER_NAMES if content.get(name) is not None]
    if len(models) != 1 or len(optimizers) > 1:
        raise CheckpointError(
            f"A file of torch.save must have tensors by name, or a dict of them under one of {', '.join(_MODEL_NAMES)} and "
            f"at most one optimizer under one of {', '.join(_OPTIMIZER_NAMES)}; {path} has {', '.join(content) or 'nothing'}. "
            'Save {"model": model_state_dict, "optimizer": optimizer_state_dict}.'
        )
    others = {
        name: value for name, value in content.items() if name not in (*models, *_OPTIMIZER_NAMES)
    }
    optimizer = content[optimizers[0]] if optimizers else None
    return content[models[0]], optimizer, others


def _tensors_and_ties(
    model: Mapping[str, Any], path: Path
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors by key, and further names of the same memory with its first name."""
    faults = [
        f"{name} {fault}" for name, value in model.items() if (fault := fault_of(value)) is not None
    ]
    if faults:
        raise CheckpointError(
            f"A full state dict must have whole, dense tensors by name; in {path}\n  "
            + "\n  ".join(faults)
            + "\nSave a full state dict. Convert what torch.distributed.checkpoint wrote from its folder."
        )
    data: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first_at: dict[Any, str] = {}
    for name, tensor in model.items():
        memory = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        first = first_at.setdefault(memory, name) if tensor.numel() else name
        if first != name:
            tied[name] = first
        else:
            data[f"{MODEL}{name}"] = tensor.detach()
    return data, tied


def _by_names(saved: Any, shapes: Mapping[str, torch.Size], path: Path) -> dict[str, Any]:
    """Return an optimizer's state dict with names of parameters; ``shapes`` are the model's."""
    state = saved.get("state") if isinstance(saved, Mapping) else None
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    if (
        not isinstance(state, Mapping)
        or not isinstance(groups, list)
        or not all(isinstance(each, Mapping) for each in (*groups, *state.values()))
        or not all(isinstance(group.get("params"), list | tuple) for group in groups)
        or not all(isinstance(each, int | str) for group in groups for each in group["params"])
    ):
        raise CheckpointError(
            f"An optimizer's state dict must have 'state' and 'param_groups'; that in {path} lacks them, or they are "
            "flattened. Save optimizer.state_dict(), or get_optimizer_state_dict without flattening."
        )
    params = [param for group in groups for param in group["params"]]
    different = set(params)
    unknown = [key for key in state if key not in different]
    if unknown or len(different) != len(params):
        raise CheckpointError(
            f"A parameter must be in one group of an optimizer, and state must belong to such a parameter; in {path} "
            f"there is state of {unknown[:10]}, and the groups have {len(params)} parameters, {len(different)} of them "
            "different. Save optimizer.state_dict() as it is."
        )
    names = _names_of(params, groups, state, shapes, path)
    return {
        "state": {names[param]: dict(each) for param, each in state.items()},
        "param_groups": [
            {
                **{key: value for key, value in group.items() if key != "param_names"},
                "params": [names[param] for param in group["params"]],
            }
            for group in groups
        ],
    }


def _names_of(
    params: Sequence[Any],
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Mapping[str, Any]],
    shapes: Mapping[str, torch.Size],
    path: Path,
) -> dict[Any, str]:
    """Return the names of an optimizer's parameters, by what its state dict calls them."""
    if all(isinstance(param, str) for param in params):
        return {param: param for param in params}
    # An optimizer that was given named parameters saves their names.
    saved = [name for group in groups for name in group.get("param_names") or ()]
    if len(saved) == len(set(saved)) == len(params) and all(
        isinstance(name, str) for name in saved
    ):
        return dict(zip(params, saved, strict=True))
    if len(shapes) != len(params):
        fault = (
            f"it has {len(params)} parameters and the model's state dict has {len(shapes)} tensors"
        )
    else:
        names = dict(zip(params, shapes, strict=True))
        misfits = [
            f"{key} of parameter {param} has shape {list(value.shape)} and {name} {list(shapes[name])}"
            for param, name in names.items()
            for key, value in state.get(param, {}).items()
            if isinstance(value, Tensor) and value.ndim and not _fits(value.shape, shapes[name])
        ]
        if not misfits:
            return names
        fault = ", ".join(misfits)
    raise CheckpointError(
        f"An optimizer that numbers its parameters must number the tensors of the model's state dict in its order, so that "
        f"their names are known; in {path} {fault}. Make the optimizer of model.named_parameters(), so that it saves "
        "names, or save what get_optimizer_state_dict returns."
    )


def _fits(state: torch.Size, param: torch.Size) -> bool:
    """Return whether a state can belong to a parameter: it has its shape, or one row or column of it (Adafactor)."""
    return len(state) == len(param) and all(a in (1, b) for a, b in zip(state, param, strict=True))


def _storable(others: Mapping[str, Any], path: Path) -> Any:
    """Return the entries that a checkpoint can hold; None if there are none, the extra itself if it is the only one."""
    kept = {}
    lost = []
    for name, value in others.items():
        faults: list[str] = []
        json_values.encode(value, name, faults)
        lost += faults
        if not faults:
            kept[name] = value
    if lost:
        warnings.warn(
            f"A checkpoint can hold what JSON can hold, and small tensors; left out of {path}: {', '.join(lost)}.",
            stacklevel=3,
        )
    return kept[_EXTRA] if kept.keys() == {_EXTRA} else kept or None
