"""A request log's profile: conversations found by name, prefix or length, and the workload that comes back from it."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostcache.errors import ConfigError
from hostcache.sim.clients import ProfileLoops, Sessions, Visit
from hostcache.sim.fleet import Fleet
from hostcache.sim.loop import Loop
from hostcache.sim.plan import Machine, trace_turns
from hostcache.sim.requests import How
from hostcache.sim.stage import identity, simulate
from hostcache.testing.mock_config import MockConfig
from hostcache.testing.mock_server import MockServer
from hostcache.workload.mining import Mined, mine
from hostcache.workload.profiles import (
    Profile,
    conversation_turns,
    named_profile,
    planned_sessions,
    profile_json,
    quantiles,
    read_profile,
)
from hostcache.workload.request_logs import LoggedRequest, read_log, token_prefix
from hostcache.workload.traces import Trace, TraceSession, open_trace, sessions_of

AGENTIC = Path(__file__).parents[3] / "shared" / "data" / "agentic240.delta.jsonl.gz"
PAGE = 64


# --- logs made of conversations whose truth is known


class Talk:
    """A conversation of token ids that logs its requests. Each answer takes a second."""

    def __init__(self, name: str | None, head: Sequence[int], at_s: float, *, digests: bool = True) -> None:
        self.name = name
        self.ids = list(head)
        self.at_s = at_s
        self.digests = digests
        self.log: list[LoggedRequest] = []

    def ask(self, ids: Sequence[int], reply: Sequence[int], *, after_s: float = 10.0) -> Talk:
        self.ids += ids
        self.at_s += after_s if self.log else 0.0
        more: dict[str, Any] = {}
        if self.digests:
            more["prefix"], more["prefix_ends"] = token_prefix(self.ids)
        self.log.append(LoggedRequest(line=1, started_s=self.at_s, ended_s=self.at_s + 1, prompt_tokens=len(self.ids),
                                      completion_tokens=len(reply), session=self.name, **more))  # fmt: skip
        self.at_s += 1
        self.ids += reply
        return self


def mined(*talks: Talk, **more: Any) -> Mined:
    log = sorted((request for talk in talks for request in talk.log), key=lambda each: each.started_s)
    return mine(log, name="test", **more)


def two(*, names: bool, digests: bool) -> tuple[Talk, Talk]:
    """Two conversations at once, of three and two requests; the lengths tell them apart too."""
    first = Talk("a" if names else None, range(1000), 0.0, digests=digests)
    other = Talk("b" if names else None, range(50_000, 80_000), 3.0, digests=digests)
    first.ask([], range(50)).ask(range(160), range(50)).ask(range(320), range(50), after_s=700)
    other.ask([], range(90)).ask(range(400), range(90))
    return first, other


@pytest.mark.parametrize(
    ("names", "digests", "joined"),
    [
        (True, True, {"hint": 5, "prefix": 0, "growth": 0, "none": 0}),
        (True, False, {"hint": 5, "prefix": 0, "growth": 0, "none": 0}),
        (False, True, {"hint": 0, "prefix": 3, "growth": 0, "none": 2}),
        (False, False, {"hint": 0, "prefix": 0, "growth": 3, "none": 2}),
    ],
)
def test_conversations_are_found_by_name_by_prefix_or_by_length(names: bool, digests: bool,
                                                                joined: dict[str, int]) -> None:
    found = mined(*two(names=names, digests=digests))
    assert found.facts.joined == joined
    assert (found.facts.sessions, found.facts.cold_starts) == (2, 2)
    assert (found.facts.warm, found.facts.resumes, found.facts.compactions) == (2, 1, 0)
    profile = found.profile
    assert (profile.start_tokens[0], profile.start_tokens[-1]) == (1000, 30_000)
    assert (profile.growth_tokens[0], profile.growth_tokens[-1]) == (160, 400)
    assert (profile.gap_s[0], profile.gap_s[-1]) == (10, 700)
    assert (profile.turns[0], profile.turns[-1]) == (2, 3)
    assert [each.start_s for each in profile.recorded] == [0, 3]
    assert [(turn.gap_s, turn.kept_tokens, turn.prompt_tokens) for turn in profile.recorded[0].turns] == [
        (0, 0, 1000), (10, 1050, 1210), (700, 1260, 1580)]  # fmt: skip


def test_names_that_never_come_twice_are_not_used_and_that_is_said() -> None:
    first, other = two(names=False, digests=True)
    for number, request in enumerate([*first.log, *other.log]):
        object.__setattr__(request, "session", f"id-{number}")
    found = mined(first, other)
    assert found.facts.sessions == 2
    assert any("names were not used" in note for note in found.facts.notes)


def test_a_compaction_is_a_conversation_cut_not_a_new_one() -> None:
    talk = Talk(None, range(10_000), 0.0).ask([], range(100)).ask(range(500), range(100))
    talk.ids = talk.ids[: int(len(talk.ids) * 0.72)]
    talk.ask(range(7, 207), range(100))
    found = mined(talk)
    assert (found.facts.sessions, found.facts.compactions, found.facts.warm) == (1, 1, 1)
    assert found.profile.compact_one_in == 2
    assert found.profile.compact_share == pytest.approx(0.72, abs=0.01)


def test_a_branch_off_a_conversation_that_goes_on_is_another_conversation() -> None:
    talk = Talk(None, range(10_000), 0.0).ask([], range(100))
    branch = Talk(None, [*talk.ids[:8000], *range(900, 1900)], 5.0).ask([], range(10))
    talk.ask(range(300), range(100), after_s=20)
    found = mined(talk, branch)
    assert (found.facts.sessions, found.facts.compactions) == (2, 0)


def test_a_system_prompt_is_told_by_what_first_prompts_share() -> None:
    system = list(range(4096))
    talks = [Talk(None, [*system, *range(10_000 * n, 10_000 * n + 600)], 3.0 * n).ask([], [n]).ask(range(200), [n])
             for n in range(1, 9)]  # fmt: skip
    found = mined(*talks)
    assert found.facts.sessions == 8
    assert found.profile.shared_tokens == 4096
    assert [each.turns[0].kept_tokens for each in found.profile.recorded] == [4096] * 8


def test_a_cut_of_the_first_conversation_is_no_system_prompt() -> None:
    """Its cut begins like its own first prompt; no other conversation does."""
    talk = Talk(None, range(10_000), 0.0).ask([], range(100)).ask(range(500), range(100))
    talk.ids = talk.ids[:8000]
    talk.ask(range(7, 207), range(100))
    other = Talk(None, range(50_000, 60_000), 500.0).ask([], range(100))
    found = mined(talk, other)
    assert (found.facts.sessions, found.facts.compactions) == (2, 1)
    assert found.profile.shared_tokens == 0
    assert [each.turns[0].kept_tokens for each in found.profile.recorded] == [0, 0]


def test_replies_that_do_not_return_are_not_counted_as_kept() -> None:
    found = mined(*two(names=True, digests=True), replies_return=False)
    assert [turn.kept_tokens for turn in found.profile.recorded[0].turns] == [0, 1000, 1210]


def test_speed_stretches_pauses_and_starts() -> None:
    slow, fast = (mined(*two(names=True, digests=True), speed=speed).profile for speed in (1.0, 20.0))
    assert fast.gap_s == pytest.approx([20 * gap for gap in slow.gap_s])
    assert [each.start_s for each in fast.recorded] == [20 * each.start_s for each in slow.recorded]
    assert fast.growth_tokens == slow.growth_tokens


def test_requests_in_flight_are_seen_at_every_start() -> None:
    log = [LoggedRequest(line=1, started_s=float(at), ended_s=at + 3.5, prompt_tokens=10, completion_tokens=1)
           for at in range(100)]  # fmt: skip
    facts = mine(log, name="steady").facts
    assert (facts.in_flight_p50, facts.in_flight_p90) == (4, 4)


def test_the_hit_share_is_that_of_the_requests_that_say_it() -> None:
    log = [LoggedRequest(line=1, started_s=float(at), ended_s=at + 0.5, prompt_tokens=100, completion_tokens=1,
                         cached_tokens=None if at == 2 else 40 * at) for at in range(3)]  # fmt: skip
    assert mine(log, name="x").facts.hit_share == pytest.approx(0.2)
    assert mine(log[2:], name="x").facts.hit_share is None


def test_a_long_log_is_recorded_in_part_at_its_own_density() -> None:
    talks = [Talk(f"{n}", range(100), 10.0 * n).ask([], [1]).ask([2], [1]) for n in range(100)]
    found = mined(*talks, most_turns=50)
    assert found.facts.recorded_sessions == 25
    assert [each.start_s for each in found.profile.recorded][:3] == [0, 10, 20]
    assert any("25 of 100 conversations" in note for note in found.facts.notes)
    assert mined(*talks, record=False).profile.recorded == ()


def test_nothing_and_a_speed_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="no answered request"):
        mine([], name="x")
    with pytest.raises(ConfigError, match="speed is 0"):
        mined(*two(names=True, digests=True), speed=0)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_whatever_is_logged_every_request_is_in_one_conversation_and_the_profile_is_one(
    seed: int, names: bool, digests: bool
) -> None:
    rng = Random(seed)
    talks = []
    for n in range(rng.randrange(1, 6)):
        talk = Talk(f"{n}" if names else None, range(rng.randrange(1, 300)), rng.random() * 30, digests=digests)
        for _ in range(rng.randrange(1, 6)):
            if rng.random() < 0.3:
                talk.ids = talk.ids[: rng.randrange(1, len(talk.ids) + 1)]
            talk.ask([rng.randrange(99) for _ in range(rng.randrange(60))], range(rng.randrange(1, 40)),
                     after_s=rng.random() * 20)
        talks.append(talk)
    found = mined(*talks)
    facts = found.facts
    assert sum(facts.joined.values()) == facts.requests == sum(len(talk.log) for talk in talks)
    assert facts.cold_starts + facts.warm + facts.resumes + facts.compactions == facts.requests
    recorded = [turn for each in found.profile.recorded for turn in each.turns]
    assert sorted(turn.prompt_tokens for turn in recorded) == sorted(
        each.prompt_tokens for talk in talks for each in talk.log)  # fmt: skip
    planned = [turn for session in planned_sessions(found.profile, seed=0) for turn in session.turns]
    assert [each.prompt_tokens for each in planned] == [each.prompt_tokens for each in recorded]


def test_a_mined_profile_survives_its_file(tmp_path: Path) -> None:
    profile = mined(*two(names=True, digests=True)).profile
    path = tmp_path / "mined.json"
    path.write_text(profile_json(profile))
    assert read_profile(path) == profile


def test_a_shipped_profile_played_and_mined_has_its_own_shares_again() -> None:
    """The loop closes: plan the assistant, log what it asks for, mine the log."""
    profile = named_profile("assistant-small")
    talks = []
    at_s = 0.0
    for session, _ in zip(planned_sessions(profile, seed=4), range(600), strict=False):
        talk = Talk(f"{session.number}", [], at_s, digests=False)
        for turn in session.turns:
            talk.ids = [0] * turn.kept_tokens
            talk.ask([0] * turn.new_tokens, [0] * turn.reply_tokens, after_s=turn.gap_s)
        talks.append(talk)
        at_s += 7.0
    facts = mined(*talks).facts
    assert facts.cold_starts / facts.requests == pytest.approx(0.23, abs=0.03)
    assert facts.warm / facts.requests == pytest.approx(0.74, abs=0.03)
    repeated = mined(*talks).profile
    assert repeated.start_tokens[50] == pytest.approx(profile.start_tokens[5], rel=0.05)
    assert repeated.reply_tokens[50] == pytest.approx(profile.reply_tokens[5], rel=0.1)


@pytest.mark.parametrize("names", [True, False])
def test_the_log_that_the_mock_server_wrote_gives_the_workload_that_was_sent(tmp_path: Path, names: bool) -> None:
    path = tmp_path / "requests.jsonl"
    config = MockConfig(request_log=path, base_s=0.001, s_per_token=0.0, s_per_restored=0.0, itl_s=0.0)

    async def session(client: httpx.AsyncClient, number: int) -> None:
        ids = list(range(1000 * number, 1000 * number + 300))
        for turn in range(3):
            body: dict[str, Any] = {"model": "mock", "prompt": ids, "max_tokens": 10, "ignore_eos": True}
            if names:
                body["user"] = f"agent {number}"
            answer = (await client.post("/v1/completions", json=body)).json()
            assert answer["usage"] == {**answer["usage"], "prompt_tokens": len(ids), "completion_tokens": 10}
            ids += [*range(7, 17), *range(100 * turn, 100 * turn + 80)]  # a reply of ten and a result of eighty

    async def run() -> None:
        async with MockServer(config) as server, httpx.AsyncClient(base_url=server.url) as client:
            await asyncio.gather(*(session(client, number) for number in range(1, 6)))

    asyncio.run(run())
    log = read_log(path)
    found = mine(log.requests, name="mock")
    assert (log.form, log.skipped, found.facts.requests) == ("proxy", {}, 15)
    assert (found.facts.sessions, found.facts.warm) == (5, 10)
    assert set(found.profile.start_tokens) == {300}
    assert set(found.profile.growth_tokens) == {80}
    assert set(found.profile.reply_tokens) == {10}
    assert found.facts.hit_share == pytest.approx((288 + 384) / (300 + 390 + 480), abs=0.03)


# --- a real trace, as if a proxy had logged it


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The first 24 sessions."""
    if not AGENTIC.is_file():
        pytest.skip("the public traces are not here")
    with gzip.open(AGENTIC, "rt") as file:
        rows = [json.loads(line) for line in file]
    names = set(list(dict.fromkeys(row["session_id"] for row in rows))[:24])
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if row["session_id"] in names))
    return open_trace(path)


