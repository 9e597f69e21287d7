"""A server under test: where it runs or how it is started, who it says it is, and whether it is the arm that was asked.

Nothing is measured on a server whose own report contradicts its arm: the command line is what somebody wanted, the
report is what there is.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hostcache.bench.servers import peak_rss_bytes
from hostcache.client.adapters import Adapter, adapter_for
from hostcache.client.openai import Capabilities, OpenAIClient
from hostcache.client.process import SILENCE_S, started
from hostcache.clock import Clock
from hostcache.errors import ConfigError, ServerError


class NotConfirmed(ServerError):
    """The server is not the arm that was asked for. `described`: what it said of itself."""

    def __init__(self, message: str, described: Mapping[str, Any]) -> None:
        super().__init__(f"arm not confirmed: {message}; nothing was measured")
        self.described = dict(described)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`url`: of a server that runs already; or `start`: its command, `{port}` takes the place of a free port.

    `tier` and `quota_bytes`: what the server must say of itself (a quota of more than 0 and at most that); None: not
    asked. `model`: None takes the first that the server offers. `silence_s`: how long a client waits for a byte.
    """

    arm: str
    url: str | None = None
    start: tuple[str, ...] = ()
    tier: Literal["on", "off"] | None = None
    quota_bytes: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    api_key: str | None = None
    model: str | None = None
    silence_s: float = SILENCE_S

    def __post_init__(self) -> None:
        if (self.url is None) == (not self.start):
            raise ConfigError(f"arm {self.arm} has {'both' if self.start else 'neither'} an address and a start "
                              "command; give one of them")
        if self.start and not any("{port}" in word for word in self.start):
            raise ConfigError(f"the start command of arm {self.arm} ({shlex.join(self.start)[:120]}) has no {{port}}; "
                              "say where the port goes")

    @property
    def command(self) -> tuple[str, ...]:
        """The start command with its environment before it, as a shell would take it."""
        return (*(("env", *(f"{name}={value}" for name, value in sorted(self.env.items()))) if self.env else ()),
                *self.start)

    @asynccontextmanager
    async def serving(self, *, folder: Path, clock: Clock) -> AsyncIterator[Serving]:
        """The server, its arm confirmed; stopped on every way out when it was started here.

        Raises ServerError when it does not answer, NotConfirmed when it is another arm.
        """
        if self.url is not None:
            async with OpenAIClient(self.url, clock=clock, api_key=self.api_key,
                                    read_timeout_s=self.silence_s) as client:
                if not await client.healthy():
                    raise ServerError(f"no server answers {self.url}/health; start one, for example with "
                                      "`hostcache serve`, or give its address with --url")
                yield await self._met(client, self.url)
            return
        log = _new_log(folder, self.arm)
        async with started(self.command, log=log, clock=clock, api_key=self.api_key,
                           silence_s=self.silence_s) as server:
            yield await self._met(server.client, server.url, command=server.command, log=log.name,
                                  pid=server.process.pid)

    async def _met(self, client: OpenAIClient, url: str, *, command: tuple[str, ...] = (),
                   log: str | None = None, pid: int | None = None) -> Serving:
        adapter = await adapter_for(client)
        described = dict(await adapter.describe())
        confirmed_by = confirm(self, described)
        model = self.model or str(described.get("model") or await client.model())
        return Serving(target=self, url=url, client=client, adapter=adapter, described=described, model=model,
                       capabilities=await client.capabilities(), confirmed_by=confirmed_by, command=command, log=log,
                       pid=pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A server that answers, as it described itself."""

    target: Target
    url: str
    client: OpenAIClient
    adapter: Adapter
    described: dict[str, Any]
    capabilities: Capabilities
    model: str
    confirmed_by: str
    command: tuple[str, ...]
    log: str | None
    pid: int | None

    @property
    def limit_tokens(self) -> int | None:
        """Longest prompt + answer; None where the server does not say."""
        return self.capabilities.max_context

    def peak_rss_bytes(self) -> int | None:
        """Of a process that was started here; None where nobody knows."""
        return None if self.pid is None else peak_rss_bytes(self.pid)


def confirm(target: Target, described: Mapping[str, Any]) -> str:
    """By what the arm is known. Raises NotConfirmed."""
    if target.tier is None:
        return "not asked"
    tier = described.get("tier")
    if tier is None:
        raise NotConfirmed(f"{target.arm} is to have its tier {target.tier}, and the server does not say whether it "
                           "has one", described)
    if target.tier == "off":
        if tier["on"]:
            raise NotConfirmed(f"{target.arm} is to be without a tier, and the server reports one ({_short(tier)})",
                               described)
        return "the server's report"
    if not tier["on"]:
        raise NotConfirmed(f"{target.arm} is to have a tier, and the server reports none"
                           f"{f' ({why})' if (why := tier.get('off_reason')) else ''}; its log may say why", described)
    quota = tier.get("quota_bytes")
    if target.quota_bytes is not None and (quota is None or not 0 < quota <= target.quota_bytes):
        raise NotConfirmed(f"{target.arm} is to have a quota of {target.quota_bytes} bytes, and the server reports "
                           f"{quota}", described)
    return "the server's report"


def hostcache_target(arm: str, *, model: str, pool_tokens: int, page_tokens: int, host_cache_bytes: int,
                     concurrency: int, prefix_cache_entries: int = 24, extra: tuple[str, ...] = (),
                     api_key: str | None = None) -> Target:
    """This Python's own engine. Every setting that could differ between arms is given: neither environment nor file
    may decide one."""
    return Target(
        arm=arm, tier="on" if host_cache_bytes else "off", quota_bytes=host_cache_bytes or None, api_key=api_key,
        start=(sys.executable, "-m", "hostcache", "serve", model, "--pool-tokens", str(pool_tokens),
               "--page-tokens", str(page_tokens), "--host-cache-bytes", str(host_cache_bytes),
               "--host-cache-mode", "on-pressure", "--concurrency", str(concurrency),
               "--prefix-cache-entries", str(prefix_cache_entries), *extra, "--host", "127.0.0.1", "--port", "{port}"))


def vllm_target(arm: str, *, model: str, host_cache_bytes: int, extra: tuple[str, ...] = (),
                command: tuple[str, ...] | None = None, api_key: str | None = None) -> Target:
    """vLLM: with the tier in it, or with `host_cache_bytes` 0 as it is, both by this Python's `hostcache vllm serve`,
    so that nothing else differs. `extra` are vLLM's own flags; `command` stands in place of it, in the arm without a
    tier in place of `vllm serve`."""
    own = ("--host", "127.0.0.1", "--port", "{port}", "--enable-prompt-tokens-details", *extra)
    if command is not None and not host_cache_bytes:
        start = (*command, model, *own)
    else:
        start = (*(command or (sys.executable, "-m", "hostcache", "vllm", "serve")), model,
                 "--host-cache-bytes", str(host_cache_bytes), "--host-cache-mode", "on-pressure", "--", *own)
    return Target(arm=arm, tier="on" if host_cache_bytes else "off", quota_bytes=host_cache_bytes or None,
                  api_key=api_key, start=start)


def _new_log(folder: Path, arm: str) -> Path:
    number = 0
    while True:
        log = folder / f"server-{arm}-{number}.log"
        if not log.exists():
            return log
        number += 1


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
