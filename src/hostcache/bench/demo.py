"""`hostcache demo`: tier off against tier on with the real engine, then the no-pressure pair, then equivalence.

Settles the sizes, runs the stages, writes the folder. Figures come from `bench.figures`; tables and pages are
handed in by the command line, because this row does not know the report.

The folder: `records.jsonl` (every turn, arm and equivalence row), `demo.json`, `demo.html`, one log per server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from hostcache import __version__
from hostcache.clock import Clock, WallClock, unix_time
from hostcache.errors import BARS_MISSED, ConfigError, HostCacheError
from hostcache.folders import new_folder
from hostcache.records import EndRecord, Record, RecordWriter, RunRecord, read_jsonl
from hostcache.sizes import parse_size
from hostcache.workload.agents import AgentShape
from hostcache.workload.corpus import CodeCorpus, load_corpus

if TYPE_CHECKING:
    from hostcache.bench.equivalence import EquivalencePlan
    from hostcache.bench.no_pressure import NoPressurePlan
    from hostcache.bench.pressure import PressurePlan
    from hostcache.bench.servers import Launcher

STAGES = ("pressure", "no-pressure", "equivalence")
RECORDS, FIGURES, PAGE = "records.jsonl", "demo.json", "demo.html"
INTERRUPTED = 130

Render = Callable[[dict[str, Any]], str]
"""demo.json's content → text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Everything that decides what a run does. `FULL` is the form of record."""

    agents: int
    prefix_tokens: int
    tool_tokens: int
    reply_tokens: int
    gap_min_s: float
    gap_max_s: float
    window_s: float
    order: tuple[Literal["off", "on"], ...]
    pool_tokens: int
    host_cache_bytes: int
    page_tokens: int
    concurrency: int
    calm_conversations: int
    calm_turns: int
    calm_prefix_tokens: int
    calm_order: tuple[Literal["off", "on"], ...]
    equivalence: int
    longest_tokens: int

    @property
    def shape(self) -> AgentShape:
        return AgentShape(prefix_tokens=self.prefix_tokens, tool_tokens=self.tool_tokens,
                          reply_tokens=self.reply_tokens, gap_min_s=self.gap_min_s, gap_max_s=self.gap_max_s)


FULL = Sizes(
    agents=12, prefix_tokens=2000, tool_tokens=64, reply_tokens=16, gap_min_s=2.0, gap_max_s=12.0, window_s=120.0,
    order=("off", "on", "on", "off"), pool_tokens=16_000, host_cache_bytes=4 << 30, page_tokens=32, concurrency=16,
    calm_conversations=4, calm_turns=5, calm_prefix_tokens=1000, calm_order=("off", "on", "off", "off", "on", "off"),
    equivalence=20, longest_tokens=6000,
)