def played(make: Callable[[Fleet, Loop], Sessions | ProfileLoops], *, pool_tokens: int, host_bytes: int) -> list[Visit]:
    machine = Machine(pool_tokens=pool_tokens, kv_bytes_per_token=131_072, prefill_tok_s=8000, copy_bytes_per_s=20e9,
                      page_tokens=PAGE)
    visits = simulate(machine.shape(host_bytes), make, seed=0).clients.visits
    assert {visit.how for visit in visits} == {How.SERVED}
    return list(visits)


def play_trace(trace: Trace, *, speed: float = 1.0, **fleet: int) -> tuple[tuple[TraceSession, ...], list[Visit]]:
    sessions = sessions_of(trace)

    def make(fleet_: Fleet, loop: Loop) -> Sessions:
        return Sessions(fleet_, loop, [
            ((session.requests[0].arrival_s or 0.0) / speed,
             ((pause_s / speed, turn) for pause_s, turn in trace_turns(session, trace, identity(PAGE), number)))
            for number, session in enumerate(sessions)])  # fmt: skip

    return sessions, played(make, **fleet)


def play_profile(profile: Profile, **fleet: int) -> list[Visit]:
    kept = identity(PAGE)
    return played(lambda fleet_, loop: Sessions(fleet_, loop, [
        (session.start_s or 0.0, conversation_turns(session, kept, seed=0))
        for session in planned_sessions(profile, seed=0)]), **fleet)  # fmt: skip


