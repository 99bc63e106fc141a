"""Collectives of optimizers on a stream of their own: they overlap with arithmetic, and nothing is read before it is there.

One GPU has no second rank to talk to. In the place of the collectives are copies on a side stream, after a long sleep. What an
optimizer computes then must be what it computes with copies on its own stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.distributed.device_mesh import init_device_mesh

from fullshard import UsageError
from fullshard.optim import AdamW8bit, Muon, ShardedOptimizer, param_cuts
from fullshard.optim.replica_messages import ReplicaMessage
from fullshard.transport import collectives
from fullshard.transport.streams import is_capturing
from fullshard.transport.tags import tag
from tests.gpu.conftest import exchange
from tests.gpu.graph_cases import (
    CASES,
    Case,
    assert_replays_equal,
    clear,
    graphed_of,
    inputs,
    optimizer_step,
    results,
)
from tests.gpu.lone_rank import lone_rank
from tests.gpu.test_streams import equal, make_model
from tests.helpers.fake import fake_world

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("reduce_scatter_that_reduces")]

EXCHANGE = collectives.exchange
STEPS = 3
SLEEP = 50_000_000
"""Cycles: some 25 ms, in which the host can issue what may run meanwhile."""


class Sent:
    """A collective on its way. It holds its memory, as NCCL's work does."""

    def __init__(self, done: torch.cuda.Event, memory: Any) -> None:
        self._done, self._memory = done, memory

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)
        self._memory = None


