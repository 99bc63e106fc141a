"""Ranks leave a step together when one of them fails.

    begin   the process groups of the step are guarded: ranks meet before each of their collectives, on every backend
    meet    a rank that has failed says so instead of naming a collective; the ranks at the meeting learn of it
    end     a last meeting of all ranks of the step: has any rank failed?
    fail    tell all ranks that may be waiting, and find out which ranks have failed

[Note: failing together]
Each process group of the step has a control channel. One channel, the last one, reaches all ranks of the step: that of a
process group which contains the others or, as in HSDP, one made for this. A rank is in one of three places:

    on its way     computing, or at a meeting on one of its channels; the last meeting is the end, on the last channel
    failed         it has raised, or has learned of a failure: at all its channels at once
    done           all came to the end, and none had failed

If any rank comes to a meeting as failed, it is a failing meeting. All ranks at it learn of the failure, since numbers
differ (or all have failed), and exchange texts. They do not come to this channel again in this step.

1. *No rank waits forever.* Suppose that ranks wait, and no message is on its way. Look at those that are on their way;
   in a step without failures, they would go through their meetings in an order without cycles. Take one whose meeting
   is earliest in that order, on channel X. Ranks of X that are on their way cannot be at an earlier meeting, and cannot
   have passed this one, as it takes all ranks of X. So they are here. Those that have failed are at X, too: they could
   only have left X by a failing meeting there, and our rank would know of it. So all are here, and none waits. If none
   is on its way, all have failed and are everywhere. It matters that a failed rank is at *all* its channels at once.
   With any order there is a deadlock: in a 2 x 2 mesh, two ranks on a diagonal fail and wait in their rows, while the
   other two wait for them in their columns.
2. *All come to the same result.* The last channel has one of two meetings: a failing one, which all ranks of the step come to,
   or the end. The failures are those reported there. A rank that failed by itself comes there with its own failure, so
   there is at least one. No rank can fail after the end.
3. *Channels stay aligned.* After a failed step, each channel has had exactly one failing meeting: a rank that learns of
   a failure goes to all its other channels, as failed. So the first meeting after the step is the first one for all.
4. *What was issued was issued by all.* A collective is issued right after its meeting, when all its memory has been
   allocated. So collectives in flight end by themselves, and a reset can wait for them.

A rank that loses a channel (its peer has ended, say) closes all of them, so that no other rank waits for it.
"""

from __future__ import annotations

import hashlib
import json
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup

from fullshard import torch_border
from fullshard.divergence.control_channel import ControlChannel
from fullshard.divergence.journal import PROGRESS, Journal, Waiting, journal_of
from fullshard.divergence.meetings import Meetings, channel_of, meet_without_collective
from fullshard.errors import ConfigurationError, StepFailedError, UsageError, ranks_text
from fullshard.mesh.backends import Backend
from fullshard.transport.monitor import POSITION
from fullshard.transport.tags import tag

_BEGINNING = tag("beginning of guarded steps")
_FAILED = tag("a guarded step that has failed")
_END = "end of a guarded step"
_SAYS = f"{_FAILED.text}: "
"""The beginning of a failed rank's message; JSON follows."""
_PASSES = 3
"""Number of times that ranks tell each other the ranks they know, before they compare."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFailure:
    """The reason why a rank has failed a guarded step."""

    rank: int
    """The rank that raised an exception."""
    type: str
    """The name of the exception's type."""
    message: str
    """The exception's message, the first 2,000 characters."""
    traceback: str = ""
    """The traceback of the exception, for a log; the last 8,000 characters."""
    may_skip: bool = True
    """Whether the step can be skipped. False for what ends a program, and for wrong use of fullshard."""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.type}" + (f": {self.message}" if self.message else "")


@dataclass(slots=True, eq=False)
class _Link:
    """One channel of this rank."""

    channel: ControlChannel
    journal: Journal
    failures: tuple[StepFailure, ...] | None = None
    """The failures that a failing meeting has told; None if there was none in this step."""


