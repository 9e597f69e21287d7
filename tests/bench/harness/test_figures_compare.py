"""Arms beside each other: what may be compared, in rates, over pairs, against the noise, and when a benefit is one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.bench.harness.sample_cells import (
    END,
    agents_cell,
    equivalence_cell,
    head,
    ladder_cell,
    request,
    rotate_cell,
    segment,
)

from hostcache.bench.harness.figures import cell_figures, compare
from hostcache.records import CellRecord, Record, RequestRecord, SegmentRecord


def made(*cells: list[Record]) -> list[dict[str, Any]]:
    return [cell_figures(records) for records in cells]


def load(arm: str, attempt: int = 1, *, turns: int = 10, window_s: float = 60.0, evicted: float = 5.0,
         host: int = 0, ttft_s: float = 0.5, **changes: Any) -> list[Record]:
    """One steady segment of `turns` equal revisits."""
    device = 960 - host
    revisits = [request(segment="steady", part="", session=f"s{i}", turn=1, due_s=10.0 + i, device_tokens=device,
                        host_tokens=host, first_token_s=10.0 + i + ttft_s, ended_s=11.0 + i + ttft_s)
                for i in range(turns)]
    first = request(segment="prime", part="", session="s0", turn=0, role="prime", cached_tokens=0, device_tokens=0,
                    recomputed={"new": 1000}, shared_tokens=0, due_s=1.0)
    bracket = segment("steady", "", window_s=window_s, opened_s=5.0, closed_s=90.0,
                      opening={"evicted_pages": 0.0, "restores": 0.0},
                      closing={"evicted_pages": evicted, "restores": float(turns if host else 0)})
    return [head("b2-r3", "rotate", arm, attempt, **changes), bracket, first, *revisits, END]


def with_primes(records: list[Record], **changes: Any) -> list[Record]:
    return [dataclasses.replace(record, **changes) if isinstance(record, RequestRecord) and record.role == "prime"
            else record for record in records]


def row_of(comparison: dict[str, Any]) -> dict[str, Any]:
    (row,) = comparison["rows"]
    found: dict[str, Any] = row
    return found


def test_windows_of_unequal_length_are_compared_as_rates() -> None:
    row = row_of(compare(made(load("off", turns=10, window_s=30.0), load("on", turns=20, window_s=60.0, host=960))))
    assert row["values"]["served"]["ratio"] == pytest.approx(1.0)
    assert row["values"]["served_per_s"] == {
        "off": pytest.approx(1 / 3), "on": pytest.approx(1 / 3), "ratio": pytest.approx(1.0),
        "ratios": [pytest.approx(1.0)], "spread": None, "noise": None, "beyond_noise": None, "difference": None,
        "higher_is_better": True}
    assert row["windows_s"] == {"off": 30.0, "on": 60.0}


def test_a_benefit_needs_evictions_in_both_arms_and_a_restore_in_one() -> None:
    off, on = load("off", evicted=5), load("on", evicted=5, host=960)
    assert row_of(compare(made(off, on)))["benefit"] == "measured"
    calm = row_of(compare(made(load("off", evicted=0), on)))
    assert calm["benefit"] == "nothing was evicted from the device in arm off: no benefit is claimed"
    assert calm["values"]["served_per_s"]["ratio"] == 1.0
    assert "nothing was restored" in row_of(compare(made(off, load("on", evicted=5))))["benefit"]


def test_without_an_eviction_counter_a_lost_prefix_is_the_proof() -> None:
    def without(records: list[Record], cached: int) -> list[Record]:
        bare = [dataclasses.replace(record, opening={}, closing={}) if isinstance(record, SegmentRecord) else record
                for record in records]
        return [dataclasses.replace(record, cached_tokens=cached, device_tokens=cached, recomputed=None)
                if isinstance(record, RequestRecord) and record.role == "revisit" else record for record in bare]

    (point,) = cell_figures(without(load("off"), 0))["points"]
    assert point["evicted"]["proof"] == "revisits that lost their prefix"
    (point,) = cell_figures(without(load("off"), 960))["points"]
    assert point["evicted"]["proof"] is None


def test_pairs_give_a_spread_and_repeated_arms_the_noise_floor() -> None:
    cells = made(load("off", 1, turns=10), load("on", 1, turns=30, host=960), load("off", 2, turns=12),
                 load("on", 2, turns=30, host=960))
    value = row_of(compare(cells))["values"]["served_per_s"]
    assert value["ratios"] == [pytest.approx(3.0), pytest.approx(2.5)]
    assert (value["ratio"], value["spread"]) == (pytest.approx(2.75), [pytest.approx(2.5), pytest.approx(3.0)])
    assert value["noise"] == [pytest.approx(10 / 12), pytest.approx(1.2)]
    assert value["beyond_noise"] is True


def test_a_ratio_inside_the_noise_is_said_to_be() -> None:
    cells = made(load("off", 1, turns=10), load("on", 1, turns=11), load("off", 2, turns=12), load("on", 2, turns=11))
    assert row_of(compare(cells))["values"]["served_per_s"]["beyond_noise"] is False


def test_coverage_is_paired_on_identical_requests_with_its_own_noise() -> None:
    cells = made(load("off", 1, turns=4), load("on", 1, turns=9, host=640), load("off", 2, turns=4))
    paired = row_of(compare(cells))["paired"]
    assert (paired["n"], paired["coverage_baseline"], paired["coverage_arm"]) == (4, 0.96, 0.96)
    assert (paired["coverage_gain"], paired["tier_hits_arm"], paired["coverage_noise"]) == (0.0, 0.64, 0.0)
    assert paired["ttft_ratio"]["p50"] == pytest.approx(1.0)


def test_unequal_identity_is_refused() -> None:
    other = [dataclasses.replace(record, identity="another") if isinstance(record, CellRecord) else record
             for record in load("on", host=960)]
    comparison = compare(made(load("off"), other))
    assert comparison["rows"] == []
    assert all("unequal identity" in each["why"] for each in comparison["refused"])
    assert len(comparison["refused"]) == 2


def test_a_second_run_on_a_warm_server_is_refused_a_place_in_the_table() -> None:
    warm = with_primes(load("on", host=960), cached_tokens=960, device_tokens=960, recomputed={"new": 40})
    comparison = compare(made(load("off"), warm))
    assert comparison["rows"] == []
    assert "first visits were served from a cache" in comparison["refused"][0]["why"]


def test_unequal_starting_states_are_refused() -> None:
    silent = with_primes(load("on", host=960), cached_tokens=None, device_tokens=None, host_tokens=None,
                         recomputed=None)
    comparison = compare(made(load("off"), silent))
    assert comparison["rows"] == []
    assert comparison["refused"][0]["why"] == "unequal start: off began cold, on unknown"


def test_an_unconfirmed_arm_is_refused() -> None:
    cells = made(load("off"), load("on", host=960))
    unconfirmed = [dataclasses.replace(record, target={"arm_confirmed_by": "not asked"})
                   if isinstance(record, CellRecord) else record for record in load("on", host=960)]
    assert len(compare(cells)["rows"]) == 1
    refused = compare([cells[0], cell_figures(unconfirmed)])["refused"]
    assert [(each["arm"], "nothing that the server said" in each["why"]) for each in refused] == [("on", True)]


def test_a_ramp_is_compared_point_by_point_as_far_as_both_arms_came() -> None:
    comparison = compare(made(agents_cell("off", points=(8, 16)), agents_cell("on", points=(8, 16, 32))))
    assert [row["part"] for row in comparison["rows"]] == ["8", "16"]


def test_a_share_is_compared_by_difference_too_and_a_ratio_over_nothing_is_unknown() -> None:
    row = row_of(compare(made(rotate_cell("off"), rotate_cell("on"))))
    found = row["values"]["host_share"]
    assert (found["off"], found["ratio"]) == (0.0, None)
    assert found["difference"] == pytest.approx(found["on"])
    assert row["values"]["recomputed_share"]["higher_is_better"] is False


def test_rungs_are_compared_as_prefill_and_decode() -> None:
    rows = {row["part"]: row["values"] for row in compare(made(ladder_cell("off"), ladder_cell("on")))["rows"]}
    assert 0.9 < rows["prose 1024"]["prefill_tok_s"]["ratio"] < 1.15
    assert rows["prose 1024"]["after_evict_ttft_s"]["ratio"] < 0.2
    assert 0.9 < rows["decode 6"]["aggregate_decode_tok_s"]["ratio"] < 1.1


def test_one_arm_alone_is_no_comparison_and_no_complaint() -> None:
    assert compare(made(equivalence_cell())) == {"baseline": "off", "rows": [], "refused": []}
