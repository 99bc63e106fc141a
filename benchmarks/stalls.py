"""Whether slow ranks are waited for, and dead ones named: many steps in which ranks stand still at random.

The script starts its own ranks. A stall is 0 to 60 s long. Half of them sleep, as a rank does that reads data; the
others hold the interpreter's lock, as an extension does that compiles, so that the rank's watchdog cannot answer
either. With `--apart`, some ranks have a process namespace of their own, as in containers: no other rank can see whether
they run. With `--scale`, stalls are so many times shorter, and so are the watchdog's times, the lease included.

With `--kill`, one rank is killed at a random moment of each run, in a stall or a step. All others must then end with an
error that names it. The exit status is 1 if a rank does not do what it should.

    python benchmarks/stalls.py                          # 1000 steps on 4 ranks, about 40 stalls
    python benchmarks/stalls.py --apart 2 --scale 10     # the same with containers, ten times as fast
    python benchmarks/stalls.py --apart 2 --scale 10 --kill 10 --backend stand-in
"""

import argparse
import ctypes
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

# What is measured, and named in the header, is the checkout that this file is in.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import header, headline
from fullshard import DivergenceError, fully_shard
from fullshard.divergence.watchdog import rounds, silences, stalls, thread
from tests.helpers.backends import ENVIRONMENTS
from tests.helpers.rank_programs import be_apart

