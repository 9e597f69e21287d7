"""Runs of shipped scenarios that several test files look at: once each, and again only where that is the test."""

from __future__ import annotations

from hostcache.sim.scenarios import Played, Scenario, run_scenario

SOAK_EVENTS = 2000
"""Of a soak that only shows its digest."""
_digests: dict[tuple[str, str, bool], str] = {}


def played(scenario: Scenario, *, faults: bool) -> Played:
    """With seed 0, everything proved as often as the scenario says."""
    result = run_scenario(scenario, faults=faults, events=SOAK_EVENTS)
    _digests[scenario.suite, scenario.name, faults] = result.run.log.digest
    return result


def first_digest(scenario: Scenario, *, faults: bool) -> str:
    """Of the run that another test has done, or of one now."""
    key = (scenario.suite, scenario.name, faults)
    if key not in _digests:
        played(scenario, faults=faults)
    return _digests[key]
