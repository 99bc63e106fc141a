"""A plan on the terminal: the verdict, the memory, the time, and what is assumed."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from fullshard.errors import size_text
from fullshard.programs.console.tables import (
    counted,
    print_facts,
    print_line,
    print_prose,
    print_table,
)
from fullshard.programs.plan_tool.answers import (
    WAITS,
    host_rows,
    limit_text,
    memory_rows,
    peak_text,
    seconds_text,
    validation_text,
    verdict,
)
from fullshard.programs.plan_tool.changes import RECOMPUTE, WIRE
from fullshard.programs.plan_tool.machine import TERA, Machine
from fullshard.programs.plan_tool.planned_step import PlannedStep
from fullshard.programs.plan_tool.profile_file import assumptions
from fullshard.programs.plan_tool.question import gpus_text
from fullshard.programs.plan_tool.search import Search
from fullshard.programs.plan_tool.validation import Bands, bands_of

FP32_NOTE = (
    "It computes in fp32, which is the trainer's default. Matrix products of bf16 are many times faster on this GPU: try "
    "--set compute.precision=bf16."
)

GRAPH_NOTE = (
    "A step in a CUDA graph (compute.graph) is planned as one without: the host launches every kernel. What compute waits for "
    "the host is less in a graph."
)

WIRE_NOTE = f" {WIRE}=bf16 rounds gradients, so a run cannot change it later."


def print_planned(
    console: Console, planned: PlannedStep, description: str, parameters: int
) -> None:
    """Print all about one step, the verdict first.

    Args:
        console: Where to.
        planned: The step.
        description: Of the model.
        parameters: Of the whole model.
    """
    bands = bands_of(planned, parameters)
    print_prose(console, verdict(planned, bands["reserved"]))
    print_prose(console, limit_text(planned))
    print_line(console, "")
    print_facts(console, list(_facts(planned, description, parameters, bands)))
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


def _facts(
    planned: PlannedStep, description: str, parameters: int, bands: Bands
) -> Iterator[tuple[str, str]]:
    yield "Model", f"{description}, {parameters:,} parameters"
    yield "GPUs", gpus_text(planned.world, planned.machine)
    yield "Sharding", sharding_text(planned)
    yield "Batch", batch_text(planned)
    yield "Memory", peak_text(planned, bands)
    yield "Step", f"{seconds_text(planned.seconds)}, {bands['time']}"
    each = planned.tokens_per_second
    yield "Tokens/s", f"{each:,.0f} per GPU, {each * planned.world:,.0f} in all"
    yield "MFU", f"{100 * planned.mfu:.1f} % of the GPU's {planned.peak_flops / TERA:.3g} TFLOP/s"


def sharding_text(planned: PlannedStep) -> str:
    """Return how the model is spread."""
    sharding = planned.config.sharding
    ranks = planned.world // sharding.replicas
    text = f"over {counted(ranks, 'GPU')}" if planned.world > 1 else "none, as there is one GPU"
    if sharding.replicas > 1:
        text = f"{counted(sharding.replicas, 'replica')} of {counted(ranks, 'GPU')} (HSDP)"
    again = "" if sharding.reshard_after_forward else ", not resharded after forward"
    where = ", shards in host memory" if sharding.offload else ""
    return f"{text}, groups of {sharding.groups}{again}{where}"


def batch_text(planned: PlannedStep) -> str:
    """Return what a step is of."""
    train, context = planned.config.train, planned.config.data.context
    rows = train.batch // planned.world // train.accumulate
    micro = f"{train.accumulate} x " if train.accumulate > 1 else ""
    return f"{counted(train.batch, 'window')} of {context:,} tokens; {micro}{rows} per GPU"


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
    if planned.config.compute.precision == "fp32" and not planned.machine.host.is_synchronous:
        yield FP32_NOTE
    if planned.config.compute.graph and not planned.machine.host.is_synchronous:
        yield GRAPH_NOTE
    if planned.padding is not None:
        yield planned.padding


def print_search(console: Console, given: PlannedStep, found: Search) -> None:
    """Print the best configurations, each with its reason."""
    print_line(console, "")
    for failed in found.failed:
        print_prose(console, f"Not planned: {failed.change.settings}: {failed.reason}")
    if not found.best:
        print_prose(console, _nothing_text(given, found))
        return
    title = (
        "Better configurations for the same batch:"
        if given.fits
        else "Configurations for the same batch that fit:"
        if found.fits
        else "Nothing that was tried fits. These configurations for the same batch come closest:"
    )
    print_prose(console, title)
    for number, each in enumerate(found.best, 1):
        speed = f"{each.step.tokens_per_second:,.0f} tokens/s per GPU"
        state = "" if each.is_confirmed else ", estimated from few layers"
        print_prose(console, f"\n{number}. {each.change.settings}")
        print_prose(
            console, f"   {speed}, {size_text(each.step.memory.reserved)}{state}: {each.reason}."
        )
    print_prose(
        console,
        "\n--set takes these settings, as in fullshard train; --toml FILE writes the first configuration."
        + (WIRE_NOTE if any(WIRE in each.change.settings for each in found.best) else ""),
    )


def _nothing_text(given: PlannedStep, found: Search) -> str:
    """Say why there is no better configuration."""
    tried = counted(found.num_plans, "other configuration")
    if given.fits:
        return f"No better configuration was found: {tried} tried."
    held = sum(given.memory.at_peak.get(kind, 0) for kind in ("parameters", "optimizer"))
    if held < given.machine.usable_bytes:
        return f"Nothing that was tried fits or needs less memory: {tried}."
    moved = " It does not fit with them in host memory, either." if found.num_plans else ""
    return (
        f"No other configuration can make it fit on {counted(given.world, 'GPU')}: parameters and optimizer state alone take "
        f"{size_text(held)} of each GPU.{moved}"
    )


def print_enough(console: Console, given: PlannedStep, enough: PlannedStep | None) -> None:
    """Print on how many more GPUs a step fits that does not fit anywhere else."""
    if enough is None:
        print_prose(
            console,
            "More GPUs do not help, as each keeps its windows. Take a smaller batch, a shorter window, or a GPU with more memory.",
        )
        return
    again = enough.config.compute.checkpoint_activations
    is_changed = again != given.config.compute.checkpoint_activations
    how = f" with {RECOMPUTE}={again}" if is_changed else ""
    print_prose(
        console,
        f"It fits on {counted(enough.world, 'GPU')}{how}: {size_text(enough.memory.reserved)} of each, "
        f"{enough.tokens_per_second:,.0f} tokens/s per GPU, with as many windows for each GPU.",
    )


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
