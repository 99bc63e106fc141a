"""The manifest of a checkpoint: one JSON file, which stays small however many ranks write.

It has the whole shape of every tensor, how it was cut, and which rank's file has which cell. Byte ranges and checksums of
the data are in the header of each file. The manifest has a checksum of each header, and of itself.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import reprlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from fullshard.checkpoint import json_values
from fullshard.checkpoint.dtypes import DTYPE_CODES, DTYPES_BY_CODE
from fullshard.checkpoint.source import AVERAGES, CLASS, MODEL, OPTIMIZER, TensorRef
from fullshard.errors import CheckpointError
from fullshard.files import content_of
from fullshard.layout.blocks import are_sizes
from fullshard.layout.sharding import Cuts, Sharding

MANIFEST = "manifest.json"
FORMAT = "fullshard.checkpoint"
VERSION = 1
"""All versions have the entries "format", "serial" and "crc32" with the same meaning: when a fullshard is downgraded and
upgraded again, each version must number its checkpoints above those of the other."""
DATA_FOLDER = re.compile(r"data-[0-9a-f]{12}")
MAX_BYTES = 1 << 30
"""Bytes of a manifest that is read: far more than any has, and no more than fits into memory."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint."""

    dtype: torch.dtype
    sharding: Sharding
    """It has one list of holders: the ranks that wrote the cells."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the model's tensor."""
        order = self.sharding.order
        if order is None:
            return self.sharding.shape
        sizes = dict(zip(order, self.sharding.shape, strict=True))
        return tuple(sizes[dim] for dim in range(len(order)))


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The length and checksum of one file of a checkpoint."""

    nbytes: int
    header_crc32: int
    """Checksum of the first bytes: the length and the header itself."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The training run that wrote a checkpoint, and may remove it when it has newer ones."""

    run: str
    """The run's id: each model in each process has its own."""
    name: str
    """Name of the checkpoint's folder when it was written. A checkpoint with another name now was copied or renamed, and is
    never removed."""
    before: Mapping[str, int] = field(default_factory=dict)
    """Earlier runs that this one continues, with the last serial number of each."""


