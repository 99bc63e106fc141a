"""`import fullshard` changes nothing in a process, and docs/process.md lists what its use changes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import process_changes

PAGE = Path(__file__).parents[1] / "docs" / "process.md"


def told_by(*arguments: str) -> list[dict[str, list[str]]]:
    """What `process_changes` prints in a new interpreter, line by line."""
    command = [sys.executable, "-W", "ignore", "-m", process_changes.__name__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_an_import_changes_nothing() -> None:
    bare, public, everything = told_by("import")
    assert bare.pop("modules") == ["fullshard"]
    assert "fullshard.divergence.watchdog.thread" in public.pop("modules")
    assert "fullshard.checkpoint.folders.process_exit" in everything.pop("modules")
    for found in (bare, public, everything):
        assert not any(found.values()), found


def test_what_would_change_a_process_is_seen() -> None:
    """The test above can fail."""
    (found,) = told_by("change")
    del found["modules"]
    assert found == {
        "calls": [
            "atexit.register",
            "multiprocessing.util.Finalize",
            "os.register_at_fork",
            "signal.signal",
            "threading.Thread.start",
        ],
        "environment": ["SOMETHING"],
        "replaced": ["sys.excepthook", "torch.nn.modules.module.Module.zero_grad"],
        "threads": ["something"],
    }


@pytest.mark.slow
def test_the_page_lists_what_a_step_and_a_checkpoint_change(tmp_path: Path) -> None:
    sharded, used, saved = told_by("train", str(tmp_path))
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    listed = set(re.findall(r"`([\w.\[\]]+)`", "\n".join(row.split(" | ")[0] for row in rows)))
    replaced = set(saved["replaced"])
    assert replaced <= listed
    # ... and nothing that is not there any more.
    assert {
        name for name in listed if name.startswith(("torch.", "sys.", "threading.e"))
    } - replaced <= {
        "torch.distributed.checkpoint.state_dict.FSDP",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining.stage._PipelineStageBase",
    }
    sections = PAGE.read_text().split("\n## ")
    for found, before, section in (
        (sharded, [], sections[1]),
        (used, sharded["replaced"], sections[2]),
    ):
        for name in set(found["replaced"]) - set(before):
            assert f"`{name}`" in section, name
    assert sharded["threads"] == []
    assert used["threads"] == ["fullshard-watchdog", "fullshard-watchdog-store"]
    assert not any(
        found["environment"] or "signal.signal" in found["calls"]
        for found in (sharded, used, saved)
    )
    assert "atexit.register" in sharded["calls"]


@pytest.mark.slow
def test_the_watchdog_and_its_hooks_are_switched_off_by_one_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULLSHARD_WATCHDOG", "0")
    _, used, _ = told_by("train", str(tmp_path))
    assert used["threads"] == []
    assert not {"sys.excepthook", "threading.excepthook"} & set(used["replaced"])
    assert "atexit.register" not in used["calls"]
