"""`fullshard.debug("streams")`: users find races in their own step, with both places, the memory's name and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.cuda import _gpu_trace
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import torch_border
from fullshard.checks.cuda_streams import CudaStreamCheck
from fullshard.comm import DefaultAllGather
from fullshard.divergence.journal import RULES
from tests.helpers.groups import alone
from tests.helpers.page_programs import DOCS, blocks

META = torch.device("meta")


class Racy(DefaultAllGather):
    """A user's all-gather on a stream of its own, for which no stream waits."""

    def __init__(self) -> None:
        self.stream = torch_border.device_for(META).new_stream(priority=0)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        with self.stream:
            return super().__call__(output_tensor, input_tensor, group, async_op)


def model_of(comm: Any = None) -> Any:
    mesh = init_device_mesh("meta", (4,))
    with META:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fullshard.fully_shard(layer, mesh=mesh)
        if comm is not None:
            layer.set_custom_all_gather(comm)
    fullshard.fully_shard(model, mesh=mesh)
    return model


def step(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.zeros(2, 8, device=META)).sum().backward()
        optimizer.step()


def test_a_step_without_races_passes_and_says_how_much_was_checked() -> None:
    with fullshard.debug("streams", world_size=4) as check:
        step(model_of())
    assert check.races == [] and check.text == "" and check.accesses > 100
    assert not dist.is_initialized()


def test_a_race_of_a_comm_object_names_both_places_the_group_and_the_remedy() -> None:
    with pytest.raises(fullshard.StreamOrderError) as caught:
        with fullshard.debug("streams", world_size=4):
            step(model_of(Racy()))
    text = str(caught.value)
    assert "must be ordered by a stream, or by an event" in text
    assert "test_debug.py" in text and "Racy.__call__" in text
    assert "the gather buffer of 1" in text and "Missing: " in text
    assert caught.value.races


def test_an_error_in_the_block_is_raised_as_it_is() -> None:
    with pytest.raises(ValueError, match="the test's"), fullshard.debug("streams"):
        raise ValueError("the test's")
    assert not dist.is_initialized()


def test_ranks_that_exist_are_refused_without_a_gpu() -> None:
    with alone(), pytest.raises(fullshard.UsageError, match="Leave init_process_group out"):
        with fullshard.debug("streams"):
            pass


def test_a_block_in_which_nothing_is_seen_proves_nothing() -> None:
    with pytest.raises(fullshard.UsageError, match="proves nothing"):
        with fullshard.debug("streams"):
            torch.zeros(8).add_(1)  # on the CPU
    assert not dist.is_initialized()


def test_checks_of_order_end_with_the_block() -> None:
    with fullshard.debug("order"):
        assert RULES.every_collective
    assert not RULES.every_collective


def test_the_program_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = blocks((DOCS / "streams.md").read_text(), "python")
    exec(compile(program, "streams.md", "exec"), {})
    assert "accesses, all ordered" in capsys.readouterr().out


# --- on a GPU, as torch tells of it -----------------------------------------------------------------------


class Gpu:
    """Fires what torch fires for a GPU. Tensors of the CPU stand for those of the device."""

    SIDE = 0xA0

    def __init__(self, check: CudaStreamCheck) -> None:
        self.check, self.now = check, 0
        check._current = lambda: check._number(self.now)  # type: ignore[method-assign]

    def on_side(self) -> Gpu:
        self.now = self.SIDE
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.now = 0

    def side_waits(self) -> None:
        _gpu_trace.EventRecordCallbacks.fire_callbacks(7, 0)
        _gpu_trace.EventWaitCallbacks.fire_callbacks(7, self.SIDE)

    def side_is_waited_for(self) -> None:
        _gpu_trace.EventRecordCallbacks.fire_callbacks(8, self.SIDE)
        _gpu_trace.EventWaitCallbacks.fire_callbacks(8, 0)


def races_of(program: Any) -> str:
    with CudaStreamCheck(device_type="cpu", raises=False) as check:
        program(Gpu(check))
    return check.text


def test_operations_on_streams_of_a_gpu_are_ordered_by_the_events_that_torch_tells_of() -> None:
    def unordered(gpu: Gpu) -> None:
        x = torch.zeros(8)
        with gpu.on_side():
            x.sum()

    def ordered(gpu: Gpu) -> None:
        x = torch.zeros(8)
        gpu.side_waits()
        with gpu.on_side():
            x.sum()

    text = races_of(unordered)
    assert "the default stream writes" in text and "the 0xa0 stream reads it" in text
    assert races_of(ordered) == ""


def test_memory_that_a_gpu_hands_out_again_is_watched() -> None:
    def reused(gpu: Gpu, *, record: bool = False) -> None:
        one, other = torch.zeros(8), torch.zeros(8)
        _gpu_trace.MemoryAllocationCallbacks.fire_callbacks(one.data_ptr())
        one.zero_()
        gpu.side_waits()
        with gpu.on_side():
            one.sum()
            if record:
                gpu.check._never_reused.add(gpu.check._memory[one.data_ptr()])
        _gpu_trace.MemoryDeallocationCallbacks.fire_callbacks(one.data_ptr())
        _gpu_trace.MemoryAllocationCallbacks.fire_callbacks(other.data_ptr())
        other.zero_()

    assert "may be handed out again" in races_of(reused)
    assert races_of(lambda gpu: reused(gpu, record=True)) == ""


def test_nothing_is_heard_behind_the_block() -> None:
    before = len(_gpu_trace.EventRecordCallbacks.callback_list)
    with CudaStreamCheck(device_type="cpu", raises=False):
        assert len(_gpu_trace.EventRecordCallbacks.callback_list) == before + 1
    assert len(_gpu_trace.EventRecordCallbacks.callback_list) == before
