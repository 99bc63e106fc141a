"""Uneven data: ranks run out of batches at different times, and training goes on over those that have some.

    before each batch   ranks tell each other whether they have one
    a rank without      repeats its last batch; its gradients are zeros
    each reduction      divides by the number of ranks that have data

A rank that has run out still holds shards, which others gather, and which its optimizer updates. So it cannot leave,
nor only answer collectives: it goes on running the program's own step. What a reduction makes of it is in
`Reduction`.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup

from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.reduction import Reduction
from fullshard.engine.reduction_state import ActiveRanks
from fullshard.engine.state import named_states
from fullshard.errors import (
    ConfigurationError,
    DivergenceError,
    LifecycleError,
    UsageError,
    exception_text,
    ranks_text,
)
from fullshard.mesh.axes import global_rank
from fullshard.transport import collectives
from fullshard.transport.tags import tag

T = TypeVar("T")

_BEGINNING = tag("beginning of fullshard.join")
_ASKING = tag("fullshard.join: who has a batch")
_LENDING = tag("fullshard.join: a batch for ranks that never had one")

_HAS, _NONE = "1", "0"
"""Answers of ranks about their next batch. One whose data raised an exception says type and message of that."""
_END: Any = object()
"""Stands for a batch where there is none."""
_MAX_DEVICES = 64
"""The largest number of devices of one host."""


def join(model: nn.Module, batches: Iterable[T]) -> JoinedBatches[T]:
    """Let ranks run out of batches at different times.

        with fullshard.join(model, loader) as batches:
            for batch in batches:  # on every rank, until all ranks have run out
                model(batch).mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    The gradients of each batch are averaged over the ranks that have one. A rank that has run out repeats its last
    batch, since its shards are needed and must be updated, but this batch does not count: its gradients are zeros,
    even where the repeated batch gives NaN. While all ranks have batches, results are bit-identical to training
    without `join`. Before each batch the host processes exchange a few bytes; no device waits for it.

    Use ``batches.active`` and ``batches.active_ranks`` for losses and metrics: average over active ranks only.

    - Call backward for a batch before the next one is drawn. With accumulation (`no_sync`,
      `set_requires_gradient_sync`), the gradients of each batch are divided by the number of ranks that had one then.
    - A rank that never had a batch gets one from the lowest rank that has one. This batch must be picklable.
    - Batches may be drawn within `guarded_step`, too: after a step that failed, the next ones follow.
    - If a rank's data raises an exception, that rank raises it and all others raise `DivergenceError`.
    - With a factor of your own (`set_gradient_divide_factor`), sums over the active ranks are divided by that factor,
      whatever their number is. Communication and reduce hooks see zeros from ranks that have run out. Their result is
      taken for an average over all ranks, and is multiplied by (number of ranks / number of active ranks).
    - Ranks that work on the same batch (tensor, context or pipeline parallelism) must have the same number of batches.
      Modules that send activations to other data-parallel ranks (expert parallelism) do not work with `join`: there a
      rank without data has gradients of other ranks' data.
    - Buffers are updated by repeated batches, too: running statistics of batch norms, for example.

    Args:
        model: A model that is sharded or replicated, by either API.
        batches: This rank's batches. If it can be iterated again, so can the result: once per epoch.

    Returns:
        A context manager that gives the batches. After it, or an exception in it, the model is as before. It may be
        used again, and within another one; after it, the outer one counts as before.

    Raises:
        ConfigurationError: nothing in the model is sharded or replicated.
    """
    return JoinedBatches(model, batches)


class JoinedBatches(Generic[T]):
    """A batch for every step, until all ranks have run out; made by `join`."""

    active: bool
    """Whether the present batch is this rank's own, and counts; False for a repeated one."""
    active_ranks: int
    """How many ranks have a batch of their own now."""

    def __init__(self, model: nn.Module, batches: Iterable[T]) -> None:
        """Find what is sharded; see `join`."""
        self._batches = batches
        self._groups = [group for state in named_states(model) for group in state.groups]
        if not self._groups:
            raise ConfigurationError(
                "fullshard.join needs a model that is sharded or replicated, but no parameter of this "
                f"{type(model).__name__} is. Call fully_shard or replicate on it, or wrap it, before."
            )
        self._ranks: _ModelRanks | None = None
        self._before: dict[Reduction, ActiveRanks | None] | None = None
        """The ranks whose gradients counted before the block; None outside of it."""
        self.active, self.active_ranks = True, 1

    def __enter__(self) -> Self:
        if self._before is not None:
            raise LifecycleError(
                "A block of fullshard.join must be left before it is entered again. Leave it, or call fullshard.join "
                "again."
            )
        if self._ranks is None:
            self._ranks = _ModelRanks(self._groups)
        self._before = {group.reduction: group.reduction.settings.active for group in self._groups}
        self._set_active(self._ranks.everyone)
        return self

    def __exit__(self, *failure: object) -> None:
        self._restore()
        self._before = None

    def __iter__(self) -> Iterator[T]:
        """Give a batch for each step, until all ranks have run out.

        Raises:
            LifecycleError: called outside of the block.
            UsageError: a rank that never had a batch cannot get one.
            DivergenceError: the data of another rank raised an exception.
        """
        return _Draws(self, self._batches)

    @property
    def _entered(self) -> _ModelRanks:
        """The model's ranks; only within the block."""
        if self._ranks is None or self._before is None:
            raise LifecycleError(
                "Batches of fullshard.join can be drawn in its block only: with fullshard.join(...) as batches."
            )
        return self._ranks

    def _set_active(self, having: frozenset[int]) -> None:
        """Let the gradients of these ranks count from now on."""
        self.active, self.active_ranks = global_rank() in having, len(having)
        by_axes: dict[Hashable, ActiveRanks | None] = {}
        for axes, members in self._entered.members.items():
            number = len(members & having)
            # Where none of them has data, all gradients are zeros, and any divisor will do.
            by_axes[axes] = ActiveRanks(self.active, max(number, 1), len(members))
            if number == len(members):
                by_axes[axes] = None
        for group in self._groups:
            group.reduction.set_active_ranks(by_axes[group.mesh_info.communicates_over])

    def _restore(self) -> None:
        """Let those gradients count that did before the block."""
        self.active, self.active_ranks = False, 0
        for reduction, active in (self._before or {}).items():
            reduction.set_active_ranks(active)


