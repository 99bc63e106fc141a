"""The manners of the stand-in for NCCL: one test for each, as its docstring lists them."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistBackendError

from tests.helpers import stand_in
from tests.helpers.rank_programs import Job, JobResult, Rank, Results, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def communicator() -> stand_in.Communicator:
    group: stand_in.StandIn = dist.group.WORLD  # type: ignore[assignment]
    return group.communicator


def note(me: Rank, text: str) -> None:
    """Write what a test is to see of a rank."""
    (me.folder / f"{me.number}.noted").write_text(text)


def works_are_done_later_and_in_order(me: Rank) -> None:
    gate, tensor = threading.Event(), torch.ones(2)
    held = communicator().call(lambda gloo: gate.wait() and None, (), 0)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    assert not held.is_completed() and not any(work.is_completed() for work in works)
    assert tensor.tolist() == [1.0, 1.0], "nothing is done before the work that was called first"
    gate.set()
    works[-1].wait()
    assert all(work.is_completed() for work in works)
    assert tensor.tolist() == [8.0, 8.0]


def ranks_connect_at_the_first_collective(me: Rank) -> None:
    if me.number == 0:  # alone: gloo would wait for the other rank here
        group = dist.new_group([0, 1], use_local_synchronization=True)
        assert group.communicator._gloo is None
    dist.barrier()
    assert communicator()._gloo is not None


def other_layers_data_is_taken(me: Rank) -> None:
    """Only sizes and kinds of collectives count: which layer's weights they are, the backend cannot know."""
    mine = torch.full((2,), float(me.number))
    gathered = torch.empty(4)
    dist.all_gather_single(gathered, mine) if hasattr(
        dist, "all_gather_single"
    ) else dist.all_gather_into_tensor(gathered, mine)
    assert gathered.tolist() == [0.0, 0.0, 1.0, 1.0]


def another_size_never_ends(me: Rank) -> None:
    work = dist.all_reduce(torch.ones(2 + me.number), async_op=True)
    other = dist.all_reduce(torch.ones(2), async_op=True)
    while communicator()._gloo is None:
        time.sleep(0.01)
    time.sleep(0.3)  # that it does not end is what is shown
    assert not work.is_completed() and not other.is_completed()
    note(me, "has seen it")
    while len(list(me.folder.glob("*.noted"))) < 2:
        time.sleep(0.01)
    dist.group.WORLD.abort()  # type: ignore[union-attr]
    for each in (work, other):
        with pytest.raises(DistBackendError, match="was aborted"):
            each.wait()
    with pytest.raises(DistBackendError, match="was aborted"):
        dist.all_reduce(torch.ones(2))


def errors_name_no_rank(me: Rank) -> None:
    dist.barrier()
    if me.diverges():
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    for call in (work.wait, lambda: dist.all_reduce(torch.ones(2))):
        with pytest.raises(DistBackendError, match="remote process exited") as caught:
            call()
        assert "1" not in str(caught.value)


def a_process_is_torn_down(me: Rank) -> None:
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
    stand_in.TEAR_DOWN_S = 3.0  # longer than the errors below take on a crowded machine
    errors_name_no_rank(me)
    note(me, "it has raised before")
    threading.Event().wait()


def an_abort_prevents_that(me: Rank) -> None:
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
    stand_in.TEAR_DOWN_S = 10.0
    dist.barrier()
    if me.diverges():
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(DistBackendError):
        dist.all_reduce(torch.ones(2))
    dist.group.WORLD.abort()  # type: ignore[union-attr]
    for thread in threading.enumerate():
        if thread.name == "stand-in":
            thread.join()  # which would have ended the process


def what_is_captured_holds_it(me: Rank) -> None:
    dist.barrier()
    with communicator().held():
        ends = threading.Thread(target=dist.destroy_process_group)
        ends.start()
        ends.join(0.3)
        assert ends.is_alive()
    ends.join()
    assert not dist.is_initialized()


PROGRAMS = {
    program.__name__: Job(program=program, backend="stand-in")
    for program in (
        works_are_done_later_and_in_order,
        ranks_connect_at_the_first_collective,
        other_layers_data_is_taken,
        another_size_never_ends,
        errors_name_no_rank,
        a_process_is_torn_down,
        an_abort_prevents_that,
        what_is_captured_holds_it,
    )
}
KILLED = {"errors_name_no_rank", "a_process_is_torn_down", "an_abort_prevents_that"}


def test_the_stand_in_has_the_manners_that_it_says(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    runner = start(PROGRAMS, folder)
    for name in PROGRAMS:
        result = Results(folder).wait(name, 150)
        codes = [end.code for end in result.ends]
        expected = [0, -signal.SIGKILL if name in KILLED else 0]
        if name == "a_process_is_torn_down":
            expected[0] = -signal.SIGABRT
            assert (folder / name / "0.noted").exists()
        assert codes == expected, (name, texts(result))
    runner.join()


def texts(result: JobResult) -> list[str]:
    return [f"{end.raised}: {end.message}\n{end.stderr}" for end in result.ends]
