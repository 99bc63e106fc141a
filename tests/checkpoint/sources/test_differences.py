"""Two checkpoints are equal if their bits are, whatever their formats; what differs is named and measured."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.checkpoint.json_values import DeviceScalar
from fullshard.checkpoint.source import TensorRef
from fullshard.checkpoint.sources import differences as module
from fullshard.checkpoint.sources.differences import Differences, differences
from tests.helpers.checkpoints import MemorySource, plain_source


def compare(first: Tensor, second: Tensor) -> Differences:
    return differences(MemorySource({"model/w": first}), MemorySource({"model/w": second}))


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1.0, math.nan, math.inf, -0.0]),
        torch.randn(3, 5).bfloat16(),
        torch.randn(7).to(torch.float8_e5m2),
        torch.randn(2, 3, dtype=torch.complex128),
        torch.tensor([True, False]),
        torch.tensor(2**62 + 1),
        torch.empty(0, 4),
    ],
)
def test_a_tensor_equals_its_copy(value: Tensor) -> None:
    found = compare(value, value.clone())
    assert not found
    assert found.compared == 1


def test_differences_are_counted_and_measured() -> None:
    first = torch.tensor([1.0, 2.0, 4.0, 0.0])
    found = compare(first, torch.tensor([1.0, 2.5, 3.0, -0.0])).tensors["model/w"]
    assert (found.differing, found.largest_absolute, found.largest_relative) == (3, 1.0, 0.25)
    found = compare(first, torch.tensor([1.0, 2.0, math.nan, 0.0])).tensors["model/w"]
    assert (found.differing, found.largest_absolute) == (1, math.inf)
    # Another NaN is another value, and so is the first bit of a complex number.
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert compare(nans[:1], nans[1:]).tensors["model/w"].differing == 1
    units = torch.tensor([1 + 1j, 1], dtype=torch.complex128)
    assert compare(units, units.conj().resolve_conj()).tensors["model/w"].differing == 2


def test_other_dtypes_are_a_difference_and_values_are_compared_still() -> None:
    found = compare(torch.tensor([1.0, math.nan, 1.01]), torch.tensor([1, math.nan, 1.01]).half())
    assert found.tensors["model/w"].differing == 1
    assert 0 < found.tensors["model/w"].largest_absolute < 1e-3
    found = compare(torch.ones(3), torch.ones(3).half())
    assert found.tensors["model/w"].differing == 0


def test_names_and_shapes_that_differ_are_listed() -> None:
    first = MemorySource({"model/a": torch.ones(2, 3), "model/b": torch.ones(2)})
    second = MemorySource({"model/a": torch.ones(3, 2), "model/c": torch.ones(2)})
    found = differences(first, second)
    assert (found.only_first, found.only_second) == (["model/b"], ["model/c"])
    assert found.tensors["model/a"].first.shape == (2, 3)
    assert found.tensors["model/a"].differing == 6


def test_tied_and_stored_twice_are_the_same() -> None:
    value = torch.randn(3)
    tied = MemorySource({"model/a": value}, tied={"b": "a"})
    twice = MemorySource({"model/a": value, "model/b": value.clone()})
    assert not differences(tied, twice)
    assert differences(tied, twice).compared == 2
    twice.whole["model/b"][1] += 1
    assert list(differences(tied, twice).tensors) == ["model/b"]


def test_scalars_may_be_stored_or_in_the_tree() -> None:
    def source(value: float, *, is_stored: bool) -> MemorySource:
        scalar, key = torch.tensor(value), "optimizer/w/exp_avg"
        state = TensorRef(key) if is_stored else scalar
        tree = {"state": {"w": {"exp_avg": state}}, "param_groups": []}
        return MemorySource({key: scalar} if is_stored else {}, optimizer=tree)

    assert not differences(source(1.0, is_stored=True), source(1.0, is_stored=False))
    found = differences(source(1.0, is_stored=True), source(2.0, is_stored=False))
    assert found.values == ["optimizer.state.w.exp_avg: tensor(1.) and tensor(2.)"]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPARED_AT_ONCE", 6)
    value = torch.randn(5, 3, 4)
    other = value.clone()
    other[4, 2, 3] += 1
    first, second = MemorySource({"model/w": value}), MemorySource({"model/w": other})
    seen: list[int] = []
    found = differences(first, second, compared=seen.append)
    assert found.tensors["model/w"].differing == 1
    assert 0 < max(first.largest_read, second.largest_read) <= 6
    assert sum(seen) == value.nbytes


def test_optimizers_are_compared() -> None:
    def trained(steps: int, lr: float) -> MemorySource:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        model(torch.ones(2)).sum().backward()
        for _ in range(steps):
            optimizer.step()
        return plain_source(model, optimizer)

    assert not differences(trained(2, 0.0), trained(2, 0.0))
    found = differences(trained(2, 0.0), trained(3, 0.5))
    assert found.values == [
        "optimizer.state.weight.step: tensor(2.) and tensor(3.)",
        "optimizer.state.bias.step: tensor(2.) and tensor(3.)",
        "optimizer.param_groups[0].lr: 0.0 and 0.5",
    ]
    assert "optimizer/weight/exp_avg" in found.tensors
    without = differences(trained(2, 0.0), plain_source(nn.Linear(2, 2)))
    assert len(without.only_first) == 4
    assert "optimizer: " in without.values[0]


@pytest.mark.parametrize(
    ("first", "second", "lines"),
    [
        ({"a": 1}, {"b": 1}, ["extra.a: only in the first", "extra.b: only in the second"]),
        ([1, 2], [1, 3, 4], ["extra: 2 and 3 items", "extra[1]: 2 and 3"]),
        (1, 1.0, ["extra: 1 and 1.0"]),
        (1, True, ["extra: 1 and True"]),
        ((1,), [1], ["extra: (1,) and [1]"]),
        (math.nan, math.nan, []),
        (math.nan, 1.0, ["extra: nan and 1.0"]),
        ({"t": torch.arange(3)}, {"t": torch.arange(3)}, []),
        (
            {"t": torch.ones(2)},
            {"t": torch.zeros(2)},
            ["extra.t: tensor([1., 1.]) and tensor([0., 0.])"],
        ),
        (DeviceScalar(torch.tensor(1.0)), torch.tensor(1.0), []),
        (TensorRef("extra/a"), None, ["extra: a tensor and None"]),
        ("x" * 99, "", [f"extra: '{'x' * 56}... and ''"]),
    ],
)
def test_values_are_compared_exactly(first: Any, second: Any, lines: list[str]) -> None:
    tensors = {"extra/a": torch.ones(2)}
    found = differences(MemorySource(tensors, extra=first), MemorySource(tensors, extra=second))
    assert found.values == lines
    assert bool(found) == bool(lines)
