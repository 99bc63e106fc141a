"""Ranks on hosts of their own, with a cable between them that a test pulls: see `hosts`.

A rank trains until its process is killed or it raises. It writes how far it has come, what its watchdog says, and what it
has raised.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fullshard import fully_shard
from fullshard.divergence.watchdog import rounds
from fullshard.errors import DivergenceError
from tests.helpers.hosts import INTERFACE, Host
from tests.helpers.rank_programs import be_apart

CLONE_NEWNET = 0x40000000
PORT = 29500
PATIENCE_S = 1.0
LEASE_S = 10.0
"""Long enough for the test to put the cable back, on a crowded machine."""


def be_rank(rank: int, host: Host, first: Host, folder: Path) -> None:
    """Train on a host; the first one serves the store."""
    with Path("/run/netns", host.name).open() as namespace:
        code = ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET)
        assert code == 0, os.strerror(ctypes.get_errno())
    be_apart()
    os.environ.update(
        GLOO_SOCKET_IFNAME=INTERFACE,
        FULLSHARD_WATCHDOG_PATIENCE=str(PATIENCE_S),
        FULLSHARD_WATCHDOG_LEASE=str(LEASE_S),
    )
    rounds.LOST_S = 1.0  # so that several rounds fit into the lease
    logging.getLogger("fullshard").addHandler(logging.FileHandler(folder / f"{rank}.log"))
    torch.set_num_threads(1)
    try:
        _train(rank, first.address, folder)
    except DivergenceError as error:
        (folder / f"{rank}.part").write_text(str(error))
        (folder / f"{rank}.part").rename(folder / f"{rank}.error")
        os._exit(1)  # its process groups wait for the other host


def _train(rank: int, address: str, folder: Path) -> None:
    store = dist.TCPStore(address, PORT, 2, rank == 0)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    model = nn.Linear(4, 4)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters())
    step = 0
    while True:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        (folder / f"{rank}.steps").write_text(str(step))
        time.sleep(0.02)  # there are other tests
