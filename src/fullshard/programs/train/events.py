"""What happens in a run, as plain values: a file, a display or a test can be on the other side.

The names and fields are those of `metrics.jsonl`. All ranks make the same events, but for times and memory; the
first one's are shown and written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

Action = Literal["stop", "skip", "ignore"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What is about to be trained."""

    kind: ClassVar[str] = "start"
    step: int = 0
    world: int
    device: str
    parameters: int
    """Elements of all parameters."""
    unsharded_bytes: int
    """Bytes of all parameters."""
    rank_bytes: tuple[int, ...]
    """Bytes of parameters each rank holds at rest, between steps."""
    tokens_per_step: int
    steps: int
    model: str
    """In words, as is the data."""
    data: str
    training_tokens: int
    held_out_tokens: int
    versions: dict[str, str]
    resumed_from: int | None
    """Steps that were done already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One optimizer step was taken, or skipped."""

    kind: ClassVar[str] = "step"
    step: int
    """Steps done, counted from 1."""
    loss: float
    """Mean over the global batch, in nats per token, before the step's update."""
    grad_norm: float
    """Before clipping."""
    lr: float
    tokens: int
    """Seen so far in the whole run, all ranks together."""
    step_s: float
    memory_bytes: int
    """Peak so far: of resident memory on CPU, of allocated memory on CUDA."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The loss on held-out data."""

    kind: ClassVar[str] = "evaluation"
    step: int
    loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint is complete; later steps may have been taken meanwhile."""

    kind: ClassVar[str] = "checkpoint"
    step: int
    path: str
    """Relative to the run's folder."""
    blocked_s: float
    """How long training waited for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """A step was bad."""

    kind: ClassVar[str] = "trouble"
    step: int
    what: str
    action: Action


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """The model has written these."""

    kind: ClassVar[str] = "samples"
    step: int
    texts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """The run ends before its last step, and can go on from a checkpoint of this one."""

    kind: ClassVar[str] = "stopped"
    step: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The last step was taken, and everything after it is done."""

    kind: ClassVar[str] = "end"
    step: int
    seconds: float
    """Of this process's part of the run."""


Event = Start | Step | Evaluation | Checkpoint | Trouble | Samples | Stopped | End
Watcher = Callable[[Event], None]
"""Whoever follows a run."""


def all_of(watchers: Iterable[Watcher]) -> Watcher:
    """A watcher that tells others, in their order."""
    listening = tuple(watchers)

    def tell(event: Event) -> None:
        for watcher in listening:
            watcher(event)

    return tell
