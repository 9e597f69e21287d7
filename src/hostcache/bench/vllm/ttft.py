"""TTFT of prompts that come back after they were evicted, and what saving them costs the prompts that evict them.

One prompt at a time, pool of one and a half of them. First visits of all prompts in turn (each evicts the one before:
this is where the tier saves), then each again (off: computed a second time; else restored), and again at once (a hit
in vLLM's own cache). Where a visit's tokens came from is read from the request's own usage and from what /metrics
added meanwhile; a visit without that proof is counted and misses a bar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import numpy as np

from hostcache.bench.vllm.metrics import Scrape, moved, moved_by_label
from hostcache.bench.vllm.rig import Bar, Rig, lines, spread
from hostcache.bench.vllm.servers import BLOCK_TOKENS, Server
from hostcache.clock import Clock
from hostcache.errors import ConfigError

TAIL_TOKENS = 8
"""Beyond whole blocks, so that all of these can come from a cache."""
COLD_BAR, COLD_GOAL = 1 / 15, 1 / 18
LOCAL_BAR = 1.25
PEER_BAR = 1.1
HELD_SHARE = 0.9
"""A restored prompt comes from the host to at least this share; the rest may still have been on the device."""
SHOWN_TRIES = 40
PLAIN_COPY_BYTES = 256 << 20

VisitKind = Literal["cold", "again", "local", "identity cold", "identity again"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftPlan:
    """`identity`: how many prompts, from `shortest_tokens` up to `prompt_tokens`, to compare token by token. Without
    any one of them the others must still fill the pool of one and a half prompts: four of even steps do."""

    prompt_tokens: int
    prompts: int
    identity: int
    shortest_tokens: int
    reply_tokens: int = 16


def whole(tokens: int) -> int:
    """The nearest length of whole blocks and a tail, not longer."""
    return max(1, (tokens - TAIL_TOKENS) // BLOCK_TOKENS) * BLOCK_TOKENS + TAIL_TOKENS


def identity_lengths(plan: TtftPlan) -> list[int]:
    low, high, count = plan.shortest_tokens, plan.prompt_tokens, plan.identity
    return [whole(low + (high - low) * at // max(1, count - 1)) for at in range(count)]


async def run(rig: Rig, plan: TtftPlan) -> dict[str, Any]:
    length = whole(plan.prompt_tokens)
    shape = rig.shape(pool_blocks=-(-3 * length // (2 * BLOCK_TOKENS)), longest_tokens=length + plan.reply_tokens)
    total = plan.prompts * length + sum(identity_lengths(plan))
    host_bytes = 2 * total * rig.model.token_bytes
    measured = {}
    for arm in rig.arms:
        stage = f"ttft, {arm.name}"
        async with rig.server(stage, shape, arm, host_bytes=host_bytes, name=f"ttft-{arm.name}") as server:
            measured[arm.name] = await _arm(rig, plan, server)
    result = {"version": 1, "prompt_tokens": length, "prompts": plan.prompts, "pool_tokens": shape.pool_tokens,
              "host_bytes": host_bytes, "token_bytes": rig.model.token_bytes, "kinds": {
                  arm.name: arm.kind for arm in rig.arms}, "arms": measured,
              "plain_copy_bytes_s": plain_copy_bytes_s(rig.clock, rig.model.token_bytes)}
    return {**result, "figures": figures(result)}


async def _arm(rig: Rig, plan: TtftPlan, server: Server) -> dict[str, Any]:
    sources = await rig.sources(server)
    length = whole(plan.prompt_tokens)
    timed = [sources[at % len(sources)][:length] for at in range(plan.prompts)]
    compared = [sources[(plan.prompts + at) % len(sources)][:tokens]
                for at, tokens in enumerate(identity_lengths(plan))]
    if short := [len(prompt) for prompt in timed if len(prompt) < length]:
        raise ConfigError(f"a file of the corpus has {short[0]} tokens, a prompt takes {length}; use a smaller "
                          "--prompt-tokens")
    visits: list[dict[str, Any]] = []

    async def visit(kind: VisitKind, index: int, prompt: Sequence[int]) -> None:
        rig.progress.show(f"{kind} {index + 1}, {len(visits)} visits done")
        visits.append({"kind": kind, "prompt": index, **await _visit(rig, server, prompt, plan.reply_tokens)})

    opening = await server.scrape()
    # These come first in every arm: whoever takes host memory as it fills has taken it before anything is timed.
    for index, prompt in enumerate(compared):
        await visit("identity cold", index, prompt)
    if server.arm.kind == "on":
        for index, prompt in enumerate(compared):
            await visit("identity again", index, prompt)
    started_s = rig.clock.now()
    for index, prompt in enumerate(timed):
        await visit("cold", index, prompt)
    first_visits_s = rig.clock.now() - started_s
    for index, prompt in enumerate(timed):
        await visit("again", index, prompt)
        await visit("local", index, prompt)
    closing = await server.scrape()
    return {**server.facts(), "visits": visits, "first_visits_s": first_visits_s,
            "opening": opening.flat("hostcache_", "vllm:kv_offload"),
            "closing": closing.flat("hostcache_", "vllm:kv_offload")}


async def _visit(rig: Rig, server: Server, prompt: Sequence[int], reply_tokens: int) -> dict[str, Any]:
    before = await server.scrape()
    reply = await rig.ask(server, prompt, tokens=reply_tokens, name="ttft")
    after = await _settled(rig, server, before, len(prompt))
    return {
        "prompt_tokens": reply.usage.prompt_tokens, "ttft_s": reply.ttft_s, "duration_s": reply.duration_s,
        "cached_tokens": reply.usage.hit_tokens, "token_ids": list(reply.token_ids),
        "by_source": moved_by_label(before, after, "vllm:prompt_tokens_cached_by_source_total", "source"),
        "hostcache_by_source": moved_by_label(before, after, "hostcache_cached_tokens_total", "source"),
        "recomputed": moved_by_label(before, after, "hostcache_recomputed_tokens_total", "reason"),
        "restored_bytes": _sum(moved(before, after, "hostcache_restore_bytes_total"),
                               moved(before, after, "vllm:kv_offload_load_bytes_total")),
        "restore_s": _sum(moved(before, after, "hostcache_restore_seconds_total"),
                          moved(before, after, "vllm:kv_offload_load_time_total")),
    }


def _sum(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


async def _settled(rig: Rig, server: Server, before: Scrape, prompt_tokens: int) -> Scrape:
    """vLLM shows a step's numbers after it; until this prompt's are there, look again."""
    for _ in range(SHOWN_TRIES):
        after = await server.scrape()
        shown = moved(before, after, "vllm:prompt_tokens_total") or 0
        ours = moved(before, after, "hostcache_prompt_tokens_total")
        if shown >= prompt_tokens and (ours is None or ours >= prompt_tokens):
            break
        await rig.clock.sleep_until(rig.clock.now() + 0.05)
    return after


def plain_copy_bytes_s(clock: Clock, token_bytes: int) -> float:
    """Copying host memory in pieces as large as a block, one thread, pages touched before: the median of five."""
    piece = BLOCK_TOKENS * token_bytes
    count = max(1, PLAIN_COPY_BYTES // piece)
    source, target = np.ones((count, piece), np.uint8), np.zeros((count, piece), np.uint8)
    rates = []
    for _ in range(5):
        started_s = clock.now()
        for at in range(count):
            target[at] = source[at]
        rates.append(count * piece / max(1e-9, clock.now() - started_s))
    return median(rates)


# --- what follows from the visits -----------------------------------------------------------------------------------


def doubt(kind: str, visit: Mapping[str, Any]) -> str | None:
    """Why this visit does not prove what it is called; None where it does. `kind`: of the arm."""
    blocks = (visit["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    cached = visit["cached_tokens"]
    outside = {name: tokens for name, tokens in visit["by_source"].items() if name != "device"}
    if cached is None:
        return "the answer does not say how much of it was cached"
    if "cold" in visit["kind"] or (kind == "off" and visit["kind"] == "again"):
        return None if cached == 0 else f"{cached} tokens of a computed prompt came from a cache"
    least = blocks if kind != "other" else HELD_SHARE * blocks  # others may keep pieces larger than a block
    if not least <= cached <= blocks:
        return f"{cached} tokens came from a cache, not {blocks}"
    if visit["kind"] == "local":
        return f"a local hit took {outside} from elsewhere" if outside else None
    host = visit["hostcache_by_source"].get("host", 0) if kind == "on" else sum(outside.values())
    return None if host >= HELD_SHARE * blocks else f"{host:g} of {blocks} tokens came from the host"


def figures(result: Mapping[str, Any]) -> dict[str, Any]:
    arms: dict[str, Any] = {}
    for name, arm in result["arms"].items():
        kind, visits = result["kinds"][name], arm["visits"]
        doubts = [f"{each['kind']} {each['prompt'] + 1}: {reason}" for each in visits
                  if (reason := doubt(kind, each)) is not None]
        again = [each for each in visits if each["kind"] == "again"]
        arms[name] = {
            **{what: spread([each["ttft_s"] for each in visits if each["kind"] == what])
               for what in ("cold", "again", "local")},
            "first_visits_s": arm["first_visits_s"], "doubts": doubts, "visits": len(visits),
            "restored_bytes": _sum(*(each["restored_bytes"] for each in again)),
            "restore_s": _sum(*(each["restore_s"] for each in again)),
        }
    figured: dict[str, Any] = {"arms": arms}
    on, off = arms.get("on"), arms.get("off")
    if on is not None:
        # The faster of both arms' first visits of the same prompt, so that what saving costs flatters nobody.
        colds = [min(pair) for pair in zip(on["cold"]["values"], (off or on)["cold"]["values"], strict=True)]
        figured["restored_over_cold"] = spread(
            [again / cold for again, cold in zip(on["again"]["values"], colds, strict=True)])
        moved_bytes, told_s = on["restored_bytes"], on["restore_s"]
        rate = moved_bytes / told_s if moved_bytes and told_s else result["plain_copy_bytes_s"]
        copy_s = (moved_bytes or 0.0) / result["prompts"] / rate
        figured["copy_rate_bytes_s"], figured["copy_rate_from"] = rate, "counters" if told_s else "a plain copy"
        figured["copy_s"] = copy_s
        figured["restored_over_local"] = on["again"]["median"] / (on["local"]["median"] + copy_s)
        figured["restored_bar_s"] = LOCAL_BAR * on["local"]["median"] + copy_s
        figured["peers"] = {
            name: {"restored": on["again"]["median"] / arm["again"]["median"],
                   "pairs": [a / b for a, b in zip(on["again"]["values"], arm["again"]["values"], strict=True)],
                   "cold": on["cold"]["median"] / arm["cold"]["median"],
                   "first_visits": on["first_visits_s"] / arm["first_visits_s"]}
            for name, arm in arms.items() if name not in ("on", "off")}
    if off is not None:
        figured["store_cost"] = {name: {"cold": arm["cold"]["median"] / off["cold"]["median"],
                                        "first_visits": arm["first_visits_s"] / off["first_visits_s"]}
                                 for name, arm in arms.items() if name != "off"}
    figured["identity"] = identity(result["arms"])
    return figured


def identity(arms: Mapping[str, Any]) -> dict[str, int]:
    """Prompts whose restored answer has the tokens of the cold one of the same server, and of the off arm's."""
    def answers(arm: str, kind: str) -> dict[int, list[int]]:
        visits = arms[arm]["visits"] if arm in arms else ()
        return {each["prompt"]: each["token_ids"] for each in visits if each["kind"] == kind}

    restored, cold = answers("on", "identity again"), answers("on", "identity cold")
    off = answers("off", "identity cold")
    return {"prompts": len(restored), "same_as_cold": sum(cold.get(at) == tokens for at, tokens in restored.items()),
            "compared_with_off": sum(at in off for at in restored),
            "same_as_off": sum(off[at] == tokens for at, tokens in restored.items() if at in off)}


