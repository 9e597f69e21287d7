"""The gap between engine and model falls to the cause that made it, request by request."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lab.probing import write_trace

from hostcache.errors import ConfigError
from hostcache.lab.gap import Gap, Model, Modelled, PerRequest, gap
from hostcache.lab.oracle import lru_curve, maximum, rates_at
from hostcache.lab.reconcile import reconcile, warm_rate
from hostcache.lab.replayed import Replayed
from hostcache.lab.stream import Stream, stream_of
from hostcache.workload.traces import open_trace

CONVERSATION = Path(__file__).resolve().parents[3] / "shared/data/mooncake_conversation_trace.jsonl.gz"
needs_trace = pytest.mark.skipif(not CONVERSATION.exists(), reason="the public traces are not beside the checkout")


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Stream:
    return stream_of(open_trace(write_trace(tmp_path_factory.mktemp("gap") / "t.jsonl", requests=60)), block_tokens=16)


def engine(blocks: int = 30, *, max_tokens: int = 1, touch: str = "tail-first") -> Modelled:
    return Modelled(block_tokens=16, capacity_tokens=16 * blocks, touch=touch,  # type: ignore[arg-type]
                    max_tokens=max_tokens)


def told(stream: Stream, cached: PerRequest, *, apart_s: float = 1.0, takes_s: float = 0.5) -> list[Replayed]:
    return [Replayed(index=index, due_s=index * apart_s, sent_s=index * apart_s,
                     first_token_s=index * apart_s + takes_s, ended_s=index * apart_s + takes_s,
                     prompt_tokens=int(stream.input_tokens[index]), completion_tokens=1, cached_tokens=int(tokens),
                     device_tokens=None, host_tokens=None, retries=0, outcome="ok", reason=None, prompt_sha256="")
            for index, tokens in enumerate(cached)]


def causes(found: Gap) -> set[str]:
    assert sum(found.causes.values()) == found.engine - found.model
    return {each.cause for each in found.odd}


def test_an_engine_that_is_the_model_leaves_nothing_to_explain(stream: Stream) -> None:
    model = Model(stream, engine())
    found = gap(stream, engine(), told(stream, model.lru()))
    assert (found.odd, found.causes, found.unexplained) == ((), {}, 0)
    assert found.bound - found.granularity - found.capacity == found.model == found.engine


def test_each_cause_is_named_where_it_is_the_one(stream: Stream) -> None:
    model = Model(stream, engine(26, max_tokens=64))
    for made, name in ((model.lru("batched"), "order_of_touch"), (model.with_answers(), "generated_tokens"),
                       (model.with_answers_given_back(), "generated_tokens"),
                       (model.whole_prompts(), "eviction_order")):
        assert (made != model.lru()).any(), name
        known = replace(engine(26, max_tokens=64), whole_prompts=name == "eviction_order")
        found = gap(stream, known, told(stream, made))
        assert {each.partition(" ")[0] for each in causes(found)} == {name}
        assert found.unexplained == 0


def test_requests_that_overlap_are_explained_by_their_times(stream: Stream) -> None:
    made = told(stream, Model(stream, engine()).lru(), apart_s=1.0, takes_s=3.5)
    model = Model(stream, engine())
    overlapping = told(stream, model.by_times(made), apart_s=1.0, takes_s=3.5)
    found = gap(stream, engine(), overlapping)
    assert "concurrency" in causes(found)
    assert found.unexplained == 0


def test_what_nothing_accounts_for_is_counted_and_a_warm_start_is_named(stream: Stream) -> None:
    base = Model(stream, engine()).lru()
    warm = base.copy()
    warm[0] = 16
    assert causes(gap(stream, engine(), told(stream, warm))) == {"warm_start"}
    strange = base.copy()
    strange[int(np.argmax(base))] -= 5
    found = gap(stream, engine(), told(stream, strange))
    assert (causes(found), found.unexplained) == ({"unexplained"}, 5)
    assert causes(gap(stream, engine(), told(stream, strange), preemptions=1)) == {"unexplained"}, "it cannot be tested"
    own = base.copy()
    own[0] = Model(stream, engine()).whole[0]
    assert causes(gap(stream, engine(), told(stream, own), preemptions=1)) == {"preemption"}
    own[0] += 16
    assert causes(gap(stream, engine(), told(stream, own), preemptions=1)) == {"unexplained"}, "more than it could be"


def test_the_same_requests_a_second_time_are_a_warm_start_request_by_request(stream: Stream) -> None:
    (again,) = Model(stream, engine(120)).warm()
    found = gap(stream, engine(120), told(stream, again))
    assert (again != Model(stream, engine(120)).lru()).any()
    assert (causes(found), found.unexplained) == ({"warm_start"}, 0)


def test_a_collapsed_bridge_is_named_with_its_texts(stream: Stream) -> None:
    collapsed = Model(stream, engine(100)).through(2)
    found = gap(stream, engine(100), told(stream, collapsed))
    assert found.engine > found.bound
    assert (causes(found), found.unexplained) == ({"bridge (2 texts)"}, 0)


def test_a_later_request_that_came_first_is_concurrency_and_no_warm_start(stream: Stream) -> None:
    """All are sent at once and in the opposite order, so the first in the trace finds what the last one left."""
    late = [replace(each, sent_s=-each.index * 1e-3, first_token_s=1.0, ended_s=1.0)
            for each in told(stream, Model(stream, engine(500)).lru())]
    made = Model(stream, engine(500)).by_times(late, from_sending=True)
    assert (made > Model(stream, engine(500)).possible).any()
    found = gap(stream, engine(500), [replace(each, cached_tokens=int(made[each.index])) for each in late])
    assert (causes(found), found.unexplained) == ({"concurrency"}, 0)


def test_blocks_of_another_size_than_was_said_are_granularity_and_no_warm_start(stream: Stream) -> None:
    fine = Model(stream, engine(500)).lru()
    found = gap(stream, replace(engine(500), block_tokens=32), told(stream, fine))
    assert (causes(found), found.unexplained) == ({"granularity (blocks of 16)"}, 0)


def test_records_of_another_trace_are_refused(stream: Stream) -> None:
    records = told(stream, Model(stream, engine()).lru())
    records[3] = replace(records[3], prompt_tokens=int(stream.input_tokens[3]) + 1)
    with pytest.raises(ConfigError, match="it is of another trace, slice or --block-tokens"):
        gap(stream, engine(), records)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_of_a_fresh_engine_no_interleaving_is_taken_for_a_warm_start(stream: Stream, data: st.DataObject) -> None:
    """Each request's blocks are there from some moment between its sending and its first token on."""
    rng = Random(data.draw(st.integers(0, 10**6)))
    model = Model(stream, engine(500))
    records = []
    for each in told(stream, model.lru()):
        sent_s = each.index + rng.random() * 4
        records.append(replace(each, sent_s=sent_s, first_token_s=sent_s + 3, ended_s=sent_s + 3))
    seen = [replace(each, sent_s=each.sent_s + rng.random() * 2.9) for each in records]
    made = model.by_times(seen, from_sending=True)
    found = gap(stream, engine(500), [replace(each, cached_tokens=int(made[each.index])) for each in records])
    assert (causes(found) - {"concurrency"}, found.unexplained) == (set(), 0)


