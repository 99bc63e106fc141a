"""What the numbers mean, in plain language: what is slow, by how much, at which group, and what to do.

A finding is made only of what was measured; where the data does not support one, there is none.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace

from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.finding import Finding
from fullshard.programs.report.run_files import Run
from fullshard.programs.report.run_findings import find_in_training
from fullshard.programs.report.step_findings import find_in_steps


def find(analysis: Analysis) -> list[Finding]:
    """All findings, what costs most first."""
    found = [*find_in_training(analysis.run), *find_in_steps(analysis)]
    left = [
        replace(
            finding, remedies=tuple(r for r in finding.remedies if not _is_done(r, analysis.run))
        )
        for finding in found
    ]
    return sorted(left, key=lambda finding: -finding.cost_share)


def _is_done(remedy: str, run: Run) -> bool:
    """Whether the configuration has all fields that a remedy names with a value: `sharding.prefetch = 2`."""
    settings = re.findall(r"`(\w+)\.(\w+) = ([^`]+)`", remedy)
    return bool(settings) and all(
        run.setting(section, name) == tomllib.loads(f"value = {value}")["value"]
        for section, name, value in settings
    )
