"""What `pyproject.toml` says about the package is all that its files need; tests/installed installs it.

Here every library is installed, and files are read where they are. So the sources are read instead.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "fullshard"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]

EXTRA_OF = {
    "programs/plan_tool/memory_chart.py": "report",
    "programs/plan_tool/page.py": "report",
    "programs/report": "report",
    "programs/train/mlflow_run.py": "mlflow",
    "programs/train/chat_template.py": "transformers",
    "programs/train/record_files.py": "datasets",
    "programs/train/tensorboard_files.py": "tensorboard",
    "programs/train/tokenizer.py": "transformers",
    "programs/train/transformers_model.py": "transformers",
    "programs/train/wandb_run.py": "wandb",
    "programs": "cli",
}
"""Which extra a file or folder may import; the first that fits. All others import torch only."""
BY_WAY_OF_TORCH = {
    "torch.utils.tensorboard": "tensorboard",
    "all_gather_object": "numpy",
    "gather_object": "numpy",
    "broadcast_object_list": "numpy",
    "scatter_object_list": "numpy",
    "send_object_list": "numpy",
    "recv_object_list": "numpy",
    "numpy": "numpy",
    "from_numpy": "numpy",
}
"""Libraries that names of torch need, some of them only when they are called."""


def libraries(extra: str) -> set[str]:
    """The libraries that an extra names, and those of the extras that it brings."""
    found = set()
    for line in EXTRAS[extra]:
        requirement = Requirement(line)
        found |= {requirement.name}.union(*map(libraries, requirement.extras))
    return found - {"fullshard"}


def foreign_imports(file: Path) -> Iterator[tuple[int, str]]:
    """Every library that a file needs beside torch, with the line."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import(names=names):
                modules = [each.name for each in names]
            case ast.ImportFrom(module=str(module), level=0):
                modules = [module]
            case ast.Attribute(attr=name) if name in BY_WAY_OF_TORCH:
                modules = [name]
            case _:
                continue
        for module in modules:
            name = BY_WAY_OF_TORCH.get(module) or module.partition(".")[0]
            if name not in (sys.stdlib_module_names | {"torch", "fullshard"}):
                yield node.lineno, name


def extra_of(file: Path) -> str | None:
    path = file.relative_to(PACKAGE)
    within = (path, *path.parents)
    return next((extra for name, extra in EXTRA_OF.items() if Path(name) in within), None)


def test_every_library_is_named_by_the_extra_of_the_files_that_import_it() -> None:
    unnamed = [
        f"{file.relative_to(PACKAGE)}:{line}: {library}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for line, library in foreign_imports(file)
        if library not in (libraries(extra) if (extra := extra_of(file)) else set())
    ]
    assert unnamed == []


def test_every_file_that_is_no_program_is_part_of_the_package() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["fullshard"]
    named = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    files = {path for path in PACKAGE.rglob("*") if path.is_file()}
    others = {path for path in files if path.suffix not in (".py", ".pyc")}
    assert others and others - named == set()


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_train_installs_what_training_needs_and_make_test_adds_the_tools(
    tmp_path: Path,
) -> None:
    def installed(target: str, *made: str) -> list[str]:
        """What pip would be called with, if these files were already made."""
        for name in made:
            (tmp_path / name).touch()
        command = ["make", "--dry-run", target, f"VENV={tmp_path}"]
        alone = {"PATH": os.environ["PATH"]}  # the make that runs the tests passes its options on
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, env=alone
        )
        lines = [line for line in done.stdout.splitlines() if "pip install" in line]
        return [line.split()[-1].strip("'") for line in lines]

    assert installed("train") == ["torch", ".[report]"]
    assert installed("test") == ["torch", ".[report]", ".[dev]"]
    assert installed("test", ".train-ready") == [".[dev]"]
    assert installed("train") == []
    assert installed("check", ".ready") == []
