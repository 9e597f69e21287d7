"""Block ids of a trace → page keys and fingerprints. Pure functions of numbers; reads no file, knows no tokens.

A trace names blocks of `block_tokens` tokens by ids that are chained by prefix: the same id means the same tokens from
the prompt's start to that block's end. A page of `page_tokens` tokens needs no more than that:

    page = n blocks      key from the id of the page's last block, which commits to everything before it
    page = 1/n block     key from (id, k) for the k-th part of the block

Any other ratio is refused. Only whole pages exist: those that end within `input_tokens` and within the blocks given.
With parts, two blocks that begin alike and differ later have different keys for all parts: sharing is never finer than
the trace says.

    x        = id · 0x9E3779B97F4A7C15 + salt word (a blake2b of the salt and both sizes)      mod 2^64
    key word = splitmix64's finalizer of x (and for parts once more, of that + the part's number times the constant)

A key is two such words under two salt words, little-endian. For whole blocks each word is a bijection of the id, so
different ids have different keys *and* different first words (what `chain_ids` keeps); for parts that holds but for one
pair in 2^64. Nothing depends on the process or the machine. Fingerprints use other constants and all ids of the page.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from hostcache.errors import ConfigError
from hostcache.tier.keys import KEY_BYTES, Identity, KeyChain, PageKey

Ids = npt.NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # Steele, Lea, Flood 2014 (SplitMix): 2^64 / golden ratio, odd


def block_keys(blocks: Ids, *, block_tokens: int, page_tokens: int, salt: bytes = b"",
               input_tokens: int | None = None) -> tuple[PageKey, ...]:
    """Keys of the whole pages in `blocks`, first to last.

    `input_tokens`: the prompt's length, where its last block is only partly filled; without it every block counts as
    full. `salt`: keys under different salts have nothing in common (a digest of the identity, say).

    Raises ConfigError when neither size is a multiple of the other.
    """
    ratio, parts = _ratio(block_tokens, page_tokens)
    pages = _whole_pages(blocks, block_tokens, page_tokens, input_tokens)
    words = np.frombuffer(_digest(b"hostcache-blk-1", salt, block_tokens, page_tokens), dtype="<u8").astype(np.uint64)
    return _keys(blocks, pages, ratio, parts, words)


def block_prints(blocks: Ids, *, block_tokens: int, page_tokens: int, input_tokens: int | None = None) -> Ids:
    """Fingerprints of the same pages: 64 bits over every id the page is made of, made otherwise than the key.

    Whoever brings a page back can hold that it is the one its key promised.
    """
    ratio, parts = _ratio(block_tokens, page_tokens)
    pages = _whole_pages(blocks, block_tokens, page_tokens, input_tokens)
    start = int.from_bytes(_digest(b"hostcache-prt-1", b"", block_tokens, page_tokens)[:8], "little")
    prints = np.full(pages, start, dtype=np.uint64)
    if parts > 1:
        number = np.arange(pages, dtype=np.uint64)
        prints = _fmix(_fmix(prints ^ blocks[number // np.uint64(parts)]) ^ (number % np.uint64(parts)))
    else:
        table = blocks[: pages * ratio].reshape(pages, ratio)
        for column in range(ratio):
            prints = _fmix(prints ^ table[:, column])
    return prints


class ChainBuilder:
    """One session's key chains: each call converts only the blocks that the call before did not begin with.

    The keys of a shared beginning are the *same objects* in both chains, so memory and hashing are paid once.
    """

    def __init__(self, identity: Identity, *, block_tokens: int) -> None:
        """Raises ConfigError when neither of block and page size is a multiple of the other."""
        self._identity = identity
        self._block_tokens = block_tokens
        self._ratio, self._parts = _ratio(block_tokens, identity.page_tokens)
        digest = _digest(b"hostcache-blk-1", identity.digest, block_tokens, identity.page_tokens)
        self._words = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        self._blocks: Ids = np.empty(0, dtype=np.uint64)
        self._keys: tuple[PageKey, ...] = ()

    def chain(self, blocks: Ids, input_tokens: int) -> KeyChain:
        """The chain of a request with these blocks; `plain` is `keys`, for a trace knows one identity."""
        pages = _whole_pages(blocks, self._block_tokens, self._identity.page_tokens, input_tokens)
        shared = common_blocks(self._blocks, blocks)
        kept = min(len(self._keys), pages, shared * self._block_tokens // self._identity.page_tokens)
        kept -= kept % self._parts
        rest = blocks[kept * self._ratio // self._parts :]
        keys = self._keys[:kept] + _keys(rest, pages - kept, self._ratio, self._parts, self._words)
        self._blocks, self._keys = blocks, keys
        return KeyChain(identity=self._identity, keys=keys, plain=keys)


def block_chain(blocks: Ids, input_tokens: int, *, block_tokens: int, identity: Identity) -> KeyChain:
    """The chain of one request on its own; a session's requests go through a `ChainBuilder`."""
    return ChainBuilder(identity, block_tokens=block_tokens).chain(blocks, input_tokens)


