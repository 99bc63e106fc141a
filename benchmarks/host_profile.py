"""Where the host time of a step goes: samples of the processor's time, by function.

    python benchmarks/host_profile.py --preset 12x768                   # on a GPU
    python benchmarks/host_profile.py --preset tiny --contestant fsdp2  # on a CPU

A profiler that is told of every call slows calls down; this one looks in every few milliseconds of
processor time. Python gets to see a signal when it runs again, so native code counts for the line that
called it. Autograd's own work in backward counts as such: it is what ended when a hook was entered.
"""

import argparse
import gc
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contestants import BUILDERS, Contestant, Setting, build, join_fake_group
from benchmarks.measure import collector_paused
from benchmarks.report import commit_of, hardware, markdown
from benchmarks.transformer import PRESETS

SECONDS_BETWEEN = 0.001
LIBRARIES = ("/fullshard/", "/torch/distributed/")
AUTOGRAD = "autograd, between hooks"
MODEL = "the model's forward, and all else"


@dataclass
class Samples:
    """What was seen running."""

    own: Counter[str] = field(default_factory=Counter)
    """By function of the library, without those it calls in the library; or what is not the library."""
    whole: Counter[str] = field(default_factory=Counter)
    """By function of the library, with all it calls."""
    counting: bool = True

    def take(self, frame: FrameType | None) -> None:
        """Note what runs now, if it counts."""
        if not self.counting:
            return
        callers = list(_frames(frame))
        known = [each for each in callers if any(part in _file(each) for part in LIBRARIES)]
        if not known:
            self.own[MODEL] += 1
        elif _is_entered_by_autograd(callers):
            self.own[AUTOGRAD] += 1
        else:
            self.own[_name(known[0])] += 1
            self.whole.update({_name(each) for each in known})

    @property
    def total(self) -> int:
        """How many samples there are."""
        return self.own.total()


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_entered_by_autograd(callers: Sequence[FrameType]) -> bool:
    """Whether the innermost frame is a hook of the library at its first line: what ended then was autograd's work."""
    hook, *outer = callers
    if not any(part in _file(hook) for part in LIBRARIES):
        return False
    runs_autograd = not outer or outer[0].f_code.co_name == "on_calling_thread"
    from_outside = runs_autograd or not any(part in _file(outer[0]) for part in LIBRARIES)
    return from_outside and hook.f_lineno == hook.f_code.co_firstlineno


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _name(frame: FrameType) -> str:
    return f"{Path(_file(frame)).stem}.{frame.f_code.co_qualname}"


@contextmanager
def sampling(samples: Samples) -> Iterator[None]:
    """Look in while this is open; on the main thread."""
    before = signal.signal(signal.SIGPROF, lambda _, frame: samples.take(frame))
    signal.setitimer(signal.ITIMER_PROF, SECONDS_BETWEEN, SECONDS_BETWEEN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def profile(contestant: Contestant, device: torch.device, steps: int) -> tuple[Samples, float]:
    """Sample some steps of a contestant that has warmed up; also returns the processor time of one, in ms."""
    samples, seconds = Samples(counting=False), 0.0
    # Hooks of backward run on the main thread then, where signals are.
    # One clock for all steps: started with each, it would strike at the same places of all.
    threads = torch.autograd.set_multithreading_enabled(False)
    with threads, collector_paused(), sampling(samples):
        for _ in range(steps):
            contestant.zero_grad()
            start = time.process_time()
            samples.counting = True
            contestant.forward_backward()
            samples.counting = False
            seconds += time.process_time() - start
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    return samples, 1000 * seconds / steps


def table(samples: Samples, milliseconds: float, rows: int) -> str:
    """The functions that take most of a step of so many milliseconds."""
    unit = milliseconds / max(samples.total, 1)
    lines = [
        (
            name,
            f"{count * unit:.2f}",
            f"{samples.whole[name] * unit:.2f}" if name in samples.whole else "",
        )
        for name, count in samples.own.most_common(rows)
    ]
    return markdown(("function", "own ms", "with callees ms"), lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of one contestant."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", choices=list(PRESETS), default="tiny", help="model size (default tiny)")
    add("--contestant", choices=list(BUILDERS), default="fullshard")
    add("--world", type=int, default=8, help="ranks of the fake group (default 8)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--steps", type=int, default=300)
    add("--rows", type=int, default=25, help="functions to print (default 25)")
    add("--commit", help="name of the measured commit, where the checkout has no git")
    options = parser.parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu":
        torch.set_num_threads(1)
    join_fake_group(options.world)
    setting = Setting(
        shape=PRESETS[options.preset],
        device=device,
        world=options.world,
        precision="bf16" if device.type == "cuda" else "fp32",
        master="fp32",
    )
    contestant = build(options.contestant, setting)
    contestant.check()
    samples, step_ms = profile(contestant, device, options.steps)
    del contestant
    gc.collect()
    dist.destroy_process_group()
    print(
        f"{hardware(device)}, torch {torch.__version__}, commit {options.commit or commit_of(Path(__file__).parent)}\n"
    )
    print(
        f"{options.contestant}, {options.preset}, world {options.world}: forward and backward, "
        f"{step_ms:.1f} ms of processor time a step, {samples.total} samples of {options.steps} steps\n"
    )
    print(table(samples, step_ms, options.rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
