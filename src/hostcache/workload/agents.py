"""The agent loop of the seed's section 3: a growing conversation, a tool result and a reply per turn, a gap between.

Everything an agent will say is drawn from its own named stream, so that both arms of a comparison hear the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from hostcache.errors import ConfigError

COMPACTED_SHARE = 0.72
"""What is left of a conversation when an agent compacts it (the seed's section 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentShape:
    """Sizes in tokens; gaps between an answer and the next turn are uniform in [gap_min_s, gap_max_s]."""

    prefix_tokens: int
    tool_tokens: int
    reply_tokens: int
    gap_min_s: float
    gap_max_s: float

    def __post_init__(self) -> None:
        for name in ("prefix_tokens", "tool_tokens", "reply_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; an agent needs at least 1")
        if not 0 <= self.gap_min_s <= self.gap_max_s:
            raise ConfigError(f"gaps from {self.gap_min_s} to {self.gap_max_s} s are no range; give 0 <= min <= max")


def stream(seed: int, *name: str | int) -> Random:
    """The random stream of that name under that seed: the same in every process, independent of the others."""
    return Random("/".join(str(part) for part in (seed, *name)))


class Agent:
    """One conversation: `prompt` → (server answers) → `heard(reply)` → wait `gap_s()` → `prompt` …

    The first prompt is the prefix; every later one is the last prompt, the reply's own tokens and a tool result.
    """

    def __init__(self, source: Sequence[int], shape: AgentShape, rng: Random, *, start: int, limit_tokens: int) -> None:
        """`source`: tokens of real code; the prefix starts at `start`, tool results are cut from the rest.

        `limit_tokens`: longest prompt + reply the server takes; an agent that would pass it compacts first.
        """
        end = start + shape.prefix_tokens
        if start < 0 or len(source) < end + shape.tool_tokens:
            raise ConfigError(f"a piece of {len(source)} tokens cannot give a prefix of {shape.prefix_tokens} from "
                              f"{start} and tool results of {shape.tool_tokens}; use a smaller --prefix-tokens")
        if shape.prefix_tokens + shape.reply_tokens > limit_tokens:
            raise ConfigError(f"prefix {shape.prefix_tokens} + reply {shape.reply_tokens} tokens exceed the server's "
                              f"{limit_tokens}; use a smaller --prefix-tokens")
        self._source = source
        self._shape = shape
        self._rng = rng
        self._tools_from = end
        self._limit_tokens = limit_tokens
        self._tokens = list(source[start:end])
        self.turn = 0

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self._tokens)

    def heard(self, reply: Sequence[int]) -> None:
        """The answer arrived: keep its own tokens, append the tool's result, compact when it would not fit."""
        self._tokens.extend(reply)
        at = self._rng.randrange(self._tools_from, len(self._source) - self._shape.tool_tokens + 1)
        self._tokens.extend(self._source[at : at + self._shape.tool_tokens])
        if len(self._tokens) + self._shape.reply_tokens > self._limit_tokens:
            self._tokens = compacted(self._tokens)
        self.turn += 1

    def gap_s(self) -> float:
        """Seconds the tool takes."""
        return self._rng.uniform(self._shape.gap_min_s, self._shape.gap_max_s)


def compacted(tokens: Sequence[int]) -> list[int]:
    """The conversation cut to `COMPACTED_SHARE` of its length."""
    return list(tokens[: max(1, int(len(tokens) * COMPACTED_SHARE))])


def agents(sources: Sequence[Sequence[int]], shape: AgentShape, *, count: int, seed: int,
           limit_tokens: int) -> list[Agent]:
    """`count` agents, each on another piece of code. More agents than files take later pieces of the same files.

    Raises ConfigError when the sources are too few or short, or two agents would start with the same page.
    """
    if count < 1:
        raise ConfigError(f"agents is {count}; at least 1 is needed")
    made = []
    for index in range(count):
        source, lap = sources[index % len(sources)], index // len(sources)
        made.append(Agent(source, shape, stream(seed, "agent", index), start=lap * shape.prefix_tokens,
                          limit_tokens=limit_tokens))
    heads = {agent.prompt[:16] for agent in made}
    if len(heads) < len(made) and shape.prefix_tokens >= 16:
        raise ConfigError(f"{len(made) - len(heads)} of {count} agents start with the same 16 tokens as another; "
                          "their prefixes would be shared and the working set smaller than stated")
    return made
