"""Words of the page are explained where they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("plotly")

from fullshard.programs.report.glossary import MEANINGS, anchor, explained
from fullshard.programs.report.page import render, with_code
from fullshard.programs.report.run_files import read_run
from tests.helpers.run_folders import HOSTILE, Machine, write_run


def test_a_word_is_explained_where_it_stands_for_the_first_time() -> None:
    text = str(explained("Gathers wait; a gather <b>waits</b> for regrouped ranks"))
    assert text.count('href="#word-gather"') == 1 and ">Gathers</a>" in text
    assert "&lt;b&gt;" in text and "regrouped" in text, "no part of another word"
    assert MEANINGS["rank"].split(",")[0] in text
    assert HOSTILE not in str(explained(HOSTILE))


def test_code_is_not_explained() -> None:
    text = str(with_code("set `sharding.groups` for groups", terms=True))
    assert "<code>sharding.groups</code>" in text and ">groups</a>" in text
    assert "<a" not in str(with_code("groups"))


def test_every_link_of_the_page_leads_to_an_entry(tmp_path: Path) -> None:
    page = render(read_run(write_run(tmp_path, Machine(), steps=30)))
    linked = set(re.findall(r'href="#(word-[^"]+)"', page))
    assert {anchor("exposed communication"), anchor("on the wire")} <= linked
    assert linked <= set(re.findall(r'id="(word-[^"]+)"', page))
    assert [*MEANINGS] == sorted(MEANINGS, key=str.lower)
