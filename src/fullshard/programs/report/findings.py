"""What a finding is, and what a remedy is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fullshard.programs.report.run_files import Run

Severity = Literal["bad", "slow", "good"]


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of the trainer's configuration with a value."""

    section: str
    name: str
    value: bool | int | str

    def is_in(self, run: Run) -> bool:
        """Say whether the run's configuration has the field with this value."""
        return bool(run.setting(self.section, self.name) == self.value)

    def __str__(self) -> str:
        """Return it as in a TOML file."""
        value = f'"{self.value}"' if isinstance(self.value, str) else str(self.value).lower()
        return f"{self.section}.{self.name} = {value}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """One thing to do about a finding: settings of the trainer, a call of the API that does the same, or advice alone."""

    text: str
    """What it does, for whom, or the advice; code is in `backquotes`."""
    settings: tuple[Setting, ...] = ()
    """Needed together."""
    call: str = ""
    """Code in `backquotes`, with words around it."""

    def is_done(self, run: Run) -> bool:
        """Say whether the run's configuration has all settings already."""
        return bool(self.settings) and all(setting.is_in(run) for setting in self.settings)

    def __str__(self) -> str:
        """Return it as a sentence; code is in `backquotes`."""
        settings = " with ".join(f"`{setting}`" for setting in self.settings)
        ways = ", or ".join(way for way in (settings, self.call) if way)
        return f"{self.text}: {ways}" if ways else self.text


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something to know, with its numbers, and what to do about it; code in texts is in `backquotes`."""

    title: str
    text: str
    remedies: tuple[Remedy, ...] = ()
    severity: Severity = "slow"
    cost_share: float = 0.0
    """Part of the step's time that it costs; 1 for what endangers the run."""
