"""Where a run takes rank_info: what launchers say, and the commands of examples/launch as they stand there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run as torchrun

from fullshard.errors import ConfigurationError
from fullshard.programs.train.config_file import to_toml
from fullshard.programs.train.launch import launched_rank_info, reports_errors
from fullshard.programs.train.rank_info import RankInfo
from fullshard.programs.train.slurm import expand_counts, first_host
from tests.helpers.runs import last_losses, tiny

EXAMPLES = Path(__file__).parents[2] / "examples" / "launch"

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "29500",
}
TASK = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "node[07-08,12]",
    "SLURM_PROCID": "4",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0",
}


def test_torchrun_gives_a_place() -> None:
    assert launched_rank_info(TORCHRUN, "cpu") == RankInfo(
        rank=3, world=4, local_rank=1, local_world=2, device="cpu", rendezvous="env://"
    )


def test_srun_gives_a_place() -> None:
    rank_info = launched_rank_info(TASK, "cuda")
    assert rank_info is not None
    assert rank_info == RankInfo(
        rank=4, world=5, local_rank=0, local_world=1, device="cuda", rendezvous=rank_info.rendezvous
    )
    found = re.fullmatch(r"tcp://node07:(\d+)", rank_info.rendezvous)
    assert found and 20_000 <= int(found[1]) < 32_000
    others = [{**TASK, "SLURM_JOB_ID": "1235"}, {**TASK, "SLURM_STEP_ID": "1"}]
    rank_infos = [launched_rank_info(each, "cuda") for each in (TASK, *others)]
    assert len({each.rendezvous for each in rank_infos if each}) == 3


def test_a_place_to_meet_can_be_chosen_under_srun() -> None:
    rank_info = launched_rank_info({**TASK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"}, "cpu")
    assert rank_info is not None and rank_info.rendezvous == "tcp://10.0.0.1:5"


def test_torchrun_under_srun_counts() -> None:
    rank_info = launched_rank_info({**TASK, **TORCHRUN}, "cpu")
    assert rank_info is not None and rank_info.world == 4


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "16"},  # a batch script
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},  # a shell: srun --pty bash
    ],
)
def test_without_ranks_of_a_launcher_there_is_no_place(environment: dict[str, str]) -> None:
    assert launched_rank_info(environment, "cpu") is None
    assert reports_errors(environment)


def test_one_process_speaks_for_all() -> None:
    assert not reports_errors(TORCHRUN) and reports_errors({**TORCHRUN, "RANK": "0"})
    assert not reports_errors(TASK) and reports_errors({**TASK, "SLURM_PROCID": "0"})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "not set: LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE to a whole number, got 'two'"),
        ({**TASK, "SLURM_LOCALID": ""}, "SLURM_LOCALID to a whole number, got ''"),
        ({**TASK, "SLURM_STEP_TASKS_PER_NODE": "2x"}, "got '2x' and 'node"),
        ({**TASK, "SLURM_STEP_NODELIST": ""}, "got '2(x2),1' and ''"),
    ],
)
def test_a_launcher_that_says_too_little_is_refused(
    environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        launched_rank_info(environment, "cpu")


def test_lists_of_hosts_and_tasks_are_read() -> None:
    assert first_host("gpu1") == first_host("gpu1,gpu2") == "gpu1"
    assert first_host("node[07-09,12],gpu1") == "node07"
    assert first_host("rack[3,5]-node[1-2].site") == "rack3-node1.site"
    assert expand_counts("2(x2),1") == [2, 2, 1]
    assert expand_counts("8") == [8]
    assert expand_counts("") == expand_counts("8,") == []


# --- the examples ------------------------------------------------------------------------------------------

SRUN = """\
while [ "${1#-}" != "$1" ]; do shift; done  # its own options
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$TASKS SLURM_STEP_TASKS_PER_NODE=$TASKS SLURM_STEP_NODELIST=localhost
for n in $(seq 0 $((TASKS - 1))); do SLURM_NODEID=0 SLURM_PROCID=$n SLURM_LOCALID=$n "$@" & done
status=0
for job in $(jobs -p); do wait "$job" || status=$?; done
exit $status
"""
"""What `srun` does, for so many tasks on this machine."""

PROGRAMS = {
    "fullshard": 'exec "$PYTHON_EXEC" -m fullshard "$@"',
    "torchrun": 'exec "$PYTHON_EXEC" -m torch.distributed.run "$@"',
    "srun": SRUN,
    "scontrol": "printf 'host7\\nhost8\\n'",
}
"""Those of Python's run in PYTHON_EXEC, which torchrun also starts ranks with."""


