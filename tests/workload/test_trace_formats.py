"""Sessions in files of their own, Bailian's chats, Azure's CSV, xz: what is read, what is refused and where."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import tarfile
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostcache.errors import ConfigError
from hostcache.workload.sample_traces import synthetic_requests
from hostcache.workload.trace_formats.bailian import prefixes
from hostcache.workload.traces import (
    AZURE,
    BAILIAN,
    MOONCAKE,
    SESSIONS,
    Trace,
    TraceRefused,
    TraceRequest,
    open_trace,
    sessions_of,
    trace_facts,
)

Row = dict[str, Any]
Spoil = Callable[[list[Any]], object]


def asked(t: float, ids: Sequence[float], **more: object) -> Row:
    """A request of a session file."""
    return {"t": t, "type": "n", "in": 64 * len(ids) + 7, "out": 3, "hash_ids": ids, **more}


PACKERS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def session(name: str, *requests: Row, **more: object) -> Row:
    return {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": list(requests), **more}


def folder(path: Path, *rows: Row) -> Path:
    path.mkdir()
    for row in rows:
        (path / f"{row['id']}.json").write_text(json.dumps(row))
    return path


def said(path: Path) -> str:
    """The one line that refuses this trace."""
    with pytest.raises(TraceRefused) as caught:
        trace_facts(open_trace(path, need_blocks=False))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    return str(caught.value)


def ranks(requests: list[TraceRequest]) -> list[list[int]]:
    known: dict[int, int] = {}
    return [[known.setdefault(each, len(known)) for each in request.blocks.tolist()] for request in requests]


TWO = (
    session("a", asked(0.0, [1, 2], api_time=2.0, think_time=0.0),
            {"t": 3.0, "type": "subagent", "agent_id": "helper", "requests": [asked(0.0, [7]), asked(4.0, [7, 8])]},
            asked(5.5, [1, 2, 3], api_time=1.0, think_time=3.25), asked(9.0, [1, 4])),
    session("b", asked(0.0, [1]), asked(1.0, [1, 2], think_time=9.0)),
)


# Sessions in files of their own


def test_sessions_of_a_folder_are_read_by_time_each_with_ids_of_its_own(tmp_path: Path) -> None:
    trace = open_trace(folder(tmp_path / "traces", *TWO))
    requests = list(trace)
    assert trace.format == SESSIONS
    assert [(request.number, request.session, request.arrival_s) for request in requests] == [
        (1, "a", 0.0), (2, "b", 0.0), (3, "b", 1.0), (4, "a/helper", 3.0), (5, "a", 5.5), (6, "a/helper", 7.0),
        (7, "a", 9.0)]
    assert [request.kept_blocks for request in requests] == [0, 0, 1, 0, 2, 1, 1]
    assert ranks(requests) == [[0, 1], [2], [2, 3], [4], [0, 1, 5], [4, 6], [0, 7]]
    assert sorted({int(each) for request in requests for each in request.blocks}) == list(range(8)), "ids have gaps"
    assert requests[3].parent == "a"


def test_a_pause_is_the_recorded_one_after_a_measured_answer_and_else_what_is_left(tmp_path: Path) -> None:
    requests = list(open_trace(folder(tmp_path / "traces", *TWO)))
    by_session = {name: [(request.think_s, request.api_s) for request in requests if request.session == name]
                  for name in ("a", "a/helper", "b")}
    assert by_session == {"a": [(0.0, 2.0), (3.25, 1.0), (2.5, None)], "a/helper": [(0.0, None), (4.0, None)],
                          "b": [(0.0, None), (1.0, None)]}


def test_sessions_begin_together_or_within_the_seconds_given_by_a_seed(tmp_path: Path) -> None:
    path = folder(tmp_path / "traces", *TWO)

    def starts(seed: int) -> list[float]:
        return sorted(each.requests[0].arrival_s or 0.0 for each in
                      sessions_of(open_trace(path, spread_s=100, seed=seed)) if each.parent is None)

    assert starts(1) == starts(1) != starts(2)
    assert all(0 <= start <= 100 for start in starts(1))
    spread = list(open_trace(path, spread_s=100, seed=1))
    assert [request.arrival_s for request in spread] == sorted(request.arrival_s or 0.0 for request in spread)
    with pytest.raises(ConfigError, match="within -1 seconds"):
        open_trace(path, spread_s=-1)


@pytest.mark.parametrize("scope", ["local", "global", "per_context", None])
def test_ids_are_one_where_the_file_says_that_they_are(scope: str | None, tmp_path: Path) -> None:
    inside = {"t": 1.0, "type": "subagent", "agent_id": "helper", "requests": [asked(0.0, [2**64 - 1, 6])]}
    rows = [session(name, asked(0.0, [2**64 - 1, 5]), inside, hash_id_scope=scope) for name in ("a", "b")]
    for row in rows:
        if scope is None:
            del row["hash_id_scope"]
    requests = list(open_trace(folder(tmp_path / "traces", *rows)))
    shared = {"local": [[0, 1], [2, 3], [0, 4], [2, 5]], "global": [[0, 1], [0, 1], [0, 2], [0, 2]]}
    assert ranks(requests) == shared.get(scope or "", [[0, 1], [2, 3], [4, 5], [6, 7]])
    if scope == "global":
        assert requests[0].blocks.tolist() == [2**64 - 1, 5]


@given(seed=st.integers(0, 2**32), first_id=st.sampled_from([0, 2**53, 2**64 - 10_000]))
@settings(max_examples=20)
def test_the_same_sessions_as_files_and_as_one_delta_trace_hold_the_same(
    seed: int, first_id: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    requests = synthetic_requests(seed, sessions=4, turns=5, first_id=first_id)
    starts: dict[str, float] = {}
    rows: dict[str, Row] = {}
    for request in requests:
        assert request.session is not None
        assert request.arrival_s is not None
        start = starts.setdefault(request.session, request.arrival_s)
        timed = {} if request.api_s is None else {"api_time": request.api_s}
        rows.setdefault(request.session, session(request.session, hash_id_scope="global"))["requests"].append(
            {"t": round(request.arrival_s - start, 3), "type": "n", "in": request.input_tokens,
             "out": request.output_tokens, "hash_ids": request.blocks.tolist(), "think_time": request.think_s, **timed})
    path = folder(tmp_path_factory.mktemp("sessions") / "traces", *rows.values())
    for read in sessions_of(open_trace(path)):
        written = [request for request in requests if request.session == read.name]
        assert len(written) == len(read.requests)
        for one, other in zip(written, read.requests, strict=True):
            assert (one.api_s, one.input_tokens, one.output_tokens, one.kept_blocks, one.blocks.tolist()) == (
                other.api_s, other.input_tokens, other.output_tokens, other.kept_blocks, other.blocks.tolist())
            assert one.think_s == pytest.approx(other.think_s)
            assert (one.arrival_s or 0) - starts[read.name] == pytest.approx(other.arrival_s)


@pytest.mark.parametrize("packed", ["folder", "tar", "tar.gz", "tar.xz", "gz inside", "xz inside"])
def test_a_tar_and_packed_files_hold_what_the_folder_holds(packed: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "traces", *TWO)
    (path / "notes.txt").write_text("not a session")
    plain = [(request.session, request.arrival_s, request.blocks.tolist()) for request in open_trace(path)]
    if packed.startswith("tar"):
        pack = PACKERS[packed.removeprefix("tar")]
        (tmp_path / "some.bin").write_bytes(pack(tar_of(path)))
        path = tmp_path / "some.bin"
    elif packed != "folder":
        for each in list(path.glob("*.json")):
            each.with_name(f"{each.name}.{packed[:2]}").write_bytes(PACKERS[f".{packed[:2]}"](each.read_bytes()))
            each.unlink()
    assert [(request.session, request.arrival_s, request.blocks.tolist()) for request in open_trace(path)] == plain


def tar_of(path: Path) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        tar.add(path, arcname="traces")
    return made.getvalue()


def test_one_session_file_is_a_trace_over_many_lines_too(tmp_path: Path) -> None:
    path = folder(tmp_path / "traces", *TWO)
    assert [request.session for request in open_trace(path / "b.json")] == ["b", "b"]
    (path / "b.json").write_text("\ufeff" + json.dumps(TWO[1], indent=1).replace("\n", "\r\n"))
    assert [request.session for request in open_trace(path / "b.json")] == ["b", "b"]
    assert len(list(open_trace(path))) == 7


def test_sessions_without_requests_are_no_trace(tmp_path: Path) -> None:
    path = folder(tmp_path / "traces", session("a"), session("b"))
    assert said(path) == "traces holds no request; give a trace with at least one row"
    assert said(path / "b.json").startswith("b.json holds no request")


def test_packing_a_session_s_file_does_not_change_when_it_begins(tmp_path: Path) -> None:
    path = folder(tmp_path / "traces", *TWO, session("a-b", asked(0.0, [1])))
    plain = [(request.session, request.arrival_s) for request in open_trace(path, spread_s=1000)]
    for name, end in (("a", ".gz"), ("b", ".xz")):
        (path / f"{name}.json{end}").write_bytes(PACKERS[end]((path / f"{name}.json").read_bytes()))
        (path / f"{name}.json").unlink()
    assert [(request.session, request.arrival_s) for request in open_trace(path, spread_s=1000)] == plain


def spoil(at: int, **fields: object) -> Spoil:
    return lambda requests: requests[at].update(fields)


SPOILT: dict[str, tuple[Spoil, str]] = {
    "a field missing": (lambda requests: requests[2].pop("in"), "a.json row 3: in is missing"),
    "negative input": (spoil(2, **{"in": -5}), "a.json row 3: in is -5; an integer in 1"),
    "negative output": (spoil(2, out=-1), "a.json row 3: out is -1"),
    "a float id": (spoil(2, hash_ids=[1, 2.0, 3]), "a.json row 3: hash_ids holds 2.0; ids are integers"),
    "an id of 65 bits": (spoil(2, hash_ids=[1, 2, 2**64]), "row 3: block id 18446744073709551616 is outside"),
    "an id twice": (spoil(2, hash_ids=[1, 2, 2]), "row 3: block 2 is there twice"),
    "a block too few": (spoil(2, hash_ids=[1, 2]), "row 3: 2 blocks for 199 tokens; floor(199 / 64) = 3 are needed"),
    "back in time": (spoil(3, t=5.0), "row 4: t 5.0 is before the previous row's 5.5"),
    "a negative time": (spoil(0, t=-1.0), "row 1: t is -1.0; seconds from 0 on"),
    "an endless time": (spoil(0, t=1e300), "row 1: t is 1e+300"),
    "a negative answer": (spoil(2, api_time=-1.0), "row 3: api_time is -1.0"),
    "a truth value": (spoil(2, think_time=True), "row 3: think_time is true"),
    "a sub-agent's field missing": (lambda requests: requests[1].pop("agent_id"), "row 2: agent_id is missing"),
    "an id that changes its parent": (spoil(3, hash_ids=[2]), 'of session "a" is the first block and in row 1 follows'),
    "a sub-agent without requests": (spoil(1, requests=None), 'row 2: agent_id is "helper", requests null'),
    "a row that is none": (lambda requests: requests.append([]), "row 5: [] is no JSON object"),
    "an agent twice": (lambda requests: requests.append(requests[1]), 'row 5: agent_id "helper" was there before'),
    "an agent in an agent": (lambda requests: requests[1]["requests"].append(
        {"t": 9.0, "type": "subagent", "agent_id": "x", "requests": []}), 'row 7: sub-agent "x" stands in a sub-agent'),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_session_that_cannot_be_is_refused_by_file_and_row(what: str, tmp_path: Path) -> None:
    rows = json.loads(json.dumps(TWO))
    how, says = SPOILT[what]
    how(rows[0]["requests"])
    if what == "an id that changes its parent":
        rows[0]["requests"][3]["in"] = 64
    assert says in said(folder(tmp_path / "traces", *rows))


@pytest.mark.parametrize(("fields", "says"), [
    ({"block_size": 32}, "b.json: block_size is 32, in the first session 64; one trace has one"),
    ({"hash_id_scope": "galactic"}, 'b.json: hash_id_scope is "galactic"; local, global, per_context are known'),
    ({"requests": 4}, "b.json: requests is 4; a list is needed"),
    ({"id": "x/y"}, 'b.json: id is "x/y"; a name without a slash is needed'),
    ({"id": "a"}, 'b.json: session "a" was there before; each file holds its own'),
])
def test_a_file_that_is_no_session_is_refused_by_name(fields: Row, says: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "traces", *TWO)
    (path / "b.json").write_text(json.dumps(TWO[1] | fields))
    assert says in said(path)


@pytest.mark.parametrize(("content", "says"), [
    (b"{", "b.json.gz: the file ends or breaks"), (b"", "b.json: not JSON"), (b"[]", "b.json: [] is no JSON object"),
    (b"{}", "b.json: block_size is missing"),
])
def test_a_damaged_session_file_is_refused_by_name(content: bytes, says: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "traces", *TWO)
    (path / "b.json").write_bytes(content)
    if content == b"{":
        (path / "b.json").unlink()
        (path / "b.json.gz").write_bytes(gzip.compress(json.dumps(TWO[1]).encode())[:40])
    assert says in said(path)


def test_a_cut_tar_is_refused_in_one_line(tmp_path: Path) -> None:
    whole = tar_of(folder(tmp_path / "traces", *TWO))
    (tmp_path / "cut.tar").write_bytes(whole[: len(whole) // 3])
    assert "cut.tar" in said(tmp_path / "cut.tar")
    (tmp_path / "cut.tar.gz").write_bytes(gzip.compress(whole)[:-20])
    assert "breaks" in said(tmp_path / "cut.tar.gz")


# Bailian


def chat(number: int, parent: int, at: float, ids: list[int], **more: object) -> Row:
    return {"chat_id": number, "parent_chat_id": parent, "timestamp": at, "input_length": 16 * len(ids) - 3,
            "output_length": 5, "type": "text", "turn": 1 if parent < 0 else 2, "hash_ids": ids, **more}


def jsonl(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


CHATS = [chat(159, -1, 0.0, [10, 11]), chat(160, -1, 61.114, [10, 12]), chat(161, 159, 62.5, [10, 11, 13]),
         chat(162, 161, 70.0, [10, 11, 13, 14]), chat(163, 55, 71.0, [20]), chat(164, 159, 80.0, [10, 11, 15])]


def test_chats_are_sessions_by_their_root_with_pauses_from_their_parent(tmp_path: Path) -> None:
    trace = open_trace(jsonl(tmp_path / "qwen.jsonl", CHATS))
    assert trace.format == BAILIAN
    requests = list(trace)
    assert [request.session for request in requests] == ["chat 159", "chat 160", "chat 159", "chat 159", "chat 55",
                                                         "chat 159"]
    assert [request.think_s for request in requests] == pytest.approx([0.0, 0.0, 62.5, 7.5, 0.0, 80.0])
    assert requests[1].arrival_s == 61.114
    assert ranks(requests) == [[0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4], [5], [0, 1, 6]]


def test_the_same_content_behind_another_prefix_is_another_block(tmp_path: Path) -> None:
    rows = [chat(1, -1, 0.0, [7, 8]), chat(2, -1, 0.5, [9, 8]), chat(3, -1, 0.6, [8, 8, 8]), chat(4, -1, 1.0, [8, 7])]
    facts = trace_facts(open_trace(jsonl(tmp_path / "qwen.jsonl", rows)))
    assert (facts.references, facts.distinct) == (9, 8), "only the first 8 of the last two is shared"


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=30))
@settings(max_examples=60)
def test_prefix_ids_are_equal_exactly_where_everything_before_is(prompts: list[list[int]]) -> None:
    named: dict[int, tuple[int, ...]] = {}
    back: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        for end, block in enumerate(prefixes(np.array(prompt, dtype=np.uint64)).tolist(), 1):
            assert named.setdefault(block, tuple(prompt[:end])) == tuple(prompt[:end])
            assert back.setdefault(tuple(prompt[:end]), block) == block


@pytest.mark.parametrize(("at", "fields", "says"), [
    (2, {"chat_id": 160}, "row 3: chat_id 160 was there before"),
    (2, {"timestamp": 3.0}, "row 3: timestamp 3.0 is before the previous row's 61.114"),
    (2, {"timestamp": "62"}, 'row 3: timestamp is "62"; seconds from 0 on'),
    (2, {"hash_ids": [10, 11]}, "row 3: 2 blocks for 45 tokens; ceil(45 / 16) = 3 are needed"),
    (2, {"hash_ids": [10, 11, 1.5]}, "row 3: hash_ids holds 1.5; ids are integers"),
    (2, {"hash_ids": [10, 11, 2**64]}, "row 3: block id 18446744073709551616 is outside"),
    (2, {"input_length": -45}, "row 3: input_length is -45"),
    (2, {"output_length": 1.5}, "row 3: output_length is 1.5"),
    (2, {"parent_chat_id": -2}, "row 3: parent_chat_id is -2"),
    (2, {"parent_chat_id": 161}, "row 3: parent_chat_id is 161, the chat's own"),
    (2, {"type": None}, "row 3: type is null"),
    (2, {"model": "qwen"}, 'row 3: "model" is no field of this format'),
])
def test_a_chat_that_cannot_be_is_refused_by_row(at: int, fields: Row, says: str, tmp_path: Path) -> None:
    rows = [dict(row) for row in CHATS]
    rows[at] |= fields
    assert f"qwen.jsonl {says}" in said(jsonl(tmp_path / "qwen.jsonl", rows))


# Azure

OF_2023 = ("TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10\r\n"
           "2023-11-16 18:17:04.0319600,3180,8\r\n2023-11-16 18:17:05,7,0")
OF_2024 = ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
           "2024-05-10 00:00:01+00:00,2399,6\n")


def test_both_kinds_of_azure_file_give_arrivals_from_the_first_row_and_lengths(tmp_path: Path) -> None:
    for name, text, arrivals in (("2023.csv", OF_2023, [0.0, 0.052, 1.02004]), ("2024.csv", OF_2024, [0.0, 0.99007])):
        (tmp_path / name).write_bytes(text.encode())
        trace = open_trace(tmp_path / name, need_blocks=False)
        requests = list(trace)
        assert trace.format == AZURE
        assert [request.arrival_s for request in requests] == arrivals
        assert [request.number for request in requests] == list(range(2, 2 + len(arrivals)))
        assert all(len(request.blocks) == 0 and request.session is None for request in requests)
        facts = trace_facts(trace)
        assert (facts.requests, facts.sessions, facts.references) == (len(arrivals), len(arrivals), 0)
        assert facts.infinite_hit_rate is facts.infinite_hit_rate_tokens is facts.infinite_hit_rate_requests is None
    assert (requests[0].input_tokens, requests[0].output_tokens) == (2162, 5)


def test_what_needs_block_ids_refuses_a_trace_without(tmp_path: Path) -> None:
    (tmp_path / "code.csv").write_text(OF_2024)
    with pytest.raises(TraceRefused, match=r"code.csv \(azure\) names no blocks, so what its prompts share"):
        open_trace(tmp_path / "code.csv")


@pytest.mark.parametrize(("line", "says"), [
    ("2024-05-10 00:00:02+00:00,-4,5", 'row 4: ContextTokens is "-4"; an integer'),
    ("2024-05-10 00:00:02+00:00,0,5", "row 4: ContextTokens is 0"),
    ("2024-05-10 00:00:02+00:00,4.5,5", 'row 4: ContextTokens is "4.5"'),
    ("2024-05-10 00:00:02+00:00,4", "row 4: 2 values; TIMESTAMP,ContextTokens,GeneratedTokens are needed"),
    ("2024-05-10 00:00:00+00:00,4,5", "row 4: TIMESTAMP 2024-05-10 00:00:00+00:00 is before the previous row's"),
    ("2024-05-10 00:00:02,4,5", 'row 4: TIMESTAMP is "2024-05-10 00:00:02"; either all rows have a time zone or n'),
    ("yesterday,4,5", 'row 4: TIMESTAMP is "yesterday"; a time like'),
    ("2024-05-32 00:00:02+00:00,4,5", 'row 4: TIMESTAMP is "2024-05-32 00:00:02+00:00"; a time like'),
    ("2024-05-10 01:00:00.9+01:00,4,5", "row 4: TIMESTAMP 2024-05-10 01:00:00.9+01:00 is before the previous row's"),
    ("\n2024-05-10 00:00:02+00:00,4,5", "row 4: empty"),
])
def test_an_azure_row_that_cannot_be_is_refused_by_number(line: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(OF_2024 + line + "\n")
    assert f"a.csv {says}" in said(tmp_path / "a.csv")


# Blocks that a file does not say, packing, memory


def test_blocks_of_another_size_are_read_when_that_is_said_and_refused_when_not(tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": 130, "output_length": 1, "hash_ids": [1, 2]}]
    path = jsonl(tmp_path / "a.jsonl", rows)
    trace = open_trace(path, blocks=(64, "floor"))
    assert (trace.format.name, trace.format.block_tokens, trace.format.rounding) == ("mooncake", 64, "floor")
    assert sum(1 for _ in trace) == 1
    says = said(path)
    assert "2 blocks for 130 tokens; ceil(130 / 512) = 1 are needed; where all its blocks are of another size" in says
    with pytest.raises(TraceRefused, match="the format says what it has"):
        open_trace(folder(tmp_path / "traces", *TWO), blocks=(32, "floor"))
    with pytest.raises(ConfigError, match="blocks of 0 tokens make no sense"):
        open_trace(path, blocks=(0, "floor"))


def test_an_xz_file_of_several_padded_streams_is_one_and_a_damaged_later_one_is_seen(tmp_path: Path) -> None:
    one, two = (jsonl(tmp_path / "a", [chat(i, -1, i, [i]) for i in some]).read_bytes() for some in ((1, 2), (3, 4)))
    path = tmp_path / "a.xz"
    path.write_bytes(lzma.compress(one) + bytes(8) + lzma.compress(two) + bytes(4))
    assert [request.session for request in open_trace(path)] == ["chat 1", "chat 2", "chat 3", "chat 4"]
    path.write_bytes(lzma.compress(one) + b"\xfd7zX!" + lzma.compress(two)[5:])
    assert "a.xz row 3: the file ends or breaks here" in said(path)


def test_memory_does_not_grow_with_a_trace_of_tens_of_megabytes_whatever_packs_it(tmp_path: Path) -> None:
    """A prompt shared by all, so that the distinct blocks do not grow either."""
    ids = ",".join(str(2**63 + each) for each in range(40))

    def write(path: Path, requests: int, padding: int, open_: Callable[..., Any]) -> Trace:
        with open_(path, "wb") as file:
            for number in range(requests):
                file.write(b'{"timestamp":%d,"input_length":20480,"output_length":1,"hash_ids":[%s]}%s\n'
                           % (number, ids.encode(), b" " * padding))
        return open_trace(path)

    def peak(trace: Trace) -> int:
        tracemalloc.start()
        try:
            facts = trace_facts(trace)
            assert facts.distinct == 40
            assert trace.format == MOONCAKE
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    for open_ in (open, gzip.open, lzma.open):
        few, many = write(tmp_path / "few", 2500, 0, open_), write(tmp_path / "many", 4000, 4_000, open_)
        assert peak(many) < 1.1 * peak(few) + 200_000


# The public files, where they lie beside this checkout


def test_the_azure_file_holds_what_is_said_of_it(root: Path) -> None:
    path = root.parent / "shared" / "data" / "AzureLLMInferenceTrace_code.csv"
    if not path.is_file():
        pytest.skip("the public traces are not beside this checkout")
    facts = trace_facts(open_trace(path, need_blocks=False))
    assert (facts.requests, facts.input_tokens, facts.output_tokens) == (8_819, 18_059_974, 245_896)
    assert facts.span_s == pytest.approx(3435.948056)
