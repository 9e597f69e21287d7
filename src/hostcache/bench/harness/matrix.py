"""Runs a matrix: one arm of one cell after the other, each against a server of its own, whatever becomes of the others.

How far it came stands in the folder alone (`matrix_folder`), so that running it again goes on where it was left: a
finished run is never repeated. Knows how runs follow one another, not what a workload does nor what a figure means.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from hostcache.bench.harness.bars import Bars, failed, first_failing, judge
from hostcache.bench.harness.cell import run_cell
from hostcache.bench.harness.cellfile import RECORDS, whole_records
from hostcache.bench.harness.figures import bench_document, cell_figures, ramp_stop
from hostcache.bench.harness.matrix_check import estimate_s, span_text
from hostcache.bench.harness.matrix_file import Matrix, Run, parse_matrix
from hostcache.bench.harness.matrix_folder import (
    FAILURE,
    Slot,
    begun,
    counted_files,
    first_record,
    state_of,
    write_whole,
)
from hostcache.clock import Clock
from hostcache.errors import ConfigError, HostCacheError

REPORT = "report.json"
Document = dict[str, Any]
Measure = Callable[[Run, Path, bool], Path]
"""(what, the attempt's folder, goes on with what is there) → file of records"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Names of runs. `ended`: not run, because their ramp had ended before them. `failed`: name → why."""

    done: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    ended: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)


def slot_of(folder: Path, run: Run) -> Slot:
    return Slot(folder, run.cell, run.arm, run.turn)


def play(matrix: Matrix, folder: Path, *, clock: Clock, err: TextIO, argv: Sequence[str] = (),
         measure: Measure | None = None) -> Outcome:
    """Every run that is not finished yet. A run that fails is noted in its folder and the next one begins.

    KeyboardInterrupt passes; what was interrupted is gone on with by the next call.
    """
    measure = measure or _measure_with(clock, err)
    watch = _Watch(matrix, clock)
    done, made, ended, wrong = [], [], {}, {}
    for number, run in enumerate(matrix.runs, start=1):
        slot = slot_of(folder, run)
        title = f"[{number}/{len(matrix.runs)}] {run.name}"
        if slot.finished is not None:
            done.append(run.name)
            watch.skip(run)
            continue
        if (why := _ramp_ended(matrix, folder, run)) is not None:
            ended[run.name] = why
            watch.skip(run)
            err.write(f"{title}: not run, the ramp ended before it: {why}\n")
            continue
        err.write(f"{title}: {watch.says(run)}\n")
        err.flush()
        try:
            said = _said(_one(_settled(matrix, run, argv), slot, measure, err), run.bars)
        except Exception as error:  # a night's other cells are worth more than this one
            wrong[run.name] = _line(error)
            err.write(f"{title}: failed: {wrong[run.name]}\n")
        else:
            made.append(run.name)
            err.write(f"{title}: {said}\n")
        watch.made(run)
    return Outcome(done=tuple(done), made=tuple(made), ended=ended, failed=wrong)


def _one(run: Run, slot: Slot, measure: Measure, err: TextIO) -> Path:
    attempt, goes_on = slot.next(run.workload.keeps)
    try:
        try:
            return measure(run, attempt, goes_on)
        except ConfigError as error:
            if not goes_on or state_of(attempt) != "interrupted":
                raise
            err.write(f"  the interrupted attempt cannot be gone on with, a new one begins: {error}\n")
            attempt = slot.fresh()
            return measure(run, attempt, False)
    except Exception as error:
        if first_record(attempt) is None:  # the server did not come up: nothing else says so
            write_whole(attempt / FAILURE, f"{_line(error)}\n")
        raise


def _measure_with(clock: Clock, err: TextIO) -> Measure:
    def measure(run: Run, attempt: Path, goes_on: bool) -> Path:
        stop = ramp_stop(run.workload.KIND, run.bars) if run.bars.point else None
        return run_cell(run.spec, run.target, attempt, clock=clock, err=err, resume=goes_on, stop=stop)

    return measure


def _settled(matrix: Matrix, run: Run, argv: Sequence[str]) -> Run:
    """With what its records are to say of the matrix."""
    told = {"matrix": matrix.name, "form": matrix.form, "matrix_sha256": matrix.digest,
            **{name: value for name, value in (("answers", run.answers), ("ramp", run.ramp)) if value}}
    return replace(run, spec=replace(run.spec, metadata={**run.spec.metadata, **told}, command=tuple(argv)))


