"""Rounds through a store, the store's client, and the states of processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from itertools import repeat
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.watchdog import one_round
from fullshard.divergence.watchdog.answers import (
    Answer,
    GroupAnswer,
    History,
    Registration,
    Wait,
    encode,
)
from fullshard.divergence.watchdog.judge import Judgement
from fullshard.divergence.watchdog.peers import Peers
from fullshard.divergence.watchdog.probes import host_key, register, state_of
from fullshard.divergence.watchdog.rounds import Member, Rounds
from fullshard.divergence.watchdog.store_client import OpenStore, StoreClient, StoreFailedError

GROUP = "0 (3 ranks, 0 to 2)"


def answer_of(rank: int, *, count: int) -> Answer:
    wait = Wait(text=f"gather {count}", kind="fullshard", group=GROUP, count=count, seconds=6.0)
    group = GroupAnswer(ranks=range(3), count=count, digest=count)
    return Answer(rank=rank, wait=wait, groups={GROUP: group}, moved=count)


class Rank:
    """One of three ranks, whose watchdog uses a store in memory."""

    def __init__(self, store: Any, rank: int, answer: Answer, tags: dict[int, str]) -> None:
        self.client = StoreClient(lambda: store, "test/")
        self.client.set(f"registration/{rank}", encode(replace(register(rank), host="here")))
        member = Member(
            rank=rank,
            world=3,
            answer=lambda: answer,
            history=lambda: History(tags={GROUP: tags}),
            clock=time.monotonic,
        )
        self.rounds = Rounds(self.client, member)
        self.rounds.join()

    def judgement(self, judgements: list[Judgement]) -> None:
        for _ in repeat(None):
            found = self.rounds.poll()
            if found is not None:
                judgements.append(found)
                return
            time.sleep(0.001)


def all_hear(ranks: list[Rank]) -> list[Judgement]:
    judgements: list[Judgement] = []
    threads = [threading.Thread(target=rank.judgement, args=[judgements]) for rank in ranks]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    return judgements


def test_ranks_of_a_host_find_each_other_though_a_place_of_their_list_stays_empty() -> None:
    store = OpenStore(dist.HashStore(), "test/")
    ranks = [Peers(store, register(rank)) for rank in range(3)]
    ranks[0].register()
    store.add(
        f"host/{host_key()}", 1
    )  # a late answer of the store: the rank will take another place
    for late in ranks[1:]:
        late.register()
        for each in ranks:
            each.find()
            each.look()
    assert [sorted(each.states) for each in ranks] == [[1, 2], [0, 2], [0, 1]]


def test_one_rank_asks_all_answer_and_all_hear_the_same() -> None:
    store = dist.HashStore()
    tags = {5: "gather 5", 6: "gather 6"}
    ranks = [Rank(store, rank, answer_of(rank, count=6), tags) for rank in range(3)]
    for each in ranks:  # at once: one of them asks, the others join it
        each.rounds.ask()
    heard = all_hear(ranks)
    assert [found.kind for found in heard] == ["fine"] * 3

    # The next round, with a history that is another one under the same number.
    ranks[2] = Rank(store, 2, answer_of(2, count=5), {4: "gather 4", 5: "something else"})
    ranks[0].rounds.ask()
    heard = all_hear(ranks)
    assert len(heard) == 3
    assert len(set(heard)) == 1
    assert heard[0].kind == "diverged"
    assert "collective 5 of process group" in heard[0].message
    assert "gather 5 on ranks 0, 1, and something else on rank 2" in heard[0].message
    for each in ranks:
        each.client.close()


def test_a_rank_that_leaves_lets_others_ask() -> None:
    store = dist.HashStore()
    ranks = [Rank(store, rank, answer_of(rank, count=6), {}) for rank in range(3)]
    leaving = ranks.pop(1)
    leaving.client.set("final/1", '["raised", "ValueError: bad sample"]')
    leaving.client.add("finals", 1)
    leaving.rounds.open_for_others()
    for each in ranks:  # who comes to ask by itself must not take the leaving rank for the asker
        each.rounds.ask()
    heard = all_hear(ranks)
    assert len(heard) == 2
    assert len(set(heard)) == 1
    assert "rank 1 raised ValueError: bad sample, while others wait" in heard[0].message
    for each in [*ranks, leaving]:
        each.client.close()


def test_a_rank_whose_store_was_too_slow_for_its_last_words_is_explained_by_its_host() -> None:
    store = dist.HashStore()
    heard_from_it = replace(
        answer_of(2, count=6), words={1: ("raised", "ValueError: bad sample")}, states={1: "alive"}
    )
    ranks = [
        Rank(store, rank, answer, {})
        for rank, answer in ((0, answer_of(0, count=6)), (2, heard_from_it))
    ]
    ranks[0].client.set("registration/1", encode(register(1)))
    ranks[0].client.add("finals", 1)  # so that nobody waits for its answer
    ranks[0].rounds.ask()
    heard = all_hear(ranks)
    assert len(set(heard)) == 1
    assert "rank 1 raised ValueError: bad sample, while others wait" in heard[0].message
    for each in ranks:
        each.client.close()


def test_a_rank_that_leaves_in_the_round_in_which_it_asks_lets_nobody_wait() -> None:
    store = dist.HashStore()
    ranks = [Rank(store, rank, answer_of(rank, count=6), {}) for rank in range(3)]
    leaving = ranks.pop(1)
    leaving.rounds.ask()
    for each in ranks:
        each.rounds.poll()
    leaving.client.set("final/1", '["raised", "ValueError: bad sample"]')
    leaving.client.add("finals", 1)
    leaving.rounds.hand_over()
    leaving.rounds.open_for_others()
    assert [found.kind for found in all_hear(ranks)] == ["fine"] * 2
    heard = all_hear(ranks)
    assert len(heard) == 2
    assert "rank 1 raised ValueError: bad sample, while others wait" in heard[0].message
    for each in [*ranks, leaving]:
        each.client.close()


def test_a_store_that_does_not_answer_stops_nobody() -> None:
    goes_on = threading.Event()

    class Stuck:
        def check(self, keys: list[str]) -> bool:
            return goes_on.wait()

        def set(self, key: str, value: str) -> None:
            raise ConnectionError("reset by peer\nand a stack")

    client = StoreClient(Stuck, "test/")
    client._do(lambda store: None)
    with pytest.raises(StoreFailedError, match="has not answered") as caught:
        client._do(lambda store: store.check([]), 0.01)
    assert caught.value.is_late
    with pytest.raises(StoreFailedError, match="does not answer"):  # at once: one is pending
        client.has(["x"])
    goes_on.set()
    while client.is_stuck:
        time.sleep(0.001)
    assert client.has(["x"])
    for _ in range(2):
        with pytest.raises(StoreFailedError, match=r"is gone \(reset by peer\)") as caught:
            client.set("x", "")
        assert not caught.value.is_late
    client.close()
    client.thread.join()


def test_what_was_given_up_is_not_done_when_a_slow_store_has_accepted_the_connection() -> None:
    accepts, store = threading.Event(), dist.HashStore()

    def connect() -> Any:
        accepts.wait()
        return store

    client = StoreClient(connect, "test/")
    with pytest.raises(StoreFailedError) as caught:
        client.set("final/1", "", 0.01)
    assert caught.value.is_late
    assert client.num_done == 0
    # By another client, which has been accepted before.
    OpenStore(store, "test/").set("final/1", "last words")
    accepts.set()
    while client.is_stuck:
        time.sleep(0.001)
    assert client.find("final/1") == b"last words"
    client.close()
    client.thread.join()


def test_an_operation_does_not_find_the_one_before_it_pending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on, set_result = threading.Event(), Future.set_result

    def set_result_and_pause(self: Future[Any], found: Any) -> None:
        set_result(self, found)
        goes_on.wait(1.0)  # the client's thread comes no further

    monkeypatch.setattr(Future, "set_result", set_result_and_pause)
    client = StoreClient(dist.HashStore, "test/")
    client.add("count", 1)
    assert not client.is_stuck
    goes_on.set()
    assert client.add("count", 1) == 2
    client.close()
    client.thread.join()


def test_last_words_of_a_rank_that_could_not_register_are_read() -> None:
    store = dist.HashStore()
    ranks = [Rank(store, rank, answer_of(rank, count=6), {}) for rank in (0, 2)]
    OpenStore(store, "test/").set("final/1", '["left", ""]')
    ranks[0].client.add("finals", 1)
    ranks[0].rounds.ask()
    heard = all_hear(ranks)
    assert len(set(heard)) == 1
    assert "rank 1 left, while others wait" in heard[0].message
    for each in ranks:
        each.client.close()


def test_a_round_of_many_ranks_takes_some_operations_of_each() -> None:
    cost = one_round(1024)
    assert {found.kind for found in cost.judgements} == {"diverged"}
    assert cost.judgements[0].message.startswith("Ranks have diverged: rank 1 died, while others")
    assert len(cost.judgements) == 1023
    assert cost.operations < 20 * 1024
    assert cost.sent + cost.received < 4000 * 1024


def test_the_state_of_a_process_is_seen() -> None:
    own = register(0)
    assert state_of(own) == "alive"
    assert state_of(replace(own, started=own.started - 1)) == "dead"  # its number was given away
    with subprocess.Popen(["sleep", "600"]) as child, contextlib.ExitStack() as stack:
        stack.callback(child.kill)
        process: Registration = replace(own, pid=child.pid, started=0)
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert state_of(process) == "stopped"
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert state_of(process) == "dead"  # nobody has waited for it yet
    assert state_of(process) == "dead"
