"""Steps in a time that the test makes: real models, real collectives, a wire and a machine of known speed.

Within `virtual_time`, traces are taken on a clock that every operation of torch and every collective advances by what it
would cost. So the same steps take the same time on every machine, however
busy it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fullshard.tracing import recorder
from fullshard.tracing.trace import Recording
from fullshard.transport.staged import Staged
from fullshard.transport.tags import Tag
from fullshard.transport.transports import Coalesced, Exchanged, Transport

US = 1_000
SLOWNESS = 8


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What things cost."""

    op_us: float = 1.0
    """An operation, however small."""
    ns_per_element: float = 20.0
    """Of an operation's outputs."""
    latency_us: float = 1.0
    """A collective, however small."""
    ns_per_byte: float = 0.01
    """On the wire, from or to other ranks."""
    slow_groups: dict[str, float] = field(default_factory=dict)
    """Microseconds that gathers of a group take longer."""
    slow_rank: int | None = None
    """Its operations take `SLOWNESS` times as long."""


class VirtualClock:
    """In the place of `recorder.host_ns`.

    All ranks do the same, so each knows when the slow one comes to a collective, and nobody has to tell.
    """

    def __init__(self, speeds: Speeds) -> None:
        self.speeds = speeds
        self.ns = 0
        self.last_ns = 0
        """The clock of the slowest rank."""
        self._wire_free_ns = {"gather": 0, "reduce": 0}
        self._slowest = 1 if speeds.slow_rank is None else SLOWNESS
        self._slowness = SLOWNESS if speeds.slow_rank == dist.get_rank() else 1

    def __call__(self) -> int:
        self.ns += 10  # reading it takes time, so that spans have an order
        return self.ns

    def compute(self, elements: int) -> None:
        """Let an operation with so many elements of output happen."""
        took = self.speeds.op_us * US + self.speeds.ns_per_element * elements
        self.ns += round(took * self._slowness)
        self.last_ns += round(took * self._slowest)

    def send(self, kind: str, text: str, nbytes: int) -> int:
        """Return when a collective is over that is issued now: one at a time of a kind, when all ranks have come."""
        speeds = self.speeds
        slow_us = speeds.slow_groups.get(text.rpartition(" ")[2], 0.0) if kind == "gather" else 0.0
        took = (speeds.latency_us + slow_us) * US + speeds.ns_per_byte * nbytes
        start = max(self.ns, self.last_ns, self._wire_free_ns[kind])
        self._wire_free_ns[kind] = start + round(took)
        return self._wire_free_ns[kind]

    def wait_until(self, over_ns: int) -> None:
        """Let all ranks wait for a collective."""
        self.ns = max(self.ns, over_ns)
        self.last_ns = max(self.last_ns, over_ns)


class _Operations(TorchDispatchMode):
    """Every operation of torch advances the clock."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not str(func).startswith(("c10d", "aten.detach", "aten.view")):
            leaves = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
            self._clock.compute(sum(leaf.numel() for leaf in leaves))
        return result


class _Work:
    """A collective that is over at a time of the clock."""

    def __init__(self, work: Any, clock: VirtualClock, over_ns: int) -> None:
        self._work, self._clock, self._over_ns = work, clock, over_ns

    def wait(self) -> None:
        self._work.wait()
        self._clock.wait_until(self._over_ns)

    def get_future(self) -> _Work:
        return self

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        """Call it at the time when the collective is over."""
        now, self._clock.ns = self._clock.ns, self._over_ns
        callback(None)
        self._clock.ns = now


def _on_the_wire(clock: VirtualClock, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a transport that takes its time."""

    def timed(transport: Transport, *args: Any, **kwargs: Any) -> Any:
        tag = next(each for each in args if isinstance(each, Tag))
        tensors = [each for each in tree_leaves(list(args[:2])) if isinstance(each, torch.Tensor)]
        nbytes = sum(tensor.nbytes for tensor in tensors)
        # Outputs and inputs together are world + 1 shards, of which world - 1 are of others.
        world = transport.group.size()
        share = (world - 1) / (2 * world if transport.sums_at_receiver else world + 1)
        over_ns = clock.send(kind, tag.text, round(nbytes * share))
        result = call(transport, *args, **kwargs)
        if result is None:
            clock.wait_until(over_ns)
            return None
        return _Work(result, clock, over_ns)

    return timed


WIRES = {"gather": "gather", "reduce": "reduce"}


@contextmanager
def virtual_time(speeds: Speeds) -> Iterator[VirtualClock]:
    """Let traces of the steps within the block be taken in a time that passes at these speeds."""
    clock = VirtualClock(speeds)
    patches = [
        patch.object(transport, name, _on_the_wire(clock, kind, getattr(transport, name)))
        for transport in (Coalesced, Exchanged, Staged)
        for name, kind in WIRES.items()
        if name in vars(transport)
    ]
    operations = _Operations(clock)
    enter, leave = Recording.__enter__, Recording.__exit__

    def begin(recording: Recording) -> Recording:
        operations.__enter__()
        return enter(recording)

    def end(recording: Recording, *error: Any) -> None:
        operations.__exit__(*error)
        leave(recording, *error)

    with (
        patch.object(recorder, "host_ns", clock),
        # Operations are counted in recorded steps only: to count them is slow.
        patch.multiple(Recording, __enter__=begin, __exit__=end),
        contextlib.ExitStack() as stack,
    ):
        for each in patches:
            stack.enter_context(each)
        yield clock
