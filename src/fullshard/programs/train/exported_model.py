"""The folder of an exported model, and the mark in it by which a later export knows that it may replace it.

    model/
      config.json, model.safetensors, tokenizer.json, ...    what transformers loads
      fullshard_export.json                                  the mark: step, checkpoint, names of all files of the export

Files that a user has added stay when an export is replaced. A folder without a mark is never replaced: its weights may be
a user's work. This file imports no torch, because problems with exporting are found before a run starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fullshard.errors import CheckpointError
from fullshard.files import content_of

MARK = "fullshard_export.json"
MAX_MARK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportForm:
    """Form of a model for transformers: the files beside its weights, and their names."""

    companions: Sequence[Any]
    """Folders, or objects with `save_pretrained`, that have configuration and tokenizer."""

    rename: Callable[[str], str | None] | None = None
    """Renaming: the model's names of weights to those of transformers; None if they are the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportMark:
    """The checkpoint that an export was made from, and the export's files."""

    checkpoint: str
    """Name of the checkpoint."""

    data: str | None
    """Name of the checkpoint's data folder, which no other save has; None for other formats than fullshard's own."""

    step: int | None
    """Steps that were trained; None if the checkpoint does not say."""

    files: tuple[str, ...]
    """Names of the export's files, without the mark."""

    ema: bool = False
    """Whether it has averages of the parameters in place of the trained weights."""

    weights: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes of each file of weights, by name, with the checksum of its header, which has the checksums of its data.
    Empty in exports of earlier versions."""

    def write(self, folder: Path) -> None:
        """Write the mark into the folder of an export."""
        (folder / MARK).write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_mark(folder: Path) -> ExportMark | None:
    """Return the mark of a folder; None if it has none, or one that cannot be read."""
    try:
        content = json.loads(content_of(folder / MARK, max_bytes=MAX_MARK_BYTES))
        return ExportMark(
            checkpoint=str(content["checkpoint"]),
            data=content["data"],
            step=content["step"],
            files=tuple(map(str, content["files"])),
            ema=content.get("ema") is True,
            weights={
                str(name): (int(nbytes), int(checksum))
                for name, (nbytes, checksum) in content.get("weights", {}).items()
            },
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def check_target(folder: Path) -> None:
    """Raise unless a model can be exported to a folder: it is new, empty, or has an earlier export.

    Raises:
        CheckpointError: it is something else, or cannot be read.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(
                f"A model must be exported to a folder; {folder} is a file. Move it away."
            )
        has_others = folder.is_dir() and any(folder.iterdir()) and read_mark(folder) is None
    except OSError as error:
        raise CheckpointError(f"A model cannot be exported to {folder}: {error}.") from error
    if has_others:
        raise CheckpointError(
            f"A model is exported to a folder that is new, empty, or has an earlier export; {folder} has other files and no "
            f"{MARK}, so it is not replaced. Move it away."
        )
