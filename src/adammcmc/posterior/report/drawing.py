"""Figures as SVG in the colours of the page: matplotlib draws, and each colour becomes a CSS variable.

A figure is part of the page (`Drawing.svg`) and a file of its own (`Drawing.file`). Both are readable in light and dark
mode, scale with the screen, and have a description in words.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["INK", "MUTED", "SERIES", "THEME", "Drawing", "draw"]

# unique colours, to be replaced in the SVG
INK, MUTED, GRID = "#010203", "#040506", "#070809"
SERIES = ("#0a0b0c", "#0d0e0f", "#101112", "#131415", "#161718", "#191a1b")
_NAMES = {INK: "ink", MUTED: "muted", GRID: "grid", **{colour: f"s{i}" for i, colour in enumerate(SERIES)}}

_LIGHT = {
    "paper": "#ffffff", "panel": "#f5f6f8", "ink": "#1b1f24", "muted": "#59636e", "grid": "#d1d9e0", "good": "#116329",
    "bad": "#a40e26", "unsure": "#7d4e00", "link": "#0550ae",
    "s0": "#0072b2", "s1": "#d55e00", "s2": "#007a5a", "s3": "#a6508a", "s4": "#7a6a00", "s5": "#56657a",
}  # fmt: skip
_DARK = {
    "paper": "#0d1117", "panel": "#161b22", "ink": "#e6edf3", "muted": "#9da7b1", "grid": "#30363d", "good": "#56d364",
    "bad": "#ff8182", "unsure": "#e3b341", "link": "#79c0ff",
    "s0": "#56b4e9", "s1": "#ff9a5c", "s2": "#3fd0a4", "s3": "#e3a0cc", "s4": "#e6d65c", "s5": "#a9b8cc",
}  # fmt: skip


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


THEME = (
    f":root{{color-scheme:light dark;{_variables(_LIGHT)}}}@media (prefers-color-scheme:dark){{:root{{{_variables(_DARK)}}}}}"
)
"""The colours of the page as CSS variables; the reader's system chooses light or dark."""


@dataclass(frozen=True)
class Drawing:
    """One figure."""

    name: str
    """The name of its file, without suffix."""
    title: str
    words: str
    """What it shows, for screen readers."""
    svg: str
    """An element for a page that has the variables of `THEME`."""
    width: float
    """Maximal, in rem."""

    @property
    def file(self) -> str:
        """The figure as a file of its own."""
        style = f"<style>{THEME}svg{{background:var(--paper)}}</style>"
        return '<?xml version="1.0" encoding="utf-8"?>\n' + re.sub(r"(<svg[^>]*>)", rf"\1{style}", self.svg, count=1)


def draw(name: str, title: str, paint: Callable[[Axes], str], width: float, height: float) -> Drawing:
    """A figure that `paint` draws on its axes; `paint` returns what the figure shows, in words."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif", "font.size": 10, "text.color": INK,
        "axes.labelcolor": INK, "axes.edgecolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED, "grid.color": GRID,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.linewidth": 0.6,
        "legend.frameon": False, "axes.facecolor": "none", "figure.facecolor": "none", "axes.titlesize": 11,
    }  # fmt: skip
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        words = paint(figure.subplots())
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return Drawing(name, title, words, _themed(file.getvalue(), name, title, words), 6.4 * width)


def _themed(svg: str, name: str, title: str, words: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for colour, variable in _NAMES.items():
        svg = svg.replace(colour, f"var(--{variable})")
    # ids must be unique on the page
    for before in ('id="', "url(#", 'href="#'):
        svg = svg.replace(before, f"{before}{name}-")
    # as wide as the page allows, in proportion
    svg = re.sub(r'(<svg[^>]*?) width="[\d.]+pt"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[\d.]+pt"', r"\1", svg, count=1)
    label = f'role="img" aria-labelledby="{name}-title {name}-words"'
    head = f'<title id="{name}-title">{html.escape(title)}</title><desc id="{name}-words">{html.escape(words)}</desc>'
    return re.sub(r"<svg([^>]*)>", lambda match: f"<svg {label}{match.group(1)}>{head}", svg, count=1)
