"""What the numbers mean, in plain language: what is slow, by how much, at which group, and what to do.

A finding is made only of what was measured; where the data does not support one, there is none.
"""

from __future__ import annotations

from fullshard.report.analysis import Analysis
from fullshard.report.finding import Finding
from fullshard.report.run_findings import find_in_training
from fullshard.report.step_findings import find_in_steps


def find(analysis: Analysis) -> list[Finding]:
    """All findings, what costs most first."""
    found = [*find_in_training(analysis.run), *find_in_steps(analysis)]
    return sorted(found, key=lambda finding: -finding.cost_share)
