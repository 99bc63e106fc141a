"""The subcommand `fullshard report`.

Exit codes:
    0     the page was written
    2     there is nothing to report on, or the page or the output cannot be written; one message, no traceback
"""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fullshard.errors import FullshardError
from fullshard.programs.console.tables import print_error, print_line
from fullshard.programs.given_path import given_path
from fullshard.programs.version_option import Version


def report(
    run: Annotated[
        Path,
        typer.Argument(
            parser=given_path,
            metavar="RUN",
            show_default=False,
            help="Folder of a run, or one that has traces of `fullshard.trace`.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            parser=given_path,
            metavar="FILE",
            show_default=False,
            help="File to write, not RUN/report.html.",
        ),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="GPU|FILE",
            show_default=False,
            help="Compare with the plan for this GPU, or for this profile of fullshard plan calibrate.",
        ),
    ] = None,
    other: Annotated[
        Path | None,
        typer.Option(
            "--with",
            parser=given_path,
            metavar="RUN",
            show_default=False,
            help="Compare with this other run, on the same page.",
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    version: Version = False,
) -> None:
    """Write one HTML page about a run: where its time went, and what would help."""
    from fullshard.programs.report import write_report

    try:
        written = write_report(run, output, plan=plan, other=other)
    except FullshardError as error:
        print_error(f"Error: {error}")
        raise typer.Exit(2) from None
    print_line(Console(), str(written))
    if show:
        webbrowser.open(written.resolve().as_uri())
