"""Traces: what the files hold, what is refused and by which row."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostcache.errors import ConfigError
from hostcache.workload.sample_traces import synthetic_requests, write_trace
from hostcache.workload.trace_formats.files import lines, opened
from hostcache.workload.traces import (
    DELTA,
    MOONCAKE,
    TraceCount,
    TraceFacts,
    TraceFormat,
    TraceRefused,
    TraceRequest,
    open_trace,
    ranked,
    sessions_of,
    trace_facts,
)

Row = dict[str, Any]
Spoil = Callable[[Row], object]


def values(request: TraceRequest) -> tuple[object, ...]:
    return (request.number, request.session, request.arrival_s, request.think_s, request.api_s, request.input_tokens,
            request.output_tokens, request.blocks.tolist(), request.kept_blocks)


def rows_of(format: TraceFormat, folder: Path) -> list[Row]:
    """A sound file's rows, to be spoilt."""
    path = folder / "sound.jsonl"
    write_trace(path, synthetic_requests(3, sessions=3, turns=4, format=format), format=format)
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def written(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def counted(path: Path, together: int) -> TraceFacts:
    trace = open_trace(path)
    count = TraceCount(trace)
    for some in ranked(trace, trace=trace, together=together):
        count.add(some)
    return count.facts()


def refusal(path: Path) -> tuple[int, str]:
    """How many requests came before the refusal, and its words."""
    came: list[TraceRequest] = []
    with pytest.raises(TraceRefused) as caught:
        came.extend(open_trace(path))
    assert "\n" not in str(caught.value)
    return len(came), str(caught.value)


# Reading


@given(seed=st.integers(0, 2**32), first_id=st.sampled_from([0, 2**53, 2**63, 2**64 - 10_000]),
       format=st.sampled_from([DELTA, MOONCAKE]), suffix=st.sampled_from([".jsonl", ".jsonl.gz"]))
@settings(max_examples=40, deadline=None)
def test_what_is_written_is_read_back_with_every_id_whole(
    seed: int, first_id: int, format: TraceFormat, suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("trace") / f"sample{suffix}"
    requests = synthetic_requests(seed, sessions=4, turns=5, format=format, first_id=first_id)
    write_trace(path, requests, format=format)
    trace = open_trace(path)
    assert trace.format == format
    assert [values(request) for request in trace] == [values(request) for request in requests]
    assert [values(request) for request in trace] == [values(request) for request in requests], "a second pass differs"


def test_the_format_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    requests = synthetic_requests(1, sessions=2, turns=2)
    write_trace(tmp_path / "a.gz", requests, format=DELTA)
    (tmp_path / "a.gz").rename(tmp_path / "mooncake.txt")
    assert open_trace(tmp_path / "mooncake.txt").format == DELTA


def test_windows_line_ends_and_empty_last_lines_are_taken(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", rows_of(DELTA, tmp_path))
    count = sum(1 for _ in open_trace(path))
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n\n")
    assert sum(1 for _ in open_trace(path)) == count == 12
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert sum(1 for _ in open_trace(path)) == 12, "a byte order mark is passed over"


def test_blocks_of_a_request_cannot_be_altered_by_its_reader(tmp_path: Path) -> None:
    request = next(iter(open_trace(written(tmp_path / "a.jsonl", rows_of(DELTA, tmp_path)))))
    with pytest.raises(ValueError, match="read-only"):
        request.blocks[0] = 7


def test_the_pause_after_an_unmeasured_answer_is_the_distance_of_the_two_arrivals(tmp_path: Path) -> None:
    row = {"input_length": 64, "output_length": 1, "session_id": "a/b", "keep": 0, "runs": [[5, 1]]}
    rows = [row | {"timestamp": 1_000, "think_ms": 0, "api_ms": 500},
            row | {"timestamp": 2_600, "think_ms": 1_000, "api_ms": 0},
            row | {"timestamp": 9_600, "think_ms": 8_000, "api_ms": 700}]  # the file's figure runs on from row 1
    requests = list(open_trace(written(tmp_path / "a.jsonl", rows)))
    assert [request.think_s for request in requests] == [0.0, 1.0, 7.0]
    assert [request.api_s for request in requests] == [0.5, None, 0.7]
    assert requests[0].parent == "a"


def test_sessions_keep_their_requests_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_trace(path, synthetic_requests(5, sessions=6, turns=3), format=DELTA)
    sessions = sessions_of(open_trace(path))
    assert sorted(session.name for session in sessions) == [f"session_{i:03d}" for i in range(6)]
    assert sorted(request.number for session in sessions for request in session.requests) == list(range(1, 19))
    for session in sessions:
        assert [request.number for request in session.requests] == sorted(r.number for r in session.requests)
        assert session.requests[0].think_s == 0
        assert session.parent is None


def test_a_request_without_a_session_is_one_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_trace(path, synthetic_requests(5, sessions=2, turns=2, format=MOONCAKE), format=MOONCAKE)
    assert [session.name for session in sessions_of(open_trace(path))] == ["row 1", "row 2", "row 3", "row 4"]


@pytest.mark.parametrize("together", [1, 700, 2**16])
@pytest.mark.parametrize("format", [DELTA, MOONCAKE])
def test_facts_equal_a_plain_count_however_many_are_taken_together(
    format: TraceFormat, together: int, tmp_path: Path
) -> None:
    requests = synthetic_requests(9, sessions=20, turns=10, format=format)
    write_trace(tmp_path / "a.jsonl.gz", requests, format=format)
    facts = counted(tmp_path / "a.jsonl.gz", together)
    seen: set[int] = set()
    hits = references = hit_tokens = 0
    shares = []
    for request in requests:
        ids = request.blocks.tolist()
        references += len(ids)
        held = next((i for i, block in enumerate(ids) if block not in seen), len(ids))
        hits += held
        hit_tokens += sum(min(format.block_tokens, request.input_tokens - i * format.block_tokens) for i in range(held))
        shares.append(held / len(ids))
        seen.update(ids)
    assert (facts.requests, facts.sessions) == (200, 20 if format is DELTA else 200)
    assert (facts.references, facts.distinct) == (references, len(seen))
    assert facts.infinite_hit_rate == hits / references
    assert facts.infinite_hit_rate_tokens == hit_tokens / sum(request.input_tokens for request in requests)
    assert facts.infinite_hit_rate_requests == pytest.approx(sum(shares) / len(shares))
    assert facts.input_tokens == sum(request.input_tokens for request in requests)
    assert facts.output_tokens == sum(request.output_tokens for request in requests)
    assert facts.longest_input_tokens == max(request.input_tokens for request in requests)


def test_memory_does_not_grow_with_the_length_of_a_trace(tmp_path: Path) -> None:
    def peak(turns: int) -> int:
        path = tmp_path / f"{turns}.jsonl.gz"
        rows = (replace(request, blocks=np.arange(request.number * 40, request.number * 40 + 40, dtype=np.uint64))
                for request in 16 * turns * [TraceRequest(
                    number=1, session=None, arrival_s=0.0, think_s=0.0, api_s=None, input_tokens=40 * 512,
                    output_tokens=1, blocks=np.empty(0, dtype=np.uint64))])
        write_trace(path, rows, format=MOONCAKE)
        tracemalloc.start()
        try:
            assert sum(1 for _ in open_trace(path)) == 16 * turns
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(1)
    assert peak(200) < 2 * peak(10)


# Refusing


def put(field: str, value: object) -> Spoil:
    return lambda row: row.update({field: value})


EITHER: dict[str, Spoil] = {
    "negative input": put("input_length", -1),
    "no input": put("input_length", 0),
    "absurd input": put("input_length", 10**15),
    "negative output": put("output_length", -5),
    "a fraction": put("input_length", 640.0),
    "a truth value": put("output_length", True),
    "text": put("timestamp", "12"),
    "nothing": put("timestamp", None),
    "NaN": put("input_length", float("nan")),
    "infinity": put("timestamp", float("inf")),
    "back in time": put("timestamp", 0),
    "a field missing": lambda row: row.pop("output_length"),
    "a field too many": put("chat_id", 4),
}
OF_MOONCAKE: dict[str, Spoil] = {
    "too few blocks": lambda row: row["hash_ids"].pop(),
    "too many blocks": lambda row: row["hash_ids"].append(10**6),
    "negative id": lambda row: row["hash_ids"].__setitem__(0, -1),
    "id over 64 bits": lambda row: row["hash_ids"].__setitem__(0, 2**64),
    "fractional id": lambda row: row["hash_ids"].__setitem__(0, 1.5),
    "id twice": lambda row: row["hash_ids"].__setitem__(0, row["hash_ids"][1]),
    "ids are no list": put("hash_ids", 17),
}
OF_DELTA: dict[str, Spoil] = {
    "too many blocks": lambda row: row["runs"].append([10**6, 1]),
    "keeps more than there was": lambda row: row.update(keep=10**6, runs=[], input_length=64 * 10**6),
    "negative keep": put("keep", -1),
    "negative id": lambda row: row["runs"].__setitem__(-1, [-1, row["runs"][-1][1]]),
    "id over 64 bits": lambda row: row["runs"].__setitem__(-1, [2**64 - 1, row["runs"][-1][1]]),
    "empty run": lambda row: row["runs"].append([4, 0]),
    "run of three": lambda row: row["runs"].append([4, 0, 1]),
    "fractional run": lambda row: row["runs"].append([4.0, 1]),
    "runs are no list": put("runs", {"a": 1}),
    "endless run": lambda row: row["runs"].append([10**6, 2**62]),
    "negative pause": put("think_ms", -1),
    "negative answer time": put("api_ms", -1),
    "no session": put("session_id", ""),
    "session is a number": put("session_id", 4),
    "a new session that keeps": put("session_id", "other"),
}


@pytest.mark.parametrize(("format", "what"), [
    *((MOONCAKE, what) for what in EITHER | OF_MOONCAKE), *((DELTA, what) for what in EITHER | OF_DELTA),
])
def test_a_row_that_cannot_be_is_refused_by_number_and_nothing_follows(
    format: TraceFormat, what: str, tmp_path: Path
) -> None:
    rows = rows_of(format, tmp_path)
    at = next(i for i, row in enumerate(rows) if i > 1 and row.get("keep", 1) and row.get("runs", [[0, 2]])[-1][1] > 1)
    spoil = (EITHER | (OF_DELTA if format is DELTA else OF_MOONCAKE))[what]
    spoil(rows[at])
    came, words = refusal(written(tmp_path / "bad.jsonl", rows))
    assert came == at
    assert words.startswith(f"bad.jsonl row {at + 1}: ")
    assert len(words) < 250


def test_a_run_may_reach_the_last_64_bit_id_and_not_beyond(tmp_path: Path) -> None:
    row = rows_of(DELTA, tmp_path)[0] | {"input_length": 128, "runs": [[2**64 - 2, 2]]}
    (request,) = open_trace(written(tmp_path / "good.jsonl", [row]))
    assert request.blocks.tolist() == [2**64 - 2, 2**64 - 1]
    row["runs"] = [[2**64 - 1, 2]]
    assert refusal(written(tmp_path / "bad.jsonl", [row])) == (
        0, "bad.jsonl row 1: run [18446744073709551615, 2] has ids outside 0 … 2^64-1")


def test_a_first_request_with_a_pause_before_it_is_refused(tmp_path: Path) -> None:
    rows = rows_of(DELTA, tmp_path)
    rows[0]["think_ms"] = 5
    assert refusal(written(tmp_path / "bad.jsonl", rows)) == (
        0, "bad.jsonl row 1: think_ms is 5 in a session's first request; there is no answer before it")


@pytest.mark.parametrize(("line", "says"), [
    (b"\n", "empty"),
    (b"{\n", "not JSON"),
    (b"[1, 2]\n", "no JSON object"),
    (b"\xff\xfe\n", "not JSON"),
    (b"[" * 100_000 + b"\n", "not JSON"),
    (b'{"timestamp": ' + b"9" * 5000 + b"}\n", "not JSON"),
    (b'{"a": NaN}\n', "NaN is no number"),
    (b'{"timestamp": 9, "input_length": 1, "input_length": 2}\n', '"input_length" is there twice'),
    (b"\xef\xbb\xbf{}\n", "not JSON"),
])
def test_a_line_that_is_no_row_is_refused_by_number(line: bytes, says: str, tmp_path: Path) -> None:
    path = written(tmp_path / "bad.jsonl", rows_of(MOONCAKE, tmp_path))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], line, *lines[5:]]))
    came, words = refusal(path)
    assert came == 5
    assert words.startswith("bad.jsonl row 6: ")
    assert says in words


