"""How fast the laboratory's curves are, beside kvcache-simulator (KVCache.AI, PyPI): every capacity against one.

The curves are handed in: bench and lab do not know each other. In each repeat everything is timed once, in turn; a
ratio is between the two times of one repeat, so that a slow moment of the machine hits both.

    core       one LRU capacity in the other's compiled core, net of its start, its loading and its prefix tree: the
               time of a run with nine equal capacities less that of a run with one, by eight. Ours: ids in memory to
               the hits at every capacity
    command    the other's whole command, its start and parsing included, compiled before. Ours: the file read and
               the curve made, in a process that runs already; and, told beside it, in a process of its own
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from hostcache.clock import Clock, WallClock
from hostcache.errors import HostCacheError
from hostcache.workload.sample_traces import write_trace
from hostcache.workload.traces import MOONCAKE, TraceRequest

CORE_BAR = 5.0
COMMAND_BAR = 10.0
ZIPF_BAR_REFERENCES_S = 3.6e6
PLAIN_BAR_REFERENCES_S = ZIPF_BAR_REFERENCES_S / 20
OPTIMUM_BAR_S = 5.0

CAPACITIES = (1_000, 10_000, 50_000)
"""Blocks. The other's core is asked for each by itself, its command for the middle one."""
DRAWN = 48
"""Capacities that `hostcache lab oracle` draws of a curve."""

SIZE = (12_031, 288_500)
"""Requests and references of Mooncake's conversation trace, which a synthetic one takes the place of."""
REUSED = 0.73
"""Share of a synthetic trace's requests that begin as an earlier one does: about 0.37 of the blocks were seen then."""

PIP = "pip install kvcache-simulator==0.1.3"
_PACKAGE = "kvcache_sim"
_MODEL = ("--model", "glm-5.2", "--no-progress", "--format", "json")
"""Any of its catalogue: the model only turns GiB into blocks."""
_COPIES = 8
_TIMEOUT_S = 600.0

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """What is measured. `stream`: a trace in memory, with `ids`, `starts`, `distinct`."""

    read: Callable[[Path], Any]
    lru: Callable[[Any], Any]
    """stream → hits at every capacity"""
    optimum: Callable[[Any, bool], Any]
    """stream, bypass → hits at every capacity"""
    distances: Callable[[Ids, int, bool], Any]
    """ids, distinct, whether compiled → the stack distance of each"""
    compiled: bool
    """Whether numba is there."""
    script: str
    """`python -c` of it reads the trace that is named by its argument and makes the LRU curve, nothing else."""


class Absent(HostCacheError):
    """The other simulator is not there, or cannot be run."""


