"""The best configurations for the same batch, and for larger ones.

    single      every change of one field, estimated; those that cannot help are left out
    combined    what several changes together would give, if their gains multiply and their bytes add up; the most
                promising are estimated
    confirmed   the best of all, planned with all its layers; the next one, if it turns out not to fit
    larger      the best with more windows, estimated: that changes what is learned

What cannot help: replicas whose parameters and optimizer state alone are too large, and what only saves memory while there is
enough of it. Shards go to host memory (`sharding.offload`) only where nothing else fits. An optimizer with smaller state, and weights
and state in bfloat16, come after all else that fits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from fullshard.errors import size_text
from fullshard.programs.plan_tool.answers import NOTABLE, WAITS, seconds_text
from fullshard.programs.plan_tool.changes import (
    ACCUMULATE,
    Change,
    accumulations,
    combined,
    is_possible,
    larger_batches,
    offloads,
    single_changes,
    with_divided_state,
)
from fullshard.programs.plan_tool.memory_use import MemoryUse
from fullshard.programs.plan_tool.parallel_plans import Plan, Planner, one_by_one
from fullshard.programs.plan_tool.planned_step import PlannedStep
from fullshard.programs.plan_tool.planning import attempted, estimated, planned
from fullshard.programs.plan_tool.question import Question
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.model_source import ModelSource

COMBINATIONS = 4
"""Number of combinations of changes that are estimated."""
CONFIRMED = 3
"""Most changes, of the best, that are planned with all layers."""
BEST = 5
"""Most changes that are returned."""
MARGIN = 0.05
"""The share of memory by which estimates may be off: it stays free where microbatches are chosen to fit."""
OF_STATE_IN_8_BITS = 0.26
"""The share of Adam's state that is left in 8 bits, with its scales."""
WORTHWHILE = 1.01
"""Least gain of a change in throughput."""

Told = Callable[[int, int, str], None]
"""A listener: it hears how many plans are made, of how many, and which one comes next."""


@dataclass(frozen=True, slots=True)
class Found:
    """A changed configuration and its plan."""

    change: Change
    step: PlannedStep
    reason: str
    """Its gain or cost against the given configuration, in one line."""
    gain: float = 1.0
    """Its throughput, relative to that of the plan it is compared with."""
    is_confirmed: bool = False
    """Whether it was planned with all layers."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A changed configuration that could not be planned."""

    change: Change
    reason: str
    """The error, in one line."""


@dataclass(frozen=True, slots=True)
class Search:
    """The result of a search."""

    best: Sequence[Found]
    """The best first; better than what was given, or at least fitting if that does not fit."""
    tried: Sequence[Found]
    """Changes of one field, in the order of fields; then changes of several."""
    num_plans: int
    num_pruned: int
    """Changes that cannot help, which were not estimated."""
    failed: Sequence[Failed] = ()
    """Changes whose planning raised an error; the search goes on without them."""
    larger: Sequence[Found] = ()
    """Changes with larger batches, in the order of sizes; gains are against the best for the same batch."""

    @property
    def better_larger(self) -> list[Found]:
        """Larger batches that fit and give more throughput, the best first."""
        better = [each for each in self.larger if each.step.fits and each.gain >= WORTHWHILE]
        return sorted(better, key=lambda each: -each.gain)

    @property
    def fits(self) -> bool:
        """Whether the best configuration fits."""
        return bool(self.best) and self.best[0].step.fits


def search(
    question: Question,
    source: ModelSource,
    given: PlannedStep,
    *,
    try_all: bool = False,
    told: Told = lambda done, total, what: None,
    planner: Planner | None = None,
) -> Search:
    """Find better configurations.

    Args:
        question: The given run.
        source: Its model.
        given: Its plan.
        try_all: Also estimate changes of one field that cannot help, to show what they cost.
        told: Is told about the progress.
        planner: Makes the plans; None for one after the other.

    Raises:
        ConfigurationError: the model has no plan.
    """
    return _Searching(question, given, told, planner or one_by_one(source)).search(try_all=try_all)


