"""Where collectives are staged: memory of the process group, symmetric memory, and what excludes what.

gloo has neither, so stand-ins at the border to torch allocate. What was released is overwritten at
once: nobody may read it, and no result may stay in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fullshard import ConfigurationError, fully_shard, torch_border
from fullshard.engine.state import state_of
from fullshard.errors import CommunicationError
from fullshard.mesh.backends import backend_named
from fullshard.transport import collectives, comm_objects, monitor, transports
from fullshard.transport.comm_objects import DefaultAllGather, DefaultReduceScatter, SymmetricPool
from tests.helpers.compare import assert_close
from tests.helpers.fake import fake_world
from tests.helpers.models import Decoder, ModelOptions, make_decoder
from tests.helpers.training import FULLSHARD, Run, batch_of, gradients, mine, shard

CPU = torch.device("cpu")


def groups_of(model: Decoder) -> list[Any]:
    return [state_of(module).groups[0] for module in (*model.blocks, model)]


def process_group_memory(model: Any) -> None:
    for module in (*model.blocks, model):
        module.set_allocate_memory_from_process_group_for_comm(True)


def symmetric_memory(model: Any) -> None:
    for module in (*model.blocks, model):
        module.set_symm_mem_for_comm()


def symmetric_memory_for_reductions_too(model: Any) -> None:
    for module in (*model.blocks, model):
        module.set_force_sum_reduction_for_comms(True)
    symmetric_memory(model)


SETTERS = [process_group_memory, symmetric_memory, symmetric_memory_for_reductions_too]


class Memory:
    """What the stand-ins handed out."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.groups: list[ProcessGroup] = []

    def new(self, group: ProcessGroup, tensor: Tensor) -> Tensor:
        self.tensors.append(tensor.fill_(torch.nan if tensor.is_floating_point() else 255))
        self.groups.append(group)
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        storages = {other.untyped_storage().data_ptr() for other in self.tensors}
        return tensor.untyped_storage().data_ptr() in storages


@contextmanager
def stand_ins() -> Iterator[Memory]:
    """A gloo group that allocates, and has symmetric memory."""
    memory = Memory()

    def allocate(group: Any, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return memory.new(group, torch.empty(numel, dtype=dtype, device=device))

    def symmetric(nbytes: int, device: torch.device, group: Any) -> Tensor:
        return memory.new(group, torch.empty(nbytes, dtype=torch.uint8, device=device))

    give = SymmetricPool.give

    def give_and_overwrite(pool: SymmetricPool, tensor: Tensor) -> None:
        tensor.view(torch.uint8).fill_(255)  # NaN, in any floating dtype
        give(pool, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_border, "allocates_tensors", lambda group, device: True)
        patch.setattr(torch_border, "allocate_tensor", allocate)
        patch.setattr(torch_border, "choose_symmetric_backend", lambda name: None)
        patch.setattr(torch_border, "symmetric_bytes", symmetric)
        for module in (collectives, comm_objects, monitor, transports):
            patch.setattr(module, "backend_of", lambda group, device: backend_named("nccl"))
        patch.setattr(SymmetricPool, "give", give_and_overwrite)
        patch.setattr(comm_objects, "_POOLS", weakref.WeakKeyDictionary())
        yield memory


# --- numbers ------------------------------------------------------------------------------------------


def accumulated(setter: Callable[[Any], None], run: Run) -> None:
    """Two steps into the same `.grad`, so that the second must not overwrite the first."""
    with stand_ins() as memory:
        model, reference = shard(make_decoder(), FULLSHARD, run), make_decoder()
        setter(model)
        for step in range(2):
            model(mine(batch_of(step))).backward()
            reference(batch_of(step)).backward()
        assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-6)
        assert memory.tensors
        locals_ = [param.grad.to_local() for param in model.parameters()]  # type: ignore[union-attr]
        if setter is not process_group_memory:
            assert not any(map(memory.holds, locals_)), "a gradient lies in memory used again"


@pytest.mark.parametrize("setter", SETTERS, ids=[s.__name__ for s in SETTERS])
@pytest.mark.parametrize(("ranks", "replicas"), [(3, 1), (4, 2)])
def test_gradients_do_not_depend_on_where_they_are_staged(
    world, ranks: int, replicas: int, setter: Callable[[Any], None]
) -> None:
    world(ranks).run(accumulated, setter, Run(replicas=replicas))


