"""A server process of our own: started on loopback, waited for, stopped by pid; and how a run of ours is ended.

Knows no arm and no workload, and judges nothing that the server says.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from hostcache.client.openai import OpenAIClient
from hostcache.clock import Clock
from hostcache.errors import ServerError

START_TIMEOUT_S = 300.0
_LEASHED = ("import ctypes, os, signal, sys\n"
            "ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"  # PR_SET_PDEATHSIG: outlives exec
            "os.getppid() == int(sys.argv[1]) or sys.exit('its parent has gone')\n"
            "os.execvp(sys.argv[2], sys.argv[2:])\n")
"""A process of Linux that becomes another one, and is told to end when we are killed."""
STOP_TIMEOUT_S = 60.0
SILENCE_S = 900.0


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
        await stop(process)


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


async def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a session of its own, in order, and then whatever of that session outlived it: an
    engine's worker would disturb the next arm."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    # In a thread, so that other servers' streams go on; shielded, because a second cancellation must not leak it.
    try:
        await asyncio.shield(asyncio.to_thread(process.wait, STOP_TIMEOUT_S))
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"


@contextlib.contextmanager
def terminate_like_interrupt() -> Iterator[None]:
    """SIGTERM stops a run as Ctrl-C does: servers end, files stay valid. For use inside a running loop."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        if task is not None:
            task.cancel()

    try:
        loop.add_signal_handler(signal.SIGTERM, stop)
    except (NotImplementedError, RuntimeError, ValueError):  # not the main thread, or no such signals here
        yield
        return
    try:
        yield
    except asyncio.CancelledError:
        if stopped:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
