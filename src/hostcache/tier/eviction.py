"""When the host is full: push the oldest out, or keep the newcomer out? Learns from what came back. Frees nothing.

Recency is right when what was used last comes back first. On a cycle larger than the host it is as wrong as can be: it
always drops the page that is needed next, and nothing is ever hit. So two rules compete, as in LeCaR (Vietri et al.,
HotStorage 2018): DISPLACE evicts the oldest, KEEP refuses the newcomer. A page that was lost to a rule and returns
counts as that rule's regret, the more the sooner it returns; the rule with less regret a page decides.
"""

from __future__ import annotations

from enum import Enum
from math import exp

LEAST_PAYBACK = 16
"""Writing pays while at least one page in so many comes back: a copy is at least so much cheaper than to compute."""


class Rule(Enum):
    DISPLACE = 0
    KEEP = 1


class Payback:
    """Does what is written come back? Restored over written pages, both fading over eight turnovers."""

    def __init__(self, turnover: int) -> None:
        self._turnover = max(1, turnover)
        self._written = 0.0
        self._restored = 0.0

    def wrote(self, pages: int) -> None:
        fade = exp(-pages / (8 * self._turnover))
        self._written = self._written * fade + pages
        self._restored *= fade

    def restored(self, pages: int) -> None:
        self._restored += pages

    @property
    def pays(self) -> bool:
        """True also while little is known: before the host was filled twice."""
        return self._written < 2 * self._turnover + 64 or self._restored * LEAST_PAYBACK >= self._written


class Duel:
    """`turnover` is the host's size in pages: the unit of time in which regret fades. Deterministic."""

    def __init__(self, turnover: int) -> None:
        self._turnover = max(1, turnover)
        self._lost = dict.fromkeys(Rule, 0.0)
        self._regret = dict.fromkeys(Rule, 0.0)

    def choose(self) -> Rule:
        """DISPLACE unless it has hurt more."""
        return Rule.KEEP if self.rate(Rule.KEEP) < self.rate(Rule.DISPLACE) else Rule.DISPLACE

    def rate(self, rule: Rule) -> float:
        """Regret a lost page, 0 … 1; damped while little is known."""
        return self._regret[rule] / (self._lost[rule] + self._turnover / 64)

    def lost(self, rule: Rule, pages: int) -> None:
        """The rule cost `pages` their place. Older experience fades over eight turnovers."""
        fade = exp(-pages / (8 * self._turnover))
        self._lost[rule] = self._lost[rule] * fade + pages
        self._regret[rule] *= fade

    def returned(self, rule: Rule, pages: int, age: int) -> None:
        """`pages` lost to the rule came back after `age` new pages."""
        self._regret[rule] += pages * exp(-age / self._turnover)
