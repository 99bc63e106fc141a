"""Before a collective: do all ranks call the same one?

`before` of `Meetings` is called right before each collective, when all its memory has been taken and nothing can fail any
more. It notes the collective in the journal. On gloo it also lets the ranks agree on it through the control channel. If
they call different collectives, bring messages of different sizes, or are in different steps, all of them raise the same
`DivergenceError` instead.

So on gloo
- no two different collectives ever meet: nothing is computed with another layer's weights, and gloo, which aborts the
  process when sizes differ, never sees different sizes;
- a collective that has been issued has been issued by all ranks, so after an exception the ranks can go on together
  (`guarded_step`).

A backend with streams would have to stop the host for it. There, the watchdog compares the journals in the background;
`debug("order")` and guarded steps let the hosts meet before every collective there, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn, cast

from torch import Tensor
from torch.distributed import DistBackendError, ProcessGroup, Work

from fullshard import torch_border
from fullshard.divergence import watchdog
from fullshard.divergence.control_channel import ControlChannel
from fullshard.divergence.journal import PROGRESS, Journal, NotedCollectives, Waiting
from fullshard.divergence.verdict import SLICE_S, VERDICT
from fullshard.errors import DivergenceError, FullshardError, ranks_text
from fullshard.mesh.backends import Backend, abort_all
from fullshard.transport.monitor import POSITION
from fullshard.transport.tags import Tag

_SLICE = timedelta(seconds=SLICE_S * 5)
_STEP = 0x9E3779B97F4A7C15
"""An odd number that spreads steps over the bits of a tag's number."""
_BYTES = 0xC2B2AE3D27D4EB4F
"""Another one, for the sizes of messages."""
_MASK = (1 << 63) - 1

_SEPARATOR = "\0"
"""Separates the parts of a rank's message, if it brings a text."""


# --- the monitor of a process group's collectives ---------------------------------------------------


class Meetings(NotedCollectives):
    """The meetings of the ranks of a process group, and their waits."""

    def begin(self) -> None:
        """Let the ranks be watched from now on."""
        PROGRESS.is_to_be_watched = False
        watchdog.start()

    def meet(
        self, tag: Tag, inputs: Sequence[Tensor], text: str, digest: int
    ) -> Sequence[str] | None:
        """Agree on the collective that was noted last, and return the text of each rank; None if they have no channel."""
        try:
            channel = channel_of(self.group, self.journal, self.backend)
            if channel is None:
                return None
            return _agree(channel, self.journal, tag, sum(each.nbytes for each in inputs), text)
        except DivergenceError:
            # On all ranks, so their journals stay equal. After a failed step, `Guard.learn` has seen to that.
            self.journal.withdraw(digest)
            raise

    def waited(self, work: Work) -> Work:
        """Return a work whose wait other ranks can see and that ends with the reason."""
        return cast(Work, WatchedWork(work, self.journal, self.backend))

    @contextlib.contextmanager
    def waiting(self, tag: Tag) -> Iterator[None]:
        """Say that the host waits for a collective within, and name the collective if it fails."""
        PROGRESS.waiting = Waiting(self.journal, tag.text, time.monotonic())
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, FullshardError):
                raise
            raise lost_within(tag.text, error) from error
        finally:
            PROGRESS.waiting = None

    def refused(self, tag: Tag, error: DistBackendError) -> NoReturn:
        """Raise the reason why the backend refuses a collective: it has failed before."""
        abort_all()
        journal = self.journal
        PROGRESS.waiting = Waiting(journal, tag.text, time.monotonic())
        try:
            raise VERDICT.explain(
                f"A backend must not fail, but that of rank {journal.ranks[journal.rank]} cannot call {tag.text} any more. It says: "
                f"{error}. If it has lost a connection, a rank has ended, or the network between ranks is cut: see what the other "
                "ranks printed last."
            ) from error
        finally:
            PROGRESS.waiting = None

    def made(self, group: ProcessGroup, backend: Backend) -> None:
        """Guard the group, too, if this one is guarded."""
        if self.journal.guard is not None:
            self.journal.guard.add(group, backend)


def meet_without_collective(channel: ControlChannel, journal: Journal, tag: Tag) -> None:
    """Let the ranks of a channel agree that they have come to the same place.

    Raises:
        StepFailedError: a rank has failed its guarded step.
        DivergenceError: ranks are in different places, or a rank has gone.
    """
    digest = journal.digest
    journal.note(tag)
    try:
        _agree(channel, journal, tag, 0)
    except DivergenceError:
        journal.withdraw(digest)
        raise


