"""The agent loop: what grows, what repeats under one seed, what may never be shared."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.errors import ConfigError
from hostcache.workload.agents import Agent, AgentShape, agents, compacted, stream

SHAPE = AgentShape(prefix_tokens=100, tool_tokens=10, reply_tokens=5, gap_min_s=2.0, gap_max_s=12.0)


def source(number: int, length: int = 1000) -> list[int]:
    return [number * 10_000 + i for i in range(length)]


def agent(seed: int = 0, *, limit: int = 10_000, start: int = 0) -> Agent:
    return Agent(source(0), SHAPE, stream(seed, "agent", 0), start=start, limit_tokens=limit)


def test_the_first_prompt_is_the_prefix() -> None:
    assert agent(start=7).prompt == tuple(source(0)[7:107])


def test_every_later_prompt_is_the_last_one_the_replys_own_tokens_and_a_piece_of_code_behind_the_prefix() -> None:
    one = agent()
    before = one.prompt
    one.heard([-1, -2, -3, -4, -5])
    assert one.prompt[:100] == before
    assert one.prompt[100:105] == (-1, -2, -3, -4, -5)
    tool = one.prompt[105:]
    assert len(tool) == 10
    assert tool[0] >= 100
    assert tool == tuple(range(tool[0], tool[0] + 10))


@given(st.integers())
def test_one_seed_says_one_thing_and_gaps_stay_in_their_range(seed: int) -> None:
    def history() -> list[object]:
        one, said = agent(seed), []
        for _ in range(5):
            one.heard([0] * 5)
            said += [one.prompt, one.gap_s()]
        return list(said)

    first = history()
    assert first == history()
    assert all(2.0 <= gap <= 12.0 for gap in first if isinstance(gap, float))


def test_another_seed_says_another_thing_and_zero_is_a_seed_like_any_other() -> None:
    def gaps(seed: int) -> list[float]:
        one = agent(seed)
        return [one.gap_s() for _ in range(3)]

    assert len({tuple(gaps(seed)) for seed in (0, 1, 2)}) == 3


def test_named_streams_of_one_seed_are_independent() -> None:
    assert stream(0, "agent", 1).random() != stream(0, "agent", 2).random()
    assert stream(0, "agent", 1).random() == stream(0, "agent", 1).random()


def test_a_conversation_that_would_not_fit_is_compacted_to_72_percent() -> None:
    one = agent(limit=120)
    one.heard([0] * 5)  # 115 tokens and a reply of 5: fits exactly
    assert len(one.prompt) == 115
    before = one.prompt
    one.heard([1] * 5)
    assert len(one.prompt) == int(130 * 0.72)
    assert one.prompt == before[: int(130 * 0.72)]
    assert compacted([1]) == [1]


def test_agents_start_on_different_pieces_also_when_files_run_out() -> None:
    loops = agents([source(0), source(1)], SHAPE, count=5, seed=0, limit_tokens=1000)
    assert len({loop.prompt for loop in loops}) == 5
    for one, other in itertools.combinations(loops, 2):
        assert not set(one.prompt) & set(other.prompt)


def test_two_agents_with_the_same_first_page_are_refused() -> None:
    with pytest.raises(ConfigError, match="start with the same 16 tokens"):
        agents([source(0), source(0)], SHAPE, count=2, seed=0, limit_tokens=1000)


@pytest.mark.parametrize(("length", "limit", "count", "said"), [
    (105, 1000, 1, "105 tokens cannot give"), (1000, 104, 1, "exceed the server's 104"),
    (1000, 1000, 0, "agents is 0")])
def test_what_cannot_be_said_is_refused_with_its_numbers(length: int, limit: int, count: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        agents([source(0, length)], SHAPE, count=count, seed=0, limit_tokens=limit)


def test_a_shape_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="gaps from 5 to 2"):
        AgentShape(prefix_tokens=1, tool_tokens=1, reply_tokens=1, gap_min_s=5, gap_max_s=2)
    with pytest.raises(ConfigError, match="reply_tokens is 0"):
        AgentShape(prefix_tokens=1, tool_tokens=1, reply_tokens=0, gap_min_s=1, gap_max_s=2)
