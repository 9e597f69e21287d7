"""`hostcache bench matrix`: from arguments to a folder, an exit code, and what whoever watches sees.

Exit code 0: all was run (whatever the bars say); 1: a run failed; 2: the file, the arguments or a check; 3: under
--strict, a bar was missed; 130: interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from hostcache.bench.harness.commands import INTERRUPTED, without_key
from hostcache.bench.harness.matrix import (
    Outcome,
    matrix_document,
    matrix_in,
    missed,
    play,
    slot_of,
    write_report,
)
from hostcache.bench.harness.matrix_check import Finding, check, estimate_s, span_text
from hostcache.bench.harness.matrix_file import Matrix, Run, matrix_text, parse_matrix, shipped
from hostcache.bench.harness.matrix_folder import Asked, begin, begun, locked
from hostcache.clock import Clock, WallClock
from hostcache.errors import BARS_MISSED, ConfigError, HostCacheError
from hostcache.folders import new_folder
from hostcache.sizes import format_size

ROOT = "hostcache-bench"
FAILED = HostCacheError.exit_code

Tell = Callable[[Mapping[str, Any]], str]
"""The document of `matrix.matrix_document` → what is printed at the end."""
Pages = Callable[[Mapping[str, Any]], Mapping[str, str]]
"""The same document → file name → text, written beside report.json."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("matrix", nargs="?", metavar="FILE|NAME",
                        help=f"a matrix file, or one that ships: {', '.join(shipped())}; with --resume it may be left "
                             "out")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", type=Path, metavar="DIR", help=f"new folder (default: the next {ROOT}/NNN)")
    where.add_argument("--resume", type=Path, metavar="DIR",
                       help="go on with the matrix in DIR: what finished there is not run again")
    parser.add_argument("--quick", action="store_true", help="the file's short form")
    parser.add_argument("--cells", type=_names, metavar="A,B", help="these alone")
    parser.add_argument("--arms", type=_names, metavar="A,B", help="these alone")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true",
                      help="check all that can be checked and print every run, its command and its time; start nothing")
    what.add_argument("--print", dest="show", action="store_true", help="print the file, to make one's own of it")
    parser.add_argument("--api-key", metavar="KEY", help="that the servers ask for")
    parser.add_argument("--strict", action="store_true", help=f"exit {BARS_MISSED} when a bar is missed")
    parser.add_argument("--json", action="store_true", help="print the figures (or the dry run) as JSON")


def run(args: argparse.Namespace, *, out: TextIO, err: TextIO, clock: Clock | None = None, argv: Sequence[str] = (),
        tell: Tell | None = None, pages: Pages | None = None) -> int:
    """The exit code. `tell` and `pages` are the report's; without them verdicts are printed, one a line."""
    clock = clock or WallClock()
    if args.show:
        out.write(matrix_text(_name(args)))
        return 0
    matrix, asked = _matrix(args)
    if args.dry_run:
        return _dry_run(matrix, args, out, clock)
    errors = _checked(matrix, args.resume or args.out or Path(ROOT), err, clock)
    if errors:
        raise ConfigError(f"{errors[0].where}: {errors[0].text}" + (f" (and {len(errors) - 1} more above)"
                                                                     if errors[1:] else ""))
    folder = _folder(args)
    with locked(folder):
        if begun(folder) is None:
            begin(folder, matrix.text, asked)
        err.write(f"{matrix.name} ({matrix.form}), {len(matrix.runs)} runs, into {folder}\n")
        try:
            outcome = play(matrix, folder, clock=clock, err=err, argv=without_key(argv))
        except KeyboardInterrupt:
            err.write(f"interrupted; `hostcache bench matrix --resume {shlex.quote(str(folder))}` goes on with it\n")
            return INTERRUPTED
        document = matrix_document(folder, baseline=matrix.baseline)
        written = write_report(folder, document, pages(document) if pages is not None else {})
    out.write(json.dumps(document, indent=1, ensure_ascii=False) + "\n" if args.json
              else tell(document) if tell is not None else _verdicts(document))
    err.write("".join(f"written: {path}\n" for path in written))
    return _exit_code(outcome, document, folder, args.strict, err)


