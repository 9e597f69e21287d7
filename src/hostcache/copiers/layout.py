"""Where the bytes of a page lie on the device and in its frame, and which copies a job is. Moves none itself.

One layout serves every copier whose device memory has addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hostcache.copiers.slabs import Slabs
from hostcache.errors import ConfigError
from hostcache.tier.copying import CopyJob, Direction

_Numbers = npt.NDArray[np.int64]


class Segment(NamedTuple):
    """One piece of every page: that of page p is the `page_bytes` bytes from `address + p * stride_bytes` on."""

    address: int
    stride_bytes: int
    page_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """A page as its segments: one where a page is contiguous over all layers, one a layer where it is not.

    Segments that lie side by side in every page are joined at the door: `segments` may be shorter than what was given.

    On the host a *slab* holds the segments one after the other, each with the pieces of all the slab's frames: a run
    of neighbouring frames is then one piece a segment, as it is on the device. With one segment, and only then, a frame
    is contiguous and `Slabs.view` shows it; `frame_pieces` says where it lies otherwise.
    """

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        joined: list[Segment] = []
        for given in self.segments:
            segment = Segment(*given)
            if segment.page_bytes < 1 or segment.stride_bytes < segment.page_bytes or segment.address < 0:
                raise ConfigError(
                    f"{segment} is no piece of a page; give an address, at least 1 byte a page and a stride that is "
                    "not shorter"
                )
            if joined and _side_by_side(joined[-1], segment):
                joined[-1] = joined[-1]._replace(page_bytes=joined[-1].page_bytes + segment.page_bytes)
            else:
                joined.append(segment)
        if not joined:
            raise ConfigError("a page layout without segments; give one segment at least")
        object.__setattr__(self, "segments", tuple(joined))

    @classmethod
    def contiguous(cls, address: int, page_bytes: int) -> PageLayout:
        """Whole pages one after the other from `address` on."""
        return cls(segments=(Segment(address, page_bytes, page_bytes),))

    @property
    def frame_bytes(self) -> int:
        """Bytes of a page over all its segments: what a frame has to hold."""
        return sum(segment.page_bytes for segment in self.segments)

    def fits(self, slabs: Slabs) -> None:
        """Raises ConfigError where frames are not as large as pages."""
        if slabs.page_bytes != self.frame_bytes:
            raise ConfigError(
                f"device pages of {self.frame_bytes} bytes but frames of {slabs.page_bytes}; make them equal"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Copies as three columns of equal length: destination address, source address, bytes."""

    to: _Numbers
    source: _Numbers
    size: _Numbers

    def __len__(self) -> int:
        return int(self.size.size)

    @property
    def total_bytes(self) -> int:
        return int(self.size.sum())

    def part(self, start: int, end: int) -> Moves:
        return Moves(self.to[start:end], self.source[start:end], self.size[start:end])

    def rows(self) -> list[tuple[int, int, int]]:
        """The same as (destination, source, bytes) in plain ints."""
        return list(zip(self.to.tolist(), self.source.tolist(), self.size.tolist(), strict=True))

    def cut(self, longest_bytes: int) -> Moves:
        """The same bytes with no copy longer than that."""
        if not len(self) or int(self.size.max()) <= longest_bytes:
            return self
        pieces = -(-self.size // longest_bytes)
        of = np.repeat(np.arange(len(self)), pieces)
        skipped = (np.arange(of.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * longest_bytes
        size = np.minimum(self.size[of] - skipped, longest_bytes)
        return Moves(self.to[of] + skipped, self.source[of] + skipped, size)


def moves(job: CopyJob, slabs: Slabs, layout: PageLayout) -> Moves:
    """The fewest copies that do the job: neighbours on both sides are one, also where the job names them apart or in
    another order. None crosses a slab or a segment: each may be memory of its own, pinned or allocated by itself.

    Maps the slabs it needs: raises MemoryRefused where one cannot be, ValueError for frames out of range.
    """
    runs = _runs(job, slabs)
    if not runs.size:
        nothing = np.empty(0, dtype=np.int64)
        return Moves(nothing, nothing, nothing)
    bases = {number: slabs.address(number * slabs.frames_per_slab) for number in np.unique(runs[:, 1]).tolist()}
    size = np.array([segment.page_bytes for segment in layout.segments], dtype=np.int64)
    stride = np.array([segment.stride_bytes for segment in layout.segments], dtype=np.int64)
    address = np.array([segment.address for segment in layout.segments], dtype=np.int64)
    before = np.cumsum(size) - size
    device: list[_Numbers] = []
    host: list[_Numbers] = []
    sizes: list[_Numbers] = []
    tight = stride == size
    # One column a segment. Where other bytes lie between the pages, neighbours do not join on the device.
    for chosen, pages in ((tight, runs), (~tight, _one_by_one(runs))):
        if chosen.any():
            page, slab, place, count = pages.T[:, :, np.newaxis]
            base = np.array([bases[number] for number in pages[:, 1].tolist()], dtype=np.int64)[:, np.newaxis]
            frames_here = np.minimum(slabs.frames_per_slab, slabs.frames - slab * slabs.frames_per_slab)
            host.append((base + frames_here * before[chosen] + place * size[chosen]).T.ravel())
            device.append((address[chosen] + page * stride[chosen]).T.ravel())
            sizes.append((count * size[chosen]).T.ravel())
    to, source = (host, device) if job.direction is Direction.STORE else (device, host)
    return Moves(np.concatenate(to), np.concatenate(source), np.concatenate(sizes))


def frame_pieces(frame: int, slabs: Slabs, layout: PageLayout) -> list[tuple[int, int]]:
    """(address, bytes) of each segment's piece of a frame, in the layout's order."""
    slab, place = divmod(frame, slabs.frames_per_slab)
    slabs.address(frame)  # in range, and mapped
    base = slabs.address(slab * slabs.frames_per_slab)
    frames_here = min(slabs.frames_per_slab, slabs.frames - slab * slabs.frames_per_slab)
    pieces = []
    before = 0
    for segment in layout.segments:
        pieces.append((base + frames_here * before + place * segment.page_bytes, segment.page_bytes))
        before += segment.page_bytes
    return pieces


def slabs_of(job: CopyJob, slabs: Slabs) -> Sequence[int]:
    """The numbers of the slabs a job touches, ascending."""
    per_slab = slabs.frames_per_slab
    touched: set[int] = set()
    for extent in job.extents:
        touched.update(range(extent.frame // per_slab, (extent.frame + extent.pages - 1) // per_slab + 1))
    return sorted(touched)


def _side_by_side(one: Segment, next_one: Segment) -> bool:
    together = one.page_bytes + next_one.page_bytes
    return (
        one.stride_bytes == next_one.stride_bytes
        and one.address + one.page_bytes == next_one.address
        and together <= one.stride_bytes
    )


def _runs(job: CopyJob, slabs: Slabs) -> _Numbers:
    """Rows of (device page, slab, place in the slab, pages), by place: the longest runs that no slab border cuts."""
    per_slab = slabs.frames_per_slab
    rows: list[tuple[int, int, int, int]] = []
    for extent in job.extents:
        page, frame, left = extent.device_page, extent.frame, extent.pages
        while left > 0:
            slab, place = divmod(frame, per_slab)
            here = min(left, per_slab - place)
            rows.append((page, slab, place, here))
            page, frame, left = page + here, frame + here, left - here
    if not rows:
        return np.empty((0, 4), dtype=np.int64)
    runs = np.array(rows, dtype=np.int64)
    page, slab, place, count = runs[np.lexsort((runs[:, 0], runs[:, 2], runs[:, 1]))].T
    starts = np.ones(page.size, dtype=bool)
    starts[1:] = (
        (slab[1:] != slab[:-1])
        | (place[1:] != place[:-1] + count[:-1])
        | (page[1:] != page[:-1] + count[:-1])
    )
    first = np.flatnonzero(starts)
    return np.stack((page[first], slab[first], place[first], np.add.reduceat(count, first)), axis=1)


def _one_by_one(runs: _Numbers) -> _Numbers:
    """The same rows with one page each."""
    count = runs[:, 3]
    pages = np.repeat(runs, count, axis=0)
    step = np.arange(pages.shape[0]) - np.repeat(np.cumsum(count) - count, count)
    pages[:, 0] += step
    pages[:, 2] += step
    pages[:, 3] = 1
    return pages
