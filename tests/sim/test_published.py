"""The published figures, their frozen roles and tolerances, and the judge that takes them from nowhere else."""

from __future__ import annotations

import copy
import dataclasses
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.errors import ConfigError
from hostcache.records import TwinRow
from hostcache.sim.published import (
    REQUEUE,
    Figure,
    Tolerance,
    figures,
    judge,
    judge_all,
    parse,
    published,
    summary,
)

SHARED = Path(__file__).resolve().parents[3] / "shared" / "facts" / "published_fleet.json"
FIGURES = {figure.name: figure for figure in figures()}
SIMULATED = [figure for figure in figures() if figure.parts is None]


def packaged() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(files("hostcache.sim").joinpath("published_fleet.json").read_text("utf-8"))
    return data


def exact(**changed: float) -> dict[str, list[float]]:
    """Every figure met by eight seeds, but for those named (spaces as underscores)."""
    values = {figure.name: [figure.published] * 8 for figure in SIMULATED}
    for name, value in changed.items():
        values[next(each for each in values if each.replace(" ", "_").replace("=", "_") == name)] = [value] * 8
    return values


# --- frozen ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not SHARED.exists(), reason="the shared facts are not beside this checkout")
def test_roles_tolerances_and_figures_are_those_of_the_shared_file() -> None:
    shared, ours = json.loads(SHARED.read_text("utf-8")), packaged()
    assert ours["twin_roles"] == shared["twin_roles"]
    assert ours["twin_tolerances"] == shared["twin_tolerances"]
    for section in ("fleet", "agent_workload", "restore", "agentic_ramp", "rotation", "rotation_workload"):
        assert json.dumps(ours[section]) == json.dumps(shared[section]), section
    facts = {key: text for key, text in shared["engine_behaviour"].items() if key != "_derived"}
    assert published().behaviour == facts
    again = parse({**shared, "rotation_requeue": ours["rotation_requeue"]})
    assert again.figures == published().figures
    assert again.roles == published().roles


def test_the_rows_that_may_be_fitted_are_these_and_no_others() -> None:
    rows = {role: sorted(row for row, is_ in published().roles.items() if is_ == role)
            for role in ("fitted", "predicted", "not claimed")}
    assert rows == {
        "fitted": ["K=48 off", "K=48 on", "K=8 off", "K=8 on", "R1 off", "R1 on", "restore 54620"],
        "predicted": ["K=16 off", "K=16 on", "K=32 off", "K=32 on", "R2 off", "R2 on", "R3 off", "R3 on", "R4 off",
                      REQUEUE, "R5 off", "R5 on", "ratio K=32", "restore 1000007", "restore 320840"],
        "not claimed": ["R4 on, measured build"]}
    assert {figure.row for figure in figures() if figure.role == "fitted"} == set(rows["fitted"])


def test_no_argument_of_the_judge_moves_a_figure_to_another_role() -> None:
    figure = FIGURES["agentic_ramp K=32 off hit_share"]
    for change in ({"role": "fitted"}, {"tolerance": None}, {"tolerance": Tolerance("±90 %", relative=0.9)},
                   {"published": 0.5}, {"must_hold": True}, {"name": "another"}):
        with pytest.raises(ConfigError, match="is not a published figure with that role"):
            judge(dataclasses.replace(figure, **change), 0.43)


def test_a_role_that_is_moved_in_the_file_is_refused_or_shows() -> None:
    moved = packaged()
    moved["twin_roles"]["fitted"].append("R2")
    with pytest.raises(ConfigError, match="'R2 off' is fitted and predicted"):
        parse(moved)
    lost = packaged()
    lost["twin_roles"]["predicted"].remove("R5")
    with pytest.raises(ConfigError, match="'R5 off' has no role"):
        parse(lost)
    strange = packaged()
    strange["twin_roles"]["fitted"].append("R9")
    with pytest.raises(ConfigError, match="'R9' is not a published row"):
        parse(strange)


