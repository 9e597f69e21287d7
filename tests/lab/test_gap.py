"""The gap between engine and model falls to the cause that made it, request by request."""

from __future__ import annotations

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
    assert causes(gap(stream, engine(), told(stream, strange), preemptions=1)) == {"preemption"}


def test_a_request_that_was_told_nothing_counts_nowhere(stream: Stream) -> None:
    records = told(stream, Model(stream, engine()).lru())
    lost = Replayed.from_json({**records[5].as_json(), "cached_tokens": None})
    found = gap(stream, engine(), [*records[:5], lost, *records[6:]])
    assert (found.compared, found.left_out, found.unexplained) == (59, 1, 0)
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