def hit_share(visits: Sequence[Visit]) -> float:
    return sum(each.device_tokens + each.host_tokens for each in visits) / sum(each.prompt_tokens for each in visits)


def proxy_log(path: Path, sessions: Sequence[TraceSession], visits: Sequence[Visit], *, names: bool) -> Path:
    """The lines a proxy would have written of that run."""
    with path.open("w") as file:
        for visit in visits:
            session = sessions[visit.client]
            file.write(json.dumps({
                "ts": 1.8e9 + visit.started_s, "latency_s": visit.ended_s - visit.started_s, "status": 200,
                "session": session.name if names else None, "request": {"model": "m"},
                "usage": {"prompt_tokens": visit.prompt_tokens, "completion_tokens": visit.reply_tokens,
                          "cached_tokens": visit.device_tokens + visit.host_tokens},
                "prefix": [f"{block:x}" for block in session.requests[visit.turn].blocks.tolist()],
                "prefix_tokens": 64}) + "\n")  # fmt: skip
    return path


def new_tokens_and_gaps(sessions: Sequence[TraceSession]) -> tuple[list[float], list[float]]:
    """Straight from the trace: of every later request what its prompt has beyond the last one and its reply, unless it
    was cut, and the pause before it."""
    grown, gaps = [], []
    for session in sessions:
        for before, after in pairwise(session.requests):
            gaps.append(after.think_s)
            had = before.input_tokens
            kept = had + max(1, before.output_tokens) if after.kept_blocks == len(before.blocks) \
                else min(after.kept_blocks * 64, had)
            kept = min(kept, after.input_tokens)
            if after.input_tokens >= had and kept >= 0.9 * had:
                grown.append(float(after.input_tokens - kept))
    return grown, gaps


