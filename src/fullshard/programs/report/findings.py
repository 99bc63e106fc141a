"""Findings and remedies: data, so that tests can apply remedies to the runs that caused them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fullshard.programs.report.run_files import Run
from fullshard.programs.train.config_fields import config_sections

Severity = Literal["bad", "slow", "good"]


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of the trainer's configuration with a value."""

    section: str
    name: str
    value: bool | int | float | str

    @property
    def is_fixed(self) -> bool:
        """Whether a resumed run must keep its value, so that only a new run can have another."""
        return config_sections()[self.section].fields[self.name].is_fixed

    def is_in(self, run: Run) -> bool:
        """Say whether the run's configuration has the field with this value."""
        return bool(run.setting(self.section, self.name) == self.value)

    def __str__(self) -> str:
        """Return it as in a TOML file."""
        value = f'"{self.value}"' if isinstance(self.value, str) else str(self.value).lower()
        return f"{self.section}.{self.name} = {value}"


Place = Literal["fully_shard", "wrapper", "before", "instead", "layer", "batch", "optimizer"]

PLACES: dict[Place, str] = {
    "fully_shard": "in every call of `fully_shard`: {}",
    "wrapper": "in `FullyShardedDataParallel`: {}",
    "before": "before `fully_shard(model)`: {}",
    "instead": "in place of your calls of `fully_shard`, with their options: {}",
    "layer": "for every layer i: {}",
    "batch": "before the batch is read: {}",
    "optimizer": "in place of torch's optimizer, if the program has that: {}",
}
"""Places in a program where code of a remedy belongs."""


@dataclass(frozen=True, slots=True)
class Call:
    """Code for a program that uses the API: arguments for calls that it has, or statements."""

    place: Place
    code: tuple[str, ...]

    def __str__(self) -> str:
        """Return it with the words that say where it belongs; code is in `backquotes`."""
        return PLACES[self.place].format(" and ".join(f"`{each}`" for each in self.code))


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """One thing to do about a finding: settings of the trainer, or code for a program of the user's, or advice alone."""

    kind: str
    """One of `remedies.REMEDIES`."""
    text: str
    """Its effect, or the advice; code is in `backquotes`."""
    settings: tuple[Setting, ...] = ()
    """Settings that are needed together."""
    call: Call | None = None

    @property
    def needs_new_run(self) -> bool:
        """Whether the run that has the finding cannot be resumed with it."""
        return any(setting.is_fixed for setting in self.settings)

    def __str__(self) -> str:
        """Return it as a sentence; code is in `backquotes`."""
        way = " with ".join(f"`{setting}`" for setting in self.settings)
        if self.needs_new_run:
            way += ", in a new run"
        if self.call is not None:
            way = str(self.call)
        return f"{self.text}: {way}" if way else self.text


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something to know, with its numbers, and what to do about it; code in texts is in `backquotes`."""

    kind: str
    """One of `reference.FINDINGS`."""
    title: str
    text: str
    amount: float
    """Its amount, to compare with the same finding about another run."""
    remedies: tuple[Remedy, ...] = ()
    severity: Severity = "slow"
    cost_share: float = 0.0
    """Part of the step's time that it costs; 1 for what endangers the run."""
