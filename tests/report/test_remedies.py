"""Every remedy that the report can give, applied to a run that causes its finding: it runs, and less of it is found."""

from __future__ import annotations

from pathlib import Path

from fullshard.programs.report.reference import FINDINGS, markdown
from fullshard.programs.report.remedies import REMEDIES

PAGE = Path(__file__).parents[2] / "docs" / "report.md"


def test_the_page_has_the_findings_and_remedies_of_the_code() -> None:
    assert markdown() in PAGE.read_text()
    assert {kind for each in FINDINGS.values() for kind in each.remedies} == {*REMEDIES}
