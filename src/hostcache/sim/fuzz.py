"""`hostcache sim fuzz`: many cases in several processes, one table of what they went through, and the first failure.

Results are taken in order of the runs' numbers, so that the answer is the same with any number of processes. The first
violation ends the search: it is shrunk and told.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TextIO

from hostcache.errors import ConfigError
from hostcache.sim.drill import Ran, run
from hostcache.sim.mischief import draw
from hostcache.sim.shrink import shrink, told

FOUND = 1
"""Exit code when an invariant was broken."""
ALL_OF = ("eviction", "restore", "fault")
_TOGETHER = "eviction, restore and fault in one run"
_BATCH = 20

EPILOG = """\
examples:
  hostcache sim fuzz                                  200 runs: some seconds
  hostcache sim fuzz --runs 10000 --seed 7 --jobs 2   the proof of record: some minutes
  hostcache sim fuzz --replay 7:123                   run 123 under seed 7 once more, event by event

A run is a seed: the fleet, its clients, the copier's faults, what is done to it and the order of events. Every
invariant is checked after every event. Exit code 1: one was broken; the run is shrunk to what it takes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """`event`: the number of the one that broke it. `trace`: the shrunk run, a line each."""

    seed: int
    run: int
    event: int
    violation: str
    trace: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuzzed:
    """`coverage`: name → how many runs went through it. `digest`: of the event logs of all runs in order."""

    seed: int
    runs: int
    events: int
    least_events: int
    coverage: dict[str, int]
    digest: str
    failure: Failure | None

    def as_json(self) -> dict[str, Any]:
        failures = []
        if self.failure is not None:
            each = self.failure
            failures.append({"replay": f"{each.seed}:{each.run}", "event": each.event, "violation": each.violation,
                             "trace": list(each.trace)})  # fmt: skip
        return {
            "seed": self.seed,
            "runs": self.runs,
            "events": self.events,
            "least_events": self.least_events,
            "violations": len(failures),
            "coverage": self.coverage,
            "covered_share": self.coverage.get(_TOGETHER, 0) / self.runs,
            "digest": self.digest,
            "failures": failures,
        }


def fuzz(
    *, runs: int, seed: int, jobs: int = 1, progress: Callable[[int, int], None] = lambda runs, events: None
) -> Fuzzed:
    """Runs 0 … `runs` - 1 under the seed, up to the first violation. `progress` hears of (runs, events) done."""
    coverage: Counter[str] = Counter()
    state = blake2b(digest_size=16)
    done = events = 0
    least: int | None = None
    failure: Failure | None = None
    for ran in _results(seed, range(runs), jobs):
        done += 1
        events += ran.events
        state.update(ran.digest.encode())
        if ran.violation is not None:
            failure = Failure(seed=seed, run=ran.number, event=ran.events, violation=ran.violation)
            break
        least = ran.events if least is None else min(least, ran.events)
        coverage.update(ran.covered)
        coverage[_TOGETHER] += set(ALL_OF) <= set(ran.covered)
        progress(done, events)
    return Fuzzed(
        seed=seed, runs=done, events=events, least_events=least or 0, digest=state.hexdigest(), failure=failure,
        coverage=dict(sorted(coverage.items())))  # fmt: skip


def _results(seed: int, numbers: range, jobs: int) -> Iterator[Ran]:
    """In order of the numbers."""
    if jobs == 1:
        for number in numbers:
            yield run(draw(seed, number))
        return
    batches = (numbers[at : at + _BATCH] for at in range(0, len(numbers), _BATCH))
    # Spawned: nothing of this process, its threads least of all, is in the children.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        ahead: list[Future[list[Ran]]] = []
        try:
            for batch in batches:
                ahead.append(pool.submit(_batch, seed, batch))
                if len(ahead) > 2 * jobs:
                    yield from ahead.pop(0).result()
            while ahead:
                yield from ahead.pop(0).result()
        finally:
            for each in ahead:
                each.cancel()


def _batch(seed: int, numbers: Iterable[int]) -> list[Ran]:
    """In another process. Up to the first violation: nobody looks at what comes after it."""
    found = []
    for number in numbers:
        ran = run(draw(seed, number))
        found.append(replace(ran, choices=None, turns=()))
        if ran.violation is not None:
            break
    return found


# --- the command


def add_fuzz_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=200, metavar="N", help="runs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="(default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N",
                        help="processes; the answer does not depend on it (default: %(default)s)")
    parser.add_argument("--replay", metavar="SEED:RUN", help="one run, with every event")
    parser.add_argument("--no-shrink", action="store_true", help="do not shrink a failing run")
    parser.add_argument("--json", action="store_true", help="one object on stdout")


def run_fuzz(args: argparse.Namespace, *, out: TextIO, err: TextIO) -> int:
    """The exit code: 0, or 1 when an invariant was broken."""
    if args.replay is not None:
        return _replay(args.replay, as_json=args.json, out=out)
    for name, least in (("runs", 1), ("jobs", 1)):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name} is {getattr(args, name)}; give at least {least}")
    told_at = 0

    def progress(runs: int, events: int) -> None:
        nonlocal told_at
        if runs * 20 // args.runs > told_at:
            told_at = runs * 20 // args.runs
            err.write(f"{runs} of {args.runs} runs, {events} events\n")
            err.flush()

    found = fuzz(runs=args.runs, seed=args.seed, jobs=args.jobs, progress=progress)
    if found.failure is not None and not args.no_shrink:
        err.write(f"run {found.failure.run} broke an invariant; leaving out what that does not need\n")
        err.flush()
        found = replace(found, failure=_shrunk(found.failure))
    if args.json:
        out.write(json.dumps(found.as_json(), indent=2) + "\n")
    else:
        out.writelines(f"{line}\n" for line in _lines(found))
    return 0 if found.failure is None else FOUND


def _shrunk(failure: Failure) -> Failure:
    case = draw(failure.seed, failure.run)
    return replace(failure, trace=tuple(told(shrink(case, run(case)))))


def _lines(found: Fuzzed) -> Iterator[str]:
    violations = 0 if found.failure is None else 1
    yield (f"seed {found.seed}: {found.runs} runs of {found.least_events} events or more, {found.events} events, "
           f"{violations} violations, digest {found.digest}")
    if (failure := found.failure) is not None:
        yield f"run {failure.run}, event {failure.event}: {failure.violation}"
        yield f"again: hostcache sim fuzz --replay {failure.seed}:{failure.run}"
        yield from failure.trace
        return
    yield "runs with …"
    for name, runs in found.coverage.items():
        yield f"  {name:<40} {runs:>7} {100 * runs / found.runs:6.1f} %"


def _replay(which: str, *, as_json: bool, out: TextIO) -> int:
    try:
        seed, number = (int(part) for part in which.split(":"))
    except ValueError:
        raise ConfigError(f"--replay is {which!r}; give SEED:RUN, two integers") from None
    ran = run(draw(seed, number), keep_log=True)
    if as_json:
        out.write(json.dumps({"replay": which, "events": ran.events, "digest": ran.digest, "violation": ran.violation,
                              "trace": list(ran.lines)}, indent=2) + "\n")  # fmt: skip
    else:
        out.writelines(f"{line}\n" for line in ran.lines)
        out.write(f"{ran.events} events, digest {ran.digest}: {ran.violation or 'no violation'}\n")
    return 0 if ran.violation is None else FOUND
