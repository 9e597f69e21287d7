"""Clouds and columns: marks where the values are, nothing outside, no text over another."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.report.charts import Axis, Column, Group, Line, Point, Rule, column_chart, scatter_chart

X, Y = Axis(name="s", write=lambda value: f"{value:g}"), Axis(name="TTFT", write=lambda value: f"{value:g}")


def cloud(*values: tuple[float, float], rules: tuple[Rule, ...] = (), failed: tuple[Point, ...] = ()) -> ET.Element:
    dots = tuple(Point(x=x, y=y, label=f"{y:g}") for x, y in values)
    return ET.fromstring(scatter_chart([Line(series="on", points=dots)], name="a <cloud>", description="words", x=X,
                                       y=Y, rules=rules, failed=failed))


def columns(*groups: tuple[float | None, ...], touching: bool = False, level: float | None = None) -> ET.Element:
    made = [Group(name=f"g{i}", columns=tuple(
        None if value is None else Column(series="on", value=value, label=f"{value:g}", short=f"{value:g}")
        for value in group)) for i, group in enumerate(groups)]
    return ET.fromstring(column_chart(made, name="columns", description="words", x_name="x", y=Y, touching=touching,
                                      level=None if level is None else Point(x=0, y=level, label="level")))


def test_equal_factors_are_equal_steps_upwards() -> None:
    ys = [float(dot.get("cy", "nan")) for dot in cloud((0, 0.1), (1, 1.0), (2, 10.0)).iter("circle")]
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.03)


def test_what_was_not_served_is_a_cross_with_its_reason() -> None:
    drawing = cloud((0, 1), failed=(Point(x=5, y=0, label="s1 turn 2: refused"),))
    (cross,) = drawing.iter("path")
    assert (cross.get("class"), cross.findtext("title")) == ("cross", "s1 turn 2: refused")


def test_rules_near_each_other_share_two_rows_and_the_rest_keep_their_titles() -> None:
    rules = tuple(Rule(x=float(i), text=f"segment {i}") for i in range(6))
    drawing = cloud((0, 1), (100, 2), rules=rules)
    texts = [text for text in drawing.iter("text") if text.get("class") == "rule-text"]
    assert [text.text for text in texts] == ["segment 0", "segment 1"]
    assert len({text.get("y") for text in texts}) == 2
    titles = [line.findtext("title") for line in drawing.iter("line") if line.get("class") == "rule"]
    assert titles == [rule.text for rule in rules]


def test_columns_are_as_high_as_their_values_and_an_empty_place_stays_empty() -> None:
    drawing = columns((10.0, None), (20.0, 40.0), level=5.0)
    heights = [float(mark.get("height", "nan")) for mark in drawing.iter("rect")]
    assert heights == [pytest.approx(heights[2] / 4, abs=0.02), pytest.approx(heights[2] / 2, abs=0.02), heights[2]]
    assert [line.findtext("title") for line in drawing.iter("line") if line.get("class") == "rule"] == ["level"]


def test_the_bins_of_a_histogram_touch() -> None:
    marks = list(columns((1.0,), (2.0,), (3.0,), touching=True).iter("rect"))
    for one, other in pairwise(marks):
        assert float(one.get("x", "nan")) + float(one.get("width", "nan")) == pytest.approx(
            float(other.get("x", "nan")), abs=0.02)


@pytest.mark.parametrize("groups", [(), ((None,),), ((-1.0,),)])
def test_columns_of_nothing_or_below_zero_are_refused(groups: tuple[tuple[float | None, ...], ...]) -> None:
    with pytest.raises(ValueError, match="no column"):
        columns(*groups)


def test_a_cloud_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no point"):
        cloud()


VALUES = st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e4)), min_size=1, max_size=20)


@given(VALUES)
def test_nothing_of_a_cloud_leaves_the_drawing(values: list[tuple[float, float]]) -> None:
    drawing = cloud(*values, rules=(Rule(x=values[0][0], text="here"),))
    _, _, width, height = map(float, drawing.get("viewBox", "").split())
    for dot in drawing.iter("circle"):
        assert 0 <= float(dot.get("cx", "nan")) <= width
        assert 0 <= float(dot.get("cy", "nan")) <= height
    for text in drawing.iter("text"):
        assert 0 <= float(text.get("x", "nan")) <= width
        assert 0 < float(text.get("y", "nan")) <= height


@given(st.lists(st.tuples(st.floats(0, 1e6), st.none() | st.floats(0, 1e6)), min_size=1, max_size=30), st.booleans())
def test_nothing_of_columns_leaves_the_drawing(groups: list[tuple[float, float | None]], touching: bool) -> None:
    drawing = columns(*groups, touching=touching)
    _, _, width, height = map(float, drawing.get("viewBox", "").split())
    for mark in drawing.iter("rect"):
        x, y = float(mark.get("x", "nan")), float(mark.get("y", "nan"))
        assert 0 <= x <= x + float(mark.get("width", "nan")) <= width + 0.01
        assert 0 <= y <= y + float(mark.get("height", "nan")) <= height + 0.01
