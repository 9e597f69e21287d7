"""A real server process, `hostcache vllm serve` on loopback, ended by its own id; and how tests talk to it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
from tests.vllm.models import VOCABULARY

from hostcache.clock import WallClock

BLOCK = 32
POOL_BLOCKS = 24
SMALL = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4", "--block-size",
         str(BLOCK), "--num-gpu-blocks-override", str(POOL_BLOCKS), "--enable-prompt-tokens-details")
"""For vLLM: a tiny model on a pool of 23 usable blocks."""

START_S = 280.0  # 80 s on two busy cores: three processes import torch, one after the other
STOP_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    tokens: tuple[int, ...]
    cached: int
    """prompt tokens"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    url: str
    model: str
    process: subprocess.Popen[bytes]
    log: Path

    def body(self, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
        """Of a request for four tokens. Token ids, since a byte that is no text has no text to compare."""
        return {"model": self.model, "prompt": list(prompt), "max_tokens": 4, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True, **more}

    def ask(self, prompt: Sequence[int], *, headers: Mapping[str, str] | None = None, **more: Any) -> Answer:
        reply = httpx.post(f"{self.url}/v1/completions", json=self.body(prompt, **more), headers=headers, timeout=120)
        assert reply.status_code == 200, reply.text
        said = reply.json()
        details = said["usage"].get("prompt_tokens_details") or {}
        return Answer(tokens=tuple(said["choices"][0]["token_ids"]), cached=details.get("cached_tokens") or 0)

    def leave(self, prompt: Sequence[int], *, after: int, **more: Any) -> int:
        """A client that closes its connection after so many events of the stream, 0: while it waits for the first one.
        The events it saw."""
        seen = 0
        body = self.body(prompt, stream=True, **more)
        waiting = httpx.Timeout(120.0, read=120.0 if after else 0.02)
        with contextlib.suppress(httpx.ReadTimeout), httpx.stream(
                "POST", f"{self.url}/v1/completions", json=body, timeout=waiting) as reply:
            for line in reply.iter_lines():
                seen += line.startswith("data: {")
                if seen >= after:
                    break
        return seen

    def until(self, reached: Callable[[dict[str, float]], bool], what: str) -> dict[str, float]:
        """The metrics at that time, however long the machine takes. They change with the engine's steps: a token is
        asked for each time."""
        clock, pause = WallClock(), threading.Event()
        give_up_s = clock.now() + START_S
        while not reached(now := self.metrics()):
            assert clock.now() < give_up_s, f"not within {START_S} s: {what}; {now}"
            pause.wait(0.1)
            self.ask(prompt("tick", 1))
        return now

    def evict(self, name: str, **more: Any) -> None:
        """Four prompts of ten blocks, nearly twice the pool."""
        for number in range(4):
            self.ask(prompt(f"{name} {number}", 10), **more)

    def metrics(self) -> dict[str, float]:
        """Sums by sample name, and by name{label=value} for each single label but the model's."""
        totals: dict[str, float] = defaultdict(float)
        for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            found = re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", line)
            if found is None:
                continue
            name, labels, value = found.groups()
            totals[name] += float(value)
            for label, what in re.findall(r'(\w+)="([^"]*)"', labels or ""):
                if label != "model_name":
                    totals[f"{name}{{{label}={what}}}"] += float(value)
        return dict(totals)


def prompt(name: str, blocks: int) -> list[int]:
    """Whole blocks and one token more, so that all of the blocks can come from a cache."""
    rng = Random(name)
    return [rng.randrange(3, VOCABULARY) for _ in range(blocks * BLOCK + 1)]


@contextlib.contextmanager
def serving(model: Path, *, log: Path, ours: Sequence[str], theirs: Sequence[str],
            environ: Mapping[str, str]) -> Iterator[Server]:
    """Answers /health when it is handed out. `ours` and `theirs`: flags before and after the `--`."""
    name, port = "tiny", _free_port()
    command = [sys.executable, "-m", "hostcache", "vllm", "serve", str(model), *ours, "--", "--served-model-name", name,
               "--port", str(port), *theirs]
    with log.open("wb") as stream:
        # A session of its own: an interrupt at the terminal reaches the test run, which ends the server in order.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
                                   env=dict(environ), start_new_session=True)
    try:
        server = Server(url=f"http://127.0.0.1:{port}", model=name, process=process, log=log)
        _wait_until_serving(server)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the session that was made for it, engine and workers included
            process.wait()


def _wait_until_serving(server: Server) -> None:
    clock, pause = WallClock(), threading.Event()
    deadline_s = clock.now() + START_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        ended = server.process.poll()
        if ended is not None or clock.now() > deadline_s:
            tail = "\n".join(server.log.read_text("utf-8", errors="replace").splitlines()[-30:])
            what = "did not answer /health" if ended is None else f"ended with {ended}"
            raise RuntimeError(f"the server {what}; the end of {server.log}:\n{tail}")
        pause.wait(0.25)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
