"""The engine leaves no access unordered: in no configuration, however its streams run."""

from __future__ import annotations

import functools
import gc
from pathlib import Path

import pytest

from benchmarks.stream_capture import CapturedStep, faults_of_capture
from benchmarks.stream_order import early_releases, key_of, places
from benchmarks.stream_settings import SETTINGS, checked
from benchmarks.stream_timeline import tables
from fullshard import torch_border
from fullshard.checks.stream_check import StreamCheck
from fullshard.checks.stream_order import Mark, Place, Wait, find_races
from fullshard.transport.streams import FSDPCommContext

pytestmark = pytest.mark.filterwarnings("ignore")

once = functools.cache(checked)


@pytest.mark.parametrize("name", SETTINGS)
def test_all_accesses_of_a_configuration_are_ordered(name: str) -> None:
    check = checked(name)
    assert check.accesses > 300
    assert not check.races, check.text


GATHERED_BY_HAND = "captured step, gathered by hand"

MUTATED = (
    "bf16, 1 replicas, reshard True",
    "bf16, 2 replicas, reshard 2",
    "fully_shard.plain",
    "fully_shard.accumulate_offload",
    "wrapper.hybrid_shard_bf16.orig",
    "comm objects that keep memory, 2 replicas",
    "an asynchronous comm object",
    "an all-reduce hook on a stream of its own",
    "shards written on a stream of their own, gathers not before",
    "muon, 2 replicas, clipping, EMA",
    "adamw over replicas, 2 replicas, clipping, EMA",
    "fused gradients, 2 replicas, recomputation none",
    "a gather that is not used",
    "unshard by hand after a write that is not counted",
    "a write that is not counted before backward",
    "a later block's weights written in forward",
    "finalised by hand",
    "a snapshot beside the next step",
    "a snapshot that is dropped, and the next one",
    "offloaded, a hook that reads gradients",
    "offloaded, a write behind an evaluation",
    "captured step, plain",
    GATHERED_BY_HAND,
    "stages that share streams",
)
"""Configurations that together have all waits and marks of the library."""

KEPT = {
    "FSDPCommContext.cross_border": (
        "CUDA refuses to wait for an event from the other side of a capture's border; see the tests below"
    ),
    "FSDPCommContext.fork_and_join": (
        "CUDA refuses to join a stream that was not forked from the capture; see the tests below"
    ),
    "FSDPCommContext.note_replay": "asked for by the watchdog's thread, and waited for by no stream",
    "FSDPCommContext.wait_for_releases < Step.hand_over": (
        "torch hands a stream that is gone out again, with its pool; streams of the virtual device are never handed out again"
    ),
}
"""What orders nothing in any configuration, and why it is there."""


def statement(place: Place) -> str:
    """Return the innermost line of a place; with its caller, where the line has several purposes."""
    line, *callers = key_of(place)
    name = line.split(" ")[1]
    if name in KEPT:
        return name
    through = f"{name} < {callers[0].split(' ')[1]}" if callers else name
    if through in KEPT:
        return through
    return (
        f"{line.split('/')[-1]} < {callers[0].split('/')[-1]}"
        if name.startswith("FSDPCommContext.")
        else line
    )


@pytest.mark.slow
def test_every_wait_and_every_mark_is_needed_somewhere_or_its_reason_is_known() -> None:
    noticed: dict[tuple[str, str], bool] = {}
    for name in MUTATED:
        program = once(name).program
        for kind in (Wait, Mark):
            for key, full in places(program, kind).items():
                if not key[0].startswith("fullshard/"):
                    continue
                site = kind.__name__, statement(key)
                if not noticed.get(site):
                    noticed[site] = bool(find_races(program, full))
    unnoticed = {site for site, found in noticed.items() if not found}
    assert {where for _, where in unnoticed} <= KEPT.keys(), unnoticed
    assert KEPT.keys() <= {where for _, where in noticed} | {
        "FSDPCommContext.wait_for_releases < Step.hand_over"
    }
    assert len(noticed) > 40


@pytest.mark.parametrize("name", MUTATED[:8])
def test_memory_that_is_given_back_before_the_last_wait_is_noticed(name: str) -> None:
    tried, missed = early_releases(once(name).program)
    assert tried and not missed


def test_the_tables_of_the_page_are_those_of_a_recorded_step() -> None:
    page = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
    gc.collect()  # models of other tests: their memory would be given back within the step
    for table in tables().split("\n\n"):
        assert table in page, table


# --- captures --------------------------------------------------------------------------------------------


def captured_faults() -> list[str]:
    """Return what CUDA would refuse in a captured step."""
    from benchmarks.stream_settings import adamw, decoder, sharded, step, train

    with StreamCheck(8, raises=False) as check:
        model = sharded(decoder())
        optimizer = adamw(model)
        train(model, optimizer)
        model.zero_grad(set_to_none=False)
        captured = CapturedStep(check)
        with captured.capture():
            step(model)
        return faults_of_capture(captured.entries)


def test_a_capture_waits_for_nothing_from_outside_and_joins_all_streams() -> None:
    assert captured_faults() == []


def test_a_capture_whose_streams_are_not_joined_at_its_borders_loses_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not checked(GATHERED_BY_HAND).races
    monkeypatch.setattr(FSDPCommContext, "fork_and_join", lambda self: None)
    assert checked(GATHERED_BY_HAND).races


def test_a_capture_whose_streams_are_joined_without_being_forked_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def join(context: FSDPCommContext) -> None:
        for stream in (context.all_gather, context.reduce_scatter, context.all_reduce):
            torch_border.current_stream(context.device).wait_stream(stream)

    monkeypatch.setattr(FSDPCommContext, "fork_and_join", join)
    assert any("is not part of the capture" in fault for fault in captured_faults())


def test_a_capture_that_keeps_events_from_before_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FSDPCommContext, "cross_border", FSDPCommContext.fork_and_join)
    assert any("waits for an event from before" in fault for fault in captured_faults())
