"""docs/api.md is what docs/build_api.py writes, and has everything; links between pages lead somewhere."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fullshard
from fullshard import checkpoint
from fullshard.mesh import axes as mesh
from fullshard.transport import collectives

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_api", ROOT / "docs" / "build_api.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(sys.modules, "build_api", module)
        spec.loader.exec_module(module)
    return module


BUILDER = builder()
PAGE = (ROOT / "docs" / "api.md").read_text()


def test_a_list_in_a_docstring_is_a_list_on_the_page() -> None:
    rendered = BUILDER.rendered_doc(
        "Two rules.\n\n- The first one,\n  over two lines.\n- The second one."
    )
    assert rendered == ["Two rules.", "- The first one, over two lines.\n- The second one."]


def test_the_page_is_up_to_date() -> None:
    if BUILDER.page() != PAGE:
        pytest.fail("docs/api.md is out of date; run: python docs/build_api.py", pytrace=False)


def test_every_public_name_has_its_place() -> None:
    methods = [name for name in vars(fullshard.FSDPModule) if not name.startswith("_")]
    classes = [
        name
        for module in (mesh, collectives)
        for name, value in inspect.getmembers(module, inspect.isclass)
        if value.__module__ == module.__name__ and not name.startswith("_")
    ]
    names = {
        *fullshard.__all__,
        *checkpoint.__all__,
        *classes,
        *(f"FSDPModule.{name}" for name in methods),
    }
    headings = set(re.findall(r"^#+ `(.*)`$", PAGE, re.MULTILINE))
    assert names <= headings
    assert all(f"](#{BUILDER.anchor(name)})" in PAGE for name in names), "the index has all"


def test_docstrings_become_markdown() -> None:
    doc = """Do it.

    So:

        do(it)
          now

    Then more
    of it:

        if x:

            y()

    Args:
        this: What, and
            how.
        that: Nothing.

    Returns:
        It.
    """
    assert "\n\n".join(BUILDER.rendered_doc(inspect.cleandoc(doc))) == (
        "Do it.\n\nSo:\n\n```text\ndo(it)\n  now\n```\n\nThen more of it:\n\n"
        "```python\nif x:\n\n    y()\n```\n\n"
        "Args:\n\n- `this`: What, and how.\n- `that`: Nothing.\n\nReturns:\n\n- It."
    )


def anchors(text: str) -> set[str]:
    """Of the headings outside of code."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return {BUILDER.anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, fragment in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        file = (page.parent / target) if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if fragment:
            assert fragment in anchors(file.read_text()), (
                f"{page.name} links to {target}#{fragment}"
            )


@pytest.mark.parametrize("page", ["fsdp1.md", "fsdp2.md"])
def test_tests_that_a_checklist_names_are_there(page: str) -> None:
    """A box is ticked by a test, so the test must exist."""
    text = (ROOT / "docs" / page).read_text()
    defined = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    named = set(re.findall(r"`(test_\w+)`", text))
    files = set(re.findall(r"`([\w/]+/test_\w+\.py)`", text))
    assert named and files
    assert not named - defined
    assert not [file for file in files if not (ROOT / "tests" / file).exists()]
