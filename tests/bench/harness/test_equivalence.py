"""Cold, device and restored answers of a mock: what is asked of whom, what counts as proof, and the verdict."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.bench.harness.on_mock import QUICK, end_of, measure_on, places, read, records_of, requests

from hostcache.bench.harness.cell import CellSpec, run_cell
from hostcache.bench.harness.cellfile import RECORDS
from hostcache.bench.harness.equivalence import EquivalenceParameters, judge
from hostcache.bench.harness.figures import cell_figures
from hostcache.bench.harness.ladder import LadderParameters
from hostcache.bench.harness.target import Target, hostcache_target
from hostcache.clock import WallClock
from hostcache.errors import ConfigError
from hostcache.records import EndRecord, Record, RequestRecord, Role, to_json
from hostcache.testing.mock_server import MockConfig, MockServer

THREE = EquivalenceParameters(conversations=3, shortest_tokens=64, longest_tokens=400, reply_tokens=8)
TWO = dataclasses.replace(THREE, conversations=2)


def tierless(workload: EquivalenceParameters, folder: Path, *, config: MockConfig = QUICK) -> list[Record]:
    async def run() -> None:
        async with MockServer(dataclasses.replace(config, host_blocks=0)) as server:
            await measure_on(server, workload, folder, target=Target(arm="off", url=server.url, tier="off"), arm="off")

    asyncio.run(run())
    return read(folder)


def edited(records: list[Record], role: Role, change: Callable[[RequestRecord], dict[str, Any]]) -> list[Record]:
    """The same run, had the answers of that role been others."""
    return [dataclasses.replace(each, **change(each)) if isinstance(each, RequestRecord) and each.role == role else each
            for each in records]


def another(record: RequestRecord) -> dict[str, Any]:
    ids = (*record.reply_ids[:5], record.reply_ids[5] + 1, *record.reply_ids[6:])
    return {"reply_ids": ids, "reply_sha256": "another"}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    return records_of(THREE, tmp_path_factory.mktemp("good"))


def test_every_conversation_is_asked_cold_from_the_device_cold_again_and_restored(good: list[Record]) -> None:
    parts = ("63", "160", "401")  # before, on and after a boundary of 16 tokens
    assert places(good) == [("before", ""), *(("prime", part) for part in parts), *(("warmup", part) for part in parts),
                            ("warmup", "evict 63"), *(("compare", part) for part in parts), ("after", "")]
    for part, whole in zip(parts, (48, 144, 400), strict=True):
        asked = requests(good, part=part)
        assert [(each.segment, each.role) for each in asked] == [
            ("prime", "cold"), ("prime", "reuse"), ("warmup", "cold-again"), ("compare", "restored")]
        assert [(each.device_tokens, each.host_tokens) for each in asked] == [(0, 0), (whole, 0), (0, 0), (0, whole)]
        assert len({each.prompt_sha256 for each in asked}) == 1
        assert {len(each.reply_ids) for each in asked} == {8}


def test_identical_answers_with_proof_are_the_verdict(good: list[Record]) -> None:
    said = judge(good)
    assert (said.verdict, said.exit_code) == ("identical", 0)
    assert said.lines == ("identical: restored against cold 3 of 3 identical; from the device against cold 3 of 3 "
                          "identical", "noise floor, cold against cold: 3 of 3 identical")


def test_a_corrupt_restore_is_found_and_ends_in_exit_3(tmp_path: Path) -> None:
    said = judge(records_of(THREE, tmp_path, config=dataclasses.replace(QUICK, corrupt_restores=True)))
    assert (said.verdict, said.exit_code) == ("different", 3)
    assert (said.restored.same, said.restored.compared, said.device.same) == (0, 3, 3)
    assert said.lines[2] == "restored differs (first difference at token 4): 63, 160, 401 tokens"


def test_one_conversation_is_compared_at_its_full_length(tmp_path: Path) -> None:
    """The large rung: the longest there is, cold, pushed out and restored."""
    large = EquivalenceParameters(conversations=1, longest_tokens=1000, reply_tokens=8)
    records = records_of(large, tmp_path)
    (restored,) = requests(records, role="restored")
    assert (restored.prompt_tokens, restored.host_tokens) == (1000, 992)
    assert judge(records).restored.compared == 1


def test_conversations_can_be_pushed_out_a_few_at_a_time(tmp_path: Path) -> None:
    records = records_of(dataclasses.replace(THREE, at_once=2), tmp_path)
    assert [part for segment, part in places(records) if part.startswith("evict")] == ["evict 63", "evict 401"]
    assert judge(records).restored.same == 3


def test_a_server_without_a_tier_is_compared_from_the_device_and_nothing_is_pushed_out(tmp_path: Path) -> None:
    records = tierless(THREE, tmp_path)
    assert [(each.segment, each.role) for each in requests(records, part="160")] == [
        ("prime", "cold"), ("warmup", "cold-again"), ("compare", "reuse")]
    assert requests(records, role="evict") == []
    said = judge(records)
    assert (said.exit_code, said.device.same, said.noise.same) == (0, 3, 3)
    assert said.lines[0] == "identical: the server has no tier; from the device against cold 3 of 3 identical"
    assert [row["verdict"] for row in cell_figures(records)["equivalence"]["rows"]] == ["identical"] * 3


def test_without_a_prefix_cache_nothing_is_proven_and_all_answers_are_cold(tmp_path: Path) -> None:
    records = tierless(TWO, tmp_path, config=dataclasses.replace(QUICK, style="vllm", device_blocks=0))
    assert {(row["verdict"], row["why"]) for row in cell_figures(records)["equivalence"]["rows"]} == {
        ("unproven", "nothing came from a cache")}
    said = judge(records)
    assert (said.verdict, said.exit_code, said.device.compared) == ("unproven", 1, 0)
    assert (said.noise.same, said.noise.compared) == (2, 2)
    assert said.lines[2] == "the server says that its prefix cache is off"
    assert said.lines[3].startswith("device not counted (nothing came from a cache): ")


def test_without_a_tier_eviction_makes_cold_again(tmp_path: Path) -> None:
    records = tierless(dataclasses.replace(THREE, cold_again="evict"), tmp_path)
    assert [(each.role, each.cached_tokens) for each in requests(records, part="160")] == [
        ("cold", 0), ("reuse", 144), ("cold-again", 0)]
    assert judge(records).noise.compared == 3


def test_where_no_salt_is_taken_the_cache_is_reset(tmp_path: Path) -> None:
    records = records_of(THREE, tmp_path, config=dataclasses.replace(QUICK, openai_fields_only=True))
    again = requests(records, role="cold-again")
    assert [each.cached_tokens for each in again] == [0, 0, 0]
    said = judge(records)
    assert (said.exit_code, said.noise.compared, said.restored.compared) == (0, 3, 3)


def test_without_a_second_cold_answer_the_noise_floor_is_said_to_be_unavailable(tmp_path: Path) -> None:
    for way in ("none", "evict"):  # a server with a tier restores what was pushed out
        records = records_of(dataclasses.replace(TWO, cold_again=way), tmp_path / way)
        assert requests(records, role="cold-again") == []
        said = judge(records)
        assert (said.exit_code, said.restored.same) == (0, 2)
        assert "unavailable" in said.lines[1]


def test_a_server_that_tells_nothing_of_its_cache_proves_nothing(tmp_path: Path) -> None:
    said = judge(records_of(THREE, tmp_path, config=dataclasses.replace(QUICK, usage="plain")))
    assert (said.verdict, said.exit_code) == ("unproven", 1)
    assert (said.restored.compared, said.device.compared) == (0, 0)
    assert "restored not counted (the server does not say what the cold answer was served from)" in said.lines[3]


@pytest.mark.parametrize("plugin", [True, False])
def test_inside_vllm_the_counters_around_the_answer_are_the_proof(plugin: bool, tmp_path: Path) -> None:
    """The tier as a plugin, and vLLM's own offloading."""
    config = dataclasses.replace(QUICK, style="vllm", plugin=plugin)
    records = records_of(THREE, tmp_path, config=config)
    assert {each.host_tokens for each in requests(records, role="restored")} == {None}
    said = judge(records)
    assert (said.exit_code, said.restored.same, said.noise.same) == (0, 3, 3)


