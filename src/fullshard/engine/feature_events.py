"""Events at which features beside the step join it; the engine knows none of them.

A feature registers its function when a user first asks for the feature, or shards a module. Registering again changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from fullshard.engine.step import Step

MODEL_CONNECTED: list[Callable[[Step], None]] = []
"""Called in a model's first forward, or the first one below another root, when its step has been made."""

PIPELINING_IMPORTED: list[Callable[[], bool]] = []
"""Called at the beginning of forwards once `torch.distributed.pipelining` is imported, until all have returned True."""

UPDATE_BEGINS: list[Callable[[Callable[[], Iterable[Tensor]]], None]] = []
"""Called before an optimizer's step with a function that returns its parameters; an error keeps it from the step."""

CallT = TypeVar("CallT", bound=Callable[..., object])


def call_at(event: list[CallT], call: CallT) -> None:
    """Call a function at an event from now on."""
    if call not in event:
        event.append(call)