@pytest.mark.parametrize("place", [("agents", "turns"), ("agents", "hit_share_off"), ("rotations", "revisits"),
                                   ("ttft_p50",), ("r4_requeue",), ("restore",), ("ratios_k32",)])
def test_a_tolerance_that_is_widened_in_the_file_is_refused(place: tuple[str, ...]) -> None:
    data = packaged()
    where = data["twin_tolerances"]
    for key in place[:-1]:
        where = where[key]
    where[place[-1]] = "95 %"
    with pytest.raises(ConfigError, match=r"the tolerance '95 %' is not one that the judge knows"):
        parse(data)


def test_reading_the_file_changes_nothing_in_it() -> None:
    data = packaged()
    before = copy.deepcopy(data)
    parse(data)
    assert data == before


# --- the figures ----------------------------------------------------------------------------------------------------


def test_every_number_of_the_published_rows_is_a_figure() -> None:
    data = packaged()
    wanted = [row[key] for row in data["agentic_ramp"] for key in row if key not in ("agents", "arm")]
    shape = ("cell", "sessions", "tokens", "users", "window_off_s", "window_on_s", "note")
    wanted += [row[key] for row in data["rotation"] for key in row if key not in shape]
    wanted += [row[key] for row in data["restore"] for key in row if key not in ("tokens", "ratio")]
    wanted += [value for key, value in data["rotation_requeue"].items() if key not in ("_source", "cell", "window_s")]
    assert sorted(float(value) for value in wanted) == sorted(figure.published for figure in SIMULATED)
    assert len(FIGURES) == len(figures())


def test_45_predicted_figures_have_a_tolerance_and_10_of_them_may_not_miss() -> None:
    judged = [figure for figure in figures() if figure.role == "predicted"]
    assert all(figure.tolerance is not None for figure in judged)
    assert len(judged) == 45
    kinds = ("off turns", "on turns", "off avg_s", "on avg_s", "on hit_share")
    assert sorted(figure.name for figure in judged if figure.must_hold) == sorted(
        f"agentic_ramp K={agents} {kind}" for agents in (16, 32) for kind in kinds)


def test_p95_decode_cold_and_restore_means_are_shown_and_never_judged() -> None:
    shown = {"ttft_p95", "decode_p50", "cold_s", "restore_mean_ms", "bytes"}
    for figure in figures():
        if figure.quantity in shown:
            assert figure.role in ("informative", "not claimed")
            assert figure.tolerance is None


@pytest.mark.parametrize(("name", "good", "bad"), [
    ("agentic_ramp K=32 on turns", (237.6, 290.4), (237.5, 290.5)),  # 10 %
    ("agentic_ramp K=16 off avg_s", (8.16, 12.24), (8.15, 12.25)),  # 20 %
    ("agentic_ramp K=32 on hit_share", (0.95, 0.97), (0.9499, 0.9701)),  # 1 point
    ("agentic_ramp K=32 off hit_share", (0.387, 0.467), (0.3869, 0.4671)),  # 4 points
    ("agentic_ramp K=16 on retries", (0.0, 0.5), (0.625,)),  # 0, as a mean of seeds
    ("agentic_ramp K=32 off retries", (79.0, 131.0), (78.0, 132.0)),  # 25 %
    ("agentic_ramp K=16 on ttft_p50", (0.471, 0.869), (0.469, 0.871)),  # 0.2 s is more than 25 %
    ("agentic_ramp K=32 off ttft_p50", (32.65, 54.39), (32.63, 54.41)),  # 25 %
    ("rotation R2 off revisits", (139.5, 200.5), (139.0, 201.0)),  # 18 %
    ("rotation R3 off revisits", (5.0, 9.0), (4.9, 9.1)),  # ±2 is more than 18 %
    ("rotation R4 off revisits", (1.0, 5.0), (0.9, 5.1)),
    ("rotation R3 off ttft_p50", (73.3, 170.7), (73.1, 170.9)),  # 40 %: a median of 7
    ("rotation R5 on hit_share", (0.968, 0.998), (0.9679, 0.9981)),  # 1.5 points
    (f"rotation {REQUEUE} served", (258.4, 315.6), (258.0, 316.0)),  # 10 %
    (f"rotation {REQUEUE} refused", (0.0,), (0.125,)),
    (f"rotation {REQUEUE} deferred", (0.125, 500.0), (0.0,)),
    (f"rotation {REQUEUE} ttft_p50", (1.06, 1.76), (1.05, 1.77)),
    ("restore 1000007 restored_s", (0.82, 1.36), (0.81, 1.37)),  # 25 %
    ("ratio K=32 turns_on_over_off", (2.52, 3.77), (2.51, 3.78)),  # 20 % of 3.14
    ("ratio K=32 avg_s_off_over_on", (4.92, 7.37), (4.91, 7.38)),  # 20 % of 6.15
])
def test_each_tolerance_is_the_one_in_the_file(name: str, good: tuple[float, ...], bad: tuple[float, ...]) -> None:
    figure = FIGURES[name]
    assert figure.role == "predicted"
    assert [judge(figure, value).within for value in good] == [True] * len(good)
    assert [judge(figure, value).within for value in bad] == [False] * len(bad)


