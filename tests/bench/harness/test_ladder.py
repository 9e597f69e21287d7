"""Ladders on a mock: what each role of a rung was served from, who decodes beside whom, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.bench.harness.on_mock import QUICK, cell_of, end_of, measure_on, of, places, read, records_of, requests

from hostcache.bench.harness.cellfile import RECORDS
from hostcache.bench.harness.figures import cell_figures
from hostcache.bench.harness.ladder import LadderParameters
from hostcache.bench.harness.target import Target
from hostcache.errors import ConfigError
from hostcache.records import EndRecord, Record, SegmentRecord, to_json
from hostcache.testing.mock_server import Fault, MockConfig, MockServer

POOL = QUICK.device_blocks * QUICK.block_tokens
RUNGS = LadderParameters(sizes=(100, 320), samples=2, reply_tokens=4, streams=())
DECODE = LadderParameters(sizes=(), streams=(1, 3), samples=2, decode_prompt_tokens=32, decode_tokens=5)


def without_tier(workload: LadderParameters, folder: Path, **spec: Any) -> list[Record]:
    async def run() -> None:
        async with MockServer(dataclasses.replace(QUICK, host_blocks=0)) as server:
            await measure_on(server, workload, folder, target=Target(arm="off", url=server.url, tier="off"),
                             arm="off", **spec)

    asyncio.run(run())
    return read(folder)


@pytest.fixture(scope="module")
def climbed(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    return records_of(RUNGS, tmp_path_factory.mktemp("climbed"), salt="same")


def test_a_rung_asks_cold_again_and_after_others_pushed_it_out(climbed: list[Record]) -> None:
    records = climbed
    assert places(records) == [("before", ""), ("rung", "code 100"), ("rung", "code 320"), ("after", "")]
    rung = requests(records, part="code 320")
    roles = [each.role for each in rung if each.role != "evict"]
    assert roles == ["cold", "reuse", "cold", "reuse", "after-evict", "after-evict"]
    assert {each.prompt_tokens for each in rung if each.role != "evict"} == {320}
    assert {each.cached_tokens for each in rung if each.role in ("cold", "evict")} == {0}
    assert {(each.device_tokens, each.host_tokens) for each in rung if each.role == "reuse"} == {(304, 0)}
    assert {(each.device_tokens, each.host_tokens) for each in rung if each.role == "after-evict"} == {(0, 304)}
    assert sum(each.prompt_tokens or 0 for each in rung if each.role == "evict") >= 1.25 * POOL


def test_the_same_prompt_is_asked_by_each_role_and_each_sample_has_its_own(climbed: list[Record]) -> None:
    prompts: dict[str, set[str]] = {}
    for each in requests(climbed, segment="rung"):
        prompts.setdefault(each.session, set()).add(each.prompt_sha256)
    assert all(len(told) == 1 for told in prompts.values())
    assert len({*map(frozenset, prompts.values())}) == len(prompts)


def test_without_a_tier_what_was_pushed_out_is_computed_again(tmp_path: Path) -> None:
    records = without_tier(RUNGS, tmp_path)
    after = requests(records, role="after-evict")
    assert {each.cached_tokens for each in after} == {0}
    assert {each.cached_tokens for each in requests(records, role="reuse")} == {96, 304}
    assert [row["restore_ratio"] for row in cell_figures(records)["ladder"]] == [None, None]


def test_a_ladder_gives_clean_figures_of_every_rung(tmp_path: Path) -> None:
    records = records_of(dataclasses.replace(RUNGS, streams=(3,), decode_tokens=5), tmp_path)
    figures = cell_figures(records, lag_bar_s=60.0)
    assert figures["reasons"] == []
    assert [(row["part"], row["corpus"], row["streams"]) for row in figures["ladder"]] == [
        ("code 100", "code", None), ("code 320", "code", None), ("code decode 3", "code", 3.0)]
    assert all(row["restored_bytes_proof"] for row in figures["ladder"][:2])
    assert [point["number"] for point in figures["points"]] == [100, 320, 3]
    assert figures["points"][0]["evicted"]["proof"] is not None


def test_streams_of_a_decode_rung_start_at_the_same_moment_with_prompts_nobody_knows(tmp_path: Path) -> None:
    records = records_of(DECODE, tmp_path)
    assert [part for segment, part in places(records) if segment == "rung"] == ["code decode 1", "code decode 3"]
    asked = requests(records, part="code decode 3")
    assert [each.role for each in asked] == ["decode"] * 6
    assert {each.client for each in asked} == {0, 1, 2}
    assert len({each.due_s for each in asked}) == 2
    assert len({each.prompt_sha256 for each in asked}) == 6
    assert {(each.cached_tokens, each.completion_tokens) for each in asked} == {(0, 5)}


def test_a_second_pass_climbs_the_same_rungs_with_fresh_prompts(tmp_path: Path) -> None:
    records = records_of(dataclasses.replace(RUNGS, sizes=(100,), samples=1, passes=2), tmp_path)
    assert [part for segment, part in places(records) if segment == "rung"] == ["code 100", "code 100 pass 2"]
    cold = requests(records, role="cold")
    assert len({each.prompt_sha256 for each in cold}) == 2
    assert {each.cached_tokens for each in cold} == {0}


def test_both_corpora_have_rungs_of_their_own_and_words_of_their_own(tmp_path: Path) -> None:
    shape = LadderParameters(sizes=(100,), samples=1, evict_pools=0.0, streams=(1,), decode_tokens=4)
    records = records_of(shape, tmp_path, corpus="both", salt="same")
    assert [part for segment, part in places(records) if segment == "rung"] == [
        "prose 100", "code 100", "prose decode 1", "code decode 1"]
    assert {each.role for each in requests(records, segment="rung")} == {"cold", "reuse", "decode"}
    assert "corpus both" in cell_of(records).inputs
    again = records_of(shape, tmp_path / "code", corpus="code", salt="same")
    assert [each.prompt_sha256 for each in requests(again, part="code 100")] == [
        each.prompt_sha256 for each in requests(records, part="code 100")]


def test_both_arms_hear_the_same_words(tmp_path: Path, climbed: list[Record]) -> None:
    on, off = climbed, without_tier(RUNGS, tmp_path / "off", salt="same")
    assert [(each.part, each.role, each.prompt_sha256) for each in requests(on, segment="rung")] == [
        (each.part, each.role, each.prompt_sha256) for each in requests(off, segment="rung")]
    assert cell_of(on).identity == cell_of(off).identity


@pytest.mark.parametrize("mode", ["text", "chat"])
def test_text_and_messages_climb_too(mode: str, tmp_path: Path) -> None:
    records = records_of(dataclasses.replace(RUNGS, sizes=(200,), samples=1), tmp_path, mode=mode)
    rung = requests(records, segment="rung")
    assert {each.outcome for each in rung} == {"ok"}
    assert {each.shared_tokens for each in rung} == {None}
    (after,) = requests(records, role="after-evict")
    assert (after.host_tokens or 0) > (after.prompt_tokens or 0) // 2
    assert sum(each.prompt_tokens or 0 for each in rung if each.role == "evict") >= 1.25 * POOL


@pytest.mark.parametrize(("shape", "config", "why"), [
    (dataclasses.replace(RUNGS, sizes=(600,)), dataclasses.replace(QUICK, max_context_tokens=512),
     r"a rung of 600 tokens and a reply of 4 exceed the server's limit of 512; use smaller ones"),
    (dataclasses.replace(RUNGS, sizes=(100, 1024)), QUICK, r"1024 tokens .* exceed the 1024 tokens that the device"),
    (dataclasses.replace(DECODE, decode_tokens=5000), QUICK, r"a decode rung of 32 \+ 5000 tokens exceed"),
    (RUNGS, dataclasses.replace(QUICK, device_blocks=0), "does not say how many tokens its cache holds"),
])
def test_what_the_server_cannot_take_is_refused_before_a_rung_is_sent(
        shape: LadderParameters, config: MockConfig, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        records_of(shape, tmp_path, config=config)
    records = read(tmp_path)
    assert {each.role for each in requests(records)} == {"control"}
    assert end_of(records).outcome == "failed"


def test_a_pool_that_the_server_does_not_tell_can_be_given(tmp_path: Path) -> None:
    shape = dataclasses.replace(RUNGS, sizes=(100,), samples=1, pool_tokens=512)
    records = records_of(shape, tmp_path, config=dataclasses.replace(QUICK, device_blocks=0))
    assert 640 <= sum(each.prompt_tokens or 0 for each in requests(records, role="evict")) < 1024


def test_failures_are_records_and_eviction_goes_on_until_enough_was_served(tmp_path: Path) -> None:
    config = dataclasses.replace(QUICK, faults=(Fault(kind="http-500", every=4),))
    records = records_of(dataclasses.replace(RUNGS, samples=1), tmp_path, config=config)
    failed = requests(records, outcome="error")
    assert failed
    assert all((each.reason or "").startswith("http-500") for each in failed)
    for part in ("code 100", "code 320"):
        evicted = requests(records, part=part, role="evict", outcome="ok")
        assert sum(each.prompt_tokens or 0 for each in evicted) >= 1.25 * POOL


def test_finished_rungs_of_an_interrupted_ladder_are_kept(tmp_path: Path) -> None:
    records = records_of(RUNGS, tmp_path)
    cut = next(i for i, each in enumerate(records) if getattr(each, "part", "") == "code 320") + 2
    kept = [each for each in records[:cut] if getattr(each, "part", "") == "code 100"]
    rewrite(tmp_path, records[:cut])
    again = records_of(RUNGS, tmp_path, resume=True)
    assert [each for each in again if getattr(each, "part", "") == "code 100"] == kept
    assert places(again) == [("before", ""), ("rung", "code 100"), ("before", "resumed 1"), ("rung", "code 320"),
                             ("after", "")]
    assert {each.cached_tokens for each in requests(again, part="code 320", role="cold")} == {0}
    assert cell_figures(again, lag_bar_s=60.0)["void"] is False
    assert len(of(EndRecord, again)) == 1
    assert len(of(SegmentRecord, again, segment="rung")) == 2


def rewrite(folder: Path, records: list[Record]) -> None:
    """As if the run had been killed after these."""
    (folder / RECORDS).write_text("".join(json.dumps(to_json(each)) + "\n" for each in records))


@pytest.mark.parametrize(("wrong", "why"), [
    ({"samples": 0}, "samples is 0"), ({"sizes": (100, 100)}, "different numbers"), ({"streams": (0,)}, "at least 1"),
    ({"evict_pools": -1.0}, "evict_pools is -1.0"), ({"sizes": (), "streams": ()}, "has no rung"),
])
def test_parameters_that_mean_nothing_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        dataclasses.replace(RUNGS, **wrong)
