"""How truly the harness's own client reports times, and whether it says so when it cannot keep up.

The mock server, in a process of its own, answers at a scripted time; one client process sends at a fixed rate, open
loop. What is reported minus what was scripted is the client's (and the mock's) own share. The rate is doubled until the
cell calls itself void by its lag bar: below that its figures must be true, above it nobody may use them.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hostcache.bench.figures import percentile
from hostcache.bench.harness.cell import CellSpec, run_cell
from hostcache.bench.harness.cellfile import whole_records
from hostcache.bench.harness.figures import cell_figures
from hostcache.bench.harness.replay import ReplayParameters
from hostcache.bench.harness.target import Target
from hostcache.clock import Clock, WallClock
from hostcache.records import RequestRecord

TTFT_S = 0.050
ITL_S = 0.010
"""So that each chunk comes by itself: what a client does a chunk is what it is short of."""
SLIP_BAR_S = 0.002
"""Reported TTFT p50 at 100 requests/s of 4 chunks may exceed the scripted one by so much."""
PROMPT_TOKENS = 64
CASES = ((100.0, 4), (75.0, 128), (150.0, 128), (300.0, 128), (600.0, 128))
"""Requests a second, chunks an answer. After the first, the rate doubles until a cell is void."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one cell reported. Times in seconds; `sent_s`: from the first dispatch to the last."""

    rate: float
    chunks: int
    requests: int
    errors: int
    sent_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    lag_p50_s: float
    lag_p99_s: float
    lag_bar_s: float
    void: bool


def ask(rate: float, chunks: int, window_s: float, *, folder: Path, clock: Clock) -> Asked:
    """One cell against a mock of its own, in a new `folder`."""
    folder.mkdir()
    trace = folder / "trace.jsonl"
    count = round(rate * window_s)
    trace.write_text("".join(json.dumps({"timestamp": round(1000 * number / rate), "input_length": PROMPT_TOKENS,
                                         "output_length": chunks, "hash_ids": [number]}) + "\n"
                             for number in range(count)))
    start = (sys.executable, "-m", "hostcache", "bench", "mock", "--ttft-s", str(TTFT_S), "--itl-s", str(ITL_S),
             "--slots", str(count), "--port", "{port}")
    spec = CellSpec(cell="client", arm="as-is", workload=ReplayParameters(trace=str(trace)))
    records = list(whole_records(run_cell(spec, Target(arm="as-is", start=start), folder, clock=clock,
                                          err=io.StringIO())))
    figures = cell_figures(records)
    window = [record for record in records if isinstance(record, RequestRecord) and record.segment == "window"]
    sent = [record.sent_s for record in window]
    ttft_s = sorted(record.first_token_s - record.sent_s for record in window if record.first_token_s is not None)
    lag = figures["lag"]
    return Asked(
        rate=rate, chunks=chunks, requests=count, errors=count - sum(record.outcome == "ok" for record in window),
        sent_s=max(sent) - min(sent), ttft_p50_s=percentile(ttft_s, 0.50) or 0.0,
        ttft_p99_s=percentile(ttft_s, 0.99) or 0.0, lag_p50_s=lag["p50"], lag_p99_s=lag["p99"],
        lag_bar_s=lag["bar_s"], void=figures["void"])


def run(*, window_s: float = 10.0, repeats: int = 3, cases: Sequence[tuple[float, int]] = CASES,
        progress: Callable[[str], None] = lambda _: None, clock: Clock | None = None) -> dict[str, Any]:
    """`cases`: requests a second, chunks an answer; from the second on they are asked until one is void. Ready for
    JSON."""
    wall = clock if clock is not None else WallClock()
    asked: list[Asked] = []
    with tempfile.TemporaryDirectory() as folder:
        for case, (rate, chunks) in enumerate(cases):
            for repeat in range(repeats if not case else 1):
                each = ask(rate, chunks, window_s, folder=Path(folder) / f"{case}-{repeat}", clock=wall)
                progress(f"{rate:g} requests/s of {chunks} chunks: {'void' if each.void else 'counts'}")
                asked.append(each)
            if case and asked[-1].void:
                break
    return summed(asked, cases[0])


def summed(asked: Sequence[Asked], first: tuple[float, int]) -> dict[str, Any]:
    """`first`: the case whose TTFT is judged."""
    judged = [each for each in asked if (each.rate, each.chunks) == first]
    slips = [abs(each.ttft_p50_s - TTFT_S) for each in judged]
    true = [abs(each.ttft_p50_s - TTFT_S) <= each.lag_bar_s for each in asked if not each.void]
    return {"cells": [asdict(each) for each in asked], "ttft_slip_s": median(slips), "ttft_slip_low_s": min(slips),
            "ttft_slip_high_s": max(slips), "first_is_void": any(each.void for each in judged),
            "void_from": next((each.rate for each in asked if each.void and each not in judged), None),
            "all_that_count_are_true": all(true)}


def bars(result: Mapping[str, Any]) -> list[tuple[str, str, float, bool]]:
    """what, bar, value, met"""
    slip_ms, fastest = 1e3 * result["ttft_slip_s"], result["void_from"]
    return [
        (f"TTFT p50 at {CASES[0][0]:g} requests/s of {CASES[0][1]} chunks, reported − scripted, ms",
         f"at most {1e3 * SLIP_BAR_S:g}", slip_ms, slip_ms <= 1e3 * SLIP_BAR_S and not result["first_is_void"]),
        ("requests/s of 128 chunks that the cell itself calls void", "some (the client says when it is the bottleneck)",
         float(fastest or 0), fastest is not None),
        ("TTFT p50 of every cell that counts is within its lag bar of the script", "yes (1)",
         float(result["all_that_count_are_true"]), bool(result["all_that_count_are_true"]))]


def table(result: Mapping[str, Any]) -> str:
    """For the terminal."""
    lines = ["requests/s  chunks  sent in s   TTFT p50   p99 (scripted 50 ms)   lag p50      p99   errors  the cell"]
    for each in result["cells"]:
        p50, p99, lag50, lag99 = (1e3 * each[name] for name in ("ttft_p50_s", "ttft_p99_s", "lag_p50_s", "lag_p99_s"))
        verdict = "void" if each["void"] else "counts"
        lines.append(f"{each['rate']:10g}  {each['chunks']:6}  {each['sent_s']:9.1f}  {p50:6.1f} ms  {p99:8.1f} ms"
                     f"         {lag50:9.1f} ms  {lag99:7.1f} ms  {each['errors']:6}  {verdict}")
    return "\n".join(lines) + "\n"
