"""`fullshard train` as users run it: wrong options, and whole runs in processes of their own."""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fullshard import cli
from fullshard.train import launch
from fullshard.train.loop import train
from fullshard.train.options import TrainOptions
from fullshard.train.progress import Silence
from fullshard.train.text import read_text
from tests.helpers.ranks import World

MakeWorld = Callable[[int], World]

TINY = TrainOptions(
    device="cpu", steps=6, batch=4, context=16, layers=2, width=16, heads=2, lr=0.01
)
LAUNCHER = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )


def refusal(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """Return the message of a run that must end with exit code 2 before any rank starts."""
    result = CliRunner().invoke(cli.build_app(), ["train", *arguments], env=environment)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def arguments_of(options: TrainOptions) -> list[str]:
    """Return the arguments that make the command build these options."""
    arguments = []
    for name, value in dataclasses.asdict(options).items():
        if value is not None:
            arguments += [f"--{name}", str(value)]
    return arguments


def train_here(options: TrainOptions) -> dict[str, float]:
    text = read_text(options.text, context=options.context)
    result = train(options, text, device=torch.device("cpu"), watcher=Silence())
    return {
        "first step": result.losses[0],
        "last step": result.losses[-1],
        "held out, before": result.held_out_before,
        "held out, after": result.held_out_after,
    }


def expected_losses(world: MakeWorld) -> dict[str, float]:
    losses: dict[str, float] = world(2).run(train_here, TINY)[0]
    return losses


def check_report(output: str, expected: dict[str, float]) -> None:
    rows = re.findall(r"(first step|last step|held out, \w+)\W+([\d.]+)", output)
    losses = {name: float(nats) for name, nats in rows}
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses["last step"] < losses["first step"]
    assert losses["held out, after"] < losses["held out, before"]
    assert output.count("sharded over 2 cpu ranks.") == 1
    assert re.search(r"rank 1\W+[\d,]+\W+(49|50)\.\d%", output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--width", "100", "--heads", "3"), "width must be divisible by heads"),
        (("--width", "12", "--heads", "4"), "width / heads must be even"),
        (("--ranks", "0"), "ranks must be at least 1, got 0."),
        (("--steps", "0"), "steps must be at least 1, got 0."),
        (("--device", "tpu"), "device must be one of auto, cpu, cuda"),
        (("--precision", "fp8"), "precision must be one of fp32, bf16"),
        (("--text", "no-such-file"), "there is none at no-such-file"),
        (("--context", "9000000"), "Use a smaller --context or a longer --text."),
        (("--steps", "many"), "Invalid value"),
        (("--no-such-option",), "No such option"),
    ],
)
def test_wrong_options_get_one_message(arguments: tuple[str, ...], message: str) -> None:
    assert message in refusal(*arguments)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "num_gpus", lambda: 1)
    message = refusal("--device", "cuda", "--ranks", "2")
    assert "2 ranks on this machine, 1 GPUs. Use --ranks 1, or --device cpu." in message


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "num_gpus", lambda: 0)
    assert "Use --device cpu." in refusal("--device", "cuda")


def test_ranks_that_disagree_with_the_launcher_are_refused() -> None:
    message = refusal("--device", "cpu", "--ranks", "3", environment=LAUNCHER)
    assert "got --ranks 3, but WORLD_SIZE is 2" in message


def test_a_launcher_that_says_too_little_is_refused() -> None:
    environment = {name: value for name, value in LAUNCHER.items() if name != "MASTER_PORT"}
    message = refusal("--device", "cpu", environment=environment)
    assert "not set: MASTER_PORT" in message


def test_only_the_first_rank_of_a_launcher_complains() -> None:
    assert refusal("--steps", "0", environment={**LAUNCHER, "RANK": "1"}) == ""


def test_help_and_wrong_options_do_not_wait_for_torch() -> None:
    program = (
        "import sys\n"
        "from fullshard.cli import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    assert 'torch' not in sys.modules\n"
    )
    answer = python("-c", program, "train", "--help")
    assert answer.returncode == 0, answer.stderr
    assert "--ranks" in answer.stdout
    answer = python("-c", program, "train", "--steps", "0")
    assert answer.returncode == 2, answer.stderr
    assert answer.stderr == "Error: steps must be at least 1, got 0.\n"


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"typer is not installed.*fullshard\[cli\]"):
        cli.main()


def test_the_command_keeps_onednn_off_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    cli.cap_cpu_instructions()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    cli.cap_cpu_instructions()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"


@pytest.mark.slow
def test_ranks_started_here_train_and_report(world: MakeWorld) -> None:
    run = python("-m", "fullshard", "train", "--ranks", "2", *arguments_of(TINY))
    assert run.returncode == 0, run.stderr
    check_report(run.stdout, expected_losses(world))


@pytest.mark.slow
def test_ranks_of_torchrun_train_and_report(world: MakeWorld) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = python(*torchrun, "-m", "fullshard", "train", *arguments_of(TINY))
    assert run.returncode == 0, run.stderr
    check_report(run.stdout, expected_losses(world))


@pytest.mark.slow
def test_a_failing_rank_is_shown_once(tmp_path: Path) -> None:
    # Ranks import the main program too, so what it replaces is replaced in them.
    program = (
        "from fullshard.cli import main\n"
        "from fullshard.train import rank\n"
        "def fail(options, place):\n"
        "    raise ValueError('this rank fails')\n"
        "rank.run_rank = fail\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    (tmp_path / "program.py").write_text(program)
    run = python(str(tmp_path / "program.py"), "train", *arguments_of(TINY))
    assert run.returncode == 1, run.stderr
    assert run.stderr.count("Traceback") == 1
    assert "ValueError: this rank fails" in run.stderr
    assert re.search(r"Rank \d of 2 failed; the other ranks were stopped.", run.stderr)
