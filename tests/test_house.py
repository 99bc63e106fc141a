"""The house can be read: one weight's way through a step touches few files, and the page tells it as it is.

Limits are those of the way itself, not of lines per file: a noun may be one file.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LIMITS = {
    "changes of file": 110,
    "files": 14,
    "lines of these files": 6_000,
    "frames of a gather": 6,
    "frames of a reduction": 6,
}
PAGE = (ROOT / "docs" / "design.md").read_text()


@functools.cache
def way() -> dict[str, Any]:
    """In an interpreter of its own: what else this one has run would be on the way."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.weight_way", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("figure", LIMITS)
def test_a_step_is_read_without_turning_many_pages(figure: str) -> None:
    assert way()["figures"][figure] <= LIMITS[figure], way()["figures"]


def rows_of_the_page() -> list[list[tuple[str, str]]]:
    """The hops that the page names, forward and backward: file and function."""
    section = PAGE.split("## One weight's way\n")[1].split("\n## ")[0]
    return [
        re.findall(r"^\| `([\w/]+\.py)` \| `(\w+)` \|", table, re.MULTILINE)
        for table in re.split(r"^### ", section, flags=re.MULTILINE)[1:]
    ]


def test_the_page_tells_one_weights_way_as_it_is() -> None:
    told = rows_of_the_page()
    assert [len(rows) >= 8 for rows in told] == [True, True]
    for rows, calls in zip(told, way()["calls"], strict=True):
        taken = iter([(file, function) for file, function in calls])
        missing = [hop for hop in rows if hop not in taken]
        assert not missing, "not on the way, or not in this order"


def test_the_page_names_every_file_of_the_way() -> None:
    named = {file for rows in rows_of_the_page() for file, _ in rows}
    assert {file for calls in way()["calls"] for file, _ in calls} == named


def test_public_names_of_the_library_are_few() -> None:
    """A room says with `__all__` what others take from it; the library itself shows what a user needs."""
    import fullshard

    assert len(fullshard.__all__) <= 75


ACROSS_ROOMS = {"clients", "docs", "gpu", "helpers", "installed", "promises"}
"""Folders of tests that belong to no room."""


def test_folders_of_tests_are_those_of_the_source() -> None:
    source, tests = ROOT / "src" / "fullshard", ROOT / "tests"
    for folder in {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}:
        assert (folder.parts[:1] and folder.parts[0] in ACROSS_ROOMS) or (source / folder).is_dir()
