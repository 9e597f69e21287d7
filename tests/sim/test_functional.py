"""Each mechanism alone, as shipped; and that the suites can fail."""

from __future__ import annotations

import argparse
import io
import json
from dataclasses import replace

import pytest
from tests.sim.runs import played

from hostcache.errors import ConfigError, InvariantBroken
from hostcache.sim import suites
from hostcache.sim.play import Asked, Play, Story
from hostcache.sim.scenarios import PAGE, Scenario, fleet_shape, run_scenario, told
from hostcache.sim.suites import SUITES, Result, line_of, run_suites, scenarios

FUNCTIONAL = scenarios("functional")


@pytest.mark.parametrize("scenario", FUNCTIONAL, ids=lambda each: each.name)
def test_it_does_what_its_story_says(scenario: Scenario) -> None:
    result = played(scenario, faults=False)
    assert len(result.proved) > len(scenario.proofs), "the story proved something of its own"
    assert result.run.log.events > 0


@pytest.mark.parametrize("scenario", FUNCTIONAL, ids=lambda each: each.name)
def test_with_faults_nothing_breaks(scenario: Scenario) -> None:
    played(scenario, faults=True)
    for seed in (1, 2):
        run_scenario(scenario, seed=seed, faults=True)


def test_scenarios_have_names_of_their_own_and_one_line_each() -> None:
    every = scenarios()
    assert len({(each.suite, each.name) for each in every}) == len(every)
    assert {each.suite for each in every} == set(SUITES)
    for each in every:
        assert each.shows
        assert "\n" not in each.shows
    with pytest.raises(ConfigError, match="there is no suite 'none'"):
        scenarios("none")


# ---- the suites can fail


def _hopeful(play: Play) -> Story:
    asked = play.ask(play.conversation(PAGE))
    yield asked
    play.prove("a first prompt is on the host", asked.host > 0)


def _endless(play: Play) -> Story:
    yield play.ask(play.conversation(PAGE))
    yield Asked(play, 99)  # nobody sent it


HOPEFUL = Scenario(name="hopeful", suite="functional", shows="", shape=fleet_shape(16, 16), clients=told(_hopeful))


def test_a_story_that_is_not_true_is_a_violation_without_faults_and_none_with_them() -> None:
    with pytest.raises(InvariantBroken, match="not true: a first prompt is on the host"):
        run_scenario(HOPEFUL)
    assert run_scenario(HOPEFUL, faults=True).proved == ()


def test_a_story_that_stops_before_its_end_is_a_violation() -> None:
    with pytest.raises(InvariantBroken, match="1 stories stopped before their end"):
        run_scenario(replace(HOPEFUL, clients=told(_endless)))


def test_a_proof_that_does_not_hold_is_a_violation() -> None:
    one = FUNCTIONAL[0]
    with pytest.raises(InvariantBroken, match="not true: pigs fly"):
        run_scenario(replace(one, proofs=(("pigs fly", lambda run: False),)))


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    suites.add_suite_arguments(parser)
    return parser.parse_args(argv)


def test_the_command_prints_a_line_a_scenario_and_ends_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "_ALL", FUNCTIONAL[:3])
    out, err = io.StringIO(), io.StringIO()
    assert run_suites(arguments("functional", "--seed", "4"), out=out, err=err) == 0
    lines = out.getvalue().splitlines()
    assert len(lines) == 7
    assert lines[0].startswith("functional/no-pressure ")
    assert lines[1].startswith("functional/no-pressure +faults")
    assert "nothing was copied" in lines[0]
    assert lines[-1].startswith("6 runs, ")
    assert lines[-1].endswith("0 violations")


def test_a_violation_ends_the_command_with_1_and_names_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "_ALL", (HOPEFUL,))
    out = io.StringIO()
    assert run_suites(arguments("--json", "--seed", "7"), out=out, err=io.StringIO()) == 1
    told_ = json.loads(out.getvalue())
    assert (told_["seed"], told_["violations"]) == (7, 1)
    assert [each["broken"] for each in told_["scenarios"]] == ["not true: a first prompt is on the host", None]
    out = io.StringIO()
    assert run_suites(arguments("functional", "--seed", "7"), out=out, err=io.StringIO()) == 1
    assert "BROKEN (seed 7): not true" in out.getvalue().splitlines()[0]


def test_no_events_are_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="--events is 0; give at least 1"):
        run_suites(arguments("soak", "--events", "0"), out=io.StringIO(), err=io.StringIO())


def test_a_result_reads_as_one_line() -> None:
    result = Result(name="n", suite="soak", shows="", faults=True, seed=1, events=12, digest="ab" * 16, simulated_s=1.0,
                    requests=3, evictions=2, restores=1, faults_seen=4, proved=("a", "b"))
    words = " ".join(line_of(result).split())
    assert words == "soak/n +faults 12 events abababababab a; b; 2 evictions, 1 restores, 4 faults"
