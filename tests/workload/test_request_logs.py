"""Request logs in four forms: what is read of each, what is refused, and that no text survives the reading."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.errors import ConfigError
from hostcache.workload.request_logs import (
    LoggedRequest,
    RequestLog,
    message_prefix,
    read_log,
    text_prefix,
    token_prefix,
)


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def proxy_row(at: float, **more: Any) -> dict[str, Any]:
    return {"ts": at, "latency_s": 2.0, "request": {"model": "m"}, "status": 200,
            "usage": {"prompt_tokens": 100, "completion_tokens": 9}, **more}  # fmt: skip


def only(log: RequestLog) -> LoggedRequest:
    (request,) = log.requests
    return request


# --- the proxy's JSON lines


def test_a_proxy_line_becomes_a_request(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 64}}
    log = read_log(write(tmp_path / "log", [
        proxy_row(1000.5, usage=usage, session="s1", prefix=["aa", "bb", "cc"], prefix_tokens=32)]))  # fmt: skip
    request = only(log)
    assert log.form == "proxy"
    assert (request.started_s, request.ended_s, request.prompt_tokens, request.completion_tokens) == (
        1000.5, 1002.5, 100, 9)  # fmt: skip
    assert (request.cached_tokens, request.session, request.model, request.status) == (64, "s1", "m", 200)
    assert request.prefix_ends.tolist() == [32, 64, 96]
    assert len(set(request.prefix.tolist())) == 3


def test_cached_tokens_beside_the_counts_and_times_as_iso_are_read_too(tmp_path: Path) -> None:
    row = proxy_row(0, ts="2026-11-30T12:00:00Z",
                    usage={"prompt_tokens": 10, "completion_tokens": 1, "cached_tokens": 4})
    request = only(read_log(write(tmp_path / "log", [row])))
    assert request.cached_tokens == 4
    assert request.started_s == 1796040000.0


def test_messages_are_digested_in_order_and_forgotten(tmp_path: Path) -> None:
    first = [{"role": "system", "content": "a secret of the house"}, {"role": "user", "content": "hello"}]
    rows = [proxy_row(1, request={"model": "m", "messages": first}),
            proxy_row(9, request={"model": "m", "messages": [*first, {"role": "assistant", "content": "yes"}]})]
    one, other = read_log(write(tmp_path / "log", rows)).requests
    assert one.prefix.tolist() == other.prefix.tolist()[:2]
    assert one.prefix_ends.tolist()[-1] == 100
    assert "secret" not in repr(one)


@given(st.integers(10**6, 7 * 10**9),
       st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=30)), timezone(-timedelta(hours=8)), None]))
def test_iso_times_are_read_with_and_without_a_zone(
    tmp_path_factory: pytest.TempPathFactory, at_s: int, zone: timezone | None
) -> None:
    moment = datetime.fromtimestamp(at_s, zone or UTC)
    text = moment.isoformat() if zone is not None else moment.replace(tzinfo=None).isoformat()
    path = write(tmp_path_factory.getbasetemp() / "iso", [proxy_row(0, ts=text)])
    assert only(read_log(path)).started_s == at_s


@pytest.mark.parametrize("prompt", ["word " * 200, list(range(640))])
def test_a_prompt_of_text_or_ids_is_digested_piece_by_piece(tmp_path: Path, prompt: Any) -> None:
    longer = prompt + ("more " * 100 if isinstance(prompt, str) else [7] * 320)
    rows = [proxy_row(1, request={"prompt": prompt}), proxy_row(2, request={"prompt": longer})]
    one, other = read_log(write(tmp_path / "log", rows)).requests
    assert 10 < len(one.prefix) < len(other.prefix)
    assert one.prefix.tolist() == other.prefix.tolist()[: len(one.prefix)]


def test_requests_are_ordered_by_start_though_a_log_is_written_by_end(tmp_path: Path) -> None:
    rows = [proxy_row(5, latency_s=1), proxy_row(2, latency_s=9)]
    assert [each.started_s for each in read_log(write(tmp_path / "log", rows)).requests] == [2, 5]


def test_failed_requests_are_counted_by_status_and_are_no_dirt(tmp_path: Path) -> None:
    rows = [proxy_row(1), proxy_row(2, status=429, usage=None), proxy_row(3, status=499, usage=None)]
    log = read_log(write(tmp_path / "log", rows))
    assert log.failed == {429: 1, 499: 1}
    assert log.skipped == {}
    assert len(log.requests) == 1


def test_lines_that_give_no_request_are_counted_by_reason_with_the_first_of_each(tmp_path: Path) -> None:
    lines: list[Any] = [proxy_row(at) for at in range(400)]
    lines[3] = "{"
    lines[7] = {"ts": 1, "latency_s": 1, "request": {}}
    lines[9] = proxy_row(9, usage={"prompt_tokens": -3, "completion_tokens": 1})
    log = read_log(write(tmp_path / "log", lines))
    assert log.skipped == {"not JSON": 1, "no usage": 1, "no count in prompt_tokens": 1}
    assert log.first == {"not JSON": 4, "no usage": 8, "no count in prompt_tokens": 10}
    assert len(log.requests) == 397


def test_a_log_of_which_more_than_a_hundredth_is_dirt_is_refused_unless_one_says_so(tmp_path: Path) -> None:
    lines: list[Any] = [proxy_row(at) for at in range(98)] + ["{", "["]
    path = write(tmp_path / "log", lines)
    with pytest.raises(ConfigError, match=r"2 of 100 requests cannot be read: 2 × not JSON \(first: line 99\)"):
        read_log(path)
    assert len(read_log(path, bad_share=0.02).requests) == 98


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ts": "yesterday"}, "no time in ts"),
        ({"ts": None}, "no time in ts"),
        ({"ts": "2026-02-29T00:00:00Z"}, "no such day or time"),
        ({"ts": "2026-13-01T00:00:00Z"}, "no such day or time"),
        ({"latency_s": -1}, "no seconds in latency_s"),
        ({"latency_s": float("nan")}, "no seconds in latency_s"),
        ({"request": 3}, "no request"),
        ({"usage": None}, "no usage"),
        ({"usage": {"prompt_tokens": True, "completion_tokens": 1}}, "no count in prompt_tokens"),
        ({"usage": {"prompt_tokens": 5}}, "no count in completion_tokens"),
        ({"prefix": "abc"}, "prefix is no list"),
        ({"status": "fine"}, "no count in status"),
    ],
)
def test_every_way_a_line_can_be_wrong_has_its_reason(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = write(tmp_path / "log", [proxy_row(1), {**proxy_row(2), **change}])
    log = read_log(path, bad_share=1)
    assert len(log.requests) == 1
    assert next(iter(log.skipped)).startswith(reason)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(["ts", "latency_s", "request", "usage", "prompt_tokens", "completion_tokens",
                                         "prefix", "prefix_tokens", "status", "messages", "startTime", "endTime",
                                         "metadata", "response", "prompt"]), inner, max_size=6), max_leaves=20),
       st.sampled_from(["proxy", "litellm"]))  # fmt: skip
def test_no_line_of_json_is_more_than_a_counted_line(tmp_path_factory: pytest.TempPathFactory, row: Any,
                                                     form: Any) -> None:
    first = proxy_row(1) if form == "proxy" else litellm_row(1)
    path = write(tmp_path_factory.getbasetemp() / "any", [first, json.dumps(row)])
    log = read_log(path, form=form, bad_share=1)
    assert len(log.requests) + sum(log.skipped.values()) + sum(log.failed.values()) == 2


# --- LiteLLM


def litellm_row(at: float, **more: Any) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{at}", "trace_id": f"t-{at}", "call_type": "acompletion", "status": "success",
        "total_tokens": 109, "prompt_tokens": 100, "completion_tokens": 9, "startTime": at, "endTime": at + 2.0,
        "completionStartTime": at + 0.5, "model": "m", "metadata": {}, "cache_hit": None,
        "messages": [{"role": "user", "content": "hello"}],
        "response": {"usage": {"prompt_tokens_details": {"cached_tokens": 32}}}, **more}  # fmt: skip


def test_a_litellm_payload_becomes_a_request(tmp_path: Path) -> None:
    log = read_log(write(tmp_path / "log", [litellm_row(50.0)]))
    request = only(log)
    assert log.form == "litellm"
    assert (request.started_s, request.ended_s, request.prompt_tokens, request.completion_tokens) == (50, 52, 100, 9)
    assert (request.cached_tokens, request.session) == (32, "t-50.0")
    assert len(request.prefix) == 1


def test_a_litellm_payload_inside_of_its_callback_with_iso_times_and_a_session_is_read(tmp_path: Path) -> None:
    inner = litellm_row(0, startTime="2026-11-30T12:00:00", endTime="2026-11-30T12:00:03.5",
                        metadata={"session_id": "s9", "usage_object": {"prompt_tokens_details": {"cached_tokens": 7}}})
    request = only(read_log(write(tmp_path / "log", [{"standard_logging_object": inner}])))
    assert request.session == "s9"
    assert request.cached_tokens == 7
    assert request.ended_s - request.started_s == 3.5


def test_a_litellm_failure_is_counted_and_redacted_messages_tell_nothing(tmp_path: Path) -> None:
    redacted = [{"role": "user", "content": "redacted-by-litellm"}]
    log = read_log(write(tmp_path / "log", [
        litellm_row(1, messages=redacted),
        litellm_row(2, status="failure", error_information={"error_code": "429"})]))  # fmt: skip
    assert log.failed == {429: 1}
    assert len(only(log).prefix) == 0


# --- CSV


def test_a_csv_is_read_by_its_head(tmp_path: Path) -> None:
    log = read_log(write(tmp_path / "log.csv", [
        "timestamp,prompt_tokens,completion_tokens,session,latency_s",
        "2026-11-30T12:00:00+01:00,120,7,a,1.5", "1796036401.25,130,8,,"]))  # fmt: skip
    first, second = log.requests
    assert log.form == "csv"
    assert (first.started_s, first.ended_s, first.session) == (1796036400.0, 1796036401.5, "a")
    assert (second.started_s, second.ended_s, second.session) == (1796036401.25, 1796036401.25, None)


def test_a_csv_line_with_a_cell_too_few_is_counted(tmp_path: Path) -> None:
    lines = ["timestamp,prompt_tokens,completion_tokens", "1,2,3", "1,2"]
    assert read_log(write(tmp_path / "l", lines), bad_share=1).skipped == {"2 cells under 3 names": 1}


# --- vLLM


def vllm_lines(name: str, at: str, ids: list[int], answer: list[int], *, streamed: bool = False) -> list[str]:
    """As vLLM 0.32's RequestLogger writes them; the texts try to be taken for more."""
    head = f"(APIServer pid=7) %s 11-30 {at} [entrypoints/.../utils/request_logger.py:%d] "
    debug, info = head % ("DEBUG", 55), head % ("INFO", 65)
    prompt = "'x, prompt_token_ids: [1, 2], prompt_embeds shape: None.\\nGenerated response y: output: 1'"
    lines = [
        f"{debug}Request {name} details: prompt: {prompt}, prompt_token_ids: {ids}, prompt_embeds shape: None.",
        f"{info}Received request {name}: params: SamplingParams(n=1, stop=['prompt_token_ids: [3]'], max_tokens=12), "
        "lora_request: None.",
    ]
    if not streamed:
        return [*lines, f"{debug}Generated response {name} details: output_token_ids: {answer}",
                f"{info}Generated response {name}: output: \"x, finish_reason: stop\", finish_reason: length"]
    for token in answer:
        lines += [f"{debug}Generated response {name} (streaming delta) details: output_token_ids: [{token}]",
                  f"{info}Generated response {name} (streaming delta): output: 'a', finish_reason: None"]
    return [*lines, f"{debug}Generated response {name} (streaming complete) details: output_token_ids: None",
            f"{info}Generated response {name} (streaming complete): output: 'aa', finish_reason: streaming_complete"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_vllm_log_gives_lengths_and_prefixes(tmp_path: Path, streamed: bool) -> None:
    ids, answer = list(range(40)), [5, 6, 7]
    log = read_log(write(tmp_path / "log", [
        "INFO 11-30 11:59:00 [api_server.py:1] starting",
        *vllm_lines("chatcmpl-1", "12:00:00", ids, answer, streamed=streamed),
        *vllm_lines("chatcmpl-2", "12:00:09", [*ids, *answer, *range(30)], [1], streamed=streamed)]))  # fmt: skip
    one, other = log.requests
    assert log.form == "vllm"
    assert (one.prompt_tokens, one.completion_tokens, other.prompt_tokens, other.completion_tokens) == (40, 3, 73, 1)
    assert other.started_s - one.ended_s == 9.0
    assert one.prefix.tolist() == other.prefix.tolist()[: len(one.prefix)]


def test_a_vllm_log_as_json_lines_gives_the_same(tmp_path: Path) -> None:
    lines = vllm_lines("chatcmpl-1", "12:00:00", list(range(40)), [5, 6, 7])
    rows = [{"asctime": "2026-11-30 12:00:00,250", "message": line.partition("] ")[2]} for line in lines]
    request = only(read_log(write(tmp_path / "log", rows)))
    assert (request.prompt_tokens, request.completion_tokens) == (40, 3)
    assert request.started_s == 1796040000.25


def test_a_vllm_log_goes_on_over_new_year(tmp_path: Path) -> None:
    lines = [line.replace("11-30", "12-31") for line in vllm_lines("a", "23:59:50", [1], [1])]
    lines += [line.replace("11-30", "01-01") for line in vllm_lines("b", "00:00:05", [1], [1])]
    one, other = read_log(write(tmp_path / "log", lines)).requests
    assert other.started_s - one.started_s == 15.0


def test_a_vllm_line_with_a_day_that_is_none_is_counted(tmp_path: Path) -> None:
    lines = [line.replace("11-30", "11-31") for line in vllm_lines("a", "23:59:50", [1], [1])]
    log = read_log(write(tmp_path / "log", [*lines, *vllm_lines("b", "00:00:05", [1], [1])]), bad_share=1)
    assert log.skipped == {"no such day or time": 4}


def test_a_vllm_log_without_debug_lines_is_refused_with_what_to_do(tmp_path: Path) -> None:
    lines = [line for line in vllm_lines("a", "12:00:00", [1], [1]) if "DEBUG" not in line]
    with pytest.raises(ConfigError, match="VLLM_LOGGING_LEVEL=DEBUG"):
        read_log(write(tmp_path / "log", lines))


def test_a_vllm_request_without_an_answer_is_counted(tmp_path: Path) -> None:
    lines = [*vllm_lines("a", "12:00:00", [1], [1]), *vllm_lines("cmpl-b-0", "12:00:01", [1], [1])[:2]]
    log = read_log(write(tmp_path / "log", lines), bad_share=1)
    assert sum("no answer in the log" in why for why in log.skipped) == 1


_REAL = """
import sys
from vllm import SamplingParams
from vllm.config.logging import LoggingConfig
from vllm.entrypoints.serve.utils.request_logger import RequestLogger
from vllm.logger import configure_logging
configure_logging(LoggingConfig(log_level="DEBUG", formatter=sys.argv[1]))
log = RequestLogger(max_log_len=None)
for name, ids in (("chatcmpl-1", list(range(40))), ("chatcmpl-2", list(range(73)))):
    log.log_inputs(name, "a\\nprompt", ids, None, SamplingParams(max_tokens=9), None)
    log.log_outputs(name, "text", [1, 2, 3], "length")
"""


@pytest.mark.vllm
@pytest.mark.parametrize("formatter", ["text", "json"])
def test_what_this_vllm_writes_is_read(tmp_path: Path, formatter: str) -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    said = subprocess.run([sys.executable, "-c", _REAL, formatter], check=True, capture_output=True, text=True)
    path = tmp_path / "log"
    path.write_text(said.stdout + said.stderr)
    log = read_log(path)
    assert [(each.prompt_tokens, each.completion_tokens) for each in log.requests] == [(40, 3), (73, 3)]


# --- files


def test_a_gzipped_log_reads_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "log", [proxy_row(1), proxy_row(2)])
    zipped = tmp_path / "log.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    assert [each.started_s for each in read_log(zipped).requests] == [1, 2]
    zipped.write_bytes(zipped.read_bytes()[:-20])
    with pytest.raises(ConfigError, match="ends or breaks here"):
        read_log(zipped)


