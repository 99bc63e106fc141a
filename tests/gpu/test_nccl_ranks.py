"""Several NCCL ranks on one GPU: the numbers of one process, and the ends that docs/divergence.md promises.

NCCL refuses two ranks on one device of one host. Ranks that call themselves different hosts may share a device; they
talk over loopback sockets (`rank_programs.ENVIRONMENTS`). Bandwidth is not that of a network, all else is NCCL's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.backend_cases import CASES, Case, is_close, resume_half, save_half
from tests.helpers.divergences import all_kinds, outcome
from tests.helpers.rank_programs import Results, no_preparation, start
from tests.helpers.ranks import World

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_ranks_train_as_one_process_does(
    nccl_world: Callable[[int], World], case: Case, ranks: int
) -> None:
    for losses in nccl_world(ranks).run(case, "cuda"):
        assert is_close(losses, case), losses


def test_a_checkpoint_of_four_ranks_is_loaded_on_two(
    nccl_world: Callable[[int], World], tmp_path: Path
) -> None:
    first = nccl_world(4).run(save_half, tmp_path / "saved", "cuda")[0]
    second = nccl_world(2).run(resume_half, tmp_path / "saved", "cuda")[0]
    assert is_close(first + second, CASES[0])


@pytest.mark.timeout(360)
def test_all_ranks_end_soon_and_are_told_why(tmp_path: Path) -> None:
    kinds = {
        name: kind.on("nccl")
        for name, kind in all_kinds().items()
        if kind.why_not_on("nccl") is None
    }
    folder = tmp_path / "jobs"
    folder.mkdir()
    # Nothing is planned before: the process that ranks are forked from must not ask for a GPU.
    runner = start({name: kind.job for name, kind in kinds.items()}, folder, no_preparation)
    problems = []
    for name, kind in kinds.items():
        result = Results(folder).wait(name, 300)
        ends = ", ".join(map(outcome, result.ends))
        problems += [f"{name} ({ends}): {problem}" for problem in kind.problems(result)]
    runner.join()
    assert not problems, "\n".join(problems)
