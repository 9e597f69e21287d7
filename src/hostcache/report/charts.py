"""Inline SVG from numbers. Colours come from the page's CSS variables, so one drawing serves light and dark.

Every mark carries its value as a `<title>` and as a visible label, and a line that is told from another by colour is
told by dashes or by the text beside it too: nothing can be read only by colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import combinations, product
from typing import TypeAlias


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


# --- lines ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value of a line. `label` is the text of its tooltip, `short` what is written beside it ("": nothing)."""

    x: float
    y: float
    label: str
    short: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart, its points in ascending x. Dashed lines have hollow marks; a line that is not `marked` has
    none, for a curve of many points; a `level` line has none either, it is drawn across the whole width at its one
    point's height, with that point's `short` at its end."""

    series: str
    points: tuple[Point, ...]
    dashed: bool = False
    level: bool = False
    marked: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What is written along one side: its name, and how a tick is written. `ticks` None: round numbers from 0 for y,
    both ends for x; a tick that is written "" is a mark alone. `rows`, of x alone: (name, one text a tick), written
    under the ticks like a small table: a second unit, or labels that would cover each other beside the points."""

    name: str
    write: Callable[[float], str]
    ticks: tuple[float, ...] | None = None
    rows: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A vertical line at `x` with a text, drawn under the lines."""

    x: float
    text: str


_PLOT_LEFT, _PLOT_RIGHT, _PLOT_TOP, _PLOT_FOOT, _INSET, _TEXT_ROW = 64, 16, 42, 288, 46, 19
_LETTER, _LABEL_HEIGHT, _RADIUS, _CROSSED = 7.2, 15, 4.5, 2.5
"""Sizes in the drawing's own units. `_LETTER` is a guess at the mean width of a digit, on the wide side, for keeping
labels apart; nothing measures text here. `_CROSSED`: how many steps further away a label may stand before it is rather
crossed by a line."""

Box: TypeAlias = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def line_chart(lines: Sequence[Line], *, name: str, description: str, x: Axis, y: Axis, log_x: bool = False,
               y_most: float | None = None, rule: Rule | None = None, rules: Sequence[Rule] = ()) -> str:
    """Lines over a common axis from 0. `y_most`: the value at the top (default: a round number above the highest).
    `rule`, `rules`: one or several.

    Raises ValueError where there is no point, or one with x ≤ 0 on a logarithmic axis, or a negative y.
    """
    points = [point for line in lines for point in line.points]
    places = [point.x for line in lines if not line.level for point in line.points]
    if not places:
        raise ValueError(f"the chart {name!r} has no point to draw")
    if (log_x and min(places) <= 0) or min(point.y for point in points) < 0:
        raise ValueError(f"the chart {name!r} has a point outside its axes")
    frame = _frame_of(places, points, x.ticks or (), y, log_x, y_most)
    slug = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
    height = _PLOT_FOOT + 14 + _TEXT_ROW * max(2, 1 + len(x.rows))
    placed = _placed(frame, [*([rule] if rule else []), *rules])
    name_box = (_PLOT_LEFT, 2.0, _PLOT_LEFT + len(y.name) * _LETTER, 18.0)
    over = _TEXT_ROW if any(_overlap(box, name_box) for _, box in placed) else 0
    marks = [*_grid(frame, x, y, name_y=14 - over), *(_rule(frame, each, box) for each, box in placed)]
    for line in lines:
        marks += _level(frame, line) if line.level else _line(frame, line)
    marks += _labels(frame, lines, [box for _, box in placed])
    return (
        f'<svg viewBox="0 {-over} {_WIDTH} {height + over}" role="img" aria-labelledby="{slug}-t {slug}-d" '
        f'class="chart lines">\n<title id="{slug}-t">{escape(name)}</title>\n'
        f'<desc id="{slug}-d">{escape(description)}</desc>\n' + "\n".join(marks) + "\n</svg>")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Where a value lies on the drawing."""

    low: float
    high: float
    log_x: bool
    y_most: float
    y_ticks: tuple[float, ...]
    y_least: float | None = None
    """The value at the foot of a logarithmic y axis; None: linear from 0."""

    def x(self, value: float) -> float:
        left, right = _PLOT_LEFT + _INSET, _WIDTH - _PLOT_RIGHT - _INSET
        low, high = self.low, self.high
        if self.log_x:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (left + right) / 2 if high == low else left + (value - low) / (high - low) * (right - left)

    def y(self, value: float) -> float:
        if self.y_least is not None:
            share = math.log(max(value, self.y_least) / self.y_least) / math.log(self.y_most / self.y_least)
            return _PLOT_FOOT - share * (_PLOT_FOOT - _PLOT_TOP)
        return _PLOT_FOOT - value / self.y_most * (_PLOT_FOOT - _PLOT_TOP)


