"""Knees of loads whose answer is known, and the intervals around them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.errors import ConfigError
from hostcache.lab.knee import Goal, Point, check_ladder, compare, knee, point, ratio, wilson
from hostcache.lab.replayed import Replayed


def served(offered_per_s: float, *, per_s: float, count: int = 200, tokens: int | None = 1) -> list[Replayed]:
    """One server, one request after another, each taking 1 / per_s; arrivals evenly spaced."""
    free_s, records = 0.0, []
    for index in range(count):
        due_s = index / offered_per_s
        free_s = max(free_s, due_s) + 1 / per_s
        records.append(Replayed(
            index=index, due_s=due_s, sent_s=due_s, first_token_s=free_s, ended_s=free_s, prompt_tokens=16,
            completion_tokens=tokens, cached_tokens=0, device_tokens=None, host_tokens=None, retries=0, outcome="ok",
            reason=None, prompt_sha256=""))
    return records


def at(offered_per_s: float, goal: Goal, *, per_s: float = 10.0) -> Point:
    return point(served(offered_per_s, per_s=per_s), rate_factor=offered_per_s, goal=goal, rng=Random(1),
                 drained_cleanly=True, lateness_p99_s=0.0)


GOAL = Goal(ttft_s=0.5, share=0.9)


def test_the_knee_of_a_server_of_ten_a_second_lies_at_ten() -> None:
    found = knee([at(rate, GOAL) for rate in (14.0, 2.0, 6.0, 9.0, 10.0, 11.0)], GOAL)
    assert found.goodput_per_s is not None
    assert 10.0 <= found.goodput_per_s < 11.0
    assert found.goodput_low is not None
    assert found.goodput_high is not None
    assert found.goodput_low <= found.goodput_per_s <= found.goodput_high
    assert found.throughput_per_s == pytest.approx(10.0, rel=0.02)
    assert found.throughput_low - 1e-9 <= found.throughput_per_s <= found.throughput_high + 1e-9
    assert not found.beyond
    assert not found.throughput_beyond


def test_a_ladder_that_never_bends_says_that_the_knee_may_lie_above() -> None:
    found = knee([at(2.0, GOAL), at(4.0, GOAL)], GOAL)
    assert found.beyond
    assert found.throughput_beyond
    assert found.goodput_per_s == pytest.approx(4.0)


def test_a_ladder_that_is_beyond_from_its_first_step_has_no_goodput_knee() -> None:
    assert knee([at(20.0, GOAL), at(40.0, GOAL)], GOAL).goodput_per_s is None


def test_wilsons_bounds_are_the_published_ones_and_never_leave_the_share() -> None:
    low, high = wilson(8, 10)
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)
    assert wilson(0, 5)[0] == 0.0
    assert wilson(5, 5)[1] == 1.0
    with pytest.raises(ConfigError):
        wilson(1, 0)


@given(st.integers(1, 500), st.data())
def test_wilsons_interval_holds_the_share(count: int, data: st.DataObject) -> None:
    good = data.draw(st.integers(0, count))
    low, high = wilson(good, count)
    assert 0 <= low <= good / count <= high <= 1


@given(st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)), min_size=1, max_size=7), st.integers())
def test_a_ratio_is_the_median_of_pairs_and_the_same_from_the_same_seed(pairs: list[tuple[float, float]],
                                                                         seed: int) -> None:
    found = ratio(pairs, Random(seed))
    assert found.least <= found.low <= found.high <= found.most
    assert found.least <= found.median <= found.most
    assert found == ratio(pairs, Random(seed))


def test_no_more_is_answered_in_bursts_than_arrives() -> None:
    """Three bursts of ten: between answers there are two long times, and a sample may have none of them."""
    records = [replace(each, due_s=float(each.index // 10), ended_s=each.index // 10 + each.index % 10 * 1e-4 + 0.01)
               for each in served(1.0, per_s=10.0, count=30)]
    found = point(records, rate_factor=1.0, goal=GOAL, rng=Random(0), drained_cleanly=True, lateness_p99_s=0.0)
    assert found.throughput_low < found.throughput_per_s <= found.throughput_high <= 30 / 2


def test_answers_without_a_count_of_their_tokens_never_meet_a_time_per_token() -> None:
    records = served(2.0, per_s=10.0, count=4, tokens=None)
    goal = Goal(tpot_s=0.01)
    with pytest.raises(ConfigError, match="tpot_s cannot be judged"):
        point(records, rate_factor=1.0, goal=goal, rng=Random(0), drained_cleanly=True, lateness_p99_s=0.0)
    records[0] = replace(records[0], completion_tokens=1)
    assert point(records, rate_factor=1.0, goal=goal, rng=Random(0), drained_cleanly=True, lateness_p99_s=0.0).good == 1
    assert Goal().good(records[1])


def test_paired_knees_give_a_ratio_or_say_why_there_is_none() -> None:
    ten = knee([at(rate, GOAL) for rate in (2.0, 9.0, 14.0)], GOAL)
    five = knee([at(rate, GOAL, per_s=5.0) for rate in (2.0, 9.0, 14.0)], GOAL)
    ratios, none = compare([ten, ten], [five, five], "a seed")
    assert ratios["throughput"].median == pytest.approx(2.0, rel=0.03)
    assert ratios["goodput"].median > 1.5
    assert none == {}
    easy = knee([at(2.0, GOAL), at(4.0, GOAL)], GOAL)
    assert "highest load still" in compare([easy], [five], "a seed")[1]["goodput"]
    hard = knee([at(20.0, GOAL), at(40.0, GOAL)], GOAL)
    assert "lowest load already" in compare([ten], [hard], "a seed")[1]["goodput"]
    dead = replace(hard, throughput_per_s=0.0)
    assert compare([ten], [dead], "a seed")[0] == {}


def test_what_has_no_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        point(served(1.0, per_s=1.0, count=1), rate_factor=1.0, goal=GOAL, rng=Random(0), drained_cleanly=True,
              lateness_p99_s=0.0)
    with pytest.raises(ConfigError, match="no ladder"):
        knee([at(2.0, GOAL)], GOAL)
    for factors, what in (((2.0,), "2 is no ladder"), ((2.0, 2.0), "each once"), ((1.0, -2.0), "factor -2 is none"),
                          ((1.0, float("nan")), "factor nan is none"), ((), "no ladder")):
        with pytest.raises(ConfigError, match=what):
            check_ladder(factors)
    check_ladder((1.0, 2.0))
    for name in ("ttft_s", "tpot_s"):
        with pytest.raises(ConfigError, match=f"{name} is -1"):
            Goal(**{name: -1.0})
    with pytest.raises(ConfigError, match="above 0"):
        ratio([(1.0, 0.0)], Random(0))
