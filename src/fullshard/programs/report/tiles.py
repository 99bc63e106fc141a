"""The numbers at the top of the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from statistics import median

from fullshard.programs.report.analysis import Analysis
from fullshard.programs.report.peak_flops import FLOPS_PER_PARAMETER, peak_flops
from fullshard.programs.report.run_files import Metrics, Run
from fullshard.programs.report.units import count, duration, loss_value, share, size
from fullshard.programs.run_events import Start


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """A number at the top of the page."""

    label: str
    value: str
    note: str = ""


def tiles_of(analysis: Analysis) -> Iterator[Tile]:
    """Yield the tiles: of the training run, then of the recorded steps."""
    run = analysis.run
    yield from _loss(run.metrics)
    yield from _speed(run)
    yield from _memory(analysis)
    yield from _optimizer(run)
    yield from _recorded_steps(analysis)


def _loss(metrics: Metrics) -> Iterator[Tile]:
    if not metrics.steps:
        return
    last = metrics.steps[-1]
    notes = [f"step {last.step}"]
    finite = [step for step in metrics.steps if isfinite(step.loss)]
    if not isfinite(last.loss) and finite:
        notes.append(f"last finite {finite[-1].loss:.3f} at step {finite[-1].step}")
    if metrics.evaluations:
        held_out = metrics.evaluations[-1]
        notes.append(f"held-out {loss_value(held_out.loss, digits=3)} at step {held_out.step}")
    yield Tile(label="Loss", value=loss_value(last.loss, digits=3), note="; ".join(notes))


def _speed(run: Run) -> Iterator[Tile]:
    """Yield speed, time left and MFU, all of the newest start: an earlier one may have had other ranks."""
    start, steps = run.metrics.newest
    times = [step.step_s for step in steps if step.step_s > 0]
    if not times:
        return
    middle = median(times)
    per_step = start.tokens_per_step if start else 0
    yield Tile(
        label="Speed",
        value=f"{count(per_step / middle)} tokens/s" if per_step else duration(1e6 * middle),
        note=f"median step {duration(1e6 * middle)}" if per_step else "median step",
    )
    if start is None:
        return
    left = start.steps - steps[-1].step
    if left > 0 and not run.metrics.is_finished:
        yield Tile(
            label="Time left",
            value=duration(1e6 * middle * left),
            note=f"{left} of {start.steps} steps, {duration(1e6 * middle)} each; evaluations and checkpoints not counted",
        )
    if per_step and start.parameters:
        yield from _utilisation(start, middle, str(run.setting("compute", "precision") or ""))


def _utilisation(start: Start, step_s: float, precision: str) -> Iterator[Tile]:
    """Yield the tile, if the device's peak is known."""
    flops = FLOPS_PER_PARAMETER * start.parameters * start.tokens_per_step / step_s
    each = flops / max(1, start.world)
    assumed = f"{FLOPS_PER_PARAMETER} FLOPs per parameter and token"
    peak = peak_flops(start.device_name, precision)
    if peak is None:
        return
    yield Tile(
        label="MFU",
        value=share(each / peak),
        note=f"{_flops(each)} of {_flops(peak)} a rank: {assumed}; peak of {start.device_name} in {precision}, "
        "data sheet, dense",
    )


def _flops(number: float) -> str:
    units = ("FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s")
    for unit in units[:-1]:
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} {units[-1]}"


def _memory(analysis: Analysis) -> Iterator[Tile]:
    start, steps = analysis.run.metrics.newest
    peak = max((step.memory_bytes for step in steps), default=0)
    if peak > 0:
        what = "resident" if start is None or start.device == "cpu" else "allocated"
        note = f"{what}, of rank 0"
        if start is not None and 0 < start.baseline_bytes < peak:
            base, own = size(start.baseline_bytes), size(peak - start.baseline_bytes)
            note += f": {base} by Python, torch and the data before the model was made, {own} since"
        yield Tile(label="Peak memory", value=size(peak), note=note)
        return
    allocated = [
        (sample.allocated, step.rank)
        for step in analysis.steps
        for sample in step.memory
        if sample.allocated is not None
    ]
    if allocated:
        most, rank = max(allocated)
        yield Tile(
            label="Peak memory",
            value=size(most),
            note=f"allocated, of rank {rank}, where the recorded steps were sampled",
        )


def _optimizer(run: Run) -> Iterator[Tile]:
    """Yield the optimizer's share of the step and its memory, if the run has measured them."""
    _, steps = run.metrics.newest
    measured = [step for step in steps if step.step_s > 0 and 0 < step.optimizer_s]
    held = max((step.optimizer_bytes for step in steps), default=0)
    if not measured or held < 0:
        return
    taken = median(step.optimizer_s for step in measured)
    part = median(step.optimizer_s / step.step_s for step in measured)
    state = f"{size(held)} of state on rank 0" if held else "no state"
    yield Tile(
        label="Optimizer",
        value=f"{share(part)} of the step",
        note=f"{run.setting('optimizer', 'name') or 'its step'}: {duration(1e6 * taken)}, {state}",
    )


def _recorded_steps(analysis: Analysis) -> Iterator[Tile]:
    if not analysis.steps:
        return
    waited = analysis.exposed_share * analysis.step_us
    yield Tile(
        label="Exposed communication",
        value=share(analysis.exposed_share),
        note=f"{duration(waited)} of {duration(analysis.step_us)} a step",
    )
    peak, whole = analysis.gathered_peak, analysis.gathered_bytes
    if peak and whole:
        yield Tile(
            label="Gathered at once",
            value=share(peak / whole),
            note=f"{size(peak)} of {size(whole)} of parameters",
        )
