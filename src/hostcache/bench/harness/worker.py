"""One process of a load: the other side of processes.py. Plays the clients of its plan, order by order.

It reads lines from its input and writes lines to its output, nothing else; when its input ends it stops what is on the
way, writes that down too, and ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hostcache.bench.harness.catalogue import played
from hostcache.bench.harness.load import Cast, Desk, LocalCrew, Order
from hostcache.bench.harness.processes import mode_of
from hostcache.bench.harness.texts import Texts
from hostcache.client.openai import OpenAIClient
from hostcache.clock import WallClock
from hostcache.errors import HostCacheError
from hostcache.records import RequestRecord, to_json

Say = Callable[[dict[str, Any]], None]


async def serve(commands: asyncio.StreamReader, say: Say) -> None:
    """Obey until the input ends, or something cannot be done."""
    try:
        await _serve(json.loads(await commands.readline()), commands, say)
    except HostCacheError as error:
        say({"failed": str(error)})
    say({"bye": True})


async def _serve(plan: Mapping[str, Any], commands: asyncio.StreamReader, say: Say) -> None:
    clock = WallClock()
    given = plan["texts"]
    source = given["source"] if isinstance(given["source"], str) else tuple(given["source"])
    mode = mode_of(given["mode"])
    texts = Texts(mode, source, seed=given["seed"], salt=given["salt"], chars_per_token=given["chars_per_token"])
    cast = Cast(part=plan["part"], count=plan["count"], mine=tuple(plan["mine"]), texts=texts,
                limit_tokens=plan["limit_tokens"])

    def emit(record: RequestRecord) -> None:
        say({"record": to_json(record)})

    async with OpenAIClient(plan["url"], clock=clock, api_key=plan["api_key"],
                            read_timeout_s=plan["silence_s"]) as client:
        desk = Desk(client, model=plan["model"], mode=mode, seed=given["seed"], clock=clock, emit=emit,
                    ignore_eos=plan["ignore_eos"], want_ids=plan["want_ids"])
        crew = LocalCrew(played(plan["workload"], plan["parameters"]).players(cast), desk)
        await client.capabilities()  # so that this client reads the server's usage as the first one does
        say({"ready": True})
        while line := await commands.readline():
            message = json.loads(line)
            if "order" in message:
                if not await _obey(crew, Order(**message["order"]), commands):
                    return
                say({"done": True})


async def _obey(crew: LocalCrew, order: Order, commands: asyncio.StreamReader) -> bool:
    """False: the input ended meanwhile, and what was on the way was stopped."""
    job = asyncio.create_task(crew.obey(order))
    line: asyncio.Task[bytes] | None = None
    try:
        while True:
            line = asyncio.create_task(commands.readline())
            await asyncio.wait((job, line), return_when=asyncio.FIRST_COMPLETED)
            if job.done():
                job.result()
                return True
            if not line.result():
                return False
            crew.halt()  # the only thing that is said while an order is under way
    finally:
        tasks = [task for task in (job, line) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _main() -> None:
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader(limit=1 << 28)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)

    def say(message: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(message, separators=(",", ":")) + "\n")
        sys.stdout.flush()

    await serve(commands, say)


if __name__ == "__main__":
    asyncio.run(_main())
