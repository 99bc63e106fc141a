"""What the watchdog's thread costs a training step.

One process is rank 0 of a `fake` group, as in step.py. The same model takes turns: steps without a watchdog, and as many
with one that does what it does in a healthy run: it looks at this process four times a second, and talks to a real store
once a second. It has registered before its turn is timed, since a run does that once.

    python benchmarks/watchdog_cost.py                          # 12x768 on a GPU, tiny on a CPU

host      until backward returns, from an idle device; on the CPU the processor time of the process, the watchdog's included
step      until the current stream has done it all; on the CPU wall time
on / off  median over rounds of the ratio of the two turns' mean steps; a step counts as twice the median at most, since
          some meet another job of the host
thread    processor time of the watchdog's thread, by the time of its turns: what it can take from the main thread, which
          waits for the interpreter lock meanwhile. Rounds differ by far more, so on / off is only a check of it.
"""

import argparse
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median

import torch
import torch.distributed as dist

# What is measured, and named in the header, is the checkout that this file is in.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contestants import Contestant, Setting, build, join_fake_group
from benchmarks.estimate import Spread, of_some
from benchmarks.measure import collector_paused, timed
from benchmarks.report import header, headline, markdown, milliseconds, write_json
from benchmarks.transformer import PRESETS
from fullshard import torch_border
from fullshard.comm.watchdog.thread import Watchdog

WARMUP = 8
SETTLING = 4
"""Steps of a turn that are not timed."""
COLUMNS = ("model", "host off ms", "host on / off", "step off ms", "step on / off", "thread")


@contextmanager
def watched(shares: list[float]) -> Iterator[None]:
    """Have a watchdog within, as `watchdog.start` makes it for groups of processes; note its share of the time."""
    group = dist.group.WORLD
    assert group is not None, "the fake group was joined"
    watchdog = Watchdog(group, thread=threading.get_ident())
    assert watchdog.thread.ident is not None, "it has been started"
    watchdog.registered.wait()
    clock = time.pthread_getcpuclockid(watchdog.thread.ident)
    since, spent = time.perf_counter(), time.clock_gettime(clock)
    try:
        yield
    finally:
        shares.append((time.clock_gettime(clock) - spent) / (time.perf_counter() - since))
        watchdog.end()
        watchdog.thread.join()


def take_turn(contestant: Contestant, device: torch.device, steps: int) -> tuple[float, float]:
    """Return the mean of some steps: until the host was done, and until the stream was.

    A mean, since what the watchdog does falls on few of them.
    """
    timings = []
    for _ in range(SETTLING + steps):
        contestant.zero_grad()
        timings.append(timed(contestant.forward_backward, device))
    kept = timings[SETTLING:]
    return capped_mean([each.host_s for each in kept]), capped_mean([each.device_s for each in kept])  # fmt: skip


def capped_mean(seconds: Sequence[float]) -> float:
    """Return the mean of steps, of which none counts as more than twice the median."""
    most = 2 * median(seconds)
    return mean(min(each, most) for each in seconds)


def measure(
    setting: Setting, rounds: int, steps: int
) -> tuple[dict[str, list[tuple[float, float]]], list[float]]:
    """Take turns, each round in another order; return their times, and the thread's shares."""
    contestant = build("fullshard", setting)
    contestant.check()
    for _ in range(WARMUP):
        contestant.forward_backward()
    samples: dict[str, list[tuple[float, float]]] = {"off": [], "on": []}
    shares: list[float] = []
    with collector_paused():
        for turn in range(rounds):
            for kind in ("off", "on") if turn % 2 else ("on", "off"):
                if kind == "off":
                    samples[kind].append(take_turn(contestant, setting.device, steps))
                else:
                    with watched(shares):
                        samples[kind].append(take_turn(contestant, setting.device, steps))
    return samples, shares


def cells(
    preset: str, samples: dict[str, list[tuple[float, float]]], shares: list[float]
) -> list[str]:
    """Write one row of the table."""
    found = [preset]
    for index in range(2):
        off, on = ([turn[index] for turn in samples[kind]] for kind in ("off", "on"))
        ratio = of_some([a / b for a, b in zip(on, off, strict=True)])
        found += [milliseconds(Spread.of(off)), f"{ratio.median:.4f} [{ratio.iqr:.4f}]"]
    return [*found, f"{mean(shares):.2%}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", choices=list(PRESETS), help="default: 12x768, or tiny on a CPU")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--rounds", type=int, default=30, help="turns of each kind (default 30)")
    add("--steps", type=int, default=40, help="timed steps of a turn (default 40)")
    add("--json", type=Path, metavar="FILE", help="write samples")
    add("--commit", help="name of the measured commit, where the checkout has no git")
    options = parser.parse_args(arguments)
    on_cuda = (options.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda"
    device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
    if not on_cuda:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    head = header("watchdog_cost.py", device, options.commit, arguments)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    torch_border.default_store = lambda: store  # the fake group's own stores nothing
    join_fake_group(8)
    preset = options.preset or ("12x768" if on_cuda else "tiny")
    setting = Setting(
        shape=PRESETS[preset],
        device=device,
        world=8,
        precision="bf16" if on_cuda else "fp32",
        master="fp32",
    )
    samples, shares = measure(setting, options.rounds, options.steps)
    dist.destroy_process_group()
    write_json(options.json, head, {"preset": preset, "samples": samples, "shares": shares})
    print(f"{headline(head)}\n\nMedians [interquartile range] of {options.rounds} rounds.\n")
    print(markdown(COLUMNS, [cells(preset, samples, shares)]))


if __name__ == "__main__":
    main()
