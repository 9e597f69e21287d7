"""Many rows at once are what the reader of single rows makes of them, or are left to it."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from collections import deque
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hostcache.errors import ConfigError
from hostcache.lab.stream import digest_of, stream_of
from hostcache.workload.trace_formats import mooncake
from hostcache.workload.trace_formats.mooncake import MOONCAKE
from hostcache.workload.traces import Trace, TraceRefused, ranked

CONVERSATION = Path(__file__).resolve().parents[3] / "shared/data/mooncake_conversation_trace.jsonl.gz"


def row(time_ms: int = 0, input_tokens: int = 600, output_tokens: int = 1, ids: tuple[int, ...] = (0, 1), *,
        tight: bool = False) -> bytes:
    line = json.dumps({"timestamp": time_ms, "input_length": input_tokens, "output_length": output_tokens,
                       "hash_ids": ids}, separators=(",", ":") if tight else None)
    return line.encode() + b"\n"


def both_ways(text: bytes, limit: int | None = None) -> bool:
    """Whether they were read at once; asserts that nothing but the time tells."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_bytes(text)
        trace = Trace(path=path, format=MOONCAKE)
        columns = mooncake.columns(path, MOONCAKE, limit)
        try:
            requests = list(islice(trace, limit))
        except TraceRefused:
            assert columns is None
            return False
        if columns is None:
            return False
        assert (columns.arrival_s * 1000).round().tolist() == [round((each.arrival_s or 0) * 1000) for each in requests]
        assert columns.input_tokens.tolist() == [each.input_tokens for each in requests]
        assert columns.output_tokens.tolist() == [each.output_tokens for each in requests]
        assert [each.tolist() for each in np.split(columns.blocks, columns.starts[1:-1])] == [
            each.blocks.tolist() for each in requests]
        try:
            assert stream_of(trace, limit=len(requests)).digest == digest_of(requests, block_tokens=512)
        except TraceRefused as torn:
            with pytest.raises(TraceRefused, match=f"^{re.escape(str(torn))}$"):
                deque(ranked(requests, trace=trace), maxlen=0)
        return True


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """Rows that can be, of which one may have become another thing."""
    rows = []
    time_ms = 0
    for _ in range(draw(st.integers(1, 5))):
        time_ms += draw(st.integers(0, 3))
        ids = draw(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 9), min_size=1, max_size=5, unique=True))
        rows.append(row(time_ms, 512 * len(ids) - draw(st.integers(0, 511)), draw(st.integers(0, 9)), tuple(ids),
                        tight=draw(st.booleans())))
    text = b"".join(rows)
    if draw(st.booleans()):
        at = draw(st.integers(0, len(text) - 1))
        text = text[:at] + draw(st.sampled_from([b"", b"0", b"7", b",", b" ", b"\n", b"-", b".", b'"', b"]"])) + text[
            at + draw(st.integers(0, 1)):]
    return text


@settings(max_examples=100, deadline=None)
@given(texts(), st.none() | st.integers(1, 5))
@example(row() * 3, None)
@example(row() + row()[:-1], None)
@example(row()[:-1], 1)
def test_at_once_or_row_by_row_they_are_the_same_requests(text: bytes, limit: int | None) -> None:
    both_ways(text, limit)


@pytest.mark.parametrize("text", [
    row(), row(tight=True), row() + row()[:-1], row(ids=(10**19 - 1, 5)), row(5) + row(5, ids=(3, 2)), row() * 2000,
])
def test_rows_as_mooncakes_files_have_them_are_read_at_once(text: bytes) -> None:
    assert both_ways(text)


@pytest.mark.parametrize("text", [
    row(ids=(2**64 - 1, 0)), row().replace(b"\n", b"\r\n"), row() + b"\n", row().replace(b"600", b" 600"),
])
def test_rows_written_in_another_way_are_left_to_the_reader_of_rows(text: bytes) -> None:
    assert not both_ways(text)


@pytest.mark.parametrize("text", [
    b"\n" + row(), row(2**53 + 1), row(2) + row(1), row(input_tokens=0, ids=()), row(input_tokens=2**27 + 1),
    row(output_tokens=2**27 + 1), row(ids=(1,)), row(ids=(1, 1)), row() + row(input_tokens=1500, ids=(4, 9, 4)),
    row(ids=(2**64, 1)), row().replace(b"600", b"0600"), row().replace(b"600", b"600.0"), row().replace(b"[0", b"[-0"),
    row().replace(b"time", b"7ime").replace(b"600", b""),
])
def test_rows_that_cannot_be_are_left_to_be_refused_by_number(text: bytes) -> None:
    assert not both_ways(text)
    assert not both_ways(row() + text)


def test_a_file_that_ends_too_soon_is_left_to_be_refused_behind_what_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    ids = np.random.default_rng(0).permutation(10**6)
    whole = b"".join(row(at, 512 * 40, ids=tuple(ids[40 * at : 40 * at + 40].tolist())) for at in range(400))
    path.write_bytes(gzip.compress(whole)[:-2000])
    assert mooncake.columns(path, MOONCAKE) is None
    with pytest.raises(TraceRefused, match="row 3"):
        stream_of(Trace(path=path, format=MOONCAKE))
    assert stream_of(Trace(path=path, format=MOONCAKE), limit=100).requests == 100


@pytest.mark.parametrize("end", [b"", b"\n"], ids=["at once", "row by row"])
def test_an_id_that_changes_its_parent_is_refused_by_row_however_it_is_read(end: bytes, tmp_path: Path) -> None:
    path = tmp_path / "torn.jsonl"
    path.write_bytes(row(ids=(1, 2)) + row(ids=(1, 3)) + row(ids=(4, 3)) + end)
    trace = Trace(path=path, format=MOONCAKE)
    assert (mooncake.columns(path, MOONCAKE) is None) == bool(end)
    with pytest.raises(TraceRefused, match=r"torn.jsonl row 3: block 3 follows block 4 and in row 2 follows block 1"):
        stream_of(trace)
    assert stream_of(trace, limit=2).distinct == 3
    path.write_bytes(row(input_tokens=5, ids=(1,)) + row(ids=(2, 1)) + end)
    with pytest.raises(TraceRefused, match=r"torn.jsonl row 2: block 1 follows block 2 and in row 1 is the first"):
        stream_of(trace)


@pytest.mark.parametrize("end", [b"", b"\n"], ids=["at once", "row by row"])
def test_more_requests_than_any_trace_has_are_refused_in_one_line(end: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(row() + end)
    with pytest.raises(ConfigError, match="has 1 requests, 100000000000000000000 were asked for"):
        stream_of(Trace(path=tmp_path / "a.jsonl", format=MOONCAKE), limit=10**20)


@pytest.mark.skipif(not CONVERSATION.exists(), reason="the public traces are not beside the checkout")
def test_the_conversation_trace_is_read_at_once() -> None:
    trace = Trace(path=CONVERSATION, format=MOONCAKE)
    assert mooncake.columns(CONVERSATION, MOONCAKE) is not None
    assert stream_of(trace, limit=600).digest == digest_of(islice(trace, 600), block_tokens=512)
