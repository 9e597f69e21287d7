"""Everything fits: the tier must move nothing and cost nothing; and the connector's own time per scheduler step.

Fixed work on servers whose pool holds all of it, in the order off, on, off, on, off, off: the off runs among
themselves say what this machine cannot tell apart. Then one server with many requests running at once, whose own
gauges tell the connector's time per step and the time between steps. A gauge that is not shown is reported as such.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hostcache.bench.vllm.loops import fixed
from hostcache.bench.vllm.metrics import Scrape
from hostcache.bench.vllm.rig import Bar, Rig, blocks_for, lines
from hostcache.bench.vllm.servers import ON, Server
from hostcache.workload.agents import AgentShape

STEP_BAR_US = 200.0
SHARE_BAR = 0.01
SAMPLE_S = 1.0
SPARE_BLOCKS = 256
"""Room is what no step soon will need: the tier saves ahead of the blocks that the next few chunks could hand out, 32
each at the servers' 1,024 tokens a step, so that many must be unused besides."""
STEP, INTERVAL, PEAK = "hostcache_step_seconds", "hostcache_step_interval_seconds", "hostcache_running_requests_peak"
QUANTILES = ("0.5", "0.99")
STILL = ("hostcache_store_bytes_total", "hostcache_restore_bytes_total", "hostcache_pins_taken_total")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalmPlan:
    """`running`: requests at once for the step times, `step_prompt_tokens` + `step_reply_tokens` each."""

    conversations: int
    turns: int
    shape: AgentShape
    order: tuple[str, ...]
    running: int
    step_prompt_tokens: int
    step_reply_tokens: int


async def run(rig: Rig, plan: CalmPlan) -> dict[str, Any]:
    turn = plan.shape.tool_tokens + plan.shape.reply_tokens
    longest = plan.shape.prefix_tokens + (plan.turns + 1) * turn
    shape = rig.shape(pool_blocks=2 * plan.conversations * blocks_for(longest) + SPARE_BLOCKS, longest_tokens=longest)
    host_bytes = shape.pool_tokens * rig.model.token_bytes
    arms = {arm.name: arm for arm in rig.arms}
    runs = []
    for index, name in enumerate(plan.order):
        stage = f"calm {index + 1}/{len(plan.order)}, {name}"
        async with rig.server(stage, shape, arms[name], host_bytes=host_bytes, name=f"calm-{index}-{name}") as server:
            done = await fixed(rig, server, plan.shape, count=plan.conversations, turns_each=plan.turns)
            runs.append({**done, "still": still(await server.scrape())})
    result = {"version": 1, "conversations": plan.conversations, "turns": plan.turns, "pool_tokens": shape.pool_tokens,
              "runs": runs, "step": await _step(rig, plan)}
    return {**result, "figures": figures(result)}


def still(scrape: Scrape) -> dict[str, float | None]:
    """What must be 0 since the server's start."""
    return {name: scrape.value(name) for name in STILL}


async def _step(rig: Rig, plan: CalmPlan) -> dict[str, Any]:
    each = blocks_for(plan.step_prompt_tokens + plan.step_reply_tokens) + 1
    shape = rig.shape(pool_blocks=plan.running * each + 8, max_num_seqs=plan.running)
    async with rig.server(f"calm, {plan.running} requests at once, on", shape, ON,
                          host_bytes=shape.pool_tokens * rig.model.token_bytes, name="calm-step-on") as server:
        stock = [token for source in await rig.sources(server) for token in source]
        size = plan.step_prompt_tokens
        prompts = [stock[at * size : (at + 1) * size] for at in range(plan.running)]
        ended = asyncio.Event()
        watching = asyncio.create_task(_most_running(rig, server, ended))
        try:
            replies = await asyncio.gather(*(rig.ask(server, prompt, tokens=plan.step_reply_tokens, name=f"step/{at}")
                                             for at, prompt in enumerate(prompts)))
        finally:
            ended.set()
            most = await watching
        await rig.clock.sleep_until(rig.clock.now() + 1.0)  # the last step's numbers are shown after it
        return {**server.facts(), "running": plan.running, "answers": len(replies), "most_running_seen": most,
                **step_gauges(await server.scrape())}


async def _most_running(rig: Rig, server: Server, ended: asyncio.Event) -> float:
    most = 0.0
    while not ended.is_set():
        running = (await server.scrape()).value("vllm:num_requests_running") or 0.0
        most = max(most, running)
        rig.progress.show(f"{running:.0f} running")
        await rig.clock.sleep_until(rig.clock.now() + SAMPLE_S)
    return most


