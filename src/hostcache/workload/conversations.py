"""Conversations without a model: tokens drawn from a counter, their page keys, and an independent print of every page.

Token i of a conversation is splitmix64(seed, number of the draw): the same in every process. Keys come from the tier's
own `key_chain`; a page's print is another digest of the same tokens, so that a page restored under the right key but
with the wrong bytes is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hostcache.errors import ConfigError
from hostcache.tier import Identity, KeyChain, key_chain

Prints = npt.NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_ANCESTORS = 64
"""How many earlier frontiers a prompt names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """A position at which a snapshot may end: after `tokens` tokens, whose digest is `print_`."""

    tokens: int
    print_: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request: `prompt_tokens` and the `reply_tokens` that will be generated.

    `chain` and `prints` cover the whole pages of both. `ancestors`: earlier frontiers that the prompt continues, oldest
    first. `store_pages`: at most so many pages may be written back (None: all); `load`: may be restored.
    """

    chain: KeyChain
    prints: Prints
    prompt_tokens: int
    reply_tokens: int
    prompt_end: Frontier
    turn_end: Frontier
    ancestors: tuple[Frontier, ...] = ()
    store_pages: int | None = None
    load: bool = True

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.reply_tokens


class _Column:
    """Values that grow at their end and may be cut. What was handed out before never changes: whoever appends after a
    cut writes to a copy."""

    def __init__(self, kind: npt.DTypeLike) -> None:
        self._room = np.empty(64, dtype=kind)
        self._written = self.length = 0

    @property
    def values(self) -> npt.NDArray[Any]:
        return self._room[: self.length]

    def append(self, values: npt.NDArray[Any]) -> None:
        end = self.length + len(values)
        if end > len(self._room) or self.length < self._written:
            room = np.empty(max(64, 2 * end), dtype=self._room.dtype)
            room[: self.length] = self.values
            self._room = room
        self._room[self.length : end] = values
        self._written = self.length = end


class Conversation:
    """`turn(reply)` → (it is served) → `answered()` → `hear(tokens)` → `turn(reply)` …; `compact` cuts it back.

    With `head`, it begins with the first `head_tokens` tokens of another conversation.
    """

    def __init__(
        self,
        identity: Identity,
        seed: int,
        *,
        start_tokens: int,
        head: Conversation | None = None,
        head_tokens: int = 0,
    ) -> None:
        if start_tokens < 1:
            raise ConfigError(f"a conversation starts with {start_tokens} tokens; give at least 1")
        self._identity = identity
        self._page = identity.page_tokens
        self._seed = np.uint64(_mix_one(seed))
        self._drawn = 0
        self._tokens = _Column(np.int32)
        self._chain = key_chain((), identity)
        self._prints = _Column(np.uint64)
        self._said = 0
        self._frontiers: list[Frontier] = []
        if head is not None:
            self._append(head._tokens.values[: min(head_tokens, head._said)])
        if start_tokens > self._tokens.length:
            self._append(self._draw(start_tokens - self._tokens.length))
        self._said = self._tokens.length

    @property
    def tokens(self) -> int:
        """Length of the next prompt."""
        return self._said

    def turn(self, reply_tokens: int, *, store_pages: int | None = None, load: bool = True) -> Turn:
        """The next request. Asked again before `answered`, it draws another reply of that length."""
        self._cut(self._said)
        if reply_tokens:
            self._append(self._draw(reply_tokens))
        return Turn(
            chain=self._chain,
            prints=self._prints.values,
            prompt_tokens=self._said,
            reply_tokens=reply_tokens,
            prompt_end=self._frontier(self._said),
            turn_end=self._frontier(self._tokens.length),
            ancestors=tuple(self._frontiers[-_ANCESTORS:]),
            store_pages=store_pages,
            load=load,
        )

    def answered(self) -> None:
        """The reply of the last turn is part of the conversation now."""
        self._frontiers += [self._frontier(self._said), self._frontier(self._tokens.length)]
        del self._frontiers[: -2 * _ANCESTORS]
        self._said = self._tokens.length

    def hear(self, tokens: int) -> None:
        """A tool's result or a user's words."""
        self._cut(self._said)
        self._append(self._draw(tokens))
        self._said = self._tokens.length

    def compact(self, share: float) -> None:
        """Cut to `share` of its length; what follows differs from what followed before."""
        self._cut(max(1, int(self._said * share)))
        self._said = self._tokens.length
        self._frontiers = [each for each in self._frontiers if each.tokens <= self._said]

    def _draw(self, count: int) -> npt.NDArray[np.int32]:
        drawn = np.arange(self._drawn, self._drawn + count, dtype=np.uint64)
        self._drawn += count
        return (_mix(drawn * _GAMMA + self._seed) >> np.uint64(33)).astype(np.int32)

    def _append(self, tokens: npt.NDArray[np.int32]) -> None:
        self._tokens.append(tokens)
        first = len(self._chain)
        rest = self._tokens.values[first * self._page :]
        self._chain = self._chain.extend(rest)
        added = len(self._chain) - first
        if added:
            before = self._prints.values[-1] if first else np.uint64(0)
            pages = rest[: added * self._page].astype(np.uint64).reshape(added, self._page)
            self._prints.append(_page_prints(pages, first, before))

    def _cut(self, tokens: int) -> None:
        self._tokens.length = tokens
        pages = tokens // self._page
        if pages < len(self._chain):
            self._chain = self._chain.prefix(pages)
            self._prints.length = pages

    def _frontier(self, tokens: int) -> Frontier:
        pages = tokens // self._page
        rest = self._tokens.values[pages * self._page : tokens].astype(np.uint64)
        state = self._prints.values[max(0, pages - 1) : pages].sum(dtype=np.uint64)
        own = (rest * _weights(self._page)[: len(rest)]).sum(dtype=np.uint64)
        mixed = _mix(np.array([state, own, tokens], dtype=np.uint64).sum(dtype=np.uint64, keepdims=True))
        return Frontier(tokens=tokens, print_=int(mixed[0]))


def token_prints(tokens: Sequence[int], page_tokens: int) -> Prints:
    """The prints of a token sequence's whole pages: one a page, each over all tokens up to that page's end."""
    pages = len(tokens) // page_tokens
    data = np.asarray(tokens[: pages * page_tokens], dtype=np.uint64).reshape(pages, page_tokens)
    return _page_prints(data, 0, np.uint64(0))


def _page_prints(pages: npt.NDArray[np.uint64], first: int, before: np.uint64) -> Prints:
    """`pages` (count, page_tokens): the first is page `first`, behind one whose print is `before`. Wraps at 2^64."""
    own = (pages * _weights(pages.shape[1])).sum(axis=1, dtype=np.uint64)
    place = np.arange(first + 1, first + 1 + len(own), dtype=np.uint64) * _GAMMA
    prints = np.cumsum(_mix(own + place), dtype=np.uint64)
    return prints + before


@lru_cache(maxsize=8)
def _weights(count: int) -> npt.NDArray[np.uint64]:
    """Odd, all different: swapped tokens give another sum."""
    return _mix(np.arange(1, count + 1, dtype=np.uint64)) | np.uint64(1)


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def _mix_one(seed: int) -> int:
    return int(_mix(np.array([seed & (2**64 - 1)], dtype=np.uint64))[0])