class SideStream:
    """Stands in for asynchronous collectives; ``sleep`` 0 means on the current stream, in order."""

    def __init__(self, sleep: int) -> None:
        self._sleep = sleep
        self._stream = torch.cuda.Stream()
        self._all_gather = collectives.all_gather
        self.issued: list[torch.cuda.Event] = []
        self.ended: list[torch.cuda.Event] = []

    def all_gather(
        self, outputs: Any, inputs: Any, group: Any, tag: Any, *, async_op: bool, **options: Any
    ) -> Any:
        """Every rank sends what this one does; the engine's gathers are left alone."""
        if not async_op:
            return self._all_gather(outputs, inputs, group, tag, async_op=False, **options)

        def copy() -> None:
            for output, each in zip(outputs, inputs, strict=True):
                output.view(-1, each.numel()).copy_(each.expand(output.numel() // each.numel(), -1))

        return self._run(copy, (outputs, inputs))

    def exchange(self, output: Tensor, sizes: Any, tensor: Tensor, group: Any, tag: Any) -> Any:
        return self._run(lambda: exchange(output, sizes, tensor, group, tag), (output, tensor))

    def _run(self, copy: Callable[[], None], memory: Any) -> Sent | None:
        if not self._sleep:
            copy()
            return None
        timed = not is_capturing()
        issued, ended = (torch.cuda.Event(enable_timing=timed) for _ in range(2))
        issued.record()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(issued)
            torch.cuda._sleep(self._sleep)
            copy()
            ended.record()
        self.issued.append(issued)
        self.ended.append(ended)
        return Sent(ended, memory)

    def overlaps(self, later: int, earlier: int) -> bool:
        """Whether a collective was issued, behind all arithmetic before it, while an earlier one was on its way."""
        return self.issued[later].elapsed_time(self.ended[earlier]) > 0


@contextmanager
def side_stream(sleep: int) -> Iterator[SideStream]:
    side = SideStream(sleep)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_gather", side.all_gather)
        patch.setattr(collectives, "exchange", side.exchange)
        yield side


def over_replicas(params: Any, **options: Any) -> optim.Optimizer:
    return ShardedOptimizer(
        optim.AdamW, params, shard_over_replicas=True, bucket_numel=1 << 20, **options
    )


def replicas_case() -> Case:
    return optimizer_step(make_model(hsdp=True), over_replicas, capturable=True, fused=True)


def eight_bit_case(hsdp: bool = False) -> Case:
    make = partial(AdamW8bit, compile=False, shard_over_replicas=hsdp, bucket_numel=1 << 20)
    return optimizer_step(make_model(hsdp=hsdp), make)


def eight_bit_replicas_case() -> Case:
    return eight_bit_case(hsdp=True)


def trained(make: Callable[[], Case]) -> list[Tensor]:
    case = make()
    found = []
    for x in inputs(STEPS):
        clear(case)
        found += results(case, case.step(x))
    return found


@pytest.mark.parametrize("make", [replicas_case, eight_bit_replicas_case])
def test_gathers_over_replicas_overlap_with_the_next_update(make: Callable[[], Case]) -> None:
    with fake_world(4):
        with side_stream(0):
            expected = trained(make)
        with side_stream(SLEEP) as side:
            assert equal(trained(make), expected)
        count = len(side.issued) // STEPS
        assert count > 3, "a step has several messages"
        for number in range((STEPS - 1) * count + 1, STEPS * count):
            assert side.overlaps(number, number - 1), number


def test_exchanges_of_muon_overlap_with_newton_schulz() -> None:
    with fake_world(4):
        with side_stream(0):
            expected = trained(CASES["muon"])
        with side_stream(SLEEP) as side:
            assert equal(trained(CASES["muon"]), expected)
        count = len(side.issued) // STEPS
        assert count >= 6, "a step has several buckets"
        first = (STEPS - 1) * count
        # Gather 0, then for each bucket the gather of the next one, and the scatter of its updates.
        for gather in range(1, count - 1, 2):
            assert side.overlaps(first + gather + 1, first + gather), gather


@pytest.mark.parametrize("make", [CASES["muon"], replicas_case], ids=["muon", "replicas"])
def test_collectives_on_their_own_stream_are_captured(make: Callable[[], Case]) -> None:
    with fake_world(4), side_stream(SLEEP // 50):
        assert_replays_equal(make)
        assert_graphed(make)


def test_a_message_to_replicas_is_captured_with_nccl() -> None:
    with lone_rank():
        own = torch.zeros(1000, device="cuda")
        message = ReplicaMessage([[own]], dist.group.WORLD, 0)
        message.start(tag("a test"))  # connects the ranks
        message.land()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            message.start(tag("a test"))
            assert message._flight is not None
            received = message._flight[1]
            message.land()
        own.fill_(3)
        graph.replay()
        assert torch.equal(received, own)


def test_muon_is_captured_with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(param_cuts, "_group_over", lambda _: dist.group.WORLD)
    monkeypatch.setattr("tests.gpu.test_streams.init_device_mesh", a_mesh_of_one)
    monkeypatch.setattr(collectives, "exchange", EXCHANGE)
    with lone_rank():
        assert_replays_equal(CASES["muon"])
        assert_graphed(CASES["muon"])


def a_mesh_of_one(*_: Any, **__: Any) -> Any:
    return init_device_mesh("cuda", (1,))


def assert_graphed(make: Callable[[], Case]) -> None:
    eager, case = make(), make()
    step = graphed_of(case)
    for x in inputs(8):
        clear(eager)
        assert equal(results(case, step(x)), results(eager, eager.step(x)))
    assert step.num_graphs == 1
    assert step.eager_reason is None


def test_a_first_step_of_muon_and_one_that_counts_on_the_host_are_not_captured() -> None:
    with fake_world(4):
        model: Any = make_model()
        model(inputs(1)[0]).float().sum().backward()
        for options, match in (({"capturable": True}, "first step"), ({}, "capturable=True")):
            optimizer = Muon(model, lr=0.01, **options)
            with pytest.raises(UsageError, match=match):
                captured(optimizer)
            optimizer.step()
        eight = AdamW8bit(model.parameters(), compile=False)
        eight.step()
        with pytest.raises(UsageError, match="AdamW8bit counts on the host"):
            captured(eight)
        eight.step()


def captured(optimizer: optim.Optimizer) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


def test_a_graphed_step_of_adamw8bit_runs_eagerly_and_says_why() -> None:
    with fake_world(4):
        eager, case = (eight_bit_case() for _ in range(2))
        step = graphed_of(case, warmup=1)
        for x in inputs(3):
            clear(eager)
            assert equal(results(case, step(x)), results(eager, eager.step(x)))
        assert step.eager_reason is not None
        assert "AdamW8bit counts its steps on the host" in step.eager_reason
