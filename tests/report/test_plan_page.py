"""The plan's page and text: the answer first, then what was served and recomputed at each host size."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ET

from tests.report.pages_read import read
from tests.report.sim_records import GIB, plan_record, same_turns

from hostcache.records import PlanRecord
from hostcache.report.plan_page import plan_html, plan_text

RECORD = plan_record()
PAGE, TEXT = plan_html(RECORD), plan_text(RECORD)


def drawings(record: PlanRecord = RECORD) -> list[ET.Element]:
    page = plan_html(record)
    return [ET.fromstring(text) for text in re.findall(r'<svg viewBox="[^"]*" role="img".*?</svg>', page, flags=re.S)]


def test_the_page_is_well_formed_and_needs_no_network() -> None:
    reader = read(PAGE)
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    for word in ("http://", "https://", "//cdn", "url(", "@import"):
        assert word not in PAGE


def test_the_answer_comes_first_in_one_sentence() -> None:
    verdict = "Host memory pays up to 2.0 GiB; beyond that it changes nothing."
    assert TEXT.splitlines()[0] == verdict
    assert PAGE.index(verdict) < PAGE.index("<svg")


def test_turns_and_recomputed_share_stand_over_host_bytes_with_the_tier_off_across() -> None:
    turns, share = drawings()
    assert [dot.get("data-value") for dot in turns.iter("circle")] == [
        "90.0", "130.0", "240.0", "264.0", "264.0", "264.0"]
    assert [dot.get("data-x") for dot in share.iter("circle")] == [
        repr(float(size)) for size in (GIB // 4, GIB // 2, GIB, 2 * GIB, 4 * GIB, 8 * GIB)]
    for drawing, off in ((turns, "84.0"), (share, "0.573")):
        (level,) = [each for each in drawing.iter("line") if each.get("class") == "line off dashed"]
        assert level.get("data-value") == off
        at = [float(dot.get("cx", "nan")) for dot in drawing.iter("circle")]
        assert abs((at[1] - at[0]) - (at[5] - at[4])) < 0.05  # doubling is one step
        (rule,) = [each for each in drawing.iter("line") if each.get("class") == "rule"]
        assert abs(float(rule.get("x1", "nan")) - at[3]) < 0.05


def test_an_open_loop_that_served_the_same_turns_is_drawn_by_its_time() -> None:
    assert [drawing[0].text for drawing in drawings(same_turns(RECORD))] == [
        "Average time per turn", "Prompt tokens recomputed"]


def test_a_plan_that_never_pays_says_so_and_draws_no_rule() -> None:
    rows = tuple(dataclasses.replace(row, pays=False) for row in RECORD.rows)
    never = dataclasses.replace(RECORD, pays_until_bytes=None, verdict="It never pays.", rows=rows)
    assert not [each for drawing in drawings(never) for each in drawing.iter("line") if each.get("class") == "rule"]
    assert "<dd>none</dd>" in plan_html(never)
    assert "yes" not in plan_text(never)


def test_the_tables_show_every_row_and_what_is_absent_as_a_dash() -> None:
    assert re.search(r"^no tier +84 +1,260\.0 +95\.24 +83\.33 +238\.10 +1\.00 +– +1 +–$", TEXT, flags=re.M)
    assert re.search(r"^2 GiB +264 .* yes$", TEXT, flags=re.M)
    assert re.search(r"^1 GiB +95\.0 % +300,000 +650,000 +50,000 +5\.0 % +0\.12 +1\.0 GiB +3\.0 GiB$", TEXT, flags=re.M)


def test_prices_appear_only_where_one_was_given() -> None:
    assert "at 2.5 per million" in TEXT
    free = dataclasses.replace(RECORD, price_per_mtok=None,
                               rows=tuple(dataclasses.replace(row, price=None) for row in RECORD.rows))
    assert "rice" not in plan_text(free) + plan_html(free)


def test_what_was_asked_is_escaped_and_every_given_value_is_on_the_page() -> None:
    assert "&lt;each&gt;" in PAGE
    for value in ("2,200,000 tokens", "890 bytes per token", "5,400 tokens/s", "17.00 GB/s", "2.5 per million tokens",
                  "hostcache sim plan --agents 32 --tokens 30000", "speculative decoding"):
        assert value in PAGE


def test_a_plan_of_one_row_has_a_page_too() -> None:
    read(plan_html(dataclasses.replace(RECORD, rows=RECORD.rows[:1])))
    read(plan_html(dataclasses.replace(RECORD, rows=RECORD.rows[1:2], pays_until_bytes=None)))
