"""A profile of the machine on which this runs: `fullshard plan calibrate`.

    measure     products, attention, copies, steps of small models, host memory and the link to it; collectives, if torchrun has
                started several ranks
    fit         the few numbers of a profile that explain the measurements; all others stay those of the nearest
                shipped profile, and say so

`calibrate_from_trace` corrects a profile by a recorded trace of a real run, which nothing measured by itself can replace:
power limits, a slow host and contention are in it.
"""

from __future__ import annotations

import datetime
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fullshard.errors import ConfigurationError
from fullshard.programs.plan_tool.device_steps import device_factor
from fullshard.programs.plan_tool.host_measurements import HostRates, measure_host
from fullshard.programs.plan_tool.host_steps import SCALED, SmallSteps, fitted_host
from fullshard.programs.plan_tool.machine import GIB, GIGA, MIB, MICRO, MILLI, TERA, Machine
from fullshard.programs.plan_tool.measurements import (
    CALIBRATION,
    Bench,
    Timed,
    TimedCollective,
    local_ranks,
)
from fullshard.programs.plan_tool.profile_file import known_profiles, load_profile
from fullshard.programs.plan_tool.program import Collective
from fullshard.programs.plan_tool.validation import MEASURED_HERE
from fullshard.tracing.schema import Kind, Trace
from fullshard.transport.collectives import value_of_first_rank

Report = Callable[[str], None]

SECONDS_EACH = 0.25
QUICK_SECONDS_EACH = 0.01

AHEAD = 0.02
"""A host that is ahead of its device by less than this share of a step may be what the device waits for."""

PRODUCTS = ((8192, 8192, 8192), (4096, 14336, 4096), (8192, 4096, 4096), (2048, 2048, 2048))
HEADS = ((32, 2048, 128), (32, 8192, 128))
COPIES = (64, 256, 1024)
"""MiB."""
GATHERS = (1, 8, 32, 128, 512, 1024)
"""MiB in all."""
HOST_COPY = 256
"""MiB of a copy from and to host memory, and of the parameters that are updated there: more than the caches of a CPU hold."""


def calibrate(
    device: torch.device,
    host: SmallSteps,
    *,
    base: str | None = None,
    quick: bool = False,
    report: Report = lambda text: None,
) -> Machine:
    """Measure a GPU and its host, and return their profile. Takes less than a minute; less if `quick`.

    Under torchrun all ranks must call this. All of them get the same profile.

    Args:
        device: The GPU.
        host: The result of `measure_steps`, from before there was a process group.
        base: The profile for everything that is not measured. By default the one of the same GPU.
        quick: Measure for a shorter time.
        report: Is given a line for each thing that is measured.
    """
    start = load_profile(base or nearest_profile(device))
    bench = Bench(device, seconds_each=QUICK_SECONDS_EACH if quick else SECONDS_EACH)
    fit = _Fit(start, torch.cuda.get_device_name(device), report)
    fit.capacity(torch.cuda.get_device_properties(device).total_memory)
    for dtype in (torch.bfloat16, torch.float32):
        fit.products(bench.products(PRODUCTS, dtype))
    fit.attention(*bench.attention(HEADS, torch.bfloat16))
    fit.copies(bench.copies(COPIES))
    fit.floor(bench.shortest_kernel_seconds())
    fit.steps(host)
    _measure_host_memory(fit, bench)
    if dist.is_initialized() and dist.get_world_size() > 1:
        _measure_collectives(fit, bench)
    else:
        report("collectives: not measured; start this with torchrun to measure them")
    return _of_first_rank(fit.machine)


def _measure_host_memory(fit: _Fit, bench: Bench) -> None:
    """Measure the needs of steps with offload; all ranks do at the same time."""
    seconds_of, ranks = bench.seconds_of, 1
    whole = dist.group.WORLD
    if dist.is_initialized() and whole is not None and whole.size() > 1:
        seconds_of, ranks = partial(bench.seconds_together, group=whole), local_ranks()
    fit.offload(measure_host(bench.device, seconds_of, ranks=ranks, mebibytes=HOST_COPY))


def nearest_profile(device: torch.device) -> str:
    """Return the name of the shipped profile for a GPU; ConfigurationError if there is none."""
    name = torch.cuda.get_device_name(device).lower()
    gib = torch.cuda.get_device_properties(device).total_memory / GIB
    fitting = [
        machine
        for machine in {path: load_profile(path) for path in known_profiles().values()}.values()
        if machine.name.split("-")[0] in name
    ]
    if not fitting:
        raise ConfigurationError(
            f"There is no shipped profile for {torch.cuda.get_device_name(device)}, and what cannot be measured must "
            f"come from one. Name the most similar one."
        )
    return min(fitting, key=lambda machine: abs(machine.memory.capacity_gib - gib)).name


