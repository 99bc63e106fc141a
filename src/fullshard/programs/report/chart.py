"""Charts as data, and the parts common to all charts.

Figures are plotly's. Their colours are CSS variables such as `var(--wait)`; `page.css` has the values, light and dark, and
`page.js` inserts them when it draws. Plotly reads a subset of HTML in any text, so names must pass through `plain`.
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
    """Values to sort rows by, where sorting the text would be wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A figure with its texts, in one or several views."""

    name: str
    """Its id on the page."""
    title: str
    caption: str
    """Guide to the figure, with its content in words for readers without sight."""
    views: Mapping[str, go.Figure]
    """Views by key; a chart without choices has one view."""
    first: str = ""
    """The key of the view that is shown first."""
    numbers: Table | None = None
    """The figure as a table."""
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Values to choose from. A view's key is one value of each, joined by slashes."""


def figure(traces: Sequence[Any], *, height: int, **layout: Any) -> go.Figure:
    """Return a figure in the page's style."""
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
    """Return a text that plotly shows as it is, with HTML escaped."""
    return html.escape(text, quote=False)
