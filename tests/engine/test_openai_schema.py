"""Parsing never fails with anything but a refusal; answers have the shapes that clients read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.engine import openai_schema as schema
from hostcache.engine.requests import LogitTrace, Usage
from hostcache.errors import RequestRefused

JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
                    max_leaves=8)
NAMES = sorted(schema._READ | schema._HARMLESS | set(schema._NEUTRAL)
               | {"prompt", "messages", "max_completion_tokens", "cache_salt"})
BODIES = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=6), JSON, max_size=5)
EXTENSIONS = st.dictionaries(st.sampled_from(["store", "max_load_tokens", "session_id", "expected_return_s", "x"]),
                             JSON)


def refusal_of(parse: Callable[[Any], object], value: object) -> RequestRefused | None:
    try:
        parse(value)
    except RequestRefused as refusal:
        return refusal
    return None


@given(body=st.binary(max_size=60))
def test_any_bytes_are_an_object_or_a_refusal(body: bytes) -> None:
    refusal = refusal_of(schema.read_json, body)
    assert refusal is None or refusal.status == 400


@given(body=BODIES, extension=EXTENSIONS | st.none())
def test_any_object_is_a_call_or_a_refusal_of_one_line(body: dict[str, Any], extension: dict[str, Any] | None) -> None:
    if extension is not None:
        body["hostcache"] = extension
    for parse in (schema.parse_completion, schema.parse_chat, schema.parse_tokenize):
        refusal = refusal_of(parse, body)
        if refusal is not None:
            assert refusal.status == 400
            assert str(refusal).isprintable()


@given(name=st.sampled_from(sorted(schema._NEUTRAL)))
def test_null_and_the_neutral_value_of_an_unsupported_field_are_accepted(name: str) -> None:
    for value in (None, *schema._NEUTRAL[name]):
        schema.parse_completion({"prompt": "x", name: value})
        schema.parse_chat({"messages": [{"role": "user", "content": "x"}], name: value})


@pytest.mark.parametrize(("name", "value"), [("n", True), ("echo", 0), ("logprobs", 0), ("presence_penalty", False)])
def test_a_truth_is_not_the_number_it_equals(name: str, value: object) -> None:
    with pytest.raises(RequestRefused, match=name):
        schema.parse_completion({"prompt": "x", name: value})


def test_a_message_that_a_client_sends_back_as_it_got_it_is_accepted() -> None:
    call = schema.parse_chat({"messages": [
        {"role": "assistant", "content": "yes", "refusal": None, "annotations": [], "audio": None, "tool_calls": None,
         "function_call": None}, {"role": "user", "content": "why?", "name": "ann"}]})
    assert call.messages == ({"role": "assistant", "content": "yes"},
                             {"role": "user", "content": "why?", "name": "ann"})


@pytest.mark.parametrize(("asked", "prompt", "context", "budget"), [
    (None, 10, 100, 16), (None, 95, 100, 5), (7, 10, 100, 7), (90, 10, 100, 90)])
def test_the_budget_of_a_completion(asked: int | None, prompt: int, context: int, budget: int) -> None:
    call = schema.parse_completion({"prompt": "x", "max_tokens": asked})
    assert schema.answer_budget(call, prompt_tokens=prompt, max_context=context) == budget


@pytest.mark.parametrize(("asked", "prompt"), [(None, 100), (None, 101), (91, 10)])
def test_what_does_not_fit_is_refused_with_the_numbers(asked: int | None, prompt: int) -> None:
    call = schema.parse_completion({"prompt": "x", "max_tokens": asked})
    with pytest.raises(RequestRefused, match=f"100 tokens.*{prompt}") as caught:
        schema.answer_budget(call, prompt_tokens=prompt, max_context=100)
    assert caught.value.code == "context_length_exceeded"


def test_a_long_chat_is_capped_where_the_client_named_no_limit() -> None:
    call = schema.parse_chat({"messages": [{"role": "user", "content": "x"}]})
    assert schema.answer_budget(call, prompt_tokens=10, max_context=100_000) == schema.CHAT_MAX_TOKENS


def test_an_infinite_margin_is_json_too() -> None:
    call = schema.parse_completion({"prompt": "x", "hostcache": {"trace_logits": True}})
    envelope = schema.Envelope(kind="completion", response_id="r", created=1, model="m", fingerprint="f")
    usage = Usage(prompt_tokens=9, completion_tokens=1, device_tokens=4, host_tokens=2)
    answer = schema.full_answer(call, envelope, text="x", token_ids=[1], finish_reason="stop", usage=usage, prompt=[1],
                                logits=[LogitTrace(digest="d", margin=math.inf)])
    assert json.loads(schema.to_json(answer))["choices"][0]["hostcache_logits"] == [{"digest": "d", "margin": None}]
    assert answer["usage"]["prompt_cache_hit_tokens"] + answer["usage"]["prompt_cache_miss_tokens"] == 9
    assert answer["usage"]["hostcache"] == {}


def test_negative_seeds_stay_apart_from_positive_ones() -> None:
    seeds = [schema.parse_completion({"prompt": "x", "seed": seed}).seed for seed in (-1, 1, 0, None)]
    assert seeds == [2**64 - 1, 1, 0, None]
