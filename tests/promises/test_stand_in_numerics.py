"""Training on the stand-in for NCCL: the numbers of one process, in every configuration that tests/gpu has for NCCL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.backend_cases import CASES, Case, is_close, pipelined, resume_half, save_half
from tests.helpers.ranks import World

ON_STAND_IN = [case for case in CASES if case is not pipelined]
"""A schedule sends and receives in one group of calls, which NCCL joins; the stand-in has one after the other."""


@pytest.mark.parametrize("case", ON_STAND_IN, ids=lambda case: case.__name__)
def test_ranks_train_as_one_process_does(world_of: Callable[[int, str], World], case: Case) -> None:
    for losses in world_of(4, "stand-in").run(case, "cpu"):
        assert is_close(losses, case), losses


def test_stages_of_a_pipeline_train_as_one_process_does(world: Callable[[int], World]) -> None:
    for losses in world(4).run(pipelined, "cpu"):
        assert is_close(losses, pipelined), losses


def test_a_checkpoint_of_four_ranks_is_loaded_on_two(
    world_of: Callable[[int, str], World], tmp_path: Path
) -> None:
    first = world_of(4, "stand-in").run(save_half, tmp_path / "saved", "cpu")[0]
    second = world_of(2, "stand-in").run(resume_half, tmp_path / "saved", "cpu")[0]
    assert is_close(first + second, CASES[0])
