"""Real ranks for tests: up to four worker processes, each with gloo, reused by all tests.

    def total(x):                                  # at module level, so that it pickles by name
        dist.all_reduce(x)
        return x.item()

    def test_all_reduce_adds(world):
        assert world(2).run(total, torch.ones(())) == [2.0, 2.0]

A `World` runs a function on every rank of a new process group. Whatever goes wrong on a rank, an
exception, a crash or a hang, arrives here as a `RankError` that says which rank and where; after a
crash or a hang all processes are replaced. What happens inside a rank is in `rank_worker`.
"""

import multiprocessing
import os
import pickle
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any

from tests.helpers.rank_worker import Job, Report, pickled, serve, stacks_file

MAX_RANKS = 4

JOB_TIMEOUT_S = 120.0
"""How long a job may take; less than the time after which pytest gives up on a test (pyproject.toml)."""

GRACE_S = 10.0
"""How long the other ranks may go on once one has failed: they may wait for it forever."""

STARTUP_TIMEOUT_S = 120.0
STACKS_TIMEOUT_S = 2.0

# Ranks are forked from a process that has only imported: starting one, or all of them again after a
# crash, takes no time, and what many ranks import when first used is imported once.
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch._dynamo.backends.common",
    "torch._inductor.pattern_matcher",
    "tests.helpers.rank_worker",
    "tests.helpers.training",
    "fullshard.programs.train.rank",
    "hypothesis",
]
# Inductor asks whether there is a GPU when it is imported. Asked by way of CUDA, as is the default, no process that
# is forked after that could use one.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(PRELOADED)


class RankError(AssertionError):
    """Some ranks failed; the message has what each of them said, equal texts folded together."""

    def __init__(self, findings: Iterable[tuple[int, str]]) -> None:
        ranks_by_text: dict[str, list[int]] = {}
        for rank, text in findings:
            ranks_by_text.setdefault(text.strip(), []).append(rank)
        super().__init__(
            "\n\n".join(
                f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))} {text}"
                for text, ranks in ranks_by_text.items()
            )
        )


class World:
    """The first `size` ranks of the pool."""

    def __init__(self, pool: "RankPool", size: int, backend: str = "gloo") -> None:
        if not 1 <= size <= MAX_RANKS:
            raise ValueError(f"A world has 1 to {MAX_RANKS} ranks, got {size}.")
        self.size = size
        self._pool, self._backend = pool, backend

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float = JOB_TIMEOUT_S, **kwargs: Any
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank and return the results by rank."""
        reports = self._run(pickled((fn, args, kwargs)), timeout_s)
        failures = _failures(reports)
        if failures:
            raise RankError(failures)
        return [pickle.loads(reports[rank].result) for rank in range(self.size)]

    def outcomes(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float = JOB_TIMEOUT_S, **kwargs: Any
    ) -> list[Any]:
        """Like `run`, but a rank that raised has the exception in its place.

        Crashes and hangs are still raised. An exception that does not pickle is replaced by a
        `StandInError`.
        """
        reports = self._run(pickled((fn, args, kwargs)), timeout_s)
        return [
            pickle.loads(report.result) if report.error is None else report.error
            for report in (reports[rank] for rank in range(self.size))
        ]

    def _run(self, call: bytes, timeout_s: float) -> dict[int, Report]:
        return self._pool.run(self.size, call, timeout_s, self._backend)


class RankPool:
    """The worker processes of one pytest session; started when first needed, closed at its end."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._ranks: list[_Rank] = []
        self._num_jobs = 0

    def run(
        self, size: int, call: bytes, timeout_s: float, backend: str = "gloo"
    ) -> dict[int, Report]:
        """Make the pickled call on `size` ranks of a backend; return their reports in order of arrival."""
        try:
            folder = self._start(size)
            ranks = self._ranks[:size]
            self._num_jobs += 1
            for rank in ranks:
                job = Job(
                    rank=rank.number,
                    world_size=size,
                    store=folder / f"store{self._num_jobs}",
                    # Longer than the job: our stacks say more than gloo's timeout.
                    group_timeout=timedelta(seconds=timeout_s + 60),
                    backend=backend,
                    call=call,
                )
                rank.send(pickle.dumps(job))
            reports = _next_reports(ranks, timeout_s)
            for rank in ranks:
                rank.send(b"")
            _require_success(_next_reports(ranks, JOB_TIMEOUT_S))
        except BaseException:
            self.close()
            raise
        return reports

    def close(self) -> None:
        """End all processes and remove their files; the next job starts new ones."""
        for rank in self._ranks:
            rank.kill()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self, size: int) -> Path:
        if self._folder is None:
            # The ranks remove it too when this process is killed, so it may be gone at the end.
            self._folder = tempfile.TemporaryDirectory(
                prefix="fullshard-ranks-", ignore_cleanup_errors=True
            )
        folder = Path(self._folder.name)
        new = [_Rank(number, folder) for number in range(len(self._ranks), size)]
        self._ranks += new
        _require_success(_next_reports(new, STARTUP_TIMEOUT_S))
        return folder


class _Rank:
    """One worker process, seen from here."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.stacks = stacks_file(folder, number)
        self.stacks.touch()
        self.connection, theirs = Pipe()
        self.process = FORK_SERVER.Process(target=serve, args=(theirs, folder, number), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, message: bytes) -> None:
        try:
            self.connection.send_bytes(message)
        except OSError:
            raise RankError([(self.number, self.death())]) from None

    def receive(self) -> Report | None:
        """The next report, or None when the process has ended."""
        try:
            report = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return None
        assert isinstance(report, Report)
        return report

    def death(self) -> str:
        self.process.join(STACKS_TIMEOUT_S)
        code = self.process.exitcode
        assert code is not None, f"rank {self.number} closed its pipe and goes on"
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return f"{cause}\n{self._read_stacks()}"

    def hang(self) -> str:
        """Where every Python thread of the rank is now."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACKS_TIMEOUT_S
        size = -1
        while time.monotonic() < deadline and (size <= 0 or size != self.stacks.stat().st_size):
            size = self.stacks.stat().st_size
            time.sleep(0.05)
        return f"did not finish; it was here:\n{self._read_stacks()}"

    def _read_stacks(self) -> str:
        # Without thread numbers, so that equal stacks fold, and without the bench's own thread.
        threads = re.sub(r"0x[0-9a-f]{8,}", "...", self.stacks.read_text()).split("\n\n")
        return "\n\n".join(text for text in threads if "_watch_parent" not in text)

    def kill(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.process.close()


def _next_reports(ranks: Sequence[_Rank], timeout_s: float) -> dict[int, Report]:
    """One report from each rank, in order of arrival; a crash or a hang is a `RankError`."""
    reports: dict[int, Report] = {}
    pending = {rank.connection: rank for rank in ranks}
    deadline = time.monotonic() + timeout_s
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            hangs = [(rank.number, rank.hang()) for rank in pending.values()]
            raise RankError([*_failures(reports), *hangs])
        for rank in [rank for rank in pending.values() if rank.connection in ready]:
            report = rank.receive()
            if report is None:
                raise RankError([*_failures(reports), (rank.number, rank.death())])
            del pending[rank.connection]
            reports[rank.number] = report
            if report.error is not None:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return reports


def _failures(reports: dict[int, Report]) -> list[tuple[int, str]]:
    return [
        (rank, f"raised\n{report.traceback}")
        for rank, report in reports.items()
        if report.error is not None
    ]


def _require_success(reports: dict[int, Report]) -> None:
    if failures := _failures(reports):
        raise RankError(failures)
