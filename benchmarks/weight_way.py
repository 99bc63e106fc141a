"""The way of one weight through one step: every function of fullshard that the host enters for it.

    python -m benchmarks.weight_way            the calls of the third step, one below the other, then the figures
    python -m benchmarks.weight_way --hops     the files in the order in which control comes to them

One `nn.Linear` in a group of its own, below a root without parameters; 8 ranks that do not exist (`fake`), on the CPU. A change of
file is a call into, or a return to, another file of the package than the one before. Fewer changes and fewer lines are a step
that is read without turning pages. docs/design.md tells the way in words, and `tests/test_house.py` compares.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard

SOURCE = Path(fullshard.__file__).parent
WORLD, FEATURES, STEPS_BEFORE = 8, 64, 2


@dataclass(frozen=True)
class Entered:
    """A call of a function of the package."""

    depth: int
    """Functions of the package around it."""
    file: str
    function: str


@dataclass
class Way:
    """The calls of one step, in order, and its figures."""

    calls: list[Entered] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """Files in the order in which control comes to them: by calls and by returns."""
    frames: dict[str, int] = field(default_factory=dict)
    """The most functions of the package between torch and the backend: of a gather, and of a reduction."""

    @property
    def changes(self) -> int:
        """Changes of file."""
        return len(self.files) - 1

    @property
    def lines(self) -> int:
        """Lines of all files that the step touches."""
        return sum(len((SOURCE / name).read_text().splitlines()) for name in {*self.files})

    def figures(self) -> dict[str, int]:
        """Return what a reader has to hold in mind."""
        return {
            "changes of file": self.changes,
            "files": len({*self.files}),
            "lines of these files": self.lines,
            "frames of a gather": self.frames.get("gather", 0),
            "frames of a reduction": self.frames.get("reduce", 0),
        }


def file_of(frame: FrameType) -> str | None:
    """Return the file of a frame, relative to the package; None for a frame of another package."""
    path = Path(frame.f_code.co_filename)
    return path.relative_to(SOURCE).as_posix() if path.is_relative_to(SOURCE) else None


def frames_around(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the package around and including ``frame``, up to the module's call."""
    any_found = False
    while frame is not None:
        if file_of(frame) is not None:
            any_found = True
            yield frame
        elif any_found and "torch/nn/modules" in frame.f_code.co_filename:
            return
        frame = frame.f_back


@contextmanager
def recorded(way: Way) -> Iterator[None]:
    """Record what the host enters within the block, on any thread."""

    def come_to(name: str | None) -> None:
        if name is not None and (not way.files or way.files[-1] != name):
            way.files.append(name)

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            name = file_of(frame)
            if name is not None:
                depth = sum(1 for _ in frames_around(frame)) - 1
                way.calls.append(Entered(depth, name, frame.f_code.co_name))
            come_to(name)
        elif event == "return":
            come_to(next((file_of(each) for each in frames_around(frame.f_back)), None))
        elif event == "c_call":
            called = getattr(argument, "__name__", "")
            kind = (
                "gather" if "gather" in called else "reduce" if "reduce_scatter" in called else ""
            )
            if kind:
                frames = sum(1 for _ in frames_around(frame))
                way.frames[kind] = max(frames, way.frames.get(kind, 0))

    sys.setprofile(profile)
    threading.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def way_of_a_weight(shard: Callable[..., Any] = fullshard.fully_shard) -> tuple[Way, Way]:
    """Return the way through a forward and through a backward; of the third step, which is as all later ones."""
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES))
    shard(model[0], reshard_after_forward=True)
    shard(model, reshard_after_forward=True)
    x = torch.randn(4, FEATURES)
    for _ in range(STEPS_BEFORE):
        model(x).sum().backward()
        model.zero_grad()
    forward, backward = Way(), Way()
    with recorded(forward):
        loss = model(x).sum()
    with recorded(backward):
        loss.backward()
    return forward, backward


def both(forward: Way, backward: Way) -> dict[str, int]:
    """Return the figures of the whole step."""
    whole = Way(
        files=[*forward.files, *backward.files], frames={**forward.frames, **backward.frames}
    )
    figures = whole.figures()
    figures["changes of file"] = forward.changes + backward.changes
    figures["frames of a gather"] = max(way.frames.get("gather", 0) for way in (forward, backward))
    return figures


def main() -> None:
    """Print the way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hops", action="store_true", help="files only")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args()
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    ways = way_of_a_weight()
    if options.json:
        calls = [[[call.file, call.function] for call in way.calls] for way in ways]
        print(json.dumps({"calls": calls, "figures": both(*ways)}))
        return
    for name, way in zip(("forward", "backward"), ways, strict=True):
        print(f"--- {name}")
        if options.hops:
            print(" > ".join(way.files))
        else:
            for call in way.calls:
                print(f"{'    ' * call.depth}{call.function}    {call.file}")
    for name, figure in both(*ways).items():
        print(f"{figure:6,} {name}")


if __name__ == "__main__":
    main()
