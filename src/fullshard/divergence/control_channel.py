"""A channel beside the collectives: ranks of a process group agree on what they do next.

Plain sockets between the ranks of one process group, whatever its backend is. Messages are a few bytes, which the
thread that trains sends and receives by itself, so an agreement of two ranks takes some tens of microseconds.

[Note: dissemination]
In round k, a rank sends to the one 2**k places after it, and receives from the one 2**k places before it. After
log2(n) rounds, rounded up, each rank has heard from all, directly or not. What is sent must be the same if it is heard
twice: the smallest and largest number so far, or a union of what ranks have said. All ranks come to the same result.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

from torch.distributed import Store

from fullshard import torch_border
from fullshard.divergence.journal import Journal
from fullshard.divergence.verdict import SLICE_S, VERDICT
from fullshard.errors import DivergenceError

_NUMBERS = struct.Struct("<qq")
_LENGTH = struct.Struct("<q")
_HELLO = struct.Struct("<16sqq")
_POLL_S = 0.001
_PEER_HAS_CLOSED = getattr(select, "POLLRDHUP", 0)
"""Linux has it. Elsewhere it is seen that both directions are closed, after an error."""
DIAL_S = 2.0
"""Longest time of one attempt to connect."""


class ControlChannel:
    """The sockets of this rank to others."""

    def __init__(
        self, journal: Journal, store: Store, timeout: Callable[[], timedelta | None]
    ) -> None:
        """Connect to the other ranks of the journal through a store that they share; collective.

        ``timeout`` says how long a rank waits for others; it may change.

        Raises:
            DivergenceError: a rank does not come.
        """
        self.journal = journal
        self._size = len(journal.ranks)
        self.is_interrupted = False
        """Whether an exchange of messages was begun and not ended: this rank does not know what comes next."""
        self._rounds: list[tuple[socket.socket, socket.socket]] = []
        """Per round, the socket to send to and the one to receive from: [Note: dissemination]."""
        _CHANNELS.add(self)
        _observe_forks()
        self._timeout = timeout
        self._connect(store, self._timeout_s)

    def hang_up(self) -> None:
        """End the connections, also under threads that wait: ranks that wait for this one learn that it has left."""
        for connection in itertools.chain.from_iterable(self._rounds):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.close()

    def closed_by(self) -> set[int]:
        """Return the ranks that have closed their connections: their processes have ended, or have hung up.

        Another thread may use the connections meanwhile.
        """
        poll = select.poll()
        ranks = {}
        for connection in itertools.chain.from_iterable(self._rounds):
            number = connection.fileno()
            if number >= 0:  # not closed here
                ranks[number] = self._rank_at(connection)
                poll.register(number, _PEER_HAS_CLOSED)
        return {ranks[number] for number, _ in poll.poll(0)}

    def close(self) -> None:
        """Close the sockets of this process."""
        for pair in self._rounds:
            for connection in pair:
                connection.close()

    # --- agreement ----------------------------------------------------------------------------------

    def agree(self, number: int) -> bool:
        """Return whether all ranks bring the same number; all ranks get the same answer.

        Raises:
            DivergenceError: a rank has gone, or the watchdog has proven a divergence.
        """
        low = high = number
        self.is_interrupted = True
        for after, before in self._rounds:
            self._send(after, _NUMBERS.pack(low, high))
            other_low, other_high = _NUMBERS.unpack(self._receive(before, _NUMBERS.size))
            low, high = min(low, other_low), max(high, other_high)
        self.is_interrupted = False
        return low == high

    def exchange(self, text: str) -> list[str]:
        """Return the text of each rank, by its place in the group."""
        said = {self.journal.rank: text}
        self.is_interrupted = True
        for after, before in self._rounds:
            message = json.dumps(said).encode()
            # In a thread: of a large world, more is sent than the network takes before the other rank receives.
            sender = threading.Thread(
                target=_send_all, args=(after, _LENGTH.pack(len(message)) + message), daemon=True
            )
            sender.start()
            (length,) = _LENGTH.unpack(self._receive(before, _LENGTH.size))
            said |= {
                int(rank): each for rank, each in json.loads(self._receive(before, length)).items()
            }
            sender.join(self._timeout_s)
        self.is_interrupted = False
        return [said[rank] for rank in range(self._size)]

    @property
    def _timeout_s(self) -> float:
        timeout = self._timeout()
        return 1800.0 if timeout is None else timeout.total_seconds()

    # --- sockets --------------------------------------------------------------------------------------

    def _send(self, to: socket.socket, message: bytes) -> None:
        try:
            to.sendall(message)
        except OSError as error:
            raise self._lost(to) from error

    def _receive(self, sender: socket.socket, size: int) -> bytes:
        message, end = b"", None
        while len(message) < size:
            try:
                part = sender.recv(size - len(message))
            except TimeoutError:
                VERDICT.raise_if_diverged()
                if end is None:
                    end = time.monotonic() + self._timeout_s
                elif time.monotonic() > end:
                    raise self._late(sender) from None
                continue
            except OSError as error:
                raise self._lost(sender) from error
            if not part:
                raise self._lost(sender)
            message += part
        return message

    def _lost(self, peer: socket.socket) -> DivergenceError:
        """Return the error about a rank that has closed its connection."""
        return VERDICT.explain(
            f"Ranks must call the same collectives, but rank {self._rank_at(peer)} has ended, or left its process group, "
            f"while {self._place()}. See what that rank printed last."
        )

    def _late(self, peer: socket.socket) -> DivergenceError:
        """Return the error about a rank that has not come within the process group's timeout."""
        return VERDICT.explain(
            f"Ranks must call the same collectives, but nothing came from rank {self._rank_at(peer)} within the process "
            f"group's timeout of {self._timeout_s:.0f} s, while {self._place()}. See where that rank is. If it only "
            "needs longer, set a longer timeout for the process group."
        )

    def _rank_at(self, peer: socket.socket) -> int:
        """Return the rank at the other end of a connection."""
        size, rank = self._size, self.journal.rank
        places: dict[socket.socket, int] = {}
        for distance, (after, before) in zip(self._distances, self._rounds, strict=True):
            places |= {after: (rank + distance) % size, before: (rank - distance) % size}
        return self.journal.ranks[places[peer]]

    def _place(self) -> str:
        tag = self.journal.last_tag
        own = self.journal.ranks[self.journal.rank]
        return f"rank {own} was about to call: {tag.text if tag else 'the first one'}"

    @property
    def _distances(self) -> list[int]:
        return [2**k for k in range((self._size - 1).bit_length())]

    def _connect(self, store: Store, timeout_s: float) -> None:
        rank, ranks = self.journal.rank, self.journal.ranks
        end = time.monotonic() + timeout_s

        def value_of(key: str, other: int) -> str:
            _wait_until(
                lambda: store.check([key]),
                end,
                f"rank {ranks[other]} has not reached the first collective of process group {self.journal.name!r}",
            )
            return store.get(key).decode()

        with _listener() as listener:
            if rank == 0:
                store.set("fullshard/token", secrets.token_hex(8))
            port = listener.getsockname()[1]
            store.set(f"fullshard/address/{rank}", json.dumps([_own_hosts(store), port]))
            token = value_of("fullshard/token", 0).encode()
            outgoing = []
            for distance in self._distances:
                place = (rank + distance) % self._size
                hosts, port = json.loads(value_of(f"fullshard/address/{place}", place))
                hello = _HELLO.pack(token, place, distance)
                outgoing.append(_dial(hosts, port, hello, end))
            incoming = _accept(listener, token, rank, self._distances, end)
        for after, before in zip(outgoing, incoming, strict=True):
            for each in (after, before):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                each.settimeout(SLICE_S)
            self._rounds.append((after, before))


