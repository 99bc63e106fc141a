"""Days, GPU hours and money of a whole run."""

from __future__ import annotations

import pytest

from fullshard.errors import ConfigurationError
from fullshard.programs.plan_tool.run_cost import days_text, read_tokens, run_cost


@pytest.mark.parametrize(
    ("written", "tokens"),
    [("15T", 15 * 10**12), ("300b", 3 * 10**11), ("1.5M", 1_500_000), ("2e9", 2 * 10**9), ("1_000", 1000), ("20,000", 20_000), ("7 k", 7000), ("1e3b", 10**12)],
)  # fmt: skip
def test_tokens_are_written_as_people_do(written: str, tokens: int) -> None:
    assert read_tokens(written) == tokens


@pytest.mark.parametrize(
    "written", ["", "T", "-1", "1.2.3", "5 Q", "0", "0.1", "1e30", "inf", "15T tokens"]
)
def test_what_is_no_number_of_tokens_is_refused(written: str) -> None:
    with pytest.raises(ConfigurationError, match="--tokens takes a number of tokens such as 15T"):
        read_tokens(written)


def test_a_run_takes_whole_steps_on_all_gpus() -> None:
    cost = run_cost(10**9, tokens_of_step=3_000_000, seconds=36.0, gpus=100, price=2.5)
    assert cost.steps == 334
    assert cost.gpu_hours == pytest.approx(334)
    assert cost.days == pytest.approx(334 * 36 / 86400)
    assert (
        str(cost)
        == "3.34 hours for 1 billion tokens, 334 steps, 334 GPU hours, 835 at 2.5 a GPU hour"
    )
    free = run_cost(1_500_000, tokens_of_step=10**6, seconds=1.0, gpus=1, price=None)
    assert str(free) == "2 seconds for 1.5 million tokens, 2 steps, 0.000556 GPU hours"


def test_times_are_in_the_unit_that_fits() -> None:
    assert [days_text(days) for days in (400, 3, 1.5, 0.05, 1e-4)] == [
        "400 days",
        "3 days",
        "36 hours",
        "72 minutes",
        "8.64 seconds",
    ]
