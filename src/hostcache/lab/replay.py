"""A trace against a server: closed, or at the trace's own times; several processes, one scraper. Judges no figure.

    closed     `at_once` requests on their way at any time, the next one in the trace's order when one has ended
    open       each at its own time ÷ `rate_factor`, whatever became of those before: due times are absolute, a late
               send delays nobody and is seen as lateness

Four faults of an earlier probe cannot pass here: counters are scraped by this process alone, so no worker can drop
them; they are read by exact name (client.adapters); a record crosses the pipe with all its fields or the run is void
(replayed.Replayed); prompts pass the bridge's gates before the first is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hostcache.client.counters import Scrape
from hostcache.client.crew import Crew, crew
from hostcache.clock import Clock
from hostcache.errors import ConfigError, ServerError
from hostcache.lab.prompts import Planned, Prompts
from hostcache.lab.replay_worker import Manner
from hostcache.lab.replayed import ProbeVoid, Replayed
from hostcache.lab.stream import Stream
from hostcache.workload.traces import TraceRequest

Scraper = Callable[[], Awaitable[Scrape]]

WORKER = (sys.executable, "-m", "hostcache.lab.replay_worker")
DRAIN_S = 60.0
TIMELINE_S = 5.0
"""Between two scrapes while requests are on their way."""
TOLD = ("prompt_tokens", "device_tokens", "host_tokens", "recomputed_tokens", "generated_tokens", "preemptions")
SETTLE_S = 10.0
"""How long the counters may take to have counted what was answered: servers publish them after an answer's end."""
REST_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Closed with `at_once`, or open with `rate_factor` (2: twice as fast as recorded); one of the two.

    `drain_s`: after the last one was due, how long answers are waited for in an open replay.
    """

    at_once: int | None = 1
    rate_factor: float | None = None
    drain_s: float = DRAIN_S
    processes: int = 1

    def __post_init__(self) -> None:
        if (self.at_once is None) == (self.rate_factor is None):
            raise ConfigError("a load is closed (at_once) or open (rate_factor); give one of the two")
        for name in ("at_once", "rate_factor", "processes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value}; give a number above 0")
        if not 0 <= self.drain_s < float("inf"):
            raise ConfigError(f"drain_s is {self.drain_s}; give 0 or more")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """`requests` in the trace's order. `offered_window_s`: from the first due time to the last. `drained_cleanly`:
    every request was answered or failed by itself before the drain's end. `lateness_…_s`: sent − due, in an open
    replay."""

    requests: tuple[Replayed, ...]
    opening: Scrape
    closing: Scrape
    timeline: tuple[tuple[float, Mapping[str, float]], ...]
    """(seconds after the start, the TOLD counters then): none of them where that scrape had no answer"""
    load: Load
    offered_window_s: float | None
    drained_cleanly: bool
    lateness_p50_s: float
    lateness_p99_s: float
    wall_s: float

    def as_json(self) -> dict[str, Any]:
        return {"load": self.load.as_json(), "engine": self.opening.engine, "opening": list(self.opening.raw),
                "closing": list(self.closing.raw), "timeline": [[at_s, dict(told)] for at_s, told in self.timeline],
                "offered_window_s": self.offered_window_s,
                "drained_cleanly": self.drained_cleanly, "lateness_p50_s": self.lateness_p50_s,
                "lateness_p99_s": self.lateness_p99_s, "wall_s": self.wall_s,
                "requests": [each.as_json() for each in self.requests]}


def as_sent(stream: Stream) -> Stream:
    """The stream as prompts can be made of it: where a trace rounds down, the rest of a prompt that no block names is
    not sent. Raises ConfigError for a request that names no block at all."""
    covered = np.diff(stream.starts) * stream.block_tokens
    if (empty := np.flatnonzero(covered == 0)).size:
        raise ConfigError(f"request {int(empty[0]) + 1} names no block, so there is nothing to send for it; cut the "
                          "trace with `hostcache lab trace slice`")
    return dataclasses.replace(stream, input_tokens=np.minimum(stream.input_tokens, covered))


def planned(stream: Stream, *, requests: int | None = None,
            due_s: Sequence[float] | None = None) -> tuple[Planned, ...]:
    """The first requests of a stream `as_sent` (None: all). `due_s`: of each, in order."""
    count = stream.requests if requests is None else min(requests, stream.requests)
    starts, names = stream.starts.tolist(), stream.names[stream.ids]
    lengths = stream.input_tokens.tolist()
    return tuple(Planned(index=index, names=tuple(names[starts[index] : starts[index + 1]].tolist()),
                         tokens=lengths[index],
                         due_s=None if due_s is None else due_s[index]) for index in range(count))


def due_times(requests: Sequence[TraceRequest], rate_factor: float) -> list[float]:
    """Seconds after the first one's, scaled. Raises ConfigError where the trace does not say when."""
    due: list[float] = []
    for each in requests:
        if each.arrival_s is None:
            raise ConfigError(f"request {each.number} of the trace has no time of arrival; replay it closed "
                              "(--at-once)")
        due.append(each.arrival_s)
    return [(at_s - due[0]) / rate_factor for at_s in due]


