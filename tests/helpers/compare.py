"""Comparing tensors, or dicts and lists of them; the message names the worst entry.

    3 of 8 entries differ, worst ['layer.weight'][1, 2]: 0.5 is not 0.25 (relative error 1),
    12 of 64 elements of it differ

A NaN on either side never passes, not even against the same NaN: no test here means to produce one.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


def assert_equal(actual: Any, expected: Any) -> None:
    """Same structure, dtypes and shapes, and every element the same bit for bit."""
    _compare(actual, expected, rtol=None, atol=0.0)


def assert_close(actual: Any, expected: Any, rtol: float, atol: float) -> None:
    """Same structure and shapes, and |actual - expected| <= atol + rtol * |expected| everywhere."""
    _compare(actual, expected, rtol=rtol, atol=atol)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Difference:
    """One entry whose elements differ: how badly, and a sentence about its worst element."""

    badness: float
    text: str


def _compare(actual: Any, expected: Any, rtol: float | None, atol: float) -> None:
    actual_entries, expected_entries = dict(_entries(actual)), dict(_entries(expected))
    missing = expected_entries.keys() - actual_entries.keys()
    surplus = actual_entries.keys() - expected_entries.keys()
    assert not missing and not surplus, (
        f"the entries are not the same: missing {sorted(missing)}, surplus {sorted(surplus)}"
    )
    differences = [
        difference
        for key, entry in expected_entries.items()
        if (difference := _difference(key, actual_entries[key], entry, rtol, atol)) is not None
    ]
    if differences:
        worst = max(differences, key=lambda difference: difference.badness)
        raise AssertionError(
            f"{len(differences)} of {len(expected_entries)} entries differ, worst {worst.text}"
        )


def _entries(value: Any, key: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a nested structure, each under the expression that leads to it."""
    if isinstance(value, torch.Tensor):
        yield key or "the tensor", value.detach().cpu()
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _entries(item, f"{key}[{name!r}]")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, item in enumerate(value):
            yield from _entries(item, f"{key}[{index}]")
    elif isinstance(value, int | float):
        yield key or "the number", torch.tensor(value, dtype=torch.float64)
    else:
        raise TypeError(f"Only tensors and numbers compare; {key or 'the value'} is {type(value)}.")


def _difference(
    key: str, actual: torch.Tensor, expected: torch.Tensor, rtol: float | None, atol: float
) -> _Difference | None:
    exact = rtol is None
    if actual.shape != expected.shape or (exact and actual.dtype != expected.dtype):
        return _Difference(
            badness=math.inf,
            text=f"{key}: {actual.dtype} of shape {tuple(actual.shape)}"
            f" is not {expected.dtype} of shape {tuple(expected.shape)}",
        )
    if _are_equal(actual, expected) and (not exact or _are_equal(_bits(actual), _bits(expected))):
        return None  # most are, and this is quick
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, e = actual.to(wide).flatten(), expected.to(wide).flatten()
    # Equal infinities are no error, though their difference is NaN.
    error = torch.where(a == e, 0.0, (a - e).abs())
    if rtol is None:
        bad = (_bits(actual) != _bits(expected)).any(dim=1) | a.isnan() | e.isnan()
        badness = error
    else:
        allowed = atol + rtol * e.abs()
        bad = ~((a == e) | (error <= allowed))
        badness = error / allowed
    if not bad.any():
        return None
    # NaN is worse than anything, and -1 keeps good elements from being chosen.
    badness = torch.where(bad, badness.nan_to_num(nan=math.inf), -1.0)
    worst = int(badness.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(worst), actual.shape)]
    relative = float(error[worst] / e[worst].abs())
    return _Difference(
        badness=float(badness[worst]),
        text=f"{key}{index if index else ''}: {actual.flatten()[worst].item()!r} is not "
        f"{expected.flatten()[worst].item()!r} (relative error {relative:.3g}), "
        f"{int(bad.sum())} of {bad.numel()} elements of it differ",
    )


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether plain tensors are equal: no NaN is, but 0.0 and -0.0 are. There is no float8 for `torch.equal`."""
    is_known = a.dtype == b.dtype and not str(a.dtype).startswith("torch.float8")
    return is_known and type(a) is type(b) is torch.Tensor and torch.equal(a, b)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, one row per element."""
    flat = tensor.contiguous().flatten()
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())
