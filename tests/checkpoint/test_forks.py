"""A process that is forked from one that saves: it has copies of all objects, none of the threads, and shares the locks."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from fullshard import CheckpointError, checkpoint
from fullshard.checkpoint.folders.unfinished_save import is_locked
from fullshard.checkpoint.manifest import MANIFEST
from tests.checkpoint.test_save import Gate


def in_a_fork(function: Callable[[], object]) -> bool:
    """Whether the function ended without an error in a process that was forked here."""
    process = os.fork()
    if process == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_process_that_is_forked_during_a_save_saves_by_itself(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with Gate() as gate:
        pending = checkpoint.async_save(tmp_path / "parent", model)

        def save() -> None:
            gate.open.set()
            with pytest.raises(
                CheckpointError, match=f"that began a save .*process {os.getppid()}"
            ):
                pending.wait()
            checkpoint.save(tmp_path / "child", model)
            checkpoint.async_save(tmp_path / "later", model).wait()
            checkpoint.async_save(tmp_path / "other", model, when_busy="refuse").wait()

        assert in_a_fork(save)
        assert not pending.done()
    pending.wait()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["child", "later", "other", "parent"]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_process_has_a_training_run_of_its_own(tmp_path: Path) -> None:
    models = [nn.Linear(2, 2)]
    checkpoint.save(tmp_path / "parent-1", models[0], keep_last=1)

    def save() -> None:
        for step in (1, 2):
            checkpoint.save(tmp_path / f"child-{step}", models[0], keep_last=1)
        models.clear()
        gc.collect()

    assert in_a_fork(save)
    assert is_locked(tmp_path / "parent-1" / MANIFEST)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["child-2", "parent-1"]
    checkpoint.save(tmp_path / "parent-2", models[0], keep_last=1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["child-2", "parent-2"]
