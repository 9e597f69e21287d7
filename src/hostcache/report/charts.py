"""Inline SVG from numbers. Colours come from the page's CSS variables, so one drawing serves light and dark.

Every mark carries its value as a `<title>` and as a visible label: no number can be read only by colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One piece of a bar. `series` picks the colour: `off`, `on`, `device`, `host`, `recomputed`.

    `label` is the full text of the tooltip, `short` what is written inside the piece where there is room.
    """

    series: str
    label: str
    short: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row of a chart: parts from left to right, and what is written at its end."""

    name: str
    parts: tuple[Part, ...]
    end_label: str


_WIDTH, _ROW, _BAR, _LEFT, _RIGHT, _TOP = 720, 58, 30, 92, 96, 14
_INSIDE = 52
"""A part narrower than this carries no label inside; its title and the legend still say its value."""


def horizontal_bars(bars: Sequence[Bar], *, name: str, description: str, longest: float | None = None) -> str:
    """Bars from a common zero; `longest` is the value of the full width (default: the longest bar)."""
    full = longest or max((sum(part.value for part in bar.parts) for bar in bars), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / full
    height = _TOP * 2 + _ROW * len(bars)
    marks = [mark for i, bar in enumerate(bars) for mark in _row(bar, _TOP + i * _ROW, scale)]
    slug = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-labelledby="{slug}-t {slug}-d" class="chart">\n'
        f'<title id="{slug}-t">{escape(name)}</title>\n<desc id="{slug}-d">{escape(description)}</desc>\n'
        f'<line class="axis" x1="{_LEFT}" y1="{_TOP / 2:g}" x2="{_LEFT}" y2="{height - _TOP / 2:g}"/>\n'
        + "\n".join(marks) + "\n</svg>")


def _row(bar: Bar, top: float, scale: float) -> list[str]:
    middle = top + _ROW / 2
    marks = [f'<text class="name" x="{_LEFT - 10}" y="{middle + 5:g}" text-anchor="end">{escape(bar.name)}</text>']
    at = float(_LEFT)
    for part in bar.parts:
        width = max(0.0, part.value * scale)
        marks.append(
            f'<rect class="mark {escape(part.series)}" x="{at:.2f}" y="{middle - _BAR / 2:g}" width="{width:.2f}" '
            f'height="{_BAR}" data-value="{part.value!r}"><title>{escape(f"{bar.name}, {part.label}")}</title></rect>')
        if part.short and width >= _INSIDE:
            marks.append(f'<text class="inside" x="{at + width / 2:.2f}" y="{middle + 5:g}" text-anchor="middle">'
                         f"{escape(part.short)}</text>")
        at += width
    marks.append(f'<text class="value" x="{at + 8:.2f}" y="{middle + 5:g}">{escape(bar.end_label)}</text>')
    return marks


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """(series, text) pairs."""
    return '<ul class="legend">' + "".join(
        f'<li><span class="key {escape(series)}" aria-hidden="true"></span>{escape(text)}</li>'
        for series, text in entries) + "</ul>"
