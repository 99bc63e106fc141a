"""Messages after ranks have failed: whether memory was the cause, and the command that goes on, and from where."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

from fullshard.errors import FullshardError
from fullshard.programs.run_events import Step, UnknownFormatError, read_events
from fullshard.programs.train.memory_kills import memory_kills
from fullshard.programs.train.processes import RankFailedError, StoppedError
from fullshard.programs.train.run_folder import RunFolder, step_of_checkpoint

OUT_OF_MEMORY = re.compile("OutOfMemoryError|out of memory|can't allocate memory|MemoryError")
"""Texts of torch, of CUDA's allocator and of Python when memory runs out."""

LESS_MEMORY = (
    "compute.checkpoint_activations=blocks takes less. So does a larger train.accumulate, if activations take more memory than "
    "the gradients of the whole model, which each rank then keeps between microbatches"
)


def with_advice(
    error: RankFailedError | StoppedError, folder: RunFolder, kills_before: Mapping[Path, int]
) -> str:
    """Return the message of an error that has ended a run, and below it what its cause may be, and how to go on."""
    lines: list[str] = []
    if isinstance(error, RankFailedError):
        lines += _memory_lines(error, kills_before)
    return "\n".join([str(error), *lines, *_lines_about_going_on(folder)])


def _memory_lines(error: RankFailedError, before: Mapping[Path, int]) -> Iterator[str]:
    if OUT_OF_MEMORY.search(str(error)):
        yield f"Memory ran out: {LESS_MEMORY}."
    if error.killed_by != signal.SIGKILL:
        return
    after = memory_kills()
    if any(count > before.get(path, count) for path, count in after.items()):
        yield (
            "Memory was the likely cause: the kernel has killed a process for lack of memory since the start. Fewer ranks on this "
            f"machine need less of it; {LESS_MEMORY}."
        )
    elif after:
        yield "The kernel has counted no kill for lack of memory since the start."
    else:
        yield "SIGKILL comes from somebody else, or from the kernel when memory runs out; its log says which (dmesg)."


def _lines_about_going_on(folder: RunFolder) -> Iterator[str]:
    """Yield the command that goes on, if there is a run to go on with."""
    if not folder.config.is_file():
        return
    from fullshard.checkpoint import latest  # imports torch, which is only needed here

    try:
        newest = latest(folder.checkpoints)
        last = _last_step(folder)
    except (OSError, FullshardError, UnknownFormatError):
        return  # the folder cannot be read: the error that is being reported is more important
    saved = 0 if newest is None else step_of_checkpoint(newest)
    if saved is None:
        return
    start = f"after step {saved}" if saved else "from the start: there is no checkpoint yet"
    again = ""
    if last > saved:
        steps = f"steps {saved + 1} to {last}" if last > saved + 1 else f"step {last}"
        again = f", and repeats {steps}"
    yield f"\nThis command resumes {start}{again}:\n  fullshard train {shlex.quote(str(folder.config))}"


def _last_step(folder: RunFolder) -> int:
    """Return the last step that was taken since the last start."""
    last = 0
    for event in read_events(folder.metrics):
        if isinstance(event, Step):
            last = event.step
    return last