def _measure_collectives(fit: _Fit, bench: Bench) -> None:
    world, local = dist.get_world_size(), local_ranks()
    first = dist.get_rank() // local * local
    # All ranks make all groups, in the same order.
    groups = [dist.new_group(list(range(host, host + local))) for host in range(0, world, local)]
    host_group = groups[first // local]
    if local > 1:
        gathers = bench.collectives("all_gather", GATHERS, host_group)
        large = GATHERS[-2:]
        scatters = bench.collectives("reduce_scatter", large, host_group)
        fit.links(gathers, scatters, bench.collectives("all_reduce", large, host_group))
    if world > local:
        whole = dist.group.WORLD
        assert whole is not None
        fit.network(bench.collectives("all_gather", [GATHERS[0], GATHERS[-1]], whole))


def _of_first_rank(machine: Machine) -> Machine:
    """Return the first rank's profile on all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return machine
    whole = dist.group.WORLD
    assert whole is not None
    return value_of_first_rank(machine, whole, CALIBRATION)


# --- fitting ---------------------------------------------------------------------------------------------


class _Fit:
    """A profile, of which measured values replace those it began with."""

    def __init__(self, start: Machine, gpu: str, report: Report) -> None:
        today = datetime.date.today().isoformat()
        self._measured = f"measured on {gpu}, {today}, torch {torch.__version__}"
        self._report = report
        untouched = {
            key: source if source.startswith("profile") else f"profile {start.name}: {source}"
            for key, source in start.sources.items()
        }
        self.machine = replace(
            start,
            name=MEASURED_HERE,
            title=f"{start.title}, as measured",
            aliases=(),
            sources=untouched,
        )

    def _put(self, section: str, *, band: float | None = None, **values: Any) -> None:
        machine = self.machine
        facts = replace(getattr(machine, section), **values)
        sources = {f"{section}.{name}": self._measured for name in values}
        bands = machine.bands if band is None else {**machine.bands, section: round(band, 3)}
        self.machine = replace(
            machine,
            **{section: facts},
            sources={**machine.sources, **sources},
            bands=bands,
        )

    def capacity(self, nbytes: int) -> None:
        """Set the memory of the device."""
        self._put("memory", capacity_gib=nbytes / GIB)

    def products(self, timed: Sequence[Timed]) -> None:
        """Set the efficiency of a dtype, with which half of the products are predicted too fast and half too slow."""
        facts, dtype = self.machine.matmul, timed[0].work.dtype
        best = max(each.work.flops / each.seconds for each in timed) / TERA
        peaks = {**facts.peak_tflops, dtype: max(best, facts.peak_tflops[dtype])}
        self._put("matmul", peak_tflops=peaks, efficiency={**facts.efficiency, dtype: 1.0})
        ratios = self._ratios(timed)
        efficiency = min(1.0, statistics.median(ratios))
        efficiencies = {**facts.efficiency, dtype: efficiency}
        self._put("matmul", efficiency=efficiencies, band=_spread(ratios))
        self._report(f"matrix products, {dtype}: up to {best:.4g} TFLOPS")

    def attention(self, forward: Sequence[Timed], backward: Sequence[Timed]) -> None:
        """Set the shares of attention."""
        for name, timed in (("forward", forward), ("backward", backward)):
            self._put("attention", **{name: 1.0})
            ratios = self._ratios(timed)
            share = min(1.0, statistics.median(ratios))
            self._put("attention", band=_spread(ratios), **{name: share})
            rate = max(each.work.flops / each.seconds for each in timed) / TERA
            self._report(f"attention, {name}: up to {rate:.4g} TFLOPS")

    def _ratios(self, timed: Sequence[Timed]) -> list[float]:
        return [self.machine.kernel_seconds(each.work) / each.seconds for each in timed]

    def copies(self, timed: Sequence[Timed]) -> None:
        """Set the bandwidth of memory."""
        rates = [each.work.nbytes / each.seconds / TERA for each in timed]
        rate = statistics.median(rates)
        peak = max(rate, self.machine.traffic.peak_tb_s)
        self._put("traffic", peak_tb_s=peak, efficiency=rate / peak, band=_spread(rates))
        self._report(f"memory: {rate * 1e3:.4g} GB/s")

    def floor(self, seconds: float) -> None:
        """Set how fast small kernels follow each other."""
        self._put("traffic", floor_us=seconds / MICRO)

    def steps(self, measured: SmallSteps) -> None:
        """Set the host's times by steps that waited for nothing else, and how long kernels take in a step."""
        found = fitted_host(self.machine, measured)
        self._put("host", **found)
        self._report(f"host: {found['launch_us']:.3g} us for an operation of a model")
        if measured.busy_seconds is not None:
            machine = self.machine
            factor = device_factor(
                measured.busy_seconds, lambda each: _with_slower_kernels(machine, each, "")
            )
            self.machine = _with_slower_kernels(
                machine, factor, "in a step that keeps the GPU busy"
            )
            self._report(f"compute: kernels take {factor:.3g} of these times in a model")

    def offload(self, rates: HostRates) -> None:
        """Set the rates of copies and updates of host memory. Rates that several ranks measured have their sharing in them."""
        shared = {"devices_per_link": 1} if rates.ranks > 1 else {}
        self._put(
            "offload",
            memory_gib=rates.memory_gib,
            memory_gb_s=rates.update * rates.ranks / GIGA,
            cores=rates.cores,
            core_gb_s=rates.core / GIGA,
            norm_gb_s=rates.norm / GIGA,
            to_device_gb_s=rates.to_device / GIGA,
            to_host_gb_s=rates.to_host / GIGA,
            unpinned_gb_s=rates.unpinned / GIGA,
            latency_us=rates.latency / MICRO,
            **shared,
        )
        up, down = rates.to_device / GIGA, rates.to_host / GIGA
        self._report(f"host memory: {up:.3g} GB/s to the GPU, {down:.3g} GB/s back")

    def links(
        self,
        gathers: Sequence[TimedCollective],
        scatters: Sequence[TimedCollective],
        reduces: Sequence[TimedCollective],
    ) -> None:
        """Set the table of a host, and the relative times of other collectives of the largest sizes."""
        facts = self.machine.links
        ranks = gathers[0].work.ranks
        # The table is that of all devices of a host, of which a rank's own part is smaller.
        scale = (1 - 1 / max(2, facts.devices_per_host)) / (1 - 1 / ranks)
        rows: list[tuple[float, float]] = []
        for each in gathers:
            milliseconds = each.seconds / MILLI * scale
            rows.append((each.work.nbytes / MIB, max(milliseconds, rows[-1][1] if rows else 0.0)))
        last = gathers[-1].seconds
        self._put(
            "links",
            all_gather=tuple(rows),
            reduce_scatter=_relative(scatters, gathers),
            all_reduce=_relative(reduces, gathers),
        )
        self._report(
            f"all-gather of {rows[-1][0]:g} MiB among {ranks} ranks: {last / MILLI:.3g} ms"
        )

    def network(self, gathers: Sequence[TimedCollective]) -> None:
        """Set the least time of a collective between hosts, and the share of the bandwidth that a large one gets."""
        small, large = gathers
        hops = self.machine.collective_seconds(small.work) - self.machine.network.base_us * MICRO
        self._put("network", base_us=max(0.0, (small.seconds - hops) / MICRO))
        predicted = self.machine.collective_seconds(large.work)
        efficiency = min(1.0, self.machine.network.efficiency * predicted / large.seconds)
        self._put("network", efficiency=efficiency)
        self._report(f"all-gather between hosts: {large.seconds / MILLI:.3g} ms")


def _relative(others: Sequence[TimedCollective], gathers: Sequence[TimedCollective]) -> float:
    """Return the mean time of collectives, relative to the gathers of as many bytes, which are the last ones."""
    pairs = zip(others, gathers[-len(others) :], strict=True)
    return statistics.geometric_mean(other.seconds / gather.seconds for other, gather in pairs)


def _spread(ratios: Sequence[float]) -> float:
    """Return the largest deviation from the median, as a share of it."""
    middle = statistics.median(ratios)
    return max(abs(ratio / middle - 1) for ratio in ratios)


# --- by a trace ------------------------------------------------------------------------------------------


def calibrate_from_trace(
    machine: Machine, measured: Trace, predicted: Trace | None = None, *, report: Report = print
) -> Machine:
    """Return a profile that explains a recorded trace better.

    Args:
        machine: The profile to correct.
        measured: Recorded by a run.
        predicted: The trace of the same step as planned with `machine`. Without it only collectives are corrected.
        report: Is given a line for each correction.
    """
    machine = _correct_collectives(machine, measured, report)
    if predicted is None:
        return machine
    host = _ratio(_host_us(measured), _host_us(predicted))
    if host is not None:
        factors = {name: getattr(machine.host, name) * host for name in SCALED}
        machine = _corrected(machine, "host", factors, f"times {host:.3g} by a trace")
        report(f"host: {host:.3g} of the planned time")
    if _is_host_bound(measured):
        report("compute: not corrected; the device waited for the host")
        return machine
    compute = _compute_ratio(measured, predicted)
    if compute is None:
        report("compute: not corrected; the traces have no groups in common")
        return machine
    report(f"compute: {compute:.3g} of the planned time")
    return _with_slower_kernels(machine, compute, "by a trace")


def _with_slower_kernels(machine: Machine, factor: float, found: str) -> Machine:
    """Return a profile whose kernels take longer by a factor, as was found."""
    text = f"divided by {factor:.3g} {found}"
    shares = {name: min(1.0, value / factor) for name, value in machine.matmul.efficiency.items()}
    machine = _corrected(machine, "matmul", {"efficiency": shares}, text)
    heads = {
        name: min(1.0, getattr(machine.attention, name) / factor)
        for name in ("forward", "backward")
    }
    machine = _corrected(machine, "attention", heads, text)
    traffic = {"efficiency": min(1.0, machine.traffic.efficiency / factor)}
    return _corrected(machine, "traffic", traffic, text)


def _corrected(machine: Machine, section: str, values: Mapping[str, Any], text: str) -> Machine:
    sources = dict(machine.sources)
    for name in values:
        sources[f"{section}.{name}"] += f"; {text}"
    facts = replace(getattr(machine, section), **values)
    return replace(machine, **{section: facts}, sources=sources)


def _correct_collectives(machine: Machine, trace: Trace, report: Report) -> Machine:
    """Scale links or network by how long gathers and reductions took. The fastest of each group waited the least for others."""
    groups = {group.name: group for group in trace.groups}
    fastest: dict[tuple[str, str], float] = {}
    for span in trace.spans:
        group = groups.get(span.group)
        if span.kind not in ("gather", "reduce") or group is None or group.world < 2:
            continue
        whole = int(span.nbytes * group.world / (group.world - 1))
        work = Collective(
            "all_gather" if span.kind == "gather" else "reduce_scatter",
            whole,
            group.world,
            1,
            "",
        )
        if whole and span.duration_us:
            ratio = span.duration_us * MICRO / machine.collective_seconds(work)
            key = span.kind, span.group
            fastest[key] = min(ratio, fastest.get(key, ratio))
    if not fastest:
        return machine
    ratio = statistics.median(fastest.values())
    report(f"collectives: {ratio:.3g} of the planned time")
    text = f"times {ratio:.3g} by a trace"
    if max(group.world for group in groups.values()) <= machine.links.devices_per_host:
        rows = tuple((size, time * ratio) for size, time in machine.links.all_gather)
        return _corrected(machine, "links", {"all_gather": rows}, text)
    values = {
        "efficiency": min(1.0, machine.network.efficiency / ratio),
        "base_us": machine.network.base_us * ratio,
    }
    return _corrected(machine, "network", values, text)


def _compute_ratio(measured: Trace, predicted: Trace) -> float | None:
    """Return measured to predicted seconds of compute, over the groups and phases that both have."""
    real, planned = (_sums(trace, "compute") for trace in (measured, predicted))
    common = real.keys() & planned.keys()
    return _ratio(sum(real[key] for key in common), sum(planned[key] for key in common))


def _sums(trace: Trace, kind: Kind) -> dict[tuple[str, str], float]:
    """Return microseconds per step, by group and phase: the median of the steps."""
    found: dict[tuple[str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in trace.spans:
        if span.kind == kind:
            found[span.group, span.phase][span.step] += span.duration_us
    return {key: statistics.median(steps.values()) for key, steps in found.items()}


def _host_us(trace: Trace) -> float | None:
    """Return the microseconds in which the host issues a step's collectives, the median of the steps."""
    issued: dict[int, list[float]] = defaultdict(list)
    for span in trace.spans:
        if span.issued_us is not None:
            issued[span.step].append(span.issued_us)
    lengths = [max(times) - min(times) for times in issued.values() if len(times) > 1]
    return statistics.median(lengths) if lengths else None


def _is_host_bound(trace: Trace) -> bool:
    """Say whether reductions begin as soon as they are issued. Otherwise the device has still been busy."""
    steps = [span.duration_us for span in trace.spans if span.kind == "step"]
    ahead = [
        span.start_us - span.issued_us
        for span in trace.spans
        if span.kind == "reduce" and span.issued_us is not None
    ]
    if not steps or not ahead:
        return False
    return statistics.median(ahead) < AHEAD * statistics.median(steps)


def _ratio(real: float | None, planned: float | None) -> float | None:
    return real / planned if real and planned else None
