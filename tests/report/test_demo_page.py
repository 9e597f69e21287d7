"""The page, the text and the Markdown of a demo: whole, self-contained, and true to the document."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from tests.bench import scripted as s

from hostcache.bench.figures import demo_document
from hostcache.records import Record, TurnRecord
from hostcache.report.demo_page import demo_html, demo_markdown, demo_tables, demo_text

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Reader(HTMLParser):
    """Notes every tag and attribute, and that tags close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


PAGE = demo_html(demo_document(s.whole_run()))


def drawings(page: str = PAGE) -> list[ET.Element]:
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, flags=re.S)]


def marks(drawing: ET.Element, series: str) -> list[ET.Element]:
    return [each for each in drawing.iter("rect") if each.get("class") == f"mark {series}"]


def test_the_page_is_well_formed_and_needs_no_network() -> None:
    reader = read(PAGE)
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    assert not {"src", "href", "xlink:href", "srcset"} & {name for name, _ in reader.attributes}
    for word in ("http://", "https://", "//cdn", "url(", "@import"):
        assert word not in PAGE


def test_the_page_serves_light_and_dark_and_names_its_language() -> None:
    assert "prefers-color-scheme:dark" in PAGE
    assert '<html lang="en">' in PAGE
    assert '<meta name="viewport"' in PAGE


def test_the_first_chart_has_one_bar_an_arm_as_long_as_its_average_turn() -> None:
    drawing = drawings()[0]
    (off,), (on,) = marks(drawing, "off"), marks(drawing, "on")
    assert (off.get("data-value"), on.get("data-value")) == ("5.0", "1.0")
    assert float(off.get("width", "0")) == pytest.approx(5 * float(on.get("width", "0")))
    assert {"5.0 s", "1.0 s"} <= {text.text for text in drawing.iter("text")}


def test_the_second_chart_stacks_each_arms_tokens_to_the_whole() -> None:
    drawing = drawings()[1]
    shares = {series: [float(mark.get("data-value", "nan")) for mark in marks(drawing, series)]
              for series in ("device", "host", "recomputed")}
    assert shares == {"device": [0.5, 0.3], "host": [0.0, 0.6], "recomputed": [0.5, pytest.approx(0.1)]}
    bars = {series: marks(drawing, series)[1] for series in shares}
    edge = float(bars["device"].get("x", "0")) + float(bars["device"].get("width", "0"))
    assert edge == pytest.approx(float(bars["host"].get("x", "0")), abs=0.02)


def test_every_chart_is_told_in_words_and_every_mark_has_its_value() -> None:
    assert len(drawings()) == 2
    for drawing in drawings():
        assert drawing.get("role") == "img"
        named = drawing.get("aria-labelledby", "").split()
        assert named == [drawing[0].get("id"), drawing[1].get("id")]
        assert all(drawing[i].text for i in range(2))
        for mark in drawing.iter("rect"):
            title = mark.find("title")
            assert title is not None
            assert re.search(r"\d", title.text or "")


def test_no_mark_leaves_its_drawing() -> None:
    for drawing in drawings():
        _, _, width, height = map(float, drawing.get("viewBox", "").split())
        for mark in drawing.iter("rect"):
            x, y = float(mark.get("x", "nan")), float(mark.get("y", "nan"))
            assert x >= 0
            assert y >= 0
            assert x + float(mark.get("width", "nan")) <= width
            assert y + float(mark.get("height", "nan")) <= height


def test_every_headline_stands_beside_the_command_that_makes_it() -> None:
    text = " ".join(read(PAGE).text)
    assert re.search(r"2\.5×.*90\.0 %.*hostcache demo --full", text, flags=re.S)
    assert "hostcache demo --from DIR" in text
    assert "00ff" in text  # the inputs' digests


def test_what_came_from_outside_is_escaped() -> None:
    assert "a <fast> one" not in PAGE
    assert "a &lt;fast&gt; one" in PAGE


def test_tables_have_captions_and_scopes() -> None:
    for table in re.findall(r"<table>.*?</table>", PAGE.split("<details>")[0], flags=re.S):
        assert "<caption>" in table
        assert 'scope="col"' in table
        assert 'scope="row"' in table


def test_the_text_has_every_row_that_was_promised() -> None:
    text = demo_text(demo_document(s.whole_run()))
    for row in ("turns served", "average time per turn", "p95 time per turn", "TTFT p50", "TTFT p95", "from the device",
                "from host RAM", "recomputed", "evicted", "hit share over the bound", "restore mean", "bytes moved",
                "errors", "retries", "No pressure", "Equivalence", "Bars"):
        assert row in text, row
    assert re.search(r"turns served in the windows +2 +5 +2\.50×", text)
    assert re.search(r"restore mean +– +10\.00 ms", text)


def test_markdown_tables_have_as_many_cells_in_every_row() -> None:
    text = demo_markdown(demo_document(s.whole_run()))
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        assert len({line.count("|") - line.count("\\|") for line in block.splitlines()}) == 1


def test_an_absent_number_is_a_dash_and_never_a_zero() -> None:
    records = [dataclasses.replace(record, hit_tokens=None, device_tokens=None, host_tokens=None)
               if isinstance(record, TurnRecord) else record for record in s.whole_run()]
    figures = demo_document(records)
    assert re.search(r"from the device +– +–", demo_text(figures))
    assert len(drawings(demo_html(figures))) == 1  # nothing to stack


def test_no_benefit_is_drawn_as_a_headline_when_none_was_measured() -> None:
    records = [record for record in s.whole_run() if getattr(record, "arm", "off") == "off"]
    page = demo_html(demo_document(records))
    assert "No benefit is reported: one arm only" in page
    assert "shorter average turn" not in page


@pytest.mark.parametrize("stage", ["pressure", "no-pressure", "equivalence"])
def test_a_run_of_one_stage_has_a_page_too(stage: str) -> None:
    parts: dict[str, list[Record]] = {
        "pressure": s.pressure_records(), "no-pressure": s.calm_records(), "equivalence": [s.row()]}
    figures = demo_document([s.run_record(stages=(stage,)), *parts[stage], s.end_record()])
    read(demo_html(figures))
    assert len(demo_tables(figures)) == (3 if stage == "pressure" else 2)


def test_a_run_that_was_cut_short_says_so_everywhere() -> None:
    figures = demo_document([s.run_record()])
    for text in (demo_text(figures), demo_markdown(figures), demo_html(figures)):
        assert "The run was cut short" in text
