"""What a rank says when the store is gone: from what it sees on its host, and from the last words of others."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from fullshard.divergence.watchdog.alone import LostStore, judge_alone
from fullshard.divergence.watchdog.answers import Absence, Answer, Wait
from fullshard.divergence.watchdog.last_words import Mailbox, Words, send
from fullshard.divergence.watchdog.peers import Peers
from fullshard.divergence.watchdog.probes import register
from fullshard.divergence.watchdog.store_client import OpenStore

WAIT = Wait(text="all-gather of layers.2", kind="fullshard", group=None, count=3, seconds=1.0)
OWN = Answer(rank=1, host="host a, process 11", line="train.py:3 in main", wait=WAIT)
GONE = LostStore(
    text="the store is gone (reset)", port=4711, is_late=False, is_given_up=False, gone_before=()
)


def dead(*ranks: int) -> dict[int, Absence]:
    return {rank: Absence(rank=rank, state="dead", host=f"process {rank}") for rank in ranks}


def raised(rank: int, text: str) -> dict[int, Absence]:
    return {rank: Absence(rank=rank, state="raised", text=text)}


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    """A mailbox of this process."""
    found = Mailbox()
    yield found
    found.close()


def headline(message: str | None) -> str:
    assert message is not None
    return message.partition("\n")[0]


def test_a_death_after_the_loss_of_the_store_is_not_taken_for_the_first() -> None:
    message = judge_alone(OWN, dead(2), GONE)
    assert headline(message) == (
        "Ranks have diverged: the store is gone (reset). It is served at port 4711 by rank 0 or by the launcher, which has "
        "ended, is stopped, or cannot be reached. Rank 2 is gone, too; without the store, nothing tells who was first."
    )
    assert message is not None
    assert "rank 2 (process 2): dead" in message
    assert "rank 1 (host a, process 11): waiting for all-gather of layers.2" in message


@pytest.mark.parametrize(
    ("absences", "store"),
    [
        (dead(2), replace(GONE, gone_before={2})),
        (dead(2), replace(GONE, is_late=True)),
    ],
    ids=["died before the store", "the store is slow"],
)
def test_a_death_is_the_reason_if_the_store_was_there_after_it(
    absences: dict[int, Absence], store: LostStore
) -> None:
    message = judge_alone(OWN, absences, store)
    assert headline(message) == "Ranks have diverged: rank 2 died, while others wait."
    assert message is not None
    assert "sees on its own host: the store is gone (reset), which rank 0" in message


def test_all_that_died_are_named_with_the_rank_that_may_serve_the_store() -> None:
    assert headline(judge_alone(OWN, dead(0, 2), GONE)) == (
        "Ranks have diverged: ranks 0, 2 died, while others wait."
    )


@pytest.mark.parametrize(
    "error", ["DivergenceError: rank 0 has ended", "RuntimeError: Connection closed by peer [::1]"]
)
def test_a_rank_that_failed_because_of_another_one_is_not_the_reason(error: str) -> None:
    message = judge_alone(OWN, {**dead(0), **raised(2, error)}, GONE)
    assert headline(message) == "Ranks have diverged: rank 0 died, while others wait."
    assert message is not None
    assert f"rank 2: raised {error}" in message


def test_nothing_is_said_before_the_store_is_given_up() -> None:
    assert judge_alone(OWN, {}, GONE) is None
    message = judge_alone(OWN, {}, replace(GONE, is_given_up=True))
    assert headline(message).startswith("Ranks have diverged: the store is gone (reset). It is")


def test_last_words_say_more_than_that_a_process_is_dead(mailbox: Mailbox) -> None:
    store = OpenStore(dist.HashStore(), "test/")
    survivor = Peers(store, register(1, mailbox.address), mailbox)
    survivor.register()
    with subprocess.Popen(["true"]) as ended:
        Peers(store, replace(register(2), pid=ended.pid, started=0)).register()
    survivor.find()
    survivor.look()
    assert survivor.gone == {2}
    assert survivor.absences({})[2].state == "dead"
    for state in ("raised", "diverged", "diverged"):
        send(mailbox.address, Words(rank=2, state=state, text=f"bad {state}"))
    survivor.look()
    found = survivor.absences({2: "layers.1"})[2]
    assert (found.state, found.text, found.last) == ("raised", "bad raised", "layers.1")
    assert survivor.verdict == "bad diverged"


def test_a_rank_tells_all_others_that_have_a_mailbox(mailbox: Mailbox) -> None:
    store = OpenStore(dist.HashStore(), "test/")
    for rank, address in ((0, mailbox.address), (1, ""), (2, "fullshard/nobody reads this")):
        Peers(store, register(rank, address)).register()
    leaving = Peers(store, register(3))
    leaving.find()
    leaving.tell("left", "")
    assert [*mailbox.read()] == [Words(rank=3, state="left", text="")]
    assert [*mailbox.read()] == []


def test_a_mailbox_reads_only_what_ranks_say(mailbox: Mailbox) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for message in (b"", b"hello", b"[]", b'{"rank": 1}'):
            stranger.sendto(message, b"\0" + mailbox.address.encode())
    send(mailbox.address, Words(rank=0, state="diverged", text="\N{GRINNING FACE}" * 50_000))
    (words,) = mailbox.read()
    assert len(words.text) == 10_000
    mailbox.close()
    assert [*mailbox.read()] == []
