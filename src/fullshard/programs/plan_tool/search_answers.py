"""Sentences and rows about a search: for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fullshard.errors import size_text
from fullshard.programs.console.tables import counted
from fullshard.programs.plan_tool.changes import OFFLOAD, OPTIMIZER, WEIGHTS, Change
from fullshard.programs.plan_tool.planned_step import PlannedStep, held_bytes
from fullshard.programs.plan_tool.question import Question
from fullshard.programs.plan_tool.search import Found, Search

LONGEST_ERROR = 80
"""Characters of an error in a table."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A line about a configuration."""

    name: str
    state: str
    """Whether it fits; why there is no plan."""
    numbers: tuple[str, str, str]
    """Tokens per second of a GPU, how many times those of what was given, memory."""
    step: PlannedStep | None = None
    """None if it has no plan."""


def tried_rows(given: PlannedStep, found: Search) -> Iterator[Tried]:
    """Yield the given configuration and all that were tried, the failed ones too."""
    steps = [("as given", given)]
    steps += [(each.change.settings, each.step) for each in found.tried]
    steps += [(_larger_text(each, found), each.step) for each in found.larger]
    for name, step in steps:
        speed = f"{step.tokens_per_second:,.0f}"
        ratio = f"{step.tokens_per_second / given.tokens_per_second:.2f} x"
        state = "fits" if step.fits else "does not fit"
        yield Tried(name, state, (speed, ratio, size_text(step.memory.reserved)), step)
    for failed in found.failed:
        text = failed.reason
        if len(text) > LONGEST_ERROR:
            text = f"{text[:LONGEST_ERROR]}..."
        yield Tried(failed.change.settings, f"not planned: {text}", ("", "", ""))


def _larger_text(larger: Found, found: Search) -> str:
    """Return the changes of a larger batch beyond those of the best configuration for the same batch."""
    if not found.best:
        return larger.change.settings
    first = set(found.best[0].change.values)
    more = Change(tuple(each for each in larger.change.values if each not in first))
    return f"1. and {more.settings}"


def nothing_text(given: PlannedStep, found: Search) -> str:
    """Say why there is no better configuration."""
    tried = counted(found.num_plans, "other configuration")
    if given.fits:
        return f"No better configuration for the same batch was found: {tried} tried."
    held = held_bytes(given)
    if held < given.machine.usable_bytes:
        return f"Nothing that was tried fits or needs less memory: {tried}."
    tried_host = any(OFFLOAD in each.change.settings for each in found.tried)
    moved = " It does not fit with them in host memory, either." if tried_host else ""
    return (
        f"No other configuration can make it fit on {counted(given.world, 'GPU')}: parameters, gradients and optimizer state alone take "
        f"{size_text(held)} of each GPU.{moved}"
    )


def untried_text(question: Question, found: Search) -> str:
    """Name the options that were not tried."""
    tried = {name for each in (*found.tried, *found.best) for name, _ in each.change.values}
    config = question.config
    parts = ["context, expert and tensor parallelism, which fullshard does not have"]
    if not config.compute.graph:
        parts.append("compute.graph, whose gain plans do not model")
    saving = []
    if OFFLOAD not in tried and not config.sharding.offload:
        saving.append(f"{OFFLOAD} (shards in host memory)")
    if OPTIMIZER not in tried and config.optimizer.name in ("adam", "adamw"):
        saving.append(f"{OPTIMIZER}=adamw8bit")
    if WEIGHTS not in tried and config.model.dtype == "fp32":
        saving.append(f"{WEIGHTS}=bf16 (weights and optimizer state)")
    if saving:
        listed = " and ".join(each for each in (", ".join(saving[:-1]), saving[-1]) if each)
        parts.append(f"{listed}, which only save{'s' * (len(saving) == 1)} memory")
    return f"Not tried: {'; '.join(parts)}."


def fewest_text(given: PlannedStep, fewest: PlannedStep | str | None) -> str:
    """Say on how many GPUs the model can be trained."""
    window = f"{given.config.data.context:,} tokens"
    if isinstance(fewest, str):
        return f"The smallest number of GPUs is not known: {fewest}"
    if fewest is None:
        return (
            f"A window of {window} does not fit on any number of GPUs, as it stays on one of them. Take shorter windows, or a GPU with "
            "more memory."
        )
    return (
        f"Smallest number of GPUs that fits: {fewest.world:,}, with one window of {window} on each and all blocks recomputed: "
        f"{size_text(fewest.memory.reserved)} of each, {fewest.tokens_per_second:,.0f} tokens/s per GPU."
    )
