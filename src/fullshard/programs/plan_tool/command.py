"""The subcommands `fullshard plan` and `fullshard plan calibrate`. Torch is imported only when one of them runs.

Exit codes: 0, also if the model does not fit; 2 with one message if the question is impossible.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from typer.core import TyperGroup

from fullshard.errors import ConfigurationError, FullshardError
from fullshard.files import atomic_write
from fullshard.programs.console.broken_pipe_safe import broken_pipe_safe
from fullshard.programs.console.progress_line import ProgressLine, showing_line
from fullshard.programs.console.tables import print_error, print_line, print_prose
from fullshard.programs.given_path import given_path
from fullshard.programs.named_models.published import name_of
from fullshard.programs.plan_tool import options
from fullshard.programs.plan_tool.question import (
    Question,
    gpus_text,
    read_machine,
    read_question,
)
from fullshard.programs.plan_tool.run_cost import read_tokens
from fullshard.programs.report import check_libraries
from fullshard.programs.version_option import Version

if TYPE_CHECKING:
    from fullshard.programs.plan_tool.answers import About
    from fullshard.programs.plan_tool.machine import Machine
    from fullshard.programs.plan_tool.planned_step import PlannedStep
    from fullshard.programs.plan_tool.search import Search, Told
    from fullshard.programs.train.config import RunConfig
    from fullshard.programs.train.model_source import ModelSource

CALIBRATE = "calibrate"
STEP = "step"
"""The name of the command that plans a step. Users do not type it."""


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
    tokens: options.Tokens = None,
    price: options.Price = None,
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
        length = RunLength(None if tokens is None else read_tokens(tokens), price)
        check_outputs([each for each in (toml, html) if each is not None])
        if html is not None:
            check_libraries("A page")
        _answer(
            console,
            question,
            length,
            searches=searches or html is not None,
            toml=toml,
            html=html,
        )
        if explain:
            from fullshard.programs.plan_tool.output import print_assumptions

            print_assumptions(console, machine)
    except FullshardError as error:
        print_error(f"Error: {error}")
        raise typer.Exit(2) from None


@dataclass(frozen=True, slots=True)
class RunLength:
    """Question about the whole run."""

    tokens: int | None
    """None if that was not said."""
    price: float | None
    """Price of a GPU for an hour."""


def _answer(
    console: Console,
    question: Question,
    length: RunLength,
    *,
    searches: bool,
    toml: Path | None,
    html: Path | None,
) -> None:
    """Plan the step that is asked for, look for better ones, and print all of it."""
    from fullshard.programs.plan_tool.answers import About
    from fullshard.programs.plan_tool.output import print_planned, print_verdict
    from fullshard.programs.plan_tool.planned_step import parameters_of
    from fullshard.programs.plan_tool.planning import many_plans
    from fullshard.programs.plan_tool.starting_point import chosen_text, first_plan
    from fullshard.programs.train.config_file import to_short_toml
    from fullshard.programs.train.model_source import open_model

    source = open_model(question.config)
    parameters = parameters_of(source)
    with many_plans(), showing_line(Console(file=broken_pipe_safe(sys.stderr))) as line:
        line.begin(1, 0, "plan", ["the first step"])
        question, step = first_plan(question, source, partial(_tell_estimate, console, line))
        line.close()
        about = About(
            description=source.description,
            parameters=parameters,
            chosen=chosen_text(question),
            tokens=length.tokens or question.tokens_of_run,
            price=length.price,
        )
        best = question.config
        print_verdict(console, step, parameters)
        if step.fits or not searches:
            print_planned(console, step, about)
        if searches:
            found = _search(console, line, First(question, source, step, about), html)
            best = found.best[0].step.config if found.best else best
        if searches and not step.fits:  # what fits comes first
            print_prose(console, "\nAs asked, which does not fit:")
            print_planned(console, step, about)
    if toml is not None:
        what = f"A run for {gpus_text(question.world, question.machine)}, by fullshard plan."
        write_file(toml, to_short_toml(best, what + _shipped_text(best)))
        print_line(console, str(toml))


def _tell_estimate(console: Console, line: ProgressLine, estimate: PlannedStep) -> None:
    """Print an estimate between lines of progress."""
    from fullshard.programs.plan_tool.output import print_estimate

    line.close()
    print_estimate(console, estimate)
    line.begin(1, 0, "plan", ["all layers"])


class First(NamedTuple):
    """The first step that was planned, and what it is about."""

    question: Question
    source: ModelSource
    step: PlannedStep
    about: About


def _search(console: Console, line: ProgressLine, first: First, html: Path | None) -> Search:
    """Look for the smallest number of GPUs and for better configurations, print both, and write the page."""
    from fullshard.programs.plan_tool.output import print_fewest, print_search
    from fullshard.programs.plan_tool.parallel_plans import several_at_a_time
    from fullshard.programs.plan_tool.scaling import fewest_gpus, scaling
    from fullshard.programs.plan_tool.search import search

    question, source, step, about = first
    told = _progress(line)
    with several_at_a_time(source) as planner:
        fewest = fewest_gpus(question, planner)
        print_fewest(console, step, fewest)
        found = search(question, source, step, try_all=html is not None, told=told, planner=planner)
        line.close()
        print_search(console, question, step, found)
        if html is not None:
            # Where it fits is on the curve, too.
            most = 0 if fewest is None or isinstance(fewest, str) else 2 * fewest.world
            curve = scaling(question, source, told, planner, most=most)
            line.close()
    if html is not None:
        from fullshard.programs.plan_tool.page import Planned, render

        plan = Planned(
            question=question, step=step, about=about, found=found, fewest=fewest, scaling=curve
        )
        write_file(html, render(plan))
        print_line(console, str(html))
    return found


def _shipped_text(config: RunConfig) -> str:
    """Return a line about the file of a published model, whose folder has no weights."""
    folder = config.model.huggingface
    name = None if folder is None else name_of(folder)
    if name is None:
        return ""
    return (
        f" model.huggingface is the configuration of {name} that comes with fullshard: it has no weights and no tokenizer. Name a "
        "folder with yours."
    )


def _progress(line: ProgressLine) -> Told:
    """Return a display of the progress of a search."""

    def told(done: int, total: int, what: str) -> None:
        if done == 0:
            line.begin(total, 0, "search", [what])
        line.show(done, f"plan {done + 1}/{total}", [what])

    return told


@app.command(CALIBRATE)
def calibrate(
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure each thing for a shorter time.")
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
    """Measure the GPUs this runs on, and write a profile for plans.

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
