"""A trace is complete and true: what it says happened, as often, with as many bytes, then and there."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import ConfigurationError, FullyShardedDataParallel, LifecycleError, fully_shard
from fullshard.storage.buffers import Buffer
from fullshard.tracing import recorder, trace as tracing
from fullshard.tracing.schema import Span
from fullshard.tracing.trace import one_at_a_time
from fullshard.wrap import ModuleWrapPolicy
from tests.helpers.fake import fake_world
from tests.helpers.models import Block, ModelOptions, make_decoder, tokens_for
from tests.helpers.threads import run_threads
from tests.helpers.traces import HostClock, SlowAllGather, Trace, end_of
from tests.helpers.traffic import ALL_REDUCE, EXCHANGE, GATHER, REDUCE_SCATTER, Traffic
from tests.helpers.training import (
    FULLSHARD,
    Run,
    batch_of,
    forward_and_backward,
    gradients,
    mine,
    shard,
)

BF16 = torch.bfloat16
FIRST, STEPS = 7, 2


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What one rank recorded and what was counted beside it."""

    trace: Trace
    gathers: Counter[int]
    reductions: Counter[int]
    all_reductions: Counter[int]


def wrapped(run: Run) -> Any:
    return FullyShardedDataParallel(
        make_decoder(run.model), auto_wrap_policy=ModuleWrapPolicy({Block})
    )


def build(run: Run, api: str) -> Any:
    return wrapped(run) if api == "wrapper" else shard(make_decoder(run.model), FULLSHARD, run)


def a_step(model: Any, run: Run, step: int, api: str) -> None:
    if api == "wrapper":
        model(mine(batch_of(step))).backward()
    else:
        forward_and_backward(model, run, step)
    model.zero_grad()


def record(folder: Path, run: Run, api: str) -> Recorded:
    """Two steps, when all orders are known."""
    model = build(run, api)
    a_step(model, run, 0, api)
    with Traffic() as traffic, fullshard.trace(model, folder, first_step=FIRST) as recording:
        for step in range(STEPS):
            a_step(model, run, step, api)
            recording.step()
    return Recorded(
        trace=Trace(recording.path),
        gathers=traffic.sizes(GATHER),
        reductions=traffic.sizes(REDUCE_SCATTER) + traffic.sizes(EXCHANGE),
        all_reductions=traffic.sizes(ALL_REDUCE),
    )


RUNS = {
    "plain": Run(),
    "bf16": Run(param_dtype=BF16, reduce_dtype=torch.float32),
    "bf16 on the wire": Run(param_dtype=BF16, reduce_dtype=torch.float32, wire_dtype=BF16),
    "accumulation": Run(microbatches=3),
    "checkpointed": Run(model=ModelOptions(checkpointing="non_reentrant")),
    "checkpointed, reentrant": Run(model=ModelOptions(checkpointing="reentrant")),
    "blocks twice": Run(model=ModelOptions(repeat=2)),
}


