"""A replay's log beside the trace that was replayed: how much of the workload comes back when the log is mined.

Both sides are mined alike: the log as it is, the trace as the log of a replay that is never late. Both are played by
the simulator on the same fleets. Runs no server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from hostcache.errors import ConfigError
from hostcache.sim.clients import Clients, Sessions
from hostcache.sim.fleet import Fleet
from hostcache.sim.loop import Loop
from hostcache.sim.plan import Machine, ProfileLoad, trace_turns
from hostcache.sim.stage import identity, simulate
from hostcache.sizes import format_size, parse_size
from hostcache.workload.conversations import Turn
from hostcache.workload.mining import Mined
from hostcache.workload.profiles import Profile, quantile_at
from hostcache.workload.traces import Trace, TraceSession

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
NEAR_RATIO = 0.02
"""A quantile came back when it is within this share of the trace's."""
NEAR_SHARE = 0.02
"""A hit share came back when it is within two points of the trace's."""
FLEETS = ("700000", "700000:16GiB", "4000000")
RATES = (0.98, 0.99, 1.0, 1.01, 1.02)
"""Each fleet is played at its prefill rate times each of these, and the mean counts: where the pool is tight, a change
of a thousandth in any time moves an eviction before or behind a conversation's return, on both sides alike."""
_MACHINE = Machine(pool_tokens=1 << 20, kv_bytes_per_token=131_072, prefill_tok_s=8000.0, copy_bytes_per_s=20e9)
"""`sim plan`'s default, an 8B model in bfloat16, but for its pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSize:
    pool_tokens: int
    host_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.pool_tokens:,} tokens" + (f", host {format_size(self.host_bytes)}" if self.host_bytes else "")


def parse_fleet(text: str) -> FleetSize:
    """Of POOL[:HOST]: tokens and a size in bytes. Raises ConfigError."""
    pool, _, host = text.partition(":")
    digits = pool.replace("_", "").replace(",", "")
    if not digits.isdecimal() or not int(digits):
        raise ConfigError(f"--fleet {text!r} is not POOL[:HOST]; give for example 700000:16GiB")
    return FleetSize(pool_tokens=int(digits), host_bytes=parse_size(host, name="--fleet") if host else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """One figure of the trace, and what came back of it. `near`: within what is asked of its kind."""

    what: str
    trace: float
    mined: float
    near: bool
    trace_range: tuple[float, float] | None = None
    """of a hit share: over `RATES`"""
    mined_range: tuple[float, float] | None = None

    @property
    def ratio(self) -> float | None:
        return self.mined / self.trace if self.trace else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    counts: tuple[Returned, ...]
    quantiles: tuple[Returned, ...]
    hit_shares: tuple[Returned, ...]
    logged_hit_share: float | None
    """What the server of the replay said; None where it did not. Of its own cache, so not of these fleets."""

    @property
    def missed(self) -> list[str]:
        return [each.what for each in (*self.counts, *self.quantiles, *self.hit_shares) if not each.near]


def compared(mined: Mined, reference: Mined, trace: Trace, sessions: Sequence[TraceSession], *,
             fleets: Sequence[FleetSize], longest_gap_s: float = 0.0,
             progress: Callable[[str], None] = lambda line: None) -> Comparison:
    """`reference`: mined of the trace itself (`workload.mining.ideal_log`). Raises ConfigError for a fleet that cannot
    hold a request."""
    longest = max(request.input_tokens + request.output_tokens for each in sessions for request in each.requests)
    for fleet in fleets:
        if max(longest, mined.profile.longest_tokens) > fleet.pool_tokens:
            raise ConfigError(f"--fleet {fleet.pool_tokens}: the trace has a request of {longest} tokens; give a "
                              "larger pool")
    shares = []
    for fleet in fleets:
        progress(f"simulating {fleet}")
        shares.append(_hit_shares(f"hit share, {fleet}", fleet, trace_sessions(trace, sessions, longest_gap_s),
                                  profile_sessions(mined.profile)))
    names = ("requests", "sessions", "compactions")
    counts = [(name, float(getattr(reference.facts, name)), float(getattr(mined.facts, name))) for name in names]
    return Comparison(
        counts=tuple(Returned(what=name, trace=of, mined=got, near=of == got) for name, of, got in counts),
        quantiles=tuple(_quantiles(reference.profile, mined.profile)), hit_shares=tuple(shares),
        logged_hit_share=mined.facts.hit_share)


def _quantiles(reference: Profile, mined: Profile) -> Iterator[Returned]:
    for name, unit in (("start_tokens", "start (tokens)"), ("growth_tokens", "growth (tokens)"),
                       ("reply_tokens", "reply (tokens)"), ("gap_s", "gap (s)")):
        for share in SHARES:
            of, got = quantile_at(getattr(reference, name), share), quantile_at(getattr(mined, name), share)
            yield Returned(what=f"{unit} p{share * 100:.0f}", trace=of, mined=got,
                           near=abs(got - of) <= NEAR_RATIO * of)


Make = Callable[[Machine, Fleet, Loop], Clients]


def trace_sessions(trace: Trace, sessions: Sequence[TraceSession], longest_gap_s: float = 0.0) -> Make:
    """Each from its own arrival on, as `sim plan --trace` plays a whole trace."""

    def paused(turns: Iterator[tuple[float, Turn]]) -> Iterator[tuple[float, Turn]]:
        return ((min(pause_s, longest_gap_s) if longest_gap_s else pause_s, turn) for pause_s, turn in turns)

    def make(machine: Machine, fleet: Fleet, loop: Loop) -> Clients:
        kept = identity(machine.page_tokens)
        return Sessions(fleet, loop, [
            (session.requests[0].arrival_s or 0.0, paused(trace_turns(session, trace, kept, number)))
            for number, session in enumerate(sessions)])  # fmt: skip

    return make


def profile_sessions(profile: Profile) -> Make:
    """As `sim plan --profile` plays it."""
    return lambda machine, fleet, loop: ProfileLoad(profile=profile, window_s=None).clients(
        fleet, loop, machine, 0, lambda ended: None)


def hit_share(make: Make, size: FleetSize, *, rate: float = 1.0) -> float:
    """Cached over prompt tokens of all that was served, on `size` at so many times the default prefill rate."""
    machine = Machine(pool_tokens=size.pool_tokens, kv_bytes_per_token=_MACHINE.kv_bytes_per_token,
                      prefill_tok_s=_MACHINE.prefill_tok_s * rate, copy_bytes_per_s=_MACHINE.copy_bytes_per_s)
    visits = simulate(machine.shape(size.host_bytes), lambda fleet, loop: make(machine, fleet, loop)).clients.visits
    return sum(each.device_tokens + each.host_tokens for each in visits) / sum(each.prompt_tokens for each in visits)


def _hit_shares(what: str, fleet: FleetSize, trace: Make, profile: Make) -> Returned:
    of, got = ([hit_share(make, fleet, rate=rate) for rate in RATES] for make in (trace, profile))
    return Returned(what=what, trace=fmean(of), mined=fmean(got), near=abs(fmean(got) - fmean(of)) <= NEAR_SHARE,
                    trace_range=(min(of), max(of)), mined_range=(min(got), max(got)))


# Text ---------------------------------------------------------------------------------------------------------------

_WIDTH = 42


def comparison_text(comparison: Comparison) -> str:
    lines = [f"{'':{_WIDTH}}{'trace':>12}{'mined':>12}"]
    for each in comparison.counts:
        lines.append(_line(each, f"{each.trace:12.0f}{each.mined:12.0f}{'':12}"))
    for each in comparison.quantiles:
        ratio = "–" if each.ratio is None else f"× {each.ratio:.4f}"
        lines.append(_line(each, f"{each.trace:12,.2f}{each.mined:12,.2f}{ratio:>12}"))
    for each in comparison.hit_shares:
        points = f"{100 * (each.mined - each.trace):+.2f} pt"
        ranges = "".join(f"  {of} {low:.1%} … {high:.1%}" for of, (low, high) in (
            ("trace", each.trace_range or (0, 0)), ("mined", each.mined_range or (0, 0))))  # fmt: skip
        lines.append(_line(each, f"{each.trace:12.2%}{each.mined:12.2%}{points:>12}", ranges))
    if comparison.logged_hit_share is not None:
        lines.append(f"{'hit share, as the log says':{_WIDTH}}{'':12}{comparison.logged_hit_share:12.2%}")
    lines.append(f"counts equal, quantiles within {NEAR_RATIO:.0%}, hit shares within {NEAR_SHARE * 100:g} points: "
                 + ("yes" if not comparison.missed else f"no: {'; '.join(comparison.missed)}"))
    return "\n".join(lines) + "\n"


def _line(each: Returned, figures: str, more: str = "") -> str:
    return f"{each.what:{_WIDTH}}{figures}{'' if each.near else '  !'}{more}".rstrip()


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Its fields, and which of them did not come back."""
    return {**asdict(comparison), "missed": comparison.missed}
