"""From samples to figures: medians with their spread, and ratios between contestants.

Noise of a shared host is one-sided (a step is never faster than the machine) and comes in stretches: a
neighbour keeps a core's caches or its clock for seconds. So a ratio is taken within each round, where
both sides met the same neighbours, and the median over rounds leaves out the rounds in which only one
side was hit:

    round 0   a 30 30   b 60 62    0.49
    round 1   a 45 44   b 90 88    0.50     a neighbour for the whole round: both slower, same ratio
    round 2   a 31 90   b 61 60    1.00     one side hit: an outlier, which a median ignores

Two more are given as a check, over all samples at once: the ratio of medians, and of lower quartiles,
which looks at the undisturbed steps only. Where the three disagree, the run was too noisy or too short.

Where a time itself is wanted and not a ratio, nothing cancels a neighbour: then the lower quartile is the
figure, of all contestants alike.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.measure import Quantity, Record

__all__ = ["Formula", "Ratio", "Spread", "Typical", "of_some", "over"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Median, lower quartile and interquartile range of some samples."""

    median: float
    lower_quartile: float
    iqr: float
    num_samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread | None":
        """Summarise the samples; None if there are none."""
        if not samples:
            return None
        lower = median = upper = samples[0]
        if len(samples) > 1:
            lower, median, upper = statistics.quantiles(samples, method="inclusive")
        return cls(median=median, lower_quartile=lower, iqr=upper - lower, num_samples=len(samples))


def of_some(samples: Sequence[float]) -> Spread:
    """Summarise samples of something that was measured."""
    found = Spread.of(samples)
    assert found is not None, "a comparison has at least one round of one step"
    return found


Typical = Callable[[str, Quantity], float]
"""The typical value of a contestant's quantity, by whatever estimator over whichever samples."""

Formula = Callable[[Typical], tuple[float, float]]
"""What is compared: numerator and denominator, from typical values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """One formula over the samples of one comparison."""

    by_round: Spread
    """Of the ratios within rounds: the figure, and how far rounds disagree."""
    of_medians: float
    of_lower_quartiles: float

    @classmethod
    def of(cls, formula: Formula, records: Mapping[str, Record], num_rounds: int) -> "Ratio":
        """Evaluate `formula` for every round, and twice over all of them."""

        def within(turn: int) -> Typical:
            def typical(name: str, quantity: Quantity) -> float:
                found = records[name].samples[quantity]
                steps = len(found) // num_rounds
                return statistics.median(found[turn * steps : (turn + 1) * steps])

            return typical

        def overall(name: str, quantity: Quantity) -> Spread:
            return of_some(records[name].samples[quantity])

        by_round = of_some([quotient(formula(within(turn))) for turn in range(num_rounds)])
        return cls(
            by_round=by_round,
            of_medians=quotient(formula(lambda *key: overall(*key).median)),
            of_lower_quartiles=quotient(formula(lambda *key: overall(*key).lower_quartile)),
        )


def over(name: str, reference: str, quantity: Quantity) -> Formula:
    """A contestant's quantity over another's."""
    return lambda typical: (typical(name, quantity), typical(reference, quantity))


def quotient(fraction: tuple[float, float]) -> float:
    """Divide; a reference that noise made zero or negative counts against the numerator."""
    numerator, denominator = fraction
    return numerator / denominator if denominator > 0 else math.inf
