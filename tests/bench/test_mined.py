"""A trace replayed against the real mock server, and its log mined: what was sent comes back. Time is virtual."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hostcache.bench import tools
from hostcache.bench.harness.load import EARLY_S, Cast, Client, Desk, LocalCrew, Order, Shift
from hostcache.bench.harness.replay import ReplayParameters
from hostcache.bench.harness.texts import Texts
from hostcache.bench.mined import (
    FleetSize,
    Returned,
    compared,
    comparison_json,
    comparison_text,
    hit_share,
    parse_fleet,
    profile_sessions,
    trace_sessions,
)
from hostcache.client.openai import Ask, OpenAIClient
from hostcache.errors import BARS_MISSED, ConfigError
from hostcache.report.bench_page import bench_html, bench_markdown, bench_text
from hostcache.testing.mock_config import MockConfig
from hostcache.testing.mock_server import MockServer
from hostcache.workload.mining import Mined, ideal_log, mine
from hostcache.workload.request_logs import LoggedRequest, read_log
from hostcache.workload.sample_traces import synthetic_requests, write_trace
from hostcache.workload.traces import DELTA, Trace, TraceSession, open_trace, sessions_of

AGENTIC = Path(__file__).parents[3] / "shared" / "data" / "agentic240.delta.jsonl.gz"
IDS = tuple((i * 7919) % 997 for i in range(5000))
SPEED = 20.0
PAGES = tools.Pages(text=bench_text, markdown=bench_markdown, html=bench_html, published=None)


# --- a replay on a clock that nothing but the replay's own pauses move


class TogetherClock:
    """Stands still while any player works; when all of them wait it is the time of the first to go on."""

    def __init__(self, players: int) -> None:
        self._players = players
        self._now_s = 1000.0
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._number = count()

    def now(self) -> float:
        self._now_s += 1e-9  # who looks until it is time must see it come
        return self._now_s

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here may block")

    async def sleep_until(self, due_s: float) -> None:
        if due_s <= self._now_s:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (due_s, next(self._number), woken))
        self._go_on()
        try:
            await woken
        finally:
            self._waiting = [each for each in self._waiting if each[2] is not woken]
            heapify(self._waiting)

    def leave(self) -> None:
        """One player fewer."""
        self._players -= 1
        self._go_on()

    def _go_on(self) -> None:
        if self._waiting and len(self._waiting) >= self._players:
            due_s, _, woken = heappop(self._waiting)
            self._now_s = max(self._now_s, due_s + EARLY_S)  # sleepers ask to be woken so much early
            woken.set_result(None)


class Player:
    """A client whose end the clock hears of."""

    side = False

    def __init__(self, client: Client, clock: TogetherClock) -> None:
        self._client = client
        self._clock = clock

    async def work(self, shift: Shift) -> None:
        await self._client.work(shift)
        self._clock.leave()


def replayed(trace: Path, log: Path, *, sessions: int) -> None:
    """Agents say the trace's first sessions to a mock server; two requests of nobody are in its log, too."""

    async def run() -> None:
        clock = TogetherClock(sessions)
        cast = Cast(part="", count=sessions, mine=tuple(range(sessions)), limit_tokens=None,
                    texts=Texts("ids", IDS, seed=0, salt="a run's"))
        config = MockConfig(block_tokens=64, log_every_blocks=1, device_blocks=1 << 20, ttft_s=0.0, itl_s=0.0, chunks=1,
                            no_prompt_ids=True, request_log=log)
        async with MockServer(config, clock=clock) as server, OpenAIClient(server.url, clock=clock) as client:
            desk = Desk(client, model="mock", mode="ids", seed=0, clock=clock, emit=lambda record: None, want_ids=True)
            nobody = Ask(endpoint="completions", prompt=IDS[:500], max_tokens=4)
            await client.ask(nobody, model="mock", rng=random.Random(0))
            clients = ReplayParameters(trace=str(trace), sessions=sessions, speed=SPEED).players(cast)
            await LocalCrew([Player(each, clock) for each in clients], desk).obey(
                Order(segment="window", part="", start_s=clock.now()))
            await client.ask(nobody, model="mock", rng=random.Random(0))

    asyncio.run(asyncio.wait_for(run(), 60.0))


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A synthetic trace, one session more than is replayed, and the log of the replay."""
    folder = tmp_path_factory.mktemp("replay")
    trace, log = folder / "trace.jsonl", folder / "log.jsonl"
    write_trace(trace, synthetic_requests(3, sessions=5, turns=6), format=DELTA)
    replayed(trace, log, sessions=4)
    return trace, log


def reference_of(trace: Path, count: int) -> tuple[Trace, tuple[TraceSession, ...], Mined]:
    opened = open_trace(trace)
    sessions = sessions_of(opened)[:count]
    return opened, sessions, mine(ideal_log(sessions, block_tokens=64), name="trace", replies_return=False)


def test_a_replayed_trace_is_mined_back_from_the_mocks_log_turn_by_turn(short: tuple[Path, Path]) -> None:
    trace, log = short
    _, sessions, reference = reference_of(trace, 4)
    requests = [each for each in read_log(log).requests if each.session is not None]
    assert len(requests) == len(read_log(log).requests) - 2
    found = mine(requests, name="log", speed=SPEED, replies_return=False)
    assert (found.facts.sessions, found.facts.requests, found.facts.joined["hint"]) == (4, 24, 24)
    for got, wanted in zip(found.profile.recorded, reference.profile.recorded, strict=True):
        assert [replace(turn, gap_s=0.0) for turn in got.turns] == [replace(turn, gap_s=0.0) for turn in wanted.turns]
        np.testing.assert_allclose([turn.gap_s for turn in got.turns], [turn.gap_s for turn in wanted.turns], atol=1e-3)
        assert got.start_s == pytest.approx(wanted.start_s, abs=1e-3)
    assert found.profile.growth_tokens == reference.profile.growth_tokens
    assert [turn.gap_s for each in reference.profile.recorded for turn in each.turns[1:]] == [
        request.think_s for each in sessions for request in each.requests[1:]]  # fmt: skip


def run_mine(*words: str) -> tuple[int, str, str]:
    parser = argparse.ArgumentParser()
    tools.add_tools(parser.add_subparsers(dest="what"))
    out, err = io.StringIO(), io.StringIO()
    return tools.run(parser.parse_args(["mine", *words]), out=out, err=err, pages=PAGES), out.getvalue(), err.getvalue()


def test_the_command_shows_the_trace_beside_what_came_back_of_it(short: tuple[Path, Path], tmp_path: Path) -> None:
    trace, log = map(str, short)
    replay = (log, "--speed", "20", "--no-replies", "--named")
    beside = (*replay, "--against", trace, "--sessions", "4", "--fleet", "32768", "--fleet", "65536:64MiB", "--strict")
    code, out, err = run_mine(*beside, "--out", str(tmp_path / "profile.json"))
    assert code == 0, out
    assert "left out 2 requests that name no conversation" in err
    assert out.splitlines()[-1].endswith("within 2 points: yes")
    assert json.loads((tmp_path / "profile.json").read_text())["recorded"]
    code, out, _ = run_mine(*beside, "--json")
    document = json.loads(out)
    assert (code, document["missed"]) == (0, [])
    assert [each["what"] for each in document["hit_shares"]] == [
        "hit share, 32,768 tokens", "hit share, 65,536 tokens, host 64.0 MiB"]


def test_a_log_mined_at_the_wrong_speed_or_with_strangers_in_it_is_told_and_exits_3(short: tuple[Path, Path]) -> None:
    trace, log = map(str, short)
    code, out, _ = run_mine(log, "--against", trace, "--sessions", "4", "--fleet", "4096", "--strict")
    assert code == BARS_MISSED
    missed = out.splitlines()[-1]
    for what in ("requests", "sessions", "gap (s) p50"):
        assert what in missed
    assert run_mine(log, "--against", trace, "--sessions", "4", "--fleet", "4096")[0] == 0


@pytest.mark.parametrize(("words", "says"), [
    (("--sessions", "4"), "--sessions is of a comparison"), (("--strict",), "--strict is of a comparison"),
    (("--against", "TRACE", "--sessions", "-1"), "give 0 or more"), (("--against", "TRACE", "--fleet", "x"), "POOL"),
])
def test_a_comparison_that_cannot_be_is_refused_before_anything_is_written(
    short: tuple[Path, Path], tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    trace, log = map(str, short)
    with pytest.raises(ConfigError, match=says):
        run_mine(log, *(trace if word == "TRACE" else word for word in words), "--out", str(tmp_path / "p.json"))
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize("text", ["", "x", "0", "-5", ":16GiB", "1.5"])
def test_a_fleet_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not POOL\[:HOST\]"):
        parse_fleet(text)


def test_a_fleet_says_its_size_and_one_too_small_for_a_request_is_refused(short: tuple[Path, Path]) -> None:
    assert parse_fleet("700_000:16GiB") == FleetSize(pool_tokens=700_000, host_bytes=16 * 2**30)
    trace, sessions, reference = reference_of(short[0], 4)
    with pytest.raises(ConfigError, match="give a larger pool"):
        compared(reference, reference, trace, sessions, fleets=[FleetSize(pool_tokens=64)])


def test_a_figure_of_nothing_has_no_ratio() -> None:
    assert Returned(what="gap", trace=0.0, mined=0.0, near=True).ratio is None
    assert Returned(what="gap", trace=2.0, mined=3.0, near=False).ratio == 1.5


# --- the hit share of the published trace


@pytest.fixture(scope="module")
def agentic() -> tuple[Trace, tuple[TraceSession, ...]]:
    """Its first 24 sessions: 389 requests, 25.6 million prompt tokens."""
    if not AGENTIC.is_file():
        pytest.skip("the public traces are not here")
    trace = open_trace(AGENTIC)
    return trace, sessions_of(trace)[:24]


def late(log: Sequence[LoggedRequest], rng: random.Random, *, mean_s: float) -> list[LoggedRequest]:
    """As if every request had come a little late, and the rest of its conversation with it."""
    behind_s: dict[str | None, float] = {}
    moved = []
    for request in log:
        behind_s[request.session] = behind_s.get(request.session, 0.0) + rng.expovariate(1 / mean_s)
        at_s = request.started_s + behind_s[request.session]
        moved.append(replace(request, started_s=at_s, ended_s=at_s))
    return sorted(moved, key=lambda each: each.started_s)


PRESSED = FleetSize(pool_tokens=700_000)
"""Too small for all: a cache without a limit has 0.91."""


@pytest.fixture(scope="module")
def agentic_hit_share(agentic: tuple[Trace, tuple[TraceSession, ...]]) -> float:
    return hit_share(trace_sessions(*agentic), PRESSED)


@pytest.mark.parametrize("late_s", [0.0, 0.1])
def test_the_mined_profile_has_the_traces_hit_share_within_2_points(
    agentic: tuple[Trace, tuple[TraceSession, ...]], agentic_hit_share: float, late_s: float
) -> None:
    """A tenth of a second is what a replay at 20 times its speed makes of five milliseconds."""
    log: Sequence[LoggedRequest] = ideal_log(agentic[1], block_tokens=64)
    if late_s:
        log = late(log, random.Random(1), mean_s=late_s)
    found = mine(log, name="agents", replies_return=False)
    assert (found.facts.sessions, found.facts.requests, found.facts.compactions) == (24, 389, 2)
    assert 0.5 < agentic_hit_share < 0.7
    assert hit_share(profile_sessions(found.profile), PRESSED) == pytest.approx(agentic_hit_share, abs=0.02)


def test_a_comparison_says_each_figure_in_a_line_and_marks_what_did_not_come_back(short: tuple[Path, Path]) -> None:
    trace, sessions, reference = reference_of(short[0], 4)
    other = mine(ideal_log(sessions[:3], block_tokens=64), name="other", replies_return=False)
    comparison = compared(other, reference, trace, sessions, fleets=[FleetSize(pool_tokens=4096)])
    text = comparison_text(comparison)
    lines: dict[str, Any] = {line[:42].strip(): line for line in text.splitlines()}
    assert lines["sessions"].split()[1:] == ["4", "3", "!"]
    assert lines["start (tokens) p50"].count("×") == 1
    assert comparison_json(comparison)["missed"][:2] == ["requests", "sessions"]
