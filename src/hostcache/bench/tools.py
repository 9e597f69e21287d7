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
from hostcache.errors import BARS_MISSED, ConfigError, HostCacheError
from hostcache.records import CellRecord, Record
from hostcache.testing.mock_server import add_arguments as mock_arguments
from hostcache.testing.mock_server import config_from, serve_mock
from hostcache.workload.corpora import build_corpus, write_corpus
from hostcache.workload.mining import mine
from hostcache.workload.profiles import find_profile, named_profile, profile_json, profile_names
from hostcache.workload.request_logs import Form, read_log

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
    each.add_argument("--out", type=Path, metavar="FILE", help="a new file (default: stdout)")
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
    log = read_log(args.log, form=args.form)
    mined = mine(log.requests, name=args.name or args.log.name.split(".")[0], speed=args.speed,
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
    _give(profile_json(mined.profile), args.out, out, err)
    return 0


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
