"""The life of one rank: join the process group, train, leave.

How the rank came to be (started by `launch` or by torchrun) is settled before; it arrives as a
`Place`.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from rich.console import Console

from fullshard.train.loop import train
from fullshard.train.options import TrainOptions
from fullshard.train.place import Place
from fullshard.train.progress import Silence, showing_progress
from fullshard.train.result import TrainResult
from fullshard.train.text import read_text


def run_rank(options: TrainOptions, place: Place) -> TrainResult:
    """Train as one of the ranks; rank 0 shows the progress."""
    device = _claim_device(place)
    # Read before the process group exists: what fails here must not leave other ranks waiting in a
    # collective.
    text = read_text(options.text, context=options.context)
    dist.init_process_group(
        backend="nccl" if place.device == "cuda" else "gloo",
        init_method=place.rendezvous,
        rank=place.rank,
        world_size=place.world,
        device_id=device if place.device == "cuda" else None,
    )
    with showing_progress(Console()) if place.rank == 0 else nullcontext(Silence()) as watcher:
        result = train(options, text, device=device, watcher=watcher)
    # Not in a finally: after an error the other ranks may be inside a collective, and leaving could
    # wait for them.
    dist.destroy_process_group()
    return result


def num_cores() -> int:
    """Return how many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _claim_device(place: Place) -> torch.device:
    """Take this rank's share of the machine: a GPU of its own, or some of the cores."""
    if place.device == "cuda":
        torch.cuda.set_device(place.local_rank)
        return torch.device("cuda", place.local_rank)
    torch.set_num_threads(max(1, num_cores() // place.local_world))
    return torch.device("cpu")
