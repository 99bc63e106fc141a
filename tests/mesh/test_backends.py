"""What is known of backends, and what is asked for in the place of their names."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from fullshard.mesh.backends import (
    NOTHING,
    abort_all,
    backend_named,
    backend_of,
    backends_in_use,
    has_imagined_ranks,
    has_peers,
)
from tests.helpers import stand_in
from tests.helpers.fake import fake_world
from tests.helpers.groups import alone

SOURCES = Path(__file__).resolve().parents[2] / "src" / "fullshard"


def test_a_backend_that_is_not_known_is_an_ordinary_one() -> None:
    found = backend_named("ucc")
    assert found is backend_named("ucc")
    assert found.ranks == "processes"
    assert not (
        found.is_on_stream or found.has_meetings or found.has_sliced_waits or found.has_aborts
    )


def test_the_backend_of_a_group_depends_on_the_device() -> None:
    with alone():
        group = dist.group.WORLD
        assert group is not None
        assert backend_of(group, torch.device("cpu")) is backend_named("gloo")
        assert backend_of(group, torch.device("meta")) is NOTHING
        assert backends_in_use() == [backend_named("gloo")]
        assert not has_peers(group), "it is alone"
    with fake_world(2):
        assert dist.group.WORLD is not None
        assert has_imagined_ranks(dist.group.WORLD)
        assert not has_peers(dist.group.WORLD), "the other rank does not exist"


def test_backends_with_an_abort_are_aborted_and_others_go_on() -> None:
    with alone():
        dist.barrier()
        abort_all()
        dist.barrier()
    dist.init_process_group(stand_in.NAME, rank=0, world_size=1, store=dist.HashStore())
    try:
        communicator = dist.group.WORLD.communicator  # type: ignore[union-attr]
        abort_all()
        for thread in threading.enumerate():
            if thread.name == "fullshard-abort":
                thread.join()
        assert communicator.is_aborted.is_set()
    finally:
        dist.destroy_process_group()


def test_no_other_file_compares_the_name_of_a_backend() -> None:
    comparison = re.compile(r"""(==|!=|\bin\b)\s*\(?["'](gloo|nccl|fake|threaded)["']""")
    found = [
        f"{path.relative_to(SOURCES)}: {line.strip()}"
        for path in SOURCES.rglob("*.py")
        for line in path.read_text().splitlines()
        if comparison.search(line) or re.search(r"""["'](gloo|nccl)["'] (not )?in """, line)
    ]
    assert not found, "\n".join(found)
