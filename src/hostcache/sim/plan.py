"""Is a host-RAM tier worth its memory here? The same workload without it and with it at a ladder of sizes.

Simulates a plain engine (chunked prefill, one least-recently-used pool) with the real tier beside it; the fleet of the
publication is `twin`'s. Every row sees the same requests from the same seed; rows run in processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from queue import Empty
from statistics import fmean
from typing import Protocol

from hostcache import __version__
from hostcache.copiers.virtual import CopySpeed
from hostcache.errors import ConfigError
from hostcache.records import PlanRecord, PlanRow
from hostcache.sim.clients import AgentLoops, Clients, ProfileLoops, Sessions, Visit
from hostcache.sim.costs import Costs
from hostcache.sim.fleet import Fleet
from hostcache.sim.loop import Loop
from hostcache.sim.requests import How
from hostcache.sim.shape import FleetShape
from hostcache.sim.stage import Run, identity, simulate
from hostcache.sizes import format_size
from hostcache.tier import Identity, TierConfig
from hostcache.workload.agents import AgentShape
from hostcache.workload.blocks import ChainBuilder, block_prints
from hostcache.workload.conversations import Conversation, Frontier, Turn
from hostcache.workload.profiles import Profile, conversation_turns, planned_sessions
from hostcache.workload.traces import Trace, TraceSession, open_trace, sessions_of, trace_facts

WORTH = 0.02
"""A size pays when the mean latency falls or the turns rise by this share over the size below it …"""
WORTH_TOKENS = 0.01
"""… or this share of all prompt tokens more comes from a cache."""

NOT_MODELLED = (
    "the order in which an engine evicts single pages: here whole conversations go, least recently used first",
    "speculative decoding, batching effects between prompts of one step, the client's network",
    "prefill that gets dearer with the context (a flat rate is asked for); give a rate at your typical prompt length",
    "replies in traces: what a trace does not show as shared is computed again",
)

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One engine. Rates in tokens or bytes a second; `decode_tok_s` of one stream alone and with every slot busy."""

    pool_tokens: int
    kv_bytes_per_token: int
    prefill_tok_s: float
    copy_bytes_per_s: float
    page_tokens: int = 64
    slots: int = 16
    decode_tok_s: tuple[float, float] = (60.0, 20.0)
    chunk_tokens: int = 2048
    max_context_tokens: int = 1 << 20

    def __post_init__(self) -> None:
        for name in ("pool_tokens", "kv_bytes_per_token", "prefill_tok_s", "copy_bytes_per_s", "page_tokens", "slots",
                     "chunk_tokens", "max_context_tokens"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; give a finite number over 0")
        if not 0 < self.decode_tok_s[1] <= self.decode_tok_s[0] < float("inf"):
            raise ConfigError(f"decode_tok_s is {self.decode_tok_s}; give one stream's rate alone, then the rate, not "
                              "higher, that each stream has when every slot is busy")

    @property
    def page_bytes(self) -> int:
        return self.page_tokens * self.kv_bytes_per_token

    def shape(self, host_bytes: int) -> FleetShape:
        """The fleet of one row."""
        alone, busy = self.decode_tok_s
        steps = ((1, 1 / alone), (self.slots, 1 / busy)) if self.slots > 1 else ((1, 1 / alone),)
        pages = self.pool_tokens // self.page_tokens
        return FleetShape(
            tier=TierConfig(host_cache_bytes=host_bytes, page_bytes=self.page_bytes, page_tokens=self.page_tokens),
            costs=Costs(prefill_token_s=1 / self.prefill_tok_s, decode_step_s=steps),
            speed=CopySpeed(store_bytes_per_s=self.copy_bytes_per_s, restore_bytes_per_s=self.copy_bytes_per_s),
            pool_tokens=self.pool_tokens, slots=self.slots, prompt_entries=0, turn_entries=1 << 30,
            chunk_tokens=self.chunk_tokens, door_slots=1 << 30, reach_pages=max(1, pages // 16))  # fmt: skip


class Load(Protocol):
    """A workload: picklable, the same requests every time. `window_s`: turns count that start within it (None: all)."""

    @property
    def window_s(self) -> float | None: ...

    def describe(self) -> dict[str, int | float | str]: ...

    @property
    def longest_tokens(self) -> int:
        """Of prompt and reply together, as far as it is known before the run."""
        ...

    @property
    def unit_tokens(self) -> int:
        """Page sizes must be a multiple or a divisor of this (1: any)."""
        ...

    def clients(self, fleet: Fleet, loop: Loop, machine: Machine, seed: int, ended: Callable[[int], None]) -> Clients:
        """`ended` hears how many requests have ended."""
        ...

    @property
    def requests(self) -> int | None:
        """How many there will be, where that is known."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsLoad:
    """`agents` loops, in a window of `window_s` seconds after a first turn each."""

    agents: int
    shape: AgentShape
    window_s: float = 600.0
    compact_one_in: int = 200

    def __post_init__(self) -> None:
        if self.agents < 1 or not 0 < self.window_s < float("inf"):
            raise ConfigError(f"{self.agents} agents for {self.window_s} s; give at least 1 agent and a time over 0")

    def describe(self) -> dict[str, int | float | str]:
        shape = self.shape
        return {"agents": self.agents, "start tokens": shape.prefix_tokens, "tool tokens a turn": shape.tool_tokens,
                "reply tokens a turn": shape.reply_tokens, "window (s)": self.window_s,
                "gap between turns (s)": f"{shape.gap_min_s:g} to {shape.gap_max_s:g}"}

    @property
    def longest_tokens(self) -> int:
        return self.shape.prefix_tokens + self.shape.tool_tokens + self.shape.reply_tokens

    @property
    def unit_tokens(self) -> int:
        return 1

    @property
    def requests(self) -> int | None:
        return None

    def clients(self, fleet: Fleet, loop: Loop, machine: Machine, seed: int, ended: Callable[[int], None]) -> Clients:
        limit = min(machine.max_context_tokens, machine.pool_tokens)
        return AgentLoops(
            fleet, loop, self.shape, count=self.agents, window_s=self.window_s, identity=identity(machine.page_tokens),
            seed=seed, compact_one_in=self.compact_one_in, limit_tokens=limit)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileLoad:
    """A profile for `window_s` seconds. None: its recorded sessions, each once at its own time, to their ends."""

    profile: Profile
    window_s: float | None = 600.0

    def __post_init__(self) -> None:
        if self.window_s is None and not self.profile.recorded:
            raise ConfigError(f"profile {self.profile.name} holds no recorded sessions; give a window")
        if self.window_s is not None and not 0 < self.window_s < float("inf"):
            raise ConfigError(f"a window of {self.window_s} s; give a time over 0")

    def describe(self) -> dict[str, int | float | str]:
        if self.window_s is None:
            return {"profile": self.profile.name, "recorded sessions": len(self.profile.recorded)}
        return {"profile": self.profile.name, "sessions at a time": self.profile.sessions, "window (s)": self.window_s}

    @property
    def longest_tokens(self) -> int:
        return self.profile.longest_tokens if self.window_s is None else self.profile.longest_start_tokens

    @property
    def unit_tokens(self) -> int:
        return 1

    @property
    def requests(self) -> int | None:
        return sum(len(session.turns) for session in self.profile.recorded) if self.window_s is None else None

    def clients(self, fleet: Fleet, loop: Loop, machine: Machine, seed: int, ended: Callable[[int], None]) -> Clients:
        limit = min(machine.max_context_tokens, machine.pool_tokens)
        kept = identity(machine.page_tokens)
        if self.window_s is not None:
            return ProfileLoops(fleet, loop, self.profile, window_s=self.window_s, identity=kept, seed=seed,
                                limit_tokens=limit)
        shared = self.profile.shared_tokens
        head = Conversation(kept, seed, start_tokens=shared) if shared else None
        sessions = [
            (session.start_s or 0.0, conversation_turns(session, kept, seed=seed, head=head))
            for session in planned_sessions(self.profile, seed=seed, limit_tokens=limit)
        ]
        return Sessions(fleet, loop, sessions, seed=seed, progress=ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLoad:
    """A recorded trace: every session starts at its time; a later request comes its pause after the last answer."""

    path: Path
    references: int
    count: int
    longest: int
    block_tokens: int
    window_s: None = None

    @classmethod
    def of(cls, path: Path) -> TraceLoad:
        """Reads the trace once. Raises TraceRefused for what is none."""
        trace = open_trace(path)
        facts = trace_facts(trace)
        return cls(path=path, references=facts.references, count=facts.requests,
                   longest=facts.longest_input_tokens, block_tokens=trace.format.block_tokens)

    def describe(self) -> dict[str, int | float | str]:
        return {"trace": self.path.name, "requests": self.count, "block references": self.references,
                "block tokens": self.block_tokens}

    @property
    def longest_tokens(self) -> int:
        return self.longest

    @property
    def unit_tokens(self) -> int:
        return self.block_tokens

    @property
    def requests(self) -> int | None:
        return self.count

    def clients(self, fleet: Fleet, loop: Loop, machine: Machine, seed: int, ended: Callable[[int], None]) -> Clients:
        trace = open_trace(self.path)
        kept = identity(machine.page_tokens)
        sessions = [
            (session.requests[0].arrival_s or 0.0, trace_turns(session, trace, kept, number))
            for number, session in enumerate(sessions_of(trace))
        ]
        return Sessions(fleet, loop, sessions, seed=seed, progress=ended)


def trace_turns(session: TraceSession, trace: Trace, kept: Identity, number: int) -> Iterator[tuple[float, Turn]]:
    """(pause before it in seconds, turn) of each of a session's requests; `number` tells sessions apart."""
    block, page = trace.format.block_tokens, kept.page_tokens
    builder = ChainBuilder(kept, block_tokens=block)
    before: Frontier | None = None
    for at, request in enumerate(session.requests):
        tokens = max(1, request.input_tokens)
        chain = builder.chain(request.blocks, tokens)
        end = Frontier(tokens=tokens, print_=(number << 32) | (at + 1))
        continued = before is not None and request.kept_blocks * block > before.tokens - block
        yield request.think_s if at else 0.0, Turn(
            chain=chain, prints=block_prints(request.blocks, block_tokens=block, page_tokens=page, input_tokens=tokens),
            prompt_tokens=tokens, reply_tokens=max(1, request.output_tokens), prompt_end=end, turn_end=end,
            ancestors=(before,) if before is not None and continued else ())  # fmt: skip
        before = end


def ladder(host_bytes: Sequence[int], machine: Machine) -> tuple[int, ...]:
    """The sizes to try: as given when several, an eighth to the whole when one. Refuses one that holds no page."""
    for size in host_bytes:
        if size < machine.page_bytes:
            raise ConfigError(f"host_cache_bytes is {size}, below one page of {machine.page_bytes} bytes "
                              f"({machine.page_tokens} tokens); give at least {machine.page_bytes}")
    if len(host_bytes) == 1:
        return tuple(size for size in (host_bytes[0] // 8, host_bytes[0] // 4, host_bytes[0] // 2, host_bytes[0])
                     if size >= machine.page_bytes)
    return tuple(sorted(set(host_bytes)))


def plan(
    machine: Machine,
    load: Load,
    host_bytes: Sequence[int],
    *,
    price_per_mtok: float | None = None,
    seed: int = 0,
    jobs: int = 1,
    commands: Sequence[str] = (),
    wall_s: Callable[[], float] | None = None,
    progress: Progress = lambda line: None,
) -> PlanRecord:
    """Simulate every row and judge. `wall_s`: seconds since the command began, for the record."""
    if load.longest_tokens > min(machine.max_context_tokens, machine.pool_tokens):
        raise ConfigError(f"the workload has a request of {load.longest_tokens} tokens; the context limit is "
                          f"{machine.max_context_tokens} and the pool {machine.pool_tokens}: raise them or shorten it")
    if load.unit_tokens % machine.page_tokens and machine.page_tokens % load.unit_tokens and load.unit_tokens > 1:
        raise ConfigError(f"pages of {machine.page_tokens} tokens cannot be cut from blocks of {load.unit_tokens}; "
                          f"give page_tokens a multiple or a divisor of {load.unit_tokens}")
    if price_per_mtok is not None and not 0 <= price_per_mtok < float("inf"):
        raise ConfigError(f"price_per_mtok is {price_per_mtok}; give 0 or more")
    sizes = (0, *ladder(host_bytes, machine))
    tasks = [(machine, load, size, seed) for size in sizes]
    rows = [_row(*task, progress) for task in tasks] if jobs == 1 else _side_by_side(tasks, jobs, progress)
    judged = _judge([each.row for each in rows], price_per_mtok)
    paying = [row.host_bytes for row in judged if row.pays]
    until = max(paying, default=None)
    return PlanRecord(
        question=_question(machine, load), verdict=_verdict(judged, until), pays_until_bytes=until,
        workload=load.describe(), device=_device(machine), pool_tokens=machine.pool_tokens,
        page_tokens=machine.page_tokens, kv_bytes_per_token=machine.kv_bytes_per_token,
        prefill_tok_s=machine.prefill_tok_s, copy_bytes_per_s=machine.copy_bytes_per_s,
        simulated_s=rows[-1].simulated_s, price_per_mtok=price_per_mtok, seed=seed, commands=tuple(commands),
        wall_s=None if wall_s is None else wall_s(), rows=tuple(judged), not_modelled=NOT_MODELLED,
        hostcache_version=__version__)  # fmt: skip


def _side_by_side(tasks: Sequence[tuple[Machine, Load, int, int]], jobs: int, progress: Progress) -> list[_Row]:
    context = get_context("forkserver")
    with context.Manager() as manager, ProcessPoolExecutor(jobs, mp_context=context) as pool:
        lines = manager.Queue()
        # The largest first: it takes longest, and the processes then end at about the same time.
        futures = [pool.submit(_row, *task, lines.put) for task in reversed(tasks)]
        while not all(future.done() for future in futures) or not lines.empty():
            with suppress(Empty):
                progress(lines.get(timeout=0.2))
        return [future.result() for future in reversed(futures)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    row: PlanRow
    simulated_s: float


def _row(machine: Machine, load: Load, host_bytes: int, seed: int, say: Progress) -> _Row:
    label, total = _label(host_bytes), load.requests
    every = max(1, (total or 0) // 20)

    def ended(count: int) -> None:
        if total and count % every == 0:
            say(f"{label}: {count} of {total} requests")

    run = simulate(
        machine.shape(host_bytes), lambda fleet, loop: load.clients(fleet, loop, machine, seed, ended), seed=seed)
    simulated_s = run.fleet.clock.now()
    row = _figures(run, label, host_bytes, load, simulated_s)
    say(f"{label}: done, {row.turns} turns")
    return _Row(row=row, simulated_s=simulated_s)


def _figures(run: Run, label: str, host_bytes: int, load: Load, simulated_s: float) -> PlanRow:
    counted = [visit for visit in run.clients.visits if visit.counted]
    served = [visit for visit in counted if visit.how is How.SERVED]
    hours = (load.window_s or simulated_s) / 3600
    latencies = sorted(visit.ended_s - visit.started_s for visit in served)
    firsts = sorted(visit.first_s - visit.started_s for visit in served if visit.first_s is not None)
    prompt = sum(visit.prompt_tokens for visit in served)
    device, host = (sum(map(tokens, served)) for tokens in (_device_tokens, _host_tokens))
    counters = run.fleet.cache.stats().counters
    return PlanRow(
        label=label, arm="on" if host_bytes else "off", host_bytes=host_bytes, turns=len(served),
        turns_per_hour=len(served) / hours if hours else None, avg_s=fmean(latencies) if latencies else None,
        p50_s=_quantile(latencies, 0.5), p95_s=_quantile(latencies, 0.95), ttft_p50_s=_quantile(firsts, 0.5),
        ttft_p95_s=_quantile(firsts, 0.95), prompt_tokens=prompt, device_tokens=device, host_tokens=host,
        recomputed_tokens=prompt - device - host, hit_share=(device + host) / prompt if prompt else None, price=None,
        refused=sum(visit.how is How.REFUSED for visit in counted), restored_bytes=counters.restore_bytes,
        written_bytes=counters.store_bytes, pays=False)  # fmt: skip


def _device_tokens(visit: Visit) -> int:
    return visit.device_tokens


def _host_tokens(visit: Visit) -> int:
    return visit.host_tokens


def _judge(rows: Sequence[PlanRow], price_per_mtok: float | None) -> list[PlanRow]:
    """The rows with their prices, and whether each size pays over the one below it."""
    judged: list[PlanRow] = []
    for row in rows:
        below = judged[-1] if judged else None
        price = None if price_per_mtok is None else row.recomputed_tokens / 1e6 * price_per_mtok
        judged.append(replace(row, price=price, pays=below is not None and _pays(row, below)))
    return judged


def _pays(row: PlanRow, below: PlanRow) -> bool:
    faster = row.avg_s is not None and below.avg_s is not None and row.avg_s <= below.avg_s * (1 - WORTH)
    more = row.turns >= max(1, below.turns) * (1 + WORTH)
    hits = row.hit_share is not None and below.hit_share is not None and row.hit_share >= below.hit_share + WORTH_TOKENS
    slower = row.avg_s is not None and below.avg_s is not None and row.avg_s > below.avg_s * (1 + WORTH)
    return (faster or more or hits) and not (slower and not more)


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    """Nearest rank."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _label(host_bytes: int) -> str:
    return format_size(host_bytes) if host_bytes else "without the tier"


def _question(machine: Machine, load: Load) -> str:
    what = ", ".join(f"{name} {value}" for name, value in load.describe().items())
    return (f"A pool of {machine.pool_tokens:,} tokens at {machine.prefill_tok_s:,.0f} tokens/s prefill; {what}: "
            "what is a host-RAM tier worth, and how large should it be?")


def _device(machine: Machine) -> dict[str, int | float | str]:
    alone, busy = machine.decode_tok_s
    return {"slots": machine.slots, "prefill chunk (tokens)": machine.chunk_tokens,
            "decode of one stream (tokens/s)": alone, "decode a stream, slots busy (tokens/s)": busy,
            "context limit (tokens)": machine.max_context_tokens}


def _verdict(rows: Sequence[PlanRow], until: int | None) -> str:
    off, sizes = rows[0], rows[1:]
    if until is None:
        smallest, largest = sizes[0].label, sizes[-1].label
        return f"It never pays here: from {smallest} to {largest} nothing gets better by {WORTH:.0%}."
    at = next(row for row in rows if row.host_bytes == until)
    gain = f"{at.turns} turns instead of {off.turns}" if at.turns != off.turns else f"{at.turns} turns"
    if at.avg_s is not None and off.avg_s is not None:
        gain += f", {at.avg_s:.1f} s instead of {off.avg_s:.1f} s on average"
    if at.hit_share is not None and off.hit_share is not None:
        gain += f", {at.hit_share:.0%} of prompt tokens from cache instead of {off.hit_share:.0%}"
    if until == sizes[-1].host_bytes:
        return f"It pays up to the largest size tried, {at.label}: {gain}. A larger one may pay more."
    return f"It pays up to {at.label}: {gain}. Beyond that size it stops paying."
