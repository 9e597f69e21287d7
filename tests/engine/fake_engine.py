"""A scripted EngineHandle on a thread of its own: goes into the server by the front door, needs no torch.

Its tokenizer has one token per UTF-8 byte. It answers with the words of `reply`, one token an event, and holds back
or fails where a test tells it to. `check` says whether every request that came in is accounted for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hostcache.engine.requests import (
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    LogitTrace,
    Usage,
)
from hostcache.errors import RequestRefused

Listener = Callable[[GenerationEvent], None]


class ByteDecoder:
    def __init__(self) -> None:
        self._held = b""

    def push(self, token_ids: Sequence[int]) -> str:
        self._held += bytes(token_ids)
        text = self._held.decode("utf-8", "ignore")
        self._held = self._held[len(text.encode()):]
        return text

    def flush(self) -> str:
        text, self._held = self._held.decode("utf-8", "replace"), b""
        return text


class ByteTokenizer:
    eos_ids: tuple[int, ...] = (0,)
    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if messages[-1]["role"] == "assistant":
            raise ValueError("the last message must not be the assistant's")
        return list("".join(f"<{each['role']}>{each['content']}\n" for each in messages).encode() + b"<assistant>")

    def stream(self) -> ByteDecoder:
        return ByteDecoder()


@dataclass
class _Live:
    request: GenerationRequest
    listener: Listener
    decoder: ByteDecoder = field(default_factory=ByteDecoder)
    sent: int = 0
    text: str = ""


@dataclass
class FakeEngine:
    """`gate` closed: requests are taken in and nothing is generated until it is opened. `fail_at`: the token before
    which a request ends with an error. `stall_at`: the token before which a request waits for ever (or its abort)."""

    reply: str = "hello there, this is the scripted answer"
    model_id: str = "fake-model"
    max_context: int = 512
    slots: int = 4
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    cached: tuple[int, int] = (3, 2)
    fail_at: int | None = None
    stall_at: int | None = None
    refuse_at: int | None = None
    wrong: str | None = None

    def __post_init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.seen: list[GenerationRequest] = []
        self.arrivals: queue.Queue[GenerationRequest] = queue.Queue()
        self.aborted: queue.Queue[str] = queue.Queue()
        self.resets: list[bool] = []
        self.finished = 0
        self.peak = 0
        self._inbox: queue.Queue[Callable[[], None]] = queue.Queue()
        self._live: dict[str, _Live] = {}
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, on_event: Listener) -> None:
        if self.refuse_at is not None and len(request.prompt) >= self.refuse_at:
            raise RequestRefused(f"the prompt of {len(request.prompt)} tokens can never fit a pool of 7",
                                 code="too_big")
        self.seen.append(request)
        self._inbox.put(lambda: self._take(request, on_event))

    def abort(self, request_id: str) -> None:
        self._inbox.put(lambda: self._abort(request_id))

    def stats(self) -> Mapping[str, Any]:
        return {"engine": {"model": self.model_id, "model_revision": "abc", "active_requests": len(self._live)},
                "accounting": {"requests": self.finished}, "host_cache": None, "host_cache_config": None}

    def metrics_text(self) -> str:
        return "# TYPE hostcache_requests_total counter\nhostcache_requests_total 1"

    def reset(self, *, weights_unchanged: bool) -> None:
        self.resets.append(weights_unchanged)

    def healthy(self) -> str | None:
        return self.wrong

    def close(self, timeout_s: float) -> bool:
        self._stop = True
        self.gate.set()
        self._inbox.put(lambda: None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def check(self) -> None:
        """Every request that came in has ended, once."""
        assert not self._live, f"still live: {sorted(self._live)}"

    def _take(self, request: GenerationRequest, listener: Listener) -> None:
        assert request.request_id not in self._live, "an engine's request ids are unique"
        self._live[request.request_id] = _Live(request, listener)
        self.peak = max(self.peak, len(self._live))
        self.arrivals.put(request)

    def _abort(self, request_id: str) -> None:
        live = self._live.pop(request_id, None)
        if live is not None:
            live.listener(self._event(live, (), "", "abort"))
            self.aborted.put(request_id)

    def _run(self) -> None:
        while not self._stop:
            idle = not self.gate.is_set() or not any(each.sent != self.stall_at for each in self._live.values())
            try:
                self._inbox.get(timeout=0.005 if self._live else None)() if idle else self._inbox.get_nowait()()
                continue
            except queue.Empty:
                pass
            if self.gate.is_set():
                for live in list(self._live.values()):
                    self._step(live)
        for request_id in list(self._live):
            self._abort(request_id)

    def _step(self, live: _Live) -> None:
        if live.sent == self.stall_at:
            return
        request = live.request
        if live.sent == self.fail_at:
            self._finish(live, (), "", "error")
            return
        reply = self.reply.encode()
        token = reply[live.sent % len(reply)]
        live.sent += 1
        text = live.decoder.push([token])
        live.text += text
        hit = next((stop for stop in request.sampling.stop if stop in live.text), None)
        if hit is not None:
            self._finish(live, (token,), "", "stop")
        elif live.sent >= request.sampling.max_tokens:
            self._finish(live, (token,), text + live.decoder.flush(), "length")
        elif live.sent == len(reply) and not request.sampling.ignore_eos:
            self._finish(live, (token,), text + live.decoder.flush(), "stop")
        else:
            live.listener(self._event(live, (token,), text, None))

    def _finish(self, live: _Live, tokens: tuple[int, ...], text: str, reason: FinishReason) -> None:
        del self._live[live.request.request_id]
        self.finished += 1
        live.listener(self._event(live, tokens, text, reason))

    def _event(self, live: _Live, tokens: tuple[int, ...], text: str, reason: FinishReason | None) -> GenerationEvent:
        prompt = len(live.request.prompt)
        device, host = (min(part, prompt // 2) for part in self.cached)
        report = {"device": device, "host": host, "recomputed": {"new": prompt - device - host},
                  "first_miss": {"reason": "new", "position": device + host}}
        usage = Usage(prompt_tokens=prompt, completion_tokens=live.sent, device_tokens=device, host_tokens=host,
                      report=report)
        logits = (LogitTrace(digest="00" * 32, margin=0.5),) * len(tokens) if live.request.trace_logits else ()
        return GenerationEvent(request_id=live.request.request_id, text=text, token_ids=tokens, usage=usage,
                               finish_reason=reason, logits=logits,
                               error="the scripted failure" if reason == "error" else None)
