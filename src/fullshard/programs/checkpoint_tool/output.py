"""What the user sees: tables on a terminal, or lines with the same columns in a pipe or a file."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from fullshard.checkpoint.dcp import EXTRA
from fullshard.checkpoint.differences import Differences
from fullshard.checkpoint.source import MODEL, OPTIMIZER, TensorInfo
from fullshard.errors import size_text
from fullshard.programs.checkpoint_tool.verification import Report
from fullshard.programs.console.broken_pipe_safe import broken_pipe_safe
from fullshard.programs.console.progress_line import showing_line
from fullshard.programs.console.safe_text import safe_line
from fullshard.programs.console.tables import (
    counted,
    print_error,
    print_facts,
    print_line,
    print_table,
)

QUIET_SECONDS = 1.0
"""Progress of a shorter task is not written to a log file."""
LONGEST_VALUE = 300
"""Characters of `extra` that are shown."""


@contextmanager
def progress(console: Console, verb: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how many bytes of ``total`` are done; yield a function to call with the bytes of each step."""
    began = time.perf_counter()
    done = 0
    if not console.is_terminal:
        # Standard output is for the reader of the pipe.
        console = Console(file=broken_pipe_safe(sys.stderr), highlight=False)
    with showing_line(console) as line:
        line.begin(total, 0, verb, ())

        def advance(nbytes: int) -> None:
            nonlocal done
            done = min(done + nbytes, total)  # more than all, if tied tensors are read twice
            seconds = time.perf_counter() - began
            if console.is_terminal or seconds > QUIET_SECONDS:
                status = f"{size_text(done)} of {size_text(total)}", rate(done, seconds)
                line.show(done, verb, status)

        yield advance


# --- inspect -----------------------------------------------------------------------------------------------


def print_json(found: Mapping[str, Any]) -> None:
    """Print the contents for a program."""
    print(json.dumps(found, indent=2))


def print_contents(console: Console, found: Mapping[str, Any]) -> None:
    """Print the contents for people."""
    print_facts(console, [("Checkpoint", found["path"]), *_facts(found)])
    for title, prefix in (("model", MODEL), ("optimizer", OPTIMIZER), ("extra", EXTRA)):
        tensors = {key: each for key, each in found["tensors"].items() if key.startswith(prefix)}
        rows = [
            (
                key.removeprefix(prefix),
                each["dtype"],
                shape_text(each["shape"]),
                size_text(each["bytes"]),
                str(each["pieces"]),
            )
            for key, each in tensors.items()
        ]
        if rows:
            print_table(console, [title, "dtype", "shape", "size", "pieces"], rows, num_texts=3)
    for key, each in found["tensors"].items():
        if "places" in each:
            print_line(console, f"\n{safe_line(key)}")
            for piece in each["places"]:
                line = "  ".join(["", piece["file"], *place_texts(piece)])
                print_line(console, safe_line(line))


