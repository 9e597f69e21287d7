"""Words as tokens, and replies that follow from a prompt alone: the mock server's tokenizer and its model. Pure.

A token is a word between white space, its id 31 bits of the word's CRC-32, so ids are the same in every process.
White space itself is no token: a client may strip a reply and still send back its exact ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from hashlib import sha256
from zlib import crc32

_CONSONANTS, _VOWELS = "bdfghjklmnprstvz", "aeio"
_SYLLABLES = tuple(consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS)
WORDS = tuple(first + second for first in _SYLLABLES for second in _SYLLABLES)
"""All words of replies: 4,096, so that 12 bits choose one. Plain ASCII, nothing that JSON escapes."""


def token_id(word: str) -> int:
    return crc32(word.encode("utf-8", "replace")) & 0x7FFFFFFF


WORD_IDS = tuple(token_id(word) for word in WORDS)


def tokenize(text: str) -> list[int]:
    return [token_id(word) for word in text.split()]


def tokenize_chat(messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Messages of `role` and `content`, each between two marks of its own, and the mark that opens the reply: the next
    turn, with the reply as the assistant's message, begins with these ids and the reply's."""
    ids: list[int] = []
    for message in messages:
        ids += [token_id(f"<|{message['role']}|>"), *tokenize(message["content"]), token_id("<|end|>")]
    return [*ids, token_id("<|assistant|>")]


def reply_words(prompt: Sequence[int], count: int, *, seed: int) -> list[int]:
    """Indexes into WORDS, a function of (seed, prompt): a longer reply begins with the shorter one."""
    key = sha256(f"hostcache mock reply {seed}\0".encode() + array("q", prompt).tobytes()).digest()
    words: list[int] = []
    for part in range(-(-count // 16)):
        drawn = sha256(key + part.to_bytes(4, "little")).digest()
        words += [int.from_bytes(drawn[at : at + 2], "little") % len(WORDS) for at in range(0, 32, 2)]
    return words[:count]


def drifted(words: Sequence[int]) -> list[int]:
    """The same reply with another word in its middle."""
    other = list(words)
    if other:
        other[len(other) // 2] = (other[len(other) // 2] + 1) % len(WORDS)
    return other