def _ramp_ended(matrix: Matrix, folder: Path, run: Run) -> str | None:
    """Why a point of a sweep is not run: an easier one of the same arm and turn failed a bar, or altogether."""
    if not run.ramp:
        return None
    for other in matrix.runs:
        if (other.ramp, other.arm, other.turn) != (run.ramp, run.arm, run.turn):
            continue
        if other.cell == run.cell:
            return None
        slot = slot_of(folder, other)
        if slot.finished is None:
            return f"{other.cell} did not finish"
        failing = first_failing(cell_figures(whole_records(slot.finished / RECORDS)), other.bars)
        if failing is not None:
            return f"{other.cell}: {failing.bar}: {failing.why}"
    return None


def _said(path: Path, bars: Bars) -> str:
    """One line on what came of it."""
    figures = cell_figures(whole_records(path))
    void = "; ".join(each["text"] for each in figures["reasons"] if each["refuses"] == "cell")
    off = [f"{verdict.part} {verdict.bar}: {verdict.why}".strip() for verdict in failed(judge(figures, bars))]
    served = sum(group["served"] for each in figures["segments"] for name, group in each["groups"].items()
                 if name != "turns")  # its parts stand beside it
    return f"{served} requests served" + (f"; VOID: {void}" if void else f"; missed {'; '.join(off)}" if off else "")


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, HostCacheError) else f"{type(error).__name__}: {text}".rstrip(": ")


class _Watch:
    """How long the rest will take: the estimates, by how far off they were so far."""

    def __init__(self, matrix: Matrix, clock: Clock) -> None:
        self._clock = clock
        self._estimates = {run.name: estimate_s(run, matrix.speed) for run in matrix.runs}
        self._left = dict(self._estimates)
        self._thought_s = self._took_s = 0.0
        self._began_s = clock.now()

    def says(self, run: Run) -> str:
        self._began_s = self._clock.now()
        known, factor = self._estimates[run.name], self._factor
        left = sum(each for each in self._left.values() if each is not None)
        more = "at least " if None in self._left.values() else ""
        this = "nobody knows how long" if known is None else f"about {span_text(known * factor)}"
        return f"{this}; {more}{span_text(left * factor)} left for all"

    def skip(self, run: Run) -> None:
        self._left.pop(run.name, None)

    def made(self, run: Run) -> None:
        self.skip(run)
        known = self._estimates[run.name]
        if known is not None:
            self._thought_s += known
            self._took_s += self._clock.now() - self._began_s

    @property
    def _factor(self) -> float:
        return min(4.0, max(0.25, self._took_s / self._thought_s)) if self._thought_s else 1.0


# -- what came of it -------------------------------------------------------------------------------------------------


def matrix_document(folder: Path, *, baseline: str = "off") -> Document:
    """What `bench report` makes of these records, by the bars that they carry."""
    return bench_document([list(whole_records(path)) for path in counted_files(folder)], baseline=baseline)


def missed(document: Document) -> list[str]:
    """What `--strict` does not let pass: bars and goals that were not reached, void cells, answers that differ.

    A bar of speed that ends a sweep, or that the baseline misses, is where its ramp ends and no fault.
    """
    cells = {(cell["cell"], cell["arm"], cell["attempt"]): cell for cell in document["cells"]}
    names = []
    for each in document["verdicts"]:
        cell = cells.get((each["cell"], each["arm"], each["attempt"]))  # None: of a goal
        ramp = cell is not None and (cell["arm"] == document["comparison"]["baseline"] or _RAMP in cell["environment"])
        if each["verdict"] == "pass" or (ramp and each["verdict"] == "miss" and each["bar"] not in _FAULTS):
            continue
        what = " ".join(filter(None, (each["cell"], each["arm"], each["part"], each["bar"])))
        names.append(f"{what} ({each['verdict']})")
    for (name, arm, attempt), cell in cells.items():
        if cell["void"]:
            names.append(f"{name} {arm} {attempt} (void)")
        if cell["equivalence"] is not None and cell["equivalence"]["different"]:
            names.append(f"{name} {arm} {attempt}: {cell['equivalence']['different']} answers differ")
    return names


_FAULTS = ("errors", "restore_failures")
_RAMP = "metadata.ramp"


def write_report(folder: Path, document: Document, pages: Mapping[str, str]) -> list[Path]:
    """`report.json` and whatever else was made of it; those of an earlier call are replaced whole."""
    texts = {REPORT: json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n", **pages}
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in texts]


def matrix_in(folder: Path, *, api_key: str | None = None) -> Matrix | None:
    """The matrix that was begun in `folder`, with its form and its choice; None where there is none."""
    there = begun(folder)
    if there is None:
        return None
    text, asked = there
    matrix = parse_matrix(text, file=asked.name, quick=asked.quick, api_key=api_key)
    return matrix.chosen(asked.cells, asked.arms)
