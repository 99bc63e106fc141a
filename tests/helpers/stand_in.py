"""A backend with NCCL's manners on CPUs, over gloo: what fullshard promises on NCCL is tested with it where there is no GPU.

    dist.init_process_group("stand-in", ...)       # after this module was imported

Its manners. Each has a test in tests/test_stand_in_backend.py; tests/gpu/test_nccl_ranks.py asks NCCL for the same:

    later         a call returns at once. A thread of the communicator does the work, in the order of the calls. The host
                  waits only for works that it is told to wait for
    lazy          ranks connect at the first collective of a process group, not when the group is made
    no meeting    ranks that call different collectives of equal size get each other's data. If sizes or kinds differ, the
                  collective never ends
    at once       if the process of a rank is gone, all works of the others fail with `DistBackendError`, and so does every later
                  call. The error names no rank
    abort         `abort` ends all works with an error, and every later call raises
    torn down     a thread looks at the communicator. With TORCH_NCCL_ASYNC_ERROR_HANDLING=1 or 3 (the default of torch) it aborts
                  the process soon after an error, with 0 or 2 it does not. `abort` before that prevents it
    captured      `destroy_process_group` waits as long as something captured holds the communicator

What it does not have: streams and devices. The host waits for a work before it reads what that writes; with NCCL the device
does, and the host goes on. `dist.split_group` needs an accelerator.
"""

from __future__ import annotations

import os
import queue
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistBackendError, PrefixStore, Store

from fullshard.mesh.backends import Backend, know
from fullshard.torch_border import process_groups

NAME = "stand-in"
CPU = torch.device("cpu")

GONE = (
    "NCCL error in: stand_in.py, remote process exited or there was a network error, ncclRemoteError: A call failed possibly "
    "due to a network error or a remote process exiting prematurely."
)
ABORTED = "NCCL communicator was aborted."
DESTROYED = "NCCL communicator was destroyed."

TEAR_DOWN_S = 0.1
"""How often torch's own watchdog looks at NCCL's communicators."""
TEARS_DOWN = ("1", "3")

_AnyProcessGroup: Any = dist.ProcessGroup
"""Without its types: its stub has overloads, and other names than some versions of torch."""
_AnyWork: Any = dist.Work


class StandInWork(_AnyWork):  # type: ignore[misc]
    """A collective that a communicator does later."""

    def __init__(self, communicator: Communicator, call: Callable[[], None], kind: int) -> None:
        super().__init__()
        self.communicator = communicator
        self.call = call
        self._kind = kind
        self.error: str | None = None
        self._is_done = threading.Lock()
        self._is_done.acquire()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._ending = threading.Lock()
        self._has_ended = False

    def end(self, error: str | None = None) -> None:
        """Be done, or have failed."""
        with self._ending:
            if self._has_ended:
                return
            self._has_ended, self.error = True, error
        self._is_done.release()
        self._future.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for it, without a frame of Python in between: NCCL's waits have none either."""
        self._is_done.acquire()
        self._is_done.release()
        if self.error is not None:
            raise DistBackendError(self.error)
        return True

    def is_completed(self) -> bool:
        """Return whether it is done, or has failed."""
        return self._has_ended

    def get_future(self) -> Any:
        """Return a future that is completed with it."""
        return self._future

    def _get_op_type(self) -> int:
        return self._kind


# Nothing of it is a user's line, as nothing of NCCL is.
StandInWork.wait.__code__ = StandInWork.wait.__code__.replace(co_filename="<stand-in>")
process_groups._OBSERVED_WAITS.add(StandInWork.wait.__code__)


