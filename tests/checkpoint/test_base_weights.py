"""Checkpoints of only what training changes: without frozen parameters, which are those of a base."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import checkpoint
from fullshard.checkpoint import base_weights, manifest as manifests
from fullshard.checkpoint.sources.conversion import write
from fullshard.checkpoint.sources.formats import open_source
from fullshard.checkpoint.sources.torch_files import TorchFile
from fullshard.errors import CheckpointError
from tests.helpers.checkpointed import ODD, Setting, train, whole_state
from tests.helpers.compare import assert_equal

FROZEN = ("blocks.0.up.weight", "blocks.0.up.bias", "blocks.0.scale", "norm.weight")
MODEL = replace(ODD, depth=1, frozen=FROZEN)
APIS = ("functional", "wrapper")


def save_all(folder: Path) -> None:
    for api in APIS:
        model, optimizer = Setting(api=api, model=MODEL).build()
        path = folder / api
        checkpoint.save(path / "base", model)
        base = checkpoint.base_of(path / "base", model)
        train(model, optimizer, range(2))
        checkpoint.async_save(path / "step", model, optimizer, base=base, extra=3).wait()
        state = whole_state(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(state, path / "state.pt")
        every = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(
            CheckpointError, match=r"must not have them; it has:\n  blocks.0.norm.weight\n"
        ):
            checkpoint.save(path / "never", model, every, base=base)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(9.0)
        with pytest.raises(
            CheckpointError, match=r"(?s)blocks.0.scale: other values.*norm.weight: other"
        ):
            checkpoint.base_of(path / "base", model)


def load_all(folder: Path) -> None:
    for number, api in enumerate(APIS):
        path = folder / APIS[number - 1]
        expected = torch.load(path / "state.pt")
        for base in (None, folder / "huggingface"):
            model, optimizer = Setting(api=api, model=MODEL).build(seed=5)
            loaded = checkpoint.load(path / "step", model, optimizer, base=base)
            assert loaded.extra == 3
            assert_equal(whole_state(model, optimizer), expected)


def test_the_rest_is_loaded_from_the_base_on_any_ranks(world: Any, tmp_path: Path) -> None:
    world(2).run(save_all, tmp_path)
    manifest = json.loads((tmp_path / "wrapper" / "step" / "manifest.json").read_text())
    kept = {key.split("/")[1] for key in manifest["tensors"]}
    assert kept.isdisjoint(FROZEN) and "blocks.0.down.weight" in kept
    write(open_source(tmp_path / "functional" / "base"), tmp_path / "huggingface", to="huggingface")
    world(3).run(load_all, tmp_path)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of one process, `step`, with the base beside it."""
    model, optimizer = Setting(api="plain", model=MODEL).build()
    checkpoint.save(tmp_path / "run" / "base", model)
    base = checkpoint.base_of(tmp_path / "run" / "base", model)
    checkpoint.save(tmp_path / "run" / "step", model, optimizer, base=base)
    return tmp_path / "run"


def test_a_base_that_is_missing_or_another_one_is_refused(saved: Path) -> None:
    model, optimizer = Setting(api="plain", model=MODEL).build(seed=5)
    moved = saved.rename(saved.with_name("moved"))
    checkpoint.load(moved / "step", model, optimizer)
    before = whole_state(model, optimizer)
    shutil.rmtree(moved / "base")
    with pytest.raises(CheckpointError, match=r"needs its base.*moved/base or .*Pass the path"):
        checkpoint.load(moved / "step", model, optimizer)
    other, _ = Setting(api="plain", model=MODEL).build(seed=7)
    checkpoint.save(moved / "base", other)
    with pytest.raises(CheckpointError, match="has other names, shapes, dtypes or values"):
        checkpoint.load(moved / "step", model, optimizer)
    with pytest.raises(CheckpointError, match="needs no base"):
        checkpoint.load(moved / "base", model, base=moved / "base")
    assert_equal(whole_state(model, optimizer), before)


# --- another base, or the same at another place ---------------------------------------------------------------


def changed(base: Path, key: str, into: Path, element: int = -1) -> None:
    """Another base: one element of one tensor differs."""
    source = TorchFile(base)
    content = {name.removeprefix("model/"): source._data[name].clone() for name in source.tensors}
    content[key].view(-1)[element] += 1
    torch.save(content, into)


