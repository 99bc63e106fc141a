"""Rounds of questions through the store: one rank asks, all answer, the asker judges, all hear the judgement.

A rank's part is a state machine. `poll` is called again and again, and never waits:

    asker                                all others
    claims round n                       find round n, at most a tick later
    answers                              answer, and count themselves
    waits until all have, or a limit
    reads the answers
    says whose history it wants          those ranks send it
    judges, says the judgement           hear it; the next round is n + 1
    ... that ranks have diverged         say that they know it

The asker reads all answers with a few operations, and no other rank reads them. So the store has some operations per
rank and round, whatever the number of ranks: benchmarks/watchdog.py counts them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from fullshard.divergence.watchdog.answers import (
    DEAD,
    STOPPED,
    Absence,
    Answer,
    History,
    answer_from,
    encode,
    history_from,
    registration_from,
)
from fullshard.divergence.watchdog.judge import (
    AGAIN,
    DIVERGED,
    FINE,
    Judgement,
    histories_wanted,
    judge,
)
from fullshard.divergence.watchdog.silences import LEASE_S, Silences
from fullshard.divergence.watchdog.store_client import StoreOperations

LOST_S = 7.0
"""Time that the asker waits for a rank whose process no other rank can see."""
LONGEST_GAP_S = 60.0
"""Longest time between rounds for a rank to count as silent all the time in between."""
GIVEN_UP_S = 11.0
"""Time that others wait for a judgement; the asker may have died."""
HISTORY_S = 3.0
OPEN = "open"
"""Stands for the asker of a round that a leaving rank has begun: the first rank that finds it asks."""


def tick_of(world: int) -> float:
    """Return the seconds between two looks of a rank whether another one has asked."""
    return max(1.0, world / 4096)


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """The rank that takes part in rounds, with its answers."""

    rank: int
    world: int
    answer: Callable[[], Answer]
    history: Callable[[], History]
    clock: Callable[[], float]
    lease_s: float = LEASE_S
    """Longest time for which a rank may be silent."""
    is_gone: Callable[[int], bool] = lambda _: False
    """Whether the process of a rank is known to be dead or stopped."""


class Rounds:
    """The part of one rank in the rounds of all."""

    def __init__(self, store: StoreOperations, member: Member) -> None:
        self._store = store
        self._member = member
        self._number = 1
        """The number of the round that comes next, or runs."""
        self._stage = 0
        """Number of messages that the asker of this round has sent."""
        self._since = 0.0
        """The time at which this rank has answered; only within a round."""
        self._asking: _Asking | None = None
        self.is_running = False
        """Whether this rank is within a round."""
        self._asker: int | None = None
        """The rank that asks in this round; None if it is this rank, or unknown."""
        self._ended: tuple[int, int] | None = None
        """After a judgement that ranks have diverged: number of the round, and how many have answered in it."""
        self._previous: tuple[float, Mapping[int, Answer]] | None = None
        """The end and the answers of the last round that this rank asked for, if another one was to follow."""
        self._silences = Silences(LONGEST_GAP_S * tick_of(member.world))

    def join(self) -> None:
        """Begin with the round that comes next."""
        self._number = self._store.add("rounds", 0) + 1

    def hand_over(self) -> None:
        """Take part in no more rounds: this rank leaves. One in which it asks ends without a judgement."""
        if self._asking is not None:
            self._say(asdict(Judgement(kind=FINE)) | {"listeners": 0})
            self._store.add("rounds", 1)
        if self.is_running:
            self._leave()

    def open_for_others(self) -> None:
        """Begin a round for others to ask in: this rank leaves."""
        self._store.claim(f"round/{self._number}", OPEN)

    # --- asking and answering -------------------------------------------------------------------------

    def ask(self) -> None:
        """Begin a round, or join the one that another rank has begun."""
        if not self.is_running:
            if self._store.claim(f"round/{self._number}", str(self._member.rank)):
                self._enter(asks=True)
            else:
                self.poll()  # which asks in a round that a leaving rank has opened, if no other rank does

    def poll(self, news: tuple[str, str] | None = None) -> Judgement | None:
        """Take the next step of the round; return the judgement at its end.

        Before a round, ``news`` are stored in the same operation: a key and a value.
        """
        if not self.is_running:
            begun = f"round/{self._number}"
            if self._store.has([begun]) if news is None else self._store.set_and_has(*news, begun):
                self._enter(asks=self._asks_in_open_round())
            return None
        return self._hear() if self._asking is None else self._poll_asking(self._asking)

    def say_known(self) -> None:
        """Say that this rank knows that ranks have diverged."""
        if self._ended is not None:
            self._store.add(f"knowing/{self._ended[0]}", 1)

    def all_know(self) -> bool:
        """Return whether all ranks that answered in the last round know that ranks have diverged."""
        if self._ended is None:
            return True
        number, listeners = self._ended
        return self._store.add(f"knowing/{number}", 0) >= listeners

    def _asks_in_open_round(self) -> bool:
        """Return whether the round, which another rank has begun, is left to others, and this rank is the first of them."""
        asker = self._store.find(f"round/{self._number}")
        if asker != OPEN.encode():
            self._asker = int(asker) if asker else None
            return False
        self._asker = None
        return self._store.claim(f"asker/{self._number}", str(self._member.rank))

    def _enter(self, *, asks: bool) -> None:
        answer = self._member.answer()
        self._store.set(f"answer/{self._number}/{self._member.rank}", encode(answer))
        self._store.add(f"answers/{self._number}", 1)
        self._since = self._member.clock()
        self._stage = 1
        self.is_running = True
        self._asking = _Asking(began=self._since) if asks else None

    def _hear(self) -> Judgement | None:
        said = self._store.find(f"said/{self._number}/{self._stage}")
        if said is None:
            is_given_up = self._member.clock() - self._since > GIVEN_UP_S
            if is_given_up or (self._asker is not None and self._member.is_gone(self._asker)):
                self._leave()
            return None
        self._stage += 1
        message = json.loads(said)
        if "histories" in message:
            if self._member.rank in message["histories"]:
                self._send_history()
            return None
        listeners = message.pop("listeners")
        lists = {name: tuple(message[name]) for name in ("culprits", "silent")}
        judgement = Judgement(**message | lists)
        self._silences.note(judgement.silent, self._member.clock())
        self._ended = (self._number, listeners) if judgement.kind == DIVERGED else None
        self._leave()
        return judgement

    def _send_history(self) -> None:
        key = f"history/{self._number}/{self._member.rank}"
        self._store.set(key, encode(self._member.history()))

    def _leave(self) -> None:
        self.is_running = False
        self._asking = None
        self._number += 1

    # --- the asker ------------------------------------------------------------------------------------

    def _poll_asking(self, asking: _Asking) -> Judgement | None:
        if asking.answers is None:
            self._collect(asking)
        if asking.answers is None:
            return None
        if asking.wanted is None:
            asking.wanted = histories_wanted(asking.answers)
            asking.wanted_since = self._member.clock()
            if asking.wanted:
                self._say({"histories": asking.wanted})
                if self._member.rank in asking.wanted:
                    self._send_history()
        keys = {rank: f"history/{self._number}/{rank}" for rank in asking.wanted}
        if keys and not self._store.has([*keys.values()]):
            if self._member.clock() - asking.wanted_since < HISTORY_S:
                return None
            keys = {rank: key for rank, key in keys.items() if self._store.has([key])}
        found = self._store.get_all([*keys.values()]) if keys else []
        return self._conclude(asking, dict(zip(keys, map(history_from, found), strict=True)))

    def _conclude(self, asking: _Asking, histories: Mapping[int, History]) -> Judgement:
        assert asking.answers is not None
        previous = self._previous[1] if self._previous is not None else None
        judgement = judge(
            asking.answers,
            asking.absences,
            histories=histories,
            previous=previous,
            lease_s=self._member.lease_s,
        )
        self._silences.note(judgement.silent, self._member.clock())
        is_to_be_repeated = judgement.kind == AGAIN
        self._previous = (self._member.clock(), asking.answers) if is_to_be_repeated else None
        listeners = len(asking.answers)
        self._say(asdict(judgement) | {"listeners": listeners})
        self._store.add("rounds", 1)
        self._ended = (self._number, listeners) if judgement.kind == DIVERGED else None
        self._leave()
        return judgement

    @property
    def must_ask_again(self) -> bool:
        """Whether this rank has asked, and must ask again to see which ranks move."""
        return self._previous is not None and not self.is_running

    def _say(self, message: Mapping[str, object]) -> None:
        self._store.set(f"said/{self._number}/{self._stage}", json.dumps(message))
        self._stage += 1

    def _collect(self, asking: _Asking) -> None:
        """Read the answers if all are there, or if no other rank can be expected to answer."""
        world = self._member.world
        waited = self._member.clock() - asking.began
        keys = [f"answer/{self._number}/{rank}" for rank in range(world)]
        answered = self._store.add(f"answers/{self._number}", 0)
        # All find the question within a tick.
        if answered < world and waited < 1.5 + 1.25 * tick_of(world):
            # Ranks that have left will not answer, and need not be waited for.
            if answered + self._store.add("finals", 0) < world:
                return
        # The count is a hint: a rank whose store was late may have counted itself twice.
        silent = _missing(self._store, keys, range(world))
        there = sorted({*range(world)} - {*silent})
        found = self._store.get_all([keys[rank] for rank in there])
        answers = dict(zip(there, map(answer_from, found), strict=True))
        absences = {rank: self._absence(rank, answers) for rank in silent}
        if waited < LOST_S and any(absence.state == "lost" for absence in absences.values()):
            # Others may be known to be dead already. Then there is no need to wait for the rest.
            known = {rank: a for rank, a in absences.items() if a.state != "lost"}
            if judge(answers, known).kind != DIVERGED:
                return
        asking.answers, asking.absences = answers, absences

    def _absence(self, rank: int, answers: Mapping[int, Answer]) -> Absence:
        """Return the reason why a rank has not answered."""
        registered = self._store.find(f"registration/{rank}")
        final = self._store.find(f"final/{rank}")
        seen = {answer.states[rank] for answer in answers.values() if rank in answer.states}
        state = next((state for state in (DEAD, STOPPED) if state in seen), "")
        if registered is None and not final:
            if not state:
                return Absence(rank=rank, state="unregistered")
            registered = self._store.find(f"announced/{rank}")
        # One that has left before it could register has sent its last words all the same.
        host = registration_from(registered).text() if registered is not None else ""
        position = self._store.find(f"position/{rank}")
        last = json.loads(position)["text"] if position else ""
        # Its store may have been too slow for its last words. Those on its host have heard them.
        words = [answer.words[rank] for answer in answers.values() if rank in answer.words]
        if final or words:
            state, text = json.loads(final) if final else words[0]
            return Absence(rank=rank, state=state, text=text, host=host, last=last)
        silent_s = 0.0 if seen else self._silences.seconds(rank, self._member.clock())
        state = state or ("busy" if seen else "lost")
        return Absence(rank=rank, state=state, host=host, last=last, silent_s=silent_s)


@dataclass(kw_only=True, slots=True)
class _Asking:
    """The knowledge of a round's asker so far."""

    began: float
    answers: Mapping[int, Answer] | None = None
    absences: Mapping[int, Absence] = field(default_factory=dict)
    wanted: list[int] | None = None
    """Ranks whose histories the asker has asked for."""
    wanted_since: float = 0.0


def _missing(store: StoreOperations, keys: Sequence[str], ranks: Sequence[int]) -> list[int]:
    """Return the ranks whose keys are not there: few operations if few are missing."""
    if not ranks or store.has([keys[rank] for rank in ranks]):
        return []
    if len(ranks) == 1:
        return [*ranks]
    half = len(ranks) // 2
    return _missing(store, keys, ranks[:half]) + _missing(store, keys, ranks[half:])
