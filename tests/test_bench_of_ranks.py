"""The bench itself: what goes wrong on a rank must arrive in the test, and the bench must survive it."""

import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from tests.helpers import ranks
from tests.helpers.compare import assert_close, assert_equal
from tests.helpers.fake import fake_world
from tests.helpers.groups import leave_group
from tests.helpers.rank_worker import StandInError, pickled
from tests.helpers.ranks import RankError, World
from tests.helpers.threads import run_threads

Worlds = Callable[[int], World]


# Functions that run on ranks.


def rank_and_sum() -> tuple[int, int, float]:
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def scaled(x: torch.Tensor, *, by: float) -> torch.Tensor:
    return x * by * (dist.get_rank() + 1)


def nothing() -> None:
    pass


def random_number() -> float:
    return torch.rand(()).item()


def raise_on(rank: int) -> str:
    if dist.get_rank() == rank:
        raise ValueError(f"no luck on {rank}")
    return "fine"


def raise_everywhere() -> None:
    raise ValueError("no luck anywhere")


class StubbornError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def raise_what_does_not_pickle() -> None:
    raise StubbornError("cannot", "travel")


def return_what_does_not_pickle() -> object:
    return threading.Lock()


def raise_while_others_wait() -> None:
    if dist.get_rank() == 1:
        raise ValueError("left the others alone")
    dist.all_reduce(torch.ones(1))


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        wait_for_what_never_comes()


def wait_for_what_never_comes() -> None:
    threading.Event().wait()


def kill_rank(rank: int, signum: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signum)
    wait_for_what_never_comes()


def exit_from(rank: int, code: int) -> None:
    if dist.get_rank() == rank:
        os._exit(code)
    wait_for_what_never_comes()


def process_id() -> int:
    return os.getpid()


def leave_early() -> None:
    dist.barrier()  # gloo fails on a rank that still connects to one that has left
    dist.destroy_process_group()


def add_on_a_mesh(num_groups_before: int) -> bool:
    """True when the sum lives on this job's mesh, not on an equal one of an earlier job."""
    for _ in range(num_groups_before):
        dist.new_group([0])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    total = x + x
    assert isinstance(total, DTensor)
    return total.device_mesh is mesh


# Results.


@pytest.mark.parametrize("n", [4, 3, 2, 1])
def test_every_rank_joins_one_group_and_reports_in_order(world: Worlds, n: int) -> None:
    assert world(n).run(rank_and_sum) == [(rank, n, n * (n + 1) / 2) for rank in range(n)]


def test_tensors_go_in_and_come_back(world: Worlds) -> None:
    x = torch.arange(3.0)
    assert_equal(world(2).run(scaled, x, by=0.5), [x * 0.5, x])


def test_every_job_starts_from_the_same_seed(world: Worlds) -> None:
    first, second = world(2).run(random_number), world(2).run(random_number)
    assert first == second
    assert first[0] == first[1]


def test_a_world_has_one_to_four_ranks(world: Worlds) -> None:
    with pytest.raises(ValueError, match="got 5"):
        world(5)


def test_processes_are_reused(world: Worlds) -> None:
    assert world(2).run(process_id) == world(3).run(process_id)[:2]


# Failures.


def test_a_failing_rank_is_shown_with_its_traceback(world: Worlds) -> None:
    with pytest.raises(RankError) as caught:
        world(2).run(raise_on, 1)
    message = str(caught.value)
    assert message.startswith("rank 1 raised\nTraceback")
    assert "in raise_on" in message
    assert "ValueError: no luck on 1" in message


def test_equal_failures_are_told_once(world: Worlds) -> None:
    with pytest.raises(RankError) as caught:
        world(3).run(raise_everywhere)
    message = str(caught.value)
    assert message.startswith("ranks 0, 1, 2 raised")
    assert message.count("no luck anywhere") == 2, "once in the source line, once as the error"


def test_outcomes_has_results_and_exceptions_by_rank(world: Worlds) -> None:
    outcomes = world(3).outcomes(raise_on, 1)
    assert outcomes[0] == outcomes[2] == "fine"
    assert isinstance(outcomes[1], ValueError)
    assert str(outcomes[1]) == "no luck on 1"


