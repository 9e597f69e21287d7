"""A probe from its file to its certificate on mock servers; the four faults of an earlier one, planted, and others."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.lab.probing import (
    ALPHABET,
    BLOCKS,
    QUICK,
    REQUESTS,
    on_mocks,
    probe_on_mocks,
    sealed_for,
    write_trace,
    written,
)

from hostcache.client.adapters import Adapter
from hostcache.client.counters import Scrape
from hostcache.clock import WallClock
from hostcache.errors import ConfigError, HostCacheError, ServerError
from hostcache.lab.certificate import certificate, digest, read_certificate, write_certificate
from hostcache.lab.judging import judge
from hostcache.lab.probe import SHIPPED, figure_names, probe_of, read_probe
from hostcache.lab.probe_commands import add_probe_arguments, run_probe_command
from hostcache.lab.prompts import Prompts
from hostcache.lab.replay import Scraper
from hostcache.lab.replayed import ProbeVoid
from hostcache.lab.running import Means, run_probe
from hostcache.lab.sealing import SealBroken, check_probe, check_trace, read_seal, seal, sealed_of, slice_of, write_seal
from hostcache.lab.serving import command_of, named
from hostcache.lab.verifying import verify
from hostcache.testing.mock_server import Fault, MockServer
from hostcache.workload.bridge import Bridge, Tokens

VLLM = replace(QUICK, style="vllm")
NO_CONTROL = ("device",)


# What must hold -----------------------------------------------------------------------------------------------------


def test_a_probe_is_decided_as_sealed_and_its_certificate_holds_with_the_trace_alone(tmp_path: Path) -> None:
    path, judged, trace = probe_on_mocks(tmp_path, config=replace(QUICK, host_blocks=0), load={"processes": 2})
    assert judged.verdict == "explained"
    assert judged.figures["device_hit_rate"] == judged.figures["lru"] < judged.figures["possible"]
    assert judged.figures["control_cached_tokens"] == judged.figures["device_unexplained_tokens"] == 0
    document = read_certificate(path)
    control, device = document["parts"]["arms"]
    assert control["control"] == "0 of 0"
    assert device["confirmed"] == ["blocks of 16 tokens", f"a pool of {16 * BLOCKS} tokens"]
    assert control["requests"][0]["prompt_sha256"] != device["requests"][0]["prompt_sha256"], "seeds of their own"
    told: list[str] = []
    assert verify(document, trace, holds=told.append) == "explained"
    assert len(told) == 6


def test_a_tier_large_enough_gives_all_that_any_cache_could(tmp_path: Path) -> None:
    async def run(urls: dict[str, str]) -> Any:
        arms = {"device": {"url": urls["device"], "tier": "off"},
                "tier": {"url": urls["tier"], "tier": "on", "host_tokens": 16 * 400}}
        probe = probe_of(written(urls, arms=arms, pairs=2), where="test")
        return await run_probe(probe, sealed_for(probe, trace), trace, tmp_path / "out", Means(clock=WallClock()))

    trace = write_trace(tmp_path / "trace.jsonl")
    path, judged = on_mocks({"device": VLLM, "tier": replace(VLLM, host_blocks=400)}, run)
    assert judged.verdict == "explained"
    assert judged.figures["tier_hit_rate"] == judged.figures["tier_model"] == judged.figures["possible"]
    assert judged.figures["tier_host_tokens"] > 0
    assert [run["arm"] for run in read_certificate(path)["parts"]["arms"]] == ["device", "tier", "tier", "device"]
    assert verify(read_certificate(path), trace) == "explained"


def test_a_ladder_is_swept_and_its_knees_are_figures(tmp_path: Path) -> None:
    path, judged, trace = probe_on_mocks(
        tmp_path, arms=NO_CONTROL, load={"rate_factors": [1, 4], "goal": {"ttft_s": 5}, "drain_s": 20},
        branches={"kneed": "device_goodput_knee > 0 and device_throughput_knee > 0"})
    assert judged.verdict == "kneed"
    assert len(judged.knees["device"][0]["points"]) == 2
    assert judged.figures["device_hit_rate"] <= judged.figures["bound"]
    assert verify(read_certificate(path), trace) == "kneed"
    parts = copy.deepcopy(read_certificate(path)["parts"])
    parts["arms"][1]["requests"][-1]["due_s"] += 0.01
    with pytest.raises(HostCacheError, match="contradict each other or the trace"):
        verify(certificate(parts), trace)


def test_prompts_may_go_as_text_when_the_servers_tokenizer_gives_them_back(tmp_path: Path) -> None:
    path, judged, trace = probe_on_mocks(tmp_path, arms=NO_CONTROL, config=VLLM, bridge={"send": "text"})
    assert judged.verdict == "explained"
    (run,) = read_certificate(path)["parts"]["arms"]
    assert run["gate"]["prompts"] == REQUESTS
    assert verify(read_certificate(path), trace) == "explained"


# The four faults, planted -------------------------------------------------------------------------------------------


def dropped(adapter: Adapter) -> Scraper:
    """Scrapes as the first attempt merged them: without what was counted."""
    async def scrape() -> Scrape:
        return replace(await adapter.scrape(), counters={}, raw=(), parts={})
    return scrape


def by_prefix(adapter: Adapter) -> Scraper:
    """Scrapes as the second attempt read them: the last line whose name begins so, which is the `_created` one."""
    async def scrape() -> Scrape:
        found = await adapter.scrape()
        last = [float(line.rsplit(" ", 1)[1]) for line in found.raw if line.startswith("vllm:prefix_cache_hits")][-1]
        return replace(found, counters={**found.counters, "device_tokens": last})
    return scrape


class Collapsed(Bridge):
    """The bridge of the retracted run: a block's text depends on its id mod 33."""

    def blocks(self, names: npt.NDArray[np.uint64]) -> Tokens:
        return super().blocks(names % np.uint64(33))  # explicit: a dataclass with slots is made anew


