"""A small trace, a small probe and a mock server for them, on which every figure is known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from hostcache.clock import WallClock
from hostcache.lab.judging import Judged
from hostcache.lab.probe import Probe, probe_of
from hostcache.lab.running import Means, run_probe
from hostcache.lab.sealing import Sealed, seal, sealed_of
from hostcache.testing.mock_server import MockConfig, MockServer
from hostcache.testing.mock_text import WORDS, token_id
from hostcache.workload.bridge import Alphabet

ALPHABET = Alphabet(words=WORDS[:2048], ids=tuple(token_id(word) for word in WORDS[:2048]))
"""The mock's tokens: a word each."""
REQUESTS = 24
BLOCKS = 40
"""Of the device: too few for the trace, so that LRU loses some."""
QUICK = MockConfig(device_blocks=BLOCKS, base_s=0.0, s_per_token=0.0, itl_s=0.0, s_per_restored=0.0)


def write_trace(path: Path, *, requests: int = REQUESTS, seed: int = 1, spread_ms: int = 20) -> Path:
    """Conversations that come back: Mooncake rows of 512-token blocks, chained by prefix."""
    rng = Random(seed)
    talks: list[list[int]] = []
    fresh = 2**40
    lines = []
    for number in range(requests):
        if talks and rng.random() < 0.6:
            talk = talks[rng.randrange(len(talks))]
        else:
            talk = []
            talks.append(talk)
        for _ in range(rng.randrange(1, 5)):
            fresh += 1
            talk.append(fresh)
        lines.append(json.dumps({"timestamp": number * spread_ms, "input_length": 512 * len(talk),
                                 "output_length": 4, "hash_ids": talk}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def written(urls: dict[str, str], **more: Any) -> dict[str, Any]:
    """A probe as its file would say it: a fresh control and one measured arm for each other url."""
    arms: dict[str, Any] = {}
    for name, url in urls.items():
        arms[name] = {"url": url, **({"control": True, "fresh": True, "requests": 8} if name == "control" else {})}
    measured = [name for name in arms if name != "control"]
    given: dict[str, Any] = {
        "probe": 1, "name": "small", "hypothesis": "LRU says what the mock holds",
        "trace": {"requests": REQUESTS, "block_tokens": 16}, "bridge": {"send": "ids"},
        "engine": {"block_tokens": 16, "capacity_tokens": 16 * BLOCKS, "touch": "tail-first", "max_tokens": 1},
        "arms": arms, "budget_minutes": 2,
        "branches": {"explained": " and ".join(f"abs({name}_gap) <= 0.005" for name in measured),
                     "beside": f"{measured[0]}_hit_rate >= 0"},
        "does_not_prove": ["that a mock is an engine"], "prior_art": ["none"],
        "retracts": [{"certificate": "0" * 64, "why": "to have one"}]}
    return {**given, **more}


def sealed_for(probe: Probe, trace: Path) -> Sealed:
    return sealed_of(seal(probe, trace, ALPHABET, model=None, now=lambda: 0.0), "test")


def on_mocks(configs: dict[str, MockConfig], body: Callable[[dict[str, str]], Awaitable[Any]]) -> Any:
    """Run `body` with a fresh mock for each name; it is given their urls."""
    async def run() -> Any:
        servers = {name: MockServer(config) for name, config in configs.items()}
        urls = {}
        entered = []
        try:
            for name, server in servers.items():
                entered.append(await server.__aenter__())
                urls[name] = server.url
            return await body(urls)
        finally:
            for server in entered:
                await server.__aexit__(None, None, None)

    return asyncio.run(run())


def probe_on_mocks(tmp_path: Path, *, means: Means | None = None, config: MockConfig = QUICK,
                   **more: Any) -> tuple[Path, Judged, Path]:
    """Certificate, judgement and trace of one small probe."""
    trace = write_trace(tmp_path / "trace.jsonl")
    arms = more.pop("arms", ("control", "device"))

    async def run(urls: dict[str, str]) -> Any:
        probe = probe_of(written(urls, **more), where="test")
        sealed = sealed_for(probe, trace)
        (tmp_path / "seal.json").write_text(json.dumps({**sealed.body, "sha256": sealed.sha256}))
        return await run_probe(probe, sealed, trace, tmp_path / "out", means or Means(clock=WallClock()))

    found, judged = on_mocks({name: replace(config) for name in arms}, run)
    return found, judged, trace