def test_an_exception_that_does_not_pickle_has_a_stand_in(world: Worlds) -> None:
    for outcome in world(2).outcomes(raise_what_does_not_pickle):
        assert isinstance(outcome, StandInError)
        assert str(outcome) == "StubbornError: cannot travel"


def test_a_result_that_does_not_pickle_is_a_failure(world: Worlds) -> None:
    with pytest.raises(RankError, match="cannot pickle"):
        world(1).run(return_what_does_not_pickle)


def test_a_failing_rank_is_told_before_those_that_wait_for_it(
    world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.5)
    with pytest.raises(RankError) as caught:
        world(2).run(raise_while_others_wait)
    message = str(caught.value)
    assert message.startswith("rank 1 raised")
    assert message.index("left the others alone") < message.index("rank 0 did not finish")
    assert "in all_reduce" in message
    assert_works_again(world)


def test_a_hang_becomes_a_failure_with_its_stack(world: Worlds) -> None:
    with pytest.raises(RankError) as caught:
        world(2).run(hang_on, 1, timeout_s=1)
    message = str(caught.value)
    assert message.startswith("rank 1 did not finish")
    assert "in wait_for_what_never_comes" in message
    assert "in hang_on" in message
    assert "_watch_parent" not in message
    assert_works_again(world)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank_is_named_at_once(world: Worlds, signum: signal.Signals) -> None:
    world(2).run(nothing)
    start = time.monotonic()
    with pytest.raises(RankError, match=rf"^rank 1 was killed by {signum.name}") as caught:
        world(2).run(kill_rank, 1, signum)
    assert time.monotonic() - start < 5
    # Nothing can be told from SIGKILL; any other end leaves its stack.
    assert ("in kill_rank" in str(caught.value)) == (signum != signal.SIGKILL)
    assert_works_again(world)


def test_a_rank_that_exits_is_named_at_once(world: Worlds) -> None:
    with pytest.raises(RankError, match=r"^rank 0 exited with 7"):
        world(2).run(exit_from, 0, 7)
    assert_works_again(world)


def assert_works_again(world: Worlds) -> None:
    assert world(2).run(rank_and_sum) == [(0, 2, 3.0), (1, 2, 3.0)]


# Nothing is left of a job, or of the bench.


def test_a_job_that_leaves_its_group_does_not_disturb_the_next(world: Worlds) -> None:
    world(2).run(leave_early)
    assert_works_again(world)


def test_a_job_does_not_see_meshes_of_the_job_before(world: Worlds) -> None:
    assert world(2).run(add_on_a_mesh, 0) == [True, True]
    assert world(2).run(add_on_a_mesh, 1) == [True, True]


def test_who_leaves_a_group_collects_garbage_until_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [13, 2, 0]
    monkeypatch.setattr(gc, "collect", lambda: found.pop(0))
    leave_group()
    assert not found


def test_a_closed_pool_leaves_no_process_and_no_file() -> None:
    pool = ranks.RankPool()
    [pid] = World(pool, 1).run(process_id)
    assert pool._folder is not None
    folder = pool._folder.name
    pool.close()
    assert not os.path.exists(folder)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# Ranks that are threads, and ranks that are not there.


def all_reduce_gradient() -> float:
    weight = torch.full((2,), float(dist.get_rank()), requires_grad=True)
    (weight * weight).sum().backward()
    assert weight.grad is not None
    dist.all_reduce(weight.grad)
    return weight.grad.sum().item()


def test_threads_are_ranks() -> None:
    assert run_threads(3, rank_and_sum) == [(rank, 3, 6.0) for rank in range(3)]
    assert run_threads(2, all_reduce_gradient) == [4.0, 4.0]
    assert run_threads(2, add_on_a_mesh, 0) == [True, True]
    assert run_threads(2, add_on_a_mesh, 1) == [True, True]
    assert not dist.is_initialized()
    assert torch.autograd.is_multithreading_enabled()


def test_a_failing_thread_ends_those_that_wait_for_it() -> None:
    with pytest.raises(RankError) as caught:
        run_threads(3, raise_while_others_wait)
    assert str(caught.value).startswith("rank 1 raised")
    assert "ranks 0, 2" not in str(caught.value)
    assert run_threads(2, rank_and_sum) == [(0, 2, 3.0), (1, 2, 3.0)]


