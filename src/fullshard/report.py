"""Reports about runs from Python: `write_report`, which `fullshard report` calls."""

from fullshard.programs.report import write_report

__all__ = ["write_report"]
