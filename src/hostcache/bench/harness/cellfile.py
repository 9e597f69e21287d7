"""A cell's file: how it ended, what of it stands, and how an interrupted one is continued. Measures nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, TypeAlias

from hostcache.errors import ConfigError
from hostcache.records import (
    CellRecord,
    EndRecord,
    Record,
    RecordRefused,
    RecordWriter,
    RequestRecord,
    SegmentRecord,
    from_json,
)

RECORDS = "records.jsonl"
Place: TypeAlias = tuple[str, str]
"""(segment, part)"""


def cell_state(folder: Path) -> Literal["absent", "interrupted", "failed", "finished"]:
    """How the cell in `folder` ended. A file without its end was interrupted."""
    path = folder / RECORDS
    if not path.is_file():
        return "absent"
    last = None
    for record in whole_records(path):
        last = record
    return last.outcome if isinstance(last, EndRecord) else "interrupted"


def whole_records(path: Path) -> Iterator[Record]:
    """Records in file order. A last line that was not written to its end is left out; any other is refused."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                return
            try:
                yield from_json(json.loads(line))
            except (ValueError, AttributeError, RecordRefused) as error:
                raise RecordRefused(f"{path}, line {number}: {error}") from error


class Earlier:
    """What an interrupted run left. `kept`: its segments that count, with their `records`; the others are run again,
    under another salt."""

    def __init__(self, path: Path, keeps: Callable[[frozenset[Place]], frozenset[Place]]) -> None:
        """Raises ConfigError for a file that is none of a cell."""
        self._path = path
        records = list(whole_records(path))
        if not records or not isinstance(records[0], CellRecord):
            raise ConfigError(f"{path} does not begin with a cell; nothing there can be resumed")
        self.first = records[0]
        segments = [(record.segment, record.part) for record in records if isinstance(record, SegmentRecord)]
        self.kept = keeps(frozenset(place for place in segments if place[0] not in ("before", "after")))
        stay = {*self.kept, *(place for place in segments if place[0] == "before" and self.kept)}
        self.records = [record for record in records if isinstance(record, SegmentRecord | RequestRecord)
                      and (record.segment, record.part) in stay]
        self.runs = 1
        while self._backup().exists():
            self.runs += 1

    def check(self, now: CellRecord) -> None:
        """Raises ConfigError when `now` is another cell. A server that was refused told too little to compare."""
        if self.first.target.get("arm_confirmed_by") is None:
            return
        for name in ("cell", "arm", "identity"):
            was, is_ = str(getattr(self.first, name)), str(getattr(now, name))
            if was != is_:
                raise ConfigError(f"{self._path} was made with another {name} ({was[:40]}, now {is_[:40]}); resume "
                                  "with the same arguments, or start anew in another folder")

    def continued(self, now: CellRecord) -> RecordWriter:
        """The old file is copied aside; a new one with what counts takes its place and is open for more. It begins
        with the old first line, or with `now` when nothing counts."""
        part = self._path.with_name(f"{RECORDS}.part")
        part.unlink(missing_ok=True)
        writer = RecordWriter(part)
        for record in (self.first if self.kept else now, *self.records):
            writer.write(record)
        shutil.copyfile(self._path, self._backup())
        part.replace(self._path)
        return writer

    def _backup(self) -> Path:
        return self._path.with_name(f"records.interrupted-{self.runs}.jsonl")
