"""`hostcache bench …`: which measurement, workload or tool, and who runs it. Knows no report and no laboratory.

Three kinds of word: measurements of our own parts (`copy`, `engine` …), workloads against any OpenAI server (`rotate`,
`agents` …), and tools (`corpus`, `mine`, `report` …). Pages and curves are handed in.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from hostcache.bench import measurements, tools
from hostcache.bench.harness import commands as workloads
from hostcache.bench.harness import matrix_commands
from hostcache.bench.oracle_speed import Curves
from hostcache.bench.tools import Pages, document_of, missed_bars
from hostcache.bench.vllm import commands as inside_vllm

_VLLM = "the tier inside real vLLM servers, beside vLLM without it and others; in vLLM's environment"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="WHAT", dest="what")
    raw = argparse.RawDescriptionHelpFormatter
    for name, text in workloads.WORKLOADS.items():
        workloads.add_arguments(commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.",
                                                    formatter_class=raw), name)
    matrix_commands.add_arguments(commands.add_parser(
        "matrix", help="a file of cells and arms, run one after the other, resumable", formatter_class=raw,
        description="Runs a matrix of cells and arms; docs/matrix.md has the file's form."))
    tools.add_tools(commands)
    for name, each in measurements.MEASUREMENTS.items():
        measurements.add_arguments(commands.add_parser(name, help=f"measures {each.says}"))
    measurements.add_arguments(commands.add_parser("all", help="every one of these measurements (the default)"))
    inside_vllm.add_arguments(commands.add_parser("vllm", help=_VLLM, formatter_class=raw))
    parser.set_defaults(**measurements.DEFAULTS)


def run(args: argparse.Namespace, *, out: TextIO, err: TextIO, pages: Pages,
        curves: Callable[[], Curves | None] = lambda: None, argv: Sequence[str] = ()) -> int:
    """The exit code."""
    what = args.what or "all"
    if what in tools.TOOLS:
        return tools.run(args, out=out, err=err, pages=pages)
    if what in workloads.WORKLOADS:
        return _workload(args, what, out=out, err=err, pages=pages, argv=argv)
    if what == "matrix":
        return matrix_commands.run(
            args, out=out, err=err, argv=argv, tell=lambda document: pages.text(dict(document), pages.published),
            pages=lambda document: {"report.md": pages.markdown(dict(document), pages.published),
                                    "report.html": pages.html(dict(document), pages.published)})
    if what == "vllm":
        return inside_vllm.run(args, out=out, err=err)
    return measurements.run(args, out=out, err=err, curves=curves)


def _workload(args: argparse.Namespace, what: str, *, out: TextIO, err: TextIO, pages: Pages,
              argv: Sequence[str]) -> int:
    def tell(path: Path, as_json: bool) -> str:
        document = document_of([path])
        return (json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n" if as_json
                else pages.text(document, None))

    return workloads.run(args, what, out=out, err=err, argv=argv, tell=tell,
                         missed=lambda path: missed_bars(document_of([path])))
