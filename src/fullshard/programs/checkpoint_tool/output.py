"""Output for the user: tables on a terminal, or lines with the same columns in a pipe or a file."""

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

from fullshard.checkpoint.source import MODEL, OPTIMIZER, TensorInfo
from fullshard.checkpoint.sources.dcp import EXTRA
from fullshard.checkpoint.sources.differences import Differences
from fullshard.errors import size_text
from fullshard.programs.checkpoint_tool.verification import Report
from fullshard.programs.console.broken_pipe_safe import broken_pipe_safe
from fullshard.programs.console.progress_line import showing_line
from fullshard.programs.console.safe_text import safe_line
from fullshard.programs.console.tables import (
    counted,
    print_error,
    print_facts,
    print_first_rows,
    print_line,
    print_more,
    print_prose,
)

QUIET_SECONDS = 1.0
"""Progress of a shorter task is not written to a log file."""
MOST_NAMES = 5
"""Tensors or faults that are listed without `--all`."""
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


def _most(list_all: bool) -> int | None:
    """Return how many names are listed; None for all."""
    return None if list_all else MOST_NAMES


# --- inspect -----------------------------------------------------------------------------------------------


def print_json(found: Mapping[str, Any]) -> None:
    """Print the contents for a program."""
    print(json.dumps(found, indent=2))


def print_contents(console: Console, found: Mapping[str, Any], *, list_all: bool = False) -> None:
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
            columns = [title, "dtype", "shape", "size", "pieces"]
            print_first_rows(console, columns, rows, num_texts=3, most=_most(list_all))
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
        if written["base"] is not None:
            yield "Base", f"{written['base']} has the frozen parameters, which are left out here"
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
        if found["optimizer"]["ema_updates"] is not None:
            yield (
                "Averages",
                f"EMA of the parameters, {found['optimizer']['ema_updates']:,} updates",
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


def print_report(console: Console, path: Path, report: Report, *, list_all: bool = False) -> None:
    """Print the result of `verify`, the verdict first."""
    amount = f"{size_text(report.nbytes)} in {counted(report.tensors, 'tensor')}"
    speed = f"{report.seconds:.3g} s, {rate(report.nbytes, report.seconds)}"
    was_read = f"{path} was read in {speed}."
    if report.faults:
        most = _most(list_all)
        print_error(f"Damaged: {counted(len(report.faults), 'fault')} in {amount}.\n{was_read}")
        for fault in report.faults[:most]:
            print_error(fault)
        print_more(Console(file=broken_pipe_safe(sys.stderr)), report.faults, most)
    elif report.has_checksums:
        print_prose(console, f"All is well: {amount}, as they were written.\n{was_read}")
    else:
        text = "The format has no checksums to compare with."
        print_prose(console, f"All can be read: {amount}. {text}\n{was_read}")


def print_written(console: Console, target: Path, seconds: float) -> None:
    """Print the path that was written, and the size of its files."""
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


def print_differences(
    console: Console, paths: tuple[Path, Path], found: Differences, *, list_all: bool = False
) -> None:
    """Print how two checkpoints differ, the verdict first."""
    if not found:
        print_line(console, f"Equal: {counted(found.compared, 'tensor')} and all else.")
    else:
        print_prose(console, f"Different: {_difference_counts(found)}.")
    print_facts(console, [("first", str(paths[0])), ("second", str(paths[1]))])
    most = _most(list_all)
    for lines in _groups_of_lines(found):
        print_line(console, "")
        for line in lines[:most]:
            print_prose(console, safe_line(line))
        print_more(console, lines, most)
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
        print_first_rows(console, columns, rows, num_texts=1, most=most)


def _difference_counts(found: Differences) -> str:
    """Return how many tensors and values are equal and different."""
    parts = [
        f"{found.compared - len(found.tensors):,} of {counted(found.compared, 'tensor')} in both are equal"
    ]
    for count, text in (
        (len(found.only_first), "only in the first"),
        (len(found.only_second), "only in the second"),
    ):
        if count:
            parts.append(f"{counted(count, 'tensor')} {text}")
    if found.values:
        differ = "differs" if len(found.values) == 1 else "differ"
        parts.append(f"{counted(len(found.values), 'other value')} {differ}")
    return "; ".join(parts)


def _groups_of_lines(found: Differences) -> Iterator[list[str]]:
    """Yield lines about what cannot be compared, one list for each kind."""
    others = [
        f"{key}: {_kind(each.first)} and {_kind(each.second)}"
        for key, each in found.tensors.items()
        if each.first != each.second
    ]
    for lines in (
        [f"{key}: only in the first" for key in found.only_first],
        [f"{key}: only in the second" for key in found.only_second],
        others,
        [*_alike_together(found.values)],
    ):
        if lines:
            yield lines


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