def common_blocks(one: Ids, other: Ids) -> int:
    """How many blocks both begin with."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


def mixed(ids: Ids) -> Ids:
    """Each id through a well-mixing bijection of 64 bits (the one fingerprints use)."""
    return _fmix(ids.copy())


def _ratio(block_tokens: int, page_tokens: int) -> tuple[int, int]:
    """(blocks a page, parts a block): one of the two is 1."""
    if block_tokens < 1 or page_tokens < 1:
        raise ConfigError(f"a block of {block_tokens} and a page of {page_tokens} tokens; both hold at least 1")
    if page_tokens % block_tokens == 0:
        return page_tokens // block_tokens, 1
    if block_tokens % page_tokens == 0:
        return 1, block_tokens // page_tokens
    raise ConfigError(f"pages of {page_tokens} tokens cannot be cut from a trace's blocks of {block_tokens}; "
                      f"use a multiple or a divisor of {block_tokens}")


def _whole_pages(blocks: Ids, block_tokens: int, page_tokens: int, input_tokens: int | None) -> int:
    covered = len(blocks) * block_tokens
    return (covered if input_tokens is None else min(covered, input_tokens)) // page_tokens


def _digest(person: bytes, salt: bytes, block_tokens: int, page_tokens: int) -> bytes:
    sizes = block_tokens.to_bytes(8, "little") + page_tokens.to_bytes(8, "little")
    return blake2b(sizes + salt, digest_size=KEY_BYTES, person=person).digest()


def _keys(blocks: Ids, pages: int, ratio: int, parts: int, words: Ids) -> tuple[PageKey, ...]:
    """`pages` keys from the first block on. `words`: the two salt words."""
    if pages == 0:
        return ()
    last = blocks[ratio - 1 : pages * ratio : ratio] if parts == 1 else np.repeat(blocks, parts)[:pages]
    mix = (last * GOLDEN)[:, np.newaxis] + words
    _splitmix(mix)
    if parts > 1:
        mix += ((np.arange(pages, dtype=np.uint64) % np.uint64(parts)) * GOLDEN)[:, np.newaxis]
        _splitmix(mix)
    keys: list[PageKey] = mix.astype("<u8", copy=False).view(f"V{KEY_BYTES}").ravel().tolist()
    return tuple(keys)


def _splitmix(x: Ids) -> None:
    """In place: the finalizer of SplitMix64 (Stafford's variant 13 of Murmur3's), a bijection."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)


def _fmix(x: Ids) -> Ids:
    """In place and returned: Murmur3's own 64-bit finalizer (Appleby, public domain), a bijection."""
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xFF51AFD7ED558CCD)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xC4CEB9FE1A85EC53)
    x ^= x >> np.uint64(33)
    return x
