"""Ranks of a run in which one of them fails, each a process of its own; all runs of a test go side by side.

`run_all` starts the processes, waits until they have written how they ended, and kills those that never do.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing.process
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fullshard import fully_shard
from fullshard.divergence.watchdog import stalls, thread
from fullshard.errors import DivergenceError
from tests.helpers.ranks import FORK_SERVER

RUN_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of some ranks, in which rank ``bad`` does something when the others train on."""

    does: str
    """One of the functions below."""
    bad: int = 1
    world: int = 2
    at: int = 3
    """In which step; before the last one, the watchdogs find each other."""
    hosted: bool = False
    """Whether rank 0 serves the store, rather than the process that starts the ranks."""


@dataclass(frozen=True, kw_only=True)
class End:
    """How a rank has ended, as it wrote itself."""

    error: str
    """The exception's type; empty if there was none."""
    message: str


def run_all(runs: Mapping[str, Run], folder: Path) -> dict[str, dict[int, End]]:
    """Return how the ranks of each run have ended; those that were killed, or stay stopped, are missing."""
    processes: dict[tuple[str, int], multiprocessing.process.BaseProcess] = {}
    stores = {}
    for name, run in runs.items():
        stores[name] = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        for rank in range(run.world):
            started = FORK_SERVER.Process(
                target=be_rank, args=(run, rank, folder / f"{name}-{rank}", stores[name].port)
            )
            started.start()
            processes[name, rank] = started
    expected = {
        key: folder / "-".join(map(str, key))
        for key in processes
        if runs[key[0]].does not in ("kill", "stop") or runs[key[0]].bad != key[1]
    }
    end = time.monotonic() + RUN_S
    while time.monotonic() < end and not all(path.exists() for path in expected.values()):
        time.sleep(0.1)
    for process in processes.values():
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        process.join()
    ends: dict[str, dict[int, End]] = {name: {} for name in runs}
    for (name, rank), path in expected.items():
        if path.exists():
            ends[name][rank] = End(**json.loads(path.read_text()))
    return ends


# --- in the ranks -----------------------------------------------------------------------------------


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave() -> None:
    sys.exit(0)


def fail() -> None:
    raise ValueError("bad sample 7")


def sleep() -> None:
    wait_for_stall()


def wait_for_stall() -> None:
    """Wait until this rank has noted that rank 1 is slow in `sleep`."""
    report = re.compile(
        r"rank 1 keeps others waiting(.*\n)+  rank 1 .*watched_ranks.py:\d+ in wait_for_"
    )
    while not any(each.ranks == (1,) and report.match(each.report) for each in stalls()):
        time.sleep(0.02)


def barrier() -> None:
    dist.barrier()


DEEDS = {each.__name__: each for each in (kill, stop, leave, fail, sleep, barrier)}


def be_rank(run: Run, rank: int, path: Path, port: int) -> None:
    """Train, and write how that ended."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["FULLSHARD_WATCHDOG_PATIENCE"] = "2"
    torch.set_num_threads(1)
    error: BaseException | None = None
    try:
        _train(run, rank, port)
    except (DivergenceError, RuntimeError) as caught:
        error = caught
    finally:
        kind = "" if error is None else type(error).__name__
        end = {"error": kind, "message": str(error)}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(end))
        part.rename(path)


def _train(run: Run, rank: int, port: int) -> None:
    finder = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    if not run.hosted:
        store = finder
    elif rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        finder.set("port", str(store.port))
    else:
        other = int(finder.get("port"))
        store = dist.TCPStore("127.0.0.1", other, None, False, wait_for_workers=False)
    timeout = timedelta(seconds=300)
    dist.init_process_group("gloo", rank=rank, world_size=run.world, store=store, timeout=timeout)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for each in (*model, model):
        fully_shard(each)
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(4):
        if step == 3:
            _wait_until_watched(run.world)
            dist.barrier()
        if step == run.at and rank == run.bad:
            DEEDS[run.does]()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if run.does == "sleep":
        wait_for_stall()
    dist.destroy_process_group()


def _wait_until_watched(world: int) -> None:
    """Wait until this rank's watchdog knows the processes of the others, and has published where this one is."""
    watchdog = thread.Current.watchdog
    assert watchdog is not None
    while len(watchdog._peers.states) < world - 1 or "last called" not in watchdog._published[0]:
        time.sleep(0.02)
