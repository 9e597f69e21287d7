"""Bars and goals: what stops a ramp, what a pressure cell must gain, and that nothing unmeasured passes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.bench.harness.sample_cells import agents_cell, cell, equivalence_cell, ladder_cell, rotate_cell

from hostcache.bench.harness.bars import Bars, failed, first_failing, judge, judge_goals, parse_bars
from hostcache.bench.harness.figures import cell_figures, compare, ramp_stop
from hostcache.errors import ConfigError
from hostcache.records import CellRecord, Record, RequestRecord, SegmentRecord


def verdicts(bars: Bars, *cells: list[Record], name: str = "b5-agents") -> list[tuple[str, str, str]]:
    found = judge_goals(name, compare([cell_figures(records) for records in cells]), bars)
    return [(each.part, each.bar, each.verdict) for each in found]


def test_a_ramp_stops_at_its_first_failing_point() -> None:
    bars = parse_bars({"ttft_p95_s": 10, "errors": 0})
    off, on = (cell_figures(agents_cell(arm)) for arm in ("off", "on"))
    stop = first_failing(off, bars)
    assert stop is not None
    assert (stop.part, stop.bar, stop.verdict) == ("32", "ttft_p95_s", "miss")
    assert "wanted at most 10" in stop.why
    assert first_failing(on, bars) is None


def test_a_ramp_under_way_is_stopped_from_the_records_of_its_point() -> None:
    stop = ramp_stop("agents", parse_bars({"ttft_p95_s": 10}))
    for part, ends in (("8", False), ("16", False), ("32", True)):
        own = [record for record in agents_cell("off") if isinstance(record, SegmentRecord | RequestRecord)
               and record.part == part]
        reason = stop(part, own)
        assert (reason is not None) is ends
    assert reason is not None
    assert reason.startswith("ttft_p95_s: ")


def test_what_was_not_measured_is_no_pass() -> None:
    found = judge(cell_figures(agents_cell("off", points=(2,))), parse_bars({"goodput_per_s": 1}))
    assert [(each.verdict, each.value) for each in found] == [("not measured", None)]
    assert failed(found) == found


def test_an_arm_that_says_it_has_no_tier_has_no_restore_failures() -> None:
    bars = parse_bars({"restore_failures": 0})
    found = [judge(cell_figures(agents_cell(arm, points=(2,))), bars) for arm in ("off", "on")]
    assert [each.verdict for verdict in found for each in verdict] == ["pass", "pass"]
    silent = [dataclasses.replace(record, target={**record.target, "tier": None}) if isinstance(record, CellRecord)
              else record for record in agents_cell("off", points=(2,))]
    assert [each.verdict for each in judge(cell_figures(silent), bars)] == ["not measured"]


def test_a_void_cell_passes_nothing() -> None:
    records = agents_cell("on", points=(2,))
    late = cell_figures(records, lag_bar_s=1e-9)
    found = judge(late, parse_bars({"ttft_p95_s": 10}))
    assert [each.verdict for each in found] == ["void"]
    assert "bottleneck" in found[0].why


def test_a_goal_is_judged_at_the_end_of_the_ramp() -> None:
    assert verdicts(parse_bars({}, {"turns": 3.1}), agents_cell("off"), agents_cell("on")) == [("32", "turns", "pass")]
    assert verdicts(parse_bars({}, {"turns": 9}), agents_cell("off"), agents_cell("on")) == [("32", "turns", "miss")]


def test_a_cell_that_is_neutral_where_it_must_win_has_failed_even_at_zero_errors() -> None:
    calm = [rotate_cell(arm, name="b2-r2", fits=True) for arm in ("off", "on")]
    found = judge_goals("b2-r2", compare([cell_figures(records) for records in calm]), parse_bars({}, {"turns": 0.5}))
    assert [each.verdict for each in found] == ["miss"]
    assert found[0].value == pytest.approx(1.0, abs=0.05)
    assert found[0].why.startswith("neutral where it must win: nothing was evicted")


def test_a_named_point_that_was_not_reached_is_not_measured() -> None:
    bars = parse_bars({}, {"turns": 3.1, "parts": ["32", 48]})
    assert verdicts(bars, agents_cell("off"), agents_cell("on")) == [
        ("32", "turns", "pass"), ("48", "turns", "not measured")]
    assert verdicts(bars, agents_cell("off", points=(8, 16)), agents_cell("on")) == [
        ("32", "turns", "not measured"), ("48", "turns", "not measured")]


def test_goals_without_a_comparable_pair_say_why() -> None:
    found = judge_goals("b5-agents", compare([cell_figures(agents_cell("off")[:-1]), cell_figures(agents_cell("on"))]),
                        parse_bars({}, {"turns": 3.1}))
    assert [(each.verdict, "cut short" in each.why) for each in found] == [("not measured", True)]


def test_a_cost_bar_holds_within_its_width_or_within_the_measured_noise() -> None:
    pairs = [ladder_cell(arm, attempt) for attempt in (1, 2) for arm in ("off", "on")]
    wide = verdicts(parse_bars({}, {"within": 0.25}), *pairs, name="b1-overhead")
    assert {each[2] for each in wide} == {"pass"}
    assert {each[1] for each in wide} == {"within (prefill_tok_s)", "within (decode_tok_s_p50)",
                                          "within (decode_tok_s_mean)"}
    assert "miss" in {each[2] for each in verdicts(parse_bars({}, {"within": 0.0}), *pairs, name="b1-overhead")}
    nothing = verdicts(parse_bars({}, {"within": 0.1}), equivalence_cell("off"), equivalence_cell("on"),
                       name="equivalence")
    assert {each[2] for each in nothing} == {"not measured"}


@pytest.mark.parametrize(("bars", "goals", "said"), [
    ({"ttft": 1}, {}, "'ttft' is not known; known are ttft_p95_s"),
    ({"errors": "0"}, {}, "'errors' is '0'; give a number"),
    ({"errors": True}, {}, "'errors' is True"),
    ({}, {"turn": 3}, "'turn' is not known; known are turns"),
    ({}, {"turns": float("nan")}, "'turns' is nan"),
    ({}, {"turns": 3, "parts": 32}, "goals.parts is 32"),
])
def test_a_bar_that_nobody_knows_is_refused(bars: dict[str, Any], goals: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_bars(bars, goals)


def test_verdicts_are_plain_json() -> None:
    assert cell().workload == "agents"
    found = judge(cell_figures(agents_cell("on", points=(2,))), parse_bars({"errors": 0}))[0].as_json()
    assert found == {"cell": "b5-agents", "arm": "on", "attempt": 1, "part": "2", "kind": "point", "bar": "errors",
                     "wants": "at most 0", "value": 0, "verdict": "pass", "why": ""}
