"""Which format a checkpoint has, and loading it, whichever it is.

fullshard        a folder with a manifest.json
DCP              a folder with a .metadata, of torch.distributed.checkpoint
Hugging Face     a folder with model.safetensors or its index: the model only
torch            a file of torch.save with state dicts
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from fullshard.checkpoint import manifest as manifests
from fullshard.checkpoint.dcp import DcpCheckpoint
from fullshard.checkpoint.dcp_metadata import METADATA
from fullshard.checkpoint.found_checkpoint import FoundCheckpoint, read_alone, read_together
from fullshard.checkpoint.huggingface import HuggingFaceFolder
from fullshard.checkpoint.load_plan import Loaded, load_source
from fullshard.checkpoint.manifest import MANIFEST
from fullshard.checkpoint.rank_group import RankGroup
from fullshard.checkpoint.retention import note_loaded
from fullshard.checkpoint.save_plan import OnProgress
from fullshard.checkpoint.source import Source
from fullshard.checkpoint.stored_checkpoint import StoredCheckpoint
from fullshard.checkpoint.torch_files import TorchFile
from fullshard.errors import CheckpointError

T = TypeVar("T")


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a checkpoint of any format; which one it is shows in what is there."""
    path = Path(path)
    if path.is_file():
        return TorchFile(path)
    if (path / MANIFEST).exists():
        return StoredCheckpoint(path, manifests.read(path))
    if (path / METADATA).exists():
        return DcpCheckpoint(path)
    if any(path.glob("*.safetensors*")):
        return HuggingFaceFolder(path)
    raise CheckpointError(
        f"A checkpoint is a file of torch.save, or a folder with a {MANIFEST} (fullshard), a {METADATA} "
        f"(torch.distributed.checkpoint) or a model.safetensors (Hugging Face); {path} "
        f"{'has none of them' if path.is_dir() else 'is not there'}. fullshard.checkpoint.latest(folder) finds the newest "
        "complete one in a folder."
    )


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    without_optimizer: bool = False,
    cast: bool = False,
    process_group: ProcessGroup | None = None,
    on_progress: OnProgress | None = None,
) -> Loaded:
    """Load a checkpoint that any number of ranks has written, through either door, in any format. All ranks call it.

    Everything that is stored must be wanted, and everything that is wanted must be stored, with the same shape and
    dtype. If not, or if a file is damaged, the error says all of it, and model and optimizer are as they were.

    Args:
        path: The folder of a checkpoint; `latest` finds the newest one. Or one of `torch.distributed.checkpoint`, a
            Hugging Face folder, or a file of `torch.save` with state dicts, of which nothing is executed.
        model: Gets the parameters and buffers.
        optimizer: Gets the state and the options of its parameter groups; of the class that was saved, or one with
            the same state (docs/checkpoints.md).
        without_optimizer: Leave a stored optimizer's state where it is; to evaluate, or to begin anew.
        cast: Let tensors have another dtype than the stored ones.
        process_group: The ranks that load together; all by default.
        on_progress: Is called with the bytes this rank has read, and will read.
    """
    rank_group = RankGroup(process_group)

    def load_once(found: FoundCheckpoint) -> Loaded:
        source = rank_group.on_each(lambda: _opened(found))
        loaded = load_source(
            source,
            model,
            optimizer,
            without_optimizer=without_optimizer,
            cast=cast,
            rank_group=rank_group,
            on_progress=on_progress,
        )
        if isinstance(source, StoredCheckpoint) and not without_optimizer:
            note_loaded(model, source.path, source.manifest)
        return loaded

    return read_together(path, rank_group, load_once)


def _opened(found: FoundCheckpoint) -> Source:
    manifest = found.manifest()
    return open_source(found.path) if manifest is None else StoredCheckpoint(found.path, manifest)


def use_source(
    path: str | os.PathLike[str],
    use: Callable[[Source], T],
    *,
    is_good: Callable[[T], bool] = lambda _: True,
) -> T:
    """Open a checkpoint of any format and use it; if it is replaced meanwhile, use the new one instead.

    Args:
        path: Where it is.
        use: Is called again with the new one if it raised `CheckpointError`, or its result is not good.
        is_good: Whether what ``use`` returned can be believed without asking whether there is a new one.
    """

    def read() -> T:
        with closing(open_source(path)) as source:
            return use(source)

    return read_alone(Path(path), read, is_good)
