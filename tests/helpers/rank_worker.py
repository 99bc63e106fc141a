"""One rank of the test bench: a process that runs jobs until its parent is gone.

The parent side is `ranks`. Between the two runs one pipe, and every message on it is bytes made by
`pickle`, never by `torch.multiprocessing`, so that tensors travel as values and no shared
memory outlives a rank.

    parent                          rank
    start the process   ->          import torch
                        <-          Report (ready)
    Job                 ->          join a new gloo group, call the function
                        <-          Report (result or error)
    b"" to every rank   ->          leave the group, collect garbage
                        <-          Report (left)

A rank leaves only when every rank has reported: a gloo peer that is still reading the last
collective would otherwise see its connection closed.
"""

import copyreg
import faulthandler
import gc
import io
import os
import pickle
import queue
import shutil
import signal
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fullshard.divergence import monitor
from fullshard.divergence.journal import note_exception
from tests.helpers.backends import ENVIRONMENTS, own_device
from tests.helpers.groups import leave_group, spare_collections
from tests.helpers.life_cycle import check_every_change_of_state
from tests.helpers.torch_costs import spare_torch_costs


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What one rank has to do: which group to join and, pickled, which call to make there."""

    rank: int
    world_size: int
    store: Path
    group_timeout: timedelta
    backend: str
    call: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What became of one exchange with a rank: a pickled result, or an error and its traceback."""

    result: bytes = b""
    error: BaseException | None = None
    traceback: str = ""


class StandInError(Exception):
    """Stands for an exception that does not survive pickling; keeps its type's name and its text."""

    def __init__(self, type_name: str, text: str) -> None:
        super().__init__(type_name, text)
        self.type_name = type_name
        self.text = text

    def __str__(self) -> str:
        return f"{self.type_name}: {self.text}"


def serve(connection: Connection, folder: Path, number: int) -> None:
    """Do the jobs that come through the pipe, as rank ``number`` of the bench with this folder."""
    os.setsid()  # keeps Ctrl-C from the rank; it ends when the other end of the pipe closes
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    stacks = stacks_file(folder, number).open("a")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_watch_parent, args=(connection, folder, inbox), daemon=True).start()

    torch.set_num_threads(1)
    spare_collections()
    check_every_change_of_state()
    spare_torch_costs()
    connection.send_bytes(pickle.dumps(Report()))
    while True:
        connection.send_bytes(pickle.dumps(_run(pickle.loads(inbox.get()))))
        inbox.get()
        connection.send_bytes(pickle.dumps(_leave()))


def pickled(value: Any) -> bytes:
    """Return what `pickle.loads` makes an equal value of, without what torch does to save a file for each tensor."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.dispatch_table = copyreg.dispatch_table.copy() | {torch.Tensor: _reduced}
    pickler.dump(value)
    return buffer.getvalue()


def _reduced(tensor: torch.Tensor) -> Any:
    is_plain = (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or vars(tensor))
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )
    if not is_plain:
        return tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    return tensor_of, (to_bytes(tensor), tensor.dtype, tuple(tensor.shape))


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements of a tensor in the order of its dimensions."""
    data: bytes = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return data


def tensor_of(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a new tensor of elements that `to_bytes` gave."""
    if not data:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(tuple(shape))


def stacks_file(folder: Path, rank: int) -> Path:
    """Where this rank's stacks go when it crashes or is asked for them."""
    return folder / f"rank{rank}.stacks"


def _watch_parent(connection: Connection, folder: Path, inbox: queue.SimpleQueue[bytes]) -> None:
    """Pass messages on; when the parent is gone, however it went, leave nothing behind."""
    try:
        while True:
            inbox.put(connection.recv_bytes())
    except (EOFError, OSError):
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def _run(job: Job) -> Report:
    gc.freeze()  # see `leave_group`
    os.environ.update(ENVIRONMENTS.get(job.backend, {}))
    try:
        dist.init_process_group(
            job.backend,
            device_id=own_device(job.backend, job.rank),
            rank=job.rank,
            world_size=job.world_size,
            store=dist.FileStore(str(job.store), job.world_size),
            timeout=job.group_timeout,
        )
        monitor.install()
        torch.manual_seed(0)
        fn, args, kwargs = pickle.loads(job.call)
        return Report(result=pickled(fn(*args, **kwargs)))
    except BaseException as error:
        # The process goes on, as no other does: what others learn from an exception that ends a process.
        note_exception(error)
        return _failure(error)


def _leave() -> Report:
    try:
        leave_group()
        return Report()
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> Report:
    text = "".join(traceback.format_exception(error))
    try:
        portable = pickle.loads(pickle.dumps(error))
    except Exception:
        portable = StandInError(type(error).__name__, str(error))
    return Report(error=portable, traceback=text)
