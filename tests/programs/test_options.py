"""What a run can be told, and what is said when it cannot be."""

from typing import Any

import pytest

from fullshard.errors import ConfigurationError
from fullshard.train.options import TrainOptions


def test_the_defaults_are_valid() -> None:
    TrainOptions()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "ranks must be at least 1, got 0."),
        ({"steps": 0}, "steps must be at least 1, got 0."),
        ({"batch": -1}, "batch must be at least 1, got -1."),
        ({"context": 0}, "context must be at least 1, got 0."),
        ({"layers": 0}, "layers must be at least 1, got 0."),
        ({"heads": 0}, "heads must be at least 1, got 0."),
        ({"lr": 0.0}, "lr must be a positive number, got 0.0."),
        ({"lr": float("nan")}, "lr must be a positive number, got nan."),
        ({"seed": -1}, "seed must not be negative, got -1."),
        ({"width": 100, "heads": 3}, "got width 100 and heads 3; 102 would do as a width."),
        ({"width": 12, "heads": 4}, "got 12 / 4 = 3; 16 would do as a width."),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'."),
        ({"precision": "fp8"}, "precision must be one of fp32, bf16, got 'fp8'."),
    ],
)
def test_wrong_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TrainOptions(**changes)
    assert message in str(caught.value)


def test_all_wrong_values_are_named_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        TrainOptions(steps=0, batch=0, device="tpu")  # type: ignore[arg-type]
    assert str(caught.value).splitlines() == [
        "steps must be at least 1, got 0.",
        "batch must be at least 1, got 0.",
        "device must be one of auto, cpu, cuda, got 'tpu'.",
    ]
