"""Step times: what belongs to which step, and the quantiles of the last ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.vllm_plugin.step_times import KEPT, StepTimes


def test_before_the_first_step_everything_is_zero() -> None:
    report = StepTimes().report()
    assert (report.own_s, report.interval_s, report.requests_peak) == ({0.5: 0.0, 0.99: 0.0}, {0.5: 0.0, 0.99: 0.0}, 0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=300))
def test_a_quantile_is_the_smallest_time_that_so_many_steps_do_not_exceed(times: list[float]) -> None:
    steps = StepTimes()
    for at, seconds in enumerate(times):
        steps.spend(seconds)
        steps.step(float(at), 1)
    for quantile, value in steps.report().own_s.items():
        assert value == sorted(times)[max(0, math.ceil(quantile * len(times)) - 1)]


def test_all_calls_since_the_last_plan_belong_to_a_step() -> None:
    steps = StepTimes()
    steps.spend(0.25)
    steps.spend(0.5)
    steps.step(1.0, 2)
    assert steps.report().own_s[0.5] == 0.75


def test_a_step_that_computes_nothing_is_none_and_takes_its_time_with_it() -> None:
    steps = StepTimes()
    steps.spend(9.0)
    steps.step(1.0, 0)
    assert not steps.fresh
    steps.spend(0.5)
    steps.step(2.0, 1)
    assert steps.report().own_s[0.99] == 0.5


def test_idle_time_is_no_interval() -> None:
    steps = StepTimes()
    for now_s, requests in ((0.0, 1), (0.25, 1), (0.5, 0), (7.0, 1), (7.25, 1)):
        steps.step(now_s, requests)
    steps.rest()
    steps.step(90.0, 1)
    assert steps.report().interval_s == {0.5: 0.25, 0.99: 0.25}


@pytest.mark.parametrize("more", [0, 1, KEPT // 2])
def test_only_the_last_steps_count(more: int) -> None:
    steps = StepTimes()
    for at in range(KEPT + more):
        steps.spend(float(at))
        steps.step(float(at), 200 if at == 0 else 3)
    report = steps.report()
    assert report.own_s[0.5] == more + KEPT // 2 - 1
    assert report.requests_peak == (200 if more == 0 else 3)
