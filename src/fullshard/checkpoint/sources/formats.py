"""Formats of checkpoints: opening and loading any of them.

fullshard        a folder with a manifest.json
DCP              a folder with a .metadata, of torch.distributed.checkpoint
Hugging Face     a folder with model.safetensors or its index: the model only
torch            a file of torch.save with state dicts
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from fullshard.checkpoint import manifest as manifests
from fullshard.checkpoint.base_weights import (
    Base,
    OverlaidSource,
    check_base,
    check_frozen,
    content_digest,
    places_of_base,
    quick_digest,
    save_of,
)
from fullshard.checkpoint.folders.found_checkpoint import FoundCheckpoint, read_alone, read_together
from fullshard.checkpoint.folders.retention import note_loaded
from fullshard.checkpoint.load_plan import Loaded, load_source
from fullshard.checkpoint.manifest import MANIFEST, BaseRecord
from fullshard.checkpoint.rank_group import RankGroup
from fullshard.checkpoint.save_plan import OnProgress
from fullshard.checkpoint.source import MODEL, Source
from fullshard.checkpoint.sources.dcp import DcpCheckpoint
from fullshard.checkpoint.sources.dcp_metadata import METADATA
from fullshard.checkpoint.sources.huggingface import HuggingFaceFolder
from fullshard.checkpoint.sources.stored_checkpoint import StoredCheckpoint
from fullshard.checkpoint.sources.torch_files import TorchFile
from fullshard.checkpoint.state.local_state import LocalModelState
from fullshard.errors import CheckpointError
from fullshard.files import local_path
from fullshard.optim import EMA

T = TypeVar("T")


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a checkpoint of any format, which the files in it show."""
    path = local_path(path)
    if path.is_file():
        return TorchFile(path)
    if (path / MANIFEST).exists():
        return StoredCheckpoint(path, manifests.read(path))
    if (path / METADATA).exists():
        return DcpCheckpoint(path)
    if any(path.glob("*.safetensors*")):
        return HuggingFaceFolder(path)
    raise CheckpointError(
        f"A checkpoint must be a file of torch.save, or a folder with {MANIFEST} (fullshard), {METADATA} "
        f"(torch.distributed.checkpoint) or model.safetensors (Hugging Face); {path} "
        f"{'has none of them' if path.is_dir() else 'is not there'}. fullshard.checkpoint.latest(folder) finds the newest "
        "complete one in a folder."
    )


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    ema: EMA | None = None,
    base: str | os.PathLike[str] | None = None,
    without_optimizer: bool = False,
    cast: bool = False,
    process_group: ProcessGroup | None = None,
    on_progress: OnProgress | None = None,
) -> Loaded:
    """Load a checkpoint of any format, written by any number of ranks, through either API. All ranks call it.

    The checkpoint must have exactly the tensors of model and optimizer, with the same shapes and dtypes. If not, or if a
    file is damaged, one error names everything that is wrong, and model and optimizer are unchanged.

    Args:
        path: The folder of a checkpoint; `latest` finds the newest one. Or a folder of `torch.distributed.checkpoint`, a
            Hugging Face folder, or a file of `torch.save` with state dicts. No code in it is run.
        model: Gets the parameters and buffers.
        optimizer: Gets the state and the options of its parameter groups. It has the saved class, or one with the same
            state (docs/checkpoints.md).
        ema: Gets the averages, if the checkpoint has them.
        base: Present path of the base, for a checkpoint of only what training has changed: by default at the same place beside
            the checkpoint, or where it was when the checkpoint was saved. It must be the same base.
        without_optimizer: Do not load a saved optimizer's state: to evaluate, or to begin with a new optimizer. Averages are
            then loaded only if ``ema`` is passed.
        cast: Let tensors have another dtype than the saved ones. Integers are not cast to floating-point numbers, nor
            complex ones to real ones.
        process_group: The ranks that load together; all by default.
        on_progress: Called with the bytes that this rank has read, and will read in total.
    """
    rank_group = RankGroup(process_group, "load")

    def load_once(found: FoundCheckpoint) -> Loaded:
        own = rank_group.on_each(lambda: open_found(found))
        source = with_base(own, base, rank_group=rank_group)
        loaded = load_source(
            source,
            model,
            optimizer,
            ema=ema,
            without_optimizer=without_optimizer,
            cast=cast or _keys_of_base(source),
            rank_group=rank_group,
            on_progress=on_progress,
        )
        if isinstance(own, StoredCheckpoint) and not without_optimizer:
            note_loaded(model, own.path, own.manifest)
        return loaded

    return read_together(path, rank_group, load_once)


