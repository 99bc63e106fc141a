"""The option `--version`, which every subcommand has. It imports no torch."""

from __future__ import annotations

from typing import Annotated

import typer

from fullshard.drop_in.program import version_text


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(version_text())
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=_print_version, is_eager=True, help="Print the version, and exit."
    ),
]
"""The type of the argument that gives a subcommand the option. Its value is never used."""


def fullshard(version: Version = False) -> None:
    """Fully sharded data parallel training for PyTorch."""
