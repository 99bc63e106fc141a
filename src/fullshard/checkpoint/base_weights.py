"""Checkpoints of only what training changes, and the base: the checkpoint that has the frozen parameters.

Such a checkpoint (of adapters, say) leaves frozen parameters out, and names the base that has them. To read it is to read
the base with the checkpoint laid over it. The base is known again by its **digest**: all names, shapes and dtypes, and the
first elements of every tensor. It does not depend on the format, so a converted base is the same base. Reading all
elements would take as long as loading them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fullshard.checkpoint.local_state import LocalTensor
from fullshard.checkpoint.manifest import BaseRecord
from fullshard.checkpoint.source import MODEL, Source, TensorInfo
from fullshard.checkpoint.tensor_files import memory_of
from fullshard.errors import CheckpointError, fault_paragraphs
from fullshard.plan.blocks import Block

SAMPLED = 1024
"""Most elements of a tensor that a digest has, and that are compared with a model."""


@dataclass(frozen=True, slots=True)
class Base:
    """A checkpoint that has the frozen parameters of a model; see `formats.base_of`."""

    path: Path
    digest: str
    """Digest of its model; see `digest_of`."""

    def record(self, checkpoint: Path) -> BaseRecord:
        """Return what a checkpoint that leaves the frozen parameters out says of it."""
        relative = os.path.relpath(self.path, os.path.abspath(checkpoint))
        return BaseRecord(str(self.path), relative, self.digest)


def digest_of(source: Source) -> str:
    """Return a text that is the same for checkpoints with the same model."""
    digest = hashlib.sha256()
    for key in sorted(key for key in source.tensors if key.startswith(MODEL)):
        info = source.tensors[key]
        digest.update(json.dumps([key, str(info.dtype), info.shape]).encode())
        for block in _first_elements((0,) * len(info.shape), info.shape):
            out = torch.empty(block.shape, dtype=info.dtype)
            source.read(key, block, out)
            digest.update(memory_of(out))
    return digest.hexdigest()


def _first_elements(start: Sequence[int], shape: Sequence[int]) -> Iterator[Block]:
    """Yield a block of the first elements of a block, if it has any."""
    sizes: list[int] = []
    room = SAMPLED
    for size in reversed(shape):
        sizes.insert(0, min(size, room))
        room //= max(sizes[0], 1)
        room = max(room, 1)
    if 0 not in sizes:
        yield Block(tuple(start), tuple(sizes))


class OverlaidSource:
    """A `Source` of a checkpoint that leaves frozen parameters out, with these from its base. Closing it closes both."""

    def __init__(self, source: Source, base: Source) -> None:
        self.path, self.format, self.extra = source.path, source.format, source.extra
        self.optimizer = source.optimizer
        self._source, self._base = source, base
        own = source.tensors.keys()
        known = {key.removeprefix(MODEL) for key in own} | source.tied.keys()
        self.from_base = frozenset(
            key
            for key in base.tensors
            if key.startswith(MODEL) and key.removeprefix(MODEL) not in known
        )
        """Keys of the tensors that the base has."""
        self.tensors: Mapping[str, TensorInfo] = {
            **source.tensors,
            **{key: base.tensors[key] for key in self.from_base},
        }
        from_base = {
            name: stored for name, stored in base.tied.items() if MODEL + stored in self.from_base
        }
        self.tied: Mapping[str, str] = {**from_base, **source.tied}

    def read(self, key: str, wanted: Block, out: Tensor) -> None:
        """Read a block from the checkpoint that has it."""
        (self._base if key in self.from_base else self._source).read(key, wanted, out)

    def verify(self, wanted: Iterable[tuple[str, Block]]) -> list[str]:
        """Check the data of both."""
        blocks = list(wanted)
        return [
            *self._source.verify([each for each in blocks if each[0] not in self.from_base]),
            *self._base.verify([each for each in blocks if each[0] in self.from_base]),
        ]

    def close(self) -> None:
        """Close both."""
        self._source.close()
        self._base.close()


def find_base(record: BaseRecord, checkpoint: Path, given: Path | None) -> Path:
    """Return where the base of a checkpoint is.

    Raises:
        CheckpointError: it is not there.
    """
    places = [Path(record.path), checkpoint / record.relative] if given is None else [given]
    for place in places:
        if place.exists():
            return place
    raise CheckpointError(
        f"{checkpoint} has only what training has changed, and needs its base, which has the frozen parameters. It is not at "
        f"{' or '.join(dict.fromkeys(map(os.path.abspath, places)))}. Pass the path of the base: load(..., base=...)."
    )


def check_digest(record: BaseRecord, checkpoint: Path, base: Source) -> None:
    """Raise unless ``base`` is the base that a checkpoint was saved with."""
    if digest_of(base) != record.digest:
        raise CheckpointError(
            f"The base of {checkpoint} must have the frozen parameters that it was trained with; {base.path} has other names, "
            "shapes, dtypes or values. Nothing was loaded. Pass the path of the right base: load(..., base=...)."
        )


def check_frozen(frozen: Iterable[LocalTensor], base: Source) -> None:
    """Raise unless a base has this rank's part of the frozen parameters, as far as their first elements show.

    Raises:
        CheckpointError: names, shapes or values differ; all are named.
    """
    missing, different = [], []
    for tensor in frozen:
        name = tensor.key.removeprefix(MODEL)
        key = MODEL + base.tied.get(name, name)
        info = base.tensors.get(key)
        if info is None:
            missing.append(name)
        elif info.shape != tensor.shape:
            different.append(f"{name}: {info.shape}, not {tensor.shape}")
        elif not all(_are_equal(base, key, block, own) for block, own in tensor.parts()):
            different.append(f"{name}: other values")
    paragraphs = [
        *fault_paragraphs(missing, "The base lacks these frozen parameters:", ""),
        *fault_paragraphs(different, "These frozen parameters differ from those of the base:", ""),
    ]
    if paragraphs:
        raise CheckpointError(
            f"The base {base.path} must have the frozen parameters of the model. Nothing was saved.\n"
            + "".join(paragraphs)
            + "Pass the checkpoint that they were loaded from, or save the model as a base first: save(base, model)."
        )


def _are_equal(base: Source, key: str, block: Block, own: Tensor) -> bool:
    for sample in _first_elements(block.start, block.shape):
        out = torch.empty(sample.shape, dtype=base.tensors[key].dtype)
        base.read(key, sample, out)
        mine = own[sample.slices_in(block)].to("cpu")
        return torch.equal(out.to(mine.dtype), mine)
    return True
