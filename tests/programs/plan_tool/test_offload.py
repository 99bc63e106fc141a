"""Steps whose shards, gradients and optimizer state are in host memory: what is recorded of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.errors import ConfigurationError
from fullshard.programs.plan_tool.machine import GIB, GIGA
from fullshard.programs.plan_tool.planned_step import estimate_step, plan_step
from fullshard.programs.plan_tool.profile_file import load_profile
from fullshard.programs.plan_tool.program import (
    HOST,
    Allocate,
    Collective,
    Entry,
    Free,
    HostCompute,
    Kernel,
    Launch,
    Program,
    Transfer,
    Wait,
)
from fullshard.programs.plan_tool.recording import Recorder
from fullshard.programs.train.model_source import open_model
from fullshard.virtual.groups import virtual_process_group
from tests.programs.plan_tool.test_recording import WORLD, collectives, config, launched, recorded

OFFLOAD = {"offload": True}


def offloaded(**sections: dict[str, Any]) -> Program:
    sharding = {**sections.pop("sharding", {}), **OFFLOAD}
    return recorded(config(sharding=sharding, **sections))


def held_between_steps(program: Program) -> Counter[tuple[bool, str]]:
    """Return the bytes of host memory (True) and of the device (False), by what they are for."""
    live: dict[int, Allocate] = {}
    for entry in program.entries[: program.begin]:
        if isinstance(entry, Allocate):
            live[entry.memory] = entry
        elif isinstance(entry, Free):
            del live[entry.memory]
    found: Counter[tuple[bool, str]] = Counter()
    for memory, entry in live.items():
        found[entry.stream == HOST, program.kinds[memory]] += entry.nbytes
    return found


def is_transfer(entry: Entry) -> bool:
    return isinstance(entry, Launch) and isinstance(entry.work, Transfer)


def transfers(program: Program) -> list[Transfer]:
    return [entry.work for entry in launched(program) if isinstance(entry.work, Transfer)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_gather_reads_an_upload_and_every_reduction_is_downloaded(replicas: int) -> None:
    sharding, train = {"replicas": replicas}, {"accumulate": 2, "batch": 4 * WORLD}
    program = offloaded(sharding=sharding, train=train, compute={"precision": "bf16"})
    plain = recorded(config(sharding=sharding, train=train, compute={"precision": "bf16"}))
    assert collectives(program) == collectives(plain)
    shards = WORLD // replicas
    works = [(entry.stream, entry.work) for entry in launched(program)]
    by_stream = {stream: [work for each, work in works if each == stream] for stream, _ in works}
    gathers = [w for w in by_stream[1] if isinstance(w, Collective | Transfer)]
    uploads, gathered = gathers[::2], gathers[1::2]
    assert [each.direction for each in uploads] == ["to device"] * len(gathered)  # type: ignore[union-attr]
    # Shards are in float32, and travel in bfloat16.
    assert [2 * each.nbytes // shards for each in gathered] == [each.nbytes for each in uploads]
    reductions = [n for kind, n in collectives(program) if kind == "reduce_scatter"]
    downloads = [each for each in transfers(program) if each.direction == "to host"]
    assert [each.nbytes for each in downloads[:-1]] == [n // shards for n in reductions]
    assert downloads[-1].nbytes == 4  # the factor by which gradients are clipped
    assert all(each.is_pinned for each in downloads[:-1])


def test_the_host_waits_at_the_end_of_backward_then_updates_by_itself() -> None:
    program = offloaded()
    step = program.entries[program.begin : program.end]
    first = next(i for i, entry in enumerate(step) if isinstance(entry, HostCompute))
    waits = [i for i, entry in enumerate(step) if isinstance(entry, Wait) and entry.stream == HOST]
    last = max(i for i, e in enumerate(step) if isinstance(e, Launch) and e.phase == "backward")
    assert last < waits[0] < waits[2] < first  # once for each stream of the engine
    names = [entry.kernel.name for entry in step if isinstance(entry, HostCompute)]
    assert "aten._fused_adamw_" in names
    kernels = [entry.work.name for entry in launched(program) if isinstance(entry.work, Kernel)]
    assert "aten._fused_adamw_" not in kernels


def test_the_host_goes_on_only_beside_copies_of_pinned_memory() -> None:
    recorder = Recorder(offloads=True)
    recorder.phase = "forward"
    with recorder.recording(), virtual_process_group(WORLD, recorder.device):
        pinned, plain = torch.empty(4096, pin_memory=True), torch.empty(4096)
        on_device = torch.empty(4096, device="meta")
        on_device.copy_(pinned, non_blocking=True)
        on_device.copy_(pinned)
        plain.copy_(on_device, non_blocking=True)
        moved = pinned.to("meta", torch.float64, non_blocking=True)
        back = on_device.to("cpu")
        total = (back + plain).sum()
        steps = torch.zeros(()) + 2
        assert (total.item(), steps.item()) == (1.0, 2.0)  # only the small one has a value
        assert pinned.is_pinned() and not back.is_pinned() and moved.dtype is torch.float64
    entries = [e for e in recorder.entries if isinstance(e, Wait | HostCompute) or is_transfer(e)]
    said = [
        "wait"
        if isinstance(e, Wait)
        else "host"
        if isinstance(e, HostCompute)
        else e.work.direction
        for e in entries
    ]  # type: ignore[union-attr]
    assert said == [
        *("to device", "to device", "wait", "to host", "wait", "to device", "to host", "wait"),
        *("host", "host"),
    ]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adagrad"])
def test_shards_and_optimizer_state_move_from_the_device_to_the_host(optimizer: str) -> None:
    section = {"name": optimizer}
    before = held_between_steps(recorded(config(optimizer=section)))
    after = held_between_steps(offloaded(optimizer=section))
    assert before[False, "optimizer"] == pytest.approx(after[True, "optimizer"], rel=0.01)
    assert not after[False, "optimizer"]
    assert not [memory for memory in before if memory[0]]
    count = sum(each.numel() for each in open_model(config()).build().parameters())
    moved = before[False, "parameters"] - after[False, "parameters"]
    assert moved == pytest.approx(4 * count / WORLD, rel=0.02)
    # Pinned memory is rounded up to a power of two, group by group.
    assert moved < after[True, "parameters"] < 2 * moved
    assert after[True, "parameters"] % 1024 == 0


def test_host_memory_that_is_only_planned_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def resident() -> int:
        return 4096 * int(Path("/proc/self/statm").read_text().split()[1])

    original = Recorder.program

    def noted(self: Recorder, begin: int) -> Program:
        taken.append(resident())
        return original(self, begin)

    monkeypatch.setattr(Recorder, "program", noted)
    model = {"layers": 2, "width": 2048, "heads": 16}
    program = offloaded(model=model)  # imports what is needed
    before = resident()
    program = offloaded(model=model)
    state = held_between_steps(program)[True, "optimizer"]
    assert state > 2e8
    assert taken[1] - before < state / 4


@pytest.mark.parametrize(
    "section", [{"name": "muon"}, {"name": "adamw8bit"}, {"shard_over_replicas": True}]
)
def test_optimizers_that_send_host_memory_are_refused(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="cannot be planned"):
        offloaded(optimizer=section, sharding={"replicas": 2})


H100 = load_profile("h100")


def test_device_memory_falls_by_what_is_in_host_memory_and_time_grows_by_the_copies() -> None:
    model = {"layers": 4, "width": 1024, "heads": 8}
    plain, moved = (
        plan_step(config(model=model, sharding={"offload": each}), WORLD, H100)
        for each in (False, True)
    )
    between = plain.memory.at_rest - moved.memory.at_rest
    state = plain.memory.at_peak["optimizer"]
    assert between == pytest.approx(1.5 * state, rel=0.02)  # Adam has two numbers for each
    assert plain.memory.reserved - moved.memory.reserved > 0.9 * between
    assert moved.host_bytes == WORLD * moved.memory.host_allocated
    assert moved.memory.host_allocated >= between
    assert (
        not plain.host_bytes and not plain.playback.transfers and not plain.playback.update_seconds
    )
    # Gradients come down the link once. The update reads and writes seven numbers for each.
    shard = state / 2
    facts = H100.offload
    link = min(facts.to_host_gb_s / facts.devices_per_link, facts.memory_gb_s / WORLD) * GIGA
    assert moved.playback.transfers["to host"] >= shard / link
    assert moved.playback.transfers["to device"] >= 1.5 * shard / link  # forward and backward
    least = 7 * shard / (facts.memory_gb_s / WORLD * GIGA)
    assert moved.playback.idle["update"] >= least
    assert moved.seconds >= plain.seconds + least
    assert sum(moved.playback.idle.values()) <= moved.seconds


def test_all_ranks_of_a_host_share_its_link_its_memory_and_its_cores() -> None:
    up = Transfer("to device", GIB, True, 1)
    alone, pair, host, hosts = (
        H100.transfer_seconds(replace(up, ranks=each)) for each in (1, 2, 8, 64)
    )
    assert alone < pair <= host == hosts
    assert H100.transfer_seconds(replace(up, is_pinned=False)) > 2 * alone
    update = Kernel("aten._fused_adamw_", "memory", "float32", 0, GIB)
    few, many = (H100.host_kernel_seconds(update, each) for each in (1, 8))
    assert many == pytest.approx(GIB / (H100.offload.memory_gb_s / 8 * GIGA))
    assert few < many
    norm = replace(update, name="aten._foreach_norm")
    assert H100.host_kernel_seconds(norm, 8) > 4 * many
    assert H100.with_fake_group().transfer_seconds(replace(up, ranks=8)) == alone
    one_core = replace(H100, offload=replace(H100.offload, cores=8))
    assert one_core.host_kernel_seconds(update, 8) > many


def test_an_estimate_from_few_layers_has_the_host_memory_of_all() -> None:
    run = config(model={"layers": 10, "width": 64}, sharding=OFFLOAD)
    whole, few = plan_step(run, WORLD, H100), estimate_step(run, WORLD, H100)
    assert few.memory.host_allocated == pytest.approx(whole.memory.host_allocated, rel=0.01)
    assert few.playback.update_seconds == pytest.approx(whole.playback.update_seconds, rel=0.05)
    small = replace(H100, offload=replace(H100.offload, memory_gib=whole.host_bytes / 2 / GIB))
    assert whole.fits and not replace(whole, machine=small).fits