def mixed_precision(setter: Callable[[Any], None]) -> None:
    run = Run(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for set_up in (setter, lambda model: None):
        with stand_ins():
            model = shard(make_decoder(), FULLSHARD, run)
            set_up(model)
            model(mine(batch_of(0))).backward()
            found.append(gradients(model))
    assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize("setter", SETTERS, ids=[s.__name__ for s in SETTERS])
def test_mixed_precision_is_staged_in_its_own_dtypes(world, setter: Callable[[Any], None]) -> None:
    world(2).run(mixed_precision, setter)


def partial_sums(setter: Callable[[Any], None]) -> None:
    with stand_ins():
        model, reference = shard(make_decoder(), FULLSHARD, Run(replicas=2)), make_decoder()
        setter(model)
        for step in range(3):
            model.set_requires_all_reduce(step == 2)
            model.set_is_last_backward(step == 2)
            model(mine(batch_of(step))).backward()
            reference(batch_of(step)).backward()
        assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("setter", SETTERS, ids=[s.__name__ for s in SETTERS])
def test_partial_sums_survive_the_next_reduction(world, setter: Callable[[Any], None]) -> None:
    world(4).run(partial_sums, setter)


# --- memory -------------------------------------------------------------------------------------------


def blocks_made(reductions: bool) -> tuple[int, int]:
    """Blocks of symmetric memory made in the first two steps, and in the four after them."""
    with stand_ins() as memory:
        model = shard(make_decoder(ModelOptions(depth=5)), FULLSHARD, Run())
        (symmetric_memory_for_reductions_too if reductions else symmetric_memory)(model)
        counts = []
        for steps in (2, 4):
            for step in range(steps):
                model(mine(batch_of(step))).backward()
            counts.append(len(memory.tensors))
        (pool,) = comm_objects._POOLS.values()
        assert not pool._lent
    return counts[0], counts[1] - counts[0]


def test_symmetric_memory_is_made_once_and_shared_by_all_groups(world) -> None:
    # Six groups; two gathers are in flight at a time, or a gather and a reduction's input and output.
    assert world(2).run(blocks_made, False) == [(2, 0)] * 2
    assert world(2).run(blocks_made, True) == [(3, 0)] * 2


def test_the_pool_hands_out_the_smallest_that_fits_to_the_stream_that_had_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = 1
    monkeypatch.setattr(torch_border, "current_stream_id", lambda device: stream)
    with fake_world(2), stand_ins() as memory:
        pool = SymmetricPool(dist.group.WORLD)
        sizes = [100, 40, 60]
        taken = [pool.take(size, CPU) for size in sizes]
        assert [tensor.numel() for tensor in taken] == sizes
        large, small, middle = memory.tensors
        for tensor in taken:
            pool.give(tensor.view(-1, 2)[1:])  # any view will do
        assert pool.take(30, CPU).data_ptr() == small.data_ptr()
        assert pool.take(35, CPU).data_ptr() == middle.data_ptr()
        stream = 2
        assert pool.take(10, CPU).data_ptr() != large.data_ptr()
        stream = 1
        assert pool.take(61, CPU).data_ptr() == large.data_ptr()
        pool.give(pool.take(0, CPU))
        assert len(memory.tensors) == 5


def only_gathers_without_sums() -> None:
    with stand_ins():
        model = shard(make_decoder(), FULLSHARD, Run())
        symmetric_memory(model)
        for group in groups_of(model):
            assert isinstance(group.routes.custom, comm_objects.SymmetricAllGather)
            assert group.reduction.settings.custom is None
        before = groups_of(model)[0].routes.custom
        symmetric_memory_for_reductions_too(model)  # a second call adds what is now possible
        for group in groups_of(model):
            assert isinstance(group.reduction.settings.custom, comm_objects.SymmetricReduceScatter)
        assert groups_of(model)[0].routes.custom is before


def test_reductions_are_symmetric_only_if_they_sum(world) -> None:
    world(1).run(only_gathers_without_sums)


def there_and_back() -> None:
    with stand_ins() as memory:
        model: Any = shard(make_decoder(), FULLSHARD, Run())
        process_group_memory(model)
        model(mine(batch_of(0))).backward()
        count = len(memory.tensors)
        for module in (*model.blocks, model):
            module.set_allocate_memory_from_process_group_for_comm(False)
        model(mine(batch_of(0))).backward()
        assert count > 0 and len(memory.tensors) == count
        reference = make_decoder()
        for _ in range(2):
            reference(batch_of(0)).backward()
        assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-6)


def test_false_returns_to_the_default(world) -> None:
    world(2).run(there_and_back)


def reductions_on_a_group_of_their_own(setter: Callable[[Any], None], before: bool) -> None:
    with stand_ins() as memory:
        model, reference = shard(make_decoder(), FULLSHARD, Run()), make_decoder()
        if before:
            model.set_separate_reduce_scatter_group()
        setter(model)
        if not before:
            model.set_separate_reduce_scatter_group()
        group = groups_of(model)[0]
        gathers, reduces = (
            group.mesh_info.shard_process_group,
            group.reduction.settings.process_group,
        )
        model(mine(batch_of(0))).backward()
        reference(batch_of(0)).backward()
        assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-6)
        assert reduces is not gathers and set(memory.groups) == {gathers, reduces}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("setter", [process_group_memory, symmetric_memory_for_reductions_too])
def test_reductions_are_staged_in_memory_of_their_own_group(
    world, setter: Callable[[Any], None], before: bool
) -> None:
    world(2).run(reductions_on_a_group_of_their_own, setter, before)


# --- refusals -----------------------------------------------------------------------------------------


