"""A CudaCopier on a real device: torch's memory and streams, steered through the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int, c_uint, c_void_p
from typing import Any

import torch

from hostcache.clock import WallClock
from hostcache.copiers.cuda import CudaCopier
from hostcache.copiers.cuda_runtime import CudaError, DriverRuntime, driver_symbols
from hostcache.copiers.layout import Moves, PageLayout, Segment, frame_pieces
from hostcache.copiers.slabs import Slabs

DEVICE = 0
_WAIT_UNTIL_EQUAL = 1


class SteeredRuntime(DriverRuntime):
    """The real runtime with switches: the next copy refused, no batches, nothing pinned."""

    refuse_copy = False
    pinning = True
    batches = True

    @property
    def can_batch(self) -> bool:
        return self.batches and super().can_batch

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        self._refused()
        super().copy(to, source, size, stream)

    def copy_batch(self, moves: Moves, stream: int) -> None:
        self._refused()
        super().copy_batch(moves, stream)

    def pin(self, address: int, size: int) -> None:
        if not self.pinning:
            raise CudaError("cuMemHostRegister_v2: refused by the test (2)", code=2, lost=False)
        super().pin(address, size)

    def _refused(self) -> None:
        if self.refuse_copy:
            self.refuse_copy = False
            raise CudaError("copy: refused by the test (1)", code=1, lost=False)


class Gate:
    """Holds a stream on the device until `open`: what is launched behind it waits, and the host does not."""

    def __init__(self) -> None:
        symbols = driver_symbols()
        address = symbols("cuStreamWaitValue32_v2")
        assert address is not None
        self._wait = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_uint, c_uint)(address)
        self._flag = torch.zeros(1, dtype=torch.int32).pin_memory()

    def hold(self, stream: torch.cuda.Stream) -> None:
        self._flag[0] = 0
        assert self._wait(stream.cuda_stream, self._flag.data_ptr(), 1, _WAIT_UNTIL_EQUAL) == 0

    def open(self) -> None:
        self._flag[0] = 1


class GpuRig:
    """`layout`: "page-major" or "by layer". Computes on a stream of its own, current for torch until `close`."""

    def __init__(
        self,
        *,
        layout: str = "page-major",
        page_bytes: int = 3 * 4096,
        device_pages: int = 24,
        frames: int = 32,
        frames_per_slab: int = 7,
        layers: int = 3,
        window_jobs: int = 1,
        batches: bool = True,
        pinning: bool = True,
        pin_ahead: bool = True,
        longest_copy_bytes: int = 32 << 20,
        copier: type[CudaCopier] = CudaCopier,
    ) -> None:
        self.page_bytes = page_bytes
        self.device_pages = device_pages
        self.frames = frames
        self.at_once = window_jobs if pinning else 1
        pieces = 1 if layout == "page-major" else layers
        shape = (pieces, device_pages, page_bytes // pieces)
        self.guard_bytes = 4096
        count = shape[0] * shape[1] * shape[2]
        self._memory = torch.full((count + 2 * self.guard_bytes,), 0xA5, dtype=torch.uint8, device=f"cuda:{DEVICE}")
        self.device = self._memory[self.guard_bytes : self.guard_bytes + count].view(shape)
        piece = shape[2]
        self.layout = PageLayout(
            segments=tuple(Segment(self.device[n].data_ptr(), piece, piece) for n in range(shape[0]))
        )
        self.slabs = Slabs(frames * page_bytes, page_bytes, slab_bytes=frames_per_slab * page_bytes)
        torch.cuda.synchronize()
        self.compute = torch.cuda.Stream()
        self._before = torch.cuda.current_stream()
        torch.cuda.set_stream(self.compute)
        self.gate = Gate()
        self._stalled = False
        self.runtime = SteeredRuntime(driver_symbols(), device=DEVICE, compute_stream=lambda: self.compute.cuda_stream)
        self.runtime.batches = batches
        self.runtime.pinning = pinning
        self.copier = copier(
            self.runtime,
            self.layout,
            device_pages,
            self.slabs,
            clock=WallClock(),
            owner=self._memory,
            window_jobs=window_jobs,
            longest_copy_bytes=longest_copy_bytes,
        )
        while pin_ahead and self.copier.pin_next():
            pass

    def read_device(self, page: int) -> bytes:
        return self.device[:, page].contiguous().cpu().numpy().tobytes()

    def write_device(self, page: int, data: bytes) -> None:
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(self.device.shape[0], -1)
        self.device[:, page] = values.to(self.device.device)

    def read_host(self, frame: int) -> bytes:
        return b"".join(ctypes.string_at(*piece) for piece in frame_pieces(frame, self.slabs, self.layout))

    def write_host(self, frame: int, data: bytes) -> None:
        at = 0
        for address, size in frame_pieces(frame, self.slabs, self.layout):
            ctypes.memmove(address, data[at : at + size], size)
            at += size

    def guards_intact(self) -> bool:
        guards = torch.cat((self._memory[: self.guard_bytes], self._memory[-self.guard_bytes :]))
        return bool((guards == 0xA5).all())

    def stall(self) -> None:
        self.gate.hold(self.compute)
        self._stalled = True

    def until_started(self, jobs: int, timeout_s: float) -> bool:
        stats = self.copier.stats()
        return stats.in_flight - stats.queued >= jobs

    def resume(self) -> None:
        if self._stalled:
            self.gate.open()
            self._stalled = False

    def fail_next(self) -> None:
        self.runtime.refuse_copy = True

    def close(self) -> None:
        self.resume()
        try:
            assert self.copier.close(30.0)
            torch.cuda.synchronize()
        finally:
            torch.cuda.set_stream(self._before)
        self.runtime.release()
        self.slabs.close()


def device_seconds(work: Callable[[], Any]) -> float:
    """Of what `work` launches on the current stream, by the device's clock."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000.0
