"""Folders of Hugging Face models: read directly into shards, and written from them.

    folder/model.safetensors                         all weights, or
    folder/model.safetensors.index.json              {"weight_map": {name: file}}
    folder/model-00001-of-00003.safetensors          ... and the files it names
    folder/config.json, tokenizer.json, ...          copied, or written by `save_pretrained`

Every rank reads only the parts of the files that it needs, so it has no more in memory than its shards and one tensor. To
write, ranks save a checkpoint of our own format first; then every rank writes its share of the files from there. No
tensor is sent between ranks. The new folder is written beside the old one, and then replaces it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fullshard.checkpoint import manifest as manifests
from fullshard.checkpoint.folders.found_checkpoint import FoundCheckpoint, read_together
from fullshard.checkpoint.folders.replacement import NEW, replacing
from fullshard.checkpoint.json_values import without_repetition
from fullshard.checkpoint.load_plan import Loaded, load_source
from fullshard.checkpoint.rank_group import RankGroup
from fullshard.checkpoint.save import save
from fullshard.checkpoint.save_plan import OnProgress
from fullshard.checkpoint.source import MODEL, Source, TensorInfo
from fullshard.checkpoint.sources.stored_checkpoint import StoredCheckpoint
from fullshard.checkpoint.sources.verified_reads import raise_if_damaged
from fullshard.checkpoint.staging import Staging, rows_of
from fullshard.checkpoint.tensor_files import NewEntry, TensorFile, write_file
from fullshard.errors import CheckpointError, ConfigurationError
from fullshard.files import content_of, local_path
from fullshard.layout.blocks import Block, whole

T = TypeVar("T")

Rename = Callable[[str], str | None]
"""Renaming: a weight's old name to its new one, or None to leave it out."""

MAX_FILE_BYTES = 5_000_000_000
CAST_BYTES = 4 << 20
"""Bytes of a tensor that are read and cast at once."""

MAX_INDEX_BYTES = 1 << 30
"""Bytes of an index that is read."""

_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = (
    "model*.safetensors",
    "model*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
)
"""Names of files that new weights replace. All other files stay."""
_COMPANIONS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")
"""Names of files of a model other than weights: configuration, tokenizer, code."""
_CONFIG = "config.json"


class HuggingFaceFolder:
    """A `Source` of a model's folder."""

    format = "Hugging Face"

    def __init__(self, path: str | os.PathLike[str], rename: Rename | None = None) -> None:
        """Open a folder and read the headers of its files.

        Args:
            path: A folder with ``model.safetensors``, or else with an index.
            rename: From names in the files to names in the model.

        Raises:
            CheckpointError: there are no safetensors, the index and the files disagree, or a file is damaged.
        """
        self.path = local_path(path)
        self.tied: Mapping[str, str] = {}
        self.optimizer: Mapping[str, Any] | None = None
        self.extra: Any = None
        self._locations: dict[str, tuple[TensorFile, str]] = {}
        """The file of each tensor and its name there, by key."""
        files = {name: file for file in _files(self.path) for name in file.entries}
        for name, renamed in _renamed({name: name for name in files}, rename, self.path).items():
            self._locations[f"{MODEL}{renamed}"] = files[name], name
        self.tensors: Mapping[str, TensorInfo] = {
            key: TensorInfo(file.entries[name].dtype, file.entries[name].shape)
            for key, (file, name) in self._locations.items()
        }

    def read(self, key: str, wanted: Block, out: Tensor) -> None:
        """Read a block of a weight."""
        file, name = self._locations[key]
        file.read_block(name, wanted, out, of=whole(self.tensors[key].shape))

    def verify(self, wanted: Iterable[tuple[str, Block]]) -> list[str]:
        """Return no faults: the format has no checksums."""
        return []

    def close(self) -> None:
        """Close the files."""
        for file, _ in self._locations.values():
            file.close()


def _files(folder: Path) -> list[TensorFile]:
    """Open the files with the weights of a folder. No two of them have a weight of the same name."""
    if (folder / _ONE_FILE).exists():  # it comes before an index, as in transformers
        return [TensorFile(folder / _ONE_FILE, None)]
    if (folder / _INDEX).exists():
        return _indexed_files(folder)
    others = sorted(each.name for each in folder.glob("*.bin")) if folder.is_dir() else []
    remedy = (
        f"It has pickles, which are not read here: {', '.join(others)}. Load them with transformers and save them with "
        "save_pretrained. A pickle with a whole state dict can be loaded as a torch file"
        if others
        else "Give the folder that save_pretrained wrote, or that a model was downloaded to"
    )
    raise CheckpointError(
        f"A Hugging Face folder must have {_ONE_FILE} or {_INDEX}; {folder} has neither. {remedy}."
    )


