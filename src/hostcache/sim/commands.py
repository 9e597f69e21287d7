"""`hostcache sim …`: reads arguments, runs, writes a folder. Pages are handed in: this row knows no report."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from hostcache.clock import WallClock
from hostcache.errors import BARS_MISSED, ConfigError
from hostcache.folders import new_folder
from hostcache.records import PlanRecord, TwinRecord
from hostcache.sim.fuzz import EPILOG, add_fuzz_arguments, run_fuzz
from hostcache.sim.plan import AgentsLoad, Load, Machine, ProfileLoad, TraceLoad, plan
from hostcache.sim.suites import add_suite_arguments, run_suites
from hostcache.sim.twin import SEEDS, twin
from hostcache.sizes import parse_size
from hostcache.workload.agents import AgentShape
from hostcache.workload.profiles import find_profile, profile_names

_PLAN = """\
examples:
  hostcache sim plan                               16 agents of 30,000 tokens on a pool of 100,000
  hostcache sim plan --pool-tokens 2200000 --kv-bytes-per-token 890 --prefill-tok-s 5400 --copy-bandwidth 57GB \\
      --host-cache-bytes 24GiB --agents 32 --tokens 30000 --price-per-mtok 0.30
  hostcache sim plan --trace sessions.jsonl.gz --pool-tokens 1000000 --host-cache-bytes 32GiB,64GiB,128GiB
  hostcache sim plan --profile profile.json

The defaults are those of an 8B model in bfloat16 (Llama 3: 32 layers, 8 KV heads of 128: 131072 bytes a token).
"""

_TWIN = """\
examples:
  hostcache sim twin                    about a minute on two cores; writes twin.json and twin.html
  hostcache sim twin --json --strict    the record on stdout; exit 3 when a bar is missed

What was published, what may be fitted and how near a prediction must come is frozen in the package; docs/simulator.md
explains every mechanism and coefficient, and what stays unexplained.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """How records become text: given by the command line."""

    plan_text: Callable[[PlanRecord], str]
    plan_html: Callable[[PlanRecord], str]
    twin_text: Callable[[TwinRecord], str]
    twin_html: Callable[[TwinRecord], str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="WHAT", required=True, dest="what")
    each = commands.add_parser(
        "plan", help="is a host-RAM tier worth its memory for this engine and workload?", epilog=_PLAN,
        description="Simulates a workload without the tier and with it at a ladder of host sizes.")
    _plan_arguments(each)
    each = commands.add_parser(
        "twin", help="the published fleet, simulated: fitted on a few rows, judged on the others", epilog=_TWIN,
        description="Fits a few device coefficients on the rows that may be fitted and predicts the other rows.")
    each.add_argument("--seeds", type=_count, default=SEEDS, metavar="N",
                      help="runs of every row; fewer than 8 are shown, not judged (default: %(default)s)")
    each.add_argument("--strict", action="store_true", help=f"exit {BARS_MISSED} when the bars are missed")
    _common(each, seed=False)
    add_fuzz_arguments(commands.add_parser(
        "fuzz", help="small fleets in every order of events, with faults, every invariant after every event",
        epilog=EPILOG, description="Plays small fleets with faults, in orders of events that a seed chooses."))
    add_suite_arguments(commands.add_parser(
        "suite", help="the four suites: functional, concurrency, stability, soak",
        description="Plays the shipped scenarios, with and without faults. Exit code 1: a violation."))


def run(args: argparse.Namespace, *, out: TextIO, err: TextIO, pages: Pages, argv: Sequence[str]) -> int:
    """The exit code."""
    command = shlex.join(["hostcache", *argv])
    if args.what == "fuzz":
        return run_fuzz(args, out=out, err=err)
    if args.what == "suite":
        return run_suites(args, out=out, err=err)
    ran = {"plan": _run_plan, "twin": _run_twin}
    return ran[args.what](args, out=out, err=err, pages=pages, command=command)


# --- plan -----------------------------------------------------------------------------------------------------------


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("the engine")
    engine.add_argument("--pool-tokens", type=_count, default=100_000, metavar="N",
                        help="tokens of KV that the device holds (default: %(default)s)")
    engine.add_argument("--kv-bytes-per-token", type=_count, default=131_072, metavar="BYTES",
                        help="of all layers together (default: %(default)s)")
    engine.add_argument("--prefill-tok-s", type=float, default=8000.0, metavar="RATE",
                        help="prefill rate at your typical prompt length (default: %(default)s)")
    engine.add_argument("--decode-tok-s", type=_pair, default=(60.0, 20.0), metavar="ALONE,BUSY",
                        help="tokens/s of one stream alone, and of each with every slot busy (default: 60,20)")
    engine.add_argument("--copy-bandwidth", default="20GB", metavar="SIZE",
                        help="bytes a second between device and host, each way (default: %(default)s)")
    engine.add_argument("--slots", type=_count, default=16, metavar="N",
                        help="requests at a time (default: %(default)s)")
    engine.add_argument("--page-tokens", type=_count, default=64, metavar="N",
                        help="tokens a page (default: %(default)s)")
    engine.add_argument("--chunk-tokens", type=_count, default=2048, metavar="N",
                        help="tokens of prefill in one step (default: %(default)s)")
    engine.add_argument("--max-context", type=_count, default=1 << 20, metavar="N",
                        help="longest prompt + reply (default: %(default)s)")
    tier = parser.add_argument_group("the tier")
    tier.add_argument("--host-cache-bytes", default="64GiB", metavar="SIZE[,SIZE…]",
                      help="one size: it and a half, a quarter, an eighth of it; several: those (default: %(default)s)")
    load = parser.add_argument_group("the workload: a trace, a profile, or agents")
    load.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake JSONL or delta sessions, .gz or not")
    load.add_argument("--profile", metavar="NAME|FILE",
                      help=f"a workload profile: {', '.join(profile_names())}, or a file (JSON)")
    load.add_argument("--agents", type=_count, metavar="K", help="agent loops (default: 16)")
    load.add_argument("--tokens", type=_count, default=30_000, metavar="N",
                      help="tokens that each agent starts with (default: %(default)s)")
    load.add_argument("--tool-tokens", type=_count, default=1600, metavar="N",
                      help="new tokens a turn (default: %(default)s)")
    load.add_argument("--reply-tokens", type=_count, default=100, metavar="N",
                      help="tokens of a reply (default: %(default)s)")
    load.add_argument("--gap-s", type=_pair, default=(5.0, 30.0), metavar="MIN,MAX",
                      help="seconds between a reply and the next turn (default: 5,30)")
    load.add_argument("--window-s", type=float, default=600.0, metavar="S",
                      help="simulated seconds of agents or a profile; one that holds recorded sessions plays them all "
                           "(default: %(default)s)")
    parser.add_argument("--price-per-mtok", type=float, metavar="PRICE",
                        help="price of a million recomputed prompt tokens, in any currency")
    _common(parser)


