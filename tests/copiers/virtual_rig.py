"""A VirtualCopier between two guarded pieces of memory, steered by its fault argument. Time passes only in waits."""

from __future__ import annotations

from random import Random

from hostcache.clock import VirtualClock
from hostcache.copiers import CopySpeed, Fail, Fault, FaultAction, VirtualCopier, Wedge
from hostcache.tier.copying import CopyJob, Direction

GUARD_BYTES = 64
GUARD = 0xA5
TORN = 0xDD


class BytesMover:
    """Device and host memory as bytes. `log` has every call: its name, the job and the pages (for begin, all)."""

    def __init__(self, *, device_pages: int, frames: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.device = bytearray([GUARD]) * (device_pages * page_bytes + 2 * GUARD_BYTES)
        self.host = bytearray([GUARD]) * (frames * page_bytes + 2 * GUARD_BYTES)
        self.log: list[tuple[str, CopyJob, int]] = []

    def page(self, number: int) -> slice:
        at = GUARD_BYTES + number * self.page_bytes
        return slice(at, at + self.page_bytes)

    def begin(self, job: CopyJob) -> None:
        self.log.append(("begin", job, job.pages))
        for device_page, frame in pairs(job):
            if job.direction is Direction.STORE:
                self.host[self.page(frame)] = bytes([TORN]) * self.page_bytes
            else:
                self.device[self.page(device_page)] = bytes([TORN]) * self.page_bytes

    def finish(self, job: CopyJob, pages: int) -> None:
        self.log.append(("finish", job, pages))
        for device_page, frame in pairs(job)[:pages]:
            if job.direction is Direction.STORE:
                self.host[self.page(frame)] = self.device[self.page(device_page)]
            else:
                self.device[self.page(device_page)] = self.host[self.page(frame)]


def pairs(job: CopyJob) -> list[tuple[int, int]]:
    """(device page, frame) of each of its pages, in order."""
    return [(e.device_page + i, e.frame + i) for e in job.extents for i in range(e.pages)]


class VirtualRig:
    """`fault` is asked after the rig's own steering had nothing to say. The default speeds: a page stores in 1 s and
    restores in 0.25 s, and nothing else takes time."""

    at_once = 1  # stores; with two lanes a restore starts beside them

    def __init__(
        self,
        *,
        page_bytes: int = 8,
        device_pages: int = 24,
        frames: int = 32,
        lanes: int = 2,
        speed: CopySpeed | None = None,
        fault: Fault | None = None,
        seed: int = 0,
    ) -> None:
        self.page_bytes = page_bytes
        self.device_pages = device_pages
        self.frames = frames
        self.clock = VirtualClock(100.0)
        self.mover = BytesMover(device_pages=device_pages, frames=frames, page_bytes=page_bytes)
        self._fault = fault
        self._wedge: Wedge | None = None
        self._started = 0
        self._fail_next = False
        self.copier = VirtualCopier(
            self.clock,
            device_pages=device_pages,
            frames=frames,
            page_bytes=page_bytes,
            speed=speed or CopySpeed(store_bytes_per_s=page_bytes, restore_bytes_per_s=4 * page_bytes),
            rng=Random(seed),
            mover=self.mover,
            lanes=lanes,
            fault=self._steer,
        )

    def _steer(self, job: CopyJob) -> FaultAction | None:
        self._started += 1
        if self._fail_next:
            self._fail_next = False
            return Fail(error="asked to fail")
        if self._wedge is not None:
            return self._wedge
        return self._fault(job) if self._fault is not None else None

    def read_device(self, page: int) -> bytes:
        return bytes(self.mover.device[self.mover.page(page)])

    def write_device(self, page: int, data: bytes) -> None:
        self.mover.device[self.mover.page(page)] = data

    def read_host(self, frame: int) -> bytes:
        return bytes(self.mover.host[self.mover.page(frame)])

    def write_host(self, frame: int, data: bytes) -> None:
        self.mover.host[self.mover.page(frame)] = data

    def guards_intact(self) -> bool:
        guard = bytes([GUARD]) * GUARD_BYTES
        return all(
            memory[:GUARD_BYTES] == guard and memory[-GUARD_BYTES:] == guard
            for memory in (self.mover.device, self.mover.host)
        )

    def stall(self) -> None:
        self._wedge = Wedge()
        self._started = 0

    def until_started(self, jobs: int, timeout_s: float) -> bool:
        self.copier.wait(0.0)
        return self._started >= jobs

    def resume(self) -> None:
        if self._wedge is not None:
            self._wedge.release()
            self._wedge = None

    def fail_next(self) -> None:
        self._fail_next = True

    def close(self) -> None:
        self.resume()
        self.copier.close(1000.0)
