"""The comparison of two checkouts finds one wrong bit, names it, and compares nothing that differs by itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import number_rank, same_numbers
from benchmarks.echo_group import EchoGroup
from benchmarks.number_rank import Digests, Place, digests_of
from benchmarks.same_numbers import Outcome, compare, main, report
from tests.helpers.groups import leave_group

NAMES = ("fully_shard.plain", "wrapper.full_shard.flat")


@pytest.fixture
def place(tmp_path: Path) -> Any:
    dist.init_process_group("echo", store=dist.HashStore(), rank=0, world_size=8)
    yield Place(rank=0, size=8, device=torch.device("cpu"), folder=tmp_path)
    leave_group()


def outcome(digests: Digests) -> Outcome:
    return Outcome(digests=[[list(each) for each in digests]])


def test_one_wrong_gradient_is_found_and_named(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(number_rank, "STEPS", 1)
    old, new = ({name: outcome(digests_of(name, place)) for name in NAMES} for _ in range(2))
    assert compare(old, new) == [(name, "equal") for name in NAMES]
    assert report(compare({"a, 2 ranks": old[NAMES[0]]}, {"a, 2 ranks": new[NAMES[0]]}), []) == 0

    reduce = EchoGroup.reduce_scatter_single_coalesced

    def by_a_few_bits_too_large(self: Any, outputs: Any, *others: Any) -> Any:
        work = reduce(self, outputs, *others)
        torch._foreach_mul_(outputs, 1 + 1e-6)
        return work

    for method in ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"):
        monkeypatch.setattr(EchoGroup, method, by_a_few_bits_too_large)
    wrong = {name: outcome(digests_of(name, place)) for name in NAMES}
    for name, verdict in compare(old, wrong):
        assert verdict.startswith("step 0, gradient of "), (name, verdict)
    assert report([("a, 2 ranks", "step 0, loss")], []) == 1
    assert "0 of 1 equal" in capsys.readouterr().out


def test_the_earliest_difference_of_all_ranks_is_told() -> None:
    same = [["step 0, loss", "a"], ["step 0, gradient of w", "b"], ["step 1, loss", "c"]]
    late, early = [*same[:2], ["step 1, loss", "x"]], [same[0], ["step 0, gradient of w", "x"]]
    old, new = Outcome(digests=[same] * 3), Outcome(digests=[same, late, early])
    rows = dict(
        compare(
            {"n": old, "gone": old, "broken": old},
            {"n": new, "broken": Outcome(digests=[], error="x")},
        )
    )
    assert rows == {
        "n": "step 0, gradient of w (rank 2; ranks that differ: 1, 2)",
        "gone": "only in the old numbers",
        "broken": "fails in the new checkout",
    }
    shorter = Outcome(digests=[same[:2]] * 3)
    assert "step 1, loss became nothing" in compare({"n": old}, {"n": shorter})[0][1]


def test_numbers_of_another_torch_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(checkout: Path, device: str, chosen: Sequence[str]) -> dict[str, Outcome]:
        return {chosen[0]: Outcome(digests=[[["step 0, loss", "a"]]])}

    monkeypatch.setattr(same_numbers, "train_checkout", train)
    file = tmp_path / "old.json"
    assert main([str(tmp_path), "--save", str(file)]) == 0
    assert main([str(tmp_path), "--against", str(file)]) == 0
    content = json.loads(file.read_text())
    content["conditions"]["torch"] = "1.0"
    file.write_text(json.dumps(content))
    assert main([str(tmp_path), "--against", str(file)]) == 2
    assert "torch: 1.0 there" in capsys.readouterr().err