def test_the_machine_and_its_loads_are_read_with_their_units() -> None:
    fleet, agents, visits = published().fleet, published().agent_workload, published().rotation_workload
    assert (fleet.pool_tokens, fleet.page_tokens, fleet.kv_bytes_per_token) == (2_200_000, 512, 890)
    assert (fleet.copy_budget_s, fleet.restore_budget_s, fleet.copy_bytes_per_s_batched) == (1.0, 0.5, 57e9)
    assert fleet.cold_prefill_tok_s[-1] == (1_000_007, 3692.0)
    assert (agents.tool_gap_s, agents.compaction_one_turn_in, agents.backoff_cap_s) == ((5.0, 30.0), 200, 8)
    assert (visits.window_off_s, visits.window_on_s, visits.probe_every_s) == (300, 600, 60)
    assert published().agent_row(32, "on").avg_s == 14.04
    assert published().rotation_row("R4").revisits_on == 216
    assert (published().requeue.served, published().requeue.deferred) == (287, 57)


# --- the judge ------------------------------------------------------------------------------------------------------


def test_a_row_has_the_keys_that_a_reader_of_the_json_expects() -> None:
    row = dataclasses.asdict(judge(FIGURES["agentic_ramp K=32 off turns"], 88.2, sd=2.0))
    assert {"figure", "published", "simulated", "rel_error", "predicted", "tolerance", "within"} <= set(row)
    assert (row["published"], row["simulated"], row["predicted"], row["within"]) == (84.0, 88.2, True, True)
    assert row["rel_error"] == pytest.approx(0.05)


def test_a_cause_stands_only_beside_a_miss_and_a_miss_without_one_says_so() -> None:
    figure = FIGURES["agentic_ramp K=32 off turns"]
    assert judge(figure, 84, cause="why").cause == ""
    assert judge(figure, 200, cause="why").cause == "why"
    assert judge(figure, 200).cause == "unexplained"
    assert judge(FIGURES["agentic_ramp K=32 off ttft_p95"], 900, cause="why").cause == ""


def test_a_published_zero_has_no_relative_error() -> None:
    assert judge(FIGURES["agentic_ramp K=16 on retries"], 0.25).rel_error is None


def test_what_was_not_simulated_has_missed_where_it_was_asked_for() -> None:
    row = judge(FIGURES["rotation R5 on revisits"], None)
    assert (row.within, row.cause, row.rel_error) == (False, "not simulated", None)
    assert judge(FIGURES["rotation R4 on, measured build revisits"], None).within is None