def _frame_of(places: Sequence[float], points: Sequence[Point], x_ticks: Sequence[float], y: Axis, log_x: bool,
              y_most: float | None) -> _Frame:
    top = y_most or max(point.y for point in points)
    top = top if top > 1e-9 else 1.0  # all of it on the axis: any scale will do
    ticks = y.ticks or round_ticks(top)
    return _Frame(low=min([*places, *x_ticks]), high=max([*places, *x_ticks]), log_x=log_x,
                  y_most=y_most or max(top, ticks[-1]), y_ticks=ticks)


def round_ticks(most: float, wanted: int = 5) -> tuple[float, ...]:
    """0 and multiples of 1, 2 or 5 times a power of ten, the last at or above `most`."""
    step = 10.0 ** math.floor(math.log10(most / wanted))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step * wanted >= most * (1 - 1e-9))
    count = math.ceil(most / step * (1 - 1e-9))
    return tuple(round(i * step, 12) for i in range(count + 1))


def _y_grid(frame: _Frame, y: Axis, name_y: int = 14) -> list[str]:
    right = _WIDTH - _PLOT_RIGHT
    marks = []
    for value in frame.y_ticks:
        at = frame.y(value)
        marks.append(f'<line class="grid" x1="{_PLOT_LEFT}" y1="{at:.2f}" x2="{right}" y2="{at:.2f}"/>'
                     f'<text class="tick" x="{_PLOT_LEFT - 8}" y="{at + 4.5:.2f}" text-anchor="end">'
                     f"{escape(y.write(value))}</text>")
    marks.append(f'<line class="axis" x1="{_PLOT_LEFT}" y1="{_PLOT_FOOT}" x2="{right}" y2="{_PLOT_FOOT}"/>')
    marks.append(f'<text class="axis-name" x="{_PLOT_LEFT}" y="{name_y}">{escape(y.name)}</text>')
    return marks


def _grid(frame: _Frame, x: Axis, y: Axis, name_y: int) -> list[str]:
    under = _PLOT_FOOT + _TEXT_ROW
    marks = _y_grid(frame, y, name_y)
    ticks = x.ticks or (frame.low, frame.high)
    for i, value in enumerate(ticks):
        at = frame.x(value)
        marks.append(f'<line class="axis" x1="{at:.2f}" y1="{_PLOT_FOOT}" x2="{at:.2f}" y2="{_PLOT_FOOT + 5}"/>')
        for j, (kind, text) in enumerate([("tick", x.write(value)), *(("value", texts[i]) for _, texts in x.rows)]):
            if not text:
                continue
            marks.append(f'<text class="{kind}" x="{at:.2f}" y="{under + j * _TEXT_ROW}" text-anchor="middle">'
                         f"{escape(text)}</text>")
    if x.rows:
        for j, name in enumerate([x.name, *(name for name, _ in x.rows)]):
            marks.append(f'<text class="axis-name" x="0" y="{under + j * _TEXT_ROW}">{escape(name)}</text>')
    else:
        marks.append(f'<text class="axis-name" x="{_PLOT_LEFT}" y="{under + _TEXT_ROW}">{escape(x.name)}</text>')
    return marks


def _rule(frame: _Frame, rule: Rule, box: Box) -> str:
    at, (left, _, right, foot) = frame.x(rule.x), box
    return (f'<line class="rule" x1="{at:.2f}" y1="{foot:.2f}" x2="{at:.2f}" y2="{_PLOT_FOOT}"/>'
            f'<text class="rule-text" x="{(left + right) / 2:.2f}" y="{foot - 4:.2f}" text-anchor="middle">'
            f"{escape(rule.text)}</text>")


