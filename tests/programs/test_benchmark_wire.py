"""The comparison of reductions counts bytes and errors that are known beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.fake import fake_world


@pytest.fixture(autouse=True)
def _root_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])


def test_a_narrow_wire_sends_half_of_what_fp32_does() -> None:
    from benchmarks.transformer import Shape
    from benchmarks.wire import APIS, REDUCTIONS, steps_table

    shape = Shape(layers=1, width=32, head_width=16, batch=1, context=8, vocab=4096)
    with fake_world(8):
        lines = steps_table(shape, torch.device("cpu"), 8, rounds=1, steps=1).splitlines()[2:]
    sent = [float(line.split("|")[2]) for line in lines]
    assert len(sent) == len(APIS) * len(REDUCTIONS)
    for bf16, fp32, wire in (sent[:3], sent[3:]):
        assert bf16 == wire > 0.4
        assert wire == pytest.approx(fp32 / 2, abs=0.06)


def test_sums_in_bf16_are_wrong_by_more_than_rounding_and_the_others_are_not() -> None:
    from benchmarks.wire import errors_of_sums

    bf16, fp32, wire = errors_of_sums(64)
    assert bf16 > 1e-3 > 1e-7 > max(fp32, wire)
