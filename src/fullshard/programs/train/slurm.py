"""The rank of a task that `srun` has started, from its environment.

$ srun --nodes 2 --ntasks-per-node 2 fullshard train run.toml

SLURM_STEP_ID                0              only set for what srun starts
SLURM_STEP_NUM_TASKS         4              tasks are ranks
SLURM_PROCID                 0  1  2  3
SLURM_NODEID                 0  0  1  1
SLURM_LOCALID                0  1  0  1
SLURM_STEP_TASKS_PER_NODE    2(x2)
SLURM_STEP_NODELIST          node[07-08]    ranks meet at the first, node07
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fullshard.errors import ConfigurationError
from fullshard.programs.train.rank_info import Device, RankInfo, number_in

FIRST_PORT, NUM_PORTS = 20_000, 12_000
"""Ports below those that Linux gives to outgoing connections (32768 and up)."""


def has_step(environment: Mapping[str, str]) -> bool:
    """Say whether `srun` started this process as one of several tasks.

    A batch script is not a task, and a step with a single task may be a user's shell. Both start ranks of their own.
    """
    is_task = "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment
    return is_task and _tasks_in(environment) != "1"


def rank_info_of_slurm(environment: Mapping[str, str], device: Device) -> RankInfo:
    """Return the rank of this task. Ranks meet at the first host of the step, or at MASTER_ADDR and MASTER_PORT if set.

    Raises:
        ConfigurationError: a variable of Slurm is missing or wrong.
    """
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get(
        "SLURM_NTASKS_PER_NODE", ""
    )
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    counts = expand_counts(per_node)
    if not counts or not hosts:
        raise ConfigurationError(
            "srun must set SLURM_STEP_TASKS_PER_NODE and SLURM_STEP_NODELIST, which tell ranks how many of them are on "
            f"this host and where the rendezvous is; got {per_node!r} and {hosts!r}. Use torchrun instead."
        )
    node = number_in(environment, "SLURM_NODEID", default=0)
    host = environment.get("MASTER_ADDR") or first_host(hosts)
    port = number_in(environment, "MASTER_PORT", default=_port(environment))
    return RankInfo(
        rank=number_in(environment, "SLURM_PROCID"),
        world=number_in({"SLURM_NTASKS": _tasks_in(environment)}, "SLURM_NTASKS"),
        local_rank=number_in(environment, "SLURM_LOCALID"),
        local_world=counts[min(node, len(counts) - 1)],
        device=device,
        rendezvous=f"tcp://{host}:{port}",
    )


def _port(environment: Mapping[str, str]) -> int:
    """Return a port computed from job and step: the same for all tasks, and rarely that of another step."""
    job = number_in(environment, "SLURM_JOB_ID", default=0)
    step = number_in(environment, "SLURM_STEP_ID", default=0)
    return FIRST_PORT + (31 * job + step) % NUM_PORTS


def _tasks_in(environment: Mapping[str, str]) -> str:
    return environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")


def expand_counts(text: str) -> list[int]:
    """Return tasks by node: `2(x2),1` is 2, 2, 1."""
    counts = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(hosts: str) -> str:
    """Return the first host of a list: `node[07-09,12],gpu1` begins with node07."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    assert first is not None, "the pattern matches any text"
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])
