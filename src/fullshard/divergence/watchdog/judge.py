"""The meaning of all ranks' answers: nothing is wrong, a rank is slow, or ranks have diverged.

A pure function of the answers. The rules, in this order:

    1. A rank has raised and not caught it, has left, is dead or is stopped, and another one waits for it: diverged.
    2. Two ranks of a process group have called different collectives under the same number, or different numbers of
       collectives in the same step: diverged.
    3. A rank does not answer, no rank on its host can see it, and another one waits for it: lost. Silence proves nothing. It
       is diverged if the rank has closed a connection, if another one has lost one, or if the silence outlives the lease.
    4. Ranks that wait for each other all wait, none has what it waits for, and none has moved, nor a byte, between two rounds:
       a deadlock, which is diverged.
    5. All ranks of a group have called a collective, which has not ended within the limit: hung, which is diverged.
    6. A rank waits for one that is in its own code, or that does not answer: slow.

Only rules that no patience could refute say "diverged". A slow rank is waited for without limit.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fullshard.divergence.watchdog.answers import (
    ASYNC_WAIT,
    Absence,
    Answer,
    History,
    Wait,
    is_consequence,
)
from fullshard.divergence.watchdog.connections import UNKNOWN
from fullshard.divergence.watchdog.silences import LEASE_S
from fullshard.errors import ranks_text

FINE, SLOW, AGAIN, DIVERGED = "fine", "slow", "again", "diverged"
LEFT_S = 2.0
"""Time that a rank must have waited for one that has left before the wait is proven to be in vain."""
MAX_HISTORIES = 24
"""Most ranks that are asked for their last collectives in one round."""
MAX_LINES = 24
"""Most different places that a message names."""

_GONE = {"left": "left", "raised": "raised", "dead": "died", "stopped": "was stopped"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """The finding of one round."""

    kind: str
    """ "fine", "slow", "diverged"; "again" if a second round must show whether any rank moves, or goes on waiting."""
    message: str = ""
    culprits: tuple[int, ...] = ()
    """Ranks that others wait for."""
    where: str = ""
    """For slow ranks: the work of the first of them, and its line."""
    silent: tuple[int, ...] = ()
    """Ranks that do not answer, and that no rank can see."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """The facts that one round has brought together."""

    answers: Mapping[int, Answer]
    absences: Mapping[int, Absence]
    histories: Mapping[int, History]
    previous: Mapping[int, Answer] | None
    """The answers of the round before, which the same rank has asked for; None if there was none."""
    lease_s: float = LEASE_S
    """Longest time for which a rank may be silent."""

    @functools.cached_property
    def waiters(self) -> list[Answer]:
        """Ranks that wait for others."""
        return [answer for answer in self.answers.values() if answer.wait is not None]

    @functools.cached_property
    def world(self) -> list[int]:
        """All ranks."""
        return sorted([*self.answers, *self.absences])

    @functools.cached_property
    def satisfied(self) -> dict[tuple[object, ...], bool]:
        """Whether all ranks have called what some wait for, by place; see `_can_go_on`."""
        return {}

    def members(self, waiter: Answer) -> Sequence[int]:
        """Return the ranks that a rank may be waiting for, itself included."""
        group = _waiting_group(waiter)
        known = waiter.groups.get(group or "")
        return self.world if known is None else known.ranks


def judge(
    answers: Mapping[int, Answer],
    absences: Mapping[int, Absence],
    *,
    histories: Mapping[int, History] | None = None,
    previous: Mapping[int, Answer] | None = None,
    lease_s: float = LEASE_S,
) -> Judgement:
    """Judge the answers of ranks, and the reasons why others have not answered."""
    found = Round(
        answers=answers,
        absences=absences,
        histories=histories or {},
        previous=previous,
        lease_s=lease_s,
    )
    silent = tuple(rank for rank, absence in absences.items() if absence.state == "lost")
    for rule in (_gone, _different, _lost, _deadlocked, _hung, _slow):
        judgement = rule(found)
        if judgement is not None:
            return replace(judgement, silent=silent)
    return Judgement(kind=FINE, silent=silent)


def histories_wanted(answers: Mapping[int, Answer]) -> list[int]:
    """Return the ranks whose last collectives would tell where journals part: one for each place in each group."""
    wanted: dict[int, None] = {}
    for classes in _classes(answers).values():
        if len(classes) > 1:
            wanted.update(dict.fromkeys(ranks[0] for ranks in classes.values()))
    return list(wanted)[:MAX_HISTORIES]


# --- rules ------------------------------------------------------------------------------------------


def _gone(found: Round) -> Judgement | None:
    gone = {
        rank: f"{_GONE[absence.state]}{' ' + absence.text if absence.text else ''}"
        for rank, absence in found.absences.items()
        if absence.state in _GONE
    }
    gone |= {
        rank: f"raised {answer.raised}"
        for rank, answer in found.answers.items()
        if answer.raised and answer.wait is None and not answer.has_caught
    }
    waited_for = _causes(found, gone)
    if not waited_for:
        return None
    if all(rank in found.absences and found.absences[rank].state == "left" for rank in waited_for):
        # They may have left after the collective that others still wait for, and what they sent is on its way.
        waits = [waiter.wait for waiter in found.waiters if waiter.wait is not None]
        if not any(wait.is_in_vain or wait.seconds >= LEFT_S for wait in waits):
            return Judgement(kind=AGAIN)
    reasons: dict[str, list[int]] = {}
    for rank in waited_for:
        reasons.setdefault(gone[rank], []).append(rank)
    text = "; ".join(f"{ranks_text(ranks)} {reason}" for reason, ranks in reasons.items())
    return _diverged(found, f"{text}, while others wait", waited_for)


def _causes(found: Round, gone: Mapping[int, str]) -> list[int]:
    """Return those of the ranks that are gone, for these reasons, which may be why others wait.

    The rank that others wait for may itself have ended because another one was gone, one that they do not wait for. So
    all are returned that have failed by themselves, and others only if there are none.
    """
    waited_for = _waited_for(found, gone)
    # The run cannot go on without a rank that has failed, only without one that is done.
    failed = [r for r in gone if r not in found.absences or found.absences[r].state != "left"]
    if not waited_for:
        absent = [rank for rank in failed if rank in found.absences]
        return absent if found.waiters else []
    causes = {
        rank
        for rank in {*waited_for, *failed}
        if not is_consequence(gone[rank].removeprefix("raised "))
    }
    return sorted(causes) or waited_for


def _different(found: Round) -> Judgement | None:
    for name, classes in _classes(found.answers).items():
        parting = _parting(name, classes, found.histories) or _unequal(name, classes)
        if parting is None:
            parting = _unequal_steps(name, found.answers)
        if parting is not None:
            text, ranks = parting
            return _diverged(found, text, ranks)
    return None


def _lost(found: Round) -> Judgement | None:
    lost = [rank for rank, absence in found.absences.items() if absence.state == "lost"]
    waited_for = _waited_for(found, lost)
    if not waited_for:
        return None
    closed = {rank for answer in found.answers.values() for rank in answer.closed}
    ended = sorted(closed.intersection(waited_for))
    if ended:
        is_one = len(ended) == 1
        text = (
            f"{ranks_text(ended)} {'has' if is_one else 'have'} closed {'its' if is_one else 'their'} connections and "
            f"{'does' if is_one else 'do'} not answer: the process has ended where no other rank can see it"
        )
        return _diverged(found, text, ended)
    why = "a host is down, or the network is cut"
    in_vain = [
        each.rank for each in found.waiters if each.wait is not None and each.wait.is_in_vain
    ]
    if in_vain:
        text = (
            f"{ranks_text(waited_for)} cannot be reached, and {ranks_text(in_vain)} "
            f"{'has' if len(in_vain) == 1 else 'have'} lost a connection: {why}"
        )
        return _diverged(found, text, waited_for)
    over = [rank for rank in waited_for if found.absences[rank].silent_s >= found.lease_s]
    if not over:
        return None
    text = f"{ranks_text(over)} cannot be reached for {found.lease_s:.0f} s: {why}"
    return _diverged(found, text, over)


def _deadlocked(found: Round) -> Judgement | None:
    for ranks in _connected(found):
        if not all(_is_blocked(found, rank) for rank in ranks):
            continue
        answers = [found.answers[rank] for rank in ranks]
        if any(_can_go_on(found, answer) for answer in answers):
            continue
        if found.previous is None:
            return Judgement(kind=AGAIN)
        if all(_same_place(answer, found.previous.get(answer.rank)) for answer in answers):
            text = f"{ranks_text(ranks)} wait for each other in different places"
            return _diverged(found, text, ranks)
    return None


def _hung(found: Round) -> Judgement | None:
    for answer in found.waiters:
        wait, limit = answer.wait, answer.limit_s
        if wait is None or limit is None or wait.seconds < limit or not _can_go_on(found, answer):
            continue
        ranks = found.members(answer)
        text = (
            f"{wait.text} has not ended within {limit:.0f} s, though {ranks_text(ranks)} called it. "
            "A kernel does not end, or the network does not deliver"
        )
        return _diverged(found, text, ranks)
    return None


def _slow(found: Round) -> Judgement | None:
    running = [rank for rank, answer in found.answers.items() if answer.wait is None]
    silent = [
        rank
        for rank, absence in found.absences.items()
        if absence.state in ("busy", "unregistered", "lost")
    ]
    waited_for = _waited_for(found, {*running, *silent})
    if not waited_for:
        return None
    longest = max(waiter.wait.seconds for waiter in found.waiters if waiter.wait is not None)
    return Judgement(
        kind=SLOW,
        message=f"{ranks_text(waited_for)} keep{'s' if len(waited_for) == 1 else ''} others waiting for {longest:.0f} "
        f"s. {_patient(found, waited_for)}, so they go on waiting.\n{lines(found)}",
        culprits=tuple(waited_for),
        where=_where(found, waited_for[0]),
    )


def _patient(found: Round, waited_for: Collection[int]) -> str:
    """Return the reason why ranks that wait for others go on."""
    silences = [
        found.absences[rank].silent_s
        for rank in waited_for
        if rank in found.absences and found.absences[rank].state == "lost"
    ]
    if not silences:
        return "Nothing is wrong so far"
    return (
        f"Nothing is proven: {max(silences):.0f} s of silence, of {found.lease_s:.0f} s that are allowed "
        "(FULLSHARD_WATCHDOG_LEASE)"
    )


def _where(found: Round, rank: int) -> str:
    answer = found.answers.get(rank)
    if answer is None:
        return _SILENT[found.absences[rank].state]
    return answer.place() + (f", at {answer.line}" if answer.line else "")


# --- what rules ask ---------------------------------------------------------------------------------


def _waiting_group(answer: Answer) -> str | None:
    return answer.wait.group if answer.wait is not None else None


def _waited_for(found: Round, ranks: Collection[int]) -> list[int]:
    """Return those of the ranks that another one waits for."""
    groups = {
        _waiting_group(waiter): (waiter.rank, found.members(waiter)) for waiter in found.waiters
    }
    return sorted(
        rank
        for rank in ranks
        if any(rank in members and rank != waiter for waiter, members in groups.values())
    )


def _is_blocked(found: Round, rank: int) -> bool:
    return rank in found.answers and found.answers[rank].wait is not None


def _connected(found: Round) -> list[list[int]]:
    """Return sets of ranks that wait for each other, directly or through others."""
    parent = {rank: rank for rank in found.world}

    def first(rank: int) -> int:
        while parent[rank] != rank:
            parent[rank] = rank = parent[parent[rank]]
        return rank

    seen = set()
    for waiter in found.waiters:
        members = found.members(waiter)
        if (key := (_waiting_group(waiter), len(members), members[0])) in seen:
            continue
        seen.add(key)
        for rank in members:
            if rank in parent:
                parent[first(rank)] = first(waiter.rank)
    sets: dict[int, list[int]] = {}
    for rank in found.world:
        sets.setdefault(first(rank), []).append(rank)
    return [ranks for ranks in sets.values() if len(ranks) > 1]


def _can_go_on(found: Round, waiter: Answer) -> bool:
    """Whether all ranks have called what a rank waits for: then it will end, or hangs in the backend."""
    wait = waiter.wait
    assert wait is not None
    place = (wait.text, wait.kind, wait.group, wait.count)
    if place not in found.satisfied:
        found.satisfied[place] = _all_have_called(found, waiter, wait)
    return found.satisfied[place]


def _all_have_called(found: Round, waiter: Answer, wait: Wait) -> bool:
    if wait.kind == "torch" and (wait.text in _POINT_TO_POINT or wait.text.startswith(ASYNC_WAIT)):
        # The other rank, and whether it has called its part before, cannot be known. But if a rank waits for this
        # one in a collective of ours, only a message on its way can end the wait, and that would be seen to move.
        others = (found.answers.get(rank) for rank in found.members(waiter))
        is_among_torch = all(
            each is not None and each.wait is not None and each.wait.kind == "torch"
            for each in others
        )
        return is_among_torch or wait.traffic == UNKNOWN
    for rank in found.members(waiter):
        other = found.answers.get(rank)
        if other is None:
            return False
        if wait.kind == "torch" or wait.group is None:
            same = other.wait is not None and (other.wait.text, other.wait.group) == (
                wait.text,
                wait.group,
            )
        else:
            same = wait.group in other.groups and other.groups[wait.group].count >= wait.count
        if not same:
            return False
    return True


_POINT_TO_POINT = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})


def _same_place(answer: Answer, before: Answer | None) -> bool:
    if before is None or before.wait is None or answer.wait is None:
        return False
    return (answer.moved, answer.wait.text, answer.wait.traffic, answer.line) == (
        before.moved,
        before.wait.text,
        before.wait.traffic,
        before.line,
    )


# --- comparing journals -----------------------------------------------------------------------------

_Classes = dict[tuple[int, int], list[int]]
"""Ranks by count and digest."""


def _classes(answers: Mapping[int, Answer]) -> dict[str, _Classes]:
    """Return, for each process group, its ranks by how far they have come there."""
    groups: dict[str, _Classes] = {}
    for rank, answer in sorted(answers.items()):
        for name, group in answer.groups.items():
            found = groups.setdefault(name, {})
            found.setdefault((group.count, group.digest), []).append(rank)
    return groups


def _parting(
    name: str, classes: _Classes, histories: Mapping[int, History]
) -> tuple[str, list[int]] | None:
    """Return the place where two ranks have called different collectives under the same number, as far as they remember."""
    known = [(ranks, histories[ranks[0]]) for ranks in classes.values() if ranks[0] in histories]
    known.sort(key=lambda each: -len(each[0]))  # the majority first: others are compared with it
    for ranks, history in known[1:]:
        majority, tags = known[0][0], history.tags.get(name, {})
        expected = known[0][1].tags.get(name, {})
        common = sorted(tags.keys() & expected.keys())
        for count in common:
            if tags[count] != expected[count]:
                # If they forgot what came before, they may have parted there.
                latest = ", at the latest" if count == common[0] and count > 1 else ""
                text = (
                    f"collective {count} of process group {name} is {expected[count]} on {ranks_text(majority)}, "
                    f"and {tags[count]} on {ranks_text(ranks)}{latest}. {_mixed(name, count, history)}"
                )
                return text, ranks
    return None


def _mixed(name: str, count: int, history: History) -> str:
    """Return the number of steps that a rank has ended since it called collective number ``count`` and its history was sent."""
    steps = history.steps.get(name, ())
    since = [step for step, called in steps if called >= count]
    if not since:
        return "No step has ended since, so no weights were updated with what it brought"
    number = since[-1] - since[0] + 1
    more = "more than " if len(since) == len(steps) and since[0] > 1 else "up to "
    return f"Since then {more}{number} step{'s' if number > 1 else ''} may have been computed with mixed weights"


def _unequal(name: str, classes: _Classes) -> tuple[str, list[int]] | None:
    """Return the ranks that have called as many collectives, but not the same."""
    by_count: dict[int, list[list[int]]] = {}
    for (count, _), ranks in classes.items():
        by_count.setdefault(count, []).append(ranks)
    for count, different in by_count.items():
        if len(different) > 1:
            sides = " and ".join(ranks_text(ranks) for ranks in different)
            text = f"the first {count} collectives of process group {name} are different ones on {sides}"
            return text, min(different, key=len)
    return None


def _unequal_steps(name: str, answers: Mapping[int, Answer]) -> tuple[str, list[int]] | None:
    """Return a step that has ended after different collectives, the earliest that is known."""
    by_step: dict[int, dict[tuple[int, int], list[int]]] = {}
    for rank, answer in sorted(answers.items()):
        for step, count, digest in answer.groups[name].marks if name in answer.groups else ():
            by_step.setdefault(step, {}).setdefault((count, digest), []).append(rank)
    for step, different in sorted(by_step.items()):
        if len(different) > 1:
            sides = ", ".join(
                f"{count} on {ranks_text(ranks)}" for (count, _), ranks in different.items()
            )
            alike = len({count for count, _ in different}) == 1
            text = (
                f"step {step} has ended after different collectives of process group {name}: {sides}"
                f"{', which are as many, and not the same' if alike else ''}"
            )
            return text, min(different.values(), key=len)
    return None


# --- messages ---------------------------------------------------------------------------------------


def _diverged(found: Round, text: str, culprits: Iterable[int]) -> Judgement:
    message = (
        f"Ranks have diverged: {text}.\n{lines(found)}\n"
        "Let all ranks call the same modules in the same order, and fail together; see docs/divergence.md."
    )
    return Judgement(kind=DIVERGED, message=message, culprits=tuple(sorted(culprits)))


def lines(found: Round) -> str:
    """Return a line for each place, with the ranks that are there."""
    places: dict[str, list[Answer]] = {}
    for _, answer in sorted(found.answers.items()):
        places.setdefault(_place(answer), []).append(answer)
    lines = [*_absent(found.absences)]
    for place, answers in sorted(places.items(), key=lambda item: len(item[1])):
        ranks = ranks_text(answer.rank for answer in answers)
        host = f" ({answers[0].host})" if len(answers) == 1 and answers[0].host else ""
        waits = [answer.wait.seconds for answer in answers if answer.wait is not None]
        time = f", for {max(waits):.0f} s" if waits else ""
        lines.append(f"  {ranks}{host}: {place}{time}")
    lines += [
        f"  rank {rank}, pending in the backend: {history.backend}"
        for rank, history in found.histories.items()
        if history.backend
    ]
    more = [f"  and {len(lines) - MAX_LINES} more places"] if len(lines) > MAX_LINES else []
    return "\n".join([*lines[:MAX_LINES], *more])


def _place(answer: Answer) -> str:
    at = f", at {answer.line}" if answer.line else ""
    caught = " and caught it" if answer.has_caught else ""
    raised = f"raised {answer.raised}{caught}; " if answer.raised else ""
    wait = answer.wait
    if wait is None:
        return f"{raised}running: {answer.place()}{at}"
    where = {"torch": "torch.distributed.", "device": "the device to finish "}.get(wait.kind, "")
    number = (
        f" (collective {wait.count} of process group {wait.group})"
        if wait.group is not None and wait.kind != "torch"
        else ""
    )
    return f"{raised}waiting for {where}{wait.caller or wait.text}{number}: {answer.place()}{at}"


_SILENT = {
    "left": "left: its program has ended, or it has destroyed its process group",
    "raised": "raised",
    "dead": "dead: the process has ended without a message (killed, or out of memory)",
    "stopped": "stopped: by a signal or a debugger",
    "busy": "no answer, but the process runs: it may hold the interpreter lock for long",
    "lost": "no answer, and no rank can see the process",
    "unregistered": "no sharded model yet",
}


def _absent(absences: Mapping[int, Absence]) -> Iterator[str]:
    texts: dict[str, list[Absence]] = {}
    for _, absence in sorted(absences.items()):
        text = _SILENT[absence.state] + (f" {absence.text}" if absence.text else "")
        # Hosts and last positions of many ranks would be too long a list to read.
        text += f"; last seen: {absence.last}" if absence.last else ""
        texts.setdefault(text, []).append(absence)
    for text, alike in texts.items():
        host = f" ({alike[0].host})" if len(alike) == 1 and alike[0].host else ""
        yield f"  {ranks_text(each.rank for each in alike)}{host}: {text}"
