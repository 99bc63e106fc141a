"""Ranks as threads of this process: quick to start, easy to debug, and able to share one GPU.

Collectives are plain Python copies between the threads (torch's `threaded` test backend), so they
show arithmetic and order, not overlap. All threads share torch's random generator.
"""

import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode  # type: ignore[attr-defined]
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from tests.helpers.groups import forget_meshes, leave_group
from tests.helpers.ranks import JOB_TIMEOUT_S, RankError


def run_threads(
    n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = JOB_TIMEOUT_S, **kwargs: Any
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `n` thread ranks and return the results by rank.

    When a rank raises, ranks that wait for it in a collective are woken and end too.
    """
    results: list[Any] = [None] * n
    failures: list[tuple[int, str]] = []
    store = dist.HashStore()

    def rank_main(rank: int) -> None:
        try:
            dist.init_process_group(
                "threaded",
                rank=rank,
                world_size=n,
                store=store,
                timeout=timedelta(seconds=timeout_s),
            )
            try:
                results[rank] = fn(*args, **kwargs)
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
                # Not left to the threads' ends: two of them, giving up the last references to their
                # groups at the same time, would wait for each other forever.
                forget_meshes()
        except BaseException as error:
            # Ranks that we wake below end with SystemExit, after the failure that is the cause.
            if not (failures and isinstance(error, SystemExit)):
                failures.append((rank, f"raised\n{''.join(traceback.format_exception(error))}"))
            ProcessLocalGroup.exception_handle(error)

    gc.freeze()  # see `leave_group`
    torch.manual_seed(0)
    # DTensor enters it in the ranks, where a CUDA build without a GPU crashes if it is the first
    # time.
    with FakeTensorMode():
        pass
    autograd_was_multithreaded = torch.autograd.is_multithreading_enabled()
    _set_thread_isolation_mode(True)
    world = _install_threaded_pg()
    if not hasattr(world, "comms"):
        world.comms = []  # torch 2.11 forgot it, and destroying a group reads it
    try:
        threads = [
            threading.Thread(target=rank_main, args=(rank,), name=f"rank{rank}", daemon=True)
            for rank in range(n)
        ]
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        failures += _hangs(threads)
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        _set_thread_isolation_mode(False)
        # torch 2.11 leaves it off.
        torch.autograd.set_multithreading_enabled(autograd_was_multithreaded)
    leave_group()
    if failures:
        raise RankError(failures)
    return results


def _hangs(threads: list[threading.Thread]) -> list[tuple[int, str]]:
    frames = sys._current_frames()
    return [
        (rank, f"did not finish; it was here:\n{''.join(traceback.format_stack(frames[ident]))}")
        for rank, ident in enumerate(thread.ident for thread in threads)
        if ident in frames and threads[rank].is_alive()
    ]
