"""The subcommand `fullshard train`.

Exit codes:
    0     trained, or the run in the folder was already finished
    1     a rank failed, and its traceback was shown; or a bad step stopped the run; or a checkpoint
          cannot be written or read
    2     wrong configuration or data; one message, no traceback
    129   stopped by SIGHUP: its terminal was closed
    130   stopped by Ctrl-C
    143   stopped by SIGTERM
A stopped run has saved a checkpoint, unless the message says that it could not.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fullshard.errors import CheckpointError, ConfigurationError
from fullshard.programs.console.broken_pipe_safe import broken_pipe_safe
from fullshard.programs.console.tables import print_error
from fullshard.programs.given_path import given_path
from fullshard.programs.train.config_file import read_config, toml_value
from fullshard.programs.train.config_reference import print_reference
from fullshard.programs.train.launch import problems_here, reports_errors, start
from fullshard.programs.train.processes import RankFailedError, StoppedError
from fullshard.programs.train.stop import BadStepError, StoppedBySignalError
from fullshard.programs.version_option import Version

File = Annotated[
    Path | None,
    typer.Argument(
        parser=given_path,
        metavar="RUN.toml",
        show_default=False,
        help="The configuration of the run.",
    ),
]
"""The argument RUN.toml."""

Fields = Annotated[
    bool,
    typer.Option(
        "--fields",
        help="List the fields of all sections, or of the section that is named instead of RUN.toml, and exit.",
    ),
]
"""The option `--fields`."""


def train(
    file: File = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.FIELD=VALUE",
            help="Set a field, whatever the file says; may be given many times.",
        ),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(metavar="N", help="Ranks to start: --set run.ranks=N", show_default=False),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            parser=given_path,
            metavar="DIR",
            help="Folder of the run: --set run.folder=DIR",
            show_default=False,
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Start a new run; an old one in the folder is moved aside."),
    ] = False,
    fields: Fields = False,
    version: Version = False,
) -> None:
    """Train a language model, sharded over ranks.

    A TOML file says what is trained, on what and how. Without one, two CPU
    ranks (or all GPUs) train a small model on the sources of Python's
    standard library. A run in the folder is resumed. Under torchrun or srun
    this process is one of the launcher's ranks.
    """
    if fields:
        with errors_of_ranks_as_exit_codes(prints_errors=True):
            print_reference(Console(), None if file is None else str(file))
        return
    wanted = [*(settings or ())]
    if ranks is not None:
        wanted.append(f"run.ranks={ranks}")
    if folder is not None:
        wanted.append(f"run.folder={toml_value(folder)}")
    prints_errors = reports_errors(os.environ)
    with errors_of_ranks_as_exit_codes(prints_errors=prints_errors):
        config = read_config(file, wanted, checks=[partial(problems_here, fresh=fresh)])
        if prints_errors:
            stream = broken_pipe_safe(sys.stdout)  # the run goes on even without a reader
            print("Starting; importing torch takes a few seconds.", file=stream, flush=True)
        start(config, fresh=fresh)


@contextmanager
def errors_of_ranks_as_exit_codes(*, prints_errors: bool) -> Iterator[None]:
    """Turn errors that end a run into a message and an exit code.

    Args:
        prints_errors: whether this process prints the message; of a launcher's ranks, only the first does.
    """
    try:
        yield
        return
    except ConfigurationError as error:
        message, code = f"Error: {error}", 2
    except (RankFailedError, BadStepError, CheckpointError) as error:
        message, code = str(error), 1
    except StoppedError as error:
        message, code = str(error), 128 + error.by
    except StoppedBySignalError as error:
        message, code = str(error), 128 + signal.SIGTERM
    except KeyboardInterrupt:
        message, code = "Stopped.", 128 + signal.SIGINT
    if prints_errors:
        _restore_terminal()
        print_error(message)
    raise typer.Exit(code)


def _restore_terminal() -> None:
    """End the progress line and show the cursor, in case rank 0 had no time to do so."""
    console = Console(file=broken_pipe_safe(sys.stdout))
    if console.is_terminal:
        console.print()
        console.show_cursor(True)
