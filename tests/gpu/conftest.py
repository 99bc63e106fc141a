"""What tests on a GPU share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullshard import comm


def reduce_scatter(outputs: Any, inputs: Any, group: Any, op: Any, *, async_op: bool) -> None:
    """A stand-in for the fake group's, which writes nothing in torch 2.11: every input element counts."""
    for output, source in zip(outputs, inputs, strict=True):
        torch.sum(source.view(-1, output.numel()), 0, out=output)


def all_to_all(outputs: Any, inputs: Any, group: Any, *, async_op: bool) -> list[Any]:
    """The same for exchanges: what this rank sends is what it receives."""
    for output, source in zip(outputs, inputs, strict=True):
        output.copy_(source)
    return []


@pytest.fixture
def reduce_scatter_that_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "reduce_scatter", reduce_scatter)
    monkeypatch.setattr(comm, "all_to_all", all_to_all)
