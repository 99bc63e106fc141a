"""A step of a run, planned: whether it fits, how long it takes, and what it waits for.

    record    the engine runs a step on a device that does not exist     `step_program`
    memory    what is allocated, and what the allocator reserves          `memory_use`
    play      when everything happens on a machine                        `playback`

Recording takes the longest, in proportion to the model's depth. `estimate_step` is for searches: it records the model with
few layers, at two depths, and goes on from there as if each further layer added the same. That is so once the pipeline
of gathers, compute and reductions has filled up, and as long as the peak of memory stays in the same place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from fullshard.programs.plan_tool.machine import Machine
from fullshard.programs.plan_tool.memory_use import (
    MemoryMoment,
    MemoryUse,
    memory_moments,
    memory_use,
)
from fullshard.programs.plan_tool.playback import Playback, play
from fullshard.programs.plan_tool.program import Kernel, Launch, MemoryKind, Program
from fullshard.programs.plan_tool.step_program import record_step
from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.model_source import ModelSource, open_model
from fullshard.programs.train.sharded_model import freeze_others
from fullshard.tracing.schema import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """A step as it is expected, before it is taken."""

    config: RunConfig
    world: int
    machine: Machine
    tokens: int
    """Tokens of one rank."""
    flops: float
    """Flops of one rank's matrix products and attention, without those that are recomputed."""
    memory: MemoryUse
    playback: Playback
    padding: str | None
    """Sentence about the groups that are padded a lot, and why, if there are any."""
    trace: Trace | None
    """Trace of the planned step; None if it was estimated from few layers."""
    memory_moments: tuple[MemoryMoment, ...] = ()
    """Memory over the step, as far as there is a trace."""
    has_experts: bool = False
    """Whether tokens are routed to experts. The plan spreads them evenly."""

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.playback.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one rank."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """The share of the device's peak that goes into the model's own arithmetic."""
        return self.flops / self.seconds / self.peak_flops

    @property
    def peak_flops(self) -> float:
        """Flops per second in the device's data sheet, in the precision of the run."""
        dtype = "bfloat16" if self.config.compute.precision == "bf16" else "float32"
        return self.machine.peak_flops(dtype)

    @property
    def fits(self) -> bool:
        """Whether the device and the host have enough memory."""
        return (
            self.memory.reserved <= self.machine.usable_bytes
            and self.host_bytes <= self.machine.host_memory_bytes
        )

    @property
    def host_bytes(self) -> int:
        """Host memory that all ranks of a host take together; 0 without offload."""
        return self.memory.host_allocated * self.machine.ranks_on_host(self.world)


HELD: tuple[MemoryKind, ...] = ("parameters", "gradients", "optimizer")
"""Memory that is divided among the ranks of a replica."""


def held_bytes(step: PlannedStep) -> int:
    """Return the bytes of a device that are divided among the ranks of a replica, as far as they are there at the peak."""
    return sum(step.memory.at_peak.get(kind, 0) for kind in HELD)


GROUPED_PRODUCT = "_grouped_mm"
"""The end of the names of kernels that multiply each expert's tokens with its weights."""

ATTENTION_GRADIENTS = 4 / 5
"""Share of attention's products in backward, without scores: one product in five computes them again."""

DEPTHS = (3, 5)
"""Depths of the models that `estimate_step` records. For 32 layers of Llama 2, four ways to shard them and two networks, this gives
times and allocated bytes within 0.2 % of the whole. Reserved bytes of these and of a model of 24 layers are within 10 %. With 2
layers, memory has its peak elsewhere."""


MICROBATCHES = (2, 3)
"""Microbatches of the steps that `plan_microbatches` records. For 12 microbatches of small models this gives the same times and
allocated bytes as the whole, and reserved bytes within 1 %."""