def run_here(folder: Path, *command: str, programs: dict[str, str], **variables: str) -> str:
    """Run a command in a folder with a run.toml, where some programs are others."""
    (folder / "run.toml").write_text(to_toml(tiny(folder)))
    (folder / "programs").mkdir()
    for name, script in (PROGRAMS | programs).items():
        (folder / "programs" / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / "programs" / name).chmod(0o755)
    variables["PATH"] = f"{folder / 'programs'}{os.pathsep}{os.environ['PATH']}"
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))
    ended = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=130,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_the_example_for_srun_trains(tmp_path: Path, preloaded_python: str) -> None:
    output = run_here(
        tmp_path,
        *("bash", str(EXAMPLES / "slurm_srun.sbatch")),
        programs={},
        PYTHON_EXEC=preloaded_python,
        SLURM_JOB_ID=str(os.getpid()),
        TASKS="2",
    )
    assert output.count("Starting") == 1, "one rank speaks for all"
    assert sorted(last_losses(tiny(tmp_path))) == [1, 2, 3, 4, 5, 6]


def kubernetes_command(**values: str) -> list[str]:
    """The command of the pod, with other values for some of its variables."""
    yaml: Any = pytest.importorskip("yaml")
    _, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    [container] = job["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]} | values
    words = [*container["command"], *container["args"]]
    # As Kubernetes does it.
    return [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word) for word in words]


@pytest.mark.slow
def test_the_example_for_kubernetes_trains(tmp_path: Path, preloaded_python: str) -> None:
    command = kubernetes_command(HOSTS="1", RANKS_PER_HOST="2", FIRST_HOST="localhost")
    command = ["bash", "-c", shlex.join(command)]
    output = run_here(tmp_path, *command, programs={}, PYTHON_EXEC=preloaded_python)
    assert output.count("Starting") == 1, "one rank speaks for all"
    losses = last_losses(tiny(tmp_path))
    assert sorted(losses) == [1, 2, 3, 4, 5, 6] and losses[6] < losses[1]


def test_torchrun_understands_the_other_examples(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    told = {"torchrun": 'echo "$@"'}
    by_slurm = run_here(
        tmp_path / "slurm",
        *("bash", str(EXAMPLES / "slurm_torchrun.sbatch")),
        programs=told,
        SLURM_JOB_NODELIST="host[7-8]",
        SLURM_JOB_NUM_NODES="2",
        SLURM_JOB_ID="9",
        TASKS="1",
    )
    (tmp_path / "hosts").mkdir()
    by_hand = run_here(
        tmp_path / "hosts",
        *("bash", str(EXAMPLES / "torchrun_two_hosts.sh"), "host7"),
        programs=told,
        RANKS_PER_HOST="8",
    )
    by_kubernetes = kubernetes_command(FIRST_HOST="host7")[1:]
    for words in (by_slurm.split(), by_hand.split(), by_kubernetes):
        launch, program, rest = torchrun.config_from_args(torchrun.parse_args(words))
        assert (launch.min_nodes, launch.max_nodes, launch.nproc_per_node) == (2, 2, 8)
        assert (launch.rdzv_backend, launch.rdzv_endpoint) == ("c10d", "host7:29400")
        assert launch.max_restarts == 3
        assert program == sys.executable and rest[-4:] == ["-m", "fullshard", "train", "run.toml"]
