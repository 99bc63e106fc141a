"""`save`, and `async_save`, which takes a snapshot and lets another thread do the rest.

    caller's thread   wait for the previous save; plan; copy what this rank writes to host memory
    writing thread    write, exchange, publish, over a process group of its own
    any later call    raises the thread's error, if there was one

A process has one save in flight at a time, and so have all ranks.
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

from fullshard.checkpoint.base_weights import Base
from fullshard.checkpoint.folders.process_exit import join_at_exit
from fullshard.checkpoint.host_copies import HostMemory, Snapshot
from fullshard.checkpoint.rank_group import RankGroup
from fullshard.checkpoint.save_plan import OnProgress, Saved, log, new_checkpoint, write
from fullshard.errors import CheckpointError, ConfigurationError
from fullshard.mesh import axes as mesh
from fullshard.optim import EMA


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    ema: EMA | None = None,
    extra: Any = None,
    base: Base | None = None,
    keep_last: int | None = None,
    process_group: ProcessGroup | None = None,
    on_progress: OnProgress | None = None,
) -> Saved:
    """Write a checkpoint that any number of ranks can load, through either API. All ranks call it.

    Until it is complete, the old checkpoint at ``path``, if there was one, stays.

    Args:
        path: A folder: new, empty, or a checkpoint, which is replaced.
        model: Sharded by `fully_shard` or `FullyShardedDataParallel`, or not at all.
        optimizer: Its state is saved, too. Pass it on all ranks or on none, with the same options and step counts.
        ema: Averages of the model's parameters, which are saved, too. It needs an optimizer.
        extra: Values that JSON can hold, tuples, and small tensors: the step, a scheduler's state, a generator's. The
            first rank's is saved.
        base: The checkpoint that has the frozen parameters, by `base_of`. They are left out then: the new checkpoint has
            parameters that are trained, buffers, and the path of its base, over which `load` puts them.
        keep_last: Keep so many of the newest checkpoints of this training run beside ``path``, and remove its older ones. A
            run is what this model saved with ``keep_last`` in this process, and in the processes it was resumed from by
            `load`. All other checkpoints stay.
        process_group: The ranks that save together; all by default.
        on_progress: Called with the bytes that this rank has written, and will write in total.
    """
    rank_group = RankGroup(process_group, "save")
    _finish_previous(rank_group, "wait")
    new = new_checkpoint(rank_group, path, model, optimizer, extra, keep_last, ema, base)
    return write(rank_group, new, on_progress)


def async_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    ema: EMA | None = None,
    extra: Any = None,
    base: Base | None = None,
    keep_last: int | None = None,
    when_busy: Literal["wait", "refuse"] = "wait",
    process_group: ProcessGroup | None = None,
    on_progress: OnProgress | None = None,
) -> PendingSave:
    """Like `save`, but return as soon as training may go on. All ranks call it.

    What this rank writes is copied to pinned host memory while the accelerator computes. The next step of ``optimizer``
    waits for these copies on the device. Call `PendingSave.wait_for_copies` before you change parameters in another way. A
    thread does the rest.

    An error of the thread is raised by the returned object's `wait`, or else by the next `save` or `async_save`.
    A process group that is destroyed, and a process that ends, wait for the thread, unless an error has ended its main
    thread: then it ends at once, and the old checkpoint stays.

    Args:
        path: See `save`.
        model: See `save`.
        optimizer: See `save`.
        ema: See `save`. Its next write waits for the copies, too.
        extra: See `save`.
        base: See `save`.
        keep_last: See `save`.
        when_busy: Whether to wait for a save that is still in flight, or to refuse this one with an error.
        process_group: See `save`.
        on_progress: Called by the thread; see `save`.
    """
    if when_busy not in ("wait", "refuse"):
        raise ConfigurationError(f"when_busy must be 'wait' or 'refuse', got {when_busy!r}.")
    rank_group = RankGroup(process_group, "save")
    _finish_previous(rank_group, when_busy)
    new = new_checkpoint(rank_group, path, model, optimizer, extra, keep_last, ema, base)
    thread_ranks = _rank_group_of_threads(process_group)
    # This must be the last step that can fail: after it the copies are under way, and the thread must keep them.
    snapshot = rank_group.on_each(lambda: Snapshot([local for _, local in new.own], _host_memory))
    snapshot.hold_back(optimizer, ema)
    new.own = [(key, copy) for (key, _), copy in zip(new.own, snapshot.copies, strict=True)]

    def finish() -> Saved:
        thread_ranks.on_each(snapshot.wait)
        return write(thread_ranks, new, on_progress)

    return PendingSave(finish, snapshot)


class PendingSave:
    """A save that a thread finishes."""

    def __init__(self, finish: Callable[[], Saved], snapshot: Snapshot) -> None:
        """Start the thread."""
        self._finish = finish
        self._snapshot = snapshot
        self._pid = os.getpid()
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
        except Exception as error:  # `wait`, or the next save, raises it
            self._error = error
            log.error("A checkpoint was not saved: %s", error)
        finally:
            del self._finish  # it holds the copies

    def done(self) -> bool:
        """Return whether the thread has ended, well or not."""
        return not self._thread.is_alive()

    @property
    def is_of_this_process(self) -> bool:
        """Whether the thread is here. A process that is forked has a copy of this object, and no thread."""
        return self._pid == os.getpid()

    def wait_for_copies(self) -> None:
        """Let the host wait until parameters and optimizer state may be changed."""
        self._snapshot.wait()

    def wait(self, timeout: float | None = None) -> Saved:
        """Wait until the checkpoint is complete, for at most ``timeout`` seconds; raise the thread's error if it had one."""
        if not self.is_of_this_process:
            raise CheckpointError(
                f"Only the process that began a save can wait for it: process {self._pid}. This one, {os.getpid()}, was forked "
                "from it, and has no thread that saves. Wait in the other process."
            )
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"The checkpoint was not complete after {timeout} s.")
        if self._error is not None:
            self._error_was_raised = True
            raise self._error
        assert self._saved is not None, "there is a result or an error"
        return self._saved

    def _finish_before_next(self) -> None:
        """Wait; raise the thread's error unless `wait` has raised it."""
        self._thread.join()
        if not self._error_was_raised:
            self.wait()


class _InFlight:
    """The last save of this process that has a thread."""

    save: PendingSave | None = None


_host_memory = HostMemory()


def _finish_previous(rank_group: RankGroup, when_busy: str) -> None:
    pending = _InFlight.save
    if pending is not None and not pending.is_of_this_process:
        pending = None  # this process was forked while another one saved, and that one goes on
    if when_busy == "refuse":
        rank_group.on_each(lambda: _refuse_if_busy(pending))
    _InFlight.save = None
    rank_group.on_each(lambda: None if pending is None else pending._finish_before_next())


def _refuse_if_busy(pending: PendingSave | None) -> None:
    if pending is not None and not pending.done():
        raise CheckpointError(
            "With when_busy='refuse', only one save may be in flight; another one is. Save less often, or pass "
            "when_busy='wait'."
        )


def _rank_group_of_threads(process_group: ProcessGroup | None) -> RankGroup:
    """Return the same ranks, over a process group that only the writing threads use."""
    if process_group is None and not dist.is_initialized():
        return RankGroup()
    group = dist.group.WORLD if process_group is None else process_group
    assert group is not None, "initialized"
    return RankGroup(mesh.host_group(group, "checkpoints of threads"), "save")