def _placed(frame: _Frame, rules: Sequence[Rule]) -> list[tuple[Rule, Box]]:
    """Each rule's text stands at its head, above the plot: over it, or beside it or a row higher where another's is in
    the way."""
    wanted = []
    for rule in rules:
        at, wide = frame.x(rule.x), len(rule.text) * _LETTER
        wanted.append([(at + shift - wide / 2, foot - _LABEL_HEIGHT, at + shift + wide / 2, foot)
                       for foot in (_PLOT_TOP - 3.0, _PLOT_TOP - 18.0) for shift in (0.0, wide / 2 + 3, -wide / 2 - 3)])
    for boxes in product(*wanted):
        stems = [(frame.x(rule.x), box[3], frame.x(rule.x), _PLOT_TOP) for rule, box in zip(rules, boxes, strict=True)]
        if all(box[0] >= 0 and box[2] <= _WIDTH for box in boxes) and not any(
                _overlap(one, other) for one, other in [*combinations(boxes, 2), *product(boxes, stems)]):
            return list(zip(rules, boxes, strict=True))
    return [(rule, middle) for rule, (middle, *_) in zip(rules, wanted, strict=True)]


def _line(frame: _Frame, line: Line) -> list[str]:
    dashed = " dashed" if line.dashed else ""
    path = " ".join(f"{frame.x(point.x):.2f},{frame.y(point.y):.2f}" for point in line.points)
    marks = [f'<polyline class="line {escape(line.series)}{dashed}" points="{path}"/>']
    look = f'class="dot {escape(line.series)}{dashed}"' if line.marked else 'class="unmarked" fill="transparent"'
    for point in line.points:
        marks.append(
            f'<circle {look} cx="{frame.x(point.x):.2f}" '
            f'cy="{frame.y(point.y):.2f}" r="{_RADIUS}" data-x="{point.x!r}" data-value="{point.y!r}">'
            f"<title>{escape(point.label)}</title></circle>")
    return marks


def _level(frame: _Frame, line: Line) -> list[str]:
    (point,) = line.points
    at, right = frame.y(point.y), _WIDTH - _PLOT_RIGHT
    dashed = " dashed" if line.dashed else ""
    return [f'<line class="line {escape(line.series)}{dashed}" x1="{_PLOT_LEFT}" y1="{at:.2f}" x2="{right}" '
            f'y2="{at:.2f}" data-value="{point.y!r}"><title>{escape(point.label)}</title></line>']


def _labels(frame: _Frame, lines: Sequence[Line], taken: Sequence[Box]) -> list[str]:
    """Each label near its mark, over no other label or mark, and over no line where there is such a place."""
    boxes = list(taken)
    for line in lines:
        for point in line.points if line.marked and not line.level else ():
            x, y = frame.x(point.x), frame.y(point.y)
            boxes.append((x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS))
    crossed = [box for line in lines for box in _steps(frame, line)]
    written = []
    for line in lines:
        for point in line.points:
            if not point.short:
                continue
            wide = len(point.short) * _LETTER
            x = _PLOT_LEFT + wide / 2 + 6 if line.level else frame.x(point.x)
            box = _free_place(x, frame.y(point.y), wide, boxes, crossed)
            boxes.append(box)
            written.append(f'<text class="value" x="{(box[0] + box[2]) / 2:.2f}" y="{box[3] - 3.5:.2f}" '
                           f'text-anchor="middle">{escape(point.short)}</text>')
    return written


def _steps(frame: _Frame, line: Line) -> list[Box]:
    """A line as small boxes along it."""
    if line.level:
        y = frame.y(line.points[0].y)
        return [(_PLOT_LEFT, y - 2, _WIDTH - _PLOT_RIGHT, y + 2)]
    boxes = []
    for one, other in zip(line.points, line.points[1:], strict=False):
        x1, y1, x2, y2 = frame.x(one.x), frame.y(one.y), frame.x(other.x), frame.y(other.y)
        count = max(1, math.ceil(math.hypot(x2 - x1, y2 - y1) / 6))
        for i in range(count + 1):
            x, y = x1 + (x2 - x1) * i / count, y1 + (y2 - y1) * i / count
            boxes.append((x - 2, y - 2, x + 2, y + 2))
    return boxes


