"""Process groups are destroyed, and processes end, while something is still under way: a checkpoint, a trace, a graph."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fullshard
from fullshard import checkpoint, torch_border
from fullshard.checkpoint import save_plan
from fullshard.features.graphs import graphed_step
from tests.helpers.divergences import LIMIT_S, Training, outcome
from tests.helpers.rank_programs import Job, Rank, Results, start


def save_slowly(run: Training, me: Rank) -> threading.Event:
    """Begin a checkpoint whose files are written when the event is set."""
    may_write, write = threading.Event(), save_plan._write_own_file

    def wait_and_write(*args: Any) -> Any:
        may_write.wait()
        return write(*args)

    save_plan._write_own_file = wait_and_write  # type: ignore[assignment]
    checkpoint.async_save(me.folder / "saved", run.model, run.optimizer)
    return may_write


def destroys_while_it_saves(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    me.diverges()
    timer = threading.Timer(0.5, save_slowly(run, me).set)
    timer.start()
    dist.destroy_process_group()
    assert not dist.is_initialized()
    assert (me.folder / "saved").exists(), "the process group's end has waited for it"


def ends_while_it_saves(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    me.diverges()
    threading.Timer(0.5, save_slowly(run, me).set).start()


def fails_while_it_saves(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    try:
        save_slowly(run, me)  # for good: no process waits for it
        if me.diverges():
            raise ValueError("a bad sample")
        run.go_on()
    finally:
        dist.destroy_process_group()


def destroys_while_a_trace_is_on(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    me.diverges()
    recording = fullshard.trace(run.model, me.folder / "trace")
    recording.__enter__()
    run.steps(2)
    dist.destroy_process_group()


class Captured:
    """What a captured step is to NCCL: it holds the communicator until it is forgotten."""

    def __init__(self) -> None:
        self._held = dist.group.WORLD.communicator.held()  # type: ignore[union-attr]
        self._held.__enter__()

    def forget(self) -> None:
        self._held.__exit__(None, None, None)


def destroys_with_a_living_graph(me: Rank) -> None:
    run = Training(me)
    run.steps(2)
    step = fullshard.graphed(
        lambda x: run.model(x), [torch.ones(2, 4)], model=run.model, optimizer=None
    )
    # No graph can be captured on a CPU. This is what `_capture` does with one.
    step._entries[0] = entry = graphed_step._Entry()
    entry.captured = Captured()  # type: ignore[assignment]
    graphed_step._CAPTURED.add(step)
    torch_border.before_shutdown(graphed_step._drop_graphs)
    me.diverges()
    dist.destroy_process_group()
    assert step.num_graphs == 0


WELL = ("well", "well")
FAILED = ("DivergenceError", "ValueError")
ENDS = {
    (program, backend): (Job(program=program, backend=backend), ends)
    for program, backends, ends in (
        (destroys_while_it_saves, ("gloo", "stand-in"), WELL),
        (ends_while_it_saves, ("stand-in",), WELL),
        (fails_while_it_saves, ("gloo", "stand-in"), FAILED),
        (destroys_while_a_trace_is_on, ("stand-in",), WELL),
        (destroys_with_a_living_graph, ("stand-in",), WELL),
    )
    for backend in backends
}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_all_ranks_end_soon_whatever_is_under_way(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    names = {
        f"{program.__name__} on {backend}": (job, ends)
        for (program, backend), (job, ends) in ENDS.items()
    }
    runner = start({name: job for name, (job, _) in names.items()}, folder)
    for name, (_, ends) in names.items():
        result = Results(folder).wait(name, 150)
        found = tuple(outcome(end) for end in result.ends)
        assert found == ends, (name, [end.stderr for end in result.ends])
        seconds = max(result.seconds(rank) for rank in (0, 1))
        assert seconds < LIMIT_S + result.starved, name
    runner.join()
