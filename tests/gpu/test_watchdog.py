"""A kernel that does not end: the watchdog names the collective that waits for it, and the process lives to print."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = """
import torch, torch.distributed as dist
from torch import nn
from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.transport.streams import comm_contexts
from fullshard.errors import DivergenceError
from fullshard.mesh.axes import DataParallelAxes

# A rank alone communicates with itself, so that one GPU has NCCL to test.
DataParallelAxes.shard_peers = property(lambda axes: axes.shard_process_group)
torch.cuda.set_device(0)
dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
# In another dtype than the shards', or a rank that holds everything has nothing to gather.
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
for each in (*model, model):
    fully_shard(each, mp_policy=policy)
x = torch.ones(8, 64, device="cuda")
model(x).sum().backward()
torch.cuda.synchronize()
print("a step has ended", flush=True)
with comm_contexts()[0].all_gather:
    torch.cuda._sleep(CYCLES)
try:
    model(x)
    torch.cuda.synchronize()
    print("the host came back", flush=True)
except DivergenceError as error:
    print("raised", type(error).__name__, flush=True)
print("the process goes on", flush=True)
"""


def test_a_collective_behind_a_kernel_that_does_not_end_is_reported(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("CYCLES", str(40 * 1_900_000_000)))  # about 40 s
    environment = {
        **os.environ,
        "FULLSHARD_WATCHDOG_PATIENCE": "2",
        "FULLSHARD_WATCHDOG_ABORT": "5",
        "PYTHONPATH": os.pathsep.join(["src", os.environ.get("PYTHONPATH", "")]),
    }
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(program)], stdout=output, stderr=output, env=environment
        )
        try:
            text = _until("has not ended within 5 s", tmp_path / "output", process)
            assert process.poll() is None, text  # it lives while the kernel runs
            assert "a step has ended" in text
            assert "Ranks have diverged: all-gather of" in text
            assert "waiting for the device to finish all-gather of" in text
            assert "program.py:" in text
            process.wait(120)
        finally:
            process.kill()
            process.wait()
    text = (tmp_path / "output").read_text()
    assert "the process goes on" in text or "raised DivergenceError" in text, text


def _until(words: str, path: Path, process: subprocess.Popen[bytes]) -> str:
    """Return what a process has printed when it has printed these words, or when it has ended."""
    end = time.monotonic() + 100
    while words not in path.read_text() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.2)
    return path.read_text()
