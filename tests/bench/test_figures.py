"""demo.json from records made by hand: each definition once, each refusal once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.bench import scripted as s

from hostcache.bench.figures import compare_text, demo_document, judge_row, missed, percentile
from hostcache.errors import ServerError
from hostcache.records import ArmRecord


def document(*records: Any, **run: Any) -> dict[str, Any]:
    return demo_document([s.run_record(**run), *records, s.end_record()])


def verdict(figures: dict[str, Any], name: str) -> str:
    return next(str(bar["verdict"]) for bar in figures["bars"] if bar["name"] == name)


def test_demo_json_has_the_keys_that_were_promised() -> None:
    figures = demo_document(s.whole_run())
    assert list(figures)[:5] == ["form", "workload", "pressure", "no_pressure", "equivalence"]
    assert {"turns_ratio", "avg_time_ratio", "hit_share_on", "hit_share_over_bound", "recomputed_share_ratio",
            "errors"} <= figures["pressure"].keys()
    assert {"ratio", "noise", "bytes_moved", "identical"} <= figures["no_pressure"].keys()
    assert {"identical", "near_ties", "total"} <= figures["equivalence"].keys()


def test_pressure_is_on_over_off_of_the_turns_started_in_the_window() -> None:
    pressure = document(*s.pressure_records())["pressure"]
    assert pressure["benefit"] == "measured"
    assert pressure["turns_ratio"] == 5 / 2
    assert pressure["avg_time_ratio"] == 1.0 / 5.0
    assert pressure["hit_share_on"] == 0.9
    assert pressure["hit_share_over_bound"] == 1.0
    assert pressure["recomputed_share_ratio"] == pytest.approx(0.1 / 0.5)
    assert pressure["errors"] == 0
    off, on = pressure["arms"]["off"], pressure["arms"]["on"]
    assert (off["turns"], off["avg_s"], off["p95_s"]) == (2, 5.0, pytest.approx(5.9))
    assert off["hit_share_over_bound"] == 100 / 180
    assert off["recomputed"] == {"evicted": 80, "new": 20}
    assert on["restore_mean_ms"] == pytest.approx(10.0)
    assert on["bytes_moved"] == 600
    window = pressure["windows"][0]
    assert window["usage_prompt_tokens"] == 300  # two in the window, and one that was under way and then settled
    assert window["accounting"]["prompt_tokens"] == 300
    assert window["drained_s"] == 5.0


def test_a_failed_turn_is_an_error_and_no_time() -> None:
    records = [*s.pressure_records(), s.turn("on", 1, 500.0, error="refused", ttft_s=None, hit_tokens=None)]
    pressure = document(*records)["pressure"]
    assert pressure["errors"] == 1
    assert pressure["arms"]["on"]["turns"] == 5
    assert pressure["arms"]["on"]["avg_s"] == 1.0
    assert verdict(document(*records), "errors") == "miss"


def test_no_benefit_is_reported_when_nothing_was_evicted() -> None:
    calm = [dataclasses.replace(record, closing=record.opening) if isinstance(record, ArmRecord) else record
            for record in s.pressure_records()]
    figures = document(*calm)
    assert figures["pressure"]["turns_ratio"] is None
    assert "nothing was evicted" in figures["pressure"]["benefit"]
    assert "turns, on ÷ off" in missed(figures)


def test_no_benefit_is_reported_when_nothing_was_restored() -> None:
    records = s.pressure_records()
    arm = records[-1]
    assert isinstance(arm, ArmRecord)
    arm.closing["host_cache"].update(restores=2, restore_bytes=10)
    assert "nothing was restored" in document(*records)["pressure"]["benefit"]


def test_one_arm_alone_is_no_comparison() -> None:
    figures = document(*(record for record in s.pressure_records() if getattr(record, "arm", None) == "off"))
    assert figures["pressure"]["turns_ratio"] is None
    assert "one arm only" in figures["pressure"]["benefit"]


def test_a_server_that_restarted_within_a_window_voids_it() -> None:
    records = s.pressure_records()
    arm = records[-1]
    assert isinstance(arm, ArmRecord)
    with pytest.raises(ServerError, match="went down"):
        document(dataclasses.replace(arm, opening=arm.closing, closing=arm.opening))


def test_the_tiers_cost_is_judged_within_the_range_of_off_against_off() -> None:
    figures = document(*s.calm_records())
    calm = figures["no_pressure"]
    assert calm["ratio"] == pytest.approx(10.15 / 10.15)
    assert calm["noise"] == [pytest.approx(10.0 / 10.3), pytest.approx(10.3 / 10.0)]
    assert len(calm["aa_ratios"]) == 6
    assert (calm["bytes_moved"], calm["waits"], calm["identical"]) == (0, 0, True)
    assert verdict(figures, "time of the same work, on ÷ off") == "pass"


def test_a_cost_outside_the_range_is_a_miss() -> None:
    assert verdict(document(*s.calm_records(on=(10.6, 10.6))), "time of the same work, on ÷ off") == "miss"


def test_a_range_wider_than_ten_per_cent_is_not_measurable_and_not_a_pass() -> None:
    figures = document(*s.calm_records(off=(10.0, 11.5, 10.2)))
    assert verdict(figures, "time of the same work, on ÷ off") == "not measurable: the A/A range is wider than 10 %"
    assert "time of the same work, on ÷ off" in missed(figures)


def test_fewer_than_three_off_against_off_ratios_are_not_measurable() -> None:
    figures = document(*s.calm_records(off=(10.0, 10.1)))
    assert verdict(figures, "time of the same work, on ÷ off") == "not measurable: fewer than 3 A/A ratios"


def test_one_byte_moved_or_one_other_reply_is_a_miss_in_every_form() -> None:
    records = s.calm_records(reply_sha256="other")
    arm = records[-1]
    assert isinstance(arm, ArmRecord)
    arm.closing["host_cache"]["store_bytes"] = 1
    figures = document(*records, form="quick")
    assert verdict(figures, "bytes moved") == "miss"
    assert verdict(figures, "outputs identical") == "miss"
    assert set(missed(figures)) >= {"bytes moved", "outputs identical"}


def test_a_failed_turn_is_not_identical_to_anything() -> None:
    records = s.calm_records(reply_sha256="")
    assert document(*records)["no_pressure"]["identical"] is False


def test_a_proven_restore_with_the_same_logits_and_text_is_identical() -> None:
    judged = judge_row(s.row())
    assert judged["verdict"] == "identical"
    assert judged["bit_for_bit"] is True
    assert judged["ttft_ratio"] == pytest.approx(0.01)


@pytest.mark.parametrize(("changes", "said"), [
    ({"restored": s.answer(host=64, device=32)}, "32 tokens were still on the device"),
    ({"restored": s.answer(host=0)}, "nothing was restored"),
    ({"restored": s.answer(host=64)}, "not the same batch shape"),
    ({"restored": s.answer(host=96, digests=())}, "traced no logits"),
    ({"device": s.answer(device=0)}, "not served from the device"),
    ({"device": s.answer(device=64, host=32)}, "not served from the device"),
    ({"cold": s.answer(device=32)}, "was not cold"),
    ({"cold_again": s.answer(host=32)}, "was not cold"),
    ({"restored": None, "error": "HTTP 500: x"}, "HTTP 500: x"),
    ({"kept_tokens": 64, "kept_expected_tokens": 96}, "the answer was not kept: 64 of 96"),
])
def test_a_row_without_proof_is_refused(changes: dict[str, Any], said: str) -> None:
    judged = judge_row(s.row(**changes))
    assert judged["verdict"] == "refused"
    assert said in str(judged["reason"])
    figures = document(s.row(**changes))
    assert figures["equivalence"]["identical"] == 0
    assert figures["equivalence"]["total"] == 1
    assert verdict(figures, "restored = cold, or a named near-tie") == "miss"


def test_one_other_bit_of_a_logit_is_different_even_with_the_same_text() -> None:
    judged = judge_row(s.row(restored=s.answer(host=96, digests=("a", "b", "x"))))
    assert judged["verdict"] == "different"
    assert judged["restored_vs_cold"] == "identical"


@pytest.mark.parametrize(("mine", "theirs", "said"), [
    (5e-5, 9e-5, "near_tie"), (5e-5, 2e-4, "different"), (1.0, 1.0, "different")])
def test_a_first_divergence_is_a_near_tie_only_when_both_margins_are_tiny(
        mine: float, theirs: float, said: str) -> None:
    one = s.answer((1, 2, 3), margins=(1, mine, 0))
    other = s.answer((1, 9, 3), margins=(1, theirs, 0))
    assert compare_text(one, other) == (said, 1, max(mine, theirs))


def test_a_near_tie_is_counted_apart_from_identical() -> None:
    cold = s.answer((1, 9, 9), margins=(1, 1e-5, 1))
    same = document(s.row(cold=cold, cold_again=cold, restored=s.answer(host=96, margins=(1, 1e-5, 1)),
                          device=s.answer(device=96, margins=(1, 1e-5, 1))))["equivalence"]
    assert (same["identical"], same["near_ties"], same["total"]) == (0, 1, 1)


def test_the_ttft_bar_needs_a_conversation_of_6000_tokens() -> None:
    bar = "restored TTFT ÷ cold TTFT at 6,000 tokens"
    assert verdict(document(s.row()), bar).startswith("not measured")
    long = {"tokens": 5985, "cold": s.answer(ttft_s=20.0)}
    assert verdict(document(s.row(**long)), bar) == "pass"
    assert verdict(document(s.row(**long, restored=s.answer(host=96, ttft_s=0.5))), bar) == "miss"


def test_stages_that_were_not_asked_for_are_not_run_and_not_missed() -> None:
    figures = document(s.row(), stages=("equivalence",))
    assert verdict(figures, "bytes moved") == "not run"
    assert figures["pressure"]["turns_ratio"] is None
    assert figures["pressure"]["errors"] is None
    assert figures["no_pressure"]["identical"] is None
    assert all(name.startswith(("conversations", "restored")) for name in missed(figures))


def test_the_quick_form_shows_bars_of_time_without_judging_them() -> None:
    figures = demo_document(s.whole_run("quick"))
    assert verdict(figures, "turns, on ÷ off") == "shown, not judged"
    assert verdict(demo_document(s.whole_run("full")), "turns, on ÷ off") == "miss"
    assert missed(figures) == []


def test_records_cut_short_say_so() -> None:
    assert demo_document([s.run_record()])["outcome"] == "cut short"
    with pytest.raises(ValueError, match="hold no run"):
        demo_document([s.end_record()])


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0, 1))
def test_percentiles_lie_between_the_extremes_and_grow(values: list[float], share: float) -> None:
    low, middle, high = (percentile(values, at) for at in (0.0, share, 1.0))
    assert low == min(values)
    assert high == max(values)
    assert middle is not None
    assert min(values) <= middle <= max(values) + 1e-9 * max(values)


def test_percentiles_interpolate_between_ranks() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentile([], 0.5) is None
