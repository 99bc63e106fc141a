"""`same_plans` finds a plan that differs, and says by how much."""

from __future__ import annotations

import pytest

from benchmarks import same_plans


def test_plans_that_differ_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = {"old": {"bf16": [1, 2], "fp32": [3, 4]}, "new": {"bf16": [1, 2], "fp32": [3, 5]}}
    monkeypatch.setattr(same_plans, "of_checkout", lambda path: plans[path.name])
    assert same_plans.main(["old", "new"]) == 1
    assert "[3, 4] became [3, 5]" in (said := capsys.readouterr().out) and "1 of 2 equal" in said
    assert same_plans.main(["old", "old"]) == 0


def test_a_checkout_s_plans_are_those_of_its_fullshard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_plans, "CONFIGURATIONS", {"bf16": {"compute": {"precision": "bf16"}}})
    monkeypatch.setattr(same_plans, "WIDTHS", (64,))
    found = same_plans.planned()
    assert all(value >= 0 for value in found["bf16, width 64"])
