"""What the watchdog's thread costs a training step.

One process is rank 0 of a `fake` group, as in step.py. The same model takes turns of about half a second: steps while
the watchdog rests, and as many while it does what it does in a healthy run: it looks at this process and talks to a
real store once a second. It is the same thread in all turns, which registered before the first. In a turn without it, it
waits for a lock.

    python benchmarks/watchdog_cost.py                          # 12x768 on a GPU, tiny on a CPU
    python benchmarks/watchdog_cost.py --pace 20                # it looks and asks 20 times as often as in a run

Turns are short since the speed of a shared host changes within seconds. A look that would fall into a turn without the watchdog
is made at the beginning of the next turn with it. So it works as much as in a run, but in half of the time.

Its cost is smaller than the noise of a shared host. If it looks 20 times as often, its looks cost 20 times as much, and the noise
is the same: a twentieth of what is measured then is the cost of a run (`in a run`), known 20 times better.

host      until backward returns, from an idle device; on the CPU the processor time of the process, the watchdog's included
step      until the current stream has done it all; on the CPU wall time
on / off  ratio of the two turns' mean steps: the median over rounds [interquartile range], and the mean with its standard
          error. A step counts as twice the median of its turn at most, since some meet another job of the host
looks     how often it looked in a second of its turns
in a run  what the host's mean becomes with one look a second, as in a run, with its standard error: 1 + (mean - 1) / looks
thread    processor time of the watchdog's thread, by the time of its turns: what it can take from the main thread, which
          waits for the interpreter lock meanwhile
"""

import argparse
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import mean, median, stdev

import torch
import torch.distributed as dist

# What is measured, and named in the header, is the checkout that this file is in.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contestants import Contestant, Setting, build, join_fake_group
from benchmarks.estimate import Spread, of_some
from benchmarks.measure import collector_paused, in_some_order, timed
from benchmarks.report import header, headline, markdown, milliseconds, write_json
from benchmarks.transformer import PRESETS
from fullshard import torch_border
from fullshard.divergence.watchdog import thread as watchdog_thread
from fullshard.divergence.watchdog.thread import Watchdog

WARMUP = 8
COLUMNS = (
    "model",
    "host off ms",
    "host on / off",
    "mean",
    "step off ms",
    "step on / off",
    "mean",
    "thread",
    "looks",
    "in a run",
)


class RestingWatchdog(Watchdog):
    """A watchdog that can be told to rest; it begins awake. It looks and asks ``pace`` times as often as others."""

    def __init__(self, group: dist.ProcessGroup, pace: float) -> None:
        self.awake = threading.Event()
        self.awake.set()
        self.looks, self.awake_s = 0, 0.0
        super().__init__(group, thread=threading.get_ident())
        self.registered.wait()
        self._tick_s /= pace
        self._began -= watchdog_thread.FINDING_S  # as in a run that has begun some time ago
        assert self.thread.ident is not None, "it has been started"
        self._clock = time.pthread_getcpuclockid(self.thread.ident)

    def _look(self, now: float) -> None:
        self.awake.wait()
        self.looks += 1
        super()._look(time.monotonic())

    @contextmanager
    def at_work(self, shares: list[float]) -> Iterator[None]:
        """Be awake within; note the thread's share of the time."""
        since, spent = time.perf_counter(), time.clock_gettime(self._clock)
        self.awake.set()
        yield
        self.awake.clear()
        seconds = time.perf_counter() - since
        self.awake_s += seconds
        shares.append((time.clock_gettime(self._clock) - spent) / seconds)


def take_turn(contestant: Contestant, device: torch.device, steps: int) -> tuple[float, float]:
    """Return the mean of some steps: until the host was done, and until the stream was.

    A mean, since what the watchdog does falls on few of them.
    """
    timings = []
    for _ in range(steps):
        contestant.zero_grad()
        timings.append(timed(contestant.forward_backward, device))
    return (
        capped_mean([each.host_s for each in timings]),
        capped_mean([each.device_s for each in timings]),
    )


def capped_mean(seconds: Sequence[float]) -> float:
    """Return the mean of steps, of which none counts as more than twice the median."""
    most = 2 * median(seconds)
    return mean(min(each, most) for each in seconds)


def measure(
    setting: Setting, rounds: int, steps: int, pace: float
) -> tuple[dict[str, list[tuple[float, float]]], list[float], float]:
    """Take turns, each round in another order; return their times, the thread's shares, and its looks per second."""
    contestant = build("fullshard", setting)
    contestant.check()
    for _ in range(WARMUP):
        contestant.forward_backward()
    samples: dict[str, list[tuple[float, float]]] = {"off": [], "on": []}
    shares: list[float] = []
    group = dist.group.WORLD
    assert group is not None, "the fake group was joined"
    watchdog_thread.REST_S /= pace
    watchdog_thread.LOOK_S /= pace
    watchdog = RestingWatchdog(group, pace)
    watchdog.awake.clear()
    watchdog.looks = 0
    with collector_paused():
        for turn in range(rounds):
            for kind in in_some_order(("off", "on"), turn):
                with watchdog.at_work(shares) if kind == "on" else nullcontext():
                    samples[kind].append(take_turn(contestant, setting.device, steps))
    watchdog.awake.set()
    watchdog.end()
    watchdog.thread.join()
    return samples, shares, watchdog.looks / watchdog.awake_s


def cells(
    preset: str, samples: dict[str, list[tuple[float, float]]], shares: list[float], looks: float
) -> list[str]:
    """Write one row of the table."""
    found, means = [preset], []
    for index in range(2):
        off, on = ([turn[index] for turn in samples[kind]] for kind in ("off", "on"))
        ratios = [a / b for a, b in zip(on, off, strict=True)]
        middle = of_some(ratios)
        means.append((mean(ratios), stdev(ratios) / len(ratios) ** 0.5))
        found += [
            milliseconds(Spread.of(off)),
            f"{middle.median:.4f} [{middle.iqr:.4f}]",
            "{:.4f} +- {:.4f}".format(*means[-1]),
        ]
    host, error = means[0]
    in_a_run = f"{1 + (host - 1) / looks:.4f} +- {error / looks:.4f}" if looks else "n/a"
    return [*found, f"{mean(shares):.2%}", f"{looks:.1f}", in_a_run]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", choices=list(PRESETS), help="default: 12x768, or tiny on a CPU")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--rounds", type=int, default=150, help="turns of each kind (default 150)")
    add("--steps", type=int, default=16, help="timed steps of a turn (default 16)")
    add("--pace", type=float, default=1.0, help="how often it looks, relative to a run (default 1)")
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
    samples, shares, looks = measure(setting, options.rounds, options.steps, options.pace)
    dist.destroy_process_group()
    write_json(
        options.json,
        head,
        {"preset": preset, "samples": samples, "shares": shares, "looks": looks},
    )
    print(f"{headline(head)}\n\n{options.rounds} rounds, pace {options.pace:g}.\n")
    print(markdown(COLUMNS, [cells(preset, samples, shares, looks)]))
    if looks < options.pace / 2:
        print(
            "\nThe watchdog looked less than half as often as the pace says: do not trust this run."
        )


if __name__ == "__main__":
    main()
