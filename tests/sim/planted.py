"""Bugs to plant into a copy of the package: what the fuzz must find. Each is an old text and a new one of one file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hostcache


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """`edits`: (file in the package, old text, new text); each old text stands there once. `says`: one of these is in
    the violation that gives it away."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    says: tuple[str, ...]


_CACHE, _KEEPER, _POOL = "tier/cache.py", "tier/keeper.py", "tier/pool.py"

PLANTS = (
    Plant(
        name="a pin is not released",
        edits=((_CACHE, """pop(done.job_id, None)) is not None:
            self._keeper.unpin(slots)""", """pop(done.job_id, None)) is not None:
            pass"""),),
        says=("pins",),
    ),
    Plant(
        name="a head is evicted before its tail",
        edits=((_KEEPER, """        if len(run) > TRIM_FACTOR * need:
            run = run[:need]""", """        run = run[-need:]"""),),
        says=("a head was evicted before its tail", "predecessor is in no tier", "listed", "in no tier"),
    ),
    Plant(
        name="a late completion is accepted",
        edits=(
            (_CACHE, """        self._quarantine[job_id] = frames
""", """        self._quarantine[job_id] = frames
        self.__dict__.setdefault("_given_up", {})[job_id] = slots, self._table.keys_of(slots)
"""),
            (_CACHE, """            self._count.late_completions += 1
            self._pool.give_back(frames)""", """            slots, keys = self.__dict__["_given_up"].pop(done.job_id)
            table = self._table
            same = table.find(keys) == slots
            if done.error is None and same.all() and (table.state[slots] == t.ABSENT).all():
                table.fill(slots, frames)
                table.ready(slots)
            else:
                self._pool.give_back(frames)"""),
        ),
        says=("came late or twice and was taken for a new one",),
    ),
    Plant(
        name="the quota is exceeded by one frame for the length of a copy",
        edits=(
            (_CACHE, """        part = part[:room]
        behind""", """        over = room < len(part)
        part = part[: room + over]
        behind"""),
            (_CACHE, """        frames = self._pool.take(room, behind)
""", """        frames = self._pool.take(room, behind)
        frames = np.append(frames, self._pool.total) if over else frames
"""),
            (_POOL, """        ordered = np.sort(np.asarray(frames, dtype=np.int64))
""", """        ordered = np.sort(np.asarray(frames, dtype=np.int64))
        ordered = ordered[ordered < self.total]
"""),
        ),
        says=("the quota is",),
    ),
    Plant(
        name="a quarantined frame is handed out",
        edits=((_CACHE, """        if not running:
            self._pool.give_back(frames)
            return
""", """        self._pool.give_back(frames)
        if not running:
            return
        frames = frames[:0]
"""),),
        says=("may still write", "in quarantine"),
    ),
    Plant(
        name="a request is counted twice",
        edits=(("tier/accounting.py", """        self._requests += 1
""", """        self._requests += 1 + (report.host_tokens > 0)
"""),),
        says=("the books count",),
    ),
    Plant(
        name="a page of another conversation is restored",
        edits=((_CACHE, """            frames=self._table.frame[slots].astype(np.int64),
""", """            frames=np.roll(self._table.frame[slots].astype(np.int64), 1),
"""),),
        says=("restores pages from frames in which others", "was restored wrong"),
    ),
    Plant(
        name="a failed store is taken for a good one",
        edits=((_CACHE, """            if done.error is None:
                self._finish_store""", """            if done.error is None or done.copied_bytes:
                self._finish_store"""),),
        says=("were stored", "in which others, or none", "restored wrong"),
    ),
    Plant(
        name="frames under a late restore are let go at once",
        edits=((_CACHE, """        if copying:
            self._draining""", """        if copying and reason is not Reason.LATE:
            self._draining"""),),
        says=("pins", "a restore may still read"),
    ),
    Plant(
        name="frames are given back twice",
        edits=((_CACHE, """                self._pool.give_back(self._undo_store(slots, t.FAILED))
""", """                frames = self._undo_store(slots, t.FAILED)
                self._pool.give_back(frames)
                self._pool.give_back(frames)
"""),),
        says=("frames", "free run"),
    ),
    Plant(
        name="the reason of a miss is lost",
        edits=(("tier/accounting.py", """        self.cause = self.cause or reason
""", """        del reason
"""),),
        says=("had to compute page",),
    ),
    Plant(
        name="what was forgotten is served",
        edits=((_CACHE, """            self._keeper.forget(self._table.live())
""", ""),),
        says=("in which others, or none", "were stored", "in no tier"),
    ),
    Plant(
        name="a distrusted page is offered again",
        edits=((_KEEPER, """            if slot == t.NONE or table.state[slot] != t.RESIDENT:
                continue
""", """            if slot == t.NONE or table.state[slot] != t.RESIDENT or not table.pins[slot]:
                continue
"""),),
        says=("in which others, or none", "were stored"),
    ),
)


def plant(bug: Plant, folder: Path) -> Path:
    """A copy of the package with the bug in it; the folder to import it from. Raises when a text is not there once."""
    copy = folder / "hostcache"
    source = Path(hostcache.__file__).parent
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in bug.edits:
        text = (copy / name).read_text()
        if text.count(old) != 1:
            raise AssertionError(f"{bug.name}: {name} holds {text.count(old)} times, not once:\n{old}")
        (copy / name).write_text(text.replace(old, new))
    return folder


def fuzz_of(folder: Path | None, *arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
    """(exit code, record) of the shipped command in a process of its own, over the package in `folder`."""
    env = {**os.environ, **environment}
    if folder is not None:
        env["PYTHONPATH"] = str(folder)
    done = subprocess.run(
        [sys.executable, "-m", "hostcache", "sim", "fuzz", *arguments, "--json"],
        env=env, capture_output=True, text=True, check=False)  # fmt: skip
    assert done.stdout, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, record
