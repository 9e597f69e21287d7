"""How fast the simulator simulates: agent-hours a minute, and whether an event stays as cheap with many more agents.

The fleet stays as it is (16 slots, two banks of 24, a pool of 2.2 million tokens) and so does its traffic: twice the
agents wait twice as long between turns. What grows is what must be kept in mind: conversations, pages on the host,
events to come. Sizes alternate; medians and the spread are told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from hostcache.clock import Clock, WallClock
from hostcache.copiers.virtual import CopySpeed
from hostcache.sim.clients import AgentLoops
from hostcache.sim.costs import Costs
from hostcache.sim.shape import FleetShape
from hostcache.sim.stage import identity, simulate
from hostcache.tier import TierConfig
from hostcache.workload.agents import AgentShape

PAGE_TOKENS, TOKEN_BYTES = 512, 890
AGENT_HOURS_BAR = 200.0
FLAT_BAR = 1.5
AGENTS = (8, 32, 128, 512)
GAP_MIN_S, GAP_MAX_S = 5.0, 30.0
"""Of 32 agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One run."""

    wall_s: float
    events: int
    turns: int
    agent_hours: float
    restores: int


def loop_of(agents: int) -> AgentShape:
    """What an agent does where there are so many."""
    return AgentShape(prefix_tokens=30_000, tool_tokens=1600, reply_tokens=100, gap_min_s=GAP_MIN_S * agents / 32,
                      gap_max_s=GAP_MAX_S * agents / 32)


def fleet(agents: int) -> FleetShape:
    """A host that holds every agent; a door at which all may wait."""
    tier = TierConfig(host_cache_bytes=agents * 200_000 * TOKEN_BYTES, page_bytes=PAGE_TOKENS * TOKEN_BYTES,
                      page_tokens=PAGE_TOKENS)
    return FleetShape(
        tier=tier, costs=Costs(prefill_token_s=1.3e-4, decode_step_s=((1, 0.008), (6, 0.048), (16, 0.068))),
        speed=CopySpeed(store_bytes_per_s=17e9, restore_bytes_per_s=17e9), pool_tokens=2_200_000, chunk_tokens=2048,
        door_waiting=agents, door_wait_s=1e9, supersede=False)  # fmt: skip


def timed(agents: int, window_s: float, clock: Clock) -> Timed:
    """Simulate one window."""
    began = clock.now()
    run = simulate(fleet(agents), lambda fleet_, loop: AgentLoops(
        fleet_, loop, loop_of(agents), count=agents, window_s=window_s, identity=identity(PAGE_TOKENS), seed=1))
    wall_s = clock.now() - began
    return Timed(wall_s=wall_s, events=run.log.events, turns=len(run.clients.visits),
                 agent_hours=agents * run.fleet.clock.now() / 3600, restores=run.fleet.watch.restores)


def run(*, repeats: int = 3, agents: tuple[int, ...] = AGENTS, window_s: float = 1800.0,
        clock: Clock | None = None) -> dict[str, Any]:
    """`window_s`: simulated after every agent's first turn. Ready for JSON."""
    wall = clock if clock is not None else WallClock()
    runs: dict[int, list[Timed]] = {count: [] for count in agents}
    for _ in range(repeats):
        for count in agents:
            runs[count].append(timed(count, window_s, wall))
    sizes = [_size(count, each) for count, each in runs.items()]
    costs = [size["us_an_event"] for size in sizes]
    at_32 = next((size for size in sizes if size["agents"] == 32), sizes[0])
    return {"sizes": sizes, "agent_hours_a_minute": at_32["agent_hours_a_minute"],
            "dearest_over_cheapest_event": max(costs) / min(costs), "repeats": repeats}


def _size(agents: int, runs: list[Timed]) -> dict[str, Any]:
    rates = sorted(each.agent_hours / each.wall_s * 60 for each in runs)
    costs = sorted(each.wall_s / each.events * 1e6 for each in runs)
    return {"agents": agents, "events": runs[0].events, "turns": runs[0].turns, "restores": runs[0].restores,
            "agent_hours_a_minute": median(rates), "agent_hours_low": rates[0], "agent_hours_high": rates[-1],
            "us_an_event": median(costs), "us_low": costs[0], "us_high": costs[-1],
            "us_a_turn": median(each.wall_s / each.turns * 1e6 for each in runs)}


def bars(result: Mapping[str, Any]) -> list[tuple[str, str, float, bool]]:
    """what, bar, value, met"""
    rate, spread = result["agent_hours_a_minute"], result["dearest_over_cheapest_event"]
    return [
        ("agent-hours simulated a minute, 32 agents", f"at least {AGENT_HOURS_BAR:g}", rate, rate >= AGENT_HOURS_BAR),
        (f"dearest over cheapest event, {AGENTS[0]} to {AGENTS[-1]} agents", f"at most {FLAT_BAR:g}", spread,
         spread <= FLAT_BAR)]


def table(result: Mapping[str, Any]) -> str:
    """For the terminal."""
    lines = ["agents   events   turns  restores  agent-hours/min (low..high)     µs an event (low..high)   µs a turn"]
    for size in result["sizes"]:
        lines.append(
            f"{size['agents']:6}  {size['events']:7}  {size['turns']:6}  {size['restores']:8}"
            f"  {size['agent_hours_a_minute']:8.0f} ({size['agent_hours_low']:.0f}..{size['agent_hours_high']:.0f})"
            f"     {size['us_an_event']:8.0f} ({size['us_low']:.0f}..{size['us_high']:.0f})   {size['us_a_turn']:9.0f}")
    return "\n".join(lines) + "\n"
