"""Timeouts hold for what threads do, and a process ends when its main thread has failed."""

from __future__ import annotations

import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import DataParallelMeshDims, checkpoint, torch_border
from fullshard.mesh import axes as mesh
from fullshard.programs.train.sharded_model import make_mesh
from tests.helpers.preloaded import TEAR_DOWN

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_failed_process_ends_and_one_that_ended_well_waits_for_its_checkpoint(
    tmp_path: Path, preloaded_python: str
) -> None:
    python = [preloaded_python, "-X", TEAR_DOWN, "-m"]
    ranks = [
        subprocess.Popen(
            [*python, "tests.helpers.exits", str(tmp_path), str(rank)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        # The other rank is still stuck, and so is a thread of this one.
        assert ranks[0].wait() == 1
        told, errors = ranks[0].communicate()
        assert "the save ended with" in told and "process group's timeout of 3 s" in told
        assert told.endswith("what was registered is called\n")
        assert "ValueError: the main thread has failed" in errors
        told, errors = ranks[1].communicate()  # its input ends
        assert ranks[1].returncode == 0, errors
        assert "the child ended with 1" in told
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    checkpoint.load(tmp_path / "well", nn.Linear(1024, 1024))
    assert checkpoint.latest(tmp_path) == tmp_path / "well"


def timeouts_of_groups() -> dict[str, timedelta | None]:
    """Of all kinds of groups that are made from one with a timeout of its own."""
    world = dist.group.WORLD
    assert world is not None
    before = torch_border.timeout_of(world)
    assert before is not None
    group = dist.new_group(timeout=timedelta(seconds=70))
    made = {
        "host": mesh.host_group(group, "test"),
        "twin": mesh.twin_group(group),
        "block": mesh.block_group(group, 2),
    }
    torch_border.set_timeout(world, timedelta(seconds=70))
    try:
        trained_on = make_mesh(2, torch.device("cpu"))
        made |= {f"trainer {axis}": trained_on.get_group(axis) for axis in ("replicate", "shard")}
    finally:
        torch_border.set_timeout(world, before)
    axes = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    for axis in ("b", "c"):
        torch_border.set_timeout(axes.get_group(axis), timedelta(seconds=70))
    info = mesh.sharding_mesh_info(axes, DataParallelMeshDims(shard=("b", "c")))
    made["joined axes"] = info.mesh.get_group()
    return {name: torch_border.timeout_of(each) for name, each in made.items()}


def test_groups_wait_no_longer_than_those_they_are_made_from(world: Any) -> None:
    for found in world(4).run(timeouts_of_groups):
        assert set(found.values()) == {timedelta(seconds=70)}, found
