"""A rank's place among the others: who it is, what it runs on, where they meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fullshard.errors import ConfigurationError

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One rank's place, from its start to its end."""

    rank: int
    world: int

    local_rank: int
    local_world: int
    """Ranks on this machine, which share its cores or GPUs."""

    device: Device

    rendezvous: str
    """The `init_method` of the process group."""


def has_launcher(environment: Mapping[str, str]) -> bool:
    """Say whether a launcher such as torchrun started this process as one of its ranks."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def place_from_launcher(environment: Mapping[str, str], device: Device) -> Place:
    """Return the place a launcher gave this process."""
    required = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in required if name not in environment]
    if missing:
        raise ConfigurationError(
            f"A launcher must set {', '.join(required)}; not set: {', '.join(missing)}. "
            "Use torchrun, or unset RANK and WORLD_SIZE to let fullshard start the ranks."
        )
    world = int(environment["WORLD_SIZE"])
    return Place(
        rank=int(environment["RANK"]),
        world=world,
        local_rank=int(environment["LOCAL_RANK"]),
        local_world=int(environment.get("LOCAL_WORLD_SIZE", world)),
        device=device,
        rendezvous="env://",
    )


def places_on_this_machine(ranks: int, device: Device, *, rendezvous: str) -> tuple[Place, ...]:
    """Return the places of ranks that all live here."""
    return tuple(
        Place(
            rank=rank,
            world=ranks,
            local_rank=rank,
            local_world=ranks,
            device=device,
            rendezvous=rendezvous,
        )
        for rank in range(ranks)
    )
