"""All findings about a run: what is slow, by how much, at which group, and what to do.

A finding states only what the data supports.
"""

from __future__ import annotations

from dataclasses import replace

from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.findings import Finding
from fullshard.programs.report.run_findings import find_in_training
from fullshard.programs.report.step_findings import find_in_steps


def diagnose(analysis: Analysis) -> list[Finding]:
    """Return all findings, what costs most first, without remedies that the run has taken already."""
    run = analysis.run
    found = [
        replace(finding, remedies=tuple(r for r in finding.remedies if not r.is_done(run)))
        for finding in (*find_in_training(run), *find_in_steps(analysis))
    ]
    return sorted(found, key=lambda finding: -finding.cost_share)