def _indexed_files(folder: Path) -> list[TensorFile]:
    where = _weight_map(folder / _INDEX)
    files = {}
    faults = []
    for file_name in sorted(set(where.values())):
        # Links are followed, because Hugging Face's caches have them. The names themselves must be in the folder.
        if Path(file_name).name != file_name or file_name in ("", "..") or "\0" in file_name:
            faults.append(f"{file_name!r} is not the name of a file in the folder")
            continue
        try:
            files[file_name] = TensorFile(folder / file_name, None)
        except CheckpointError as error:
            faults.append(str(error))
    for name, file_name in where.items():
        if file_name in files and name not in files[file_name].entries:
            faults.append(f"{name} is not in {file_name}")
    for file_name, file in files.items():
        for name in file.entries:
            if where.get(name) != file_name:
                found = f"the index says {where[name]}" if name in where else "not in the index"
                faults.append(f"{name} is in {file_name}, but {found}")
    if faults:
        raise CheckpointError(
            f"The index of a Hugging Face folder must name every weight of its files once; in {folder}\n  "
            + "\n  ".join(faults)
            + "\nDownload or save the folder again."
        )
    return list(files.values())


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of every weight. Sizes in an index are not used: many are wrong."""
    try:
        text = content_of(index, max_bytes=MAX_INDEX_BYTES)
        content = json.loads(text, object_pairs_hook=without_repetition)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} cannot be read: {error}") from error
    where = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise CheckpointError(
            f'An index must have a "weight_map" with the file of every weight; {index} has none. Download or save the folder '
            "again."
        )
    return where


def load_huggingface(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    rename: Rename | None = None,
    cast: bool = True,
    process_group: ProcessGroup | None = None,
    on_progress: OnProgress | None = None,
) -> Loaded:
    """Load the weights of a Hugging Face folder into a model of either API. All ranks call it.

    Each rank reads what it holds. The weights must be those of the model's state dict; tied ones may have one of their
    names or all. If any is missing, unknown or of another shape, one error names all, and nothing is loaded.

    Args:
        folder: A folder with ``model.safetensors``, or with an index and its files.
        model: Gets the weights. It must be materialised, and need not be initialised.
        rename: From names in the files to names in the model, or None for a weight to leave out.
        cast: Let weights have another dtype than the model, which keeps its own. Integers, which may be quantised weights,
            are not cast to floating-point numbers, nor complex ones to real ones.
        process_group: The ranks that load together; all by default.
        on_progress: Called with the bytes that this rank has read, and will read in total.
    """
    rank_group = RankGroup(process_group)

    def load_once(found: FoundCheckpoint) -> Loaded:
        source = rank_group.on_each(lambda: HuggingFaceFolder(found.path, rename))
        return load_source(source, model, cast=cast, rank_group=rank_group, on_progress=on_progress)

    return read_together(folder, rank_group, load_once, own_paths=True)


# --- writing ---------------------------------------------------------------------------------------------


def write_huggingface(
    source: Source,
    folder: str | os.PathLike[str],
    *,
    config_from: Any = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
    overwrite: bool = False,
    process_group: ProcessGroup | None = None,
) -> None:
    """Write the model of a checkpoint as a folder that transformers can load. All ranks call it, and share the work.

    A rank needs memory for one tensor at a time. Tied weights are written once. The folder appears when it is complete.

    Args:
        source: An open checkpoint; its optimizer and extra values are left out.
        folder: New or empty, unless ``overwrite`` is set.
        config_from: A folder whose configuration, tokenizer and code are copied, or an object with ``save_pretrained``
            (a configuration, a tokenizer), or a list of these. The dtype in config.json is corrected.
        max_file_bytes: Larger models are written as several files with an index. A larger tensor gets its own file.
        dtype: Dtype of floating-point weights in the folder; None for those of the checkpoint.
        rename: From names in the checkpoint to names in the folder.
        overwrite: Whether to replace weights that the folder has. Its other files stay, also those that other processes write
            meanwhile.
        process_group: The ranks that write together, to one file system; all by default.

    Raises:
        CheckpointError: the checkpoint is damaged, or the folder cannot be written. The folder is unchanged.
    """
    rank_group = RankGroup(process_group)
    place = rank_group.on_each(lambda: local_path(folder))
    options = _Options(_companions(config_from, place, rank_group), max_file_bytes, dtype, rename)
    with replacing(place, rank_group, keep=_is_kept if overwrite else None) as workspace:
        _write(source, workspace / NEW, options, rank_group)


def save_huggingface(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    config_from: Any = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
    overwrite: bool = False,
    process_group: ProcessGroup | None = None,
) -> None:
    """Write a model of either API as a folder that transformers can load. All ranks call it, and share the work.

    Every rank first writes its shards to a checkpoint beside the folder, which needs the same disk space again until the
    folder is complete. Then it writes some of the files from there. So no rank needs memory for more than its shards and
    one tensor, and nothing is gathered.

    Args:
        folder: New or empty, unless ``overwrite`` is set.
        model: Its parameters and persistent buffers are written, in the dtypes they are sharded in. Tied ones are written
            once, under the first of their names.
        config_from: A folder whose configuration, tokenizer and code are copied, or an object with ``save_pretrained``
            (``model.config`` of a model of transformers, a tokenizer), or a list of these.
        max_file_bytes: Larger models are written as several files with an index. A larger tensor gets its own file.
        dtype: Dtype of floating-point weights in the folder; None for those of the model.
        rename: From names in the model to names in the folder, or None for a weight to leave out.
        overwrite: Whether to replace weights that the folder has. Its other files stay, also those that other processes write
            meanwhile.
        process_group: The ranks that hold the model; all by default.

    Raises:
        CheckpointError: the folder cannot be written. It is unchanged.
    """
    rank_group = RankGroup(process_group)
    place = rank_group.on_each(lambda: local_path(folder))
    options = _Options(_companions(config_from, place, rank_group), max_file_bytes, dtype, rename)
    with replacing(place, rank_group, keep=_is_kept if overwrite else None) as workspace:
        shards = workspace / "shards"
        save(shards, model, process_group=process_group)
        source = rank_group.on_each(lambda: StoredCheckpoint(shards, manifests.read(shards)))
        try:
            _write(source, workspace / NEW, options, rank_group)
        finally:
            source.close()


@dataclass(frozen=True, slots=True)
class _Options:
    """Options for writing a folder: see `write_huggingface`."""

    companions: Sequence[Any]
    max_file_bytes: int
    dtype: torch.dtype | None
    rename: Rename | None

    def __post_init__(self) -> None:
        if self.max_file_bytes < 1:
            raise ConfigurationError(f"max_file_bytes must be positive, got {self.max_file_bytes}.")
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ConfigurationError(
                f"dtype must be a floating-point dtype, because only floating-point weights are cast; got {self.dtype}."
            )

    def stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a tensor is written."""
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype


