"""Profiles of machines as TOML files: the shipped ones by name, others by path; read strictly, and written.

    name = "h100"                              what the user says
    [matmul]                                   a section for each field of `Machine`
    processors = 132                           a value
    source.processors = "data sheet"           where it comes from; every value has one
    band = 0.1                                 relative error of the section's times; may be left out

A profile with a problem is refused, with all its problems in one message. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import math
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigurationError
from fullshard.files import local_path
from fullshard.programs.plan_tool.machine import (
    AttentionFacts,
    CompileFacts,
    HostFacts,
    LinkFacts,
    Machine,
    MatmulFacts,
    MemoryFacts,
    NetworkFacts,
    OffloadFacts,
    OverlapFacts,
    TrafficFacts,
)

FOLDER = Path(__file__).parent / "profiles"
SECTIONS: dict[str, Any] = {
    "memory": MemoryFacts,
    "matmul": MatmulFacts,
    "attention": AttentionFacts,
    "traffic": TrafficFacts,
    "host": HostFacts,
    "compiled": CompileFacts,
    "links": LinkFacts,
    "network": NetworkFacts,
    "overlap": OverlapFacts,
    "offload": OffloadFacts,
}
"""Sections of a profile and their fields."""
AT_LEAST_ONE = frozenset(
    {
        "overlap.compute_slowdown",
        "matmul.processors",
        "links.devices_per_host",
        "offload.cores",
        "offload.devices_per_link",
    }
)
SHARES = frozenset(
    f"{section}.{name}"
    for section, name in (
        ("matmul", "efficiency"),
        ("attention", "forward"),
        ("attention", "backward"),
        ("traffic", "efficiency"),
        ("network", "efficiency"),
        ("compiled", "traffic"),
        ("compiled", "host"),
        ("compiled", "activations"),
        ("compiled", "recomputed_activations"),
    )
)
"""Values above 0 and up to 1."""
MAY_BE_ZERO = frozenset(
    {
        "memory.outside_gib",
        "memory.workspace_mib",
        "matmul.short_inner",
        "attention.half_length",
        "attention.half_width",
        *(f"host.{each.name}" for each in fields(HostFacts)),
        *(f"network.{name}" for name in ("base_us", "hop_us", "link_hop_us")),
        "traffic.floor_us",
        "offload.latency_us",
    }
)


NO_CPU_PLANS = (
    "Plans are of GPUs; CPU ranks are for tests. Plan the GPUs on which the model will train, such as --gpu h100: a plan runs on "
    "a machine without a GPU."
)
CPU_NAMES = ("cpu", "gloo", "laptop")
"""Names of a profile that fullshard shipped until 0.1."""
OLD_HOST_VALUES = ("turn_us", "is_synchronous")
"""Values of older profiles, without an effect on GPUs."""


def known_profiles() -> dict[str, Path]:
    """Return the files of the shipped profiles, by names and aliases."""
    found: dict[str, Path] = {}
    for path in sorted(FOLDER.glob("*.toml")):
        document = tomllib.loads(path.read_text())
        found |= dict.fromkeys((document["name"], *document["aliases"]), path)
    return found


def load_profile(name_or_path: str | Path) -> Machine:
    """Return the machine of a shipped profile, or of a TOML file.

    Raises:
        ConfigurationError: there is no such profile, or with everything that is wrong in it.
    """
    text = str(name_or_path)
    path = local_path(name_or_path)
    if isinstance(name_or_path, str) and not text.endswith(".toml"):
        known = known_profiles()
        name = text.lower().replace("_", "-").replace(" ", "-")
        if name in CPU_NAMES:
            raise ConfigurationError(NO_CPU_PLANS)
        found = known.get(name)
        if found is None:
            raise ConfigurationError(_unknown_name(text, known))
        path = found
    return parse_profile(_text_of(path), where=str(path))


def _unknown_name(name: str, known: Mapping[str, Path]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    names = ", ".join(sorted({path.stem for path in known.values()}))
    return (
        f"There is no profile of a GPU named {name!r}.{hint} Known are {names}. "
        f"For another one give a TOML file, which `fullshard plan calibrate` writes."
    )


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        raise ConfigurationError(f"There is no file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}.") from None


def parse_profile(text: str, *, where: str) -> Machine:
    """Return the machine that a TOML text describes; ConfigurationError with all its problems."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where} is not TOML: {error}.") from None
    _drop_old_values(document, where)
    reading = _Reading(document)
    machine = reading.machine()
    if reading.problems or machine is None:
        noun = "a problem" if len(reading.problems) == 1 else f"{len(reading.problems)} problems"
        lines = [f"The profile {where} has {noun}.", *(f"  - {each}" for each in reading.problems)]
        remedy = "Compare it with a shipped profile, such as profiles/h100.toml of the plan tool."
        raise ConfigurationError("\n".join([*lines, remedy]))
    return machine


