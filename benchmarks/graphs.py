"""Steps captured in CUDA graphs: the unsharded model, torch's FSDP2 and fullshard, each replayed.

    python benchmarks/graphs.py                                  # 12x768, 1.2b and 3.8b: some minutes
    python benchmarks/graphs.py --preset 12x768 --eager          # and the same steps without a graph
    python benchmarks/graphs.py --preset 3.8b --compile          # compiled blocks, captured

One process is rank 0 of a `fake` group. Every contestant is built, warmed up and captured; then all are replayed in
interleaved rounds (whole steps of large models: one contestant after the other, since they do not fit together). A turn
begins with untimed replays (`--settle`), until power and clock are those of this contestant. `fused` is fullshard with
gradients written once, and `wrapper-fused` is the same by `FullyShardedDataParallel`. Two kinds of steps are measured, one
after the other:

    fwd+bwd   forward and backward
    step      forward, backward, clipping to a norm of 1 and AdamW(fused, capturable)

time      device time of a replay, from events around several: median over rounds [interquartile range]
x         median of the ratios to unsharded's within rounds
x energy  the ratio of median power times median time
W, MHz    power and clock of the multiprocessors during turns, medians; * if the power limit lowered the clock
reserved  what the allocator holds for the contestant when it has been captured: weights, the optimizer's state, the pool
          of the graph. Nothing else is cached then

The fake group's reduce-scatter writes nothing in torch 2.11. So gradients of sharded contestants are whatever was in
memory, and are set to zero before they are clipped: a write of this rank's shard, which FSDP2 and fullshard have alike.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

# What is measured, and named in the header, is the checkout that this file is in.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contestants import (
    BUILDERS,
    Contestant,
    Setting,
    Unavailable,
    build,
    join_fake_group,
)
from benchmarks.estimate import Spread
from benchmarks.measure import in_some_order
from benchmarks.power import Draw, PowerMeter
from benchmarks.report import header, headline, markdown, milliseconds, write_json
from benchmarks.transformer import PRESETS, count_parameters, local_tensor
from fullshard import clip_grad_norm_, torch_border
from fullshard.optim import ShardedOptimizer

Kind = Literal["fwd+bwd", "step"]
KINDS: tuple[Kind, ...] = ("fwd+bwd", "step")
DEFAULT_PRESETS = ("12x768", "1.2b", "3.8b")
WARMUP = 3
TIMED_S = 1.0
"""How long the timed replays of a turn take, about."""
SETTLED_S = 1.0
"""How long a contestant is replayed before its timed replays, about.