@pytest.mark.parametrize("plugin", [True, False])
def test_the_report_and_the_verdict_agree_inside_vllm(plugin: bool, tmp_path: Path) -> None:
    config = dataclasses.replace(QUICK, style="vllm", plugin=plugin)
    found = cell_figures(records_of(TWO, tmp_path, config=config))["equivalence"]
    assert [row["verdict"] for row in found["rows"]] == ["identical", "identical"]


def test_text_without_ids_is_compared_by_its_digest(tmp_path: Path) -> None:
    corrupt = dataclasses.replace(QUICK, corrupt_restores=True)
    assert judge(records_of(TWO, tmp_path / "same", mode="chat")).verdict == "identical"
    said = judge(records_of(TWO, tmp_path / "other", mode="chat", config=corrupt))
    assert said.exit_code == 3
    assert "no token ids to say where" in said.lines[2]


def test_a_difference_within_the_noise_of_two_cold_answers_is_no_comparison(good: list[Record]) -> None:
    noisy = edited(edited(good, "cold-again", another), "restored", another)
    said = judge(noisy)
    assert (said.verdict, said.exit_code) == ("unproven", 1)
    assert (said.noise.same, said.noise.compared, said.restored.compared) == (0, 3, 0)
    assert any("two cold answers differ here" in line for line in said.lines)


