"""Ranks that run the programs of `examples/clients`, one after the other; `clients.py` starts and asks them.

Importing a client takes many seconds, so ranks live on from program to program. Between two programs the process group,
the environment and Accelerate's global state are put back. When a rank fails, and the others do not fail with it, all
are replaced. On a CPU ranks are forked from a process that has the clients imported; a forked process cannot use
a GPU, so there every rank imports them itself.
"""

import gc
import importlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

__all__ = ["Engine", "Job", "Outcome", "Ranks", "first_error"]

Engine = Literal["torch", "fullshard"]

JOB_TIMEOUT_S = 600.0
"""A job takes seconds on an idle machine; this is for ranks that wait for each other forever."""
GRACE_S = 10.0
"""How long other ranks may go on once one has failed: they may wait for it forever."""
START_TIMEOUT_S = 300.0
STOPPED = "no answer: the rank was stopped"

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Some machines advertise AMX and do not allow it.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",  # the process group is there before the client looks for it
    "TORCHELASTIC_RUN_ID": "clients",  # Lightning asks for it, and then takes the ranks as they are
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A program and its arguments."""

    program: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a rank has to say of a job."""

    losses: list[float] = field(default_factory=list)
    """And, after the losses, the program's checks."""
    saved: list[float] = field(default_factory=list)
    """What the program says of the model that it saved."""
    engines: tuple[str, ...] = ()
    """Whose sharded modules the model had."""
    error: str | None = None


def first_error(outcomes: Sequence[Outcome]) -> str | None:
    """Return what went wrong: the first rank's error that is not its wait for another one."""
    errors = [outcome.error for outcome in outcomes if outcome.error]
    return next((error for error in errors if error != STOPPED), errors[0] if errors else None)


class Ranks:
    """A world of one engine; started when first needed."""

    def __init__(
        self,
        engine: Engine,
        size: int,
        device: str,
        folder: Path,
        programs: Sequence[str],
        job_timeout_s: float = JOB_TIMEOUT_S,
    ) -> None:
        self._engine, self._size, self._device = engine, size, device
        self._job_timeout_s = job_timeout_s
        self._folder, self._programs = folder, tuple(programs)
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, job: Job) -> list[Outcome]:
        """Run a program on every rank; the outcomes by rank, with an error where there was one."""
        if not self._ranks:
            self._start()
        store = str(self._folder / f"store_{self._engine}_{self._size}_{os.urandom(4).hex()}")
        for _, connection in self._ranks:
            connection.send((store, job))
        outcomes = self._outcomes(self._job_timeout_s)
        if any(outcome is None for outcome in outcomes):
            self.close()
        else:
            # A rank leaves the process group when all have reported: another may still read from it.
            for _, connection in self._ranks:
                connection.send(None)
        missing = Outcome(error=STOPPED)
        return [outcome or missing for outcome in outcomes]

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._ranks:
            connection.close()
            process.kill()
            process.join()
        self._ranks = []

    def _start(self) -> None:
        os.environ.update(ENVIRONMENT)
        if self._device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        context: Any = multiprocessing.get_context(
            "spawn" if self._device == "cuda" else "forkserver"
        )
        if self._device != "cuda":
            context.set_forkserver_preload(list(self._programs))
        for rank in range(self._size):
            ours, theirs = multiprocessing.Pipe()
            log = self._folder / f"{self._engine}_{self._size}_rank_{rank}.txt"
            place = (self._engine, rank, self._size, self._device, str(log))
            process = context.Process(target=_serve, args=(theirs, *place), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        started = self._outcomes(START_TIMEOUT_S)
        errors = [outcome.error if outcome else "no answer" for outcome in started]
        if any(errors):
            self.close()
            raise RuntimeError(f"The ranks of {self._engine} did not start: {errors}")

    def _outcomes(self, timeout_s: float) -> list[Outcome | None]:
        """Return one outcome per rank; None of a rank that ended, or went on for too long."""
        found: list[Outcome | None] = [None] * len(self._ranks)
        pending = {connection: number for number, (_, connection) in enumerate(self._ranks)}
        deadline = time.monotonic() + timeout_s
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                number = pending.pop(connection)
                try:
                    found[number] = connection.recv()
                except (EOFError, OSError):
                    found[number] = None
                outcome = found[number]
                if outcome is None or outcome.error:
                    deadline = min(deadline, time.monotonic() + min(GRACE_S, timeout_s))
        return found


# --- in the rank ---------------------------------------------------------------------------------------


def _serve(
    connection: Connection, engine: Engine, rank: int, size: int, device: str, log: str
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size)
    )
    output = Path(log).open("a", buffering=1)
    sys.stdout = sys.stderr = output
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.use_deterministic_algorithms(True, warn_only=True)
    if engine == "fullshard":
        import fullshard

        fullshard.install()
    connection.send(Outcome())
    try:
        while True:
            store, job = connection.recv()
            environment = dict(os.environ)
            connection.send(_run(store, job, device))
            connection.recv()
            _clean_up()
            os.environ.clear()
            os.environ.update(environment)
    except (EOFError, OSError):
        os._exit(0)


def _run(store: str, job: Job, device: str) -> Outcome:
    print(f"--- {job.program} {' '.join(job.arguments)}", flush=True)
    size = int(os.environ["WORLD_SIZE"])
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            rank=int(os.environ["RANK"]),
            world_size=size,
            store=dist.FileStore(store, size),
            timeout=timedelta(seconds=JOB_TIMEOUT_S),
        )
        program = importlib.import_module(job.program)
        trained = program.train(program.command_line().parse_args(job.arguments))
        losses = [*trained.losses, *trained.checks]
        print("losses", *losses, flush=True)
        return Outcome(losses=losses, saved=trained.saved, engines=_engines(trained.model))
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        # What a list or a cause is announced by says little without its beginning.
        told = " ".join(each.strip() for each in lines[: 2 if lines[0].endswith(":") else 1])
        return Outcome(error=f"{type(error).__name__}: {told}")


def _engines(model: torch.nn.Module) -> tuple[str, ...]:
    """Say who made the sharded modules: the packages of their classes' FSDP base."""
    bases = {
        base.__module__.split(".")[0]
        for module in model.modules()
        for base in type(module).__mro__
        if base.__name__ in ("FSDPModule", "FullyShardedDataParallel")
    }
    return tuple(sorted(bases))


def _clean_up() -> None:
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
