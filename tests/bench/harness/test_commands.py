"""`bench rotate` and `bench agents`: from arguments to a cell, an exit code, and what whoever watches sees."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import io
import json
import threading
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.bench.harness.on_mock import QUICK, cell_of, read, records_of, requests

from hostcache.bench.harness import commands
from hostcache.bench.harness.agents import AgentsParameters
from hostcache.bench.harness.cellfile import RECORDS
from hostcache.bench.harness.live import PlainScreen, RichScreen, Tally, screen_for
from hostcache.bench.harness.replay import ProfileParameters, ReplayParameters
from hostcache.bench.harness.rotate import RotateParameters
from hostcache.client.counters import Scrape
from hostcache.clock import VirtualClock
from hostcache.errors import BARS_MISSED, ConfigError, ServerError
from hostcache.records import RequestRecord
from hostcache.testing.mock_server import MockConfig, serve_mock

SHORT = ("--points", "2", "--prefix-tokens", "64", "--tool-tokens", "8", "--reply-tokens", "4", "--gap-min-s", "0",
         "--gap-max-s", "0.01", "--duration-s", "0.1")


def parsed(workload: str, *argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    commands.add_arguments(parser, workload)
    return parser.parse_args(argv)


@contextmanager
def mock(config: MockConfig = QUICK) -> Iterator[str]:
    """A mock on a thread of its own, for code that brings its own event loop."""
    loop = asyncio.new_event_loop()
    ready: list[str] = []
    up = threading.Event()

    def on_ready(url: str) -> None:
        ready.append(url)
        up.set()

    task = loop.create_task(serve_mock(config, on_ready=on_ready))
    thread = threading.Thread(target=loop.run_until_complete, args=(task,))
    thread.start()
    try:
        assert up.wait(30)
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()


def run(workload: str, *argv: str, **more: Any) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = commands.run(parsed(workload, *argv), workload, out=out, err=err, argv=argv, **more)
    return code, out.getvalue(), err.getvalue()


def test_a_run_writes_its_records_into_a_new_folder_and_says_where(tmp_path: Path) -> None:
    with chdir(tmp_path), mock() as url:
        first = run("agents", "--url", f"{url}/v1", *SHORT, "--tier", "on", "--api-key", "secret")
        second = run("agents", "--url", url, *SHORT, "--api-key=secret", "--goodput", "ttft:2000", "tpot:50", "--bar",
                     "errors:0", "--metadata", "gpu=none")
    assert (first[0], second[0]) == (0, 0)
    assert first[1] == f"hostcache-bench/001/{RECORDS}\n"
    cell = cell_of(read(tmp_path / "hostcache-bench" / "002"))
    assert (cell.cell, cell.arm) == ("agents", "as-is")
    assert cell.parameters["goodput"] == {"ttft": 2000.0, "tpot": 50.0}
    assert cell.parameters["bars"] == {"errors": 0.0}
    assert cell.environment["metadata.gpu"] == "none"
    for folder in ("001", "002"):
        assert "secret" not in (tmp_path / "hostcache-bench" / folder / RECORDS).read_text()


def test_what_is_told_and_missed_comes_from_the_file_alone(tmp_path: Path) -> None:
    with mock() as url:
        arguments = ("--url", url, "--tokens", "64", "--sessions", "3", "--reply-tokens", "4", "--duration-s", "0",
                     "--recovery-idle-s", "0", "--observe-idle-s", "0", "--out")
        told = run("rotate", *arguments, str(tmp_path / "a"), "--json", "--strict",
                   tell=lambda path, as_json: f"{path.name} {as_json}\n", missed=lambda path: ["ttft p95"])
        lenient = run("rotate", *arguments, str(tmp_path / "b"), missed=lambda path: ["ttft p95"])
    assert told[:2] == (BARS_MISSED, f"{RECORDS} True\n")
    assert "missed: ttft p95" in told[2]
    assert lenient[0] == 0


def test_resume_of_a_finished_run_runs_nothing(tmp_path: Path) -> None:
    with mock() as url:
        run("agents", "--url", url, *SHORT, "--out", str(tmp_path / "a"))
        before = (tmp_path / "a" / RECORDS).read_bytes()
        code, out, _ = run("agents", "--url", url, *SHORT, "--resume", str(tmp_path / "a"))
    assert (code, out) == (0, f"{tmp_path / 'a' / RECORDS}\n")
    assert (tmp_path / "a" / RECORDS).read_bytes() == before
    with pytest.raises(ConfigError, match=r"has no records\.jsonl"):
        run("agents", *SHORT, "--resume", str(tmp_path / "none"))


def test_no_server_is_one_line_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"no server answers http://127\.0\.0\.1:9/health; start one"):
        run("agents", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "a"))
    assert not (tmp_path / "a").exists()  # nothing was measured, nothing is left


def test_defaults_ask_hostcache_serve_on_its_own_port() -> None:
    target = commands.target_of(parsed("rotate"))
    assert (target.url, target.arm, target.tier) == ("http://127.0.0.1:8000", "as-is", None)
    assert commands.workload_of(parsed("rotate"), "rotate") == RotateParameters()
    assert commands.workload_of(parsed("agents"), "agents") == AgentsParameters()


def test_names_that_users_of_other_tools_know_mean_the_same() -> None:
    agents = commands.workload_of(parsed("agents", "--concurrency", "8,16"), "agents")
    assert agents == AgentsParameters(points=(8, 16))
    replay = commands.workload_of(parsed("agents", "--input-file", "t.jsonl", "--replay-speedup", "20"), "agents")
    assert replay == ReplayParameters(trace="t.jsonl", speed=20.0)
    profile = commands.workload_of(parsed("agents", "--profile", "p.json", "--points", "4", "--divisor", "2"), "agents")
    assert profile == ProfileParameters(profile="p.json", points=(4,), divisor=2.0)
    assert commands.target_of(parsed("agents", "--base-url", "http://h:1/v1")).url == "http://h:1"
    assert parsed("agents", "--random-seed", "5").seed == 5


@pytest.mark.parametrize(("argv", "why"), [
    (("--url", "http://x", "--start", "serve {port}"), "--url and --start are both given"),
    (("--quota", "1GiB"), "it needs --tier on"),
    (("--profile", "p", "--trace", "t"), "--profile and --trace are both given"),
    (("--trace", "t", "--prefix-tokens", "5"), "--prefix-tokens means nothing with --trace"),
    (("--speed", "2"), "--speed means nothing without --profile or --trace"),
    (("--profile", "p", "--cold-share", "0.1"), "--cold-share means nothing with --profile"),
    (("--goodput", "ttft"), "--goodput 'ttft' is no NAME:VALUE"),
    (("--goodput", "speed:5"), "--goodput speed is unknown"),
    (("--processes", "0"), "--processes is 0"),
    (("--start", "serve"), "has no"),
])
def test_arguments_that_do_not_go_together_are_refused_before_anything_starts(
        tmp_path: Path, argv: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        run("agents", *argv, "--out", str(tmp_path / "a"))
    assert not (tmp_path / "a").exists()


# -- what whoever watches sees ---------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def scrape(**counters: float) -> Scrape:
    return Scrape(engine="x", counters=dict(counters), created={}, raw=(), at_s=0.0)


@pytest.fixture(name="record")
def _record(tmp_path: Path) -> RequestRecord:
    return requests(records_of(AgentsParameters(points=(1,), prefix_tokens=64, duration_s=0.0, gap_min_s=0.0),
                               tmp_path), role="prime")[0]


def test_the_tally_counts_turns_shares_errors_and_lag(record: RequestRecord) -> None:
    tally = Tally()
    tally.begin("window", "8", 30.0)
    for changes in ({"prompt_tokens": 100, "cached_tokens": 75, "due_s": 0.0, "sent_s": 0.004, "first_token_s": 0.5},
                    {"prompt_tokens": 100, "cached_tokens": None, "due_s": 0.0, "sent_s": 0.002, "first_token_s": 1.5},
                    {"outcome": "error", "reason": "http-500: it broke", "due_s": 0.0, "sent_s": 0.001}):
        tally.heard(dataclasses.replace(record, **changes))
    assert (tally.turns, tally.hit_share, tally.ttft, tally.failed) == (2, "75.0%", "1.000 s", "1 http-500")
    assert (tally.lag, tally.left(10.0)) == ("2.0 ms", ", 20 s left")
    tally.counters(scrape(restored_bytes=1000.0))
    tally.counters(scrape(restored_bytes=1000.0 + 2048))
    assert tally.moved("restored_bytes") == "2.0 KiB"
    assert tally.moved("written_bytes") == "not said"


def test_a_terminal_has_a_screen_and_anything_else_plain_lines(record: RequestRecord) -> None:
    terminal, pipe, clock = Terminal(), io.StringIO(), VirtualClock()
    for stream, kind in ((terminal, RichScreen), (pipe, PlainScreen)):
        screen = screen_for(stream, clock)
        assert isinstance(screen, kind)
        screen.note("before [everything]")
        screen.cell("b5 · on", {"engine": "vllm", "version": "0.32", "model": "m"})
        screen.segment("window", "8", 60.0)
        screen.heard(record)
        screen.counters(scrape(restored_bytes=5.0))
        screen.refresh()
        screen.note("the ramp ends")
        screen.close()
        screen.close()
    for said in (terminal.getvalue(), pipe.getvalue()):
        for word in ("before [everything]", "b5 · on", "vllm", "window", "TTFT p50", "the ramp ends"):
            assert word in said
    assert "\x1b" not in pipe.getvalue()


def test_a_plain_screen_says_how_each_segment_ended_and_nothing_of_one_without_requests(record: RequestRecord) -> None:
    pipe, clock = io.StringIO(), VirtualClock()
    screen = PlainScreen(pipe, clock)
    screen.cell("b1 · on", {"engine": "mock"})
    for part, count in (("prose 200", 1), ("prose 700", 0), ("code 200", 2)):
        screen.segment("rung", part, None)
        for _ in range(count):
            screen.refresh()
            screen.heard(record)
    screen.close()
    _, first, last = pipe.getvalue().splitlines()
    assert first.startswith("b1 · on prose 200 rung: 1 turn, TTFT p50")
    assert last.startswith("b1 · on code 200 rung: 2 turns, TTFT p50")


def test_a_cell_shows_itself_on_a_terminal(tmp_path: Path) -> None:
    terminal = Terminal()
    with mock() as url:
        code = commands.run(parsed("agents", "--url", url, *SHORT, "--out", str(tmp_path / "a")), "agents",
                            out=io.StringIO(), err=terminal)
    assert code == 0
    assert "hit share" in terminal.getvalue()
    assert json.loads((tmp_path / "a" / RECORDS).read_text().splitlines()[-1])["outcome"] == "finished"
