"""A plan on the terminal: the verdict, the memory, the time, and what is assumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from fullshard.errors import size_text
from fullshard.programs.console.tables import (
    print_facts,
    print_line,
    print_prose,
    print_table,
)
from fullshard.programs.plan_tool.answers import (
    WAITS,
    About,
    batch_text,
    host_rows,
    limit_text,
    memory_rows,
    peak_text,
    seconds_text,
    sharding_text,
    validation_text,
    verdict,
)
from fullshard.programs.plan_tool.changes import OPTIMIZER, WEIGHTS, WIRE
from fullshard.programs.plan_tool.machine import TERA, Machine
from fullshard.programs.plan_tool.planned_step import PlannedStep
from fullshard.programs.plan_tool.profile_file import assumptions
from fullshard.programs.plan_tool.question import Question, gpus_text
from fullshard.programs.plan_tool.search import Found, Search
from fullshard.programs.plan_tool.search_answers import (
    fewest_text,
    nothing_text,
    tried_rows,
    untried_text,
)
from fullshard.programs.plan_tool.validation import Bands, bands_of

FP32_NOTE = (
    "It computes in fp32, which is the trainer's default. Matrix products of bf16 are many times faster on this GPU: try "
    "--set compute.precision=bf16."
)

GRAPH_NOTE = (
    "A step in a CUDA graph (compute.graph) is planned as one without: the host launches every kernel. What compute waits for "
    "the host is less in a graph."
)

CHANGE_NOTES = {
    WIRE: f"{WIRE}=bf16 rounds gradients, so a run cannot change it later.",
    WEIGHTS: f"{WEIGHTS}=bf16 rounds weights and optimizer state, so small updates are lost.",
    OPTIMIZER: f"{OPTIMIZER}=adamw8bit rounds the optimizer's state to 8 bits.",
}
"""Sentence that a change needs, by the field that it changes."""


def print_estimate(console: Console, estimate: PlannedStep) -> None:
    """Print the first answer about a step whose plan takes a while."""
    fits = "It fits" if estimate.fits else "It does not fit"
    print_prose(
        console,
        f"{fits}, estimated from few layers: {size_text(estimate.memory.reserved)} of "
        f"{size_text(estimate.machine.usable_bytes)}, {seconds_text(estimate.seconds)} a step, "
        f"{estimate.tokens_per_second:,.0f} tokens/s per GPU. The plan with all layers follows.\n",
    )


def print_verdict(console: Console, planned: PlannedStep, parameters: int) -> None:
    """Print whether a step fits, and what limits it."""
    bands = bands_of(planned, parameters)
    print_prose(console, verdict(planned, bands["reserved"]))
    print_prose(console, limit_text(planned))


def print_planned(console: Console, planned: PlannedStep, about: About) -> None:
    """Print all about one step but the verdict."""
    bands = bands_of(planned, about.parameters)
    print_line(console, "")
    print_facts(console, list(_facts(planned, about, bands)))
    rows = [(label, size_text(nbytes)) for label, nbytes in memory_rows(planned)]
    rows.append(("reserved in all", size_text(planned.memory.reserved)))
    print_table(console, ["memory of a GPU, at the peak", "bytes"], rows, num_texts=1)
    in_host = [(label, size_text(nbytes)) for label, nbytes in host_rows(planned)]
    if in_host:
        in_host.append(("in all", size_text(planned.memory.host_allocated)))
        print_table(console, ["host memory for a GPU", "bytes"], in_host, num_texts=1)
    print_table(
        console, ["time of a step", "seconds", "share"], list(_time_rows(planned)), num_texts=1
    )
    for note in _notes(planned, bands):
        print_prose(console, f"\n{note}")


def _facts(planned: PlannedStep, about: About, bands: Bands) -> Iterator[tuple[str, str]]:
    yield "Model", f"{about.description}, {about.parameters:,} parameters"
    yield "GPUs", gpus_text(planned.world, planned.machine)
    yield "Sharding", sharding_text(planned)
    yield "Batch", batch_text(planned)
    if about.chosen is not None:
        yield "Chosen", about.chosen
    yield "Memory", peak_text(planned, bands)
    yield "Step", f"{seconds_text(planned.seconds)}, {bands['time']}"
    each = planned.tokens_per_second
    yield "Tokens/s", f"{each:,.0f} per GPU, {each * planned.world:,.0f} in all"
    yield "MFU", f"{100 * planned.mfu:.1f} % of the GPU's {planned.peak_flops / TERA:.3g} TFLOP/s"
    yield "Run", str(about.cost_of(planned))


def _time_rows(planned: PlannedStep) -> Iterator[tuple[str, str, str]]:
    playback, whole = planned.playback, planned.seconds

    def row(label: str, seconds: float) -> tuple[str, str, str]:
        return label, seconds_text(seconds), f"{100 * seconds / whole:.1f} %"

    for phase in ("forward", "backward", "optimizer"):
        if playback.phases.get(phase):
            yield row(f"compute, {phase}", playback.phases[phase])
    for reason, what in WAITS.items():
        if playback.idle.get(reason):
            yield row(f"waits for {what}", playback.idle[reason])
    beside = whole - sum(playback.phases.values()) - sum(playback.idle.values())
    if beside > 0.0005 * whole:
        yield row("compute, slowed by collectives", beside)
    yield row("step", whole)


def _notes(planned: PlannedStep, bands: Bands) -> Iterator[str]:
    text = validation_text(planned, bands)
    if text:
        yield text
    if planned.config.compute.precision == "fp32":
        yield FP32_NOTE
    if planned.config.compute.graph:
        yield GRAPH_NOTE
    if planned.padding is not None:
        yield planned.padding


def print_search(console: Console, question: Question, given: PlannedStep, found: Search) -> None:
    """Print the best configurations, each with its reason, and all that was tried."""
    print_line(console, "")
    if found.best:
        print_prose(
            console,
            "Better configurations for the same batch:"
            if given.fits
            else "Configurations for the same batch that fit:"
            if found.fits
            else "Nothing that was tried fits. These configurations for the same batch come closest:",
        )
        _print_found(console, found.best)
    else:
        print_prose(console, nothing_text(given, found))
    if found.better_larger:
        first = "the first of these" if found.best else "as given"
        print_prose(
            console,
            f"\nLarger batches, against {first}. They change what is learned, so the learning rate may have to change:",
        )
        _print_found(console, found.better_larger)
    if found.best or found.better_larger:
        first = "; --toml FILE writes the first configuration" if found.best else ""
        notes = [f"--set takes these settings, as in fullshard train{first}."]
        changed = [name for each in found.best for name, _ in each.change.values]
        notes += [note for name, note in CHANGE_NOTES.items() if name in changed]
        print_prose(console, "\n" + " ".join(notes))
    rows = [(tried.name, tried.state, *tried.numbers) for tried in tried_rows(given, found)]
    if rows:
        columns = ["tried, estimated from few layers", "", "tokens/s per GPU", "speed", "memory"]
        print_table(console, columns, rows, num_texts=2)
    print_prose(console, f"\n{untried_text(question, found)}")


def _print_found(console: Console, best: Sequence[Found]) -> None:
    for number, each in enumerate(best, 1):
        speed = f"{each.step.tokens_per_second:,.0f} tokens/s per GPU"
        state = "" if each.is_confirmed else ", estimated from few layers"
        print_prose(console, f"\n{number}. {each.change.settings}")
        print_prose(
            console, f"   {speed}, {size_text(each.step.memory.reserved)}{state}: {each.reason}."
        )


def print_fewest(console: Console, given: PlannedStep, fewest: PlannedStep | str | None) -> None:
    """Print on how many GPUs the model can be trained."""
    print_prose(console, f"\n{fewest_text(given, fewest)}")


def print_assumptions(console: Console, machine: Machine) -> None:
    """Print everything that a profile assumes, with its sources."""
    print_line(console, "")
    print_prose(console, f"What the profile {machine.name} assumes ({machine.title}):")
    section = ""
    for each in assumptions(machine):
        here, _, name = each.name.partition(".")
        if here != section:
            section = here
            band = f", band \u00b1 {100 * each.band:.0f} %" if each.band is not None else ""
            print_line(console, f"\n[{section}]{band}")
        print_prose(console, f"{name} = {each.value}")
        print_prose(console, f"    {each.source}")
