"""The collectives that this rank has called, and the place of its process.

A `Journal` belongs to a process group. It numbers the collectives that fullshard calls there. Ranks that call the same
collectives in the same order have equal journals; `meetings` and the watchdog compare them.

`PROGRESS` is about the whole process, beside the engine's own `POSITION`. The thread that trains writes both, at the cost
of a few attributes per collective. The watchdog's thread reads them at any time. No lock is needed: each attribute is
written at once, and a reader that sees one old attribute beside a new one only reports a place that was left just now.
"""

from __future__ import annotations

import os
import time
import weakref
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fullshard import torch_border
from fullshard.divergence.verdict import VERDICT
from fullshard.errors import exception_text
from fullshard.mesh.backends import Backend
from fullshard.transport.monitor import POSITION, GroupMonitor
from fullshard.transport.tags import TAG_BITS, Tag

RING = 1 << 14
"""Number of the last collectives that a journal remembers: those of some seconds, even of a small model on a fast device."""
MARKS = 512
"""Number of the last steps that a journal remembers."""
_MASK = (1 << TAG_BITS) - 1

_INVERSE = pow(31, -1, 1 << TAG_BITS)
"""The inverse of the factor by which `Journal.note` multiplies."""


class Update(NamedTuple):
    """A step of an optimizer over parameters that a process group shards or replicates; equal on all its ranks."""

    number: int
    describe: Callable[[], str]
    """The optimizer, the parameters that it updates, and its options, for people."""


class Guard(Protocol):
    """A guarded step that is running: `step_guard.StepGuard`."""

    def raise_if_failed(self) -> None:
        """Raise if this rank has learned that another one failed."""

    def learn(self, journal: Journal, said: Sequence[str]) -> None:
        """Raise if a rank has failed, by what ranks say at a meeting that did not agree."""

    def add(self, group: ProcessGroup, backend: Backend) -> None:
        """Guard one more process group."""


class Journal:
    """The collectives that fullshard has called on one process group, or on ranks that meet without one."""

    def __init__(self, name: str, rank: int, ranks: Sequence[int]) -> None:
        self.name = name
        self.rank = rank
        """This rank's place in the group."""
        self.ranks = tuple(ranks)
        """Global ranks, in the group's order."""
        self.count = 0
        """Number of collectives that have been called."""
        self.digest = 0
        """A hash of all their tags, in order."""
        self.step = 0
        """Steps of optimizers that have parameters which this group shards or replicates."""
        self.updates = 0
        """A sum of the numbers of their updates: the order of two optimizers does not matter."""
        self.last_updates: deque[Update] = deque(maxlen=4)
        """Updates since the ranks last met, for messages."""
        self.models = 0
        """Number of models that have been used there: all ranks have agreed on each, in this order."""
        self.tags: list[Tag | None] = [None] * RING
        """Collective number n, counted from 1, is at n % RING."""
        self._digests = array("q", bytes(8 * RING))
        """At the same places, the digests after these collectives."""
        self.marks: deque[tuple[int, int, int]] = deque(maxlen=MARKS)
        """Step, count and digest at the end of the last steps; the watchdogs of two ranks compare them."""
        self.guard: Guard | None = None
        """Set within a guarded step."""

    def note(self, tag: Tag) -> None:
        """Note a collective that is about to be called."""
        PROGRESS.moved = time.monotonic()
        count = self.count + 1
        place = count % RING
        self.tags[place] = tag
        self.digest = self._digests[place] = (self.digest * 31 + tag.number) & _MASK
        self.count = count  # at last: another thread finds everything else in place

    def withdraw(self, digest: int) -> None:
        """Forget the collective that was noted last, since it will not be called; ``digest`` is the one before it.

        All ranks of a meeting that fails do so. Their journals stay equal, and they may go on together.
        """
        self.count -= 1
        self.digest = digest

    def note_failed_meeting(self, tag: Tag, *, is_noted: bool) -> None:
        """Note a meeting at which a rank said that it has failed; with ``is_noted``, a collective was noted for it.

        All ranks of the meeting do so, and have equal journals afterwards, whether they had noted a collective or not.
        Its number is not used again: a watchdog may have seen the collective there, and compare it with another rank's.
        """
        count, digest = self.count, self.digest
        if is_noted:
            noted = self.tags[count % RING]
            assert noted is not None, "it is the last one"
            count, digest = count - 1, ((digest - noted.number) * _INVERSE) & _MASK
        self.tags[(count + 1) % RING] = None
        self._digests[(count + 1) % RING] = digest
        self.tags[(count + 2) % RING] = tag
        self.digest = self._digests[(count + 2) % RING] = (digest * 31 + tag.number) & _MASK
        self.count = count + 2

    def end_step(self, update: Update | None = None) -> None:
        """Note that a step has ended, in which an optimizer did this."""
        self.step += 1
        if update is not None:
            self.updates = (self.updates + update.number) & _MASK
            self.last_updates.append(update)
        self.marks.append((self.step, self.count, self.digest))

    @property
    def last_tag(self) -> Tag | None:
        """The collective that was called last."""
        return self.tags[self.count % RING]

    # --- read by other threads ----------------------------------------------------------------------

    def now(self) -> tuple[int, int]:
        """Return the number of collectives that have been called, and the digest after them."""
        count = self.count
        return count, self._digests[count % RING]

    def digest_after(self, count: int) -> int | None:
        """Return the digest after so many collectives; None if they were not called yet, or too long ago."""
        if count > self.count:
            return None
        digest = self._digests[count % RING]
        return digest if self._is_remembered(count) else None

    def last_tags(self) -> list[tuple[int, str]]:
        """Return the last collectives, oldest first: how many had been called with each, and its text."""
        counts = range(max(1, self.count - RING + 1), self.count + 1)
        found = [(count, self.tags[count % RING]) for count in counts]
        return [
            (count, tag.text)
            for count, tag in found
            if tag is not None and self._is_remembered(count)
        ]

    def _is_remembered(self, count: int) -> bool:
        """Return whether the entry just read is of this collective; the thread that trains may have written over it."""
        return count > self.count + 1 - RING


