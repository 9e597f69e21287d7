"""A scripted server with the surface that the bench uses and two faked tiers: same flags, same stats, no model.

Run as `python mini_server.py MODEL --port N …`. The reply to a prompt is a function of its tokens alone. The device is
an LRU of pages of `--pool-tokens`; what it evicts goes to the host when `--host-cache-bytes` is not 0. The model's name
picks a fault: `mini:tier-dead` never has a tier, `mini:busy` refuses the first two requests of every five, `mini:drift`
answers differently when anything came from the host, `mini:forgetful` restores nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

VOCABULARY = 5000
PAGE_BYTES = 1000


def tokens_of(text: str) -> list[int]:
    """Four characters a token."""
    return [int.from_bytes(hashlib.blake2b(text[i : i + 4].encode(), digest_size=2).digest()) % VOCABULARY
            for i in range(0, len(text), 4)]


def reply_to(prompt: Sequence[int], count: int, drift: int = 0) -> list[int]:
    seed = hashlib.sha256(json.dumps([*prompt, drift]).encode()).digest()
    return [int.from_bytes(hashlib.blake2b(seed, salt=i.to_bytes(8), digest_size=2).digest()) % VOCABULARY
            for i in range(count)]


class MiniTiers:
    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings = settings
        self.page = settings.page_tokens
        self.device: OrderedDict[int, None] = OrderedDict()
        self.host: set[int] = set()
        self.seen: set[int] = set()
        self.tier = settings.host_cache_bytes > 0 and settings.model != "mini:tier-dead"
        self.requests = 0
        self.counters: dict[str, int] = dict.fromkeys(
            ("restores", "restore_bytes", "store_bytes", "stores_issued", "copy_submissions", "evict_waits",
             "prefill_holds", "restore_failures", "restore_timeouts", "evict_drops_uncached"), 0)
        self.restore_s = 0.0
        self.evictions = 0
        self.accounting: dict[str, int] = dict.fromkeys(
            ("requests", "prompt_tokens", "device_tokens", "host_tokens", "recomputed_tokens", "bound_tokens"), 0)
        self.recomputed: dict[str, int] = {}

    def keys(self, tokens: Sequence[int], count: int) -> list[int]:
        return [hash(tuple(tokens[: (i + 1) * self.page])) for i in range(count // self.page)]

    def account(self, prompt: Sequence[int]) -> dict[str, Any]:
        keys = self.keys(prompt, len(prompt) - 1)
        device = host = bound = 0
        while device < len(keys) and keys[device] in self.device:
            device += 1
        if self.tier and self.settings.model != "mini:forgetful":
            while device + host < len(keys) and keys[device + host] in self.host:
                host += 1
        while bound < len(keys) and keys[bound] in self.seen:
            bound += 1
        if host:
            self.counters["restores"] += 1
            self.counters["copy_submissions"] += 1
            self.counters["restore_bytes"] += host * PAGE_BYTES
            self.restore_s += 0.002
        parts = {"new": len(prompt) - bound * self.page, "evicted": (bound - device - host) * self.page}
        parts = {reason: count for reason, count in parts.items() if count}
        for reason, count in parts.items():
            self.recomputed[reason] = self.recomputed.get(reason, 0) + count
        for name, count in (("requests", 1), ("prompt_tokens", len(prompt)), ("device_tokens", device * self.page),
                            ("host_tokens", host * self.page), ("recomputed_tokens", sum(parts.values())),
                            ("bound_tokens", bound * self.page)):
            self.accounting[name] += count
        return {"device": device * self.page, "host": host * self.page, "recomputed": parts, "first_miss": None}

    def retain(self, tokens: Sequence[int]) -> None:
        for key in self.keys(tokens, len(tokens) - 1):
            self.seen.add(key)
            self.device[key] = None
            self.device.move_to_end(key)
        while len(self.device) * self.page > self.settings.pool_tokens:
            key, _ = self.device.popitem(last=False)
            self.evictions += 1
            if self.tier and key not in self.host:
                self.host.add(key)
                self.counters["store_bytes"] += PAGE_BYTES

    def stats(self) -> dict[str, Any]:
        host = {**self.counters, "quota_bytes": self.settings.host_cache_bytes,
                "bytes_used": min(len(self.host) * PAGE_BYTES, self.settings.host_cache_bytes),
                "restore_latency": {"sum_s": self.restore_s, "count": self.counters["restores"]}}
        return {
            "version": 1,
            "engine": {"model": self.settings.model, "model_revision": "r1", "page_tokens": self.page,
                       "device_evictions": self.evictions, "deferred_admissions": 0, "preemptions": 0},
            "accounting": {**self.accounting, "recomputed": dict(self.recomputed), "bound_exact": True},
            "host_cache": host if self.tier else None,
            "host_cache_config": {"host_cache_mode": self.settings.host_cache_mode, "page_bytes": PAGE_BYTES}
            if self.tier else None,
        }


def app_of(settings: argparse.Namespace) -> Starlette:
    tiers = MiniTiers(settings)

    async def health(_: Request) -> Response:
        return Response(status_code=200)

    async def stats(_: Request) -> Response:
        return JSONResponse(tiers.stats())

    async def models(_: Request) -> Response:
        return JSONResponse({"data": [{"id": settings.model}]})

    async def tokenize(request: Request) -> Response:
        tokens = tokens_of((await request.json())["prompt"])
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": 8192})

    async def completions(request: Request) -> Response:
        body = await request.json()
        tiers.requests += 1
        if settings.model == "mini:busy" and tiers.requests % 5 in (1, 2):
            return JSONResponse({"error": {"message": "busy"}}, status_code=429, headers={"Retry-After": "0.01"})
        prompt: list[int] = body["prompt"]
        report = tiers.account(prompt)
        await asyncio.sleep(report["recomputed"].get("evicted", 0) * settings.s_per_token)
        drift = int(settings.model == "mini:drift" and report["host"] > 0)
        reply = reply_to(prompt, body["max_tokens"], drift)
        tiers.retain([*prompt, *reply])
        return StreamingResponse(stream(body, prompt, reply, report), media_type="text/event-stream")

    return Starlette(routes=[
        Route("/health", health), Route("/v1/stats", stats), Route("/v1/models", models),
        Route("/tokenize", tokenize, methods=["POST"]), Route("/v1/completions", completions, methods=["POST"])])


async def stream(body: dict[str, Any], prompt: list[int], reply: list[int],
                 report: dict[str, Any]) -> AsyncIterator[str]:
    traced = bool(body.get("hostcache", {}).get("trace_logits"))
    for i, token in enumerate(reply):
        choice: dict[str, Any] = {"index": 0, "text": f" {token}", "finish_reason": None, "token_ids": [token]}
        if traced:
            digest = hashlib.sha256(json.dumps([*prompt, *reply[: i + 1]]).encode()).hexdigest()
            choice["hostcache_logits"] = [{"digest": digest, "margin": 1.0}]
        yield f"data: {json.dumps({'choices': [choice]})}\n\n"
    hit = report["device"] + report["host"]
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(reply), "total_tokens": len(prompt) + len(reply),
             "prompt_cache_hit_tokens": hit, "prompt_cache_miss_tokens": len(prompt) - hit, "hostcache": report}
    yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name in ("port", "pool-tokens", "page-tokens", "host-cache-bytes", "concurrency", "prefix-cache-entries"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--host-cache-mode", required=True)
    parser.add_argument("--s-per-token", type=float, default=0.0002)
    settings = parser.parse_args()
    if settings.model == "mini:broken":
        raise SystemExit(f"mini: no such model in {os.getcwd()}")
    uvicorn.run(app_of(settings), host=settings.host, port=settings.port, log_level="warning")


if __name__ == "__main__":
    main()
