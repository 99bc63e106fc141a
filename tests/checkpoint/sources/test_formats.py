"""`load` takes a checkpoint of any format, into shards of either API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard import CheckpointError, checkpoint
from fullshard.checkpoint.sources.conversion import FORMATS, convert
from tests.helpers.checkpointed import Setting, train, whole_state
from tests.helpers.compare import assert_equal
from tests.helpers.models import ModelOptions, make_decoder


def load_all(folder: Path, api: str, expected: dict[str, Any]) -> None:
    for name in FORMATS:
        model, optimizer = Setting(api=api).build(seed=5)
        if name == "huggingface":
            loaded = checkpoint.load(folder / name, model)
            assert_equal(whole_state(model, optimizer)["model"], expected["model"])
            assert loaded.extra is None
        else:
            loaded = checkpoint.load(folder / name, model, optimizer)
            assert_equal(whole_state(model, optimizer), expected)
            assert loaded.extra == {"step": 2}


@pytest.mark.parametrize("api", ["functional", "flat"])
def test_any_format_is_loaded(world: Any, tmp_path: Path, api: str) -> None:
    model, optimizer = Setting(api="plain").build()
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path / "fullshard", model, optimizer, extra={"step": 2})
    for name in FORMATS[1:]:
        convert(tmp_path / "fullshard", tmp_path / name, to=name)
    world(2).run(load_all, tmp_path, api, whole_state(model, optimizer))


def test_tied_here_and_different_there_is_an_error(tmp_path: Path) -> None:
    untied, tied = (make_decoder(ModelOptions(depth=1, tied=each)) for each in (False, True))
    before = {name: value.clone() for name, value in tied.state_dict().items()}
    checkpoint.save(tmp_path / "a", untied)
    with pytest.raises(CheckpointError, match=r"not: head.weight and embed.weight"):
        checkpoint.load(tmp_path / "a", tied)
    assert_equal(tied.state_dict(), before)
    with torch.no_grad():
        untied.head.weight.copy_(untied.embed.weight)
    checkpoint.save(tmp_path / "a", untied)
    checkpoint.load(tmp_path / "a", tied)
    assert_equal(tied.state_dict(), untied.state_dict())


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    model = make_decoder()
    with pytest.raises(CheckpointError, match=r"(?s)has none of them.*latest"):
        checkpoint.load(tmp_path, model)
    with pytest.raises(CheckpointError, match="is not there"):
        checkpoint.load(tmp_path / "nobody", model)
