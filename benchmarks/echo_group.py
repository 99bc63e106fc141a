"""A process group of any size in one process, whose results are defined: all other ranks echo this one.

torch's `fake` group leaves outputs of reductions unwritten in some versions. Here every rank is taken to
send what this one sends, so a gather repeats this rank's piece, and a sum over ranks adds up all pieces of
this rank's input. The work is ordinary kernels on the current stream: on a GPU the order of streams decides
whether the numbers are right, as it does with NCCL, and the host waits for nothing.

    import benchmarks.echo_group                      # makes the backend known
    dist.init_process_group("echo", store=dist.HashStore(), rank=0, world_size=8)
"""

import contextlib
import importlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["EchoGroup"]

_SUM, _AVG, _MAX, _MIN = (
    dist.ReduceOp.SUM,
    dist.ReduceOp.AVG,
    dist.ReduceOp.MAX,
    dist.ReduceOp.MIN,
)


_AnyProcessGroup: Any = dist.ProcessGroup
"""Without its types: its stub has overloads that nobody calls, and other names than some versions of torch."""


class EchoGroup(_AnyProcessGroup):  # type: ignore[misc]
    """One rank; the others are imagined."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._own_rank, self._own_size = rank, size

    def size(self) -> int:
        """Return the number of ranks."""
        return self._own_size

    def getBackendName(self) -> str:
        """Return the name by which it was registered."""
        return "echo"

    @property
    def group_name(self) -> str:
        """The name torch knows this group by."""
        return str(dist.distributed_c10d._world.pg_names[self])

    def allgather(self, outputs: Any, inputs: Sequence[Tensor], options: Any = None) -> Any:
        """Repeat each input in all of its outputs."""
        for copies, source in zip(outputs, inputs, strict=True):
            for copy in copies:
                _copy(copy, source)
        return _done(outputs)

    def all_gather_single(self, output: Tensor, source: Tensor, options: Any = None) -> Any:
        """Repeat the input once for each rank."""
        for copy in output.view(self._own_size, -1):
            _copy(copy, source.view(-1))
        return _done(output)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any = None
    ) -> Any:
        """Repeat each input once for each rank."""
        for output, source in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, source)
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, options: Any) -> Any:
        """Sum (or average) the pieces for all ranks: every element of the input counts."""
        pieces = source.view(self._own_size, -1)
        operation = _known(options, _SUM, _AVG)
        # In float64, so that the result does not depend on where the pieces lie in memory.
        result = pieces.sum(0, dtype=torch.float64)
        if operation == _AVG:
            result /= self._own_size
        output.view(-1).copy_(result)
        return _done(output)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any
    ) -> Any:
        """Reduce several inputs."""
        for output, source in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, source, options)
        return _done(outputs)

    def all_to_all_single(
        self, output: Tensor, source: Tensor, received: Any, sent: Any, options: Any = None
    ) -> Any:
        """Receive from each rank what this one sends to it."""
        _copy(output, source)
        return _done(output)

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> Any:
        """Multiply by the number of ranks, or leave averages and extremes as they are."""
        if _known(options, _SUM, _AVG, _MAX, _MIN) == _SUM:
            for tensor in tensors:
                tensor.mul_(self._own_size)
        return _done(tensors)

    def broadcast(self, tensors: Sequence[Tensor], options: Any = None) -> Any:
        """Leave what is there: the first rank has the same."""
        return _done(tensors)

    def barrier(self, options: Any = None) -> Any:
        """Return at once."""
        return _done(None)

    # Names of the same collectives before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _known(options: Any, *operations: dist.ReduceOp.RedOpType) -> dist.ReduceOp.RedOpType:
    """Return which of the operations is asked for."""
    for operation in operations:
        if options.reduceOp == operation:
            return operation
    raise NotImplementedError(f"an echo group does not reduce by {options.reduceOp}")


def _copy(output: Tensor, source: Tensor) -> None:
    """Copy, unless the input already lies where the output is."""
    if output.data_ptr() != source.data_ptr():
        output.copy_(source)


def _done(result: Any) -> Any:
    """Return a finished work object: what was asked for is on the current stream."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(future)


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> EchoGroup:
    return EchoGroup(rank, size)


dist.Backend.register_backend("echo", _create, devices=["cpu", "cuda"])


def _know_imagined_ranks() -> None:
    """Tell fullshard, whichever checkout it is, that the other ranks do not answer."""
    for folder in ("mesh", "comm"):  # where an older checkout has it
        with contextlib.suppress(ImportError):
            backends = importlib.import_module(f"fullshard.{folder}.backends")
            backends.know(backends.Backend(name="echo", ranks="imagined"))
            return


_know_imagined_ranks()
