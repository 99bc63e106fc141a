"""What recording a step costs, and what it costs to be able to.

One process is rank 0 of a `fake` group, as in step.py. The same model takes turns: some steps without a
recorder, as many with one.

    python benchmarks/trace.py                          # 12x768 and 1.2b on a GPU, tiny and small on a CPU
    python benchmarks/trace.py --preset 12x768 --json benchmarks/results/trace-h200.json

step         until the current stream has done it all; on the CPU wall time
host         until backward returns, nothing awaited; on the CPU the processor time of the step
on / off     median over rounds of the ratio of the best steps of the two turns of a round
events       recorded in one step
begin, end   what a recording costs beside its steps: waiting for the device, naming, writing the file
off          what cannot be measured as a ratio, since code without points is other code: how often a step asks for
             a recorder, times what asking takes, over the host time of the step
"""

import argparse
import gc
import json
import sys
import tempfile
import time
import timeit
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

# What is measured, and named in the header, is the checkout that this file is in.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fullshard
from benchmarks.contestants import Contestant, Setting, build, join_fake_group
from benchmarks.estimate import Spread, of_some
from benchmarks.measure import collector_paused, timed
from benchmarks.report import header, headline, markdown, milliseconds, write_json
from benchmarks.transformer import PRESETS
from fullshard.tracing.group_facts import outermost_states
from fullshard.transport.streams import FSDPCommContext

WARMUP = 4
COLUMNS = (
    "model",
    "step off ms",
    "step on / off",
    "host off ms",
    "host on / off",
    "events",
    "begin ms",
    "end ms",
    "off: questions",
    "ns each",
    "of host time",
)


@dataclass(kw_only=True, slots=True)
class Measured:
    """What is known about one model; times in seconds, by turn."""

    preset: str
    step_off: list[float]
    step_on: list[float]
    host_off: list[float]
    host_on: list[float]
    begin: list[float]
    end: list[float]
    events: int = 0
    questions: int = 0
    """How often a step asks for a recorder."""
    question_s: float = 0.0

    @property
    def off_share(self) -> float:
        """Of the host time of a step, what the questions take."""
        return self.questions * self.question_s / median(self.host_off)


def take_turn(contestant: Contestant, device: torch.device, steps: int) -> tuple[float, float]:
    """The best of some steps' times, until the stream was done and until the host was: disturbances only add."""
    timings = []
    for _ in range(steps):
        contestant.zero_grad()
        timings.append(timed(contestant.forward_backward, device))
    return min(t.device_s for t in timings), min(t.host_s for t in timings)


def recorded_turn(
    contestant: Contestant, device: torch.device, steps: int, folder: Path, measured: Measured
) -> None:
    """The same while it is recorded."""
    start = time.perf_counter()
    with fullshard.trace(contestant.model, folder) as recording:
        measured.begin.append(time.perf_counter() - start)
        step_s, host_s = take_turn(contestant, device, steps)
        for _ in range(steps):
            recording.step()
        start = time.perf_counter()
    measured.end.append(time.perf_counter() - start)
    measured.step_on.append(step_s)
    measured.host_on.append(host_s)
    events = json.loads(recording.path.read_text())["traceEvents"]
    measured.events = sum(event["ph"] != "M" for event in events) // steps


def count_questions(contestant: Contestant) -> int:
    """How often one step asks for a recorder."""
    asked = 0

    class Counting(FSDPCommContext):
        @property
        def observer(self) -> None:  # type: ignore[override]
            nonlocal asked
            asked += 1

    (root,) = outermost_states(contestant.model).values()
    assert root.step is not None, "warmed up"
    context = root.step.context
    context.__class__ = Counting
    try:
        contestant.forward_backward()
    finally:
        context.__class__ = FSDPCommContext
    return asked


def question_s() -> float:
    """Seconds that it takes to ask, and to be told that there is none."""
    context = FSDPCommContext(torch.device("cpu"))
    number = 100_000
    statements = ("if context.observer is not None: pass", "pass")
    asking, nothing = (
        min(timeit.repeat(code, globals={"context": context}, number=number, repeat=7))
        for code in statements
    )
    return (asking - nothing) / number


def measure(preset: str, setting: Setting, rounds: int, steps: int, folder: Path) -> Measured:
    """Take turns."""
    device = setting.device
    contestant = build("fullshard", setting)
    contestant.check()
    measured = Measured(
        preset=preset, step_off=[], step_on=[], host_off=[], host_on=[], begin=[], end=[]
    )
    for _ in range(WARMUP):
        contestant.forward_backward()
    with collector_paused():
        for turn in range(rounds + 1):
            if turn % 2:
                recorded_turn(contestant, device, steps, folder, measured)
            step_s, host_s = take_turn(contestant, device, steps)
            measured.step_off.append(step_s)
            measured.host_off.append(host_s)
            if turn % 2 == 0:
                recorded_turn(contestant, device, steps, folder, measured)
            if turn == 0:  # what is made once is made now
                for samples in (measured.step_off, measured.step_on, measured.host_off):
                    samples.clear()
                for samples in (measured.host_on, measured.begin, measured.end):
                    samples.clear()
            gc.collect()
    measured.questions, measured.question_s = count_questions(contestant), question_s()
    return measured


def ratios(on: Sequence[float], off: Sequence[float]) -> Spread:
    """Of the turns of each round."""
    return of_some([a / b for a, b in zip(on, off, strict=True)])


def row(measured: Measured) -> tuple[str, ...]:
    """One line of the table."""
    step = ratios(measured.step_on, measured.step_off)
    host = ratios(measured.host_on, measured.host_off)
    return (
        measured.preset,
        milliseconds(Spread.of(measured.step_off)),
        f"{step.median:.3f} [{step.iqr:.3f}]",
        milliseconds(Spread.of(measured.host_off)),
        f"{host.median:.3f} [{host.iqr:.3f}]",
        str(measured.events),
        f"{median(measured.begin) * 1e3:.2f}",
        f"{median(measured.end) * 1e3:.2f}",
        str(measured.questions),
        f"{measured.question_s * 1e9:.0f}",
        f"{measured.off_share:.2e}",
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line, with defaults that depend on the device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", nargs="+", choices=list(PRESETS), help="default: 12x768 1.2b, or tiny small")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--world", type=int, default=8, help="ranks of the fake group (default 8)")
    add("--rounds", type=int, default=20, help="turns of each kind (default 20)")
    add("--steps", type=int, default=4, help="steps of a turn (default 4)")
    add("--json", type=Path, metavar="FILE", help="write samples")
    add("--commit", help="name of the measured commit, where the checkout has no git")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = options.device == "cuda"
    options.preset = options.preset or (["12x768", "1.2b"] if on_cuda else ["tiny", "small"])
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every model and print one table."""
    options = parse_arguments(arguments)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(0)
    head = header("trace.py", device, options.commit, arguments)
    join_fake_group(options.world)
    results: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        for preset in options.preset:
            setting = Setting(
                shape=PRESETS[preset],
                device=device,
                world=options.world,
                precision="bf16" if device.type == "cuda" else "fp32",
                master="fp32",
            )
            results.append(measure(preset, setting, options.rounds, options.steps, Path(folder)))
    dist.destroy_process_group()
    written: list[dict[str, Any]] = [asdict(each) for each in results]
    write_json(options.json, head, written)
    print(f"{headline(head)}\n\nMedians [interquartile range] of {options.rounds} rounds.\n")
    print(markdown(COLUMNS, [row(each) for each in results]))


if __name__ == "__main__":
    main()
