"""Files that others wrote, or damaged: whatever is in them, the only thing that happens is the documented error.

Each parser gets 600 mutations of a good file, in a process with little memory and time: it neither hangs nor takes
much. After that come single files, crafted to be small and to cost much.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fullshard import CheckpointError, ConfigurationError, checkpoint
from fullshard.checkpoint import manifest as manifests
from fullshard.checkpoint.source import Source
from fullshard.checkpoint.sources.dcp import DcpCheckpoint, write_dcp
from fullshard.checkpoint.sources.formats import open_source
from fullshard.checkpoint.sources.huggingface import HuggingFaceFolder, save_huggingface
from fullshard.checkpoint.sources.stored_checkpoint import StoredCheckpoint
from fullshard.checkpoint.sources.torch_files import TorchFile, write_torch_file
from fullshard.checkpoint.tensor_files import TensorFile
from fullshard.layout.blocks import whole
from fullshard.programs.checkpoint_tool.contents import describe
from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.diagnosis import diagnose
from fullshard.programs.report.run_files import read_run
from fullshard.programs.train.config_file import read_config, to_toml
from fullshard.programs.train.run_folder import RunFolder
from tests.helpers.checkpoints import plain_source, value_of
from tests.helpers.hostile import (
    NUM_INPUTS,
    in_small_process,
    json_text,
    mutated_bytes,
    mutated_tree,
    nested,
    rewrite,
    value,
)
from tests.helpers.run_folders import Machine, write_run


def fuzz(try_one: Callable[[random.Random], None], error: type[Exception]) -> None:
    """Call a function for many seeds; it may raise one kind of error."""

    def all_of_them() -> None:
        good = 0
        warnings.simplefilter("ignore")
        for seed in range(NUM_INPUTS):
            try:
                try_one(random.Random(seed))
                good += 1
            except Exception as caught:
                if type(caught) is not error:
                    raise AssertionError(f"seed {seed}") from caught
        assert good > NUM_INPUTS // 100, "nearly nothing was accepted: what was tested?"

    in_small_process(all_of_them)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


EXTRA = {"rng": torch.arange(5), "names": ["a", (1.5, None)]}


def read_all(source: Source) -> None:
    """What `inspect` and `verify` do with a checkpoint."""
    json.dumps(describe(source, pieces=True))
    for key, info in source.tensors.items():
        if not source.verify([(key, whole(info.shape))]):
            source.read(key, whole(info.shape), torch.empty(info.shape, dtype=info.dtype))
    source.close()


# --- checkpoints -------------------------------------------------------------------------------------------


def with_checksum(parts: Any) -> bytes:
    if isinstance(parts, dict):
        parts.pop("crc32", None)
        with contextlib.suppress(ValueError):
            text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
            parts["crc32"] = f"{zlib.crc32(text.encode()):08x}"
    return json_text(parts)


def test_manifests(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, *trained(), extra=EXTRA)
    good = (tmp_path / "manifest.json").read_bytes()
    tree = json.loads(good)

    def try_one(chance: random.Random) -> None:
        crafted = chance.random() < 0.8
        text = with_checksum(mutated_tree(chance, tree)) if crafted else mutated_bytes(chance, good)
        manifest = manifests.parse(text, tmp_path)
        rewrite(tmp_path / "manifest.json", text)
        read_all(StoredCheckpoint(tmp_path, manifest))

    fuzz(try_one, CheckpointError)


def test_tensor_files(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, *trained())
    (file,) = tmp_path.glob("data-*/*.safetensors")
    good = file.read_bytes()
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])
    record = manifests.read(tmp_path).files[0]

    def try_one(chance: random.Random) -> None:
        if chance.random() < 0.5:
            text = json_text(mutated_tree(chance, header))
            rewrite(file, len(text).to_bytes(8, "little") + text + good[8 + length :])
        else:
            rewrite(file, mutated_bytes(chance, good))
        if chance.random() < 0.5:  # one that we wrote, or that others wrote
            written = file.read_bytes()
            checksum = zlib.crc32(written[: 8 + int.from_bytes(written[:8], "little")])
            known = manifests.FileRecord(len(written), checksum)
            found = TensorFile(file, known if chance.random() < 0.8 else record)
        else:
            found = TensorFile(file, None)
        for key, entry in found.entries.items():
            found.read_into(key, 0, torch.empty(entry.shape, dtype=entry.dtype))
        found.verify([(entry.begin, entry.end) for entry in found.entries.values()])
        found.close()

    fuzz(try_one, CheckpointError)


def test_metadata_of_dcp(tmp_path: Path) -> None:
    folders = [tmp_path / "with optimizer", *[tmp_path / "model"] * 9]  # which takes much less time
    write_dcp(plain_source(*trained()), folders[0])
    write_dcp(plain_source(trained()[0], extra={"n": 1}), folders[1])
    good = {folder: (folder / ".metadata").read_bytes() for folder in folders}

    def try_one(chance: random.Random) -> None:
        folder = chance.choice(folders)
        content = good[folder]
        if chance.random() < 0.6:
            metadata = pickle.loads(content)
            mutate_metadata(chance, metadata)
            with contextlib.suppress(RuntimeError, TypeError, ValueError):  # torch cannot write it
                content = pickle.dumps(metadata, protocol=chance.choice((2, 4, 5)))
        if content == good[folder] or chance.random() < 0.1:
            content = mutated_bytes(chance, content)
        rewrite(folder / ".metadata", content)
        read_all(DcpCheckpoint(folder))

    fuzz(try_one, CheckpointError)


def mutate_metadata(chance: random.Random, metadata: Any) -> None:
    """Put something else in the place of an attribute of some object in metadata."""
    records = [metadata, *metadata.storage_data, *metadata.storage_data.values()]
    for entry in metadata.state_dict_metadata.values():
        chunks = getattr(entry, "chunks", [])
        records += [entry, *chunks, getattr(entry, "properties", entry)]
    for _ in range(chance.randint(1, 3)):
        changed = chance.choice(records)
        new = value(chance)
        if chance.random() < 0.3:
            new = torch.Size([chance.choice((0, 1, 2, 2**40))] * chance.choice((1, 3, 24, 100)))
        if chance.random() < 0.3 and vars(changed):
            other = chance.choice([each for each in records if vars(each)])
            new = chance.choice(list(vars(other).values()))
        name = chance.choice(list(vars(changed)) or ["x"])
        object.__setattr__(changed, name, new)
    if chance.random() < 0.3 and isinstance(metadata.planner_data, dict):
        with contextlib.suppress(TypeError):
            metadata.planner_data[chance.choice(list(metadata.planner_data))] = value(chance)


def test_data_of_dcp(tmp_path: Path) -> None:
    write_dcp(plain_source(trained()[0], extra={"names": ["a", (1.5, None)]}), tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    good = file.read_bytes()

    def try_one(chance: random.Random) -> None:
        rewrite(file, mutated_bytes(chance, good).ljust(len(good), b"\0"))
        read_all(DcpCheckpoint(tmp_path))

    fuzz(try_one, CheckpointError)


def test_files_of_torch_save(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    write_torch_file(plain_source(*trained(), extra=EXTRA), file)
    good = file.read_bytes()
    content = torch.load(file, weights_only=True)

    def try_one(chance: random.Random) -> None:
        if chance.random() < 0.6:
            memory = io.BytesIO()
            torch.save(mutated_tree(chance, content), memory)
            rewrite(file, memory.getvalue())
        else:
            rewrite(file, mutated_bytes(chance, good))
        read_all(TorchFile(file))

    fuzz(try_one, CheckpointError)


def test_folders_of_hugging_face(tmp_path: Path) -> None:
    save_huggingface(tmp_path / "hf", nn.Linear(3, 2), max_file_bytes=20)
    file = tmp_path / "hf/model.safetensors.index.json"
    good = json.loads(file.read_bytes())

    def try_one(chance: random.Random) -> None:
        rewrite(file, json_text(mutated_tree(chance, good)))
        if chance.random() < 0.3:
            rewrite(file, mutated_bytes(chance, file.read_bytes()))
        read_all(HuggingFaceFolder(tmp_path / "hf"))

    fuzz(try_one, CheckpointError)


def doubled(depth: int = 60) -> Any:
    """A few bytes that are 2 ** 60 values, if one walks them."""
    found: Any = ("x", "y")
    for _ in range(depth):
        found = (found, found)
    return found


def many_dimensions(metadata: Metadata) -> None:
    """A chunk beside its tensor in every one of 24 dimensions: it has 16 million corners."""
    ones = torch.Size((1,) * 24)
    metadata.state_dict_metadata["model.weight"] = TensorStorageMetadata(
        TensorProperties(torch.float32), ones, [ChunkStorageMetadata(ones, ones)]
    )
    (place,) = (v for k, v in metadata.storage_data.items() if k.fqn == "model.weight")
    metadata.storage_data[MetadataIndex("model.weight", ones)] = place


def shared_chunks(metadata: Metadata) -> None:
    entry: Any = metadata.state_dict_metadata["model.weight"]
    (place,) = (v for k, v in metadata.storage_data.items() if k.fqn == "model.weight")
    chunks = entry.chunks * 3000
    for number in range(3000):
        name = f"model.{number}"
        metadata.state_dict_metadata[name] = replace(entry, chunks=chunks)
        metadata.storage_data[MetadataIndex(name, entry.chunks[0].offsets)] = place


COSTLY_METADATA: dict[str, Callable[[Any], Any]] = {
    "many dimensions": many_dimensions,
    "a path": lambda m: m.planner_data.update({"model.weight": doubled()}),
    "part of a path": lambda m: m.planner_data.update({"model.weight": ("model", doubled())}),
    "a name": lambda m: m.state_dict_metadata.update({doubled(5): None}),
    "a shape": lambda m: m.state_dict_metadata["model.weight"].__dict__.update(size=doubled()),
    "a dtype": lambda m: m.state_dict_metadata["model.weight"].properties.__dict__.update(
        dtype=doubled()
    ),
    "a file": lambda m: [
        v.__dict__.update(relative_path=doubled()) for v in m.storage_data.values()
    ],
    "an offset": lambda m: [k.__dict__.update(offset=doubled()) for k in m.storage_data],
    "shared chunks": shared_chunks,
}


@pytest.mark.parametrize("change", COSTLY_METADATA.values(), ids=COSTLY_METADATA)
def test_metadata_that_would_cost_much_are_refused(
    tmp_path: Path, change: Callable[[Any], Any]
) -> None:
    write_dcp(plain_source(*trained()), tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    change(metadata)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    in_small_process(partial(expect_refusal, tmp_path))


COSTLY_PICKLES = {
    "a memo of 4 billion": b"Nr\xff\xff\xff\xff.",
    "a key of 2 ** 60 values": b"}K\x01" + b"\x85q\x00h\x00\x86" * 60 + b"Ns.",
    "a text of 4 billion": b"\x8d\x00\x00\x00\x00\xff\x00\x00\x00.",
    "an integer of 4 billion bytes": b"\x8b\xff\xff\xff\x7f.",
    "a size of a list, copied": b"](" + b"N" * 10**6 + b"eq\x00"
    b"ctorch\nSize\nq\x010(" + b"h\x01h\x00\x85R" * 10**4 + b"t.",
    "a stack of marks": b"(" * 10**6 + b".",
}


@pytest.mark.parametrize("content", COSTLY_PICKLES.values(), ids=COSTLY_PICKLES)
def test_pickles_that_would_cost_much_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    in_small_process(partial(expect_refusal, tmp_path))


def expect_refusal(folder: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_source(folder)
    assert not isinstance(caught.value.__cause__, MemoryError)
    assert len(str(caught.value)) < 10_000


def test_64_dimensions_are_no_work(tmp_path: Path) -> None:
    values = torch.arange(4.0).reshape((1,) * 40 + (2, 2) + (1,) * 22)
    write_dcp(plain_source(Holding(values)), tmp_path)
    assert torch.equal(value_of(DcpCheckpoint(tmp_path), "model/values"), values)


class Holding(nn.Module):
    """A buffer."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("values", values)