class StepGuard:
    """The channels of the ranks that step together: [Note: failing together]."""

    def __init__(self, backends: Mapping[ProcessGroup, Backend]) -> None:
        """Connect the ranks of these process groups; collective. Each group has its backend.

        Raises:
            DivergenceError: a rank does not come.
            ConfigurationError: it cannot be found out which ranks step together.
        """
        links = []
        # In the order of ranks, not of modules: a rank waits for others here, and all must wait in one order.
        for group in sorted(backends, key=lambda group: _key(journal_of(group))):
            journal = journal_of(group)
            # The messages below are no collective, so ranks meet before them, on every backend.
            Meetings(group, backends[group]).before(_BEGINNING, text=_BEGINNING.text)
            channel = channel_of(group, journal, backends[group])
            if channel is not None:
                links.append(_Link(channel, journal))
        self.journals = [link.journal for link in links]
        self._last = _link_to_all(links)
        if self._last is not None and self._last not in links:
            links.append(self._last)
        self._links = {link.journal: link for link in links}
        self._has_learned = False

    def add(self, group: ProcessGroup, backend: Backend) -> None:
        """Guard one more process group, which was made within the step; collective over its ranks.

        All of them are ranks of another process group that is guarded, and have just met there.
        """
        journal = journal_of(group)
        channel = channel_of(group, journal, backend)
        if channel is not None:
            self._links.setdefault(journal, _Link(channel, journal))
            journal.guard = self

    # --- the step -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Guard the process groups from now on.

        Raises:
            UsageError: they are guarded already.
        """
        if any(link.journal.guard is not None for link in self._links.values()):
            raise UsageError(
                "Guarded steps cannot contain each other, nor run at the same time over the same process groups. Give "
                "all models of the step to one guarded_step."
            )
        self._has_learned = False
        for link in self._links.values():
            link.failures = None
            link.journal.guard = self
        PROGRESS.guarded = bool(self._links)

    def finish(self) -> None:
        """Guard the process groups no more."""
        for journal in self._links:
            journal.guard = None
        PROGRESS.guarded = False

    @property
    def has_learned(self) -> bool:
        """Whether another rank has told of a failure."""
        return self._has_learned

    def raise_if_failed(self) -> None:
        """Raise again what this rank has learned, in case that the program went on after it.

        Raises:
            StepFailedError: a rank has failed.
        """
        if self._has_learned:
            raise self._error()

    def learn(self, journal: Journal, said: Sequence[str]) -> None:
        """Look for failures in the texts of ranks at a meeting that did not agree.

        Raises:
            StepFailedError: a rank has failed.
        """
        failures = _failures(said)
        if failures is not None:
            journal.note_failed_meeting(_FAILED, is_noted=True)
            self._links[journal].failures = failures
            self._has_learned = True
            raise self._error()

    def end(self, policy: str) -> None:
        """Meet all ranks at the end of the step; ``policy`` must be the same on all.

        Raises:
            StepFailedError: a rank has failed.
            DivergenceError: ranks are in other places, or one has gone.
        """
        self.raise_if_failed()
        if self._last is not None:
            meet_without_collective(
                self._last.channel, self._last.journal, tag(f"{_END} ({policy})")
            )

    def fail(self, failure: StepFailure | None) -> tuple[StepFailure, ...]:
        """Leave the step as failed, and return the failures of all ranks, which are the same on all of them.

        Args:
            failure: This rank's failure; None if it has learned of another's.

        Raises:
            DivergenceError: a rank has gone.
        """
        text = _SAYS + json.dumps(None if failure is None else asdict(failure))
        missing = [link for link in self._links.values() if link.failures is None]
        POSITION.raised, POSITION.phase = None, "outside"
        PROGRESS.moved = time.monotonic()
        if missing:
            PROGRESS.waiting = Waiting(
                missing[0].journal, "others, after a failed step", PROGRESS.moved, is_noted=False
            )
        try:
            _tell(missing, text)
        except BaseException:
            for link in self._links.values():
                link.channel.hang_up()
            raise
        finally:
            PROGRESS.waiting = None
        if self._last is None:
            assert failure is not None, "there is nobody to learn from"
            return (failure,)
        assert self._last.failures is not None, "just told"
        return self._last.failures

    def _error(self) -> StepFailedError:
        told = next((link.failures for link in self._links.values() if link.failures), ())
        return step_failed(told)


def step_failed(failures: Sequence[StepFailure]) -> StepFailedError:
    """Return the error about a step that has failed."""
    lines = "\n  ".join(map(str, failures)) or "another rank, which learned of it from a third one"
    return StepFailedError(
        "A guarded step needs all ranks, but it failed on\n  "
        + lines
        + "\nAll ranks have left the step and dropped its gradients, and the model can be used again. To go on with the next "
        'batch, use guarded_step(..., on_error="skip").',
        tuple(failures),
    )


# --- telling ------------------------------------------------------------------------------------------


def _tell(links: Sequence[_Link], text: str) -> None:
    """Come to all channels at once, as failed."""
    if len(links) == 1:
        _tell_one(links[0], text)
    elif links:
        with ThreadPoolExecutor(len(links)) as threads:
            futures = [threads.submit(_tell_one, link, text) for link in links]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            if any(future.exception() is not None for future in done):
                for link in links:
                    link.channel.hang_up()  # or the other threads would wait on
            for future in futures:
                future.result()


def _tell_one(link: _Link, text: str) -> None:
    channel = link.channel
    if channel.is_interrupted:
        # A signal came in the middle of a message. The others see the end of the connection.
        channel.hang_up()
        link.failures = ()
        return
    channel.agree(_FAILED.number)  # that others bring other numbers is known
    link.failures = _failures(channel.exchange(text)) or ()
    link.journal.note_failed_meeting(_FAILED, is_noted=False)


def _failures(said: Sequence[str]) -> tuple[StepFailure, ...] | None:
    """Return the failures that ranks tell, by rank; None if this is no failing meeting."""
    told = [text.removeprefix(_SAYS) for text in said if text.startswith(_SAYS)]
    if not told:
        return None
    found = (json.loads(text) for text in told)
    return tuple(StepFailure(**each) for each in found if each is not None)


# --- the ranks that step together ---------------------------------------------------------------------


def _key(journal: Journal) -> tuple[tuple[int, ...], str]:
    return journal.ranks, journal.name


def _link_to_all(links: Sequence[_Link]) -> _Link | None:
    """Return a channel to all ranks that the channels reach, directly or through others; collective.

    Raises:
        ConfigurationError: the process groups hang together in a way that takes too long to find out.
    """
    if not links:
        return None
    known = {rank for link in links for rank in link.journal.ranks}
    # Ranks of a mesh know each other after as many passes as it has axes. With one process group here there may still
    # be others that its ranks are in.
    for _ in range(_PASSES):
        for link in links:
            for text in link.channel.exchange(json.dumps(sorted(known))):
                known.update(json.loads(text))
    ranks = tuple(sorted(known))
    number = tag(str(ranks)).number
    answers = [
        link.channel.agree(number) for link in links
    ]  # of all channels, as others come to them
    if not all(answers):
        raise ConfigurationError(
            "guarded_step needs process groups that form a mesh, or one that contains the others, but those of this model "
            f"reach ever more ranks, so far {ranks_text(ranks)}. Guard the models of one mesh at a time."
        )
    for link in links:
        if set(link.journal.ranks) == known:
            return link
    return _made_for(ranks)


_MADE: weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], _Link]] = (
    weakref.WeakKeyDictionary()
)
"""Links by default process group and ranks."""


def _made_for(ranks: tuple[int, ...]) -> _Link:
    """Return a channel between these ranks, made once; collective."""
    world = dist.group.WORLD
    assert world is not None, "process groups have been made"
    made = _MADE.setdefault(world, {})
    if ranks not in made:
        name = f"guarded steps {hashlib.sha256(str(ranks).encode()).hexdigest()[:16]}"
        journal = Journal(name, ranks.index(dist.get_rank()), ranks)
        store = PrefixStore(name, torch_border.store_of(world))
        made[ranks] = _Link(
            ControlChannel(journal, store, lambda: torch_border.timeout_of(world)), journal
        )
    return made[ranks]
