"""Small programs that run as the ranks of a job: real processes with real ends, many jobs side by side.

    def program(me: Rank) -> None: ...             # what every rank runs

    runner = start({"a job": Job(program=program, ranks=3)}, folder)
    result = Results(folder).wait("a job", 60)     # how each of its ranks ended

A rank is forked from a process that has imported everything, and ends as an interpreter does: the exception hook,
threads, `atexit` and, where the job asks for it, the destructors of all objects. Whoever starts jobs reads files in the folder, so several processes
of tests can share one start.

    tests        `start`      -> runner       forked from the server of `ranks`; imports what ranks need
    runner                    -> store host   the stores of all jobs, as torchrun's agent has them
    runner                    -> ranks        of as many jobs at a time as `TOGETHER` says
    rank         RANK.json    <- rank         when it diverged, and what it raised
    tests        result.json  <- runner       how all ranks of a job ended
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fullshard.errors import DivergenceError, exception_message
from tests.helpers.backends import ENVIRONMENTS, own_device
from tests.helpers.preloaded import be_main_process
from tests.helpers.ranks import FORK_SERVER
from tests.helpers.torch_costs import spare_torch_costs

TOGETHER = 10
"""How many jobs run at a time. Most of them wait."""

JOB_TIMEOUT_S = 90.0
"""How long a job may take. Then its ranks are asked for their stacks and killed."""

STACKS_S = 1.0
"""How long ranks have to write their stacks."""

PR_SET_PDEATHSIG = 1
CLONE_NEWNS, CLONE_NEWPID = 0x20000, 0x20000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000


@dataclass(kw_only=True)
class Rank:
    """One rank of a job, as its program sees it."""

    number: int
    world_size: int
    odd: int
    """The rank that does something else than the others."""
    folder: Path
    """Shared by the ranks of the job."""
    backend: str = "gloo"
    """Of the default process group."""
    diverged: float | None = None
    """When this rank reached the place where the odd one diverges."""
    starved_before: Mapping[str, int] = field(default_factory=dict)
    """How long each thread of this rank had waited for a processor until then."""

    @property
    def is_odd(self) -> bool:
        """Whether this is the rank that diverges."""
        return self.number == self.odd

    def diverges(self) -> bool:
        """Return whether this rank is to do something else now, and note the time."""
        if self.diverged is None:
            self.diverged, self.starved_before = time.monotonic(), _starved_ns()
            self._note("diverged", {"at": self.diverged})
        return self.is_odd

    def note_end(self, error: BaseException | None) -> None:
        """Tell the runner what the program raised."""
        found = error
        while found is not None and not isinstance(found, DivergenceError):
            found = found.__cause__  # torch's pipelines raise an error of their own from it
        found = found or error
        kind = type(found).__name__ if found else ""
        notes = getattr(found, "__notes__", ())
        message = "\n".join([exception_message(found), *notes]) if found else ""
        before = self.starved_before
        starved = sum(now - before.get(thread, 0) for thread, now in _starved_ns().items()) / 1e9
        self._note(
            "end",
            {"raised": kind, "message": message, "at": time.monotonic(), "starved": starved},
        )

    def _note(self, name: str, value: dict[str, Any]) -> None:
        # Renamed into place, since the rank may be killed at any time.
        path = self.folder / f"{self.number}.{name}.json"
        path.with_suffix(".part").write_text(json.dumps(value))
        path.with_suffix(".part").rename(path)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A program, and on which ranks it runs."""

    program: Callable[[Rank], None]
    ranks: int = 2
    odd: int = 1
    """The rank that diverges."""
    store_on_rank_0: bool = False
    """Whether rank 0 has the store of the process group, and not the process that started the ranks."""
    resumed_after_s: float | None = None
    """When a rank that stops itself is continued; it is not by default."""
    timeout_s: float = JOB_TIMEOUT_S
    backend: str = "gloo"
    """Of the default process group: "gloo", "stand-in", or "nccl" with all ranks on one GPU."""
    is_apart: bool = False
    """Whether the odd rank has a process namespace of its own, as in a container: no other rank can see its process."""
    tears_down: bool = False
    """Whether ranks tear the interpreter down at their end, with the destructors of all objects. It takes four
    times as long as the rest of a small program, so few do."""


@dataclass(kw_only=True)
class RankEnd:
    """How one rank ended."""

    code: int | None
    """Exit code, the negative number of a signal, or None if it was stopped and had to be killed."""
    raised: str = ""
    """Type of the exception that left the program."""
    message: str = ""
    at: float = 0.0
    """When the program ended, or the process if it was not asked."""
    starved: float = 0.0
    """How long the threads that it has at the end have waited for a processor since the divergence, all together."""
    hung: bool = False
    stderr: str = ""
    """The last lines; of a rank that hung, with the stacks of all its threads."""