def _exit_code(outcome: Outcome, document: Mapping[str, Any], folder: Path, strict: bool, err: TextIO) -> int:
    off = missed(dict(document))
    if off:
        err.write(f"missed: {'; '.join(off)}\n")
    if outcome.failed:
        for name, why in outcome.failed.items():
            err.write(f"failed: {name}: {why}\n")
        err.write(f"`hostcache bench matrix --resume {shlex.quote(str(folder))}` tries these again\n")
        return FAILED
    return BARS_MISSED if strict and off else 0


def _verdicts(document: Mapping[str, Any]) -> str:
    lines = []
    for each in document["verdicts"]:
        what = " ".join(filter(None, (each["cell"], each["arm"], each["part"], each["bar"])))
        value = "" if each["value"] is None else f" {each['value']:.4g}"
        lines.append(f"{each['verdict']}: {what}{value}, wanted {each['wants']}\n")
    return "".join(lines) or f"{len(document['cells'])} runs, no bars\n"


# -- which matrix, and where -----------------------------------------------------------------------------------------


def _name(args: argparse.Namespace) -> str:
    if args.matrix is None:
        raise ConfigError(f"name a matrix: a file, or one of {', '.join(shipped())}")
    return str(args.matrix)


def _matrix(args: argparse.Namespace) -> tuple[Matrix, Asked]:
    """What is asked for; of a folder that is resumed, what was asked for there. Raises ConfigError."""
    earlier = None if args.resume is None else begun(args.resume)
    if earlier is None:
        if args.resume is not None and args.matrix is None:
            raise ConfigError(f"--resume {args.resume} has no matrix; give its file too, or the right folder")
        name = _name(args)
        text = matrix_text(name)
        whole = parse_matrix(text, file=name, quick=args.quick, api_key=args.api_key)
        asked = Asked(name=name, sha256=whole.digest, quick=args.quick, cells=args.cells, arms=args.arms)
        return whole.chosen(args.cells, args.arms), asked
    text, asked = earlier
    if args.matrix is not None and matrix_text(args.matrix) != text:
        raise ConfigError(f"{args.matrix} is not the matrix in {args.resume}; leave it out to go on with that one, or "
                          "start anew in another folder")
    if args.quick and not asked.quick:
        raise ConfigError(f"the matrix in {args.resume} was begun without --quick; start anew in another folder")
    if args.cells is None and args.arms is None:
        there = matrix_in(args.resume, api_key=args.api_key)
        assert there is not None
        return there, asked
    whole = parse_matrix(text, file=asked.name, quick=asked.quick, api_key=args.api_key)
    return whole.chosen(args.cells, args.arms), asked


def _folder(args: argparse.Namespace) -> Path:
    if args.resume is None:
        return new_folder(args.out, ROOT)
    folder: Path = args.resume
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _checked(matrix: Matrix, folder: Path, err: TextIO, clock: Clock) -> list[Finding]:
    """The errors; warnings and what follows the first error are written."""
    found = check(matrix, folder, clock=clock)
    errors = [each for each in found if each.level == "error"]
    for each in found if errors[1:] else [each for each in found if each.level == "warning"]:
        err.write(f"{each}\n")
    return errors


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; give for example b1,b5")
    return names


# -- what would be run -----------------------------------------------------------------------------------------------


