"""Numbers for people: three digits and a unit."""

from __future__ import annotations

import math

from fullshard.errors import size_text

size = size_text
COUNTS = ("", " K", " M", " B", " T")


def duration(us: float) -> str:
    """Return microseconds in the unit that fits."""
    for unit_us, unit, limit_us in ((1, "\u00b5s", 999.5), (1e3, "ms", 999.5e3), (1e6, "s", 120e6)):
        if abs(us) < limit_us:
            return f"{_digits(us / unit_us)} {unit}"
    minutes = round(us / 60e6)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def count(number: float) -> str:
    """Return a count, rounded to three digits from a thousand on."""
    return f"{number:.0f}" if abs(number) < 1000 else _scaled(number, COUNTS)


def exact(number: float) -> str:
    """Return a count with all its digits."""
    return f"{number:,.0f}"


def loss_value(loss: float, *, digits: int) -> str:
    """Return a loss with so many decimals."""
    return f"{loss:.{digits}f}" if math.isfinite(loss) else "not finite"


def share(part: float) -> str:
    """Return a share as a percentage."""
    percent = 100 * part
    if 0 < percent < 0.05:
        return "< 0.1 %"
    if percent == 0:
        return "0 %"
    return f"{percent:.1f} %" if abs(percent) < 10 else f"{percent:.0f} %"


def _scaled(number: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if abs(number) < 999.5:
            return f"{_digits(number)}{unit}"
        number /= 1000
    return f"{_digits(number)}{units[-1]}"


def _digits(number: float) -> str:
    if number == 0:
        return "0"
    decimals = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    text = f"{number:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
