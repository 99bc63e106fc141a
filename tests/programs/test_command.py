"""`fullshard train` as users run it: what is refused before anything starts, and whole runs in processes of their own."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from rich.text import Text
from typer.testing import CliRunner

import fullshard
from fullshard.drop_in import program
from fullshard.drop_in.program import cap_cpu_instructions
from fullshard.errors import CheckpointError
from fullshard.programs import cli
from fullshard.programs.train import launch
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.config_file import read_config, to_toml
from fullshard.programs.train.rank_info import RankInfo
from tests.helpers.runs import last_losses, records, tiny

ROOT = Path(__file__).parents[2]
LAUNCHER = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


def environment() -> dict[str, str]:
    known = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    return known | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def python(
    *arguments: str, executable: str = sys.executable, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [executable, *arguments],
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=130,
        check=False,
    )


def settings(*wanted: str) -> list[str]:
    return [word for each in wanted for word in ("--set", each)]


def refusal(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """Return the message of a run that must end with exit code 2 before any rank starts."""
    result = CliRunner().invoke(cli.build_app(), ["train", *arguments], env=environment)
    assert result.exit_code == 2, (result.output, result.exception)
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def must_not_start(*_: object, **__: object) -> None:
    raise AssertionError("this run was to be refused")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run is started in this process, and none has its folder here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "launch", must_not_start)
    monkeypatch.setattr(launch, "join", must_not_start)


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "0"), "run.ranks must be a whole number, at least 1, or left out"),
        (("--ranks", "two"), 'run.ranks must be a whole number, at least 1, or left out; --set says "two"'),
        (("--set", "train.stepz=1"), "Did you mean train.steps?"),
        (("none.toml",), "There is no file none.toml."),
        (("--ranks", "3"), "train.batch must be divisible by ranks * train.accumulate: 16 / (3 * 1)"),
        (settings("sharding.replicas=3", "run.device=cpu"), "2 / 3 leaves 2. 1 or 2 would do"),
        (settings("train.batch=15", "sharding.replicas=2"), "15 / (2 * 1) leaves 1"),
        (settings("model.width=100", "model.heads=3"), "102 would do as model.width"),
        (settings("data.path=no-such-file"), "no-such-file"),
        (settings("data.context=9000000"), "data.context"),
        (settings("model.huggingface=no-such-folder"), "no-such-folder"),
        (("--folder", "a-file"), "a-file is a file"),
        (("--steps", "10"), "No such option"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], message: str) -> None:
    Path("a-file").touch()
    assert message in refusal(*arguments)
    assert [each.name for each in Path().iterdir()] == ["a-file"], "no run was begun"


def test_all_problems_come_in_one_message() -> None:
    message = refusal(
        *settings("train.stepz=1", "optimizer.lr=-1", "data.path=nowhere"), "--ranks", "3"
    )
    for part in ("4 problems", "train.stepz", "optimizer.lr", "nowhere", "16 / (3 * 1)"):
        assert part in message


def test_a_fresh_run_leaves_the_old_one_to_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    begun: list[object] = []
    monkeypatch.setattr(launch, "launch", lambda *_, fresh: begun.append(fresh))
    arguments = ["train", "--fresh", "--folder", "run", *settings("run.device=cpu")]
    assert CliRunner().invoke(cli.build_app(), arguments).exit_code == 0
    assert begun == [True]
    assert [each.name for each in Path().iterdir()] == ["run"], "model and data come first"


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "num_gpus", lambda: 1)
    message = refusal(*settings("run.device=cuda", "run.ranks=2"))
    assert "2 ranks on this machine, 1 GPUs" in message


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "num_gpus", lambda: 0)
    assert "and there is none" in refusal("--set", "run.device=cuda")
    message = refusal(*settings("sharding.offload=true", "sharding.replicas=4"))
    assert "sharding.offload needs CUDA" in message
    assert "2 / 4 leaves 2" in message


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, ("--ranks", "4"), "run.ranks must agree with the launcher: got 4, but it has started 2"),
        ({}, ("--fresh",), "--fresh is not allowed under a launcher"),
        ({"MASTER_PORT": ""}, (), "MASTER_PORT"),
        ({"WORLD_SIZE": "3"}, (), "16 / (3 * 1) leaves 1"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_a_launcher_is_refused(
    changes: dict[str, str], arguments: tuple[str, ...], message: str
) -> None:
    environment = {name: value for name, value in (LAUNCHER | changes).items() if value}
    wanted = settings("run.device=cpu", "train.steps=0")
    assert message in refusal(*arguments, *wanted, environment=environment)


def test_only_the_first_rank_of_a_launcher_complains() -> None:
    assert refusal("--set", "train.steps=0", environment={**LAUNCHER, "RANK": "1"}) == ""


def test_help_and_a_wrong_configuration_do_not_wait_for_torch() -> None:
    program = (
        "import sys\n"
        "from fullshard.programs.cli import main\n"
        "for arguments in (['--help'], ['--fields'], ['--set', 'train.steps=0', '--set', 'data.path=none']):\n"
        "    sys.argv[1:] = ['train', *arguments]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        print('code', end.code)\n"
        "assert 'torch' not in sys.modules\n"
    )
    answer = python("-c", program)
    assert answer.returncode == 0, answer.stderr
    assert re.findall(r"^code (\d)", answer.stdout, re.MULTILINE) == ["0", "0", "2"]
    assert "--ranks" in answer.stdout
    assert "train.steps must be" in answer.stderr and "none" in answer.stderr


def test_every_command_knows_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    verbs = (f"checkpoint {verb}" for verb in ("inspect", "verify", "convert", "diff"))
    app = cli.build_app()
    for command in (
        "",
        "train",
        "inspect",
        "report",
        "evaluate",
        "export",
        "env",
        "checkpoint",
        *verbs,
    ):
        result = CliRunner().invoke(app, [*command.split(), "--version"])
        assert result.exit_code == 0, command
        assert result.stdout.startswith(
            f"fullshard {fullshard.__version__} (torch {torch.__version__.partition('+')[0]}"
        )
    with pytest.raises(SystemExit, match="0"):
        program.main(["--version"], "fullshard run")
    assert capsys.readouterr().out.startswith(f"fullshard {fullshard.__version__} (torch ")


def test_one_section_s_fields_are_listed_and_fit_a_narrow_terminal() -> None:
    with patch.dict(os.environ, {"COLUMNS": "60", "FORCE_COLOR": "1"}):
        result = CliRunner().invoke(cli.build_app(), ["train", "--fields", "schedule"])
    shown = Text.from_ansi(result.stdout).plain
    assert shown.startswith("[schedule]") and "[optimizer]" not in shown
    assert 'kind = "cosine"  fixed\n    How it falls after the warm-up.' in shown
    assert max(map(len, shown.splitlines())) <= 60
    assert "schedul is none. The sections: run, model, " in refusal("--fields", "schedul")


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"typer is not installed.*fullshard\[cli\]"):
        cli.main()


def test_the_command_keeps_onednn_off_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    cap_cpu_instructions()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    cap_cpu_instructions()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_the_command_lets_nccl_keep_the_process_unless_the_user_has_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["fullshard", "--version"])
    for name, own in (
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"),
        ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "500"),
    ):
        for chosen, kept in ((None, own), ("3", "3")):
            if chosen is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, chosen)
            with pytest.raises(SystemExit):
                cli.main()
            assert os.environ[name] == kept


def test_the_documentation_has_all_fields_as_the_command_lists_them() -> None:
    result = CliRunner().invoke(cli.build_app(), ["train", "--fields"])
    assert result.exit_code == 0
    assert (ROOT / "docs" / "training.md").read_text().endswith(result.output), (
        "docs/training.md ends with what `fullshard train --fields` prints into a file"
    )


# --- whole runs --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_stops_when_told_to_and_goes_on_when_started_again(
    tmp_path: Path, preloaded_python: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(to_toml(tiny(tmp_path, "train.steps=100000")))
    config = read_config(file)
    command = [sys.executable, "-m", "fullshard", "train", str(file), "--ranks", "2"]
    with (
        subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as run,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(
            run.kill
        )  # Popen would wait for a run that a failed assertion has left running
        deadline = time.monotonic() + 100
        while not (config.run.folder / "metrics.jsonl").exists() or len(last_losses(config)) < 3:
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        _, errors = run.communicate(timeout=100)
    assert run.returncode == 143, errors
    assert "SIGTERM: the ranks save a checkpoint and leave." in errors
    [stopped] = records(config, "stopped")
    steps = stopped["step"] + 2
    wanted = settings(f"train.steps={steps}", "run.ranks=1")
    # As the only rank of a launcher, so that no other interpreter is started.
    launcher = LAUNCHER | {"WORLD_SIZE": "1", "MASTER_PORT": "0"}
    arguments = ("-m", "fullshard", "train", str(file), *wanted)
    again = python(*arguments, executable=preloaded_python, **launcher)
    assert again.returncode == 0, again.stderr
    assert sorted(last_losses(config)) == list(range(1, steps + 1))
    assert read_config(config.run.folder / "config.toml").train.steps == steps


def test_a_checkpoint_that_cannot_be_written_is_a_message_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CheckpointError("The disk is full.")

    from fullshard.programs.train import rank

    monkeypatch.setattr(rank, "run_rank", fail)
    place = RankInfo(rank=0, world=1, local_rank=0, local_world=1, device="cpu", rendezvous="")
    error = launch._launched_rank(RunConfig(), place, fresh=False)
    assert isinstance(error, CheckpointError)
    monkeypatch.setattr(launch, "launch", fail)
    result = CliRunner().invoke(cli.build_app(), ["train", *settings("run.device=cpu")])
    assert result.exit_code == 1
    assert result.stderr.strip() == "The disk is full."


def test_a_failing_rank_is_shown_once(tmp_path: Path) -> None:
    # Ranks import the main program too, so what it puts in the place of the real thing is there in them.
    program = (
        "import sys, types\n"
        "from fullshard.programs.cli import main\n"
        "def fail(config, place, fresh):\n"
        "    raise ValueError('this rank fails')\n"
        "sys.modules['fullshard.programs.train.rank'] = types.SimpleNamespace(run_rank=fail)\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    (tmp_path / "program.py").write_text(program)
    run = python(str(tmp_path / "program.py"), "train", *settings("run.device=cpu"))
    assert run.returncode == 1, run.stderr
    assert run.stderr.count("Traceback") == 1
    assert "ValueError: this rank fails" in run.stderr
    assert re.search(r"Rank \d of 2 failed; the other ranks were stopped.", run.stderr)
