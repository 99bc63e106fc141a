"""What is beside a checkpoint may be anybody's, and what is read may be replaced or removed meanwhile."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

from fullshard import CheckpointError, checkpoint
from fullshard.checkpoint import load_plan, manifest as manifests, save_plan
from fullshard.checkpoint.folders import publication
from fullshard.programs.checkpoint_tool import contents, verification
from fullshard.programs.checkpoint_tool.command import app


def filled(value: float) -> nn.Linear:
    model = nn.Linear(3, 3)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


def before_first_call(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, happens: Callable[[], object]
) -> None:
    """Let something happen when a function is called for the first time."""
    function = getattr(place, name)
    pending = [happens]

    def call(*args: Any, **kwargs: Any) -> Any:
        if pending:
            pending.pop()()
        return function(*args, **kwargs)

    monkeypatch.setattr(place, name, call)


# --- replaced and removed while it is read -------------------------------------------------------------------


def test_a_reader_that_meets_a_replacement_reads_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last"
    for turn, (place, name) in enumerate([(load_plan, "compare"), (load_plan, "_verify")]):
        checkpoint.save(path, filled(turn), extra=turn)
        before_first_call(
            monkeypatch, place, name, lambda: checkpoint.save(path, filled(7), extra="new")
        )
        model = filled(0)
        assert checkpoint.load(path, model).extra == "new"
        assert bool((model.weight == 7).all())
        monkeypatch.undo()
    for command, place, name in [
        ("verify", verification, "_batches"),
        ("inspect", contents, "locate_tensors"),
    ]:
        before_first_call(monkeypatch, place, name, lambda: checkpoint.save(path, filled(8)))
        found = CliRunner().invoke(app, [command, str(path), *["--pieces"][: command == "inspect"]])
        assert found.exit_code == 0, found.output
        monkeypatch.undo()


def test_a_folder_of_hugging_face_that_is_replaced_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks could have opened one the old files, another one the new ones, and nothing would have failed."""
    path = tmp_path / "model"
    checkpoint.save_huggingface(path, filled(1))
    for load in (checkpoint.load_huggingface, checkpoint.load):
        before_first_call(
            monkeypatch,
            load_plan,
            "compare",
            lambda: checkpoint.save_huggingface(path, filled(2), overwrite=True),
        )
        model = filled(0)
        load(path, model)
        assert bool((model.weight == 2).all())
        monkeypatch.undo()
        checkpoint.save_huggingface(path, filled(1), overwrite=True)


def test_a_reader_of_what_was_removed_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "old"
    checkpoint.save(path, filled(0))
    before_first_call(monkeypatch, load_plan, "_verify", lambda: shutil.rmtree(path))
    with pytest.raises(CheckpointError, match="old was removed while it was read"):
        checkpoint.load(path, filled(1))


def test_the_newest_one_is_found_while_older_ones_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between listing and reading, the only one is removed, since there is a newer one: that is the answer."""
    model = filled(0)
    checkpoint.save(tmp_path / "b", model, keep_last=1)
    for place, name, newer in [(manifests, "text_in", "a"), (publication, "_has_length", "0")]:
        before_first_call(
            monkeypatch,
            place,
            name,
            partial(checkpoint.save, tmp_path / newer, model, keep_last=1),
        )
        assert checkpoint.latest(tmp_path) == tmp_path / newer
        monkeypatch.undo()


# --- verified before anything is removed ---------------------------------------------------------------------


def save_on_a_bad_disk(folder: Path) -> None:
    """What one rank writes is not what is there afterwards: data, the header, the file itself."""
    model = filled(0)
    checkpoint.save(folder / "step-1", model, keep_last=1)
    write_file = save_plan.write_file
    fault = ""

    def write_badly(path: Path, *args: Any, **kwargs: Any) -> Any:
        record = write_file(path, *args, **kwargs)
        if fault == "lost":
            path.unlink()
        else:
            at = 20 if fault == "header" else path.stat().st_size - 1
            with path.open("r+b") as file:
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))
        return record

    for fault in ("data", "header", "lost"):  # noqa: B007  (what writes reads it)
        for name in ("step-2", "step-1"):
            save_plan.write_file = write_badly  # type: ignore[assignment]
            try:
                with pytest.raises(CheckpointError, match="is still there"):
                    checkpoint.save(folder / name, model, keep_last=1)
            finally:
                save_plan.write_file = write_file


def test_nothing_is_removed_for_a_checkpoint_that_cannot_be_read(
    world: Any, tmp_path: Path
) -> None:
    world(2).run(save_on_a_bad_disk, tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["step-1"]
    assert len(list((tmp_path / "step-1").iterdir())) == 2
    checkpoint.load(tmp_path / "step-1", filled(1))


def save_by_other_names(folder: Path) -> list[Path]:
    """Ranks that are given other paths, or are elsewhere, save and load together by the first one's."""
    rank = dist.get_rank()
    before = Path.cwd()
    (folder / f"cwd-{rank}").mkdir()
    os.chdir(folder / f"cwd-{rank}")
    try:
        model = filled(3)
        saved = checkpoint.save(f"at-{rank}", model)
        pending = checkpoint.async_save("later", model)
        return [saved.path, pending.wait().path, checkpoint.load("later", model).path]
    finally:
        os.chdir(before)