LONGEST_S = 60.0
ENDS_S = 120.0
"""How long ranks may take to end after the death of one of them."""
WRITTEN = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One rank and what it is told."""

    rank: int
    ranks: int
    port: int
    folder: Path
    backend: str
    apart: int
    """So many ranks, the last ones, have namespaces of their own."""
    scale: float
    steps: int
    stalls: int
    """How many, on all ranks together."""
    seed: int
    kill: bool
    """Whether one rank is killed."""


def stand_still(seconds: float, *, holds_lock: bool) -> None:
    """Do nothing for a while."""
    if holds_lock:
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    else:
        time.sleep(seconds)


def hasten(scale: float) -> None:
    """Let the watchdog of this process wait for shorter times."""
    os.environ["FULLSHARD_WATCHDOG_PATIENCE"] = str(thread.PATIENCE_S / scale)
    os.environ["FULLSHARD_WATCHDOG_LEASE"] = str(silences.LEASE_S / scale)
    thread.MAX_PATIENCE_S /= scale
    thread.REPEAT_S /= scale
    rounds.LOST_S /= scale


def run_rank(place: Place) -> None:
    """Train, stand still now and then, and write what the watchdog has noted, or how this rank has ended."""
    if place.rank >= place.ranks - place.apart:
        be_apart()
    hasten(place.scale)
    os.environ.update(ENVIRONMENTS.get(place.backend, {}) | {"GLOO_SOCKET_IFNAME": "lo"})
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", place.port, None, False, wait_for_workers=False)
    dist.init_process_group(place.backend, store=store, rank=place.rank, world_size=place.ranks)
    draw = random.Random(place.seed)  # the same on all ranks
    if place.kill:
        victim, at = draw.randrange(place.ranks), draw.randrange(2, place.steps // 2)
        late = draw.random() * LONGEST_S / place.scale / 4
        kill = (at, late) if victim == place.rank else None
    else:
        kill = None
    try:
        stood_s = train(place, draw, kill)
    except DivergenceError as error:
        (place.folder / f"{WRITTEN}{place.rank}").write_text(str(error))
        os._exit(1)
    text = f"rank {place.rank}: {place.steps} steps, stood still for {stood_s:.0f} s, {len(stalls())} stalls noted"
    (place.folder / f"rank{place.rank}").write_text(text)
    dist.barrier()
    dist.destroy_process_group()


def train(place: Place, draw: random.Random, kill: tuple[int, float] | None) -> float:
    """Do all steps; return for how long this rank stood still. ``kill``: in which step this rank dies, and how late in it."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    for layer in (*model, model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters())
    planned = [
        (
            draw.randrange(place.steps),
            draw.randrange(place.ranks),
            draw.random() < 0.5,
            draw.random(),
        )
        for _ in range(place.stalls)
    ]
    longest_s, stood_s = LONGEST_S / place.scale, 0.0
    for step in range(place.steps):
        if kill is not None and step == kill[0]:
            (place.folder / "killed").write_text(f"{place.rank} in step {step}")
            threading.Timer(kill[1], os.kill, (os.getpid(), signal.SIGKILL)).start()
            time.sleep(kill[1] / 2)  # the rest is steps, and stalls of others
        for at, rank, holds_lock, share in planned:
            if (at, rank) == (step, place.rank):
                stand_still(share * longest_s, holds_lock=holds_lock)
                stood_s += share * longest_s
        model(torch.ones(2, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    while kill is not None:
        time.sleep(1.0)
    return stood_s


def run(place: Place) -> list[str]:
    """Run all ranks; return what each has written."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(target=run_rank, args=(replace(place, rank=rank, port=store.port),))
        for rank in range(place.ranks)
    ]
    for each in processes:
        each.start()
    victim = None
    while any(each.is_alive() for each in processes):
        ended = [rank for rank, each in enumerate(processes) if not each.is_alive()]
        if victim is None and ended and place.kill:
            victim, end = ended[0], time.monotonic() + ENDS_S
        if victim is not None and time.monotonic() > end:
            for each in processes:
                each.kill()
        time.sleep(0.1)
    for each in processes:
        each.join()
    return [path.read_text() for path in sorted(place.folder.glob("rank*"))]


def named_the_dead(place: Place) -> tuple[str, bool]:
    """Return who died, and whether all others have ended with an error that names this rank."""
    killed = (place.folder / "killed").read_text()
    victim = int(killed.split()[0])
    errors = {
        int(path.name.removeprefix(WRITTEN)): path.read_text()
        for path in place.folder.glob(f"{WRITTEN}*")
    }
    named = [rank for rank, text in errors.items() if f"rank {victim} " in text.splitlines()[0]]
    first = errors[min(errors)].splitlines()[0] if errors else "no rank has written an error"
    text = f"rank {killed}: named by {len(named)} of {place.ranks - 1} ranks: {first}"
    return text, len(named) == place.ranks - 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ranks, then print how they ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="processes (default 4)")
    add("--steps", type=int, default=1000, help="steps (default 1000)")
    add("--stalls", type=int, default=40, help="stalls of all ranks together (default 40)")
    add("--seed", type=int, default=0, help="which stalls (default 0)")
    add("--apart", type=int, default=0, help="ranks in namespaces of their own; needs root")
    add("--scale", type=float, default=1.0, help="by what all times are divided (default 1)")
    add("--kill", type=int, default=0, help="so many runs in which a rank is killed, instead")
    add("--backend", choices=("gloo", "stand-in"), default="gloo")
    options = parser.parse_args(arguments)
    head = header("stalls.py", torch.device("cpu"), None, arguments)
    print(f"{headline(head)}\n")
    begin, failed = time.monotonic(), False
    for number in range(max(options.kill, 1)):
        with tempfile.TemporaryDirectory() as name:
            place = Place(
                rank=0,
                port=0,
                folder=Path(name),
                ranks=options.ranks,
                backend=options.backend,
                apart=options.apart,
                scale=options.scale,
                steps=options.steps,
                stalls=options.stalls,
                seed=options.seed + number,
                kill=options.kill > 0,
            )
            texts = run(place)
            if options.kill:
                text, is_named = named_the_dead(place)
                print(text, flush=True)
                failed |= not is_named
                continue
            errors = [path.read_text() for path in place.folder.glob(f"{WRITTEN}*")]
            print("\n".join([*texts, *errors]))
            print(f"{len(texts)} of {options.ranks} ranks finished")
            failed |= len(texts) < options.ranks
    print(f"{time.monotonic() - begin:.0f} s")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
