"""From a trace's block ids to prompts and back: N tokens a block, as token ids and as text that gives those ids.

    block     = id × an odd constant mod 2^64 in base n, in the first tokens; then filler from (seed, id)
    alphabet  = n words, each one token with its leading space, whatever words stand around it

Different ids differ within the first `digits` tokens, so an engine whose blocks are at least that long sees siblings
part in their first block; the id can be read back from the tokens, so no two ids can have one text. The gates hold both
against what is really sent. Ids are 64 bits and stay so. Knows no server: whoever has a tokenizer hands it in.

Why not pieces of a book, or random ids decoded to text: the first gives 7 % of the blocks of a public trace another
block's text, the second does not come back as the same tokens (docs/negative-results.md has the figures).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from hostcache.errors import HostCacheError
from hostcache.workload.blocks import GOLDEN, mixed

Tokenize = Callable[[str], Sequence[int]]
Tokens = npt.NDArray[np.int32]

FEWEST_WORDS = 64
ID_BITS = 64
_UNDO = np.uint64(pow(int(GOLDEN), -1, 2**ID_BITS))


class BridgeRefused(HostCacheError):
    """What would be sent is not what the trace says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alphabet:
    """`words` (n,) without their leading space, `ids` (n,) their tokens: both free of repetitions, in one order."""

    words: tuple[str, ...]
    ids: tuple[int, ...]

    def __post_init__(self) -> None:
        sound = all(type(each) is int and 0 <= each < 2**31 for each in self.ids)
        if len(self.words) != len(self.ids) or len(self.words) < FEWEST_WORDS or not sound:
            raise BridgeRefused(f"{len(self.words)} words and {len(self.ids)} tokens are no alphabet; it has a token "
                                f"for each word, and {FEWEST_WORDS} or more of them")
        for what, given in (("word", self.words), ("token", self.ids)):
            if len(set(given)) < len(given):
                twice = next(each for place, each in enumerate(given) if each in given[:place])
                raise BridgeRefused(f"{what} {twice!r} is twice in an alphabet; two ids could have one text")

    @property
    def digest(self) -> str:
        lines = "".join(f"{word}\t{token}\n" for word, token in zip(self.words, self.ids, strict=True))
        return sha256(lines.encode()).hexdigest()


def candidate_words(texts: Iterable[str]) -> Iterator[str]:
    """Lower-case words of two to twelve letters, each once, in the order in which they appear."""
    seen: set[str] = set()
    for text in texts:
        for word in re.findall(r"(?<![A-Za-z])[a-z]{2,12}(?![A-Za-z])", text):
            if word not in seen:
                seen.add(word)
                yield word


