"""Ranks that are started again meet where no rank that has ended can mislead them."""

import random
import threading
import time

import pytest
from torch.distributed import HashStore, PrefixStore, Store

from fullshard.errors import CommunicationError
from fullshard.programs.train.rendezvous import fresh_store, store_of_torchrun


def attempt(store: Store, world: int, late: int) -> None:
    """All ranks meet, one of them later."""
    parts: list[Store | None] = [None] * world

    def meet(rank: int) -> None:
        if rank == late:
            time.sleep(0.05)
        parts[rank] = fresh_store(store, rank=rank, world=world, timeout_s=10.0)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for part in parts:
        assert isinstance(part, PrefixStore)
        assert not part.check(["address"]), "nobody was here before"
    assert parts[0] is not None and parts[-1] is not None
    parts[0].set("address", "of rank 0")
    assert parts[-1].check(["address"]), "all are in the same part"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_attempt_has_a_part_of_the_store_for_itself(world: int) -> None:
    store = HashStore()
    draw = random.Random(world)
    for _ in range(4):
        attempt(store, world, late=draw.randrange(world))


def test_a_rank_that_ended_in_the_middle_is_not_taken_for_its_successor() -> None:
    store = HashStore()
    store.set("hello/1", "somebody")
    store.set("offer/1", "old somebody")
    store.set("accepted/1", "old")
    attempt(store, 2, late=1)
    attempt(store, 2, late=0)


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(CommunicationError, match="Rank 0 waits for rank 1"):
        fresh_store(HashStore(), rank=0, world=2, timeout_s=0.05)
    with pytest.raises(CommunicationError, match="Rank 1 waits for rank 0"):
        fresh_store(HashStore(), rank=1, world=2, timeout_s=0.05)


def test_without_torchrun_s_store_ranks_meet_as_they_were_told() -> None:
    assert store_of_torchrun({}, rank=0, world=1, timeout_s=1.0) is None
