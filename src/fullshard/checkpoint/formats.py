"""Which format a checkpoint has, and loading it, whichever it is.

fullshard        a folder with a manifest.json
DCP              a folder with a .metadata, of torch.distributed.checkpoint
Hugging Face     a folder with model.safetensors or its index: the model only
torch            a file of torch.save with state dicts
"""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ..errors import CheckpointError
from . import manifest as manifests
from .dcp import DcpCheckpoint
from .dcp_metadata import METADATA
from .huggingface import HuggingFaceFolder
from .loading import Loaded, load_source
from .manifest import MANIFEST
from .source import Source
from .stored import StoredCheckpoint
from .team import Team
from .torch_files import TorchFile
from .writing import OnProgress


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a checkpoint of any format; which one it is shows in what is there."""
    path = Path(path)
    if path.is_file():
        return TorchFile(path)
    if (path / MANIFEST).is_file():
        return StoredCheckpoint(path, manifests.read(path))
    if (path / METADATA).is_file():
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
        optimizer: Gets the state and the options of its parameter groups.
        without_optimizer: Leave a stored optimizer's state where it is; to evaluate, or to begin anew.
        cast: Let tensors have another dtype than the stored ones.
        process_group: The ranks that load together; all by default.
        on_progress: Is called with the bytes this rank has read, and will read.
    """
    team = Team(process_group)
    # One rank says which it is, and reads the manifest: another save may replace it while the others would look.
    folder, text = team.first(lambda: (str(path), _manifest_bytes(Path(path))))
    source = team.each(lambda: _opened(Path(folder), text))
    return load_source(
        source,
        model,
        optimizer,
        without_optimizer=without_optimizer,
        cast=cast,
        team=team,
        on_progress=on_progress,
    )


def _manifest_bytes(path: Path) -> bytes | None:
    return manifests.read_bytes(path) if (path / MANIFEST).is_file() else None


def _opened(path: Path, text: bytes | None) -> Source:
    if text is None:
        return open_source(path)
    return StoredCheckpoint(path, manifests.parse(text, path))
