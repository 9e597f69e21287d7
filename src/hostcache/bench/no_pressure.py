"""The same closed list of turns on several fresh servers whose pool holds everything: what does the tier cost then?

All servers are up at once and take each turn one after the other, in an order that rotates from turn to turn, so
that the machine's drift meets every one of them alike. One stream at a time: replies may be compared token by token.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

from hostcache.bench.rig import Rig, TurnPlace, arm_record, take_turn
from hostcache.bench.servers import RunningServer, ServerPlan
from hostcache.workload.agents import Agent, AgentShape, agents, stream


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPressurePlan:
    """`turns` of each of `conversations`, the first being the prefix."""

    conversations: int
    turns: int
    shape: AgentShape
    servers: tuple[ServerPlan, ...]


async def run_no_pressure(rig: Rig, plan: NoPressurePlan) -> None:
    async with AsyncExitStack() as stack:
        servers: list[RunningServer] = []
        for index, server_plan in enumerate(plan.servers):
            rig.progress.stage(f"no pressure, server {index + 1}/{len(plan.servers)}, tier {server_plan.arm}")
            name = f"no-pressure-{index}-{server_plan.arm}"
            servers.append(await stack.enter_async_context(rig.launcher.running(server_plan, name=name)))
        rig.progress.stage(f"no pressure, {len(servers)} servers in turn", "warming up")
        started_s = rig.clock.now()
        sources = await rig.sources(servers[0].client, plan.conversations + 1)
        await _warm_up(rig, plan, servers, sources[-1])
        opened_s = rig.clock.now()
        openings = [await server.client.stats() for server in servers]
        loops = [
            agents(sources[: plan.conversations], plan.shape, count=plan.conversations, seed=rig.seed,
                   limit_tokens=server.limit_tokens)
            for server in servers
        ]
        step = 0
        for turn in range(plan.turns):
            for conversation in range(plan.conversations):
                for place in range(len(servers)):
                    index = (step + place) % len(servers)
                    await _turn(rig, plan, servers[index], index, conversation, loops[index][conversation])
                step += 1
                rig.progress.show(f"{step}/{plan.turns * plan.conversations} turns (turn {turn + 1})")
        settled_s = rig.clock.now()
        for index, (server, opening) in enumerate(zip(servers, openings, strict=True)):
            rig.write(arm_record(
                server, stage="no-pressure", index=index, window_s=None, primed_s=started_s, opened_s=opened_s,
                settled_s=settled_s, opening=opening, closing=await server.client.stats()))


async def _warm_up(rig: Rig, plan: NoPressurePlan, servers: list[RunningServer], source: list[int]) -> None:
    """Lazy initialisation is nobody's tax: one uncounted turn of other text on each server."""
    for index, server in enumerate(servers):
        place = TurnPlace(stage="no-pressure", arm=server.plan.arm, arm_index=index, agent=plan.conversations, turn=0,
                          phase="prime", started_s=rig.clock.now())
        answered = await take_turn(server, place, source[: plan.shape.tool_tokens], reply_tokens=2,
                                   rng=stream(rig.seed, "warm-up", index))
        rig.write(answered.record)


async def _turn(rig: Rig, plan: NoPressurePlan, server: RunningServer, index: int, conversation: int,
                agent: Agent) -> None:
    place = TurnPlace(stage="no-pressure", arm=server.plan.arm, arm_index=index, agent=conversation, turn=agent.turn,
                      phase="fixed", started_s=rig.clock.now())
    answered = await take_turn(server, place, agent.prompt, reply_tokens=plan.shape.reply_tokens,
                               rng=stream(rig.seed, "no-pressure", index, conversation, agent.turn))
    rig.write(answered.record)
    if answered.resend is not None:
        agent.heard(answered.resend)
