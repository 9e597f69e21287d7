"""One record per request, from submission to its last event. Holds state and derives lengths; decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Any

from hostcache.engine.device import CacheChoices
from hostcache.engine.requests import GenerationEvent, GenerationRequest
from hostcache.engine.restores import Restore
from hostcache.engine.text import AnswerText
from hostcache.tier import Account, KeyChain

OnEvent = Callable[[GenerationEvent], None]


class State(Enum):
    WAITING = "waiting"
    """in the queue; holds no pages but `claim`"""
    RESTORING = "restoring"
    """in a slot with all its pages; some of them are being copied into"""
    RUNNING = "running"
    """in a slot, prefilled or decoded at each step"""
    ENDED = "ended"


@dataclass(slots=True, kw_only=True, eq=False)
class Live:
    """WAITING → admitted → (RESTORING →) RUNNING → ENDED; preempted, or a late restore kept its pages: → WAITING.

    `tokens` is the prompt and the answer so far; positions 0 … written-1 of it are in `pages`, whole pages of them are
    published. `chain` has the keys of the whole pages of the prompt, and of the answer as far as written.
    """

    request: GenerationRequest
    on_event: OnEvent
    order: int
    tokens: list[int]
    prompt_tokens: int
    chain: KeyChain
    text: AnswerText
    rng: Random
    page_tokens: int
    state: State = State.WAITING
    pages: list[int] = field(default_factory=list)
    written: int = 0
    claim: list[int] = field(default_factory=list)
    """Pages of its prompt, held while room is on its way, so that making room does not cost them."""
    admitted: int = 0
    """Orders admissions; the greatest is preempted first."""
    account: Account | None = None
    report: Mapping[str, Any] | None = None
    """Set when the account is settled."""
    device_pages: int = 0
    host_pages: int = 0
    restore: Restore | None = None
    may_restore: bool = True
    waits_for: int | None = None
    """The one restore of another request that it waited for."""
    recovering: bool = False
    """Preempted; what it was served since then counts as recovery."""
    recovered: tuple[int, int] = (0, 0)
    deferred: bool = False
    shared: bool = False
    """It waited while another request computed its next page."""
    wanted_pages: int | None = None
    """What its last try of admission was short of or took."""
    agreed_pages: int | None = None
    """With an audit: the leading pages whose keys stand for these very tokens."""
    prompt_retained: bool = False
    stale: bool = False
    """The caches were reset while it ran: it publishes and leaves nothing."""

    @property
    def answer_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def todo(self) -> int:
        """Tokens whose KV is not written yet; the last of them gives the next token."""
        return len(self.tokens) - self.written

    @property
    def most_positions(self) -> int:
        """Positions it will ever write: the last token of an answer needs none."""
        return self.prompt_tokens + self.request.sampling.max_tokens - 1

    @property
    def loadable_pages(self) -> int:
        """Leading pages it may be served: its last token is always computed."""
        pages = (len(self.tokens) - 1) // self.page_tokens
        return pages if self.agreed_pages is None else min(pages, self.agreed_pages)

    @property
    def pages_to_start(self) -> int:
        """Pages for all tokens it has and the next one."""
        return -(-min(len(self.tokens) + 1, self.most_positions) // self.page_tokens)

    @property
    def loads_pages(self) -> int | None:
        """How many pages the tier may load for it; None: any number."""
        limits = self.request.limits
        if not limits.load:
            return 0
        return None if limits.max_load_tokens is None else limits.max_load_tokens // self.page_tokens

    def choices(self) -> CacheChoices:
        limits, hints = self.request.limits, self.request.hints
        caps = []
        if not limits.store:
            caps.append(0)
        if limits.max_store_tokens is not None:
            caps.append(limits.max_store_tokens // self.page_tokens)
        if not limits.store_answer:
            caps.append(self.prompt_tokens // self.page_tokens)
        return CacheChoices(store_pages=min(caps, default=None), session_closed=hints.session_closed,
                            expected_return=hints.expected_return_s is not None)
