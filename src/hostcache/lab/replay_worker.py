"""One process of a replay: sends what it is told to when it is due, and says what became of it. Counts nothing.

Reads JSON lines from its input (a plan, then orders) and writes JSON lines to its output; when its input ends it stops
what is on its way, writes that down too, and ends. Counters are no business of it: one scraper, in the parent, reads
them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from hostcache.client.openai import Ask, OpenAIClient
from hostcache.clock import Clock, WallClock
from hostcache.errors import HostCacheError
from hostcache.lab.prompts import Planned, Prompts
from hostcache.lab.replayed import Replayed, aborted, replayed

Emit = Callable[[Replayed], None]
Say = Callable[[Mapping[str, Any]], None]

BUILD_AHEAD_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How prompts are sent: to whom, in which form, how long an answer."""

    url: str
    api_key: str | None
    model: str
    send: str
    """ids or text"""
    max_tokens: int
    ignore_eos: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Sender:
    """Sends planned requests, each as a task of its own."""

    def __init__(self, client: OpenAIClient, prompts: Prompts, manner: Manner, *, clock: Clock, emit: Emit,
                 failed: Callable[[str], None]) -> None:
        """`failed` hears of a request that nothing can be said of, because this program is at fault."""
        self._client = client
        self._prompts = prompts
        self._manner = manner
        self._clock = clock
        self._emit = emit
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, request: Planned, *, start_s: float) -> None:
        """At once, or when it is due after `start_s`."""
        task = asyncio.create_task(self._send(request, start_s))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(f"{type(error).__name__}: {error}")

    async def stop(self) -> None:
        """What is on its way is given up and written down."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self, request: Planned, start_s: float) -> None:
        due_s = self._clock.now() if request.due_s is None else start_s + request.due_s
        digest = ""
        try:
            await self._clock.sleep_until(due_s - BUILD_AHEAD_S)
            digest = self._prompts.digest(request)
            tokens = self._prompts.of(request)
            prompt = (self._prompts.bridge.text(tokens) if self._manner.send == "text"
                      else tuple(tokens.tolist()))
            ask = Ask(endpoint="completions", prompt=prompt, max_tokens=self._manner.max_tokens,
                      ignore_eos=self._manner.ignore_eos)
            await self._clock.sleep_until(due_s)
            heard = await self._client.ask(ask, model=self._manner.model, rng=Random(request.index))
        except asyncio.CancelledError:
            self._emit(aborted(request.index, due_s, self._clock.now(), start_s=start_s, prompt_sha256=digest))
            raise
        self._emit(replayed(request.index, due_s, heard, start_s=start_s, prompt_sha256=digest))


async def work(commands: asyncio.StreamReader, say: Say) -> None:
    """Obey until the input ends, or something cannot be done."""
    try:
        await _work(json.loads(await commands.readline()), commands, say)
    except HostCacheError as error:
        say({"failed": str(error)})


async def _work(plan: Mapping[str, Any], commands: asyncio.StreamReader, say: Say) -> None:
    clock = WallClock()
    manner = Manner(**plan["manner"])
    requests = {index: Planned(index=index, names=tuple(names), tokens=tokens, due_s=due_s)
                for index, names, tokens, due_s in plan["requests"]}

    def emit(record: Replayed) -> None:
        say({"record": record.as_json()})

    async with OpenAIClient(manner.url, clock=clock, api_key=manner.api_key) as client:
        sender = Sender(client, Prompts.from_json(plan["prompts"]), manner, clock=clock, emit=emit,
                        failed=lambda why: say({"failed": why}))
        say({"ready": True})
        try:
            while line := await commands.readline():
                order = json.loads(line)
                if order.get("halt"):
                    await sender.stop()
                for index in order.get("send", ()):
                    sender.send(requests[index], start_s=order["start_s"])
        finally:
            await sender.stop()


async def _main() -> None:
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader(limit=1 << 28)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)

    def say(message: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps(message, separators=(",", ":")) + "\n")
        sys.stdout.flush()

    await work(commands, say)


if __name__ == "__main__":
    asyncio.run(_main())
