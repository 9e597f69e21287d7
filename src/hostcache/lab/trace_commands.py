"""`hostcache lab trace …`: says what a trace holds, cuts it, writes it in another form, checks it."""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO, TypeVar, cast

from hostcache.errors import ConfigError
from hostcache.folders import give_name, part_of
from hostcache.lab.stream import Seal
from hostcache.workload.trace_formats import azure, delta, mooncake, sessions
from hostcache.workload.traces import (
    AZURE,
    DELTA,
    MOONCAKE,
    SESSIONS,
    Trace,
    TraceCount,
    TraceFormat,
    TraceRefused,
    TraceRequest,
    block_form,
    open_trace,
    ranked,
)

_EXAMPLES = """\
examples:
  hostcache lab trace info conversation_trace.jsonl.gz
  hostcache lab trace slice conversation_trace.jsonl.gz --requests 600 --out first600.jsonl
  hostcache lab trace slice sessions.jsonl.xz --seconds 600:1200 --out ten-minutes.jsonl.xz
  hostcache lab trace convert traces/ --spread-s 3600 --seed 7 --to delta --out sessions.delta.jsonl.gz
  hostcache lab trace validate qwen_coder_blksz_16.jsonl

Read: Mooncake, the delta form, Qwen-Bailian (JSONL), kv-cache-tester sessions (a folder, a tar or one JSON file), Azure
(CSV); plain, gzip or xz. A file is written packed when its name ends in .gz or .xz, and never over another. Rows are
read as a stream; what stays in memory is some 50 bytes for each run of consecutive new ids, and each session's last
prompt where the form speaks of it.
"""

Found = TypeVar("Found")


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `info`, `slice`, `convert` and `validate`, and their arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    commands = parser.add_subparsers(metavar="WHAT", required=True, dest="trace_what")
    for name, about in (("info", "what it holds, its bound, and its digest"),
                        ("slice", "a part of it, in the same form"),
                        ("convert", "the same requests in another form"),
                        ("validate", "whether every row can be: exit code 0 or 2")):
        each = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        each.add_argument("trace", type=Path, metavar="FILE", help="a trace file, or a folder or tar of sessions")
        add_reading_arguments(each)
        each.add_argument("--json", action="store_true", help="one JSON object on stdout")
        if name == "slice":
            each.add_argument("--requests", type=int, metavar="N", help="the first N requests")
            each.add_argument("--seconds", metavar="A:B", help="what came from A to before B (either may be left out)")
            each.add_argument("--sessions", type=int, metavar="N", help="the first N sessions, with their sub-agents")
        if name == "convert":
            each.add_argument("--to", choices=sorted(_FORMS), required=True, help="the form to write")
        if name in ("slice", "convert"):
            each.add_argument("--out", type=Path, required=True, metavar="PATH", help="a new file (or folder)")


