"""A fresh vLLM server process per arm, its engine in processes of its own: start, prove the arm, stop by session.

Every arm gets the same flags and the same environment; only the connector differs. Measures nothing.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

import httpx

from hostcache.bench.vllm.metrics import Scrape, parse
from hostcache.client.openai import Failure, OpenAIClient
from hostcache.client.process import stop
from hostcache.clock import Clock
from hostcache.errors import ConfigError, ServerError

BLOCK_TOKENS = 32
START_TIMEOUT_S = 400.0
SHOWS_TIMEOUT_S = 10.0
NAME = "bench"
WARM_TOKENS = 3 * BLOCK_TOKENS
"""Of the first request, which no measurement counts: the first forward pass costs more than any other."""

Kind = Literal["off", "on", "native", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """`transfer`: the --kv-transfer-config of another connector; `environment`: what it needs besides."""

    name: str
    kind: Kind
    transfer: str | None = None
    environment: Mapping[str, str]

    def connector(self, host_bytes: int) -> list[str]:
        """Flags beyond those that every arm has."""
        if self.kind == "native":
            return ["--kv-transfer-config", json.dumps({
                "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
                    "spec_name": "MemcpyOffloadingSpec", "spec_module_path": "hostcache.bench.vllm.offload_spec",
                    # Its default keeps prompts only; a conversation resends its answers, and ours keeps those too.
                    "offload_prompt_only": False, "cpu_bytes_to_use": host_bytes}})]
        return ["--kv-transfer-config", self.transfer] if self.transfer is not None else []


OFF = Arm(name="off", kind="off", environment={})
ON = Arm(name="on", kind="on", environment={})
NATIVE = Arm(name="native", kind="native", environment={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What all arms of a stage have alike. `pool_blocks`: usable ones; vLLM keeps one more to itself."""

    model_dir: Path
    token_bytes: int
    pool_blocks: int
    max_model_len: int
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 1024

    def flags(self) -> list[str]:
        return ["--served-model-name", NAME, "--dtype", "float32", "--enforce-eager",
                "--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(self.pool_blocks + 1),
                "--max-model-len", str(self.max_model_len), "--max-num-seqs", str(self.max_num_seqs),
                "--max-num-batched-tokens", str(self.max_num_batched_tokens), "--enable-prefix-caching",
                "--enable-prompt-tokens-details"]

    @property
    def pool_tokens(self) -> int:
        return self.pool_blocks * BLOCK_TOKENS

    def environment(self) -> dict[str, str]:
        """Of the same for every arm. GNU OpenMP spins while it waits, Intel's, which the wheel brings, can be told not
        to; one compiled function of the embedding costs half a minute at the first forward pass."""
        library = Path(sys.prefix) / "lib" / "libiomp5.so"
        pool_gib = (self.pool_blocks + 1) * BLOCK_TOKENS * self.token_bytes / 2**30
        return {
            "OMP_NUM_THREADS": str(os.cpu_count() or 1), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": str(int(pool_gib) + 1),
            **({"LD_PRELOAD": str(library), "KMP_BLOCKTIME": "0"} if library.is_file() else {}),
        }


