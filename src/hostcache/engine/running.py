"""The engine on a thread of its own, as the server sees it (`EngineHandle`). All of the engine happens on that thread.

Calls from other threads go through a mailbox; what comes back is events, called on the engine's thread, and a frozen
record of each step. Knows neither HTTP nor models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hostcache.clock import Clock
from hostcache.engine.engine import Engine, Log
from hostcache.engine.interfaces import Tokenizer
from hostcache.engine.live import Live
from hostcache.engine.requests import GenerationEvent, GenerationRequest
from hostcache.errors import RequestRefused

COPY_POLL_S = 0.005
"""How soon the resting engine hears a call while a copy is on its way: then it waits for the copier, not for mail."""

TICK_S = 0.1
"""The resting engine looks around this often, so that paced write-backs go on without traffic."""


@dataclass(frozen=True, slots=True)
class _Submit:
    live: Live


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Reset:
    weights_unchanged: bool


_Letter = _Submit | _Abort | _Reset


class RunningEngine:
    """Starts its thread at once. Life: *serving* → `close` → *draining* → *stopped*; an exception inside a step makes
    it *broken*: what runs then ends with an error, what comes later too, and `healthy` says why."""

    def __init__(self, engine: Engine, *, model_id: str, clock: Clock, log: Log, rss_bytes: Callable[[], int],
                 release: Callable[[float], bool] = lambda timeout_s: True) -> None:
        """`release`: gives back what the engine ran on (copier, memory), within a time; False when it could not."""
        self._engine = engine
        self._model_id = model_id
        self._clock = clock
        self._log = log
        self._rss_bytes = rss_bytes
        self._release = release
        self._started_s = clock.now()
        self._news = threading.Condition()  # guards the five below
        self._mail: list[_Letter] = []
        self._closing = False
        self._stopping = False
        self._idle = True
        self._broken: str | None = None
        self._thread = threading.Thread(target=self._work, name="hostcache-engine", daemon=True)
        self._thread.start()

    # ---- any thread

    @property
    def model_id(self) -> str:
        return self._model_id

    @property
    def max_context(self) -> int:
        return self._engine.config.max_context

    @property
    def slots(self) -> int:
        return self._engine.config.slots

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def submit(self, request: GenerationRequest, on_event: Callable[[GenerationEvent], None]) -> None:
        """As EngineHandle says. Keys the prompt on the calling thread."""
        live = self._engine.prepare(request, on_event)
        with self._news:
            if self._closing:
                raise RequestRefused("the server is stopping; send the request to another one", status=429,
                                     code="draining")
            self._idle = False
            self._mail.append(_Submit(live))
            self._news.notify_all()

    def abort(self, request_id: str) -> None:
        self._post(_Abort(request_id))

    def reset(self, *, weights_unchanged: bool) -> None:
        """Takes effect before any request that is submitted after this call."""
        self._post(_Reset(weights_unchanged))

    def stats(self) -> Mapping[str, Any]:
        return self._engine.published.as_json(uptime_s=self._uptime_s(), rss_bytes=self._rss_bytes())

    def metrics_text(self) -> str:
        return self._engine.published.metrics_text(uptime_s=self._uptime_s(), rss_bytes=self._rss_bytes())

    def healthy(self) -> str | None:
        if self._broken is not None:
            return self._broken
        return "the engine is stopped" if self._stopping else None

    def close(self, timeout_s: float) -> bool:
        with self._news:
            self._closing = True
            self._news.notify_all()
            whole = self._news.wait_for(lambda: self._idle, timeout=max(0.0, timeout_s))
            self._stopping = True
            self._news.notify_all()
        # A step that is under way ends first: at least a second, or the thread would run on with freed memory.
        self._thread.join(max(1.0, timeout_s))
        if self._thread.is_alive():
            return False
        return self._release(max(0.1, timeout_s)) and whole

    def _post(self, letter: _Letter) -> None:
        with self._news:
            self._mail.append(letter)
            self._news.notify_all()

    def _uptime_s(self) -> float:
        return self._clock.now() - self._started_s

    # ---- the engine's thread

    def _work(self) -> None:
        while True:
            with self._news:
                mail, self._mail = self._mail, []
                if self._stopping:
                    break
            try:
                worked = self._turn(mail)
            except Exception as error:
                self._break(error)
                worked = True
            with self._news:
                self._idle = self._engine.idle and not any(isinstance(letter, _Submit) for letter in self._mail)
                if self._idle:
                    self._news.notify_all()
            if not worked:
                self._rest()
        self._end_everything(mail)

    def _turn(self, mail: list[_Letter]) -> bool:
        if self._broken is not None:
            for letter in mail:
                if isinstance(letter, _Submit):
                    self._engine.refuse(letter.live, self._broken)
            self._engine.deliver()
            return False
        for letter in mail:
            match letter:
                case _Submit(live):
                    self._engine.enqueue(live)
                case _Abort(request_id):
                    self._engine.abort(request_id)
                case _Reset(weights_unchanged):
                    self._engine.reset(weights_unchanged=weights_unchanged)
        return self._engine.step() or bool(mail)

    def _rest(self) -> None:
        """Until mail comes, a copy ends or a deadline passes."""
        wake_s = self._engine.wake_s
        patience_s = TICK_S if wake_s is None else min(TICK_S, max(0.0, wake_s - self._clock.now()))
        if self._broken is None and self._engine.copies_on_their_way and not self._mail:
            self._engine.wait_for_copies(min(COPY_POLL_S, patience_s))
            return
        with self._news:
            self._news.wait_for(lambda: bool(self._mail) or self._stopping, timeout=patience_s)

    def _break(self, error: Exception) -> None:
        """Nothing is known of the engine's state any more: say so, and leave nobody waiting."""
        reason = f"the engine stopped: {type(error).__name__}: {' '.join(str(error).split())}; restart the server"
        with self._news:
            first = self._broken is None
            self._broken = self._broken or reason
        if first:
            self._log("engine_broken", level="error", error=reason)
        self._engine.fail_all(reason)

    def _end_everything(self, mail: list[_Letter]) -> None:
        """Cut short: whoever still waits hears of it, and copies are given up so that they can be awaited."""
        for letter in mail:
            if isinstance(letter, _Submit):
                self._engine.refuse(letter.live, "the server is stopping")
        if self._broken is None:
            self._engine.abort_all()
        self._engine.deliver()
