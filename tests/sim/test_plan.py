"""Is a host tier worth its memory: the ladder, the verdict, the refusals, and the command."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from hostcache.cli import _parser, main
from hostcache.errors import ConfigError
from hostcache.records import PlanRecord
from hostcache.sim.plan import AgentsLoad, Machine, ProfileLoad, TraceLoad, ladder, plan
from hostcache.workload.agents import AgentShape
from hostcache.workload.profiles import Profile, profile_json
from hostcache.workload.sample_traces import synthetic_requests, write_trace
from hostcache.workload.traces import DELTA

PAGE = 16
MACHINE = Machine(pool_tokens=4000, kv_bytes_per_token=1000, prefill_tok_s=500.0, copy_bytes_per_s=1e9,
                  page_tokens=PAGE, slots=4, chunk_tokens=256)  # fmt: skip
SHAPE = AgentShape(prefix_tokens=600, tool_tokens=60, reply_tokens=20, gap_min_s=1.0, gap_max_s=3.0)
LOAD = AgentsLoad(agents=10, shape=SHAPE, window_s=60.0)
WORKING_SET = 20_000_000


def test_a_pressed_pool_is_told_until_which_size_it_pays() -> None:
    record = plan(MACHINE, LOAD, [WORKING_SET // 8, WORKING_SET, 8 * WORKING_SET])
    off, *sizes = record.rows
    assert off.arm == "off"
    assert off.host_bytes == 0
    assert off.host_tokens == 0
    assert sizes[1].turns > off.turns
    assert (sizes[1].hit_share or 0) > (off.hit_share or 0)
    assert (sizes[1].avg_s or 0) < (off.avg_s or 0)
    assert not sizes[2].pays
    assert record.pays_until_bytes == WORKING_SET
    assert "Beyond that size it stops paying" in record.verdict
    for row in record.rows:
        assert row.device_tokens + row.host_tokens + row.recomputed_tokens == row.prompt_tokens


def test_where_everything_fits_it_never_pays_and_nothing_moves() -> None:
    record = plan(replace(MACHINE, pool_tokens=100_000), LOAD, [WORKING_SET])
    assert record.pays_until_bytes is None
    assert record.verdict.startswith("It never pays here")
    assert {row.turns for row in record.rows} == {record.rows[0].turns}
    assert all(row.written_bytes == row.restored_bytes == 0 for row in record.rows)


def test_the_record_does_not_depend_on_the_number_of_processes() -> None:
    one, two = (plan(MACHINE, LOAD, [WORKING_SET], jobs=jobs) for jobs in (1, 2))
    assert one == two
    assert plan(MACHINE, LOAD, [WORKING_SET], seed=1) != one


def test_recomputed_tokens_have_their_price() -> None:
    record = plan(MACHINE, LOAD, [WORKING_SET], price_per_mtok=2.0)
    for row in record.rows:
        assert row.price == pytest.approx(row.recomputed_tokens / 1e6 * 2.0)


def test_one_size_becomes_a_ladder_and_several_are_taken_as_they_are() -> None:
    assert ladder([8_000_000], MACHINE) == (1_000_000, 2_000_000, 4_000_000, 8_000_000)
    assert ladder([40_000], MACHINE) == (20_000, 40_000)
    assert ladder([64_000, 32_000, 64_000], MACHINE) == (32_000, 64_000)


def test_impossible_questions_are_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="host_cache_bytes is 15999, below one page of 16000 bytes"):
        plan(MACHINE, LOAD, [15_999])
    with pytest.raises(ConfigError, match="copy_bytes_per_s is 0"):
        replace(MACHINE, copy_bytes_per_s=0)
    with pytest.raises(ConfigError, match="a request of 4680 tokens; the context limit is 1048576 and the pool 4000"):
        plan(MACHINE, replace(LOAD, shape=replace(SHAPE, prefix_tokens=4600)), [WORKING_SET])
    with pytest.raises(ConfigError, match="price_per_mtok is -1"):
        plan(MACHINE, LOAD, [WORKING_SET], price_per_mtok=-1.0)


def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "sessions.jsonl.gz"
    write_trace(path, synthetic_requests(3, sessions=6, turns=5), format=DELTA)
    return path


def test_a_trace_is_answered_request_by_request(tmp_path: Path) -> None:
    load = TraceLoad.of(trace_file(tmp_path))
    machine = replace(MACHINE, pool_tokens=load.longest + 4096, page_tokens=64, prefill_tok_s=2000.0)
    record = plan(machine, load, [WORKING_SET * 10])
    assert {row.turns for row in record.rows} == {load.count}
    assert record.rows[-1].recomputed_tokens <= record.rows[0].recomputed_tokens
    with pytest.raises(ConfigError, match="pages of 48 tokens cannot be cut from blocks of 64"):
        plan(replace(machine, page_tokens=48), load, [WORKING_SET])


def test_a_profile_is_answered() -> None:
    profile = Profile(name="small", start_tokens=(200, 600), growth_tokens=(20, 80), reply_tokens=(10, 30),
                      gap_s=(1, 3), turns=(2, 8), sessions=12, shared_tokens=64, compact_one_in=10)  # fmt: skip
    record = plan(MACHINE, ProfileLoad(profile=profile, window_s=60.0), [WORKING_SET])
    assert record.rows[0].turns > 20
    assert record.rows[-1].host_tokens > 0


def command(*words: str) -> list[str]:
    return ["sim", "plan", "--pool-tokens", "4000", "--kv-bytes-per-token", "1000", "--prefill-tok-s", "500",
            "--page-tokens", "16", "--copy-bandwidth", "1GB", "--agents", "10", "--tokens", "600",
            "--tool-tokens", "60", "--reply-tokens", "20", "--gap-s", "1,3", "--window-s", "30", "--jobs", "1",
            *words]  # fmt: skip


def test_the_command_writes_a_record_and_a_page_and_prints_the_verdict_first(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command("--host-cache-bytes", "20MB", "--price-per-mtok", "0.3")) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("It pays up to")
    assert shown.err.count(": done, ") == 5
    folder = tmp_path / "hostcache-sim" / "001"
    document = json.loads((folder / "plan.json").read_text())
    assert document["record"] == PlanRecord.KIND
    assert len(document["rows"]) == 5
    assert document["commands"][0].startswith("hostcache sim plan --pool-tokens 4000")
    assert "<svg" in (folder / "plan.html").read_text()
    assert main(command("--host-cache-bytes", "20MB", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["arm"] == "off"
    assert (tmp_path / "hostcache-sim" / "002").is_dir()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host-cache-bytes", "1KB"], "below one page of 16000 bytes"),
        (["--copy-bandwidth", "0"], "copy_bytes_per_s is 0"),
        (["--tokens", "9000"], "the pool 4000"),
        (["--trace", "absent.jsonl"], "absent.jsonl"),
        (["--gap-s", "often"], "'often' is not a pair of numbers"),
        (["--slots", "0"], "'0' is not a whole number of at least 1"),
    ],
)
def test_the_command_refuses_in_one_line_with_exit_code_2_and_writes_nothing(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str],
        message: str) -> None:
    monkeypatch.chdir(tmp_path)
    given = command(*words)
    if "--trace" in words:
        at = given.index("--agents")
        del given[at : at + 2]
    assert main(given) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("hostcache: error: ")
    assert message in error
    assert not (tmp_path / "hostcache-sim").exists()


def test_the_commands_that_the_readme_prints_are_understood(root: Path) -> None:
    printed = re.findall(r"^\.venv/bin/hostcache (sim (?:.*\\\n)*.*)$", (root / "README.md").read_text(), re.MULTILINE)
    assert len(printed) == 3
    for line in printed:
        words = shlex.split(line.replace("\\\n", " "))
        assert _parser(words).parse_args(words).what == words[1]


def test_two_workloads_are_one_too_many(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(profile_json(Profile(name="p", start_tokens=(9,), growth_tokens=(1,), reply_tokens=(1,), gap_s=(1,),
                                         turns=(1,), sessions=1)))  # fmt: skip
    assert main(command("--profile", str(path))) == 2
    assert "are two workloads; give one" in capsys.readouterr().err
