"""What a line chart must show: marks where the values are, every value readable, nothing outside or on top."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.report.charts import Axis, Line, Point, Rule, line_chart, line_legend, round_ticks

X, Y = Axis(name="agents", write=lambda value: f"{value:g}"), Axis(name="seconds", write=lambda value: f"{value:g} s")


def line(*values: tuple[float, float], series: str = "on", dashed: bool = False, labels: bool = True) -> Line:
    return Line(series=series, dashed=dashed, points=tuple(
        Point(x=x, y=y, label=f"{series} at {x:g}: {y:g}", short=f"{y:.1f}" if labels else "") for x, y in values))


def draw(*lines: Line, x: Axis = X, log_x: bool = False, rule: Rule | None = None,
         rules: Sequence[Rule] = ()) -> ET.Element:
    return ET.fromstring(line_chart(lines, name="Time <per> turn", description="in words", x=x, y=Y, log_x=log_x,
                                    rule=rule, rules=rules))


def dots(drawing: ET.Element) -> list[tuple[float, float]]:
    return [(float(dot.get("cx", "nan")), float(dot.get("cy", "nan"))) for dot in drawing.iter("circle")]


def texts(drawing: ET.Element, kind: str) -> list[str]:
    return [text.text or "" for text in drawing.iter("text") if text.get("class") == kind]


def test_marks_stand_in_proportion_to_their_values_from_a_zero_axis() -> None:
    drawing = draw(line((8, 10), (16, 20), (32, 40)))
    (x8, y10), (x16, y20), (x32, y40) = dots(drawing)
    assert (x32 - x16) == pytest.approx(2 * (x16 - x8), abs=0.03)
    assert (y10 - y20) == pytest.approx((y20 - y40) / 2, abs=0.03)
    zero = next(text for text in drawing.iter("text") if text.text == "0 s")
    assert float(zero.get("y", "nan")) - 4.5 == pytest.approx(y10 + (y10 - y20), abs=0.03)


def test_a_logarithmic_axis_gives_equal_steps_to_equal_factors() -> None:
    (x1, _), (x2, _), (x4, _) = dots(draw(line((1, 1), (2, 1), (4, 1)), log_x=True))
    assert x2 - x1 == pytest.approx(x4 - x2, abs=0.03)


def test_every_mark_has_its_value_as_title_and_as_visible_text() -> None:
    drawing = draw(line((8, 10), (16, 20)), line((8, 12), (16, 22), series="off", dashed=True))
    for dot in drawing.iter("circle"):
        title = dot.find("title")
        assert title is not None
        assert dot.get("data-value", "nan").removesuffix(".0") in (title.text or "")
    assert sorted(texts(drawing, "value")) == ["10.0", "12.0", "20.0", "22.0"]


def test_published_and_simulated_differ_by_dashes_and_hollow_marks_not_only_by_colour() -> None:
    drawing = draw(line((8, 10), (16, 20), dashed=True), line((8, 12), (16, 22)))
    assert [each.get("class") for each in drawing.iter("polyline")] == ["line on dashed", "line on"]
    assert [each.get("class") for each in drawing.iter("circle")] == ["dot on dashed"] * 2 + ["dot on"] * 2


def test_a_table_under_the_axis_has_one_text_a_tick() -> None:
    x = Axis(name="agents", write=lambda value: f"{value:g}", ticks=(8.0, 16.0), rows=(("off", ("1", "2")),))
    drawing = draw(line((8, 1), (16, 2), labels=False), x=x)
    ticks = {text.text: text.get("x") for text in drawing.iter("text") if text.get("class") in ("tick", "value")}
    assert (ticks["1"], ticks["2"]) == (ticks["8"], ticks["16"])
    assert texts(drawing, "axis-name") == ["seconds", "agents", "off"]


def test_a_level_line_spans_the_plot_and_a_rule_stands_at_its_value() -> None:
    level = Line(series="off", level=True, dashed=True, points=(Point(x=1, y=5, label="off: 5", short="off 5"),))
    drawing = draw(line((1, 10), (2, 20), (4, 20)), level, rule=Rule(x=2, text="enough"), log_x=True)
    (across,) = [each for each in drawing.iter("line") if each.get("class") == "line off dashed"]
    assert float(across.get("x2", "nan")) - float(across.get("x1", "nan")) > 600
    (rule,) = [each for each in drawing.iter("line") if each.get("class") == "rule"]
    assert float(rule.get("x1", "nan")) == pytest.approx(dots(drawing)[1][0], abs=0.03)
    assert "enough" in texts(drawing, "rule-text")


@given(st.lists(st.integers(0, 100), min_size=1, max_size=2, unique=True))
def test_texts_of_two_rules_stand_at_their_lines_and_not_on_each_other(places: list[int]) -> None:
    drawing = draw(line((0, 1), (100, 2)), rules=[Rule(x=float(place), text="a pool of them") for place in places])
    lines = sorted(float(each.get("x1", "nan")) for each in drawing.iter("line") if each.get("class") == "rule")
    written = sorted((float(text.get("x", "nan")), float(text.get("y", "nan")))
                     for text in drawing.iter("text") if text.get("class") == "rule-text")
    wide = 7.2 * len("a pool of them")
    assert len(lines) == len(written) == len(places)
    for i, (x, y) in enumerate(written):
        assert any(abs(x - at) <= wide / 2 + 3.1 for at in lines)
        assert wide / 2 - 0.1 <= x <= 720 - wide / 2 + 0.1
        assert not any(abs(x - other) < wide - 0.1 and abs(y - level) < 12 for other, level in written[i + 1:])


def test_a_curve_without_marks_keeps_its_values_as_titles_and_ticks_without_a_text_are_marks_alone() -> None:
    x = Axis(name="tokens", write=lambda value: "" if value == 16 else f"{value:g}", ticks=(8.0, 16.0, 32.0),
             rows=(("GiB", ("1", "", "4")),))
    values = tuple(Point(x=x, y=x, label=f"at {x:g}") for x in (8.0, 16.0, 32.0))
    drawing = draw(Line(series="on", points=values, marked=False), x=x)
    assert [each.get("class") for each in drawing.iter("circle")] == ["unmarked"] * 3
    assert [title.text for circle in drawing.iter("circle") for title in circle] == ["at 8", "at 16", "at 32"]
    assert [text for text in texts(drawing, "tick") if text.isdigit()] == ["8", "32"]
    assert texts(drawing, "value") == ["1", "4"]
    assert sum(each.get("class") == "axis" and each.get("y2") == "293" for each in drawing.iter("line")) == 3


def test_names_and_words_are_escaped_and_the_chart_is_told_in_words() -> None:
    drawing = draw(line((8, 10)))
    assert (drawing.get("role"), drawing[0].text, drawing[1].text) == ("img", "Time <per> turn", "in words")
    assert drawing.get("aria-labelledby", "").split() == [drawing[0].get("id"), drawing[1].get("id")]
    assert "&lt;b&gt;" in line_legend((("off", True, "<b>"),))


VALUES = st.lists(st.tuples(st.floats(1, 1e6), st.floats(0, 1e6)), min_size=1, max_size=8,
                  unique_by=lambda value: value[0]).map(sorted)


@given(VALUES, VALUES, st.booleans())
def test_nothing_that_is_drawn_leaves_the_drawing(
        one: list[tuple[float, float]], other: list[tuple[float, float]], log_x: bool) -> None:
    drawing = draw(line(*one), line(*other, series="off"), log_x=log_x)
    _, _, width, height = map(float, drawing.get("viewBox", "").split())
    for x, y in dots(drawing):
        assert 0 <= x <= width
        assert 0 <= y <= height
    for text in drawing.iter("text"):
        assert 0 <= float(text.get("x", "nan")) <= width
        assert 0 < float(text.get("y", "nan")) <= height


@given(st.lists(st.floats(0, 300), min_size=2, max_size=8))
def test_labels_of_a_ladder_never_cover_each_other(heights: list[float]) -> None:
    drawing = draw(line(*((2.0**i, height) for i, height in enumerate(heights))), log_x=True)
    boxes = []
    for text in (each for each in drawing.iter("text") if each.get("class") == "value"):
        wide, x, y = 7.2 * len(text.text or ""), float(text.get("x", "nan")), float(text.get("y", "nan"))
        boxes.append((x - wide / 2, y - 11, x + wide / 2, y + 3))
    for i, a in enumerate(boxes):
        assert not any(a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3] for b in boxes[i + 1:])


@given(st.floats(1e-9, 1e12))
def test_ticks_are_round_evenly_spaced_and_reach_the_highest_value(most: float) -> None:
    ticks = round_ticks(most)
    assert ticks[0] == 0
    assert most <= ticks[-1] * (1 + 1e-6) + 1e-11
    assert 2 <= len(ticks) <= 7
    if most > 1e-6:
        assert re.fullmatch(r"[125]e[+-]\d+", f"{ticks[1]:.0e}")


@pytest.mark.parametrize(("bad", "log_x"), [((), False), (((0.0, 1.0),), True), (((1.0, -1.0),), False)])
def test_a_chart_without_a_point_or_with_one_outside_its_axes_is_refused(
        bad: tuple[tuple[float, float], ...], log_x: bool) -> None:
    with pytest.raises(ValueError, match=r"no point|outside its axes"):
        draw(line(*bad), log_x=log_x)
