"""The subcommand `fullshard evaluate`.

Exit codes: 0; 1 if a rank failed, or the checkpoint cannot be read; 2 with one message if configuration or data are
wrong; 130 after Ctrl-C.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fullshard.errors import CheckpointError, ConfigurationError
from fullshard.programs.console.tables import print_line
from fullshard.programs.evaluate_tool.held_out import HeldOutResult
from fullshard.programs.evaluate_tool.start import start
from fullshard.programs.given_path import existing_path
from fullshard.programs.train.command import errors_of_ranks_as_exit_codes
from fullshard.programs.train.config import Problem, RunConfig
from fullshard.programs.train.config_file import read_config, toml_value
from fullshard.programs.train.launch import reports_errors
from fullshard.programs.train.origin import Origin, find_origin
from fullshard.programs.train.preflight import data_problems, model_problems
from fullshard.programs.version_option import Version


def evaluate(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            parser=existing_path,
            show_default=False,
            help="The folder of a run, or a checkpoint in it.",
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", show_default="the newest", help="Which checkpoint."),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(metavar="N", help="Ranks to start; any number.", show_default=False),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.FIELD=VALUE",
            help="Set a field of the run for this evaluation: evaluation.windows, data.path, evaluation.ema, ...",
        ),
    ] = None,
    version: Version = False,
) -> None:
    """Evaluate a run's checkpoint on its held-out data.

    Prints loss, perplexity and the number of tokens: what the run itself
    found at this step. Nothing is written, and the run may be active.
    """
    prints = reports_errors(os.environ)
    with errors_of_ranks_as_exit_codes(prints_errors=prints):
        origin = _origin(path, step)
        assert origin.run is not None, "checked"
        wanted = [*(settings or ()), f"run.folder={toml_value(origin.run.path)}"]
        if ranks is not None:
            wanted.append(f"run.ranks={ranks}")
        config = read_config(origin.run.config, wanted, checks=[_problems])
        result = start(config, origin.checkpoint)
        if prints:
            _print(result)


def _origin(path: Path, step: int | None) -> Origin:
    try:
        origin = find_origin(path, step)
    except CheckpointError as error:
        raise ConfigurationError(str(error)) from error
    if origin.run is None:
        raise ConfigurationError(
            f"An evaluation needs model and data of a run; {path} is neither the folder of a run nor a checkpoint in one. "
            "Start a run from these weights with model.weights; its first evaluation evaluates them."
        )
    return origin


def _problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems that can be found without torch. Any number of ranks will do."""
    yield from model_problems(config)
    yield from data_problems(config)


def _print(result: HeldOutResult) -> None:
    console = Console()
    averages = ", averages of its parameters" if result.ema else ""
    print_line(console, f"Checkpoint  {result.checkpoint}, after step {result.step}{averages}")
    print_line(console, f"Loss        {result.loss:.6f} nats per token")
    print_line(console, f"Perplexity  {result.perplexity:.6g}")
    windows = f"{result.windows:,} windows" if result.windows > 1 else "1 window"
    print_line(console, f"Tokens      {result.tokens:,} held-out tokens, in {windows}")
    if result.note:
        print_line(console, f"Note        {result.note}")
