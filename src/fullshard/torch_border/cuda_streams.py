"""Streams of CUDA devices that the host enters and leaves in little time."""

from __future__ import annotations

from typing import Any

import torch

# A build without CUDA has none of them.
_get_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_set_device: Any = getattr(torch._C, "_cuda_setDevice", None)
_get_stream: Any = getattr(torch._C, "_cuda_getCurrentStream", None)
_set_stream: Any = getattr(torch._C, "_cuda_setStream", None)


class CUDAStream(torch.Stream):
    """A stream that is entered as `torch.Stream` is, without the objects that this makes each time.

    Every gather and every reduction enters one, so it counts: see `docs/decisions/019-calls-around-streams.md`.
    """

    def __init__(self, device: torch.device, *, priority: int) -> None:
        """Take the arguments of torch's constructor."""
        self._own = self.stream_id, self.device_index, self.device_type
        self._before: list[tuple[int, tuple[int, int, int]]] = []
        """The current device, and the current stream of the stream's device, for each time it was entered and not left."""

    def __enter__(self) -> CUDAStream:
        """Make it the current stream, and its device the current device."""
        self._before.append((_get_device(), _get_stream(self._own[1])))
        _set_stream(*self._own)
        return self

    def __exit__(self, *_: object) -> None:
        """Go back to the stream and to the device of before."""
        device, stream = self._before.pop()
        _set_stream(*stream)
        if device != self._own[1]:
            _set_device(device)