def pressure_pool_tokens(agents: int, prefix_tokens: int, turn_tokens: int, page_tokens: int) -> int:
    """A pool of about 45 % of the working set in mid-window, when an agent has added some four turns to its prefix.

    Less than half, as in the form of record, so that returning in turn meets an eviction nearly every time; yet
    two to three whole conversations, so that both arms can still run requests side by side.
    """
    return -(-int(0.45 * agents * (prefix_tokens + 4 * turn_tokens)) // page_tokens) * page_tokens


QUICK = dataclasses.replace(
    FULL, agents=6, prefix_tokens=1000, window_s=45.0, order=("off", "on"),
    pool_tokens=pressure_pool_tokens(6, 1000, FULL.tool_tokens + FULL.reply_tokens, FULL.page_tokens),
    calm_conversations=2, calm_turns=3, calm_prefix_tokens=500, calm_order=("off", "on", "off"),
    equivalence=4, longest_tokens=1000,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--quick", action="store_true", help="about 5 minutes, bars shown but not judged (default)")
    form.add_argument("--full", action="store_true", help="the form of record, about 35 minutes")
    form.add_argument("--from", dest="from_dir", type=Path, metavar="DIR",
                      help="recompute every figure from DIR/records.jsonl; runs nothing")
    parser.add_argument("--model", default="smollm2", help="name, directory or GGUF file (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="new folder (default: the next hostcache-demo/NNN)")
    parser.add_argument("--stages", default=",".join(STAGES), metavar="LIST", help="some of %(default)s")
    parser.add_argument("--json", action="store_true", help="print demo.json instead of the tables")
    parser.add_argument("--strict", action="store_true", help=f"exit {BARS_MISSED} when a judged bar is missed")
    parser.add_argument("--seed", type=int, default=0, help="of every random stream (default: %(default)s)")
    sizes = parser.add_argument_group("sizes (any of them makes the form 'custom')")
    sizes.add_argument("--agents", type=int, metavar="N")
    sizes.add_argument("--prefix-tokens", type=int, metavar="N")
    sizes.add_argument("--window-s", type=float, metavar="S")
    sizes.add_argument("--gap-min-s", type=float, metavar="S", help="shortest pause of an agent's tool")
    sizes.add_argument("--gap-max-s", type=float, metavar="S", help="longest")
    sizes.add_argument("--pool-tokens", type=int, metavar="N", help="device pool of the pressure arms")
    sizes.add_argument("--host-cache-bytes", metavar="SIZE")
    sizes.add_argument("--page-tokens", type=int, metavar="N")
    sizes.add_argument("--equivalence", type=int, metavar="N", help="conversations to compare")
    sizes.add_argument("--longest-tokens", type=int, metavar="N", help="longest of them")


_SIZE_FLAGS = ("agents", "prefix_tokens", "window_s", "gap_min_s", "gap_max_s", "pool_tokens", "page_tokens",
               "equivalence", "longest_tokens")


def settle_sizes(args: argparse.Namespace) -> tuple[Literal["quick", "full", "custom"], Sizes]:
    """The form and its sizes. Raises ConfigError for a size that makes no sense."""
    form: Literal["quick", "full", "custom"] = "full" if args.full else "quick"
    base = FULL if args.full else QUICK
    given = {name: value for name in _SIZE_FLAGS if (value := getattr(args, name)) is not None}
    if args.host_cache_bytes is not None:
        given["host_cache_bytes"] = parse_size(args.host_cache_bytes, name="--host-cache-bytes")
    for name, value in given.items():
        if value < 0 or (value == 0 and not name.startswith("gap_")):
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; give more than 0")
    sizes = dataclasses.replace(base, **given)
    if sizes != base:
        form = "custom"
        if {"agents", "prefix_tokens", "page_tokens"} & given.keys() and "pool_tokens" not in given:
            turn = sizes.tool_tokens + sizes.reply_tokens
            pool = pressure_pool_tokens(sizes.agents, sizes.prefix_tokens, turn, sizes.page_tokens)
            least = -(-(sizes.prefix_tokens + 2 * turn) // sizes.page_tokens) * sizes.page_tokens
            sizes = dataclasses.replace(sizes, pool_tokens=max(pool, least))
        sizes = dataclasses.replace(sizes, concurrency=max(sizes.concurrency, sizes.agents))
    return form, sizes


def run(args: argparse.Namespace, *, out: TextIO, err: TextIO, tables: Render | None = None, page: Render | None = None,
        clock: Clock | None = None, command: Sequence[str] | None = None) -> int:
    """The exit code. `tables` renders what is printed (None: demo.json is printed), `page` renders demo.html (None: no
    page is written). `command` starts a server in place of this Python's `hostcache serve`."""
    if args.from_dir is not None:
        return _again(args, out=out, err=err, tables=tables, page=page)
    stages = _stages(args.stages)
    form, sizes = settle_sizes(args)
    corpus = load_corpus()
    folder = new_folder(args.out, "hostcache-demo")
    clock = clock or WallClock()
    writer = RecordWriter(folder / RECORDS)
    outcome: Literal["finished", "interrupted", "failed"] = "finished"
    detail, failure = "", None
    try:
        writer.write(_run_record(args, form, sizes, stages, corpus))
        asyncio.run(_stages_in_turn(args, sizes, stages, corpus, folder, clock, writer.write, err, command))
    except KeyboardInterrupt:
        outcome, detail = "interrupted", "stopped by the user"
    except (HostCacheError, OSError) as error:
        outcome, detail, failure = "failed", str(error), error
    finally:
        writer.write(EndRecord(ended_unix_s=unix_time(), outcome=outcome, detail=detail))
        writer.close()
    document = _document(folder / RECORDS)
    _write_new(folder / FIGURES, _json(document))
    if page is not None:
        _write_new(folder / PAGE, page(document))
    _show(document, args, out, tables)
    err.write(f"written: {folder}/ ({', '.join(sorted(path.name for path in folder.iterdir()))})\n")
    if failure is not None:
        raise failure
    if outcome == "interrupted":
        return INTERRUPTED
    return _exit_code(document, args, err)


async def _stages_in_turn(args: argparse.Namespace, sizes: Sizes, stages: Sequence[str], corpus: CodeCorpus,
                          folder: Path, clock: Clock, write: Callable[[Record], None], err: TextIO,
                          command: Sequence[str] | None) -> None:
    from hostcache.bench.equivalence import run_equivalence
    from hostcache.bench.no_pressure import run_no_pressure
    from hostcache.bench.pressure import run_pressure
    from hostcache.bench.progress import Progress
    from hostcache.bench.rig import Rig
    from hostcache.client.process import terminate_like_interrupt

    launcher = make_launcher(args.model, folder, clock, err, command)
    rig = Rig(launcher=launcher, clock=clock, corpus=corpus, progress=Progress(err, clock), write=write, seed=args.seed)
    with terminate_like_interrupt():
        try:
            if "pressure" in stages:
                await run_pressure(rig, pressure_plan(args.model, sizes))
            if "no-pressure" in stages:
                await run_no_pressure(rig, no_pressure_plan(args.model, sizes))
            if "equivalence" in stages:
                await run_equivalence(rig, equivalence_plan(args.model, sizes))
        finally:
            rig.progress.finish()


def make_launcher(model: str, log_dir: Path, clock: Clock, err: TextIO, command: Sequence[str] | None) -> Launcher:
    """Servers under this machine's own settings. A model with a short name is fetched first: no arm pays for it."""
    from hostcache.bench.servers import Launcher
    from hostcache.engine.models import MODELS, get
    from hostcache.settings import settle

    if command is not None:
        return Launcher(log_dir=log_dir, clock=clock, command=tuple(command))
    settings = settle().settings
    if model in MODELS:
        get(model, cache_dir=Path(settings.model_dir).expanduser() if settings.model_dir else None,
            progress=lambda line: print(line, file=err, flush=True))
    return Launcher(log_dir=log_dir, clock=clock, api_key=settings.api_keys[0] if settings.api_keys else None)


def pressure_plan(model: str, sizes: Sizes) -> PressurePlan:
    from hostcache.bench.pressure import PressurePlan
    from hostcache.bench.servers import ServerPlan

    arms = {arm: ServerPlan(model=model, pool_tokens=sizes.pool_tokens, page_tokens=sizes.page_tokens,
                            host_cache_bytes=sizes.host_cache_bytes if arm == "on" else 0,
                            concurrency=sizes.concurrency) for arm in ("off", "on")}
    return PressurePlan(agents=sizes.agents, shape=sizes.shape, window_s=sizes.window_s,
                        order=tuple(arms[arm] for arm in sizes.order))


def no_pressure_plan(model: str, sizes: Sizes) -> NoPressurePlan:
    """Pool and banks hold everything twice over: no limit is within reach."""
    from hostcache.bench.no_pressure import NoPressurePlan
    from hostcache.bench.servers import ServerPlan

    turn = sizes.tool_tokens + sizes.reply_tokens
    total = sizes.calm_conversations * (sizes.calm_prefix_tokens + sizes.calm_turns * (turn + sizes.page_tokens))
    arms = {arm: ServerPlan(model=model, pool_tokens=-(-2 * total // sizes.page_tokens) * sizes.page_tokens,
                            page_tokens=sizes.page_tokens, concurrency=sizes.concurrency,
                            host_cache_bytes=sizes.host_cache_bytes if arm == "on" else 0,
                            prefix_cache_entries=4 * sizes.calm_conversations * sizes.calm_turns + 4)
            for arm in ("off", "on")}
    shape = dataclasses.replace(sizes.shape, prefix_tokens=sizes.calm_prefix_tokens)
    return NoPressurePlan(conversations=sizes.calm_conversations, turns=sizes.calm_turns, shape=shape,
                          servers=tuple(arms[arm] for arm in sizes.calm_order))


def equivalence_plan(model: str, sizes: Sizes) -> EquivalencePlan:
    from hostcache.bench.equivalence import EquivalencePlan, pool_tokens_for
    from hostcache.bench.servers import ServerPlan

    pool = pool_tokens_for(sizes.longest_tokens, sizes.reply_tokens, sizes.page_tokens)
    off, on = (ServerPlan(model=model, pool_tokens=pool, page_tokens=sizes.page_tokens, host_cache_bytes=quota,
                          concurrency=sizes.concurrency) for quota in (0, sizes.host_cache_bytes))
    return EquivalencePlan(conversations=sizes.equivalence, longest_tokens=sizes.longest_tokens,
                           reply_tokens=sizes.reply_tokens, page_tokens=sizes.page_tokens, on=on, off=off)


def _stages(text: str) -> tuple[str, ...]:
    asked = [name.strip() for name in text.split(",") if name.strip()]
    if not asked or (unknown := [name for name in asked if name not in STAGES]):
        raise ConfigError(f"--stages is {text!r}; give some of {','.join(STAGES)}"
                          + (f" ({unknown[0]!r} is none of them)" if asked else ""))
    return tuple(name for name in STAGES if name in asked)


def _run_record(args: argparse.Namespace, form: Literal["quick", "full", "custom"], sizes: Sizes,
                stages: tuple[str, ...], corpus: CodeCorpus) -> RunRecord:
    values = dataclasses.asdict(sizes)
    flags = {"quick": "", "full": " --full"}.get(form, "".join(
        f" --{name.replace('_', '-')} {getattr(args, name)}"
        for name in (*_SIZE_FLAGS, "host_cache_bytes") if getattr(args, name) is not None))
    if form == "custom" and args.full:
        flags = " --full" + flags
    chosen = "" if stages == STAGES else f" --stages {','.join(stages)}"
    return RunRecord(
        form=form, model=args.model, seed=args.seed,
        workload={name: " ".join(value) if isinstance(value, tuple) else value for name, value in values.items()},
        environment=describe_machine(), inputs=corpus.inputs,
        commands=(f"hostcache demo{flags} --model {args.model} --seed {args.seed}{chosen}",
                  "hostcache demo --from DIR"),
        stages=stages, started_unix_s=unix_time(), hostcache_version=__version__)


def describe_machine() -> dict[str, int | float | str]:
    """Where a measurement was made: what a reader needs to judge its times."""
    facts: dict[str, int | float | str] = {
        "python": platform.python_version(), "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
    }
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                facts["cpu"] = line.partition(":")[2].strip()
            if line.startswith("processor"):
                facts["cpus"] = int(facts.get("cpus", 0)) + 1
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemTotal:"):
                facts["memory_bytes"] = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        facts["load_1m"] = float(Path("/proc/loadavg").read_text(encoding="ascii").split()[0])
    for package in ("torch", "numpy", "httpx", "uvicorn"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    return facts


def _document(path: Path) -> dict[str, Any]:
    from hostcache.bench.figures import demo_document

    return demo_document(read_jsonl(path))


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _write_new(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as stream:
        stream.write(text)


def _show(document: dict[str, Any], args: argparse.Namespace, out: TextIO, tables: Render | None) -> None:
    out.write(_json(document) if args.json or tables is None else tables(document))
    out.flush()


def _exit_code(document: dict[str, Any], args: argparse.Namespace, err: TextIO) -> int:
    from hostcache.bench.figures import missed

    names = missed(document)
    if names and args.strict:
        err.write(f"missed: {'; '.join(names)}\n")
        return BARS_MISSED
    return 0


def _again(args: argparse.Namespace, *, out: TextIO, err: TextIO, tables: Render | None, page: Render | None) -> int:
    """`--from DIR`: the same figures from the records; exit 1 when demo.json says something else."""
    folder: Path = args.from_dir
    if not (folder / RECORDS).is_file():
        raise ConfigError(f"--from {folder} has no {RECORDS}; give the folder of a demo")
    document = _document(folder / RECORDS)
    if page is not None and not (folder / PAGE).exists():
        _write_new(folder / PAGE, page(document))
    _show(document, args, out, tables)
    stored = folder / FIGURES
    if not stored.exists():
        _write_new(stored, _json(document))
        err.write(f"{stored} was missing; written from the records\n")
    else:
        different = differing(json.loads(stored.read_text(encoding="utf-8")), json.loads(_json(document)))
        if different:
            err.write(f"{stored} differs from its records at {different[0]} ({len(different)} places)\n")
            return 1
        err.write(f"every figure of {stored} follows from its records\n")
    return _exit_code(document, args, err)


def differing(stored: Any, computed: Any, path: str = "$") -> list[str]:
    """Places where two JSON values differ."""
    if isinstance(stored, dict) and isinstance(computed, dict):
        return [place for key in sorted({*stored, *computed}) for place in (
            differing(stored[key], computed[key], f"{path}.{key}") if key in stored and key in computed
            else [f"{path}.{key}"])]
    if isinstance(stored, list) and isinstance(computed, list) and len(stored) == len(computed):
        return [place for i, pair in enumerate(zip(stored, computed, strict=True))
                for place in differing(*pair, f"{path}[{i}]")]
    return [] if stored == computed else [path]
