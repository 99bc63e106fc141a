"""The package as `pip install` leaves it: `make test-installed` runs this; `make test` does not, since pip needs a network.

All other tests read the checkout and have every library. Here the wheel is built, and installed with one extra into an
environment of its own, outside of the checkout. So a file that the wheel lacks, and a library that the extra does not
name, are missing there. Torch and what torch needs are links to those of this interpreter, because they are large.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # pip waits for an index
    pytest.mark.skipif(
        "FULLSHARD_TEST_INSTALLED" not in os.environ, reason="make test-installed runs it"
    ),
]

ROOT = Path(__file__).parents[2]
PACKAGED = ("LICENSE", "README.md", "pyproject.toml", "src")
OF_THE_CLONE = {"benchmarks", "clients", "dev", "docs"}
"""Extras for what the wheel does not hold."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TINY_RUN = (
    *("model.layers=1", "model.width=8", "model.heads=1", "data.context=16", "data.path=text.txt"),
    *(
        "train.steps=4",
        "train.batch=4",
        "run.device=cpu",
        "samples.count=0",
        "evaluation.windows=2",
    ),
    *("run.folder=run", "checkpoint.every=2"),
)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}

PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn

from fullshard import checkpoint, fully_shard
from fullshard.optim import EMA, AdamW8bit, Muon, ShardedOptimizer

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
for layer in model:
    fully_shard(layer)
fully_shard(model)
average = EMA(model)
for optimizer in (
    ShardedOptimizer(torch.optim.AdamW, model.parameters()), Muon(model), AdamW8bit(model.parameters())
):
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update()
checkpoint.save("saved", model, optimizer)
checkpoint.load("saved", model, optimizer)
print(f"rank {dist.get_rank()} is done")
dist.destroy_process_group()
"""

IMPORT_ALL = """
import importlib, pkgutil, sys
import fullshard
for module in pkgutil.walk_packages(fullshard.__path__, "fullshard."):
    if not module.name.startswith(tuple(sys.argv[1:])) and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


