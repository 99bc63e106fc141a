"""The processes of this host: which are dead, which are stopped, and which can be seen at all.

Process numbers mean something only within one namespace of one running kernel. Containers on one machine usually have
namespaces of their own, and cannot see each other's processes. So ranks compare a key of both, not the host's name,
before one looks for the other's process.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from fullshard.divergence.watchdog.answers import ALIVE, DEAD, STOPPED, Registration

_PROC = Path("/proc")
_STOPPED = "Tt"
"""States of a process stopped by a signal, or by a debugger."""
_DEAD = "ZXx"


def register(rank: int, mailbox: str = "") -> Registration:
    """Return the registration of this process as a rank, which receives last words at ``mailbox``."""
    pid = os.getpid()
    return Registration(
        rank=rank,
        host=socket.gethostname(),
        host_key=host_key(),
        pid=pid,
        started=_state_and_start(pid)[1],
        mailbox=mailbox,
    )


def host_key() -> str:
    """Return a text that is equal for two processes if, and only if, they can see each other."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    try:
        namespace = os.readlink(_PROC / "self/ns/pid")
    except OSError:
        namespace = ""
    return f"{boot}/{namespace}"


def state_of(process: Registration) -> str:
    """Return the state of a process on this host: alive, dead or stopped."""
    state, started = _state_and_start(process.pid)
    if state in _DEAD or (started and process.started and started != process.started):
        return DEAD
    return STOPPED if state in _STOPPED else ALIVE


def _state_and_start(pid: int) -> tuple[str, int]:
    """Return the kernel's letter for a process's state, and when it started; "X" if there is no such process."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ("X" if (_PROC / "self").exists() else _state_by_signal(pid)), 0
    except OSError:
        return "R", 0  # it is there, and we may not look
    # The command in parentheses may contain spaces and parentheses itself; the state follows the last one.
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _state_by_signal(pid: int) -> str:
    """The letter for a process's state, on a system without /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "X"
    except PermissionError:
        pass
    return "R"
