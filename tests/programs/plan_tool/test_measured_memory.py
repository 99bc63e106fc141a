"""The memory of a step on the virtual device is the memory that the same step took on an H200.

The steps are those of `benchmarks/step.py`, and the measurements are in `benchmarks/results`: forward and backward without an
optimizer, one rank of a group that moves nothing. Between what was measured and the engine of today there may be changes, so a
test that fails here asks for a new measurement, if the engine was meant to need another amount.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.contestants import BUILDERS, Contestant, Setting
from benchmarks.transformer import PRESETS, local_tensor
from fullshard.engine.step import LEFT_AT_PEAK
from fullshard.programs.plan_tool.allocator import CachingAllocator
from fullshard.programs.plan_tool.profile_file import load_profile
from fullshard.programs.plan_tool.program import Allocate, Collective, Entry, Free, Launch
from fullshard.programs.plan_tool.recording import Recorder
from fullshard.virtual.device import META
from fullshard.virtual.groups import virtual_process_group
from fullshard.virtual.without_values import without_values

MEASURED = Path(__file__).parents[3] / "benchmarks" / "results" / "memory-h200.json"


def build(name: str, setting: Setting) -> nn.Module:
    # The builder of the unsharded model moves it to a device, which is where it is already.
    return setting.meta_model(torch.bfloat16) if name == "unsharded" else BUILDERS[name](setting)


def entries_of(name: str, setting: Setting) -> tuple[list[Entry], int]:
    """Return what two steps do, after a first one, and where they begin."""
    recorder = Recorder()
    group = virtual_process_group(setting.world, recorder.device)
    with recorder.recording(), group, without_values():
        contestant = Contestant(name, build(name, setting), setting)
        recorder.phase = "between"
        held = [*map(local_tensor, contestant.model.parameters())]
        recorder.name_memory([*held, contestant.tokens, contestant.targets], "parameters")
        contestant.forward_backward()
        gc.collect()
        contestant.zero_grad()
        begin = len(recorder.entries)
        for _ in range(2):
            contestant.zero_grad()
            contestant.forward_backward()
        return list(recorder.entries), begin


def peaks(entries: list[Entry], begin: int, num_threads: int = 1) -> dict[str, int]:
    """Return the most that was allocated and reserved from an entry on, after the allocator gave back what was free."""
    memory = CachingAllocator()
    for thread in range(num_threads):
        memory.allocate(-1 - thread, load_profile("h200").workspace_bytes)
    for index, entry in enumerate(entries):
        if index == begin:
            memory.give_back_free_segments()
            memory.reset_peaks()
        if isinstance(entry, Allocate):
            memory.allocate(entry.memory, entry.nbytes, entry.stream)
        elif isinstance(entry, Free):
            memory.free(entry.memory)
    return {
        "peak_allocated_bytes": memory.peak_allocated,
        "peak_reserved_bytes": memory.peak_reserved,
    }


@pytest.mark.parametrize(
    ("preset", "name"), [("12x768", "unsharded"), ("12x768", "fullshard"), ("1.2b", "fullshard")]
)
def test_a_step_takes_the_memory_that_it_took_on_an_h200(preset: str, name: str) -> None:
    records: Any = json.loads(MEASURED.read_text())["results"]["records"]
    measured = records[preset][name]["memory"]
    setting = Setting(shape=PRESETS[preset], device=META, world=8, precision="bf16", master="fp32")
    # Autograd has a thread of its own for what is on a device, unless a model is sharded.
    found = peaks(*entries_of(name, setting), num_threads=2 if name == "unsharded" else 1)
    assert found["peak_allocated_bytes"] == pytest.approx(
        measured["peak_allocated_bytes"], rel=0.01
    )
    assert found["peak_reserved_bytes"] == pytest.approx(measured["peak_reserved_bytes"], rel=0.05)


def test_small_groups_are_copied_out_at_once_but_not_while_memory_is_at_its_peak() -> None:
    setting = Setting(
        shape=PRESETS["12x768"], device=META, world=8, precision="bf16", master="fp32"
    )
    entries, begin = entries_of("fullshard", setting)
    lags: list[int] = []  # kernels of compute between the end of a gather and its copy
    since: int | None = None
    for entry in entries[begin:]:
        if not isinstance(entry, Launch):
            continue
        if isinstance(entry.work, Collective):
            if entry.work.kind == "all_gather" and entry.work.messages == 1:
                since = 0
        elif "index_select" in entry.work.name and since is not None:
            lags.append(since)
            since = None
        elif entry.stream == 0 and since is not None:
            since += 1
    layers = setting.shape.layers
    assert len(lags) == 2 * 2 * layers
    at_peak = LEFT_AT_PEAK + 1  # one is gathered before any is left
    for step in (lags[: 2 * layers], lags[2 * layers :]):
        forward, backward = step[:layers], step[layers:]
        assert forward == [0] * layers
        assert min(backward[:at_peak]) > 0
        assert backward[at_peak:] == [0] * (layers - at_peak)


def test_copying_small_groups_out_at_once_takes_no_more_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = Setting(
        shape=PRESETS["12x768"], device=META, world=8, precision="bf16", master="fp32"
    )
    found = peaks(*entries_of("fullshard", setting))
    monkeypatch.setattr("fullshard.engine.step.LEFT_AT_PEAK", 1000)  # all of backward
    assert found == peaks(*entries_of("fullshard", setting))
