"""The table of clients: what it calls equal, different and known."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.client_rows import ROWS
from benchmarks.clients import Cell, compare, line, verdicts

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"


@pytest.mark.parametrize(
    ("found", "text", "good"),
    [
        ([[4.0, 2.0], [3.0, 1.0]], "equal", True),
        ([[4.0, 2.000001], [3.0, 1.0]], "5e-07", True),
        ([[4.0, 2.0], [3.0, 1.1]], "NO: 1e-01", False),
        ([[4.0, 2.0], [3.0, float("nan")]], "NO: nan", False),
        ([[4.0, 2.0], [3.0]], "steps [2, 1], not [2, 2]", False),
        ([[4.0, 2.0]], "steps [2], not [2, 2]", False),
    ],
)
def test_losses_are_compared_rank_by_rank_and_step_by_step(found, text, good):
    assert compare([[4.0, 2.0], [3.0, 1.0]], found, 1e-5) == Cell(text=text, good=good)


def test_losses_of_no_step_are_not_equal():
    assert not compare([[], []], [[], []], 1e-5).good


def test_a_bad_cell_counts_unless_the_row_knows_whose_bug_it_is():
    cells = {"runs": Cell(text="yes", good=True), "resume": Cell(text="NO: 1e-01", good=False)}
    row = replace(ROWS[0], known={})
    known = replace(row, known={"resume": "Accelerate's bug"})
    assert verdicts(row, cells) == [f"{row.name}: resume: NO: 1e-01"]
    assert verdicts(known, cells) == []
    assert "| Accelerate's bug (NO: 1e-01) |" in line(known, cells)


def test_the_page_has_every_row_that_runs_on_a_cpu():
    text = PAGE.read_text()
    named = [
        f"| {row.client} | {row.api} | {row.options} |" for row in ROWS if "cpu" in row.devices
    ]
    assert [name for name in named if name not in text] == []