def _common(parser: argparse.ArgumentParser, *, seed: bool = True) -> None:
    if seed:
        parser.add_argument("--seed", type=int, default=0, metavar="N",
                            help="of everything random (default: %(default)s)")
    parser.add_argument("--jobs", type=_count, default=max(1, min(4, os.cpu_count() or 1)), metavar="N",
                        help="processes (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the record as JSON instead of tables")
    parser.add_argument("--out", type=Path, metavar="DIR", help="new folder (default: the next hostcache-sim/NNN)")


def _run_plan(args: argparse.Namespace, *, out: TextIO, err: TextIO, pages: Pages, command: str) -> int:
    clock = WallClock()
    began = clock.now()
    machine = Machine(
        pool_tokens=args.pool_tokens, kv_bytes_per_token=args.kv_bytes_per_token, prefill_tok_s=args.prefill_tok_s,
        copy_bytes_per_s=float(parse_size(args.copy_bandwidth, name="--copy-bandwidth")), page_tokens=args.page_tokens,
        slots=args.slots, decode_tok_s=args.decode_tok_s, chunk_tokens=args.chunk_tokens,
        max_context_tokens=args.max_context)  # fmt: skip
    sizes = [parse_size(each, name="--host-cache-bytes") for each in args.host_cache_bytes.split(",")]
    load = _load(args, err)
    record = plan(
        machine, load, sizes, price_per_mtok=args.price_per_mtok, seed=args.seed, jobs=args.jobs, commands=(command,),
        wall_s=lambda: round(clock.now() - began, 1), progress=lambda line: _tell(err, line))  # fmt: skip
    _write(record, "plan", pages.plan_text, pages.plan_html, args, out, err)
    return 0


def _run_twin(args: argparse.Namespace, *, out: TextIO, err: TextIO, pages: Pages, command: str) -> int:
    clock = WallClock()
    began = clock.now()
    record = twin(
        seeds=args.seeds, jobs=args.jobs, commands=(command,), wall_s=lambda: round(clock.now() - began, 1),
        progress=lambda line: _tell(err, line))  # fmt: skip
    _write(record, "twin", pages.twin_text, pages.twin_html, args, out, err)
    return BARS_MISSED if args.strict and not record.summary.passed else 0


def _load(args: argparse.Namespace, err: TextIO) -> Load:
    given = [name for name in ("trace", "profile", "agents") if getattr(args, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"--{given[0]} and --{given[1]} are two workloads; give one")
    if args.trace is not None:
        _tell(err, f"reading {args.trace}")
        return TraceLoad.of(args.trace)
    if args.profile is not None:
        profile = find_profile(args.profile)
        return ProfileLoad(profile=profile, window_s=None if profile.recorded else args.window_s)
    gap_min_s, gap_max_s = args.gap_s
    shape = AgentShape(prefix_tokens=args.tokens, tool_tokens=args.tool_tokens, reply_tokens=args.reply_tokens,
                       gap_min_s=gap_min_s, gap_max_s=gap_max_s)
    return AgentsLoad(agents=args.agents or 16, shape=shape, window_s=args.window_s)


def _write(record: Any, name: str, text: Callable[[Any], str], html: Callable[[Any], str], args: argparse.Namespace,
           out: TextIO, err: TextIO) -> None:
    document = json.dumps({"record": record.KIND, "version": 1, **asdict(record)}, indent=1, ensure_ascii=False) + "\n"
    folder = new_folder(args.out, "hostcache-sim")
    (folder / f"{name}.json").write_text(document, encoding="utf-8")
    (folder / f"{name}.html").write_text(html(record), encoding="utf-8")
    out.write(document if args.json else text(record))
    out.flush()
    _tell(err, f"written: {folder / f'{name}.json'} and {name}.html beside it")


def _tell(err: TextIO, line: str) -> None:
    err.write(f"{line}\n")
    err.flush()


def _count(text: str) -> int:
    try:
        value = int(text.replace("_", "").replace(",", ""))
    except ValueError:
        value = 0
    if value < 1:
        raise ConfigError(f"{text!r} is not a whole number of at least 1")
    return value


def _pair(text: str) -> tuple[float, float]:
    parts = text.split(",")
    try:
        first, second = float(parts[0]), float(parts[-1])
    except ValueError:
        raise ConfigError(f"{text!r} is not a pair of numbers; write them as 5,30") from None
    if len(parts) > 2:
        raise ConfigError(f"{text!r} is not a pair of numbers; write them as 5,30")
    return first, second
