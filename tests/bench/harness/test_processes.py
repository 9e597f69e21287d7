"""Load from several processes: every record comes back, a lost worker voids the run, Ctrl-C leaves a valid file."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from tests.bench.harness.on_mock import QUICK, end_of, measure_on, of, places, read, records_of, requests

from hostcache.bench.harness.agents import AgentsParameters
from hostcache.bench.harness.cellfile import RECORDS, cell_state
from hostcache.bench.harness.load import Cast, shares
from hostcache.bench.harness.processes import Plan, working
from hostcache.bench.harness.rotate import RotateParameters
from hostcache.bench.harness.texts import Texts
from hostcache.client.crew import line_of
from hostcache.errors import ServerError
from hostcache.records import RequestRecord, SegmentRecord
from hostcache.testing.mock_server import MockServer

AGENTS = AgentsParameters(points=(4,), prefix_tokens=64, tool_tokens=8, reply_tokens=4, gap_min_s=0.0, gap_max_s=0.02,
                          duration_s=0.1)
ENDLESS = dataclasses.replace(AGENTS, duration_s=600.0, reply_tokens=50)
SLOW = dataclasses.replace(QUICK, itl_s=0.01)
RUN = ("import sys; from hostcache.bench.harness import commands as c; import argparse; p = argparse.ArgumentParser(); "
       "c.add_arguments(p, 'agents'); sys.exit(c.run(p.parse_args(), 'agents', out=sys.stdout, err=sys.stderr))")


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until_busy(folder: Path) -> None:
    """The window is open and something is being answered."""
    path = folder / RECORDS
    while not path.exists() or '"segment":"window"' not in path.read_text():  # noqa: ASYNC110  # others write it
        await asyncio.sleep(0.02)


def test_shares_cover_everybody_once() -> None:
    assert shares(5, 2) == [(0, 2, 4), (1, 3)]
    assert shares(2, 8) == [(0,), (1,)]


def test_the_same_is_said_by_one_process_and_by_two(tmp_path: Path) -> None:
    alone, both = (requests(records_of(AGENTS, tmp_path / str(count), processes=count, salt="same"))
                   for count in (1, 2))
    said = [{(each.session, each.turn): each.prompt_sha256 for each in asked if each.role != "control"}
            for asked in (alone, both)]
    common = said[0].keys() & said[1].keys()
    assert set(range(4)) <= {each.client for each in both}
    assert common
    assert all(said[0][place] == said[1][place] for place in common)


def test_every_record_crosses_the_border_and_the_counters_agree(tmp_path: Path) -> None:
    records = records_of(RotateParameters(clients=2, sessions=4, tokens=64, growth_tokens=8, reply_tokens=4,
                                          duration_s=0.1, recovery_idle_s=0.0, observe_idle_s=0.0, probe_every_s=0.05),
                         tmp_path, processes=2)
    assert places(records) == [(name, "") for name in ("before", "nopressure", "warmup", "steady", "after")]
    for segment in of(SegmentRecord, records):
        counted = segment.closing["requests"] - segment.opening["requests"]
        assert counted == len(requests(records, segment=segment.segment))
    assert sorted(path.name for path in tmp_path.iterdir()) == [RECORDS]  # no worker had anything to complain of


def test_a_killed_worker_voids_the_run_with_a_reason_and_nobody_is_left_over(tmp_path: Path) -> None:
    async def run() -> list[int]:
        async with MockServer(SLOW) as server:
            cell = asyncio.create_task(measure_on(server, ENDLESS, tmp_path, processes=2))
            await until_busy(tmp_path)
            workers = children(os.getpid())
            os.kill(workers[-1], signal.SIGKILL)
            with pytest.raises(ServerError, match="was ended by SIGKILL before its work was done"):
                await cell
            return workers

    workers = asyncio.run(run())
    assert len(workers) == 2
    assert not set(workers) & set(children(os.getpid()))
    records = read(tmp_path)
    assert end_of(records).outcome == "failed"
    assert "so the run is void" in end_of(records).detail
    assert requests(records, outcome="aborted")  # what the living worker had on its way is told
    assert ("window", "4") not in places(records)


def test_a_worker_whose_input_ends_stops_by_itself(tmp_path: Path) -> None:
    """So that none outlives a harness that was killed."""
    texts = Texts("text", "some words " * 400, seed=0, salt="s")

    async def run() -> int:
        async with MockServer(SLOW) as server:
            plan = Plan(workload="agents", parameters=dataclasses.asdict(ENDLESS), url=server.url, api_key=None,
                        model="mock", ignore_eos=True, want_ids=True, silence_s=60.0,
                        cast=Cast(part="", count=4, mine=(0,), texts=texts, limit_tokens=None))
            worker = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "hostcache.bench.harness.worker", stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE)
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(line_of(plan.message()))
            assert b"ready" in await worker.stdout.readline()
            worker.stdin.write(b'{"order":{"segment":"prime","part":"","start_s":0.0,"until_s":null}}\n')
            assert b'"outcome":"ok"' in await worker.stdout.readline()
            worker.stdin.close()
            said = await worker.stdout.read()
            assert said.rstrip().endswith(b'{"bye":true}')
            return await worker.wait()

    assert asyncio.run(run()) == 0


def test_a_workload_that_cannot_be_played_is_the_workers_own_word(tmp_path: Path) -> None:
    heard: list[RequestRecord] = []
    texts = Texts("text", "some words " * 400, seed=0, salt="s")
    plan = Plan(workload="agents", parameters=dataclasses.asdict(AGENTS), url="http://127.0.0.1:9", api_key=None,
                model="mock", ignore_eos=True, want_ids=True, silence_s=60.0,
                cast=Cast(part="", count=1, mine=(0,), texts=texts, limit_tokens=10))

    async def run() -> None:
        async with working([plan], emit=heard.append, log_dir=tmp_path):
            raise AssertionError("it cannot be ready")

    with pytest.raises(ServerError, match="exceed the server's 10"):
        asyncio.run(run())
    assert heard == []


@pytest.mark.parametrize(("sign", "processes"), [(signal.SIGINT, 2), (signal.SIGTERM, 1)])
def test_ctrl_c_leaves_a_valid_file_and_resume_goes_on(tmp_path: Path, sign: signal.Signals, processes: int) -> None:
    arguments = ["--points", "2,3", "--prefix-tokens", "64", "--tool-tokens", "8", "--gap-min-s", "0", "--gap-max-s",
                 "0.02", "--processes", str(processes), "--reply-tokens", "20"]

    async def run() -> None:
        async with MockServer(SLOW) as server:
            async def start(*more: str) -> asyncio.subprocess.Process:
                return await asyncio.create_subprocess_exec(
                    sys.executable, "-c", RUN, "--url", server.url, *arguments, *more, stderr=asyncio.subprocess.PIPE)

            first = await start("--out", str(tmp_path), "--duration-s", "600")
            await until_busy(tmp_path)
            first.send_signal(sign)
            said = (await first.communicate())[1].decode()
            assert first.returncode == 130
            assert f"--resume {tmp_path}" in said
            assert "Traceback" not in said
            records = read(tmp_path)
            assert (end_of(records).outcome, end_of(records).detail) == ("interrupted", "stopped by the user")
            assert requests(records, outcome="aborted", segment="window")
            again = await start("--resume", str(tmp_path), "--duration-s", "0.1")
            await again.communicate()
            assert again.returncode == 0

    asyncio.run(run())
    assert cell_state(tmp_path) == "finished"
    assert [place for place in places(read(tmp_path)) if place[0] == "window"] == [("window", "2"), ("window", "3")]


def test_a_killed_harness_leaves_a_readable_file_and_no_server(tmp_path: Path) -> None:
    """kill -9 at the worst moment: the server and the workers it started end by themselves."""
    mock = ("import argparse, asyncio; from hostcache.testing.mock_server import *; p = argparse.ArgumentParser(); "
            "add_arguments(p); a = p.parse_args(); asyncio.run(serve_mock(config_from(a), a.host, a.port))")
    start = shlex.join((sys.executable, "-c", mock, "--itl-s", "0.02", "--port", "{port}"))

    async def run() -> list[int]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", RUN, "--start", start, "--out", str(tmp_path), "--points", "2", "--processes", "2",
            "--gap-min-s", "0", "--gap-max-s", "0.02", "--prefix-tokens", "64", "--duration-s", "600",
            stderr=asyncio.subprocess.DEVNULL)
        await until_busy(tmp_path)
        started = children(process.pid)
        process.kill()
        await process.wait()
        while any(map(alive, started)):  # noqa: ASYNC110  # they are not our children
            await asyncio.sleep(0.05)
        return started

    assert len(asyncio.run(run())) == 3
    assert cell_state(tmp_path) == "interrupted"
    assert ("prime", "2") in places(read(tmp_path))