COSTLY_VALUES: dict[str, Any] = {
    "shared": doubled(),
    "deep": nested(list, 5000),
    "expanded": {"t": torch.zeros(1).expand(1 << 40)},
}


@pytest.mark.parametrize("value", COSTLY_VALUES.values(), ids=COSTLY_VALUES)
@pytest.mark.parametrize("place", ["model", "optimizer", "extra"])
def test_values_that_would_cost_much_are_refused(tmp_path: Path, value: Any, place: str) -> None:
    if place == "extra" and isinstance(value, dict):
        return  # left out, with a warning
    state = {"model": {"w": torch.ones(1)}, place: value}
    save_deep(state, tmp_path / "file.pt")
    in_small_process(partial(expect_refusal, tmp_path / "file.pt"))


def save_deep(state: Any, path: Path) -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        torch.save(state, path)
    finally:
        sys.setrecursionlimit(limit)


def test_compressed_files_are_refused(tmp_path: Path) -> None:
    """They would be unpacked: to 1000 times their size."""
    torch.save({"w": torch.zeros(1000)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "file.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(CheckpointError, match="compresses nothing"):
        open_source(tmp_path / "file.pt")


def test_pipes_in_the_place_of_files_are_not_waited_for(tmp_path: Path) -> None:
    for name in ("manifest.json", ".metadata", "model.safetensors.index.json"):
        os.mkfifo(tmp_path / name)
    for read in (manifests.read, DcpCheckpoint, HuggingFaceFolder):
        with pytest.raises(CheckpointError, match="not a regular file"):
            read(tmp_path)


# --- runs --------------------------------------------------------------------------------------------------


def test_configurations(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.touch()
    good = to_toml(read_config(None)).encode()
    settings = [line for line in good.decode().splitlines() if "=" in line]

    def try_one(chance: random.Random) -> None:
        if chance.random() < 0.5:
            rewrite(file, mutated_bytes(chance, good))
            read_config(file)
        else:
            read_config(None, [hostile_setting(chance, settings)])

    fuzz(try_one, ConfigurationError)


def hostile_setting(chance: random.Random, settings: list[str]) -> str:
    """A `--set` with a strange value, or a strange text."""
    from fullshard.programs.train.config_fields import config_sections

    section = chance.choice(list(config_sections().values()))
    name = f"{section.name}.{chance.choice(list(section.fields))}"
    text = chance.choice(
        (
            *(
                "9" * 5000,
                "1e999",
                "nan",
                "-inf",
                "[" * 3000,
                "{a" * 50,
                "'''",
                "1979-05-27",
                "\x00",
            ),
            *(
                "[1, 2, [3]]",
                "{a = 1}",
                "-1",
                "0",
                "true",
                "\x1b[2J",
                "é",
                "1_000",
                "0xff",
                " ",
                "",
            ),
            *(str(2**63), str(-(2**70)), "1e308", "[]", "x" * 10_000, '"\\ud800"', "\ud800"),
        )
    )
    setting = f"{name}={text}"
    if chance.random() < 0.3:
        setting = mutated_bytes(chance, setting.encode(errors="replace")).decode(errors="replace")
    return setting


MACHINE = Machine(layers=1, slow_gathers={"layers.0": 5000}, world=1)


class Drawing:
    """Stands for all of plotly's classes, which take a hundred times as long to check what they are given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.content = [*args, kwargs]

    def to_plotly_json(self) -> Any:
        return json.loads(json.dumps(self.content, allow_nan=False, default=vars))


def test_run_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics, traces and configuration, and all that is computed from them."""
    pytest.importorskip("plotly")  # which the modules below import
    from fullshard.programs.report import (
        chart,
        group_charts,
        memory_chart,
        page,
        run_charts,
        timeline_chart,
    )

    write_run(tmp_path, MACHINE, steps=6, num_traced=1)
    trace, metrics, config = (
        tmp_path / name for name in ("trace/rank_00000.json", "metrics.jsonl", "config.toml")
    )
    good = {file: file.read_bytes() for file in (trace, metrics, config)}
    records = [json.loads(line) for line in good[metrics].splitlines()]
    events = json.loads(good[trace])
    layout = SimpleNamespace(Template=Drawing)
    stand_in = SimpleNamespace(Scatter=Drawing, Bar=Drawing, Figure=Drawing, layout=layout)
    for module in (chart, run_charts, timeline_chart, group_charts, memory_chart):
        monkeypatch.setattr(module, "go", stand_in)
    monkeypatch.setattr(page, "get_plotlyjs", str)

    def try_one(chance: random.Random) -> None:
        for file, content in good.items():
            rewrite(file, mutated_bytes(chance, content) if chance.random() < 0.2 else content)
        if chance.random() < 0.6:
            lines = [json_text(record) for record in mutated_tree(chance, records)]
            rewrite(metrics, b"\n".join(lines))
        if chance.random() < 0.6:
            rewrite(trace, json_text(mutated_tree(chance, events)))
        run = read_run(tmp_path)
        diagnose(Analysis(run))
        folder = RunFolder(tmp_path)
        folder.is_finished(6)
        if chance.random() < 0.05:  # takes ten times as long as all else
            page.render(run).encode()
            with contextlib.suppress(ConfigurationError):
                folder.check(read_config(None))

    fuzz(try_one, ConfigurationError)
