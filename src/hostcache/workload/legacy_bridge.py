"""The defective bridge of the retracted probe, under its own name: to re-derive its number, never to send anything.

It chose the word at place j of a block by (id·7 + j·13) mod 33, so that a block's text depended on id mod 33 alone and
the 13,712 blocks of the slice had 33 texts (the second seed document, "Attempt 4").
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LEGACY_WORDS = 33


def legacy_words(name: int, count: int) -> list[int]:
    """Which of the 33 words stand at the first `count` places of a block."""
    return [(name * 7 + place * 13) % LEGACY_WORDS for place in range(count)]


def legacy_texts(names: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """(blocks,) ids → (blocks,) which text each has; as many texts as words, since 7 and 33 have no common factor."""
    return collapsed_texts(names, LEGACY_WORDS)


def collapsed_texts(names: npt.NDArray[np.uint64], texts: int) -> npt.NDArray[np.int64]:
    """What a bridge of that many texts would make of the ids."""
    return (names % np.uint64(texts)).astype(np.int64)