def on_gloo(method: str) -> None:
    layer: Any = fully_shard(nn.Linear(2, 2))
    getattr(layer, method)(*([True] if "allocate" in method else []))


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("set_allocate_memory_from_process_group_for_comm", "gloo does not"),
        ("set_symm_mem_for_comm", "uses gloo on cpu"),
    ],
)
def test_a_backend_without_such_memory_is_refused_on_all_ranks(
    world, method: str, words: str
) -> None:
    outcomes = world(2).outcomes(on_gloo, method)
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert all(isinstance(outcome, ConfigurationError) for outcome in outcomes)
    assert words in str(outcomes[0]) and "Leave" in str(outcomes[0])


def test_nothing_is_to_be_turned_off_by_default() -> None:
    with fake_world(2):
        layer: Any = fully_shard(nn.Linear(2, 2))
        layer.set_allocate_memory_from_process_group_for_comm(False)
        assert state_of(layer).groups[0].routes.custom is None


def test_a_torch_without_symmetric_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm_objects, "backend_of", lambda group, device: backend_named("nccl"))

    def choose(name: str) -> None:
        raise RuntimeError(f"no backend {name} here")

    monkeypatch.setattr(torch_border, "choose_symmetric_backend", choose)
    with fake_world(2):
        layer: Any = fully_shard(nn.Linear(2, 2))
        with pytest.raises(ConfigurationError, match="no backend NCCL here"):
            layer.set_symm_mem_for_comm()


def test_symmetric_memory_that_cannot_be_registered_says_so() -> None:
    def fail(nbytes: int, device: torch.device, group: Any) -> Tensor:
        raise RuntimeError("no windows")

    with fake_world(2), stand_ins(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_border, "symmetric_bytes", fail)
        layer: Any = fully_shard(nn.Linear(2, 2))
        layer.set_symm_mem_for_comm()
        with pytest.raises(CommunicationError, match=r"bytes on cpu could not be: no windows"):
            layer(torch.ones(1, 2))


CALLS: dict[str, Callable[[Any], None]] = {
    "custom gather": lambda layer: layer.set_custom_all_gather(DefaultAllGather()),
    "custom reduction": lambda layer: layer.set_custom_reduce_scatter(DefaultReduceScatter()),
    "process group": lambda layer: layer.set_allocate_memory_from_process_group_for_comm(True),
    "not process group": lambda layer: layer.set_allocate_memory_from_process_group_for_comm(False),
    "symmetric": lambda layer: layer.set_symm_mem_for_comm(),
    "sums": lambda layer: layer.set_force_sum_reduction_for_comms(True),
    "no sums": lambda layer: layer.set_force_sum_reduction_for_comms(False),
    "two inputs": lambda layer: layer.set_reduce_scatter_max_input_buffers(2),
}

EXCLUDED = [
    (("custom gather",), "process group", "has DefaultAllGather"),
    (("custom reduction",), "process group", "has DefaultReduceScatter"),
    (("custom gather",), "not process group", "has DefaultAllGather"),
    (("custom gather",), "symmetric", "has DefaultAllGather"),
    (("custom reduction",), "symmetric", "has DefaultReduceScatter"),
    (("process group",), "custom gather", r"exclude each other.*\(False\) before"),
    (("process group",), "custom reduction", r"exclude each other.*\(False\) before"),
    (("process group",), "symmetric", r"exclude each other.*\(False\) before"),
    (("symmetric",), "custom gather", "set_symm_mem_for_comm exclude each other"),
    (("symmetric",), "custom reduction", "set_symm_mem_for_comm exclude each other"),
    (("symmetric",), "process group", "set_symm_mem_for_comm exclude each other"),
    (("symmetric",), "not process group", "set_symm_mem_for_comm exclude each other"),
    (("sums", "two inputs"), "symmetric", "max_input_buffers=2 for FSDPLinear"),
    (("sums", "symmetric"), "two inputs", "max_input_buffers=2 for FSDPLinear"),
    (("sums", "symmetric"), "no sums", "can only sum"),
]


@pytest.mark.parametrize(("first", "then", "words"), EXCLUDED)
def test_what_excludes_each_other_is_refused_in_either_order(
    first: tuple[str, ...], then: str, words: str
) -> None:
    with fake_world(2), stand_ins():
        layer = fully_shard(nn.Linear(2, 2))
        for name in first:
            CALLS[name](layer)
        (group,) = state_of(layer).groups
        before = group.routes.custom, group.reduction.settings
        with pytest.raises(ConfigurationError, match=words):
            CALLS[then](layer)
        assert (group.routes.custom, group.reduction.settings) == before


ALLOWED = [
    ("process group", "process group", "not process group", "symmetric"),
    ("process group", "not process group", "custom gather", "custom reduction"),
    ("process group", "sums", "two inputs", "no sums"),
    ("symmetric", "two inputs", "no sums"),
    ("sums", "symmetric", "symmetric"),
]


@pytest.mark.parametrize("names", ALLOWED, ids=", ".join)
def test_what_does_not_exclude_each_other_is_not_refused(names: tuple[str, ...]) -> None:
    with fake_world(2), stand_ins():
        layer = fully_shard(nn.Linear(2, 2))
        for name in names:
            CALLS[name](layer)
        layer(torch.ones(1, 2)).sum().backward()