def plan_step(
    config: RunConfig, world: int, machine: Machine, source: ModelSource | None = None
) -> PlannedStep:
    """Plan a step of a run.

    Args:
        config: The run.
        world: Ranks.
        machine: The machine of each of them.
        source: The run's model, if it is open already.

    Raises:
        ConfigurationError: the configuration does not go together, or not with this number of ranks.
    """
    step = record_step(config, world, source or open_model(config))
    is_compiled = config.compute.compile == "blocks"
    playback = play(step.program, machine, is_compiled=is_compiled)
    kept = _kept_activations(config, machine)
    memory = memory_use(step.program, machine, kept=kept)
    return PlannedStep(
        config=config,
        world=world,
        machine=machine,
        tokens=step.tokens,
        flops=model_flops(step.program),
        memory=memory,
        playback=playback,
        padding=step.padding,
        trace=step.trace(playback),
        memory_moments=memory_moments(
            step.program,
            playback.launches,
            playback.seconds,
            kept=kept,
            workspace=memory.at_peak.get("workspace", 0),
        ),
        has_experts=any(
            isinstance(entry, Launch)
            and isinstance(entry.work, Kernel)
            and entry.work.name.endswith(GROUPED_PRODUCT)
            for entry in step.program.entries
        ),
    )


def plan_microbatches(
    config: RunConfig, world: int, machine: Machine, source: ModelSource | None = None, *, most: int
) -> PlannedStep:
    """Plan a step as `plan_step` does; if it has more than so many microbatches, from few of them.

    All microbatches but the first and the last do the same. So a step of two and one of three tell what many take, and the
    trace is that of three.

    Raises:
        ConfigurationError: the configuration does not go together, or not with this number of ranks.
    """
    source, count = source or open_model(config), config.train.accumulate
    if count <= max(most, MICROBATCHES[1]):
        return plan_step(config, world, machine, source)
    few, more = (
        plan_step(_with_microbatches(config, each), world, machine, source) for each in MICROBATCHES
    )
    step = _Line(count - MICROBATCHES[0]).step(few, more)
    return replace(step, config=config, tokens=more.tokens // MICROBATCHES[1] * count)


def _with_microbatches(config: RunConfig, count: int) -> RunConfig:
    """Return a run that has so many microbatches of the same size."""
    batch = config.train.batch // config.train.accumulate * count
    return replace(config, train=replace(config.train, accumulate=count, batch=batch))


def estimate_step(
    config: RunConfig, world: int, machine: Machine, source: ModelSource | None = None
) -> PlannedStep:
    """Plan a step from what few layers take; see `plan_step`. There is no trace.

    Raises:
        ConfigurationError: the configuration does not go together, or not with this number of ranks.
    """
    source = source or open_model(config)
    depth = _template_of(source).depth
    # The whole is no more work, or cannot be made shallower.
    if depth <= sum(DEPTHS) or not _layers_train_alike(config, source):
        step = plan_microbatches(config, world, machine, source, most=0)
    else:
        few, more = (
            plan_microbatches(config, world, machine, ShallowModel(source, each), most=0)
            for each in DEPTHS
        )
        step = _Line((depth - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])).step(few, more)
    return replace(step, trace=None, memory_moments=())


class _Line:
    """A line through two plans, with few and with some more layers or microbatches, which is drawn on to many of them."""

    def __init__(self, times: float) -> None:
        self._times = times
        """Length of the line from few to many, relative to the step from few to more."""

    def step(self, few: PlannedStep, more: PlannedStep) -> PlannedStep:
        return replace(
            more,
            flops=self.at(few.flops, more.flops),
            memory=self.memory(few.memory, more.memory),
            playback=self.playback(few.playback, more.playback),
        )

    def at(self, few: float, more: float) -> float:
        return few + (more - few) * self._times

    def each(self, few: Mapping[Any, float], more: Mapping[Any, float]) -> defaultdict[Any, float]:
        found = {
            key: max(0.0, self.at(few.get(key, 0.0), more.get(key, 0.0))) for key in {**few, **more}
        }
        return defaultdict(float, found)

    def memory(self, few: MemoryUse, more: MemoryUse) -> MemoryUse:
        allocated = round(self.at(few.allocated, more.allocated))
        # Deeper models have hardly more fragments. This is the weakest of the estimates.
        fragments = max(each.reserved - each.allocated for each in (few, more))
        return replace(
            more,
            allocated=allocated,
            reserved=allocated + fragments,
            at_rest=round(self.at(few.at_rest, more.at_rest)),
            at_peak=self._bytes(few.at_peak, more.at_peak),
            host_allocated=round(self.at(few.host_allocated, more.host_allocated)),
            host_at_peak=self._bytes(few.host_at_peak, more.host_at_peak),
        )

    def _bytes(self, few: Mapping[Any, int], more: Mapping[Any, int]) -> dict[Any, int]:
        return {kind: round(nbytes) for kind, nbytes in self.each(few, more).items()}

    def playback(self, few: Playback, more: Playback) -> Playback:
        return Playback(
            seconds=self.at(few.seconds, more.seconds),
            gradient_seconds=self.at(few.gradient_seconds, more.gradient_seconds),
            host_seconds=self.at(few.host_seconds, more.host_seconds),
            update_seconds=self.at(few.update_seconds, more.update_seconds),
            compute=self.each(few.compute, more.compute),
            phases=self.each(few.phases, more.phases),
            collectives=self.each(few.collectives, more.collectives),
            transfers=self.each(few.transfers, more.transfers),
            idle=self.each(few.idle, more.idle),
        )