class _Searching:
    def __init__(
        self, question: Question, given: PlannedStep, told: Told, planner: Planner
    ) -> None:
        self._question, self._given, self._told, self._planner = question, given, told, planner
        (base,) = planner(partial(attempted, estimated), [question])
        self._base = given if isinstance(base, str) else base
        """Estimates are compared with an estimate."""
        self._needs_memory = False
        """Whether more memory would make a faster configuration possible."""
        self._failed: list[Failed] = []
        self._done = 0
        self._total = 0

    def search(self, *, try_all: bool) -> Search:
        possible = [*single_changes(self._question), *self._microbatches_that_fit()]
        hopeful = [change for change in possible if self._could_fit(change)]
        wanted = [each for each in hopeful if try_all or not self._is_idle(each)]
        self._total = len(wanted) + COMBINATIONS + 1
        tried = self._estimates(wanted)
        self._needs_memory = self._has_too_large(tried)
        if not any(each.step.fits for each in tried) or self._needs_memory:
            missing = [each for each in hopeful if each not in wanted]
            self._total += len(missing)
            tried += self._estimates(missing)
            wanted = hopeful
        tried += self._with_divided_state(tried, possible)
        together = self._estimates(self._combinations(tried))
        moved = self._offloaded([*tried, *together])
        ranked = sorted([*tried, *together, *moved], key=self._rank)
        best = self._confirmed(self._better(ranked)[:BEST])
        return Search(
            best=best,
            larger=self._larger(best),
            tried=[*tried, *together, *moved],
            num_plans=self._done,
            num_pruned=len(possible) - len(wanted),
            failed=self._failed,
        )

    def _microbatches_that_fit(self) -> list[Change]:
        """Return microbatches so small that their activations fit, if activations shrink with them."""
        question, memory = self._question, self._base.memory
        shrinking = _activations_of(memory)
        left = question.machine.usable_bytes * (1 - MARGIN) - (memory.reserved - shrinking)
        if self._base.fits or left <= 0:
            return []
        needed = question.config.train.accumulate * shrinking / left
        possible = (
            change
            for change in accumulations(question)
            if dict(change.values)[ACCUMULATE] >= needed
        )
        # Fragments may need more than the margin, so the next smaller ones are tried, too.
        return [change for change in possible if change not in single_changes(question)][:2]

    # --- what is not worth an estimate

    def _could_fit(self, change: Change) -> bool:
        """Say whether what every rank holds between steps leaves any memory."""
        before, after = self._question.config, change.of(self._question.config)
        held = Counter(self._base.memory.at_peak)
        if not after.sharding.offload:
            held.update(self._base.memory.host_at_peak)
        larger = after.sharding.replicas / before.sharding.replicas
        parameters = held.get("parameters", 0) * larger
        state = held.get("optimizer", 0) * larger * _keepers(before) / _keepers(after)
        if after.optimizer.name != before.optimizer.name:
            state *= OF_STATE_IN_8_BITS
        if after.model.dtype != before.model.dtype:  # from 32 to 16 bits
            parameters, state = parameters / 2, state / 2
        return parameters + state < self._question.machine.usable_bytes

    def _is_idle(self, change: Change) -> bool:
        """Say whether it only saves memory, and there is enough."""
        return change.saves_memory and self._base.fits

    def _has_too_large(self, tried: Sequence[Found]) -> bool:
        """Say whether memory is all that keeps a faster configuration from working."""
        return any(
            not each.step.fits and self._speed(each.step) > WORTHWHILE * self._speed(self._base)
            for each in tried
        )

    def _with_divided_state(
        self, tried: Sequence[Found], possible: Sequence[Change]
    ) -> list[Found]:
        """Return replicas that may fit if they divide the optimizer's state, and do not without that."""
        fitting = {each.change for each in tried if each.step.fits}
        wanted = [
            other
            for change in possible
            if change not in fitting
            and (other := with_divided_state(self._question, change))
            and self._could_fit(other)
        ]
        self._total += len(wanted[:1])
        return self._estimates(wanted[:1])

    def _offloaded(self, others: Sequence[Found]) -> list[Found]:
        """Return plans that fit with shards in host memory, which is slow: only where nothing else fits."""
        if self._base.fits or any(each.step.fits for each in others):
            return []
        wanted = offloads(self._question)
        self._total += len(wanted)
        return self._estimates(wanted)

    def _larger(self, best: Sequence[Found]) -> list[Found]:
        """Return the best configuration with more windows; nothing if none fits."""
        first = best[0] if best else None
        if not (first.step.fits if first else self._base.fits):
            return []
        changes = larger_batches(self._question, first.change if first else None)
        self._total = self._done + len(changes) + 1
        before = first.step if first else self._base
        if first and first.is_confirmed:  # compare estimates with an estimate
            self._total += 1
            again = [step for _, step in self._plans(estimated, [first.change])]
            before = again[0] if again else before
        return self._estimates(changes, before)

    # --- combinations

    def _combinations(self, tried: Sequence[Found]) -> list[Change]:
        """Return the most promising changes of several fields."""
        axes: dict[str, list[Found]] = defaultdict(list)
        for each in tried:
            if self._helps(each):
                axes[each.change.axis].append(each)
        predicted: list[tuple[float, float, Change]] = []
        for choice in product(*([None, *found] for found in axes.values())):
            chosen = [each for each in choice if each is not None]
            if len(chosen) >= 2:
                seconds, nbytes = self._predicted(chosen)
                change = combined(tuple(each.change for each in chosen))
                if is_possible(self._question, change):
                    predicted.append((nbytes, seconds, change))
        # Bytes do not quite add up. So some may need a little more than there is, and others not.
        there = self._question.machine.usable_bytes
        bold, careful = (
            sorted(predicted, key=partial(_hope, most)) for most in (there * (1 + MARGIN), there)
        )
        wanted = {each: None for _, _, each in bold[: COMBINATIONS - 1]}
        wanted |= {each: None for _, _, each in careful}
        return list(wanted)[:COMBINATIONS]

    def _helps(self, found: Found) -> bool:
        """Say whether it gains time, or memory where that is short."""
        base, step = self._base, found.step
        is_faster = self._speed(step) > self._speed(base) * (1 + NOTABLE / 2)
        saved = base.memory.reserved - step.memory.reserved
        needs_memory = not base.fits or self._needs_memory
        return is_faster or (needs_memory and saved > NOTABLE * base.memory.reserved)

    def _predicted(self, chosen: Sequence[Found]) -> tuple[float, float]:
        """Return seconds and bytes, if gains multiply and bytes add up."""
        seconds, nbytes = self._base.seconds, float(self._base.memory.reserved)
        for each in chosen:
            seconds *= each.step.seconds / self._base.seconds
            nbytes += each.step.memory.reserved - self._base.memory.reserved
        return seconds, nbytes

    # --- plans

    def _estimates(
        self, changes: Sequence[Change], before: PlannedStep | None = None
    ) -> list[Found]:
        before = before or self._base
        return [
            Found(change, step, reason(before, step), gain=self._speed(step) / self._speed(before))
            for change, step in self._plans(estimated, changes)
        ]

    def _confirmed(self, best: Sequence[Found]) -> list[Found]:
        """Plan the best with all its layers, and go on with the next as long as it is not what the estimate said."""
        found = list(best[CONFIRMED:])
        for index, estimate in enumerate(best[:CONFIRMED]):
            self._total = max(self._total, self._done + 1)
            for _, step in self._plans(planned, [estimate.change]):  # none if it failed
                why = reason(self._given, step)
                gain = self._speed(step) / self._speed(self._given)
                found.append(replace(estimate, step=step, reason=why, gain=gain, is_confirmed=True))
                if step.fits == estimate.step.fits and self._is_better(found[-1]):
                    found += best[index + 1 : CONFIRMED]
                    return self._better(sorted(found, key=self._rank))
        return self._better(sorted(found, key=self._rank))

    def _better(self, ranked: Sequence[Found]) -> list[Found]:
        """Return those that are better than what is given; if some of them fit, only these."""
        better = [each for each in ranked if self._is_better(each)]
        return [each for each in better if each.step.fits] or better

    def _plans(
        self, plan: Plan[PlannedStep], changes: Sequence[Change]
    ) -> Iterator[tuple[Change, PlannedStep]]:
        """Yield the plans of changed configurations but those that fail, and tell about each before it is there."""
        config = self._question.config
        asked = [replace(self._question, config=change.of(config)) for change in changes]
        answers = self._planner(partial(attempted, plan), asked)
        for change in changes:
            self._told(self._done, self._total, change.settings)
            answer = next(answers)
            self._done += 1
            if isinstance(answer, str):
                self._failed.append(Failed(change, answer))
            else:
                yield change, answer

    def _speed(self, step: PlannedStep) -> float:
        return step.tokens_per_second

    def _rank(self, found: Found) -> tuple[bool, bool, bool, float]:
        """Return a key that sorts the best first. Estimates are too rough to push a confirmed one from its place."""
        step = found.step
        cost = -step.tokens_per_second if step.fits else step.memory.reserved
        return not step.fits, found.change.trains_otherwise, not found.is_confirmed, cost

    def _is_better(self, found: Found) -> bool:
        before = self._given if found.is_confirmed else self._base
        if not self._base.fits:
            return found.step.fits or found.step.memory.reserved < before.memory.reserved
        return found.step.fits and self._speed(found.step) >= WORTHWHILE * self._speed(before)


