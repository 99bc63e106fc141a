"""`fullshard report`: one HTML page about a run, from the files it left.

command        the verb: arguments in, exit code out
page           all of it together: page.html, page.css, page.js
chart          what a chart is; run_charts, timeline_chart, group_charts, memory_chart: all there are
views          which recorded steps can be chosen
diagnosis      what the numbers mean, in plain language: run_findings, step_findings; findings: what one is
analysis       the numbers that findings and charts share
replay         what waits would remain at another prefetch depth
timeline       where the time of a step went; intervals: arithmetic of time
run_files      the folder as plain values
units          numbers as people read them
"""

from __future__ import annotations

from pathlib import Path

from fullshard.errors import ConfigurationError
from fullshard.files import atomic_write

FILE_NAME = "report.html"
LIBRARIES = ("plotly", "jinja2")
"""What the extra `report` brings."""


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the page about the run in folder ``run``, whole or not at all.

    Args:
        run: A folder with `metrics.jsonl` or traces.
        output: The file to write; `report.html` in the run's folder if not given. One that is there is replaced.

    Returns:
        The file.

    Raises:
        ConfigurationError: There is nothing to report on, nowhere to write, or plotly is not installed.
    """
    from fullshard.programs.report.run_files import read_run

    found = read_run(run)
    try:
        from fullshard.programs.report.page import render
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in LIBRARIES:
            raise
        raise ConfigurationError(
            f"A report needs {' and '.join(LIBRARIES)}; {missing} is not installed. "
            "Install the extra: pip install 'fullshard[report]'"
        ) from None
    target = output or run / FILE_NAME
    _write(target, render(found))
    return target


def _write(target: Path, text: str) -> None:
    try:
        with atomic_write(target, durable=False) as file:
            file.write(text.encode())
    except OSError as error:
        raise ConfigurationError(
            f"The report cannot be written to {target}: {error.strerror}. Name a file in a folder that is there "
            "and can be written to, with --output."
        ) from error