def test_a_trace_played_at_20_times_its_speed_and_logged_is_mined_back_within_2_percent(
    tmp_path: Path, trace: Trace
) -> None:
    sessions, visits = play_trace(trace, speed=20, pool_tokens=8_000_000, host_bytes=0)
    log = read_log(proxy_log(tmp_path / "proxy.jsonl", sessions, visits, names=True))
    found = mine(log.requests, name="agents", speed=20)
    assert log.skipped == {}
    assert found.facts.sessions == 24
    assert found.facts.hit_share == pytest.approx(hit_share(visits))
    grown, gaps = new_tokens_and_gaps(sessions)
    np.testing.assert_allclose(found.profile.growth_tokens, quantiles(grown, 101), rtol=0.02, atol=0.5)
    np.testing.assert_allclose(found.profile.gap_s, quantiles(gaps, 101), rtol=0.02, atol=0.01)


@pytest.fixture(scope="module")
def pressed(trace: Trace) -> tuple[tuple[TraceSession, ...], list[Visit]]:
    return play_trace(trace, pool_tokens=700_000, host_bytes=0)


@pytest.mark.parametrize("names", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_mined_profile_has_the_hit_share_of_the_run_it_was_mined_from_within_2_points(
    tmp_path: Path, pressed: tuple[tuple[TraceSession, ...], list[Visit]], names: bool
) -> None:
    sessions, visits = pressed
    log = read_log(proxy_log(tmp_path / "proxy.jsonl", sessions, visits, names=names))
    profile = mine(log.requests, name="agents").profile
    assert 0.3 < hit_share(visits) < 0.8  # under pressure: a cache without a limit has 0.91
    again = play_profile(profile, pool_tokens=700_000, host_bytes=0)
    assert hit_share(again) == pytest.approx(hit_share(visits), abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("pool_tokens", "host_gib"), [(400_000, 0), (400_000, 32), (700_000, 16), (2_000_000, 16)])
def test_the_hit_share_holds_on_other_fleets_with_and_without_a_host_tier(
    tmp_path: Path, trace: Trace, pool_tokens: int, host_gib: int
) -> None:
    fleet = {"pool_tokens": pool_tokens, "host_bytes": host_gib * 2**30}
    sessions, visits = play_trace(trace, **fleet)
    log = read_log(proxy_log(tmp_path / "proxy.jsonl", sessions, visits, names=True))
    profile = mine(log.requests, name="agents").profile
    assert hit_share(play_profile(profile, **fleet)) == pytest.approx(hit_share(visits), abs=0.02)
