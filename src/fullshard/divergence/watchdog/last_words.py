"""A rank's words to the other ranks on its host before it ends, without the store.

The store ends with the process that serves it, and that may be a rank. Then ranks judge alone and end one after the
other. One that looks late finds several processes dead, and nothing tells it which one died first and which ones only
followed. So a rank that ends sends its last words to the others on its host: its verdict, its exception, or that it is
done. They are datagrams between processes. The kernel keeps them in the receiver's queue, whether the sender has ended
or the receiver is stopped. The sender waits for no answer.

The invariant: words are sent before the process ends. So a rank that first looks at a process, and then reads its
words, has the words of every process that it found dead.

The sockets have names in Linux's abstract namespace, which need no file. Where there is none (another system, or
containers that share processes but no network), no rank hears, and ranks say what they see.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass

DIVERGED = "diverged"

_MAX_TEXT = 10_000
"""Characters of a text; longer ones are cut."""
_MAX_BYTES = 1 << 17
"""Largest size of a message. A character takes twelve bytes at most."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the sender, as the kernel reports them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """The last words of a rank."""

    rank: int
    state: str
    """ "diverged": it has a verdict; "raised"; "left"."""
    text: str
    """The verdict's message, or the exception and its place."""


class Mailbox:
    """The socket at which the watchdog of this process receives last words."""

    def __init__(self) -> None:
        self.address = ""
        """Its address for the others on this host; empty if there can be none."""
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError, AttributeError):
            receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            self._socket = receiver
            receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            address = f"fullshard/{secrets.token_hex(16)}"
            receiver.bind(_name(address))
            self.address = address

    def read(self) -> Iterator[Words]:
        """Return the words that have come since, in the order in which they were sent."""
        while self._socket is not None:
            try:
                message, ancillary, _, _ = self._socket.recvmsg(
                    _MAX_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except OSError:  # nothing more
                return
            # Any process of the host may send to this name. The kernel says whose process it was.
            users = [_CREDENTIALS.unpack(data[: _CREDENTIALS.size])[1] for *_, data in ancillary]
            if users == [os.getuid()]:
                with contextlib.suppress(ValueError, TypeError):
                    yield Words(**json.loads(message))

    def close(self) -> None:
        """Receive nothing more."""
        if self._socket is not None:
            self._socket.close()


def send(address: str, words: Words) -> None:
    """Send last words to a mailbox; nothing happens if no watchdog reads it."""
    message = json.dumps(asdict(words) | {"text": words.text[:_MAX_TEXT]}).encode()
    with contextlib.suppress(OSError, AttributeError):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            sender.sendto(message, _name(address))


def _name(address: str) -> bytes:
    return b"\0" + address.encode()
