"""What a cell says, measured in tokens: heads that share nothing, pieces of real text, and talks that only ever grow.

Everything follows from (seed, salt, names), in every process alike: the words from the seed, so that both arms of a
comparison hear the same; a tag before them from the salt, so that no earlier run can have left them in a cache.
Knows no server and no clock.

Mode `ids`: pieces are token ids, cut by the server's own tokenizer, and replies come back as ids: sizes are exact and
a prompt is an exact descendant of the last. Modes `text` and `chat`: pieces are text of about the size asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from itertools import chain
from typing import Literal, Protocol, TypeAlias

from hostcache.client.openai import Heard
from hostcache.errors import ConfigError
from hostcache.workload.agents import stream

Mode: TypeAlias = Literal["ids", "text", "chat"]
Piece: TypeAlias = tuple[int, ...] | str
Prompt: TypeAlias = str | tuple[int, ...] | tuple[Mapping[str, str], ...]

CHARS_PER_TOKEN = 4.0
"""Until a server's usage has told better."""
_TAG_TOKENS = 8
_MASK = 2**64 - 1


class Texts:
    """The words of one cell. `source`: token ids or characters of the corpus; `chars_per_token`: of a text source."""

    def __init__(self, mode: Mode, source: Piece, *, seed: int, salt: str,
                 chars_per_token: float = CHARS_PER_TOKEN) -> None:
        if len(source) < 64:
            raise ConfigError(f"a corpus of {len(source)} {'tokens' if mode == 'ids' else 'characters'} is too short "
                              "to draw from; give a longer one")
        self.mode: Mode = mode
        self.source = source
        self.seed = seed
        self.salt = salt
        self.chars_per_token = chars_per_token
        self._per_token = 1.0 if mode == "ids" else chars_per_token
        self._salted = int.from_bytes(blake2b(salt.encode(), digest_size=8).digest())
        self._letters: tuple[int, ...] = tuple(dict.fromkeys(source)) if not isinstance(source, str) else ()

    def with_salt(self, salt: str) -> Texts:
        """The same words behind other tags."""
        return Texts(self.mode, self.source, seed=self.seed, salt=salt, chars_per_token=self.chars_per_token)

    def head(self, tokens: int, *name: str | int) -> Piece:
        """The beginning of a prompt: a tag of (salt, name), then real text. Two heads differ from their first token on,
        but for one pair in 2^64."""
        number = int.from_bytes(blake2b("/".join(map(str, (self.salt, *name))).encode(), digest_size=8).digest())
        tag = self._tag(number, max(1, min(_TAG_TOKENS, tokens - 1)))
        return _filled(tag, self.piece(tokens, *name), self._units(tokens))

    def piece(self, tokens: int, *name: str | int) -> Piece:
        """Real text from anywhere in the corpus."""
        return self._cut(stream(self.seed, "piece", *name).randrange(len(self.source)), self._units(tokens))

    def block(self, number: int, tokens: int) -> Piece:
        """What stands for block `number` of a trace: the same number, the same words; another number, others.

        The number's own digits come first, mixed with the salt by a bijection: blocks of 6 tokens or more never
        collide in a vocabulary of 2,000.
        """
        mixed = _mix((number + self._salted) & _MASK)
        rest = self._cut(mixed % len(self.source), self._units(tokens))
        return _filled(self._tag(mixed, tokens), rest, self._units(tokens))

    def first(self, piece: Piece, tokens: int) -> Piece:
        """The beginning of a piece."""
        return piece[: self._units(tokens)]

    def talk(self, head: Piece, *, shared_tokens: int = 0) -> Talk:
        """`shared_tokens`: of the head, sent in this cell before."""
        if self.mode == "ids":
            return IdsTalk(head, shared_tokens)
        return WordsTalk(self.mode, head, self.chars_per_token)

    def tokens_of(self, piece: Piece) -> int:
        """How many tokens a piece is taken for."""
        return round(len(piece) / self._per_token)

    def prompt(self, piece: Piece) -> Prompt:
        """One piece as a whole prompt."""
        return self.talk(piece).prompt

    def _units(self, tokens: int) -> int:
        return max(1, round(tokens * self._per_token))

    def _cut(self, start: int, units: int) -> Piece:
        whole = self.source[start : start + units]
        while len(whole) < units:
            whole = _filled(whole, self.source, units)
        return whole

    def _tag(self, number: int, tokens: int) -> Piece:
        """The number's digits: as tokens of the corpus, at most `tokens` of them, or as a word."""
        if not self._letters:
            return f"{number:016x} "
        digits: list[int] = []
        base = len(self._letters)
        while number and len(digits) < tokens:
            number, digit = divmod(number, base)
            digits.append(self._letters[digit])
        return tuple(digits)


