"""One live line about a running measurement; plain lines where the stream is no terminal. Knows no measurement."""

from __future__ import annotations

from typing import TextIO

from hostcache.clock import Clock

PLAIN_EVERY_S = 10.0


class Progress:
    """`stage` starts a new line, `show` renews it."""

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        self._stream = stream
        self._clock = clock
        self._live = stream.isatty()
        self._dirty = False
        self._next_plain_s = clock.now()
        self._stage = ""

    def stage(self, text: str, doing: str = "starting the server") -> None:
        """A new stage begins. Without `doing`, nothing is said of it until there is news."""
        self.finish()
        self._stage = text
        self._next_plain_s = self._clock.now() + (0.0 if doing else PLAIN_EVERY_S)
        if doing:
            self.show(doing)
            self._next_plain_s = self._clock.now()  # the first news of a stage is not held back

    def show(self, text: str) -> None:
        line = f"{self._stage}: {text}" if self._stage else text
        if self._live:
            self._stream.write(f"\r\x1b[2K{line[:118]}")
            self._dirty = True
        elif self._clock.now() >= self._next_plain_s:
            self._stream.write(line + "\n")
            self._next_plain_s = self._clock.now() + PLAIN_EVERY_S
        self._stream.flush()

    def note(self, text: str) -> None:
        """A line that stays."""
        self.finish()
        self._stream.write(text + "\n")
        self._stream.flush()

    def finish(self) -> None:
        """Leave the live line as it is and go on below it."""
        if self._dirty:
            self._stream.write("\n")
            self._dirty = False
            self._stream.flush()
