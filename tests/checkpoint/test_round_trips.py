"""What any ranks have written any others read, to the last bit; and training goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard import checkpoint
from tests.helpers.checkpointed import ODD, OPTIMIZERS, Setting, train, whole_state
from tests.helpers.compare import assert_equal
from tests.helpers.ranks import RankError

SMALL = replace(ODD, depth=1)

APIS = ("functional", "wrapper", "flat")

LAYOUTS: dict[str, tuple[int, int]] = {
    "1": (1, 1),
    "3": (3, 1),
    "2x2": (4, 2),
}
"""Ranks, and how many replicas they are."""


def write_all(folder: Path, layout: str) -> None:
    """Train a little through every API, save, and note what was saved."""
    for api in APIS:
        setting = Setting(api=api, replicas=LAYOUTS[layout][1], model=SMALL)
        model, optimizer = setting.build()
        train(model, optimizer, range(1))
        checkpoint.save(folder / f"{layout}-{api}", model, optimizer, extra={"layout": layout})
        state = whole_state(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(state, folder / f"{layout}-{api}.pt")


def read_all(folder: Path, layout: str) -> None:
    """Load what was written into models that were initialized in another way.

    Every layout loads every layout's. Apis are chosen such that every API loads every API's, and that all that was
    written is loaded by somebody.
    """
    here = list(LAYOUTS).index(layout)
    for there, written in enumerate(LAYOUTS):
        api = APIS[(here + there) % 3]
        setting = Setting(api=api, replicas=LAYOUTS[layout][1], model=SMALL)
        model, optimizer = setting.build(seed=5)
        name = f"{written}-{APIS[(here + 2 * there) % 3]}"
        loaded = checkpoint.load(folder / name, model, optimizer)
        assert loaded.extra == {"layout": written}
        assert_equal(whole_state(model, optimizer), torch.load(folder / f"{name}.pt"))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_layout_and_api_reads_every_other(world: Any, tmp_path: Path) -> None:
    for layout, (ranks, _) in LAYOUTS.items():
        world(ranks).run(write_all, tmp_path, layout)
    for layout, (ranks, _) in LAYOUTS.items():
        world(ranks).run(read_all, tmp_path, layout)


def write_mixed(folder: Path) -> dict[str, Any]:
    model, optimizer = Setting(mixed=True).build()
    train(model, optimizer, range(1))
    checkpoint.save(folder / "mixed", model, optimizer)
    return whole_state(model, optimizer)


def read_full(folder: Path, expected: dict[str, Any]) -> None:
    for api in APIS:
        model, optimizer = Setting(api=api).build(seed=5)
        checkpoint.load(folder / "mixed", model, optimizer)
        assert_equal(whole_state(model, optimizer), expected)


def test_mixed_precision_is_loaded_into_full(world: Any, tmp_path: Path) -> None:
    expected = world(2).run(write_mixed, tmp_path)[0]
    world(3).run(read_full, tmp_path, expected)


RESUMED = {
    f"{api} {optimizer} {'mixed' if mixed else 'fp32'}": Setting(
        api=api, optimizer=optimizer, mixed=mixed
    )
    for api, mixed_ones in {"functional": ("AdamW", "view"), "wrapper": ("SGD",)}.items()
    for optimizer in OPTIMIZERS
    for mixed in (optimizer in mixed_ones,)
}

Run = tuple[list[float], dict[str, Any]]
"""Losses, and the state at the end."""


def train_save_and_die(folder: Path) -> None:
    for name, setting in RESUMED.items():
        model, optimizer = setting.build()
        train(model, optimizer, range(2))
        checkpoint.save(folder / name / "step-2", model, optimizer, extra={"step": 2})
    os.kill(os.getpid(), signal.SIGKILL)


def resume(folder: Path) -> dict[str, Run]:
    runs = {}
    for name, setting in RESUMED.items():
        model, optimizer = setting.build(seed=5)
        newest = checkpoint.latest(folder / name)
        assert newest is not None
        step = checkpoint.load(newest, model, optimizer).extra["step"]
        runs[name] = train(model, optimizer, range(step, 4)), whole_state(model, optimizer)
    return runs


def train_through() -> dict[str, Run]:
    runs = {}
    for name, setting in RESUMED.items():
        model, optimizer = setting.build()
        runs[name] = train(model, optimizer, range(4)), whole_state(model, optimizer)
    return runs


def test_training_goes_on_after_every_process_was_killed(world: Any, tmp_path: Path) -> None:
    undisturbed = world(2).run(train_through)
    with pytest.raises(RankError, match="SIGKILL"):
        world(2).run(train_save_and_die, tmp_path)
    resumed = world(2).run(resume, tmp_path)
    for name in RESUMED:
        for of_rank, expected_of_rank in zip(resumed, undisturbed, strict=True):
            losses, state = of_rank[name]
            all_losses, expected = expected_of_rank[name]
            assert losses == all_losses[2:], name
            assert_equal(state, expected)
