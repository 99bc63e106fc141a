"""`fullshard report`: one HTML page about a run, from the files it left.

command     the subcommand: arguments, exit codes
run_files   reads the folder into plain values
timeline    where the time of a step went; `intervals` is its arithmetic
replay      which waits would remain at another prefetch depth
analysis    the numbers that findings and charts share
diagnosis   all findings: `run_findings` and `step_findings`; `findings` says what findings and remedies are
remedies    what can be done, each with the check that is made before it is said
reference   all findings and remedies as tables, for the documentation
chart       what a chart is; `run_charts`, `timeline_chart`, `group_charts` and `memory_chart` make them
plan_comparison   a run against its plan; `run_comparison` two runs side by side
glossary    words of the page, and what they mean
views       which recorded steps can be chosen in a chart
speed_settings   which of the trainer's settings are on, and what the others would bring
tiles       the numbers at the top; `peak_flops` knows what GPUs can do
page        the page, from page.html, layout.html, macros.html, page.css and page.js
units       numbers with three digits and a unit
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from fullshard.errors import ConfigurationError
from fullshard.files import atomic_write, local_path

FILE_NAME = "report.html"
LIBRARIES = ("plotly", "jinja2")
"""Packages of the extra `report`."""


def write_report(
    run: Path, output: Path | None = None, *, plan: str | None = None, other: Path | None = None
) -> Path:
    """Write the page about the run in folder ``run``. An older page stays until the new one is complete.

    Args:
        run: A folder with `metrics.jsonl` or traces.
        output: The file to write; the default is `report.html` in the run's folder. An existing file is replaced.
        plan: Compare the run with its plan for a GPU of this name, or of the profile in this TOML file.
        other: Compare the run with the one in this folder.

    Returns:
        The file.

    Raises:
        ConfigurationError: There is nothing to report on, the page cannot be written, plotly is not installed, or there is no
            plan for this run.
    """
    from fullshard.programs.report.run_files import read_run

    run, other = local_path(run), None if other is None else local_path(other)
    target = run / FILE_NAME if output is None else local_path(output)
    found = read_run(run)
    compared = None if other is None else read_run(other)
    with importing_libraries("A report"):
        from fullshard.programs.report.page import render
    planned = None
    if plan is not None:
        from fullshard.programs.plan_tool.run_plan import plan_of_run  # imports torch

        planned = plan_of_run(run, found, plan)
    _write(target, render(found, planned, compared))
    return target


@contextmanager
def importing_libraries(what: str) -> Iterator[None]:
    """Explain how to install the packages of the extra, if one is missing that the block imports.

    Args:
        what: Name of the feature that needs them.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in LIBRARIES:
            raise
        raise _missing_library(what, missing) from None


def check_libraries(what: str) -> None:
    """Refuse a feature that needs the packages of the extra if one is missing, without importing them; ConfigurationError."""
    for name in LIBRARIES:
        if find_spec(name) is None:
            raise _missing_library(what, name)


def _missing_library(what: str, name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} needs {' and '.join(LIBRARIES)}; {name} is not installed. "
        "Install the extra: pip install 'fullshard[report]'"
    )


def _write(target: Path, text: str) -> None:
    try:
        with atomic_write(target, durable=False) as file:
            file.write(text.encode())
    except OSError as error:
        raise ConfigurationError(
            f"The report cannot be written to {target}: {error.strerror}. Name a file in an existing folder that can be "
            "written to, with --output."
        ) from error
