"""The harness's documents for the pages: every kind of cell, and one with things that went wrong."""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib.resources import files
from typing import Any

from tests.bench.harness.sample_cells import agents_cell, equivalence_cell, ladder_cell, rotate_cell, whole_matrix

from hostcache.bench.harness.bars import parse_bars
from hostcache.bench.harness.figures import bench_document
from hostcache.records import CellRecord

BARS = {
    "b5-agents": parse_bars({"ttft_p95_s": 10, "errors": 0, "restore_failures": 0}, {"turns": 3.1}),
    "b1-overhead": parse_bars({}, {"within": 0.25}),
    "b2-r2": parse_bars({}, {"turns": 2}),
}


@functools.cache
def published() -> dict[str, Any]:
    text = files("hostcache.sim").joinpath("published_fleet.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@functools.cache
def whole() -> dict[str, Any]:
    """As it is read back from its JSON file."""
    found: dict[str, Any] = json.loads(json.dumps(bench_document(whole_matrix(), bars=BARS), allow_nan=False))
    return found


@functools.cache
def troubled() -> dict[str, Any]:
    """A void arm, an unconfirmed one, a run that was cut short, an answer that differs."""
    late = [dataclasses.replace(record, parameters={"lag_bar_ms": 1e-6}) if isinstance(record, CellRecord) else record
            for record in agents_cell("on", points=(2, 3))]
    unconfirmed = [dataclasses.replace(record, target={"engine": "<b>other</b>", "arm_confirmed_by": "not asked"})
                   if isinstance(record, CellRecord) else record for record in rotate_cell("on")]
    return bench_document([agents_cell("off", points=(2, 3)), late, rotate_cell("off")[:-1], unconfirmed,
                           equivalence_cell(wrong=(1,)), ladder_cell("off")])
