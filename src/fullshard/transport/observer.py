"""The events of a step, told to its observers: traces, profiler ranges, planners.

The engine reads `FSDPCommContext.observer` where something happens, and goes on if it is None: one `if` per event without an
observer. An observer gives nothing back to the step, and must not raise.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

from torch.distributed import Work

Collective = Literal["gather", "reduce", "all-reduce"]
Part = Literal[
    "pre_forward",
    "inputs_to_device",
    "forward_prefetch",
    "post_forward",
    "pre_backward",
    "backward_prefetch",
    "post_backward_reduce",
    "root_post_backward_callback",
    "all_gather",
    "all_gather_copy_out",
]
"""Work of the host: of a group if it is an all-gather's, of no state if it is a root's, else of a state."""


class StepObserver:
    """A listener to a step; each method does nothing unless it is overridden.

    ``group`` is a `FSDPParamGroup` and ``state`` an `FSDPState`: observers know them by name, hash and memory.
    """

    capturable = True
    """Whether it may observe a step that is captured in a CUDA graph."""

    # --- work of the host ---------------------------------------------------------------------------

    def begins(self, part: Part, of: Any) -> None:
        """The host begins a part of the step."""

    def ends(self, part: Part, of: Any) -> None:
        """The host has ended a part of the step."""

    def failed(self) -> None:
        """An exception leaves a hook of the engine: parts that have begun do not end."""

    # --- computation --------------------------------------------------------------------------------

    def forward_begins(self, state: Any) -> None:
        """A module of ``state`` has its parameters and inputs; its forward, or recomputation, is next."""

    def forward_ends(self, state: Any) -> None:
        """The module's forward has returned, or raised."""

    def backward_begins(self, state: Any, call: int) -> None:
        """Backward has reached ``state`` and its parameters are there; it may have been reached before.

        ``call`` is a number that is greater for calls which began later in forward.
        """

    def backward_ends(self, state: Any) -> None:
        """Backward has left ``state``; it may have reached it without our knowledge."""

    def abandoned(self, states: Collection[Any]) -> None:
        """Work of ``states`` that has begun will not end: an exception was raised."""

    # --- collectives --------------------------------------------------------------------------------

    def issues(self, collective: Collective, group: Any) -> None:
        """The host begins to issue a collective of a group."""

    def calls(self, collective: Collective, group: Any, nbytes: int) -> None:
        """It is called next, on its stream; ``nbytes`` come from, or go to, other ranks."""

    def called(self, collective: Collective, group: Any, works: Sequence[Work | None]) -> None:
        """It has been called; the stream is ordered after calls that have no work."""

    def waits(self, collective: Collective, group: Any, event: Any = None) -> None:
        """The current stream waits next for an event behind the collective; or, without one, the host for its works."""

    def waited(self, collective: Collective, group: Any, event: Any = None) -> None:
        """The current stream, or the host, has waited."""

    def gradients_final(self, group: Any, event: Any) -> None:
        """The sharded gradients of a group have been issued; they are final behind ``event``, None for a host without streams."""

    def gathered_aside(self, group: Any) -> None:
        """A group is gathered for another reason than a step: by `unshard` of the user, or to show full parameters."""

    # --- memory -------------------------------------------------------------------------------------

    def memory_of_gathers(self, group: Any) -> None:
        """The memory that a group has for gathering may have changed: `held_bytes`."""

    def released(self, group: Any) -> None:
        """A group's gathered memory was given back."""

    def memory_of_reductions(self, holder: object, nbytes: int) -> None:
        """A reduce buffer, or gradients that wait, take so many bytes now."""


class Observed(NamedTuple):
    """An observer, and the group it is told of."""

    observer: StepObserver
    group: Any


class Observers(StepObserver):
    """Several observers, told one after the other."""

    def __init__(self, observers: Sequence[StepObserver]) -> None:
        self.observers = tuple(observers)


def _to_all(name: str) -> Any:
    def tell(self: Observers, *args: Any) -> None:
        for each in self.observers:
            getattr(each, name)(*args)

    return tell


for _name in [name for name, value in vars(StepObserver).items() if callable(value)]:
    setattr(Observers, _name, _to_all(_name))
