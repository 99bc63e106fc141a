"""Sentences about a plan, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fullshard.errors import size_text
from fullshard.programs.console.tables import counted
from fullshard.programs.plan_tool.planned_step import PlannedStep
from fullshard.programs.plan_tool.playback import Idle
from fullshard.programs.plan_tool.program import MemoryKind, Phase
from fullshard.programs.plan_tool.run_cost import DEFAULT_TOKENS, RunCost, run_cost
from fullshard.programs.plan_tool.validation import PLUS_MINUS, Band, Bands

LIMITED_FROM = 0.1
"""Waits below this share of a step are not what limits it."""
NOTABLE = 0.01
"""Times below this share of a step, and bytes below this share of its memory, are not worth a word."""

WAITS: dict[Idle, str] = {
    "gather": "gathers",
    "reduction": "reductions",
    "copy": "copies from and to host memory",
    "update": "the update in host memory",
    "host": "the host",
    "other": "other work",
}
"""Work that compute waits for, by the reason of the wait."""

LIMITS: dict[Idle, str] = {
    "gather": "Exposed gathers limit it",
    "reduction": "Exposed reductions limit it",
    "copy": "Copies from and to host memory limit it",
    "update": "The update in host memory limits it",
    "host": "The host limits it",
    "other": "Work behind compute limits it",
}

MEMORY: dict[MemoryKind, str] = {
    "parameters": "parameters, sharded",
    "gradients": "gradients, sharded",
    "accumulated": "gradients, whole, of microbatches",
    "optimizer": "optimizer state",
    "activations": "activations",
    "gathered": "gathered parameters",
    "reducing": "gradients being reduced",
    "temporary": "temporary tensors",
    "workspace": "workspaces of libraries",
}
"""Purposes of memory, in the order of tables."""

PHASES: dict[Phase, str] = {
    "build": "while it is built",
    "forward": "in forward",
    "backward": "in backward",
    "optimizer": "in the optimizer's step",
    "between": "between steps",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """Facts about a plan beside its step."""

    description: str
    """Text about the model."""
    parameters: int
    """Elements of the whole model's parameters."""
    chosen: str | None = None
    """Text about the plan's own choices, where nothing was asked for."""
    tokens: int | None = None
    """Tokens of the whole run; None if their number is not known."""
    price: float | None = None
    """Price of a GPU for an hour."""

    def cost_of(self, planned: PlannedStep) -> RunCost:
        """Return the cost of the run; for a billion tokens if its length is not known."""
        return run_cost(
            self.tokens or DEFAULT_TOKENS,
            tokens_of_step=planned.tokens * planned.world,
            seconds=planned.seconds,
            gpus=planned.world,
            price=self.price,
        )


def seconds_text(seconds: float) -> str:
    """Return a time with three digits, in the unit that fits."""
    if seconds <= 0:
        return "0 s"
    for unit, in_unit in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= in_unit:
            return f"{_three_digits(seconds / in_unit)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} us"


def _three_digits(number: float) -> str:
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}"


def verdict(planned: PlannedStep, band: Band) -> str:
    """Say whether it fits, and by how much; also if the plan is not exact enough to be sure."""
    if not planned.host_bytes:
        return _verdict_of_gpu(planned, band)
    missing = planned.host_bytes - planned.machine.host_memory_bytes
    if missing > 0:
        return f"It does not fit: {size_text(missing)} of host memory are missing. {host_text(planned)}"
    return f"{_verdict_of_gpu(planned, band)} {host_text(planned)}"


def _verdict_of_gpu(planned: PlannedStep, band: Band) -> str:
    needed, there = planned.memory.reserved, planned.machine.usable_bytes
    machine, error = planned.machine.title, int(needed * (band.relative or 0.0))
    is_close = abs(there - needed) < error
    if needed <= there:
        close = ", but only just" if is_close else ""
        unsure = f", and the plan may be off by {size_text(error)}" if is_close else ""
        return (
            f"It fits{close}: {size_text(needed)} of the {size_text(there)} that torch can use of {machine}; "
            f"{size_text(there - needed)} stay free{unsure}."
        )
    unsure = f" The plan may be off by {size_text(error)}." if is_close else ""
    return (
        f"It does not fit: {size_text(needed - there)} are missing. It needs {size_text(needed)}, and torch can use "
        f"{size_text(there)} of {machine}.{unsure}"
    )