def _agree(
    channel: ControlChannel, journal: Journal, tag: Tag, nbytes: int, text: str = ""
) -> Sequence[str]:
    """Agree on a collective, and return the text that each rank brings to it."""
    PROGRESS.waiting = Waiting(journal, tag.text, PROGRESS.moved)
    step = journal.step * _STEP + journal.updates if tag.of_step else 0
    collective = (tag.number + step + nbytes * _BYTES) & _MASK
    try:
        if channel.agree((collective + _number(text)) & _MASK if text else collective):
            if tag.of_step and journal.last_updates:
                journal.last_updates.clear()
            return [text] * len(journal.ranks)
        size = f", {nbytes:,} bytes" if nbytes else ""
        place = f"{tag.text} (step {journal.step}, {POSITION.text()}{size})"
        said = channel.exchange(
            f"{place}{_SEPARATOR}{collective}{_SEPARATOR}{text}" if text else place
        )
    finally:
        PROGRESS.waiting = None
    if journal.guard is not None:
        journal.guard.learn(journal, said)
    # Ranks without a text only name their place, and then only places are compared.
    places, *rest = zip(*(each.split(_SEPARATOR, 2) for each in said), strict=False)
    if text and rest and set(rest[0]) == {str(collective)}:
        return rest[1]  # only the texts differ
    ranks_by_place: dict[str, list[int]] = {}
    for rank, place in zip(journal.ranks, places, strict=True):
        ranks_by_place.setdefault(place, []).append(rank)
    if len(ranks_by_place) == 1:  # they are about to call the same, after different updates
        raise _different_updates(channel, journal)
    lines = [f"{ranks_text(ranks)}: {place}" for place, ranks in ranks_by_place.items()]
    raise DivergenceError(
        "Ranks must call the same collectives in the same order, but they are about to call\n  "
        + "\n  ".join(lines)
        + "\nLet all ranks run the same modules in the same order, and the same number of "
        "microbatches and steps; see docs/divergence.md."
    )


def _different_updates(channel: ControlChannel, journal: Journal) -> DivergenceError:
    """Return the error about ranks that have come to the same place with different updates of their shards."""
    own = "; ".join(each.describe() for each in journal.last_updates) or "none"
    ranks_by_updates: dict[str, list[int]] = {}
    for rank, updates in zip(journal.ranks, channel.exchange(own), strict=True):
        ranks_by_updates.setdefault(updates, []).append(rank)
    journal.updates = 0  # on all ranks, so they may go on together
    lines = [f"{ranks_text(ranks)}: {updates}" for updates, ranks in ranks_by_updates.items()]
    return DivergenceError(
        f"Optimizers must update the shards of all ranks in the same way, but in step {journal.step} they have not:"
        "\n  "
        + "\n  ".join(lines)
        + "\nGive all ranks the same optimizer, with the same parameters and "
        "options, and let the learning rate depend on nothing that differs between ranks; see docs/divergence.md."
    )


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def _timeout_of(group: ProcessGroup | None) -> timedelta | None:
    return None if group is None else torch_border.timeout_of(group)


_CHANNELS: weakref.WeakKeyDictionary[ProcessGroup, ControlChannel] = weakref.WeakKeyDictionary()


def channel_of(group: ProcessGroup, journal: Journal, backend: Backend) -> ControlChannel | None:
    """Return the control channel of a group, made at its first use, which is collective; None if it can have none."""
    found = _CHANNELS.get(group)
    if found is None and len(journal.ranks) > 1 and backend.ranks == "processes":
        PROGRESS.waiting = Waiting(
            journal, "the first collective of a process group", PROGRESS.moved
        )
        try:
            reference = weakref.ref(group)
            store, timeout = torch_border.store_of(group), lambda: _timeout_of(reference())
            found = _CHANNELS[group] = ControlChannel(journal, store, timeout)
        finally:
            PROGRESS.waiting = None
    return found


# --- waiting ----------------------------------------------------------------------------------------


class WatchedWork:
    """A `Work` for which the host waits: in slices where the backend can (see `verdict`), and with a name for others to see."""

    def __init__(self, work: Work, journal: Journal, backend: Backend) -> None:
        self._work = work
        self._limit = (_SLICE,) if backend.has_sliced_waits else ()
        self._journal, self._tag = journal, journal.last_tag

    def get_future(self) -> Any:
        """Return a future that is completed when the work is done."""
        return self._work.get_future()

    def is_completed(self) -> bool:
        """Return whether the work is done, or has failed."""
        return self._work.is_completed()

    def wait(self) -> None:
        """Wait for the work.

        Raises:
            DivergenceError: a rank has ended since.
        """
        work = self._work
        text = self._tag.text if self._tag is not None else ""
        PROGRESS.waiting = Waiting(self._journal, text, time.monotonic())
        try:
            while True:
                try:
                    work.wait(*self._limit)
                    return
                except RuntimeError as error:
                    VERDICT.raise_if_diverged()
                    if not self._limit or work.is_completed():
                        raise lost_within(text, error) from error
        finally:
            PROGRESS.waiting = None


def lost_within(text: str, error: RuntimeError) -> DivergenceError:
    """Return the error for a collective that has failed after all ranks had called it."""
    if isinstance(error, DistBackendError):
        abort_all()
    return VERDICT.explain(
        f"A collective failed after all ranks had called it: {text}. The backend says: {error}. If it lost a connection, a "
        "rank has ended, or the network between ranks is cut: see what the other ranks printed last."
    )