def adapted() -> nn.Sequential:
    """A frozen layer of more elements than a quick digest has, and a trained one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 60), nn.Linear(60, 2))
    model[0].requires_grad_(False)
    return model


def is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except CheckpointError as error:
        assert "has other names, shapes, dtypes or values" in str(error)
        return True
    return False


def test_one_element_anywhere_makes_another_base(tmp_path: Path) -> None:
    model = adapted()
    torch.save(model.state_dict(), tmp_path / "base.pt")
    base = checkpoint.base_of(tmp_path / "base.pt", model)
    checkpoint.save(tmp_path / "step", model, base=base)
    for key, element in (("0.weight", -1), ("0.weight", 1500), ("0.bias", 0), ("1.bias", 1)):
        changed(tmp_path / "base.pt", key, tmp_path / "other.pt", element)
        assert is_refused(
            lambda: checkpoint.load(tmp_path / "step", adapted(), base=tmp_path / "other.pt")
        )
        if key.startswith("0"):
            with pytest.raises(CheckpointError, match=f"{key}: other values"):
                checkpoint.base_of(tmp_path / "other.pt", model)
    for form in ("fullshard", "huggingface", "dcp"):  # the same base in other formats
        write(open_source(tmp_path / "base.pt"), tmp_path / form, to=form)
        checkpoint.load(tmp_path / "step", adapted(), base=tmp_path / form)


def load_in_parts(step: Path, base: Path) -> tuple[bool, str]:
    """Whether another base is refused, and the digest of this one."""
    base_weights.AT_ONCE = 500
    refused = is_refused(lambda: checkpoint.load(step, adapted(), base=base))
    model = adapted()
    checkpoint.load(base, model)
    return refused, checkpoint.base_of(base, model).content


def test_ranks_read_a_base_together_and_all_refuse_another_one(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_weights, "AT_ONCE", 500)
    torch.save(adapted().state_dict(), tmp_path / "base.pt")
    base = checkpoint.base_of(tmp_path / "base.pt", adapted())
    checkpoint.save(tmp_path / "step", adapted(), base=base)
    changed(tmp_path / "base.pt", "0.weight", tmp_path / "other.pt")
    run = partial(world(2).run, load_in_parts, tmp_path / "step")
    assert run(tmp_path / "base.pt") == [(False, base.content)] * 2
    (refused, content), other = run(tmp_path / "other.pt")
    assert refused and content != base.content and other == (refused, content)


def test_the_very_save_is_known_without_reading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted()
    checkpoint.save(tmp_path / "base", model)
    checkpoint.save(tmp_path / "step", model, base=checkpoint.base_of(tmp_path / "base", model))
    monkeypatch.setattr(base_weights, "content_digest", lambda *_: pytest.fail("all was read"))
    checkpoint.load(tmp_path / "step", adapted())
    monkeypatch.undo()
    # Saved again, it is another save with the same content.
    checkpoint.save(tmp_path / "base", model)
    checkpoint.load(tmp_path / "step", adapted())
    with torch.no_grad():
        next(model.parameters())[-1, -1] += 1
    checkpoint.save(tmp_path / "base", model)
    assert is_refused(lambda: checkpoint.load(tmp_path / "step", adapted()))


def test_a_copied_run_uses_the_base_that_was_copied_with_it(saved: Path) -> None:
    copied = Path(shutil.copytree(saved, saved.with_name("copied")))
    other, _ = Setting(api="plain", model=MODEL).build(seed=7)
    checkpoint.save(saved / "base", other)  # the original run goes on with another base
    model, optimizer = Setting(api="plain", model=MODEL).build(seed=5)
    checkpoint.load(copied / "step", model, optimizer)
    # What is beside it is another one, and where the base was is the right one.
    shutil.copytree(copied / "base", saved / "base", dirs_exist_ok=True)
    checkpoint.save(copied / "base", other)
    checkpoint.load(copied / "step", model, optimizer)
    checkpoint.save(saved / "base", other)
    with pytest.raises(CheckpointError, match=r"(?s)copied/base has other .*run/base has other"):
        checkpoint.load(copied / "step", model, optimizer)


def test_a_record_of_an_older_version_is_compared_as_it_was(saved: Path) -> None:
    file = saved / "step" / "manifest.json"
    parts = json.loads(file.read_text())
    for name in ("content", "save"):
        del parts["base"][name]
    del parts["crc32"]
    parts["crc32"] = manifests._checksum(parts)
    file.write_text(json.dumps(parts))
    model, optimizer = Setting(api="plain", model=MODEL).build(seed=5)
    checkpoint.load(saved / "step", model, optimizer)
