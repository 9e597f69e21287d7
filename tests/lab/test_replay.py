"""Replays against the mock server, through real worker processes; what cannot be is refused by name."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.lab.probing import ALPHABET, BLOCKS, QUICK, REQUESTS, write_trace

from hostcache.client.adapters import adapter_for
from hostcache.client.crew import WorkerLost
from hostcache.client.openai import OpenAIClient
from hostcache.clock import WallClock
from hostcache.errors import ConfigError
from hostcache.lab.gap import Modelled, gap
from hostcache.lab.measured import check_replay, counted, scrape_again
from hostcache.lab.prompts import Planned, Prompts
from hostcache.lab.replay import WORKER, Load, Replay, as_sent, due_times, planned, replay
from hostcache.lab.replay_worker import Manner
from hostcache.lab.replayed import ProbeVoid, Replayed
from hostcache.lab.stream import Stream, stream_of
from hostcache.testing.mock_server import Fault, MockConfig, MockServer
from hostcache.workload.bridge import Bridge
from hostcache.workload.traces import open_trace

ENGINE = Modelled(block_tokens=16, capacity_tokens=16 * BLOCKS, touch="tail-first", max_tokens=1)


def played(tmp_path: Path, load: Load, *, config: MockConfig = QUICK, send: str = "ids", max_tokens: int = 1,
           worker: tuple[str, ...] = WORKER) -> tuple[Replay, Stream]:
    trace = open_trace(write_trace(tmp_path / "trace.jsonl"))
    stream = stream_of(trace, block_tokens=16)
    prompts = Prompts(bridge=Bridge(alphabet=ALPHABET, block_tokens=16, seed=b"a test"))
    due_s = None if load.rate_factor is None else due_times(list(trace), load.rate_factor)
    requests = planned(stream, due_s=due_s)

    async def run() -> Replay:
        clock = WallClock()
        async with MockServer(config) as server, OpenAIClient(server.url, clock=clock) as client:
            adapter = await adapter_for(client)
            return await replay(requests, prompts, Manner(url=server.url, api_key=None, model="mock", send=send,
                                                          max_tokens=max_tokens, ignore_eos=True), load,
                                scrape=adapter.scrape, clock=clock, log_dir=tmp_path, worker=worker, timeline_s=0.02)

    return asyncio.run(run()), stream


@pytest.mark.parametrize(("style", "send", "processes"), [("hostcache", "ids", 1), ("vllm", "text", 2)])
def test_a_closed_replay_gives_what_lru_says_request_by_request(tmp_path: Path, style: Any, send: str,
                                                                processes: int) -> None:
    outcome, stream = played(tmp_path, Load(processes=processes), config=replace(QUICK, style=style), send=send)
    totals = check_replay(outcome)
    found = gap(stream, ENGINE, outcome.requests, preemptions=totals.preemptions)
    assert [each.index for each in outcome.requests] == list(range(REQUESTS))
    assert outcome.drained_cleanly
    assert outcome.offered_window_s is None
    assert 0 < found.model == found.engine == totals.cached_tokens < found.possible
    assert (found.unexplained, found.equal, found.odd) == (0, REQUESTS, ())
    assert [each.prompt_tokens for each in outcome.requests] == stream.input_tokens.tolist()
    assert not list(tmp_path.glob("replay-*.log")), "workers that had nothing to say leave no log"


def test_many_at_once_in_an_open_replay_keep_their_due_times_and_come_back_whole(tmp_path: Path) -> None:
    outcome, stream = played(tmp_path, Load(at_once=None, rate_factor=2.0, processes=2), max_tokens=3)
    totals = check_replay(outcome)
    assert outcome.drained_cleanly
    assert outcome.offered_window_s == pytest.approx((REQUESTS - 1) * 0.020 / 2)
    assert [each.due_s for each in outcome.requests] == pytest.approx([n * 0.010 for n in range(REQUESTS)])
    assert all(each.sent_s >= each.due_s and each.completion_tokens == 3 for each in outcome.requests)
    assert 0 <= outcome.lateness_p50_s <= outcome.lateness_p99_s
    assert totals.prompt_tokens == int(stream.input_tokens.sum())
    told = [counters["prompt_tokens"] for _, counters in outcome.timeline]
    assert told == sorted(told)
    assert told, "the last one is sent long after the first scrape in between is due"


def test_an_open_replay_that_does_not_drain_says_so_and_loses_no_record(tmp_path: Path) -> None:
    config = replace(QUICK, faults=(Fault(kind="stall", every=5),))
    outcome, _ = played(tmp_path, Load(at_once=None, rate_factor=20.0, drain_s=0.5), config=config, max_tokens=4)
    assert not outcome.drained_cleanly
    stalled = [each for each in outcome.requests if each.outcome == "aborted"]
    assert len(outcome.requests) == REQUESTS
    assert stalled
    assert all(each.cached_tokens is None and "the replay ended" in str(each.reason) for each in stalled)


_DIES = "import sys; sys.stdin.readline(); print('{\"ready\": true}', flush=True); sys.stdin.readline(); sys.exit(3)"
_FORGETS = """
import json, sys
sys.stdin.readline()
print('{"ready": true}', flush=True)
for line in sys.stdin:
    for index in json.loads(line)["send"]:
        print(json.dumps({"record": {"index": index, "due_s": 0.0, "sent_s": 0.0, "first_token_s": 0.1, "ended_s": 0.1,
              "prompt_tokens": 16, "completion_tokens": 1, "device_tokens": 0, "host_tokens": 0, "retries": 0,
              "outcome": "ok", "reason": None, "prompt_sha256": ""}}), flush=True)