def run(*, curves: Curves, trace: Path | None = None, repeats: int = 5, plain_repeats: int = 3,
        zipf: tuple[int, int] = (10_000_000, 1_000_000), size: tuple[int, int] = SIZE,
        capacities: Sequence[int] = CAPACITIES, seed: int = 0, package: str = _PACKAGE, clock: Clock | None = None,
        progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Ready for JSON: each figure as median, low and high over the repeats. About three minutes with the defaults.

    `trace`: None for a seeded synthetic one of `size` (requests, references). `zipf`: references, ids. `package`: the
    other simulator's; where it cannot be had, `peer` says why and its rows are left out.
    """
    clock = clock or WallClock()
    with TemporaryDirectory(prefix="hostcache-oracle-") as name:
        folder = Path(name)
        path = _synthetic(folder / "synthetic.jsonl.gz", size, Random(seed)) if trace is None else trace
        stream = curves.read(path)
        result: dict[str, Any] = {
            "version": 1, "repeats": repeats, "numba": curves.compiled, "capacities": list(capacities),
            "trace": {"name": path.name, "synthetic": trace is None, "requests": len(stream.starts) - 1,
                      "references": len(stream.ids), "distinct": stream.distinct},
            "zipf": {"references": zipf[0], "ids": zipf[1], "seed": seed}}
        try:
            progress("kvcache-simulator: compiled, asked for its blocks' size")
            peer: _Peer | None = _Peer.ready(package, path, stream, folder)
            result["peer"] = {"version": _version("kvcache-simulator"), "absent": None}
        except Absent as why:
            peer, result["peer"] = None, {"version": None, "absent": str(why)}
        progress("the trace")
        figures = _on_trace(curves, stream, path, folder, peer, capacities, repeats, clock)
        progress(f"{zipf[0]:,} Zipf references")
        figures |= _on_zipf(curves, zipf, repeats, plain_repeats, seed, clock)
    return {**result, "figures": {name: _spread(values) for name, values in figures.items()}}


def _on_trace(curves: Curves, stream: Any, path: Path, folder: Path, peer: _Peer | None, capacities: Sequence[int],
              repeats: int, clock: Clock) -> dict[str, list[float]]:
    references = len(stream.ids)
    ours = [sys.executable, "-c", curves.script, str(path)]
    if curves.compiled:  # numba keeps what it compiled here, and finds nothing at first
        ours = ["env", f"NUMBA_CACHE_DIR={folder / 'compiled'}", *ours]
    figures: dict[str, list[float]] = {"process_first_s": [_seconds(clock, lambda: _output(ours))]}
    curves.lru(stream)
    curves.optimum(stream, True)
    middle = capacities[len(capacities) // 2]
    for _ in range(repeats):
        row: dict[str, float] = {}
        row["curve_s"] = _seconds(clock, lambda: [curves.lru(stream) for _ in range(_COPIES)]) / _COPIES
        row["read_s"] = _seconds(clock, lambda: curves.read(path))
        row["process_s"] = _seconds(clock, lambda: _output(ours))
        row["optimum_s"] = _seconds(clock, lambda: [curves.optimum(stream, bypass) for bypass in (True, False)])
        row["read_and_curve_s"] = row["read_s"] + row["curve_s"]
        row["curve_references_s"] = references / row["curve_s"]
        if peer is not None:
            for capacity in capacities:
                one, many = (_seconds(clock, lambda k=k, c=capacity: _output(peer.core(c, k)))  # type: ignore[misc]
                             for k in (1, 1 + _COPIES))
                if many > one:
                    row[f"core_{capacity}_references_s"] = references * _COPIES / (many - one)
                    row[f"over_core_{capacity}"] = (many - one) / _COPIES / row["curve_s"]
            row["command_s"] = _seconds(clock, lambda: _output(peer.command([middle])))
            row["command_drawn_s"] = _seconds(clock, lambda: _output(peer.command(_drawn(stream.distinct))))
            row["command_default_s"] = _seconds(clock, lambda: _output(peer.command(None)))
            row["command_start_s"] = _seconds(clock, lambda: _output(peer.start()))
            row["over_command"] = row["command_s"] / row["read_and_curve_s"]
            for name in ("command", "command_drawn", "command_default"):
                row[f"{name}_over_process"] = row[f"{name}_s"] / row["process_s"]
        for name, value in row.items():
            figures.setdefault(name, []).append(value)
    return figures


def _on_zipf(curves: Curves, zipf: tuple[int, int], repeats: int, plain_repeats: int, seed: int,
             clock: Clock) -> dict[str, list[float]]:
    references, distinct = zipf
    ids = zipf_ids(references, distinct, seed)

    def rates(compiled: bool, times: int) -> list[float]:
        return [references / _seconds(clock, lambda: curves.distances(ids, distinct, compiled)) for _ in range(times)]

    plain = {"zipf_plain_references_s": rates(False, plain_repeats)}
    return {"zipf_references_s": rates(True, repeats), **plain} if curves.compiled else plain


def zipf_ids(references: int, distinct: int, seed: int) -> Ids:
    """Id of rank r with a chance of 1 / r, ranks shuffled over the ids. 10 million over a million: 762,621 differ."""
    rng = np.random.default_rng(seed)
    chances = np.cumsum(1 / np.arange(1, distinct + 1))
    ranks = np.searchsorted(chances, rng.random(references) * chances[-1])
    ids: Ids = rng.permutation(distinct).astype(np.int32)[np.minimum(ranks, distinct - 1)]
    return ids


def _synthetic(path: Path, size: tuple[int, int], rng: Random) -> Path:
    """So many requests and references; some begin as an earlier one does, as far as both go."""
    requests, references = size
    cuts = sorted(rng.sample(range(1, references), requests - 1))
    earlier: list[list[int]] = []
    fresh = 0
    for length in (b - a for a, b in zip([0, *cuts], [*cuts, references], strict=True)):
        shared = rng.choice(earlier)[:length] if earlier and rng.random() < REUSED else []
        new = length - len(shared)
        earlier.append([*shared, *range(fresh, fresh + new)])
        fresh += new
    write_trace(path, [TraceRequest(
        number=number + 1, session=None, arrival_s=number * 0.3, think_s=0.0, api_s=None,
        input_tokens=len(ids) * MOONCAKE.block_tokens, output_tokens=1, blocks=np.array(ids, dtype=np.uint64))
        for number, ids in enumerate(earlier)], format=MOONCAKE)
    return path


# The other simulator ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peer:
    """Its command and its compiled core on one trace."""

    whole: tuple[str, ...]
    core_start: tuple[str, ...]
    block_bytes: float

    @classmethod
    def ready(cls, package: str, trace: Path, stream: Any, folder: Path) -> _Peer:
        """Has it compile its core, and writes the core's files. Raises Absent."""
        if importlib.util.find_spec(package) is None:
            raise Absent(f"kvcache-simulator is not installed; {PIP}")
        whole = (sys.executable, "-m", package)
        asked = ("run", "--trace", str(trace), "--block-size", str(MOONCAKE.block_tokens), *_MODEL)
        try:
            core = _output([sys.executable, "-c",
                            f"from {package}.cpp_backend import ensure_cpp_simulator as c; print(c())"]).strip()
            document = json.loads(_output([*whole, *asked, "--policies", "lru", "--budgets-gib", "1"]))
            block_bytes = float(document["metadata"]["bytesPerBlock"])
        except (HostCacheError, ValueError, KeyError) as why:
            raise Absent(f"kvcache-simulator cannot be run here: {why}") from None
        files = {"ids": stream.ids.astype("<u4"), "tokens": np.full(len(stream.ids), MOONCAKE.block_tokens, "<u2"),
                 "request-ends": stream.starts[1:].astype("<u4")}
        words = [core, "--policy", "batch", "--policies", "lru"]
        for name, values in files.items():
            values.tofile(folder / name)
            words += [f"--{name}", str(folder / name)]
        requests = len(stream.starts) - 1
        words += ["--request-count", str(requests), "--total-blocks", str(len(stream.ids)),
                  "--warmup-requests", str(requests // 2)]
        return cls(whole=(*whole, *asked), core_start=tuple(words), block_bytes=block_bytes)

    def core(self, capacity: int, copies: int) -> list[str]:
        return [*self.core_start, "--capacities", ",".join([str(capacity)] * copies)]

    def command(self, capacities: Sequence[int] | None) -> list[str]:
        """LRU at these; None: as it comes, three policies at fifteen budgets."""
        if capacities is None:
            return list(self.whole)
        budgets = ",".join(repr((each + 0.5) * self.block_bytes / 2**30) for each in capacities)
        return [*self.whole, "--policies", "lru", "--budgets-gib", budgets]

    def start(self) -> list[str]:
        """It starts, reads its catalogue of models, and ends."""
        return [*self.whole[:3], "list-models"]


def _drawn(distinct: int) -> list[int]:
    return sorted({*np.geomspace(1, max(2, distinct), DRAWN).round().astype(int).tolist()})


def _output(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S,
                              stdin=subprocess.DEVNULL).stdout
    except subprocess.CalledProcessError as died:
        said = (died.stderr or "").strip().splitlines()
        raise HostCacheError(f"{Path(command[0]).name} ended with {died.returncode}: "
                             f"{said[-1][:200] if said else 'it said nothing'}") from None
    except (OSError, subprocess.TimeoutExpired) as why:
        raise HostCacheError(f"{Path(command[0]).name} did not end well: {why}") from None


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _seconds(clock: Clock, call: Callable[[], Any]) -> float:
    began_s = clock.now()
    call()
    return clock.now() - began_s


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "low": min(values), "high": max(values)}


# What is told -------------------------------------------------------------------------------------------------------


def bars(result: Mapping[str, Any]) -> list[tuple[str, str, float, bool]]:
    """what, bar, value, met; of what was measured"""
    figures = result["figures"]

    def at_least(name: str, what: str, bar: float, scale: float = 1.0) -> list[tuple[str, str, float, bool]]:
        if name not in figures:
            return []
        value = figures[name]["median"]
        return [(what, f"at least {bar / scale:g}", value / scale, value >= bar)]

    found: list[tuple[str, str, float, bool]] = []
    for capacity in result["capacities"]:
        found += at_least(f"over_core_{capacity}", f"every capacity, times as fast as kvcache-simulator's core for "
                          f"{capacity:,} blocks", CORE_BAR)
    found += at_least("over_command", "reading and every capacity, in a process that runs, times as fast as its whole "
                      "command for one", COMMAND_BAR)
    found += at_least("zipf_references_s", f"million references/s, {result['zipf']['references']:,} of Zipf",
                      ZIPF_BAR_REFERENCES_S, 1e6)
    found += at_least("zipf_plain_references_s", "million references/s of it with numpy alone",
                      PLAIN_BAR_REFERENCES_S, 1e6)
    optimum_s = figures["optimum_s"]["median"]
    return [*found, ("both optima at every capacity, seconds", f"less than {OPTIMUM_BAR_S:g}", optimum_s,
                     optimum_s < OPTIMUM_BAR_S)]


def table(result: Mapping[str, Any]) -> str:
    """For the terminal."""
    figures, trace = result["figures"], result["trace"]
    lines = [f"{'synthetic, no --trace given: ' if trace['synthetic'] else ''}{trace['name']}: "
             f"{trace['requests']:,} requests, {trace['references']:,} references, {trace['distinct']:,} distinct",
             f"medians of {result['repeats']} (low..high)"]
    if not result["numba"]:
        lines.append("numba is not installed, so nothing is compiled; pip install 'hostcache[lab]'")
    if result["peer"]["absent"]:
        lines.append(f"not compared: {result['peer']['absent']}")

    def row(name: str, what: str, scale: float = 1.0, unit: str = "s") -> None:
        if name in figures:
            middle, low, high = (figures[name][each] * scale for each in ("median", "low", "high"))
            lines.append(f"  {what:<72} {middle:9.3f} {unit:<7} ({low:.3f}..{high:.3f})")

    def rate(name: str, what: str) -> None:
        row(name, what, 1e-6, "Mref/s")

    rate("curve_references_s", "LRU, every capacity")
    for capacity in result["capacities"]:
        rate(f"core_{capacity}_references_s", f"kvcache-simulator's core, LRU, {capacity:,} blocks")
        row(f"over_core_{capacity}", "  ours over it", unit="times")
    row("read_s", "reading the trace")
    row("read_and_curve_s", "reading it and LRU at every capacity, in a process that runs")
    row("process_s", "the same in a process of its own, start included, compiled before")
    row("process_first_s", "the same, nothing compiled before")
    row("command_s", "kvcache-simulator's whole command: LRU at one capacity")
    row("command_start_s", "  of that: it starts and reads its catalogue")
    row("over_command", "  over ours in a process that runs", unit="times")
    row("command_over_process", "  over ours in a process of its own", unit="times")
    row("command_drawn_s", f"its whole command: LRU at the {DRAWN} capacities that `lab oracle` draws")
    row("command_drawn_over_process", "  over ours, every capacity, in a process of its own", unit="times")
    row("command_default_s", "its whole command as it comes: 3 policies, 15 budgets")
    row("command_default_over_process", "  over ours, LRU alone, in a process of its own", unit="times")
    row("optimum_s", "both optima, every capacity")
    rate("zipf_references_s", f"LRU, every capacity, {result['zipf']['references']:,} of Zipf")
    rate("zipf_plain_references_s", "  with numpy alone")
    return "\n".join(lines)