def _drop_old_values(document: dict[str, Any], where: str) -> None:
    """Take what only plans of CPU ranks needed out of an older profile; ConfigurationError if it is that of a CPU."""
    host = document.get("host")
    if not isinstance(host, dict):
        return
    if host.get("is_synchronous") is True:
        raise ConfigurationError(f"The profile {where} is that of a CPU. {NO_CPU_PLANS}")
    for values in (host, host.get("source")):
        if isinstance(values, dict):
            for name in OLD_HOST_VALUES:
                values.pop(name, None)


class _Reading:
    """The values found in a document, and its problems."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.problems: list[str] = []
        self._document = document
        self._sources: dict[str, str] = {}
        self._bands: dict[str, float] = {}

    def machine(self) -> Machine | None:
        names = {"name": _take_text, "title": _take_text, "aliases": _take_texts}
        top = {name: self._value(name, self._document, take) for name, take in names.items()}
        sections = {name: self._section(name, facts) for name, facts in SECTIONS.items()}
        self._refuse_unknown(self._document, {*names, *SECTIONS}, prefix="")
        if self.problems:
            return None
        self._check_tables(sections)
        return Machine(**top, **sections, sources=self._sources, bands=self._bands)

    def _section(self, section: str, facts: type) -> Any:
        values = self._document.get(section)
        if not isinstance(values, dict):
            said = "is missing" if values is None else "must be a section"
            self.problems.append(f"[{section}] {said}.")
            return None
        sources = values.get("source", {})
        if not isinstance(sources, dict):
            self.problems.append(f"{section}.source must be a table of texts.")
            sources = {}
        hints = typing.get_type_hints(facts)
        names = [each.name for each in fields(facts)]
        found = {}
        for name in names:
            found[name] = self._value(name, values, TAKERS[hints[name]], prefix=f"{section}.")
            source = self._value(name, sources, _take_text, prefix=f"{section}.source.")
            self._sources[f"{section}.{name}"] = source
        if "band" in values:
            self._bands[section] = self._value("band", values, _take_number, prefix=f"{section}.")
        self._refuse_unknown(values, {*names, "source", "band"}, prefix=f"{section}.")
        self._refuse_unknown(sources, set(names), prefix=f"{section}.source.")
        return facts(**found)

    def _value(
        self, name: str, values: Mapping[str, Any], take: Callable[[object], Any], prefix: str = ""
    ) -> Any:
        full_name = prefix + name
        if name not in values:
            self.problems.append(f"{full_name} is missing.")
            return None
        try:
            value = take(values[name])
        except ValueError as error:
            self.problems.append(f"{full_name} must be {error}, got {values[name]!r}.")
            return None
        problem = _range_problem(full_name, value)
        if problem:
            self.problems.append(f"{full_name} must be {problem}, got {values[name]!r}.")
        return value

    def _refuse_unknown(self, values: Mapping[str, Any], known: set[str], *, prefix: str) -> None:
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {prefix}{near[0]}?" if near else ""
                self.problems.append(f"{prefix}{name} is not known.{hint}")

    def _check_tables(self, sections: Mapping[str, Any]) -> None:
        """Add problems between values, each of which is possible by itself."""
        matmul, memory = sections["matmul"], sections["memory"]
        if matmul.peak_tflops.keys() != matmul.efficiency.keys():
            self.problems.append(
                "matmul.peak_tflops and matmul.efficiency must have the same dtypes."
            )
        if "float32" not in matmul.peak_tflops:
            self.problems.append(
                "matmul.peak_tflops must have float32, which other dtypes fall back to."
            )
        table = sections["links"].all_gather
        if not table or any(
            left[0] >= right[0] or left[1] > right[1] for left, right in pairwise(table)
        ):
            self.problems.append(
                "links.all_gather must have sizes that rise and times that do not fall."
            )
        if not matmul.tiles:
            self.problems.append("matmul.tiles must have a tile.")
        if memory.outside_gib >= memory.capacity_gib:
            self.problems.append("memory.outside_gib must be less than memory.capacity_gib.")


# --- one value -------------------------------------------------------------------------------------------


def _take_text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text")
    return " ".join(value.split())


def _take_texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("a list of texts")
    return tuple(map(_take_text, value))


def _take_int(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("a whole number")
    return value


def _take_number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError("a finite number")
    return float(value)


def _take_by_dtype(value: object) -> Mapping[str, float]:
    if not isinstance(value, dict) or not value:
        raise ValueError("a table of dtypes and numbers")
    return {name: _take_number(number) for name, number in value.items()}


def _take_rows(length: int) -> Callable[[object], tuple[tuple[float, ...], ...]]:
    def take(value: object) -> tuple[tuple[float, ...], ...]:
        if not isinstance(value, list) or not all(
            isinstance(row, list) and len(row) == length for row in value
        ):
            raise ValueError(f"a list of rows of {length} numbers")
        return tuple(tuple(map(_take_number, row)) for row in value)

    return take


TAKERS: dict[Any, Callable[[object], Any]] = {
    int: _take_int,
    float: _take_number,
    Mapping[str, float]: _take_by_dtype,
    tuple[tuple[float, float], ...]: _take_rows(2),
    tuple[tuple[float, float, float], ...]: _take_rows(3),
}


def _range_problem(full_name: str, value: object) -> str:
    """Return the rule that a value breaks if it is out of range."""
    numbers = _numbers_in(value)
    if full_name in AT_LEAST_ONE:
        return "at least 1" if any(number < 1 for number in numbers) else ""
    if full_name in SHARES:
        return "above 0 and at most 1" if any(not 0 < number <= 1 for number in numbers) else ""
    if full_name in MAY_BE_ZERO or full_name.endswith(".band"):
        return "0 or more" if any(number < 0 for number in numbers) else ""
    return "above 0" if any(number <= 0 for number in numbers) else ""


def _numbers_in(value: object) -> list[float]:
    if isinstance(value, Mapping):
        return [float(number) for number in value.values()]
    if isinstance(value, tuple):
        return [number for each in value for number in _numbers_in(each)]
    return [float(value)] if isinstance(value, int | float) else []


# --- showing and writing ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assumption:
    """One value of a profile, for people."""

    name: str
    value: str
    source: str
    band: float | None
    """The relative error of its section's times, if it is known."""


