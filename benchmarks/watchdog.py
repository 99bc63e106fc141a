"""What a round of the watchdog costs in a large world, as `python -m benchmarks.watchdog [RANKS ...]`.

Ranks are objects of one process, and so is the store. The protocol is the real one (`comm.watchdog.rounds`); the store
counts operations and bytes. Time is virtual: a server that handles one key after the other, `KEYS_PER_S` of them in a
second, and ranks that look at the store at their ticks. The rate is an assumption. It leaves out the network.

The case: one rank has died in a collective, and 0.1 % of the ranks are slow. A round ends when all others have heard that.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fullshard.divergence.watchdog.answers import (
    Answer,
    GroupAnswer,
    History,
    Registration,
    Wait,
    encode,
)
from fullshard.divergence.watchdog.judge import Judgement
from fullshard.divergence.watchdog.rounds import Member, Rounds, tick_of
from fullshard.divergence.watchdog.store_client import LIMIT_S, KeyStore, StoreOperations

KEYS_PER_S = 50_000
"""An assumption about the store's server."""
WORLDS = (8, 64, 512, 4096, 16384)
DEAD = 1
HOST = 8
"""Ranks on a host."""
LOOK_S = 0.25

T = TypeVar("T")


@dataclass(kw_only=True)
class Server:
    """A store in memory that counts, and takes time."""

    values: dict[str, bytes] = field(default_factory=dict)
    now: float = 0.0
    """When the rank whose turn it is has the answer to its last operation."""
    free: float = 0.0
    """When the server has handled all that it was asked for."""
    operations: int = 0
    sent: int = 0
    received: int = 0

    def _serve(self, keys: Sequence[str], received: int = 0) -> None:
        self.operations += 1
        self.received += sum(map(len, keys)) + received
        self.free = max(self.free, self.now) + len(keys) / KEYS_PER_S
        self.now = self.free

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        self._serve([key], len(value))
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        """Return a value."""
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return it."""
        self._serve([key], 8)
        self.sent += 8
        number = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(number).encode()
        return number

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        self._serve(keys)
        self.sent += 1
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Store a value if there is none."""
        self._serve([key], len(desired))
        return self.values.setdefault(key, desired.encode())

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return several values."""
        self._serve(keys)
        found = [self.values[key] for key in keys]
        self.sent += sum(map(len, found))
        return found


class Direct(StoreOperations):
    """Operations on a store in memory."""

    def __init__(self, server: Server) -> None:
        super().__init__("fullshard/watchdog/")
        self._server = server

    def _do(self, operation: Callable[[KeyStore], T], limit_s: float = LIMIT_S) -> T:
        return operation(self._server)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one round cost."""

    world: int
    operations: int
    sent: int
    received: int
    seconds: float
    judgements: list[Judgement]

    def row(self) -> str:
        """Return a line of the table."""
        idle = self.world / tick_of(self.world)
        return (
            f"{self.world:>7,} {tick_of(self.world):>6.1f} {idle:>10,.0f} {self.operations:>11,} "
            f"{self.operations / self.world:>9.1f} {self.received / 1e6:>9.2f} {self.sent / 1e6:>9.2f} {self.seconds:>8.1f}"
        )


HEADING = (
    "  ranks   tick idle ops/s   ops/round  per rank  MB to it MB from it  seconds\n"
    "              (s)                                   store     store (virtual)"
)


def answer_of(rank: int, world: int) -> Answer:
    """Return what a rank would say: nearly all wait in the same gather, some are slow."""
    is_slow = rank % 1000 == 999
    group = "0 (all ranks)"
    wait = Wait(
        text="all-gather of model.layers.17",
        kind="fullshard",
        group=group,
        count=1234,
        seconds=5.3,
    )
    host = range(rank - rank % HOST, min(world, rank - rank % HOST + HOST))
    return Answer(
        rank=rank,
        host=f"host node{rank // HOST}, process {1000 + rank}",
        step=17,
        phase="forward",
        module="model.layers.17",
        line="train/loop.py:123 in train_step",
        moved=1251,
        wait=None if is_slow else wait,
        limit_s=1800.0,
        groups={
            group: GroupAnswer(
                ranks=range(world),
                count=1233 if is_slow else 1234,
                digest=(1 << 62) + is_slow,
                marks=((16, 1160, 1 << 61), (17, 1230, 1 << 61)),
            )
        },
        states={each: "dead" if each == DEAD else "alive" for each in host if each != rank},
    )


def one_round(world: int, seed: int = 0) -> Cost:
    """Let rank 0 ask while one rank is dead; return what it cost until all have heard the judgement."""
    server, chance, tick = Server(), random.Random(seed), tick_of(world)
    tags = {"0 (all ranks)": {count: f"collective {count}" for count in range(978, 1233)}}

    def member(rank: int) -> Rounds:
        return Rounds(
            Direct(server),
            Member(
                rank=rank,
                world=world,
                answer=lambda: answer_of(rank, world),
                history=lambda: History(tags=tags),
                clock=lambda: server.now,
            ),
        )

    dead = Registration(rank=DEAD, host="node0", host_key="", pid=1001, started=1)
    Direct(server).set(f"registration/{DEAD}", encode(dead))
    members = {rank: member(rank) for rank in range(world) if rank != DEAD}
    server.operations = server.sent = server.received = 0
    members[0].ask()
    turns = [(chance.random() * tick, rank) for rank in members]
    heapq.heapify(turns)
    judgements: list[Judgement] = []
    last = 0.0
    while len(judgements) < len(members):
        server.now, rank = heapq.heappop(turns)
        judgement = members[rank].poll()
        if judgement is not None:
            judgements.append(judgement)
            last = max(last, server.now)
            continue
        pause = LOOK_S * tick if members[rank].is_running else tick
        heapq.heappush(turns, (server.now + pause, rank))
    return Cost(
        world=world,
        operations=server.operations,
        sent=server.sent,
        received=server.received,
        seconds=last,
        judgements=judgements,
    )


def main(arguments: Sequence[Any]) -> None:
    """Print the table."""
    print(f"One round; the store handles {KEYS_PER_S:,} keys in a second, which is an assumption.")
    print(HEADING)
    for world in [int(each) for each in arguments] or WORLDS:
        print(one_round(world).row(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