class Talk(Protocol):
    """A conversation: `prompt` → (server answers) → `heard` → `append` → `prompt` …, and `cut` when it is too long."""

    @property
    def prompt(self) -> Prompt: ...

    @property
    def tokens(self) -> int:
        """Its length: exact in mode `ids`, else what usage last said and an estimate of the rest."""
        ...

    @property
    def shared_tokens(self) -> int | None:
        """How much of the prompt was sent or answered before; None where the client cannot know."""
        ...

    def heard(self, heard: Heard) -> None:
        """The reply joins as the server gave it; of a failed turn nothing does."""
        ...

    def append(self, piece: Piece) -> None: ...

    def cut(self, share: float) -> None:
        """Compaction: the first `share` of it stays."""
        ...


class IdsTalk:
    """Token ids: every size is exact."""

    def __init__(self, head: Piece, shared_tokens: int) -> None:
        self._ids = list(_ids(head))
        self._known = shared_tokens

    @property
    def prompt(self) -> Prompt:
        return tuple(self._ids)

    @property
    def tokens(self) -> int:
        return len(self._ids)

    @property
    def shared_tokens(self) -> int | None:
        return self._known

    def heard(self, heard: Heard) -> None:
        if heard.outcome == "ok":
            self._ids.extend(heard.token_ids)
        self._known = len(self._ids)

    def append(self, piece: Piece) -> None:
        self._ids.extend(_ids(piece))

    def cut(self, share: float) -> None:
        del self._ids[max(1, round(len(self._ids) * share)) :]
        self._known = min(self._known, len(self._ids))


class WordsTalk:
    """Text, as one string (mode `text`) or as messages that take turns (mode `chat`)."""

    def __init__(self, mode: Mode, head: Piece, chars_per_token: float) -> None:
        self._chat = mode == "chat"
        self._messages: list[tuple[str, str]] = [("user", _text(head))]
        self._per_token = chars_per_token
        self._counted: tuple[int, int] | None = None
        """(characters, tokens) when usage last spoke"""

    @property
    def prompt(self) -> Prompt:
        if self._chat:
            return tuple({"role": role, "content": text} for role, text in self._messages)
        return "".join(text for _, text in self._messages)

    @property
    def tokens(self) -> int:
        chars, tokens = self._counted or (0, 0)
        return tokens + round((self._chars() - chars) / self._per_token)

    @property
    def shared_tokens(self) -> int | None:
        return None

    def heard(self, heard: Heard) -> None:
        if heard.outcome != "ok":
            return
        self._say("assistant", heard.text)
        if heard.usage is not None:
            self._counted = self._chars(), heard.usage.prompt_tokens + heard.usage.completion_tokens

    def append(self, piece: Piece) -> None:
        self._say("user", _text(piece))

    def cut(self, share: float) -> None:
        keep, kept = max(1, round(self._chars() * share)), list[tuple[str, str]]()
        for role, text in self._messages:
            kept.append((role, text[:keep]))
            keep -= len(text)
            if keep <= 0:
                break
        if self._chat and len(kept) > 1 and kept[-1][0] == "assistant":
            kept.pop()  # a prompt ends with its user
        self._messages, self._counted = kept, None

    def _say(self, role: str, text: str) -> None:
        last_role, last = self._messages[-1]
        if self._chat and last_role != role:
            self._messages.append((role, text))
        else:
            self._messages[-1] = last_role, last + text

    def _chars(self) -> int:
        return sum(len(text) for _, text in self._messages)


def _ids(piece: Piece) -> tuple[int, ...]:
    if isinstance(piece, str):
        raise TypeError("text where token ids are needed")
    return piece


def _text(piece: Piece) -> str:
    if not isinstance(piece, str):
        raise TypeError("token ids where text is needed")
    return piece


def joined(*pieces: Piece) -> Piece:
    """One after the other; all of one kind."""
    if all(isinstance(piece, str) for piece in pieces):
        return "".join(map(_text, pieces))
    return tuple(chain.from_iterable(map(_ids, pieces)))


def _filled(first: Piece, then: Piece, units: int) -> Piece:
    """The first, filled up to `units` from the other; never shorter than the first."""
    return joined(first, then[: max(0, units - len(first))])


def _mix(x: int) -> int:
    """splitmix64's finalizer: a bijection of 64-bit numbers (Steele, Lea, Flood 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