def add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    """How a trace is to be read, for every command that reads one; `open_asked` acts on it."""
    parser.add_argument("--read-blocks", metavar="N:ROUNDING",
                        help="the file's blocks, where they are not its form's (64:floor, say)")
    parser.add_argument("--spread-s", type=float, default=0.0, metavar="S",
                        help="sessions whose start nobody recorded begin within S seconds (default: together)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="draws those starts (default: %(default)s)")


def open_asked(args: argparse.Namespace, *, need_blocks: bool = True) -> Trace:
    """The trace at `args.trace`. Raises ConfigError, TraceRefused."""
    blocks = None if args.read_blocks is None else block_form(args.read_blocks, "--read-blocks")
    return open_trace(args.trace, blocks=blocks, spread_s=args.spread_s, seed=args.seed, need_blocks=need_blocks)


def run_trace(args: argparse.Namespace, *, out: TextIO, err: TextIO, every: int = 5_000_000) -> int:
    """The exit code. `every`: blocks between two lines of progress. Raises ConfigError, TraceRefused."""
    ran: dict[str, Callable[[argparse.Namespace, _Told], dict[str, Any]]] = {
        "info": _info, "slice": _slice, "convert": _convert, "validate": _validate}
    document = ran[args.trace_what](args, _Told(err, every))
    out.write(json.dumps(document, indent=1, allow_nan=False) + "\n" if args.json else _text(document))
    return 0 if document.get("valid", True) else TraceRefused.exit_code


# Commands -----------------------------------------------------------------------------------------------------------


def _info(args: argparse.Namespace, told: _Told) -> dict[str, Any]:
    trace = open_asked(args, need_blocks=False)
    count, seal = TraceCount(trace), Seal(trace.format.block_tokens)
    for some in ranked(_watched(trace, told), trace=trace):
        count.add(some)
        seal.add(some)
    facts = count.facts()
    return {
        **_named(trace), "requests": facts.requests, "sessions": facts.sessions, "references": facts.references,
        "distinct": facts.distinct,
        "infinite_hit_rate": None if facts.infinite_hit_rate is None else {
            "blocks": facts.infinite_hit_rate, "tokens": facts.infinite_hit_rate_tokens,
            "requests": facts.infinite_hit_rate_requests},
        "input_tokens": facts.input_tokens, "output_tokens": facts.output_tokens,
        "longest_input_tokens": facts.longest_input_tokens, "span_s": facts.span_s, "digest": seal.hexdigest()}


def _validate(args: argparse.Namespace, told: _Told) -> dict[str, Any]:
    try:
        trace = open_asked(args, need_blocks=False)
        count = TraceCount(trace)
        for some in ranked(_watched(trace, told), trace=trace):
            count.add(some)
    except TraceRefused as bad:
        if not args.json:
            raise
        return {"trace": args.trace.name, "valid": False, "row": bad.row, "why": str(bad)}
    return {**_named(trace), "valid": True, "requests": count.requests, "references": count.references}


def _slice(args: argparse.Namespace, told: _Told) -> dict[str, Any]:
    cut = _Cut.of(args)
    trace = open_asked(args, need_blocks=False)
    if trace.format.name == SESSIONS.name:
        if cut.sessions is None or cut.requests is not None or args.seconds is not None:
            raise ConfigError(f"{args.trace.name} has a file for each session; give --sessions N alone, or convert it "
                              "first")
        taken = sessions.sources(trace.path)[: cut.sessions]
        names = [each.unpacked_name for each in taken]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{args.trace.name} has {names.count(name)} session files named {name}, and one "
                                  "folder has room for one; convert it instead")
        sliced = _new_folder(args.out, ((each.unpacked_name, each.read()) for each in taken),
                             lambda folder: _sealed(_again(args, folder), told))
    else:
        sliced = _new_file(args.out, _lines(trace, cut, told), lambda file: _sealed(_again(args, file), told))
    return {**_named(trace), "requests": sliced[0], "digest": sliced[1], "written": str(args.out)}


def _convert(args: argparse.Namespace, told: _Told) -> dict[str, Any]:
    trace = open_asked(args)
    form = _FORMS[args.to]
    seal, lost = Seal(trace.format.block_tokens), _Lost(args.to)
    blocks = trace.format.block_tokens, trace.format.rounding
    usual = blocks == (form.format.block_tokens, form.format.rounding)

    def seen() -> Iterator[TraceRequest]:
        for some in ranked(_watched(trace, told), trace=trace):
            seal.add(some)
            for request in some.requests:
                lost.add(request)
                yield request

    requests, digest = _new_file(args.out, form.lines(seen()),
                                 lambda file: _sealed(open_trace(file, blocks=None if usual else blocks), told))
    return {
        **_named(trace), "to": args.to, "requests": requests, "lost": lost.words(trace),
        "digest_before": seal.hexdigest(), "digest": digest, "same_digest": digest == seal.hexdigest(),
        "read_blocks": None if usual else f"{blocks[0]}:{blocks[1]}", "written": str(args.out)}


@dataclass(frozen=True, slots=True)
class _Form:
    """A form that can be written."""

    format: TraceFormat
    lines: Callable[[Iterable[TraceRequest]], Iterator[bytes]]


_FORMS = {MOONCAKE.name: _Form(MOONCAKE, mooncake.lines),
          DELTA.name: _Form(DELTA, lambda requests: delta.lines(requests, alone=True))}


