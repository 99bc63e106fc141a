"""A guarded step that fails on one rank fails on all, and training goes on as if no rank had seen the batch."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard import (
    ConfigurationError,
    DivergenceError,
    StepFailedError,
    UnsupportedError,
    fully_shard,
    guarded_step,
)
from fullshard.divergence.journal import journal_of
from fullshard.divergence.meetings import Meetings
from fullshard.divergence.step_guard import StepFailure, StepGuard
from fullshard.engine.reduction import Reduction
from fullshard.engine.sharded_state import ShardedState
from fullshard.engine.state import named_states
from fullshard.mesh.backends import backend_named
from fullshard.storage.buffers import Buffer
from fullshard.transport.monitor import POSITION
from fullshard.transport.tags import tag
from fullshard.transport.works import JoinedGather
from tests.helpers.models import ModelOptions, make_decoder, tokens_for
from tests.helpers.training import FULLSHARD, Run, ShardOptimizer, shard
from tests.helpers.wrapping import library, wrap_blocks

MICROBATCHES = 2
GLOO = backend_named("gloo")


# --- places -------------------------------------------------------------------------------------------


class Trap:
    """Counts the places that a step passes, and raises at one.

    They are: data, forwards and backwards of all modules, losses, and wherever fullshard takes memory.
    """

    def __init__(self, model: nn.Module) -> None:
        self.passed = 0
        self.place: int | None = None
        for module in model.modules():
            module.register_forward_pre_hook(self._before)
            module.register_forward_hook(self._after)

    def set(self, place: int | None) -> None:
        """Begin a step that raises at a place."""
        self.passed, self.place = 0, place

    def __call__(self, *_: Any) -> None:
        self.passed += 1
        if self.passed - 1 == self.place:
            self.place = None
            kind = torch.OutOfMemoryError if self.passed % 2 else ValueError
            raise kind(f"rank {dist.get_rank()} at place {self.passed - 1}")

    @contextlib.contextmanager
    def in_allocations(self) -> Iterator[None]:
        """Count what takes memory for gathers and reductions, too."""
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in (
                (Buffer, "allocate"),
                (JoinedGather, "__init__"),
                (Reduction, "_prepare"),
            ):
                patch.setattr(owner, name, self._counted(getattr(owner, name)))
            yield

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self()
            return function(*args, **kwargs)

        return counted

    def _before(self, module: nn.Module, args: Any) -> None:
        self()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self()
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: self())


Failing = dict[int, dict[int, int]]
"""By step, the places at which ranks fail, by rank."""


def failing_steps(places: int, world: int, number_of_failures: int) -> Failing:
    """Choose places for two of three steps, the first included, each in another part of the step.

    Two ranks fail in some, often in the same place.
    """
    rng = random.Random(places)
    steps: Failing = {}
    for number in range(number_of_failures):
        first, second = rng.sample(range(world), 2)
        part = places // number_of_failures
        place = places * number // number_of_failures + rng.randrange(part)
        failing = {first: place}
        if number % 3 == 2:
            failing[second] = place if number % 2 else rng.randrange(places)
        steps[number // 2 * 3 + number % 2] = failing
    return steps


# --- training -----------------------------------------------------------------------------------------


def sharded(api: str, options: ModelOptions, replicas: int = 1) -> nn.Module:
    model = make_decoder(options)
    if api == "fully_shard":
        return shard(model, FULLSHARD, Run(model=options, replicas=replicas))
    lib = library(FULLSHARD)
    strategy: dict[str, Any] = {}
    if replicas > 1:
        mesh = init_device_mesh(
            "cpu",
            (replicas, dist.get_world_size() // replicas),
            mesh_dim_names=("replicate", "shard"),
        )
        strategy = {"device_mesh": mesh, "sharding_strategy": lib.ShardingStrategy.HYBRID_SHARD}
    return wrap_blocks(lib, model, use_orig_params=True, **strategy)


@contextlib.contextmanager
def accumulating(model: Any, api: str) -> Iterator[None]:
    if api == "wrapper":
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def compute_gradients(model: nn.Module, api: str, step: int, trap: Callable[[], None]) -> float:
    total = 0.0
    for microbatch in range(MICROBATCHES):
        tokens = tokens_for(dist.get_rank(), MICROBATCHES * step + microbatch)
        trap()
        is_last = microbatch == MICROBATCHES - 1
        with contextlib.nullcontext() if is_last else accumulating(model, api):
            loss = model(tokens) / MICROBATCHES
            trap()
            loss.backward()
        total += loss.item()
        trap()
    return total


def train(
    api: str, options: ModelOptions, replicas: int, failing: Failing, *, skip: bool
) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    """Train; run the steps that fail, or skip them."""
    model = sharded(api, options, replicas)
    trap = Trap(model)
    optimizer = ShardOptimizer("AdamW", list(model.parameters()))
    losses, failures = [], []
    for number in range(max(failing) + 2):
        fails = number in failing
        if fails and skip:
            continue
        trap.set(failing[number].get(dist.get_rank()) if fails else None)
        with trap.in_allocations(), guarded_step(model, on_error="skip") as step:
            loss = compute_gradients(model, api, number, trap)
        assert step.failed is fails
        if step.failed:
            assert_between_steps(model)
            failures.append([(each.rank, each.type, each.message) for each in step.failures])
            assert "compute_gradients" in step.failure.traceback
            continue
        losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses, local_shards(model), failures


def assert_between_steps(model: nn.Module) -> None:
    """Nothing is gathered or in flight, no memory is held, and there is no gradient."""
    assert all(param.grad is None for param in model.parameters())
    for state in named_states(model):
        assert state.step is None or not (state.step.busy or state.step.context.reduce_inputs)
        for group in state.groups:
            buffer = group.reduction._buffer
            assert group.sharded_state is ShardedState.SHARDED
            assert group.held_bytes == 0
            assert not group.reduction.unreduced.held
            assert buffer is None or not buffer.allocated


def local_shards(model: nn.Module) -> dict[str, Tensor]:
    """This rank's shards: if all are equal, so is the whole."""
    return {
        name: (param.to_local() if isinstance(param, DTensor) else param).detach().clone()
        for name, param in model.named_parameters()
    }