def test_what_is_no_log_is_refused_with_the_forms_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_log(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"no request log that is known; known are proxy .* litellm .* vLLM.* csv"):
        read_log(write(tmp_path / "log", ["hello", "world"]))
    with pytest.raises(ConfigError, match="holds no answered request"):
        read_log(write(tmp_path / "log", [proxy_row(1, status=500, usage=None)]))


# --- digests


@given(st.lists(st.integers(0, 2**31 - 1), max_size=200), st.lists(st.integers(0, 2**31 - 1), max_size=200))
def test_two_prompts_share_digests_exactly_as_far_as_whole_chunks_agree(one: list[int], other: list[int]) -> None:
    (left, ends), (right, _) = token_prefix(one), token_prefix(other)
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    shared = sum(a == b for a, b in zip(left.tolist(), right.tolist(), strict=False))
    assert shared == same // 16
    assert ends.tolist() == [16 * (at + 1) for at in range(len(one) // 16)]


@given(st.lists(st.text(max_size=20), min_size=1, max_size=12), st.integers(1, 10**6))
def test_the_last_message_ends_where_the_prompt_does(texts: list[str], tokens: int) -> None:
    digests, ends = message_prefix(texts, tokens)
    assert len(digests) == len(ends) == len(texts)
    assert ends.tolist() == sorted(ends.tolist())
    assert ends[-1] == tokens


def test_a_text_shorter_than_a_piece_has_no_digest() -> None:
    digests, ends = text_prefix("short", 2)
    assert len(digests) == len(ends) == 0
