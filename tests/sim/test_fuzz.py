"""The fuzz: clean, wide, the same everywhere, and a failure is told so that a person can follow it."""

from __future__ import annotations

import argparse
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.sim.planted import PLANTS, fuzz_of, plant

from hostcache.errors import ConfigError
from hostcache.sim.drill import run
from hostcache.sim.fuzz import FOUND, add_fuzz_arguments, fuzz, run_fuzz
from hostcache.sim.mischief import draw


def command(*arguments: str) -> tuple[int, str, str]:
    parser = argparse.ArgumentParser()
    add_fuzz_arguments(parser)
    out, err = io.StringIO(), io.StringIO()
    code = run_fuzz(parser.parse_args(arguments), out=out, err=err)
    return code, out.getvalue(), err.getvalue()


def test_two_hundred_runs_break_nothing_and_go_through_nearly_everything() -> None:
    code, out, err = command("--runs", "200", "--seed", "1", "--jobs", "2", "--json")
    record = json.loads(out)
    assert code == 0, record["failures"]
    assert record["runs"] == 200
    assert record["violations"] == 0
    assert record["least_events"] >= 300
    assert record["covered_share"] >= 0.95
    assert "200 of 200 runs" in err
    covered = record["coverage"]
    for name in (
        "host eviction", "write-back", "write-back failed", "write-back skipped", "eviction waited",
        "eviction dropped pages", "late store in quarantine", "late restore", "completion told twice",
        "one copy for several", "refused at the door", "deferred", "preempted", "forget", "distrust", "burst", "close",
        "abort of one waiting", "abort of one queued", "abort of one restoring", "abort of one computing",
        "abort of one decoding", "mode on-pressure", "mode on-retain", "mode on-evict", "chunked lane",
        "exclusive lane", "eviction rule lru", "eviction rule scan-resistant", "tail restored", "reason evicted",
        "reason not_written", "reason not_ready", "reason dearer", "reason late", "reason failed", "reason identity",
        "reason opted_out", "reason aborted", "reason new", "reason partial_page"):  # fmt: skip
        assert covered.get(name, 0) > 0, name


def test_the_answer_does_not_depend_on_the_number_of_processes() -> None:
    assert fuzz(runs=30, seed=3, jobs=2) == fuzz(runs=30, seed=3)


def test_a_seed_says_everything_in_any_process_and_under_any_hash_seed() -> None:
    here = fuzz(runs=4, seed=5).digest
    assert {fuzz_of(None, "--runs", "4", "--seed", "5", PYTHONHASHSEED=each)[1]["digest"] for each in "01"} == {here}
    assert fuzz(runs=4, seed=6).digest != here
    assert run(draw(5, 0)).digest != run(draw(5, 1)).digest


def test_a_run_repeats_itself_from_the_choices_it_made() -> None:
    for number in range(8):
        case = draw(9, number)
        first = run(case)
        again = run(replace(case, choices=first.choices))
        assert (again.digest, again.events) == (first.digest, first.events)


@pytest.fixture(scope="module")
def bugged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with a bug that nearly every run runs into."""
    bug = next(each for each in PLANTS if each.name == "a request is counted twice")
    return plant(bug, tmp_path_factory.mktemp("bugged"))


def test_a_failure_is_replayed_to_the_same_event_and_shrunk_to_a_few(bugged: Path) -> None:
    code, record = fuzz_of(bugged, "--runs", "50", "--seed", "1")
    assert code == FOUND
    failure = record["failures"][0]
    assert record["violations"] == 1
    code, again = fuzz_of(bugged, "--replay", failure["replay"])
    assert code == FOUND
    assert (again["events"], again["violation"]) == (failure["event"], failure["violation"])
    trace = failure["trace"]
    assert trace[0].startswith("fleet: ")
    assert "the books count" in trace[-1]
    events = trace[trace.index("events:") + 1 : -1]
    assert 5 <= len(events) <= 40, trace
    assert sum(line.startswith("client") for line in trace) <= 6, trace
    assert not any(line.startswith(("copy", "mischief")) for line in trace), trace  # it takes none


def test_a_run_that_is_not_broken_has_no_violation_and_its_events() -> None:
    ran = run(draw(1, 0))
    assert ran.violation is None
    assert ran.events >= 300


def test_a_replay_shows_every_event_and_the_text_form_its_table() -> None:
    code, out, _ = command("--replay", "1:0")
    assert code == 0
    assert out.splitlines()[-1].endswith("no violation")
    code, out, _ = command("--runs", "2")
    assert code == 0
    assert "runs with …" in out


@pytest.mark.parametrize("arguments", [("--runs", "0"), ("--jobs", "0"), ("--replay", "7"), ("--replay", "a:b")])
def test_what_cannot_be_run_is_refused_in_one_line(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="give"):
        command(*arguments)