def places_in_a_step(api: str, options: ModelOptions, replicas: int) -> int:
    model = sharded(api, options, replicas)
    trap = Trap(model)
    with trap.in_allocations():
        compute_gradients(model, api, 0, trap)
    return trap.passed


def failing_run(
    api: str, options: ModelOptions, replicas: int, number_of_failures: int
) -> list[Any]:
    places = places_in_a_step(api, options, replicas)
    failing = failing_steps(places, dist.get_world_size(), number_of_failures)
    losses, params, failures = train(api, options, replicas, failing, skip=False)
    expected_losses, expected, _ = train(api, options, replicas, failing, skip=True)
    assert losses == expected_losses
    for name, param in expected.items():
        assert torch.equal(params[name], param), name
    for told, scheduled in zip(failures, failing.values(), strict=True):
        for rank, kind, message in told:
            assert message == f"rank {rank} at place {scheduled[rank]}"
            assert kind == ("ValueError" if scheduled[rank] % 2 else "OutOfMemoryError")
    return failures


SMALL = ModelOptions(depth=2)
CASES = {
    "three ranks, checkpointing": (
        3,
        "fully_shard",
        ModelOptions(depth=2, checkpointing="non_reentrant"),
        1,
        20,
    ),
    "hsdp": (4, "fully_shard", ModelOptions(depth=2, tied=True), 2, 10),
    "hybrid wrapper": (4, "wrapper", SMALL, 2, 10),
}
"""Ranks, API, model, replicas, and in how many places steps fail."""


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_after_failures_anywhere_as_if_no_rank_had_seen_those_batches(
    world, case: str
) -> None:
    ranks, *arguments = CASES[case]
    told = world(ranks).run(failing_run, *arguments)
    assert len(told[0]) == arguments[-1]
    assert all(each == told[0] for each in told)
    assert any(len(failures) == 2 for failures in told[0])


# --- policies and exceptions --------------------------------------------------------------------------


def net(width: int = 4, **options: Any) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def run(model: nn.Module) -> None:
    model(torch.full((2, 4), dist.get_rank() + 1.0)).sum().backward()


def fail_on(rank: int, error: BaseException) -> None:
    if dist.get_rank() == rank:
        raise error