def assumptions(machine: Machine) -> Sequence[Assumption]:
    """Return everything that a profile assumes, with its sources, in the order of the file."""
    found = []
    for section, facts in SECTIONS.items():
        for each in fields(facts):
            name = f"{section}.{each.name}"
            value = _toml(getattr(getattr(machine, section), each.name))
            found.append(Assumption(name, value, machine.sources[name], machine.bands.get(section)))
    return found


def to_toml(machine: Machine) -> str:
    """Return a profile's file, which `load_profile` reads."""
    lines = [
        f"name = {_toml(machine.name)}",
        f"title = {_toml(machine.title)}",
        f"aliases = {_toml(machine.aliases)}",
    ]
    for section, facts in SECTIONS.items():
        lines += ["", f"[{section}]  # {facts.TITLE}"]
        if section in machine.bands:
            lines.append(f"band = {_toml(machine.bands[section])}")
        for each in fields(facts):
            source = machine.sources[f"{section}.{each.name}"]
            value = getattr(getattr(machine, section), each.name)
            lines += [f"{each.name} = {_toml(value)}", f"source.{each.name} = {_toml(source)}"]
    return "\n".join([*lines, ""])


def _toml(value: object) -> str:
    match value:
        case int() | float():
            return repr(value)
        case str():
            text = value.replace("\\", "\\\\").replace('"', '\\"')
            return f'"{text}"'
        case tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case Mapping():
            return f"{{ {', '.join(f'{name} = {_toml(each)}' for name, each in value.items())} }}"
    raise TypeError(f"no profile has a {type(value).__name__}")