@dataclass(kw_only=True)
class JobResult:
    """How a job ended."""

    ends: list[RankEnd] = field(default_factory=list)
    diverged: float | None = None
    """When the odd rank diverged; None if it never did."""

    def seconds(self, rank: int) -> float:
        """Return how long after the divergence the rank's program ended."""
        return self.ends[rank].at - (self.diverged or 0.0)

    @property
    def starved(self) -> float:
        """How long threads have waited for processors: so much later, at most, did a rank end on a crowded machine."""
        return sum(end.starved for end in self.ends)


class Results:
    """The results of jobs that were started, by files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def wait(self, name: str, timeout_s: float) -> JobResult:
        """Return the result of a job as soon as there is one."""
        path = self._folder / name / "result.json"
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no result of {name!r} after {timeout_s} s")
            time.sleep(0.1)
        values = json.loads(path.read_text())
        values["ends"] = [RankEnd(**end) for end in values["ends"]]
        return JobResult(**values)


def no_preparation() -> None:
    """Do nothing."""


def start(
    jobs: Mapping[str, Job], folder: Path, prepare: Callable[[], None] = no_preparation
) -> Any:
    """Start a process that runs the jobs, in this order; return the process, to be joined.

    It calls ``prepare`` before it starts a rank, for what all ranks would otherwise do anew. That must not start a
    thread nor run a backward, which leave a process that cannot be forked.
    """
    runner = FORK_SERVER.Process(target=_run_all, args=(dict(jobs), folder, prepare), daemon=True)
    runner.start()
    return runner


# --- in the runner ----------------------------------------------------------------------------------------------


def _run_all(jobs: dict[str, Job], folder: Path, prepare: Callable[[], None]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests get it, and end this process
    torch.set_num_threads(1)
    spare_torch_costs()
    prepare()
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = (
            False  # torch.library has hundreds, and ranks would call them all at their ends
        )
    gc.collect()
    gc.freeze()  # what is there now is never collected, so ranks do not copy it to count references
    stores = iter(_host_stores(len(jobs)))
    waiting = [(name, job, next(stores)) for name, job in jobs.items()]
    running: list[_RunningJob] = []
    while waiting or running:
        while waiting and len(running) < TOGETHER:
            name, job, port = waiting.pop(0)
            running.append(_RunningJob(job, folder / name, port))
        processes = [rank.pidfd for each in running for rank in each.ranks if rank.end is None]
        select.select(processes, [], [], 0.1)
        running = [each for each in running if not each.has_ended()]


def _host_stores(num_stores: int) -> list[int]:
    """Start a process with a store for each job; return their ports."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        _die_with_parent()
        stores = [
            dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            for _ in range(num_stores)
        ]
        theirs.sendall(json.dumps([store.port for store in stores]).encode() + b"\n")
        signal.pause()
    theirs.close()
    with ours.makefile() as lines:
        ports: list[int] = json.loads(lines.readline())
    return ports


