"""The benchmark of recordings measures steps of both kinds, and counts what a step asks when nobody records."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.fake import fake_world


@pytest.fixture(autouse=True)
def _root_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])


def test_both_kinds_of_steps_are_measured(tmp_path: Path) -> None:
    from benchmarks.contestants import Setting
    from benchmarks.trace import measure, row
    from benchmarks.transformer import Shape

    shape = Shape(layers=2, width=32, head_width=16, batch=1, context=8, vocab=64)
    device = torch.device("cpu")
    setting = Setting(shape=shape, device=device, world=8, precision="fp32", master="fp32")
    with fake_world(8):
        measured = measure("two layers", setting, rounds=2, steps=1, folder=tmp_path)
    samples = (measured.step_off, measured.step_on, measured.host_off, measured.host_on)
    assert [len(each) for each in samples] == [2] * 4, "the first round does not count"
    # Forward, backward and a reduction of three groups; two gathers of each layer and one of the root.
    assert measured.events > 2 * 3 + 3 + 5
    # Each group is asked for when it is gathered (twice), computed with, released and reduced.
    assert 3 * 8 < measured.questions < 3 * 20
    assert 0 < measured.off_share < 0.01
    assert row(measured)[0] == "two layers"
