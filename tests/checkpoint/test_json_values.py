"""Nested values survive JSON to the last bit, and nothing else is accepted."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from fullshard import CheckpointError
from fullshard.checkpoint.json_values import DeviceScalar, decode, encode, references
from fullshard.checkpoint.source import TensorRef


def round_trip(value: Any) -> Any:
    faults: list[str] = []
    text = json.dumps(encode(value, "value", faults), allow_nan=False)
    assert faults == []
    return decode(json.loads(text))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.just("!"), inner)
    ),
    max_leaves=20,
)


@given(plain)
def test_values_come_back(value: Any) -> None:
    found = round_trip(value)
    assert found == value
    assert repr(found) == repr(value)  # types of numbers, tuples and lists, order of dicts


def test_nan_and_subclasses() -> None:
    assert math.isnan(round_trip(math.nan))
    assert round_trip(OrderedDict(a=torch.float32.itemsize)) == {"a": 4}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]
)
def test_numbers_in_tensors_keep_dtype_and_bits(dtype: torch.dtype) -> None:
    for number in (3, 1 / 3, 0):
        value = torch.tensor(number, dtype=dtype)
        found = round_trip({"step": value})["step"]
        assert found.dtype == dtype and torch.equal(found, value)
    if dtype.is_floating_point:
        assert math.isinf(round_trip(torch.tensor(-math.inf, dtype=dtype)).item())


def test_a_number_on_a_device_says_so() -> None:
    found = round_trip(DeviceScalar(torch.tensor(2.0)))
    assert isinstance(found, DeviceScalar) and found.value.item() == 2.0


def test_small_tensors_and_references() -> None:
    state = torch.get_rng_state()
    tree = {"rng": state, "empty": torch.empty(0, 3), "halves": torch.rand(2, 3).half()}
    found = round_trip(tree)
    assert all(
        torch.equal(found[key], tree[key]) and found[key].dtype == tree[key].dtype for key in tree
    )
    nested = {"a": [TensorRef("x"), ({"b": TensorRef("y")},)]}
    assert round_trip(nested) == nested
    assert [ref.key for ref in references(nested)] == ["x", "y"]


def test_what_json_cannot_say_is_listed_with_its_path() -> None:
    faults: list[str] = []
    encode({"a": [1, Fraction(1, 3)], "b": {2: {3}}, "c": torch.zeros(1 << 20)}, "extra", faults)
    assert faults == [
        "extra.a[1]: fractions.Fraction",
        "extra.b[2]: builtins.set",
        f"extra.c: a tensor of {4 << 20} bytes; at most {1 << 20}",
    ]


@pytest.mark.parametrize(
    "crafted",
    [
        {"!": "pickle", "data": "..."},
        {"!": "tuple"},
        {"!": "float", "value": "one"},
        {"!": "scalar", "dtype": "F32", "value": [1, 2]},
        {"!": "scalar", "dtype": "F3", "value": 1},
        {"!": "scalar", "dtype": "I64", "value": 1 << 80},
        {"!": "array", "dtype": "U8", "shape": [5], "base64": "AAAA"},
        {"!": "array", "dtype": "F32", "shape": [-1], "base64": ""},
        {"!": "array", "dtype": "U8", "shape": [1 << 60], "base64": "AAAA"},
        {"!": "dict", "items": [[[1], 2]]},
        {"!": ["tuple"]},
    ],
)
def test_crafted_values_are_refused(crafted: Any) -> None:
    with pytest.raises(CheckpointError):
        decode({"a": [crafted]})


def test_depth_is_limited() -> None:
    value: Any = 1
    for _ in range(200):
        value = [value]
    with pytest.raises(CheckpointError, match="levels deep"):
        decode(value)