class _RunningRank:
    """The process of one rank."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.stopped_since: float | None = None
        self.end: RankEnd | None = None

    def reap(self) -> None:
        """Note how the process ended, if it has."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self._note(os.waitstatus_to_exitcode(status))

    def kill(self, *, hung: bool) -> None:
        """End the process, and note that it had to be."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._note(None)
        assert self.end is not None
        self.end.hung = hung

    def is_stopped(self) -> bool:
        """Whether the process has been stopped by a signal."""
        state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state != "T":
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = time.monotonic()
        return state == "T"

    def _note(self, code: int | None) -> None:
        os.close(self.pidfd)
        self.end = RankEnd(code=code, at=time.monotonic())


class _RunningJob:
    """The processes of one job."""

    def __init__(self, job: Job, folder: Path, port: int) -> None:
        folder.mkdir()
        self._job = job
        self._folder = folder
        self._deadline = time.monotonic() + job.timeout_s
        if job.store_on_rank_0:
            port = _free_port()
        self.ranks = [
            _RunningRank(_fork_rank(job, number, folder, port)) for number in range(job.ranks)
        ]

    def has_ended(self) -> bool:
        """Look after the ranks; once all have ended, write the result and return True."""
        for rank in self._going():
            rank.reap()
        going = self._going()
        stopped = [rank for rank in going if rank.is_stopped()]
        if self._job.resumed_after_s is not None:
            for rank in stopped:
                if time.monotonic() - rank.stopped_since > self._job.resumed_after_s:
                    os.kill(rank.pid, signal.SIGCONT)
        elif len(stopped) == len(going):
            for rank in stopped:  # nobody is left who would wait for it
                rank.kill(hung=False)
        if self._going() and time.monotonic() > self._deadline:
            self._end_hung_ranks()
        if self._going():
            return False
        self._write_result()
        return True

    def _going(self) -> list[_RunningRank]:
        return [rank for rank in self.ranks if rank.end is None]

    def _end_hung_ranks(self) -> None:
        for rank in self._going():
            os.kill(rank.pid, signal.SIGUSR1)
        time.sleep(STACKS_S)
        for rank in self._going():
            rank.kill(hung=True)

    def _write_result(self) -> None:
        result = JobResult(diverged=self._note_of(self._job.odd, "diverged").get("at"))
        for number, rank in enumerate(self.ranks):
            assert rank.end is not None
            for key, value in self._note_of(number, "end").items():
                setattr(rank.end, key, value)
            stderr = (self._folder / f"{number}.stderr").read_text(errors="replace")
            rank.end.stderr = "\n".join(stderr.splitlines()[-60:])
            result.ends.append(rank.end)
        path = self._folder / "result.json"
        path.with_suffix(".part").write_text(json.dumps(asdict(result)))
        path.with_suffix(".part").rename(path)

    def _note_of(self, number: int, name: str) -> dict[str, Any]:
        path = self._folder / f"{number}.{name}.json"
        values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return values


def _starved_ns() -> dict[str, int]:
    """Return how long each thread of this process has been ready to run without a processor."""
    found = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, IndexError):  # a thread has ended, or the kernel does not count
            found[path.parent.name] = int(path.read_text().split()[1])
    return found


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port


# --- in a rank --------------------------------------------------------------------------------------------------


def _fork_rank(job: Job, number: int, folder: Path, port: int) -> int:
    """Fork the process of a rank, which ends when this one does; return its number."""
    pid = os.fork()
    if pid == 0:
        _die_with_parent()
        if job.is_apart and number == job.odd:
            be_apart()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        be_main_process()
        _redirect(folder / f"{number}.stderr")
        os.environ.update(
            RANK=str(number),
            LOCAL_RANK=str(number),
            WORLD_SIZE=str(job.ranks),
            LOCAL_WORLD_SIZE=str(job.ranks),
            MASTER_ADDR="localhost",
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE=str(not job.store_on_rank_0),
            GLOO_SOCKET_IFNAME="lo",
        )
        os.environ.update(ENVIRONMENTS.get(job.backend, {}))
        me = Rank(
            number=number,
            world_size=job.ranks,
            odd=job.odd,
            folder=folder,
            backend=job.backend,
        )
        _end(_run(job.program, me), tears_down=job.tears_down)
    return pid


def _run(program: Callable[[Rank], None], me: Rank) -> int:
    """Run a program as an interpreter does; return its exit code."""
    printed: list[BaseException] = []

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        printed.append(error)
        sys.__excepthook__(kind, error, traceback)

    try:
        sys.excepthook = hook
        device = own_device(me.backend, me.number)
        if device is not None:
            torch.set_default_device(device)
        dist.init_process_group(me.backend, device_id=device)
        torch.manual_seed(0)
        program(me)
    except SystemExit as end:
        me.note_end(end)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.last_value = error  # as the interpreter does
        try:
            # Another hook before ours may print the reason for it, or add notes to it.
            sys.excepthook(type(error), error, error.__traceback__)
            me.note_end(printed[-1])
        except BaseException as of_hook:  # the interpreter prints both
            me.note_end(of_hook)
        return 1
    me.note_end(None)
    return 0


def why_not_apart() -> str | None:
    """Return why no process namespace can be made here, if so."""
    pid = os.fork()
    if pid == 0:
        os._exit(_unshare())
    return os.strerror(code) if (code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) else None


def be_apart() -> None:
    """Go on as a process of a process namespace of its own. This process waits for that one, and ends in the same way.

    The first process of a namespace is immune against signals from inside, so it is the second one that goes on.
    """
    code = _unshare()
    assert code == 0, os.strerror(code)
    if first := os.fork():
        _end_like(first)
    _die_with_parent()
    _mount_proc()
    if second := os.fork():
        _, status = os.waitpid(second, 0)
        os._exit(os.waitstatus_to_exitcode(status) % 256)
    _die_with_parent()


def _unshare() -> int:
    """Let children have namespaces of their own for processes and mounts; return the number of an error, or 0."""
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.unshare(CLONE_NEWPID | CLONE_NEWNS) else 0


def _mount_proc() -> None:
    """Let /proc be that of the new namespace, as in a container. CUDA looks for its own process there."""
    libc = ctypes.CDLL(None, use_errno=True)
    private = libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
    assert private and libc.mount(b"proc", b"/proc", b"proc", 0, None) == 0, os.strerror(
        ctypes.get_errno()
    )


def _end_like(process: int) -> NoReturn:
    """Wait for a process that hands on how its child has ended, and end in that way."""
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code > 128:
        signal.signal(256 - code, signal.SIG_DFL) if 256 - code != signal.SIGKILL else None
        os.kill(os.getpid(), 256 - code)
    os._exit(code)


def _end(code: int, *, tears_down: bool) -> None:
    """End this process as an interpreter does."""
    if tears_down:
        ctypes.pythonapi.Py_Exit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _redirect(path: Path) -> None:
    """Let what this process prints, and the stacks of its threads, go to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = open(1, "w", 1), open(2, "w", 1, errors="backslashreplace")
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, 2)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
