"""Cells measured on a mock server in this process, and their records."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from hostcache.bench.harness.cell import CellSpec, Stop, Workload, play_cell
from hostcache.bench.harness.cellfile import RECORDS, whole_records
from hostcache.bench.harness.target import Target
from hostcache.clock import WallClock
from hostcache.records import CellRecord, EndRecord, Record, RequestRecord, SegmentRecord
from hostcache.testing.mock_server import MockConfig, MockServer

QUICK = MockConfig(device_blocks=64, host_blocks=4096, base_s=0.0005, s_per_token=1e-6, itl_s=0.0, s_per_restored=0.0)
"""1,024 tokens on the device, plenty on the host, hardly any time."""

R = TypeVar("R", bound=Record)


def measure_on(server: MockServer, workload: Workload, folder: Path, *, target: Target | None = None,
               resume: bool = False, stop: Stop | None = None, **spec: Any) -> Any:
    """The coroutine that measures one cell there."""
    return play_cell(
        CellSpec(**{"cell": "c", "arm": "on", "workload": workload, "corpus": "code", **spec}),
        target or Target(arm="on", url=server.url, tier="on"), folder, clock=WallClock(), err=io.StringIO(),
        resume=resume, stop=stop)


def records_of(workload: Workload, folder: Path, *, config: MockConfig = QUICK, **more: Any) -> list[Record]:
    """One cell on a fresh mock."""

    async def run() -> None:
        async with MockServer(config) as server:
            await measure_on(server, workload, folder, **more)

    asyncio.run(run())
    return read(folder)


def read(folder: Path) -> list[Record]:
    return list(whole_records(folder / RECORDS))


def of(kind: type[R], records: Sequence[Record], **fields: Any) -> list[R]:
    """Those of that kind whose fields have these values."""
    return [record for record in records if isinstance(record, kind)
            and all(getattr(record, name) == value for name, value in fields.items())]


def cell_of(records: Sequence[Record]) -> CellRecord:
    (cell,) = of(CellRecord, records)
    return cell


def end_of(records: Sequence[Record]) -> EndRecord:
    assert isinstance(records[-1], EndRecord)
    return records[-1]


def requests(records: Sequence[Record], **fields: Any) -> list[RequestRecord]:
    return of(RequestRecord, records, **fields)


def places(records: Sequence[Record]) -> list[tuple[str, str]]:
    """(segment, part) of each finished segment, in file order."""
    return [(segment.segment, segment.part) for segment in of(SegmentRecord, records)]
