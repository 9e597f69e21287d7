"""An answer while it arrives: events in any cut, what counts as an arrival, and whose word on the cache is read."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.client.scripted import event, said, word

from hostcache.client.stream import Events, StreamedAnswer, error_text
from hostcache.client.usage import ReplyUsage, read_usage
from hostcache.client.wire import Broken, Head

TEXTS = st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1).map(str.strip)
                 .filter(bool), max_size=5)


@given(TEXTS, st.sampled_from(["\n", "\r\n"]), st.lists(st.integers(0, 200)))
def test_events_are_the_same_wherever_the_bytes_were_cut(texts: list[str], newline: str, cuts: list[int]) -> None:
    raw = "".join(f": a comment{newline}event: x{newline}data: {text}{newline}{newline}" for text in texts).encode()
    edges = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    events = Events()
    got = [found for start, stop in itertools.pairwise(edges) for found in events.feed(raw[start:stop])]
    assert [found.decode() for found in got] == texts


def test_data_of_several_lines_is_one_event_and_a_missing_last_line_is_forgiven() -> None:
    events = Events()
    assert events.feed(b'data: {"a":\ndata:1}\n\ndata: last') == [b'{"a":\n1}']
    assert events.rest() == [b"last"]


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    events = Events()
    events.feed(b"a" * 16_000_000)
    with pytest.raises(Broken, match="malformed-sse"):
        events.feed(b"a" * 1_000_000)


def heard(*chunks: tuple[float, object], done: bool = True) -> StreamedAnswer:
    answer = StreamedAnswer()
    answer.head(Head(status=200, headers={}), 1.0)
    for at_s, chunk in chunks:
        answer.body(event(chunk), at_s)
    if done:
        assert answer.body(event("[DONE]"), 99.0) is True
    answer.close()
    return answer


def test_only_chunks_with_text_or_tokens_are_arrivals() -> None:
    answer = heard((2.0, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}), (3.0, said("a")),
                   (4.0, word("", [7])), (4.0, word("b", [8, 9])), (5.0, word("", finish_reason="length")))
    assert answer.arrivals_s == [3.0, 4.0, 4.0]
    assert ("".join(answer.text), answer.token_ids, answer.finish_reason) == ("ab", [7, 8, 9], "length")


def test_reasoning_is_generated_but_is_no_text_of_the_answer() -> None:
    answer = heard((2.0, {"choices": [{"delta": {"reasoning_content": "hm"}}]}), (3.0, said("yes")))
    assert answer.arrivals_s == [2.0, 3.0]
    assert (answer.text, answer.reasoning) == (["", "yes"], ["hm"])


@pytest.mark.parametrize("chunk", [
    "{oops", "[]", "3", '"text"', "null", '{"choices": 3}', '{"choices": [3]}', '{"choices": [{"text": 3}]}',
    '{"choices": [{"text": ["a"]}]}', '{"choices": [{"delta": "a"}]}', '{"choices": [{"text": "a", "token_ids": 3}]}',
    '{"choices": [{"text": "a", "token_ids": ["b"]}]}', '{"choices": [{"hostcache_logits": [3]}]}',
    "[" * 100_000, '{"choices": [{"delta": {"content": {"a": 1}}}]}'])
def test_whatever_else_an_event_is_it_is_malformed_and_never_an_exception_of_ours(chunk: str) -> None:
    with pytest.raises(Broken, match="malformed-sse"):
        heard((1.0, chunk))


FIELDS = st.sampled_from(["choices", "delta", "text", "content", "token_ids", "usage", "error", "timings", "hostcache",
                          "prompt_tokens", "prompt_tokens_details", "recomputed"])


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(FIELDS, inner), max_leaves=25))
def test_no_json_whatever_makes_it_raise_anything_else(value: Any) -> None:
    answer = StreamedAnswer()
    answer.head(Head(status=200, headers={}), 1.0)
    with contextlib.suppress(Broken):
        answer.body(event(json.dumps(value)), 2.0)
        answer.close()
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        read_usage(answer.usage, answer.timings)


def test_a_stream_without_an_end_or_without_a_token_is_no_answer() -> None:
    with pytest.raises(Broken, match=r"cut-short: the stream ended before \[DONE\]"):
        heard((1.0, word("a")), done=False)
    with pytest.raises(Broken, match="no-token"):
        heard((1.0, word("")))
    with pytest.raises(Broken, match="stream-error: engine stopped"):
        heard((1.0, {"error": {"message": "engine stopped"}}))


def test_an_answer_that_is_no_stream_says_how_it_begins() -> None:
    answer = StreamedAnswer()
    answer.head(Head(status=200, headers={}), 1.0)
    answer.body(b'{"object": "text_completion"}', 1.0)
    with pytest.raises(Broken, match=r"malformed-sse: the answer is no stream of events; it begins with '\{"):
        answer.close()


def of(hit: int | None, **more: Any) -> ReplyUsage:
    return ReplyUsage(**{"prompt_tokens": 100, "completion_tokens": 5, "hit_tokens": hit, "device_tokens": None,
                         "host_tokens": None, "recomputed": None, "first_miss": None, **more})


BASE = {"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105}


@pytest.mark.parametrize(("usage", "timings", "expected"), [
    # This project's engine.
    ({**BASE, "prompt_tokens_details": {"cached_tokens": 64}, "prompt_cache_hit_tokens": 64,
      "hostcache": {"device": 48, "host": 16, "recomputed": {"new": 36}, "first_miss": {"reason": "new", "at": 64}}},
     None, of(64, device_tokens=48, host_tokens=16, recomputed={"new": 36}, first_miss={"reason": "new", "at": 64})),
    # vLLM, with and without --enable-prompt-tokens-details; SGLang; DeepSeek.
    ({**BASE, "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": None}}, None, of(0)),
    ({**BASE, "prompt_tokens_details": None}, None, of(None)),
    (BASE, None, of(None)),
    ({**BASE, "prompt_cache_hit_tokens": 60, "prompt_cache_miss_tokens": 40}, None, of(60)),
    # llama.cpp: with usage, with timings alone, older ones. `tokens_cached` is the slot's fill and is not read.
    (BASE, {"cache_n": 90, "prompt_n": 10, "predicted_n": 5}, of(90)),
    (BASE, {"prompt_n": 10, "predicted_n": 5}, of(90)),
    (None, {"cache_n": 90, "prompt_n": 10, "predicted_n": 5}, of(90)),
    ({**BASE, "tokens_cached": 104}, None, of(None)),
    (None, None, None),
    ({}, {"predicted_ms": 3.5}, None),
])
def test_each_engines_word_on_the_cache_is_read(usage: Mapping[str, Any] | None, timings: Mapping[str, Any] | None,
                                                expected: ReplyUsage | None) -> None:
    assert read_usage(usage, timings) == expected


@pytest.mark.parametrize("usage", [
    {"prompt_tokens": -1, "completion_tokens": 1}, {"prompt_tokens": "3", "completion_tokens": 1},
    {"prompt_tokens": True, "completion_tokens": 1}, {"prompt_tokens": 2.5, "completion_tokens": 1},
    {"completion_tokens": 1}, {"prompt_tokens": 1}, {"prompt_tokens": 1e300, "completion_tokens": 1}])
def test_what_is_no_count_is_named(usage: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"usage\.\w+ is .*, not a count"):
        read_usage(usage, None)


@pytest.mark.parametrize(("body", "text"), [
    ('{"error": {"message": "too\\nlong"}}', "too long"), ('{"error": "no"}', "no"), ('{"detail": "x"}',
     "{'detail': 'x'}"), ("<html>\n502</html>", "<html> 502</html>"), ("[" * 100_000, "[" * 200), ("", "")])
def test_an_errors_body_becomes_one_line(body: str, text: str) -> None:
    assert error_text(body) == text