class _Draws(Iterator[T]):
    """One pass over the batches.

    Not a generator, which would end with the first exception: ranks may draw in a guarded step, and go on after it.
    """

    def __init__(self, joined: JoinedBatches[T], batches: Iterable[T]) -> None:
        self._joined = joined
        self._source = _each(batches)
        self._drawn: tuple[Any, Exception | None] | None = None
        """The batch that was drawn, until the other ranks have been asked."""
        self._kept: Any = _END
        """The last batch, to be repeated."""
        self._active = self._begins = True
        self._ended = False

    def __next__(self) -> T:
        joined, ranks = self._joined, self._joined._entered
        if self._ended:
            raise StopIteration
        if self._drawn is None:
            self._drawn = _next_of(self._source) if self._active else (_END, None)
        batch, failure = self._drawn
        said = ranks.ask(exception_text(failure) if failure else _NONE if batch is _END else _HAS)
        if failure is not None:
            raise failure
        _check_data(said)
        having = frozenset(rank for rank, each in said.items() if each == _HAS)
        if not having:
            self._ended = True
            joined._restore()
            raise StopIteration
        if batch is not _END:
            self._kept = _copy_of(batch)
        if self._begins and having < ranks.everyone:
            self._kept = ranks.lend(self._kept)
        self._drawn, self._begins, self._active = None, False, batch is not _END
        joined._set_active(having)
        result: T = batch if self._active else _copy_of(self._kept)
        return result


# --- between ranks ----------------------------------------------------------------------------------


class _Exchange(NamedTuple):
    """An exchange over one process group."""

    group: ProcessGroup
    device: torch.device
    speaks_for: list[list[int]]
    """The ranks that a rank knows of, by place in the group: itself, and those that earlier exchanges reached."""


