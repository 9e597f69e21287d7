"""The report of a benchmark as text, Markdown and a one-file page: everything is there, in order, and loads nothing."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from tests.report.bench_documents import published, troubled, whole
from tests.report.pages_read import read

from hostcache.report.bench_page import MARKS_MOST, bench_html, bench_markdown, bench_text, summary_line
from hostcache.report.bench_tables import (
    answers_table,
    comparison_table,
    counters_tables,
    loads_table,
    readings_table,
    refusals_table,
    rungs_table,
    verdicts_table,
)

PAGE = bench_html(whole(), published())
DRAWING = re.compile(r'<svg viewBox="[^"]*" role="img".*?</svg>', flags=re.S)


def drawings(page: str = PAGE) -> list[ET.Element]:
    return [ET.fromstring(text) for text in DRAWING.findall(page)]


@pytest.mark.parametrize("page", [PAGE, bench_html(troubled(), published())])
def test_the_page_is_well_formed_and_names_no_address(page: str) -> None:
    reader = read(page)
    assert not {"link", "img", "iframe", "object"} & set(reader.tags)
    assert reader.tags.count("script") == 1
    for word in ("http://", "https://", "//cdn", "url(", "@import", "fetch(", "src="):
        assert word not in page


def test_every_section_has_a_tab_that_controls_it() -> None:
    tabs = re.findall(r'role="tab" id="tab-(\w+)" aria-controls="panel-(\w+)"', PAGE)
    panels = re.findall(r'role="tabpanel" id="panel-(\w+)" aria-labelledby="tab-(\w+)"', PAGE)
    assert [name for name, _ in tabs] == ["summary", "figures", "arms", "published", "latency", "restores", "counters",
                                          "verdicts", "environment"]
    assert tabs == panels


def test_without_the_script_every_section_is_shown_and_no_dead_tab() -> None:
    assert 'class="tabs" hidden' in PAGE
    assert not re.search(r'class="panel"[^>]* hidden', PAGE)


def test_the_page_serves_light_and_dark_print_and_keyboard() -> None:
    for word in ("prefers-color-scheme:dark", "@media print", ":focus-visible", "ArrowRight", '<html lang="en">'):
        assert word in PAGE


def test_every_chart_is_told_in_words_and_every_mark_has_its_value() -> None:
    found = drawings()
    assert len(found) > 20
    ids = [drawing[0].get("id") for drawing in found]
    assert len(set(ids)) == len(ids)
    for drawing in found:
        assert drawing[0].text
        assert drawing[1].text
        marks = [*drawing.iter("rect"), *drawing.iter("circle"), *drawing.iter("path")]
        assert marks
        for mark in marks:
            title = mark.find("title")
            assert title is not None
            assert re.search(r"\d", title.text or "")


def test_no_mark_leaves_its_drawing() -> None:
    for drawing in drawings():
        _, _, width, height = map(float, drawing.get("viewBox", "").split())
        for mark in drawing.iter("rect"):
            x, y = float(mark.get("x", "nan")), float(mark.get("y", "nan"))
            assert 0 <= x <= x + float(mark.get("width", "nan")) <= width + 0.01
            assert 0 <= y <= y + float(mark.get("height", "nan")) <= height + 0.01
        for dot in drawing.iter("circle"):
            assert 0 <= float(dot.get("cx", "nan")) <= width
            assert 0 <= float(dot.get("cy", "nan")) <= height


def test_the_two_arms_differ_by_more_than_colour() -> None:
    (cloud,) = [drawing for drawing in drawings() if drawing[0].text == "b5-agents TTFT over time"]
    kinds = {dot.get("class") for dot in cloud.iter("circle")}
    assert kinds == {"dot cloud off dashed", "dot cloud on"}
    (bins,) = [drawing for drawing in drawings() if drawing[0].text == "b5-agents TTFT histogram"]
    assert {mark.get("class") for mark in bins.iter("rect")} == {"mark off hollow", "mark on"}


def test_long_runs_are_thinned_but_keep_their_slowest() -> None:
    (cell,) = [cell for cell in whole()["cells"]
               if (cell["cell"], cell["arm"], cell["attempt"]) == ("b5-agents", "on", 1)]
    column = cell["requests"]["columns"].index("ttft_s")
    slowest = max(row[column] for row in cell["requests"]["rows"])
    (cloud,) = [drawing for drawing in drawings() if drawing[0].text == "b5-agents TTFT over time"]
    on = [float(dot.get("data-value", "nan")) for dot in cloud.iter("circle") if dot.get("class") == "dot cloud on"]
    assert len(on) <= MARKS_MOST < len(cell["requests"]["rows"])
    assert slowest in on


def test_the_headline_stands_beside_the_published_one() -> None:
    assert "the turns at 32 agents (3.14× published)" in PAGE
    assert "lower average time (6.15× published)" in PAGE
    assert ">4 of 4</dd>" in PAGE


def test_the_summary_counts_what_was_void_refused_and_claimed() -> None:
    assert summary_line(whole()).endswith("a benefit is claimed at 6 of 9 compared points.")
    assert "6 runs of 4 cells, 1 void, 3 refused for comparison; bars: none were asked" in summary_line(troubled())


def test_what_was_refused_is_listed_with_its_reason_and_escaped() -> None:
    table = refusals_table(troubled())
    assert table is not None
    said = {(row[0], row[1]) for row in table.rows}
    assert {("b5-agents on 1", "lag"), ("b2-r3 off 1", "cut-short"), ("b2-r3 on 1", "arm-not-confirmed")} <= said
    page = bench_html(troubled(), published())
    assert "Void: no figure of these counts" in page
    assert "<b>other" not in page
    assert "&lt;b&gt;other" in page


def test_the_comparison_says_where_no_benefit_is_claimed() -> None:
    table = comparison_table(whole())
    assert table is not None
    benefit = {row[0]: row[-1] for row in table.rows}
    assert benefit["b5-agents 32"] == "measured"
    assert benefit["b5-agents 8"] == "nothing was evicted from the device in arm off"


def test_both_readings_of_refusals_stand_beside_each_other() -> None:
    table = readings_table(whole())
    assert table is not None
    (row,) = [row for row in table.rows if row[0] == "b5-agents on 1 32"]
    retries, served, errors, _, served_at_once, errors_at_once, _ = row[1:]
    assert int(served) - int(served_at_once) == int(errors_at_once) - int(errors) == int(retries) > 0


def test_counters_are_told_for_each_segment_with_their_balance() -> None:
    (table,) = [table for table in counters_tables(whole()) if table.title == "b5-agents on 1"]
    assert {row[0] for row in table.rows} >= {"before", "prime 8", "window 32", "after"}
    assert {row[table.columns.index("balance")] for row in table.rows} == {"balanced"}


def test_the_terminal_lists_goals_and_what_was_missed_and_counts_the_rest() -> None:
    document = whole()
    passed = [each for each in document["verdicts"] if (each["kind"], each["verdict"]) == ("point", "pass")]
    table = verdicts_table(document, brief=True)
    assert table is not None
    assert len(table.rows) == len(document["verdicts"]) - len(passed) > 0
    assert f"Not listed: {len(passed)} bars" in table.note
    assert f"Not listed: {len(passed)} bars" in bench_text(document)


def test_each_run_is_told_by_itself_so_that_one_server_alone_can_be_measured() -> None:
    document = whole()
    cell, *_ = (each for each in document["cells"] if each["cell"] == "b5-agents")
    alone = {**document, "cells": [cell], "comparison": {**document["comparison"], "rows": []}, "verdicts": []}
    table = loads_table(alone)
    assert table is not None
    assert [row[0] for row in table.rows] == [f"b5-agents {cell['arm']} {cell['attempt']} {point['part']}"
                                              for point in cell["points"]]
    for said in (bench_text(alone), bench_markdown(alone), bench_html(alone)):
        assert "Loads: each run by itself" in said
        assert "ITL p50 / p99" in said


def test_rungs_and_answers_are_told_run_by_run() -> None:
    rungs, answers = rungs_table(whole()), answers_table(whole())
    assert rungs is not None
    assert answers is not None
    kinds = {each["workload"]: each for each in whole()["cells"]}
    assert len([row for row in rungs.rows if row[0].startswith(kinds["ladder"]["cell"])]) >= len(
        kinds["ladder"]["ladder"])
    assert {row[-2] for row in answers.rows} <= {"identical", "different", "unproven"}


def test_readings_of_refusals_are_printed_where_there_was_one() -> None:
    every, some = readings_table(whole()), readings_table(whole(), brief=True)
    assert every is not None
    assert some is not None
    assert set(some.rows) < set(every.rows)
    assert all(row[1] != "0" or row[5] != "0" for row in some.rows)


def test_without_published_figures_nothing_is_set_beside_anything() -> None:
    page, text, markdown = bench_html(whole()), bench_text(whole()), bench_markdown(whole())
    for said in (page, text, markdown):
        assert "ublished" not in said.replace("as published", "")
    assert "Average time per turn" in page
    assert "the turns at 32 agents" in page


def test_markdown_and_text_hold_every_table_and_the_commands() -> None:
    text, markdown = bench_text(whole(), published()), bench_markdown(whole(), published())
    for title in ("Cells: what ran", "Refusals read both ways", "Steady rotation R1 to R5", "The agents' ramp",
                  "No overhead: cold ladders", "A/B/A passes", "Restore against cold prefill", "Verdicts"):
        assert title in text
        assert title in markdown
    assert "hostcache bench matrix seed.toml" in markdown
    assert text.rstrip().endswith(summary_line(whole()))
    assert "(E2E − TTFT) ÷ (n − 1)" in markdown
