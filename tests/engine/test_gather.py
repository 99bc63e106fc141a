"""One group's gather, from each of its sources: every rank has the full parameters, bit for bit.

Ranks are threads. No model, no API.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard.layout.segments
from benchmarks.stream_settings import checked
from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.engine.gather import Gather
from fullshard.engine.known_groups import groups_of
from fullshard.engine.param_group import FSDPParamGroup
from fullshard.engine.routes import Route
from fullshard.engine.sharded_state import ShardedState
from fullshard.engine.state import state_of
from fullshard.features.full_params import all_gather_full
from fullshard.layout.segments import Layout, flat_layout, gathers_in_place, per_row_layout
from fullshard.storage.buffers import FlatShard, shard_of
from fullshard.storage.codecs import AnyCodec, Cast, Plain
from fullshard.storage.shard_buffer import ShardBuffer, UploadBuffer
from fullshard.torch_border import below_autograd
from fullshard.transport.comm_objects import DefaultAllGather
from fullshard.transport.observer import StepObserver
from fullshard.transport.staged import Staged
from fullshard.transport.streams import FSDPCommContext
from fullshard.transport.tags import tag
from fullshard.transport.transports import Coalesced, Transport
from tests.helpers.compare import assert_equal
from tests.helpers.fake import fake_world
from tests.helpers.param_groups import make_group
from tests.helpers.threads import run_threads

CPU = torch.device("cpu")
WORLD = 3
SHAPES = ((5, 3), (4, 6), (2,), ())
"""None of them is divided evenly by three ranks; the last rank has nothing of (2,)."""
DIMS = (0, 1, 0, 0)
"""The second can not be gathered in place."""

in_place_and_packed = pytest.mark.parametrize("in_place", [True, False], ids=["in place", "packed"])
each_source = pytest.mark.parametrize("source", ["shards", "upload"])


def layout() -> Layout:
    return per_row_layout(SHAPES, world=WORLD, dims=DIMS)


def full_params() -> list[Tensor]:
    """What all ranks make up together; no two elements are the same."""
    first, params = 1, []
    for shape in SHAPES:
        numel = torch.Size(shape).numel()
        params.append(torch.arange(first, first + numel, dtype=torch.float32).view(shape))
        first += numel
    return params


def shards_of(params: Sequence[Tensor], rank: int) -> ShardBuffer:
    """This rank's shards of full parameters."""
    shards = ShardBuffer(layout(), rank, [param.dtype for param in params], CPU)
    for index, (local, full) in enumerate(zip(shards.locals, params, strict=True)):
        local.copy_(shard_of(layout(), index, rank, full))
    return shards


