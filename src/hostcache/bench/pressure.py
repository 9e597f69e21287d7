"""K agent loops against one server: prime, open the window, let what was started in it end. Compares nothing.

The window opens once every agent has been served its first turn. Agents do not wait for each other: who is primed
early goes on, so that the window opens on an engine in its steady state. Turns started in the window are counted
however late they end; none starts after it; the closing scrape comes after the last of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from hostcache.bench.rig import Rig, TurnPlace, arm_record, take_turn
from hostcache.bench.servers import RunningServer, ServerPlan
from hostcache.errors import ServerError
from hostcache.records import Phase
from hostcache.workload.agents import Agent, AgentShape, agents, stream


@dataclass(frozen=True, slots=True, kw_only=True)
class PressurePlan:
    agents: int
    shape: AgentShape
    window_s: float
    order: tuple[ServerPlan, ...]


@dataclass(slots=True)
class _Window:
    """closed: None → opened_s set → closed. Owned by `_run_arm`; agents only read it and report their state."""

    opened_s: float | None = None
    closed: bool = False
    primed: int = 0
    turns: int = 0
    errors: int = 0

    def phase(self, agent: Agent) -> Phase:
        if agent.turn == 0:
            return "prime"
        return "before" if self.opened_s is None else "window"


async def run_pressure(rig: Rig, plan: PressurePlan) -> None:
    """Every arm of `plan.order` in turn, a fresh process each; records are written as they come."""
    for index, server_plan in enumerate(plan.order):
        rig.progress.stage(f"pressure {index + 1}/{len(plan.order)}, tier {server_plan.arm}")
        async with rig.launcher.running(server_plan, name=f"pressure-{index}-{server_plan.arm}") as server:
            await _run_arm(rig, plan, server, index)


async def _run_arm(rig: Rig, plan: PressurePlan, server: RunningServer, index: int) -> None:
    clock, window = rig.clock, _Window()
    sources = await rig.sources(server.client, plan.agents)
    loops = agents(sources, plan.shape, count=plan.agents, seed=rig.seed, limit_tokens=server.limit_tokens)
    all_primed, busy = asyncio.Event(), set[int]()

    async def converse(number: int, agent: Agent) -> None:
        backoff = stream(rig.seed, "backoff", index, number)
        while not window.closed:
            busy.add(number)
            place = TurnPlace(stage="pressure", arm=server.plan.arm, arm_index=index, agent=number, turn=agent.turn,
                              phase=window.phase(agent), started_s=clock.now())
            answered = await take_turn(server, place, agent.prompt, reply_tokens=plan.shape.reply_tokens, rng=backoff)
            rig.write(answered.record)
            busy.discard(number)
            if answered.resend is None:
                window.errors += 1
                if place.phase == "prime":
                    raise ServerError(f"agent {number} could not be primed: {answered.record.error}")
            else:
                agent.heard(answered.resend)
                window.turns += place.phase == "window"
                if place.phase == "prime":
                    window.primed += 1
                    if window.primed == plan.agents:
                        all_primed.set()
            await clock.sleep_until(clock.now() + agent.gap_s())

    tasks = [asyncio.create_task(converse(number, agent)) for number, agent in enumerate(loops)]
    show = asyncio.create_task(_show(rig, plan, window, busy))
    try:
        await _either(all_primed.wait(), tasks)
        primed_s = clock.now()
        opening = await server.client.stats()
        window.opened_s = clock.now()
        await _either(clock.sleep_until(window.opened_s + plan.window_s), tasks)
        window.closed = True
        for number, task in enumerate(tasks):
            if number not in busy:
                task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        settled_s = clock.now()
        closing = await server.client.stats()
    finally:
        for task in (*tasks, show):
            task.cancel()
        await asyncio.gather(*tasks, show, return_exceptions=True)
    rig.write(arm_record(server, stage="pressure", index=index, window_s=plan.window_s, primed_s=primed_s,
                         opened_s=window.opened_s, settled_s=settled_s, opening=opening, closing=closing))


async def _either(waited: Coroutine[Any, Any, object], tasks: list[asyncio.Task[None]]) -> None:
    """Await `waited`; a loop that breaks meanwhile raises at once instead of leaving us waiting for it."""
    waiting = asyncio.create_task(waited)
    try:
        await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        waiting.cancel()


async def _show(rig: Rig, plan: PressurePlan, window: _Window, busy: set[int]) -> None:
    while True:
        if window.opened_s is None:
            text = f"{window.primed}/{plan.agents} agents primed"
        elif window.closed:
            text = f"window over, {len(busy)} turns still running, {window.turns} served"
        else:
            left_s = window.opened_s + plan.window_s - rig.clock.now()
            text = f"{window.turns} turns served, {len(busy)} running, {max(0.0, left_s):.0f} s left"
        rig.progress.show(text + (f", {window.errors} errors" if window.errors else ""))
        await rig.clock.sleep_until(rig.clock.now() + 0.5)
