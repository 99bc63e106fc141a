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
import os
import socket
import threading

from fullshard import torch_border
from fullshard.errors import DivergenceError


def abort_collectives(store_port: int | None) -> None:
    """Let all collectives of this process fail that have not ended; the process groups cannot be used any more."""
    # Aborting may take long by itself, if a kernel does not end.
    for abort in torch_border.aborts():
        threading.Thread(target=abort, name="fullshard-watchdog-abort", daemon=True).start()
    if torch_border.uses_gloo():
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
    sockets = _sockets()
    try:
        ours = {_name(each)[1] for each in sockets if _is_listening(each)} - {store_port}
        for each in sockets:
            own, other = _name(each), _peer(each)
            if other is None or store_port in (own[1], other[1]):
                continue
            if own[1] in ours or _is_private(other[0]):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
    finally:
        for each in sockets:
            each.close()


def _sockets() -> list[socket.socket]:
    """Return copies of this process's internet sockets that are not objects of Python's."""
    # `isinstance` would ask objects for their class, and some of torch's warn when they are asked for anything.
    of_python = {
        each.fileno() for each in gc.get_objects() if issubclass(type(each), socket.socket)
    }
    found = []
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        with contextlib.suppress(OSError):
            if number in of_python or not os.readlink(f"/proc/self/fd/{name}").startswith(
                "socket:"
            ):
                continue
            copy = socket.socket(fileno=os.dup(number))
            is_internet = copy.family in (socket.AF_INET, socket.AF_INET6)
            if is_internet and copy.type == socket.SOCK_STREAM:
                found.append(copy)
            else:
                copy.close()
    return found


def _is_listening(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _name(each: socket.socket) -> tuple[str, int]:
    host, port, *_ = each.getsockname()
    return host, port


def _peer(each: socket.socket) -> tuple[str, int] | None:
    try:
        host, port, *_ = each.getpeername()
    except OSError:  # not connected
        return None
    return host, port


def _is_private(host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_private
