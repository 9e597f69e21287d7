"""Long pressure while copies fail, stick, come late and twice: the fleet goes on, and says what became of its tier."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.sim.runs import played

from hostcache.copiers.faults import Wedge
from hostcache.sim.play import Churn
from hostcache.sim.scenarios import Faults, Scenario, run_scenario
from hostcache.sim.suites import scenarios
from hostcache.tier import Direction, Reason

STABILITY = scenarios("stability")


def named(name: str) -> Scenario:
    return next(each for each in STABILITY if each.name == name)


def test_without_faults_the_tier_is_on_and_its_counters_balance() -> None:
    for width in (1, 4):
        calm = replace(named("everything"), width=width)
        assert "counters balanced" in run_scenario(calm).proved


@pytest.mark.parametrize("scenario", STABILITY, ids=lambda each: each.name)
def test_with_faults_of_its_kind_the_fleet_goes_on(scenario: Scenario) -> None:
    result = played(scenario, faults=True)
    stats, clients = result.run.fleet.stats(), result.run.clients
    assert result.faults > 0
    assert isinstance(clients, Churn)
    assert clients.sent == clients.ended == 150
    assert stats.served > 110


def test_above_the_quarantine_limit_the_tier_is_off_says_so_and_costs_nothing_more() -> None:
    fleet = run_scenario(named("turned-off"), faults=True).run.fleet
    assert fleet.cache.off_reason is not None
    assert "frames are held by copies that do not end" in fleet.cache.off_reason
    assert fleet.cache.quarantined > 0.25 * fleet.shape.tier.frames
    assert fleet.accounting.stats().recomputed[Reason.TIER_OFF] > 0


def test_a_lane_that_is_wedged_for_ever_keeps_its_frames_costs_few_waits_and_serves_nobody_wrong() -> None:
    fleet = run_scenario(named("wedged-for-ever"), faults=True).run.fleet
    stats = fleet.stats()
    assert stats.evict_wait_s < 0.1 * (stats.prefill_s + stats.decode_s)
    assert fleet.copier.in_flight >= 1
    assert fleet.cache.stats().quarantined_frames > 0
    assert fleet.stats().served > 120


def test_the_first_lane_to_wedge_may_be_either_and_at_any_job() -> None:
    for direction in Direction:
        for number in (0, 3, 30):
            scenario = replace(named("wedged-for-ever"), faults=Faults(at=((direction, number, Wedge),)))
            run_scenario(scenario, seed=number, faults=True)
