"""The TCP connections of this process: those that gloo has, and whether anything comes or goes on any."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Collection, Iterator

_COUNTS = struct.Struct("QQ")
"""In `tcp_info` of Linux: bytes that the other end has confirmed, and bytes received."""
_COUNTS_AT = 120
UNKNOWN = -1


@contextlib.contextmanager
def tcp_sockets(without: Collection[int] = ()) -> Iterator[list[socket.socket]]:
    """Give copies of this process's internet sockets, except those with these file descriptors."""
    found: list[socket.socket] = []
    try:
        for name in os.listdir("/proc/self/fd"):
            number = int(name)
            with contextlib.suppress(OSError):  # closed meanwhile
                if number not in without and _is_socket(name):
                    copy = socket.socket(fileno=os.dup(number))
                    found.append(copy)
        yield [each for each in found if _is_tcp(each)]
    finally:
        for each in found:
            each.close()


def name_of(each: socket.socket) -> tuple[str, int]:
    """Return host and port of this end."""
    host, port, *_ = each.getsockname()
    return host, port


def peer_of(each: socket.socket) -> tuple[str, int] | None:
    """Return host and port of the other end; None if there is none."""
    try:
        host, port, *_ = each.getpeername()
    except OSError:
        return None
    return host, port


def traffic(store_port: int | None) -> int:
    """Return the bytes that have come and gone over all connections but the store's; `UNKNOWN` if the system counts none."""
    total = 0
    try:
        with tcp_sockets() as sockets:
            for each in sockets:
                other = peer_of(each)
                if other is not None and store_port not in (name_of(each)[1], other[1]):
                    size = _COUNTS_AT + _COUNTS.size
                    info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
                    total += sum(_COUNTS.unpack_from(info, _COUNTS_AT))
    except (OSError, AttributeError, struct.error):  # another system, or an old kernel
        return UNKNOWN
    return total


def _is_socket(name: str) -> bool:
    return os.readlink(f"/proc/self/fd/{name}").startswith("socket:")


def _is_tcp(each: socket.socket) -> bool:
    is_internet = each.family in (socket.AF_INET, socket.AF_INET6)
    return is_internet and each.type == socket.SOCK_STREAM
