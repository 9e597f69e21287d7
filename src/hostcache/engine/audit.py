"""Remembers the tokens behind page keys and compares them on each hit: a debug mode that believes no digest.

A page key commits to its tokens by 128 bits, so a difference means a fault of ours, not a collision. Knows no pages.
"""

from __future__ import annotations

from collections.abc import Sequence

from hostcache.tier import PageKey


class TokenAudit:
    """At most `entries` pages are remembered, the oldest are forgotten first. `mismatches` should stay 0."""

    def __init__(self, page_tokens: int, entries: int) -> None:
        self.mismatches = 0
        self._page = page_tokens
        self._entries = entries
        self._tokens: dict[PageKey, tuple[int, ...]] = {}

    def note(self, keys: Sequence[PageKey], tokens: Sequence[int], start: int, stop: int) -> None:
        """Pages start … stop-1 of a prompt were published under these keys."""
        for i in range(start, stop):
            self._tokens.setdefault(keys[i], self._of(tokens, i))
        while len(self._tokens) > self._entries:
            del self._tokens[next(iter(self._tokens))]

    def agreed(self, keys: Sequence[PageKey], tokens: Sequence[int]) -> int:
        """How many leading pages may be served: up to the first whose key stands for other tokens."""
        for i, key in enumerate(keys):
            if self._tokens.get(key, self._of(tokens, i)) != self._of(tokens, i):
                self.mismatches += 1
                return i
        return len(keys)

    def _of(self, tokens: Sequence[int], page: int) -> tuple[int, ...]:
        return tuple(tokens[page * self._page : (page + 1) * self._page])
