"""A step with shards in host memory copies what its plan says, and takes the memory that its plan says."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fullshard import torch_border
from fullshard.programs.plan_tool.host_measurements import measure_host
from fullshard.programs.plan_tool.measurements import Bench
from fullshard.programs.plan_tool.memory_use import memory_use
from fullshard.programs.plan_tool.profile_file import load_profile
from fullshard.programs.plan_tool.program import Launch, Program, Transfer
from fullshard.programs.plan_tool.step_program import record_step
from fullshard.programs.plan_tool.training_step import TrainingStep
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.config_file import read_config
from fullshard.programs.train.model_source import open_model
from tests.helpers.fake import fake_world

pytestmark = pytest.mark.gpu

WORLD = 8
CUDA = torch.device("cuda")


class Copies(torch_border.OperatorMode):
    """Notes copies between host and device: their direction and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = torch_border.signature_of(func).name
        if name in ("copy_", "_to_copy"):
            target, source = (args[0], args[1]) if name == "copy_" else (result, args[0])
            if target.is_cpu != source.is_cpu:
                direction = "to device" if source.is_cpu else "to host"
                self.found.append((direction, source.nbytes))
        return result


def run(**changes: object) -> RunConfig:
    settings = ["model.size=small", "compute.precision=bf16", f"train.batch={2 * WORLD}"]
    settings += [f"{name.replace('__', '.')}={value}" for name, value in changes.items()]
    return read_config(None, [*settings, "sharding.offload=true"])


def planned(config: RunConfig) -> Program:
    return record_step(config, WORLD, open_model(config)).program


@pytest.mark.parametrize(
    "config",
    [run(), run(sharding__replicas=2, train__accumulate=2), run(optimizer__name="sgd")],
    ids=["adamw", "HSDP, accumulated", "sgd"],
)
def test_a_step_copies_what_its_plan_says(config: RunConfig) -> None:
    program = planned(config)
    expected = [
        (entry.work.direction, entry.work.nbytes)
        for entry in program.entries[program.begin : program.end]
        if isinstance(entry, Launch) and isinstance(entry.work, Transfer)
    ]
    with fake_world(WORLD):
        step = TrainingStep(config, WORLD, open_model(config), CUDA)
        step.take()
        with Copies() as copies:
            step.take()
    assert copies.found == expected


def test_a_step_takes_the_memory_that_its_plan_says() -> None:
    config = run()
    program = planned(config)
    # The library for matrix products takes its workspaces once.
    weight = torch.ones(64, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    (weight @ weight).sum().backward()
    del weight
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held, pinned = torch.cuda.memory_allocated(), pinned_bytes()
    with fake_world(WORLD):
        step = TrainingStep(config, WORLD, open_model(config), CUDA)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            step.take()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - held
        taken = pinned_bytes() - pinned
    h200 = load_profile("h200")
    use = memory_use(program, replace(h200, memory=replace(h200.memory, workspace_mib=0)))
    assert use.allocated == pytest.approx(peak, rel=0.01)
    # Blocks of other tests may be used again.
    of_plan = use.host_at_peak["parameters"] + use.host_at_peak["gradients"]
    assert of_plan > 0
    assert taken <= 1.01 * of_plan


def pinned_bytes() -> int:
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


def test_host_memory_and_its_link_are_measured() -> None:
    bench = Bench(CUDA, seconds_each=0.01)
    rates = measure_host(CUDA, bench.seconds_of, ranks=1, mebibytes=32)
    assert rates.to_device > rates.unpinned > 1e9
    assert rates.to_host > 1e9
    assert 0 < rates.latency < 0.1  # 1.2 ms where five other processes used the GPU
    assert rates.core <= 1.2 * rates.update