def caught(fn: Callable[[], Any]) -> BaseException | None:
    try:
        fn()
    except BaseException as error:
        return error
    return None


def train_well(model: nn.Module) -> None:
    """Check that a model trains, and that the ranks' journals are equal."""
    run(model)
    assert all(param.grad is not None for param in model.parameters())
    model.zero_grad()
    journal = journal_of(dist.group.WORLD)
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, (journal.count, journal.digest, POSITION.raised))
    assert len(set(places)) == 1
    assert journal.guard is None


def raises_the_same_error_on_all_ranks() -> str:
    model = net()

    def step() -> None:
        with guarded_step(model):
            run(model)
            fail_on(1, ValueError("a bad sample"))
            run(model)

    error = caught(step)
    assert type(error) is StepFailedError
    assert [(each.rank, each.type, each.message) for each in error.failures] == [
        (1, "ValueError", "a bad sample")
    ]
    assert isinstance(error.__cause__, ValueError) is (dist.get_rank() == 1)
    train_well(model)
    return str(error)


def tells_of_what_ends_a_program() -> str:
    model = net()
    texts = []
    for ending in (KeyboardInterrupt("ctrl-c"), SystemExit(3)):

        def step(ending: BaseException = ending) -> None:
            with guarded_step(model, on_error="skip"):
                fail_on(0, ending)
                run(model)

        error = caught(step)
        assert error is ending if dist.get_rank() == 0 else type(error) is StepFailedError
        texts.append(error.failures[0].type if isinstance(error, StepFailedError) else "")
    train_well(model)
    return " ".join(texts) or "KeyboardInterrupt SystemExit"


def never_skips_wrong_use() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = local_shards(model)

    def step_within() -> None:
        with guarded_step(model, on_error="skip"):
            run(model)
            optimizer.step()

    error = caught(step_within)
    assert type(error) is StepFailedError
    assert "Call it after the block" in str(error)
    assert len(error.failures) == dist.get_world_size()
    for name, shard_now in local_shards(model).items():
        assert torch.equal(shard_now, before[name])

    def nested() -> None:
        with guarded_step(model, on_error="skip"), guarded_step(model):
            pass

    error = caught(nested)
    assert type(error) is StepFailedError
    assert "Guarded steps cannot contain each other" in str(error)

    def unsupported() -> None:
        with guarded_step(model, on_error="skip"):
            raise UnsupportedError("every time")

    assert "every time" in str(caught(unsupported))

    def unsharded() -> None:
        with guarded_step(nn.Linear(2, 2)):
            pass

    assert "nothing here is sharded: Linear" in str(caught(unsharded))
    train_well(model)


def does_not_hide_divergence() -> str:
    model = net()

    def step() -> None:
        with guarded_step(model, on_error="skip"):
            (model if dist.get_rank() else model[1])(torch.ones(2, 4))

    error = caught(step)
    assert type(error) is DivergenceError
    return str(error)


def fails_though_the_program_catches_it() -> None:
    model = net()
    with guarded_step(model, on_error="skip") as step:
        for _ in range(3):
            with contextlib.suppress(Exception):
                run(model)
        fail_on(1, ValueError("late"))
        run(model)
        run(model)
    assert step.failure.message == "late"
    with guarded_step(model, on_error="skip") as step:
        fail_on(1, ValueError("early"))
        for _ in range(3):
            with contextlib.suppress(Exception):
                run(model)
    assert step.failure.message == "early"
    train_well(model)


def drops_gradients_from_before_the_block() -> None:
    model = net()
    run(model)
    model.set_requires_gradient_sync(False)
    run(model)
    with guarded_step(model, on_error="skip") as step:
        model.set_requires_gradient_sync(True)
        fail_on(1, ValueError("no"))
        run(model)
    assert step.failed
    assert all(param.grad is None for param in model.parameters())
    run(model)
    assert all(param.grad is None for param in model.parameters())  # as before the block
    model.set_requires_gradient_sync(True)
    run(model)
    twice = [param.grad.to_local().clone() for param in model.parameters()]
    model.zero_grad()
    run(model)
    for both, param in zip(twice, model.parameters(), strict=True):
        torch.testing.assert_close(both, 2 * param.grad.to_local())
    model.zero_grad()
    train_well(model)


