"""Every command in README, docs/ and the other pages works.

- Commands of `fullshard` are run here, in a folder that has what the pages speak of, with the values of `SMALLER` in the
  place of large ones. Training runs on the ranks of the tests, not in processes of its own.
- Other commands are in `ELSEWHERE`, each with the file that runs it, and the reason. Their options are read here, by the
  parsers of the programs themselves.

A command that is new must run here, or get a line in `ELSEWHERE`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import shlex
import subprocess
import sys
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed import run as torchrun
from typer.testing import CliRunner, Result

from fullshard.checkpoint.sources.conversion import write
from fullshard.programs import cli
from fullshard.programs.train import launch
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.config_file import read_config, to_toml
from tests.helpers.checkpoints import plain_source
from tests.helpers.page_programs import blocks
from tests.helpers.runs import TINY, run, write_text

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(ROOT / folder / "README.md" for folder in ("examples", "benchmarks")),
    *sorted((ROOT / "docs").glob("*.md")),
]

PROGRAMS = (
    "accelerate|bash|conda|docker|export|fullshard|git|kubectl|make|pip|pre-commit|python3?|sbatch|srun|tensorboard|"
    "torchrun|uv|wandb"
)

SMALLER = {"RUN": "runs/small", "traces": "runs/small/trace", "1000": "2"}
"""What stands in a page, and what is tried in its place: names for a run and its traces, and a step that a short run has."""

ELSEWHERE = {
    r"pip install '[\w.]*\[\w+(,\w+)*\]'": ("needs a network; the extras are looked up here", "Makefile"),
    r"make [\w-]+( \w+=.*)?": ("make looks for the target here", ".ci/run"),
    r"pre-commit install": ("changes the clone", ".pre-commit-config.yaml"),
    r"python step_a.py|torchrun --nproc-per-node \d step_\w+.py": ("on ranks of the tests", "tests/docs/test_guide.py"),
    r"torchrun .*examples/\w+.py .*": ("on ranks of the tests, in few steps", "tests/programs/test_examples.py"),
    r"torchrun .*examples.clients.\w+": ("needs its libraries", "tests/clients/test_clients.py"),
    r"torchrun .* -m (torchtitan.train|trl.scripts.\w+) \.\.\.": ("needs its libraries", "tests/clients/test_clients.py"),
    r"(torchrun .* -m )?fullshard plan calibrate .*": ("needs a GPU", "tests/programs/plan_tool/test_calibrate.py"),
    r"torchrun --nnodes=2 .*": ("two hosts", "tests/programs/test_two_hosts.py"),
    r"export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1": ("two hosts", "tests/programs/test_two_hosts.py"),
    r"torchrun [^=]*-m fullshard.run train.py.*": ("under torchrun", "tests/drop_in/test_program.py"),
    r"python -m fullshard.run.*": ("in a process of its own", "tests/drop_in/test_program.py"),
    r"accelerate launch .*": ("needs Accelerate", "tests/clients/test_clients.py"),
    r"srun .*": ("a stand-in for Slurm", "tests/programs/test_launch.py"),
    r"python (benchmarks/\w+.py|-m benchmarks.\w+).*": ("takes minutes or a GPU; in parts", "tests/programs/test_benchmarks.py"),
    r"python -m tests.helpers.divergences": ("takes minutes; most cases", "tests/promises/test_divergence.py"),
    r"python docs/build_api.py": ("rewrites a page", "tests/docs/test_api.py"),
    r"python docs/build_images.py": ("trains for minutes and makes pictures; by hand", "docs/build_images.py"),
    r"python -m fullshard.programs.report.reference": ("prints tables", "tests/programs/report/test_remedies.py"),
    r"wandb sync.*": ("needs wandb and an account", "docs/training.md"),
    r"fullshard evaluate RUN.*": ("starts ranks", "tests/programs/test_evaluate.py"),
    r"fullshard plan llama3-8b .*": ("searches for seconds; with a small model", "tests/programs/plan_tool/test_plan_command.py"),
    r"fullshard plan .* --html .*": ("plans many numbers of GPUs", "tests/programs/plan_tool/test_plan_page.py"),
    r"fullshard train .* --set data.path=chats.jsonl .*": ("imports transformers", "tests/programs/test_records.py"),
    r"fullshard export RUN/best": ("needs a run that keeps them", "tests/programs/test_best_weights.py"),
    r"fullshard export .* --ema": ("needs a run with averages", "tests/programs/test_averages.py"),
    r"fullshard export .* --config-from .*": ("imports transformers", "tests/programs/test_export.py"),
}  # fmt: skip
"""Commands that do not run here: how they look, why, and what runs them or what they do."""


class Command(NamedTuple):
    page: str
    text: str
    shown: str = ""
    """What the page says it prints."""

    @property
    def words(self) -> list[str]:
        return [SMALLER.get(word, word) for word in shlex.split(self.text, comments=True)]


# --- reading the pages ---------------------------------------------------------------------------


def commands(page: Path) -> Iterator[Command]:
    """Commands in indented blocks, after a `$` in any block, and between backticks in the text."""
    name, text = page.name, page.read_text()
    text = text.replace("\\\n", " ")
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    after_dollar = rf"^( *)\$ ((?:{PROGRAMS}) .*)\n((?:\1(?!```|\$ ).*\n|\n)*)"
    for _, command, shown in re.findall(after_dollar, text, re.MULTILINE):
        yield Command(name, without_comment(command), shown)
    for command in re.findall(rf"^    ((?:{PROGRAMS}) .*)", prose, re.MULTILINE):
        yield Command(name, without_comment(command))
    for command in re.findall(rf"`((?:{PROGRAMS})\s[^`]*)`", prose):
        yield Command(name, " ".join(command.split()))


def without_comment(command: str) -> str:
    return re.sub(r"\s+#.*", "", command).strip()


COMMANDS = [command for page in PAGES for command in commands(page)]


def elsewhere(command: Command) -> str | None:
    """The pattern by which a command is known to run elsewhere."""
    return next((each for each in ELSEWHERE if re.fullmatch(each, command.text)), None)


HERE = [each for each in COMMANDS if each.text.startswith("fullshard ") and not elsewhere(each)]


def test_every_command_runs_here_or_is_known_to_run_elsewhere() -> None:
    assert len(HERE) > 20 and len(COMMANDS) > 80, "the pages are read wrongly"
    unknown = [
        f"{each.page}: {each.text}" for each in COMMANDS if each not in HERE and not elsewhere(each)
    ]
    assert not unknown, "commands that nothing runs; see the top of this file"
    assert set(ELSEWHERE) == set(map(elsewhere, COMMANDS)) - {None}, "no page has these"
    for _, where in ELSEWHERE.values():
        assert (ROOT / where).is_file(), where


# --- commands of fullshard -----------------------------------------------------------------------


def invoke(words: list[str]) -> Result:
    return CliRunner().invoke(cli.build_app(), words, terminal_width=200)


def in_folder(folder: str, config: RunConfig) -> None:
    with contextlib.chdir(folder):
        run(config)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: Any) -> Path:
    """The folder in which the pages' commands make sense, with a trainer that uses the ranks of the tests."""

    def on_ranks(config: RunConfig, ranks: int, device: str, *, fresh: bool) -> None:
        world(min(ranks, 2)).run(in_folder, str(tmp_path), config)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "launch", on_ranks)
    monkeypatch.setattr(webbrowser, "open", lambda address: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    page = (ROOT / "docs" / "training.md").read_text()
    [given] = [block for block in blocks(page, "toml") if "[run]" in block]
    Path("page.toml").write_text(given)
    short = ("train.steps=3", "checkpoint.every=1", "trace.start=2", "trace.steps=1")
    small = [*TINY, *short, f"data.path={write_text(tmp_path)}"]
    Path("run.toml").write_text(to_toml(read_config(Path("page.toml"), small)))
    common = blocks((ROOT / "docs" / "guide.md").read_text(), "python")[0]
    Path("common.py").write_text(common)
    model = nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    for folder in ("runs/a/step-100", "runs/b/step-100"):
        write(plain_source(model, optimizer, {}), Path(folder), to="fullshard")
    return tmp_path


def complaint(command: Command) -> str | None:
    """What is wrong with a command, or with what the page says it prints."""
    words = command._replace(text=command.text.split("|")[0]).words[1:]
    names_a_command = not any(set(word) & set("./=-") or word in SMALLER for word in words)
    if names_a_command and not (len(words) > 1 and words[0] in ("inspect", "report")):
        words = [*words, "--help"]
    result = invoke(words)
    if result.exit_code:
        return f"exit code {result.exit_code}: {result.output}{result.exception or ''}"
    printed = " ".join(result.output.split())
    lines = [" ".join(line.split()) for line in command.shown.splitlines()]
    missing = [line for line in lines if line != "..." and line not in printed]
    return f"does not print {missing}, but {printed}" if missing else None


def in_order(command: Command) -> int:
    """Runs come first: others look at them."""
    return not command.text.startswith("fullshard train run.toml")


@pytest.mark.slow
def test_commands_of_fullshard_do_what_the_pages_say(scene: Path) -> None:
    seen: set[str] = set()
    wrong = []
    for command in sorted(HERE, key=in_order):
        if command.text not in seen:
            seen.add(command.text)
            problem = complaint(command)
            if problem:
                wrong.append(f"{command.page}: {command.text}: {problem}")
    assert not wrong, "\n".join(wrong)


# --- other programs ------------------------------------------------------------------------------


class Understood(Exception):
    """A program has read its arguments."""


def reads_its_arguments(module: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a program, and end it when its parser has understood the arguments."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_end(parser: argparse.ArgumentParser, *args: Any) -> None:
        parse(parser, *args)
        raise Understood

    program = importlib.import_module(module)
    with monkeypatch.context() as patched, pytest.raises(Understood):
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
        patched.setattr(sys, "argv", [module, *words])
        program.main()


def module_and_words(words: list[str]) -> tuple[str, list[str]]:
    """Which module a command of Python runs, and with which arguments."""
    if words[0] == "-m":
        return words[1], words[2:]
    return words[0].removesuffix(".py").replace("/", "."), words[1:]


WITHOUT_PARSER = ("benchmarks.stream_timeline", "benchmarks.watchdog")


def test_benchmarks_and_examples_know_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    for text in sorted({each.text for each in COMMANDS}):
        words = shlex.split(text)
        if words[0] == "torchrun" and "..." not in words:
            _, program, words = torchrun.config_from_args(torchrun.parse_args(words[1:]))
            assert program in (sys.executable, "python"), text
            words = [word for word in words if word != "-u"]
        elif words[0] == "python":
            words = words[1:]
        if re.match(r"benchmarks|examples/", "".join(words[:2]).removeprefix("-m")):
            module, rest = module_and_words(words)
            name = module.rsplit(".", 1)[1]
            assert re.search(rf"\b{name}\b", tests), f"no test knows {module}"
            if module not in WITHOUT_PARSER:
                reads_its_arguments(module, rest, monkeypatch)


def test_targets_of_make_and_extras_are_there() -> None:
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    targets = set()
    for command in COMMANDS:
        if command.text.startswith("pip"):
            wanted = re.findall(r"\[(.*)\]", command.text)[0].split(",")
            assert set(wanted) <= set(extras), command
        if command.text.startswith("make"):
            targets.add(shlex.split(command.text)[1])
    dry = ["make", "--dry-run", "PY=python3", *sorted(targets)]
    ended = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