def test_a_line_without_end_is_refused_before_it_fills_memory(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"{}\n{}\n" + b" " * 5000)
    with opened(path) as file:
        rows = lines(path, file, max_bytes=1000)
        assert [number for number, _ in islice(rows, 2)] == [1, 2]
        with pytest.raises(TraceRefused, match=r"bad\.jsonl row 3: longer than 1000 bytes; a trace has one"):
            next(rows)


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
@pytest.mark.parametrize("spoil", ["cut", "flipped", "garbage behind"])
def test_a_broken_packed_file_is_refused_by_row(spoil: str, pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "a.packed"
    write_trace(path, synthetic_requests(1, sessions=500, turns=4), format=DELTA)
    data = bytearray(pack(path.read_bytes()))
    if spoil == "cut":
        del data[len(data) * 2 // 3 :]
        unpacked = (zlib.decompressobj(31) if pack is gzip.compress else lzma.LZMADecompressor()).decompress(data)
    elif spoil == "flipped":
        data[-6] ^= 1  # the checksum
    else:
        data += b"garbage"
    path.write_bytes(data)
    came, words = refusal(path)
    if spoil == "cut":
        assert came == unpacked.count(b"\n") > 0, "whole rows before the cut are read"
        assert words.startswith(f"a.packed row {came + 1}: ")
    assert 0 < came <= 2_000
    assert "breaks here" in words


@pytest.mark.parametrize(("content", "says"), [
    (b"", "holds no request"),
    (b"\n\n", "holds no request"),
    (gzip.compress(b""), "holds no request"),
    (lzma.compress(b""), "holds no request"),
    (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
    (b"TIMESTAMP,ContextTokens\n", "row 1: not JSON"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:3d\nsize 132054902\n", "Git LFS's pointer"),
    (b"\x1f\x8bgarbage", "row 1: the file ends or breaks here"),
    (b"\xfd7zXZ\x00garbage", "row 1: the file ends or breaks here"),
    (b'{"timestamp": 1, "text": "hello"}\n', "no known trace format has the fields timestamp, text"),
    (b'{"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.1, "input_length": 5, "output_length": 1, "type": "text", '
     b'"turn": 1}\n', "no known trace format"),
])
def test_what_is_no_known_trace_is_refused_in_one_line(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(TraceRefused, match=says) as caught:
        open_trace(tmp_path / "a")
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_refused_in_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, says in ((tmp_path / "none", "cannot be read: no file of that name"), (tmp_path, "no session files"),
                       (tmp_path / "pipe", "no regular file, and a trace is read more than once"),
                       (tmp_path / ("x" * 300), "cannot be read: File name too long")):
        with pytest.raises(TraceRefused, match=says) as caught:
            open_trace(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("together", [1, 2**16])
def test_an_id_that_changes_its_parent_is_refused_with_both_rows(together: int, tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
            for ids in ([1, 2, 3], [1, 2, 4], [9, 2**64 - 1], [8, 3], [8, 2**64 - 1])]
    with pytest.raises(TraceRefused) as caught:
        counted(written(tmp_path / "a.jsonl", rows[:4]), together)
    assert str(caught.value) == ("a.jsonl row 4: block 3 follows block 8 and in row 1 follows block 2; "
                                 "ids must be chained by prefix")
    with pytest.raises(TraceRefused, match="row 3: block 18446744073709551615 follows block 8 and in row 2 follows"):
        counted(written(tmp_path / "a.jsonl", [rows[0], rows[2], rows[4]]), together)
    rows[3]["hash_ids"] = [2, 8]
    with pytest.raises(TraceRefused, match="row 3: block 2 is the first block and in row 1 follows block 1;"):
        counted(written(tmp_path / "a.jsonl", [rows[0], rows[2], rows[3]]), together)


def test_of_two_rows_that_cannot_be_the_first_is_named(tmp_path: Path) -> None:
    """Rows are taken together, and an id that changes its parent is seen later than what one row tells."""
    rows = [{"timestamp": 0, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
            for ids in ([1, 2], [3, 2], [4])]
    path = written(tmp_path / "a.jsonl", rows)
    path.write_bytes(path.read_bytes() + b"{\n")
    with pytest.raises(TraceRefused, match="row 2: block 2 follows block 3"):
        trace_facts(open_trace(path))
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[::2]) + b"{\n")
    with pytest.raises(TraceRefused, match="row 3: not JSON"):
        trace_facts(open_trace(path))


# Samples


def test_the_same_seed_gives_the_same_bytes_in_any_process(tmp_path: Path) -> None:
    script = ("import hashlib, pathlib, sys\n"
              "from hostcache.workload.sample_traces import synthetic_requests, write_trace\n"
              "from hostcache.workload.traces import DELTA\n"
              "path = pathlib.Path(sys.argv[1]); write_trace(path, synthetic_requests(7, sessions=5, turns=5), "
              "format=DELTA)\n"
              "sys.stdout.write(hashlib.sha256(path.read_bytes()).hexdigest())\n")
    digests = {
        subprocess.run([sys.executable, "-c", script, str(tmp_path / f"{seed}.gz")], check=True, capture_output=True,
                       env=os.environ | {"PYTHONHASHSEED": str(seed)}, text=True).stdout
        for seed in (0, 1)
    }
    write_trace(tmp_path / "other.gz", synthetic_requests(8, sessions=5, turns=5), format=DELTA)
    write_trace(tmp_path / "same.gz", synthetic_requests(7, sessions=5, turns=5), format=DELTA)
    assert len(digests) == 1
    assert (tmp_path / "same.gz").read_bytes() == (tmp_path / "0.gz").read_bytes()
    assert (tmp_path / "other.gz").read_bytes() != (tmp_path / "0.gz").read_bytes()


def test_what_a_format_cannot_say_is_refused(tmp_path: Path) -> None:
    requests = synthetic_requests(1, sessions=1, turns=1, format=MOONCAKE)
    with pytest.raises(ConfigError, match="has no session"):
        write_trace(tmp_path / "a", requests, format=DELTA)
    with pytest.raises(ConfigError, match="has no arrival"):
        write_trace(tmp_path / "a", [replace(requests[0], arrival_s=None)], format=MOONCAKE)
    with pytest.raises(ConfigError, match="0 sessions"):
        synthetic_requests(1, sessions=0, turns=1)


# The public files, where they lie beside this checkout


@pytest.fixture(scope="module")
def data(root: Path) -> Path:
    folder = root.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the public traces are not beside this checkout")
    return folder


@pytest.mark.parametrize(("name", "requests", "references", "distinct", "rate"), [
    ("mooncake_conversation_trace.jsonl.gz", 12_031, 288_500, 182_790, 0.366412),
    ("mooncake_synthetic_trace.jsonl.gz", 3_993, 121_877, 43_924, 0.639604),
])
def test_the_mooncake_files_hold_what_is_said_of_them(
    data: Path, name: str, requests: int, references: int, distinct: int, rate: float
) -> None:
    trace = open_trace(data / name)
    facts = trace_facts(trace)
    assert trace.format == MOONCAKE
    assert (facts.requests, facts.sessions, facts.references, facts.distinct) == (requests, requests, references,
                                                                                 distinct)
    assert facts.infinite_hit_rate == pytest.approx(rate, abs=5e-7)


def test_the_agent_file_holds_what_its_docstring_says(data: Path) -> None:
    trace = open_trace(data / "agentic240.delta.jsonl.gz")
    facts = trace_facts(trace)
    assert trace.format == DELTA
    assert (facts.requests, facts.sessions, facts.references, facts.distinct) == (4_061, 242, 4_376_363, 427_617)
    assert facts.infinite_hit_rate == pytest.approx(0.902289, abs=5e-7)
    assert (facts.input_tokens, facts.output_tokens, facts.longest_input_tokens) == (280_214_905, 2_079_304, 451_691)
    sessions = sessions_of(trace)
    starts = [session.requests[0].arrival_s or 0.0 for session in sessions]
    assert (min(starts), max(starts)) == (29.144, 3585.746)
    assert [session.name for session in sessions if session.parent] == ["trace_0291/agent_001", "trace_0291/agent_002"]
    after_measured = after_unmeasured = anew = 0
    thought_s = 0.0
    for session in sessions:
        for before, request in zip(session.requests, session.requests[1:], strict=False):
            assert before.arrival_s is not None
            assert request.arrival_s is not None
            apart_s = request.arrival_s - before.arrival_s
            thought_s += request.think_s
            anew += request.kept_blocks == 0
            if before.api_s is None:
                after_unmeasured += 1
                assert request.think_s == pytest.approx(apart_s)
            else:
                after_measured += 1
                assert abs(apart_s - before.api_s - request.think_s) <= 1
    assert (after_measured, after_unmeasured, anew) == (3_305, 514, 8)
    assert sum(request.api_s is None for session in sessions for request in session.requests) == 528
    assert thought_s / 3600 == pytest.approx(211.9, abs=0.05)
