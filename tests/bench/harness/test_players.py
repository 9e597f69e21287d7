"""Rotations, agents, profiles and traces: who says what when, read from the records of a mock."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.bench.harness.on_mock import QUICK, places, read, records_of, requests

from hostcache.bench.harness.agents import AgentsParameters, FirstTurns
from hostcache.bench.harness.catalogue import played
from hostcache.bench.harness.load import Cast, prompt_sha256
from hostcache.bench.harness.replay import ProfileParameters, ReplayParameters
from hostcache.bench.harness.rotate import RotateParameters
from hostcache.bench.harness.texts import Texts
from hostcache.errors import ConfigError
from hostcache.records import RequestRecord
from hostcache.workload.profiles import Profile, RecordedSession, RecordedTurn, profile_json
from hostcache.workload.sample_traces import synthetic_requests, write_trace
from hostcache.workload.traces import DELTA, MOONCAKE, open_trace, sessions_of

ROTATION = RotateParameters(clients=2, sessions=5, tokens=64, growth_tokens=16, reply_tokens=4, nopressure_visits=2,
                            duration_s=0.15, recovery_idle_s=0.01, observe_idle_s=0.01, probe_prompt_tokens=16,
                            probe_tokens=4, probe_every_s=0.05)
AGENTS = AgentsParameters(points=(3,), prefix_tokens=64, tool_tokens=16, reply_tokens=4, gap_min_s=0.0, gap_max_s=0.01,
                          duration_s=0.15)
IDS = tuple((i * 7919) % 997 for i in range(5000))


def by_session(records: list[RequestRecord]) -> dict[str, list[RequestRecord]]:
    sessions: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in records:
        if record.role not in ("probe", "control"):
            sessions[record.session].append(record)
    return sessions


def cast(count: int = 1, *, limit: int | None = None, mine: tuple[int, ...] | None = None) -> Cast:
    return Cast(part="", count=count, mine=tuple(range(count)) if mine is None else mine, limit_tokens=limit,
                texts=Texts("ids", IDS, seed=0, salt="s"))


def test_a_rotation_visits_its_sessions_in_turn_through_all_segments(tmp_path: Path) -> None:
    records = records_of(ROTATION, tmp_path)
    assert places(records) == [(name, "") for name in ("before", "nopressure", "warmup", "steady", "recovery",
                                                       "observe", "after")]
    calm = requests(records, segment="nopressure", client=0)
    assert [(each.session, each.role) for each in calm] == [("s0", "prime"), ("s0", "revisit")]
    warmup = requests(records, segment="warmup", client=0)
    assert [(each.session, each.role) for each in warmup] == [("s0", "revisit"), ("s2", "prime"), ("s4", "prime")]
    steady = [each.session for each in requests(records, segment="steady", client=1)]
    assert steady == (["s1", "s3"] * len(steady))[: len(steady)]
    for after in ("recovery", "observe"):
        visited = requests(records, segment=after)
        assert sorted(each.session for each in visited if each.role == "revisit") == ["s0", "s1", "s2", "s3", "s4"]
    assert {each.segment for each in requests(records, role="probe")} >= {"steady"}


def test_each_visit_is_an_exact_descendant_of_the_last_and_hits_all_that_it_may(tmp_path: Path) -> None:
    """With room for everything, whole blocks of what was sent or answered before are hits, and nothing else is."""
    config = dataclasses.replace(QUICK, device_blocks=100_000)
    records = records_of(dataclasses.replace(ROTATION, duration_s=0.1), tmp_path, config=config)
    for visits in by_session(requests(records)).values():
        for before, now in pairwise(visits):
            assert now.turn == before.turn + 1
            assert now.shared_tokens == (before.prompt_tokens or 0) + (before.completion_tokens or 0)
            assert now.prompt_tokens == now.shared_tokens + 16
            assert now.cached_tokens == (now.shared_tokens - 1) // 16 * 16  # the last token has no entry yet


def test_a_session_that_outgrows_the_server_begins_anew_and_is_no_revisit(tmp_path: Path) -> None:
    config = dataclasses.replace(QUICK, max_context_tokens=128)
    records = records_of(ROTATION, tmp_path, config=config)
    asked = requests(records)
    assert max((each.prompt_tokens or 0) + each.max_tokens for each in asked) <= 128
    reborn = [each for each in asked if "." in each.session and each.turn == 0]
    assert reborn
    assert {each.role for each in reborn} <= {"visit", "prime"}
    assert all(each.shared_tokens == 0 for each in reborn)


def test_sessions_that_were_never_answered_before_are_visits(tmp_path: Path) -> None:
    records = records_of(dataclasses.replace(ROTATION, warmup_laps=0, nopressure_visits=0), tmp_path)
    steady = by_session(requests(records, segment="steady"))
    assert all([each.role for each in visits] == ["visit", *["revisit"] * (len(visits) - 1)]
               for visits in steady.values())


def test_zeroes_leave_segments_and_the_probe_out(tmp_path: Path) -> None:
    records = records_of(dataclasses.replace(ROTATION, nopressure_visits=0, duration_s=0.0, recovery_idle_s=0.0,
                                             observe_idle_s=0.0, probe_tokens=0), tmp_path)
    assert places(records) == [("before", ""), ("warmup", ""), ("after", "")]
    assert requests(records, role="probe") == []


def test_a_window_opens_once_every_agent_was_answered_and_closes_with_its_last_turn(tmp_path: Path) -> None:
    records = records_of(AGENTS, tmp_path)
    primes, window = requests(records, segment="prime"), requests(records, segment="window")
    assert {each.client for each in primes if each.role == "prime"} == {0, 1, 2}
    assert {each.role for each in window} == {"revisit"}
    assert max(each.ended_s for each in primes) <= min(each.sent_s for each in window)
    assert all(each.sent_s >= each.due_s for each in window)


def test_both_arms_hear_the_same_words_whatever_the_server_does(tmp_path: Path) -> None:
    """Same seed, same forced salt: the k-th prompt of a session is the same on a server that is slower."""
    slow = dataclasses.replace(QUICK, base_s=0.02)
    one, other = (by_session(requests(records_of(AGENTS, tmp_path / name, config=config, salt="same")))
                  for name, config in (("fast", QUICK), ("slow", slow)))
    assert one.keys() == other.keys()
    for session, visits in one.items():
        for a, b in zip(visits, other[session], strict=False):
            assert a.prompt_sha256 == b.prompt_sha256


def test_agents_compact_leave_and_begin_anew_as_often_as_told(tmp_path: Path) -> None:
    shape = dataclasses.replace(AGENTS, compact_one_in=2, cold_share=0.2)
    asked = requests(records_of(shape, tmp_path), part="3")
    sessions = by_session(asked)
    assert any(len(name.split(".")) == 2 for name in sessions)
    shorter = [now for visits in sessions.values() for before, now in pairwise(visits)
               if (now.prompt_tokens or 0) < (before.prompt_tokens or 0)]
    assert shorter
    cold = [each for each in asked if each.segment == "window" and each.turn == 0]
    assert cold
    assert {each.role for each in cold} == {"prime"}


def test_the_window_waits_for_everybody_but_those_who_failed_thrice(tmp_path: Path) -> None:
    record = requests(records_of(dataclasses.replace(AGENTS, duration_s=0.0), tmp_path), segment="prime")[0]
    first = FirstTurns(3)
    failed = dataclasses.replace(record, outcome="error", reason="http-500: it broke")
    for heard, client in ((record, 0), (failed, 1), (record, 1), (failed, 2), (failed, 2)):
        first.heard(dataclasses.replace(heard, client=client))
    assert not first.all.is_set()
    first.heard(dataclasses.replace(record, client=2, outcome="refused", reason="refused-429: given up"))
    assert first.all.is_set()
    assert (first.primed, first.given_up, first.why) == ({0, 1}, {2}, "refused-429: given up")


def test_sizes_that_no_server_takes_are_refused_before_they_are_sent() -> None:
    workloads: tuple[Any, ...] = (ROTATION, AGENTS)
    for workload in workloads:
        with pytest.raises(ConfigError, match="exceed the server's 64"):
            workload.players(cast(1, limit=64))


@pytest.mark.parametrize(("cls", "wrong"), [
    (RotateParameters, {"sessions": 2}), (RotateParameters, {"tokens": 0}), (RotateParameters, {"gap_s": -1.0}),
    (AgentsParameters, {"points": ()}), (AgentsParameters, {"points": (4, 4)}), (AgentsParameters, {"gap_min_s": 9.0}),
    (AgentsParameters, {"cold_share": 1.5}), (AgentsParameters, {"prefix_tokens": 0}),
    (AgentsParameters, {"tool_tokens": -1}), (ReplayParameters, {"speed": 0.0}), (ReplayParameters, {"sessions": -1}),
])
def test_parameters_that_make_no_sense_are_refused(cls: type[Any], wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        cls(**wrong)


def test_a_table_makes_a_workload_strictly() -> None:
    assert played("agents", {"points": [1, 2], "duration_s": 5}) == AgentsParameters(points=(1, 2), duration_s=5.0)
    for table, why in (({"pionts": [1]}, "'pionts' is no parameter"), ({"points": ["1"]}, "give a whole number"),
                       ({"duration_s": "5"}, "give a number"), ({"prefix_tokens": 1.5}, "give a whole number"),
                       ({"points": 3}, "give a list")):
        with pytest.raises(ConfigError, match=why):
            played("agents", table, where="cell b5")
    with pytest.raises(ConfigError, match="no workload is named 'ladders'"):
        played("ladders", {})


# -- profiles and traces ---------------------------------------------------------------------------------------------

PROFILE = Profile(name="p", start_tokens=(80.0, 120.0), growth_tokens=(10.0, 20.0), reply_tokens=(3.0, 6.0),
                  gap_s=(0.0, 0.02), turns=(2.0, 3.0), sessions=3, shared_tokens=48)
RECORDED = dataclasses.replace(PROFILE, recorded=(
    RecordedSession(start_s=0.0, turns=(RecordedTurn(gap_s=0.0, kept_tokens=48, prompt_tokens=100, reply_tokens=4),
                                        RecordedTurn(gap_s=0.02, kept_tokens=104, prompt_tokens=120, reply_tokens=4))),
    RecordedSession(start_s=0.1, turns=(RecordedTurn(gap_s=0.0, kept_tokens=48, prompt_tokens=90, reply_tokens=4),
                                        RecordedTurn(gap_s=0.02, kept_tokens=50, prompt_tokens=60, reply_tokens=4)))))


def profile_file(folder: Path, profile: Profile) -> str:
    path = folder / "profile.json"
    path.write_text(profile_json(profile))
    return str(path)


def test_a_profile_gives_as_many_agents_as_it_says_and_replaces_those_that_are_over(tmp_path: Path) -> None:
    workload = ProfileParameters(profile=profile_file(tmp_path, PROFILE), duration_s=0.15)
    records = records_of(workload, tmp_path / "run", config=dataclasses.replace(QUICK, device_blocks=100_000))
    assert places(records)[1:3] == [("prime", "3"), ("window", "3")]
    sessions = by_session(requests(records))
    assert len(sessions) > 3
    assert max(len(visits) for visits in sessions.values()) <= 3
    firsts = [visits[0] for visits in sessions.values()]
    assert all(80 <= (each.prompt_tokens or 0) <= 120 and each.shared_tokens == 48 for each in firsts)
    assert max(each.cached_tokens or 0 for each in firsts) == 48  # the system prompt, once somebody brought it


def test_a_recorded_profile_plays_its_sessions_at_their_own_times_once(tmp_path: Path) -> None:
    workload = ProfileParameters(profile=profile_file(tmp_path, RECORDED), duration_s=60.0)
    records = records_of(workload, tmp_path / "run")
    assert places(records) == [("before", ""), ("window", ""), ("after", "")]
    sessions = by_session(requests(records))
    assert [(each.prompt_tokens, each.shared_tokens) for each in sessions["p0"]] == [(100, 48), (120, 104)]
    assert [(each.prompt_tokens, each.shared_tokens) for each in sessions["p1"]] == [(90, 48), (60, 50)]
    start = {name: visits[0].due_s for name, visits in sessions.items()}
    assert start["p1"] - start["p0"] == pytest.approx(0.1)
    for visits in sessions.values():
        assert visits[1].due_s == pytest.approx(visits[0].ended_s + 0.02)


def test_a_trace_is_sent_block_by_block_and_hits_exactly_what_its_ids_share(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, synthetic_requests(3, sessions=3, turns=3), format=DELTA)
    workload = ReplayParameters(trace=str(path), speed=1e4)
    config = dataclasses.replace(QUICK, device_blocks=1_000_000)
    records = records_of(workload, tmp_path / "run", config=config)
    whole = {session.name: session.requests for session in sessions_of(open_trace(path))}
    sent = by_session(requests(records))
    assert sent.keys() == whole.keys()
    for name, rows in whole.items():
        assert [each.prompt_tokens for each in sent[name]] == [row.input_tokens for row in rows]
        assert [each.completion_tokens for each in sent[name]] == [max(1, row.output_tokens) for row in rows]
    assert all((each.cached_tokens or 0) <= (each.shared_tokens or 0) for each in requests(records, segment="window"))
    assert sum(each.cached_tokens or 0 for each in requests(records, segment="window")) > 0


def test_a_mooncake_trace_is_an_open_loop_with_absolute_due_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, synthetic_requests(1, sessions=4, turns=1, format=MOONCAKE), format=MOONCAKE)
    workload = ReplayParameters(trace=str(path), speed=1e4, block_tokens=16)
    records = records_of(workload, tmp_path / "run")
    rows = list(open_trace(path))
    sent = sorted(requests(records, segment="window"), key=lambda each: each.due_s)
    assert len(sent) == len(rows)
    for record, row in zip(sent, rows, strict=True):
        assert record.due_s - sent[0].due_s == pytest.approx(((row.arrival_s or 0) - (rows[0].arrival_s or 0)) / 1e4)
        assert record.prompt_tokens == pytest.approx(row.input_tokens / 32, abs=1)


def test_a_session_ends_before_a_request_beyond_the_longest_and_a_trace_that_is_too_long_is_refused(
        tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = synthetic_requests(3, sessions=2, turns=4)
    write_trace(path, rows, format=DELTA)
    longest = max(row.input_tokens + row.output_tokens for row in rows)
    with pytest.raises(ConfigError, match=f"prompt and answer of {longest} tokens and the server takes"):
        ReplayParameters(trace=str(path)).players(cast(2, limit=longest - 1))
    players = ReplayParameters(trace=str(path), longest_tokens=longest - 1).players(cast(2, limit=longest - 1))
    assert len(players) == 2
    with pytest.raises(ConfigError, match="no request of"):
        ReplayParameters(trace=str(path), longest_tokens=1).players(cast(2))


def test_a_folder_of_kv_cache_tester_sessions_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "sessions"
    path.mkdir()
    for name, blocks in (("a", [1, 2]), ("b", [1, 2, 3])):
        asked = [{"t": 20.0 * turn, "type": "n", "in": 64 * (len(blocks) + turn) + 7, "out": 3, "api_time": 2.0,
                  "hash_ids": [*blocks, *range(10, 10 + turn)]} for turn in range(2)]
        (path / f"{name}.json").write_text(json.dumps(
            {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": asked}))
    workload = ReplayParameters(trace=str(path), speed=1e4, spread_s=50.0)
    config = dataclasses.replace(QUICK, device_blocks=1_000_000)
    sent = by_session(requests(records_of(workload, tmp_path / "run", config=config), segment="window"))
    assert {name: [each.prompt_tokens for each in visits] for name, visits in sent.items()} == {
        "a": [135, 199], "b": [199, 263]}
    assert {name: visits[1].cached_tokens for name, visits in sent.items()} == {"a": 128, "b": 192}
    before = workload.inputs()
    (path / "b.json").write_text((path / "b.json").read_text() + "\n")
    assert workload.inputs() != before


def test_the_blocks_of_a_trace_may_be_other_ones_than_its_forms(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"timestamp": 0, "input_length": 64, "output_length": 2, "hash_ids": ids}) + "\n"
                            for ids in ([1, 2], [1, 3])))
    with pytest.raises(ConfigError):
        ReplayParameters(trace=str(path)).players(cast(2))
    workload = ReplayParameters(trace=str(path), read_blocks="32:ceil")
    records = records_of(workload, tmp_path / "run")
    assert [(each.prompt_tokens, each.shared_tokens) for each in requests(records, segment="window")] == [(64, 32)] * 2
    with pytest.raises(ConfigError, match="read_blocks is 32; give tokens a block and ceil or floor"):
        ReplayParameters(trace=str(path), read_blocks="32").players(cast(2))


def test_a_trace_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ReplayParameters(trace="no such file").inputs()


def test_prompts_are_digested_by_what_they_are() -> None:
    ids, text, messages = (1, 2, 3), "abc", ({"role": "user", "content": "abc"},)
    digests = {prompt_sha256(ids), prompt_sha256(text), prompt_sha256(messages), prompt_sha256((1, 2)),
               prompt_sha256(())}
    assert len(digests) == 5


def test_every_client_is_played_by_exactly_one_process() -> None:
    def names(players: object) -> list[str]:
        return [type(player).__name__ for player in players]  # type: ignore[attr-defined]  # a sequence of clients

    whole = ROTATION.players(cast(2))
    halves = [ROTATION.players(cast(2, mine=(number,))) for number in range(2)]
    assert names(whole) == ["Visitor", "Visitor", "Probe"]
    assert [names(half) for half in halves] == [["Visitor", "Probe"], ["Visitor"]]


def test_records_of_a_run_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    assert records_of(dataclasses.replace(AGENTS, duration_s=0.02), tmp_path) == read(tmp_path)
