"""A workload as distributions and recorded sessions: read strictly, drawn by quantile, planned the same every time."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.errors import ConfigError
from hostcache.tier import Identity
from hostcache.workload.conversations import Conversation
from hostcache.workload.profiles import (
    PlannedTurn,
    Profile,
    RecordedSession,
    RecordedTurn,
    conversation_turns,
    draw,
    find_profile,
    named_profile,
    planned_sessions,
    profile_json,
    profile_names,
    quantile_at,
    quantiles,
    read_profile,
    scaled,
)

CODING = Profile(
    name="coding agents", start_tokens=(8000, 30_000, 90_000), growth_tokens=(200, 1600, 6000),
    reply_tokens=(20, 100, 900), gap_s=(2, 10, 60), turns=(1, 20, 200), sessions=4, compact_one_in=200)  # fmt: skip

RECORDED = Profile(
    name="two sessions", start_tokens=(50, 100), growth_tokens=(10, 20), reply_tokens=(5,), gap_s=(1, 9), turns=(1, 3),
    sessions=2, shared_tokens=40, in_flight=(1, 2), recorded=(
        RecordedSession(start_s=0.0, turns=(
            RecordedTurn(gap_s=0.0, kept_tokens=0, prompt_tokens=100, reply_tokens=5),
            RecordedTurn(gap_s=1.5, kept_tokens=105, prompt_tokens=125, reply_tokens=5),
            RecordedTurn(gap_s=9.0, kept_tokens=60, prompt_tokens=70, reply_tokens=0))),
        RecordedSession(start_s=2.5, turns=(
            RecordedTurn(gap_s=0.0, kept_tokens=40, prompt_tokens=50, reply_tokens=5),)),
    ))  # fmt: skip


Sessions = list[list[PlannedTurn]]


def all_turns(profile: Profile, *, sessions: int, seed: int = 1, limit_tokens: int = 1 << 62) -> Sessions:
    planned = planned_sessions(profile, seed=seed, limit_tokens=limit_tokens)
    return [list(each.turns) for each in islice(planned, sessions)]


# --- files


@pytest.mark.parametrize("profile", [CODING, RECORDED])
def test_a_profile_survives_its_file(tmp_path: Path, profile: Profile) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profile_json(profile))
    assert read_profile(path) == profile


def test_a_file_has_version_2_only_where_something_in_it_needs_2() -> None:
    assert json.loads(profile_json(CODING))["version"] == 1
    assert "recorded" not in json.loads(profile_json(CODING))
    assert json.loads(profile_json(RECORDED))["version"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "not a profile of version 1 or 2"),
        ({"version": True}, "not a profile of version 1 or 2"),
        ({"colour": "red"}, "'colour' is no field of a profile"),
        ({"in_flight": [1]}, "'in_flight' is no field of a profile of version 1"),
        ({"sessions": 0}, "sessions is 0; give at least 1"),
        ({"sessions": "four"}, 'sessions is "four"; give one of type int'),
        ({"sessions": True}, "sessions is true; give one of type int"),
        ({"gap_s": [5, 1]}, r"gap_s is \[5.0, 1.0\]…; give finite quantiles in ascending order"),
        ({"start_tokens": []}, "start_tokens is"),
        ({"start_tokens": [0, 5]}, "the first at least 1"),
        ({"growth_tokens": ["a"]}, "growth_tokens is .*; give a list of numbers"),
        ({"compact_share": 0}, "compact_share is 0"),
        ({"version": 2, "recorded": [{"start_s": 0}]}, "recorded is .*; give a list of"),
        ({"version": 2, "recorded": [{"start_s": 0, "turns": []}]}, "recorded session 0 has 0 turns"),
        ({"version": 2, "recorded": [{"start_s": 0, "turns": [[0, 0, 9]]}]}, "recorded is .*; give a list of"),
        ({"version": 2, "recorded": [{"start_s": 0, "turns": [[0, 1, 9, 1]]}]}, "turn 0 keeps 1 tokens of 0"),
        ({"version": 2, "recorded": [{"start_s": 0, "turns": [[0, 0, 9, 1], [1, 11, 20, 1]]}]},
         "turn 1 keeps 11 tokens of 10 in a prompt of 20"),
        ({"version": 2, "recorded": [{"start_s": 0, "turns": [[-1, 0, 9, 1]]}]}, "turn 0: gap -1"),
    ],
)  # fmt: skip
def test_what_is_no_profile_is_refused_in_one_line(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**json.loads(profile_json(CODING)), **change}))
    with pytest.raises(ConfigError, match=message) as refused:
        read_profile(path)
    assert "\n" not in str(refused.value)


def test_a_missing_field_and_a_missing_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(ConfigError, match="cannot read the profile"):
        read_profile(path)
    path.write_text('{"version": 1, "name": "empty"}')
    with pytest.raises(ConfigError, match="start_tokens"):
        read_profile(path)
    path.write_text("not json")
    with pytest.raises(ConfigError, match="is not a profile"):
        read_profile(path)


# --- distributions


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.integers(0, 99))
def test_a_draw_lies_between_the_least_and_the_greatest(values: list[float], seed: int) -> None:
    ordered = quantiles(values)
    assert min(values) - 1e-6 <= draw(ordered, Random(seed)) <= max(values) + 1e-6


def test_draws_follow_the_quantiles() -> None:
    rng = Random(1)
    drawn = [draw((0.0, 10.0, 1000.0), rng) for _ in range(4000)]
    assert sum(value <= 5 for value in drawn) == pytest.approx(1000, rel=0.1)
    assert sum(value <= 10 for value in drawn) == pytest.approx(2000, rel=0.1)
    assert sum(value <= 505 for value in drawn) == pytest.approx(3000, rel=0.1)


def test_no_values_have_no_quantiles() -> None:
    with pytest.raises(ValueError, match="no values"):
        quantiles([])


# --- what sessions ask for


def test_the_same_seed_plans_the_same_sessions_and_another_one_others() -> None:
    assert all_turns(CODING, sessions=5) == all_turns(CODING, sessions=5)
    assert all_turns(CODING, sessions=5) != all_turns(CODING, sessions=5, seed=2)


def test_as_many_sessions_as_the_profile_has_at_a_time_start_by_themselves_and_the_others_wait_for_a_place() -> None:
    planned = list(islice(planned_sessions(CODING, seed=3), 9))
    assert [each.start_s is not None for each in planned] == [True] * 4 + [False] * 5
    assert all(2 <= each.gap_s <= 60 for each in planned)


def test_a_session_grows_from_its_last_prompt_and_reply() -> None:
    for turns in all_turns(CODING, sessions=10):
        assert turns[0].kept_tokens == 0
        for before, turn in pairwise(turns):
            had = before.prompt_tokens + before.reply_tokens
            assert turn.kept_tokens in (had, int(had * 0.72))
            assert 200 <= turn.new_tokens <= 6000


def test_recorded_sessions_are_planned_as_they_were() -> None:
    first, second = planned_sessions(RECORDED, seed=5)
    assert (first.start_s, second.start_s) == (0.0, 2.5)
    assert [(each.gap_s, each.kept_tokens, each.prompt_tokens) for each in first.turns] == [
        (0.0, 0, 100), (1.5, 105, 125), (9.0, 60, 70)]  # fmt: skip
    assert [each.kept_tokens for each in second.turns] == [40]


def test_laps_repeat_the_recording_at_its_own_density() -> None:
    planned = list(planned_sessions(RECORDED, seed=5, laps=3))
    assert [each.start_s for each in planned] == [0.0, 2.5, 5.0, 7.5, 10.0, 12.5]
    assert [each.number for each in planned] == list(range(6))


@given(st.integers(2, 400), st.integers(0, 50))
def test_no_request_passes_the_limit_or_keeps_more_than_there_is(limit: int, seed: int) -> None:
    small = scaled(CODING, 300)
    for profile in (small, RECORDED):
        for turns in all_turns(profile, sessions=2, seed=seed, limit_tokens=limit):
            had = profile.shared_tokens
            for turn in turns:
                assert turn.prompt_tokens >= 1
                assert turn.prompt_tokens + turn.reply_tokens <= limit
                assert 0 <= turn.kept_tokens <= had
                had = turn.prompt_tokens + turn.reply_tokens


def test_a_limit_below_two_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="limit_tokens is 1"):
        next(planned_sessions(CODING, seed=0, limit_tokens=1))


def test_a_conversation_shares_exactly_what_its_turns_keep() -> None:
    identity = Identity(model="m", revision="1", dtype="f16", layout="l", page_tokens=1)
    head = Conversation(identity, 7, start_tokens=40)
    said = [list(conversation_turns(each, identity, seed=7, head=head)) for each in planned_sessions(RECORDED, seed=7)]
    turns = [turn for _, turn in said[0]]
    assert [pause for pause, _ in said[0]] == [0.0, 1.5, 9.0]
    assert [turn.prompt_tokens for turn in turns] == [100, 125, 70]

    def common(one: int, other: int) -> int:
        pairs = list(zip(turns[one].prints.tolist(), turns[other].prints.tolist(), strict=False))
        return next((at for at, (left, right) in enumerate(pairs) if left != right), len(pairs))

    assert common(0, 1) == 105
    assert common(1, 2) == 60
    assert said[1][0][1].prints.tolist()[:40] == head.turn(0).prints.tolist()[:40]


# --- what ships


def test_four_profiles_ship_with_their_source() -> None:
    assert profile_names() == ("assistant", "assistant-small", "coding-agents", "coding-agents-small")
    for name in profile_names():
        profile = named_profile(name)
        assert profile.name == name
        assert "publication" in profile.source
        assert find_profile(name) == profile


def test_an_unknown_name_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no profile is named 'coder'; there are assistant, .*coding-agents"):
        find_profile("coder")
    path = tmp_path / "mine.json"
    path.write_text(profile_json(CODING))
    assert find_profile(str(path)) == CODING


def shares(profile: Profile, sessions: int) -> dict[str, float]:
    """Of requests: cold starts, cuts, and the rest; of prompt tokens: what a cache that forgets nothing would hold."""
    requests = cold = cut = prompt = kept = long_prompt = long_kept = 0
    for turns in all_turns(profile, sessions=sessions):
        had = None
        for turn in turns:
            requests += 1
            cold += had is None
            cut += had is not None and turn.kept_tokens < had
            prompt += turn.prompt_tokens
            kept += turn.kept_tokens
            if turn.prompt_tokens > 64_000:
                long_prompt += turn.prompt_tokens
                long_kept += turn.kept_tokens
            had = turn.prompt_tokens + turn.reply_tokens
    return {"cold": cold / requests, "cut": cut / requests, "warm": (requests - cold - cut) / requests,
            "cached": kept / prompt, "cached of long": long_kept / max(1, long_prompt)}


def test_the_assistant_has_the_published_shares() -> None:
    profile = named_profile("assistant")
    found = shares(profile, 5000)
    assert profile.shared_tokens == 18_000
    assert found["warm"] == pytest.approx(0.74, abs=0.01)
    assert found["cold"] == pytest.approx(0.23, abs=0.01)
    assert found["cached"] == pytest.approx(0.90, abs=0.02)
    assert found["cached of long"] > 0.96


def test_the_coding_agents_have_the_published_sizes_gaps_and_rates() -> None:
    profile = named_profile("coding-agents")
    sessions = all_turns(profile, sessions=700)
    later = [turn for turns in sessions for turn in turns[1:]]
    assert {turns[0].prompt_tokens for turns in sessions} == {30_000}
    assert {turn.new_tokens for turn in later} == {1600}
    assert {turn.reply_tokens for turn in later} == {100}
    assert {len(turns) for turns in sessions} == {57}
    gaps = sorted(turn.gap_s for turn in later)
    assert gaps[0] >= 5
    assert sum(gap <= 30 for gap in gaps) / len(gaps) == pytest.approx(0.99, abs=0.003)
    assert mean(gap for gap in gaps if gap <= 30) == pytest.approx(17.5, abs=0.2)
    assert sum(gap >= 600 for gap in gaps) / len(gaps) == pytest.approx(9 / 2003, abs=0.0015)
    assert shares(profile, 700)["cut"] == pytest.approx(1 / 200, abs=0.001)
    assert profile.compact_share == 0.72


def test_the_coding_agents_carry_the_published_concurrency() -> None:
    in_flight = named_profile("coding-agents").in_flight
    assert quantile_at(in_flight, 0.5) == 4
    assert quantile_at(in_flight, 0.9) == pytest.approx(14)


@pytest.mark.parametrize("name", ["assistant", "coding-agents"])
def test_the_small_form_is_the_same_workload_with_fifteenth_tokens(name: str) -> None:
    large, small = named_profile(name), named_profile(f"{name}-small")
    assert small == scaled(large, 15, gap_divisor=2.5, name=small.name)
    one, other = shares(large, 600), shares(small, 600)
    assert {key: one[key] for key in ("cold", "cut", "warm", "cached")} == pytest.approx(
        {key: other[key] for key in ("cold", "cut", "warm", "cached")}, abs=0.01)
    assert all(turn.prompt_tokens <= 11_000 for turns in all_turns(small, sessions=500) for turn in turns)


def test_a_recording_is_scaled_too_and_stays_one() -> None:
    half = scaled(RECORDED, 2, gap_divisor=2)
    assert half.recorded[0].turns[1] == RecordedTurn(gap_s=0.75, kept_tokens=52, prompt_tokens=62, reply_tokens=2)
    assert half.recorded[1].start_s == 1.25
    assert scaled(RECORDED, 3).recorded[0].turns[1].kept_tokens == 34  # 33 + 1, though 105 / 3 is 35
    with pytest.raises(ConfigError, match="scaled by 0"):
        scaled(RECORDED, 0)