def test_requests_without_an_answer_leave_nothing_behind_and_that_is_no_concurrency(stream: Stream) -> None:
    records = told(stream, Model(stream, engine(500)).lru())
    for index in range(0, 60, 4):
        records[index] = replace(records[index], outcome="error", cached_tokens=None, first_token_s=None)
    made = Model(stream, engine(500)).by_times(records)
    found = gap(stream, engine(500), [each if each.cached_tokens is None else
                                      replace(each, cached_tokens=int(made[each.index])) for each in records])
    assert (causes(found), found.unexplained, found.left_out) == ({"unanswered"}, 0, 15)


def test_a_request_that_was_told_nothing_counts_nowhere(stream: Stream) -> None:
    records = told(stream, Model(stream, engine()).lru())
    lost = Replayed.from_json({**records[5].as_json(), "cached_tokens": None})
    found = gap(stream, engine(), [*records[:5], lost, *records[6:]])
    assert (found.compared, found.left_out, found.unexplained) == (59, 1, 0)
    assert found.prompt_tokens == int(stream.input_tokens.sum() - stream.input_tokens[5]), "one denominator for all"
    assert found.bound - found.granularity - found.capacity == found.model == found.engine
    nobody = gap(stream, engine(), [replace(each, cached_tokens=None) for each in records])
    assert (nobody.compared, nobody.prompt_tokens) == (0, int(stream.input_tokens.sum()))
    with pytest.raises(ConfigError, match="one each, in order"):
        gap(stream, engine(), records[:5])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), blocks=st.integers(16, 80))
