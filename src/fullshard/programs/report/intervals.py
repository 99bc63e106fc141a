"""Arithmetic on ranges of time. Lists of intervals are sorted, disjoint and half open."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union: sorted and disjoint."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def without(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    """Return ``intervals`` without ``others``; both are sorted and disjoint."""
    left: list[Interval] = []
    first = 0
    for start, end in intervals:
        while first < len(others) and others[first][1] <= start:
            first += 1
        at, i = start, first
        while i < len(others) and others[i][0] < end:
            if others[i][0] > at:
                left.append((at, others[i][0]))
            at = max(at, others[i][1])
            i += 1
        if at < end:
            left.append((at, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    """Return the sum of their lengths."""
    return sum(end - start for start, end in intervals)