def alphabet_of(tokenize: Tokenize, candidates: Iterable[str], *, size: int = 4096, group: int = 32) -> Alphabet:
    """The first `size` candidates that are one token each, found by group: as many tokens as words, and the same ones
    from behind when the words are, so that no token for two words makes up for a word of two.

    Raises BridgeRefused where fewer than `FEWEST_WORDS` are, or are asked for.
    """
    if size < FEWEST_WORDS:
        raise BridgeRefused(f"an alphabet of {size} words is too small; {FEWEST_WORDS} or more are needed")
    words: dict[str, int] = {}
    taken: set[int] = set()

    def test(some: Sequence[str]) -> None:
        tokens = list(tokenize("".join(f" {word}" for word in some)))
        if len(tokens) == len(some) and (len(some) == 1 or tokens[::-1] == list(
                tokenize("".join(f" {word}" for word in reversed(some))))):
            for word, token in zip(some, tokens, strict=True):
                if token not in taken:
                    taken.add(token)
                    words[word] = token
        elif len(some) > 1:
            test(some[: len(some) // 2])
            test(some[len(some) // 2 :])

    waiting: list[str] = []
    for word in candidates:
        waiting.append(word)
        if len(waiting) == group:
            test(waiting)
            waiting = []
            if len(words) >= size:
                break
    if waiting:
        test(waiting)
    if len(words) < FEWEST_WORDS:
        raise BridgeRefused(f"the tokenizer gives {len(words)} words as one token each, {FEWEST_WORDS} are needed; "
                            "does it add tokens of its own, or cut words otherwise?")
    chosen = list(words)[:size]
    return Alphabet(words=tuple(chosen), ids=tuple(words[word] for word in chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bridge:
    """`block_tokens` N of the trace (or N scaled down); `seed` decides the filler and nothing else."""

    alphabet: Alphabet
    block_tokens: int
    seed: bytes

    def __post_init__(self) -> None:
        if self.block_tokens < self.digits:
            raise BridgeRefused(f"a block of {self.block_tokens} tokens cannot hold a 64-bit id in base "
                                f"{len(self.alphabet.words)}, which takes {self.digits}; use longer blocks")

    @property
    def digits(self) -> int:
        """Tokens that an id takes."""
        count, reach = 0, 1
        while reach < 2**ID_BITS:
            reach *= len(self.alphabet.words)
            count += 1
        return count

    def blocks(self, names: npt.NDArray[np.uint64]) -> Tokens:
        """(count,) ids → (count, block_tokens) tokens."""
        base = np.uint64(len(self.alphabet.words))
        digits = self.digits
        chosen = np.empty((len(names), self.block_tokens), dtype=np.int64)
        rest = names.astype(np.uint64) * GOLDEN
        for place in reversed(range(digits)):
            chosen[:, place] = (rest % base).astype(np.int64)
            rest = rest // base
        salt = np.uint64(int.from_bytes(sha256(b"hostcache-bridge-1" + self.seed).digest()[:8], "little"))
        state = mixed(names.astype(np.uint64) ^ salt)
        for place in range(digits, self.block_tokens):
            state = state + GOLDEN
            chosen[:, place] = (mixed(state) % base).astype(np.int64)
        return np.array(self.alphabet.ids, dtype=np.int32)[chosen]

    def prompt(self, names: npt.NDArray[np.uint64], tokens: int | None = None) -> Tokens:
        """A request's blocks as one prompt, cut to `tokens` where its last block is not full.

        Raises BridgeRefused for more tokens than the blocks have.
        """
        whole = self.blocks(names).reshape(-1)
        if tokens is not None and not 0 <= tokens <= len(whole):
            raise BridgeRefused(f"a prompt of {tokens} tokens is not made of {len(names)} blocks of "
                                f"{self.block_tokens}; what is sent would not be what the trace says")
        return whole if tokens is None else whole[:tokens]

    def text(self, tokens: Sequence[int] | Tokens) -> str:
        """What tokenizes to exactly these; each word with its leading space."""
        words = dict(zip(self.alphabet.ids, self.alphabet.words, strict=True))
        return "".join(f" {words[int(token)]}" for token in tokens)

    def names_of(self, blocks: Tokens) -> npt.NDArray[np.uint64]:
        """(count, at least `digits`) tokens → the ids, read from the first tokens of each.

        Raises BridgeRefused for what is no block of this alphabet.
        """
        head = blocks[:, : self.digits]
        ids = np.array(self.alphabet.ids, dtype=np.int32)
        order = np.argsort(ids)
        places = order[np.searchsorted(ids, head, sorter=order).clip(max=len(ids) - 1)]
        if head.shape[1] < self.digits or (strange := head[ids[places] != head]).size:
            what = f"{head.shape[1]} tokens" if head.shape[1] < self.digits else f"token {int(strange[0])}"
            raise BridgeRefused(f"{what} cannot be the id of a block: {self.digits} words of the alphabet are")
        value = np.zeros(len(blocks), dtype=np.uint64)
        for place in range(self.digits):
            value = value * np.uint64(len(ids)) + places[:, place].astype(np.uint64)
        return value * _UNDO


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """What was held before anything was sent."""

    blocks: int
    engine_block_tokens: int
    first_blocks: int
    """different first engine blocks: as many as blocks"""
    prompts: int
    """that were sent through the tokenizer and came back as they were"""
    alphabet: str
    seed: str


def gate(bridge: Bridge, names: npt.NDArray[np.uint64], *, engine_block_tokens: int,
         prompts: Iterable[Tokens] = (), tokenize: Tokenize | None = None) -> GateReport:
    """Both directions, on the ids that will be sent (`names`, each once).

    Same id, same tokens. Different ids, different tokens, already in the first engine block. Every id is read back. The
    text of every prompt given tokenizes to that prompt. Raises BridgeRefused at the first that does not.
    """
    if engine_block_tokens < 1:
        raise BridgeRefused(f"an engine has no blocks of {engine_block_tokens} tokens; give 1 or more")
    # The least of a block that an engine block may end with, where neither size is a multiple of the other.
    size = math.gcd(engine_block_tokens, bridge.block_tokens)
    made = bridge.blocks(names)
    again = bridge.blocks(names[::-1].copy())[::-1]
    if (unequal := np.flatnonzero((made != again).any(axis=1))).size:
        raise BridgeRefused(f"block {names[unequal[0]]} has two texts; a bridge must be a function of the id")
    first = np.ascontiguousarray(made[:, :size])
    _, where, counts = np.unique(first.view([("", first.dtype)] * size).ravel(), return_index=True, return_counts=True)
    if len(where) != len(names):
        alike = np.flatnonzero((first == first[where[counts > 1][0]]).all(axis=1))
        raise BridgeRefused(f"blocks {names[alike[0]]} and {names[alike[1]]} begin with the same {size} tokens, and "
                            f"{len(names)} blocks have {len(where)} beginnings: an engine with blocks of "
                            f"{engine_block_tokens} would see hits that the trace does not have; use larger ones, or "
                            "more words")
    if (unread := np.flatnonzero(bridge.names_of(made) != names)).size:
        raise BridgeRefused(f"block {names[unread[0]]} reads back as {bridge.names_of(made[unread[:1]])[0]}")
    sent = 0
    for prompt in prompts:
        if tokenize is None:
            raise BridgeRefused("prompts cannot be tried as text without a tokenizer; send token ids")
        back = np.asarray(tokenize(bridge.text(prompt)), dtype=np.int64)
        if not np.array_equal(back, prompt):
            short = min(len(back), len(prompt))
            at = int(np.append(np.flatnonzero(back[:short] != prompt[:short]), short)[0])
            raise BridgeRefused(f"prompt {sent} of {len(prompt)} tokens comes back as {len(back)} tokens, different "
                                f"from token {at} on; send token ids")
        sent += 1
    return GateReport(blocks=len(names), engine_block_tokens=engine_block_tokens, first_blocks=len(where), prompts=sent,
                      alphabet=bridge.alphabet.digest, seed=bridge.seed.hex())
