"""Races that this project, and others, have had: each as a small program, which is reported; and mended, which is not.

The programs run on the virtual device, with operations of torch. What they show of other projects is what their threads
say: pytorch/pytorch and NVIDIA/Megatron-LM, by number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import torch_border
from fullshard.checks.stream_check import StreamCheck

META = torch.device("meta")


class Streams:
    """Streams beside compute, and what programs do."""

    def __init__(self) -> None:
        self.compute = torch_border.current_stream(META)
        self.gather, self.reduce, self.replicas = (
            torch_border.device_for(META).new_stream(priority=0) for _ in range(3)
        )

    @staticmethod
    def memory(*, zero: bool = True) -> Tensor:
        return torch.zeros(64, device=META) if zero else torch.empty(64, device=META)

    def follow(self, behind: Any, first: Any) -> None:
        behind.wait_stream(first)


Program = Callable[[Streams, bool], None]
PROGRAMS: dict[str, Program] = {}


def defect(program: Program) -> Program:
    PROGRAMS[program.__name__] = program
    return program


@defect
def offloaded_gradients_over_replicas_pytorch_180665(s: Streams, mended: bool) -> None:
    """The reduce-scatter's output is copied to the host on the stream of the all-reduce, and freed meanwhile."""
    with s.reduce:
        output = s.memory()
    s.follow(s.replicas, s.reduce)
    with s.replicas:
        torch.empty(64, pin_memory=True).copy_(output, non_blocking=True)
    if mended:
        s.follow(s.reduce, s.replicas)
    del output
    with s.reduce:
        s.memory()  # of the next group


@defect
def a_hook_reads_gradients_in_host_memory_pytorch_180666(s: Streams, mended: bool) -> None:
    """A hook runs when the copy to the host is issued, not when it is done."""
    on_host = torch.empty(1024, pin_memory=True)
    with s.reduce:
        on_host.copy_(torch.zeros(1024, device=META), non_blocking=True)
        if mended:
            s.reduce.synchronize()
    on_host.mul_(2)


@defect
def the_host_waits_for_another_stream_pytorch_160481(s: Streams, mended: bool) -> None:
    """With replicas, copies to the host are on the stream of the all-reduce; the host waited for that of the reduce-scatter."""
    on_host = torch.empty(1024, pin_memory=True)
    with s.replicas:
        on_host.copy_(torch.zeros(1024, device=META), non_blocking=True)
    (s.replicas if mended else s.reduce).synchronize()
    on_host.mul_(2)


@defect
def backward_beside_an_accumulation_pytorch_181218(s: Streams, mended: bool) -> None:
    """A chunk of the loss is differentiated while the gradients of the one before are accumulated on another stream."""
    gradient, total = s.memory(), s.memory()
    s.follow(s.reduce, s.compute)
    with s.reduce:
        total.add_(gradient)
    if mended:
        s.follow(s.compute, s.reduce)
    del gradient
    s.memory()  # of the next chunk


@defect
def a_shard_cast_on_a_stream_of_its_own_pytorch_91096(s: Streams, mended: bool) -> None:
    """The shard in low precision is allocated on one stream and read by compute, and its memory is given back unseen."""
    with s.gather:
        cast = s.memory()
    s.follow(s.compute, s.gather)
    cast.sum()
    if mended:
        s.follow(s.gather, s.compute)
    del cast
    with s.gather:
        s.memory()


@defect
def gathered_memory_given_back_megatron_5788(s: Streams, mended: bool) -> None:
    """A gather's storage is resized to nothing while compute still reads it."""
    with s.gather:
        gathered = s.memory()
    s.follow(s.compute, s.gather)
    gathered.sum()
    if mended:
        s.follow(s.gather, s.compute)
    gathered.untyped_storage().resize_(0)
    with s.gather:
        s.memory()  # the next group's


@defect
def weights_made_on_another_stream_megatron_6137(s: Streams, mended: bool) -> None:
    """Weights are written on the compute stream and gathered without a wait."""
    weight = s.memory()
    if mended:
        s.follow(s.gather, s.compute)
    with s.gather:
        gather(weight)


@defect
def a_main_gradient_that_is_replaced_megatron_6187(s: Streams, mended: bool) -> None:
    """A gradient is allocated on the compute stream, and replaced on the stream of reductions."""
    if mended:
        with s.reduce:
            gradient = s.memory(zero=False)
    else:
        gradient = s.memory(zero=False)
    with s.reduce:
        gradient.zero_()
    del gradient
    s.memory()


@defect
def a_reduce_input_that_is_freed_while_it_is_read(s: Streams, mended: bool) -> None:
    """The input of a reduction goes back to compute's pool before compute has waited."""
    gradients = s.memory()
    s.follow(s.reduce, s.compute)
    with s.reduce:
        output = torch.empty(8, device=META)
        dist.reduce_scatter_tensor(output, gradients)
    if mended:
        s.follow(s.compute, s.reduce)
    del gradients
    s.memory()


@defect
def shards_that_a_forward_has_packed_anew(s: Streams, mended: bool) -> None:
    """Gathers waited for compute before a forward packed replaced parameters into a new shard buffer."""
    shards = s.memory()
    if not mended:
        s.follow(s.gather, s.compute)
    shards.copy_(torch.ones(64, device=META))
    if mended:
        s.follow(s.gather, s.compute)
    with s.gather:
        gather(shards)


@defect
def an_index_shared_by_two_models(s: Streams, mended: bool) -> None:
    """The index that distributes messages was made on the stream of one model's gathers and read on another's."""
    with s.gather:
        index = torch.zeros(64, dtype=torch.int64, device=META)
    if mended:
        s.follow(s.reduce, s.gather)
    with s.reduce:  # the other model's gathers
        s.memory().index_select(0, index)


@defect
def a_checkpoint_beside_an_optimizer(s: Streams, mended: bool) -> None:
    """Weights are copied to host memory on a stream of their own while the optimizer writes them."""
    weight, on_host = torch.zeros(1024, device=META), torch.empty(1024, pin_memory=True)
    s.follow(s.replicas, s.compute)
    with s.replicas:
        on_host.copy_(weight, non_blocking=True)
    if mended:
        s.follow(s.compute, s.replicas)
    weight.mul_(0.5)


@defect
def pinned_memory_that_is_used_again(s: Streams, mended: bool) -> None:
    """The host writes the next upload into memory that the last one is still read from."""
    staging, on_device = torch.empty(1024, pin_memory=True), torch.empty(1024, device=META)
    staging.fill_(1)
    with s.gather:
        on_device.copy_(staging, non_blocking=True)
    if mended:
        s.gather.synchronize()
    staging.fill_(2)


@defect
def a_result_read_before_its_work_is_waited_for(s: Streams, mended: bool) -> None:
    """An asynchronous collective's output is read before `Work.wait`."""
    total = s.memory()
    work = dist.all_reduce(total, async_op=True)
    if mended:
        work.wait()
    total.sum()


def gather(shard: Tensor) -> None:
    dist.all_gather_into_tensor(shard.new_empty(8 * shard.numel()), shard)


def check_of(program: Program, *, mended: bool) -> StreamCheck:
    with StreamCheck(8, offloads=True, raises=False) as check:
        program(Streams(), mended)
    return check


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_known_defect_is_reported_and_its_mended_form_is_not(program: Program) -> None:
    found = check_of(program, mended=False)
    assert found.races
    assert "Missing: " in found.text and "test_known_defects.py" in found.text
    assert check_of(program, mended=True).text == ""
