"""`hostcache lab trace`: what it prints, what it writes, and that a failure leaves nothing behind."""

from __future__ import annotations

import argparse
import gzip
import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostcache.errors import ConfigError
from hostcache.lab.oracle import maximum
from hostcache.lab.stream import digest_of, stream_of
from hostcache.lab.trace_commands import add_trace_arguments, run_trace
from hostcache.workload.sample_traces import synthetic_requests, write_trace
from hostcache.workload.traces import DELTA, MOONCAKE, TraceFormat, TraceRefused, TraceRequest, open_trace, sessions_of

Row = dict[str, Any]


def ran(*argv: object, code: int = 0) -> str:
    parser = argparse.ArgumentParser()
    add_trace_arguments(parser)
    out = io.StringIO()
    assert run_trace(parser.parse_args([str(each) for each in argv]), out=out, err=io.StringIO()) == code
    return out.getvalue()


def document(*argv: object, code: int = 0) -> Row:
    found: Row = json.loads(ran(*argv, "--json", code=code))
    return found


def sample(folder: Path, format: TraceFormat, name: str = "sample.jsonl", seed: int = 5) -> Path:
    write_trace(folder / name, synthetic_requests(seed, sessions=6, turns=5, format=format), format=format)
    return folder / name


def session_files(folder: Path) -> Path:
    folder.mkdir()
    for name in "abc":
        requests = [{"t": t, "type": "n", "in": 64 * count, "out": 1, "hash_ids": list(range(1, count + 1)),
                     "think_time": 1.0, "api_time": 0.5} for t, count in ((0.0, 2), (3.0, 3), (7.25, 5))]
        (folder / f"{name}.json").write_text(json.dumps({"id": name, "block_size": 64, "hash_id_scope": "local",
                                                         "requests": requests}))
    return folder