async def replay(requests: Sequence[Planned], prompts: Prompts, manner: Manner, load: Load, *, scrape: Scraper,
                 clock: Clock, log_dir: Path, worker: Sequence[str] = WORKER, timeline_s: float = TIMELINE_S,
                 progress: Callable[[str], None] = lambda text: None) -> Replay:
    """Sends them all. The gates are the caller's to have passed, with these prompts.

    Raises WorkerLost when a process died, ProbeVoid when a record is missing, twice there or incomplete, ServerError
    when the server cannot be scraped.
    """
    if load.rate_factor is None:
        requests = [Planned(index=each.index, names=each.names, tokens=each.tokens) for each in requests]
    elif any(each.due_s is None for each in requests):
        raise ConfigError("an open replay needs a due time for every request")
    processes = min(load.processes, len(requests))
    share = {each.index: place % processes for place, each in enumerate(requests)}
    plans = [{"manner": manner.as_json(), "prompts": prompts.as_json(),
              "requests": [[each.index, each.names, each.tokens, each.due_s] for each in requests
                           if share[each.index] == number]} for number in range(processes)]
    async with crew(worker, plans, log_dir=log_dir, name="replay") as workers:
        for _ in range(processes):
            await workers.hear()
        opening = await _at_rest(scrape, clock)
        play = _Play(workers, share, clock, progress, len(requests))
        start_s = clock.now()
        timeline: list[tuple[float, Mapping[str, float]]] = []
        watch = asyncio.create_task(_watch(scrape, clock, start_s, timeline_s, timeline))
        try:
            if load.at_once is not None:
                drained = await play.closed(requests, load.at_once, start_s)
            else:
                drained = await play.open(requests, load.drain_s, start_s)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        wall_s = clock.now() - start_s
        found = _whole(play.records, requests)
        closing = await _settled(scrape, opening, found, clock)
    lateness = [each.sent_s - each.due_s for each in found]
    last_due_s = max((each.due_s or 0.0 for each in requests), default=0.0)
    return Replay(requests=found, opening=opening, closing=closing, timeline=tuple(timeline), load=load,
                  offered_window_s=None if load.rate_factor is None else last_due_s, drained_cleanly=drained,
                  lateness_p50_s=float(np.quantile(lateness, 0.5)), lateness_p99_s=float(np.quantile(lateness, 0.99)),
                  wall_s=wall_s)


