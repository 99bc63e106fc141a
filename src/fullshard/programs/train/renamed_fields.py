"""Fields of configurations that have another name since: files and commands with the old one are still read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Renamed:
    """The field that an old one is now."""

    full_name: str
    values: Mapping[str, str] = field(default_factory=dict)
    """New names of values, by the old ones."""


RENAMED = {
    "sharding.door": Renamed("sharding.api", {"fully_shard": "fsdp2", "wrapper": "fsdp1"}),
}


def renamed(full_name: str, value: Any) -> tuple[str, Any]:
    """Return a field and its value by their names of today."""
    new = RENAMED.get(full_name)
    if new is None:
        return full_name, value
    return new.full_name, new.values.get(value, value) if isinstance(value, str) else value


def with_names_of_today(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a configuration with the fields' names of today."""
    found: dict[str, Any] = {}
    for section, values in document.items():
        if not isinstance(values, Mapping):
            found[section] = values
            continue
        found.setdefault(section, {})
        for name, value in values.items():
            full_name, new_value = renamed(f"{section}.{name}", value)
            new_section, _, new_name = full_name.partition(".")
            found.setdefault(new_section, {})[new_name] = new_value
    return found
