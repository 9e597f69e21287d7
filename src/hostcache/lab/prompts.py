"""Which tokens a request of a trace is sent as: one bridge for all of them, or one for each. Sends nothing.

`fresh`: each request has a filler of its own, so that no two prompts share an engine block whatever the trace says.
That is a cold arm on any server, also on one whose prefix cache cannot be turned off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import gcd
from typing import Any

import numpy as np

from hostcache.workload.bridge import Alphabet, Bridge, BridgeRefused, GateReport, Tokenize, Tokens, gate


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request: its place in the trace from 0, its blocks' own ids, its prompt's length, its due time in seconds
    after the first one's (None: as soon as it is its turn)."""

    index: int
    names: tuple[int, ...]
    tokens: int
    due_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """`bridge` of all requests; with `fresh` its seed is mixed with each request's index."""

    bridge: Bridge
    fresh: bool = False

    def of(self, request: Planned) -> Tokens:
        """(tokens,) of this request."""
        return self._bridge(request.index).prompt(np.array(request.names, dtype=np.uint64), request.tokens)

    def text(self, request: Planned) -> str:
        return self.bridge.text(self.of(request))

    def gates(self, requests: Sequence[Planned], *, engine_block_tokens: int,
              tokenize: Tokenize | None = None) -> GateReport:
        """Both directions, on exactly what will be sent. Raises BridgeRefused. `tokenize`: prompts go as text."""
        names = np.unique(np.concatenate([np.array(each.names, dtype=np.uint64) for each in requests]))
        sent: Iterator[Tokens] = (self.of(each) for each in requests)
        report = gate(self.bridge, names, engine_block_tokens=engine_block_tokens, tokenize=tokenize,
                      prompts=sent if tokenize is not None else ())
        if self.fresh:
            size = min(engine_block_tokens, self.bridge.block_tokens)
            begun: dict[bytes, int] = {}
            for each in requests:
                prompt = self.of(each)
                other = begun.setdefault(prompt[:size].tobytes(), each.index)
                if other != each.index and len(prompt) >= size:
                    raise BridgeRefused(f"requests {other} and {each.index} begin with the same {size} tokens although "
                                        f"each is to be fresh; use blocks longer than the {self.bridge.digits} tokens "
                                        "of an id")
        return report

    def collide(self, requests: Sequence[Planned], engine_block_tokens: int) -> bool:
        """Do two of these requests' blocks begin alike, as far as the gate compares them?"""
        names = np.unique(np.concatenate([np.array(each.names, dtype=np.uint64) for each in requests]))
        begin = self.bridge.blocks(names)[:, : gcd(engine_block_tokens, self.bridge.block_tokens)]
        return len(np.unique(begin, axis=0)) < len(names)

    def digest(self, request: Planned) -> str:
        """sha256 of the prompt's token ids as little-endian 64-bit integers."""
        return sha256(self.of(request).astype("<i8").tobytes()).hexdigest()

    def as_json(self) -> dict[str, Any]:
        return {"words": list(self.bridge.alphabet.words), "ids": list(self.bridge.alphabet.ids),
                "block_tokens": self.bridge.block_tokens, "seed": self.bridge.seed.hex(), "fresh": self.fresh}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Prompts:
        alphabet = Alphabet(words=tuple(given["words"]), ids=tuple(given["ids"]))
        return cls(bridge=Bridge(alphabet=alphabet, block_tokens=given["block_tokens"],
                                 seed=bytes.fromhex(given["seed"])), fresh=given["fresh"])

    def _bridge(self, index: int) -> Bridge:
        if not self.fresh:
            return self.bridge
        return Bridge(alphabet=self.bridge.alphabet, block_tokens=self.bridge.block_tokens,
                      seed=self.bridge.seed + index.to_bytes(8, "little"))
