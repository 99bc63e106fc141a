"""Ranks that save or load together: if one of them fails, all of them fail.

Everything that can fail is done within `on_each` or `on_first`. These exchange the outcome, and all ranks go on, or all
raise the same error. So no rank waits in a collective for one that has given up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fullshard.divergence import monitor
from fullshard.errors import (
    CheckpointError,
    ConfigurationError,
    FullshardError,
    exception_message,
    ranks_text,
)
from fullshard.mesh import axes as mesh
from fullshard.mesh.backends import NOTHING, backend_of
from fullshard.transport import collectives
from fullshard.transport.tags import tag

T = TypeVar("T")


class RankGroup:
    """The ranks of a process group, or one process by itself."""

    def __init__(self, group: ProcessGroup | None = None, purpose: str = "save or load") -> None:
        """Take the ranks of ``group``, or all ranks; ``purpose`` must be the same on all."""
        monitor.install()
        self._tag = tag(f"checkpoint ({purpose})", of_step=False)  # states are compared one by one
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        # torch's new_group returns a number to ranks that are not in the group.
        if not isinstance(group, ProcessGroup | None):
            raise ConfigurationError(
                f"Ranks that save or load must be in process_group; rank {dist.get_rank()} is not. Call it on the ranks of "
                "the group only."
            )
        if group is not None and backend_of(group, torch.device("cpu")) is NOTHING:
            # On an accelerator, every exchange would wait for all that is computed there.
            group = mesh.host_group(group, "checkpoints")
        self._group = group
        self.ranks = [0] if group is None else dist.get_process_group_ranks(group)
        """Ranks in the default process group."""
        self.rank = 0 if group is None else dist.get_rank()
        self.is_first = self.rank == self.ranks[0]

    @classmethod
    def alone(cls) -> RankGroup:
        """Return this process by itself, also if there are others."""
        alone = cls.__new__(cls)
        alone._group, alone.ranks, alone.rank, alone.is_first = None, [0], 0, True
        return alone

    def collect(self, value: T) -> list[T]:
        """Return a small value of every rank, in the order of `ranks`."""
        if self._group is None:
            return [value]
        return collectives.values_of_all_ranks(value, self._group, self._tag)

    def on_each(self, function: Callable[[], T]) -> T:
        """Call a function on every rank, and return its result; an error on one rank is an error on all.

        The function must not communicate.
        """
        result, error = _outcome(function)
        outcomes = self.collect(None if error is None else (type(error), exception_message(error)))
        if not any(outcomes):
            return result  # type: ignore[return-value]  # without error there is a result
        ranks_by_outcome: dict[tuple[type[Exception], str], list[int]] = {}
        for rank, outcome in zip(self.ranks, outcomes, strict=True):
            if outcome is not None:
                ranks_by_outcome.setdefault(outcome, []).append(rank)
        raise _joined(ranks_by_outcome, len(self.ranks)) from error

    def on_first(self, function: Callable[[], T]) -> T:
        """Call a function on the first rank only, and return its result, or raise its error, on all ranks.

        The result must be small.
        """
        result, error = _outcome(function) if self.is_first else (None, None)
        outcome = (result, None if error is None else (type(error), exception_message(error)))
        if self._group is not None:
            outcome = collectives.value_of_first_rank(outcome, self._group, self._tag)
        if outcome[1] is not None:
            raise _joined({outcome[1]: [self.ranks[0]]}, 1) from error
        return outcome[0]  # type: ignore[return-value]  # the function's, of any type


def _outcome(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:  # the other ranks wait for this one, whatever it is
        return None, error


def _joined(found: dict[tuple[type[Exception], str], list[int]], ranks: int) -> Exception:
    """Return one error for all ranks, with the ranks of each message."""
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


def _named(kind: type[Exception], text: str) -> str:
    return f"{kind.__name__}: {text}"