def check_counted(recorded: Recorded, ranks: int) -> None:
    """As many collectives as ran, with the bytes of all but this rank's part."""
    pairs = [("gather", recorded.gathers), ("reduce", recorded.reductions)]
    for category, counted in pairs:
        events = recorded.trace.of(category)
        sizes = Counter(event["args"]["bytes"] for event in events)
        expected = Counter({nbytes - nbytes // ranks: n for nbytes, n in counted.items()})
        assert sizes == expected, category
    assert recorded.gathers and recorded.reductions


def check_order(trace: Trace) -> None:
    """A group is gathered, then waited for, then computed with."""
    gathers, waits = trace.of("gather"), trace.of("wait")
    for gather in gathers:
        group = gather["args"]["group"]
        # The clock of the thread that completes it is read before the host goes on.
        wait = next(w for w in waits if w["args"]["group"] == group and end_of(w) >= end_of(gather))
        assert wait["args"]["for"] == "gather"
        assert gather["args"]["issued"] <= gather["ts"] <= end_of(gather)
    for compute in trace.of("compute"):
        group = compute["args"]["group"]
        before = [g for g in gathers if g["args"]["group"] == group and g["ts"] < compute["ts"]]
        assert before or compute["args"]["pass"] == "backward", compute["name"]
        assert all(end_of(gather) <= compute["ts"] for gather in before)


@pytest.mark.parametrize("name", RUNS)
def test_a_trace_has_every_collective_with_its_bytes(world, tmp_path: Path, name: str) -> None:
    for rank, recorded in enumerate(world(2).run(record, tmp_path, RUNS[name], "fully_shard")):
        trace = recorded.trace
        check_counted(recorded, ranks=2)
        check_order(trace)
        assert trace.overlaps() == []
        assert trace.count("gather") == trace.count("release")
        assert set(trace.count("reduce").values()) == {STEPS}
        assert (trace.about["rank"], trace.about["world"], trace.about["num_steps"]) == (
            rank,
            2,
            STEPS,
        )
        assert [step["args"]["step"] for step in trace.of("step")] == [FIRST, FIRST + 1]
        assert {e["args"]["step"] for e in trace.of("gather")} == {FIRST, FIRST + 1}
        names = [group["name"] for group in trace.about["groups"]]
        assert names == ["root", "blocks.0", "blocks.1", "blocks.2"]


def test_a_trace_of_the_wrapper_has_every_collective_with_its_bytes(world, tmp_path: Path) -> None:
    for recorded in world(2).run(record, tmp_path, Run(), "wrapper"):
        trace = recorded.trace
        check_counted(recorded, ranks=2)
        check_order(trace)
        assert trace.overlaps() == []
        assert trace.count("gather") == trace.count("release")
        assert [group["name"] for group in trace.about["groups"]][:2] == ["root", "blocks.0"]


def test_a_trace_of_replicas_has_their_all_reduces(world, tmp_path: Path) -> None:
    run = Run(replicas=2, microbatches=2)
    for recorded in world(4).run(record, tmp_path, run, "fully_shard"):
        check_counted(recorded, ranks=2)
        assert recorded.trace.overlaps() == []
        # Each of two replicas sends half of what is summed, and then half of the sum.
        sizes = Counter(e["args"]["bytes"] for e in recorded.trace.of("all-reduce"))
        assert sizes == recorded.all_reductions
        waits = [w for w in recorded.trace.of("wait") if w["args"]["for"] == "reduction"]
        for all_reduce in recorded.trace.of("all-reduce"):
            assert all_reduce["ts"] in [wait["ts"] for wait in waits], "the host stood still"


def test_compute_is_in_order_and_the_root_contains_the_rest(world, tmp_path: Path) -> None:
    trace = world(2).run(record, tmp_path, Run(), "fully_shard")[0].trace
    one = [e["name"] for e in trace.of("compute") if e["args"]["step"] == FIRST]
    blocks = [f"blocks.{index}" for index in range(3)]
    assert one == [
        *(f"forward {name}" for name in ("root", *blocks)),
        *(f"backward {name}" for name in ("root", *reversed(blocks))),
    ]
    by_name = {e["name"]: e for e in trace.of("compute") if e["args"]["step"] == FIRST}
    for kind in ("forward", "backward"):
        root = by_name[f"{kind} root"]
        for block in blocks:
            inner = by_name[f"{kind} {block}"]
            assert root["ts"] <= inner["ts"] and end_of(inner) <= end_of(root)
            assert inner["args"] == {"group": block, "step": FIRST, "pass": kind}


def test_recomputation_is_part_of_backward(world, tmp_path: Path) -> None:
    run = Run(model=ModelOptions(checkpointing="non_reentrant"))
    trace = world(2).run(record, tmp_path, run, "fully_shard")[0].trace
    again = [e for e in trace.of("compute") if e["name"].startswith("recompute")]
    assert Counter(e["args"]["group"] for e in again) == dict.fromkeys(
        ("blocks.0", "blocks.1", "blocks.2"), STEPS
    )
    assert {e["args"]["pass"] for e in again} == {"backward"}


# --- truth -----------------------------------------------------------------------------------------

PAUSE_S = 0.05


def test_a_gather_that_is_slow_is_waited_for_where_it_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = HostClock()
    monkeypatch.setattr(recorder, "host_ns", clock)
    with fake_world(4):
        model: Any = shard(make_decoder(), FULLSHARD, Run())
        model.blocks[1].set_custom_all_gather(SlowAllGather(clock, PAUSE_S))
        model(tokens_for(0, 2)).backward()
        with fullshard.trace(model, tmp_path) as recording:
            model(tokens_for(0, 2)).backward()
            recording.step()
    trace = Trace(recording.path)
    for wait in trace.of("wait"):
        is_slow = wait["args"]["group"] == "blocks.1" and wait["args"]["for"] == "gather"
        assert (wait["dur"] > 0.5 * PAUSE_S * 1e6) is is_slow, wait["name"]
    for compute in trace.of("compute"):
        if compute["args"]["group"] != "root":
            assert compute["dur"] < 0.5 * PAUSE_S * 1e6, "the wait is no part of it"
    slow = [e for e in trace.of("gather") if e["args"]["group"] == "blocks.1"]
    assert [e["args"]["pass"] for e in slow] == ["forward", "backward"]
    assert all(e["dur"] >= PAUSE_S * 1e6 for e in slow)


def late_on_one_rank(folder: Path) -> Trace:
    """Rank 0 comes late to everything after the second block's forward has begun."""
    model: Any = shard(make_decoder(), FULLSHARD, Run())
    if dist.get_rank() == 0:
        model.blocks[1].up.register_forward_pre_hook(lambda *_: time.sleep(4 * PAUSE_S))
    for _ in range(2):
        with fullshard.trace(model, folder) as recording:
            model(mine(batch_of(0))).backward()
            recording.step()
    return Trace(recording.path)


def test_who_waits_for_a_late_rank_waits_where_it_is_missed(world, tmp_path: Path) -> None:
    late, early = world(2).run(late_on_one_rank, tmp_path)
    longest = max(early.of("wait"), key=lambda wait: wait["dur"])
    # The gather of block 2 was issued by both before the sleep; that of backward was not.
    assert longest["args"] == {
        "group": "blocks.2",
        "step": 1,
        "pass": "backward",
        "for": "gather",
    }
    assert longest["dur"] > 2 * PAUSE_S * 1e6
    sleeping = max(late.of("compute"), key=lambda e: e["dur"] if "blocks" in e["name"] else 0)
    assert sleeping["name"] == "forward blocks.1"
    assert max(wait["dur"] for wait in late.of("wait")) < longest["dur"]


def step_bits(folder: Path | None) -> dict[str, Tensor]:
    model: Any = shard(make_decoder(), FULLSHARD, Run(param_dtype=BF16))
    for step in range(2):
        with fullshard.trace(model, folder) if folder is not None else nullcontext():
            model(mine(batch_of(step))).backward()
    return gradients(model)


def both_ways(folder: Path) -> bool:
    recorded, not_recorded = step_bits(folder), step_bits(None)
    return all(torch.equal(recorded[name], not_recorded[name]) for name in not_recorded)


def test_recording_changes_no_bit(world, tmp_path: Path) -> None:
    assert world(2).run(both_ways, tmp_path) == [True, True]


# --- memory ----------------------------------------------------------------------------------------


def allocations(patch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that buffers have taken minus those given back, after every change from now on."""
    totals: list[int] = []
    change: dict[str, Callable[[Buffer], None]] = {
        name: getattr(Buffer, name) for name in ("allocate", "release")
    }

    def counted(name: str) -> Callable[[Buffer], None]:
        def method(buffer: Buffer) -> None:
            before = buffer.held_bytes
            change[name](buffer)
            if buffer.held_bytes != before:
                totals.append((totals[-1] if totals else 0) + buffer.held_bytes - before)

        return method

    for name in change:
        patch.setattr(Buffer, name, counted(name))
    return totals


@pytest.mark.parametrize("in_place", [True, False])
def test_memory_is_known_at_every_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_place: bool
) -> None:
    monkeypatch.setattr(fullshard.layout.segments, "IN_PLACE_FROM", 0 if in_place else 1 << 40)
    with fake_world(4):
        model: Any = shard(make_decoder(), FULLSHARD, Run())
        model(tokens_for(0, 2)).backward()
        totals = allocations(monkeypatch)
        with fullshard.trace(model, tmp_path) as recording:
            model(tokens_for(0, 2)).backward()
            totals = list(totals)  # at its end, buffers without memory are made and thrown away
    trace = Trace(recording.path)
    both = zip(trace.memory("gathered"), trace.memory("reducing"), strict=True)
    assert [gathered + reducing for gathered, reducing in both] == totals
    assert totals[-1] == 0 < max(totals)


def test_memory_that_is_held_before_a_recording_is_counted(tmp_path: Path) -> None:
    with fake_world(4):
        model: Any = shard(make_decoder(), FULLSHARD, Run(reshard_after_forward=False))
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        model(tokens_for(0, 2)).backward()
        with fullshard.trace(model, tmp_path) as recording:
            pass
        facts = Trace(recording.path).about["groups"]
    assert Trace(recording.path).memory("gathered")[-1] == sum(g["gathered_bytes"] for g in facts)
    assert Trace(recording.path).memory("reducing")[-1] > 0


# --- beginnings and ends ---------------------------------------------------------------------------


class Fails(nn.Module):
    """Passes everything on; fails in forward or backward when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.when = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "forward":
            raise ZeroDivisionError
        y = x * 1
        if self.when == "backward":
            y.register_hook(lambda _: 1 // 0)
        return y


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_step_that_fails_leaves_no_span_open(tmp_path: Path, when: str) -> None:
    with fake_world(2):
        fails = Fails()
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Sequential(fails, nn.Linear(4, 4)))
        fully_shard(model[1])
        fully_shard(model)
        with fullshard.trace(model, tmp_path) as recording:
            fails.when = when
            with pytest.raises(ZeroDivisionError):
                model(torch.ones(2, 4)).sum().backward()
            model.reset_iter_state()
            recording.step()
            fails.when = ""
            model(torch.ones(2, 4)).sum().backward()
            recording.step()
    trace = Trace(recording.path)
    assert trace.overlaps() == []
    whole = [e["name"] for e in trace.of("compute") if e["args"]["step"] == 2]
    assert whole == ["forward root", "forward 1", "backward root", "backward 1"]
    first, second = trace.of("step")
    for compute in trace.of("compute"):
        step = first if compute["args"]["step"] == 1 else second
        assert step["ts"] <= compute["ts"] and end_of(compute) <= end_of(step), compute["name"]
    assert end_of(first) == second["ts"]


def test_a_block_left_by_an_exception_leaves_its_trace(tmp_path: Path) -> None:
    with fake_world(2):
        model: Any = fully_shard(nn.Linear(4, 4))
        with pytest.raises(ZeroDivisionError), fullshard.trace(model, tmp_path) as recording:
            model(torch.ones(2, 4)).sum().backward()
            raise ZeroDivisionError
        assert Trace(recording.path).count("gather") == {"root": 1}
        with fullshard.trace(model, tmp_path):  # and can be recorded again
            pass


def test_a_relative_folder_is_one_in_the_folder_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    with fake_world(2):
        with fullshard.trace(fully_shard(nn.Linear(4, 4)), "traces") as recording:
            monkeypatch.chdir(tmp_path / "there")
    assert recording.path == tmp_path / "traces" / "rank_00000.json"
    assert recording.path.is_file()


def test_the_first_forward_can_be_recorded(tmp_path: Path) -> None:
    with fake_world(2):
        model: Any = shard(make_decoder(), FULLSHARD, Run())
        holder = nn.ModuleDict({"model": model})
        with fullshard.trace(holder, tmp_path) as recording:
            model(tokens_for(0, 2)).backward()
            recording.step()
    assert set(Trace(recording.path).count("reduce")) == {
        "root",
        *(f"blocks.{i}" for i in range(3)),
    }


def test_several_models_have_names_of_their_own(tmp_path: Path) -> None:
    with fake_world(2):
        model = nn.ModuleList(fully_shard(nn.Linear(4, 4)) for _ in range(2))
        with fullshard.trace(model, tmp_path) as recording:
            for part in model:
                part(torch.ones(2, 4)).sum().backward()
    assert Trace(recording.path).count("gather") == {"0: root": 1, "1: root": 1}


def test_what_happens_in_a_pause_is_in_no_step(tmp_path: Path) -> None:
    with fake_world(2):
        model: Any = shard(make_decoder(), FULLSHARD, Run())
        with fullshard.trace(model, tmp_path) as recording:
            for step in range(3):
                model(mine(batch_of(step))).backward()
                recording.step()
                with recording.paused(), torch.no_grad():
                    model(mine(batch_of(step)))
                    time.sleep(PAUSE_S)
        with pytest.raises(LifecycleError, match="within its block"), recording.paused():
            pass
    trace = Trace(recording.path)
    assert set(trace.count("compute").values()) == {6}, "a forward and a backward of each step"
    assert trace.memory("gathered")[-1] == 0
    first, second, third = trace.of("step")
    assert second["ts"] - end_of(first) > PAUSE_S * 1e6 < third["ts"] - end_of(second)
    for event in trace.of("compute"):
        assert any(s["ts"] <= event["ts"] and end_of(event) <= end_of(s) for s in trace.of("step"))


def test_no_more_than_allowed_is_kept(tmp_path: Path) -> None:
    with fake_world(2):
        model: Any = shard(make_decoder(), FULLSHARD, Run())
        with fullshard.trace(model, tmp_path, limit=10) as recording:
            model(tokens_for(0, 2)).backward()
            recording.step()
    trace = Trace(recording.path)
    kept = [e for e in trace.events if e["ph"] != "M" and e.get("cat") != "step"]
    assert len(kept) <= 10 < trace.about["dropped"]


def test_what_cannot_be_recorded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="nothing in this Linear is"):
        fullshard.trace(nn.Linear(2, 2), tmp_path)
    with fake_world(2):
        model: Any = fully_shard(nn.Linear(4, 4))
        with pytest.raises(ConfigurationError, match="limit must be at least 1, got 0"):
            fullshard.trace(model, tmp_path, limit=0)
        recording = fullshard.trace(model, tmp_path)
        with pytest.raises(LifecycleError, match="only be recorded within the block"):
            recording.step()
        with pytest.raises(LifecycleError, match="only be paused within its block"):
            recording.paused().__enter__()
        with recording, pytest.raises(LifecycleError, match="one recording at a time"):
            fullshard.trace(model, tmp_path).__enter__()
        assert model(torch.ones(1, 4)).shape == (1, 4)
    contexts = [SimpleNamespace(device=torch.device(name)) for name in ("cpu", "xpu:0")]
    monkeypatch.setattr(tracing, "contexts_of", lambda _: contexts)
    with pytest.raises(ConfigurationError, match=r"on \['cpu', 'xpu:0'\]"):
        tracing.Recording(model, tmp_path, first_step=0, limit=1)


def test_a_part_of_a_model_that_has_not_run_cannot_be_recorded(tmp_path: Path) -> None:
    with fake_world(2):
        model: Any = shard(make_decoder(), FULLSHARD, Run())
        recording = fullshard.trace(model.blocks[0], tmp_path)
        with pytest.raises(LifecycleError, match="Pass the outermost module"), recording:
            model(tokens_for(0, 2)).backward()
        with fullshard.trace(model.blocks[0], tmp_path):  # now its streams are known
            model(tokens_for(0, 2)).backward()
    assert Trace(recording.path).count("reduce").total() == 4


def record_on_a_thread(folder: Path) -> Path:
    model: Any = shard(make_decoder(), FULLSHARD, Run())
    with fullshard.trace(model, folder) as recording:
        model(mine(batch_of(0))).backward()
        recording.step()
    return recording.path


def test_ranks_that_are_threads_record_for_themselves(tmp_path: Path) -> None:
    paths = run_threads(2, record_on_a_thread, tmp_path)
    for rank, path in enumerate(paths):
        trace = Trace(path)
        assert trace.about["rank"] == rank
        assert trace.count("reduce").total() == 4
        assert trace.overlaps() == []


# --- the format ------------------------------------------------------------------------------------


def test_the_file_is_in_chrome_s_format(world, tmp_path: Path) -> None:
    trace = world(2).run(record, tmp_path, replace(Run(), steps=1), "fully_shard")[1].trace
    assert trace.content["displayTimeUnit"] == "ms"
    for event in trace.events:
        assert {"ph", "name", "pid"} <= set(event) and event["pid"] == 1
        if event["ph"] in "XiC":
            assert event["ts"] >= 0 and 1 <= event["tid"] <= 6
        if event["ph"] == "X":
            assert event["dur"] >= 0
    lanes = {e["tid"]: e["args"]["name"] for e in trace.events if e["name"] == "thread_name"}
    assert lanes == {
        1: "step",
        2: "compute",
        3: "all-gather",
        4: "reduce-scatter",
        5: "all-reduce",
        6: "host",
    }
    now_ns = time.time_ns()
    assert now_ns - 60e9 < trace.about["zero_unix_ns"] < now_ns


def test_what_is_on_the_wire_together_is_drawn_one_after_the_other() -> None:
    times = [(0, 10), (2, 5), (3, 7), (8, 12), (12, 13)]
    spans = [Span(kind="gather", step=1, start_us=a, duration_us=b - a) for a, b in times]
    drawn = [(each.start_us, each.end_us) for each in one_at_a_time(spans)]
    assert drawn == [(0, 10), (2, 5), (5, 7), (10, 12), (12, 13)]
