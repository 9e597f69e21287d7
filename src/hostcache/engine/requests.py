"""What a request is and what comes back: the border between the server and the engine. Knows neither HTTP nor torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from hostcache.engine.interfaces import Tokenizer

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. temperature 0 is greedy; `seed` None draws from the engine's own stream."""

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """What the tier may do for one request (None: no limit). Honoured and visible in the request's report."""

    store: bool = True
    load: bool = True
    store_answer: bool = True
    max_store_tokens: int | None = None
    max_load_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheHints:
    """Soft: may order, never block, exceed or fail."""

    session_id: str | None = None
    expected_return_s: float | None = None
    session_closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    salt: str = ""
    limits: CacheLimits = field(default_factory=CacheLimits)
    hints: CacheHints = field(default_factory=CacheHints)
    trace_logits: bool = False
    """Report a digest and the top-two margin of the logits behind every token (for equivalence checks)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTrace:
    """`digest`: sha256 hex of the float32 logits row; `margin`: best minus second best logit."""

    digest: str
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """`cached_tokens` = device + host; known from the first token on. `report` is the account of this request
    (tokens by source, recomputed by reason, the first missing page), ready for JSON."""

    prompt_tokens: int
    completion_tokens: int
    device_tokens: int
    host_tokens: int
    report: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        return self.device_tokens + self.host_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEvent:
    """One step of one request. `text` is what may be shown now (stop strings and half characters held back).
    `token_ids` are the new tokens. The last event has a finish_reason; `error` only with finish_reason "error"."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    finish_reason: FinishReason | None = None
    error: str | None = None
    logits: tuple[LogitTrace, ...] = ()
    """One per token id when the request asked for `trace_logits`."""


class EngineHandle(Protocol):
    """The running engine as the server sees it. All methods may be called from any thread and return at once."""

    @property
    def model_id(self) -> str: ...

    @property
    def max_context(self) -> int:
        """Longest prompt + answer of one request, in tokens."""
        ...

    @property
    def slots(self) -> int:
        """Requests that run at the same time (`--concurrency`)."""
        ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def submit(self, request: GenerationRequest, on_event: Callable[[GenerationEvent], None]) -> None:
        """Queue a request. `on_event` is called on the engine's thread; the last call has a finish_reason.

        Raises RequestRefused, with the sizes, for one that can never fit.
        """
        ...

    def abort(self, request_id: str) -> None:
        """The client left: stop, free pages and pins. Unknown ids are ignored."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """The latest published record, ready for JSON: `engine`, `accounting`, `host_cache` (None when off),
        `host_cache_config`."""
        ...

    def metrics_text(self) -> str:
        """Prometheus text of the same record."""
        ...

    def reset(self, *, weights_unchanged: bool) -> None:
        """Forget every cached prefix on the device, and on the host unless `weights_unchanged`."""
        ...

    def healthy(self) -> str | None:
        """None when serving; else one line that says what is wrong."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Finish what runs (at most timeout_s), refuse what is new, stop the thread. False: cut short."""
        ...