def policies(*cases: Callable[[], Any]) -> list[Any]:
    return [case() for case in cases]


def test_a_failure_reaches_all_ranks_and_only_what_can_be_skipped_is_skipped(world) -> None:
    results = world(2).run(
        policies,
        raises_the_same_error_on_all_ranks,
        tells_of_what_ends_a_program,
        never_skips_wrong_use,
        fails_though_the_program_catches_it,
        drops_gradients_from_before_the_block,
        does_not_hide_divergence,
    )
    raised, ended, *_, diverged = zip(*results, strict=True)
    assert raised[0] == raised[1]
    assert "rank 1: ValueError: a bad sample" in raised[0]
    assert ended[1] == "KeyboardInterrupt SystemExit"
    assert diverged[0] == diverged[1]


def test_a_policy_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'raise' or 'skip'"):
        guarded_step(nn.Linear(1, 1), on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="needs the models"):
        guarded_step()


def alone() -> None:
    model = net()
    for place in range(3):
        with guarded_step(model, on_error="skip") as step:
            if place == 0:
                raise ValueError("before")
            loss = model(torch.ones(2, 4)).sum()
            if place == 1:
                raise ValueError("within")
            loss.backward()
        assert step.failed is (place < 2)
    with guarded_step(nn.Linear(2, 2), on_error="skip") as step:
        raise ValueError("nothing is sharded")
    assert step.failure.message == "nothing is sharded"


def test_a_rank_alone_may_skip_its_steps_too(world) -> None:
    world(1).run(alone)


# --- process groups -----------------------------------------------------------------------------------


def failure() -> StepFailure:
    return StepFailure(rank=dist.get_rank(), type="ValueError", message="no")


def ranks_of_a_mesh_that_fail_at_once() -> list[tuple[int, ...]]:
    """All sets of failing ranks, while the others wait in their rows or in their columns."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    rows, columns = mesh.get_group("shard"), mesh.get_group("replicate")
    guard = StepGuard({rows: GLOO, columns: GLOO})
    rank, told = dist.get_rank(), []
    for failing in ((0, 3), (1, 2), (0,), (3,), (0, 1), (0, 2), (0, 1, 2)):
        for waiting_in in (rows, columns, None):
            guard.begin()
            own = failure() if rank in failing else None
            if own is None:
                with contextlib.suppress(StepFailedError):
                    if waiting_in is not None:
                        for _ in range(2):
                            # It may meet those of its row, and must learn at the latest at the end.
                            Meetings(waiting_in, GLOO).before(tag("all-gather of something"))
                    guard.end("raise")
                assert guard.has_learned
            found = tuple(each.rank for each in guard.fail(own))
            guard.finish()
            assert set(found) <= set(failing)
            told.append(found)
    guard.begin()
    Meetings(rows, GLOO).before(tag("a"))
    Meetings(columns, GLOO).before(tag("b"))
    guard.end("raise")
    guard.finish()
    return told


def several_roots_and_meshes() -> list[str]:
    """Models on different meshes, one of which is kept in smaller shards after forward."""
    whole = net(reshard_after_forward=2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    parts = nn.ModuleList([net(mesh=mesh["a"]), net(mesh=mesh["b"])])
    told = []
    for place, rank in enumerate((3, 0, 2, 1, 3)):
        with guarded_step(parts, whole, on_error="skip") as step:
            for number, model in enumerate((parts[0], whole, parts[1], whole)):
                if number == place:
                    fail_on(rank, ValueError(f"{number}"))
                run(model)
        assert step.failed is (place < 4)
        told.append(str(step.failure))
        assert step.failed is all(param.grad is None for param in parts.parameters())
    return told


def meshes() -> tuple[Any, Any]:
    return ranks_of_a_mesh_that_fail_at_once(), several_roots_and_meshes()


def test_ranks_of_several_process_groups_leave_together_whoever_fails(world) -> None:
    results = world(4).run(meshes)
    assert all(result == results[0] for result in results)
    told, failures = results[0]
    assert told[:3] == [(0, 3)] * 3
    assert failures[:2] == ["rank 3: ValueError: 0", "rank 0: ValueError: 1"]
