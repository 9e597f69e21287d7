"""A ThreadCopier between two guarded pieces of memory, steered by its fault argument."""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from hostcache.clock import WallClock
from hostcache.copiers import Fail, Fault, FaultAction, Slabs, ThreadCopier
from hostcache.tier.copying import CopyJob

GUARD_BYTES = 4096
GUARD = 0xA5


class ThreadRig:
    """`fault` is asked after the rig's own steering had nothing to say."""

    def __init__(
        self,
        *,
        page_bytes: int = 1000,
        device_pages: int = 24,
        frames: int = 32,
        frames_per_slab: int = 7,
        threads: int = 1,
        chunk_bytes: int = 1700,
        segments: int = 1,
        fault: Fault | None = None,
    ) -> None:
        self.page_bytes = page_bytes
        self.device_pages = device_pages
        self.frames = frames
        self.at_once = threads
        # (segments, bytes): each segment between guards of its own.
        piece = page_bytes // segments
        self._memory = np.full((segments, device_pages * piece + 2 * GUARD_BYTES), GUARD, dtype=np.uint8)
        self._inner = self._memory[:, GUARD_BYTES:-GUARD_BYTES]
        self.pieces = np.lib.stride_tricks.as_strided(
            self._inner, (device_pages, segments, piece), (piece, self._memory.strides[0], 1)
        )
        self.slabs = Slabs(frames * page_bytes, page_bytes, slab_bytes=frames_per_slab * page_bytes)
        self._fault = fault
        self._gate = threading.Event()
        self._gate.set()
        self._started = threading.Semaphore(0)
        self._fail_next = False
        self.copier = ThreadCopier(
            self._inner.ctypes.data,
            device_pages,
            page_bytes,
            self.slabs,
            clock=WallClock(),
            owner=self._memory,
            threads=threads,
            chunk_bytes=chunk_bytes,
            segments=segments,
            segment_stride_bytes=self._memory.strides[0],
            fault=self._steer,
        )

    def _steer(self, job: CopyJob) -> FaultAction | None:
        self._started.release()
        self._gate.wait()
        if self._fail_next:
            self._fail_next = False
            return Fail(error="asked to fail")
        return self._fault(job) if self._fault is not None else None

    def read_device(self, page: int) -> bytes:
        data: bytes = self.pieces[page].tobytes()
        return data

    def write_device(self, page: int, data: bytes) -> None:
        self.pieces[page] = np.frombuffer(data, dtype=np.uint8).reshape(self.pieces.shape[1:])

    def read_host(self, frame: int) -> bytes:
        return bytes(self.slabs.view(frame))

    def write_host(self, frame: int, data: bytes) -> None:
        assert len(data) == self.page_bytes
        ctypes.memmove(self.slabs.address(frame), data, len(data))

    def guards_intact(self) -> bool:
        before, after = self._memory[:, :GUARD_BYTES], self._memory[:, -GUARD_BYTES:]
        return bool((before == GUARD).all() and (after == GUARD).all())

    def stall(self) -> None:
        self._gate.clear()
        self._started = threading.Semaphore(0)

    def until_started(self, jobs: int, timeout_s: float) -> bool:
        return all(self._started.acquire(timeout=timeout_s) for _ in range(jobs))

    def resume(self) -> None:
        self._gate.set()

    def fail_next(self) -> None:
        self._fail_next = True

    def close(self) -> None:
        self.resume()
        assert self.copier.close(30.0)
        self.slabs.close()
