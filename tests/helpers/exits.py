"""Two ranks that end while checkpoints are on their way, as `python -m tests.helpers.exits FOLDER RANK`.

rank 1   has a child of `multiprocessing`, which fails while a thread of it writes
both     save; the thread of rank 1 is stuck
rank 0   waits for that, in vain; then it fails while another thread of it is stuck
rank 1   goes on when its input ends; then it ends well while a thread of it has much to write
"""

from __future__ import annotations

import atexit
import multiprocessing
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from fullshard import checkpoint, torch_border
from fullshard.checkpoint import save_plan
from fullshard.checkpoint.folders import publication

TIMEOUT = timedelta(seconds=3)


def fail(path: Path, group: ProcessGroup | None = None) -> None:
    """Fail in the main thread, while a thread writes that will never end."""
    publication.begin = lambda _: threading.Event().wait()  # type: ignore[assignment, return-value]
    checkpoint.async_save(path, nn.Linear(2, 2), process_group=group)
    raise ValueError("the main thread has failed")


def main(folder: Path, rank: int) -> None:
    if rank == 1:
        child = multiprocessing.get_context("fork").Process(target=fail, args=[folder / "child"])
        child.start()
        child.join()
        print("the child ended with", child.exitcode, flush=True)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    alone = [dist.new_group([each]) for each in range(2)][rank]
    dist.barrier()
    assert dist.group.WORLD is not None
    torch_border.set_timeout(dist.group.WORLD, TIMEOUT)

    is_stuck = threading.Event()
    write_own = save_plan._write_own_file
    if rank == 1:
        save_plan._write_own_file = lambda *_: is_stuck.wait()  # type: ignore[assignment, return-value]
    pending = checkpoint.async_save(folder / "together", nn.Linear(2, 2))
    if rank == 1:
        sys.stdin.read()
        is_stuck.set()
        save_plan._write_own_file = write_own
    try:
        pending.wait()
    except RuntimeError as error:
        print("the save ended with", error, flush=True)
    if rank == 0:
        atexit.register(print, "what was registered is called", flush=True)
        fail(folder / "never", alone)
    checkpoint.async_save(folder / "well", nn.Linear(1024, 1024), process_group=alone)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
