"""The tools of the harness that start no workload: `bench corpus|mine|profiles|report|mock`. Knows no report page."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO, get_args

from hostcache.bench.harness.cellfile import RECORDS, whole_records
from hostcache.bench.harness.figures import bench_document
from hostcache.bench.harness.matrix_folder import counted_files
from hostcache.bench.harness.summaries import parse_goodput
from hostcache.bench.mined import (
    FLEETS,
    Comparison,
    FleetSize,
    compared,
    comparison_json,
    comparison_text,
    parse_fleet,
)
from hostcache.errors import BARS_MISSED, ConfigError, HostCacheError
from hostcache.records import CellRecord, Record
from hostcache.testing.mock_server import add_arguments as mock_arguments
from hostcache.testing.mock_server import config_from, serve_mock
from hostcache.workload.corpora import build_corpus, write_corpus
from hostcache.workload.mining import Mined, ideal_log, mine
from hostcache.workload.profiles import find_profile, named_profile, profile_json, profile_names
from hostcache.workload.request_logs import Form, read_log
from hostcache.workload.traces import open_trace, sessions_of

_REPORT = """\
examples:
  hostcache bench report hostcache-bench/007              one run, or every cell of a matrix
  hostcache bench report off-folder on-folder --out page  two runs side by side, if they may be compared

Every figure is computed anew from the records. Two cells stand in one comparison only when they sent the same, started
cold and each server said which arm it was; docs/measuring.md says what every figure means and what makes a cell void.
"""
_MINE = """\
examples:
  hostcache bench mine requests.jsonl --out my-profile.json
  hostcache bench agents --profile my-profile.json
  hostcache sim plan --profile my-profile.json
  hostcache bench mine replay.jsonl --speed 20 --no-replies --named --against trace.jsonl.gz --sessions 24

Reads a proxy's JSONL, vLLM's request log, LiteLLM's JSONL or a CSV (docs/profiles.md); sizes and times, never content.
"""
_CORPUS = """\
example:
  hostcache bench corpus --from ~/src/project --out corpus
  hostcache bench agents --corpus corpus

The same folder gives the same bytes on every machine; corpus.json holds the sha256 of every input and output.
"""
_MOCK = """\
examples:
  hostcache bench mock --port 8001
  hostcache bench mock --ttft-s 0.05 --chunks 4 --fault refuse:10 --fault stall:50

