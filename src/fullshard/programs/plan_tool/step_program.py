"""The program of a training step: the model and the optimizer of a run, sharded and run by the engine.

The first step differs: nothing is known about the order of modules, and the optimizer has no state. So the second one is
recorded.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import torch_border
from fullshard.comm.spans import TraceRecorder
from fullshard.plan.mesh import world_size
from fullshard.programs.inspect_tool.without_values import without_values
from fullshard.programs.plan_tool.program import Program
from fullshard.programs.plan_tool.recording import (
    META,
    HookRecorder,
    RecordedClock,
    Recorder,
    Times,
)
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.evaluation import window_losses
from fullshard.programs.train.model_source import ModelSource
from fullshard.programs.train.optimizer import build_ema, build_optimizer
from fullshard.programs.train.sharded_model import build_model
from fullshard.tracing.schema import Trace
from fullshard.tracing.trace import attach, contexts_of, export


@dataclass(frozen=True, slots=True)
class StepProgram:
    """A recorded step of one rank."""

    program: Program
    tokens: int
    """That the rank trains on."""
    trace: Callable[[Times], Trace]
    """Returns the trace of the step as it was played."""


def record_step(
    config: RunConfig, world: int, source: ModelSource, *, has_streams: bool = True
) -> StepProgram:
    """Return the program of a run's step on rank 0 of a world, which holds the most.

    Args:
        config: The run.
        world: Ranks.
        source: Its model.
        has_streams: Whether the device is an accelerator; otherwise it is a CPU.

    Raises:
        ConfigurationError: the configuration does not go together, or not with this number of ranks.
    """
    # The wrapper has the same groups and collectives, but cannot be built without memory. What compiling changes is
    # the machine's business.
    config = replace(
        config,
        sharding=replace(config.sharding, door="fully_shard"),
        compute=replace(config.compute, compile="none", graph=False),
    )
    recorder = Recorder(has_streams=has_streams)
    ranks = torch_border.virtual_process_group(world, recorder)
    gc.freeze()  # so that only what the step makes is looked through
    with recorder.recording(), ranks, without_values():
        step = _Step(recorder, config, world, source)
        step.take()
        gc.collect()  # what only cycles keep alive is not a step's memory
        gc.unfreeze()
        contexts = contexts_of(step.model.module)
        begin = len(recorder.entries)
        spans = HookRecorder(recorder)
        attach(spans, step.model.module, contexts)
        step.take()
        spans.end_step()
        for context in contexts:
            context.recorder = None
        program = recorder.program(begin)
        step.name_optimizer_state()
        return StepProgram(program, step.tokens, export_later(step.model.module, spans))


class _Step:
    """The training step of a run: what `fullshard train` does, without data."""

    def __init__(
        self, recorder: Recorder, config: RunConfig, world: int, source: ModelSource
    ) -> None:
        self._recorder, self._config, self._source = recorder, config, source
        rows = config.train.batch // world
        context = config.data.context
        self.tokens = rows * context
        self.model = build_model(config, source, META)
        self.optimizer = build_optimizer(config.optimizer, self.model)
        self._ema = build_ema(config.optimizer, self.model.module)
        self._windows = torch.empty(rows, context + 1, dtype=torch.int64, device=META)
        recorder.phase = "between"
        held = (*self.model.module.parameters(), *self.model.module.buffers(), self._windows)
        recorder.name_memory(_local_tensors(held), "parameters")

    def take(self) -> None:
        """Take a step."""
        recorder, accumulate = self._recorder, self._config.train.accumulate
        micro = self._windows.shape[0] // accumulate
        for index in range(accumulate):
            is_last = index + 1 == accumulate
            with nullcontext() if is_last else self.model.accumulating():
                with recorder.during("forward"):
                    windows = self._windows[index * micro : (index + 1) * micro]
                    losses = window_losses(self._source, self.model.module, windows)
                    loss = losses.sum() / self._windows.shape[0]
                with recorder.during("backward"):
                    loss.backward()
                del losses, loss
        with recorder.during("optimizer"):
            grads = [p.grad for p in self.model.module.parameters() if p.grad is not None]
            recorder.name_memory(_local_tensors(grads), "gradients")
            del grads
            self.model.clip_gradients(self._config.train.clip or math.inf)
            self.optimizer.step()
            if self._ema is not None:
                self._ema.update()
            self.optimizer.zero_grad()

    def name_optimizer_state(self) -> None:
        """Say which memory is the optimizer's. Behind the last step: some optimizers change when they are asked."""
        self._recorder.name_memory(_local_tensors(_tensors_of(self.optimizer)), "optimizer")


def _local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [each.to_local() if isinstance(each, DTensor) else each for each in tensors]


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (each for each in state.values() if isinstance(each, Tensor) and each.is_meta)


def export_later(model: nn.Module, spans: TraceRecorder) -> Callable[[Times], Trace]:
    """Return what exports a trace when the times are known. The world is gone by then."""
    clock = spans.clock
    assert isinstance(clock, RecordedClock), "the recorder is the device"
    world = world_size()

    def export_with(times: Times) -> Trace:
        clock.times = times
        return replace(export(model, spans), rank=0, world=world)

    return export_with
