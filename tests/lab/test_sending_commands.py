"""`hostcache lab replay | knee | reconcile`: what is refused before a request is sent, and what stays."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.lab.probing import QUICK, REQUESTS, on_mocks, write_trace

from hostcache.errors import ConfigError, HostCacheError
from hostcache.lab.probe_commands import add_probe_arguments, run_probe_command
from hostcache.testing.mock_server import MockConfig

NOWHERE = "http://127.0.0.1:9"


def ran(*words: object) -> str:
    parser = argparse.ArgumentParser()
    add_probe_arguments(parser.add_subparsers(dest="what"))
    out = io.StringIO()
    assert run_probe_command(parser.parse_args([str(each) for each in words]), out=out, err=io.StringIO()) == 0
    return out.getvalue()


def on_mock(config: MockConfig, *words: object) -> str:
    async def run(urls: dict[str, str]) -> str:
        return await asyncio.to_thread(ran, *words, "--url", urls["one"])

    said: str = on_mocks({"one": config}, run)
    return said


def small(tmp_path: Path) -> tuple[object, ...]:
    return ("--trace", write_trace(tmp_path / "trace.jsonl"), "--block-tokens", 16)


def told(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize(("words", "says"), [
    (("replay", "--at-once", 0), "at_once is 0"),
    (("knee", "--rate-factors", "2"), "2 is no ladder"),
    (("knee", "--rate-factors", "2,-1"), "factor -1 is none"),
    (("knee", "--rate-factors", "1,2", "--ttft-s", "-1"), "ttft_s is -1"),
    (("knee", "--rate-factors", "1,2", "--against", f"{NOWHERE}/"), "is --url"),
    (("replay",), "unreachable"),
])
def test_what_cannot_be_run_is_refused_before_there_is_a_folder(tmp_path: Path, words: tuple[object, ...],
                                                                says: str) -> None:
    with pytest.raises(HostCacheError, match=says):
        ran(*words, *small(tmp_path), "--url", NOWHERE, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_requests_that_all_arrive_at_once_have_no_knee(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", spread_ms=0)
    with pytest.raises(ConfigError, match="all arrive at the same moment"):
        ran("knee", "--rate-factors", "1,2", "--trace", trace, "--url", NOWHERE, "--out", tmp_path / "out")


def test_a_replay_is_reconciled_with_its_own_trace_and_settings_alone(tmp_path: Path) -> None:
    trace = small(tmp_path)
    on_mock(QUICK, "replay", *trace, "--max-tokens", 1, "--out", tmp_path / "out")
    found = tmp_path / "out" / "replay.json"
    assert (told(found)["max_tokens"], told(found)["gap"]["unexplained"]) == (1, 0)
    against = ("reconcile", "--capacity-tokens", 640, "--replay", found)
    assert json.loads(ran(*against, *trace, "--json"))["equal"] == REQUESTS
    with pytest.raises(ConfigError, match="another workload"):
        ran(*against, *trace[:2], "--block-tokens", 32)
    with pytest.raises(ConfigError, match="both given"):
        ran(*against, *trace, "--hits", 1, "--queries", 2)


@pytest.mark.parametrize("usage", ["plain", "none"])
def test_what_was_measured_stays_also_where_it_is_void(tmp_path: Path, usage: Any) -> None:
    trace = small(tmp_path)
    with pytest.raises(HostCacheError, match="record_field_lost"):
        on_mock(replace(QUICK, style="vllm", usage=usage), "replay", *trace, "--out", tmp_path / "out")
    found = tmp_path / "out" / "replay.json"
    assert len(told(found)["requests"]) == REQUESTS
    with pytest.raises(ConfigError, match="no request was told its cached tokens"):
        ran("reconcile", "--capacity-tokens", 640, "--replay", found, *trace)


def test_a_knee_that_was_not_reached_is_said_not_to_be(tmp_path: Path) -> None:
    said = on_mock(QUICK, "knee", *small(tmp_path), "--rate-factors", "1,2", "--max-tokens", 1, "--out",
                   tmp_path / "out")
    assert said.count("the highest load: it may lie above") == 2
    (found,) = next(iter(told(tmp_path / "out" / "knee.json")["knees"].values()))
    assert (found["beyond"], found["throughput_beyond"]) == (True, True)