class ShallowModel:
    """A model with only the first of its layers: all that `ModelSource` has, but for the depth."""

    def __init__(self, source: ModelSource, depth: int) -> None:
        self._source, self._depth = source, depth

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def build(self) -> nn.Module:
        """Return the model without its later layers."""
        model = deepcopy(_template_of(self._source).model)
        del _layers(self._source, model)[self._depth :]
        return model


class _Template(NamedTuple):
    """A model that was built once: to copy it is cheaper."""

    model: nn.Module
    """The model with its first layers only."""
    depth: int
    """Layers of the whole model."""
    parameters: int
    """Elements of the whole model's parameters."""


_TEMPLATES: WeakKeyDictionary[ModelSource, _Template] = WeakKeyDictionary()


def _layers_train_alike(config: RunConfig, source: ModelSource) -> bool:
    """Return whether the same parameters are trained in all layers."""
    patterns = config.model.trainable
    if patterns is None:
        return True
    model = source.build()
    freeze_others(model, patterns)
    trained = {
        tuple(parameter.requires_grad for parameter in layer.parameters())
        for layer in _layers(source, model)
    }
    return len(trained) == 1


def parameters_of(source: ModelSource) -> int:
    """Return how many parameters a model has."""
    return _template_of(source).parameters


def _template_of(source: ModelSource) -> _Template:
    found = _TEMPLATES.get(source)
    if found is None:
        model = source.build()
        layers = _layers(source, model)
        parameters = sum(each.numel() for each in model.parameters())
        found = _TEMPLATES[source] = _Template(model, len(layers), parameters)
        del layers[DEPTHS[1] :]
    return found


def _layers(source: ModelSource, model: nn.Module) -> nn.ModuleList:
    """Return the list that has the layers of a model; an empty one if they are not in one list."""
    blocks = source.blocks(model)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and list(module) == blocks:
            return module
    return nn.ModuleList()


def _kept_activations(config: RunConfig, machine: Machine) -> float:
    """Return the share of recorded activations that compiled blocks keep."""
    if config.compute.compile != "blocks":
        return 1.0
    if config.compute.checkpoint_activations == "none":
        return machine.compiled.activations
    return machine.compiled.recomputed_activations


def model_flops(program: Program) -> float:
    """Return the flops of a step's forward and backward, without what is computed again.

    Backward does not compute gradients of frozen parameters. It never counts for more than two forwards: attention, and
    functions of one's own, compute some of forward again within backward.
    """
    flops: defaultdict[str, float] = defaultdict(float)
    for entry in program.entries[program.begin : program.end]:
        if isinstance(entry, Launch) and isinstance(entry.work, Kernel) and not entry.is_repeated:
            share = ATTENTION_GRADIENTS if entry.work.kind == "attention" else 1.0
            flops[entry.phase] += entry.work.flops * (share if entry.phase == "backward" else 1)
    return flops["forward"] + min(flops["backward"], 2 * flops["forward"])