def host_text(planned: PlannedStep) -> str:
    """Say how much host memory a step with offload takes."""
    machine, ranks = planned.machine, planned.machine.ranks_on_host(planned.world)
    return (
        f"Shards, gradients and optimizer state take {size_text(planned.host_bytes)} of the {size_text(machine.host_memory_bytes)} "
        f"of a host: {ranks} x {size_text(planned.memory.host_allocated)}."
    )


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
    """Return the windows of a step."""
    train, context = planned.config.train, planned.config.data.context
    rows = train.batch // planned.world // train.accumulate
    micro = f"{train.accumulate} x " if train.accumulate > 1 else ""
    return f"{counted(train.batch, 'window')} of {context:,} tokens; {micro}{rows} per GPU"


def host_rows(planned: PlannedStep) -> list[tuple[str, int]]:
    """Return the purposes of one GPU's host memory, and their bytes; nothing without offload."""
    found = planned.memory.host_at_peak
    return [(label, found[kind]) for kind, label in MEMORY.items() if found.get(kind)]


def memory_rows(planned: PlannedStep) -> Iterator[tuple[str, int]]:
    """Yield the purposes of memory at the peak, and their bytes."""
    for kind, label in MEMORY.items():
        nbytes = planned.memory.at_peak.get(kind, 0)
        if nbytes:
            yield label, nbytes
    yield "allocator: reserved, not used", planned.memory.reserved - planned.memory.allocated


def peak_text(planned: PlannedStep, bands: Bands) -> str:
    """Say when the most memory is in use, and how much the allocator has then."""
    memory = planned.memory
    return (
        f"{size_text(memory.allocated)} allocated {PHASES[memory.peak_phase]}, {bands['allocated'].percent}; "
        f"{size_text(memory.reserved)} reserved, {bands['reserved'].percent}; {size_text(memory.at_rest)} between steps"
    )


def waits(planned: PlannedStep) -> list[tuple[Idle, float]]:
    """Return the awaited work of compute and its seconds, the longest first."""
    found = [(reason, seconds) for reason, seconds in planned.playback.idle.items() if seconds > 0]
    return sorted(found, key=lambda each: -each[1])


def limit_text(planned: PlannedStep) -> str:
    """Say in a sentence what limits the step."""
    found, whole = waits(planned), planned.seconds
    idle = sum(seconds for _, seconds in found)
    parts = _listed(
        [
            f"{seconds_text(seconds)} for {WAITS[reason]}"
            for reason, seconds in found
            if seconds >= NOTABLE * whole
        ]
    )
    if idle < LIMITED_FROM * whole:
        rest = f"waits {parts}" if parts else "hardly waits" if found else "never waits"
        return f"Compute limits it: it is busy for {seconds_text(whole - idle)} of {seconds_text(whole)}, and {rest}."
    return f"{LIMITS[found[0][0]]}: in a step of {seconds_text(whole)}, compute waits {parts}."


def _listed(parts: Sequence[str]) -> str:
    """Return them as people list things: a, b and c."""
    return " and ".join(each for each in (", ".join(parts[:-1]), *parts[-1:]) if each)


def validation_text(planned: PlannedStep, bands: Bands) -> str | None:
    """Say which answers were not compared with measured runs; None if all were."""
    missing = [
        name
        for name, answer in (("memory", bands["reserved"]), ("time", bands["time"]))
        if not answer.is_validated
    ]
    if not missing:
        return None
    text = (
        f"Not validated: no plan of {planned.machine.title} with a model of about this size and this many GPUs was compared with a "
        f"measured run in {' and '.join(missing)}."
    )
    if planned.has_experts:
        text += " No run with experts was measured at all: tokens are planned as if all experts got equally many."
    if bands["reserved"].basis == "others" and bands["reserved"].relative is not None:
        text += " The errors of memory are those of other measured steps."
    if bands["time"].basis == "host":
        text += (
            f" It waits for the host, whose times in shipped profiles are from an earlier engine, so the plan may be up to "
            f"{bands['time'].percent.removeprefix(PLUS_MINUS)} too slow: measure this machine with fullshard plan calibrate."
        )
    return text
