"""Facts about a rank: its number, its device, and the place where ranks meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fullshard.errors import ConfigurationError

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """One rank of a run."""

    rank: int
    world: int

    local_rank: int
    local_world: int
    """Ranks on this machine, which share its cores or GPUs."""

    device: Device

    rendezvous: str
    """The `init_method` of the process group."""


def has_torchrun(environment: Mapping[str, str]) -> bool:
    """Say whether torchrun, or a launcher that sets the same variables, made this process a rank."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def rank_info_of_torchrun(environment: Mapping[str, str], device: Device) -> RankInfo:
    """Return the rank that torchrun made of this process.

    Raises:
        ConfigurationError: a variable of the launcher is missing or wrong.
    """
    required = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in required if name not in environment]
    if missing:
        raise ConfigurationError(
            f"A launcher must set {', '.join(required)}; not set: {', '.join(missing)}. "
            "Use torchrun, or unset RANK and WORLD_SIZE to let fullshard start the ranks."
        )
    world = number_in(environment, "WORLD_SIZE")
    return RankInfo(
        rank=number_in(environment, "RANK"),
        world=world,
        local_rank=number_in(environment, "LOCAL_RANK"),
        local_world=number_in(environment, "LOCAL_WORLD_SIZE", default=world),
        device=device,
        rendezvous="env://",
    )


def number_in(environment: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    """Return a variable of a launcher as a number.

    Raises:
        ConfigurationError: it is not a number, or it is missing and has no default.
    """
    text = environment.get(name) or ("" if default is None else str(default))
    if not text.isdecimal():
        raise ConfigurationError(
            f"A launcher must set {name} to a whole number, got {text!r}. Start the run with torchrun, "
            "with srun, or with no launcher at all."
        )
    return int(text)


def local_rank_infos(ranks: int, device: Device, *, rendezvous: str) -> tuple[RankInfo, ...]:
    """Return the ranks of a run that is on this machine only."""
    return tuple(
        RankInfo(
            rank=rank,
            world=ranks,
            local_rank=rank,
            local_world=ranks,
            device=device,
            rendezvous=rendezvous,
        )
        for rank in range(ranks)
    )
