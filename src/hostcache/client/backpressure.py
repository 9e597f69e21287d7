"""How long to wait after a refusal, and when to stop asking. Pure arithmetic: no clock, no network."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

RETRYABLE = frozenset({429, 503})
"""Statuses that say "not now" instead of "no"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backpressure:
    """Exponential waits with jitter, as a real agent retries a front door.

    Wait n (from 0) is `base_s` × 2^n, at most `cap_s`, times 1 ± `jitter`; never shorter than the server's
    Retry-After. `budget` refusals of one turn are waited out, the next one ends it. A Retry-After beyond
    `longest_s` ends it too: nobody waits there.
    """

    base_s: float = 0.5
    cap_s: float = 8.0
    jitter: float = 0.25
    budget: int = 20
    longest_s: float = 120.0

    def wait_s(self, refusals: int, retry_after_s: float | None, rng: Random) -> float | None:
        """Seconds to wait after the `refusals`-th refusal in a row (from 0); None: give up.

        A server's Retry-After moves the whole jittered band up, so that many refused clients do not come back at once.
        """
        if refusals >= self.budget or (retry_after_s is not None and retry_after_s > self.longest_s):
            return None
        spread = 1 + self.jitter * (2 * rng.random() - 1)
        own_s = min(self.cap_s, self.base_s * 2.0**refusals) * spread
        if retry_after_s is None or retry_after_s <= own_s:
            return own_s
        return retry_after_s * (1 + self.jitter * rng.random())


def parse_retry_after(header: str | None) -> float | None:
    """Seconds of a Retry-After header. None when absent or not a number of seconds (an HTTP date is not used here)."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None
