"""Load from several processes: this side of the pipe. The other side is worker.py.

A worker gets its plan as the first line of its standard input, then orders; it gives records and `done` back, one JSON
object a line. Nobody is trusted to live: a worker that ends before its time voids the run with a reason, and a worker
whose input ends stops by itself, so none is left over when this process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from hostcache.bench.harness.load import Cast, Emit, Order, together
from hostcache.bench.harness.texts import Mode
from hostcache.errors import ServerError
from hostcache.records import RequestRecord, from_json

END_TIMEOUT_S = 10.0
_LONGEST_LINE = 1 << 28


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that a worker needs to know. `workload`: its name in the catalogue; `parameters`: its fields."""

    workload: str
    parameters: dict[str, Any]
    cast: Cast
    url: str
    api_key: str | None
    model: str
    ignore_eos: bool
    want_ids: bool
    silence_s: float

    def line(self) -> bytes:
        texts = self.cast.texts
        return _line({
            "workload": self.workload, "parameters": self.parameters, "url": self.url, "api_key": self.api_key,
            "model": self.model, "ignore_eos": self.ignore_eos, "want_ids": self.want_ids,
            "silence_s": self.silence_s, "part": self.cast.part,
            "count": self.cast.count, "mine": self.cast.mine, "limit_tokens": self.cast.limit_tokens,
            "texts": {"mode": texts.mode, "source": texts.source, "seed": texts.seed, "salt": texts.salt,
                      "chars_per_token": texts.chars_per_token},
        })


class WorkerCrew:
    """Clients in processes of their own."""

    def __init__(self, workers: Sequence[_Worker]) -> None:
        self._workers = workers

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(worker.pid for worker in self._workers)

    async def obey(self, order: Order) -> None:
        await together(worker.obey(order) for worker in self._workers)

    def halt(self) -> None:
        for worker in self._workers:
            worker.say({"halt": True})


@asynccontextmanager
async def working(plans: Sequence[Plan], *, emit: Emit, log_dir: Path) -> AsyncIterator[WorkerCrew]:
    """One worker a plan; all have ended when this is left, and everything they had to say was heard."""
    workers: list[_Worker] = []
    try:
        for number, plan in enumerate(plans):
            workers.append(await _start(number, plan, emit, log_dir))
        await together(worker.ready() for worker in workers)
        yield WorkerCrew(workers)
    finally:
        await asyncio.gather(*(worker.end() for worker in workers), return_exceptions=True)


class _Worker:
    def __init__(self, number: int, process: asyncio.subprocess.Process, emit: Emit, log: Path) -> None:
        self._number = number
        self._process = process
        self._emit = emit
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, message: dict[str, Any]) -> None:
        self.send(_line(message))

    def send(self, line: bytes) -> None:
        """To a dead worker it is said in vain: `_listen` will see that it is dead."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._process.stdin.write(line)

    async def ready(self) -> None:
        await self._listen("ready")

    async def obey(self, order: Order) -> None:
        self.say({"order": dataclasses.asdict(order)})
        await self._listen("done")

    async def end(self) -> None:
        """Its input ends, so it stops; what it still says is heard."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                with contextlib.suppress(ServerError):
                    await self._listen("bye")
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._log.is_file() and not self._log.stat().st_size:
            self._log.unlink()

    async def _listen(self, wanted: str) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            message: dict[str, Any] = json.loads(line)
            if "record" in message:
                record = from_json(message["record"])
                assert isinstance(record, RequestRecord)
                self._emit(record)
            elif "failed" in message:
                raise ServerError(f"worker {self._number}: {message['failed']}")
            elif wanted in message:
                return
        code = await self._process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        raise ServerError(f"worker {self._number} (process {self.pid}) {how} before its work was done; its requests "
                          f"are lost, so the run is void (its log: {self._log})")


async def _start(number: int, plan: Plan, emit: Emit, log_dir: Path) -> _Worker:
    log = log_dir / f"worker-{plan.cast.part or 'all'}-{number}.log"
    with log.open("ab") as stream:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hostcache.bench.harness.worker", stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=stream, limit=_LONGEST_LINE,
            start_new_session=True)  # Ctrl-C reaches us alone; the workers are told by their input's end
    worker = _Worker(number, process, emit, log)
    worker.send(plan.line())
    return worker


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def mode_of(text: str) -> Mode:
    """The mode of that name, as it came over the pipe."""
    modes: dict[str, Mode] = {"ids": "ids", "text": "text", "chat": "chat"}
    return modes[text]