def _free_place(x: float, y: float, wide: float, boxes: Sequence[Box], crossed: Sequence[Box]) -> Box:
    """The nearest place over nothing else; one that a line crosses counts as so much further away."""
    shifts = [(far, across, down) for far in range(12) for down in (-6.0 - 8 * far, 6.0 + _LABEL_HEIGHT + 8 * far)
              for across in (0.0, -wide / 3, wide / 3)]
    shifts[6:6] = [(0, -wide / 2 - 8, 5.0), (0, wide / 2 + 8, 5.0)]
    places = [(far, (x + across - wide / 2, y + down - _LABEL_HEIGHT, x + across + wide / 2, y + down))
              for far, across, down in shifts]
    inside = [(far, box) for far, box in places if box[0] >= _PLOT_LEFT and box[2] <= _WIDTH and box[1] >= 16
              and box[3] <= _PLOT_FOOT - 1]
    free = [(far + _CROSSED * any(_overlap(box, line) for line in crossed), box) for far, box in inside
            if not any(_overlap(box, other) for other in boxes)]
    return min(free, key=lambda place: place[0])[1] if free else next(iter([*inside, *places]))[1]


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def line_legend(entries: Sequence[tuple[str, bool, str]]) -> str:
    """(series, dashed, text): a piece of each line and what it is."""
    return '<ul class="legend">' + "".join(
        f'<li><svg class="key-line" viewBox="0 0 34 12" aria-hidden="true">'
        f'<line class="line {escape(series)}{" dashed" if dashed else ""}" x1="0" y1="6" x2="34" y2="6"/></svg>'
        f"{escape(text)}</li>" for series, dashed, text in entries) + "</ul>"


# --- clouds ---------------------------------------------------------------------------------------------------------


_CLOUD_RADIUS = 2.8
_DEPTH = 1e6


def scatter_chart(clouds: Sequence[Line], *, name: str, description: str, x: Axis, y: Axis,
                  rules: Sequence[Rule] = (), failed: Sequence[Point] = ()) -> str:
    """One dot a point on a logarithmic y axis; dashed clouds have hollow dots. `failed`: crosses on the upper edge at
    their x, for what has no y. Values under a millionth of the highest stand on the foot.

    Raises ValueError where there is nothing to draw.
    """
    points = [point for cloud in clouds for point in cloud.points]
    places = [point.x for point in [*points, *failed]]
    if not places:
        raise ValueError(f"the chart {name!r} has no point to draw")
    top = max([point.y for point in points], default=1.0)
    top = top if top > 1e-9 else 1.0
    ticks = _decades([top, *(point.y for point in points if point.y > top / _DEPTH)])
    xs = round_ticks(max(places)) if max(places) > 1e-9 else (0.0,)
    frame = _Frame(low=0.0, high=xs[-1], log_x=False, y_most=ticks[-1], y_ticks=ticks, y_least=ticks[0])
    marks = [*_y_grid(frame, y), *_x_name(x.name), *_rules(frame, rules)]
    for value in xs:
        marks.append(f'<text class="tick" x="{frame.x(value):.2f}" y="{_PLOT_FOOT + _TEXT_ROW}" text-anchor="middle">'
                     f"{escape(x.write(value))}</text>")
    for cloud in clouds:
        marks += [_dot(frame, cloud, point) for point in cloud.points]
    for point in failed:
        at = frame.x(point.x)
        marks.append(f'<path class="cross" d="M{at - 4:.2f} {_PLOT_TOP - 4}l8 8m0 -8l-8 8" data-x="{point.x!r}">'
                     f"<title>{escape(point.label)}</title></path>")
    return _drawing(name, description, _PLOT_FOOT + 14 + 2 * _TEXT_ROW, "chart lines", marks)


def _dot(frame: _Frame, cloud: Line, point: Point) -> str:
    hollow = " dashed" if cloud.dashed else ""
    return (f'<circle class="dot cloud {escape(cloud.series)}{hollow}" cx="{frame.x(point.x):.2f}" '
            f'cy="{frame.y(point.y):.2f}" r="{_CLOUD_RADIUS}" data-x="{point.x!r}" data-value="{point.y!r}">'
            f"<title>{escape(point.label)}</title></circle>")


def _rules(frame: _Frame, rules: Sequence[Rule]) -> list[str]:
    """Lines where something began; texts in two rows, one that finds no room is left to the line's title."""
    marks = []
    taken = [float("-inf")] * 2
    for rule in sorted(rules, key=lambda rule: rule.x):
        at = frame.x(rule.x)
        marks.append(f'<line class="rule" x1="{at:.2f}" y1="{_PLOT_TOP}" x2="{at:.2f}" y2="{_PLOT_FOOT}">'
                     f"<title>{escape(rule.text)}</title></line>")
        wide = len(rule.text) * _LETTER
        row = next((i for i, until in enumerate(taken) if at > until and at + wide <= _WIDTH), None)
        if row is not None:
            marks.append(f'<text class="rule-text" x="{at:.2f}" y="{_PLOT_TOP - 4 - 11 * row}">{escape(rule.text)}'
                         "</text>")
            taken[row] = at + wide + 6
    return marks