class _Lost:
    """What of these requests a form cannot say."""

    def __init__(self, to: str) -> None:
        self._to = to
        self._sessions = self._pauses = self._answers = self._times = self._forks = False
        self._last_s: dict[str, float | None] = {}

    def add(self, request: TraceRequest) -> None:
        self._sessions |= request.session is not None
        self._pauses |= request.think_s > 0
        self._answers |= request.api_s is not None
        self._times |= any(each is not None and abs(each * 1000 - round(each * 1000)) > 1e-6
                           for each in (request.arrival_s, request.think_s, request.api_s))
        # After an answer that was not timed, the delta form measures a pause from the session's last request: a fork's
        # own pause, from an earlier one, has no place there.
        if self._to == DELTA.name and request.session is not None and request.arrival_s is not None:
            last_s = self._last_s.get(request.session)
            self._forks |= last_s is not None and abs(request.arrival_s - last_s - request.think_s) > 2e-3
            self._last_s[request.session] = None if request.api_s else request.arrival_s

    def words(self, trace: Trace) -> list[str]:
        said = [(self._times, "times below a millisecond"), (self._forks, "pauses after a fork of a chat")]
        if self._to == MOONCAKE.name:
            said += [(self._sessions, "sessions"), (self._pauses, "pauses"), (self._answers, "answer times")]
        if trace.format.name not in (MOONCAKE.name, DELTA.name):
            said.append((True, f"fields of {trace.format.name} that are not read"))
        return [words for is_lost, words in said if is_lost]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """Which requests: within the seconds, of the first sessions there, and of those the first."""

    requests: int | None
    sessions: int | None
    from_s: float
    before_s: float

    @classmethod
    def of(cls, args: argparse.Namespace) -> _Cut:
        for flag, value in (("--requests", args.requests), ("--sessions", args.sessions)):
            if value is not None and value < 1:
                raise ConfigError(f"{flag} is {value}; give 1 or more")
        if args.requests is None and args.sessions is None and args.seconds is None:
            raise ConfigError("nothing says what to take; give --requests N, --seconds A:B or --sessions N")
        from_s, before_s = -inf, inf
        if args.seconds is not None:
            first, colon, last = args.seconds.partition(":")
            try:
                from_s, before_s = float(first or "-inf"), float(last or "inf")
            except ValueError:
                colon = ""
            if not colon or not from_s < before_s:
                raise ConfigError(f"--seconds is {args.seconds}; give A:B with A before B, in seconds")
        return cls(requests=args.requests, sessions=args.sessions, from_s=from_s, before_s=before_s)

    def take(self, rows: Iterable[tuple[bytes, TraceRequest]]) -> Iterator[tuple[bytes, TraceRequest]]:
        names: set[str] = set()
        taken = 0
        for line, request in rows:
            at = request.arrival_s or 0.0
            if at >= self.before_s or (self.requests is not None and taken >= self.requests):
                break
            if at < self.from_s:
                continue
            name = f"row {request.number}" if request.session is None else request.session.partition("/")[0]
            if self.sessions is not None and name not in names and len(names) >= self.sessions:
                continue
            names.add(name)
            taken += 1
            yield line, request
        if not taken:
            raise ConfigError("no request is within what was asked for; see `hostcache lab trace info` for the trace's "
                              "span")


def _lines(trace: Trace, cut: _Cut, told: _Told) -> Iterator[bytes]:
    """Rows of that part: as they stand, but for the delta form, whose rows speak of earlier ones."""
    progress = _Progress(told)

    def seen() -> Iterator[tuple[bytes, TraceRequest]]:
        for line, request in trace.with_lines():
            progress.saw(request)
            yield line, request

    kept = deque[bytes]()

    def taken() -> Iterator[TraceRequest]:
        for line, request in cut.take(seen()):
            kept.append(line)
            yield request

    requests = (request for some in ranked(taken(), trace=trace) for request in some.requests)
    if trace.format.name == DELTA.name:
        yield from delta.lines(requests)
        return
    if trace.format.name == AZURE.name:
        yield azure.HEADING + b"\n"
    for _ in requests:
        yield kept.popleft().rstrip(b"\r\n") + b"\n"


# Parts --------------------------------------------------------------------------------------------------------------


def _again(args: argparse.Namespace, path: Path) -> Trace:
    return open_asked(argparse.Namespace(**{**vars(args), "trace": path}), need_blocks=False)


def _named(trace: Trace) -> dict[str, Any]:
    drawn = {"spread_s": trace.spread_s, "seed": trace.seed} if trace.format.name == SESSIONS.name else {}
    return {"trace": trace.path.name, "format": trace.format.name, "block_tokens": trace.format.block_tokens or None,
            "rounding": trace.format.rounding if trace.format.block_tokens else None, **drawn}


