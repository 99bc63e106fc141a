"""All findings about a run: what is slow, by how much, at which group, and what to do.

A finding states only what the data supports, and has only remedies that were checked against it.
"""

from __future__ import annotations

from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.findings import Finding
from fullshard.programs.report.run_findings import find_in_training, find_uneven_shards
from fullshard.programs.report.step_findings import find_in_steps


def diagnose(analysis: Analysis) -> list[Finding]:
    """Return all findings, what costs most first."""
    found = [*find_in_training(analysis.run), *find_in_steps(analysis)]
    # A trace knows the cause of uneven shards, and what would help.
    if all(finding.kind != "padding" for finding in found):
        found += find_uneven_shards(analysis.run)
    return sorted(found, key=lambda finding: -finding.cost_share)
