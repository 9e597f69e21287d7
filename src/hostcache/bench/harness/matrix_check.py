"""What can be known of a matrix before anything is started: faults, and how long it will take. Starts no server; asks
one that runs already who it is.

The traps that have cost whole nights: a start command without its execute bit, an arm that was not switched, a session
that no pool holds, a trace that is not there, a goal at a point that no ramp reaches.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hostcache.bench.harness.agents import AgentsParameters
from hostcache.bench.harness.cell import CONTROL_REPLY_TOKENS, CONTROL_TOKENS, SETTLE_STEP_S, corpus_text
from hostcache.bench.harness.equivalence import EquivalenceParameters
from hostcache.bench.harness.ladder import LadderParameters
from hostcache.bench.harness.matrix_file import Matrix, Run, Speed
from hostcache.bench.harness.replay import ProfileParameters, ReplayParameters
from hostcache.bench.harness.rotate import RotateParameters
from hostcache.bench.harness.target import NotConfirmed, Target, confirm
from hostcache.client.adapters import adapter_for
from hostcache.client.openai import OpenAIClient
from hostcache.clock import Clock
from hostcache.engine.models import MODELS, default_cache_dir
from hostcache.errors import ConfigError, HostCacheError
from hostcache.settings import settle
from hostcache.sizes import format_size
from hostcache.vllm_plugin.launch import compose

LEAST_FREE_BYTES = 256 << 20
RESTORE_SHARE = 0.1
"""What a restored turn takes of a computed one, its new tokens among it (estimates only)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`error`: the run would be for nothing; `warning`: somebody should know."""

    level: Literal["error", "warning"]
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.text}"


def check(matrix: Matrix, folder: Path, *, clock: Clock) -> list[Finding]:
    """Each finding once, in the order of the file. `folder`: where the matrix is to be run."""
    found = [*_folder(folder)]
    for target in {run.arm: run.target for run in matrix.runs if run.target.url is not None}.values():
        found += asyncio.run(_running_server(target, clock))
    for run in matrix.runs:
        found += [*_server(run), *_said(run), *_sizes(run), *_judged(run)]
    return list(dict.fromkeys(found))


def estimate_s(run: Run, speed: Speed) -> float | None:
    """Seconds of one run, its server's start included; None where nobody can say (a trace at its own pace, a profile
    that is not there)."""
    try:
        body = _body_s(run, speed)
    except ConfigError:
        body = None
    if body is None:
        return None
    controls_s = 2 * (CONTROL_TOKENS / speed.prefill_tok_s + CONTROL_REPLY_TOKENS / speed.decode_tok_s)
    return (speed.start_s if run.target.start else 0.0) + controls_s + 10 * SETTLE_STEP_S + body


def span_text(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


# -- checks ----------------------------------------------------------------------------------------------------------


def _folder(folder: Path) -> Iterator[Finding]:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        yield Finding(level="error", where=str(folder), text=f"{there} is no folder; give another --out")
    elif not os.access(there, os.W_OK | os.X_OK):
        yield Finding(level="error", where=str(folder), text=f"{there} cannot be written to; give another --out")
    elif (free := shutil.disk_usage(there).free) < LEAST_FREE_BYTES:
        yield Finding(level="warning", where=str(folder), text=f"{format_size(free)} are free there")


async def _running_server(target: Target, clock: Clock) -> list[Finding]:
    """Does it answer, and is it the arm?"""
    where = f"arm {target.arm}"
    assert target.url is not None
    try:
        async with OpenAIClient(target.url, clock=clock, api_key=target.api_key) as client:
            if not await client.healthy():
                return [Finding(level="warning", where=where, text=f"{target.url} does not answer now")]
            confirm(target, await (await adapter_for(client)).describe())
    except NotConfirmed as error:
        return [Finding(level="error", where=where, text=str(error))]
    except HostCacheError as error:
        return [Finding(level="warning", where=where, text=f"{target.url} does not say who it is: {error}")]
    return []


def _server(run: Run) -> Iterator[Finding]:
    where, target = f"arm {run.arm}", run.target
    if target.tier is None:
        yield Finding(level="warning", where=where, text="no tier is asked for, so nothing confirms it as this arm; "
                                                         "its cells stand alone, in no comparison")
    if not target.start:
        return
    program = target.start[0]
    if shutil.which(program) is None:
        lost = Path(program).is_file()
        yield Finding(level="error", where=where, text=f"{program} is there, but cannot be executed; chmod +x it"
                      if lost else f"there is no program {program}; give one that exists")
    if target.start[1:5] == ("-m", "hostcache", "vllm", "serve"):
        yield from _vllm(where, target.start[5], target.start[target.start.index("--") + 1 :])
    if run.settings is None:
        return
    try:
        settle(run.settings)
    except ConfigError as error:
        yield Finding(level="error", where=f"{where} in {run.cell}", text=str(error))
    model = str(run.settings["model"])
    if model in MODELS:
        if not (default_cache_dir() / MODELS[model].file_name).is_file() and settle().settings.model_dir is None:
            yield Finding(level="warning", where=where, text=f"model {model} is not here yet; the first start fetches "
                                                             f"{format_size(MODELS[model].size_bytes)}")
    elif not model.startswith("random:") and not Path(model).expanduser().exists():
        yield Finding(level="error", where=where, text=f"model {model} does not exist; give a directory, a .gguf file "
                                                       f"or one of {', '.join(MODELS)}")


def _vllm(where: str, model: str, flags: Sequence[str]) -> Iterator[Finding]:
    """What `hostcache vllm serve` would refuse, and a model that would be looked for on the Hub by mistake."""
    try:
        compose(model, settle(), flags, front_door=False, environ={})
    except HostCacheError as error:
        yield Finding(level="error", where=where, text=str(error))
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", model) and not Path(model).expanduser().is_dir():
        yield Finding(level="error", where=where, text=f"model {model} is no directory here; `hostcache model export "
                                                       f"smollm2 --hf {model}` makes one; or give another directory or "
                                                       "a name on the Hub (OWNER/NAME)")


def _said(run: Run) -> Iterator[Finding]:
    """Texts, profiles and traces."""
    try:
        run.workload.inputs()
        if run.spec.corpus not in ("code", "prose", "both"):
            corpus_text(run.spec.corpus, 1)
        elif isinstance(run.workload, ProfileParameters):
            run.workload.settled()
    except (HostCacheError, OSError) as error:
        yield Finding(level="error", where=f"cell {run.cell}", text=str(error))


def _sizes(run: Run) -> Iterator[Finding]:
    """Against the pool, where the file says how large it is."""
    pool, where = run.pool_tokens, f"cell {run.cell}"
    if pool is None:
        return
    longest, active = _longest_and_active(run)
    if longest > pool:
        yield Finding(level="error", where=where, text=f"{longest} tokens at once do not fit the pool of {pool} tokens "
                                                       f"of arm {run.arm}; use smaller ones")
    elif active > pool:
        yield Finding(level="warning", where=where, text=f"its clients hold {active} tokens at once, the pool of arm "
                                                         f"{run.arm} {pool}: some will wait for admission")


def _longest_and_active(run: Run) -> tuple[int, int]:
    """Tokens of the longest first prompt with its reply, and of all that may be under way at once."""
    shape = run.workload
    if isinstance(shape, RotateParameters):
        one = shape.tokens + shape.reply_tokens
        return one, shape.clients * one
    if isinstance(shape, AgentsParameters):
        one = shape.prefix_tokens + shape.reply_tokens
        return one, one  # a pause after each answer, and a front door: K agents are not K requests
    if isinstance(shape, LadderParameters):
        one = max([size + shape.reply_tokens for size in shape.sizes], default=0)
        decode = shape.decode_prompt_tokens + shape.decode_tokens
        return max(one, decode if shape.streams else 0), max(one, decode * max(shape.streams, default=0))
    if isinstance(shape, EquivalenceParameters):
        one = shape.longest_tokens + shape.reply_tokens
        return one, one
    return 0, 0


def _judged(run: Run) -> Iterator[Finding]:
    points = _ramp(run)
    for part in run.bars.goal_parts:
        if points and part not in map(str, points):
            yield Finding(level="error", where=f"cell {run.cell}", text=f"its goals are of the point {part}, and the "
                                                                        f"ramp has {', '.join(map(str, points))}")


def _ramp(run: Run) -> tuple[int, ...]:
    return run.workload.points if isinstance(run.workload, AgentsParameters | ProfileParameters) else ()


# -- how long it takes -----------------------------------------------------------------------------------------------


def _body_s(run: Run, speed: Speed) -> float | None:
    shape = run.workload
    again = 1.0 if run.target.tier != "on" else RESTORE_SHARE

    def turn_s(tokens: float, reply_tokens: float) -> float:
        return tokens / speed.prefill_tok_s + reply_tokens / speed.decode_tok_s

    if isinstance(shape, RotateParameters):
        cold, lap = turn_s(shape.tokens, shape.reply_tokens), shape.sessions * shape.tokens / speed.prefill_tok_s
        busy = again if run.pool_tokens is not None and shape.sessions * shape.tokens > run.pool_tokens else 0.0
        body = shape.duration_s + busy * shape.clients * cold
        body += (shape.clients + RESTORE_SHARE * shape.nopressure_visits) * cold if shape.nopressure_visits else 0.0
        body += shape.warmup_laps * lap + sum(idle + again * lap for idle in (shape.recovery_idle_s,
                                                                                shape.observe_idle_s) if idle)
        return body
    if isinstance(shape, AgentsParameters):
        body = 0.0
        for count in shape.points:
            prime = count * turn_s(shape.prefix_tokens, 0)
            full = run.pool_tokens is not None and count * shape.prefix_tokens > run.pool_tokens
            body += prime + shape.duration_s + (again * prime if full else shape.gap_min_s)
        return body
    if isinstance(shape, LadderParameters):
        pushed = shape.evict_pools * (run.pool_tokens or shape.pool_tokens) / speed.prefill_tok_s
        times = shape.samples * (1 + again * (shape.evict_pools > 0))
        rungs = sum(times * turn_s(size, 2 * shape.reply_tokens) + pushed for size in shape.sizes)
        decode = sum(shape.samples * (streams * shape.decode_prompt_tokens / speed.prefill_tok_s + shape.decode_tokens
                                      / min(speed.decode_tok_s, speed.streams_tok_s / streams))
                     for streams in shape.streams)
        return shape.passes * (2 if run.spec.corpus.endswith("both") else 1) * (rungs + decode)
    if isinstance(shape, EquivalenceParameters):
        lengths = shape.lengths(32)
        if run.target.tier == "off":
            return sum(2 * turn_s(tokens, 1.5 * shape.reply_tokens) for tokens in lengths)
        pushed = shape.evict_pools * (run.pool_tokens or shape.pool_tokens) / speed.prefill_tok_s
        times = -(-len(lengths) // (shape.at_once or len(lengths)))
        return times * pushed + sum(2 * turn_s(tokens, 2 * shape.reply_tokens) for tokens in lengths)
    if isinstance(shape, ProfileParameters):
        profile = shape.settled()
        points = shape.points or (profile.sessions,)
        middle = profile.start_tokens[len(profile.start_tokens) // 2]
        return sum(shape.duration_s + turn_s(count * middle, 0) for count in points)
    if isinstance(shape, ReplayParameters) and shape.duration_s:
        return shape.duration_s
    return None