def _dry_run(matrix: Matrix, args: argparse.Namespace, out: TextIO, clock: Clock) -> int:
    """2 where a check fails. What is finished in a folder to be resumed is marked."""
    found = check(matrix, args.resume or args.out or Path(ROOT), clock=clock)
    if args.out is not None and args.out.is_dir() and any(args.out.iterdir()):
        found.insert(0, Finding(level="error", where=str(args.out),
                                text="it is not empty; runs never overwrite: give a new folder, or --resume it"))
    if args.resume is not None and not args.resume.is_dir():
        found.insert(0, Finding(level="error", where=str(args.resume), text="there is no such folder to resume"))
    done = {run.name for run in matrix.runs if args.resume is not None and slot_of(args.resume, run).finished}
    out.write(_dry_json(matrix, found, done) if args.json else _dry_text(matrix, found, done))
    return ConfigError.exit_code if any(each.level == "error" for each in found) else 0


def _dry_text(matrix: Matrix, found: Sequence[Finding], done: set[str]) -> str:
    lines = [f"{matrix.name} ({matrix.form}): {matrix.about}".rstrip(": "), ""]
    for cell in matrix.cells:
        runs = [run for run in matrix.runs if run.cell == cell]
        lines += [f"{cell}: {runs[0].workload.KIND}, {_shape(runs[0])}"]
        lines += [f"  answers {runs[0].answers}"] * bool(runs[0].answers)
        lines += [f"  {kind}: {', '.join(f'{name} {_plain(value)}' for name, value in table.items())}"
                  for kind, table in (("bars", runs[0].spec.bars), ("goals", runs[0].spec.goals)) if table]
        for run in {run.arm: run for run in runs}.values():
            asked = {None: "not asked", "on": "tier on", "off": "tier off"}[run.target.tier]
            quota = f", at most {format_size(run.target.quota_bytes)}" if run.target.quota_bytes else ""
            lines += [f"  {run.arm} ({asked}{quota}): {run.target.url or _command(run)}"]
        lines += [f"  {', '.join(_short(run, matrix, done) for run in runs)}", ""]
    lines += [str(each) for each in found] or ["all that can be checked without starting a server is well"]
    left = [estimate_s(run, matrix.speed) for run in matrix.runs if run.name not in done]
    known = sum(each for each in left if each is not None)
    lines += [f"{len(matrix.runs)} runs of {len(matrix.cells)} cells, {len(done)} finished; "
              f"{'at least' if None in left else 'about'} {span_text(known)} left", ""]
    return "\n".join(lines)


def _short(run: Run, matrix: Matrix, done: set[str]) -> str:
    known = estimate_s(run, matrix.speed)
    return f"{run.arm} {run.turn} " + ("(finished)" if run.name in done else "(unknown)" if known is None
                                       else f"(about {span_text(known)})")


def _shape(run: Run) -> str:
    """The parameters; what is 0 or empty is left out, as it leaves something out."""
    given = [f"{field.name} {_plain(value)}" for field in dataclasses.fields(run.workload)  # type: ignore[arg-type]
             if (value := getattr(run.workload, field.name))]
    return ", ".join([*given, f"corpus {run.spec.corpus}", f"seed {run.spec.seed}"])


def _plain(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, list | tuple) else f"{value}"


def _command(run: Run) -> str:
    """As one would type it."""
    words = list(run.target.command)
    own = [sys.executable, "-m", "hostcache"]
    for at in range(len(words) - 2):
        if words[at : at + 3] == own:
            words[at : at + 3] = ["hostcache"]
            break
    return shlex.join(words).replace("'{port}'", "{port}")


def _dry_json(matrix: Matrix, found: Sequence[Finding], done: set[str]) -> str:
    return json.dumps({
        "version": 1, "matrix": matrix.name, "form": matrix.form, "sha256": matrix.digest,
        "runs": [{"cell": run.cell, "arm": run.arm, "turn": run.turn, "workload": run.workload.KIND,
                  "answers": run.answers, "command": list(run.target.command), "url": run.target.url,
                  "tier": run.target.tier, "finished": run.name in done, "estimate_s": estimate_s(run, matrix.speed)}
                 for run in matrix.runs],
        "findings": [{"level": each.level, "where": each.where, "text": each.text} for each in found]},
        indent=1) + "\n"

