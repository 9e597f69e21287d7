"""A fresh server process per arm: start, wait until it serves, read the arm back, stop by pid.

Measures nothing but the peak memory of the process it started.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostcache.client.counters import read
from hostcache.client.openai import OpenAIClient
from hostcache.clock import Clock
from hostcache.errors import ServerError
from hostcache.records import Arm

START_TIMEOUT_S = 300.0
_LEASHED = ("import ctypes, os, signal, sys\n"
            "ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"  # PR_SET_PDEATHSIG: outlives exec
            "os.getppid() == int(sys.argv[1]) or sys.exit('its parent has gone')\n"
            "os.execvp(sys.argv[2], sys.argv[2:])\n")
"""A process of Linux that becomes another one, and is told to end when we are killed."""
STOP_TIMEOUT_S = 60.0
SILENCE_S = 900.0


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
class Started:
    """A process that answers /health, and a client of it. `command`: with its port."""

    command: tuple[str, ...]
    url: str
    process: subprocess.Popen[bytes]
    client: OpenAIClient


@asynccontextmanager
async def started(command: Sequence[str], *, log: Path, clock: Clock, api_key: str | None = None,
                  timeout_s: float = START_TIMEOUT_S, silence_s: float = SILENCE_S) -> AsyncIterator[Started]:
    """Starts `command` on a free loopback port, which takes the place of `{port}` in it; waits until it serves;
    stops it by pid on every way out. Raises ServerError when it does not come up within `timeout_s`. `silence_s`: how
    long the client waits for a byte of an answer."""
    port = free_port()
    command = tuple(word.replace("{port}", str(port)) for word in command)
    if shutil.which(command[0]) is None:
        raise ServerError(f"cannot start {command[0]}: there is no such program; give a command that exists")
    leash = (sys.executable, "-I", "-S", "-c", _LEASHED, str(os.getpid())) if sys.platform == "linux" else ()
    with log.open("xb") as stream:
        # A session of its own, so that Ctrl-C reaches us alone and the server is stopped in order.
        process = subprocess.Popen((*leash, *command), stdin=subprocess.DEVNULL, stdout=stream,  # noqa: ASYNC220
                                   stderr=stream, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        async with OpenAIClient(url, clock=clock, api_key=api_key, read_timeout_s=silence_s) as client:
            await _wait_until_serving(process, client, log, clock, timeout_s)
            yield Started(command=command, url=url, process=process, client=client)
    finally:
        await _stop(process)


async def _wait_until_serving(process: subprocess.Popen[bytes], client: OpenAIClient, log: Path, clock: Clock,
                              timeout_s: float) -> None:
    deadline_s = clock.now() + timeout_s
    while not await client.healthy():
        if process.poll() is not None:
            raise ServerError(f"the server ended with {process.returncode} before it served: {_last_line(log)} "
                              f"(whole log: {log})")
        if clock.now() > deadline_s:
            raise ServerError(f"the server did not answer /health within {timeout_s:.0f} s; see {log}")
        await clock.sleep_until(clock.now() + 0.1)


async def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    # In a thread, so that other servers' streams go on; shielded, because a second cancellation must not leak it.
    try:
        await asyncio.shield(asyncio.to_thread(process.wait, STOP_TIMEOUT_S))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    except asyncio.CancelledError:
        process.kill()
        process.wait()
        raise


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


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"
