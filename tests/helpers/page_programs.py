"""Programs that stand in pages of docs/: reading them from the page, and running them on ranks."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NUMBER = r"\d+\.\d+"


def blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a page, in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def execute(
    common: str, code: str, folder: str, given: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run a program as a script in ``folder``, beside the guide's `common.py`; returns its names.

    Args:
        common: The text of `common.py`.
        code: The program.
        folder: Where it runs.
        given: Names that it finds.
    """
    module = ModuleType("common")
    names: dict[str, Any] = {"__name__": "__main__", **(given or {})}
    sys.modules["common"] = module
    try:
        with contextlib.chdir(folder):
            exec(compile(common, "guide.md: common.py", "exec"), module.__dict__)
            exec(compile(code, "a page of docs", "exec"), names)
    finally:
        del sys.modules["common"]
    return names


def check_output(shown: str, printed: str) -> None:
    """Check for the same words, and numbers that are about the same; however lines are broken."""
    shown, printed = " ".join(shown.split()), " ".join(printed.split())
    assert re.sub(NUMBER, "#", printed) == re.sub(NUMBER, "#", shown)
    expected = [float(text) for text in re.findall(NUMBER, shown)]
    actual = [float(text) for text in re.findall(NUMBER, printed)]
    assert actual == pytest.approx(expected, abs=0.02)
