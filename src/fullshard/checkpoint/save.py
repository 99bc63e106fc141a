"""`save`, and `async_save`, which is the same in two halves: a snapshot now, all else by another thread.

    caller's thread   wait for the save before; plan; copy what this rank writes to host memory
    writing thread    write, exchange, publish, over a process group of its own
    any later call    gets the error, if the thread had one

One save is on its way at a time, in a process and so on all ranks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from fullshard.checkpoint.host_copies import HostMemory, Snapshot
from fullshard.checkpoint.process_exit import join_at_exit
from fullshard.checkpoint.rank_group import RankGroup
from fullshard.checkpoint.save_plan import OnProgress, Saved, log, make_plan, write
from fullshard.errors import CheckpointError, ConfigurationError
from fullshard.plan import mesh


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    keep_last: int | None = None,
    process_group: ProcessGroup | None = None,
    on_progress: OnProgress | None = None,
) -> Saved:
    """Write a checkpoint that any number of ranks can load, through either door. All ranks call it.

    The checkpoint at ``path`` is the old one, if there was one, until it is the new one.

    Args:
        path: A folder: new, empty, or a checkpoint, which is replaced.
        model: Sharded by `fully_shard` or `FullyShardedDataParallel`, or not at all.
        optimizer: Its state is saved, too. On all ranks or on none, with the same options and step counts.
        extra: Anything JSON can say, tuples, and small tensors: the step, a scheduler's state, a generator's. The
            first rank's is saved.
        keep_last: Afterwards remove all but so many of the newest checkpoints beside this one that the same run has saved with
            ``keep_last``: this model, in this process and in those it goes on from by `load`. All others stay.
        process_group: The ranks that save together; all by default.
        on_progress: Is called with the bytes this rank has written, and will write.
    """
    rank_group = RankGroup(process_group)
    _finish_previous(rank_group, "wait")
    plan = make_plan(rank_group, path, model, optimizer, extra, keep_last)
    return write(rank_group, plan, on_progress)


def async_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    keep_last: int | None = None,
    when_busy: Literal["wait", "refuse"] = "wait",
    process_group: ProcessGroup | None = None,
    on_progress: OnProgress | None = None,
) -> PendingSave:
    """Like `save`, but return as soon as training may go on. All ranks call it.

    What this rank writes is copied to host memory: pinned, and beside what the accelerator computes. The next step
    of ``optimizer`` waits for these copies on the device; whoever changes parameters in another way calls
    `PendingSave.wait_for_copies` before. All else is done by a thread.

    An error of the thread is raised by the returned object's `wait`, or else by the next `save` or `async_save`.
    Wait before the process group is destroyed. A process that ends waits for the thread, unless an error has ended its main
    thread: then it ends at once, and what was there before stays.

    Args:
        path: As for `save`, and so are the others that are not here.
        model: See `save`.
        optimizer: See `save`.
        extra: See `save`.
        keep_last: See `save`.
        when_busy: Whether to wait if the last save is still on its way, or to refuse this one with an error.
        process_group: See `save`.
        on_progress: Called by the thread.
    """
    if when_busy not in ("wait", "refuse"):
        raise ConfigurationError(f"when_busy must be 'wait' or 'refuse', got {when_busy!r}.")
    rank_group = RankGroup(process_group)
    _finish_previous(rank_group, when_busy)
    plan = make_plan(rank_group, path, model, optimizer, extra, keep_last)
    thread_ranks = _rank_group_of_threads(process_group)
    # Last of what can fail: from here on copies are on their way, and the thread is to hold them.
    snapshot = rank_group.on_each(lambda: Snapshot([local for _, local in plan.own], _host_memory))
    snapshot.hold_back(optimizer)
    plan.own = [(key, copy) for (key, _), copy in zip(plan.own, snapshot.copies, strict=True)]

    def finish() -> Saved:
        thread_ranks.on_each(snapshot.wait)
        return write(thread_ranks, plan, on_progress)

    return PendingSave(finish, snapshot)


class PendingSave:
    """A save that a thread is about to finish."""

    def __init__(self, finish: Callable[[], Saved], snapshot: Snapshot) -> None:
        """Start the thread."""
        self._finish = finish
        self._snapshot = snapshot
        self._saved: Saved | None = None
        self._error: Exception | None = None
        self._error_was_raised = False
        self._thread = threading.Thread(target=self._run, name="fullshard checkpoint", daemon=True)
        join_at_exit(self._thread)
        _InFlight.save = self
        self._thread.start()

    def _run(self) -> None:
        try:
            self._saved = self._finish()
        except Exception as error:  # raised where somebody waits, if anybody does
            self._error = error
            log.error("A checkpoint was not saved: %s", error)
        finally:
            del self._finish  # and with it the copies

    def done(self) -> bool:
        """Whether the thread has ended, well or not."""
        return not self._thread.is_alive()

    def wait_for_copies(self) -> None:
        """Wait until parameters and optimizer state may be changed."""
        self._snapshot.wait()

    def wait(self, timeout: float | None = None) -> Saved:
        """Wait until the checkpoint is complete, for so many seconds at most; raise the thread's error if it had one."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"The checkpoint was not complete after {timeout} s.")
        if self._error is not None:
            self._error_was_raised = True
            raise self._error
        assert self._saved is not None, "there is a result or an error"
        return self._saved

    def _finish_before_next(self) -> None:
        """Wait; raise an error only if nobody has seen it."""
        self._thread.join()
        if not self._error_was_raised:
            self.wait()


class _InFlight:
    """The last save of this process that a thread was started for."""

    save: PendingSave | None = None


_host_memory = HostMemory()


def _finish_previous(rank_group: RankGroup, when_busy: str) -> None:
    pending = _InFlight.save
    if when_busy == "refuse":
        rank_group.on_each(lambda: _refuse_if_busy(pending))
    _InFlight.save = None
    rank_group.on_each(lambda: None if pending is None else pending._finish_before_next())


def _refuse_if_busy(pending: PendingSave | None) -> None:
    if pending is not None and not pending.done():
        raise CheckpointError(
            "Another save is on its way, and this one was to be refused then. Save less often, or pass when_busy='wait'."
        )


def _rank_group_of_threads(process_group: ProcessGroup | None) -> RankGroup:
    """The same ranks, over a process group that nobody else uses."""
    if process_group is None and not dist.is_initialized():
        return RankGroup()
    group = dist.group.WORLD if process_group is None else process_group
    assert group is not None, "initialized"
    return RankGroup(mesh.host_group(group, "checkpoints of threads"))
