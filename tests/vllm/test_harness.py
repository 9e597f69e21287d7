"""`hostcache bench agents` and `equivalence` as shipped, against real vLLM servers: with the tier, as it is, and with
its prefix cache off. Red: the harness misreads an engine that it did not grow up with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.server import BLOCK, SMALL, Server, serving

from hostcache.bench.harness.cellfile import whole_records
from hostcache.bench.harness.figures import cell_figures
from hostcache.records import Record, RequestRecord, SegmentRecord

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

BLOCKS = 64
ROOMY = (*SMALL, "--num-gpu-blocks-override", str(BLOCKS + 1))
"""Four requests of the longest context fit at once: none is preempted. Six agents do not."""
AGENTS = ("agents", "--points", "2,6", "--prefix-tokens", "380", "--tool-tokens", "16", "--reply-tokens", "4",
          "--gap-min-s", "0", "--gap-max-s", "0.05", "--duration-s", "1.5", "--bar", "errors:0", "restore_failures:0",
          "--lag-bar-ms", "60000", "--strict", "--json")
EQUIVALENCE = ("equivalence", "--conversations", "3", "--shortest-tokens", "100", "--longest-tokens", "400",
               "--reply-tokens", "12", "--json")
SUMS = {"cached + recomputed = prompt", "device + host = cached", "vLLM: parts by source = prompt tokens",
        "vLLM: cached by source = hits + external hits"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    tier: Server
    plain: Server
    uncached: Server


@pytest.fixture(scope="module")
def servers(tiny_llama: Path, server_environ: dict[str, str],
            tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Started beside each other: most of a start is one process that imports."""
    folder = tmp_path_factory.mktemp("harness")
    kinds = {"tier": ("64MiB", ()), "plain": ("0", ()), "uncached": ("0", ("--no-enable-prefix-caching",))}
    with ExitStack() as stack, ThreadPoolExecutor(len(kinds)) as pool:
        started = {name: pool.submit(stack.enter_context, serving(
            tiny_llama, log=folder / f"{name}.log", ours=["--host-cache-bytes", quota], theirs=[*ROOMY, *more],
            environ=server_environ)) for name, (quota, more) in kinds.items()}
        yield Servers(**{name: server.result() for name, server in started.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    code: int
    said: dict[str, Any]
    told: str
    records: list[Record]
    figures: dict[str, Any]


def bench(server: Server, folder: Path, *words: str) -> Ran:
    out = folder / "out"
    done = subprocess.run([sys.executable, "-m", "hostcache", "bench", *words, "--url", server.url, "--out", str(out)],
                          capture_output=True, text=True, timeout=300, cwd=folder, check=False)
    assert "Traceback" not in done.stderr
    records = list(whole_records(out / "records.jsonl"))
    return Ran(code=done.returncode, said=json.loads(done.stdout) if done.stdout else {}, told=done.stderr,
               records=records, figures=cell_figures(records))


def requests(ran: Ran, *segments: str) -> list[RequestRecord]:
    return [each for each in ran.records if isinstance(each, RequestRecord)
            and (not segments or each.segment in segments)]


def check_sums(ran: Ran) -> None:
    """Served + computed = prompt tokens: by each request's usage, by vLLM's counters, and the one by the other."""
    assert ran.figures["reasons"] == []
    assert {each.outcome for each in requests(ran)} == {"ok"}
    for segment in ran.figures["segments"]:
        assert segment["balance"]["verdict"] == "balanced", segment
        assert set(segment["balance"]["checked"]) == SUMS
        assert segment["counters"]["preemptions"] == 0
    brackets = [each for each in ran.records if isinstance(each, SegmentRecord)]
    assert brackets
    for bracket in brackets:
        sent = [each for each in requests(ran) if (each.segment, each.part) == (bracket.segment, bracket.part)]

        def counted(name: str, bracket: SegmentRecord = bracket) -> float:
            return bracket.closing[name] - bracket.opening[name]

        prompt = sum(each.prompt_tokens or 0 for each in sent)
        cached = sum(each.cached_tokens or 0 for each in sent)
        assert {each.cached_tokens is None for each in sent} == {False}
        assert counted("vllm:prompt_tokens_total") == prompt
        assert counted("vllm:prompt_tokens_cached_total") == cached
        assert counted('vllm:prompt_tokens_by_source_total{source="local_compute"}') == prompt - cached
        assert counted("vllm:prefix_cache_hits_total") == counted(
            'vllm:prompt_tokens_cached_by_source_total{source="device"}')
        assert counted("vllm:external_prefix_cache_hits_total") == counted(
            'vllm:prompt_tokens_cached_by_source_total{source="host"}')


def check_verdicts(ran: Ran) -> None:
    assert ran.code == 0, ran.told
    assert [(each["part"], each["bar"], each["verdict"]) for each in ran.said["verdicts"]] == [
        (part, bar, "pass") for part in ("2", "6") for bar in ("errors", "restore_failures")]


def test_agents_on_vllm_with_the_tier_balance(servers: Servers, tmp_path: Path) -> None:
    ran = bench(servers.tier, tmp_path, *AGENTS, "--tier", "on", "--quota", "64MiB")
    check_sums(ran)
    check_verdicts(ran)
    target = ran.figures["target"]
    assert target["arm_confirmed_by"] == "the server's report"
    assert target["tier"] == {"on": True, "kind": "hostcache", "quota_bytes": 64 << 20, "mode": None}
    assert (target["page_tokens"], target["prefix_caching"]) == (BLOCK, True)
    six = ran.figures["points"][-1]
    assert six["evicted"]["proof"] == "counter"  # six first prompts alone are more than the pool holds
    assert six["values"]["hit_share"] is not None


def test_agents_on_vllm_as_it_is_balance(servers: Servers, tmp_path: Path) -> None:
    ran = bench(servers.plain, tmp_path, *AGENTS, "--tier", "off")
    check_sums(ran)
    check_verdicts(ran)
    assert ran.figures["target"]["tier"] == {"on": False}
    assert ran.figures["points"][0]["values"]["hit_share"] > 0.5  # two agents fit
    assert {segment["counters"]["host_tokens"] for segment in ran.figures["segments"]} == {0}
    assert not any("hostcache" in name for each in ran.records if isinstance(each, SegmentRecord)
                   for name in each.closing)


def test_agents_on_vllm_without_a_prefix_cache_hit_nothing(servers: Servers, tmp_path: Path) -> None:
    ran = bench(servers.uncached, tmp_path, *AGENTS, "--tier", "off")
    check_sums(ran)
    check_verdicts(ran)
    assert {each.cached_tokens for each in requests(ran)} == {0}
    assert [point["values"]["hit_share"] for point in ran.figures["points"]] == [0, 0]
    assert ran.figures["target"]["prefix_caching"] is False


def test_restored_answers_are_the_cold_ones(servers: Servers, tmp_path: Path) -> None:
    ran = bench(servers.tier, tmp_path, *EQUIVALENCE, "--tier", "on")
    check_sums(ran)
    assert "identical: restored against cold 3 of 3 identical; from the device against cold 3 of 3" in ran.told
    assert "noise floor, cold against cold: 3 of 3 identical" in ran.told
    assert ran.code == 0
    assert ran.figures["equivalence"]["identical"] == 3  # the report and the command say the same
    assert {each.host_tokens for each in requests(ran)} == {None}  # vLLM's usage does not say it: its counters do
    assert ran.figures["restore_histogram"]["n"] == 3


def test_device_hits_of_vllm_as_it_is_are_the_cold_answers(servers: Servers, tmp_path: Path) -> None:
    ran = bench(servers.plain, tmp_path, *EQUIVALENCE, "--tier", "off")
    check_sums(ran)
    assert "identical: the server has no tier; from the device against cold 3 of 3 identical" in ran.told
    assert ran.code == 0
    assert ran.figures["restore_histogram"] is None


def test_without_a_prefix_cache_equivalence_says_that_nothing_was_proven(servers: Servers, tmp_path: Path) -> None:
    ran = bench(servers.uncached, tmp_path, *EQUIVALENCE, "--tier", "off")
    check_sums(ran)
    assert "unproven: the server has no tier; from the device against cold none compared" in ran.told
    assert "the server says that its prefix cache is off" in ran.told
    assert ran.code == 1


def test_an_arm_without_its_tier_is_refused_before_anything_is_measured(servers: Servers, tmp_path: Path) -> None:
    ran = bench(servers.plain, tmp_path, *AGENTS, "--tier", "on")
    assert "arm not confirmed: on is to have a tier, and the server reports none" in ran.told
    assert ran.code == 6
    assert requests(ran) == []
