"""Is a restore worth it, and how long is it waited for? By the speeds of copying and computing, as measured."""

from __future__ import annotations

KEEP = 0.8
"""What remains of a measurement's weight when the next one comes."""


SLOW = 4.0
"""A copy that takes so many times as long as others did is not waited for any longer."""


class Rates:
    """Tokens prefilled and bytes restored per second, from decayed sums; a restore is worth it until both are known."""

    def __init__(self) -> None:
        self._tokens = self._prefill_s = self._bytes = self._restore_s = 0.0

    def saw_prefill(self, tokens: int, seconds: float) -> None:
        if tokens > 0 and seconds > 0:
            self._tokens, self._prefill_s = KEEP * self._tokens + tokens, KEEP * self._prefill_s + seconds

    def saw_restore(self, copied_bytes: int, seconds: float) -> None:
        if copied_bytes > 0 and seconds > 0:
            self._bytes, self._restore_s = KEEP * self._bytes + copied_bytes, KEEP * self._restore_s + seconds

    def dearer(self, *, tokens: int, copied_bytes: int, bytes_ahead: int) -> bool:
        """Would restoring, behind what is being restored already, take longer than computing these tokens?"""
        if not self._prefill_s or not self._restore_s:
            return False
        return self._copying_s(bytes_ahead + copied_bytes) > self._computing_s(tokens)

    def patience_s(self, *, least_s: float, tokens: int, copied_bytes: int, bytes_ahead: int) -> float:
        """How long a request waits for its restore before it is computed after all: SLOW times what the copy should
        take, but no longer than computing would take, and `least_s` in any case.

        Who waits for the time of computing and then computes has spent at most twice that, whatever the copy does.
        While one of the two speeds is unknown the other one decides.
        """
        limits = []
        if self._prefill_s:
            limits.append(self._computing_s(tokens))
        if self._restore_s:
            limits.append(SLOW * self._copying_s(bytes_ahead + copied_bytes))
        return max([least_s, *([min(limits)] if limits else [])])

    def _copying_s(self, size: int) -> float:
        return size * self._restore_s / self._bytes

    def _computing_s(self, tokens: int) -> float:
        return tokens * self._prefill_s / self._tokens
