"""`fullshard.debug`: checks that cost time, which users turn on for a run, or for a block."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch

from fullshard.divergence.journal import RULES
from fullshard.errors import ConfigurationError

if TYPE_CHECKING:
    from fullshard.checks.checked_block import CheckedBlock

_CHECKS = ("order", "streams")


def debug(*what: str, world_size: int | None = None, host_memory: bool = False) -> Debugging:
    """Turn checks on that cost time; without arguments, turn them off. Call it on all ranks.

    What it returns may be used in a ``with`` statement, and turns the checks off at the end of the block::

        with fullshard.debug("streams"):
            model(batch).sum().backward()
            optimizer.step()

    Args:
        *what: ``"order"``: before every collective, on every backend, the ranks check that they call the same one.
            ``"streams"``: at the end of the ``with`` block, prove that streams and events order all accesses to the same
            memory, on a GPU or on tensors of the meta device; see docs/streams.md. Races are a `StreamOrderError`.
        world_size: Ranks for ``"streams"`` on the meta device: the program is rank 0 of so many that do not exist. None
            means the GPU, or 8 ranks on a machine without one.
        host_memory: For ``"streams"`` on the meta device: whether tensors of the CPU are memory without values, which the device
            copies from and to, as with `CPUOffloadPolicy`.

    Raises:
        ConfigurationError: there is no such check.
    """
    unknown = sorted(set(what) - {*_CHECKS})
    if unknown:
        raise ConfigurationError(
            f"fullshard.debug knows 'order' and 'streams'; it was given {unknown}."
        )
    RULES.every_collective = "order" in what
    return Debugging(what, world_size, host_memory)


class Debugging:
    """Checks that are on; in a ``with`` statement, until the end of the block."""

    def __init__(self, what: tuple[str, ...], world_size: int | None, host_memory: bool) -> None:
        self._what, self._world_size, self._host_memory = what, world_size, host_memory
        self._streams: CheckedBlock | None = None

    def __enter__(self) -> CheckedBlock | None:
        if "streams" not in self._what:
            return None
        # Imported here: a program that asks for none of this pays nothing for it.
        if self._world_size is None and torch.cuda.is_available():
            from fullshard.checks.cuda_streams import CudaStreamCheck

            self._streams = CudaStreamCheck()
        else:
            from fullshard.checks.stream_check import StreamCheck

            self._streams = StreamCheck(self._world_size or 8, offloads=self._host_memory)
        return self._streams.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        RULES.every_collective = False
        if self._streams is not None:
            self._streams.__exit__(kind, error, trace)
