"""What whoever watches a cell sees: a screen where there is a terminal and `rich`, plain lines elsewhere.

Shows what records and scrapes say so far; nothing of it is a result. Knows no workload.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from hostcache.bench.progress import Progress
from hostcache.client.counters import Scrape
from hostcache.clock import Clock
from hostcache.records import RequestRecord, SegmentName
from hostcache.sizes import format_size

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

LAST = 200
"""Requests that the moving figures are of."""


class Screen(Protocol):
    wants_counters: bool
    """Somebody sees them, so that they are worth asking the server for while it works."""

    def cell(self, title: str, described: Mapping[str, Any]) -> None:
        """A cell begins, on a server that said this of itself."""
        ...

    def segment(self, name: SegmentName, part: str, until_s: float | None) -> None:
        """A segment begins."""
        ...

    def heard(self, record: RequestRecord) -> None: ...

    def counters(self, scrape: Scrape) -> None: ...

    def note(self, text: str) -> None:
        """One line that stays."""
        ...

    def refresh(self) -> None: ...

    def close(self) -> None: ...


class Tally:
    """Figures of the segment so far, kept up request by request."""

    def __init__(self) -> None:
        self.segment, self.part = "", ""
        self.until_s: float | None = None
        self.begin("", "", None)
        self._bytes: dict[str, float] = {}
        self._base: dict[str, float] = {}

    def begin(self, segment: str, part: str, until_s: float | None) -> None:
        self.segment, self.part, self.until_s = segment, part, until_s
        self.turns = self.retries = 0
        self.prompt_tokens = self.cached_tokens = 0
        self.errors: Counter[str] = Counter()
        self._ttft_s: deque[float] = deque(maxlen=LAST)
        self._lag_s: deque[float] = deque(maxlen=LAST)

    def heard(self, record: RequestRecord) -> None:
        self._lag_s.append(record.sent_s - record.due_s)
        self.retries += len(record.retries)
        if record.outcome != "ok":
            self.errors[(record.reason or record.outcome).partition(":")[0]] += 1
            return
        self.turns += 1
        if record.first_token_s is not None:
            self._ttft_s.append(record.first_token_s - record.due_s)
        if record.prompt_tokens is not None and record.cached_tokens is not None:
            self.prompt_tokens += record.prompt_tokens
            self.cached_tokens += record.cached_tokens

    def counters(self, scrape: Scrape) -> None:
        self._bytes = {name: scrape.counters[name] for name in ("restored_bytes", "written_bytes")
                       if name in scrape.counters}
        self._base = self._base or self._bytes

    def moved(self, name: str) -> str:
        """Since the cell began; "not said" where the server has no such counter."""
        if name not in self._bytes or name not in self._base:
            return "not said"
        return format_size(int(self._bytes[name] - self._base[name]))

    @property
    def ttft(self) -> str:
        return f"{median(self._ttft_s):.3f} s" if self._ttft_s else "–"

    @property
    def hit_share(self) -> str:
        return f"{self.cached_tokens / self.prompt_tokens:.1%}" if self.prompt_tokens else "–"

    @property
    def lag(self) -> str:
        if not self._lag_s:
            return "–"
        ordered = sorted(self._lag_s)
        return f"{1e3 * ordered[int(0.99 * (len(ordered) - 1))]:.1f} ms"

    @property
    def failed(self) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in self.errors.most_common()) or "none"

    @property
    def line(self) -> str:
        return (f"{self.turns} {'turn' if self.turns == 1 else 'turns'}, TTFT p50 {self.ttft}, hit {self.hit_share}, "
                f"errors {self.failed}, lag p99 {self.lag}")

    def left(self, now_s: float) -> str:
        return "" if self.until_s is None else f", {max(0.0, self.until_s - now_s):.0f} s left"


class PlainScreen:
    """One line when a segment ends, and now and then while a long one goes on."""

    wants_counters = False

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        self._progress = Progress(stream, clock)
        self._clock = clock
        self._title = self._place = ""
        self._tally = Tally()

    def cell(self, title: str, described: Mapping[str, Any]) -> None:
        self._end_segment()
        self._title = title
        self._progress.note(f"{title}: {described.get('engine')} {described.get('version') or ''}".rstrip())

    def segment(self, name: SegmentName, part: str, until_s: float | None) -> None:
        self._end_segment()
        self._tally.begin(name, part, until_s)
        self._place = " ".join(filter(None, (self._title, part, name)))
        self._progress.stage(self._place, doing="")

    def heard(self, record: RequestRecord) -> None:
        self._tally.heard(record)

    def counters(self, scrape: Scrape) -> None:
        self._tally.counters(scrape)

    def note(self, text: str) -> None:
        self._progress.note(text)

    def refresh(self) -> None:
        if self._tally.segment:
            self._progress.show(f"{self._tally.line}{self._tally.left(self._clock.now())}")

    def close(self) -> None:
        self._end_segment()
        self._progress.finish()

    def _end_segment(self) -> None:
        if self._tally.turns or self._tally.errors:
            self._progress.note(f"{self._place}: {self._tally.line}")
        self._tally.begin("", "", None)


class RichScreen:
    """A table that stays in place, notes above it."""

    wants_counters = True

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        from rich.console import Console

        self._console = Console(file=stream)
        self._clock = clock
        self._title = ""
        self._engine = ""
        self._tally = Tally()
        self._live: Live | None = None

    def cell(self, title: str, described: Mapping[str, Any]) -> None:
        from rich.live import Live

        self._title, self._tally = title, Tally()
        self._engine = " ".join(str(described[name]) for name in ("engine", "version", "model") if described.get(name))
        if self._live is None:
            self._live = Live(self._table(), console=self._console, auto_refresh=False)
            self._live.start()

    def segment(self, name: SegmentName, part: str, until_s: float | None) -> None:
        self._tally.begin(name, part, until_s)
        self.refresh()

    def heard(self, record: RequestRecord) -> None:
        self._tally.heard(record)

    def counters(self, scrape: Scrape) -> None:
        self._tally.counters(scrape)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self) -> Table:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        tally = self._tally
        table = Table(title=Text(self._title), caption=Text(self._engine), show_header=False, box=box.SIMPLE)
        place = " ".join(filter(None, (tally.segment, tally.part))) or "begins"
        for name, value in (
            ("segment", place + tally.left(self._clock.now())), ("turns", str(tally.turns)),
            ("TTFT p50, from due", tally.ttft), ("hit share", tally.hit_share),
            ("restored", tally.moved("restored_bytes")), ("written back", tally.moved("written_bytes")),
            ("errors", tally.failed), ("retries", str(tally.retries)), ("lag p99", tally.lag),
        ):
            table.add_row(name, Text(value))
        return table


def screen_for(stream: TextIO, clock: Clock) -> Screen:
    """A live one on a terminal that has `rich`, else plain lines."""
    if stream.isatty():
        try:
            return RichScreen(stream, clock)
        except ImportError:
            pass
    return PlainScreen(stream, clock)