def _decades(values: Sequence[float]) -> tuple[float, ...]:
    """Powers of ten around all values; with 2 and 5 between where there are few."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    steps = (1.0, 2.0, 5.0) if high - low <= 2 else (1.0,)
    return (*(step * 10.0 ** power for power in range(low, high) for step in steps), 10.0 ** high)


# --- columns --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column. `label` is its tooltip, `short` what is written above it ("": nothing). A hollow one is outlined."""

    series: str
    value: float
    label: str
    short: str = ""
    hollow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Columns side by side over one name; None leaves the place of a column empty."""

    name: str
    columns: tuple[Column | None, ...]


def column_chart(groups: Sequence[Group], *, name: str, description: str, x_name: str, y: Axis,
                 touching: bool = False, level: Point | None = None) -> str:
    """Groups of upright columns from a common zero; `touching`: without gaps between the groups, as in a histogram.
    `level`: a line across at its y. Raises ValueError where there is no column, or one below 0."""
    values = [column.value for group in groups for column in group.columns if column is not None]
    if not values or min(values) < 0:
        raise ValueError(f"the chart {name!r} has no column to draw, or one below 0")
    top = max([*values, *([level.y] if level else [])])
    ticks = y.ticks or round_ticks(top if top > 1e-9 else 1.0)
    frame = _Frame(low=0.0, high=1.0, log_x=False, y_most=max(top, ticks[-1]), y_ticks=ticks)
    left, right = float(_PLOT_LEFT), float(_WIDTH - _PLOT_RIGHT)
    step = (right - left) / len(groups)
    marks = [*_y_grid(frame, y), *_x_name(x_name)]
    every = max(1, math.ceil(max(len(group.name) for group in groups) * _LETTER / step))
    for i, group in enumerate(groups):
        marks += _columns(frame, group, left + i * step, step, 0.0 if touching else min(0.3, 0.08 * step / 2))
        if i % every == 0:
            marks.append(f'<text class="tick" x="{left + (i + .5) * step:.2f}" y="{_PLOT_FOOT + _TEXT_ROW}" '
                         f'text-anchor="middle">{escape(group.name)}</text>')
    if level is not None:
        at = frame.y(level.y)
        marks.append(f'<line class="rule" x1="{left}" y1="{at:.2f}" x2="{right}" y2="{at:.2f}">'
                     f"<title>{escape(level.label)}</title></line>")
        if level.short:
            marks.append(f'<text class="rule-text" x="{right:.2f}" y="{at - 4:.2f}" text-anchor="end">'
                         f"{escape(level.short)}</text>")
    return _drawing(name, description, _PLOT_FOOT + 14 + 2 * _TEXT_ROW, "chart lines", marks)


def _columns(frame: _Frame, group: Group, left: float, step: float, gap: float) -> list[str]:
    wide = step * (1 - 2 * gap) / max(1, len(group.columns))
    wide = min(wide, 64.0) if gap else wide
    start = left + (step - wide * len(group.columns)) / 2
    marks = []
    for i, column in enumerate(group.columns):
        if column is None:
            continue
        x, y = start + i * wide, frame.y(column.value)
        hollow = " hollow" if column.hollow else ""
        marks.append(
            f'<rect class="mark {escape(column.series)}{hollow}" x="{x:.2f}" y="{y:.2f}" width="{wide:.2f}" '
            f'height="{max(0.0, _PLOT_FOOT - y):.2f}" data-value="{column.value!r}">'
            f"<title>{escape(column.label)}</title></rect>")
        if column.short and len(column.short) * _LETTER <= max(wide, step / len(group.columns)):
            marks.append(f'<text class="value" x="{x + wide / 2:.2f}" y="{y - 5:.2f}" text-anchor="middle">'
                         f"{escape(column.short)}</text>")
    return marks


def _x_name(name: str) -> list[str]:
    """Under the ticks, in a row of its own."""
    return [f'<text class="axis-name" x="{_PLOT_LEFT}" y="{_PLOT_FOOT + 2 * _TEXT_ROW}">{escape(name)}</text>']


def _drawing(name: str, description: str, height: float, kind: str, marks: Sequence[str]) -> str:
    slug = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
    return (f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-labelledby="{slug}-t {slug}-d" class="{kind}">\n'
            f'<title id="{slug}-t">{escape(name)}</title>\n<desc id="{slug}-d">{escape(description)}</desc>\n'
            + "\n".join(marks) + "\n</svg>")
