"""The step and the transports tell a monitor, and go on without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from fullshard import fully_shard
from fullshard.divergence import monitor as divergence
from fullshard.mesh.backends import Backend
from fullshard.transport import monitor
from fullshard.transport.monitor import POSITION, GroupMonitor, ModelMonitor, Monitor
from fullshard.transport.tags import Tag
from tests.helpers.fake import fake_world


class Noted(Monitor, GroupMonitor, ModelMonitor):
    """Notes what it is told, and where the step was."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def of_group(self, group: ProcessGroup, backend: Backend) -> GroupMonitor:
        return self

    def of_model(self) -> ModelMonitor:
        return self

    def before(
        self, tag: Tag, inputs: Sequence[Tensor] = (), text: str | None = None
    ) -> Sequence[str] | None:
        self.told.append(f"{tag.text} in {POSITION.text()}")
        return None

    def agree(self, root: Any, states: Sequence[Any], occasion: str = "forward") -> None:
        self.told.append(f"agree on {len(states)} states: {occasion}")

    def runs_without_gradients(self, model: nn.Module) -> None:
        self.told.append(f"{type(model).__name__} without gradients")

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        self.told.append(f"{type(optimizer).__name__} begins")

    def optimizer_ended(self, optimizer: Optimizer) -> None:
        self.told.append(f"{type(optimizer).__name__} ended")

    def exception_left(self, error: BaseException) -> None:
        self.told.append(f"{error!r} in {POSITION.text()}")


@pytest.fixture
def noted() -> Iterator[Noted]:
    before, told = monitor.monitor(), Noted()
    monitor.install(told)
    try:
        yield told
    finally:
        monitor.install(before)


def sharded() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    return fully_shard(model)


def train(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return [param.to_local() for param in model.parameters()]  # type: ignore[attr-defined]


def test_a_monitor_is_told_of_the_steps_parts_in_their_order(noted: Noted) -> None:
    with fake_world(2):
        model = sharded()
        assert noted.told == []
        train(model)
        assert noted.told == [
            "agree on 2 states: forward",
            "all-gather of root in forward of root",
            "all-gather of 0 in forward of 0",
            "all-gather of 0 in backward of root",
            "reduce-scatter of 0 in backward of 0",
            "reduce-scatter of root in backward of 0",
            "SGD begins",
            "SGD ended",
        ]
        noted.told.clear()
        with torch.no_grad():
            model(torch.ones(2, 4))
        model[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 4))
    assert "FSDPSequential without gradients" in noted.told
    assert noted.told[-1] == "ZeroDivisionError('division by zero') in forward of 0"


def test_nothing_is_different_without_a_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(2):
        expected = train(sharded())
        monkeypatch.setattr(monitor, "_installed", monitor.IDLE)
        monkeypatch.setattr(divergence, "install", lambda **_: None)
        found = train(sharded())
        assert monitor.monitor() is monitor.IDLE
    assert all(map(torch.equal, expected, found))