@dataclass(frozen=True, slots=True)
class _Weight:
    """A tensor to write."""

    name: str
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def _write(source: Source, folder: Path, options: _Options, rank_group: RankGroup) -> None:
    """Fill a new folder: every rank writes its share of the weights, the first rank also all other files."""
    files = rank_group.on_each(lambda: _planned_files(source, options))

    def write_share() -> None:
        for name in list(files)[rank_group.ranks.index(rank_group.rank) :: len(rank_group.ranks)]:
            _write_weights(source, folder / name, files[name])
        if rank_group.is_first:
            _write_companions(options.companions, folder)
            if len(files) > 1:
                (folder / _INDEX).write_text(_index_text(files))

    rank_group.on_each(write_share)
    rank_group.on_first(lambda: _name_dtype(folder / _CONFIG, files))


def _planned_files(source: Source, options: _Options) -> dict[str, list[_Weight]]:
    """Return the weights of every file, by its name. Files are filled in order, as transformers does."""
    files: list[list[_Weight]] = []
    open_file: list[_Weight] = []
    room = options.max_file_bytes
    for weight in _weights(source, options):
        if weight.nbytes > options.max_file_bytes:
            files.append([weight])
            continue
        if weight.nbytes > room:
            files.append(open_file)
            open_file, room = [], options.max_file_bytes
        open_file.append(weight)
        room -= weight.nbytes
    files += [open_file] if open_file else []
    if len(files) == 1:
        return {_ONE_FILE: files[0]}
    return {
        f"model-{number:05d}-of-{len(files):05d}.safetensors": weights
        for number, weights in enumerate(files, start=1)
    }


def _weights(source: Source, options: _Options) -> Iterable[_Weight]:
    names = {key: key.removeprefix(MODEL) for key in source.tensors if key.startswith(MODEL)}
    renamed = _renamed(names, options.rename, source.path)
    if not renamed:
        raise CheckpointError(
            f"A Hugging Face folder must have weights; {source.path} has no tensors of a model, or rename leaves all of them "
            "out."
        )
    for key, name in renamed.items():
        info = source.tensors[key]
        yield _Weight(name, key, options.stored_dtype(info.dtype), info.shape)


