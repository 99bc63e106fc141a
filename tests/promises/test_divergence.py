"""Ranks that diverge end soon, in an error that names the rank and the place; differences that are legal are no error.

One test per kind; `python -m tests.helpers.divergences` also runs variants of them. All kinds run side by side in
processes of their own, started by the first test that needs one; with several pytest processes, by one of them.

Kinds run on gloo, and one of each sort on the stand-in for NCCL, too; there the command above runs all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.divergences import all_kinds, outcome, plan_operations
from tests.helpers.rank_programs import JobResult, Results, start

ON_STAND_IN = (
    "a_rank_is_slow_in_a_layer",
    "a_rank_raises_in_forward",
    "a_rank_has_less_data",
    "a_rank_is_killed",
    "a_rank_is_killed_while_others_compute",
    "a_rank_in_a_container_is_killed",
    "the_rank_with_the_store_is_killed",
    "a_rank_aborts_its_process_group",
    "a_tensor_parallel_rank_raises_in_forward",
    "a_rank_waits_for_a_collective_that_it_called_alone",
    "a_rank_evaluates_in_another_order",
    "a_rank_calls_equal_layers_in_another_order_later",
)
KINDS = {
    name: kind
    for name, kind in all_kinds().items()
    if not kind.is_variant and not kind.needs_aborts
} | {f"{name} on stand-in": all_kinds()[name].on("stand-in") for name in ON_STAND_IN}
RESULT_TIMEOUT_S = 280.0
"""A result may come late on a crowded machine. A job that hangs is ended much earlier."""


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Results]:
    """The results of all kinds that are to be tested."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # which all workers share
    folder /= "divergences"
    try:
        folder.mkdir()
    except FileExistsError:
        yield Results(folder)
        return
    selected = [
        item.callspec.id
        for item in request.session.items
        if item.path == Path(__file__) and hasattr(item, "callspec")
    ]
    jobs = {name: KINDS[name].job for name in selected if why_not(name) is None}
    runner = start(jobs, folder, plan_operations)
    yield Results(folder)
    runner.join()


def why_not(name: str) -> str | None:
    return KINDS[name].why_not_on(KINDS[name].job.backend)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", KINDS)
def test_every_rank_ends_soon_and_is_told_why(results: Results, name: str) -> None:
    if reason := why_not(name):
        pytest.skip(reason)
    result = results.wait(name, RESULT_TIMEOUT_S)
    problems = KINDS[name].problems(result)
    assert not problems, "\n".join([*problems, "", *_details(result)])


def _details(result: JobResult) -> Iterator[str]:
    for rank, end in enumerate(result.ends):
        yield f"--- rank {rank}: {outcome(end)} after {result.seconds(rank):.1f} s: {end.message}"
        yield end.stderr


def test_the_table_has_at_least_fifty_kinds_on_two_to_four_ranks_and_both_apis() -> None:
    divergences = [kind for kind in KINDS.values() if not kind.legal]
    assert len(divergences) >= 50
    assert {kind.job.ranks for kind in divergences} == {2, 3, 4}
    assert {kind.api for kind in divergences} == {"fully_shard", "wrapper"}
