"""Worker processes that take JSON lines and give JSON lines. Knows no request, no record and no workload.

Nobody is trusted to live: a worker that ends before it was told to is reported with how it ended, and a worker whose
input ends stops by itself, so that none is left over when this process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from hostcache.errors import ServerError

END_TIMEOUT_S = 10.0
LONGEST_LINE = 1 << 28


class WorkerLost(ServerError):
    """A worker ended, or said what nobody can read, before its work was done."""


class Crew:
    """Workers by number, from 0. `say` goes to one of them; `hear` gives what any of them said, in order of arrival;
    `rest`, once they have ended, what nobody had heard yet."""

    def __init__(self, processes: Sequence[asyncio.subprocess.Process], logs: Sequence[Path]) -> None:
        self._processes = processes
        self._logs = logs
        self._heard: asyncio.Queue[tuple[int, Mapping[str, Any] | None]] = asyncio.Queue()
        self._readers = [asyncio.create_task(self._read(number)) for number in range(len(processes))]

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def say(self, number: int, message: Mapping[str, Any]) -> None:
        """To a dead worker it is said in vain: `hear` will tell."""
        pipe = self._processes[number].stdin
        assert pipe is not None
        with contextlib.suppress(ConnectionError, RuntimeError):
            pipe.write(line_of(message))

    async def hear(self) -> tuple[int, Mapping[str, Any]]:
        """The next message and whose it is. Raises WorkerLost once a worker has ended, or says `failed`."""
        number, message = await self._heard.get()
        if message is None:
            raise WorkerLost(await self._how(number))
        if "failed" in message:
            raise WorkerLost(f"worker {number}: {message['failed']}")
        return number, message

    async def end(self) -> None:
        """Their inputs end, so they stop; those that do not are killed. What they said by then is kept for `rest`."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process, log in zip(self._processes, self._logs, strict=True):
            try:
                async with asyncio.timeout(END_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
            if log.is_file() and not log.stat().st_size:
                log.unlink()
        with contextlib.suppress(TimeoutError):  # a child of theirs may still hold the pipe
            async with asyncio.timeout(END_TIMEOUT_S):
                await asyncio.gather(*self._readers, return_exceptions=True)

    def rest(self) -> Iterator[Mapping[str, Any]]:
        while not self._heard.empty():
            _, message = self._heard.get_nowait()
            if message is not None:
                yield message

    async def _read(self, number: int) -> None:
        pipe = self._processes[number].stdout
        assert pipe is not None
        while line := await pipe.readline():
            try:
                message = json.loads(line)
            except ValueError:
                message = {"failed": f"said what is no JSON: {line[:120]!r}"}
            await self._heard.put((number, message if isinstance(message, dict) else {"failed": f"said {message!r}"}))
        await self._heard.put((number, None))

    async def _how(self, number: int) -> str:
        process = self._processes[number]
        code = await process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return (f"worker {number} (process {process.pid}) {how} before its work was done; what it had is lost, so the "
                f"run is void (its log: {self._logs[number]})")


@asynccontextmanager
async def crew(command: Sequence[str], plans: Sequence[Mapping[str, Any]], *, log_dir: Path,
               name: str = "worker") -> AsyncIterator[Crew]:
    """One process of `command` a plan, which it gets as its first line; all have ended when this is left."""
    processes: list[asyncio.subprocess.Process] = []
    logs = [_new_log(log_dir, name, number) for number in range(len(plans))]
    started: Crew | None = None
    try:
        for log in logs:
            with log.open("ab") as stream:
                processes.append(await asyncio.create_subprocess_exec(
                    *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=stream,
                    limit=LONGEST_LINE,
                    start_new_session=True))  # Ctrl-C reaches us alone; workers are told by their input's end
        started = Crew(processes, logs)
        for number, plan in enumerate(plans):
            started.say(number, plan)
        yield started
    finally:
        if started is None:
            started = Crew(processes, logs[: len(processes)])
        await asyncio.shield(started.end())


def line_of(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _new_log(folder: Path, name: str, number: int) -> Path:
    attempt = 0
    while True:
        log = folder / f"{name}-{number}{f'-{attempt}' if attempt else ''}.log"
        try:
            log.touch(exist_ok=False)
            return log
        except FileExistsError:
            attempt += 1
