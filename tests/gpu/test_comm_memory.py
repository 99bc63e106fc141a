"""Staging memory of NCCL's own and symmetric memory, on a real device, with one rank: the same bits.

Each test runs in a process of its own: the kind of symmetric memory is chosen once per process, and
what its libraries cannot do on a machine, they may answer by crashing or hanging.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import MixedPrecisionPolicy, fully_shard, torch_border
from fullshard.mesh.axes import DataParallelAxes
from fullshard.transport import collectives, comm_objects
from fullshard.transport.staged import Staged
from fullshard.transport.transports import Coalesced
from tests.gpu.conftest import TO_ITSELF
from tests.gpu.test_streams import WIDTH, Layer, equal, pause

pytestmark = pytest.mark.gpu

LIMIT_S = 28
"""For one process; a test has up to two, and a minute."""


def report(connection: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Be the only rank of an NCCL group, run the function and send what it returned, or what it raised."""
    DataParallelAxes.shard_peers = TO_ITSELF  # type: ignore[method-assign, assignment]
    try:
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        store = dist.HashStore()
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
        answer = True, function(*args)
        gc.collect()
        dist.destroy_process_group()
    except Exception:
        answer = False, traceback.format_exc()
    connection.send(answer)


def alone_on_nccl(function: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
    """Run a function in a new process; whether it succeeded, and its result or what went wrong."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=report, args=(theirs, function, args), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(LIMIT_S):
            return False, f"no answer within {LIMIT_S} s"
        return ours.recv()  # type: ignore[no-any-return]
    except EOFError:
        process.join(5)
        return False, f"the process died with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()


def group_allocates() -> bool:
    return torch_border.allocates_tensors(dist.group.WORLD, torch.device("cuda", 0))


def use_symmetric_memory() -> None:
    device = torch.device("cuda", 0)
    collectives.connect(dist.group.WORLD, device)
    torch_border.choose_symmetric_backend("NCCL")
    block = torch_border.symmetric_bytes(1 << 20, device, dist.group.WORLD)
    comm_objects.DefaultAllGather()(block, block, dist.group.WORLD)
    torch.cuda.synchronize()


@pytest.fixture(scope="module")
def nccl_that_allocates() -> None:
    worked, answer = alone_on_nccl(group_allocates)
    if not (worked and answer):
        pytest.skip(f"NCCL does not allocate on this machine: {answer}")


@pytest.fixture(scope="module")
def symmetric_memory() -> None:
    worked, answer = alone_on_nccl(use_symmetric_memory)
    if not worked:
        last = str(answer).strip().splitlines()[-1]
        pytest.skip(f"torch {torch.__version__} has no NCCL symmetric memory here: {last}")


def default(module: Any) -> None:
    pass


def process_group(module: Any) -> None:
    module.set_allocate_memory_from_process_group_for_comm(True)


def symmetric(module: Any) -> None:
    module.set_symm_mem_for_comm()


def symmetric_and_reductions(module: Any) -> None:
    module.set_force_sum_reduction_for_comms(True)
    module.set_symm_mem_for_comm()


def make_model(setter: Callable[[Any], None], reduce_dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Layer() for _ in range(4)))
    mesh = init_device_mesh("cuda", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for module in [*list(model)[1:], model]:
        setter(fully_shard(module, mesh=mesh, mp_policy=policy))
    return model


def train(model: Any, rng: random.Random | None) -> list[Tensor]:
    """Steps of two backwards each, the gradients of both in the same `.grad`; sleeps in all streams."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator("cuda").manual_seed(1)
    results = []
    for _ in range(3):
        for _ in range(2):
            x = torch.randn(256, WIDTH, device="cuda", generator=generator)
            model(x).float().pow(2).mean().backward()
        results += [p.grad.to_local().clone() for p in model.parameters()]
        if rng is not None:
            pause(rng)
        optimizer.step()
        optimizer.zero_grad()
    return results + [p.to_local().detach().clone() for p in model.parameters()]


def disturb(rng: random.Random, patch: pytest.MonkeyPatch) -> None:
    """Sleeps around the collectives, on their streams, and between the modules, on compute's."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def disturbed(*args: Any, **kwargs: Any) -> Any:
            pause(rng)
            result = function(*args, **kwargs)
            pause(rng)
            return result

        return disturbed

    for transport in (Coalesced, Staged):
        for name in ("gather", "reduce"):
            patch.setattr(transport, name, around(getattr(transport, name)))


def same_bits_when_disturbed(setter: Callable[[Any], None], reduce_dtype: torch.dtype) -> None:
    expected = train(make_model(default, reduce_dtype), None)
    assert equal(train(make_model(setter, reduce_dtype), None), expected), "undisturbed"
    for seed in range(4):
        rng = random.Random(seed)
        model = make_model(setter, reduce_dtype)
        for module in model.modules():
            module.register_forward_hook(lambda *_, rng=rng: pause(rng))
        with pytest.MonkeyPatch.context() as patch:
            disturb(rng, patch)
            assert equal(train(model, rng), expected), f"seed {seed}"


def succeed(function: Callable[..., Any], *args: Any) -> Any:
    worked, answer = alone_on_nccl(function, *args)
    assert worked, answer
    return answer


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("nccl_that_allocates")
def test_memory_of_the_process_group_changes_no_bit(reduce_dtype: torch.dtype) -> None:
    succeed(same_bits_when_disturbed, process_group, reduce_dtype)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("setter", [symmetric, symmetric_and_reductions])
@pytest.mark.usefixtures("symmetric_memory")
def test_symmetric_memory_changes_no_bit(
    setter: Callable[[Any], None], reduce_dtype: torch.dtype
) -> None:
    succeed(same_bits_when_disturbed, setter, reduce_dtype)


def blocks_made(steps: int) -> list[int]:
    """Bytes of all blocks of symmetric memory, after two steps and after some more."""
    made: list[int] = []
    original = torch_border.symmetric_bytes

    def counted(nbytes: int, device: torch.device, group: Any) -> Tensor:
        made.append(nbytes)
        return original(nbytes, device, group)

    torch_border.symmetric_bytes = counted
    model = make_model(symmetric_and_reductions, torch.float32)
    sums = []
    for count in (2, steps):
        for _ in range(count):
            model(torch.ones(8, WIDTH, device="cuda")).float().mean().backward()
        sums.append(sum(made))
    torch.cuda.synchronize()
    return sums


@pytest.mark.usefixtures("symmetric_memory")
def test_symmetric_memory_does_not_grow_after_the_first_steps() -> None:
    before, after = succeed(blocks_made, 20)
    assert 0 < before == after


def host_waits(setter: Callable[[Any], None]) -> None:
    model = make_model(setter, torch.float32)
    x = torch.randn(8, WIDTH, device="cuda")
    for _ in range(3):
        model(x).float().mean().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).float().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("nccl_that_allocates")
def test_the_host_never_waits_with_memory_of_the_process_group() -> None:
    succeed(host_waits, process_group)


@pytest.mark.usefixtures("symmetric_memory")
def test_the_host_never_waits_with_symmetric_memory() -> None:
    succeed(host_waits, symmetric_and_reductions)


def reduced_over_a_new_group() -> None:
    """The group of the reductions is made, and has not communicated, when it is to allocate."""
    module: Any = fully_shard(nn.Linear(WIDTH, WIDTH, device="cuda"))
    module.set_allocate_memory_from_process_group_for_comm(True)
    module.set_separate_reduce_scatter_group()
    module(torch.ones(2, WIDTH, device="cuda")).sum().backward()
    torch.cuda.synchronize()


@pytest.mark.usefixtures("nccl_that_allocates")
def test_a_group_that_has_not_communicated_is_connected_first() -> None:
    succeed(reduced_over_a_new_group)
