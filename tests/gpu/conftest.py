"""What tests on a GPU share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullshard.mesh.axes import DataParallelAxes
from fullshard.transport import collectives
from fullshard.transport.transports import Coalesced, Exchanged


def reduce_to_itself(
    transport: Any, outputs: Any, inputs: Any, op: Any, tag: Any, **options: Any
) -> None:
    """A stand-in for the fake group's, which writes nothing in torch 2.11: every input element counts."""
    for output, source in zip(outputs, inputs, strict=True):
        torch.sum(source.view(-1, output.numel()), 0, out=output.view(-1))


def exchange_with_itself(
    transport: Any, outputs: Any, inputs: Any, op: Any, tag: Any, **options: Any
) -> None:
    """The same for exchanges: what this rank sends is what it receives."""
    for output, source in zip(outputs, inputs, strict=True):
        output.copy_(source)


def exchange(output: Any, sizes: Any, tensor: Any, group: Any, tag: Any) -> None:
    """The same for exchanges of parts of several sizes: what is sent, again and again, as often as it fits."""
    if output.numel():
        index = torch.arange(output.numel(), device=output.device) % max(tensor.numel(), 1)
        output.copy_(tensor[index] if tensor.numel() else torch.zeros_like(output))


def pytest_exception_interact(
    node: pytest.Item | pytest.Collector, call: pytest.CallInfo[Any]
) -> None:
    """Say at once which test has failed, and why: a run on a lent GPU may be cut off before its summary."""
    reporter: Any = node.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None and call.excinfo is not None:
        reporter.write_line(f"\nFAILED {node.nodeid} - {call.excinfo.exconly(tryshort=True)}")


TO_ITSELF = property(lambda axes: axes.shard_process_group)
"""For `DataParallelAxes.shard_peers`: a rank alone communicates with itself, so that one GPU has NCCL to test."""


@pytest.fixture
def communicates_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataParallelAxes, "shard_peers", TO_ITSELF)


@pytest.fixture
def reduce_scatter_that_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coalesced, "reduce", reduce_to_itself)
    monkeypatch.setattr(Exchanged, "reduce", exchange_with_itself)
    monkeypatch.setattr(collectives, "exchange", exchange)
