"""Passes at the borders of a capture, without a GPU: streams that run everything at once, and events that know where they
were recorded. On a GPU, `tests/gpu/test_graphs.py` captures the same steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
import fullshard.layout.segments
from fullshard import MixedPrecisionPolicy, UsageError, fully_shard
from fullshard.engine import captures, options
from fullshard.mesh.backends import Backend
from fullshard.transport import streams
from fullshard.transport.streams import FSDPCommContext
from fullshard.transport.transports import Coalesced
from tests.gpu.conftest import reduce_to_itself
from tests.helpers.fake import fake_world

WIDTH = 8


class Capture:
    """The capture that is under way; 0 outside of captures."""

    number = 0
    _count = 0

    @classmethod
    @contextmanager
    def begin(cls) -> Iterator[None]:
        cls._count += 1
        cls.number = cls._count
        try:
            yield
        finally:
            cls.number = 0


class EmulatedEvent:
    """An event that may be waited for only where it was recorded: in the same capture, or outside of all."""

    def __init__(self) -> None:
        self._recorded_in = 0

    def record(self) -> None:
        self._recorded_in = Capture.number

    def wait(self) -> None:
        assert self._recorded_in == Capture.number, "it was recorded on the other side of a border"

    def query(self) -> bool:
        return True


original_init = FSDPCommContext.__init__


def init_with_streams(context: FSDPCommContext, device: torch.device) -> None:
    original_init(context, device)
    context.asynchronous = True


def new_event(context: FSDPCommContext) -> EmulatedEvent:
    event = EmulatedEvent()
    context._events.add(event)
    return event


def nothing(*_: Any) -> None:
    pass


@pytest.fixture(autouse=True)
def emulated_streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(FSDPCommContext, "__init__", init_with_streams)
    monkeypatch.setattr(FSDPCommContext, "new_event", new_event)
    monkeypatch.setattr(FSDPCommContext, "fork_and_join", nothing)
    monkeypatch.setattr(FSDPCommContext, "gathers_wait_for", nothing)
    monkeypatch.setattr(Coalesced, "reduce", reduce_to_itself)
    for module in (streams, captures, options):
        monkeypatch.setattr(module, "is_capturing", lambda: Capture.number > 0)
    with fake_world(4):
        yield


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def make_model(**settings: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Layer() for _ in range(3)))
    for layer in model[1:]:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def step(model: Any, number: int) -> list[Tensor]:
    """Two microbatches; return the loss and the gradients."""
    model.zero_grad()
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(number))
    model.set_requires_gradient_sync(False)
    model(x[:3]).pow(2).mean().backward()
    model.set_requires_gradient_sync(True)
    loss = model(x[3:]).pow(2).mean()
    loss.backward()
    return [loss.detach(), *(param.grad.to_local().clone() for param in model.parameters())]


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


FEW = 8
"""Gathers of a step. One that begins with all four groups in memory has 6, others 10 or more."""


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(
    "settings",
    [{}, {"reshard_after_forward": 2}, {"mp_policy": BF16, "fuse_gradients": True}],
    ids=["plain", "post-forward mesh", "fused"],
)
def test_neither_events_nor_gathered_parameters_cross_the_border_of_a_capture(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], kept: bool
) -> None:
    monkeypatch.setattr(fullshard.layout.segments, "IN_PLACE_FROM", 0 if kept else 1 << 40)
    expected, model = make_model(**settings), make_model(**settings)
    model.set_reshard_after_backward(not kept)
    gathers: list[int] = []
    all_gather = Coalesced.gather

    def counted(*args: Any, **kwargs: Any) -> Any:
        gathers.append(Capture.number)
        return all_gather(*args, **kwargs)

    monkeypatch.setattr(Coalesced, "gather", counted)
    for number in range(7):
        if number in (2, 3, 5):  # two captures one after the other, then one after an eager step
            if kept:
                model.unshard(async_op=True)
            gathers.clear()
            with Capture.begin():
                found = step(model, number)
                assert gathers.count(Capture.number) >= FEW
        else:
            gathers.clear()
            found = step(model, number)
            assert number not in (4, 6) or gathers.count(0) >= FEW
        for ours, theirs in zip(found, step(expected, number), strict=True):
            assert torch.equal(ours, theirs), number


@pytest.mark.parametrize("in_backward", [True, False])
def test_after_an_exception_in_a_capture_the_model_runs_as_before(in_backward: bool) -> None:
    expected, model = make_model(), make_model()
    for number in range(2):
        step(expected, number)
        step(model, number)

    def fail(*_: Any) -> None:
        raise OSError("in a capture")

    hooked = model[2].up
    handle = (
        hooked.register_full_backward_hook(fail)
        if in_backward
        else hooked.register_forward_hook(fail)
    )
    with pytest.raises(OSError, match="in a capture"), Capture.begin():
        step(model, 2)
    handle.remove()
    model.reset_iter_state()
    for ours, theirs in zip(step(model, 2), step(expected, 2), strict=True):
        assert torch.equal(ours, theirs)


def test_what_cannot_be_captured_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, x = make_model(), torch.randn(3, WIDTH)
    with pytest.raises(UsageError, match="first forward and the first backward"), Capture.begin():
        model(x)
    with torch.no_grad():
        model(x)
    with pytest.raises(UsageError, match="first forward and the first backward"), Capture.begin():
        model(x).sum().backward()
    model.reset_iter_state()
    step(model, 0)
    with (
        fullshard.trace(model, tmp_path),
        pytest.raises(UsageError, match="while a trace is recorded"),
        Capture.begin(),
    ):
        model(x)
    monkeypatch.setattr(captures, "backend_of", lambda *_: Backend(name="fake"))
    names = r"(?s)root: .*run on fake.*\n  1: .*\n  2: .*\n  3: .*docs/graphs.md"
    with pytest.raises(UsageError, match=names), Capture.begin():
        model(x)
    step(model, 1)
