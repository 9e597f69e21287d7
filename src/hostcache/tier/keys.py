"""Page keys: what makes two pages the same page. Pure functions of tokens and identity; knows no pool, no bytes of KV.

A chain of token digests, one a page, commits to every token up to the end of that page:

    plain[-1] = blake2b-128(page size)
    plain[i] = blake2b-128(plain[i-1] ‖ token ids of page i, 4 bytes little-endian each)
    key[i]   = blake2b-128(identity digest ‖ plain[i])

so a key commits to its parent, its tokens and the identity, and `plain` alone tells that the same tokens exist under
another identity. All fields of a digest have fixed length or are tagged and length-prefixed (`Identity.digest`), and
nothing depends on Python's `hash`, so every process on every machine derives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import blake2b
from typing import NewType

import numpy as np
import numpy.typing as npt

PageKey = NewType("PageKey", bytes)
"""16 bytes."""

KEY_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Everything besides the tokens that KV bytes depend on. What is not named here is not shared (fail-closed)."""

    model: str
    revision: str
    dtype: str
    layout: str
    page_tokens: int
    parallel: str = "1"
    adapter: str = ""
    media: str = ""
    salt: str = ""

    @cached_property
    def digest(self) -> bytes:
        """16 bytes over (tag, length, value) of every field, in order of declaration."""
        state = blake2b(digest_size=KEY_BYTES, person=b"hostcache-id-1")
        for field in fields(self):
            for part in (field.name.encode(), str(getattr(self, field.name)).encode()):
                state.update(len(part).to_bytes(8, "little"))
                state.update(part)
        return state.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChain:
    """The keys of a token sequence's whole pages, in order. Compute once, hand on."""

    identity: Identity
    keys: tuple[PageKey, ...]
    plain: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def page_tokens(self) -> int:
        return self.identity.page_tokens

    def prefix(self, pages: int) -> KeyChain:
        return KeyChain(identity=self.identity, keys=self.keys[:pages], plain=self.plain[:pages])

    def extend(self, tokens: Sequence[int] | npt.NDArray[np.int32]) -> KeyChain:
        """This chain plus the whole pages of `tokens`, which follow position len(self) * page_tokens."""
        last = self.plain[-1] if self.plain else _root(self.page_tokens)
        keys, plain = _digests(tokens, self.identity, last)
        return KeyChain(identity=self.identity, keys=self.keys + keys, plain=self.plain + plain)


def key_chain(tokens: Sequence[int] | npt.NDArray[np.int32], identity: Identity) -> KeyChain:
    """Keys of the whole pages of `tokens` (ids in 0 … 2^31-1; a rest shorter than a page has no key).

    Raises ValueError for a negative id or one over 31 bits: such input (embeddings, say) has no key and is not stored.
    """
    keys, plain = _digests(tokens, identity, _root(identity.page_tokens))
    return KeyChain(identity=identity, keys=keys, plain=plain)


def chain_ids(digests: Sequence[bytes]) -> list[int]:
    """The first 64 bits of each 16-byte digest as an integer: what the history keeps."""
    if not digests:
        return []
    words: list[int] = np.frombuffer(b"".join(digests), dtype="<u8")[::2].tolist()
    return words


def _root(page_tokens: int) -> bytes:
    if page_tokens < 1:
        raise ValueError(f"page_tokens is {page_tokens}; a page holds at least 1 token")
    return blake2b(page_tokens.to_bytes(8, "little"), digest_size=KEY_BYTES, person=b"hostcache-page-1").digest()


def _digests(
    tokens: Sequence[int] | npt.NDArray[np.int32], identity: Identity, last: bytes
) -> tuple[tuple[PageKey, ...], tuple[bytes, ...]]:
    wide = np.asarray(tokens)
    if wide.size and wide.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers in 0 … 2^31-1, got {wide.dtype}")
    if wide.size and (int(wide.min()) < 0 or int(wide.max()) >= 2**31):
        raise ValueError(f"token ids must be integers in 0 … 2^31-1, got {wide.min()} … {wide.max()}")
    data = np.ascontiguousarray(wide, dtype="<i4").tobytes()
    step = 4 * identity.page_tokens
    salt = identity.digest
    keys: list[PageKey] = []
    plain: list[bytes] = []
    for at in range(0, len(data) - step + 1, step):
        last = blake2b(last + data[at : at + step], digest_size=KEY_BYTES).digest()
        plain.append(last)
        keys.append(PageKey(blake2b(salt + last, digest_size=KEY_BYTES).digest()))
    return tuple(keys), tuple(plain)