class Communicator:
    """The works of one process group, done one after the other."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._works: queue.SimpleQueue[StandInWork | None] = queue.SimpleQueue()
        self._pending: list[StandInWork] = []
        self._lock = threading.Lock()
        self._gloo: Any = None
        self.error: str | None = None
        """Why it cannot be used any more."""
        self.is_aborted = threading.Event()
        self.holders = 0
        """What was captured with it, and is alive."""
        self._is_free = threading.Condition(self._lock)
        threading.Thread(target=self._run, name="stand-in", daemon=True).start()

    def call(self, call: Callable[[Any], Any], header: Sequence[int], kind: int) -> StandInWork:
        """Do something with the group of gloo later; ranks whose headers differ wait for good."""

        def run() -> None:
            gloo = self._connected()
            if self._size > 1 and header:
                own = torch.tensor(header)
                found = [torch.empty_like(own) for _ in range(self._size)]
                gloo.allgather([found], [own]).wait()
                if any(each.tolist() != own.tolist() for each in found):
                    # Nothing is sent there: this ends with the connection.
                    gloo.recv([own], (self._rank + 1) % self._size, 4711).wait()
            done = call(gloo)
            if done is not None:
                done.wait()

        with self._lock:
            if self.error is not None:
                raise DistBackendError(self.error)
            work = StandInWork(self, run, kind)
            self._pending.append(work)
        self._works.put(work)
        return work

    def _connected(self) -> Any:
        if self._gloo is None:
            group = dist.ProcessGroup(self._store, self._rank, self._size)
            gloo = dist.ProcessGroupGloo(self._store, self._rank, self._size, self._timeout)
            group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            self._gloo = group
        return self._gloo

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            if work.is_completed():
                continue
            try:
                work.call()
            except RuntimeError:
                self._fail(GONE)
                if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") in TEARS_DOWN:
                    self._tear_down()
                return
            with self._lock:
                if work in self._pending:
                    self._pending.remove(work)
            work.end()

    def _tear_down(self) -> None:
        if not self.is_aborted.wait(TEAR_DOWN_S):
            os.abort()

    def _fail(self, error: str) -> None:
        with self._lock:
            self.error = self.error or error
            pending, self._pending = self._pending, []
        for work in pending:
            work.end(self.error)

    def abort(self) -> None:
        """End all works."""
        self._fail(ABORTED)
        self.is_aborted.set()

    def destroy(self) -> None:
        """End when all works are done, and nothing captured holds it any more."""
        with self._is_free:
            while self.holders and not self.is_aborted.is_set():
                self._is_free.wait(0.1)
        for work in list(self._pending):
            work._is_done.acquire()
            work._is_done.release()
        self.is_aborted.set()
        self._fail(DESTROYED)
        self._works.put(None)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold it, as a captured graph does."""
        with self._lock:
            self.holders += 1
        try:
            yield
        finally:
            with self._is_free:
                self.holders -= 1
                self._is_free.notify_all()


class _Options:
    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout


