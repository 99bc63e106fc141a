"""How much of a step's host time passes within certain calls.

collective_s   within the process group, at the one place where all contestants enter it. The `fake`
               group copies this rank's piece to where every rank's would arrive, one copy per rank, on
               the calling thread: at 4096 ranks that is milliseconds a call, which no real group takes
copy_s         within the fused copies by which contestants pack and distribute what they communicate.
               On the CPU this is memory traffic, which a GPU would have on its own time
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.distributed import ProcessGroup

__all__ = ["Clock", "Part", "silent_collectives"]

Part = Literal["collective_s", "copy_s"]

CALLS: Mapping[Part, tuple[Any, tuple[str, ...]]] = MappingProxyType(
    {
        # Torch 2.13 has two names for some of them; contestants use either.
        "collective_s": (
            ProcessGroup,
            tuple(n for n in vars(ProcessGroup) if "gather" in n or "reduce_scatter" in n),
        ),
        "copy_s": (
            torch,
            ("_foreach_copy_", "_foreach_zero_", "_chunk_cat", "split_with_sizes_copy"),
        ),
    }
)


@contextmanager
def replaced(part: Part, replacement: Callable[[Callable[..., Any]], Any]) -> Iterator[None]:
    """Let `replacement` stand in for every function of a part."""
    home, names = CALLS[part]
    # What is in the class, not what `getattr` makes of it: that could not be put back.
    originals = {name: vars(home)[name] for name in names}
    for name in names:
        setattr(home, name, replacement(getattr(home, name)))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(home, name, original)


class Finished:
    """Stands for the work of a collective that there is nothing to wait for."""

    def wait(self) -> bool:
        """Return at once."""
        return True


@contextmanager
def silent_collectives() -> Iterator[None]:
    """Let collectives do nothing: outputs keep what happened to be in their memory."""
    finished = Finished()
    with replaced("collective_s", lambda function: lambda *arguments, **options: finished):
        yield


class Clock:
    """Adds up the time within one part's calls, while `running`."""

    def __init__(self, part: Part, device: torch.device) -> None:
        self._part = part
        # As in `timed`: on the CPU, what passes within the calls is work of the calling thread.
        self._now = time.perf_counter if device.type == "cuda" else time.process_time
        self._total_s = 0.0

    def take_s(self) -> float:
        """Return the seconds since the last call of this."""
        total_s, self._total_s = self._total_s, 0.0
        return total_s

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure within this block."""
        with replaced(self._part, self._timed):
            yield

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            start = self._now()
            try:
                return function(*arguments, **options)
            finally:
                self._total_s += self._now() - start

        return call
