"""Agents at twice the pool: the turns that a tier is worth, and that one of any size never costs any.

`run` compares off and on in the order off, on, on, off. `run_grid` gives the tier a quarter, half, one and two times
the working set, off before and after: what the two off windows differ by is what this machine cannot tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hostcache.bench.vllm.loops import window_figures, windowed
from hostcache.bench.vllm.rig import Bar, Rig, blocks_for, lines
from hostcache.bench.vllm.servers import OFF, ON, Shape
from hostcache.errors import ConfigError
from hostcache.sizes import format_size
from hostcache.workload.agents import AgentShape

TURNS_BAR = 3.0
LEAST_NOISE = 0.05
TURNS_AHEAD = 4
"""The working set is taken with this many turns added to each prefix: about the middle of a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    agents: int
    shape: AgentShape
    window_s: float
    order: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPlan:
    """`shares`: of the working set. `arms`: which connectors get them."""

    agents: int
    shape: AgentShape
    window_s: float
    shares: tuple[float, ...]
    arms: tuple[str, ...]


def working_tokens(agents: int, shape: AgentShape) -> int:
    return agents * (shape.prefix_tokens + TURNS_AHEAD * (shape.tool_tokens + shape.reply_tokens))


def _server_shape(rig: Rig, agents: int, shape: AgentShape) -> Shape:
    pool = blocks_for(working_tokens(agents, shape) // 2)
    least = shape.prefix_tokens + 2 * (shape.tool_tokens + shape.reply_tokens)
    return rig.shape(pool_blocks=pool, max_num_seqs=max(16, agents), longest_tokens=least)


async def run(rig: Rig, plan: FleetPlan) -> dict[str, Any]:
    shape = _server_shape(rig, plan.agents, plan.shape)
    working_bytes = working_tokens(plan.agents, plan.shape) * rig.model.token_bytes
    arms = {arm.name: arm for arm in rig.arms}
    windows = []
    for index, name in enumerate(plan.order):
        stage = f"fleet {index + 1}/{len(plan.order)}, {name}"
        async with rig.server(stage, shape, arms[name], host_bytes=2 * working_bytes,
                              name=f"fleet-{index}-{name}") as server:
            windows.append(await windowed(rig, server, plan.shape, count=plan.agents, window_s=plan.window_s))
    result = {"version": 1, "agents": plan.agents, "prefix_tokens": plan.shape.prefix_tokens,
              "window_s": plan.window_s, "pool_tokens": shape.pool_tokens, "working_bytes": working_bytes,
              "windows": windows}
    return {**result, "figures": figures(result)}


def figures(result: Mapping[str, Any]) -> dict[str, Any]:
    windows = [window_figures(arm) for arm in result["windows"]]
    off, on = ([each for each in windows if each["arm"] == arm] for arm in ("off", "on"))
    sums = {"off": sum(each["turns"] for each in off), "on": sum(each["turns"] for each in on)}
    return {
        "windows": windows, "errors": sum(each["errors"] for each in windows), "turns": sums,
        "turns_ratio": _per(sums["on"], len(on), sums["off"], len(off)),
        "pairs": [_per(b["turns"], 1, a["turns"], 1) for a, b in zip(off, on, strict=False)],
    }


def _per(on: int, on_windows: int, off: int, off_windows: int) -> float | None:
    return on / on_windows / (off / off_windows) if on_windows and off else None


def bars(result: Mapping[str, Any]) -> list[Bar]:
    figured = result["figures"]
    ratio = figured["turns_ratio"] or 0.0
    return [
        ("fleet: turns, on ÷ off", f"at least {TURNS_BAR:g}", ratio, ratio >= TURNS_BAR),
        ("fleet: turns that failed", "0", float(figured["errors"]), figured["errors"] == 0),
    ]


def table(result: Mapping[str, Any]) -> str:
    figured = result["figures"]
    rows = [_HEAD, *(_row(each["arm"], each) for each in figured["windows"])]
    pairs = ", ".join("—" if pair is None else f"{pair:.2f}" for pair in figured["pairs"])
    ratio = "—" if figured["turns_ratio"] is None else f"{figured['turns_ratio']:.2f}"
    return "\n".join([_about(result), lines(rows),
                      f"turns, on ÷ off: {ratio} (pairs {pairs}); {figured['errors']} errors"])


_HEAD = ["arm", "turns", "mean turn s", "mean TTFT s", "hit share", "errors"]


def _row(name: str, window: Mapping[str, Any]) -> list[str]:
    return [name, str(window["turns"]), _number(window["mean_s"], ".2f"), _number(window["mean_ttft_s"], ".2f"),
            _number(window["hit_share"], ".1%"), str(window["errors"])]


def _number(value: float | None, form: str) -> str:
    return "—" if value is None else format(value, form)


def _about(result: Mapping[str, Any]) -> str:
    return (f"{result['agents']} agents of {result['prefix_tokens']} tokens and more, windows of "
            f"{result['window_s']:g} s, pool of {result['pool_tokens']} tokens, working set "
            f"{format_size(result['working_bytes'])}")


# --- no harm at any size --------------------------------------------------------------------------------------------


async def run_grid(rig: Rig, plan: GridPlan) -> dict[str, Any]:
    known = {arm.name: arm for arm in rig.arms}
    if unknown := [name for name in plan.arms if name not in known or name == "off"]:
        raise ConfigError(f"--no-harm-arms has {unknown[0]!r}; give some of {', '.join(set(known) - {'off'})}")
    shape = _server_shape(rig, plan.agents, plan.shape)
    working_bytes = working_tokens(plan.agents, plan.shape) * rig.model.token_bytes
    cells = [(OFF, 0.0), *((known[name], share) for name in plan.arms for share in plan.shares), (OFF, 0.0)]
    windows = []
    for index, (arm, share) in enumerate(cells):
        named = f"{arm.name} at {share:g}" if share else arm.name
        stage = f"no-harm {index + 1}/{len(cells)}, {named}"
        async with rig.server(stage, shape, arm, host_bytes=int(share * working_bytes),
                              name=f"no-harm-{index}-{arm.name}") as server:
            window = await windowed(rig, server, plan.shape, count=plan.agents, window_s=plan.window_s)
            windows.append({**window, "share": share})
    result = {"version": 1, "agents": plan.agents, "prefix_tokens": plan.shape.prefix_tokens,
              "window_s": plan.window_s, "pool_tokens": shape.pool_tokens, "working_bytes": working_bytes,
              "windows": windows}
    return {**result, "figures": grid_figures(result)}


def grid_figures(result: Mapping[str, Any]) -> dict[str, Any]:
    windows = [{**window_figures(arm), "share": arm["share"]} for arm in result["windows"]]
    off = [each["turns"] for each in windows if each["arm"] == "off"]
    mean = sum(off) / len(off)
    noise = max(LEAST_NOISE, (max(off) - min(off)) / mean if mean else 0.0)
    return {"windows": windows, "off_turns": off, "noise": noise,
            "cells": [{"arm": each["arm"], "share": each["share"], "turns": each["turns"],
                       "over_off": each["turns"] / mean if mean else None}
                      for each in windows if each["arm"] != "off"]}


def grid_bars(result: Mapping[str, Any]) -> list[Bar]:
    """Ours are judged; others' cells are shown beside them."""
    figured = result["figures"]
    least = 1 - figured["noise"]
    errors = sum(each["errors"] for each in figured["windows"])
    return [*((f"no-harm: turns, on at {cell['share']:g} of the working set ÷ off", f"at least {least:.3f}",
               cell["over_off"] or 0.0, (cell["over_off"] or 0.0) >= least)
              for cell in figured["cells"] if cell["arm"] == ON.name),
            ("no-harm: turns that failed", "0", float(errors), errors == 0)]


def grid_table(result: Mapping[str, Any]) -> str:
    figured = result["figures"]
    over = iter(figured["cells"])
    rows = [[*_HEAD[:1], "host ÷ working set", *_HEAD[1:], "÷ off"]]
    for each in figured["windows"]:
        first, *rest = _row(each["arm"], each)
        rows.append([first, f"{each['share']:g}", *rest,
                     "" if each["arm"] == "off" else _number(next(over)["over_off"], ".2f")])
    return "\n".join([_about(result), lines(rows),
                      f"noise: {figured['noise']:.1%} (the two off windows, at least {LEAST_NOISE:.0%})"])
