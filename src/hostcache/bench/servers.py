"""A fresh server process per arm, and the arm read back from it.

Measures nothing but the peak memory of the process it started.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostcache.client.counters import read
from hostcache.client.openai import OpenAIClient
from hostcache.client.process import started
from hostcache.clock import Clock
from hostcache.errors import ServerError
from hostcache.records import Arm


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """What an arm needs of its server. `host_cache_bytes` 0 is the off arm."""

    model: str
    pool_tokens: int
    page_tokens: int
    host_cache_bytes: int
    concurrency: int
    prefix_cache_entries: int = 24
    extra: tuple[str, ...] = ()

    @property
    def arm(self) -> Arm:
        return "on" if self.host_cache_bytes else "off"

    def flags(self) -> tuple[str, ...]:
        """Every setting that could differ between arms is given: neither environment nor file may decide one."""
        return (
            self.model, "--pool-tokens", str(self.pool_tokens), "--page-tokens", str(self.page_tokens),
            "--host-cache-bytes", str(self.host_cache_bytes), "--host-cache-mode", "on-pressure",
            "--concurrency", str(self.concurrency), "--prefix-cache-entries", str(self.prefix_cache_entries),
            *self.extra,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """How a server is started: the command before the flags, and where logs go."""

    log_dir: Path
    clock: Clock
    command: tuple[str, ...] = (sys.executable, "-m", "hostcache", "serve")
    api_key: str | None = None
    """The key that the machine's own settings (environment, hostcache.toml) make every server ask for."""

    @asynccontextmanager
    async def running(self, plan: ServerPlan, *, name: str) -> AsyncIterator[RunningServer]:
        """A serving process whose arm was read back; stopped on every way out.

        Raises ServerError when it does not come up, or is not the arm that was asked for.
        """
        command = (*self.command, *plan.flags(), "--host", "127.0.0.1", "--port", "{port}")
        log = self.log_dir / f"{name}.log"
        async with started(command, log=log, clock=self.clock, api_key=self.api_key) as server:
            client = server.client
            running = RunningServer(plan=plan, command=server.command, log=log.name, process=server.process,
                                    client=client, model=await client.model(), max_context=await client.max_context())
            check_arm(plan, await client.stats())
            yield running


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    plan: ServerPlan
    command: tuple[str, ...]
    log: str
    process: subprocess.Popen[bytes]
    client: OpenAIClient
    model: str
    max_context: int

    @property
    def limit_tokens(self) -> int:
        """Longest prompt + answer that fits the context and, with a page to spare, the pool."""
        return min(self.max_context, self.plan.pool_tokens - self.plan.page_tokens)

    def peak_rss_bytes(self) -> int | None:
        """The process's high-water mark so far (VmHWM); None where /proc does not say."""
        return peak_rss_bytes(self.process.pid)


def check_arm(plan: ServerPlan, stats: Mapping[str, Any]) -> None:
    """Raises ServerError unless the server itself says that it is the arm that was asked for."""
    tier, config = stats.get("host_cache"), stats.get("host_cache_config")
    if not plan.host_cache_bytes:
        if tier is not None:
            raise ServerError("the off arm's server reports a host cache; nothing was measured")
        return
    if tier is None:
        raise ServerError("the on arm's server reports host_cache null: its tier is off; nothing was measured. "
                          "See the server's log for the reason")
    quota = read(stats, "host_cache", "quota_bytes")
    if quota is None or not 0 < quota <= plan.host_cache_bytes:
        raise ServerError(f"the on arm's server has a quota of {quota} bytes, asked for {plan.host_cache_bytes}; "
                          "nothing was measured")
    mode = config.get("host_cache_mode", config.get("mode")) if isinstance(config, Mapping) else None
    if mode != "on-pressure":
        raise ServerError(f"the on arm's tier is in mode {mode!r}, not 'on-pressure'; nothing was measured")


def peak_rss_bytes(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
