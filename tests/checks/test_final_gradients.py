"""An observer is told when a group's gradients are final, and what to wait for, to read them beside the rest of backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.stream_settings import META, decoder, sharded, step
from fullshard import CPUOffloadPolicy, torch_border
from fullshard.checks.stream_check import StreamCheck
from fullshard.engine.state import state_of
from fullshard.transport.observer import StepObserver


class Reader(StepObserver):
    """Reads gradients on a stream of its own, as soon as they are final."""

    def __init__(self, *, is_ordered: bool) -> None:
        self.stream = torch_border.device_for(META).new_stream(priority=0)
        self.is_ordered = is_ordered
        self.read: list[Any] = []

    def gradients_final(self, group: Any, event: Any) -> None:
        with self.stream:
            if self.is_ordered:
                event.wait()
            for sharded_param in group.sharded_params:
                if sharded_param.param.grad is not None:
                    self.read.append(sharded_param.param.grad.to_local().clone())


def races(settings: dict[str, Any], *, is_ordered: bool) -> bool:
    """Train two steps with a reader beside the second, and return whether anything is read too early."""
    hooked = settings.pop("hooked", False)
    with StreamCheck(8, raises=False) as check:
        model = sharded(decoder(), **settings)
        for module in (*model.blocks, model) if hooked else ():
            module.set_all_reduce_hook(lambda reduced: reduced.mul_(2))
        step(model)
        context: Any = state_of(model).step.context  # type: ignore[union-attr]
        reader = Reader(is_ordered=is_ordered)
        context.observe(reader)
        step(model)
        context.stop_observing(reader)
        torch_border.current_stream(META).wait_stream(reader.stream)
        assert len(reader.read) == len(list(model.parameters()))
        model.zero_grad()
    return bool(check.races)


@pytest.mark.parametrize("settings", [{}, {"replicas": 2}, {"hooked": True}], ids=str)
def test_gradients_are_read_beside_backward_behind_their_event_and_not_without(
    settings: dict[str, Any],
) -> None:
    assert not races({**settings}, is_ordered=True)
    assert races({**settings}, is_ordered=False)


def test_a_copy_to_the_host_has_an_event_for_observers() -> None:
    events: list[Any] = []

    class Notes(StepObserver):
        def gradients_final(self, group: Any, event: Any) -> None:
            events.append((group.reduction.events, event))

    with StreamCheck(8, offloads=True) as check:
        model = sharded(decoder(on=torch.device("cpu")), offload_policy=CPUOffloadPolicy())
        step(model)
        context = state_of(model).step.context  # type: ignore[union-attr]
        context.observe(notes := Notes())
        step(model)
        context.stop_observing(notes)
    assert not check.races
    assert events and all(event is of.done for of, event in events)
