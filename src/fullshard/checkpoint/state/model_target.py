"""A model that a checkpoint is loaded into.

faults      why the checkpoint does not fit, by names, shapes and dtypes; known before anything is read
requests    blocks of stored tensors, and views of the model's own memory to read them into
install     after everything was read: copies into tensors that files cannot be read into
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from fullshard.checkpoint import json_values
from fullshard.checkpoint.dtypes import keeps_meaning
from fullshard.checkpoint.source import MODEL, Source, TensorInfo
from fullshard.checkpoint.state.local_state import LocalModelState, LocalTensor
from fullshard.checkpoint.tensor_memory import fill
from fullshard.errors import CheckpointError, fault_paragraphs
from fullshard.layout.blocks import Block, whole


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """The blocks that this rank reads of one stored tensor."""

    key: str
    parts: list[tuple[Block, Tensor]]
    """Blocks of the model's tensor, and memory for each: strided, of the block's shape, on any device."""


@dataclass(slots=True)
class Faults:
    """Reasons why a checkpoint does not fit, by full names."""

    missing: list[str] = field(default_factory=list)
    """Names that the checkpoint lacks."""
    unexpected: list[str] = field(default_factory=list)
    """Names that only the checkpoint has."""
    shapes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    casts: list[str] = field(default_factory=list)
    """Tensors whose values a cast would change."""
    others: list[str] = field(default_factory=list)
    """Sentences about the optimizer."""
    kinds: list[str] = field(default_factory=list)
    """Reasons why this optimizer cannot take the saved optimizer's state."""

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) for each in fields(self))

    def __add__(self, other: Faults) -> Faults:
        pairs = {
            each.name: [*getattr(self, each.name), *getattr(other, each.name)]
            for each in fields(self)
        }
        return Faults(**pairs)

    def paragraphs(self) -> list[str]:
        """Return the paragraphs of an error that names all faults."""
        return [
            *fault_paragraphs(
                self.missing,
                "The checkpoint lacks these:",
                "Build the model, and the optimizer, that were saved.",
            ),
            *fault_paragraphs(
                self.unexpected,
                "The checkpoint has these, but the model and the optimizer do not:",
                "Build the model, and the optimizer, that were saved.",
            ),
            *fault_paragraphs(
                self.shapes,
                "These have other shapes in the checkpoint:",
                "Build the model with the sizes it was saved with.",
            ),
            *fault_paragraphs(
                self.dtypes,
                "These have other dtypes in the checkpoint:",
                "Convert the model first, or pass cast=True.",
            ),
            *fault_paragraphs(
                self.casts,
                "These cannot be cast: integers may be quantised weights, which need their scales, complex numbers would "
                "lose their imaginary parts, and smaller integers do not have all values:",
                "Convert the model's tensors to the dtypes of the checkpoint, or the checkpoint's to floating-point numbers.",
            ),
            *fault_paragraphs(
                self.others,
                "The optimizer's groups, or its state, differ from those in the checkpoint:",
                "Make the optimizer as it was when it was saved, and change its options afterwards.",
            ),
            *fault_paragraphs(
                self.kinds,
                "The optimizer cannot take the checkpoint's state:",
                "Make the optimizer that was saved, or load the model alone with without_optimizer=True.",
            ),
        ]


class ModelTarget:
    """A model that is loaded into."""

    def __init__(
        self,
        model: LocalModelState,
        source: Source,
        *,
        cast: bool | Collection[str] = False,
        only: Collection[str] | None = None,
    ) -> None:
        """Compare a model with a source.

        Args:
            model: This rank's part of the model.
            source: The checkpoint.
            cast: Let dtypes differ: of all tensors, or of those with these keys in the source.
            only: Names of the tensors to load; all by default, and then the source must have no others.
        """
        self.faults = Faults()
        self.notes: list[str] = []
        self.requests: list[ReadRequest] = []
        self._model = model
        self._cast = cast
        self._read: dict[str, Tensor] = {}
        """Tensors that are read into memory other than the model's, by key."""
        names = StoredNames(model, source.tied, _model_names(source.tensors))
        for tensor in model.tensors:
            name = tensor.key.removeprefix(MODEL)
            if only is not None and name not in only:
                continue
            stored = names.stored(name)
            if stored is None:
                self.faults.missing.append(name)
            else:
                self._request(name, tensor, MODEL + stored, source.tensors[MODEL + stored])
        if only is None:
            self.faults.unexpected += names.unknown

    def _request(self, name: str, tensor: LocalTensor, stored: str, info: TensorInfo) -> None:
        if tensor.key in self._model.extra_states:
            # Its module knows which shape and dtype it may have.
            self._read[tensor.key] = memory = torch.empty(info.shape, dtype=info.dtype)
            self.requests.append(ReadRequest(stored, [(whole(info.shape), memory)]))
            return
        if info.shape != tensor.shape:
            self.faults.shapes.append(f"{name}: {info.shape}, not {tensor.shape}")
        elif info.dtype != tensor.dtype and not self._may_cast(stored):
            self.faults.dtypes.append(f"{name}: {info.dtype}, not {tensor.dtype}")
        elif not keeps_meaning(info.dtype, tensor.dtype):
            self.faults.casts.append(f"{name}: {info.dtype} to {tensor.dtype}")
        elif tensor.local is not None:
            if tensor.key in self._model.copied:
                self._read[tensor.key] = tensor.local
            self.requests.append(ReadRequest(stored, list(tensor.parts())))

    def _may_cast(self, stored: str) -> bool:
        return self._cast if isinstance(self._cast, bool) else stored in self._cast

    @torch.no_grad()
    def install(self) -> None:
        """Copy the values read into other memory: into tensors that need them, and to `set_extra_state` of modules."""
        for key, value in self._read.items():
            module = self._model.extra_states.get(key)
            if module is None:
                fill(self._model.copied[key], value)
            else:
                kept: Any = module.get_extra_state()
                state = value if isinstance(kept, Tensor) else _extra_state(key, value)
                module.set_extra_state(state)


def _extra_state(key: str, value: Tensor) -> Any:
    try:
        if value.dtype != torch.uint8 or value.ndim != 1:
            raise ValueError(f"{value.dtype} of shape {tuple(value.shape)}")
        return json_values.decode(json.loads(bytes(value.tolist())))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"The extra state of a module must be a tensor or JSON text; {key} is neither: {error}"
        ) from error


class StoredNames:
    """The checkpoint's names of the model's tensors. A tied tensor may have another of its names in the checkpoint."""

    def __init__(
        self, model: LocalModelState, stored_tied: Mapping[str, str], stored: Iterable[str]
    ) -> None:
        self._stored = dict.fromkeys(stored)
        self._stored_tied = stored_tied
        self._own = {tensor.key.removeprefix(MODEL) for tensor in model.tensors}
        self._aliases: dict[str, list[str]] = {}
        for alias, name in model.tied.items():
            self._aliases.setdefault(name, []).append(alias)
        taken = {self.stored(name) for name in self._own}
        self.unknown = [
            name for name in self._stored if name not in taken and name not in model.tied
        ]
        """The checkpoint's names that the model does not have."""

    def stored(self, name: str) -> str | None:
        """Return the checkpoint's name of the model's tensor ``name``, or None."""
        for known in (name, *self._aliases.get(name, ())):
            for candidate in (known, self._stored_tied.get(known)):
                if candidate in self._stored:
                    return candidate
        return None


def _model_names(tensors: Iterable[str]) -> list[str]:
    return [key.removeprefix(MODEL) for key in tensors if key.startswith(MODEL)]
