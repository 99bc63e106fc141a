"""Streams that are entered in little time: what is current within, and afterwards."""

from __future__ import annotations

import pytest
import torch

from fullshard.torch_border import cuda_streams, device_for
from fullshard.torch_border.cuda_streams import CUDAStream


class Process:
    """The current device, and the current stream of each."""

    def __init__(self, patch: pytest.MonkeyPatch, device: int) -> None:
        self.device = device
        self.streams = {index: (7 + index, index, 1) for index in (-1, 0, 1)}
        patch.setattr(cuda_streams, "_get_device", lambda: self.device)
        patch.setattr(cuda_streams, "_set_device", self.set_device)
        patch.setattr(cuda_streams, "_get_stream", lambda index: self.streams[index])
        patch.setattr(cuda_streams, "_set_stream", self.set_stream)

    def set_device(self, device: int) -> None:
        self.device = device

    def set_stream(self, stream: int, device: int, kind: int) -> None:
        self.streams[device], self.device = (stream, device, kind), device

    def state(self) -> tuple[int, dict[int, tuple[int, int, int]]]:
        return self.device, dict(self.streams)


@pytest.mark.parametrize("current", [-1, 0, 1])
def test_device_and_stream_are_those_of_before_again(
    monkeypatch: pytest.MonkeyPatch, current: int
) -> None:
    process = Process(monkeypatch, current)
    stream = CUDAStream(torch.device("cpu"), priority=0)  # whose index is -1
    own = stream.stream_id, stream.device_index, stream.device_type
    before = process.state()
    for _ in range(2):
        with stream:
            assert process.device == -1 and process.streams[-1] == own
        assert process.state() == before
    with pytest.raises(ValueError, match="on purpose"), stream:
        raise ValueError("on purpose")
    assert process.state() == before
    with stream:
        process.set_stream(9, -1, 0)  # a user's own
        within = process.state()
        with stream:
            assert process.streams[-1] == own
        assert process.state() == within
    assert process.state() == before


@pytest.mark.gpu
def test_a_stream_is_current_within_its_block() -> None:
    device = torch.device("cuda", 0)
    before, stream = torch.cuda.current_stream(), device_for(device).new_stream(priority=-1)
    assert stream.stream_id != before.stream_id
    with stream:
        assert torch.cuda.current_stream().stream_id == stream.stream_id
        assert torch.accelerator.current_stream() == stream
        other = device_for(device).new_stream(priority=0)
        with other:
            assert torch.cuda.current_stream().stream_id == other.stream_id
        assert torch.cuda.current_stream().stream_id == stream.stream_id
    assert torch.cuda.current_stream() == before
    torch.accelerator.current_stream().wait_stream(stream)
    stream.wait_stream(torch.accelerator.current_stream())
    assert stream.query() in (True, False)