@pytest.mark.parametrize(("role", "change", "why"), [
    ("restored", {"host_tokens": 0, "cached_tokens": 0}, "nothing was restored"),
    ("restored", {"device_tokens": 48}, "48 tokens were still on the device"),
    ("restored", {"outcome": "error", "reason": "http-500: it broke"}, "restored: http-500: it broke"),
    ("cold", {"cached_tokens": 16, "shared_tokens": None}, "16 tokens of the cold answer came from a cache"),
])
def test_an_answer_without_proof_is_not_counted_and_says_why(role: Role, change: dict[str, Any], why: str,
                                                              good: list[Record]) -> None:
    """However different it is: nobody knows what was compared."""
    said = judge(edited(edited(good, "restored", another), role, lambda _: change))
    assert said.restored.compared == 0
    assert (said.verdict, said.exit_code) == ("unproven", 1)
    assert any(f"restored not counted ({why})" in line for line in said.lines)


def test_a_device_answer_that_differs_is_a_difference_too(good: list[Record]) -> None:
    said = judge(edited(good, "reuse", another))
    assert (said.exit_code, said.restored.same, said.device.same) == (3, 3, 0)


def test_a_run_that_was_cut_short_or_began_warm_is_not_identical(good: list[Record]) -> None:
    assert "did not finish" in judge([each for each in good if not isinstance(each, EndRecord)]).lines[-1]
    warm = judge(edited(good, "control", lambda _: {"cached_tokens": 99}))
    assert warm.exit_code == 1
    assert any("an earlier run had left" in line for line in warm.lines)


def test_only_equivalence_is_judged(tmp_path: Path) -> None:
    shape = LadderParameters(sizes=(), streams=(1,), samples=1, decode_tokens=2)
    with pytest.raises(ConfigError, match="is a run of ladder"):
        judge(records_of(shape, tmp_path))


def test_a_conversation_that_does_not_fit_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a conversation of 2001 tokens .* exceed the 1024 tokens that the device"):
        records_of(dataclasses.replace(THREE, longest_tokens=2000), tmp_path)
    assert {each.role for each in requests(read(tmp_path))} == {"control"}
    assert end_of(read(tmp_path)).outcome == "failed"


def test_compared_conversations_of_an_interrupted_run_are_kept(tmp_path: Path, good: list[Record]) -> None:
    folder = tmp_path / "again"
    first = records_of(THREE, folder)
    closed = [i for i, each in enumerate(first) if getattr(each, "segment", "") == "compare"]
    (folder / RECORDS).write_text("".join(json.dumps(to_json(each)) + "\n" for each in first[: closed[2]]))
    records = records_of(THREE, folder, resume=True)
    assert requests(records, part="63") == requests(first, part="63")
    assert [part for segment, part in places(records) if segment == "compare"] == ["63", "160", "401"]
    assert len(requests(records, role="restored")) == 3
    assert judge(records).lines == judge(good).lines


@pytest.mark.slow
def test_the_embedded_engine_restores_the_very_answers(tmp_path: Path) -> None:
    """The real model, with a real tier and without one."""
    shape = EquivalenceParameters(conversations=2, shortest_tokens=150, longest_tokens=300, reply_tokens=12)
    said = []
    for arm, quota_bytes in (("on", 64 << 20), ("off", 0)):
        target = hostcache_target(arm, model="smollm2", pool_tokens=512, page_tokens=32, host_cache_bytes=quota_bytes,
                                  concurrency=4)
        run_cell(CellSpec(cell="equivalence", arm=arm, workload=shape), target, tmp_path / arm, clock=WallClock(),
                 err=io.StringIO())
        said.append(judge(read(tmp_path / arm)))
    on, off = said
    assert (on.exit_code, on.restored.same, on.device.same, on.noise.same) == (0, 2, 2, 2)
    assert (off.exit_code, off.restored.compared, off.device.same, off.noise.same) == (0, 0, 2, 2)


@given(st.integers(2, 40), st.integers(1, 500), st.integers(0, 5000), st.sampled_from((1, 2, 16, 32, 48, 64, 256)))
def test_lengths_lie_beside_page_boundaries_and_never_twice(count: int, shortest: int, more: int, page: int) -> None:
    shape = EquivalenceParameters(conversations=count, shortest_tokens=shortest, longest_tokens=shortest + more)
    lengths = shape.lengths(page)
    assert len(set(lengths)) == count
    assert min(lengths) > 0
    assert all((tokens - beside) % page == 0 for tokens, beside in zip(lengths, (-1, 0, 1) * count, strict=False))
    assert lengths == shape.lengths(page)


@pytest.mark.parametrize(("wrong", "why"), [
    ({"conversations": 0}, "conversations is 0"), ({"longest_tokens": 10}, "below shortest_tokens"),
    ({"evict_pools": 0.0}, "without eviction nothing is restored"), ({"at_once": -1}, "at_once is -1"),
    ({"cold_again": "wish"}, "one of auto, cache_salt, reset, evict, none"),
])
def test_parameters_that_mean_nothing_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        dataclasses.replace(THREE, **wrong)
