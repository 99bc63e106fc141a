"""Paths as arguments of the command line: every argument and option that is a path has `given_path` as its parser."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from fullshard.errors import ConfigurationError
from fullshard.files import local_path


def given_path(path: str | os.PathLike[str]) -> Path:
    """Return a path of the command line; an empty one, such as of a variable that is not set, is refused."""
    if not os.fspath(path):
        raise typer.BadParameter("A path must not be empty.")
    try:
        return local_path(path)
    except ConfigurationError as error:
        raise typer.BadParameter(str(error)) from None


def existing_path(path: str | os.PathLike[str]) -> Path:
    """Return a path of the command line; nothing there is an error."""
    found = given_path(path)
    if not found.exists():
        raise typer.BadParameter(f"Path {str(path)!r} does not exist.")
    return found
