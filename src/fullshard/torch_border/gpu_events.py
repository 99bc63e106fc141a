"""Torch's reports of a GPU's streams, events and memory, as its own sanitizer hears them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.cuda import _gpu_trace

_KINDS = {
    "marked": "EventRecordCallbacks",
    "waited": "EventWaitCallbacks",
    "taken": "MemoryAllocationCallbacks",
    "given_back": "MemoryDeallocationCallbacks",
    "host_waits_for_event": "EventSynchronizationCallbacks",
    "host_waits_for_stream": "StreamSynchronizationCallbacks",
    "host_waits": "DeviceSynchronizationCallbacks",
}
"""The names of functions that are called, and where torch keeps them."""


@contextmanager
def heard_gpu_events(calls: Mapping[str, Callable[..., None]]) -> Iterator[None]:
    """Let functions be called within the block for what happens on GPUs.

    ``marked`` and ``waited`` get event and stream, ``taken`` and ``given_back`` an address, ``host_waits_for_event`` an event,
    ``host_waits_for_stream`` a stream, ``host_waits`` nothing. An exception in one of them is logged by torch.
    """
    lists = [
        (getattr(_gpu_trace, _KINDS[kind]).callback_list, call) for kind, call in calls.items()
    ]
    for heard, call in lists:
        heard.append(call)
    activate = getattr(torch._C, "_activate_gpu_trace", None)
    if activate is not None and torch.cuda.is_available():
        activate()
    try:
        yield
    finally:
        for heard, call in lists:
            heard.remove(call)