def chats(path: Path) -> Path:
    rows = [{"chat_id": i, "parent_chat_id": i - 2 if i > 2 else -1, "timestamp": i * 1.25, "input_length": 16 * i,
             "output_length": 2, "type": "text", "turn": 1, "hash_ids": [7, *range(i, 2 * i - 1)]} for i in range(1, 9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


AZURE = ("TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10\r\n"
         "2023-11-16 18:17:04.0319600,3180,8\r\n2023-11-16 18:17:05,7,0")


def azure(path: Path) -> Path:
    path.write_bytes(AZURE.encode())
    return path


def left_in(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


# info


@pytest.mark.parametrize("format", [DELTA, MOONCAKE])
def test_info_says_what_the_oracle_would_say(format: TraceFormat, tmp_path: Path) -> None:
    path = sample(tmp_path, format)
    told, stream = document("info", path), stream_of(open_trace(path))
    rates = maximum(stream)
    assert (told["requests"], told["references"], told["distinct"]) == (30, stream.references, stream.distinct)
    assert told["infinite_hit_rate"] == pytest.approx(
        {"blocks": rates.blocks, "tokens": rates.tokens, "requests": rates.requests})
    assert told["digest"] == stream.digest
    assert (told["format"], told["block_tokens"], told["rounding"]) == (format.name, format.block_tokens,
                                                                        format.rounding)
    assert told["sessions"] == (6 if format is DELTA else 30)


def test_info_reads_as_a_table_and_leaves_out_what_is_not_there(tmp_path: Path) -> None:
    text = ran("info", azure(tmp_path / "code.csv"))
    assert "requests              3\n" in text
    assert "infinite" not in text
    assert "as a mean of requests" in ran("info", sample(tmp_path, DELTA))


def test_sessions_spread_by_a_seed_have_another_digest_and_say_which(tmp_path: Path) -> None:
    path = session_files(tmp_path / "traces")
    together, spread = document("info", path), document("info", path, "--spread-s", 60, "--seed", 4)
    assert (spread["spread_s"], spread["seed"]) == (60.0, 4)
    assert together["digest"] != spread["digest"] == document("info", path, "--spread-s", 60, "--seed", 4)["digest"]


# convert


@given(seed=st.integers(0, 2**32), format=st.sampled_from([DELTA, MOONCAKE]), to=st.sampled_from(["delta", "mooncake"]),
       suffix=st.sampled_from(["", ".gz", ".xz"]))
@settings(max_examples=25)
def test_a_conversion_keeps_the_digest_whatever_the_form_and_the_packing(
    seed: int, format: TraceFormat, to: str, suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("traces")
    path, out = sample(folder, format, seed=seed), folder / f"out.jsonl{suffix}"
    told = document("convert", path, "--to", to, "--out", out)
    assert told["same_digest"]
    assert told["digest"] == told["digest_before"] == stream_of(open_trace(path)).digest
    assert told["read_blocks"] == (None if to == format.name else f"{format.block_tokens}:{format.rounding}")
    again = open_trace(out, blocks=(format.block_tokens, format.rounding))
    assert [request.blocks.tolist() for request in again] == [request.blocks.tolist() for request in open_trace(path)]
    assert left_in(folder) == {path.name, out.name}


def test_a_conversion_says_what_it_loses_and_how_to_read_it(tmp_path: Path) -> None:
    path = sample(tmp_path, DELTA)
    told = document("convert", path, "--to", "mooncake", "--out", tmp_path / "m.jsonl")
    assert told["lost"] == ["sessions", "pauses", "answer times"]
    assert told["read_blocks"] == "64:floor"
    assert document("info", tmp_path / "m.jsonl", "--read-blocks", "64:floor")["digest"] == told["digest"]
    text = ran("convert", path, "--to", "mooncake", "--out", tmp_path / "n.jsonl")
    assert "read it with --read-blocks 64:floor" in text
    assert "lost                  sessions, pauses, answer times\n" in text
    assert "lost                  nothing\n" in ran("convert", path, "--to", "delta", "--out", tmp_path / "d.jsonl")


def test_session_files_become_one_delta_trace_that_holds_the_same(tmp_path: Path) -> None:
    path = session_files(tmp_path / "traces")
    out = tmp_path / "all.jsonl.xz"
    told = document("convert", path, "--spread-s", 100, "--seed", 2, "--to", "delta", "--out", out)
    assert told["same_digest"]
    assert told["lost"] == ["fields of kv-cache-tester that are not read"]
    one, other = (sessions_of(open_trace(each, spread_s=100, seed=2)) for each in (path, out))
    assert [kept(session.requests) for session in one] == [kept(session.requests) for session in other]


def kept(requests: tuple[TraceRequest, ...]) -> list[tuple[object, ...]]:
    return [(each.session, each.think_s, each.api_s, each.kept_blocks, each.blocks.tolist()) for each in requests]


def test_a_fork_of_a_chat_keeps_its_blocks_in_the_delta_form_and_says_that_its_pause_is_lost(tmp_path: Path) -> None:
    def written(name: str, parents: list[int]) -> Path:
        rows = [{"chat_id": i, "parent_chat_id": parent, "timestamp": i * 1.25, "input_length": 16 * i,
                 "output_length": 1, "type": "text", "turn": 1, "hash_ids": list(range(i))}
                for i, parent in enumerate(parents, start=1)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / name

    chain, fork = written("chain.jsonl", [-1, 1, 2]), written("fork.jsonl", [-1, 1, 1])
    for path, lost in ((chain, ["fields of bailian that are not read"]),
                       (fork, ["pauses after a fork of a chat", "fields of bailian that are not read"])):
        out = tmp_path / f"{path.stem}.delta.jsonl"
        told = json.loads(ran("convert", path, "--to", "delta", "--out", out, "--json"))
        assert (told["lost"], told["same_digest"]) == (lost, True)


def test_chats_keep_their_digest_where_their_times_are_whole_milliseconds(tmp_path: Path) -> None:
    path = chats(tmp_path / "chats.jsonl")
    told = document("convert", path, "--to", "delta", "--out", tmp_path / "a.jsonl")
    assert told["same_digest"]
    assert told["read_blocks"] == "16:ceil"
    path.write_text(path.read_text().replace("1.25,", "1.2501,", 1))
    told = document("convert", path, "--to", "delta", "--out", tmp_path / "b.jsonl")
    assert not told["same_digest"]
    assert told["lost"][0] == "times below a millisecond"


def test_arrivals_alone_become_no_form_that_needs_blocks(tmp_path: Path) -> None:
    with pytest.raises(TraceRefused, match="names no blocks"):
        ran("convert", azure(tmp_path / "code.csv"), "--to", "mooncake", "--out", tmp_path / "m.jsonl")
    assert left_in(tmp_path) == {"code.csv"}


# slice


def test_the_first_requests_are_the_file_s_own_lines(tmp_path: Path) -> None:
    path = sample(tmp_path, MOONCAKE)
    told = document("slice", path, "--requests", 7, "--out", tmp_path / "seven.jsonl")
    assert told["requests"] == 7
    assert (tmp_path / "seven.jsonl").read_bytes() == b"".join(path.read_bytes().splitlines(keepends=True)[:7])
    assert told["digest"] == stream_of(open_trace(path), limit=7).digest


@given(seed=st.integers(0, 2**32), from_s=st.integers(0, 200), length_s=st.integers(1, 400),
       format=st.sampled_from([DELTA, MOONCAKE]), sessions=st.sampled_from([None, 1, 3]),
       requests=st.sampled_from([None, 1, 4]))
@settings(max_examples=25)
def test_a_slice_holds_what_was_asked_for_and_reads_as_the_same_form(
    seed: int, from_s: int, length_s: int, format: TraceFormat, sessions: int | None, requests: int | None,
    tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("traces")
    path, out = sample(folder, format, seed=seed), folder / "cut.jsonl.gz"
    wanted: list[TraceRequest] = []
    names: list[object] = []
    for request in open_trace(path):
        name = request.session or request.number
        if from_s <= (request.arrival_s or 0) < from_s + length_s and len(wanted) != requests and (
                name in names or len(names) != sessions):
            wanted.append(request)
            names.append(name) if name not in names else None
    argv = ["slice", path, "--seconds", f"{from_s}:{from_s + length_s}", "--out", out]
    argv += [] if sessions is None else ["--sessions", sessions]
    argv += [] if requests is None else ["--requests", requests]
    if not wanted:
        with pytest.raises(ConfigError, match="no request is within what was asked for"):
            ran(*argv)
        assert left_in(folder) == {path.name}
        return
    told = document(*argv)
    trace = open_trace(out)
    assert trace.format == format
    assert told["digest"] == digest_of(wanted, block_tokens=format.block_tokens) == digest_of(
        trace, block_tokens=format.block_tokens)
    assert [(each.session, each.arrival_s, each.api_s) for each in trace] == [
        (each.session, each.arrival_s, each.api_s) for each in wanted]


def test_the_first_sessions_of_chats_and_of_files_come_with_all_of_theirs(tmp_path: Path) -> None:
    told = document("slice", chats(tmp_path / "chats.jsonl"), "--sessions", 1, "--out", tmp_path / "one.jsonl")
    assert (told["requests"], {each.session for each in open_trace(tmp_path / "one.jsonl")}) == (4, {"chat 1"})
    told = document("slice", session_files(tmp_path / "traces"), "--sessions", 2, "--out", tmp_path / "two")
    assert told["requests"] == 6
    assert left_in(tmp_path / "two") == {"a.json", "b.json"}
    with pytest.raises(ConfigError, match="give --sessions N alone, or convert it first"):
        ran("slice", tmp_path / "traces", "--requests", 2, "--out", tmp_path / "three")


def test_a_slice_of_arrivals_keeps_its_heading(tmp_path: Path) -> None:
    ran("slice", azure(tmp_path / "code.csv"), "--seconds", "0.01:", "--out", tmp_path / "later.csv")
    trace = open_trace(tmp_path / "later.csv", need_blocks=False)
    assert [each.input_tokens for each in trace] == [3180, 7]


# validate, and what is refused


def test_a_sound_trace_is_valid_and_a_spoilt_one_is_named_by_its_row(tmp_path: Path) -> None:
    path = sample(tmp_path, DELTA)
    assert document("validate", path)["valid"] is True
    assert "valid                 yes\n" in ran("validate", path)
    lines = path.read_text().splitlines()
    (tmp_path / "bad.jsonl").write_text("\n".join([*lines[:8], lines[8].replace('"keep":', '"keep":9999'), *lines[9:]]))
    told = document("validate", tmp_path / "bad.jsonl", code=2)
    assert (told["valid"], told["row"]) == (False, 9)
    assert told["why"].startswith("bad.jsonl row 9: keep is 9999")
    with pytest.raises(TraceRefused, match=r"bad\.jsonl row 9: keep is 9999") as caught:
        ran("validate", tmp_path / "bad.jsonl")
    assert caught.value.exit_code == 2


def test_an_id_behind_another_parent_is_found_by_validation(tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": ids} for ids in ([1, 2], [3, 2])]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert document("validate", path, code=2)["row"] == 2
    for argv in (["info", path], ["slice", path, "--requests", 2, "--out", tmp_path / "out"],
                 ["convert", path, "--to", "delta", "--out", tmp_path / "out"]):
        with pytest.raises(TraceRefused, match=r"a\.jsonl row 2: block 2 follows block 3 and in row 1 follows block 1"):
            ran(*argv)
    assert left_in(tmp_path) == {"a.jsonl"}
    assert document("slice", path, "--requests", 1, "--out", tmp_path / "one.jsonl")["requests"] == 1


def test_what_a_slice_of_sessions_cannot_be_is_told_under_its_own_name(tmp_path: Path) -> None:
    path = session_files(tmp_path / "traces")
    text = (path / "b.json").read_text()
    (path / "b.json").write_text(text.replace("[1, 2, 3]", "[3, 2, 1]"))
    with pytest.raises(TraceRefused, match=r'^two row \d+: block \d+ of session "b" ') as caught:
        ran("slice", path, "--sessions", 2, "--out", tmp_path / "two")
    assert "part" not in str(caught.value)
    assert left_in(tmp_path) == {"traces"}


def test_session_files_of_one_name_are_not_written_over_each_other(tmp_path: Path) -> None:
    path = session_files(tmp_path / "traces")
    (path / "a.json.gz").write_bytes(gzip.compress((path / "c.json").read_bytes()))
    (path / "c.json").unlink()
    assert document("info", path)["sessions"] == 3
    with pytest.raises(ConfigError, match=r"traces has 2 session files named a\.json, and one folder has room for one"):
        ran("slice", path, "--sessions", 3, "--out", tmp_path / "three")
    assert left_in(tmp_path) == {"traces"}


@pytest.mark.parametrize(("argv", "says"), [
    (["slice"], "nothing says what to take"),
    (["slice", "--requests", 0], "--requests is 0; give 1 or more"),
    (["slice", "--sessions", -1], "--sessions is -1"),
    (["slice", "--seconds", "5"], "--seconds is 5; give A:B"),
    (["slice", "--seconds", "9:5"], "--seconds is 9:5; give A:B with A before B"),
    (["slice", "--seconds", "a:b"], "--seconds is a:b"),
    (["slice", "--requests", 3, "--read-blocks", "64"], "--read-blocks is 64; give tokens a block and ceil or floor"),
    (["slice", "--requests", 3, "--read-blocks", "0:ceil"], "--read-blocks is 0:ceil"),
    (["slice", "--requests", 3, "--read-blocks", "64:round"], "--read-blocks is 64:round"),
])
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    argv: list[object], says: str, tmp_path: Path
) -> None:
    path = sample(tmp_path, MOONCAKE)
    with pytest.raises(ConfigError, match=says) as caught:
        ran(argv[0], path, *argv[1:], "--out", tmp_path / "cut.jsonl")
    assert "\n" not in str(caught.value)
    assert left_in(tmp_path) == {path.name}


def test_nothing_is_overwritten_and_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    path = sample(tmp_path, DELTA)
    (tmp_path / "mine").write_text("precious")
    for argv in (["slice", path, "--requests", 3], ["convert", path, "--to", "mooncake"]):
        with pytest.raises(ConfigError, match="mine exists; nothing is ever overwritten"):
            ran(*argv, "--out", tmp_path / "mine")
        with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
            ran(*argv, "--out", tmp_path / "no" / "where")
        for length in (245, 300):  # of the name, and of the name while it is written
            with pytest.raises(ConfigError, match="cannot be written: File name too long"):
                ran(*argv, "--out", tmp_path / ("x" * length))
    assert (tmp_path / "mine").read_text() == "precious"
    lines = path.read_text().splitlines()
    (tmp_path / "bad.jsonl").write_text("\n".join([*lines[:8], "{", *lines[9:]]))
    for what, *more in (["slice", "--sessions", "6"], ["convert", "--to", "delta"]):
        with pytest.raises(TraceRefused, match=r"bad\.jsonl row 9: not JSON"):
            ran(what, tmp_path / "bad.jsonl", *more, "--out", tmp_path / "half.jsonl")
    assert left_in(tmp_path) == {path.name, "mine", "bad.jsonl"}


def test_long_traces_say_how_far_they_are(tmp_path: Path) -> None:
    path = sample(tmp_path, DELTA)
    references = [len(request.blocks) for request in open_trace(path)]
    parser = argparse.ArgumentParser()
    add_trace_arguments(parser)
    err = io.StringIO()
    args = parser.parse_args(["slice", str(path), "--requests", "99", "--out", str(tmp_path / "same.jsonl")])
    assert run_trace(args, out=io.StringIO(), err=err, every=sum(references)) == 0
    assert err.getvalue() == (f"  30 requests, {sum(references):,} blocks\n"
                              f"  reading back: 30 requests, {sum(references):,} blocks\n")


def test_the_public_trace_s_slice_is_the_one_of_the_probe(root: Path, tmp_path: Path) -> None:
    path = root.parent / "shared" / "data" / "mooncake_conversation_trace.jsonl.gz"
    if not path.is_file():
        pytest.skip("the public traces are not beside this checkout")
    told = document("slice", path, "--requests", 600, "--out", tmp_path / "first.jsonl.xz")
    stream = stream_of(open_trace(tmp_path / "first.jsonl.xz"))
    assert (stream.references, stream.distinct, stream.digest) == (16_495, 13_712, told["digest"])


def test_times_of_a_slice_go_up(tmp_path: Path) -> None:
    ran("slice", sample(tmp_path, DELTA), "--seconds", ":90", "--out", tmp_path / "cut.jsonl")
    arrivals = [request.arrival_s or 0.0 for request in open_trace(tmp_path / "cut.jsonl")]
    assert arrivals
    assert all(one <= other < 90 for one, other in pairwise(arrivals))