class Waiting(NamedTuple):
    """A wait of the thread that trains for other ranks."""

    journal: Journal | None
    """The journal of the process group; None if the wait is not in a collective of a group."""
    text: str
    """The name of the awaited event: the text of a tag, or "agreement on the model"."""
    since: float
    """The time at which the wait began, by `time.monotonic`."""
    is_noted: bool = True
    """Whether the journal has the awaited event as its last collective; otherwise it comes after that."""


class Progress:
    """The present work of this process, beside the step's `POSITION`. Ranks that are threads share it; they have no watchdog."""

    def __init__(self) -> None:
        self.step = 0
        """Steps of optimizers over sharded parameters."""
        self.moved = time.monotonic()
        """The time at which a step last began or ended, or a collective was last called."""
        self.journal: Journal | None = None
        """The journal of the process group on which a collective was last called."""
        self.waiting: Waiting | None = None
        self.is_to_be_watched = False
        """Whether a model was sharded, and the watchdog starts with the next collective, if it does not run."""
        self.guarded = False
        """Whether a guarded step is running. An exception is no reason not to wait for this rank then: it tells the others."""


PROGRESS = Progress()


def note_exception(error: BaseException) -> None:
    """Note an exception that leaves a sharded forward or backward, or ends the thread that trains."""
    if not PROGRESS.guarded:
        POSITION.raised_in = POSITION.text()
        POSITION.raised = exception_text(error)


_JOURNALS: weakref.WeakKeyDictionary[ProcessGroup, Journal] = weakref.WeakKeyDictionary()


def journal_of(group: ProcessGroup) -> Journal:
    """Return the journal of a process group, which lives as long as the group."""
    found = _JOURNALS.get(group)
    if found is None:
        ranks = dist.get_process_group_ranks(group)
        found = _JOURNALS[group] = Journal(group.group_name, group.rank(), ranks)
    return found


def journals() -> list[Journal]:
    """Return the journals of all process groups that fullshard has used and that have not been destroyed.

    Something may hold the object of a destroyed group on some ranks only. Torch gives its name to the next group, and the
    journals of two different groups would be compared.
    """
    # Not `values()`: the watchdog's thread calls this while another one may add a journal.
    groups = [reference() for reference in _JOURNALS.keyrefs()]
    found = [
        _JOURNALS.get(each) for each in groups if each is not None and torch_border.exists(each)
    ]
    return [journal for journal in found if journal is not None]


# --- before a collective ------------------------------------------------------------------------------


class Rules:
    """The rules of when ranks meet."""

    def __init__(self) -> None:
        self.every_collective = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
        """Whether ranks meet before every collective, on every backend. In guarded steps they do anyway."""
        self.by_backend = True
        """Whether they meet where the backend's manners say so; False only to measure what that costs."""


RULES = Rules()


class NotedCollectives(GroupMonitor, ABC):
    """The collectives that a backend carries for a process group: each is noted, and ranks meet before it where they do.

    Here is what a collective costs where ranks do not meet: on a backend with streams, outside of guarded steps.
    """

    def __init__(self, group: ProcessGroup, backend: Backend) -> None:
        self.group, self.backend = group, backend
        self.journal = journal_of(group)

    def before(
        self, tag: Tag, inputs: Sequence[Tensor] = (), text: str | None = None
    ) -> Sequence[str] | None:
        """Note that a collective is about to be called, and let the ranks agree on it where they meet.

        Raises:
            StepFailedError: a rank has failed its guarded step.
            DivergenceError: ranks are about to call different collectives, or a rank has gone.
        """
        if VERDICT.message is not None:
            VERDICT.raise_if_diverged()
        journal = self.journal
        if journal.guard is not None:
            journal.guard.raise_if_failed()
        elif PROGRESS.is_to_be_watched:
            self.begin()
        digest = journal.digest
        journal.note(tag)
        PROGRESS.journal = journal
        if (
            text is None
            and not (self.backend.has_meetings and RULES.by_backend)
            and not RULES.every_collective
            and journal.guard is None
        ):
            return None
        return self.meet(tag, inputs, text or "", digest)

    @abstractmethod
    def begin(self) -> None:
        """The first collective comes next since a model was sharded."""

    @abstractmethod
    def meet(
        self, tag: Tag, inputs: Sequence[Tensor], text: str, digest: int
    ) -> Sequence[str] | None:
        """Agree on the collective that was noted last; the journal had ``digest`` before it."""
