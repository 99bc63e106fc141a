"""What is printed and written: where and when it was measured, one table per model, all samples.

Ratios are taken between medians of the same comparison. The table is markdown, made to be
copied into a page.
"""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.contestants import RIVALS, Setting
from benchmarks.estimate import Spread
from benchmarks.measure import PLAIN_SHARDS, Effort, Quantity, Record

__all__ = [
    "Case",
    "Summary",
    "as_json",
    "commit_of",
    "header",
    "headline",
    "markdown",
    "milliseconds",
    "number",
    "remarks",
    "summarise",
    "table",
    "write_json",
]

OUTPUT_OPTIONS = ("--json", "--profile", "--commit")
"""Options with one value that do not change the figures; left out of the printed command line."""

GIB = 1 << 30
LEFT_BEHIND_BYTES = 1 << 20
"""Memory left after deletion that is worth a remark."""

UNJOINED_S = 2e-4
"""By how much a step may keep the device busy beyond 1.05 times its device time, unremarked."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment that changes reserved memory; printed with the command line."""

COLUMNS = (
    "contestant",
    "fwd+bwd ms",
    "x unsharded",
    "x rival",
    "host ms",
    "extra host ms",
    "extra / rival's",
    "extra per group us",
    "optimizer ms",
    "x plain",
    "peak alloc GiB",
    "peak reserved GiB",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One comparison by name: the model, how it is run and how often it is measured."""

    preset: str
    num_parameters: int
    setting: Setting
    effort: Effort


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One row of the table; None where nothing was measured or there is nothing to divide by."""

    forward_backward_s: Spread | None
    over_unsharded: float | None
    over_rival: float | None
    host_s: Spread | None
    extra_host_s: float | None
    extra_host_over_rival: float | None
    extra_host_per_group_s: float | None
    optimizer_s: Spread | None
    optimizer_over_plain: float | None
    peak_allocated_bytes: int | None
    peak_allocated_over_rival: float | None
    peak_reserved_bytes: int | None
    peak_reserved_over_rival: float | None


def over(value: float | None, reference: float | None) -> float | None:
    """Divide where both exist and the reference is positive."""
    return None if value is None or reference is None or reference <= 0 else value / reference


def summarise(records: Mapping[str, Record], num_groups: int) -> dict[str, Summary]:
    """Turn the samples of one comparison into rows."""

    def spread(name: str, quantity: Quantity) -> Spread | None:
        record = records.get(name)
        if record is None or record.status != "measured":
            return None
        return Spread.of(record.samples.get(quantity, []))

    def median(name: str, quantity: Quantity) -> float | None:
        found = spread(name, quantity)
        return None if found is None else found.median

    def extra_host(name: str) -> float | None:
        own, base = median(name, "host_s"), median("unsharded", "host_s")
        return None if own is None or base is None or name == "unsharded" else own - base

    def peak(name: str, field: str) -> int | None:
        record = records.get(name)
        if record is None or record.status != "measured" or record.memory is None:
            return None
        value: int = getattr(record.memory, field)
        return value

    rows = {}
    for name in records:
        rival = RIVALS.get(name, "fsdp2")
        step, extra = median(name, "forward_backward_s"), extra_host(name)
        allocated = peak(name, "peak_allocated_bytes")
        reserved = peak(name, "peak_reserved_bytes")
        rows[name] = Summary(
            forward_backward_s=spread(name, "forward_backward_s"),
            over_unsharded=over(step, median("unsharded", "forward_backward_s")),
            over_rival=over(step, median(rival, "forward_backward_s")),
            host_s=spread(name, "host_s"),
            extra_host_s=extra,
            extra_host_over_rival=over(extra, extra_host(rival)),
            extra_host_per_group_s=over(extra, num_groups),
            optimizer_s=spread(name, "optimizer_s"),
            optimizer_over_plain=over(
                median(name, "optimizer_s"), median(PLAIN_SHARDS, "optimizer_s")
            ),
            peak_allocated_bytes=allocated,
            peak_allocated_over_rival=over(allocated, peak(rival, "peak_allocated_bytes")),
            peak_reserved_bytes=reserved,
            peak_reserved_over_rival=over(reserved, peak(rival, "peak_reserved_bytes")),
        )
    return rows


def number(value: float | None, digits: int, scale: float = 1.0) -> str:
    """Write a number, or n/a."""
    return "n/a" if value is None else f"{value * scale:.{digits}f}"


def milliseconds(spread: Spread | None) -> str:
    """Write a median with its interquartile range."""
    if spread is None:
        return "n/a"
    return f"{number(spread.median, 2, 1e3)} [{number(spread.iqr, 2, 1e3)}]"


def gibibytes(size: int | None, ratio: float | None) -> str:
    """Write a size with its ratio to the rival's."""
    if size is None:
        return "n/a"
    return number(size, 3, 1 / GIB) + ("" if ratio is None else f" ({ratio:.3f}x)")


def cells(name: str, row: Summary) -> tuple[str, ...]:
    """Write one row in the order of COLUMNS."""
    return (
        name,
        milliseconds(row.forward_backward_s),
        number(row.over_unsharded, 3),
        number(row.over_rival, 3),
        milliseconds(row.host_s),
        number(row.extra_host_s, 2, 1e3),
        number(row.extra_host_over_rival, 3),
        number(row.extra_host_per_group_s, 0, 1e6),
        milliseconds(row.optimizer_s),
        number(row.optimizer_over_plain, 2),
        gibibytes(row.peak_allocated_bytes, row.peak_allocated_over_rival),
        gibibytes(row.peak_reserved_bytes, row.peak_reserved_over_rival),
    )


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay a markdown table out so that it is readable as text, too."""
    rows = list(rows)
    widths = [max(len(line[i]) for line in (columns, *rows)) for i in range(len(columns))]

    def line(texts: Sequence[str]) -> str:
        padded = (
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(texts, widths, strict=True))
        )
        return "| " + " | ".join(padded) + " |"

    rule = ("-" * (width - 1) + "-:"[i > 0] for i, width in enumerate(widths))
    return "\n".join([line(columns), "| " + " | ".join(rule) + " |", *map(line, rows)])


def remarks(records: Iterable[Record]) -> list[str]:
    """Say who is missing and why, and what the columns do not show."""
    found = []
    for record in records:
        if record.status != "measured":
            found.append(f"- {record.name} {record.status}: {record.reason}")
            continue
        if record.memory is not None and record.memory.left_behind_bytes > LEFT_BEHIND_BYTES:
            left_mib = record.memory.left_behind_bytes / (1 << 20)
            found.append(f"- {record.name} left {left_mib:.1f} MiB allocated after its deletion")
        if record.timed_compilations:
            found.append(
                f"- {record.name} had {record.timed_compilations} frames compiled in timed steps: "
                "its times are too large, more --warmup may help"
            )
        step = Spread.of(record.samples.get("forward_backward_s", []))
        wall = Spread.of(record.samples.get("wall_s", []))
        if step and wall and wall.median > 1.05 * step.median + UNJOINED_S:
            found.append(
                f"- {record.name} keeps the device busy for {number(wall.median, 2, 1e3)} ms: "
                "some work is not joined to the current stream, so fwd+bwd is too small"
            )
    return found


def table(case: Case, records: Mapping[str, Record]) -> str:
    """Write the result of one comparison: what it was, the table, remarks."""
    setting, effort, shape = case.setting, case.effort, case.setting.shape
    summaries = summarise(records, shape.num_groups)
    rows = [cells(name, summaries[name]) for name in records if records[name].status == "measured"]
    parts = [
        f"**{case.preset}**: {case.num_parameters / 1e6:,.1f} M parameters, "
        f"{shape.layers} layers x {shape.width} wide, {shape.num_groups} groups, "
        f"vocabulary {shape.vocab}, batch {shape.batch} x {shape.context}, "
        f"world {setting.world}; {setting.described}. Medians [interquartile range] of "
        f"{effort.rounds} interleaved rounds x {effort.steps} steps"
        f"{', each turn built afresh' if effort.isolate else ''}.",
        markdown(COLUMNS, rows),
        "\n".join(remarks(records.values())),
    ]
    return "\n\n".join(part for part in parts if part)


def commit_of(folder: Path) -> str:
    """Name the commit checked out in `folder`, with a mark if files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ("git", "-C", str(folder), *arguments), capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        commit = git("rev-parse", "--short", "HEAD")
        return commit + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def hardware(device: torch.device) -> str:
    """Name what the figures were measured on."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    return f"CPU {processor}, {torch.get_num_threads()} thread(s)"


def command_line(script: str, arguments: Sequence[str]) -> str:
    """Write the command without the options that only say where output goes."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in OUTPUT_OPTIONS:
            skip = True
        elif not argument.startswith(tuple(f"{option}=" for option in OUTPUT_OPTIONS)):
            kept.append(argument)
    allocator = (f"{name}={os.environ[name]}" for name in ALLOCATOR_VARIABLES if name in os.environ)
    return shlex.join([*allocator, "python", f"benchmarks/{script}", *kept])


def header(
    script: str, device: torch.device, commit: str | None, arguments: Sequence[str] | None
) -> dict[str, str]:
    """Say when, on what and of which code the figures are.

    `commit` is asked of git, and `arguments` are the process's, unless they are given.
    """
    folder = Path(__file__).parent
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": hardware(device),
        "torch": str(torch.__version__),
        "commit": commit or commit_of(folder),
        "command": command_line(script, sys.argv[1:] if arguments is None else arguments),
    }


def headline(head: Mapping[str, str]) -> str:
    """Write a header in one line, to stand above tables."""
    return (
        f"{head['date']}, {head['hardware']}, torch {head['torch']}, commit {head['commit']}: "
        f"`{head['command']}`"
    )


def write_json(file: Path | None, head: Mapping[str, str], results: object) -> None:
    """Write results under their header, if a file is asked for."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"header": head, "results": results}, indent=1) + "\n")


def as_json(case: Case, records: Mapping[str, Record]) -> dict[str, Any]:
    """Collect everything about one comparison in plain values."""
    setting = case.setting
    summaries = summarise(records, setting.shape.num_groups)
    return {
        "preset": case.preset,
        "shape": asdict(setting.shape),
        "num_parameters": case.num_parameters,
        "num_groups": setting.shape.num_groups,
        "world": setting.world,
        "precision": setting.precision,
        "master": setting.master,
        "compiler": setting.compiler,
        "effort": asdict(case.effort),
        "contestants": {
            name: {**asdict(record), "summary": asdict(summaries[name])}
            for name, record in records.items()
        },
    }
