"""Any format becomes any other, and nothing that it can hold is lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from fullshard import CheckpointError, ConfigurationError
from fullshard.checkpoint import manifest as manifests
from fullshard.checkpoint.sources.conversion import FORMATS, convert, write, write_checkpoint
from fullshard.checkpoint.sources.differences import differences
from fullshard.checkpoint.sources.formats import load, open_source
from tests.helpers.checkpoints import MemorySource, plain_source, value_of
from tests.helpers.models import ModelOptions, make_decoder, tokens_for

NAMES = {
    "fullshard": "fullshard",
    "huggingface": "Hugging Face",
    "dcp": "DCP",
    "torch": "torch",
}


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_decoder(ModelOptions(depth=1, scalar=True), seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(tokens_for(0, 4)).backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same checkpoint in all formats."""
    folder = tmp_path_factory.mktemp("made")
    model, optimizer = trained()
    source = plain_source(model, optimizer, {"step": 3, "seen": (1, None)})
    for each in FORMATS:
        write(source, folder / each, to=each)
    return folder


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("to", FORMATS)
def test_any_format_becomes_any_other(made: Path, tmp_path: Path, source: str, to: str) -> None:
    target = tmp_path / "target"
    convert(made / source, target, to=to)
    first, second = open_source(made / source), open_source(target)
    assert second.format == NAMES[to]
    found = differences(first, second)
    if to == "huggingface" and source != "huggingface":  # the model only
        assert all(key.startswith("optimizer/") for key in found.only_first)
        assert not found.tensors and not found.only_second
        assert second.optimizer is None and second.extra is None
    else:
        assert not found
    assert found.compared >= 11


@pytest.mark.parametrize("files", [1, 2, 3, 20])
def test_a_converted_checkpoint_is_loaded(made: Path, tmp_path: Path, files: int) -> None:
    convert(made / "dcp", tmp_path / "own", to="fullshard", files=files)
    manifest = manifests.read(tmp_path / "own")
    assert len(manifest.files) == min(files, 13), "the largest number of rows is 13"
    model, optimizer = trained(seed=1)
    loaded = load(tmp_path / "own", model, optimizer)
    assert loaded.extra == {"step": 3, "seen": (1, None)}
    expected = plain_source(*trained())
    assert not differences(plain_source(model, optimizer), expected)


def test_unusual_tensors_are_divided_and_put_together(tmp_path: Path) -> None:
    values = {
        "model/empty": torch.empty(0, 3),
        "model/no_columns": torch.empty(3, 0),
        "model/scalar": torch.tensor(3),
        "model/row": torch.randn(1, 9).half(),
        "model/rows": torch.randn(7, 2, 3),
    }
    source = MemorySource(values, tied={"again": "rows"})
    write_checkpoint(source, tmp_path / "own", files=3)
    found = open_source(tmp_path / "own")
    assert source.largest_read == 18, "three rows of seven"
    assert found.tied == {"again": "rows"}
    for key, value in values.items():
        assert torch.equal(value_of(found, key), value)


def test_what_is_damaged_is_not_converted(made: Path, tmp_path: Path) -> None:
    convert(made / "fullshard", tmp_path / "own", to="fullshard")
    (file,) = (tmp_path / "own").glob("data-*/*")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    for to in FORMATS:
        with pytest.raises(CheckpointError, match="damaged"):
            convert(tmp_path / "own", tmp_path / to, to=to)
        left = tmp_path / to
        assert not left.exists() or not any(left.iterdir()), "nothing is left behind"


@pytest.mark.parametrize("calls", range(6))
def test_a_failed_write_leaves_a_whole_checkpoint_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    flushed = 0

    def fail(descriptor: int) -> None:
        nonlocal flushed
        if flushed == calls:
            raise OSError(errno.ENOSPC, "disk full")
        flushed += 1

    monkeypatch.setattr(os, "fsync", fail)
    source = plain_source(nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="disk full"):
        write_checkpoint(source, tmp_path / "own")
    if (tmp_path / "own").exists():  # the last flushes come when it is published
        assert calls >= 4
        assert not differences(open_source(tmp_path / "own"), source)


def test_targets_and_options_are_checked_first(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="one of fullshard, huggingface, dcp, torch"):
        convert(made / "dcp", tmp_path / "x", to="zip")
    with pytest.raises(ConfigurationError, match="got 2 for dcp"):
        convert(made / "dcp", tmp_path / "x", to="dcp", files=2)
    with pytest.raises(ConfigurationError, match="got 0"):
        convert(made / "dcp", tmp_path / "x", to="fullshard", files=0)
    for to in FORMATS:
        with pytest.raises(CheckpointError, match="must be converted to a new path"):
            convert(made / "dcp", made / "fullshard", to=to)
    with pytest.raises(CheckpointError, match="has none of them"):
        open_source(tmp_path)
    with pytest.raises(CheckpointError, match="is not there"):
        open_source(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_large_tensors_beside_the_model_are_refused_by_name(tmp_path: Path) -> None:
    source = MemorySource({"model/w": torch.ones(2), "extra/mean/w": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"extra/mean/w: a tensor of torch.float32"):
        write_checkpoint(source, tmp_path / "own")
    source = MemorySource({}, extra={"when": tmp_path})
    with pytest.raises(CheckpointError, match=r"extra.when: pathlib"):
        write_checkpoint(source, tmp_path / "own")
    assert not (tmp_path / "own").exists()
