"""What a chart is, and what all charts have in common.

Figures are plotly's. Their colours are CSS variables, `var(--wait)`: `page.css` has the values, light and dark, and
`page.js` puts them in when it draws. Plotly reads a subset of HTML in any text, so names go in through `plain`.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of text under headings; columns beyond the first ``num_text`` are numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_text: int = 1
    keys: Sequence[Sequence[float | str]] = ()
    """What to sort rows by, where the text will not do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A figure in words and in one or several views."""

    name: str
    """Its id on the page."""
    title: str
    caption: str
    """How to read it, and what it shows: for all, and in place of the figure for who cannot see it."""
    views: Mapping[str, go.Figure]
    """By key; a chart without choices has one."""
    first: str = ""
    """The view to begin with."""
    numbers: Table | None = None
    """The same in numbers."""
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What can be chosen; a view's key joins one of each with a slash."""


def figure(traces: Sequence[Any], *, height: int, **layout: Any) -> go.Figure:
    """A figure in the page's style."""
    axis = {
        "gridcolor": "var(--grid)",
        "linecolor": "var(--line)",
        "zerolinecolor": "var(--grid)",
        "automargin": True,
        "title": {"standoff": 8},
    }
    common: dict[str, Any] = {
        "template": go.layout.Template(),
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "inherit", "size": 12, "color": "var(--muted)"},
        "hoverlabel": {
            "bgcolor": "var(--surface)",
            "bordercolor": "var(--line)",
            "font": {"color": "var(--ink)", "size": 12},
            "align": "left",
        },
        "showlegend": False,  # the page has its own, which wraps and can be reached by keyboard
        "dragmode": "zoom",
        "uirevision": "kept",  # the reader's zoom survives a change of colours
    }
    axes = {name: {**axis, **value} for name, value in layout.items() if "axis" in name}
    return go.Figure(data=list(traces), layout={**common, **layout, **axes})


def plain(text: str) -> str:
    """Text that plotly shows as it is, whatever is in it."""
    return html.escape(text, quote=False)
