"""A server for one arm: started here or there already, and what it says of itself held against what the arm is.

Nothing is measured on a server whose own report contradicts its arm. Measures nothing.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostcache.client.adapters import Adapter, adapter_for
from hostcache.client.openai import Capabilities, OpenAIClient
from hostcache.client.process import started
from hostcache.clock import Clock
from hostcache.errors import ServerError
from hostcache.lab.replayed import ProbeVoid

START_TIMEOUT_S = 600.0
"""vLLM on a CPU compiles before it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A server that answers. `command`: empty where it was not started here."""

    url: str
    client: OpenAIClient
    adapter: Adapter
    described: Mapping[str, Any]
    capabilities: Capabilities
    model: str
    command: tuple[str, ...]


@asynccontextmanager
async def serving(*, url: str | None, start: Sequence[str] = (), env: Mapping[str, str] | None = None,
                  model: str | None = None, api_key: str | None, log: Path, clock: Clock) -> AsyncIterator[Serving]:
    """At `url`, or by `start`, in which `{port}` is a free port and `{model}` the model's source; a first word
    `hostcache` is this Python's own. `model`: the source; as a name for requests, what the server offers is taken.
    `log`: a new file, of a server that is started.

    Raises ServerError when it does not come up or does not answer.
    """
    if url is not None:
        async with OpenAIClient(url, clock=clock, api_key=api_key) as client:
            if not await client.healthy():
                raise ServerError(f"no server answers {url}/health; start one, for example with `hostcache serve`")
            yield await _met(client, url, ())
        return
    command = command_of(start, env or {}, model=model)
    async with started(command, log=log, clock=clock, api_key=api_key, timeout_s=START_TIMEOUT_S) as server:
        yield await _met(server.client, server.url, server.command)


def command_of(start: Sequence[str], env: Mapping[str, str], *, model: str | None) -> tuple[str, ...]:
    """The words with the model filled in, the environment before them as a shell would take it.

    Raises ServerError for a `{model}` that nobody gave.
    """
    if model is None and any("{model}" in word for word in start):
        raise ServerError("the start command names {model} and the seal names none; seal it with --model SOURCE")
    words = tuple(word.replace("{model}", model or "") for word in start)
    if words[0] == "hostcache":
        words = (sys.executable, "-m", *words)
    return (*(("env", *(f"{name}={value}" for name, value in sorted(env.items()))) if env else ()), *words)


def named(command: Sequence[str]) -> tuple[str, ...]:
    """The command for a record that others read: `hostcache` by its name again, not by where this Python lies."""
    words = tuple(command)
    own = (sys.executable, "-m")
    for at in range(len(words) - 1):
        if words[at : at + 2] == own:
            return (*words[:at], *words[at + 2 :])
    return words


def confirm(arm: str, described: Mapping[str, Any], *, tier: str | None, block_tokens: int,
            capacity_tokens: int | None) -> tuple[str, ...]:
    """What was held against the server's own report. Raises ProbeVoid where that contradicts the arm.

    `capacity_tokens` None: not asked. A pool may be one block larger: vLLM keeps one for itself.
    """
    found: list[str] = []

    def refuse(message: str) -> ProbeVoid:
        return ProbeVoid("arm_not_confirmed", f"{arm}: {message}; nothing was measured")

    if tier is not None:
        said = described.get("tier")
        if said is None:
            raise refuse(f"its tier is to be {tier}, and the server does not say whether it has one")
        if said["on"] != (tier == "on"):
            why = said.get("off_reason")
            raise refuse(f"its tier is to be {tier}, and the server reports it {'on' if said['on'] else 'off'}"
                         f"{f' ({why})' if why else ''}")
        found.append(f"tier {tier}")
    page = described.get("page_tokens")
    if page is not None:
        if page != block_tokens:
            raise refuse(f"its blocks are to have {block_tokens} tokens, the server reports {page:g}")
        found.append(f"blocks of {block_tokens} tokens")
    pool = described.get("pool_tokens")
    if pool is not None and capacity_tokens is not None:
        if not capacity_tokens <= pool <= capacity_tokens + block_tokens:
            raise refuse(f"its pool is to have {capacity_tokens} tokens, the server reports {pool:g}")
        found.append(f"a pool of {int(pool)} tokens")
    return tuple(found)


async def _met(client: OpenAIClient, url: str, command: tuple[str, ...]) -> Serving:
    adapter = await adapter_for(client)
    described = dict(await adapter.describe())
    return Serving(url=url, client=client, adapter=adapter, described=described,
                   capabilities=await client.capabilities(), model=await client.model(), command=command)