def _renamed(names: Mapping[T, str], rename: Rename | None, path: Path) -> dict[T, str]:
    """Return the new names; weights that are left out are missing."""
    if rename is None:
        return dict(names)
    renamed = {thing: new for thing, name in names.items() if (new := rename(name)) is not None}
    first: dict[str, T] = {}
    faults = [
        f"{names[first[new]]} and {names[thing]} become {new}"
        for thing, new in renamed.items()
        if first.setdefault(new, thing) != thing
    ]
    if faults:
        raise ConfigurationError(
            f"rename must give every weight a different name; of those in {path}, {', '.join(faults)}."
        )
    return renamed


def _write_weights(source: Source, path: Path, weights: Sequence[_Weight]) -> None:
    faults = source.verify((weight.key, whole(weight.shape)) for weight in weights)
    raise_if_damaged(source.path, faults)

    # One memory for all weights, large enough from the start: a larger one would be a second one, because the writer still
    # refers to the last weight when it fetches the next.
    memory, staging = Staging(), Staging()
    memory.of([max(weight.nbytes for weight in weights)], torch.uint8)

    def fetch(weight: _Weight) -> Tensor:
        out = memory.of(weight.shape, weight.dtype)
        dtype, all_of_it = source.tensors[weight.key].dtype, whole(weight.shape)
        if dtype == weight.dtype:
            source.read(weight.key, all_of_it, out)
            return out
        for rows in rows_of(all_of_it, CAST_BYTES // dtype.itemsize):
            staged = staging.of(rows.shape, dtype)
            source.read(weight.key, rows, staged)
            out[rows.slices_in(all_of_it)].copy_(staged)
        return out

    entries = [
        NewEntry(weight.name, weight.dtype, weight.shape, partial(fetch, weight))
        for weight in weights
    ]
    write_file(path, entries)


def _index_text(files: Mapping[str, Sequence[_Weight]]) -> str:
    index = {
        "metadata": {
            "total_size": sum(weight.nbytes for weights in files.values() for weight in weights)
        },
        "weight_map": {weight.name: name for name, weights in files.items() for weight in weights},
    }
    return json.dumps(index, indent=2) + "\n"


def _companions(config_from: Any, folder: Path, rank_group: RankGroup) -> list[Any]:
    """Return the sources of the files other than weights; a later source replaces files of an earlier one."""
    given = config_from if isinstance(config_from, list | tuple) else [config_from]
    found = [each for each in given if each is not None]

    def check() -> bool:
        wrong = [
            type(each).__name__ if isinstance(each, nn.Module) else each
            for each in found
            if isinstance(each, nn.Module)  # its save_pretrained would write its weights
            or (not hasattr(each, "save_pretrained") and not _is_folder(each))
        ]
        if wrong:
            raise ConfigurationError(
                "config_from must be a folder, an object with save_pretrained that is not a model, or a list of these; it has "
                f"{wrong}. Pass a model's config."
            )
        return _is_folder(folder)

    # A folder that is overwritten keeps its files. It is listed here because the dtype in its config.json may change.
    return [folder, *found] if rank_group.on_first(check) else found


def _is_folder(path: Any) -> bool:
    return isinstance(path, str | os.PathLike) and local_path(path).is_dir()


def _write_companions(companions: Sequence[Any], folder: Path) -> None:
    for each in companions:
        if hasattr(each, "save_pretrained"):
            each.save_pretrained(folder)
            continue
        for file in Path(each).iterdir():
            if file.is_file() and _matches(file, _COMPANIONS) and _is_kept(file):
                shutil.copyfile(file, folder / file.name)


def _name_dtype(config: Path, files: Mapping[str, Sequence[_Weight]]) -> None:
    """Set the dtype in a configuration to the one of most weights: transformers loads weights in that dtype."""
    if not config.is_file():
        return
    nbytes: Counter[torch.dtype] = Counter()
    for weights in files.values():
        for weight in weights:
            if weight.dtype.is_floating_point:
                nbytes[weight.dtype] += weight.nbytes
    try:
        content = json.loads(config.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{config.name} of config_from cannot be read: {error}.") from error
    named = [key for key in ("dtype", "torch_dtype") if content.get(key) is not None]
    if not named or not nbytes:
        return
    ((dtype, _),) = nbytes.most_common(1)
    content.update({key: str(dtype).removeprefix("torch.") for key in named})
    config.write_text(json.dumps(content, indent=2) + "\n")


def _is_kept(path: Path) -> bool:
    """Return whether a file stays when the weights of its folder are replaced."""
    return not _matches(path, _WEIGHTS)


def _matches(path: Path, patterns: Iterable[str]) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in patterns)