def bars(result: Mapping[str, Any]) -> list[Bar]:
    figured = result["figures"]
    if "on" not in figured["arms"]:
        return []
    on, over_cold = figured["arms"]["on"], figured["restored_over_cold"]["median"]
    doubts = sum(len(arm["doubts"]) for arm in figured["arms"].values())
    same = figured["identity"]
    judged: list[Bar] = [
        ("ttft: restored ÷ cold", f"at most 1/15 = {COLD_BAR:.4f}; goal 1/18 = {COLD_GOAL:.4f}", over_cold,
         over_cold <= COLD_BAR),
        ("ttft: restored, seconds", f"at most {LOCAL_BAR} × local hit + copy time = {figured['restored_bar_s']:.3f}",
         on["again"]["median"], on["again"]["median"] <= figured["restored_bar_s"]),
        ("ttft: visits whose source is not proven", "0", float(doubts), doubts == 0),
        ("ttft: restored answers that differ from the cold ones", f"0 of {same['prompts']}",
         float(same["prompts"] - same["same_as_cold"] + same["compared_with_off"] - same["same_as_off"]),
         same["same_as_cold"] == same["prompts"] and same["same_as_off"] == same["compared_with_off"]),
    ]
    for name, peer in figured["peers"].items():
        judged += [
            (f"ttft: restored, ours ÷ {name}", f"at most {PEER_BAR}", peer["restored"], peer["restored"] <= PEER_BAR),
            (f"ttft: first visits (saving), ours ÷ {name}", f"at most {PEER_BAR}", peer["cold"],
             peer["cold"] <= PEER_BAR),
        ]
    return judged