@dataclass(frozen=True, slots=True)
class BaseRecord:
    """The checkpoint that has the frozen parameters, which this one leaves out. See `base_weights`."""

    path: str
    """Absolute path."""
    relative: str
    """Path from this checkpoint's folder: both may have been moved together."""
    digest: str
    content: str = ""
    """Empty in older manifests, as is `save`."""
    save: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that is known of a checkpoint without reading tensors."""

    data: str
    """The folder of the tensor files, beside the manifest."""
    world: int
    tensors: Mapping[str, StoredTensor]
    """Tensors by key, tied ones once."""
    files: Mapping[int, FileRecord]
    """Files by the rank that wrote them; a rank that had nothing to write has none."""
    tied: Mapping[str, str] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    """See `source.Source.optimizer`."""
    extra: Any = None
    serial: int = 0
    """A number above those of all checkpoints that were beside this one when it was written."""
    run: RunRecord | None = None
    """None if the checkpoint was not saved with ``keep_last``; then it is never removed."""
    base: BaseRecord | None = None
    """None if the checkpoint has all parameters."""
    created: str = ""
    fullshard: str = ""
    torch: str = ""


def file_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


# --- writing ---------------------------------------------------------------------------------------


def text_of(manifest: Manifest) -> str:
    """Return the manifest as JSON, with a line for each tensor.

    Raises:
        CheckpointError: `parse` would refuse it. So no checkpoint is published that cannot be opened.
    """
    lists: dict[tuple[int, ...], int] = {}
    tensors = {}
    for key, stored in manifest.tensors.items():
        sharding = stored.sharding
        (ranks,) = sharding.holders
        record: dict[str, Any] = {
            "dtype": DTYPE_CODES[stored.dtype],
            "shape": list(sharding.shape),
            "cuts": [_cuts_as_json(cuts) for cuts in sharding.cuts],
            "ranks": lists.setdefault(ranks, len(lists)),
        }
        if sharding.order is not None:
            record["order"] = list(sharding.order)
        if sharding.flat:
            record["flat"] = True
        tensors[key] = record
    faults: list[str] = []
    parts: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "fullshard": manifest.fullshard,
        "torch": manifest.torch,
        "created": manifest.created,
        "serial": manifest.serial,
        "run": None if manifest.run is None else asdict(manifest.run),
        "world": manifest.world,
        "data": manifest.data,
        "files": {
            str(rank): {"bytes": file.nbytes, "header_crc32": f"{file.header_crc32:08x}"}
            for rank, file in manifest.files.items()
        },
        "ranks": [list(ranks) for ranks in lists],
        "tensors": tensors,
        "tied": dict(manifest.tied),
        "optimizer": json_values.encode(manifest.optimizer, "optimizer", faults),
        "extra": json_values.encode(manifest.extra, "extra", faults),
    }
    if manifest.base is not None:
        parts["base"] = asdict(manifest.base)
    assert not faults, f"checked when the save began: {faults}"
    parts["crc32"] = _checksum(parts)
    text = "{" + ",".join(_lines(parts)) + "\n}\n"
    try:
        _manifest(_parts(text.encode()))
    except _FAULTS as error:
        raise CheckpointError(
            f"A manifest must be one that can be read again; this one could not be: {error}. Nothing was saved."
        ) from error
    return text


def _lines(parts: Mapping[str, Any]) -> Iterator[str]:
    for name, value in parts.items():
        if name in ("files", "tensors") and value:
            inner = ",".join(f"\n  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            yield f"\n{json.dumps(name)}: {{{inner}}}"
        else:
            yield f"\n{json.dumps(name)}: {json.dumps(value, allow_nan=False)}"


def _cuts_as_json(cuts: Cuts) -> Any:
    return [cuts.start, cuts.step] if isinstance(cuts, range) else {"at": list(cuts)}


def _checksum(parts: Mapping[str, Any]) -> str:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"{zlib.crc32(text.encode()):08x}"


# --- reading ---------------------------------------------------------------------------------------


def read(path: Path) -> Manifest:
    """Return the manifest of the checkpoint in the folder ``path``."""
    return parse(read_bytes(path), path)


def read_bytes(path: Path) -> bytes:
    """Return the text of the manifest, which the first rank sends to all, so that all read the same checkpoint."""
    file = path / MANIFEST
    try:
        return content_of(file, max_bytes=MAX_BYTES)
    except FileNotFoundError:
        raise CheckpointError(
            f"A complete checkpoint is a folder with a {MANIFEST}; {path} {'has none' if path.is_dir() else 'is no folder'}. "
            "fullshard.checkpoint.latest(folder) finds the newest complete one in a folder."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def text_in(path: Path) -> bytes | None:
    """Return the text of the manifest in the folder ``path``, or None if it is certain that there is none.

    Raises:
        OSError: there may be one, which cannot be read.
    """
    try:
        return content_of(path / MANIFEST, max_bytes=MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None


def serial_in(text: bytes) -> int:
    """Return the serial number in a manifest of any version, or 0 if it is damaged: see `VERSION`."""
    try:
        return _count(_parts(text, any_version=True)["serial"], "serial")
    except _FAULTS:
        return 0


def parse(text: bytes, path: Path) -> Manifest:
    """Return the manifest that a text has, after checking everything that can be checked without the files."""
    file = path / MANIFEST
    try:
        return _manifest(_parts(text))
    except _FAULTS as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(
            f"{file} is not a usable manifest: {reason}. Load another checkpoint, or save this one again."
        ) from error


_FAULTS = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError)
"""Errors that may be raised when a file is not a valid manifest."""


def _parts(text: bytes, *, any_version: bool = False) -> dict[str, Any]:
    """Return the entries of a manifest, after checking format, version and checksum."""
    parts = json.loads(
        text, object_pairs_hook=json_values.without_repetition, parse_constant=_refuse
    )
    if not isinstance(parts, dict) or parts.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    if parts.get("version") != VERSION and not any_version:
        raise ValueError(f"this fullshard reads version {VERSION}, not {parts.get('version')!r}")
    if parts.pop("crc32", None) != _checksum(parts):
        raise ValueError("its checksum is wrong, so it was changed after it was written")
    return parts


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _manifest(parts: dict[str, Any]) -> Manifest:
    world = _count(parts["world"], "world")
    if not DATA_FOLDER.fullmatch(parts["data"]):
        raise ValueError(f"its data cannot be in {parts['data']!r}")
    lists = [tuple(_rank(rank, world) for rank in ranks) for ranks in parts["ranks"]]
    if any(len(set(ranks)) < len(ranks) for ranks in lists):
        raise ValueError("a list of ranks has one twice")
    manifest = Manifest(
        data=parts["data"],
        world=world,
        tensors={key: _tensor(key, record, lists) for key, record in parts["tensors"].items()},
        files={
            _rank(int(rank), world): FileRecord(
                _count(file["bytes"], "bytes"), int(file["header_crc32"], 16)
            )
            for rank, file in parts["files"].items()
        },
        tied={name: _text(stored) for name, stored in parts["tied"].items()},
        optimizer=json_values.decode(parts["optimizer"]),
        extra=json_values.decode(parts["extra"]),
        serial=_count(parts["serial"], "serial"),
        run=_run(parts.get("run")),  # older manifests do not have it
        base=_base(parts.get("base")),
        created=_text(parts["created"]),
        fullshard=_text(parts["fullshard"]),
        torch=_text(parts["torch"]),
    )
    _check_references(manifest)
    return manifest


def _run(record: Any) -> RunRecord | None:
    if record is None:
        return None
    before = {run: _count(serial, "a serial") for run, serial in record["before"].items()}
    return RunRecord(_text(record["run"]), _text(record["name"]), before)


def _base(record: Any) -> BaseRecord | None:
    if record is None:
        return None
    texts = (_text(record[name]) for name in ("path", "relative", "digest"))
    later = (_text(record.get(name, "")) for name in ("content", "save"))
    return BaseRecord(*texts, *later)


def _tensor(key: str, record: Mapping[str, Any], lists: Sequence[tuple[int, ...]]) -> StoredTensor:
    if not key.startswith((MODEL, OPTIMIZER)):
        raise ValueError(f"tensor {key!r} belongs neither to the model nor to the optimizer")
    if record["dtype"] not in DTYPES_BY_CODE:
        raise ValueError(f"tensor {key!r} has dtype {record['dtype']!r}")
    dtype = DTYPES_BY_CODE[record["dtype"]]
    if not are_sizes(record["shape"]):
        raise ValueError(f"tensor {key!r} has no shape that a tensor can have")
    shape = tuple(record["shape"])
    numel = math.prod(shape)
    if numel * dtype.itemsize >= 1 << 63:
        raise ValueError(f"tensor {key!r} has {numel} elements")
    order = tuple(record["order"]) if "order" in record else None
    if order is not None and sorted(order) != list(range(len(shape))):
        raise ValueError(f"tensor {key!r} has dimensions in the order {order}")
    flat = record.get("flat", False) is True
    sizes = (numel,) if flat else shape
    if len(record["cuts"]) != len(sizes):
        raise ValueError(f"tensor {key!r} has {len(record['cuts'])} cuts for {len(sizes)}")
    ranks = lists[_count(record["ranks"], f"ranks of {key!r}")] if lists else ()
    cuts = tuple(
        _cuts(key, each, size, len(ranks)) for each, size in zip(record["cuts"], sizes, strict=True)
    )
    sharding = Sharding(shape=shape, order=order, flat=flat, cuts=cuts, holders=(ranks,))
    if sharding.cells > len(ranks):
        raise ValueError(f"tensor {key!r} has {sharding.cells} pieces in {len(ranks)} files")
    return StoredTensor(dtype, sharding)


def _cuts(key: str, record: Any, size: int, most: int) -> Cuts:
    """Return cuts that cover the dimension: so cells can neither overlap nor be missing."""
    if isinstance(record, dict):
        at = tuple(_integer(each, f"a cut of {key!r}") for each in record["at"])
        if not at or at[0] != 0 or at[-1] > size or any(a > b for a, b in itertools.pairwise(at)):
            raise ValueError(f"tensor {key!r} has cuts at {at[:10]}, not rising from 0 to {size}")
        return at
    first, every = (_integer(each, f"a cut of {key!r}") for each in record)
    if first > 0 or every < 1 or (size - first) > every * max(most, 1):
        raise ValueError(f"tensor {key!r} of size {size} has cuts {record} in {most} files")
    return range(first, size, every)


def _check_references(manifest: Manifest) -> None:
    """Raise unless the manifest lists every tensor that it refers to, and refers to every tensor of the optimizer."""
    lost = [name for name in manifest.tied.values() if MODEL + name not in manifest.tensors]
    refs = {ref.key for ref in json_values.references(manifest.optimizer)}
    lost += sorted(refs - set(manifest.tensors))
    lost += [key for key in manifest.tensors if key.startswith(OPTIMIZER) and key not in refs]
    if lost:
        raise ValueError(f"these tensors are listed or referred to, not both: {lost[:10]}")
    if manifest.optimizer is not None:
        _check_optimizer(manifest.optimizer)


def _check_optimizer(optimizer: Mapping[str, Any]) -> None:
    state, groups, names = (optimizer.get(key) for key in ("state", "param_groups", CLASS))
    if not isinstance(state, dict) or not isinstance(groups, list):
        raise ValueError("its optimizer lacks state or param_groups")
    if not all(isinstance(each, dict) for each in (*state.values(), *groups)) or not all(
        isinstance(group.get("params"), list) for group in groups
    ):
        raise ValueError(
            "its optimizer's state is not a dict by parameter, or a group has no list of parameters"
        )
    params = [name for group in groups for name in group["params"]]
    if not all(isinstance(name, str) for name in (*params, *state)):
        raise ValueError("its optimizer has parameters that are not names")
    if AVERAGES in optimizer:
        _count(optimizer[AVERAGES]["updates"], "updates of averages")
        if not all(
            isinstance(own.get(AVERAGES, TensorRef("")), TensorRef) for own in state.values()
        ):
            raise ValueError("its averages are not tensors")
    if names is not None and not (
        isinstance(names, list)
        and names
        and all(isinstance(name, str) and name.isprintable() for name in names)
    ):
        raise ValueError("its optimizer's class is not a list of names")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{reprlib.repr(value)} is not a text")
    return value


def _integer(value: Any, what: str) -> int:
    if type(value) is not int:
        raise ValueError(f"{what} is {reprlib.repr(value)}, not an integer")
    return value


def _count(value: Any, what: str) -> int:
    if not 0 <= _integer(value, what) < 1 << 63:
        raise ValueError(f"{what} is {reprlib.repr(value)}")
    return int(value)


def _rank(value: Any, world: int) -> int:
    if not 0 <= _integer(value, "a rank") < world:
        raise ValueError(f"rank {value} is not below {world}")
    return int(value)