def command(shape: Shape, arm: Arm, host_bytes: int, port: int) -> list[str]:
    """Whole, environment included: what is printed can be run again."""
    given = {**shape.environment(), **arm.environment}
    start = ["env", *(f"{name}={value}" for name, value in given.items()), sys.executable, "-m"]
    flags = [*shape.flags(), "--host", "127.0.0.1", "--port", str(port)]
    if arm.kind == "on":
        return [*start, "hostcache", "vllm", "serve", str(shape.model_dir), "--host-cache-bytes", str(host_bytes),
                "--host-cache-mode", "on-pressure", "--", *flags]
    return [*start, "hostcache.vllm_plugin.vllm_command", "serve", str(shape.model_dir), *flags,
            *arm.connector(host_bytes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    shape: Shape
    arm: Arm
    host_bytes: int
    command: str
    log: str
    client: OpenAIClient
    http: httpx.AsyncClient

    async def scrape(self) -> Scrape:
        try:
            answer = await self.http.get("/metrics", timeout=30.0)
        except httpx.HTTPError as error:
            raise ServerError(f"the {self.arm.name} arm's /metrics: {str(error) or type(error).__name__}") from error
        return parse(answer.text)

    def facts(self) -> dict[str, object]:
        return {"arm": self.arm.name, "host_bytes": self.host_bytes if self.arm.kind != "off" else 0,
                "pool_tokens": self.shape.pool_tokens, "command": self.command, "log": self.log}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    log_dir: Path
    clock: Clock

    @asynccontextmanager
    async def running(self, shape: Shape, arm: Arm, *, host_bytes: int, name: str) -> AsyncIterator[Server]:
        """Serves, has answered one request, and was proven to be the arm. Raises ServerError otherwise."""
        port = _free_port()
        words = command(shape, arm, host_bytes, port)
        log = self.log_dir / f"{name}.log"
        with log.open("xb") as stream:
            # A session of its own: Ctrl-C reaches us alone, and its engine and workers can be ended with it.
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=stream,  # noqa: ASYNC220
                                       stderr=subprocess.STDOUT, start_new_session=True)
        url = f"http://127.0.0.1:{port}"
        try:
            async with (OpenAIClient(url, clock=self.clock) as client,
                        httpx.AsyncClient(base_url=url, trust_env=False) as http):
                await self._wait_until_serving(process, client, log)
                server = Server(shape=shape, arm=arm, host_bytes=host_bytes, command=shlex.join(words), log=log.name,
                                client=client, http=http)
                await self._warm(server)
                await self._prove(server, log)
                yield server
        finally:
            await stop(process)

    async def _wait_until_serving(self, process: subprocess.Popen[bytes], client: OpenAIClient, log: Path) -> None:
        deadline_s = self.clock.now() + START_TIMEOUT_S
        while not await client.healthy():
            if process.poll() is not None:
                raise ServerError(f"the server ended with {process.returncode} before it served: {_last_error(log)} "
                                  f"(whole log: {log})")
            if self.clock.now() > deadline_s:
                raise ServerError(f"the server did not answer /health within {START_TIMEOUT_S:.0f} s; see {log}")
            await self.clock.sleep_until(self.clock.now() + 0.25)

    async def _warm(self, server: Server) -> None:
        rng = Random("warm")
        prompt = [rng.randrange(100, 20_000) for _ in range(WARM_TOKENS)]
        outcome = await server.client.complete(prompt, model=NAME, max_tokens=4, rng=rng)
        if isinstance(outcome, Failure):
            raise ServerError(f"the {server.arm.name} arm's first request failed: {outcome.error}; see {server.log}")

    async def _prove(self, server: Server, log: Path) -> None:
        """vLLM shows a step's numbers shortly after it, so a doubt is looked at again for a while."""
        give_up_s = self.clock.now() + SHOWS_TIMEOUT_S
        while (doubt := doubt_of(server.arm, await server.scrape())) is not None:
            if self.clock.now() > give_up_s:
                raise ServerError(f"{doubt}; nothing was measured. See {log} for the reason")
            await self.clock.sleep_until(self.clock.now() + 0.25)


def doubt_of(arm: Arm, scrape: Scrape) -> str | None:
    """Why this server is not the arm that was asked for; None where its own metrics say that it is."""
    asked = scrape.value("vllm:external_prefix_cache_queries_total")
    if arm.kind == "off":
        names = scrape.names("hostcache_", "vllm:kv_offload")
        if names or asked:
            return f"the off arm's server shows {names[0] if names else 'questions to an external cache'}"
        return None
    if arm.kind == "on":
        quota = scrape.value("hostcache_quota_bytes")
        return None if quota else f"the on arm's server shows hostcache_quota_bytes {quota}: its tier is off"
    if arm.kind == "native" and not scrape.names("vllm:kv_offload"):
        return "the native arm's server shows no vllm:kv_offload series: its connector is not there"
    if not asked:
        return f"the {arm.name} arm's server asked no external cache for the first prompt: its connector is not there"
    return None


def others(texts: list[str], environments: list[str]) -> tuple[Arm, ...]:
    """Arms of NAME=JSON, each with the NAME:KEY=VALUE that are meant for it. Raises ConfigError."""
    given: dict[str, str] = {}
    for text in texts:
        name, equals, transfer = text.partition("=")
        if not equals or not name.isidentifier() or name in ("off", "on", "native") or name in given:
            raise ConfigError(f"--other {text!r}: give NAME=JSON with a new NAME of letters, digits and _")
        try:
            good = isinstance(json.loads(transfer), dict)
        except json.JSONDecodeError:
            good = False
        if not good:
            raise ConfigError(f"--other {name}: {transfer!r} is no JSON object; give a --kv-transfer-config")
        given[name] = transfer
    variables: dict[str, dict[str, str]] = {name: {} for name in given}
    for text in environments:
        name, _, pair = text.partition(":")
        key, equals, value = pair.partition("=")
        if name not in variables or not key or not equals:
            raise ConfigError(f"--other-env {text!r}: give NAME:KEY=VALUE with a NAME that --other has")
        variables[name][key] = value
    return tuple(Arm(name=name, kind="other", transfer=transfer, environment=variables[name])
                 for name, transfer in given.items())



def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last_error(log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or "error:" in line]
    return (named or lines or ["it said nothing"])[-1].strip()[-300:]
