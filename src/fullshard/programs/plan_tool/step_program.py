"""The program of a training step: the model and the optimizer of a run, sharded and run by the engine.

The first step differs: nothing is known about the order of modules, and the optimizer has no state. So the second one is
recorded.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.features.padding import padding_text
from fullshard.mesh.axes import world_size
from fullshard.programs.plan_tool.program import Phase, Program
from fullshard.programs.plan_tool.recording import HookRecorder, RecordedClock, Recorder, Times
from fullshard.programs.plan_tool.training_step import TrainingStep
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.model_source import ModelSource
from fullshard.tracing.group_facts import states_in
from fullshard.tracing.recorder import TraceRecorder
from fullshard.tracing.schema import Trace
from fullshard.tracing.trace import attach, contexts_of, export
from fullshard.virtual.device import META
from fullshard.virtual.groups import virtual_process_group
from fullshard.virtual.without_values import without_values


@dataclass(frozen=True, slots=True)
class StepProgram:
    """A recorded step of one rank."""

    program: Program
    tokens: int
    """Tokens that the rank trains on."""
    padding: str | None
    """Sentence about the groups that are padded a lot, and why, if there are any."""
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
        has_streams: Whether the device is an accelerator. The steps of CPU ranks in tests have none.

    Raises:
        ConfigurationError: the configuration does not go together, or not with this number of ranks.
    """
    # The machine knows the effects of compiling.
    config = replace(config, compute=replace(config.compute, compile="none", graph=False))
    recorder = Recorder(has_streams=has_streams, offloads=config.sharding.offload)
    ranks = virtual_process_group(world, recorder.device)
    gc.freeze()  # so that only what the step makes is looked through
    with recorder.recording(), ranks, without_values():
        step = _RecordedStep(recorder, config, world, source)
        step.take()
        gc.collect()  # what only cycles keep alive is not a step's memory
        gc.unfreeze()
        recorder.name_what_stayed("optimizer", "optimizer")
        step.name_parameters()  # shards in host memory are packed anew in the first step
        contexts = contexts_of(step.model.module)
        begin = len(recorder.entries)
        spans = HookRecorder(recorder)
        attach(spans, step.model.module, contexts)
        step.take()
        spans.end_step()
        for context in contexts:
            context.stop_observing(spans)
        program = recorder.program(begin)
        padding = padding_text((state, name) for state, name, _ in states_in(step.model.module))
        return StepProgram(program, step.tokens, padding, export_later(step.model.module, spans))


class _RecordedStep(TrainingStep):
    """A step that tells the recorder where it is and what memory is for."""

    def __init__(
        self, recorder: Recorder, config: RunConfig, world: int, source: ModelSource
    ) -> None:
        self._recorder = recorder
        super().__init__(config, world, source, META)
        recorder.phase = "between"
        self.name_parameters()

    def allocate(self, model: nn.Module, device: torch.device) -> None:
        """Do as `TrainingStep` says. What is taken here and given back remains reserved."""
        with self._recorder.during("between"):
            super().allocate(model, device)

    def name_parameters(self) -> None:
        """Tell the recorder which memory is there all the time."""
        held = (*self.model.module.parameters(), *self.model.module.buffers(), self.windows)
        self._recorder.name_memory(_local_tensors(held), "parameters")

    def update(self) -> None:
        """Do as `TrainingStep` says."""
        grads = [p.grad for p in self.model.module.parameters() if p.grad is not None]
        self._recorder.name_memory(_local_tensors(grads), "gradients")
        del grads
        super().update()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Do as `TrainingStep` says."""
        with self._recorder.during(phase):
            yield
        if phase == "backward" and self._config.train.accumulate > 1:
            self._recorder.name_accumulated()


def _local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [each.to_local() if isinstance(each, DTensor) else each for each in tensors]


def export_later(model: nn.Module, spans: TraceRecorder) -> Callable[[Times], Trace]:
    """Return the function that exports a trace when the times are known. The world is gone by then."""
    clock = spans.clock
    assert isinstance(clock, RecordedClock), "the recorder is the device"
    world = world_size()

    def export_with(times: Times) -> Trace:
        clock.times = times
        return replace(export(model, spans), rank=0, world=world)

    return export_with