def test_means_and_spreads_are_over_the_seeds_and_ratios_of_the_means() -> None:
    values = {"agentic_ramp K=32 on turns": [240.0, 280.0], "agentic_ramp K=32 off turns": [80.0]}
    rows = {row.figure: row for row in judge_all(values)}
    assert (rows["agentic_ramp K=32 on turns"].simulated, rows["agentic_ramp K=32 off turns"].sd) == (260.0, None)
    assert rows["agentic_ramp K=32 on turns"].sd == pytest.approx(800**0.5)
    assert rows["ratio K=32 turns_on_over_off"].simulated == 3.25
    assert rows["ratio K=32 avg_s_off_over_on"].simulated is None
    assert set(rows) == set(FIGURES)


@pytest.mark.parametrize("name", ["agentic_ramp K=64 on turns", "ratio K=32 turns_on_over_off"])
def test_values_for_what_is_no_figure_or_is_a_ratio_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a published figure that is simulated"):
        judge_all({name: [1.0]})
    if name not in FIGURES:
        with pytest.raises(ConfigError, match="is not a published figure"):
            judge_all({}, {name: "why"})


@given(st.sampled_from([figure for figure in figures() if figure.tolerance]),
       st.floats(min_value=0, max_value=1e3), st.floats(min_value=0, max_value=1))
def test_nearer_to_the_published_value_is_never_worse(figure: Figure, simulated: float, share: float) -> None:
    assert figure.tolerance is not None
    nearer = figure.published + share * (simulated - figure.published)
    if judge(figure, simulated).within and figure.tolerance.above is None:
        assert judge(figure, nearer).within


# --- the bars -------------------------------------------------------------------------------------------------------


def test_a_twin_that_meets_every_figure_passes_over_eight_seeds_only() -> None:
    rows = judge_all(exact())
    bars = summary(rows, seeds=8)
    assert (bars.judged, bars.within, bars.must_hold, bars.misses, bars.passed) == (45, 45, 10, (), True)
    assert not summary(rows, seeds=7).passed


def test_four_misses_leave_90_per_cent_five_do_not_and_one_that_may_not_miss_is_enough() -> None:
    misses = {f"agentic_ramp_K_{agents}_{arm}_ttft_p50": 900.0 for agents in (16, 32) for arm in ("off", "on")}
    bars = summary(judge_all(exact(**misses)), seeds=8)
    assert (bars.within, bars.passed, len(bars.misses)) == (41, True, 4)
    bars = summary(judge_all(exact(**misses, rotation_R2_on_revisits=1.0)), seeds=8)
    assert (bars.within, bars.passed) == (40, False)
    bars = summary(judge_all(exact(agentic_ramp_K_32_on_hit_share=0.5)), seeds=8)
    assert (bars.must_hold_misses, bars.passed) == (("agentic_ramp K=32 on hit_share",), False)


def test_fitted_and_informative_figures_do_not_count_however_wrong() -> None:
    values = {figure.name: [figure.published if figure.role == "predicted" else 1e6] * 8 for figure in SIMULATED}
    assert summary(judge_all(values), seeds=8).within == 45


def test_a_figure_that_is_left_out_has_missed() -> None:
    rows = [row for row in judge_all(exact()) if row.figure != "rotation R3 on revisits"]
    bars = summary(rows, seeds=8)
    assert (bars.judged, bars.misses) == (45, ("rotation R3 on revisits",))


@pytest.mark.parametrize("change", [{"within": True}, {"role": "fitted"}, {"tolerance": "±99 %"}, {"published": 60.0}])
def test_a_row_that_the_judge_did_not_write_is_refused(change: dict[str, Any]) -> None:
    wrong = dataclasses.replace(judge(FIGURES["agentic_ramp K=32 off turns"], 60.0), **change)
    with pytest.raises(ConfigError, match="is not what the judge says"):
        summary([wrong], seeds=8)


def test_a_row_given_twice_is_refused() -> None:
    row: TwinRow = judge(FIGURES["agentic_ramp K=32 off turns"], 84.0)
    with pytest.raises(ConfigError, match="is given twice"):
        summary([row, row], seeds=8)
