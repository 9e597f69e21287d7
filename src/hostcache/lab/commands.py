"""`hostcache lab …`: reads arguments, runs, prints or writes a folder. Pages are handed in: it knows no report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, get_args

from hostcache.clock import WallClock
from hostcache.errors import ConfigError
from hostcache.folders import new_folder
from hostcache.lab.lru import Touch
from hostcache.lab.oracle import oracle
from hostcache.lab.own_tier import OwnTier, own_tier
from hostcache.lab.probe_commands import PROBE_WORDS, add_probe_arguments, run_probe_command
from hostcache.lab.story import story, story_text
from hostcache.lab.stream import Stream, stream_of
from hostcache.lab.trace_commands import add_reading_arguments, add_trace_arguments, open_asked, run_trace
from hostcache.sizes import parse_size

_STORY = """\
example:
  hostcache lab story --trace conversation_trace.jsonl.gz

A hit rate of 0.3865 was published for a stream whose bound is 0.1687. This re-derives both from the public trace, and
what happened in between. docs/lab.md tells the story.
"""
_ORACLE = """\
examples:
  hostcache lab oracle --trace conversation_trace.jsonl.gz
  hostcache lab oracle --trace sessions.jsonl.gz --pool-tokens 1000000 --host-tokens 8000000 --kv-bytes-per-token 131072
  hostcache lab oracle --trace conversation_trace.jsonl.gz --requests 600 --block-tokens 64 --pool-tokens 65536 --json

Every capacity of LRU and of the optimum in one pass each. With numba ('hostcache[lab]') a million references take
well under a second, without it about twenty times as long. With a pool and a host, hostcache's own tier is driven over
the trace too, request by request, which takes longer.
"""

Render = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """How documents become text: given by the command line."""

    oracle_text: Render
    oracle_html: Render


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="WHAT", required=True, dest="what")
    each = commands.add_parser("story", help="the retracted probe, re-derived from the public trace in a second",
                               epilog=_STORY, description="Re-derives a published number that exceeded a theorem.",
                               formatter_class=argparse.RawDescriptionHelpFormatter)
    each.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake's conversation trace; it is not shipped")
    each.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_trace_arguments(commands.add_parser("trace", help="read, cut, convert and check traces of five formats",
                                            description="Traces: what is in them, parts of them, other forms."))
    add_probe_arguments(commands)
    each = commands.add_parser("oracle", help="what any cache could have held of a trace, at every capacity",
                               epilog=_ORACLE, description="The bound, LRU and the optimum of a trace.",
                               formatter_class=argparse.RawDescriptionHelpFormatter)
    each.add_argument("--trace", type=Path, required=True, metavar="FILE", help="a trace with block ids")
    add_reading_arguments(each)
    each.add_argument("--requests", type=int, metavar="N", help="the first N requests (default: all)")
    each.add_argument("--block-tokens", type=int, metavar="N",
                      help="read the trace's blocks as blocks of N tokens (default: the trace's own)")
    each.add_argument("--touch", choices=get_args(Touch), default="sequential",
                      help="the order in which LRU hears of a request's blocks (default: %(default)s)")
    each.add_argument("--pool-tokens", type=int, metavar="N", help="a device pool to mark")
    each.add_argument("--host-tokens", type=int, metavar="N",
                      help="a host tier behind it to mark; hostcache's own tier is then driven over the trace")
    each.add_argument("--page-tokens", type=int, metavar="N",
                      help="an engine's blocks: bound and LRU are given in these too, never a prompt's last token, and "
                      "that tier has pages of them (default: one page is one block)")
    each.add_argument("--no-own-tier", action="store_true", help="leave that tier out, for a very long trace")
    each.add_argument("--kv-bytes-per-token", metavar="SIZE", help="to show capacities in bytes too")
    each.add_argument("--out", type=Path, metavar="DIR", help="new folder (default: the next hostcache-lab/NNN)")
    each.add_argument("--json", action="store_true", help="print the document instead of the tables")


def run(args: argparse.Namespace, *, out: TextIO, err: TextIO, pages: Pages, argv: Sequence[str],
        api_key: str | None = None) -> int:
    """The exit code. `api_key`: what servers under this machine's settings ask for."""
    if args.what == "trace":
        return run_trace(args, out=out, err=err)
    if args.what in PROBE_WORDS:
        return run_probe_command(args, out=out, err=err, api_key=api_key)
    ran: dict[str, Callable[..., int]] = {"story": _story, "oracle": _oracle}
    return ran[args.what](args, out=out, err=err, pages=pages, argv=argv)


def _story(args: argparse.Namespace, *, out: TextIO, err: TextIO, pages: Pages, argv: Sequence[str]) -> int:
    told = story(args.trace)
    out.write(json.dumps(told, indent=1) + "\n" if args.json else story_text(told))
    return 0


def _oracle(args: argparse.Namespace, *, out: TextIO, err: TextIO, pages: Pages, argv: Sequence[str]) -> int:
    for flag, most in _MOST.items():
        if (value := getattr(args, flag)) is not None and not 1 <= value <= most:
            raise ConfigError(f"--{flag.replace('_', '-')} is {value}; give 1 or more, at most {most}")
    if args.host_tokens is not None and args.pool_tokens is None:
        raise ConfigError("--host-tokens is given without --pool-tokens; a host tier stands behind a device pool")
    token_bytes = None if args.kv_bytes_per_token is None else parse_size(args.kv_bytes_per_token,
                                                                          name="--kv-bytes-per-token")
    if token_bytes == 0:
        raise ConfigError(f"--kv-bytes-per-token is {args.kv_bytes_per_token}; a token of no bytes needs no cache; "
                          "leave it out to show tokens alone")
    stream = stream_of(open_asked(args), limit=args.requests, block_tokens=args.block_tokens)
    folder = new_folder(args.out, "hostcache-lab")
    try:
        document = {
            "version": 1, "trace": args.trace.name, "command": ["hostcache", *argv], "kv_bytes_per_token": token_bytes,
            **oracle(stream, pool_tokens=args.pool_tokens, host_tokens=args.host_tokens, touch=args.touch,
                     page_tokens=args.page_tokens, progress=lambda text: print(f"  {text}", file=err, flush=True)),
            "own_tier": None if args.host_tokens is None or args.no_own_tier else
            _own_tier(stream, args, err).as_json()}
    except BaseException:
        folder.rmdir()
        raise
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    (folder / "oracle.json").write_text(text, encoding="utf-8")
    (folder / "oracle.html").write_text(pages.oracle_html(document), encoding="utf-8")
    out.write(text if args.json else pages.oracle_text(document))
    err.write(f"written: {folder}/ (oracle.json, oracle.html)\n")
    return 0


TELL_EVERY_S = 5.0
_MOST = {"requests": 2**31, "block_tokens": 2**20, "pool_tokens": 10**15, "host_tokens": 10**15, "page_tokens": 2**20}
"""What is taken for a slip of the hand above, and would no longer fit the numbers that are counted in."""


def _own_tier(stream: Stream, args: argparse.Namespace, err: TextIO) -> OwnTier:
    clock = WallClock()
    due_s = clock.now() + TELL_EVERY_S

    def progress(requests: int) -> None:
        nonlocal due_s
        if clock.now() >= due_s:
            due_s = clock.now() + TELL_EVERY_S
            print(f"  hostcache's own tier: {requests:,} of {stream.requests:,} requests", file=err, flush=True)

    print("  hostcache's own tier, request by request", file=err, flush=True)
    return own_tier(stream, device_tokens=args.pool_tokens, host_tokens=args.host_tokens,
                    page_tokens=args.page_tokens, progress=progress)