class StandIn(_AnyProcessGroup):  # type: ignore[misc]
    """The process group: every collective goes to the communicator."""

    supports_splitting = False

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._own_size = size
        self.options = _Options(timeout)
        self.communicator = Communicator(PrefixStore(NAME, store), rank, size, timeout)

    def size(self) -> int:
        """Return the number of ranks."""
        return self._own_size

    def getBackendName(self) -> str:
        """Return the name by which it was registered."""
        return NAME

    @property
    def group_name(self) -> str:
        """The name torch knows this group by."""
        return str(dist.distributed_c10d._world.pg_names[self])

    def _get_backend(self, device: torch.device) -> StandIn:
        if device.type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    def abort(self) -> None:
        """End all collectives."""
        self.communicator.abort()

    def shutdown(self) -> None:
        """Destroy the communicator."""
        super().shutdown()  # what fullshard does before
        self.communicator.destroy()

    # --- collectives --------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        """Reduce in place."""
        tensors, options = _list(tensors), options or dist.AllreduceOptions()
        return self._call("allreduce", tensors, 1, lambda gloo: gloo.allreduce(tensors, options))

    def allreduce_coalesced(self, tensors: Any, options: Any = None) -> Any:
        """Reduce several in place."""

        def call(gloo: Any) -> None:
            for each in tensors:
                gloo.allreduce([each], _reduce(options)).wait()

        return self._call("allreduce", tensors, 2, call)

    def broadcast(self, tensors: Any, options: Any = None) -> Any:
        """Send what one rank has to all."""
        tensors, options = _list(tensors), options or dist.BroadcastOptions()
        return self._call("broadcast", tensors, 0, lambda gloo: gloo.broadcast(tensors, options))

    def reduce(self, tensors: Any, options: Any = None) -> Any:
        """Reduce to one rank."""
        tensors = _list(tensors)
        return self._call("reduce", tensors, 3, lambda gloo: gloo.reduce(tensors, options))

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        """Gather one tensor of each rank."""
        return self._call("allgather", inputs, 4, lambda gloo: gloo.allgather(outputs, inputs))

    def all_gather_single(self, output: Tensor, tensor: Tensor, options: Any = None) -> Any:
        """Gather one tensor of each rank into one."""
        return self._call("gather", [tensor], 5, lambda gloo: gloo._allgather_base(output, tensor))

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None
    ) -> Any:
        """Gather several."""

        def call(gloo: Any) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                gloo._allgather_base(output, tensor).wait()

        return self._call("gather", inputs, 6, call)

    def reduce_scatter(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        """Reduce a list of tensors, one for each rank."""

        def call(gloo: Any) -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                _reduce_scatter(gloo, output, torch.stack(parts), options)

        return self._call("reduce_scatter", [each for parts in inputs for each in parts], 9, call)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, options: Any = None) -> Any:
        """Reduce one tensor of each rank."""
        return self._call(
            "reduce_scatter",
            [tensor],
            9,
            lambda gloo: _reduce_scatter(gloo, output, tensor, options),
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None
    ) -> Any:
        """Reduce several."""

        def call(gloo: Any) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                _reduce_scatter(gloo, output, tensor, options)

        return self._call("reduce_scatter", inputs, 9, call)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, received: Any, sent: Any, options: Any = None
    ) -> Any:
        """Exchange parts."""
        # Ranks may send parts of different sizes.
        return self._call(
            "all_to_all",
            [],
            10,
            lambda gloo: gloo.alltoall_base(output, tensor, received, sent),
        )

    def alltoall(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        """Exchange tensors."""
        return self._call("all_to_all", [], 11, lambda gloo: gloo.alltoall(outputs, inputs))

    def gather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        """Gather at one rank."""
        return self._call("gather", inputs, 7, lambda gloo: gloo.gather(outputs, inputs, options))

    def scatter(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        """Scatter from one rank."""
        return self._call(
            "scatter", outputs, 8, lambda gloo: gloo.scatter(outputs, inputs, options)
        )

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        return self._call("barrier", [], 16, lambda gloo: gloo.barrier())

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        """Send to a rank."""
        return self.communicator.call(lambda gloo: gloo.send(tensors, to, tag), (), 12)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        """Receive from a rank."""
        return self.communicator.call(lambda gloo: gloo.recv(tensors, source, tag), (), 13)

    def _call(
        self, name: str, tensors: Sequence[Tensor], kind: int, call: Callable[[Any], Any]
    ) -> StandInWork:
        header = (zlib.crc32(name.encode()), sum(each.nbytes for each in tensors))
        return self.communicator.call(call, header, kind)

    # Names of the same collectives before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _reduce(options: Any) -> Any:
    found = dist.AllreduceOptions()
    if options is not None:
        found.reduceOp = options.reduceOp
    return found


def _reduce_scatter(gloo: Any, output: Tensor, tensor: Tensor, options: Any) -> None:
    """Reduce and keep a part: as gloo does it, but for any operation that it reduces by."""
    whole = tensor.detach().clone()
    operation = options.reduceOp if options is not None else dist.ReduceOp.SUM
    is_average = operation == dist.ReduceOp.AVG
    reduced = dist.AllreduceOptions()
    reduced.reduceOp = cast(Any, dist.ReduceOp.SUM if is_average else operation)
    gloo.allreduce([whole], reduced).wait()
    part = whole.view(gloo.size(), -1)[gloo.rank()]
    output.detach().view(-1).copy_(part / gloo.size() if is_average else part)


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> StandIn:
    return StandIn(store, rank, size, timeout)


dist.Backend.register_backend(NAME, _create, devices=["cpu"])
know(Backend(name=NAME, has_aborts=True))