def _facts(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "Format", found["format"]
    if found["written"] is not None:
        written = found["written"]
        yield (
            "Written",
            f"{written['created']} by {counted(written['world'], 'rank')}, fullshard {written['fullshard']}, torch {written['torch']}",
        )
    yield "Files", f"{len(found['files']):,}, {size_text(sum(found['files'].values()))}"
    yield "Model", totals_text(found["model"])
    if found["optimizer"] is not None:
        groups = found["optimizer"]["groups"]
        sizes = ", ".join(f"{group['params']:,}" for group in groups)
        kind = found["optimizer"]["class"]
        yield (
            "Optimizer",
            ("" if kind is None else f"{kind}, ")
            + f"{totals_text(found['optimizer'])}; {counted(len(groups), 'group')} of {sizes} parameters",
        )
    if found["tied"]:
        yield "Tied", ", ".join(f"{name} = {stored}" for name, stored in found["tied"].items())
    if found["extra"] is not None:
        yield "Extra", shortened(json.dumps(found["extra"]))


def totals_text(totals: Mapping[str, int]) -> str:
    """Return the number and size of tensors in words."""
    tensors = counted(totals["tensors"], "tensor")
    return f"{totals['elements']:,} elements in {tensors}, {size_text(totals['bytes'])}"


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape in words."""
    return " x ".join(map(str, shape)) if shape else "scalar"


def place_texts(piece: Mapping[str, Any]) -> Iterator[str]:
    """Yield the bytes of a piece, if they are known, and its block of the tensor, as an index."""
    if piece["offset"] is not None:
        yield f"{piece['offset']:,} to {piece['offset'] + piece['nbytes']:,}"
    spans = [f"{a}:{a + n}" for a, n in zip(piece["start"], piece["shape"], strict=True)]
    yield f"[{', '.join(spans)}]"


def shortened(text: str) -> str:
    """Return a text, cut after `LONGEST_VALUE` characters."""
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


# --- verify, convert, diff ---------------------------------------------------------------------------------


def print_report(console: Console, report: Report) -> None:
    """Print the result of `verify`."""
    for fault in report.faults:
        print_error(fault)
    amount = f"{size_text(report.nbytes)} in {counted(report.tensors, 'tensor')}"
    speed = f"{report.seconds:.3g} s, {rate(report.nbytes, report.seconds)}"
    if report.faults:
        print_error(f"Damaged: {counted(len(report.faults), 'fault')} in {amount} ({speed}).")
    elif report.has_checksums:
        print_line(console, f"All is well: {amount}, as they were written ({speed}).")
    else:
        text = f"All can be read: {amount} ({speed}). The format has no checksums to compare with."
        print_line(console, text)


def print_written(console: Console, target: Path, seconds: float) -> None:
    """Print what was converted, and the size of its files."""
    files = [target] if target.is_file() else [file for file in target.rglob("*") if file.is_file()]
    nbytes = sum(file.stat().st_size for file in files)
    amount = f"{size_text(nbytes)} in {seconds:.3g} s, {rate(nbytes, seconds)}"
    print_line(console, f"Wrote {target} ({amount}).")


def print_weights_only(console: Console, source: Path) -> None:
    """Print that a Hugging Face folder has no configuration, and what writes one."""
    print_line(
        console,
        "It has weights only, under the names of the checkpoint. A folder that transformers loads: "
        f"fullshard export {source} --config-from FOLDER --to FOLDER",
    )


def rate(nbytes: int, seconds: float) -> str:
    """Return bytes per second in words."""
    return f"{size_text(int(nbytes / max(seconds, 1e-9)))}/s"


def print_differences(console: Console, found: Differences) -> None:
    """Print how two checkpoints differ."""
    for label, keys in (("first", found.only_first), ("second", found.only_second)):
        for key in keys:
            print_line(console, safe_line(f"{key}: only in the {label}"))
    for key, each in found.tensors.items():
        if each.first != each.second:
            kinds = f"{_kind(each.first)} and {_kind(each.second)}"
            print_line(console, safe_line(f"{key}: {kinds}"))
    for line in _alike_together(found.values):
        print_line(console, safe_line(line))
    rows = [
        (
            key,
            f"{each.differing:,}",
            f"{each.differing / math.prod(each.first.shape):.1%}",
            f"{each.largest_absolute:.3g}",
            f"{each.largest_relative:.3g}",
        )
        for key, each in found.tensors.items()
        if each.differing and each.first.shape == each.second.shape
    ]
    if rows:
        columns = ["tensor", "differing", "share", "absolute", "relative"]
        print_table(console, columns, rows, num_texts=1)
        print_line(console, "")
    equal = found.compared - len(found.tensors)
    print_line(
        console,
        f"Different: {equal:,} of {counted(found.compared, 'tensor')} in both are equal; "
        f"{len(found.only_first):,} are only in the first, {len(found.only_second):,} only in the "
        f"second; {counted(len(found.values), 'other value')} differ."
        if found
        else f"Equal: {counted(found.compared, 'tensor')} and all else.",
    )


def _alike_together(lines: Sequence[str]) -> Iterator[str]:
    """Yield one line for equal differences of many parameters, such as their step counts."""
    alike: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        path, _, text = line.partition(": ")
        alike.setdefault((path.rpartition(".")[2], text), []).append(path)
    for (_, text), paths in alike.items():
        others = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
        yield f"{paths[0]}{others}: {text}"


def _kind(info: TensorInfo) -> str:
    return f"{str(info.dtype).removeprefix('torch.')} {shape_text(info.shape)}"
