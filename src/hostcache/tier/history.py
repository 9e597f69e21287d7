"""Remembers which pages were ever seen and how each left, in bounded memory. Knows digests only, no pages, no frames.

Two generations of a dictionary: entries go into the young one; when it is full it becomes the old one and the former
old one is dropped. From the first drop that lost something on, `exact` is False: an unknown page may have been seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import repeat

from hostcache.tier.keys import KeyChain, PageKey, chain_ids

PRESENT = 0
"""Seen, and not known to have left."""


class History:
    """64-bit digest → note (a non-negative integer, 0 when the page has not left). At most `entries` of each kind."""

    def __init__(self, entries: int) -> None:
        self.capacity = entries
        self._half = max(1, entries // 2)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._plain_young: dict[int, bytes] = {}
        self._plain_old: dict[int, bytes] = {}
        self._epochs: dict[bytes, int] = {}
        self.exact = True

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def ids(self, identity: bytes, keys: Sequence[PageKey]) -> list[int]:
        """What pages of an identity (its digest) are called here: other numbers once the identity was forgotten."""
        ids = chain_ids(keys)
        epoch = self._epochs.get(identity)
        return [i ^ epoch for i in ids] if epoch else ids

    def forget(self, identity: bytes) -> None:
        """Nothing that was seen under this identity could be served any more."""
        last = self._epochs.get(identity, 0).to_bytes(8, "little")
        self._epochs[identity] = int.from_bytes(blake2b(identity + last, digest_size=8).digest(), "little")

    def seen(self, chain: KeyChain, start: int, stop: int) -> None:
        """Pages [start, stop) of the chain exist now."""
        own = chain.identity.digest
        self._young.update(zip(self.ids(own, chain.keys[start:stop]), repeat(PRESENT)))
        self._turn()
        self._plain_young.update(zip(chain_ids(chain.plain[start:stop]), repeat(own)))
        if len(self._plain_young) > self._half:
            self._plain_old, self._plain_young = self._plain_young, {}

    def left(self, ids: Iterable[int], note: int) -> None:
        """These pages are in no tier any more; `note` (over 0) says how they left."""
        young, half = self._young, self._half
        for i in ids:
            young[i] = note
            if len(young) > half:
                self._turn()
                young = self._young

    def notes(self, ids: Sequence[int]) -> list[int | None]:
        """What is known of each: its note, or None for a page that was never seen (or is forgotten)."""
        notes = list(map(self._young.get, ids))
        if self._old and None in notes:
            old = self._old
            notes = [old.get(i) if note is None else note for i, note in zip(ids, notes, strict=True)]
        return notes

    def known_elsewhere(self, chain: KeyChain, start: int, stop: int) -> list[bool]:
        """For each page: were the same tokens last seen under another identity?"""
        own, young, old = chain.identity.digest, self._plain_young, self._plain_old
        return [(young.get(i) or old.get(i) or own) != own for i in chain_ids(chain.plain[start:stop])]

    def clear(self) -> None:
        """Forget everything: nothing that was seen could be served any more. Exactness starts anew."""
        for table in (self._young, self._old):
            table.clear()
        self._plain_young.clear()
        self._plain_old.clear()
        self._epochs.clear()
        self.exact = True

    def _turn(self) -> None:
        """A full generation becomes the old one."""
        if len(self._young) > self._half:
            if self.exact and any(i not in self._young for i in self._old):
                self.exact = False
            self._old, self._young = self._young, {}
