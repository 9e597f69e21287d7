"""A cell's figures from its records: definitions by hand-made requests, sums that balance, reasons that void."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bench.harness.sample_cells import (
    END,
    agents_cell,
    cell,
    equivalence_cell,
    ladder_cell,
    request,
    rotate_cell,
    segment,
)

from hostcache.bench.harness.figures import LAG_BAR_S, bench_document, cell_figures
from hostcache.bench.harness.summaries import parse_goodput, summary
from hostcache.errors import ConfigError
from hostcache.records import CellRecord, Record, RequestRecord, RetryNote, SegmentRecord, from_json, to_json

COUNTED = {"prompt_tokens": 1000.0, "cached_tokens": 960.0, "device_tokens": 960.0, "host_tokens": 0.0,
           "recomputed_tokens": 40.0}
NOTHING = dict.fromkeys(COUNTED, 0.0)


def figures(*requests: RequestRecord, segments: Sequence[SegmentRecord] = (), end: bool = True, lag_bar_s: float = 0.02,
            goodput: dict[str, float] | None = None, **head: Any) -> dict[str, Any]:
    inside = sum((each.segment, each.part) == ("window", "8") for each in requests)
    brackets = segments or (segment(opening=NOTHING, closing={name: value * inside
                                                              for name, value in COUNTED.items()}),)
    return cell_figures([cell(**head), *brackets, *requests, *([END] if end else [])], lag_bar_s=lag_bar_s,
                        goodput=goodput)


def turns(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["segments"][0]["groups"]["turns"]
    return found


def codes(document: dict[str, Any]) -> list[str]:
    return [reason["code"] for reason in document["reasons"]]


# -- definitions -----------------------------------------------------------------------------------------------------


def test_ttft_and_e2e_are_told_from_due_from_sent_and_from_the_attempt_that_was_answered() -> None:
    waited = request(due_s=10.0, sent_s=10.25, answered_attempt_s=12.25, first_token_s=13.0, ended_s=15.0,
                     retries=(RetryNote(status=429, retry_after_s=None, wait_s=2.0),))
    found = turns(figures(waited, lag_bar_s=1.0))
    assert [found[start]["ttft_s"]["p50"] for start in ("from_due", "from_sent", "from_answered")] == [3.0, 2.75, 0.75]
    assert [found[start]["e2e_s"]["p50"] for start in ("from_due", "from_sent", "from_answered")] == [5.0, 4.75, 2.75]
    assert (found["lag_s"]["p50"], found["waited_s"]["p50"]) == (0.25, 2.0)


def test_tpot_divides_by_the_tokens_after_the_first_and_itl_is_the_list_of_gaps() -> None:
    found = turns(figures(request()))
    assert found["tpot_s"]["p50"] == pytest.approx(0.5 / 4)
    assert found["decode_tok_s"]["p50"] == pytest.approx(8.0)
    assert found["itl_s"]["n"] == 4
    assert found["itl_s"]["mean"] == pytest.approx(0.125)
    assert found["itl_s"]["max"] == pytest.approx(0.15)


def test_a_reply_of_one_token_has_no_tpot() -> None:
    assert turns(figures(request(completion_tokens=1)))["tpot_s"] == {
        "n": 0, "mean": None, "p50": None, "p90": None, "p95": None, "p99": None, "max": None}


def test_hit_share_is_a_ratio_of_sums_not_a_mean_of_ratios() -> None:
    small = request(session="s1", prompt_tokens=100, cached_tokens=0, device_tokens=0, recomputed={"new": 100},
                    shared_tokens=0)
    found = turns(figures(request(), small))["tokens"]
    assert found["hit_share"] == pytest.approx(960 / 1100)
    assert found["recomputed_share"] == pytest.approx(140 / 1100)
    assert found["recomputed_by_reason"] == {"new": 108, "partial_page": 32}


def test_total_coverage_stands_beside_tier_hits() -> None:
    found = turns(figures(request(device_tokens=320, host_tokens=640)))["tokens"]
    assert (found["hit_share"], found["device_share"], found["host_share"]) == (0.96, 0.32, 0.64)
    assert found["restored_requests"] == 1


def test_what_the_usage_does_not_say_is_counted_and_not_taken_for_zero() -> None:
    silent = request(session="s1", prompt_tokens=None, cached_tokens=None, device_tokens=None, host_tokens=None,
                     completion_tokens=None, recomputed=None, reason="usage-missing: no usage in the stream")
    found = turns(figures(request(), silent))
    assert (found["served"], found["tokens"]["without_usage"], found["tokens"]["hit_share"]) == (2, 1, 0.96)
    assert found["notes"] == {"usage-missing": 1}
    alone = turns(figures(silent))["tokens"]
    assert (alone["prompt"], alone["cached"], alone["hit_share"], alone["restored_requests"]) == (None,) * 4


def test_refusals_are_read_both_ways() -> None:
    retry = (RetryNote(status=429, retry_after_s=1.0, wait_s=1.0),)
    spent = request(session="s2", outcome="refused", reason="refused-429: 20 retries spent", first_token_s=None,
                    answered_attempt_s=None, retries=retry * 20)
    found = turns(figures(request(), request(session="s1", retries=retry), spent,
                          request(session="s3", outcome="error", reason="http-500", first_token_s=None),
                          request(session="s4", outcome="aborted", reason="stopped", first_token_s=None)))
    as_retries, as_errors = found["readings"]["as_retries"], found["readings"]["as_errors"]
    assert (as_retries["served"], as_retries["errors"]) == (2, 2)
    assert (as_errors["served"], as_errors["errors"]) == (1, 3)
    assert (found["retries"], found["aborted"]) == (21, 1)
    assert found["reasons"] == {"http-500": 1, "refused-429": 1, "stopped": 1}


def test_never_primed_sessions_stand_apart_from_the_revisits() -> None:
    groups = figures(request(), request(session="s9", role="visit"), request(session="s1", role="prime"),
                     )["segments"][0]["groups"]
    assert {name: group["n"] for name, group in groups.items()} == {
        "turns": 3, "revisits": 1, "never_primed": 1, "first_visits": 1}


def test_goodput_is_of_turns_that_meet_every_limit() -> None:
    limits = parse_goodput("ttft:600 tpot:130")
    slow = request(session="s1", first_token_s=10.7, ended_s=11.2)
    unknown = request(session="s2", completion_tokens=None)
    found = turns(figures(request(), slow, unknown, request(session="s3", outcome="error", reason="stalled"),
                          goodput=limits))["goodput"]
    assert (found["good"], found["unknown"], found["good_share"]) == (1, 1, 0.25)
    assert found["goodput_per_s"] == pytest.approx(1 / 60)


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "ttft:-1", "speed:3", "ttft:nan"])
def test_a_goodput_that_is_no_limit_is_refused_with_the_way_out(text: str) -> None:
    with pytest.raises(ConfigError, match="ttft:2000 tpot:50"):
        parse_goodput(text)


def test_streams_decode_together_over_the_time_in_which_any_was_decoding() -> None:
    one = request(role="decode", first_token_s=10.0, ended_s=20.0, completion_tokens=101, client=0)
    two = request(role="decode", first_token_s=15.0, ended_s=25.0, completion_tokens=101, client=1)
    later = request(role="decode", first_token_s=30.0, ended_s=35.0, completion_tokens=101, client=0)
    found = summary([later, one, two], window_s=None)
    assert found["aggregate_decode_tok_s"] == pytest.approx(300 / 20)
    assert found["clients"] == 2


def test_a_ladders_decode_rungs_are_told_by_their_streams() -> None:
    rows = cell_figures(ladder_cell("on"))["ladder"]
    decode = [(row["part"], row["streams"]) for row in rows if row["streams"]]
    assert decode == [("decode 1", 1.0), ("decode 3", 3.0), ("decode 6", 6.0)]
    (rung,) = [row for row in rows if row["part"] == "prose 2048"]
    assert rung["corpus"] == "prose"
    assert rung["restore_ratio"] == pytest.approx(rung["cold_ttft_s"] / rung["after_evict_ttft_s"])
    assert rung["prefill_tok_s"] == pytest.approx(2048 / rung["cold_ttft_s"])


def test_without_a_restore_an_evicted_rung_has_no_restore_ratio() -> None:
    assert {row["restore_ratio"] for row in cell_figures(ladder_cell("off"))["ladder"]} == {None}


def test_every_file_carries_its_formulas_and_is_plain_json() -> None:
    document = cell_figures(agents_cell("on"))
    assert "n − 1" in document["formulas"]["tpot_s"]
    assert json.loads(json.dumps(document, allow_nan=False)) == document


# -- properties ------------------------------------------------------------------------------------------------------


@settings(max_examples=24)
@given(st.randoms(use_true_random=False), st.sampled_from(["agents", "rotate", "ladder", "equivalence"]))
def test_the_order_of_the_requests_changes_no_figure(rng: Random, kind: str) -> None:
    made: list[Record] = {"agents": agents_cell("on", points=(3,), fits=2, window_s=20), "rotate": rotate_cell("off"),
                          "ladder": ladder_cell("on"), "equivalence": equivalence_cell()}[kind]
    inner = [record for record in made if isinstance(record, RequestRecord)]
    rng.shuffle(inner)
    others = [record for record in made if not isinstance(record, RequestRecord)]
    assert cell_figures([others[0], *inner, *others[1:]]) == cell_figures(made)


REQUESTS = st.lists(st.builds(
    lambda number, role, outcome, prompt, cached, host, retries: request(
        session=f"s{number}", role=role, outcome=outcome, prompt_tokens=prompt, cached_tokens=min(cached, prompt),
        host_tokens=min(host, cached, prompt), device_tokens=min(cached, prompt) - min(host, cached, prompt),
        recomputed={"new": prompt - min(cached, prompt)}, shared_tokens=prompt,
        reason=None if outcome == "ok" else outcome,
        retries=(RetryNote(status=429, retry_after_s=None, wait_s=1.0),) * retries),
    st.integers(0, 5), st.sampled_from(["prime", "visit", "revisit", "probe"]),
    st.sampled_from(["ok", "ok", "refused", "error", "aborted"]), st.integers(1, 4000), st.integers(0, 4000),
    st.integers(0, 4000), st.integers(0, 2)), max_size=30)


@given(REQUESTS)
def test_the_sums_balance(requests: list[RequestRecord]) -> None:
    found = summary(requests, window_s=60.0)
    assert found["n"] == found["served"] + found["refused"] + found["errors"] + found["aborted"]
    for reading in found["readings"].values():
        assert reading["served"] + reading["errors"] + found["aborted"] == found["n"]
    spent = found["tokens"]
    if found["served"]:
        assert spent["cached"] + spent["recomputed"] == spent["counted_prompt"] == spent["prompt"]
        assert spent["device"] + spent["host"] == spent["cached"]
        assert sum(spent["recomputed_by_reason"].values()) == spent["recomputed"]
    document = figures(*requests) if requests else None
    if document is not None:
        groups = document["segments"][0]["groups"]
        assert sum(groups.get(name, {"n": 0})["n"] for name in ("revisits", "never_primed", "first_visits", "probe")) \
            == len(requests)
        assert "balance" not in codes(document)


@given(st.integers(0, 5), st.sampled_from(["off", "on"]))
def test_a_generated_cell_survives_its_file_and_is_clean(attempt: int, arm: str) -> None:
    made = agents_cell(arm, attempt, points=(2, 3), fits=2, window_s=10)
    read = [from_json(json.loads(json.dumps(to_json(record)))) for record in made]
    document = cell_figures(read)
    assert document == cell_figures(made)
    assert (document["void"], document["reasons"]) == (False, [])
    assert {each["balance"]["verdict"] for each in document["segments"]} == {"balanced"}


# -- reasons ---------------------------------------------------------------------------------------------------------


def test_a_late_client_voids_the_cell_by_its_own_bar_and_says_what_to_do() -> None:
    late = [request(session=f"s{i}", sent_s=10.0 + i / 1000) for i in range(100)]
    document = figures(*late, lag_bar_s=LAG_BAR_S)
    assert (document["void"], codes(document)) == (True, ["lag"])
    assert "more processes" in document["reasons"][0]["text"]
    assert not figures(*late, lag_bar_s=0.2)["void"]
    own = cell_figures([cell(parameters={"lag_bar_ms": 500}), segment(), *late, END])
    assert (own["void"], own["lag"]["bar_s"]) == (False, 0.5)


def test_lag_while_priming_is_not_held_against_the_measurement() -> None:
    late = request(segment="prime", session="s1", role="prime", shared_tokens=960, sent_s=99.0)
    assert codes(figures(request(), late)) == []


def test_a_reset_counter_voids_the_cell_and_leaves_no_deltas() -> None:
    document = figures(request(), segments=[segment(opening=COUNTED, closing=COUNTED, resets=("prompt_tokens",))])
    assert (document["void"], codes(document), document["segments"][0]["counters"]) == (True, ["reset"], {})


def test_a_restart_between_two_brackets_is_seen_too() -> None:
    brackets = [segment("prime", opening=NOTHING, closing=COUNTED, opened_s=0, closed_s=5),
                segment(opening=NOTHING, closing=COUNTED, opened_s=6, closed_s=70)]
    primed = request(segment="prime", session="s1", role="prime", shared_tokens=960, due_s=1.0)
    assert codes(figures(request(), primed, segments=brackets)) == ["reset"]


def test_a_gauge_that_fell_is_no_reset() -> None:
    bracket = segment(opening={**NOTHING, "resident_bytes": 9.0}, closing={**COUNTED, "resident_bytes": 1.0})
    document = figures(request(), segments=[bracket])
    assert codes(document) == []
    assert document["segments"][0]["levels"] == {"resident_bytes": 1.0}


def test_first_visits_that_were_served_from_an_earlier_runs_cache_make_the_cell_contaminated() -> None:
    """Case O10: the same load again without a reset: 63 of 64 blocks of each prompt."""
    again = [request(session=f"s{i}", turn=0, role="prime", prompt_tokens=1024, cached_tokens=1008, device_tokens=1008,
                     recomputed={"partial_page": 16}, shared_tokens=0) for i in range(64)]
    document = figures(*again)
    assert (document["void"], codes(document)) == (True, ["contaminated"])
    assert document["state"]["start"]["above_expected"] == 64
    assert turns(document)["tokens"]["hit_share"] == 0.984375
    fresh = [dataclasses.replace(each, cached_tokens=0, device_tokens=0, recomputed={"new": 1024}) for each in again]
    assert figures(*fresh)["state"]["start"]["verdict"] == "cold"


def test_a_fixed_prefix_that_this_cell_has_sent_before_is_no_contamination() -> None:
    first = request(session="s0", turn=0, role="prime", cached_tokens=0, device_tokens=0, recomputed={"new": 1000},
                    shared_tokens=0, due_s=1.0)
    second = request(session="s1", turn=0, role="prime", cached_tokens=640, device_tokens=640,
                     recomputed={"new": 360}, shared_tokens=650, due_s=5.0)
    assert codes(figures(first, second)) == []
    assert codes(figures(first, dataclasses.replace(second, shared_tokens=630))) == ["contaminated"]


def test_without_token_counts_only_the_cells_first_request_and_the_controls_tell() -> None:
    first = request(session="s0", role="prime", cached_tokens=48, device_tokens=48, recomputed={"new": 952},
                    shared_tokens=None, due_s=1.0)
    second = request(session="s1", role="prime", shared_tokens=None, due_s=2.0)
    assert figures(first, second)["state"]["start"]["verdict"] == "cold"
    warm = dataclasses.replace(first, cached_tokens=640, device_tokens=640, recomputed={"new": 360})
    assert codes(figures(warm, second)) == ["contaminated"]
    control = request(segment="before", part="", session="control", role="control", shared_tokens=0, due_s=0.5,
                      cached_tokens=0, device_tokens=0, recomputed={"new": 1000})
    assert codes(figures(control, warm, second)) == ["contaminated"]
    silent = dataclasses.replace(first, cached_tokens=None, device_tokens=None)
    assert figures(silent)["state"]["start"]["verdict"] == "unknown"


def test_a_control_that_hits_is_found_out() -> None:
    control = request(segment="before", part="", session="control", role="control", shared_tokens=0, due_s=0.5)
    document = figures(request(), control)
    assert codes(document) == ["contaminated"]
    assert document["state"]["start"]["control"] == {"n": 1, "hit_share": 0.96}


@pytest.mark.parametrize("said", [None, "", "not asked"])
def test_an_arm_that_nobody_confirmed_stands_alone(said: str | None) -> None:
    document = figures(request(), target={"tier": None, "arm_confirmed_by": said})
    assert (document["void"], codes(document)) == (False, ["arm-not-confirmed"])


def test_counters_that_do_not_add_up_void_the_cell() -> None:
    bracket = segment(opening=NOTHING, closing={**COUNTED, "recomputed_tokens": 39.0})
    document = figures(request(), segments=[bracket])
    assert (document["void"], codes(document)) == (True, ["balance"])


def test_an_absent_counter_is_absent_and_breaks_nothing() -> None:
    document = figures(request(), segments=[segment(opening={"prompt_tokens": 0.0, "new": 1.0},
                                                    closing={"prompt_tokens": 1000.0, "restores": 3.0})])
    assert document["segments"][0]["counters"] == {"prompt_tokens": 1000.0}
    assert document["segments"][0]["balance"]["verdict"] == "not available"
    assert document["points"][0]["values"]["restores"] is None


@pytest.mark.parametrize("wrong", [{"cached_tokens": 1001}, {"recomputed": {"new": 41}}, {"host_tokens": 1}])
def test_a_usage_that_is_impossible_voids_the_cell(wrong: dict[str, Any]) -> None:
    document = figures(request(**wrong))
    assert (document["void"], codes(document)) == (True, ["balance"])


def test_prompt_tokens_that_this_client_did_not_send_are_somebody_elses() -> None:
    bracket = segment(opening=NOTHING, closing={name: 2 * value for name, value in COUNTED.items()})
    document = figures(request(), segments=[bracket])
    assert (document["void"], codes(document)) == (False, ["foreign-traffic"])


def test_a_file_without_its_last_line_is_shown_and_not_compared() -> None:
    document = figures(request(), end=False)
    assert (document["outcome"], document["void"], codes(document)) == ("cut short", False, ["cut-short"])


def test_a_failed_run_is_void_with_its_reason() -> None:
    document = cell_figures([cell(), dataclasses.replace(END, outcome="failed", detail="worker 1 died")])
    assert document["void"]
    assert "worker 1 died" in document["reasons"][0]["text"]


def test_requests_of_a_segment_that_never_closed_are_kept_apart_from_its_counters() -> None:
    document = figures(request(), request(part="16", session="s5"))
    (left,) = [each for each in document["segments"] if not each["bracketed"]]
    assert (left["part"], left["requests"], left["window_s"], left["counters"]) == ("16", 1, None, {})


def test_two_cells_in_one_file_are_refused() -> None:
    with pytest.raises(ValueError, match="2 cells"):
        cell_figures([cell(), cell()])


# -- answers and restores --------------------------------------------------------------------------------------------


def test_equivalence_compares_token_by_token_and_asks_for_proof() -> None:
    found = cell_figures(equivalence_cell(wrong=(1,), unproven=(2,)))["equivalence"]
    assert (found["total"], found["identical"], found["different"], found["unproven"]) == (4, 2, 1, 1)
    assert (found["cold_vs_cold_identical"], found["cold_vs_cold_compared"]) == (4, 4)
    wrong, unproven = found["rows"][1], found["rows"][2]
    assert (wrong["verdict"], wrong["restored_vs_cold"]["at"]) == ("different", 7)
    assert (unproven["verdict"], unproven["why"]) == ("unproven", "nothing was restored")


def test_answers_of_one_session_in_parts_of_their_own_are_one_conversation() -> None:
    made = [dataclasses.replace(record, part=record.role) if isinstance(record, RequestRecord) else record
            for record in equivalence_cell(wrong=(3,))]
    found = cell_figures(made)["equivalence"]
    assert (found["total"], found["identical"], found["different"]) == (4, 3, 1)


def test_an_answer_that_stops_early_is_a_difference_at_its_end() -> None:
    made = [dataclasses.replace(record, reply_ids=record.reply_ids[:5])
            if isinstance(record, RequestRecord) and record.role == "restored" else record
            for record in equivalence_cell()]
    rows = cell_figures(made)["equivalence"]["rows"]
    assert {(row["verdict"], row["restored_vs_cold"]["at"]) for row in rows} == {("different", 5)}


def test_restores_are_binned_by_the_servers_own_buckets() -> None:
    found = cell_figures(agents_cell("on"))["restore_histogram"]
    assert found["source"] == "counter hostcache_restore_latency_seconds"
    assert found["bounds_s"] == [0.001, 0.005, 0.02, 0.1, None]
    assert sum(found["counts"]) == found["n"] > 100
    assert 0.0005 < found["mean_s"] < 0.05


def test_restores_are_read_from_hostcaches_own_stats() -> None:
    def raw(low: int, high: int, total_s: float) -> tuple[str, ...]:
        return ("accounting {}", "host_cache " + json.dumps({"restore_latency": {
            "buckets": {"0.001": low, "0.01": low + high, "+Inf": low + high}, "sum_s": total_s, "count": low + high}}))

    bracket = segment(opening=NOTHING, closing=COUNTED, raw_opening=raw(1, 1, 0.01), raw_closing=raw(3, 2, 0.022))
    found = figures(request(), segments=[bracket])["restore_histogram"]
    assert (found["bounds_s"], found["counts"], found["n"]) == ([0.001, 0.01, None], [2, 1, 0], 3)
    assert found["mean_s"] == pytest.approx(0.004)


def test_without_buckets_the_ttft_of_restored_turns_stands_in() -> None:
    found = figures(request(device_tokens=0, host_tokens=960), request(session="s1"))["restore_histogram"]
    assert (found["source"], found["n"]) == ("TTFT of turns that were served from the host", 1)
    assert dict(zip(found["bounds_s"], found["counts"], strict=True))[0.5] == 1
    assert figures(request())["restore_histogram"] is None


def test_of_vllms_own_offload_the_mean_of_its_loads_is_known_and_no_buckets() -> None:
    """Real lines of vLLM 0.32 have a histogram of sizes in bytes, which is none of times."""
    def raw(loads: int, total_s: float) -> tuple[str, ...]:
        labels = '{engine="0",model_name="a b"}'
        return (f"vllm:kv_offload_load_time_total{labels} {total_s}",
                f"vllm:kv_offload_load_size_count{labels} {loads}",
                f'vllm:kv_offload_load_size_bucket{{engine="0",le="+Inf",model_name="a b"}} {loads}',
                f"vllm:kv_offload_load_size_sum{labels} 1e6")

    # A family without labels has no line before its first load.
    for opening, loads, mean_s in ((raw(2, 0.5), 4, 0.375), ((), 6, 1 / 3)):
        bracket = segment(opening=NOTHING, closing=COUNTED, raw_opening=opening, raw_closing=raw(6, 2.0))
        found = figures(request(), segments=[bracket])["restore_histogram"]
        assert (found["n"], found["mean_s"], found["counts"]) == (loads, pytest.approx(mean_s), [])


@pytest.mark.parametrize(("requests", "known"), [(1, True), (2, False)])
def test_a_turn_that_was_alone_while_the_server_counted_tokens_of_the_host_was_restored(requests: int,
                                                                                        known: bool) -> None:
    bracket = segment(opening=NOTHING, closing={**COUNTED, "device_tokens": 0.0, "host_tokens": 960.0})
    asked = [request(session=f"s{i}", device_tokens=None, host_tokens=None) for i in range(requests)]
    found = figures(*asked, segments=[bracket])["restore_histogram"]
    assert (found is not None) is known


def test_the_document_reads_its_bars_from_the_cells_own_parameters() -> None:
    made = [[dataclasses.replace(record, parameters={"bars": {"ttft_p95_s": 10}, "goals": {"turns": 3.1}})
             if isinstance(record, CellRecord) else record for record in agents_cell(arm)] for arm in ("off", "on")]
    said = [(each["arm"], each["part"], each["bar"], each["verdict"]) for each in bench_document(made)["verdicts"]]
    assert said == [("off", "8", "ttft_p95_s", "pass"), ("off", "16", "ttft_p95_s", "pass"),
                    ("off", "32", "ttft_p95_s", "miss"), ("on", "8", "ttft_p95_s", "pass"),
                    ("on", "16", "ttft_p95_s", "pass"), ("on", "32", "ttft_p95_s", "pass"),
                    ("on", "32", "turns", "pass")]
