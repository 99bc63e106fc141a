"""Whether slow ranks are waited for: many steps in which ranks stand still at random.

The script starts its own gloo ranks. A stall is 0 to 20 s long. Half of them sleep, as a rank does that reads data; the
others hold the interpreter's lock, as an extension does that compiles, so that the rank's watchdog cannot answer
either. The exit status is 1 if a rank does not finish all steps.

    python benchmarks/stalls.py                         # 1000 steps on 3 ranks, about 30 stalls, 6 minutes
    python benchmarks/stalls.py --steps 100 --stalls 4
"""

import argparse
import ctypes
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

# What is measured, and named in the header, is the checkout that this file is in.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import header, headline
from fullshard import fully_shard
from fullshard.comm.watchdog import stalls
from fullshard.programs.train.processes import run_in_processes

LONGEST_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One rank and what it is told."""

    rank: int
    ranks: int
    folder: Path
    steps: int
    stalls: int
    """How many, on all ranks together."""
    seed: int


def stand_still(seconds: float, *, holds_lock: bool) -> None:
    """Do nothing for a while."""
    if holds_lock:
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    else:
        time.sleep(seconds)


def run_rank(place: Place) -> None:
    """Train, stand still now and then, and write what the watchdog has noted."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(place.folder / "store"), place.ranks)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.ranks)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    for layer in (*model, model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters())
    draw = random.Random(place.seed)  # the same on all ranks
    planned = [
        (
            draw.randrange(place.steps),
            draw.randrange(place.ranks),
            draw.random() < 0.5,
            draw.random(),
        )
        for _ in range(place.stalls)
    ]
    stood_s = 0.0
    for step in range(place.steps):
        for at, rank, holds_lock, share in planned:
            if (at, rank) == (step, place.rank):
                stand_still(share * LONGEST_S, holds_lock=holds_lock)
                stood_s += share * LONGEST_S
        model(torch.ones(2, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    text = f"rank {place.rank}: {place.steps} steps, stood still for {stood_s:.0f} s, {len(stalls())} stalls noted"
    (place.folder / f"rank{place.rank}").write_text(text)
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ranks, then print how they ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=3, help="processes (default 3)")
    add("--steps", type=int, default=1000, help="steps (default 1000)")
    add("--stalls", type=int, default=30, help="stalls of all ranks together (default 30)")
    add("--seed", type=int, default=0, help="which stalls (default 0)")
    options = parser.parse_args(arguments)
    head = header("stalls.py", torch.device("cpu"), None, arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = [
            Place(
                rank=rank,
                ranks=options.ranks,
                folder=folder,
                steps=options.steps,
                stalls=options.stalls,
                seed=options.seed,
            )
            for rank in range(options.ranks)
        ]
        begin = time.monotonic()
        run_in_processes(run_rank, places)
        texts = [path.read_text() for path in sorted(folder.glob("rank*"))]
    print(f"{headline(head)}\n\n" + "\n".join(texts))
    print(f"{len(texts)} of {options.ranks} ranks finished, in {time.monotonic() - begin:.0f} s")
    if len(texts) < options.ranks:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
