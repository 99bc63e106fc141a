"""Ranks that die, stop, leave, fail or sleep: what the others say, in real processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.watched_ranks import Run, run_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

RUNS = {
    "killed": Run(does="kill"),
    "store's host killed": Run(does="kill", bad=0, hosted=True),
    "stopped": Run(does="stop", world=3),
    "store's host stopped": Run(does="stop", bad=0, hosted=True),
    "left": Run(does="leave"),
    "failed": Run(does="fail", hosted=True),
    "failed at once": Run(does="fail", at=1),
    "slow": Run(does="sleep"),
    "elsewhere": Run(does="barrier"),
}
SAID = {
    "killed": r"rank 1 died, while others wait\.\n  rank 1 \(host \S+, process \d+\): dead: .*; last seen: .*last called ",
    "store's host killed": r"rank 0 died, while others wait\.\n  rank 0 \(host \S+, process \d+\): dead",
    "stopped": r"rank 1 was stopped, while others wait\.\n  rank 1 \(host .*\): stopped",
    "store's host stopped": r"rank 0 was stopped, while others wait\.\n  rank 0 \(host .*\): stopped",
    "left": r"rank 1 left, while others wait\.\n  rank 1 \(host .*\): left",
    "failed": r"rank 1 raised ValueError: bad sample 7, .*while others wait",
    "failed at once": r"rank 1 raised ValueError: bad sample 7, .*while others wait",
    "elsewhere": r"ranks 0, 1 wait for each other.*\n(.*\n)*  rank 1 .*: waiting for torch.distributed.barrier: .* "
    r"at .*watched_ranks.py:\d+ in barrier",
}


def test_survivors_name_the_rank_that_is_gone_and_wait_for_one_that_is_slow(tmp_path: Path) -> None:
    ends = run_all(RUNS, tmp_path)
    for name, said in SAID.items():
        run = RUNS[name]
        survivors = {*range(run.world)} - ({run.bad} if name != "elsewhere" else set())
        assert survivors <= ends[name].keys(), f"{name}: a rank hangs, or was killed"
        for rank in survivors:
            end = ends[name][rank]
            assert end.error == "DivergenceError", (name, rank, end)
            assert re.search(said, end.message), (name, rank, end.message)
            # Without the wait before step 3, rank 0 may not have seen the end of the step before.
            where = "all-gather" if run.at == 3 else r"(all-gather|reduce-scatter)"
            assert re.search(rf"waiting for {where} of (0|1|root)", end.message), (name, end)
    assert {rank: end.error for rank, end in ends["slow"].items()} == {0: "", 1: ""}
