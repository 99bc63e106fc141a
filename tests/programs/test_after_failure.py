"""What a user reads after a rank has failed: whether memory was the cause, and how to go on."""

import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fullshard.checkpoint
from fullshard.programs import cli
from fullshard.programs.run_events import Step, line_of
from fullshard.programs.train import after_failure, launch
from fullshard.programs.train.memory_kills import memory_kills
from fullshard.programs.train.processes import RankFailedError

COUNTER = Path("counter")


def step(number: int) -> Step:
    return Step(step=number, loss=1.0, grad_norm=1.0, lr=1.0, tokens=1, step_s=1.0, memory_bytes=1)


def told(
    monkeypatch: pytest.MonkeyPatch,
    error: RankFailedError,
    folder: Path,
    kills: tuple[dict[Path, int], dict[Path, int]],
) -> str:
    """Return what the command prints if its ranks end with this error, with these kills before and after."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(launch, "run_in_processes", fail)
    monkeypatch.setattr(launch, "memory_kills", lambda: kills[0])
    monkeypatch.setattr(after_failure, "memory_kills", lambda: kills[1])
    arguments = ["train", "--folder", str(folder), "--set", "run.device=cpu"]
    result = CliRunner().invoke(cli.build_app(), arguments)
    assert result.exit_code == 1, result.output
    return result.stderr


@pytest.mark.parametrize(
    ("error", "kills", "cause"),
    [
        (RankFailedError("gone", signal.SIGKILL), ({COUNTER: 3}, {COUNTER: 4}), "the likely cause"),
        (RankFailedError("gone", signal.SIGKILL), ({COUNTER: 3}, {COUNTER: 3}), "no kill for lack"),
        (RankFailedError("gone", signal.SIGKILL), ({}, {}), "its log says which (dmesg)"),
        (RankFailedError("gone", signal.SIGSEGV), ({COUNTER: 3}, {COUNTER: 4}), None),
        (RankFailedError("torch.OutOfMemoryError: ..."), ({}, {}), "Memory ran out"),
        (RankFailedError("ValueError: ..."), ({COUNTER: 3}, {COUNTER: 4}), None),
    ],
)
def test_memory_is_named_as_the_cause_only_with_evidence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: RankFailedError,
    kills: tuple[dict[Path, int], dict[Path, int]],
    cause: str | None,
) -> None:
    text = told(monkeypatch, error, tmp_path / "run", kills)
    if cause is None:
        assert text.strip() in ("gone", "ValueError: ...")
    else:
        assert cause in text


def test_the_command_that_goes_on_is_given_and_from_which_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.toml").touch()
    (folder / "metrics.jsonl").write_bytes(line_of(step(12)) + line_of(step(37)))
    newest: list[Path | None] = [folder / "checkpoints" / "step_00000030", None]
    monkeypatch.setattr(fullshard.checkpoint, "latest", lambda _: newest.pop(0))
    command = f"\n  fullshard train '{folder / 'config.toml'}'\n"
    error = RankFailedError("gone")
    assert told(monkeypatch, error, folder, ({}, {})).endswith(
        f"This command resumes after step 30, and repeats steps 31 to 37:{command}"
    )
    assert told(monkeypatch, RankFailedError("gone"), folder, ({}, {})).endswith(
        f"from the start: there is no checkpoint yet, and repeats steps 1 to 37:{command}"
    )


def test_kills_of_the_machine_and_of_both_kinds_of_control_groups_are_counted(
    tmp_path: Path,
) -> None:
    files = {
        "proc/vmstat": "nr_free_pages 7\noom_kill 2\n",
        "proc/self/cgroup": "4:memory:/job/1\n1:cpu:/\n0::/box\n",
        "sys/fs/cgroup/memory/job/1/memory.oom_control": "under_oom 0\noom_kill 5\n",
        "sys/fs/cgroup/box/memory.events": "oom 9\noom_kill 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert sorted(memory_kills(tmp_path).values()) == [1, 2, 5]
    assert not memory_kills(tmp_path / "elsewhere")