def collapsed(prompts: Prompts) -> Prompts:
    bridge = prompts.bridge
    return Prompts(bridge=Collapsed(alphabet=bridge.alphabet, block_tokens=bridge.block_tokens, seed=bridge.seed))


_LOSES_A_FIELD = """
import json, subprocess, sys
inner = subprocess.Popen([sys.executable, "-m", "hostcache.lab.replay_worker"], stdin=sys.stdin,
                         stdout=subprocess.PIPE, text=True)
for line in inner.stdout:
    message = json.loads(line)
    message.get("record", {}).pop("cached_tokens", None)
    print(json.dumps(message), flush=True)
"""
_NULLS_A_FIELD = _LOSES_A_FIELD.replace('.pop("cached_tokens", None)', '.update(dict.fromkeys(["cached_tokens"]))'
                                        ).replace("message.get", '"record" in message and message["record"]'
                                                  ).replace('("record", {})', "")


@pytest.mark.parametrize(("fault", "planted"), [
    ("counters_missing", Means(clock=WallClock(), scraper=dropped)),
    ("created_taken_for_count", Means(clock=WallClock(), scraper=by_prefix)),
    ("record_field_lost", Means(clock=WallClock(), worker=(sys.executable, "-c", _LOSES_A_FIELD))),
    ("record_field_lost", Means(clock=WallClock(), worker=(sys.executable, "-c", _NULLS_A_FIELD))),
    ("bridge_collision", Means(clock=WallClock(), prompts=collapsed)),
], ids=["counters-dropped", "created", "field-lost", "field-emptied", "collapsed-bridge"])
def test_each_fault_of_the_retracted_probe_is_caught_by_name_before_a_certificate(
        tmp_path: Path, fault: str, planted: Means) -> None:
    with pytest.raises(ProbeVoid, match=f"^{fault}: "):
        probe_on_mocks(tmp_path, means=planted, arms=NO_CONTROL, config=VLLM)
    assert not (tmp_path / "out" / "certificate.json").exists()
    attempt = json.loads((tmp_path / "out" / "attempt-001" / "attempt.json").read_text())
    assert (attempt["outcome"], attempt["fault"]) == ("failed", fault)
    assert attempt["reason"].startswith(fault)
    if fault == "bridge_collision":
        assert not list((tmp_path / "out" / "attempt-001").glob("run-*.json")), "nothing was sent"


# Other voids, and attempts ------------------------------------------------------------------------------------------


