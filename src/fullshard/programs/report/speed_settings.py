"""The trainer's settings for speed and memory: which are on, and what the others would bring to this run.

A setting is judged by what was recorded of the run. Where that does not tell, the text says what the setting is for.
"""

from __future__ import annotations

from collections.abc import Iterator

from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.chart import Table
from fullshard.programs.report.timeline import group_bytes
from fullshard.programs.report.units import size
from fullshard.programs.train.config_fields import config_sections


def speed_settings(analysis: Analysis) -> Table | None:
    """Return the settings of a run of the trainer; None for other programs."""
    if not analysis.run.config:
        return None
    rows = [list(row) for row in _rows(analysis)]
    return Table(headings=["Setting", "In this run", "What it brings"], rows=rows, num_text=3)


def _rows(analysis: Analysis) -> Iterator[tuple[str, str, str]]:
    yield "compute.graph", *_captured(analysis)
    yield "compute.fuse_gradients", *_fused(analysis)
    yield "compute.compile", *_compiled(analysis)
    yield "sharding.groups", *_groups(analysis)
    yield "compute.wire", *_narrow(analysis)
    yield "optimizer.flat", *_flat(analysis)
    yield "optimizer.shard_over_replicas", *_over_replicas(analysis)


def _value(analysis: Analysis, section: str, name: str) -> object:
    """Return a field's value, also of runs that were started before the field was there."""
    found = analysis.run.setting(section, name)
    return config_sections()[section].fields[name].default if found is None else found


def _on_cuda(analysis: Analysis) -> bool:
    start = analysis.run.metrics.start
    return start is not None and start.device == "cuda"


def _captured(analysis: Analysis) -> tuple[str, str]:
    if not _on_cuda(analysis):
        return "off", "It needs CUDA: a step becomes one launch of a CUDA graph."
    if _value(analysis, "compute", "graph") is True:
        return (
            "on",
            "A step is one launch of a CUDA graph. Recorded steps run without it, so their host time is not that of others.",
        )
    return (
        "off",
        "A step becomes one launch of a CUDA graph. It helps where the GPU waits for the host, as with small layers or batches; "
        "the graph's memory stays reserved.",
    )


def _fused(analysis: Analysis) -> tuple[str, str]:
    value = _value(analysis, "compute", "fuse_gradients")
    captured = _on_cuda(analysis) and _value(analysis, "compute", "graph") is True
    if value is True or (value is None and captured):
        return "on", "Weight gradients of linear layers are written once, where they are reduced."
    return (
        "off",
        "Weight gradients of linear layers would be written once, where they are reduced. Measured gain: 2 to 3 % of forward and "
        "backward of captured steps of wide models on one H200; none without `compute.graph`.",
    )


def _compiled(analysis: Analysis) -> tuple[str, str]:
    if _value(analysis, "compute", "compile") == "blocks":
        return "blocks", "torch.compile merges the small operations of each block."
    if not _on_cuda(analysis):
        return "none", "On the CPU the trainer compiles without a code generator: nothing to gain."
    return (
        "none",
        "torch.compile would merge the small operations of each block. The first steps take longer.",
    )


def _groups(analysis: Analysis) -> tuple[str, str]:
    value = str(_value(analysis, "sharding", "groups"))
    if value == "plan":
        return value, "Small blocks share a group, so there are fewer collectives."
    now, planned = len(analysis.groups), len(analysis.planned)
    if not planned:
        return value, "`plan` lets small blocks share a group, so there are fewer collectives."
    if planned >= now:
        return value, "The blocks are large enough: `plan` would make as many groups."
    return value, f"`plan` would make {planned} groups of {now}, so there are fewer collectives."


def _narrow(analysis: Analysis) -> tuple[str, str]:
    value = str(_value(analysis, "compute", "wire"))
    sent = sum(group_bytes(analysis.steps, "reduce").values()) if analysis.steps else 0.0
    if value == "bf16":
        return value, (
            f"Gradients travel in bfloat16 and are summed in float32: {size(sent)} a step and rank."
            if sent
            else "Gradients travel in bfloat16 and are summed in float32."
        )
    if not sent:
        return value, "`bf16` would halve the bytes of gradients between ranks."
    return (
        value,
        f"Gradients are {size(sent)} a step and rank; `bf16` would halve that. They are rounded once, and summed in float32.",
    )


def _flat(analysis: Analysis) -> tuple[str, str]:
    if _value(analysis, "optimizer", "flat") is True:
        return "on", "The optimizer updates whole shards at once."
    return "off", "The optimizer would update whole shards at once, not each parameter."


def _over_replicas(analysis: Analysis) -> tuple[str, str]:
    replicas = analysis.run.setting("sharding", "replicas")
    steps = analysis.run.metrics.newest[1]
    held = max((step.optimizer_bytes for step in steps), default=0)
    on = _value(analysis, "optimizer", "shard_over_replicas") is True
    if not isinstance(replicas, int) or replicas < 2:
        return "on" if on else "off", "There are no replicas (`sharding.replicas`)."
    if on:
        return "on", f"Each of {replicas} replicas keeps a part of the optimizer's state."
    return (
        "off",
        f"Each of {replicas} replicas would keep a part of the optimizer's state"
        + (f": {size(held / replicas)} a rank instead of {size(held)}" if held else "")
        + ". The result is the same; updated shards are sent between replicas once a step.",
    )
