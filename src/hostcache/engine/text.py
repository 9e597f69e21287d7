"""What of an answer may be shown: half characters, and what may become a stop string, are held back."""

from __future__ import annotations

from collections.abc import Sequence

from hostcache.engine.interfaces import StreamDecoder


class AnswerText:
    """Feed tokens with `push`, show what it returns; `flush` at the end. After `stopped` nothing more comes."""

    def __init__(self, decoder: StreamDecoder, stop: Sequence[str]) -> None:
        self._decoder = decoder
        self._stop = tuple(text for text in stop if text)
        self._held = ""
        self.stopped = False

    def push(self, token_ids: Sequence[int]) -> str:
        return self._show(self._decoder.push(token_ids), last=False)

    def flush(self) -> str:
        return self._show(self._decoder.flush(), last=True)

    def _show(self, text: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        held = self._held + text
        found = min((at for stop in self._stop if (at := held.find(stop)) >= 0), default=None)
        if found is not None:
            self.stopped = True
            self._held = ""
            return held[:found]
        keep = 0 if last else max((_overlap(held, stop) for stop in self._stop), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
