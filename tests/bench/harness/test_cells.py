"""A cell from an idle server to its file: brackets, refusals, interruptions, and the honest cold start."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.bench.harness.on_mock import QUICK, cell_of, end_of, measure_on, of, places, read, records_of, requests

from hostcache.bench.harness.agents import AgentsParameters
from hostcache.bench.harness.cell import Cell, CellSpec, Workload, corpus_text
from hostcache.bench.harness.cellfile import RECORDS, cell_state
from hostcache.bench.harness.rotate import RotateParameters
from hostcache.bench.harness.target import NotConfirmed, Target, confirm, hostcache_target, vllm_target
from hostcache.errors import ConfigError, ServerError
from hostcache.records import Record, RecordRefused, SegmentRecord
from hostcache.testing.mock_server import Fault, MockConfig, MockServer

SMALL = RotateParameters(clients=2, sessions=4, tokens=64, growth_tokens=8, reply_tokens=4, nopressure_visits=1,
                         duration_s=0.0, recovery_idle_s=0.0, observe_idle_s=0.0, probe_tokens=0)
RAMP = AgentsParameters(points=(1, 2, 3), prefix_tokens=64, tool_tokens=8, reply_tokens=4, gap_min_s=0.0,
                        gap_max_s=0.02, duration_s=0.05)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Broken(Workload):
    """Sends one request and breaks in the middle of its segment."""

    KIND = "ladder"

    async def run(self, cell: Cell) -> None:
        async with cell.segment("rung", "only"):
            await cell.ask(cell.texts.prompt(cell.texts.head(32, "a")), role="cold", session="a", max_tokens=2)
            raise ServerError("the workload broke")


def test_a_cell_is_bracketed_and_its_controls_hit_nothing(tmp_path: Path) -> None:
    records = records_of(SMALL, tmp_path)
    assert places(records) == [("before", ""), ("nopressure", ""), ("warmup", ""), ("after", "")]
    controls = requests(records, role="control")
    assert [(each.segment, each.cached_tokens, each.shared_tokens) for each in controls] == [
        ("before", 0, 0), ("after", 0, 0)]
    assert controls[0].prompt_sha256 != controls[1].prompt_sha256
    assert end_of(records).outcome == "finished"
    assert cell_state(tmp_path) == "finished"


def test_the_first_line_says_what_was_measured_where(tmp_path: Path) -> None:
    cell = cell_of(records_of(SMALL, tmp_path, bars={"ttft_p95_s": 1.0}, goodput={"ttft": 2000.0}, seed=7,
                              metadata={"gpu": "none"}))
    assert cell.target["engine"] == "hostcache"
    assert cell.target["arm_confirmed_by"] == "the server's report"
    assert cell.parameters["sessions"] == 4
    assert cell.parameters["mode"] == "ids"
    assert (cell.parameters["bars"], cell.parameters["goodput"]) == ({"ttft_p95_s": 1.0}, {"ttft": 2000.0})
    assert cell.environment["metadata.gpu"] == "none"
    assert list(cell.inputs) == ["corpus code"]


def test_every_segment_balances_by_the_servers_own_counters(tmp_path: Path) -> None:
    records = records_of(SMALL, tmp_path)
    for segment in of(SegmentRecord, records):
        moved = {name: segment.closing[name] - segment.opening[name]
                 for name in ("prompt_tokens", "cached_tokens", "recomputed_tokens")}
        asked = requests(records, segment=segment.segment)
        assert moved["cached_tokens"] + moved["recomputed_tokens"] == moved["prompt_tokens"]
        assert moved["prompt_tokens"] == sum(each.prompt_tokens or 0 for each in asked)
        assert moved["cached_tokens"] == sum(each.cached_tokens or 0 for each in asked)
        assert segment.resets == ()
        assert segment.raw_opening
        assert segment.raw_closing


def test_the_same_seed_again_on_a_warm_server_shows_hits_on_first_visits_but_not_in_the_control(
        tmp_path: Path) -> None:
    """Case O10: with the salt forced, the second run is not the first; with a salt of its own it is."""

    async def run() -> None:
        async with MockServer(dataclasses.replace(QUICK, device_blocks=4096)) as server:
            for folder, salt in (("first", "fixed"), ("again", "fixed"), ("fresh", None)):
                await measure_on(server, SMALL, tmp_path / folder, salt=salt)

    asyncio.run(run())
    first, again, fresh = (read(tmp_path / name) for name in ("first", "again", "fresh"))
    assert [each.cached_tokens for each in requests(first, role="prime")] == [0] * 4
    assert [each.cached_tokens for each in requests(again, role="prime")] == [48] * 4  # all but the last block
    assert all((each.shared_tokens or 0) < (each.cached_tokens or 0) for each in requests(again, role="prime"))
    assert [each.cached_tokens for each in requests(fresh, role="prime")] == [0] * 4
    for records in (first, again, fresh):
        assert {each.cached_tokens for each in requests(records, role="control")} == {0}
    assert cell_of(first).identity == cell_of(again).identity == cell_of(fresh).identity


def test_identity_ignores_the_length_of_the_window_and_nothing_that_is_said(tmp_path: Path) -> None:
    def identity(workload: RotateParameters, **spec: Any) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return cell_of(records_of(workload, folder, **spec)).identity

    base = identity(SMALL)
    assert identity(dataclasses.replace(SMALL, duration_s=0.05)) == base
    assert identity(SMALL, arm="other", attempt=3, bars={"errors": 0}) == base
    assert identity(dataclasses.replace(SMALL, tokens=65)) != base
    assert identity(SMALL, seed=1) != base
    assert identity(SMALL, mode="text") != base


@pytest.mark.parametrize(("config", "target", "why"), [
    (dataclasses.replace(QUICK, host_blocks=64), {"tier": "off"}, "to be without a tier, and the server reports one"),
    (dataclasses.replace(QUICK, host_blocks=0), {"tier": "on"}, "to have a tier, and the server reports none"),
    (QUICK, {"tier": "on", "quota_bytes": 1000}, "quota of 1000 bytes, and the server reports 67108864"),
])
def test_an_arm_that_was_not_switched_is_refused_before_anything_is_measured(
        tmp_path: Path, config: MockConfig, target: dict[str, object], why: str) -> None:
    async def run() -> int:
        async with MockServer(config) as server:
            asked = Target(arm="the arm", url=server.url, **target)  # type: ignore[arg-type]  # of the table above
            with pytest.raises(NotConfirmed, match=why):
                await measure_on(server, SMALL, tmp_path, target=asked)
            return int(server.stats()["accounting"]["requests"])

    assert asyncio.run(run()) == 0
    records = read(tmp_path)
    assert [type(record).__name__ for record in records] == ["CellRecord", "EndRecord"]
    assert cell_of(records).target["arm_confirmed_by"] is None
    assert end_of(records).outcome == "failed"
    assert why in end_of(records).detail


def test_a_server_that_does_not_say_whether_it_has_a_tier_confirms_neither_arm() -> None:
    for tier in ("on", "off"):
        with pytest.raises(NotConfirmed, match="does not say"):
            confirm(Target(arm="a", url="http://x", tier=tier), {"engine": "unknown", "tier": None})
    assert confirm(Target(arm="a", url="http://x"), {"tier": None}) == "not asked"


def test_a_workload_that_breaks_leaves_its_requests_and_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="the workload broke"):
        records_of(Broken(), tmp_path)
    records = read(tmp_path)
    assert places(records) == [("before", "")]
    assert len(requests(records, role="cold")) == 1
    assert (end_of(records).outcome, end_of(records).detail) == ("failed", "the workload broke")


def test_a_server_that_serves_nothing_is_told_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with MockServer(QUICK) as server:
            server.config = dataclasses.replace(QUICK, faults=(Fault(kind="http-500", every=1),))
            await measure_on(server, SMALL, tmp_path)

    with pytest.raises(ServerError):
        asyncio.run(run())


def test_records_are_never_written_over(tmp_path: Path) -> None:
    records_of(SMALL, tmp_path)
    with pytest.raises(FileExistsError):
        records_of(SMALL, tmp_path)


def test_an_interrupted_ramp_goes_on_where_it_was(tmp_path: Path) -> None:
    """The user stops it after the second point; the third alone is run again, under another salt."""

    def interrupt(part: str, records: Sequence[Record]) -> str | None:
        assert requests(records, segment="window", part=part)
        if part == "2":
            raise KeyboardInterrupt
        return None

    async def run() -> None:
        async with MockServer(QUICK) as server:
            with pytest.raises(KeyboardInterrupt):
                await measure_on(server, RAMP, tmp_path, stop=interrupt)
            assert cell_state(tmp_path) == "interrupted"
            with (tmp_path / RECORDS).open("a") as stream:
                stream.write('{"record":"request","versi')  # killed in the middle of a line
            await measure_on(server, RAMP, tmp_path, resume=True)
            kept = (tmp_path / RECORDS).read_bytes()
            await measure_on(server, RAMP, tmp_path, resume=True)
            assert (tmp_path / RECORDS).read_bytes() == kept

    asyncio.run(run())
    records = read(tmp_path)
    assert end_of(records).outcome == "finished"
    assert places(records) == [("before", ""), ("prime", "1"), ("window", "1"), ("prime", "2"), ("window", "2"),
                               ("before", "resumed 1"), ("prime", "3"), ("window", "3"), ("after", "")]
    assert all(each.cached_tokens == 0 for each in requests(records, segment="prime", role="prime"))
    assert (tmp_path / "records.interrupted-1.jsonl").exists()


def test_a_point_that_was_cut_short_is_run_again_from_its_beginning(tmp_path: Path) -> None:
    records = records_of(RAMP, tmp_path)
    lines = (tmp_path / RECORDS).read_text().splitlines(keepends=True)
    window = next(i for i, record in enumerate(records) if isinstance(record, SegmentRecord)
                  and (record.segment, record.part) == ("window", "2"))
    (tmp_path / RECORDS).write_text("".join(lines[:window]))  # kill -9 before the segment's record
    assert cell_state(tmp_path) == "interrupted"
    again = records_of(RAMP, tmp_path, resume=True)
    assert places(again)[:3] == [("before", ""), ("prime", "1"), ("window", "1")]
    assert places(again)[4:] == [("prime", "2"), ("window", "2"), ("prime", "3"), ("window", "3"), ("after", "")]
    primes = requests(again, segment="prime", part="2", role="prime")
    assert sorted(each.client for each in primes if each.turn == 0) == [0, 1]


def test_a_point_that_failed_before_the_interruption_ends_the_ramp_on_resume_too(tmp_path: Path) -> None:
    records = records_of(RAMP, tmp_path)
    lines = (tmp_path / RECORDS).read_text().splitlines(keepends=True)
    window = next(i for i, record in enumerate(records) if isinstance(record, SegmentRecord)
                  and (record.segment, record.part) == ("window", "1"))
    (tmp_path / RECORDS).write_text("".join(lines[: window + 1]))  # kill -9 right after it

    def stop(part: str, records: Sequence[Record]) -> str | None:
        return "ttft_p95_s" if requests(records, segment="window", part=part) else None

    again = records_of(RAMP, tmp_path, resume=True, stop=stop)
    assert places(again) == [("before", ""), ("prime", "1"), ("window", "1"), ("before", "resumed 1"), ("after", "")]


def test_another_cell_does_not_go_on_in_the_same_file(tmp_path: Path) -> None:
    records_of(RAMP, tmp_path)
    lines = (tmp_path / RECORDS).read_text().splitlines(keepends=True)
    (tmp_path / RECORDS).write_text("".join(lines[:-1]))
    with pytest.raises(ConfigError, match="made with another identity"):
        records_of(dataclasses.replace(RAMP, tool_tokens=9), tmp_path, resume=True)


def test_a_refused_arm_that_was_put_right_is_measured_on_resume(tmp_path: Path) -> None:
    for config in (dataclasses.replace(QUICK, host_blocks=0), QUICK):
        async def run(config: MockConfig = config) -> None:
            async with MockServer(config) as server:
                await measure_on(server, SMALL, tmp_path, resume=True)

        if config is QUICK:
            asyncio.run(run())
        else:
            with pytest.raises(NotConfirmed):
                asyncio.run(run())
    assert cell_of(read(tmp_path)).target["arm_confirmed_by"] == "the server's report"
    assert cell_state(tmp_path) == "finished"


def test_a_rotation_that_was_cut_short_begins_anew_under_another_salt(tmp_path: Path) -> None:
    first = records_of(SMALL, tmp_path)
    lines = (tmp_path / RECORDS).read_text().splitlines(keepends=True)
    (tmp_path / RECORDS).write_text("".join(lines[:-1]))
    again = records_of(SMALL, tmp_path, resume=True)
    assert places(again) == places(first)
    assert cell_of(again).salt != cell_of(first).salt


def test_a_file_that_is_broken_in_the_middle_is_refused_by_line(tmp_path: Path) -> None:
    records_of(SMALL, tmp_path)
    lines = (tmp_path / RECORDS).read_text().splitlines(keepends=True)
    (tmp_path / RECORDS).write_text("".join([lines[0], lines[1][:40] + "\n", *lines[2:]]))
    with pytest.raises(RecordRefused, match="line 2"):
        cell_state(tmp_path)


def test_a_ramp_ends_at_the_point_that_gives_a_reason(tmp_path: Path) -> None:
    records = records_of(RAMP, tmp_path, stop=lambda part, _: "too slow" if part == "2" else None)
    assert places(records)[-2:] == [("window", "2"), ("after", "")]
    assert end_of(records).outcome == "finished"


def test_a_server_started_for_the_cell_has_its_log_and_is_gone_afterwards(tmp_path: Path) -> None:
    script = ("import argparse, asyncio; from hostcache.testing.mock_server import *; p = argparse.ArgumentParser(); "
              "add_arguments(p); a = p.parse_args(); print('mock begins', flush=True); "
              "asyncio.run(serve_mock(config_from(a), a.host, a.port))")
    target = Target(arm="on", tier="on", env={"MOCK": "1"},
                    start=(sys.executable, "-c", script, "--port", "{port}", "--host-blocks", "64"))

    async def run() -> None:
        async with MockServer(QUICK) as unused:
            await measure_on(unused, SMALL, tmp_path, target=target)

    asyncio.run(run())
    cell = cell_of(read(tmp_path))
    assert cell.target["command"][:2] == ["env", "MOCK=1"]
    assert "mock begins" in (tmp_path / str(cell.target["log"])).read_text()


def test_a_command_that_does_not_come_up_is_told_with_its_last_words(tmp_path: Path) -> None:
    for start, why in (((sys.executable, "-c", "raise SystemExit('no such model')", "{port}"), "no such model"),
                       (("no-such-command", "{port}"), "cannot start no-such-command")):
        async def run(start: tuple[str, ...] = start) -> None:
            async with MockServer(QUICK) as unused:
                await measure_on(unused, SMALL, tmp_path, target=Target(arm="on", start=start))

        with pytest.raises(ServerError, match=why):
            asyncio.run(run())


def test_a_target_has_one_address_and_a_place_for_its_port() -> None:
    with pytest.raises(ConfigError, match="neither"):
        Target(arm="a")
    with pytest.raises(ConfigError, match="both"):
        Target(arm="a", url="http://x", start=("serve", "{port}"))
    with pytest.raises(ConfigError, match=r"has no .port."):
        Target(arm="a", start=("serve", "--port", "8000"))


def test_presets_give_every_setting_that_may_differ_between_arms() -> None:
    off, on = (hostcache_target(arm, model="m", pool_tokens=1024, page_tokens=32, host_cache_bytes=quota, concurrency=4)
               for arm, quota in (("off", 0), ("on", 1 << 20)))
    assert (off.tier, off.quota_bytes, on.tier, on.quota_bytes) == ("off", None, "on", 1 << 20)
    assert [pair for pair in zip(off.start, on.start, strict=True) if pair[0] != pair[1]] == [("0", str(1 << 20))]
    plain, inside = (vllm_target(arm, model="m", host_cache_bytes=quota, extra=("--max-model-len", "2048"))
                     for arm, quota in (("off", 0), ("on", 1 << 20)))
    assert [pair for pair in zip(plain.start, inside.start, strict=True) if pair[0] != pair[1]] == [("0", str(1 << 20))]
    own = vllm_target("off", model="m", host_cache_bytes=0, command=("vllm", "serve"))
    assert own.start[:5] == ("vllm", "serve", "m", "--host", "127.0.0.1")


def test_prompts_that_the_server_cannot_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--prompts ids needs a server with /tokenize"):
        records_of(SMALL, tmp_path, config=dataclasses.replace(QUICK, no_tokenize=True), mode="ids")


@pytest.mark.parametrize("mode", ["text", "chat"])
def test_text_and_chat_hit_too_and_claim_no_shared_tokens(tmp_path: Path, mode: str) -> None:
    records = records_of(dataclasses.replace(SMALL, warmup_laps=2), tmp_path, mode=mode,
                         config=dataclasses.replace(QUICK, device_blocks=4096))
    revisits = requests(records, role="revisit")
    assert revisits
    assert all((each.cached_tokens or 0) > 0 and each.shared_tokens is None for each in revisits)


def test_a_server_without_usage_gives_records_with_reasons(tmp_path: Path) -> None:
    records = records_of(SMALL, tmp_path, config=dataclasses.replace(QUICK, usage="none"))
    asked = requests(records)
    assert asked
    for each in asked:
        assert (each.outcome, each.prompt_tokens, each.cached_tokens) == ("ok", None, None)
        assert (each.reason or "").startswith("usage-missing")


@pytest.mark.parametrize("kind", ["http-500", "malformed", "reset", "cut-short", "no-token", "stream-error"])
def test_what_goes_wrong_is_a_record_with_a_reason_and_never_a_drop(tmp_path: Path, kind: str) -> None:
    config = dataclasses.replace(QUICK, faults=(Fault(kind=kind, every=7),))  # type: ignore[arg-type]  # of the list
    records = records_of(dataclasses.replace(SMALL, clients=4), tmp_path, config=config)
    failed = [each for each in requests(records) if each.outcome != "ok"]
    assert failed
    assert all(each.outcome == "error" and (each.reason or "").startswith(kind.replace("malformed", "malformed-sse"))
               for each in failed)
    assert len(requests(records)) == 2 + 4 + 4  # controls, nopressure, warmup: nobody is left out
    assert end_of(records).outcome == "finished"


def test_a_server_that_falls_silent_is_given_up_with_a_reason(tmp_path: Path) -> None:
    async def run() -> None:
        async with MockServer(dataclasses.replace(QUICK, faults=(Fault(kind="stall", every=7),))) as server:
            target = Target(arm="on", url=server.url, silence_s=0.5)
            await measure_on(server, dataclasses.replace(SMALL, clients=4), tmp_path, target=target)

    asyncio.run(run())
    failed = [each for each in requests(read(tmp_path)) if each.outcome != "ok"]
    assert failed
    assert all((each.reason or "").startswith("stalled") for each in failed)


def test_a_corpus_has_a_name_or_a_folder() -> None:
    assert len(corpus_text("code", 5000)) == 5000
    with pytest.raises(ConfigError, match="holds no whole corpus"):
        corpus_text("no/such/folder:prose", 5000)


def test_a_cell_spec_is_no_place_for_secrets() -> None:
    assert "api_key" not in {field.name for field in dataclasses.fields(CellSpec)}
