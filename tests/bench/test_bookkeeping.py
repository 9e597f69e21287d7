from __future__ import annotations

import json
from typing import Any

import pytest

from hostcache.bench import bookkeeping
from hostcache.clock import VirtualClock


class TickingClock(VirtualClock):
    """Every look at it costs a millisecond: each timed call takes exactly one."""

    def now(self) -> float:
        self.advance(0.001)
        return super().now()


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return bookkeeping.run(
        tokens=4_007, page_tokens=8, small_pages=200, large_pages=800, memory_pages=1_500, conversation_pages=50,
        repeats=3, clock=TickingClock(),
    )


def test_every_call_is_timed_for_each_size(result: dict[str, Any]) -> None:
    assert [row["tokens"] for row in result["conversation"]] == [40, 400, 4_007]
    assert [row["pages"] for row in result["conversation"]] == [5, 50, 500]
    for row in result["conversation"]:
        assert set(row["calls_s"]) == set(bookkeeping.CALLS)
    assert [row["pages"] for row in result["growth"]["tiers"]] == [200, 800]
    assert set(result["growth"]["ratios"]) == {*bookkeeping.CALLS, "stats"}
    assert json.loads(json.dumps(result)) == result


def test_the_figures_follow_from_the_times(result: dict[str, Any]) -> None:
    for row in result["conversation"]:
        once = set(bookkeeping.CALLS) - {"plan", "settle"}
        assert all(row["calls_s"][name] == pytest.approx(0.001) for name in once)
        assert row["total_s"] == pytest.approx(sum(row["calls_s"].values()))
        assert row["ratio"] == pytest.approx(row["total_s"] / 0.001)
    assert [result[f"pause_{name}s"] for name in ("", "process_", "empty_")] == [pytest.approx(0.001)] * 3
    assert result["growth"]["ratios"]["lookup"] == pytest.approx(1.0)


def test_each_bar_of_the_issue_is_compared_with_its_figure(result: dict[str, Any]) -> None:
    assert [(bar["at_most"], bar["unit"]) for bar in result["bars"]] == [
        (5.0, "×"), (1.5, "×"), (3.0, "×"), (10.0, "ms"), (400.0, "bytes"),
    ]
    for bar in result["bars"]:
        assert bar["verdict"] == ("pass" if bar["value"] <= bar["at_most"] else "miss"), bar["name"]
    assert result["bars"][0]["verdict"] == "miss", "eight calls and their jobs at a tick each are over five ticks"
    assert result["bars"][1]["verdict"] == "pass"


def test_the_table_names_calls_sizes_and_verdicts(result: dict[str, Any]) -> None:
    text = bookkeeping.table(result)
    for word in (*bookkeeping.CALLS, "4,007", "800", "bare", "miss", "pass", "bytes a page beside the history"):
        assert word in text
