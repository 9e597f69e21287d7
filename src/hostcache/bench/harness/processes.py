"""Load from several processes: this side of the pipe. The other side is worker.py.

A worker gets its plan as the first line of its standard input, then orders; it gives records and `done` back. A worker
that ends before its time voids the run with a reason.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from hostcache.bench.harness.load import Cast, Emit, Order
from hostcache.bench.harness.texts import Mode
from hostcache.client.crew import Crew, crew
from hostcache.records import RequestRecord, from_json

_COMMAND = (sys.executable, "-m", "hostcache.bench.harness.worker")


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

    def message(self) -> dict[str, Any]:
        texts = self.cast.texts
        return {
            "workload": self.workload, "parameters": self.parameters, "url": self.url, "api_key": self.api_key,
            "model": self.model, "ignore_eos": self.ignore_eos, "want_ids": self.want_ids,
            "silence_s": self.silence_s, "part": self.cast.part,
            "count": self.cast.count, "mine": self.cast.mine, "limit_tokens": self.cast.limit_tokens,
            "texts": {"mode": texts.mode, "source": texts.source, "seed": texts.seed, "salt": texts.salt,
                      "chars_per_token": texts.chars_per_token},
        }


class WorkerCrew:
    """Clients in processes of their own."""

    def __init__(self, workers: Crew, emit: Emit) -> None:
        self._workers = workers
        self._emit = emit

    async def obey(self, order: Order) -> None:
        for number in range(len(self._workers)):
            self._workers.say(number, {"order": dataclasses.asdict(order)})
        await self.until_all_said("done")

    def halt(self) -> None:
        for number in range(len(self._workers)):
            self._workers.say(number, {"halt": True})

    async def until_all_said(self, wanted: str) -> None:
        """Raises ServerError (WorkerLost) when one cannot go on."""
        missing = set(range(len(self._workers)))
        while missing:
            number, message = await self._workers.hear()
            self.take(message)
            if wanted in message:
                missing.discard(number)

    def take(self, message: Mapping[str, Any]) -> None:
        if "record" in message:
            record = from_json(message["record"])
            assert isinstance(record, RequestRecord)
            self._emit(record)


@asynccontextmanager
async def working(plans: Sequence[Plan], *, emit: Emit, log_dir: Path) -> AsyncIterator[WorkerCrew]:
    """One worker a plan; all have ended when this is left, and everything they had to say was heard."""
    name = f"worker-{plans[0].cast.part or 'all'}" if plans else "worker"
    async with crew(_COMMAND, [plan.message() for plan in plans], log_dir=log_dir, name=name) as workers:
        ours = WorkerCrew(workers, emit)
        try:
            await ours.until_all_said("ready")
            yield ours
        finally:
            await asyncio.shield(workers.end())
            for message in workers.rest():
                ours.take(message)


def mode_of(text: str) -> Mode:
    """The mode of that name, as it came over the pipe."""
    modes: dict[str, Mode] = {"ids": "ids", "text": "text", "chat": "chat"}
    return modes[text]
