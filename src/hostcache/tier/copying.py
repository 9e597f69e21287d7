"""What crosses between the tier's driver and whoever moves bytes: jobs, extents, completions. Moves nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Direction(Enum):
    """STORE copies device → host (write back), RESTORE host → device."""

    STORE = "store"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """`pages` neighbouring device pages from `device_page` on ⇄ as many neighbouring frames from `frame` on."""

    device_page: int
    frame: int
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyJob:
    """One batch for a copier. `job_id` is unique over both directions for the life of the tier."""

    job_id: int
    direction: Direction
    extents: tuple[Extent, ...]

    @property
    def pages(self) -> int:
        return sum(extent.pages for extent in self.extents)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyDone:
    """How a job ended. `error` is None when every byte is in place.

    `submissions` counts the copy calls that were issued (one an extent when nothing forced a split);
    times are the copier's clock, in seconds.
    """

    job_id: int
    direction: Direction
    error: str | None
    copied_bytes: int
    submissions: int
    submitted_s: float
    started_s: float
    finished_s: float


class Copier(Protocol):
    """Moves pages between the device pool and the frames. Called from one thread only; never blocks unless `wait`.

    Restores go before stores. A job is reported by `poll` exactly once, or never (a wedged copy): the caller
    holds the deadline. `cancel` before the start means: it will not run and will not be reported.
    """

    def submit(self, job: CopyJob) -> None:
        """Queue a job. Returns at once. Raises ValueError for a page or frame out of range: nothing is queued then."""
        ...

    def poll(self) -> list[CopyDone]:
        """The jobs that ended since the last call, in order of their end."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Block until `poll` has something to say, at most `timeout_s`; False when nothing came."""
        ...

    def cancel(self, job_id: int) -> bool:
        """True: the job never started and never will (not reported). False: it runs, ended or is unknown; its bytes
        may still move until it is reported."""
        ...

    @property
    def in_flight(self) -> int:
        """Jobs submitted and not yet reported or cancelled."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Stop taking jobs, drop what has not started, wait for what runs. False: something still runs."""
        ...


def extents(device_pages: Sequence[int] | npt.NDArray[np.int64],
            frames: Sequence[int] | npt.NDArray[np.int64]) -> tuple[Extent, ...]:
    """Pairs of (device page, frame) in order, joined where both sides are neighbours. Lengths must be equal."""
    pages = np.asarray(device_pages, dtype=np.int64)
    places = np.asarray(frames, dtype=np.int64)
    if pages.shape != places.shape:
        raise ValueError(f"{pages.size} device pages but {places.size} frames; they pair one to one")
    if not pages.size:
        return ()
    breaks = np.flatnonzero((np.diff(pages) != 1) | (np.diff(places) != 1)) + 1
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), int(pages.size)]
    return tuple(
        Extent(device_page=int(pages[a]), frame=int(places[a]), pages=b - a) for a, b in zip(starts, ends, strict=True)
    )
