"""The comparison of checkpoints runs, and its plans do not grow with ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]


def compare_tiny(folder: Path) -> dict[str, dict[str, list[float]]]:
    from benchmarks.checkpoint import NAMES, Place, build, compare, save

    model, optimizer = build(1, layers=2)
    for name in NAMES:
        save(name, folder / f"written-{name}", model, optimizer)
    place = Place(
        rank=dist.get_rank(), ranks=2, folder=folder, megabytes=1, rounds=1, job="compare"
    )
    return compare(place, model, optimizer)


def test_both_are_timed_in_every_round(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    samples, _ = world(2).run(compare_tiny, tmp_path)
    assert list(samples) == ["save", "load", "resume", "reshard"]
    for by_name in samples.values():
        assert {name: len(seconds) for name, seconds in by_name.items()} == {
            "fullshard": 1,
            "dcp": 1,
        }


def test_a_plan_for_many_ranks_is_no_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.checkpoint import plan_times

    few, many = (plan_times(world, layers=1) for world in (8, 64))
    assert few["tensors"] == many["tensors"] == 27
    by_rank = 80  # a file's record, and its number in a list
    assert many["manifest bytes"] - few["manifest bytes"] < 56 * by_rank + 500