def test_all_ranks_are_told_where_the_checkpoint_is(world: Any, tmp_path: Path) -> None:
    folder = tmp_path / "cwd-0"
    expected = [folder / "at-0", folder / "later", folder / "later"]
    assert world(2).run(save_by_other_names, tmp_path) == [expected, expected]


# --- things that nobody may read -----------------------------------------------------------------------------


@pytest.fixture
def not_root() -> Iterator[Path]:
    """A folder of one's own for somebody who may not read everything."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        (folder / "lost+found").chmod(0o700)
        shutil.rmtree(folder)


@pytest.mark.filterwarnings("ignore:.*is skipped")
def test_what_cannot_be_read_beside_a_checkpoint_is_left_alone(not_root: Path) -> None:
    model = filled(0)
    lost = not_root / "lost+found"
    lost.mkdir()
    lost.chmod(0o000)
    (not_root / "broken").symlink_to("nowhere")
    (not_root / "loop").symlink_to("loop")
    (not_root / "file").touch()
    secret = not_root / "secret"
    checkpoint.save(secret, model)
    (secret / "manifest.json").chmod(0o000)
    for step in (1, 2, 3):
        checkpoint.save(not_root / f"step-{step}", model, keep_last=2)
        checkpoint.async_save(not_root / f"step-{step}", model, keep_last=2).wait()
    assert checkpoint.latest(not_root) == not_root / "step-3"
    with pytest.warns(UserWarning, match="lost.found is skipped: .*Permission denied"):
        checkpoint.latest(not_root)
    assert sorted(each.name for each in not_root.iterdir()) == sorted(
        ["broken", "file", "loop", "lost+found", "secret", "step-2", "step-3"]
    )
    # That nothing can be known of the folder itself is no answer: a run would begin anew.
    with pytest.raises(CheckpointError, match="cannot be searched for checkpoints"):
        checkpoint.latest(lost)
    with pytest.raises(CheckpointError, match="Permission denied"):
        checkpoint.load(lost, model)
    with pytest.raises(CheckpointError, match="Permission denied"):
        checkpoint.load(lost / "below", model)
    # A disk of one's own is as good as an empty folder.
    (not_root / "disk" / "lost+found").mkdir(parents=True)
    (not_root / "disk" / "lost+found").chmod(0o000)
    checkpoint.save(not_root / "disk", model, keep_last=1)
    checkpoint.save(not_root / "disk", model, keep_last=1)
    checkpoint.load(not_root / "disk", model)
    (not_root / "disk" / "lost+found").chmod(0o700)
    # A folder that can be written to, and not be listed.
    (not_root / "blind").mkdir()
    (not_root / "blind").chmod(0o300)
    with pytest.warns(UserWarning, match="No old checkpoint in .*blind is removed.*Permission"):
        checkpoint.save(not_root / "blind" / "step-1", model, keep_last=1)
    checkpoint.load(not_root / "blind" / "step-1", model)
    (not_root / "blind").chmod(0o700)
