"""A question: a run, a number of GPUs and their kind. It imports no torch, so a wrong question is answered at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullshard.errors import ConfigurationError
from fullshard.programs.plan_tool.machine import Machine
from fullshard.programs.plan_tool.profile_file import known_profiles, load_profile
from fullshard.programs.train.config import Problem, RunConfig
from fullshard.programs.train.config_file import read_config
from fullshard.programs.train.model_argument import (
    DEFAULT_WORLD,
    MAX_WORLD,
    file_and_settings,
    is_factory,
)
from fullshard.programs.train.preflight import longest_context, model_problems

USUAL_TOKENS = 8192
"""Most tokens of a window, and of all windows of a GPU in a microbatch, where the question does not say how many."""

DECODER_CONTEXT = 2048
"""Tokens of a window of the built-in decoder, which was not made for a certain number."""

CONTEXT = "data.context"
PRECISION = "compute.precision"
BATCH = "train.batch"
RECOMPUTE = "compute.checkpoint_activations"


@dataclass(frozen=True, slots=True)
class Question:
    """A step of a run, on so many ranks of a machine."""

    config: RunConfig
    world: int
    machine: Machine
    open_fields: frozenset[str] = frozenset()
    """Fields that nothing in the question sets: `starting_point` may choose their values."""
    tokens_of_run: int | None = None
    """Tokens of all steps of a run's file; None if there is no file."""


def read_question(
    model: str, gpus: int | None, machine: Machine, settings: Sequence[str]
) -> Question:
    """Return the question of a command line.

    Args:
        model: As on the command line.
        gpus: Number of GPUs; None for those of the run, or the default.
        machine: Their kind and their hosts.
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
        if world > MAX_WORLD:
            yield Problem(
                ("run.ranks",),
                f"A step can be planned for at most {MAX_WORLD:,} GPUs; got {world:,}. Set --gpus to fewer.",
            )

    wanted = [*of_model, *settings]
    open_fields = frozenset() if file else _open_fields(wanted)
    if file is None:
        # A run's own defaults are for a few ranks on a CPU. Other fields may go together with bf16 only, so it comes first.
        if PRECISION in open_fields:
            wanted.append(f"{PRECISION}=bf16")
        asked = read_config(None, wanted)
        wanted += _usual_settings(asked, open_fields, world_of(asked))
    config = read_config(file, wanted, checks=[problems])
    tokens = config.train.steps * config.train.batch * config.data.context if file else None
    return Question(config, world_of(config), machine, open_fields, tokens)


def _open_fields(settings: Sequence[str]) -> frozenset[str]:
    """Return the fields for which a plan has usual values, and to which nothing is set."""
    given = {each.partition("=")[0].strip() for each in settings}
    return frozenset({CONTEXT, PRECISION, BATCH, RECOMPUTE} - given)


def _usual_settings(config: RunConfig, open_fields: frozenset[str], world: int) -> Iterator[str]:
    """Yield the usual settings of training a model: long windows; one window for each rank and microbatch.

    `starting_point` may make more windows of it.
    """
    if CONTEXT in open_fields:
        yield f"{CONTEXT}={min(longest_window(config) or DECODER_CONTEXT, USUAL_TOKENS)}"
    if BATCH in open_fields:
        yield f"{BATCH}={world * config.train.accumulate}"


def longest_window(config: RunConfig) -> int | None:
    """Return how many tokens the model was made for; None if that is not known, or there is no such number."""
    folder = config.model.huggingface
    return None if folder is None else longest_context(folder)


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
