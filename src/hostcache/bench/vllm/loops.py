"""K agent loops against one vLLM server, for a window or for so many turns each. Compares nothing.

The window opens once every agent has been served its first turn, on an engine in its steady state: who is primed early
goes on. Turns started in the window are counted however late they end; none starts after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hostcache.bench.vllm.metrics import moved, moved_by_label
from hostcache.bench.vllm.rig import Rig
from hostcache.bench.vllm.servers import NAME, Server
from hostcache.client.openai import Failure
from hostcache.errors import ServerError
from hostcache.workload.agents import Agent, AgentShape, agents, stream


@dataclass(slots=True)
class _Window:
    opened_s: float | None = None
    closed: bool = False
    primed: int = 0


async def _agents(rig: Rig, server: Server, shape: AgentShape, count: int) -> list[Agent]:
    return agents(await rig.sources(server), shape, count=count, seed=rig.seed,
                  limit_tokens=server.shape.max_model_len)


async def windowed(rig: Rig, server: Server, shape: AgentShape, *, count: int, window_s: float) -> dict[str, Any]:
    """One arm. Every turn is kept, `phase` prime, before or window; a failed one has `error`."""
    clock, window = rig.clock, _Window()
    loops = await _agents(rig, server, shape, count)
    turns: list[dict[str, Any]] = []
    all_primed, busy = asyncio.Event(), set[int]()

    async def converse(number: int, agent: Agent) -> None:
        rng = stream(rig.seed, "backoff", number)
        while not window.closed:
            phase = "prime" if agent.turn == 0 else "before" if window.opened_s is None else "window"
            busy.add(number)
            turn = await _turn(rig, server, number, agent, shape, phase, rng)
            busy.discard(number)
            turns.append(turn)
            if phase == "prime":
                if turn["error"] is not None:
                    raise ServerError(f"agent {number} could not be primed: {turn['error']}; see {server.log}")
                window.primed += 1
                if window.primed == count:
                    all_primed.set()
            await clock.sleep_until(clock.now() + agent.gap_s())

    def news() -> str:
        served = sum(turn["phase"] == "window" for turn in turns)
        if window.opened_s is None:
            return f"{window.primed}/{count} agents primed"
        if window.closed:
            return f"window over, {len(busy)} turns still running, {served} served"
        return f"{served} turns served, {max(0.0, window.opened_s + window_s - clock.now()):.0f} s left"

    async def show() -> None:
        while True:
            rig.progress.show(news())
            await clock.sleep_until(clock.now() + 0.5)

    tasks = [asyncio.create_task(converse(number, agent)) for number, agent in enumerate(loops)]
    showing = asyncio.create_task(show())
    try:
        await _either(all_primed.wait(), tasks)
        opening = await server.scrape()
        window.opened_s = clock.now()
        await _either(clock.sleep_until(window.opened_s + window_s), tasks)
        window.closed = True
        for number, task in enumerate(tasks):
            if number not in busy:
                task.cancel()
        for end in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(end, Exception):
                raise end
        settled_s = clock.now()
        closing = await server.scrape()
    finally:
        for task in (*tasks, showing):
            task.cancel()
        await asyncio.gather(*tasks, showing, return_exceptions=True)
    return {**server.facts(), "window_s": window_s, "settled_after_s": settled_s - window.opened_s, "turns": turns,
            "by_source": moved_by_label(opening, closing, "vllm:prompt_tokens_cached_by_source_total", "source"),
            "recomputed": moved_by_label(opening, closing, "hostcache_recomputed_tokens_total", "reason"),
            "bound_tokens": moved(opening, closing, "hostcache_bound_tokens_total"),
            "opening": opening.flat("hostcache_", "vllm:kv_offload"),
            "closing": closing.flat("hostcache_", "vllm:kv_offload")}


async def fixed(rig: Rig, server: Server, shape: AgentShape, *, count: int, turns_each: int) -> dict[str, Any]:
    """`count` conversations of `turns_each` turns side by side, without windows: the wall time of all of it."""
    loops = await _agents(rig, server, shape, count)
    turns: list[dict[str, Any]] = []

    async def converse(number: int, agent: Agent) -> None:
        rng = stream(rig.seed, "backoff", number)
        for _ in range(turns_each):
            turn = await _turn(rig, server, number, agent, shape, "fixed", rng)
            if turn["error"] is not None:
                raise ServerError(f"a turn of the fixed work failed: {turn['error']}; see {server.log}")
            turns.append(turn)
            rig.progress.show(f"{len(turns)}/{count * turns_each} turns")
            await rig.clock.sleep_until(rig.clock.now() + agent.gap_s())

    started_s = rig.clock.now()
    async with asyncio.TaskGroup() as group:
        for number, agent in enumerate(loops):
            group.create_task(converse(number, agent))
    wall_s = rig.clock.now() - started_s
    return {**server.facts(), "wall_s": wall_s, "turns": turns, "turns_per_s": len(turns) / wall_s,
            "tokens_per_s": sum(turn["prompt_tokens"] + turn["completion_tokens"] for turn in turns) / wall_s}


async def _turn(rig: Rig, server: Server, number: int, agent: Agent, shape: AgentShape, phase: str,
                rng: Any) -> dict[str, Any]:
    prompt, index = agent.prompt, agent.turn
    outcome = await server.client.complete(prompt, model=NAME, max_tokens=shape.reply_tokens, rng=rng)
    turn = {"agent": number, "turn": index, "phase": phase, "duration_s": outcome.duration_s,
            "retries": len(outcome.retries)}
    if isinstance(outcome, Failure):
        return {**turn, "error": outcome.error, "ttft_s": None, "prompt_tokens": len(prompt), "completion_tokens": 0,
                "cached_tokens": None}
    agent.heard(outcome.token_ids)
    return {**turn, "error": None, "ttft_s": outcome.ttft_s, "prompt_tokens": outcome.usage.prompt_tokens,
            "completion_tokens": outcome.usage.completion_tokens, "cached_tokens": outcome.usage.hit_tokens}


async def _either(waited: Coroutine[Any, Any, object], tasks: Sequence[asyncio.Task[None]]) -> None:
    """Await `waited`; a loop that breaks meanwhile raises at once instead of leaving us waiting for it."""
    waiting = asyncio.create_task(waited)
    try:
        await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        waiting.cancel()


def window_figures(arm: dict[str, Any]) -> dict[str, Any]:
    """Counted turns (started in the window, served), their mean time, their hit share from usage."""
    counted = [turn for turn in arm["turns"] if turn["phase"] == "window" and turn["error"] is None]
    told = [turn for turn in counted if turn["cached_tokens"] is not None]
    prompts = sum(turn["prompt_tokens"] for turn in told)
    return {
        "arm": arm["arm"], "host_bytes": arm["host_bytes"], "turns": len(counted),
        "errors": sum(turn["error"] is not None for turn in arm["turns"]),
        "mean_s": fmean(turn["duration_s"] for turn in counted) if counted else None,
        "mean_ttft_s": fmean(turn["ttft_s"] for turn in counted) if counted else None,
        "hit_share": sum(turn["cached_tokens"] for turn in told) / prompts if prompts else None,
        "turns_per_s": len(counted) / arm["settled_after_s"],
    }