class _Play:
    def __init__(self, workers: Crew, share: dict[int, int], clock: Clock, progress: Callable[[str], None],
                 count: int) -> None:
        self.records: list[Replayed] = []
        self._workers = workers
        self._share = share
        self._clock = clock
        self._progress = progress
        self._count = count

    async def closed(self, requests: Sequence[Planned], at_once: int, start_s: float) -> bool:
        waiting = iter(requests)
        on_the_way = 0
        while True:
            while on_the_way < at_once and (request := next(waiting, None)) is not None:
                self._send([request.index], start_s)
                on_the_way += 1
            if not on_the_way:
                return True
            await self._record()
            on_the_way -= 1

    async def open(self, requests: Sequence[Planned], drain_s: float, start_s: float) -> bool:
        for number in range(len(self._workers)):
            self._workers.say(number, {"send": [each for each, whose in self._share.items() if whose == number],
                                       "start_s": start_s})
        deadline_s = start_s + max(each.due_s or 0.0 for each in requests) + drain_s
        over = asyncio.create_task(self._clock.sleep_until(deadline_s))
        record: asyncio.Task[None] | None = None
        drained = True
        try:
            while len(self.records) < self._count:
                record = asyncio.create_task(self._record())
                await asyncio.wait({record, over} if drained else {record}, return_when=asyncio.FIRST_COMPLETED)
                if over.done() and drained and not record.done():
                    drained = False
                    for number in range(len(self._workers)):
                        self._workers.say(number, {"halt": True})
                await record
        finally:
            for task in (over, record):
                if task is not None:
                    task.cancel()
        return drained

    def _send(self, indexes: list[int], start_s: float) -> None:
        self._workers.say(self._share[indexes[0]], {"send": indexes, "start_s": start_s})

    async def _record(self) -> None:
        _, message = await self._workers.hear()
        if "record" not in message:
            raise ProbeVoid("record_field_lost", f"a worker said {str(message)[:80]} where a record was due")
        self.records.append(Replayed.from_json(message["record"]))
        done = len(self.records)
        if done % max(1, self._count // 10) == 0 or done == self._count:
            self._progress(f"{done} of {self._count} requests")


def _whole(records: Sequence[Replayed], requests: Sequence[Planned]) -> tuple[Replayed, ...]:
    by_index = {each.index: each for each in records}
    wanted = {each.index for each in requests}
    if len(by_index) != len(records):
        raise ProbeVoid("record_twice", f"{len(records) - len(by_index)} requests have two records")
    if differing := sorted(wanted ^ by_index.keys()):
        raise ProbeVoid("record_missing", f"request {differing[0]} has no record, or was never to be sent")
    return tuple(by_index[each.index] for each in requests)


async def _watch(scrape: Scraper, clock: Clock, start_s: float, every_s: float,
                 timeline: list[tuple[float, Mapping[str, float]]]) -> None:
    """Until it is cancelled."""
    due_s = start_s
    while True:
        due_s = max(due_s + every_s, clock.now())
        await clock.sleep_until(due_s)
        told: dict[str, float] = {}
        with contextlib.suppress(ServerError):
            counters = (await scrape()).counters
            told = {name: counters[name] for name in TOLD if name in counters}
        timeline.append((clock.now() - start_s, told))


async def _at_rest(scrape: Scraper, clock: Clock) -> Scrape:
    """A scrape whose counters are those of the one before it: what was asked of the server until now is counted."""
    before = await scrape()
    deadline_s = clock.now() + SETTLE_S
    while True:
        await clock.sleep_until(clock.now() + REST_S)
        now = await scrape()
        if now.counters.get("prompt_tokens") == before.counters.get("prompt_tokens") or clock.now() >= deadline_s:
            return now
        before = now


async def _settled(scrape: Scraper, opening: Scrape, records: Sequence[Replayed], clock: Clock) -> Scrape:
    """A scrape of a server at rest: one that has counted every prompt that was answered, where it counts them."""
    answered = sum(each.prompt_tokens or 0 for each in records)
    deadline_s = clock.now() + SETTLE_S
    while True:
        closing = await scrape()
        counted = closing.counters.get("prompt_tokens", 0.0) - opening.counters.get("prompt_tokens", 0.0)
        if counted >= answered or "prompt_tokens" not in closing.counters or clock.now() >= deadline_s:
            return closing
        await clock.sleep_until(clock.now() + REST_S)
