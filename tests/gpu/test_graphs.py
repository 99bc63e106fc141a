"""Steps captured in a CUDA graph: replayed, they give the bits of eager steps, for everything a step can be.

A case is a model, an optimizer and a step. It runs twice from the same weights: all steps eagerly, and the last ones
replayed. Losses, gradients and shards must be equal after every step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import fullshard
import fullshard.layout.segments
from fullshard import CPUOffloadPolicy, UsageError, clip_grad_norm_
from tests.gpu.graph_cases import (
    BATCH,
    CASES,
    REPLAYED,
    WARMUP,
    Captured,
    adamw_case,
    assert_replays_equal,
    clear,
    compiled_model,
    eager_results,
    graphed_of,
    inputs,
    loss_of,
    plain_step,
    replayed_results,
    results,
    sharded_adamw,
)
from tests.gpu.lone_rank import lone_rank
from tests.gpu.test_streams import WIDTH, disturbed, equal, make_model
from tests.helpers.fake import fake_world

pytestmark = pytest.mark.gpu
reduces = pytest.mark.usefixtures("reduce_scatter_that_reduces")


GATHERED = ("plain", "hsdp", "post-forward mesh", "int8 extension", "wire dtype", "wrapper")
"""Cases that run also with gathers in place, without staging."""


@reduces
@pytest.mark.parametrize(
    ("name", "in_place"),
    [*((name, False) for name in CASES), *((name, True) for name in GATHERED)],
)
def test_replayed_steps_equal_eager_ones(
    monkeypatch: pytest.MonkeyPatch, name: str, in_place: bool
) -> None:
    monkeypatch.setattr(fullshard.layout.segments, "IN_PLACE_FROM", 0 if in_place else 1 << 40)
    with fake_world(4):
        assert_replays_equal(CASES[name])


@reduces
@pytest.mark.parametrize("fuse", [False, True])
def test_replayed_steps_of_compiled_blocks_equal_eager_ones(fuse: bool) -> None:
    with fake_world(4):
        assert_replays_equal(lambda: plain_step(compiled_model(fuse_gradients=fuse)))


@pytest.mark.usefixtures("communicates_with_itself")
def test_replayed_steps_of_one_nccl_rank_equal_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.gpu.test_streams.init_device_mesh",
        lambda *_, **__: torch.distributed.init_device_mesh("cuda", (1,)),
    )
    with lone_rank():
        for name in ("plain", "sharded adamw", "wrapper", "wire dtype", "checkpointing"):
            assert_replays_equal(CASES[name])
        eager, case = adamw_case(), adamw_case()
        step = graphed_of(case)
        for x in inputs(8):
            clear(eager)
            assert equal(results(case, step(x)), results(eager, eager.step(x)))
        assert step.num_graphs == 1


# --- forward and backward in two graphs -------------------------------------------------------------


@reduces
@pytest.mark.parametrize("name", ["plain", "kept after forward", "post-forward mesh", "wrapper"])
def test_forward_and_backward_may_be_two_graphs(name: str) -> None:
    with fake_world(4):
        expected = eager_results(CASES[name]())
        case = CASES[name]()
        batches = inputs(WARMUP + REPLAYED)
        for x in batches[:WARMUP]:
            clear(case)
            case.step(x)
        clear(case)
        x = torch.zeros(BATCH, WIDTH, device="cuda")
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward):
            loss = loss_of(case.model, x)
        with torch.cuda.graph(backward, pool=forward.pool()):
            loss.backward()
        for batch, theirs in zip(batches[WARMUP:], expected[WARMUP:], strict=True):
            x.copy_(batch)
            forward.replay()
            backward.replay()
            # The eager step of the plain case has no accumulation, and neither has this.
            if name != "wrapper":
                assert equal(results(case, loss), theirs)


# --- eager steps between replays, several graphs ----------------------------------------------------


@reduces
@pytest.mark.parametrize("name", ["plain", "sharded adamw", "accumulation, kept", "wrapper, flat"])
def test_eager_steps_may_come_between_replays(name: str) -> None:
    with fake_world(4):
        expected, case = eager_results(CASES[name]()), CASES[name]()
        batches = inputs(WARMUP + REPLAYED)
        captured: list[Captured] = []
        for number, x in enumerate(batches):
            if number in (2, 5):  # two graphs, which share their memory
                captured.append(Captured(case, captured[0].graph.pool() if captured else None))
            if number in (3, 4):
                loss = captured[0](x)
            elif number == 6:
                loss = captured[1](x)
            else:
                clear(case)
                loss = case.step(x)
            assert equal(results(case, loss), expected[number]), f"step {number}"


# --- streams, memory --------------------------------------------------------------------------------


@reduces
@pytest.mark.parametrize(
    ("name", "in_place"),
    [
        ("plain", True),
        ("hsdp", False),
        ("post-forward mesh", False),
        ("wire dtype", True),
        ("prefetch two", False),
        ("wrapper", True),
    ],
)
def test_sleeps_in_a_graph_do_not_change_the_bits(
    monkeypatch: pytest.MonkeyPatch, name: str, in_place: bool
) -> None:
    monkeypatch.setattr(fullshard.layout.segments, "IN_PLACE_FROM", 0 if in_place else 1 << 40)
    with fake_world(4):
        expected = eager_results(CASES[name]())
        for seed in range(3):
            with disturbed(seed):
                found = replayed_results(CASES[name]())
            for ours, theirs in zip(found, expected, strict=True):
                assert equal(ours, theirs), f"seed {seed}"


@reduces
def test_replays_take_no_memory_and_a_deleted_graph_gives_its_memory_back() -> None:
    with fake_world(4):
        case = adamw_case()
        for x in inputs(3):
            clear(case)
            case.step(x)
        Captured(case)  # the matrix library keeps a workspace for the stream of captures
        clear(case)
        gc.collect()  # what earlier tests have left
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        captured = Captured(case)
        x = inputs(1)[0]
        captured(x)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        for _ in range(200):
            captured(x)
        torch.cuda.synchronize()
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == held
        del captured
        clear(case)
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() == before
        case.step(x)
        clear(case)
        assert torch.cuda.memory_allocated() == before


# --- refusals and failures --------------------------------------------------------------------------


@contextmanager
def refused(match: str) -> Iterator[None]:
    with pytest.raises(UsageError, match=match), torch.cuda.graph(torch.cuda.CUDAGraph()):
        yield


@reduces
def test_what_cannot_be_captured_is_refused_before_the_capture_is_spoilt(tmp_path: Path) -> None:
    with fake_world(4):
        x = inputs(1)[0]
        case = plain_step(make_model())
        with refused("first forward"):
            case.step(x)
        with torch.no_grad():
            case.model(x)
        with refused("first backward"):
            case.step(x)
        case.step(x)
        with fullshard.trace(case.model, tmp_path), refused("while a trace is recorded"):
            case.step(x)
        offloaded = plain_step(make_model(offload=CPUOffloadPolicy()))
        offloaded.step(x)
        with refused("host memory"):
            offloaded.step(x)
        for each in (case, offloaded):
            each.step(x)  # eagerly, as ever
        optimizer = sharded_adamw(case.model.parameters(), lr=0.1, capturable=True)
        optimizer.step()
        with refused("error_if_nonfinite"):
            clip_grad_norm_(case.model, 1.0, error_if_nonfinite=True)


@reduces
@pytest.mark.parametrize("name", ["plain", "prefetch two", "wrapper, grad op"])
@pytest.mark.parametrize("in_backward", [True, False])
def test_after_a_capture_that_failed_the_model_runs_eagerly(name: str, in_backward: bool) -> None:
    with fake_world(4):
        expected, case = eager_results(CASES[name]()), CASES[name]()
        x = inputs(WARMUP + 1)[-1]
        for each in inputs(WARMUP):
            clear(case)
            case.step(each)
        clear(case)
        raising = list(case.model.modules())[-2]
        handles = [
            raising.register_full_backward_pre_hook(fail)
            if in_backward
            else raising.register_forward_pre_hook(fail)
        ]
        with pytest.raises(OSError, match="in a capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            case.step(x)
        for handle in handles:
            handle.remove()
        with pytest.warns(UserWarning, match="did not finish") if in_backward else nullcontext():
            loss = case.step(x)
        assert equal(results(case, loss), expected[WARMUP])


def fail(*_: Any) -> None:
    raise OSError("in a capture")
