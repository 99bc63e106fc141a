"""The rendezvous of ranks that torchrun has restarted: a store without keys of an earlier attempt.

torchrun keeps one store for all its attempts, and it holds the addresses of ranks that have ended. A new rank that reads
an old address before it is replaced tries to reach a process that is gone. The attempt's number
(`TORCHELASTIC_RESTART_COUNT`) does not tell attempts apart, because each host counts its own failures only. So the ranks
agree on a token and use it as the prefix of all keys. The keys that they use to agree may hold anything from before:

    rank r    hello/r = a nonce                    accepted/r = the token, once an offer names the nonce
    rank 0    offer/r = token, nonce of hello/r    until accepted/r is the token

Only a rank 0 that has read the nonce can offer with it, and only a rank that has read the token can accept it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from fullshard.errors import CommunicationError

POLL_S = 0.01


def store_of_torchrun(
    environment: Mapping[str, str], *, rank: int, world: int, timeout_s: float
) -> Store | None:
    """Return a fresh store within torchrun's; None if this is not a rank of torchrun's agent."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return None
    store = TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        world_size=world,
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
    )
    return fresh_store(store, rank=rank, world=world, timeout_s=timeout_s)


def fresh_store(store: Store, *, rank: int, world: int, timeout_s: float) -> Store:
    """Return a store within ``store`` that only the ranks of this attempt use. All ranks call it."""
    deadline = time.monotonic() + timeout_s
    nonce = secrets.token_hex(8)
    if rank == 0:
        for other in range(1, world):
            _offer_until_accepted(store, nonce, other, deadline)
        return PrefixStore(nonce, store)
    store.set(f"hello/{rank}", nonce)

    def offered() -> str | None:
        token, _, named = _value(store, f"offer/{rank}").partition(" ")
        return token if named == nonce else None

    token = _wait_for(offered, f"Rank {rank} waits for rank 0", deadline)
    store.set(f"accepted/{rank}", token)
    return PrefixStore(token, store)


def _offer_until_accepted(store: Store, token: str, rank: int, deadline: float) -> None:
    def accepted() -> str | None:
        # Read again each time: the first value may be from a rank that has ended.
        store.set(f"offer/{rank}", f"{token} {_value(store, f'hello/{rank}')}")
        return token if _value(store, f"accepted/{rank}") == token else None

    _wait_for(accepted, f"Rank 0 waits for rank {rank}", deadline)


def _value(store: Store, key: str) -> str:
    """Return the value of a key; an empty text if there is none."""
    return store.get(key).decode() if store.check([key]) else ""


def _wait_for(look: Callable[[], str | None], what: str, deadline: float) -> str:
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise CommunicationError(
                f"All ranks must join the rendezvous within run.timeout. {what}, and the time is over. Look for an error of "
                "that rank, or increase run.timeout."
            )
        time.sleep(POLL_S)
    return found
