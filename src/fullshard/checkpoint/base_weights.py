"""Checkpoints of only what training changes, and the base: the checkpoint that has the frozen parameters.

Such a checkpoint (of adapters, say) leaves frozen parameters out, and names the base that has them. To read it is to read
the base with the checkpoint laid over it. The base is known again in three steps:

    digest     of all names, shapes and dtypes, and of the first elements of every tensor: quick, refuses most others
    save       the very save of our own format, by the checksums of its files: then its data are verified as they are read
    content    otherwise the digest of all elements, which does not depend on the format: a converted base is the same base

For the last one ranks read the base once, together.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from fullshard.checkpoint.manifest import BaseRecord
from fullshard.checkpoint.rank_group import RankGroup
from fullshard.checkpoint.source import MODEL, Source, TensorInfo
from fullshard.checkpoint.sources.stored_checkpoint import StoredCheckpoint
from fullshard.checkpoint.staging import Staging, rows_of
from fullshard.checkpoint.state.local_state import LocalTensor
from fullshard.checkpoint.tensor_files import memory_of
from fullshard.checkpoint.tensor_memory import contiguous_values
from fullshard.errors import CheckpointError, fault_paragraphs
from fullshard.files import local_path
from fullshard.layout.blocks import Block, whole

SAMPLED = 1024
"""Most elements of a tensor that the quick digest has."""

AT_ONCE = 1 << 20
"""Elements of a tensor that are read at once. The digest of the content depends on it."""


@dataclass(frozen=True, slots=True)
class Base:
    """A checkpoint that has the frozen parameters of a model; see `formats.base_of`."""

    path: Path
    digest: str
    """Digest of the first elements of its model."""
    content: str
    """Digest of all elements of its model."""
    save: str
    """Identity of a save of our own format, different from that of all others; empty for other formats."""

    def __post_init__(self) -> None:
        local_path(self.path)

    def record(self, checkpoint: Path) -> BaseRecord:
        """Return the record of it in a checkpoint that leaves the frozen parameters out."""
        relative = os.path.relpath(self.path, os.path.abspath(checkpoint))
        return BaseRecord(str(self.path), relative, self.digest, self.content, self.save)


def quick_digest(source: Source) -> str:
    """Return a text that is the same for checkpoints with the same model, and different for most others."""
    digest = hashlib.sha256()
    for key in sorted(key for key in source.tensors if key.startswith(MODEL)):
        info = source.tensors[key]
        digest.update(json.dumps([key, str(info.dtype), info.shape]).encode())
        for block in _first_elements((0,) * len(info.shape), info.shape):
            out = torch.empty(block.shape, dtype=info.dtype)
            source.read(key, block, out)
            digest.update(memory_of(out))
    return digest.hexdigest()


def content_digest(source: Source, rank_group: RankGroup) -> str:
    """Return a text that only checkpoints with the same model have. Ranks read the model once, together."""
    turn, turns = rank_group.ranks.index(rank_group.rank), len(rank_group.ranks)
    shares = rank_group.collect(rank_group.on_each(lambda: _digest_of_share(source, turn, turns)))
    # A sum does not depend on which rank has read what.
    return f"{sum(int(share, 16) for share in shares) % (1 << 256):064x}"


def _digest_of_share(source: Source, turn: int, turns: int) -> str:
    total, staging = 0, Staging()
    blocks = (
        (key, block)
        for key in sorted(key for key in source.tensors if key.startswith(MODEL))
        for block in rows_of(whole(source.tensors[key].shape), AT_ONCE)
    )
    for key, block in islice(blocks, turn, None, turns):
        info = source.tensors[key]
        out = staging.of(block.shape, info.dtype)
        source.read(key, block, out)
        digest = hashlib.sha256(
            json.dumps([key, str(info.dtype), info.shape, block.start]).encode()
        )
        digest.update(memory_of(out))
        total += int.from_bytes(digest.digest(), "big")
    return f"{total:x}"


def save_of(source: Source) -> str:
    """Return the identity of this save among all others, or "" if it is not of our own format."""
    if not isinstance(source, StoredCheckpoint):
        return ""
    manifest = source.manifest
    files = {rank: [file.nbytes, file.header_crc32] for rank, file in manifest.files.items()}
    text = json.dumps([manifest.data, manifest.created, files], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


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


def places_of_base(record: BaseRecord, checkpoint: Path, given: Path | None) -> list[str]:
    """Return where the base of a checkpoint may be: beside it, as it was, and then where it was.

    So a run that was copied with its base uses its own.

    Raises:
        CheckpointError: it is at none of these places.
    """
    places = [checkpoint / record.relative, Path(record.path)] if given is None else [given]
    texts = list(dict.fromkeys(map(os.path.abspath, places)))
    found = [text for text in texts if os.path.exists(text)]
    if not found:
        raise CheckpointError(
            f"{checkpoint} has only what training has changed, and needs its base, which has the frozen parameters. It is not at "
            f"{' or '.join(texts)}. Pass the path of the base: load(..., base=...)."
        )
    return found


def check_base(record: BaseRecord, checkpoint: Path, base: Source, rank_group: RankGroup) -> None:
    """Raise unless ``base`` is the base that a checkpoint was saved with. All ranks call it."""
    is_same = rank_group.on_each(lambda: quick_digest(base)) == record.digest
    if all(rank_group.collect(is_same)):
        # A record of an older fullshard has only the quick digest.
        if record.save == save_of(base) != "" or not record.content:
            return
        is_same = content_digest(base, rank_group) == record.content
    if not all(rank_group.collect(is_same)):
        raise CheckpointError(
            f"The base of {checkpoint} must have the frozen parameters that it was trained with; {base.path} has other names, "
            "shapes, dtypes or values. Nothing was loaded. Pass the path of the right base: load(..., base=...)."
        )


def check_frozen(frozen: Iterable[LocalTensor], base: Source) -> None:
    """Raise unless a base has this rank's part of the frozen parameters.

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
    staging = Staging()
    for rows in rows_of(block, AT_ONCE):
        out = staging.of(rows.shape, base.tensors[key].dtype)
        base.read(key, rows, out)
        mine = contiguous_values(own[rows.slices_in(block)].detach().to("cpu"))
        # Bytes, because a value that is not a number does not equal itself.
        if memory_of(out.to(mine.dtype)) != memory_of(mine):
            return False
    return True
