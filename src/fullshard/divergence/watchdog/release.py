"""Bringing back a thread that is blocked in a collective which will never end.

NCCL      has an abort: its kernels end, and waits for them return.
gloo      has none that wakes a waiter. A connection that closes does: all operations on it fail. So this rank shuts its own
          connections to other ranks down; gloo's own thread sees that at once.
the rest  (a host that waits for a kernel which never ends) cannot be brought back. The process has printed its report.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import ipaddress
import socket

from fullshard.divergence.watchdog.connections import name_of, peer_of, tcp_sockets
from fullshard.errors import DivergenceError
from fullshard.mesh.backends import abort_all, backends_in_use


def abort_collectives(store_port: int | None) -> None:
    """Let all collectives of this process fail that have not ended; the process groups cannot be used any more."""
    abort_all()
    if any(not each.has_aborts for each in backends_in_use()):
        _shut_connections_down(store_port)


def raise_in(thread: int, message: str) -> None:
    """Raise `DivergenceError` in a thread, when it next runs Python."""

    def init(self: DivergenceError) -> None:
        super(DivergenceError, self).__init__(message)

    def reduce(self: DivergenceError) -> tuple[type[DivergenceError], tuple[str]]:
        return DivergenceError, (message,)

    # Python takes a class here, not an exception, and makes the exception without arguments.
    error = type("DivergenceError", (DivergenceError,), {"__init__": init, "__reduce__": reduce})
    error.__module__ = DivergenceError.__module__
    _PENDING.append(error)  # Python does not keep it alive until it is raised
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


_PENDING: list[type[DivergenceError]] = []


# --- connections ------------------------------------------------------------------------------------


def _shut_connections_down(store_port: int | None) -> None:
    """Shut the connections of gloo down.

    They are known by what they are not: sockets of Python's, connections to the store, and connections to the
    internet.
    """
    # `isinstance` would ask objects for their class, and some of torch's warn when they are asked for anything.
    of_python = {
        each.fileno() for each in gc.get_objects() if issubclass(type(each), socket.socket)
    }
    with tcp_sockets(without=of_python) as sockets:
        ours = {name_of(each)[1] for each in sockets if _is_listening(each)} - {store_port}
        for each in sockets:
            own, other = name_of(each), peer_of(each)
            if other is None or store_port in (own[1], other[1]):
                continue
            if own[1] in ours or _is_private(other[0]):
                _shut_down(each)


def leave_store(store_port: int | None) -> None:
    """End this process's connections to the store, for a thread that waits for a key. A store that is served here goes on."""
    with tcp_sockets() as sockets:
        for each in sockets:
            other = peer_of(each)
            if store_port is not None and other is not None and other[1] == store_port:
                _shut_down(each)


def _shut_down(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)


def _is_listening(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_private(host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_private