class Beside:
    """Messages that travel in the call of a group's own."""

    received_bytes = held_bytes = 0

    def __init__(self, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        self._messages = outputs, inputs
        self.decoded = 0

    def encode(self) -> tuple[list[Tensor], list[Tensor]]:
        return self._messages

    def decode(self) -> None:
        self.decoded += 1

    def release(self) -> None:
        """Nothing was taken."""


class Alone:
    """The gather of one route, in no group."""

    def __init__(
        self, codec: AnyCodec, transport: Transport | None, beside: Beside | None = None
    ) -> None:
        self.codec = codec
        route = Route(codec, transport, beside)  # type: ignore[arg-type]
        self.routes: Any = SimpleNamespace(
            from_shards=route,
            post_forward=None,
            beside=beside,
            keeps_memory=False,
            connect=lambda context: None,
        )
        self.gather = Gather(self.routes)
        self.context = FSDPCommContext(CPU)
        self.gather.connect(self.context)

    def start(self) -> None:
        self.gather.start(self.context, "group", tag("all-gather"), kept=False)

    def finish(self) -> None:
        self.gather.finish(self.context, "group")

    def run(self) -> None:
        self.start()
        self.finish()

    @property
    def held_bytes(self) -> int:
        return self.gather.held_bytes

    def release(self) -> None:
        self.gather.release(self.context)


def make(
    shards: ShardBuffer,
    source: str,
    dtype: torch.dtype,
    custom: DefaultAllGather | None = None,
    beside: Beside | None = None,
) -> tuple[Alone, FlatShard | UploadBuffer]:
    made = UploadBuffer(shards, CPU) if source == "upload" else shards.flat_shard
    dtypes, group = [dtype] * len(SHAPES), dist.group.WORLD
    assert group is not None
    transport = Coalesced(group, CPU) if custom is None else Staged(custom, group, CPU)
    packed = not transport.in_place or not gathers_in_place(layout(), dtypes)
    codec = Cast(made, layout(), dist.get_rank(), dtypes, CPU, packed=packed)
    return Alone(codec, transport, beside), made


def gathers_twice(source: str, dtype: torch.dtype) -> None:
    full = full_params()
    shards = shards_of(full, dist.get_rank())
    alone, made = make(shards, source, dtype)
    for factor in (1, 2):  # the source is read anew by every gather
        alone.run()
        assert_equal(list(alone.codec.params), [(param * factor).to(dtype) for param in full])
        alone.release()
        assert alone.held_bytes == 0
        for local in shards.locals:
            local.mul_(2)
    if isinstance(made, UploadBuffer):
        assert made._on_device.held_bytes == 0, "memory is there only while it is read"


@in_place_and_packed
@each_source
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_rank_has_the_full_parameters_in_the_compute_dtype(
    monkeypatch: pytest.MonkeyPatch, source: str, dtype: torch.dtype, in_place: bool
) -> None:
    monkeypatch.setattr(fullshard.layout.segments, "IN_PLACE_FROM", 0 if in_place else 1 << 40)
    run_threads(WORLD, gathers_twice, source, dtype)


class Counting(DefaultAllGather):
    """Notes what it hands out, and what comes back."""

    def __init__(self) -> None:
        self.balance = 0
        self.calls = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return super().__call__(*args, **options)

    def allocate(self, size: Sequence[int], **options: Any) -> Tensor:
        tensor = super().allocate(size, **options)
        self.balance += tensor.nbytes
        return tensor

    def release(self, tensor: Tensor) -> None:
        self.balance -= tensor.nbytes


def with_a_comm_object(source: str) -> None:
    comm, shards = Counting(), shards_of(full_params(), dist.get_rank())
    alone, _ = make(shards, source, torch.float32, comm)
    alone.run()
    alone.release()
    assert alone.held_bytes == comm.balance == 0 and comm.calls == 1
    staged = torch.zeros(3 * WORLD, dtype=torch.uint8)
    beside = Beside([staged], [torch.full((3,), dist.get_rank(), dtype=torch.uint8)])
    alone, _ = make(shards, source, torch.float32, comm, beside)
    alone.codec.release()
    alone.start()
    assert alone.held_bytes - comm.balance == 0 < comm.balance, "staged in its memory only"
    alone.finish()
    assert comm.balance == 0 and comm.calls == 3, "an extra message is a call of its own"
    assert beside.decoded == 1
    assert_equal(list(alone.codec.params), full_params())
    assert staged.tolist() == [rank for rank in range(WORLD) for _ in range(3)]


@each_source
def test_a_comm_object_gathers_in_its_own_memory_and_gets_it_back(source: str) -> None:
    run_threads(WORLD, with_a_comm_object, source)


def messages_beside_the_buffer() -> int:
    gathered = torch.zeros(2 * WORLD, dtype=torch.uint8)
    beside = Beside([gathered], [torch.full((2,), dist.get_rank() + 7, dtype=torch.uint8)])
    shards = shards_of(full_params(), dist.get_rank())
    alone, _ = make(shards, "shards", torch.float32, beside=beside)
    alone.run()
    assert_equal(list(alone.codec.params), full_params())
    assert gathered.tolist() == [rank + 7 for rank in range(WORLD) for _ in range(2)]
    return alone.codec.received_bytes


def test_messages_travel_beside_the_buffer_and_bytes_are_those_of_other_ranks() -> None:
    # Per rank: 2 of 5 rows of 3, padded; 2 of 6 columns of 4; 1 of 2; 1 of 1. Rows have gaps up to 8 elements.
    pieces = 6 + 8 + 1 + 1
    for received in run_threads(WORLD, messages_beside_the_buffer):
        assert pieces * 4 * (WORLD - 1) <= received <= 4 * 8 * 4 * (WORLD - 1)


def test_one_rank_alone_computes_with_its_shards() -> None:
    shapes = [(3, 2), (4,)]
    shards = ShardBuffer(per_row_layout(shapes, world=1), 0, [torch.float32] * 2, CPU)
    gathered = torch.zeros(1, dtype=torch.uint8)
    alone = Alone(Plain(shards), None, Beside([gathered], [torch.ones(1, dtype=torch.uint8)]))
    alone.run()
    shards.locals[0].fill_(5)
    alone.release()
    params = alone.codec.params
    assert [tuple(param.shape) for param in params] == shapes
    assert bool((params[0] == 5).all()) and alone.held_bytes == 0
    assert gathered.tolist() == [1]


def test_without_other_ranks_a_gather_is_a_cast() -> None:
    shapes = [(3, 2), (4,)]
    single = per_row_layout(shapes, world=1)
    shards = ShardBuffer(single, 0, [torch.float32] * 2, CPU)
    for local in shards.locals:
        local.fill_(3)
    dtypes = [torch.bfloat16] * 2
    alone = Alone(Cast(shards.flat_shard, single, 0, dtypes, CPU, packed=False), None)
    alone.run()
    assert_equal(
        list(alone.codec.params), [torch.full(shape, 3, dtype=torch.bfloat16) for shape in shapes]
    )
    assert alone.codec.received_bytes == 0


# --- post-forward shard, in a group --------------------------------------------------------------------


def from_the_post_forward_shard() -> None:
    module = nn.Linear(3, 5)
    for param in module.parameters():  # not random: ranks are threads, and draw from one generator
        param.data = torch.arange(param.numel(), dtype=torch.float32).view_as(param)
    expected = {name: param.detach().clone() for name, param in module.named_parameters()}
    group = make_group(module, param_dtype=torch.bfloat16, post_forward_size=2)

    def assert_unsharded() -> None:
        assert_equal(
            {param.name: param.unsharded_param for param in group.params},
            {name: full.bfloat16() for name, full in expected.items()},
        )

    for _ in range(2):
        group.unshard()
        group.wait()
        assert_unsharded()
        pointers = [param.unsharded_param for param in group.params]
        group.reshard_after_forward()
        assert group.sharded_state is ShardedState.SHARDED_POST_FORWARD
        kept = group.held_bytes
        with torch.no_grad():
            for sharded_param in group.sharded_params:
                sharded_param.param.add_(1)  # too late for this backward
        group.unshard()
        group.wait()
        assert_unsharded()
        assert [param.unsharded_param for param in group.params] == pointers
        group.reshard()
        assert group.held_bytes == 0 < kept
        for full in expected.values():
            full.add_(1)


@in_place_and_packed
def test_backward_gathers_what_forward_has_kept(
    monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    monkeypatch.setattr(fullshard.layout.segments, "IN_PLACE_FROM", 0 if in_place else 1 << 40)
    run_threads(4, from_the_post_forward_shard)


def after_a_gather_nobody_used() -> None:
    module = nn.Linear(3, 5)
    nn.init.constant_(module.weight, 2)
    nn.init.constant_(module.bias, 3)
    group = make_group(module)
    group.unshard()
    group.reshard()  # prefetched in vain
    assert group.held_bytes == 0
    with torch.no_grad():
        for sharded_param in group.sharded_params:
            sharded_param.param.mul_(2)
    group.unshard()
    group.wait()
    weight, bias = (param.unsharded_param for param in group.params)
    assert_equal([weight, bias], [torch.full((5, 3), 4.0), torch.full((5,), 6.0)])


def test_a_gather_nobody_used_leaves_nothing_behind() -> None:
    run_threads(WORLD, after_a_gather_nobody_used)


# --- hooks of other features ---------------------------------------------------------------------------


class WrittenLater:
    """An event of the host: what it stands for is written when the host waits for it."""

    def __init__(self, write: Callable[[], object]) -> None:
        self._write, self.waits = write, 0

    def synchronize(self) -> None:
        self._write()
        self.waits += 1


def gathers_what_the_event_brings() -> None:
    group = make_group(nn.Linear(3, 5))
    weight = group.sharded_params[0].param
    event = WrittenLater(lambda: torch.no_grad()(weight.fill_)(7))
    group.unshard()
    group.wait()
    group.not_before(event)
    group.unshard()  # it is gathered: nothing to wait for
    assert event.waits == 0
    for _ in range(2):
        group.reshard()
        group.unshard()
        group.wait()
        assert event.waits == 1, "it counts for one gather"
        assert_equal(group.params[0].unsharded_param, torch.full((5, 3), 7.0))


def test_a_gather_comes_not_before_an_event() -> None:
    run_threads(WORLD, gathers_what_the_event_brings)


def test_the_gather_stream_waits_for_such_an_event_and_without_that_there_is_a_race(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "shards written on a stream of their own, gathers not before"
    assert not checked(name).races
    monkeypatch.setattr(FSDPParamGroup, "not_before", lambda *_: None)
    assert checked(name).races


class Aside(StepObserver):
    """Notes which groups are gathered aside of a step."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def gathered_aside(self, group: Any) -> None:
        self.names.append(group.name)


def test_an_observer_is_told_of_gathers_aside_of_a_step() -> None:
    with fake_world(2):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for module in (*model, model):
            fully_shard(module)
        model(torch.ones(2, 4)).sum().backward()
        state = state_of(model[0])
        assert state is not None
        context = state.groups[0].context
        context.observe(aside := Aside())
        model(torch.ones(2, 4)).sum().backward()
        assert aside.names == []
        model[1].unshard()
        assert aside.names == ["1"]
        model[1].unshard()  # it is there
        assert aside.names == ["1"]
        model[1].reshard()


def test_full_parameters_are_gathered_aside() -> None:
    with fake_world(2):
        model = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=True)
        model(torch.ones(2, 4)).sum().backward()
        (group,) = groups_of(model.parameters())
        group.context.observe(aside := Aside())
        with FullyShardedDataParallel.summon_full_params(model):
            assert aside.names == [group.name]


# --- outside of training -------------------------------------------------------------------------------


def gather_flat() -> None:
    flat = flat_layout(
        [(5, 3), (4,), (2, 2)],
        world=WORLD,
        kinds=[0, 0, 1],
        multiple=1,
        strides=[(3, 1), (1,), (2, 1)],
    )
    rank = dist.get_rank()
    full = [torch.arange(15.0).view(5, 3), torch.arange(20.0, 24.0), torch.ones(2, 2)]
    shards = ShardBuffer(flat, rank, [torch.float32] * 3, CPU)
    for index, (local, param) in enumerate(zip(shards.locals, full, strict=True)):
        local.copy_(shard_of(flat, index, rank, param))
    pieces: list[Tensor | None] = [shards.pieces[0], None]
    assert_equal(all_gather_full(flat, pieces, dist.group.WORLD, tag("full"))[:2], full[:2])
    assert all_gather_full(flat, pieces, dist.group.WORLD, tag("full"))[2] is None
    assert_equal(all_gather_full(flat, shards.pieces, dist.group.WORLD, tag("full")), full)


def test_full_parameters_are_gathered_segment_by_segment() -> None:
    run_threads(WORLD, gather_flat)


def test_a_gather_on_the_meta_device_tells_its_sizes_without_memory() -> None:
    with fake_world(WORLD):
        meta = torch.device("meta")
        shards = ShardBuffer(layout(), 0, [torch.float32] * 4, meta)
        dtypes = [torch.bfloat16] * 4
        codec = Cast(shards.flat_shard, layout(), 0, dtypes, meta, packed=True)
        assert codec.nbytes >= sum(param.numel() for param in full_params()) * 2
        assert all(param.is_meta for param in codec.params)


def test_a_context_below_autograd_can_be_kept_and_entered_again() -> None:
    leaf, written, below = torch.ones(2, requires_grad=True), torch.ones(2), below_autograd()

    def compute() -> tuple[bool, bool]:
        """Return whether autograd records an operator, and whether it counts a write."""
        before = written._version
        written.add_(1)
        return (leaf * 2).requires_grad, written._version > before

    def compute_below() -> tuple[bool, bool]:
        with below:
            return compute()

    with ThreadPoolExecutor() as other_thread:  # backward is on one, on accelerators
        for _ in range(2):
            assert compute_below() == (False, False)
            assert compute() == (True, True)
            assert other_thread.submit(compute_below).result() == (False, False)
            assert other_thread.submit(compute).result() == (True, True)
