"""Every exception fullshard raises on purpose.

    FullshardError
      ConfigurationError   (ValueError)     an option, mesh or module cannot be used as asked
        OptionTypeError    (TypeError)      ... because a value has the wrong type
      LayoutError          (ValueError)     shapes, dtypes and world size do not make a layout
      LifecycleError       (RuntimeError)   the right call at the wrong time
        UsageError         (ValueError)     ... or a call that does not fit the state of the model or machine
      CommunicationError   (RuntimeError)   a collective or a comm object broke its contract
      DivergenceError      (RuntimeError)   ranks do different things, or one of them has gone
      StreamOrderError     (RuntimeError)   streams and events leave the order of two accesses open
      StepFailedError      (RuntimeError)   a rank has failed a guarded step, and all have left it
      CheckpointError      (RuntimeError)   a checkpoint is damaged, does not fit, or cannot be written
      UnsupportedError     (NotImplementedError)   torch offers it, this version does not yet

The two indented classes have several built-in bases, because torch raises different ones in similar cases and
programs catch those. (A UsageError is a ConfigurationError and a LifecycleError.)

A message says the rule, then all offenders by full name, then the remedy. Checks run before the first
collective, on what every rank knows, so that all ranks raise the same error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class FullshardError(Exception):
    """Base of every exception this package raises on purpose."""


class ConfigurationError(FullshardError, ValueError):
    """An option, mesh, module or parameter cannot be used as asked."""


class OptionTypeError(ConfigurationError, TypeError):
    """An option is of the wrong type; torch raises ValueError for some of these and TypeError for others."""


class LayoutError(FullshardError, ValueError):
    """Shapes, dtypes and world size cannot be laid out."""


class LifecycleError(FullshardError, RuntimeError):
    """A call came at a time when it has no meaning."""


class UsageError(ConfigurationError, LifecycleError):
    """A call does not fit the state of the model or of the machine; torch raises ValueError or RuntimeError."""


class CommunicationError(FullshardError, RuntimeError):
    """A collective, or a comm object supplied by the user, broke its contract."""


class DivergenceError(FullshardError, RuntimeError):
    """Ranks do different things where all must do the same, or one of them has gone."""


class StreamOrderError(FullshardError, RuntimeError):
    """Streams and events leave the order of accesses to the same memory open: `fullshard.debug("streams")` has found races."""

    def __init__(self, message: str, races: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.races = tuple(races)
        """The pairs of accesses."""


class StepFailedError(FullshardError, RuntimeError):
    """A rank has raised an exception in a guarded step. All ranks have left the step; see `guarded_step`."""

    def __init__(self, message: str, failures: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.failures = tuple(failures)
        """A `StepFailure` for each rank that has failed."""


class CheckpointError(FullshardError, RuntimeError):
    """A checkpoint is damaged or not one, does not fit what it is loaded into, or cannot be written."""


class UnsupportedError(FullshardError, NotImplementedError):
    """A part of torch's FSDP surface that this version of fullshard does not have yet."""


def fault_paragraphs(faults: Iterable[str], rule: str, remedy: str) -> list[str]:
    """Return one paragraph of a message: the rule, a line per fault, the remedy; or none if nothing is at fault."""
    lines = sorted(set(faults))
    return [f"{rule}\n  " + "\n  ".join(lines) + f"\n{remedy}"] if lines else []


def exception_text(error: BaseException) -> str:
    """Return type and message of an exception."""
    return f"{type(error).__name__}: {exception_message(error)}"


def exception_message(error: BaseException) -> str:
    """Return the message of an exception, of any class: where ``str`` fails, it says so.

    A rank that is about to tell others why it fails must not fail once more.
    """
    try:
        return str(error)
    except Exception as broken:
        return f"(no message: __str__ raised {type(broken).__name__})"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as a message names them: "rank 3", "ranks 0, 1", "ranks 0-6, 8"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(runs) > 1 or len(runs[0]) > 1 else ''} {', '.join(parts)}"


def names_text(names: Sequence[str], most: int = 5) -> str:
    """Return names in one line: all of them, or the first and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
"""The units of sizes in all messages, tables and charts: those in which torch and drivers count memory."""


def size_text(num_bytes: float) -> str:
    """Return a number of bytes as three digits and a unit."""
    unit, bytes_in_unit = size_unit(num_bytes)
    return f"{num_bytes / bytes_in_unit:.3g} {unit}"


def size_unit(num_bytes: float) -> tuple[str, int]:
    """Return the unit in which a number of bytes has one to three digits before the point, and the unit's bytes."""
    power = 0
    while abs(num_bytes) >= 999.5 * 1024**power and power + 1 < len(SIZE_UNITS):
        power += 1
    return SIZE_UNITS[power], 1024**power