def test_an_attempt_that_is_killed_has_said_so_before(tmp_path: Path) -> None:
    """Nothing can be written by a process that is killed: its attempt says it from the first moment."""
    trace = write_trace(tmp_path / "trace.jsonl")
    found: list[dict[str, Any]] = []

    def look(prompts: Prompts) -> Prompts:
        found.append(json.loads((tmp_path / "out" / "attempt-001" / "attempt.json").read_text()))
        return prompts

    async def run(urls: dict[str, str]) -> None:
        probe = probe_of(written(urls), where="test")
        await run_probe(probe, sealed_for(probe, trace), trace, tmp_path / "out",
                        Means(clock=WallClock(), unix_now=lambda: 1.5, prompts=look))

    on_mocks({"device": QUICK}, run)
    assert (found[0]["outcome"], found[0]["fault"], found[0]["began_unix_s"]) == ("failed", "killed", 1.5)
    assert json.loads((tmp_path / "out" / "attempt-001" / "attempt.json").read_text())["outcome"] == "completed"


@pytest.mark.parametrize(("number", "edit", "says"), [
    (1, lambda attempt: attempt.update(cost=0.0), "cost 0.0 USD, the probe makes it"),
    (1, lambda attempt: attempt.update(outcome="completed", fault=None, reason=None), "last one alone is completed"),
    (1, lambda attempt: attempt.update(began_unix_s=-1.0), "it was sealed at"),
    (1, lambda attempt: attempt.update(note="x"), "says note, which none says"),
    (1, lambda attempt: attempt.update(seal="0"), "an attempt at another seal"),
    (1, None, "every attempt is kept: bring back what is missing"),
    (2, lambda attempt: attempt.update(began_unix_s=4e9), "this machine's clock says"),
], ids=["cost", "outcome", "began", "more", "seal", "gone", "clock"])
def test_an_attempt_that_was_edited_or_is_gone_ends_the_next_run_before_it_starts(
        tmp_path: Path, number: int, edit: Callable[[dict[str, Any]], object] | None, says: str) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    probe = probe_of(written({"device": "http://127.0.0.1:1"}, cost={"per_hour": 1e6}), where="test")
    sealed = sealed_for(probe, trace)
    run = partial(run_probe, probe, sealed, trace, tmp_path / "out", Means(clock=WallClock(), prompts=collapsed))
    for _ in range(2):
        with pytest.raises(ProbeVoid, match="bridge_collision"):
            asyncio.run(run())
    path = tmp_path / "out" / f"attempt-{number:03d}" / "attempt.json"
    if edit is None:
        path.parent.rename(tmp_path / "elsewhere")
    else:
        attempt = json.loads(path.read_text())
        edit(attempt)
        path.write_text(json.dumps(attempt))
    with pytest.raises(ConfigError, match=says):
        asyncio.run(run())
    assert not (tmp_path / "out" / "attempt-003").exists()


def test_an_attempt_is_completed_when_its_certificate_is_there_and_not_before(tmp_path: Path) -> None:
    """Between the last run and the certificate a disk may fill up: the attempt has failed then, and says why."""
    def taken(prompts: Prompts) -> Prompts:
        (tmp_path / "out" / "certificate.json").write_text("of somebody else")
        return prompts

    with pytest.raises(HostCacheError, match="never overwritten"):
        probe_on_mocks(tmp_path, arms=NO_CONTROL, means=Means(clock=WallClock(), prompts=taken))
    attempt = json.loads((tmp_path / "out" / "attempt-001" / "attempt.json").read_text())
    assert (attempt["outcome"], attempt["fault"], attempt["runs"]) == ("failed", "CertificateRefused", 1)


