"""Decide where a run takes place: on ranks started here, or as one of those a launcher started.

    start(options)
      under torchrun   this process is a rank already        -> run_rank
      else             n processes on this machine           -> run_rank in each

What can be known to be wrong is found here, before any rank starts. torch is imported only where it
is needed: it takes seconds, and the process that merely watches the ranks can often do without.
"""

from __future__ import annotations

import os
import socket
import tempfile
from functools import partial
from pathlib import Path

from fullshard.errors import ConfigurationError
from fullshard.train.options import TrainOptions
from fullshard.train.place import (
    Device,
    Place,
    has_launcher,
    place_from_launcher,
    places_on_this_machine,
)
from fullshard.train.processes import run_in_processes
from fullshard.train.text import read_text

DEFAULT_CPU_RANKS = 2


def start(options: TrainOptions) -> None:
    """Train, and return when all is done that this process has to do.

    Raises:
        ConfigurationError: the options do not fit this machine or the launcher; no rank was
            started.
        RankFailedError: a rank started here failed; all of them have ended.
    """
    read_text(options.text, context=options.context)  # only to find what is wrong with it
    device = choose_device(options)
    if has_launcher(os.environ):
        join(options, place_from_launcher(os.environ, device))
    else:
        launch(options, device)


def choose_device(options: TrainOptions) -> Device:
    """Return the device the options ask for, if the machine has it."""
    if options.device == "cpu":
        return "cpu"
    if num_gpus() > 0:
        return "cuda"
    if options.device == "cuda":
        raise ConfigurationError(
            "--device cuda needs a GPU that torch can use, and there is none. Use --device cpu."
        )
    return "cpu"


def join(options: TrainOptions, place: Place) -> None:
    """Train as the rank a launcher made of this process."""
    if options.ranks not in (None, place.world):
        raise ConfigurationError(
            f"--ranks must agree with the launcher: got --ranks {options.ranks}, but WORLD_SIZE is "
            f"{place.world}. Leave --ranks out under torchrun."
        )
    _check_gpus(place.local_world, place.device)
    from fullshard.train.rank import run_rank

    run_rank(options, place)


def launch(options: TrainOptions, device: Device) -> None:
    """Train on ranks started here, as many as asked for; else 2 on CPU, or one per GPU."""
    ranks = options.ranks or (num_gpus() if device == "cuda" else DEFAULT_CPU_RANKS)
    _check_gpus(ranks, device)
    with tempfile.TemporaryDirectory(prefix="fullshard-") as folder:
        # A file to meet at, not a port: a free port can be taken before the ranks get to it.
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        places = places_on_this_machine(ranks, device, rendezvous=rendezvous)
        run_in_processes(partial(_launched_rank, options), places)


def num_gpus() -> int:
    """Return how many GPUs torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _launched_rank(options: TrainOptions, place: Place) -> None:
    # All ranks are here, so gloo need not find out which network the machine's name belongs to.
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    from fullshard.train.rank import run_rank

    run_rank(options, place)


def _check_gpus(ranks: int, device: Device) -> None:
    """Check that each rank on this machine can have a GPU of its own."""
    if device == "cuda" and ranks > num_gpus():
        raise ConfigurationError(
            f"Each rank needs a GPU of its own: {ranks} ranks on this machine, {num_gpus()} GPUs. "
            f"Use --ranks {num_gpus()}, or --device cpu."
        )
