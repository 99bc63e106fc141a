"""Plans that answer questions: every failure is one message."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from fullshard.errors import ConfigurationError, FullshardError
from fullshard.programs.plan_tool.planned_step import (
    PlannedStep,
    estimate_step,
    plan_microbatches,
    plan_step,
)
from fullshard.programs.plan_tool.question import Question
from fullshard.programs.train.model_source import ModelSource


@contextmanager
def many_plans() -> Iterator[None]:
    """Make plans faster within the block.

    Every recorded step collects garbage. It then need not look at all that was imported before.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


MOST_MICROBATCHES = 8
"""Most microbatches of which all are planned. A step with more is planned from few, but for the comparison with a real one."""


def planned(question: Question, source: ModelSource) -> PlannedStep:
    """Plan a step with all its layers.

    Raises:
        ConfigurationError: the model cannot be run without values, or the configuration is not possible.
    """
    return _safely(partial(plan_microbatches, most=MOST_MICROBATCHES), question, source)


def planned_whole(question: Question, source: ModelSource) -> PlannedStep:
    """Plan a step with all its layers and microbatches: its trace is to be compared with that of a run.

    Raises:
        ConfigurationError: the model cannot be run without values, or the configuration is not possible.
    """
    return _safely(plan_step, question, source)


def estimated(question: Question, source: ModelSource) -> PlannedStep:
    """Plan a step from few of its layers; a model that has no layers is planned as a whole.

    Raises:
        ConfigurationError: the model cannot be run without values, or the configuration is not possible.
    """
    return _safely(estimate_step, question, source)


def attempted(
    plan: Callable[[Question, ModelSource], PlannedStep], question: Question, source: ModelSource
) -> PlannedStep | str:
    """Return a plan, or the error that planning raised in one line: a candidate that has no plan ends nothing."""
    try:
        return plan(question, source)
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())


def _safely(
    plan: Callable[..., PlannedStep], question: Question, source: ModelSource
) -> PlannedStep:
    try:
        return plan(question.config, question.world, question.machine, source)
    except FullshardError:
        raise
    except Exception as error:  # whatever a model does that tensors without values do not allow
        first_line = (str(error).splitlines() or [""])[0].rstrip(".")
        raise ConfigurationError(
            f"A plan runs the model on the meta device, where tensors have sizes and no values, and {source.description} "
            f"raised {type(error).__name__} there: {first_line}. Models whose computation depends on values cannot be planned."
        ) from error