def step_gauges(scrape: Scrape) -> dict[str, Any]:
    """0 seconds is what the plugin shows of no step at all: not measured either."""
    return {"own_s": {q: scrape.value(STEP, quantile=q) or None for q in QUANTILES},
            "interval_s": {q: scrape.value(INTERVAL, quantile=q) or None for q in QUANTILES},
            "peak_running": scrape.value(PEAK)}


# --- what follows ---------------------------------------------------------------------------------------------------


def figures(result: Mapping[str, Any]) -> dict[str, Any]:
    rates = {arm: [each["turns_per_s"] for each in result["runs"] if each["arm"] == arm] for arm in ("off", "on")}
    own, interval = result["step"]["own_s"]["0.5"], result["step"]["interval_s"]["0.5"]
    return {
        "rates": rates, "noise": aa_noise(rates["off"]),
        "on_over_off": median(rates["on"]) / median(rates["off"]) if rates["on"] and rates["off"] else None,
        "moved": [each["still"] for each in result["runs"] if each["arm"] == "on"],
        "step_share": own / interval if own is not None and interval else None,
    }


def aa_noise(rates: Sequence[float]) -> float:
    """The most that one off run was slower than another, as a share."""
    return 1 - min(rates) / max(rates) if rates else 0.0


def bars(result: Mapping[str, Any]) -> list[Bar]:
    figured, step = result["figures"], result["step"]
    least = 1 - figured["noise"]
    ratio = figured["on_over_off"] or 0.0
    judged: list[Bar] = [
        ("calm: throughput, on ÷ off", f"at least {least:.3f}, off's own noise", ratio, ratio >= least)]
    for name in STILL:
        told = [each[name] for each in figured["moved"]]
        known = [value for value in told if value is not None]
        judged.append((f"calm: {name}", "0, shown by every on run", max(known, default=-1.0),
                       bool(told) and len(known) == len(told) and not any(known)))
    seen = max(step["most_running_seen"], step["peak_running"] or 0.0)
    judged.append(("calm: requests running at once", f"{step['running']}", seen, seen >= step["running"]))
    own_us = _micro(step["own_s"]["0.5"])
    judged.append((f"calm: connector's time per step, median µs{'' if own_us is not None else ' (not shown)'}",
                   f"at most {STEP_BAR_US:g}", -1.0 if own_us is None else own_us,
                   own_us is not None and own_us <= STEP_BAR_US))
    share = figured["step_share"]
    judged.append((f"calm: its share of the step{'' if share is not None else ' (not shown)'}", f"under {SHARE_BAR:g}",
                   -1.0 if share is None else share, share is not None and share < SHARE_BAR))
    return judged


def table(result: Mapping[str, Any]) -> str:
    figured, step = result["figures"], result["step"]
    rows = [["arm", "turns/s", "tokens/s", "seconds", "stored B", "restored B", "pins"]]
    rows += [[each["arm"], f"{each['turns_per_s']:.3f}", f"{each['tokens_per_s']:.0f}", f"{each['wall_s']:.1f}",
              *(_shown(each["still"][name]) if each["arm"] == "on" else "" for name in STILL)]
             for each in result["runs"]]
    ratio = figured["on_over_off"]
    said = [f"No pressure: {result['conversations']} conversations of {result['turns']} turns, pool of "
            f"{result['pool_tokens']} tokens", lines(rows),
            f"throughput, on ÷ off: {'—' if ratio is None else f'{ratio:.3f}'}; off against off differs by up to "
            f"{figured['noise']:.1%}"]
    own, interval, share = step["own_s"], step["interval_s"], figured["step_share"]
    said.append(f"connector's own time per scheduler step, {step['running']} requests (at once: "
                f"{_shown(step['peak_running'])} by its own gauge, {step['most_running_seen']:g} seen): "
                f"median {_us(own['0.5'])}, p99 {_us(own['0.99'])}; between steps: median {_us(interval['0.5'])}, "
                f"p99 {_us(interval['0.99'])}; share {'not shown' if share is None else f'{share:.3%}'}")
    return "\n".join(said)


def _micro(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def _us(seconds: float | None) -> str:
    return "not shown" if seconds is None else f"{seconds * 1e6:,.0f} µs"


def _shown(value: float | None) -> str:
    return "not shown" if value is None else f"{value:g}"
