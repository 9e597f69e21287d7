"""The twin's page and text: every figure in its group, the verdict first or last, the two curves over each other."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as ET

import pytest
from tests.report.pages_read import read
from tests.report.sim_records import OFF_BY, twin_record

from hostcache.records import from_json, to_json
from hostcache.report.twin_page import twin_html, twin_text

RECORD = twin_record()
PAGE, TEXT = twin_html(RECORD), twin_text(RECORD)


def drawings(page: str = PAGE) -> list[ET.Element]:
    return [ET.fromstring(text) for text in re.findall(r'<svg viewBox="[^"]*" role="img".*?</svg>', page, flags=re.S)]


def cells(text: str, start: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return re.split(r" {2,}", line)


def test_the_page_is_well_formed_and_needs_no_network() -> None:
    reader = read(PAGE)
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    for word in ("http://", "https://", "//cdn", "url(", "@import"):
        assert word not in PAGE
    assert "prefers-color-scheme:dark" in PAGE


def test_the_verdict_is_the_first_thing_on_the_page_and_the_last_line_of_the_text() -> None:
    verdict = ("Passed: 43 of 45 predicted figures are within tolerance (95.6 %; needed 90 %), and 10 of the 10 that "
               "may not miss hold.")
    assert PAGE.index(verdict) < PAGE.index("<svg")
    assert TEXT.splitlines()[-1] == verdict


def test_both_curves_have_published_and_simulated_over_each_other_for_both_arms() -> None:
    assert [drawing[0].text for drawing in drawings()] == [
        "Average time per turn", "Share of prompt tokens from cache"]
    for drawing in drawings():
        assert [each.get("class") for each in drawing.iter("polyline")] == [
            "line off dashed", "line off", "line on dashed", "line on"]
        assert len(list(drawing.iter("circle"))) == 16
    seconds = drawings()[0]
    values = [float(dot.get("data-value", "nan")) for dot in seconds.iter("circle")]
    assert values[:4] == [2.76, 10.2, 86.31, 130.72]
    assert values[6] == pytest.approx(86.31 * OFF_BY["agentic_ramp K=32 off avg_s"])


def test_each_point_of_a_curve_can_be_read_under_the_axis_and_says_what_was_fitted() -> None:
    written = [text.text for text in drawings()[0].iter("text")]
    for text in ("8 (fitted)", "16", "32", "48 (fitted)", "tier off", "86.3 | 82.9", "14.0 | 15.6"):
        assert text in written


def test_text_aligns_published_simulated_error_tolerance_and_verdict() -> None:
    assert cells(TEXT, "K=32 off, hit share") == [
        "K=32 off, hit share", "42.7 %", "47.8 %", "1.0 pt", "+5.1 pt", "±4 points", "MISS"]
    assert cells(TEXT, "K=16 on, average turn") == [
        "K=16 on, average turn", "8.41 s", "7.32 s", "0.16", "-13.0 %", "±20 %", "ok"]
    assert cells(TEXT, "R4 on, admission requeue, refused")[-1] == "ok"
    assert cells(TEXT, "K=48 off, retries")[-2:] == ["–", "–"]
    assert cells(TEXT, "K=32 off, TTFT p95") == ["K=32 off, TTFT p95", "56.00 s", "56.00 s", "1.20", "+0.0 %"]


def test_every_figure_of_the_record_is_on_both() -> None:
    groups = ["Predicted: no", "Fitted: the", "Informative: without", "Not claimed"]
    for shown in (TEXT, PAGE):
        assert [shown.index(group) for group in groups] == sorted(shown.index(group) for group in groups)
    assert PAGE.count('<th scope="row">') == len(RECORD.rows) + len(RECORD.coefficients)


def test_each_miss_is_named_with_its_cause_or_says_that_it_has_none() -> None:
    said = TEXT.split("\nMissed\n")[1]
    assert "K=32 off, hit share: 47.8 % against 42.7 % (+5.1 pt, allowed ±4 points). The bank of the <engine>" in said
    assert "R3 on, TTFT p50: 1.26 s against 0.90 s (+40.0 %, allowed ±25 % or ±0.2 s). Unexplained." in said
    assert "R2 on, revisits" not in said
    assert "What missed, and why" in PAGE


def test_coefficients_limits_and_commands_are_on_both() -> None:
    assert cells(TEXT, "prefill, linear") == ["prefill, linear", "0.00013", "s/token", "fitted", "K=8 and K=48"]
    for text in ("the wire between hosts", "8 agents on: p95 above off"):
        assert text in TEXT
        assert text in PAGE
    assert "hostcache sim twin --seeds 8" in PAGE


def test_what_came_from_outside_is_escaped() -> None:
    assert "<engine>" not in PAGE
    assert "a report &lt;of&gt; the fleet" in PAGE


def test_a_figure_that_may_not_miss_is_named_as_such_and_the_verdict_says_missed() -> None:
    text = twin_text(twin_record({"agentic_ramp K=32 on turns": 0.5}))
    assert "K=32 on, turns served: 132 against 264 (-50.0 %, allowed ±10 %). Unexplained. May not miss." in text
    assert text.splitlines()[-1].startswith("MISSED: 43 of 45")  # the ratio of the turns goes with it
    assert "9 of the 10 that may not miss hold" in text


def test_fewer_seeds_than_needed_give_no_verdict() -> None:
    assert twin_text(twin_record(seeds=3)).splitlines()[-1].startswith("Not judged: 43 of 45")


def test_a_record_without_simulated_values_has_a_page_with_dashes_and_no_zeros() -> None:
    rows = tuple(dataclasses.replace(row, simulated=None, sd=None, rel_error=None) for row in RECORD.rows)
    bare = dataclasses.replace(RECORD, rows=rows, coefficients=(), not_modelled=(), unexplained=())
    read(twin_html(bare))
    assert "130.7 | –" in twin_html(bare)
    read(twin_html(dataclasses.replace(bare, rows=())))


def test_the_record_survives_json_and_its_rows_have_the_promised_keys() -> None:
    document = json.loads(json.dumps(to_json(RECORD)))
    assert from_json(document) == RECORD
    for row in document["rows"]:
        assert {"figure", "published", "simulated", "rel_error", "predicted", "tolerance", "within"} <= set(row)
