"""`hostcache bench rotate|agents`: arguments to a cell on a server, and the exit code.

Names of flags are those that users of vLLM's bench, AIPerf and GuideLLM know where one exists: `--url` (`--base-url`),
`--model`, `--seed`, `--goodput`, `--metadata`, `--concurrency`, `--input-file`, `--replay-speedup`.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TextIO, get_type_hints

from hostcache.bench.harness.agents import AgentsParameters
from hostcache.bench.harness.catalogue import WORKLOADS as CATALOGUE
from hostcache.bench.harness.catalogue import Known
from hostcache.bench.harness.cell import CellSpec, run_cell
from hostcache.bench.harness.cellfile import RECORDS, cell_state, whole_records
from hostcache.bench.harness.equivalence import judge
from hostcache.bench.harness.replay import ProfileParameters, ReplayParameters
from hostcache.bench.harness.target import Target
from hostcache.client.process import SILENCE_S
from hostcache.clock import Clock, WallClock
from hostcache.errors import BARS_MISSED, ConfigError
from hostcache.folders import new_folder
from hostcache.sizes import parse_size

INTERRUPTED = 130
DEFAULT_URL = "http://127.0.0.1:8000"
GOODPUT = ("ttft", "tpot", "itl", "e2el")

Tell = Callable[[Path, bool], str]
"""(file of records, as JSON) → what is printed at the end."""
Missed = Callable[[Path], Sequence[str]]
"""file of records → the bars that were missed"""

WORKLOADS: Mapping[str, str] = {
    "rotate": "C clients over S sessions in turn: segments with and without pressure, idle pauses, recovery",
    "agents": "K agents in a closed loop, a ramp over K; or a mined profile, or a recorded trace",
    "ladder": "prompts of several sizes cold, again and after eviction; decode at 1, 3 and 6 streams",
    "equivalence": f"cold against device and restored answers, token by token; exit {BARS_MISSED} when they differ",
}


def add_arguments(parser: argparse.ArgumentParser, workload: str) -> None:
    """The arguments of `bench rotate` or `bench agents`."""
    add_target_arguments(parser)
    add_run_arguments(parser)
    sizes = parser.add_argument_group("workload")
    if workload != "agents":
        _add_fields(sizes, CATALOGUE[workload], {"clients": "--concurrency"})
        return
    _add_fields(sizes, AgentsParameters, {"points": "--concurrency"})
    recorded = parser.add_argument_group("workload, from a profile or a trace")
    recorded.add_argument("--profile", metavar="NAME|FILE", help="a mined profile, or the name of one that ships")
    recorded.add_argument("--divisor", type=float, metavar="X", help="divide the profile's token counts by it")
    recorded.add_argument("--trace", "--input-file", dest="trace", metavar="FILE",
                          help="a recorded trace: Mooncake's form, Bailian's, the delta form, kv-cache-tester sessions")
    recorded.add_argument("--read-blocks", metavar="N:ROUNDING",
                          help="the trace's blocks, where they are not its form's (64:floor, say)")
    recorded.add_argument("--spread-s", type=float, metavar="S",
                          help="sessions whose start nobody recorded begin within S seconds (default: together)")
    recorded.add_argument("--speed", "--replay-speedup", dest="speed", type=float, metavar="X",
                          help="divide recorded pauses and arrivals by it")
    recorded.add_argument("--sessions", type=int, metavar="N", help="of the trace, the first N (default: all)")
    recorded.add_argument("--longest-gap-s", type=float, metavar="S", help="cut the trace's pauses to that")
    recorded.add_argument("--block-tokens", type=int, metavar="N", help="tokens that stand for a block of the trace")
    recorded.add_argument("--longest-tokens", type=int, metavar="N", help="end a session before a longer request")


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Which server, and as which arm."""
    group = parser.add_argument_group("server")
    group.add_argument("--url", "--base-url", dest="url", metavar="URL",
                       help=f"of a server that runs (default: {DEFAULT_URL})")
    group.add_argument("--start", metavar="COMMAND", help="start this one instead; {port} stands for its port")
    group.add_argument("--model", metavar="NAME", help="as the server calls it (default: the first it offers)")
    group.add_argument("--api-key", metavar="KEY", help="that the server asks for")
    group.add_argument("--arm", metavar="NAME", help="the arm's name in the records (default: on, off or as-is)")
    group.add_argument("--tier", choices=("on", "off"),
                       help="what the server must say of itself; else nothing is measured")
    group.add_argument("--quota", metavar="SIZE", help="the most that its tier's quota may be")
    group.add_argument("--silence-s", type=float, default=SILENCE_S, metavar="S",
                       help="a request is given up after so long without a byte (default: %(default)g)")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """How it is run and where it is written."""
    group = parser.add_argument_group("run")
    where = group.add_mutually_exclusive_group()
    where.add_argument("--out", type=Path, metavar="DIR", help="new folder (default: the next hostcache-bench/NNN)")
    where.add_argument("--resume", type=Path, metavar="DIR",
                       help="go on with an interrupted run: the points that finished are kept")
    group.add_argument("--seed", "--random-seed", dest="seed", type=int, default=0,
                       help="of every random stream (default: %(default)s)")
    group.add_argument("--cell", metavar="NAME", help="name in the records (default: the workload's)")
    group.add_argument("--salt", metavar="TEXT", help="instead of a new one: texts that a cache may know already")
    group.add_argument("--prompts", choices=("auto", "ids", "text", "chat"), default="auto",
                       help="how prompts are sent (default: token ids where the server can)")
    group.add_argument("--corpus", default="code", metavar="NAME|DIR",
                       help="what is talked about (default: %(default)s)")
    group.add_argument("--processes", type=int, default=1, metavar="N",
                       help="that make the load (default: %(default)s)")
    group.add_argument("--goodput", nargs="+", default=[], metavar="METRIC:MS", help=f"any of {', '.join(GOODPUT)}")
    group.add_argument("--bar", nargs="+", default=[], metavar="NAME:VALUE",
                       help="judged by the report, and by --strict")
    group.add_argument("--lag-bar-ms", type=float, metavar="MS", help="dispatch lag p99 beyond it makes the run void")
    group.add_argument("--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="noted in the records")
    group.add_argument("--json", action="store_true", help="print the figures as JSON")
    group.add_argument("--strict", action="store_true", help=f"exit {BARS_MISSED} when a bar is missed")


def run(args: argparse.Namespace, workload: str, *, out: TextIO, err: TextIO, clock: Clock | None = None,
        argv: Sequence[str] = (), tell: Tell | None = None, missed: Missed | None = None) -> int:
    """The exit code. `tell` and `missed` read the file of records; without them its path is printed."""
    target = target_of(args)
    spec = spec_of(args, workload_of(args, workload), target, argv)
    if args.resume is not None and cell_state(args.resume) == "absent":
        raise ConfigError(f"--resume {args.resume} has no {RECORDS}; give the folder of an interrupted run")
    folder: Path = args.resume or new_folder(args.out, "hostcache-bench")
    path = folder / RECORDS
    interrupted = False
    try:
        run_cell(spec, target, folder, clock=clock or WallClock(), err=err, resume=args.resume is not None)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if path.exists():
            err.write(f"written: {path}\n")
        elif not any(folder.iterdir()):
            folder.rmdir()
    if interrupted:
        err.write(f"interrupted; `--resume {folder}` goes on with it\n")
        return INTERRUPTED
    out.write(f"{path}\n" if tell is None else tell(path, args.json))
    if workload == "equivalence":
        judgement = judge(whole_records(path))
        (err if args.json else out).write("".join(f"{line}\n" for line in judgement.lines))
        if judgement.exit_code:
            return judgement.exit_code
    names = missed(path) if missed is not None and args.strict else ()
    if names:
        err.write(f"missed: {'; '.join(names)}\n")
        return BARS_MISSED
    return 0


def target_of(args: argparse.Namespace) -> Target:
    """Raises ConfigError."""
    if args.url is not None and args.start is not None:
        raise ConfigError("--url and --start are both given; give one of them")
    tier: Literal["on", "off"] | None = args.tier
    quota = None if args.quota is None else parse_size(args.quota, name="--quota")
    if quota is not None and tier != "on":
        raise ConfigError("--quota says how large the tier may be; it needs --tier on")
    url = None if args.start is not None else (args.url or DEFAULT_URL).rstrip("/").removesuffix("/v1")
    return Target(arm=args.arm or tier or "as-is", url=url, start=tuple(shlex.split(args.start or "")), tier=tier,
                  quota_bytes=quota, api_key=args.api_key, model=args.model, silence_s=args.silence_s)


def spec_of(args: argparse.Namespace, workload: Known, target: Target, argv: Sequence[str]) -> CellSpec:
    """Raises ConfigError."""
    if args.processes < 1:
        raise ConfigError(f"--processes is {args.processes}; give at least 1")
    goodput = _pairs(args.goodput, ":", "--goodput", float)
    if unknown := sorted(goodput.keys() - set(GOODPUT)):
        raise ConfigError(f"--goodput {unknown[0]} is unknown; there are {', '.join(GOODPUT)}")
    return CellSpec(
        cell=args.cell or workload.NAME, arm=target.arm, workload=workload, seed=args.seed, mode=args.prompts,
        corpus=args.corpus, processes=args.processes, salt=args.salt, bars=_pairs(args.bar, ":", "--bar", float),
        goodput=goodput, lag_bar_ms=args.lag_bar_ms,
        metadata=_pairs(args.metadata, "=", "--metadata", str), command=without_key(argv))


def workload_of(args: argparse.Namespace, workload: str) -> Known:
    """Raises ConfigError for arguments that do not go together."""
    if workload != "agents":
        return CATALOGUE[workload](**_given(args, CATALOGUE[workload]))
    if args.profile is not None and args.trace is not None:
        raise ConfigError("--profile and --trace are both given; give one of them")
    cls: type[AgentsParameters] | type[ProfileParameters] | type[ReplayParameters] = AgentsParameters
    if args.profile is not None:
        cls = ProfileParameters
    elif args.trace is not None:
        cls = ReplayParameters
    given = _given(args, cls)
    every = {field.name for each in (AgentsParameters, ProfileParameters, ReplayParameters) for field in fields(each)}
    foreign = [name for name in sorted(every - given.keys()) if getattr(args, name, None) is not None]
    if foreign:
        source = {AgentsParameters: "without --profile or --trace", ProfileParameters: "with --profile",
                  ReplayParameters: "with --trace"}[cls]
        raise ConfigError(f"--{foreign[0].replace('_', '-')} means nothing {source}; leave it out")
    return cls(**given)


def _add_fields(group: argparse._ArgumentGroup, cls: type[Any], aliases: Mapping[str, str]) -> None:
    """A flag for each parameter; the default is the dataclass's own, so that what was given can be told."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        flags = [f"--{field.name.replace('_', '-')}", *([aliases[field.name]] if field.name in aliases else [])]
        if hints[field.name] == tuple[int, ...]:
            group.add_argument(*flags, dest=field.name, type=_numbers, metavar="N,N,…",
                               help=f"(default: {','.join(map(str, getattr(cls(), field.name))) or 'as recorded'})")
        else:
            group.add_argument(*flags, dest=field.name, type=hints[field.name],
                               metavar="S" if field.name.endswith("_s") else "N" if hints[field.name] is int else "X",
                               help=f"(default: {field.default})")


def _given(args: argparse.Namespace, cls: type[Any]) -> dict[str, Any]:
    return {field.name: value for field in fields(cls) if (value := getattr(args, field.name, None)) is not None}


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers; give for example 8,16,32") from None


def _pairs(texts: Sequence[str], between: str, flag: str, kind: Callable[[str], Any]) -> dict[str, Any]:
    pairs = {}
    for text in texts:
        name, found, value = text.partition(between)
        try:
            if not name or not found:
                raise ValueError
            pairs[name] = kind(value)
        except ValueError:
            raise ConfigError(f"{flag} {text!r} is no NAME{between}VALUE") from None
    return pairs


def without_key(argv: Sequence[str]) -> tuple[str, ...]:
    """The command for the records: a key is nobody else's business."""
    words, hide = [], False
    for word in argv:
        words.append("…" if hide else "--api-key=…" if word.startswith("--api-key=") else word)
        hide = word == "--api-key"
    return tuple(words)
