"""What `pyproject.toml` says about the package is all that its files need; tests/installed installs it.

Here every library is installed, and files are read where they are. So the sources are read instead. What is around the
package, for contributors and reports, is valid and names what is there: workflows, forms, hooks.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from fullshard.programs import cli

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


def test_make_dist_builds_what_can_be_installed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "dist.py", tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    stem = f"fullshard-{PROJECT['project']['version']}"
    names = {f"{stem}.tar.gz", f"{stem}-py3-none-any.whl"}
    assert {path.name for path in tmp_path.iterdir()} == names


# --- workflows, forms and hooks -------------------------------------------------------------------

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [ROOT / ".github" / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "feature.yml")]
OF_PROGRAMS = ("benchmarks/results/", "docs/images/")
"""Files as programs write them, which the hooks leave alone."""


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no clone")
    paths = (ROOT / name for name in listed.stdout.split("\0") if name)
    return [path for path in paths if path.is_file()]


def test_workflows_run_what_is_there_on_pythons_and_torches_that_are_supported() -> None:
    assert [path.name for path in WORKFLOWS] == ["tests.yml"]
    jobs = read_yaml(WORKFLOWS[0])["jobs"]
    lines = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = {line.split()[1] for line in lines if line.startswith("make ")}
    assert targets == {"test", "check", "docs", "dist", "test-installed"}
    known = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets <= set(known)
    matrix = jobs["tests"]["strategy"]["matrix"]["include"]
    pythons = {each["python"] for each in matrix}
    assert pythons == {"3.11", "3.12", "3.13", "3.14"}
    assert PROJECT["project"]["requires-python"] == ">=3.11"
    (torch,) = PROJECT["project"]["dependencies"]
    torches = sorted((each["torch"] for each in matrix), key=Version)
    assert Requirement(torch).specifier == f">={torches[0].removesuffix('.0')}"
    (usual,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert usual in torches


def test_forms_are_valid_and_the_commands_that_they_name_are_there() -> None:
    app = typer.main.get_command(cli.build_app())
    commands = app.list_commands(None)
    for path in (*FORMS, ROOT / "SECURITY.md", ROOT / ".github/ISSUE_TEMPLATE/config.yml"):
        named = re.findall(r"`fullshard (\w+)", path.read_text())
        assert set(named) <= set(commands), path
    for form in map(read_yaml, FORMS):
        assert {"name", "description", "body"} <= set(form)
        fields = [each for each in form["body"] if each["type"] != "markdown"]
        assert len({each["id"] for each in fields}) == len(fields)
        assert all(each["attributes"]["label"] for each in fields)
    (environment,) = (
        each for each in read_yaml(FORMS[0])["body"] if each.get("id") == "environment"
    )
    assert "`fullshard env`" in environment["attributes"]["description"]
    assert environment["validations"] == {"required": True}


def test_local_hooks_are_tools_of_the_developers() -> None:
    repositories = read_yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    hooks = [hook for each in repositories if each["repo"] == "local" for hook in each["hooks"]]
    tools = {hook["entry"].removeprefix(".venv/bin/").split()[0] for hook in hooks}
    assert tools == {"ruff", "mypy"} <= libraries("dev")


def test_files_are_as_the_hooks_want_them() -> None:
    exclude = read_yaml(ROOT / ".pre-commit-config.yaml")["exclude"]
    wrong = []
    for path in tracked_files():
        name, content = str(path.relative_to(ROOT)), path.read_bytes()
        if name.startswith(OF_PROGRAMS):
            assert re.search(exclude, name)
            continue
        if re.search(rb"[ \t\r]$", content, re.MULTILINE):
            wrong.append(f"{name}: whitespace ends a line")
        if (content and not content.endswith(b"\n")) or content.endswith(b"\n\n"):
            wrong.append(f"{name}: does not end with one newline")
        if len(content) > 500 * 1024:
            wrong.append(f"{name}: is large")
        match path.suffix:
            case ".json":
                json.loads(content)
            case ".toml":
                tomllib.loads(content.decode())
            case ".yaml" | ".yml":
                assert list(yaml.safe_load_all(content))
    assert wrong == []
