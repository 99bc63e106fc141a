"""What is asked: a run, a number of GPUs and what they are. It imports no torch, so a wrong question is answered at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullshard.errors import ConfigurationError
from fullshard.programs.plan_tool.machine import Machine
from fullshard.programs.plan_tool.profile_file import known_profiles, load_profile
from fullshard.programs.train.config import OFFLOAD_ON_CPU, Problem, RunConfig
from fullshard.programs.train.config_file import read_config
from fullshard.programs.train.model_argument import (
    DEFAULT_WORLD,
    MAX_WORLD,
    file_and_settings,
    is_factory,
)
from fullshard.programs.train.preflight import model_problems


@dataclass(frozen=True, slots=True)
class Question:
    """A step of a run, on so many ranks of a machine."""

    config: RunConfig
    world: int
    machine: Machine


def read_question(
    model: str, gpus: int | None, machine: Machine, settings: Sequence[str]
) -> Question:
    """Return what is asked for.

    Args:
        model: As on the command line.
        gpus: How many; None for those of the run, or the default.
        machine: What they are.
        settings: `section.field=value`.

    Raises:
        ConfigurationError: the model is not known, or the settings do not go together, or not with the number of GPUs.
    """
    if is_factory(model):
        raise ConfigurationError(
            f"A plan runs the step of fullshard train, which does not know how to call {model}. Give a size, a Hugging Face "
            "folder, or a run's TOML file; fullshard inspect takes any module:function."
        )
    file, of_model = file_and_settings(model, takes_factories=False)

    def world_of(config: RunConfig) -> int:
        return gpus or config.run.ranks or DEFAULT_WORLD

    def problems(config: RunConfig) -> Iterator[Problem]:
        world = world_of(config)
        yield from (*config.world_problems(world), *model_problems(config))
        if config.sharding.offload and machine.host.is_synchronous:
            yield Problem(("sharding.offload",), OFFLOAD_ON_CPU)
        if world > MAX_WORLD:
            yield Problem(
                ("run.ranks",),
                f"A step can be planned for at most {MAX_WORLD:,} GPUs; got {world:,}. Set --gpus to fewer.",
            )

    wanted = [*of_model, *settings]
    if file is None and not any(each.startswith("train.batch=") for each in wanted):
        # A run's own default is for a few ranks. Every rank of a plan gets a window for each microbatch.
        accumulate = read_config(None, wanted).train.accumulate
        wanted.append(f"train.batch={(gpus or DEFAULT_WORLD) * accumulate}")
    config = read_config(file, wanted, checks=[problems])
    return Question(config, world_of(config), machine)


def read_machine(gpu: str | None, profile: Path | None, network: str | None) -> Machine:
    """Return the machine of a GPU's name or of a profile's file.

    Args:
        gpu: Its name.
        profile: The file.
        network: Gbit/s of a GPU to other hosts, or of a host if it ends with "/host"; None for that of the profile.

    Raises:
        ConfigurationError: there is no such profile, or neither or both are given, or the network is not a number.
    """
    if (gpu is None) == (profile is None):
        names = ", ".join(sorted({path.stem for path in known_profiles().values()}))
        raise ConfigurationError(
            f"A plan needs to know the GPU: give either --gpu ({names}), or --profile and a file that fullshard plan "
            "calibrate has written."
        )
    if profile is not None and profile.suffix != ".toml":
        raise ConfigurationError(f"--profile takes a TOML file; {profile} does not end with .toml.")
    machine = load_profile(str(profile) if gpu is None else gpu)
    if network is None:
        return machine
    number, _, unit = network.partition("/")
    is_number = re.fullmatch(r"\d+(\.\d+)?", number) and 0 < float(number) < math.inf
    if not is_number or unit not in ("", "host"):
        raise ConfigurationError(
            f"--network takes the Gbit/s of a GPU to other hosts, such as 400, or of a whole host, such as 3200/host; got {network}."
        )
    if unit == "host":
        return machine.with_network(gbit_per_host=float(number))
    return machine.with_network(gbit_per_device=float(number))


def gpus_text(world: int, machine: Machine) -> str:
    """Return how many GPUs there are, and on how many hosts."""
    per_host = machine.links.devices_per_host
    if world <= per_host:
        return f"{world} x {machine.title}, on one host"
    return f"{world:,} x {machine.title}, {per_host} per host, {machine.network.gbit_per_device:g} Gbit/s each"