def _hope(most: float, predicted: tuple[float, float, Change]) -> tuple[float, bool, float, int]:
    """Return a key that sorts the most promising first, if there are so many bytes."""
    nbytes, seconds, change = predicted
    return max(0.0, nbytes - most), change.trains_otherwise, seconds, len(change.values)


def _activations_of(memory: MemoryUse) -> int:
    """Return the bytes that grow with the microbatch."""
    return memory.at_peak.get("activations", 0) + memory.at_peak.get("temporary", 0)


def _keepers(config: RunConfig) -> int:
    """Return among how many replicas the optimizer's state is divided."""
    return config.sharding.replicas if config.optimizer.shard_over_replicas else 1


def reason(before: PlannedStep, after: PlannedStep) -> str:
    """Say in one line what a change gains and costs."""
    return "; ".join(_reasons(before, after))


def _reasons(before: PlannedStep, after: PlannedStep) -> Iterator[str]:
    if after.fits != before.fits:
        yield "fits" if after.fits else "does not fit"
    yield _times_text(after.tokens_per_second / before.tokens_per_second)
    times = list(_differences(before, after))
    times.sort(key=lambda each: -abs(each[0]))
    for difference, what in times[:2]:
        if abs(difference) >= NOTABLE * before.seconds:
            word = "longer" if difference > 0 else "shorter"
            yield f"{what} {seconds_text(abs(difference))} {word}"
    nbytes = after.memory.reserved - before.memory.reserved
    if abs(nbytes) >= NOTABLE * before.memory.reserved:
        yield f"{size_text(abs(nbytes))} {'more' if nbytes > 0 else 'less'} memory"
    if after.host_bytes and not before.host_bytes:
        yield f"shards, gradients and optimizer state take {size_text(after.host_bytes)} of host memory a host"


def _differences(before: PlannedStep, after: PlannedStep) -> Iterator[tuple[float, str]]:
    """Yield by how much the parts of a step are longer."""
    idle = {key: after.playback.idle[key] - before.playback.idle[key] for key in WAITS}
    gathers, reductions = idle.pop("gather"), idle.pop("reduction")
    if gathers * reductions > 0:
        # The two share the wire, and few layers do not tell how they divide the waits between them.
        yield gathers + reductions, "waits for gathers and reductions"
    else:
        yield gathers, f"waits for {WAITS['gather']}"
        yield reductions, f"waits for {WAITS['reduction']}"
    for key, difference in idle.items():
        yield difference, f"waits for {WAITS[key]}"
    work = [sum(step.playback.phases.values()) for step in (before, after)]
    yield work[1] - work[0], "compute"


def _times_text(ratio: float) -> str:
    """Return how many times as fast something is."""
    return f"{ratio:.2f} x tokens/s" if ratio < 10 else f"{ratio:,.0f} x tokens/s"