class Environment(NamedTuple):
    """An environment with the wheel, one extra and a folder to work in, and nothing else."""

    folder: Path
    work: Path

    def run(self, program: str, *arguments: str, code: int = 0) -> str:
        """Run a program of the environment, which ends with `code`, and return what it prints."""
        kept = {"PATH", "HOME", "LANG", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS", "RES_OPTIONS"}
        done = subprocess.run(
            [str(self.folder / "bin" / program), *arguments],
            cwd=self.work,
            env={name: value for name, value in os.environ.items() if name in kept}
            | {"PYTHONNOUSERSITE": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == code, f"{program} {' '.join(arguments)}\n{done.stdout}"
        return done.stdout

    def train(self, *settings: str) -> str:
        options = [word for each in (*TINY_RUN, *settings) for word in ("--set", each)]
        return self.run("fullshard", "train", *options)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a clone in which nothing was built before."""
    clone = tmp_path_factory.mktemp("clone")
    for name in PACKAGED:
        path = ROOT / name
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(path, clone / name, ignore=ignored)
        else:
            shutil.copy(path, clone)
    pip("wheel", "--no-deps", "--wheel-dir", str(clone / "dist"), str(clone))
    (built,) = (clone / "dist").glob("*.whl")
    return built


def pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def install(wheel: Path, extra: str, folder: Path) -> Environment:
    venv.create(folder / "env", with_pip=False, symlinks=True)
    (site_packages,) = (folder / "env").glob("lib/python*/site-packages")
    linked = with_requirements("torch")
    for each in linked.values():
        tops = {file.parts[0] for file in each.files or () if file.parts[0] != ".."}
        for name in tops - {"__pycache__"}:
            if not (site_packages / name).exists():  # several share a folder, such as nvidia
                (site_packages / name).symlink_to(Path(str(each.locate_file(name))).resolve())
    # What is linked stays as it is: pip would change it where it really is.
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [pin for pin in pins if canonicalize_name(pin.partition("==")[0]) not in linked]
    pins += [f"{name}=={each.version}" for name, each in linked.items()]
    (folder / "constraints.txt").write_text("\n".join(pins))
    target = ("--python", str(folder / "env" / "bin" / "python"))
    wanted = f"{wheel}[{extra}]" if extra else str(wheel)
    pip(*target, "install", "--constraint", str(folder / "constraints.txt"), wanted)
    (folder / "work").mkdir()
    (folder / "work" / "text.txt").write_text("for x in range(3):\n    return x\n" * 100)
    return Environment(folder / "env", folder / "work")


def with_requirements(
    name: str, extras: Sequence[str] = (), found: dict[str, Distribution] | None = None
) -> dict[str, Distribution]:
    """What pip installs for a name and its extras, by canonical name."""
    found = {} if found is None else found
    known = found.setdefault(canonicalize_name(name), distribution(name))
    for line in known.requires or ():
        each = Requirement(line)
        wanted = each.marker is None or any(
            each.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        )
        if wanted and (canonicalize_name(each.name) not in found or each.extras):
            with_requirements(each.name, tuple(each.extras), found)
    return found


@pytest.fixture
def environment(wheel: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Environment:
    return install(wheel, request.param, tmp_path)


def with_extra(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("environment", [name], indirect=True, ids=[name or "no extra"])


@with_extra("")
def test_the_library_needs_torch_only(environment: Environment) -> None:
    environment.run("python", "-c", IMPORT_ALL, "fullshard.programs", "fullshard.__main__")
    (environment.work / "program.py").write_text(PROGRAM)
    printed = environment.run("python", *TORCHRUN, "program.py")
    assert {"rank 0 is done", "rank 1 is done"} <= set(printed.splitlines())
    assert "fullshard[cli]" in environment.run("fullshard", "train", code=1)


@with_extra("cli")
def test_the_command_trains_and_says_what_a_page_needs(environment: Environment) -> None:
    environment.train()
    assert "step_00000004" in environment.run(
        "fullshard", "checkpoint", "verify", "run/checkpoints/step_00000004"
    )
    environment.run("fullshard", "inspect", "tiny", "--world", "8")
    environment.run("fullshard", "plan", "tiny", "--gpus", "4", "--gpu", "h100", "--no-search")
    assert "fullshard[report]" in environment.run("fullshard", "report", "run", code=2)


@with_extra("report")
def test_the_trainer_and_a_plan_write_pages(environment: Environment) -> None:
    environment.run("python", "-c", IMPORT_ALL)
    environment.train()
    report = environment.work / "run" / "report.html"
    assert report.is_file()
    report.unlink()
    environment.run("fullshard", "report", "run")
    assert report.is_file()
    small = ("--set", "model.layers=1", "--set", "train.batch=2")
    machine = ("--gpus", "2", "--gpu", "h100", "--no-search")
    environment.run("fullshard", "plan", "tiny", *machine, *small, "--html", "plan.html")
    assert (environment.work / "plan.html").is_file()


@with_extra("tensorboard")
def test_metrics_are_written_for_tensorboard(environment: Environment) -> None:
    environment.train("log.tensorboard=true")
    assert list((environment.work / "run" / "tensorboard").glob("events.*"))


@with_extra("wandb")
def test_metrics_are_written_for_weights_and_biases(environment: Environment) -> None:
    environment.train("log.wandb=true", "log.wandb_offline=true")
    assert list((environment.work / "run" / "wandb").rglob("*.wandb"))


@with_extra("mlflow")
def test_metrics_are_sent_to_mlflow(environment: Environment) -> None:
    assert "has stopped" not in environment.train("log.mlflow=true")
    assert (environment.work / "run" / "mlflow_id").read_text().strip()


@with_extra("datasets")
def test_a_run_learns_from_compressed_chats(environment: Environment) -> None:
    chats = [{"prompt": f"After {n}?", "completion": str(n + 1)} for n in range(40)]
    content = "".join(json.dumps(chat) + "\n" for chat in chats).encode()
    (environment.work / "chats.jsonl.gz").write_bytes(gzip.compress(content))
    assert "40 records in" in environment.train("data.path=chats.jsonl.gz", "data.context=64")


@with_extra("transformers")
def test_a_model_of_transformers_is_trained(environment: Environment) -> None:
    folder = environment.work / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    shape = [each for each in TINY_RUN if each.startswith("model.")]
    settings = [each for each in TINY_RUN if each not in shape]
    options = [word for each in (*settings, "model.huggingface=llama") for word in ("--set", each)]
    environment.run("fullshard", "train", *options)
    environment.run("fullshard", "export", "run", "--to", "exported")


def test_every_extra_is_tested_here() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = set(re.findall(r'@with_extra\("(\w+)"\)', Path(__file__).read_text()))
    assert set(project["optional-dependencies"]) - OF_THE_CLONE == tested
