"""How much of a step's host time passes within certain calls.

collective_s   within the process group, at the one place where all contestants enter it. The `fake`
               group copies this rank's piece to where every rank's would arrive, one copy per rank, on
               the calling thread: at 4096 ranks that is milliseconds a call, which no real group takes
copy_s         within the fused copies by which contestants pack and distribute what they communicate.
               On the CPU this is memory traffic, which a GPU would have on its own time
"""

import functools
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.distributed import ProcessGroup

__all__ = ["Clock", "Part"]

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


class Clock:
    """Adds up the time within one part's calls while it is entered."""

    def __init__(self, part: Part, device: torch.device) -> None:
        self._home, self._names = CALLS[part]
        # As in `timed`: on the CPU, what passes within the calls is work of the calling thread.
        self._now = time.perf_counter if device.type == "cuda" else time.process_time
        self._total_s = 0.0
        self._originals: dict[str, Any] = {}

    def take_s(self) -> float:
        """Return the seconds since the last call of this."""
        total_s, self._total_s = self._total_s, 0.0
        return total_s

    def __enter__(self) -> None:
        for name in self._names:
            # What is in the class, not what `getattr` makes of it: that could not be put back.
            self._originals[name] = vars(self._home)[name]
            setattr(self._home, name, self._timed(getattr(self._home, name)))

    def __exit__(self, *exception: object) -> None:
        for name, original in self._originals.items():
            setattr(self._home, name, original)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            start = self._now()
            try:
                return function(*arguments, **options)
            finally:
                self._total_s += self._now() - start

        return call