"""


def test_a_worker_that_dies_voids_the_run(tmp_path: Path) -> None:
    with pytest.raises(WorkerLost, match=r"worker 0 \(process \d+\) ended with 3 before its work was done"):
        played(tmp_path, Load(), worker=(sys.executable, "-c", _DIES))


def test_a_record_that_lost_a_field_on_its_way_voids_the_run(tmp_path: Path) -> None:
    with pytest.raises(ProbeVoid, match="record_field_lost: request 0: cached_tokens was lost on its way"):
        played(tmp_path, Load(), worker=(sys.executable, "-c", _FORGETS))


def test_every_field_of_a_record_crosses_the_pipe() -> None:
    record = Replayed(index=3, due_s=1.0, sent_s=1.5, first_token_s=None, ended_s=2.0, prompt_tokens=16,
                      completion_tokens=None, cached_tokens=0, device_tokens=None, host_tokens=None, retries=1,
                      outcome="error", reason="reset: x", prompt_sha256="ab")
    assert Replayed.from_json(record.as_json()) == record
    with pytest.raises(ProbeVoid, match="extra is no field"):
        Replayed.from_json({**record.as_json(), "extra": 1})


def test_raw_lines_are_read_by_exact_name_and_a_time_of_creation_is_no_count() -> None:
    """The lines that the earlier probe's second attempt recorded: the `_created` one stands last."""
    lines = ['vllm:prompt_tokens_total{engine="0"} 8.0', 'vllm:prefix_cache_queries_total{engine="0"} 8.0',
             'vllm:prefix_cache_hits_total{engine="0"} 0.0', 'vllm:prefix_cache_hits_created{engine="0"} 1.788e+09']
    scrape = scrape_again("vllm", lines)
    assert scrape.counters["device_tokens"] == 0
    later = [lines[0].replace("8.0", "72.0"), lines[1].replace("8.0", "72.0"), lines[2].replace("0.0", "16.0"),
             lines[3]]
    totals = counted("vllm", lines, later)
    assert (totals.prompt_tokens, totals.device_tokens, totals.queries) == (64, 16, 64)
    with pytest.raises(ProbeVoid, match="counters_missing: the closing scrape of vllm has no device_tokens"):
        counted("vllm", lines, [lines[0], lines[1], lines[3]])
    with pytest.raises(ProbeVoid, match="counter_reset"):
        counted("vllm", later, lines)


def test_a_server_that_began_anew_is_seen_by_its_uptime_where_every_counter_went_up() -> None:
    def lines(up_s: float, tokens: int) -> list[str]:
        accounting = {"prompt_tokens": tokens, "device_tokens": 0, "host_tokens": 0, "recomputed_tokens": tokens}
        return [f"accounting {json.dumps(accounting)}", f"engine {json.dumps({'uptime_s': up_s, 'preemptions': 0})}"]

    assert counted("hostcache", lines(10, 64), lines(70, 128)).prompt_tokens == 64
    with pytest.raises(ProbeVoid, match="counter_reset"):
        counted("hostcache", lines(10, 64), lines(5, 128))


def test_a_trace_without_times_is_not_replayed_open_and_a_load_is_one_of_two(tmp_path: Path) -> None:
    stream = stream_of(open_trace(write_trace(tmp_path / "t.jsonl")), limit=1)
    assert planned(stream)[0].due_s is None
    assert planned(stream, requests=1, due_s=[0.5])[0] == Planned(
        index=0, names=tuple(stream.names.tolist()), tokens=int(stream.input_tokens[0]), due_s=0.5)
    with pytest.raises(ConfigError, match="one of the two"):
        Load(at_once=1, rate_factor=1.0)
    with pytest.raises(ConfigError, match="rate_factor is -1"):
        Load(at_once=None, rate_factor=-1.0)


def test_what_no_block_names_is_not_sent(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1124, "output_length": 1, "hash_ids": [7, 8]}\n'
                    '{"timestamp": 1, "input_length": 30, "output_length": 1, "hash_ids": []}\n')
    trace = open_trace(path, blocks=(512, "floor"))
    (request,) = planned(as_sent(stream_of(trace, limit=1)))
    assert (request.tokens, request.names) == (1024, (7, 8))
    with pytest.raises(ConfigError, match="request 2 names no block"):
        as_sent(stream_of(trace))