def _send_all(to: socket.socket, message: bytes) -> None:
    """Send a message; if the other rank has gone, the call that receives from it sees that."""
    view = memoryview(message)
    while view:
        try:
            view = view[to.send(view) :]
        except TimeoutError:
            continue
        except OSError:
            return


_CHANNELS: weakref.WeakSet[ControlChannel] = weakref.WeakSet()


def closed_connections(journal: Journal) -> set[int]:
    """Return the ranks that have closed a connection of this journal's process group to this process."""
    channels = [channel for channel in list(_CHANNELS) if channel.journal is journal]
    return {rank for channel in channels for rank in channel.closed_by()}


def _close_in_child() -> None:
    """Close the channels that a forked process (a worker of a data loader) has inherited.

    Otherwise other ranks would not see that this one has ended while its child is alive.
    """
    for channel in list(_CHANNELS):
        channel.close()


@functools.cache
def _observe_forks() -> None:
    os.register_at_fork(after_in_child=_close_in_child)


# --- connecting -------------------------------------------------------------------------------------


def _listener() -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    listener = socket.create_server(("", 0), family=family, backlog=64, dualstack_ipv6=both)
    listener.settimeout(SLICE_S)
    return listener


def _own_hosts(store: Store) -> list[str]:
    """Return addresses under which other ranks may reach this one, the most likely first."""
    found = []
    serving = torch_border.store_host(store)
    for name in (serving, socket.gethostname()):
        with suppress(OSError):
            for family, _, _, _, address in socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM):
                if name != serving:
                    found.append(str(address[0]))
                    continue
                # The address of the interface that leads to the store's host. Nothing is sent.
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(address)
                    found.append(probe.getsockname()[0])
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def _dial(hosts: Sequence[str], port: int, hello: bytes, end: float) -> socket.socket:
    """Connect to the rank that listens at one of the addresses and knows the token."""
    found: list[socket.socket] = []

    def dialled() -> bool:
        for host in hosts:
            with suppress(OSError):
                connection = socket.create_connection((host, port), timeout=DIAL_S)
                with suppress(OSError):
                    connection.sendall(hello)
                    found.append(connection)
                    return True
        return False

    _wait_until(dialled, end, f"no rank could be reached at port {port} of {', '.join(hosts)}")
    return found[0]


def _accept(
    listener: socket.socket, token: bytes, rank: int, distances: Sequence[int], end: float
) -> list[socket.socket]:
    """Return the connections of the ranks before this one, by their distances."""
    found: dict[int, socket.socket] = {}

    def accepted() -> bool:
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            connection.settimeout(DIAL_S)
            with suppress(OSError, struct.error):  # it is not a rank of ours
                hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
                sent, place, distance = _HELLO.unpack(hello)
                if (sent, place) == (token, rank):
                    found[distance] = connection
        return len(found) == len(distances)

    _wait_until(accepted, end, "a rank has not connected to this one")
    return [found[distance] for distance in distances]


def _wait_until(done: Callable[[], bool], end: float, otherwise: str) -> None:
    pause = _POLL_S
    while not done():
        VERDICT.raise_if_diverged()
        if time.monotonic() > end:
            raise VERDICT.explain(
                f"Ranks must call the same collectives, but within the process group's timeout {otherwise}. See where that "
                "rank is, or what it printed last."
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