def table(result: Mapping[str, Any]) -> str:
    figured = result["figures"]
    rows = [["arm", "cold s", "restored s", "local hit s", "cold ÷ restored", "first visits s", "÷ off"]]
    for name, arm in figured["arms"].items():
        cost = figured.get("store_cost", {}).get(name)
        rows.append([name, *(_range(arm[what]) for what in ("cold", "again", "local")),
                     f"{arm['cold']['median'] / arm['again']['median']:.1f}", f"{arm['first_visits_s']:.1f}",
                     f"{cost['first_visits']:.2f}" if cost else ""])
    said = [f"TTFT, {result['prompts']} prompts of {result['prompt_tokens']} tokens, pool of {result['pool_tokens']}: "
            "median (least to most). Off computes what others restore.", lines(rows)]
    if "copy_s" in figured:
        said.append(f"restored ÷ (local hit + copy time) = {figured['restored_over_local']:.2f}; copy time "
                    f"{figured['copy_s']:.3f} s at {figured['copy_rate_bytes_s'] / 1e9:.1f} GB/s "
                    f"(from {figured['copy_rate_from']})")
        said += [f"restored, ours ÷ {name}: {peer['restored']:.2f} "
                 f"(pairs {', '.join(f'{pair:.2f}' for pair in peer['pairs'])})"
                 for name, peer in figured["peers"].items()]
    same = figured["identity"]
    said.append(f"restored answers with the tokens of the cold ones: {same['same_as_cold']} of {same['prompts']}"
                f" (of the off arm's: {same['same_as_off']} of {same['compared_with_off']})")
    said += [f"not proven, {name}: {reason}" for name, arm in figured["arms"].items() for reason in arm["doubts"]]
    return "\n".join(said)


def _range(value: Mapping[str, float]) -> str:
    return f"{value['median']:.3f} ({value['min']:.3f} to {value['max']:.3f})"
