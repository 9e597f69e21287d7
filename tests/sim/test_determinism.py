"""Same seed, same bytes: every shipped scenario, in this process and in a fresh one with other hashes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.sim.runs import SOAK_EVENTS, first_digest

from hostcache.sim.scenarios import Scenario, run_scenario
from hostcache.sim.suites import scenarios

_SCRIPT = f"""
from hostcache.sim.scenarios import run_scenario
from hostcache.sim.suites import scenarios
for each in scenarios():
    for faults in (False, True) if each.suite == "functional" else (True,):
        log = run_scenario(each, faults=faults, events={SOAK_EVENTS}, check=False).run.log
        print(each.suite, each.name, faults, log.digest)
"""
CASES = [(each, faults) for each in scenarios()
         for faults in ((False, True) if each.suite == "functional" else (True,))]  # fmt: skip


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Any]:
    """A process of its own, which runs beside the tests that do not need it yet."""
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", _SCRIPT]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def digest(scenario: Scenario, faults: bool, seed: int = 0) -> str:
    return run_scenario(scenario, seed=seed, faults=faults, events=SOAK_EVENTS, check=False).run.log.digest


def test_two_runs_in_one_process_give_the_same_log_and_checks_change_nothing(elsewhere: Any) -> None:
    """The first run proved everything on its way, the second only at its end."""
    for each, faults in CASES:
        assert digest(each, faults) == first_digest(each, faults=faults), each.name


def test_another_seed_gives_another_log(elsewhere: Any) -> None:
    for each, faults in CASES:
        if each.suite == "functional" and not faults:
            assert digest(each, faults, seed=1) != first_digest(each, faults=faults), each.name
    for suite in ("concurrency", "stability", "soak"):
        for each in scenarios(suite)[::4]:
            assert digest(each, True, seed=1) != first_digest(each, faults=True), each.name


def test_a_fresh_process_with_other_hashes_gives_the_same_log(elsewhere: Any) -> None:
    out, _ = elsewhere.communicate()
    assert elsewhere.returncode == 0
    rows = [line.split() for line in out.splitlines()]
    there = {(suite, name, faults == "True"): found for suite, name, faults, found in rows}
    assert there == {(each.suite, each.name, faults): first_digest(each, faults=faults) for each, faults in CASES}
