"""Is a restore worth it? Compares its time with that of computing the same tokens, both as measured. Starts nothing."""

from __future__ import annotations

KEEP = 0.8
"""What remains of a measurement's weight when the next one comes."""


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
        restore_s = (bytes_ahead + copied_bytes) * self._restore_s / self._bytes
        return restore_s > tokens * self._prefill_s / self._tokens