An OpenAI server without a model, with a device and a host tier, for trying a harness. It listens on loopback.
"""

TOOLS = ("corpus", "mine", "profiles", "report", "mock")
Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """How documents become text: given by the command line. `published`: what to show beside, or None."""

    text: Callable[[Document, Document | None], str]
    markdown: Callable[[Document, Document | None], str]
    html: Callable[[Document, Document | None], str]
    published: Document | None


def add_tools(commands: Any) -> None:
    """Their parsers, to what `ArgumentParser.add_subparsers` gave."""
    raw = argparse.RawDescriptionHelpFormatter

    def tool(name: str, text: str, epilog: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = commands.add_parser(name, help=text, epilog=epilog, formatter_class=raw,
                                                              description=f"{text[0].upper()}{text[1:]}.")
        return parser

    each = tool("corpus", "prose and code from real text, to talk about", _CORPUS)
    each.add_argument("--from", dest="source", type=Path, metavar="DIR",
                      help="a folder of text and code (default: Python's standard library)")
    each.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder")
    each = tool("mine", "a request log to a workload profile, without reading content", _MINE)
    each.add_argument("log", type=Path, metavar="LOG")
    each.add_argument("--form", choices=get_args(Form), help="of the log (default: told from its first lines)")
    each.add_argument("--name", metavar="NAME", help="of the profile (default: the log's)")
    each.add_argument("--speed", type=float, default=1.0, metavar="X",
                      help="how many times faster than life the log was recorded (default: 1)")
    each.add_argument("--no-replies", action="store_true", help="prompts do not contain the answers before them")
    each.add_argument("--named", action="store_true", help="leave out requests that name no conversation")
    each.add_argument("--out", type=Path, metavar="FILE", help="a new file (default: stdout, but for --against)")
    group = each.add_argument_group("what came back of a trace whose replay the log is of")
    group.add_argument("--against", type=Path, metavar="TRACE", help="print its figures beside the mined ones")
    group.add_argument("--sessions", type=int, default=0, metavar="N", help="of the trace, the first N (default: all)")
    group.add_argument("--longest-gap-s", type=float, default=0.0, metavar="S", help="the replay cut pauses to that")
    group.add_argument("--fleet", action="append", default=[], metavar="POOL[:HOST]",
                       help="simulate both on a device of so many tokens and a host tier of so many bytes; may be "
                            f"given again (default: {', '.join(FLEETS)})")
    group.add_argument("--json", action="store_true", help="print the comparison as JSON")
    group.add_argument("--strict", action="store_true", help=f"exit {BARS_MISSED} when something did not come back")
    each = tool("profiles", "the workloads that ship", "")
    each.add_argument("name", nargs="?", metavar="NAME|FILE", help="print this one")
    each = tool("report", "records of the harness as tables, JSON and one page", _REPORT)
    each.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="of runs, or of a whole matrix")
    each.add_argument("--out", type=Path, metavar="DIR", help="new folder for report.md, report.json and report.html")
    each.add_argument("--baseline", default="off", metavar="ARM", help="the others are compared with (default: off)")
    each.add_argument("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="instead of the records' own")
    each.add_argument("--json", action="store_true", help="print JSON instead of tables")
    each.add_argument("--strict", action="store_true", help=f"exit {BARS_MISSED} when a bar of the records is missed")
    mock_arguments(tool("mock", "an offline server with a device and a host tier", _MOCK))


def run(args: argparse.Namespace, *, out: TextIO, err: TextIO, pages: Pages) -> int:
    """The exit code."""
    ran: Mapping[str, Callable[..., int]] = {"corpus": _corpus, "mine": _mine, "profiles": _profiles,
                                             "report": _report, "mock": _mock}
    return ran[args.what](args, out=out, err=err, pages=pages)


def _corpus(args: argparse.Namespace, *, out: TextIO, err: TextIO, pages: Pages) -> int:
    corpus = build_corpus(args.source)
    write_corpus(corpus, args.out)
    for name, digest in corpus.digests.items():
        out.write(f"{digest}  {args.out / name}\n")
    return 0


def _mine(args: argparse.Namespace, *, out: TextIO, err: TextIO, pages: Pages) -> int:
    asked = [name for name in ("sessions", "longest_gap_s", "fleet", "json", "strict") if getattr(args, name)]
    if asked and args.against is None:
        raise ConfigError(f"--{asked[0].replace('_', '-')} is of a comparison; give --against TRACE with it")
    if args.sessions < 0 or not 0 <= args.longest_gap_s < float("inf"):
        raise ConfigError(f"--sessions is {args.sessions}, --longest-gap-s {args.longest_gap_s}; give 0 or more")
    fleets = [parse_fleet(text) for text in args.fleet or FLEETS]
    log = read_log(args.log, form=args.form)
    requests = [each for each in log.requests if each.session is not None or not args.named]
    if args.named:
        err.write(f"left out {len(log.requests) - len(requests)} requests that name no conversation\n")
    mined = mine(requests, name=args.name or args.log.name.split(".")[0], speed=args.speed,
                 source=f"mined from {args.log.name} ({log.form})", replies_return=not args.no_replies)
    for why, count in log.skipped.items():
        err.write(f"skipped {count} × {why} (first: line {log.first[why]})\n")
    for status, count in log.failed.items():
        err.write(f"left out {count} requests that were answered {status}\n")
    for name, value in asdict(mined.facts).items():
        if name != "notes":
            err.write(f"  {name.replace('_', ' '):20} {value}\n")
    for note in mined.facts.notes:
        err.write(f"  {note}\n")
    if args.out is not None or args.against is None:
        _give(profile_json(mined.profile), args.out, out, err)
    if args.against is None:
        return 0
    comparison = _against(mined, args, fleets, err)
    out.write(json.dumps(comparison_json(comparison), indent=1, ensure_ascii=False) + "\n" if args.json
              else comparison_text(comparison))
    return BARS_MISSED if args.strict and comparison.missed else 0


def _against(mined: Mined, args: argparse.Namespace, fleets: Sequence[FleetSize], err: TextIO) -> Comparison:
    """The log is of a replay of the first sessions of that trace."""
    trace = open_trace(args.against)
    sessions = sessions_of(trace)[: args.sessions or None]
    ideal = ideal_log(sessions, block_tokens=trace.format.block_tokens, longest_gap_s=args.longest_gap_s)
    reference = mine(ideal, name=args.against.name, replies_return=not args.no_replies)

    def tell(line: str) -> None:
        err.write(f"{line}\n")
        err.flush()

    return compared(mined, reference, trace, sessions, fleets=fleets, longest_gap_s=args.longest_gap_s, progress=tell)


def _profiles(args: argparse.Namespace, *, out: TextIO, err: TextIO, pages: Pages) -> int:
    if args.name is not None:
        out.write(profile_json(find_profile(args.name)))
        return 0
    for name in profile_names():
        out.write(f"{name:24}{named_profile(name).source}\n")
    return 0


def _give(text: str, path: Path | None, out: TextIO, err: TextIO) -> None:
    if path is None:
        out.write(text)
        return
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise ConfigError(f"--out {path} exists; nothing is overwritten: give a new name") from None
    except OSError as why:
        raise ConfigError(f"--out {path} cannot be written: {why.strerror}") from None
    err.write(f"written: {path}\n")


# --- report -----------------------------------------------------------------------------------------------------------


def cells_in(folders: Iterable[Path]) -> list[list[Record]]:
    """The records of every cell in or below the folders. Raises ConfigError where there is none."""
    found: list[list[Record]] = []
    for folder in folders:
        paths = [folder] if folder.is_file() else counted_files(folder) or sorted(folder.rglob(RECORDS))
        files = [records for records in map(list, map(whole_records, paths))
                 if any(isinstance(each, CellRecord) for each in records)]
        if not files:
            raise ConfigError(f"{folder} holds no {RECORDS} of the harness; give the folder of a run or of a matrix")
        found += files
    return found


def document_of(folders: Iterable[Path], *, baseline: str = "off", goodput: Sequence[str] = ()) -> Document:
    wanted = parse_goodput(" ".join(goodput)) if goodput else None
    return bench_document(cells_in(folders), baseline=baseline, goodput=wanted)


def missed_bars(document: Document) -> list[str]:
    """What `--strict` does not let pass, as `cell arm point: bar`."""
    return [" ".join(str(each[name]) for name in ("cell", "arm", "part", "bar") if each.get(name))
            for each in document["verdicts"] if each["verdict"] != "pass"]


def _report(args: argparse.Namespace, *, out: TextIO, err: TextIO, pages: Pages) -> int:
    document = document_of(args.folders, baseline=args.baseline, goodput=args.goodput)
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    if args.out is not None:
        try:
            args.out.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(f"--out {args.out} exists; a report is never overwritten: give a new name") from None
        (args.out / "report.json").write_text(text, encoding="utf-8")
        (args.out / "report.md").write_text(pages.markdown(document, pages.published), encoding="utf-8")
        (args.out / "report.html").write_text(pages.html(document, pages.published), encoding="utf-8")
        err.write(f"written: {args.out}/ (report.html, report.json, report.md)\n")
    out.write(text if args.json else pages.text(document, pages.published))
    names = missed_bars(document)
    if names and args.strict:
        err.write(f"missed: {'; '.join(names)}\n")
        return BARS_MISSED
    return 0


# --- mock -------------------------------------------------------------------------------------------------------------


def _mock(args: argparse.Namespace, *, out: TextIO, err: TextIO, pages: Pages) -> int:
    config = config_from(args)

    def ready(url: str) -> None:
        print(f"serving {config.model} on {url}", file=err, flush=True)

    async def serve() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await serve_mock(config, args.host, args.port, on_ready=ready)

    try:
        asyncio.run(serve())
    except OSError as why:
        raise HostCacheError(f"cannot listen on {args.host}:{args.port}: {why.strerror}; "
                             "choose another --port") from None
    return 0
