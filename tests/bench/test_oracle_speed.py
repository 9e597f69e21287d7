"""The measurement of the laboratory's curves: what is timed, what is told, what is judged. Nothing here is fast."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from hostcache.bench import oracle_speed
from hostcache.bench.oracle_speed import Curves, bars, run, table, zipf_ids
from hostcache.cli import _curves
from hostcache.clock import VirtualClock
from hostcache.lab.oracle import cold_miss_floor
from hostcache.lab.stream import stream_of
from hostcache.workload.traces import open_trace


class TickingClock(VirtualClock):
    """Every look at it costs a millisecond: each timed call takes exactly one."""

    def now(self) -> float:
        self.advance(0.001)
        return super().now()


def small(curves: Curves, repeats: int = 2, **options: Any) -> dict[str, Any]:
    return run(curves=curves, repeats=repeats, plain_repeats=1, zipf=(3000, 200), size=(60, 900),
               capacities=(20, 50, 90), **options)


def named(result: dict[str, Any]) -> dict[str, tuple[float, bool]]:
    return {what: (value, met) for what, _, value, met in bars(result)}


@pytest.fixture(scope="module")
def plain() -> Curves:
    """As they are without numba, which would compile for seconds; a process of their own does nothing."""
    return dataclasses.replace(_curves(), compiled=False, script="")


@pytest.fixture(scope="module")
def alone(plain: Curves) -> dict[str, Any]:
    return small(plain, package="no_such_simulator", clock=TickingClock())


def test_without_the_other_simulator_one_line_says_how_to_get_it(alone: dict[str, Any]) -> None:
    text = table(alone)
    assert "not compared: kvcache-simulator is not installed; pip install kvcache-simulator==0.1.3" in text.splitlines()
    assert not any(name.startswith(("over_", "core_", "command")) for name in alone["figures"])
    assert list(named(alone)) == ["million references/s of it with numpy alone",
                                  "both optima at every capacity, seconds"]
    assert json.loads(json.dumps(alone)) == alone


def test_without_numba_one_line_says_so_and_numpy_is_still_measured(alone: dict[str, Any]) -> None:
    assert "pip install 'hostcache[lab]'" in table(alone)
    assert "zipf_references_s" not in alone["figures"]
    assert alone["figures"]["zipf_plain_references_s"]["median"] == pytest.approx(3000 / 0.001)


def test_without_a_trace_a_synthetic_one_of_the_same_size_is_named(alone: dict[str, Any]) -> None:
    assert table(alone).startswith("synthetic, no --trace given: synthetic.jsonl.gz: 60 requests, 900 references, ")
    assert alone["trace"]["synthetic"]


def test_the_synthetic_trace_shares_what_the_conversation_trace_shares(tmp_path: Path) -> None:
    rng = Random(0)
    stream = stream_of(open_trace(oracle_speed._synthetic(tmp_path / "one.jsonl.gz", (1200, 28_850), rng)))
    assert (stream.requests, stream.references) == (1200, 28_850)
    assert 0.60 < cold_miss_floor(stream) < 0.67


def test_a_given_trace_is_named(plain: Curves, tmp_path: Path) -> None:
    path = oracle_speed._synthetic(tmp_path / "mine.jsonl.gz", (20, 200), Random(1))
    result = small(plain, trace=path, package="no_such_simulator", clock=TickingClock())
    assert table(result).startswith("mine.jsonl.gz: 20 requests, 200 references, ")


def test_the_process_of_its_own_reads_the_trace_it_is_given(tmp_path: Path) -> None:
    path = oracle_speed._synthetic(tmp_path / "mine.jsonl.gz", (20, 200), Random(1))
    for argument, code in ((path, 0), (tmp_path / "other", 1)):
        done = subprocess.run([sys.executable, "-c", _curves().script, argument], capture_output=True, check=False)
        assert done.returncode == code


def test_zipf_gives_each_rank_its_share_and_a_seed_the_same_ids() -> None:
    ids = zipf_ids(200_000, 50, 1)
    shares = np.sort(np.bincount(ids, minlength=50))[::-1] / len(ids)
    assert shares == pytest.approx(1 / np.arange(1, 51) / (1 / np.arange(1, 51)).sum(), abs=0.004)
    assert (ids == zipf_ids(200_000, 50, 1)).all()
    assert (ids != zipf_ids(200_000, 50, 2)).any()


def test_both_ways_that_are_measured_find_the_same_distances(plain: Curves) -> None:
    """Of a stream so long that the line of slots is packed, thrice."""
    ids = zipf_ids(20_000, 300, 1)
    assert (plain.distances(ids, 300, True) == plain.distances(ids, 300, False)).all()


def test_a_simulator_that_cannot_be_run_is_told_in_one_line(plain: Curves) -> None:
    result = small(plain, package="json", clock=TickingClock())
    absent = result["peer"]["absent"]
    assert absent.startswith("kvcache-simulator cannot be run here: ")
    assert "json.cpp_backend" in absent
    assert "\n" not in absent


def test_every_bar_is_judged_from_its_figure() -> None:
    def judged(**medians: float) -> dict[str, tuple[float, bool]]:
        figures = {name: {"median": value, "low": value, "high": value} for name, value in medians.items()}
        return named({"figures": figures, "capacities": [1000], "zipf": {"references": 10_000_000}})

    good = judged(over_core_1000=5.0, over_command=10.0, zipf_references_s=3.6e6, zipf_plain_references_s=0.18e6,
                  optimum_s=4.9)
    assert [met for _, met in good.values()] == [True] * 5
    assert good["million references/s, 10,000,000 of Zipf"][0] == pytest.approx(3.6)
    bad = judged(over_core_1000=4.9, over_command=9.9, zipf_references_s=3.5e6, zipf_plain_references_s=0.17e6,
                 optimum_s=5.0)
    assert [met for _, met in bad.values()] == [False] * 5


def test_beside_the_other_simulator_all_of_it_is_compared(plain: Curves) -> None:
    pytest.importorskip("kvcache_sim", reason=f"{oracle_speed.PIP} to compare with it")
    if shutil.which("c++") is None:
        pytest.skip("kvcache-simulator compiles its core at first use; there is no c++ here")
    said = io.StringIO()
    result = small(plain, repeats=1, clock=TickingClock(), progress=lambda line: said.write(f"{line}\n"))
    assert result["peer"]["absent"] is None
    figures = result["figures"]
    assert figures["over_command"]["median"] == pytest.approx(1 / (1 + 1 / 8))  # eight curves in a tick
    for name in ("command_start_s", "command_drawn_over_process", "command_default_over_process"):
        assert figures[name]["low"] > 0
    assert any(what.startswith("reading and every capacity, in a process that runs") for what in named(result))
    assert "whole command: LRU at one capacity" in table(result)
    assert said.getvalue().splitlines()[0].startswith("kvcache-simulator")
