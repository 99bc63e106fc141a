"""Traces of real streams: a wait is where compute stood still, and the wire is busy where the collective ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.transport.comm_objects import DefaultAllGather
from tests.gpu.test_streams import WIDTH, equal, make_model, train
from tests.helpers.fake import fake_world
from tests.helpers.traces import Trace, end_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("reduce_scatter_that_reduces")]

CYCLES = 50_000_000
"""Some tens of milliseconds."""


def length_of_a_pause() -> float:
    """Microseconds for which the stream is kept busy by so many cycles."""
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda._sleep(1000)
    begin.record()
    torch.cuda._sleep(CYCLES)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def a_step(model: nn.Module) -> None:
    model(torch.ones(256, WIDTH, device="cuda")).float().pow(2).mean().backward()


def record(model: nn.Module, folder: Path, steps: int = 2) -> Trace:
    """When everything has been warmed up."""
    for _ in range(3):
        a_step(model)
    with fullshard.trace(model, folder) as recording:
        for _ in range(steps):
            a_step(model)
            recording.step()
    return Trace(recording.path)


class SlowAllGather(DefaultAllGather):
    """Keeps the all-gather stream busy for a while."""

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: Any = False
    ) -> Any:
        torch.cuda._sleep(CYCLES)
        return super().__call__(output_tensor, input_tensor, group, async_op)


def test_a_slow_gather_is_waited_for_where_it_is_slow(tmp_path: Path) -> None:
    pause = length_of_a_pause()
    with fake_world(4):
        model: Any = make_model()
        model[3].set_custom_all_gather(SlowAllGather())
        trace = record(model, tmp_path)
    # A pause was measured before, perhaps while another process had a part of the GPU: so half of one is one.
    for gather in trace.of("gather"):
        assert (gather["dur"] > 0.5 * pause) == (gather["args"]["group"] == "3"), gather["name"]
    long = [wait for wait in trace.of("wait") if wait["dur"] > 0.5 * pause]
    assert [(w["args"]["group"], w["args"]["for"], w["args"]["pass"]) for w in long] == [
        ("3", "gather", "forward"),
        ("3", "gather", "backward"),
    ] * 2
    inner = [e for e in trace.of("compute") if e["args"]["group"] != "root"]
    assert all(compute["dur"] < 0.5 * pause for compute in inner), "the wait is no part of it"


class SlowLayer(nn.Module):
    """Keeps the compute stream busy in forward and in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return Slow.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch.cuda._sleep(CYCLES // 10)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        torch.cuda._sleep(CYCLES // 10)
        return gradient * 1


def test_where_compute_takes_long_nothing_is_waited_for(tmp_path: Path) -> None:
    pause = length_of_a_pause() / 10
    with fake_world(4):
        model: Any = make_model()
        for layer in list(model)[1:]:
            layer.norm = nn.Sequential(SlowLayer(), layer.norm)
        trace = record(model, tmp_path, steps=4)
    # The shortest of four steps: in one of them, another process may have had the GPU during a wait.
    waits: dict[tuple[str, str, str], float] = {}
    for wait in trace.of("wait"):
        about = wait["args"]
        if about["group"] not in ("root", "1"):
            place = about["group"], about["for"], about["pass"]
            waits[place] = min(wait["dur"], waits.get(place, wait["dur"]))
    assert waits and max(waits.values()) < 0.1 * pause
    inner = [e for e in trace.of("compute") if e["args"]["group"] != "root"]
    assert min(compute["dur"] for compute in inner) > 0.8 * pause


@pytest.mark.parametrize("options", [{}, {"hsdp": True}, {"wire": True}, {"part": 2}], ids=str)
def test_a_trace_is_complete_and_in_order(tmp_path: Path, options: dict[str, Any]) -> None:
    with fake_world(4):
        trace = record(make_model(**options), tmp_path)
    assert trace.overlaps() == []
    assert trace.about["device"] == "cuda"
    assert trace.count("gather") == trace.count("release")
    assert set(trace.count("reduce").values()) == {2}
    assert bool(trace.of("all-reduce")) is bool(options.get("hsdp"))
    gathers = trace.of("gather")
    for compute in trace.of("compute"):
        group = compute["args"]["group"]
        before = [g for g in gathers if g["args"]["group"] == group and g["ts"] < compute["ts"]]
        assert before and all(end_of(gather) <= compute["ts"] for gather in before)
    first, second = trace.of("step")
    assert end_of(first) == second["ts"]
    assert trace.memory("gathered")[-1] == trace.memory("reducing")[-1] == 0
    assert min(trace.memory("allocated")) > 0


def test_recording_changes_no_bit(tmp_path: Path) -> None:
    with fake_world(4):
        expected = train(make_model())
        model = make_model()
        with fullshard.trace(model, tmp_path):
            assert equal(train(model), expected)


def test_the_host_does_not_wait_while_it_records(tmp_path: Path) -> None:
    with fake_world(4):
        model = make_model()
        for _ in range(3):
            a_step(model)
        x = torch.ones(8, WIDTH, device="cuda")
        with fullshard.trace(model, tmp_path) as recording:
            torch.cuda.set_sync_debug_mode("error")
            try:
                model(x).float().mean().backward()
                recording.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
