"""Manners of backends: all that fullshard must know of one that carries a process group's collectives.

The rest of the library asks for a property, never for a name. A backend that is not known here is taken to be an
ordinary one: its ranks are processes, and the host waits for its works.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fullshard import torch_border


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Backend:
    """The manners of a backend."""

    name: str
    ranks: Literal["processes", "threads", "imagined"] = "processes"
    """The kind of its ranks: processes; threads of one process; or, but for one, no ranks at all, so none can be asked."""
    is_on_stream: bool = False
    """Whether it issues a collective to the current stream, if that is not asynchronous. The host waits for no work then."""
    has_meetings: bool = False
    """Whether hosts meet before each of its collectives. They have to where a wrong collective ends the process, and they
    can where the host waits for its works anyway."""
    has_sliced_waits: bool = False
    """Whether a wait for a work may end without the work, and be repeated."""
    has_coalesced_gathers: bool = True
    """Whether several gathers may go in one call: [Note: names of gloo's work]."""
    exchanges_device_memory: bool = True
    """Whether it has an all-to-all of tensors that are not in host memory."""
    has_aborts: bool = False
    """Whether its collectives are ended by its `abort`. Those of others are, by shutting connections down."""
    has_keepalives: bool = False
    """Whether its connections also carry what no collective sends, so that bytes which come or go prove nothing."""
    hangs_alone: bool = False
    """Whether a collective of one rank may fail to end: a kernel on a device."""


NOTHING = Backend(name="nothing")
"""Stand-in for a backend, for a device on which a process group has none."""

_KNOWN: dict[str, Backend] = {}


def know(backend: Backend) -> None:
    """Let a backend have these manners in this process."""
    _KNOWN[backend.name] = backend


for _each in (
    Backend(
        name="gloo",
        has_meetings=True,
        has_sliced_waits=True,
        has_coalesced_gathers=False,
        exchanges_device_memory=False,
    ),
    Backend(name="nccl", is_on_stream=True, has_aborts=True, has_keepalives=True, hangs_alone=True),
    Backend(name="fake", ranks="imagined", is_on_stream=True),
    Backend(name="threaded", ranks="threads"),
):
    know(_each)


def backend_named(name: str) -> Backend:
    """Return the manners of a backend by the name that torch knows it by."""
    return _KNOWN.get(name) or _KNOWN.setdefault(name, Backend(name=name))


_BACKENDS: weakref.WeakKeyDictionary[ProcessGroup, dict[str, Backend]] = weakref.WeakKeyDictionary()


def backends_of(group: ProcessGroup) -> dict[str, Backend]:
    """Return the backends of a process group by type of device."""
    found = _BACKENDS.get(group)
    if found is None:
        pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
        found = _BACKENDS[group] = {kind: backend_named(name) for kind, _, name in pairs}
    return found


def backends_in_use() -> list[Backend]:
    """Return the backends of all process groups that have not been destroyed."""
    found = (backends_of(group).values() for group in torch_border.all_groups())
    return list(dict.fromkeys(itertools.chain.from_iterable(found)))


def backend_of(group: ProcessGroup, device: torch.device) -> Backend:
    """Return the backend that carries a group's collectives on a device."""
    return backends_of(group).get(device.type, NOTHING)


def abort_all() -> None:
    """End all collectives of this process whose backends have an abort; their process groups cannot be used any more.

    At once after a backend's error: otherwise its own threads may end the process before it can say why.
    """
    for group in torch_border.all_groups():
        for kind, backend in backends_of(group).items():
            if backend.has_aborts:
                with contextlib.suppress(RuntimeError):  # never used
                    abort = torch_border.abort_of(group, torch.device(kind))
                    # It may take long, if a kernel does not end.
                    threading.Thread(target=abort, name="fullshard-abort", daemon=True).start()


def has_peers(group: ProcessGroup) -> bool:
    """Return whether a process group has other ranks, and they exist."""
    return group.size() > 1 and not has_imagined_ranks(group)


def has_imagined_ranks(group: ProcessGroup) -> bool:
    """Return whether the ranks of a process group do not exist, but for one."""
    return any(each.ranks == "imagined" for each in backends_of(group).values())