def test_failed_attempts_stay_and_stand_in_the_certificate_with_their_reason(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")

    async def run(urls: dict[str, str]) -> Any:
        probe = probe_of(written(urls, cost={"per_hour": 3600}), where="test")
        sealed = sealed_for(probe, trace)
        with pytest.raises(ProbeVoid, match="bridge_collision"):
            await run_probe(probe, sealed, trace, tmp_path / "out", Means(clock=WallClock(), prompts=collapsed))
        path, _ = await run_probe(probe, sealed, trace, tmp_path / "out", Means(clock=WallClock()))
        with pytest.raises(ConfigError, match="is not run again"):
            await run_probe(probe, sealed, trace, tmp_path / "out", Means(clock=WallClock()))
        return path

    parts = read_certificate(on_mocks({"device": QUICK}, run))["parts"]
    assert [(each["number"], each["outcome"], each["fault"]) for each in parts["attempts"]] == [
        (1, "failed", "bridge_collision"), (2, "completed", None)]
    assert parts["cost"]["total"] == pytest.approx(sum(each["wall_s"] for each in parts["attempts"]), abs=0.01)


@pytest.mark.parametrize(("fault", "more", "config"), [
    ("control_not_zero", {"arms_of": {"control": {"control": True}}}, QUICK),
    ("arm_not_confirmed", {"engine": {"block_tokens": 16, "capacity_tokens": 16 * BLOCKS + 160, "max_tokens": 1}},
     QUICK),
    ("arm_not_confirmed", {"arms_of": {"device": {"tier": "on"}}}, QUICK),
    ("request_failed", {}, replace(QUICK, faults=(Fault(kind="http-500", every=9),))),
    ("over_budget", {"budget_minutes": 0.005}, replace(QUICK, base_s=0.1)),
], ids=["control", "capacity", "tier", "request", "budget"])
def test_what_voids_a_run_has_a_name(tmp_path: Path, fault: str, more: dict[str, Any], config: Any) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    changed = more.pop("arms_of", {})

    async def run(urls: dict[str, str]) -> None:
        given = written(urls, **more)
        for name, keys in changed.items():
            given["arms"][name] = {"url": urls[name], **keys}
        probe = probe_of(given, where="test")
        await run_probe(probe, sealed_for(probe, trace), trace, tmp_path / "out", Means(clock=WallClock()))

    with pytest.raises(ProbeVoid, match=f"^{fault}: "):
        on_mocks({"control": config, "device": config}, run)


def test_a_rate_above_the_bound_is_impossible_whatever_the_branches_say(tmp_path: Path) -> None:
    path, _, trace = probe_on_mocks(tmp_path, arms=NO_CONTROL, branches={"fine": "device_hit_rate >= 0"})
    parts = read_certificate(path)["parts"]
    runs = copy.deepcopy(parts["arms"])
    for record in runs[0]["requests"]:
        record["cached_tokens"] = record["prompt_tokens"] - 16
    cached = sum(record["cached_tokens"] for record in runs[0]["requests"])
    accounting = json.loads(runs[0]["closing"][0].partition(" ")[2])
    before = json.loads(runs[0]["opening"][0].partition(" ")[2])
    accounting |= {"device_tokens": before["device_tokens"] + cached,
                   "recomputed_tokens": accounting["prompt_tokens"] - before["device_tokens"] - cached}
    accounting["device_tokens"] = accounting["prompt_tokens"] - accounting["recomputed_tokens"]
    runs[0]["closing"][0] = f"accounting {json.dumps(accounting)}"
    judged = judge(sealed_of(parts["seal"], "test"), trace, runs)
    assert judged.verdict == "impossible"
    assert judged.cause is not None
    assert verify(read_certificate(path), trace) == "fine"


def test_failed_requests_do_not_make_the_rate_of_the_others_impossible(tmp_path: Path) -> None:
    """Those that failed were all new ones; the answered ones alone were held to a greater part than all could be."""
    path, _, trace = probe_on_mocks(tmp_path, arms=NO_CONTROL, branches={"fine": "device_hit_rate >= 0"})
    parts = read_certificate(path)["parts"]
    runs = copy.deepcopy(parts["arms"])
    gone = 0
    for record in runs[0]["requests"]:
        if not record["cached_tokens"]:
            gone += record["prompt_tokens"]
            record |= {"outcome": "error", "reason": "http 500", **dict.fromkeys(
                ("prompt_tokens", "completion_tokens", "cached_tokens", "device_tokens", "host_tokens"))}
    accounting = json.loads(runs[0]["closing"][0].partition(" ")[2])
    accounting |= {name: accounting[name] - gone for name in ("prompt_tokens", "recomputed_tokens")}
    runs[0]["closing"][0] = f"accounting {json.dumps(accounting)}"
    judged = judge(sealed_of(parts["seal"], "test"), trace, runs)
    assert judged.figures["device_hit_rate"] > judged.figures["bound"]
    assert judged.verdict == "fine"


# Seals and certificates ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("made")
    path, _, trace = probe_on_mocks(folder)
    return path, trace


def test_an_edited_probe_or_another_trace_is_refused_before_anything_starts(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    probe = probe_of(written({"control": "http://127.0.0.1:1", "device": "http://127.0.0.1:1"}), where="test")
    sealed = sealed_for(probe, trace)
    check_probe(sealed, probe)
    check_trace(sealed, trace)
    with pytest.raises(SealBroken, match="edited after it was sealed: capacity_tokens was 640 and is 656"):
        check_probe(sealed, replace(probe, capacity_tokens=656))
    with pytest.raises(SealBroken, match=r'arms\.device\.url was "http://127.0.0.1:1" and is null'):
        check_probe(sealed, replace(probe, arms=(probe.arms[0], replace(probe.arms[1], url=None))))
    with pytest.raises(SealBroken, match=r'branches was \["explained","beside"\] and is \["beside","explained"\]'):
        check_probe(sealed, replace(probe, branches=probe.branches[::-1]))
    other = write_trace(tmp_path / "other.jsonl", seed=2)
    with pytest.raises(SealBroken, match=r"trace: the first 24 requests of other.jsonl"):
        asyncio.run(run_probe(probe, sealed, other, tmp_path / "out", Means(clock=WallClock())))
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="the probe is for a trace of digest"):
        sealed_for(replace(probe, trace_digest="0" * 64), trace)


def test_a_seal_is_read_back_whole_and_a_changed_one_is_not(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    probe = probe_of(written({"device": "http://127.0.0.1:1"}), where="test")
    sealed = sealed_for(probe, trace)
    document = {**sealed.body, "sha256": sealed.sha256}
    write_seal(tmp_path / "seal.json", document)
    again = read_seal(tmp_path / "seal.json")
    assert (again.probe, again.sha256, again.alphabet) == (probe, sealed.sha256, ALPHABET)
    with pytest.raises(ConfigError, match="never replaced"):
        write_seal(tmp_path / "seal.json", document)
    (tmp_path / "seal.json").write_text(json.dumps(document).replace('"requests": 24', '"requests": 25'))
    with pytest.raises(SealBroken, match="something in it was changed"):
        read_seal(tmp_path / "seal.json")


def _raw_line(parts: dict[str, Any]) -> None:
    line = parts["arms"][1]["closing"][0]
    parts["arms"][1]["closing"][0] = line.replace('"prompt_tokens": ', '"prompt_tokens": 1')


def _swap(parts: dict[str, Any]) -> None:
    first, second = parts["arms"][1]["requests"][:2]
    first["prompt_sha256"], second["prompt_sha256"] = second["prompt_sha256"], first["prompt_sha256"]


_EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "verdict": (lambda parts: parts["verdict"].update(verdict="beside"), "part 'verdict'"),
    "figures": (lambda parts: parts["figures"]["figures"].update(device_hit_rate=0.2), "part 'figures'"),
    "raw lines": (_raw_line, "part 'arms'"),
    "prompts": (_swap, "another prompt than follows"),
    "records": (lambda parts: parts["arms"][1]["requests"].pop(), "part 'arms'"),
    "cached": (lambda parts: parts["arms"][1]["requests"][3].update(cached_tokens=1), "part 'arms'"),
    "seal": (lambda parts: parts["seal"]["oracle"].update(bound=0.9), "part 'seal'"),
    "probe": (lambda parts: parts["probe"].update(hypothesis="another"), "part 'probe'"),
    "attempts": (lambda parts: parts["attempts"].insert(0, dict(parts["attempts"][0])), "part 'attempts'"),
    "runs": (lambda parts: parts["arms"].pop(0), "part 'arms'"),
    "order of the runs": (lambda parts: (parts["arms"].reverse(), parts["figures"]["gaps"].reverse()),
                          "run 1 is device of pair 0 at load 0, the probe asks for control"),
    "the control's reading": (lambda parts: parts["arms"][0].update(control="5 of 9"), "control of control"),
    "the gate's report": (lambda parts: parts["arms"][1]["gate"].update(first_blocks=33), "gate of device"),
    "what was confirmed": (lambda parts: parts["arms"][1]["confirmed"].clear(), "confirmed of device"),
    "what was described": (lambda parts: parts["arms"][1]["described"].update(pool_tokens=99), "arm_not_confirmed"),
    "another engine": (lambda parts: parts["arms"][1].update(engine="vllm"), "part 'arms'"),
    "the command": (lambda parts: parts["arms"][1]["command"].append("--fast"), "command of device"),
    "the lateness": (lambda parts: parts["arms"][1].update(lateness_p99_s=0.0), "lateness_p99_s of device"),
    "a timeline": (lambda parts: parts["arms"][1]["timeline"].append([0.0, {"prompt_tokens": 1e9}]), "goes backwards"),
    "a time": (lambda parts: parts["arms"][1]["requests"][5].update(ended_s=0.0), "the times of request 5"),
    "a request that failed": (lambda parts: parts["arms"][1]["requests"][5].update(outcome="cut", reason="it was"),
                              "request_failed: request 5"),
    "a record's host": (lambda parts: parts["arms"][1]["requests"][5].update(host_tokens=16), "record_impossible"),
    "a record below zero": (lambda parts: parts["arms"][1]["requests"][5].update(cached_tokens=-16),
                            "record_impossible"),
    "a note in a run": (lambda parts: parts["arms"][1].update(note="it went well"), "note of device"),
    "a raw line twice": (lambda parts: parts["arms"][1]["closing"].append(parts["arms"][1]["closing"][0]),
                         "two raw lines are of the section"),
    "an endless count": (lambda parts: parts["arms"][1].update(closing=['accounting {"prompt_tokens": 1e999}']),
                         "1e999 is no number"),
    "a raw line of another kind": (lambda parts: parts["arms"][1]["closing"].append(5), "part 'arms' does not hold"),
    "an attempt's cost": (lambda parts: (parts["attempts"][0].update(cost=5.0), parts["cost"].update(total=5.0)),
                          "attempt 1 of .* cost 5.0 USD, the probe makes it 0.0 USD"),
    "an attempt before the seal": (lambda parts: parts["attempts"][0].update(began_unix_s=-1.0), "it was sealed at"),
    "an attempt's time": (lambda parts: parts["attempts"][0].update(wall_s=0.0), "part 'attempts' does not hold"),
    "a failed attempt left out or made up": (
        lambda parts: (parts["attempts"].insert(0, {**parts["attempts"][0], "outcome": "failed", "fault": "x",
                                                    "reason": "x"}), parts["attempts"][1].update(number=2),
                       [run.update(attempt=2) for run in parts["arms"]], parts["cost"].update(attempts=2)),
        "another prompt than follows"),
    "no arms": (lambda parts: parts.pop("arms"), "part 'arms' does not hold: there is no 'arms'"),
    "no attempts": (lambda parts: parts["attempts"].clear(), "part 'attempts' does not hold: there is none"),
    "no cost": (lambda parts: parts.pop("cost"), "part 'cost'"),
    "arms that are none": (lambda parts: parts.update(arms=[5]), "part 'arms' does not hold"),
    "attempts that are none": (lambda parts: parts.update(attempts=[5]), "part 'attempts' does not hold"),
    "a cost that is none": (lambda parts: parts["attempts"][0].update(cost="x"), "part 'attempts' does not hold"),
    "a part that nobody knows": (lambda parts: parts.update(note="it went well"), "part 'note'"),
    "retracts": (lambda parts: parts["retracts"].clear(), "part 'retracts'"),
    "what it does not prove": (lambda parts: parts["does_not_prove"].clear(), "part 'does_not_prove'"),
}


@pytest.mark.parametrize("edited", sorted(_EDITS))
def test_a_part_that_was_edited_with_new_digests_does_not_follow_from_the_others(
        made: tuple[Path, Path], edited: str) -> None:
    path, trace = made
    parts = copy.deepcopy(read_certificate(path)["parts"])
    edit, named = _EDITS[edited]
    edit(parts)
    with pytest.raises(HostCacheError, match=named):
        verify(certificate(parts), trace)


@pytest.mark.parametrize(("edit", "says"), [
    (lambda body: body["bridge"].update(block_tokens=32), "bridge: block_tokens is 16 here, sealed was 32"),
    (lambda body: body["bridge"].update(words=["a"], ids=[1]), "no alphabet"),
    (lambda body: body["oracle"].update(more=1), "oracle: more is null here, sealed was 1"),
    (lambda body: body["trace"].update(requests=9), "trace: requests is 24 here, sealed was 9"),
    (lambda body: body.pop("model"), "model is missing"),
    (lambda body: body.update(note=1), "note is no part of it"),
    (lambda body: body["probe"].update(loads=[{"at_once": 0}]), "the sealed probe cannot be read"),
], ids=["block", "alphabet", "oracle", "requests", "missing", "more", "probe"])
def test_a_seal_that_was_made_up_anew_contradicts_its_trace_or_itself(
        made: tuple[Path, Path], edit: Callable[[dict[str, Any]], object], says: str) -> None:
    path, trace = made
    body = copy.deepcopy(read_certificate(path)["parts"]["seal"])
    del body["sha256"]
    edit(body)
    with pytest.raises(SealBroken, match=says):
        check_trace(sealed_of({**body, "sha256": digest(body)}, "test"), trace)


def test_another_trace_fails_a_certificate_and_is_named(made: tuple[Path, Path], tmp_path: Path) -> None:
    path, trace = made
    lines = trace.read_text().splitlines()
    row = json.loads(lines[2])
    row["hash_ids"][-1] += 2**50
    (tmp_path / "trace.jsonl").write_text("\n".join([*lines[:2], json.dumps(row), *lines[3:]]) + "\n")
    with pytest.raises(HostCacheError, match="part 'trace' does not hold"):
        verify(read_certificate(path), tmp_path / "trace.jsonl")


# Files and commands -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["conversation-300", "conversation-300-vllm", "conversation-600", "s46b"])
def test_the_shipped_probes_can_be_read_and_decided(name: str) -> None:
    probe = read_probe(Path(name))
    assert probe.name == name
    assert probe == read_probe(SHIPPED / f"{name}.yaml")
    assert {"bound", "lru"} <= set(figure_names(probe))
    assert all("{port}" in arm.start for arm in probe.arms)
    assert any(arm.control for arm in probe.arms)


@pytest.mark.parametrize(("change", "says"), [
    ({"budget": 3}, "'budget' is not known"),
    ({"probe": 2}, "version 2"),
    ({"branches": {"a": "device_hitrate > 0"}}, "there is no figure 'device_hitrate'"),
    ({"branches": {}}, "there are no branches"),
    ({"trace": {"requests": 0}}, "requests is '0'; a whole number of at least 1 is needed"),
    ({"trace": {}}, "trace: requests is missing"),
    ({"bridge": {"send": "chat"}}, "one of ids, text is needed"),
    ({"load": {"at_once": 2, "rate_factors": [1, 2]}}, "give one of the two"),
    ({"arms": {"a-b": {"url": "http://x"}}}, "the name of an arm"),
    ({"arms": {"a": {"url": "http://x", "start": ["x", "{port}"]}}}, "both a url and a start command"),
    ({"arms": {"a": {"start": ["x"]}}}, "no {port}"),
    ({"arms": {"a": {"control": True, "url": "http://x"}}}, "every arm is a control"),
    ({"does_not_prove": "nothing"}, "a list is needed"),
    ({"load": {"rate_factors": [2, 1, 2]}}, "a ladder is of different loads"),
    ({"trace": {"requests": 1}, "load": {"rate_factors": [2, 1]}}, "take 2 at least"),
    ({"trace": {"requests": 10**23}}, "requests is '1000"),
    ({"name": "../up"}, "a folder carries it"),
    ({"budget_minutes": 0}, "budget_minutes is 0; give more than 0"),
    ({"load": {"goal": {"ttft_s": 1}}}, "give rate_factors, or no goal"),
    ({"arms": {"a": {"start": ["x", "{port}"], "env": {"A": True}}}}, "values that are texts"),
])
def test_a_probe_that_cannot_be_is_refused_by_its_key(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("{", r"\{")):
        probe_of({**written({"device": "http://127.0.0.1:1"}), **change}, where="p.yaml")


def test_a_key_that_stands_twice_in_a_probe_is_refused_with_its_line(tmp_path: Path) -> None:
    text = (SHIPPED / "conversation-300-vllm.yaml").read_text()
    path = tmp_path / "p.yaml"
    path.write_text(text)
    assert read_probe(path).name == "conversation-300-vllm"
    path.write_text(text.replace("branches:\n", "branches:\n  device_beside_the_model: device_gap > 9\n"))
    with pytest.raises(ConfigError, match=r"the key 'device_beside_the_model' of line \d+ stands there already"):
        read_probe(path)


def command(*words: object) -> tuple[int, str, str]:
    parser = ArgumentParser()
    add_probe_arguments(parser.add_subparsers(dest="what"))
    out, err = io.StringIO(), io.StringIO()
    code = run_probe_command(parser.parse_args([str(word) for word in words]), out=out, err=err)
    return code, out.getvalue(), err.getvalue()


def test_the_commands_say_what_holds_and_what_the_numbers_are(made: tuple[Path, Path], tmp_path: Path) -> None:
    path, trace = made
    code, out, err = command("probe", "verify", path, "--trace", trace)
    assert code == 0
    assert "holds; its verdict is explained" in out
    assert "holds: trace and oracle" in err
    assert command("probe", "verify", path, "--trace", trace, "--expect", "impossible")[0] == 3
    parts = read_certificate(path)["parts"]
    stream = slice_of(trace, sealed_of(parts["seal"], "test").probe)
    (tmp_path / "replay.json").write_text(json.dumps({**parts["arms"][1], "digest": stream.digest}))
    _, out, _ = command("reconcile", "--trace", trace, "--block-tokens", 16, "--capacity-tokens", 16 * BLOCKS,
                        "--replay", tmp_path / "replay.json", "--json")
    assert json.loads(out)["unexplained"] == 0
    _, out, _ = command("reconcile", "--trace", trace, "--block-tokens", 16, "--capacity-tokens", 16 * BLOCKS,
                        "--hits", 99, "--queries", 100)
    assert "impossible" in out
    with pytest.raises(ConfigError, match="--hits and --queries"):
        command("reconcile", "--trace", trace, "--capacity-tokens", 1)


def test_a_certificate_is_never_overwritten(made: tuple[Path, Path]) -> None:
    path, _ = made
    with pytest.raises(HostCacheError, match="never overwritten"):
        write_certificate(path, {})


def test_the_slice_is_the_probes(made: tuple[Path, Path]) -> None:
    path, trace = made
    probe = sealed_of(read_certificate(path)["parts"]["seal"], "test").probe
    assert slice_of(trace, probe).requests == REQUESTS
    assert slice_of(trace, probe, 3).requests == 3


_MOCK = ("import asyncio, sys\n"
         "from hostcache.testing.mock_server import MockConfig, serve_mock\n"
         "config = MockConfig(device_blocks=40, base_s=0, s_per_token=0, itl_s=0)\n"
         "asyncio.run(serve_mock(config, port=int(sys.argv[1])))\n")


def test_servers_are_started_and_stopped_by_the_probe(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    arm = {"start": [sys.executable, "-c", _MOCK, "{port}", "{model}"], "env": {"PYTHONWARNINGS": "error"}}
    probe = probe_of(written({"device": ""}, arms={"device": arm}), where="test")
    with pytest.raises(ConfigError, match="say which with --model"):
        sealed_for(probe, trace)
    sealed = sealed_of(seal(probe, trace, ALPHABET, model="a-model"), "test")
    path, judged = asyncio.run(run_probe(probe, sealed, trace, tmp_path / "out", Means(clock=WallClock())))
    assert judged.verdict == "explained"
    (run,) = read_certificate(path)["parts"]["arms"]
    assert run["command"][0] == "env"
    assert run["command"][-1] == "a-model"
    assert named(command_of(("hostcache", "serve"), {"A": "1"}, model=None)) == ("env", "A=1", "hostcache", "serve")
    broken = replace(probe, arms=(replace(probe.arms[0], start=(sys.executable, "-c", "exit('no luck')", "{port}")),))
    with pytest.raises(ServerError, match="ended with 1 before it served: no luck"):
        asyncio.run(run_probe(broken, sealed_for(broken, trace), trace, tmp_path / "two", Means(clock=WallClock())))


@contextmanager
def mock_elsewhere(config: Any) -> Iterator[str]:
    """A mock on a thread of its own, for commands that run their own event loop."""
    ready: Future[tuple[str, Callable[[], object]]] = Future()

    async def serve() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        async with MockServer(config) as server:
            ready.set_result((server.url, partial(loop.call_soon_threadsafe, over.set)))
            await over.wait()

    thread = Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    url, stop = ready.result(timeout=30)
    try:
        yield url
    finally:
        stop()
        thread.join()


def test_replay_and_knee_run_from_the_command_line_and_write_their_folders(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    common = ["--trace", trace, "--block-tokens", 16, "--words", 256, "--max-tokens", 1, "--filler", "x"]
    with mock_elsewhere(QUICK) as url:
        with pytest.raises(ConfigError, match="closed or open"):
            command("replay", *common, "--url", url, "--at-once", 1, "--rate-factor", 2)
        code, out, _ = command("replay", *common, "--url", url, "--out", tmp_path / "replay")
        assert code == 0
        assert "not explained" in out
        written_down = json.loads((tmp_path / "replay" / "replay.json").read_text())
        assert written_down["gap"]["unexplained"] == 0
        assert written_down["described"]["pool_tokens"] == 16 * BLOCKS
        code, out, _ = command("knee", *common, "--url", url, "--rate-factors", "2,8", "--ttft-s", 5, "--out",
                               tmp_path / "knee")
        assert "throughput knee" in out
        code, out, _ = command("bridge", *common[:6], "--tokenizer", url, "--text", "--json")
        assert json.loads(out)["prompts"] == REQUESTS
