"""`torch_border.CompiledKernel` repeats a compiled call without its checks, and only where that computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fullshard import torch_border


class Code:
    """What the compiler's last stage makes of a graph: here the graph itself, so that nothing is generated."""

    _boxed_call = True

    def __init__(self, graph: Any, inputs: Any, **_: Any) -> None:
        self.current_callable = lambda taken: graph(*taken)

    def __call__(self, inputs: list[Any]) -> Any:
        return self.current_callable(inputs)


@pytest.fixture(autouse=True)
def _nothing_is_generated() -> Iterator[None]:
    with patch("torch._inductor.compile_fx.compile_fx_inner", Code), torch.no_grad():
        yield
    torch.compiler.reset()


def add_rows(total: Tensor, values: Tensor, nothing: None, largest: Tensor, factor: Tensor) -> None:
    total.copy_(total * factor + values)
    largest.copy_(total.amax(1))


def tensors(rows: int) -> tuple[Any, ...]:
    both = torch.zeros(2, rows * 4)  # the total is a view of one storage, as codes are
    return both[0].view(-1, 4), torch.randn(rows, 4), None, torch.zeros(rows), torch.full((1,), 2.0)


def test_a_repeated_call_computes_what_a_checked_one_does() -> None:
    kernel = torch_border.CompiledKernel(add_rows)
    for rows in (3, 5, 7):
        arguments = tensors(rows)
        total, first, _, largest, factor = arguments
        repeat = kernel.run(arguments, varying=(1, 4))
        assert repeat is not None
        torch.testing.assert_close(total, first)
        second, halved = torch.randn(rows, 4), torch.full((1,), 0.5)
        with patch.object(kernel, "_checked", side_effect=AssertionError("checked again")):
            repeat(second, halved)
        expected = first * halved + second
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(largest, expected.amax(1))
        repeat(first, factor)
        torch.testing.assert_close(total, expected * factor + first)


def test_a_call_whose_result_is_written_after_the_generated_code_is_checked_each_time() -> None:
    kernel = torch_border.CompiledKernel(add_rows)
    total, values, nothing, _, factor = tensors(4)
    shares = total.view(-1)[:4]  # the largest are written into the first row
    assert kernel.run((total, values, nothing, shares, factor), varying=(1, 4)) is None
    expected = values.clone()
    expected[0] = values.amax(1)
    torch.testing.assert_close(total, expected)
