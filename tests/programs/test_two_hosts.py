"""A run on two hosts, of which one is lost and comes back: namespaces with a cable between them, on this machine."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fullshard.programs.train.config import RunConfig
from fullshard.programs.train.config_file import to_toml
from tests.helpers.hosts import INTERFACE, Host, two_hosts, why_no_hosts
from tests.helpers.ranks import World
from tests.helpers.runs import in_folder, last_losses, records, run, tiny

STEPS = 25
EVERY = 5
NO_HOSTS = why_no_hosts()


def join_run(
    host: Host, first: Host, config: Path, log: Path, python: str
) -> subprocess.Popen[bytes]:
    """Start torchrun on a host, as docs/launching.md says, with what makes it notice losses sooner."""
    meeting = f"is_host={host is first},keep_alive_interval=1,keep_alive_max_attempt=3"
    return host.start(
        [
            *(python, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={first.address}:29400", "--rdzv-id=test"),
            *("--max-restarts=3", "--monitor-interval=0.1"),
            *(f"--rdzv-conf={meeting}", f"--local-addr={host.address}"),
            *("-m", "fullshard", "train", str(config)),
        ],
        environment=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(filter(None, map(os.path.abspath, sys.path))),
            "PYTHON_EXEC": python,  # by which torchrun starts ranks
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # or a new agent was seen to wait
        },
        log=log,
    )


def wait_until(condition: Callable[[], bool], what: str, log: Path, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s {what}\n{log.read_text()[-8000:]}"
        time.sleep(0.02)


def has_saved(config: RunConfig) -> bool:
    return config.run.folder.joinpath("metrics.jsonl").exists() and bool(
        records(config, "checkpoint")
    )


@pytest.mark.slow
@pytest.mark.timeout(450)
@pytest.mark.skipif(NO_HOSTS is not None, reason=str(NO_HOSTS))
def test_a_run_goes_on_when_a_lost_host_has_come_back(
    tmp_path: Path, world: Callable[[int], World], preloaded_python: str
) -> None:
    config = tiny(tmp_path, f"train.steps={STEPS}", f"checkpoint.every={EVERY}", "run.timeout=8")
    file, log = tmp_path / "run.toml", tmp_path / "log"
    file.write_text(to_toml(config))
    with two_hosts() as (first, second):
        agents = [join_run(host, first, file, log, preloaded_python) for host in (first, second)]
        wait_until(lambda: has_saved(config), "for a checkpoint", log, seconds=120)
        second.unplug()
        second.end_processes()
        agents.pop().wait(60)
        # Each program is a client and a process of the preloaded Python. Numbers of processes begin anew at times.
        began = {number: psutil.Process(number).create_time() for number in first.processes()}
        [of_agent, _, _, of_rank] = sorted(began, key=began.__getitem__)
        assert of_agent == agents[0].pid
        # Nobody tells the first host: its rank waits for the other until run.timeout has passed.
        wait_until(lambda: of_rank not in first.processes(), "for the rank", log, seconds=60)
        assert not records(config, "end"), "the host was lost before the end"
        second.plug()
        agents.append(join_run(second, first, file, log, preloaded_python))
        for agent in agents:
            assert agent.wait(150) == 0, log.read_text()[-8000:]
    starts = [record["resumed_from"] for record in records(config, "start")]
    assert starts[0] is None and len(starts) == 2
    assert starts[1] is not None and starts[1] % EVERY == 0, "it went on from a checkpoint"
    undisturbed = in_folder(config, tmp_path / "undisturbed")
    world(2).run(run, undisturbed)
    assert last_losses(config) == pytest.approx(last_losses(undisturbed), rel=1e-6)
    assert sorted(last_losses(config)) == list(range(1, STEPS + 1))