def test_one_at_a_time_the_model_by_times_is_lru_and_nothing_is_above_what_is_possible(
        tmp_path_factory: pytest.TempPathFactory, seed: int, blocks: int) -> None:
    path = tmp_path_factory.mktemp("gap") / "t.jsonl"
    made = stream_of(open_trace(write_trace(path, requests=20, seed=Random(seed).randrange(10**6))), block_tokens=16)
    model = Model(made, engine(blocks))
    assert (model.by_times(told(made, model.lru())) == model.lru()).all()
    for each in (model.lru(), model.lru("sequential"), model.with_answers(), model.with_answers_given_back(),
                 model.whole_prompts()):
        assert (each <= model.possible).all()
    assert int(model.possible.sum()) <= model.bound_tokens


def test_an_engine_that_counts_tokens_is_held_against_the_bound_in_tokens(tmp_path: Path) -> None:
    """Two prompts of 520 tokens share 512: a quarter of the blocks, half of the tokens."""
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"timestamp": 0, "input_length": 520, "output_length": 1, "hash_ids": [1, last]})
                            + "\n" for last in (2, 3)))
    made = stream_of(open_trace(path))
    for hits, queries, most, verdict in ((512, 1040, 512 / 1040, "explained"), (1, 4, 0.25, "explained"),
                                         (520, 1040, 512 / 1040, "impossible"), (2, 4, 0.25, "impossible"),
                                         (510, 1036, 512 / 1040, "explained")):
        outcome = reconcile(made, capacity_blocks=100, hits=hits, queries=queries)
        assert (outcome.max_hit_rate, outcome.verdict) == (most, verdict)


def test_of_two_counts_that_are_possible_what_can_be_tested_is_and_the_rest_is_said_not_to_be(stream: Stream) -> None:
    curve, most = lru_curve(stream), maximum(stream).blocks
    warmed = {size: warm_rate(stream, size, "sequential") for size in range(20, 90, 4)}
    blocks = max((size for size, rate in warmed.items() if rate < most),
                 key=lambda size: warmed[size] - rates_at(stream, curve, size).blocks)
    warm = warmed[blocks]
    outcome = reconcile(stream, capacity_blocks=blocks, hits=warm * 1000, queries=1000)
    assert (outcome.verdict, outcome.cause) == ("above_model", "warm_start")
    untested = {each.name for each in outcome.causes if not each.tested}
    assert untested == {"generated_tokens", "eviction_order", "concurrency", "preemption"}
    assert not any(each.fits for each in outcome.causes if not each.tested)
    with pytest.raises(ConfigError, match="inf hits of 10 queries is no rate"):
        reconcile(stream, capacity_blocks=60, hits=float("inf"), queries=10)


def test_the_same_requests_a_second_time_are_a_warm_start_also_where_only_two_counts_are_known(stream: Stream) -> None:
    (again,) = Model(stream, engine(500)).warm()
    outcome = reconcile(stream, capacity_blocks=500, hits=int(again.sum()), queries=int(stream.input_tokens.sum()))
    assert (outcome.verdict, outcome.cause) == ("impossible", "warm_start")


@needs_trace
def test_a_perfect_engine_on_the_trace_as_it_is_published_is_possible() -> None:
    whole = stream_of(open_trace(CONVERSATION), limit=600)
    model = Model(whole, engine(10**6))
    outcome = reconcile(whole, capacity_blocks=10**6, hits=int(model.lru().sum()),
                        queries=int(whole.input_tokens.sum()))
    assert (outcome.verdict, round(outcome.max_hit_rate, 4)) == ("explained", 0.1716)


@needs_trace
def test_the_slice_of_the_live_probe_has_the_issues_figures() -> None:
    stream = stream_of(open_trace(CONVERSATION), limit=300, block_tokens=16)
    model = Model(stream, engine(8192 // 16, max_tokens=4))
    prompt = int(stream.input_tokens.sum())
    assert prompt == 135_840
    assert round(model.bound_tokens / prompt, 4) == 0.0796
    assert round(int(model.lru().sum()) / prompt, 4) == 0.0352
    assert (model.whole_prompts() == model.lru()).all(), "whole prompts or blocks: the same here, request by request"
    assert (model.with_answers() == model.lru()).all()
