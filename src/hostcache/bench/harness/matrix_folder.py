"""What a matrix leaves in its folder, and what that says of how far it came. Measures nothing, judges nothing.

    matrix.toml                                    the file as it was given: what is resumed is this
    plan.json                                      the form and the choice of cells and arms; written last
    lock                                           held by the process that runs it
    runs/CELL/ARM-TURN/attempt-N/records.jsonl     and the server's log; failure.txt where it did not come that far

There is no other state. A run is done when one of its attempts has finished records. An interrupted attempt with parts
that count is gone on with; else the next attempt gets a folder of its own. Nothing is ever written over or removed, so
a process that is killed at any point loses what it had not yet written and nothing else.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from hostcache.bench.harness.cellfile import RECORDS, Place, cell_state, whole_records
from hostcache.errors import ConfigError
from hostcache.records import CellRecord, RecordRefused, SegmentRecord

TOML, PLAN, LOCK, RUNS, FAILURE = "matrix.toml", "plan.json", "lock", "runs", "failure.txt"
State: TypeAlias = Literal["absent", "interrupted", "failed", "finished"]
_ATTEMPT = "attempt-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a matrix was begun with. None: all."""

    name: str
    sha256: str
    quick: bool
    cells: tuple[str, ...] | None
    arms: tuple[str, ...] | None


def write_whole(path: Path, text: str) -> None:
    """The file is there with all of it, or as it was before."""
    part = path.with_name(f"{path.name}.part")
    with part.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(path)


def begin(folder: Path, text: str, asked: Asked) -> None:
    """Notes what is to be run here."""
    write_whole(folder / TOML, text)
    write_whole(folder / PLAN, json.dumps({
        "version": 1, "name": asked.name, "sha256": asked.sha256, "quick": asked.quick,
        "cells": asked.cells and list(asked.cells), "arms": asked.arms and list(asked.arms)}, indent=1) + "\n")


def begun(folder: Path) -> tuple[str, Asked] | None:
    """The file and what was asked; None where nothing was begun. Raises ConfigError for a folder of something else."""
    path = folder / PLAN
    if not path.is_file():
        return None
    try:
        plan: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        text = (folder / TOML).read_text(encoding="utf-8")
        if plan.pop("version") != 1:
            raise ValueError
        cells, arms = (None if (names := plan.pop(key)) is None else tuple(names) for key in ("cells", "arms"))
        return text, Asked(**plan, cells=cells, arms=arms)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no plan of a matrix that this hostcache reads; start anew in another folder"
                          ) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """This process alone runs the matrix in `folder`. Raises ConfigError when another one does.

    The kernel holds the lock for as long as the process lives, so that a killed one leaves none behind.
    """
    with (folder / LOCK).open("a+", encoding="ascii") as stream:  # never removed: another may just have opened it
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            stream.seek(0)
            owner = stream.read().strip() or "unknown"
            raise ConfigError(f"process {owner} runs the matrix in {folder}; wait for it, or give another folder"
                              ) from error
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        yield


class Slot:
    """One run's place: its attempts, oldest first."""

    def __init__(self, folder: Path, cell: str, arm: str, turn: int) -> None:
        self._folder = folder / RUNS / cell / f"{arm}-{turn}"

    @property
    def attempts(self) -> list[Path]:
        found = self._folder.glob(f"{_ATTEMPT}*") if self._folder.is_dir() else ()
        numbered = [(int(number), path) for path in found
                    if (number := path.name.removeprefix(_ATTEMPT)).isdecimal()]
        return [path for _, path in sorted(numbered)]

    @property
    def finished(self) -> Path | None:
        """The attempt that finished."""
        return next((path for path in self.attempts if state_of(path) == "finished"), None)

    @property
    def counts(self) -> Path | None:
        """The file of records that stands for this run: of the attempt that finished, else of the last that has one."""
        wanted = [*filter(None, [self.finished]), *reversed(self.attempts)]
        return next((path / RECORDS for path in wanted if first_record(path) is not None), None)

    @property
    def failure(self) -> str | None:
        """Why the last attempt did not even begin to measure."""
        attempts = self.attempts
        note = attempts[-1] / FAILURE if attempts else None
        return note.read_text(encoding="utf-8").strip() if note is not None and note.is_file() else None

    def next(self, keeps: Callable[[frozenset[Place]], frozenset[Place]]) -> tuple[Path, bool]:
        """Where the next attempt writes, and whether it goes on with what is there."""
        attempts = self.attempts
        last = attempts[-1] if attempts else None
        if last is not None:
            if state_of(last) == "absent" and not (last / FAILURE).exists():
                return last, False
            if state_of(last) == "interrupted" and keeps(_finished_parts(last)):
                return last, True
        return self.fresh(), False

    def fresh(self) -> Path:
        """A new attempt's folder."""
        attempts = self.attempts
        number = 1 + (int(attempts[-1].name.removeprefix(_ATTEMPT)) if attempts else 0)
        path = self._folder / f"{_ATTEMPT}{number}"
        path.mkdir(parents=True)
        return path


def counted_files(folder: Path) -> list[Path]:
    """The file of records that stands for each run in `folder`: of the attempt that finished, else of the last;
    none where no matrix was run there. Interrupted and failed attempts beside it stay, and count for nothing."""
    slots = [Slot(folder, arm.parent.name, *_arm_and_turn(arm.name)) for arm in sorted((folder / RUNS).glob("*/*-*"))]
    return [path for slot in slots if (path := slot.counts) is not None]


def _arm_and_turn(name: str) -> tuple[str, int]:
    arm, _, turn = name.rpartition("-")
    return arm, int(turn) if turn.isdecimal() else 0


def state_of(attempt: Path) -> State:
    """How it ended. Records that cannot be read were interrupted, by more than a signal."""
    try:
        return cell_state(attempt)
    except RecordRefused:
        return "interrupted"


def first_record(attempt: Path) -> CellRecord | None:
    """None where nobody can say which cell this was."""
    try:
        first = next(iter(whole_records(attempt / RECORDS)), None)
    except (OSError, RecordRefused):
        return None
    return first if isinstance(first, CellRecord) else None


def _finished_parts(attempt: Path) -> frozenset[Place]:
    """Segments that an interrupted attempt finished; none where its records cannot be gone on with."""
    if first_record(attempt) is None:
        return frozenset()
    try:
        return frozenset((record.segment, record.part) for record in whole_records(attempt / RECORDS)
                         if isinstance(record, SegmentRecord) and record.segment not in ("before", "after"))
    except RecordRefused:
        return frozenset()


def free_bytes(folder: Path) -> int:
    """Left on the disk of `folder`, or of the nearest of its parents that exists."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free