Large steps run at the power limit. So the clock, and with it the time, depends on how warm the device is and on what ran
before; it takes a while to settle.
"""
REFERENCE = "unsharded"
OURS = ("fullshard", "fused", "wrapper", "wrapper-fused")
ALONE_FROM = 2_000_000_000
"""Parameters from which whole steps of all contestants are too large to be in memory together."""


@dataclass(kw_only=True, slots=True)
class Measured:
    """One contestant with one kind of step."""

    reserved_bytes: int = 0
    capture_s: float = 0.0
    failure: str | None = None
    replay_s: list[float] = field(default_factory=list)
    """By round."""
    draws: list[Draw] = field(default_factory=list)
    """Of the rounds in which power could be measured."""
    eager_s: list[float] = field(default_factory=list)

    @property
    def watts(self) -> float | None:
        """Median power; None if it is not known."""
        return statistics.median(draw.watts for draw in self.draws) if self.draws else None

    @property
    def replay_joules(self) -> float | None:
        """Energy of a replay; None if it is not known."""
        return None if self.watts is None else self.watts * statistics.median(self.replay_s)


def step_of(contestant: Contestant, kind: Kind) -> Callable[[], object]:
    """Return the step of a contestant that is captured."""
    if kind == "fwd+bwd":
        return contestant.forward_backward
    model, ours = contestant.model, contestant.name in OURS
    options: dict[str, Any] = {
        "lr": torch.tensor(1e-5, device=contestant.tokens.device),
        "fused": True,
        "capturable": True,
    }
    optimizer: torch.optim.Optimizer
    if ours:
        optimizer = ShardedOptimizer(torch.optim.AdamW, model.parameters(), **options)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    clip: Callable[..., Any] = clip_grad_norm_ if ours else torch.nn.utils.clip_grad_norm_

    def step() -> None:
        contestant.forward_backward()
        if contestant.name != REFERENCE:
            torch._foreach_zero_(
                [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
            )
        clip(model if ours else model.parameters(), 1.0)
        optimizer.step()

    return step


def give_cached_memory_back(device: torch.device) -> None:
    """Collect cycles and hand cached blocks back.

    Workspaces of the matrix library stay: graphs that others have captured use them.
    """
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def allocate_workspaces(device: torch.device) -> None:
    """Let the matrix library take its workspace for captures, so that no contestant is charged for it."""
    square = torch.ones(256, 256, dtype=torch.bfloat16, device=device)
    square @ square
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        square @ square


class Captured:
    """A contestant's step in a graph."""

    def __init__(self, name: str, setting: Setting, kind: Kind, measured: Measured) -> None:
        device = setting.device
        give_cached_memory_back(device)
        before = torch.cuda.memory_reserved(device)
        self.device, self.measured = device, measured
        self.contestant = build(name, setting)
        self.step = step_of(self.contestant, kind)
        for _ in range(WARMUP):
            self.contestant.zero_grad()
            self.step()
        self.contestant.zero_grad()
        began, stream = time.perf_counter(), torch.cuda.current_stream()
        self.graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(self.graph, pool=pool):
                self.step()
        except Exception as error:
            measured.failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            torch_border.mend_after_failed_capture(pool, stream)
            return
        measured.capture_s = time.perf_counter() - began
        self.graph.replay()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        measured.reserved_bytes = torch.cuda.memory_reserved(device) - before
        self.replay_s = self._time(self.graph.replay, 2)
        """About, for the length of turns."""

    def _time(self, call: Callable[[], object], times: int, *, untimed: int = 1) -> float:
        """Return the seconds of device time of each of some calls, one after the other, after some untimed ones."""
        event: Any = torch.cuda.Event  # its constructor has no types
        begin, end = event(enable_timing=True), event(enable_timing=True)
        for _ in range(untimed):
            call()
        torch.cuda.synchronize(self.device)
        begin.record()
        for _ in range(times):
            call()
        end.record()
        torch.cuda.synchronize(self.device)
        return float(begin.elapsed_time(end)) / 1e3 / times

    def turn(self, meter: PowerMeter | None, settled_s: float) -> None:
        """Measure one turn."""
        draws: list[Draw] = []
        with ExitStack() as watched:
            if meter is not None:
                draws = watched.enter_context(meter.watching())
            replay_s = self._time(
                self.graph.replay,
                max(2, round(TIMED_S / self.replay_s)),
                untimed=max(1, round(settled_s / self.replay_s)),
            )
        self.measured.replay_s.append(replay_s)
        self.measured.draws += draws

    def eager_turn(self) -> None:
        """Measure one turn without the graph."""

        def eagerly() -> None:
            self.contestant.zero_grad()
            self.step()

        self.measured.eager_s.append(self._time(eagerly, 3))


def measure(
    setting: Setting,
    kind: Kind,
    contestants: Sequence[str],
    rounds: int,
    *,
    settled_s: float,
    alone: bool,
    eager: bool,
) -> dict[str, Measured]:
    """Measure one kind of step of all contestants, ``alone`` or in interleaved rounds."""
    found = {name: Measured() for name in contestants}
    if alone:
        for name in contestants:
            take_turns(captured(setting, kind, {name: found[name]}), rounds, settled_s, eager=eager)
    else:
        take_turns(captured(setting, kind, found), rounds, settled_s, eager=eager)
    return found


def captured(setting: Setting, kind: Kind, found: Mapping[str, Measured]) -> list[Captured]:
    """Build and capture contestants; those that cannot be are told in ``found``."""
    good = []
    for name, measured in found.items():
        try:
            each = Captured(name, setting, kind, measured)
        except (Unavailable, torch.OutOfMemoryError) as error:
            measured.failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        if measured.failure is None:
            good.append(each)
    return good


def take_turns(
    contestants: Sequence[Captured], rounds: int, settled_s: float, *, eager: bool
) -> None:
    """Let all take their turns, in each round in another order."""
    meter = PowerMeter.of(contestants[0].device) if contestants else None
    for number in range(rounds):
        for each in in_some_order(contestants, number):
            each.turn(meter, settled_s)
    for each in contestants if eager else ():
        for _ in range(3):
            each.eager_turn()


