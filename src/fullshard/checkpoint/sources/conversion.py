"""Conversion of checkpoints from any format into any other, in one process and bounded memory.

Hugging Face folders have the model only. Writing a file of torch.save takes memory for all of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from torch import Tensor

from fullshard.checkpoint import json_values
from fullshard.checkpoint.folders import publication
from fullshard.checkpoint.manifest import Manifest, StoredTensor, file_name
from fullshard.checkpoint.source import MODEL, OPTIMIZER, Source
from fullshard.checkpoint.sources.dcp import write_dcp
from fullshard.checkpoint.sources.formats import use_source
from fullshard.checkpoint.sources.huggingface import write_huggingface
from fullshard.checkpoint.sources.torch_files import write_torch_file
from fullshard.checkpoint.sources.verified_reads import read_verified
from fullshard.checkpoint.tensor_files import NewEntry, write_file
from fullshard.errors import CheckpointError, ConfigurationError
from fullshard.files import local_path
from fullshard.layout.blocks import Block
from fullshard.layout.sharding import Cuts, Sharding

FORMATS = ("fullshard", "huggingface", "dcp", "torch")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str,
    files: int = 1,
) -> None:
    """Write the checkpoint at ``source`` to ``target`` in another format, or the same.

    Args:
        source: A checkpoint of any format.
        target: A path where nothing is yet.
        to: One of `FORMATS`.
        files: Number of files of a checkpoint of our own format.
    """
    use_source(source, lambda opened: write(opened, target, to=to, files=files))


def write(
    source: Source,
    target: str | os.PathLike[str],
    *,
    to: str,
    files: int = 1,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write an open source; ``on_bytes`` is called with the bytes of each read. See `convert`."""
    if to not in FORMATS:
        raise ConfigurationError(
            f"A checkpoint can be written as one of {', '.join(FORMATS)}; not as {to!r}."
        )
    if files < 1 or (files > 1 and to != "fullshard"):
        raise ConfigurationError(
            f"files must be 1, or more for the format fullshard; got {files} for {to}."
        )
    target = local_path(target)
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise CheckpointError(
            f"A checkpoint must be converted to a new path; {target} exists. Choose another path."
        )
    counted = source if on_bytes is None else _Counted(source, on_bytes)
    if to == "fullshard":
        write_checkpoint(counted, target, files=files)
    elif to == "dcp":
        write_dcp(counted, target)
    elif to == "huggingface":
        write_huggingface(counted, target)
    else:
        write_torch_file(counted, target)


class _Counted:
    """A source that reports the bytes of each read."""

    def __init__(self, source: Source, on_bytes: Callable[[int], None]) -> None:
        self._source = source
        self._on_bytes = on_bytes
        self.path = source.path
        self.format = source.format
        self.tensors = source.tensors
        self.tied = source.tied
        self.optimizer = source.optimizer
        self.extra = source.extra

    def read(self, key: str, wanted: Block, out: Tensor) -> None:
        self._source.read(key, wanted, out)
        self._on_bytes(out.nbytes)

    def verify(self, wanted: Iterable[tuple[str, Block]]) -> list[str]:
        return self._source.verify(wanted)

    def close(self) -> None:
        self._source.close()


# --- our own format ----------------------------------------------------------------------------------------


def write_checkpoint(source: Source, path: str | os.PathLike[str], *, files: int = 1) -> None:
    """Write a checkpoint of our own format, with the rows of each tensor divided over ``files`` files.

    It needs memory for the largest part of a tensor in one file.
    """
    path = Path(os.path.abspath(local_path(path)))
    _refuse_what_cannot_be_written(source)
    tensors = {
        key: StoredTensor(info.dtype, _in_rows(info.shape, files))
        for key, info in source.tensors.items()
    }
    save = publication.begin(path)
    try:
        records = {}
        for rank in range(files):
            entries = _entries(source, tensors, rank)
            if entries:
                records[rank] = write_file(save.folder / file_name(rank), entries)
        manifest = Manifest(
            data=save.folder.name,
            world=files,
            tensors=tensors,
            files=records,
            tied=source.tied,
            optimizer=source.optimizer,
            extra=source.extra,
        )
        beside = publication.survey(path.parent, with_files=False)
        publication.publish(save, publication.stamped(manifest, beside))
    except BaseException:
        save.abandon()
        raise


def _refuse_what_cannot_be_written(source: Source) -> None:
    faults = [
        f"{key}: a tensor of {info.dtype} and shape {info.shape} beside model and optimizer"
        for key, info in source.tensors.items()
        if not key.startswith((MODEL, OPTIMIZER))
    ]
    for name in ("optimizer", "extra"):
        json_values.encode(getattr(source, name), name, faults)
    if faults:
        raise CheckpointError(
            "A checkpoint of fullshard can have tensors of a model and an optimizer, and values that JSON can hold, with "
            f"tensors of up to {json_values.MAX_ARRAY_BYTES} bytes; {source.path} has\n  "
            + "\n  ".join(faults)
            + "\nConvert to another format, or save it without them."
        )


def _in_rows(shape: tuple[int, ...], files: int) -> Sharding:
    cuts: list[Cuts] = [(0,)] * len(shape)
    if shape and shape[0]:
        cuts[0] = range(0, shape[0], -(-shape[0] // files))
    return Sharding(shape=shape, cuts=tuple(cuts), holders=(tuple(range(files)),))


def _entries(source: Source, tensors: dict[str, StoredTensor], rank: int) -> list[NewEntry]:
    entries = []
    for key, stored in tensors.items():
        cell = stored.sharding.cell_of(rank)
        extent = None if cell is None else stored.sharding.extent(cell)
        if extent is not None and extent.numel:
            fetch = partial(read_verified, source, key, extent)
            entries.append(NewEntry(key, stored.dtype, extent.shape, fetch))
    return entries