def with_base(
    source: Source,
    base: str | os.PathLike[str] | None = None,
    *,
    rank_group: RankGroup | None = None,
) -> Source:
    """Return a checkpoint with the parameters that it leaves out, from its base; the checkpoint itself if it has all.

    Args:
        source: An open checkpoint. If an error is raised, it is closed.
        base: Present path of the base; by default beside the checkpoint as it was, or where it was.
        rank_group: Ranks that all call it, and share the reading; by default this process by itself.

    Raises:
        CheckpointError: the base is missing or another one; or the checkpoint has none, and one was passed.
    """
    ranks = RankGroup.alone() if rank_group is None else rank_group
    record = source.base if isinstance(source, StoredCheckpoint) else None
    if record is None and base is None:
        return source
    try:
        given = ranks.on_each(lambda: None if base is None else local_path(base))
        if record is None:
            raise CheckpointError(
                f"{source.path} has all parameters, and needs no base. Leave base out."
            )
        under = _open_base(record, source.path, given, ranks)
    except BaseException:
        source.close()
        raise
    return OverlaidSource(source, under)


def _open_base(
    record: BaseRecord, checkpoint: Path, given: Path | None, ranks: RankGroup
) -> Source:
    """Open the base of a checkpoint: the first that is the right one, of those that are there."""
    faults = []
    for place in ranks.on_first(lambda: places_of_base(record, checkpoint, given)):
        try:
            opened = ranks.on_each(partial(open_source, place))
            under = with_base(opened, rank_group=ranks)
            try:
                check_base(record, checkpoint, under, ranks)
            except BaseException:
                under.close()
                raise
            return under
        except CheckpointError as error:
            faults.append(str(error))
    raise CheckpointError("\n".join(faults))


def _keys_of_base(source: Source) -> Collection[str]:
    """Return the keys of tensors that may have another dtype than the model's, as weights of Hugging Face folders may."""
    return source.from_base if isinstance(source, OverlaidSource) else ()


def base_of(
    path: str | os.PathLike[str], model: nn.Module, *, process_group: ProcessGroup | None = None
) -> Base:
    """Return the base of checkpoints that leave the frozen parameters of a model out: ``save(..., base=base)``.

    The base is compared with the model's frozen parameters. All ranks call it.

    Args:
        path: The checkpoint, of any format, that has the frozen parameters under the names that the model has.
        model: Has loaded them.
        process_group: The ranks that save together; all by default.

    Raises:
        CheckpointError: the base cannot be read, or has other parameters; all are named.
    """
    rank_group = RankGroup(process_group)
    place = Path(rank_group.on_first(lambda: os.path.abspath(local_path(path))))
    opened = rank_group.on_each(lambda: open_source(place))

    def checked_digest(source: Source) -> str:
        state = LocalModelState(model, "fullshard.checkpoint.base_of")
        frozen = state.frozen
        check_frozen([t for t in state.tensors if t.key.removeprefix(MODEL) in frozen], source)
        return quick_digest(source)

    with closing(with_base(opened, rank_group=rank_group)) as source:
        digest = rank_group.on_each(lambda: checked_digest(source))
        return Base(place, digest, content_digest(source, rank_group), save_of(source))


def open_found(found: FoundCheckpoint) -> Source:
    """Open a checkpoint that was found: of our own format the very one, of others what is there now."""
    manifest = found.manifest()
    return open_source(found.path) if manifest is None else StoredCheckpoint(found.path, manifest)


def use_source(
    path: str | os.PathLike[str],
    use: Callable[[Source], T],
    *,
    is_good: Callable[[T], bool] = lambda _: True,
) -> T:
    """Open a checkpoint of any format, and return what ``use`` makes of it; if it is replaced meanwhile, use the new one.

    Args:
        path: Its path.
        use: Called again with a new checkpoint if it raised `CheckpointError`, or if its result is not good.
        is_good: Whether a result can be trusted without asking for a new checkpoint.
    """

    def read() -> T:
        with closing(open_source(path)) as source:
            return use(source)

    return read_alone(local_path(path), read, is_good)
