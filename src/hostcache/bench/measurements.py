"""`hostcache bench copy|bookkeeping|…|all`: runs a measurement of our own parts, prints its table and bars.

A measurement is a module with `run(...) -> dict` (ready for JSON) and `table(result) -> str`; how its bars are read
stands in `MEASUREMENTS`. Nothing here is asserted by pytest: time is noisy, so bars are judged here and end in exit 3
only under --strict.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from hostcache.bench.client_speed import bars as client_bars
from hostcache.bench.demo import describe_machine
from hostcache.bench.memory import bars as memory_bars
from hostcache.bench.oracle_speed import Curves
from hostcache.bench.oracle_speed import bars as oracle_bars
from hostcache.bench.sim_speed import bars as sim_bars
from hostcache.clock import unix_time
from hostcache.errors import BARS_MISSED, ConfigError
from hostcache.settings import settle
from hostcache.sizes import parse_size

Bar = tuple[str, str, float, bool]
"""what, bar, value, met"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """`judge` reads the bars off a result; `shown`: the module's own table has them already; `curves`: it is handed the
    laboratory's."""

    module: str
    says: str
    options: Callable[[argparse.Namespace, TextIO], dict[str, Any]]
    judge: Callable[[Mapping[str, Any]], list[Bar]]
    shown: bool
    curves: bool = False


RESTORE_BAR = 0.85
CALLS_BAR = 2


def _none(_args: argparse.Namespace, _err: TextIO) -> dict[str, Any]:
    return {}


def _memory(args: argparse.Namespace, err: TextIO) -> dict[str, Any]:
    return {"model": args.model, "quota_bytes": parse_size(args.quota, name="--quota"), "err": err}


def _oracle(args: argparse.Namespace, err: TextIO) -> dict[str, Any]:
    return {"trace": args.trace, "progress": lambda line: err.write(f"  {line}\n")}


def _client(_args: argparse.Namespace, err: TextIO) -> dict[str, Any]:
    return {"progress": lambda line: err.write(f"  {line}\n")}


def _engine(args: argparse.Namespace, err: TextIO) -> dict[str, Any]:
    directory = settle().settings.model_dir
    return {"model": args.model, "progress": lambda line: err.write(f"  {line}\n"),
            "cache_dir": None if directory is None else Path(directory).expanduser()}


def _engine_bars(result: Mapping[str, Any]) -> list[Bar]:
    return [(name, f"at least {least:g}", result["figures"][name], name not in result["missed"])
            for name, least in result["bars"].items()]


def _copy_bars(result: Mapping[str, Any]) -> list[Bar]:
    restore, calls = result["over_plain"]["restore"]["median"], result["submissions"]["restore"]
    return [
        ("restore ÷ plain copy", f"at least {RESTORE_BAR}", restore, restore >= RESTORE_BAR),
        ("copy calls for a conversation of neighbouring pages", f"at most {CALLS_BAR}", calls, calls <= CALLS_BAR),
        ("restored bytes equal the stored ones", "yes (1)", float(result["bytes_equal"]), bool(result["bytes_equal"])),
    ]


def _bookkeeping_bars(result: Mapping[str, Any]) -> list[Bar]:
    return [(bar["name"], f"at most {bar['at_most']:g} {bar['unit']}", bar["value"], bar["verdict"] == "pass")
            for bar in result["bars"]]


MEASUREMENTS: Mapping[str, Measurement] = {
    "copy": Measurement(module="copy_speed", options=_none, judge=_copy_bars, shown=False,
                        says="restore against a plain memory copy"),
    "bookkeeping": Measurement(module="bookkeeping", options=_none, judge=_bookkeeping_bars, shown=True,
                               says="the tier's own time and memory"),
    "engine": Measurement(module="engine_speed", options=_engine, judge=_engine_bars, shown=True,
                          says="prefill and decode against transformers"),
    "sim": Measurement(module="sim_speed", options=_none, judge=sim_bars, shown=False,
                       says="how fast the simulator simulates"),
    "memory": Measurement(module="memory", options=_memory, judge=memory_bars, shown=False,
                          says="peak RSS with the tier minus without"),
    "client": Measurement(module="client_speed", options=_client, judge=client_bars, shown=False,
                          says="how truly the harness's client reports times, and whether it says when it cannot"),
    "oracle": Measurement(module="oracle_speed", options=_oracle, judge=oracle_bars, shown=False, curves=True,
                          says="the laboratory's curves, beside kvcache-simulator"),
}


DEFAULTS: Mapping[str, Any] = {"json": False, "out": None, "strict": False, "model": "smollm2", "quota": "2GiB",
                               "trace": None}
"""Of the arguments, for who gives none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results to a new JSON file too")
    parser.add_argument("--strict", action="store_true", help=f"exit {BARS_MISSED} when a bar is missed")
    parser.add_argument("--model", default=DEFAULTS["model"],
                        help="of the engine and memory measurements (default: %(default)s)")
    parser.add_argument("--quota", default=DEFAULTS["quota"], metavar="SIZE",
                        help="of the memory measurement (default: %(default)s)")
    parser.add_argument("--trace", type=Path, metavar="FILE",
                        help="Mooncake's conversation trace, of the oracle measurement (default: a synthetic one)")


def run(args: argparse.Namespace, *, out: TextIO, err: TextIO, curves: Callable[[], Curves | None] = lambda: None,
        load: Callable[[str], ModuleType] = importlib.import_module,
        measurements: Mapping[str, Measurement] = MEASUREMENTS) -> int:
    """The exit code. Prints each table as soon as it is known; with --json one object at the end.

    `curves`: the laboratory's, made when they are measured.
    """
    if args.out is not None and args.out.exists():
        raise ConfigError(f"--out {args.out} exists; results are never overwritten: give a new name")
    names = list(measurements) if args.what in (None, "all") else [args.what]
    results: dict[str, Any] = {}
    missed: list[str] = []
    for name in names:
        each = measurements[name]
        err.write(f"bench {name}: {each.says}\n")
        module = load(f"hostcache.bench.{each.module}")
        result = module.run(**each.options(args, err), **({"curves": curves()} if each.curves else {}))
        bars = each.judge(result)
        judged = [{"name": what, "bar": bar, "value": value, "verdict": "pass" if met else "miss"}
                  for what, bar, value, met in bars]
        results[name] = {**result, "judged": judged}
        missed += [what for what, _, _, met in bars if not met]
        if not args.json:
            out.write(f"{module.table(result)}\n{'' if each.shown else ''.join(_lines(bars))}\n")
            out.flush()
    document = {"version": 1, "made_unix_s": unix_time(), "environment": describe_machine(), **results}
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    if args.json:
        out.write(text)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("x", encoding="utf-8") as stream:
            stream.write(text)
        err.write(f"written: {args.out}\n")
    if missed and args.strict:
        err.write(f"missed: {'; '.join(missed)}\n")
        return BARS_MISSED
    return 0


def _lines(bars: Iterable[Bar]) -> Iterable[str]:
    for what, bar, value, met in bars:
        yield f"  {'pass' if met else 'MISS'}  {what}: {value:.4g} ({bar})\n"