class _ModelRanks:
    """The ranks over which a model is sharded and replicated, and how they hear of each other.

    Exchanges follow one another over the model's process groups, and each passes on what the one before has learned.
    Over a grid of shards and replicas, each rank hears of all after two.
    """

    def __init__(self, groups: Sequence[FSDPParamGroup]) -> None:
        """Find out which ranks are reached through which process group; collective."""
        self._exchanges: list[_Exchange] = []
        self.members: dict[Hashable, frozenset[int]] = {}
        """The ranks that reduce a group's gradients, by its axes."""
        self._reached = {global_rank()}
        for group in groups:
            axes = group.mesh_info.communicates_over
            if axes not in self.members:
                self.members[axes] = frozenset(self._find_members(group))
        self.everyone = frozenset(self._reached)

    def _find_members(self, group: FSDPParamGroup) -> set[int]:
        info, members = group.mesh_info, {global_rank()}
        for process_group in (info.shard_process_group, info.replicate_process_group):
            if process_group is None or process_group.size() == 1:
                continue
            own = json.dumps([sorted(members), sorted(self._reached)])
            texts = collectives.texts_of_all_ranks(own, process_group, _BEGINNING, group.device)
            said = [json.loads(text) for text in texts]
            members = {rank for theirs, _ in said for rank in theirs}
            if all(process_group is not each.group for each in self._exchanges):
                reached = [theirs for _, theirs in said]
                self._exchanges.append(_Exchange(process_group, group.device, reached))
                self._reached.update(rank for theirs in reached for rank in theirs)
        return members

    def ask(self, own: str) -> dict[int, str]:
        """Return what each rank says about its next batch."""
        said = {global_rank(): own}
        for exchange in self._exchanges:
            # As long as all say the same, so do the texts, and equal texts are exchanged fastest.
            alike = own in (_HAS, _NONE) and set(said.values()) == {own}
            text = own if alike else json.dumps(said)
            texts = collectives.texts_of_all_ranks(text, exchange.group, _ASKING, exchange.device)
            for theirs, text in zip(exchange.speaks_for, texts, strict=True):
                if text in (_HAS, _NONE):
                    said.update(dict.fromkeys(theirs, text))
                else:
                    said.update({int(rank): each for rank, each in json.loads(text).items()})
        return said

    def lend(self, batch: Any) -> Any:
        """Return the batch, or that of another rank if this rank has none.

        Raises:
            UsageError: on all ranks; a batch cannot be sent.
        """
        fault = ""
        for exchange in self._exchanges:
            group = exchange.group
            own = fault or (_NONE if batch is _END else _HAS)
            texts = collectives.texts_of_all_ranks(own, group, _ASKING, exchange.device)
            fault = next((text for text in texts if text not in (_HAS, _NONE)), "")
            if fault or _HAS not in texts or _NONE not in texts:
                continue  # all ranks of the group do
            lender = texts.index(_HAS)
            sent = _packed(batch) if lender == group.rank() else b""
            sent = collectives.value_of_rank(sent, lender, group, _LENDING)
            if isinstance(sent, str):
                fault = sent
            elif batch is _END:
                batch = _unpacked(sent, exchange.device)
        if fault:
            raise UsageError(
                "A rank that has no batch at all gets one from a rank that has, so batches must be picklable; that of "
                f"{fault}. Give every rank a batch, or make batches picklable."
            )
        return batch


# --- batches ----------------------------------------------------------------------------------------


def _each(batches: Iterable[T]) -> Iterator[T]:
    yield from batches  # so that `iter`, which may fail, is part of drawing the first one


def _next_of(source: Iterator[T]) -> tuple[Any, Exception | None]:
    """Return the next batch, or `_END`, or what was raised instead."""
    try:
        return next(source, _END), None
    except Exception as error:
        return _END, error


def _check_data(said: Mapping[int, str]) -> None:
    """Raise if the data of a rank has raised an exception."""
    failed = {rank: each for rank, each in said.items() if each not in (_HAS, _NONE)}
    if failed:
        lines = [f"{ranks_text([rank])}: {failed[rank]}" for rank in sorted(failed)]
        raise DivergenceError(
            "All ranks must be able to draw batches until they run out, but the data of some has raised an "
            "exception:\n  " + "\n  ".join(lines) + "\nSee the traceback of that rank."
        )


def _copy_of(value: Any) -> Any:
    """Return a batch in containers of its own: a program may take its items out, and the next one needs them again."""
    if isinstance(value, MutableMapping):
        copied: Any = copy.copy(value)
        for key, item in value.items():
            copied[key] = _copy_of(item)
        return copied
    if isinstance(value, list):
        copied = copy.copy(value)
        copied[:] = map(_copy_of, value)
        return copied
    if isinstance(value, tuple):
        items = map(_copy_of, value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return copy.copy(value) if dataclasses.is_dataclass(value) else value


def _packed(batch: Any) -> bytes | str:
    """Return a batch as bytes or, if it cannot be packed, a text that says why."""
    buffer = io.BytesIO()
    try:
        torch.save(batch, buffer)
    except Exception as error:
        return f"rank {global_rank()} is not ({exception_text(error)})"
    return buffer.getvalue()


def _unpacked(packed: bytes, device: torch.device) -> Any:
    """Return a batch of another rank; tensors that were on its accelerator are on ``device``."""
    places = {f"{device.type}:{index}": str(device) for index in range(_MAX_DEVICES)}
    # As with all objects that ranks send each other, pickles are trusted.
    return torch.load(io.BytesIO(packed), map_location=places, weights_only=False)
