"""The subcommands `fullshard plan` and `fullshard plan calibrate`. Torch is imported only when one of them runs.

Exit codes: 0, also if the model does not fit; 2 with one message if the question is impossible.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from fullshard.errors import ConfigurationError, FullshardError
from fullshard.files import atomic_write
from fullshard.programs.console.broken_pipe_safe import broken_pipe_safe
from fullshard.programs.console.progress_line import ProgressLine, showing_line
from fullshard.programs.console.tables import print_error, print_line
from fullshard.programs.given_path import given_path
from fullshard.programs.plan_tool import options
from fullshard.programs.plan_tool.question import (
    Question,
    gpus_text,
    read_machine,
    read_question,
)
from fullshard.programs.report import check_libraries
from fullshard.programs.version_option import Version

if TYPE_CHECKING:
    from fullshard.programs.plan_tool.machine import Machine
    from fullshard.programs.plan_tool.planned_step import PlannedStep
    from fullshard.programs.plan_tool.scaling import ScalePoint
    from fullshard.programs.plan_tool.search import Search, Told

CALIBRATE = "calibrate"
STEP = "step"
"""The name of the command that plans a step. Nobody types it."""


class PlanGroup(TyperGroup):
    """Lets `fullshard plan` take a model, or the word calibrate."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the name of a command before the arguments of a plan."""
        is_calibration = args[:1] == [CALIBRATE]
        return super().parse_args(ctx, args if is_calibration else [STEP, *args])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Leave the name out of the usage that help prints."""
        name, command, rest = super().resolve_command(ctx, args)
        return ("" if name == STEP else name), command, rest


app = typer.Typer(cls=PlanGroup)


@app.callback()
def describe() -> None:
    """Say whether a model fits, how fast it will train, and what limits it."""


@app.command(STEP)
def plan(
    model: options.Model,
    gpus: options.Gpus = None,
    gpu: options.Gpu = None,
    profile: options.Profile = None,
    network: options.Network = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    compiled: options.Compiled = False,
    settings: options.Settings = None,
    explain: options.Explain = False,
    searches: options.Searches = True,
    toml: options.Toml = None,
    html: options.Html = None,
    version: Version = False,
) -> None:
    """Say whether a model fits, how fast it will train, and what limits it.

    The engine runs a step on a device that does not exist, and a virtual clock
    gives it times. Nothing is allocated, and no GPU is needed.
    """
    # OpenMP, and OpenBLAS of numpy, would start threads. A process with threads cannot be forked (`parallel_plans`), and
    # nothing is computed here.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    short = {"train.batch": batch, "data.context": seq}
    given = [f"{field}={value}" for field, value in short.items() if value is not None]
    given += ["compute.compile=blocks"] if compiled else []
    console = Console()
    try:
        machine = read_machine(gpu, profile, network)
        question = read_question(model, gpus, machine, [*(settings or ()), *given])
        check_outputs([each for each in (toml, html) if each is not None])
        if html is not None:
            check_libraries("A page")
        _answer(console, question, searches=searches or html is not None, toml=toml, html=html)
        if explain:
            from fullshard.programs.plan_tool.output import print_assumptions

            print_assumptions(console, machine)
    except FullshardError as error:
        print_error(f"Error: {error}")
        raise typer.Exit(2) from None


def _answer(
    console: Console, question: Question, *, searches: bool, toml: Path | None, html: Path | None
) -> None:
    """Plan the step that is asked for, look for better ones, and print all of it."""
    from fullshard.programs.plan_tool.output import print_enough, print_planned, print_search
    from fullshard.programs.plan_tool.parallel_plans import several_at_a_time
    from fullshard.programs.plan_tool.planning import many_plans, parameters_of, planned
    from fullshard.programs.plan_tool.scaling import enough_gpus, scaling
    from fullshard.programs.plan_tool.search import search
    from fullshard.programs.train.config_file import to_short_toml
    from fullshard.programs.train.model_source import open_model

    source = open_model(question.config)
    best, parameters = question.config, parameters_of(source)
    with many_plans(), showing_line(Console(file=broken_pipe_safe(sys.stderr))) as line:
        line.begin(1, 0, "plan", ["as given"])
        step = planned(question, source)
        line.close()
        print_planned(console, step, source.description, parameters)
        if searches:
            told = _progress(line)
            with several_at_a_time(source) as planner:
                found = search(
                    question, source, step, try_all=html is not None, told=told, planner=planner
                )
                line.close()
                print_search(console, step, found)
                if not step.fits and not found.fits:
                    print_enough(console, step, enough_gpus(question, step, planner))
                if html is not None:
                    curve = scaling(question, source, told, planner)
                    line.close()
            best = found.best[0].step.config if found.best else best
            if html is not None:
                _write_page(html, step, source.description, parameters, found, curve)
                print_line(console, str(html))
    if toml is not None:
        about = f"A run for {gpus_text(question.world, question.machine)}, by fullshard plan."
        write_file(toml, to_short_toml(best, about))
        print_line(console, str(toml))


def _write_page(
    html: Path,
    step: PlannedStep,
    description: str,
    parameters: int,
    found: Search,
    curve: Sequence[ScalePoint],
) -> None:
    """Write the page of a plan."""
    from fullshard.programs.plan_tool.page import Planned, render

    plan = Planned(
        step=step, description=description, parameters=parameters, found=found, scaling=curve
    )
    write_file(html, render(plan))


def _progress(line: ProgressLine) -> Told:
    """Return what shows the progress of a search."""

    def told(done: int, total: int, what: str) -> None:
        if done == 0:
            line.begin(total, 0, "search", [what])
        line.show(done, f"plan {done + 1}/{total}", [what])

    return told


@app.command(CALIBRATE)
def calibrate(
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure less, in a second or two.")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="GPU",
            help="The profile for all that is not measured.",
            show_default="that of this GPU",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            parser=given_path,
            metavar="RUN",
            help="Then correct it by the traces of a run.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", parser=given_path, metavar="FILE", help="File to write."),
    ] = Path("profile.toml"),
    version: Version = False,
) -> None:
    """Measure the machine this runs on, and write a profile for plans.

    Start it with torchrun on all GPUs of one or two hosts to measure
    collectives, too: torchrun --nproc-per-node 8 -m fullshard plan calibrate
    """
    console = Console()
    try:
        from fullshard.programs.plan_tool.calibration_run import calibrated

        machine = calibrated(
            quick=quick, base=base, run=trace, report=lambda text: print_line(console, text)
        )
        if machine is not None:  # the other ranks have the same
            _write_profile(machine, output)
            print_line(console, str(output))
    except FullshardError as error:
        print_error(f"Error: {error}")
        raise typer.Exit(2) from None


def _write_profile(machine: Machine, output: Path) -> None:
    from fullshard.programs.plan_tool.profile_file import to_toml

    write_file(output, to_toml(machine))


def check_outputs(outputs: Sequence[Path]) -> None:
    """Refuse files that cannot be written, before anything takes time; ConfigurationError."""
    for output in outputs:
        folder = output.parent
        if output.is_dir():
            reason = "it is a folder. Name a file in it"
        elif not folder.is_dir():
            reason = f"there is no folder {folder}. Make it first, or name a file in another one"
        elif not os.access(folder, os.W_OK | os.X_OK):
            reason = f"nothing may be written to {folder}. Name a file in another folder"
        else:
            continue
        raise ConfigurationError(f"{output} cannot be written: {reason}.")
    if len({output.resolve() for output in outputs}) < len(outputs):
        raise ConfigurationError(f"--toml and --html both name {outputs[0]}. Name two files.")


def write_file(output: Path, text: str) -> None:
    """Write a file; ConfigurationError if that is not possible."""
    try:
        with atomic_write(output, durable=False) as file:
            file.write(text.encode())
    except OSError as error:
        raise ConfigurationError(
            f"{output} cannot be written: {error.strerror}. Name a file in an existing folder that can be written to."
        ) from error
