"""Ranks that save or load together: what one of them cannot do, none of them does.

Everything that can fail is done within `each` or `first`. These exchange how it went, and all ranks go on, or all
raise the same error: none waits in a collective for one that has given up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fullshard.comm import collectives
from fullshard.errors import CheckpointError, ConfigurationError, FullshardError
from fullshard.plan import mesh

T = TypeVar("T")


class RankGroup:
    """The ranks of a process group, or one process by itself."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        """Of ``group``; without it, of all ranks there are."""
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if not isinstance(
            group, ProcessGroup | None
        ):  # what new_group returns to others is a number
            raise ConfigurationError(
                f"Ranks that save or load are in process_group; rank {dist.get_rank()} is not."
            )
        if group is not None and collectives.backend_of(group, torch.device("cpu")) == "nothing":
            # Through an accelerator, every exchange would wait for all that it computes.
            group = mesh.host_group(group, "checkpoints")
        self._group = group
        self.ranks = [0] if group is None else dist.get_process_group_ranks(group)
        """Of the whole world."""
        self.rank = 0 if group is None else dist.get_rank()
        self.is_first = self.rank == self.ranks[0]

    def collect(self, value: T) -> list[T]:
        """A small value of every rank, in the order of `ranks`."""
        return (
            [value] if self._group is None else collectives.values_of_all_ranks(value, self._group)
        )

    def on_each(self, function: Callable[[], T]) -> T:
        """Call a function on every rank, which must not communicate; an error anywhere is one everywhere."""
        result, error = _outcome(function)
        outcomes = self.collect(None if error is None else (type(error), str(error)))
        if not any(outcomes):
            return result  # type: ignore[return-value]  # without error there is a result
        ranks_by_outcome: dict[tuple[type[Exception], str], list[int]] = {}
        for rank, outcome in zip(self.ranks, outcomes, strict=True):
            if outcome is not None:
                ranks_by_outcome.setdefault(outcome, []).append(rank)
        raise _joined(ranks_by_outcome, len(self.ranks)) from error

    def on_first(self, function: Callable[[], T]) -> T:
        """Call a function on the first rank only, and return its result, which is small, or raise its error, on all."""
        result, error = _outcome(function) if self.is_first else (None, None)
        outcome = (result, None if error is None else (type(error), str(error)))
        if self._group is not None:
            outcome = collectives.value_of_first_rank(outcome, self._group)
        if outcome[1] is not None:
            raise _joined({outcome[1]: [self.ranks[0]]}, 1) from error
        return outcome[0]  # type: ignore[return-value]  # the function's, of any type


def _outcome(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:  # the other ranks wait for this one, whatever it is
        return None, error


def _joined(found: dict[tuple[type[Exception], str], list[int]], ranks: int) -> Exception:
    """One error for all ranks: what each of them said, equal texts together."""
    ((kind, text), where), *more = found.items()
    if not more and len(where) == ranks:
        return (
            kind(text) if issubclass(kind, FullshardError) else CheckpointError(_named(kind, text))
        )
    lines = [
        f"{ranks_text(ranks)}: "
        + (text if issubclass(kind, FullshardError) else _named(kind, text))
        for (kind, text), ranks in found.items()
    ]
    return CheckpointError("\n".join(lines))


def ranks_text(ranks: Sequence[int]) -> str:
    """For messages."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _named(kind: type[Exception], text: str) -> str:
    return f"{kind.__name__}: {text}"
