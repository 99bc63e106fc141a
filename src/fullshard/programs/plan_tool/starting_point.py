"""The first step that is planned, where the question leaves something open: how many windows, and what is recomputed.

The windows of a GPU have up to `USUAL_TOKENS` tokens together, and as little is recomputed as memory allows. If nothing
fits, it is one window for each GPU, with all blocks recomputed. What is better than that is left to the search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from fullshard.programs.plan_tool.changes import BATCH, RECOMPUTE, RECOMPUTED, changed
from fullshard.programs.plan_tool.planned_step import PlannedStep, held_bytes
from fullshard.programs.plan_tool.planning import estimated, planned
from fullshard.programs.plan_tool.question import (
    CONTEXT,
    PRECISION,
    USUAL_TOKENS,
    Question,
    longest_window,
)
from fullshard.programs.train.model_source import ModelSource

MOST_KEPT = {"selective": 0.5}
"""Most that recomputation keeps of all activations: a third in Llamas, a tenth where there are experts. So an estimate is often
not needed. What decides is the plan with all layers."""


MANY_RANKS = 256
"""Least number of ranks for which a plan with all layers may take ten seconds: the engine then looks at the shards of so many."""


def first_plan(
    question: Question,
    source: ModelSource,
    told: Callable[[PlannedStep], None] = lambda estimate: None,
) -> tuple[Question, PlannedStep]:
    """Return the question with what it left open, and its plan with all layers.

    Args:
        question: The question of the user.
        source: Its model.
        told: Is told the estimate, if it takes longer than people like to wait for a first answer.

    Raises:
        ConfigurationError: the model has no plan.
    """
    choices = list(_choices(question))
    is_long = question.world > MANY_RANKS
    first: PlannedStep | None = None
    for choice in choices[:-1]:
        if first is None or is_long or not _is_certain(first, choice):
            guess = estimated(choice, source)  # it takes less time than the whole
            first = first or guess
            if held_bytes(guess) > question.machine.usable_bytes:
                break  # to recompute more does not help
            if not guess.fits:
                continue
            if is_long:
                told(guess)
        step = planned(choice, source)
        if step.fits:
            return choice, step
    if is_long:
        told(estimated(choices[-1], source))
    return choices[-1], planned(choices[-1], source)


def _is_certain(first: PlannedStep, choice: Question) -> bool:
    """Return whether a choice will fit, as far as the first estimate tells, which keeps more."""
    before, after = first.config, choice.config
    kept = MOST_KEPT.get(after.compute.checkpoint_activations)
    if kept is None or before.train.batch != after.train.batch:
        return False
    if before.compute.checkpoint_activations != RECOMPUTED[0]:
        return False
    activations = first.memory.at_peak.get("activations", 0)
    return first.memory.reserved - (1 - kept) * activations < choice.machine.usable_bytes


def _choices(question: Question) -> Iterator[Question]:
    """Yield the possible plans, the one that recomputes the least first; only the question itself if nothing is open."""
    config = question.config
    if BATCH not in question.open_fields:
        yield question
        return
    most = max(1, USUAL_TOKENS // config.data.context)
    kept = config.compute.checkpoint_activations
    recomputed = RECOMPUTED if RECOMPUTE in question.open_fields else (kept,)
    choices = [(most, each) for each in recomputed]
    while most > 1:
        most //= 2
        choices.append((most, recomputed[-1]))
    for rows, each in choices:
        values = {BATCH: question.world * config.train.accumulate * rows, RECOMPUTE: each}
        yield replace(question, config=changed(config, values))


def chosen_text(question: Question) -> str | None:
    """Return the choices that were made, and why; None if the question said all of it."""
    config, parts = question.config, []
    if PRECISION in question.open_fields:
        parts.append("compute in bf16")
    if CONTEXT in question.open_fields:
        longest = longest_window(config)
        text = f"windows of {config.data.context:,} tokens"
        if longest is not None:
            most = "the most" if longest == config.data.context else f"of at most {longest:,}"
            text += f" ({most} that the model takes)"
        parts.append(text)
    if BATCH in question.open_fields:
        rows = config.train.batch // question.world // config.train.accumulate
        parts.append("one window at a time" if rows == 1 else f"{rows} windows at a time")
        again = config.compute.checkpoint_activations
        if RECOMPUTE in question.open_fields and again != RECOMPUTED[0]:
            what = "all blocks recomputed" if again == RECOMPUTED[-1] else f"{again} recomputation"
            parts.append(f"{what}, as it would not fit with less")
    return "; ".join(parts) if parts else None