def _sealed(trace: Trace, told: _Told) -> tuple[int, str]:
    """Requests and digest of what was written, read back."""
    seal, requests = Seal(trace.format.block_tokens), 0
    for some in ranked(_watched(trace, told, "reading back: "), trace=trace):
        seal.add(some)
        requests += len(some.requests)
    return requests, seal.hexdigest()


@dataclass(frozen=True, slots=True)
class _Told:
    """Where progress is told, and after how many blocks."""

    err: TextIO
    every: int


def _watched(requests: Iterable[TraceRequest], told: _Told, doing: str = "") -> Iterator[TraceRequest]:
    progress = _Progress(told, doing)
    for request in requests:
        progress.saw(request)
        yield request


class _Progress:
    def __init__(self, told: _Told, doing: str = "") -> None:
        self._told = told
        self._doing = doing
        self._requests = self._references = 0
        self._due = told.every

    def saw(self, request: TraceRequest) -> None:
        self._requests += 1
        self._references += max(1, len(request.blocks))  # a trace without blocks gets on, too
        if self._references >= self._due:
            self._due = self._references + self._told.every
            self._told.err.write(f"  {self._doing}{self._requests:,} requests, {self._references:,} blocks\n")
            self._told.err.flush()


def _text(document: dict[str, Any]) -> str:
    rows = []
    for key, value in document.items():
        words = value
        if isinstance(value, dict):
            words = ", ".join(f"{share:.6f} of {name}" if name != "requests" else f"{share:.6f} as a mean of requests"
                              for name, share in value.items())
        elif isinstance(value, list):
            words = ", ".join(value) or "nothing"
        elif isinstance(value, bool):
            words = "yes" if value else "no"
        elif isinstance(value, int):
            words = f"{value:,}" if key != "seed" else str(value)
        elif value is None:
            continue
        rows.append(f"{key.replace('_', ' '):<22}{words}\n")
    if read_blocks := document.get("read_blocks"):
        rows.append(f"\nIts blocks are not that form's: read it with --read-blocks {read_blocks}\n")
    return "".join(rows)


# Files --------------------------------------------------------------------------------------------------------------


def _new_file(path: Path, lines: Iterable[bytes], check: Callable[[Path], Found]) -> Found:
    """Writes beside `path`, has it checked, then gives it its name. Nothing stays of what fails.

    Raises ConfigError where `path` is there already or cannot be written.
    """
    part = _part(path)
    try:
        with part.open("xb") as raw, _packed(path, raw) as file:
            file.writelines(lines)
        found = check(part)
        try:
            give_name(part, path)
        except FileExistsError:
            _refuse_existing(path)
    except TraceRefused as bad:
        _of_the_whole(bad, part, path)
    except OSError as why:
        raise ConfigError(f"--out {path} cannot be written: {why.strerror or why}; give a new file where there is "
                          "room") from None
    finally:
        with suppress(OSError):
            part.unlink()
    return found


def _new_folder(path: Path, files: Iterable[tuple[str, bytes]], check: Callable[[Path], Found]) -> Found:
    """The same for a folder."""
    part = _part(path)
    try:
        part.mkdir()
        for name, content in files:
            (part / name).write_bytes(content)
        found = check(part)
        if path.exists():
            _refuse_existing(path)
        part.rename(path)
    except TraceRefused as bad:
        _of_the_whole(bad, part, path)
    except OSError as why:
        raise ConfigError(f"--out {path} cannot be written: {why.strerror or why}; give a new folder where there is "
                          "room") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return found


def _of_the_whole(bad: TraceRefused, part: Path, path: Path) -> NoReturn:
    """A refusal of what was written, which nobody ever sees under the name of its part."""
    raise TraceRefused(str(bad).replace(part.name, path.name), row=bad.row) from None


def _part(path: Path) -> Path:
    try:
        there = path.exists()
    except OSError as why:
        raise ConfigError(f"--out {path} cannot be written: {why.strerror}; give another name") from None
    if there:
        _refuse_existing(path)
    return part_of(path)


def _refuse_existing(path: Path) -> NoReturn:
    raise ConfigError(f"--out {path} exists; nothing is ever overwritten: give a new name")


def _packed(path: Path, raw: BinaryIO) -> AbstractContextManager[BinaryIO]:
    if path.suffix == ".gz":
        return cast(AbstractContextManager[BinaryIO], gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0))
    if path.suffix == ".xz":
        return cast(AbstractContextManager[BinaryIO], lzma.open(raw, "wb"))
    return nullcontext(raw)