def test_a_thread_that_hangs_is_shown_with_its_stack() -> None:
    with pytest.raises(RankError, match="rank 0 did not finish") as caught:
        run_threads(2, hang_on, 0, timeout_s=0.5)
    assert "in wait_for_what_never_comes" in str(caught.value)
    assert run_threads(2, rank_and_sum) == [(0, 2, 3.0), (1, 2, 3.0)]


def test_a_fake_world_has_the_size_asked_for() -> None:
    with fake_world(512, rank=511):
        assert (dist.get_rank(), dist.get_world_size()) == (511, 512)
    assert not dist.is_initialized()


# Comparing.

MATRIX = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def test_the_worst_entry_is_named() -> None:
    off = MATRIX.clone()
    off[1, 0] = 6.0
    actual = {"good": MATRIX, "bad": MATRIX + 0.5, "worst": [off]}
    expected = {"good": MATRIX, "bad": MATRIX, "worst": [MATRIX]}
    with pytest.raises(AssertionError) as caught:
        assert_close(actual, expected, rtol=0.1, atol=0)
    assert str(caught.value) == (
        "2 of 3 entries differ, worst ['worst'][0][1, 0]: 6.0 is not 3.0 (relative error 1), "
        "1 of 4 elements of it differ"
    )


def test_equal_is_stricter_than_close() -> None:
    nearly = torch.nextafter(MATRIX, torch.tensor(10.0))
    assert_close(nearly, MATRIX, rtol=1e-6, atol=0)
    with pytest.raises(AssertionError, match="4 of 4 elements"):
        assert_equal(nearly, MATRIX)
    with pytest.raises(AssertionError, match=r"-0\.0 is not 0\.0"):
        assert_equal(torch.tensor(-0.0), torch.tensor(0.0))
    with pytest.raises(AssertionError, match=r"torch\.bfloat16"):
        assert_equal(MATRIX.bfloat16(), MATRIX)


@pytest.mark.parametrize("side", ["actual", "expected", "both"])
def test_nan_never_passes(side: str) -> None:
    actual, expected = MATRIX.clone(), MATRIX.clone()
    if side != "expected":
        actual[0, 1] = torch.nan
    if side != "actual":
        expected[0, 1] = torch.nan
    with pytest.raises(AssertionError, match=r"the tensor\[0, 1\]: .*nan"):
        assert_close(actual, expected, rtol=1e9, atol=1e9)
    with pytest.raises(AssertionError, match=r"the tensor\[0, 1\]: .*nan"):
        assert_equal(actual, expected)


@pytest.mark.parametrize(
    "actual",
    [[MATRIX], {"a": MATRIX}, MATRIX[:1], [MATRIX, MATRIX, MATRIX], []],
    ids=["shorter", "mapping", "smaller", "longer", "empty"],
)
def test_other_structures_do_not_pass(actual: Any) -> None:
    with pytest.raises(AssertionError):
        assert_close(actual, [MATRIX, MATRIX], rtol=1, atol=1)


def test_any_dtype_compares() -> None:
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64):
        assert_equal(MATRIX.to(dtype), MATRIX.to(dtype))
    assert_equal([1, 0.5], [1, 0.5])
    assert_close(torch.tensor([torch.inf, 0.0]), torch.tensor([torch.inf, 0.0]), rtol=0, atol=0)
    assert_equal(torch.empty(0, 3), torch.empty(0, 3))


def test_tensors_of_all_kinds_travel_as_they_are() -> None:
    shared = torch.ones(2)
    sent = [
        *(torch.empty(0, 3), torch.tensor(1.3), torch.tensor([True]), torch.ones(2).bfloat16()),
        *(torch.randn(4, 3).t(), torch.randn(9)[2:5], torch.ones(2, requires_grad=True)),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.ones(2, dtype=torch.complex64).conj(),
        nn.Parameter(torch.ones(2)),
        *(shared, shared),
    ]
    received = pickle.loads(pickled(sent))
    for before, after in zip(sent, received, strict=True):
        assert type(after) is type(before)
        assert (after.dtype, after.stride()) == (before.dtype, before.stride())
        assert after.requires_grad == before.requires_grad
        assert torch.equal(after, before)
    assert received[-1] is received[-2]
    received[-1].zero_()  # may be written to