def ratio(measured: Measured, reference: Measured) -> str:
    """Write the median of the ratios within rounds."""
    if not measured.replay_s or len(measured.replay_s) != len(reference.replay_s):
        return "n/a"
    pairs = zip(measured.replay_s, reference.replay_s, strict=True)
    return f"{statistics.median(ours / theirs for ours, theirs in pairs):.3f}"


def energy_ratio(measured: Measured, reference: Measured) -> str:
    """Write the ratio of the energies of a replay."""
    ours, theirs = measured.replay_joules, reference.replay_joules
    return "n/a" if ours is None or theirs is None else f"{ours / theirs:.3f}"


def power(measured: Measured) -> str:
    """Write power and clock."""
    if measured.watts is None:
        return "n/a"
    mhz = statistics.median(draw.megahertz for draw in measured.draws)
    capped = any(draw.capped for draw in measured.draws)
    return f"{measured.watts:.0f}, {mhz:.0f}{'*' if capped else ''}"


def rows(kind: Kind, found: Mapping[str, Measured]) -> list[list[str]]:
    """Write one line for each contestant."""
    lines = []
    reference = found.get(REFERENCE, Measured())
    for name, each in found.items():
        if each.failure is not None:
            lines.append([name, kind, "failed", *["n/a"] * (len(COLUMNS) - 3)])
            continue
        lines.append(
            [
                name,
                kind,
                milliseconds(Spread.of(each.replay_s)),
                ratio(each, reference),
                energy_ratio(each, reference),
                power(each),
                f"{each.reserved_bytes / 2**30:.2f}",
                milliseconds(Spread.of(each.eager_s)),
                f"{each.capture_s:.1f}",
            ]
        )
    return lines


COLUMNS = (
    "contestant",
    "what",
    "captured, ms [iqr]",
    "x",
    "x energy",
    "W, MHz",
    "reserved, GiB",
    "eager, ms [iqr]",
    "capture, s",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print one table per preset."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", action="append", choices=list(PRESETS), help="model size; may be repeated")
    add("--world", type=int, default=8, help="ranks of the fake group (default 8)")
    add(
        "--contestants",
        nargs="+",
        choices=list(BUILDERS),
        default=["unsharded", "fsdp2", "fullshard", "fused", "wrapper-fused"],
    )
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    add("--rounds", type=int, default=6)
    add(
        "--settle",
        type=float,
        default=SETTLED_S,
        metavar="SECONDS",
        help=f"replays before the timed ones of a turn (default {SETTLED_S})",
    )
    add("--compile", action="store_true", help="compile every block before it is sharded")
    add("--eager", action="store_true", help="time the steps without graphs, too")
    add("--json", type=Path, metavar="FILE", help="write all samples")
    add("--commit", help="name of the measured commit, where the checkout has no git")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("graphs are CUDA's, and there is no GPU here.")
    device = torch.device("cuda", 0)
    head = header("graphs.py", device, options.commit, arguments)
    print(headline(head), flush=True)
    join_fake_group(options.world)
    allocate_workspaces(device)
    results: dict[str, Any] = {}
    for preset in options.preset or DEFAULT_PRESETS:
        setting = Setting(
            shape=PRESETS[preset],
            device=device,
            world=options.world,
            precision="bf16",
            master="fp32",
            compiler="inductor" if options.compile else None,
        )
        began, lines, failures = time.perf_counter(), [], []
        for kind in options.kinds:
            found = measure(
                setting,
                kind,
                options.contestants,
                options.rounds,
                settled_s=options.settle,
                alone=kind == "step" and count_parameters(setting.shape) >= ALONE_FROM,
                eager=options.eager,
            )
            lines += rows(kind, found)
            failures += [f"- {n}, {kind}: {m.failure}" for n, m in found.items() if m.failure]
            results[f"{preset} {kind}"] = {name: asdict(each) for name, each in found.items()}
        print(f"\n**{preset}**, world {options.world} ({time.perf_counter() - began:.0f} s)\n")
        print(markdown(COLUMNS, lines))
        print("\n".join(failures), flush=True)
        write_json(options.json, head, results)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
