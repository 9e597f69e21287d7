"""A CUDA device made of main memory and a clock, and a driver library in front of it, so that the real runtime runs.

The device: streams are queues, a copy moves its bytes when its time is up and its stream's predecessors are over, a
kernel is a duration and a function. The library: C functions with the prototypes of NVIDIA's cuda.h, written down here
once more, so that a wrong argument on our side arrives as a wrong argument. Every call is in `log`.

What it cannot show: speed, and whether NVIDIA's driver does what its reference says.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections import deque
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hostcache.clock import Clock, VirtualClock, WallClock
from hostcache.copiers.cuda import CudaCopier
from hostcache.copiers.cuda_runtime import DriverRuntime
from hostcache.copiers.layout import PageLayout, Segment, frame_pieces
from hostcache.copiers.slabs import Slabs

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NO_CONTEXT = 201
INVALID_HANDLE = 400
NOT_READY = 600
ILLEGAL_ADDRESS = 700
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713
NOT_SUPPORTED = 801
CAPTURE_UNSUPPORTED = 900
NAMES = {
    INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE",
    OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY",
    NO_CONTEXT: b"CUDA_ERROR_INVALID_CONTEXT",
    INVALID_HANDLE: b"CUDA_ERROR_INVALID_HANDLE",
    ILLEGAL_ADDRESS: b"CUDA_ERROR_ILLEGAL_ADDRESS",
    NOT_SUPPORTED: b"CUDA_ERROR_NOT_SUPPORTED",
    CAPTURE_UNSUPPORTED: b"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
}
CONTEXT = 0xC0DE
DEFAULT_STREAM = 0
LOWEST_PRIORITY = 0
HIGHEST_PRIORITY = -5


@dataclass(slots=True, eq=False)
class Event:
    """`recorded` counts records; `ended_s` has the end of each record that is over."""

    timed: bool
    recorded: int = 0
    ended_s: dict[int, float] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.recorded == 0 or self.recorded in self.ended_s


@dataclass(slots=True, eq=False)
class Op:
    """Something on a stream. `after`: an event and which of its records must be over."""

    queued_s: float
    duration_s: float = 0.0
    after: tuple[Event, int] | None = None
    copies: bool = False
    effect: Callable[[float], None] | None = None
    over: bool = False


@dataclass(slots=True, eq=False)
class Stream:
    priority: int
    flags: int
    ops: deque[Op] = field(default_factory=deque)
    free_s: float = -math.inf


class FakeGpu:
    """`copy_s` a copy plus its bytes at `copy_bytes_per_s`. `stalled`: no copy ends. `lost`: what every call answers.

    `refuse(call, code, after=n)` answers `code` once, to the n-th call of that name from now. `capturing`: a graph is
    being captured somewhere in global mode; a thread that has not relaxed its own mode is refused.
    """

    def __init__(self, clock: Clock, *, copy_s: float = 0.0, copy_bytes_per_s: float = math.inf) -> None:
        self.clock = clock
        self.copy_s = copy_s
        self.copy_bytes_per_s = copy_bytes_per_s
        self.device_memory: list[tuple[int, int]] = []
        self.pinned: dict[int, int] = {}
        self.streams: dict[int, Stream] = {DEFAULT_STREAM: Stream(LOWEST_PRIORITY, 0)}
        self.dying: list[Stream] = []
        self.events: dict[int, Event] = {}
        self.log: list[tuple[str, tuple[int, ...]]] = []
        self.blocked: list[int] = []
        """Threads that a call of theirs held until a copy was over, one entry a call."""
        self.stalled = False
        self.lost: int | None = None
        self.capturing = False
        self.failures: list[BaseException] = []
        self.changed = threading.Condition(threading.RLock())
        self._refusals: dict[str, list[list[int]]] = {}
        self._handles = 1000
        self._local = threading.local()

    # What a test does to it

    def launch(self, seconds: float, effect: Callable[[], None], *, stream: int = DEFAULT_STREAM) -> None:
        """A kernel: what it reads it reads, and what it writes it writes, at its end."""
        with self.changed:
            self.progress()
            self.streams[stream].ops.append(
                Op(self.clock.now(), duration_s=seconds, effect=lambda _: effect())
            )

    def refuse(self, call: str, code: int, *, after: int = 0) -> None:
        self._refusals.setdefault(call, []).append([after, code])

    def forgive(self) -> None:
        """Nothing that has not happened yet will be refused."""
        self._refusals.clear()

    def lose(self, code: int = ILLEGAL_ADDRESS) -> None:
        with self.changed:
            self.lost = code
            self.changed.notify_all()

    def stall(self) -> None:
        with self.changed:
            self.progress()
            self.stalled = True

    def resume(self) -> None:
        with self.changed:
            self.stalled = False
            self.progress()
            self.changed.notify_all()

    def settle(self) -> None:
        """Let time pass until every stream is empty."""
        while (due_s := self.next_s()) is not None:
            self.clock.sleep(max(0.0, due_s - self.clock.now()))
            with self.changed:
                self.progress()

    def calls(self, name: str) -> int:
        return sum(call == name for call, _ in self.log)

    # Time

    def next_s(self) -> float | None:
        with self.changed:
            ends = [end_s for stream in self._streams() if (end_s := self._end_s(stream)) is not None]
        return min(ends, default=None)

    def progress(self) -> None:
        """Everything that is over by now happens, in the order of its time."""
        now_s = self.clock.now()
        while True:
            due: tuple[float, Stream] | None = None
            for stream in self._streams():
                end_s = self._end_s(stream)
                if end_s is not None and end_s <= now_s and (due is None or end_s < due[0]):
                    due = (end_s, stream)
            if due is None:
                return
            end_s, stream = due
            op = stream.ops.popleft()
            stream.free_s = end_s
            if op.effect is not None:
                op.effect(end_s)
            op.over = True

    def _streams(self) -> list[Stream]:
        return [*self.streams.values(), *self.dying]

    def _end_s(self, stream: Stream) -> float | None:
        """When its first op is over; None when it has none or that cannot be told yet."""
        if not stream.ops or self.lost is not None:
            return None
        op = stream.ops[0]
        start_s = max(stream.free_s, op.queued_s)
        if op.after is not None:
            event, record = op.after
            if record and record not in event.ended_s:
                return None
            return max(start_s, event.ended_s.get(record, start_s))
        if op.copies and self.stalled:
            return None
        return start_s + op.duration_s

    # What the library asks of it

    def handle(self) -> int:
        self._handles += 1
        return self._handles

    def enter(self, name: str, arguments: tuple[int, ...]) -> int:
        """Before every call: 0, or what it answers instead of doing anything."""
        self.log.append((name, arguments))
        for refusal in self._refusals.get(name, ()):
            if refusal[0] == 0:
                self._refusals[name].remove(refusal)
                return refusal[1]
            refusal[0] -= 1
        if self.lost is not None and name not in ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuGetErrorName"):
            return self.lost
        if name in WITHOUT_CONTEXT:
            return 0
        if not self.contexts or self.contexts[-1] != CONTEXT:
            return NO_CONTEXT
        if self.capturing and self.mode != 2 and name != "cuThreadExchangeStreamCaptureMode":
            return CAPTURE_UNSUPPORTED
        self.progress()
        return 0

    @property
    def contexts(self) -> list[int]:
        """Of the calling thread."""
        if not hasattr(self._local, "contexts"):
            self._local.contexts = []
        found: list[int] = self._local.contexts
        return found

    @property
    def mode(self) -> int:
        return int(getattr(self._local, "mode", 0))

    @mode.setter
    def mode(self, value: int) -> None:
        self._local.mode = value

    def kind(self, address: int, size: int) -> str | None:
        """device, pinned or pageable; None for a range that is partly one and partly another."""
        end = address + size
        for start, length in self.device_memory:
            if start <= address and end <= start + length:
                return "device"
            if address < start + length and start < end:
                return None
        for start, length in self.pinned.items():
            if start <= address and end <= start + length:
                return "pinned"
            if address < start + length and start < end:
                return None
        return "pageable"

    def add_copies(self, moves: list[tuple[int, int, int]], stream: Stream) -> Op:
        def effect(_: float) -> None:
            for to, source, size in moves:
                ctypes.memmove(to, source, size)

        seconds = len(moves) * self.copy_s + sum(size for _, _, size in moves) / self.copy_bytes_per_s
        op = Op(self.clock.now(), duration_s=seconds, copies=True, effect=effect)
        stream.ops.append(op)
        return op

    def block(self, op: Op) -> None:
        """Hold the calling thread until the op is over."""
        self.blocked.append(threading.get_ident())
        while not op.over and self.lost is None:
            self.progress()
            due_s = self.next_s()
            if op.over:
                return
            if due_s is None:
                self.changed.wait(0.01)
                continue
            self.changed.release()
            try:
                self.clock.sleep(max(0.0, due_s - self.clock.now()))
            finally:
                self.changed.acquire()


# The library

BATCH_FORMS = ("cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2")
WITHOUT_CONTEXT = (
    "cuInit", "cuDriverGetVersion", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2",
    "cuGetErrorName",
)  # fmt: skip


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (("srcAccessOrder", c_int), ("src", _Location), ("dst", _Location), ("flags", c_uint))


class FakeDriver:
    """`symbol` in place of `driver_symbols()`. `without`: entry points that this driver does not have."""

    def __init__(self, gpu: FakeGpu, *, without: tuple[str, ...] = ()) -> None:
        self._gpu = gpu
        self._without = without
        self._name = ctypes.create_string_buffer(b"unknown")
        self._names = {code: ctypes.create_string_buffer(name) for code, name in NAMES.items()}
        handle, integer = POINTER(c_void_p), POINTER(c_int)
        self._functions: dict[str, Any] = {}
        for function, *arguments in (
            (self.cuInit, c_uint),
            (self.cuDriverGetVersion, integer),
            (self.cuDeviceGet, integer, c_int),
            (self.cuDeviceGetName, POINTER(ctypes.c_char), c_int, c_int),
            (self.cuDeviceGetAttribute, integer, c_int, c_int),
            (self.cuDevicePrimaryCtxRetain, handle, c_int),
            (self.cuDevicePrimaryCtxRelease_v2, c_int),
            (self.cuCtxPushCurrent_v2, c_void_p),
            (self.cuCtxPopCurrent_v2, handle),
            (self.cuThreadExchangeStreamCaptureMode, integer),
            (self.cuCtxGetStreamPriorityRange, integer, integer),
            (self.cuStreamCreateWithPriority, handle, c_uint, c_int),
            (self.cuStreamDestroy_v2, c_void_p),
            (self.cuStreamQuery, c_void_p),
            (self.cuStreamWaitEvent, c_void_p, c_void_p, c_uint),
            (self.cuEventCreate, handle, c_uint),
            (self.cuEventRecord, c_void_p, c_void_p),
            (self.cuEventQuery, c_void_p),
            (self.cuEventElapsedTime, POINTER(c_float), c_void_p, c_void_p),
            (self.cuEventDestroy_v2, c_void_p),
            (self.cuMemcpyAsync, c_uint64, c_uint64, c_size_t, c_void_p),
            (self.cuMemHostRegister_v2, c_void_p, c_size_t, c_uint),
            (self.cuMemHostUnregister, c_void_p),
            (self.cuGetErrorName, c_int, POINTER(c_char_p)),
            (
                self.cuMemcpyBatchAsync, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_size_t), c_size_t,
                POINTER(_Attributes), POINTER(c_size_t), c_size_t, POINTER(c_size_t), c_void_p,
            ),
            (
                self.cuMemcpyBatchAsync_v2, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_size_t), c_size_t,
                POINTER(_Attributes), POINTER(c_size_t), c_size_t, c_void_p,
            ),
        ):  # fmt: skip
            name = function.__name__
            self._functions[name] = ctypes.CFUNCTYPE(c_int, *arguments)(self._guarded(name, function))

    def symbol(self, name: str) -> int | None:
        if name in self._without or name not in self._functions:
            return None
        return ctypes.cast(self._functions[name], c_void_p).value

    def _guarded(self, name: str, function: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            plain = tuple(argument or 0 if isinstance(argument, int | None) else -1 for argument in arguments)
            gpu = self._gpu
            with gpu.changed:
                try:
                    return gpu.enter(name, plain) or function(*arguments)
                except BaseException as failure:  # ctypes would only print it
                    gpu.failures.append(failure)
                    return INVALID_VALUE

        return call

    # Set-up

    def cuInit(self, flags: int) -> int:
        return INVALID_VALUE if flags else 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version[0] = 13000
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device[0] = 40 + ordinal
        return 0

    def cuDeviceGetName(self, name: Any, length: int, device: int) -> int:
        told = b"Fake GPU %d" % (device - 40)
        ctypes.memmove(name, told + b"\0", min(length, len(told) + 1))
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        if attribute != 40:
            return INVALID_VALUE
        value[0] = 2
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        context[0] = CONTEXT
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: int) -> int:
        return 0

    def cuCtxPushCurrent_v2(self, context: int | None) -> int:
        self._gpu.contexts.append(context or 0)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        if not self._gpu.contexts:
            return NO_CONTEXT
        context[0] = self._gpu.contexts.pop()
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        mode[0], self._gpu.mode = self._gpu.mode, mode[0]
        return 0

    def cuGetErrorName(self, code: int, name: Any) -> int:
        if code not in self._names:
            return INVALID_VALUE
        ctypes.memmove(name, ctypes.byref(c_void_p(ctypes.addressof(self._names[code]))), ctypes.sizeof(c_void_p))
        return 0

    # Streams and events

    def cuCtxGetStreamPriorityRange(self, least: Any, greatest: Any) -> int:
        least[0], greatest[0] = LOWEST_PRIORITY, HIGHEST_PRIORITY
        return 0

    def cuStreamCreateWithPriority(self, stream: Any, flags: int, priority: int) -> int:
        stream[0] = self._gpu.handle()
        self._gpu.streams[stream[0]] = Stream(priority, flags)
        return 0

    def cuStreamDestroy_v2(self, stream: int | None) -> int:
        if not stream or stream not in self._gpu.streams:
            return INVALID_HANDLE
        self._gpu.dying.append(self._gpu.streams.pop(stream))
        return 0

    def cuStreamQuery(self, stream: int | None) -> int:
        found = self._gpu.streams.get(stream or 0)
        if found is None:
            return INVALID_HANDLE
        return NOT_READY if found.ops else 0

    def cuStreamWaitEvent(self, stream: int | None, event: int | None, flags: int) -> int:
        on, what = self._gpu.streams.get(stream or 0), self._gpu.events.get(event or 0)
        if on is None or what is None or flags:
            return INVALID_HANDLE
        on.ops.append(Op(self._gpu.clock.now(), after=(what, what.recorded)))
        return 0

    def cuEventCreate(self, event: Any, flags: int) -> int:
        if flags not in (0, 2):
            return INVALID_VALUE
        event[0] = self._gpu.handle()
        self._gpu.events[event[0]] = Event(timed=flags == 0)
        return 0

    def cuEventRecord(self, event: int | None, stream: int | None) -> int:
        on, what = self._gpu.streams.get(stream or 0), self._gpu.events.get(event or 0)
        if on is None or what is None:
            return INVALID_HANDLE
        what.recorded += 1
        number = what.recorded
        on.ops.append(Op(self._gpu.clock.now(), effect=lambda end_s: what.ended_s.__setitem__(number, end_s)))
        return 0

    def cuEventQuery(self, event: int | None) -> int:
        what = self._gpu.events.get(event or 0)
        if what is None:
            return INVALID_HANDLE
        return 0 if what.over else NOT_READY

    def cuEventElapsedTime(self, milliseconds: Any, start: int | None, end: int | None) -> int:
        one, other = self._gpu.events.get(start or 0), self._gpu.events.get(end or 0)
        if one is None or other is None or not (one.timed and other.timed and one.recorded and other.recorded):
            return INVALID_HANDLE
        if not (one.over and other.over):
            return NOT_READY
        milliseconds[0] = 1000.0 * (other.ended_s[other.recorded] - one.ended_s[one.recorded])
        return 0

    def cuEventDestroy_v2(self, event: int | None) -> int:
        return 0 if self._gpu.events.pop(event or 0, None) else INVALID_HANDLE

    # Memory

    def cuMemHostRegister_v2(self, address: int | None, size: int, flags: int) -> int:
        if not address or not size or flags:
            return INVALID_VALUE
        if self._gpu.kind(address, size) != "pageable":
            return ALREADY_REGISTERED
        self._gpu.pinned[address] = size
        return 0

    def cuMemHostUnregister(self, address: int | None) -> int:
        return 0 if self._gpu.pinned.pop(address or 0, None) else NOT_REGISTERED

    def cuMemcpyAsync(self, to: int, source: int, size: int, stream: int | None) -> int:
        on = self._gpu.streams.get(stream or 0)
        kinds = (self._gpu.kind(to, size), self._gpu.kind(source, size))
        if on is None or None in kinds or "device" not in kinds:
            return INVALID_VALUE
        op = self._gpu.add_copies([(to, source, size)], on)
        if "pageable" in kinds:
            self._gpu.block(op)
        return self._gpu.lost or 0

    def cuMemcpyBatchAsync(
        self, to: Any, source: Any, sizes: Any, count: int, attributes: Any, first: Any, attribute_count: int,
        failed: Any, stream: int | None,
    ) -> int:  # fmt: skip
        on = self._gpu.streams.get(stream or 0)
        if on is None or not stream or count < 1 or attribute_count != 1 or first[0] != 0:
            return INVALID_VALUE
        if attributes[0].srcAccessOrder != 1 or attributes[0].flags not in (0, 1):
            return INVALID_VALUE
        moves = [(to[i], source[i], sizes[i]) for i in range(count)]
        for number, (one, other, size) in enumerate(moves):
            kinds = (self._gpu.kind(one, size), self._gpu.kind(other, size))
            if sorted(map(str, kinds)) != ["device", "pinned"] or size < 1:
                failed[0] = number
                return INVALID_VALUE
        self._gpu.add_copies(moves, on)
        return 0

    def cuMemcpyBatchAsync_v2(
        self, to: Any, source: Any, sizes: Any, count: int, attributes: Any, first: Any, attribute_count: int,
        stream: int | None,
    ) -> int:  # fmt: skip
        failed = [0]
        return self.cuMemcpyBatchAsync(to, source, sizes, count, attributes, first, attribute_count, failed, stream)


# The rig

GUARD_BYTES = 4096
GUARD = 0xA5


def layouts(page_bytes: int, device_pages: int, base: int) -> dict[str, tuple[PageLayout, int]]:
    """Kinds of device memory by name: the layout, and the bytes it takes from `base` on."""
    third = page_bytes // 3
    sizes = [third, third, page_bytes - 2 * third]
    by_layer, at = [], base
    for size in sizes:
        by_layer.append(Segment(at, size, size))
        at += size * device_pages
    block_first = [Segment(base + sum(sizes[:n]), page_bytes, size) for n, size in enumerate(sizes)]
    padded = [Segment(base + n * (third + 13), 3 * (third + 13) + 40, size) for n, size in enumerate(sizes)]
    return {
        "page-major": (PageLayout.contiguous(base, page_bytes), page_bytes * device_pages),
        "by layer": (PageLayout(segments=tuple(by_layer)), page_bytes * device_pages),
        "block first": (PageLayout(segments=tuple(block_first)), page_bytes * device_pages),
        "padded": (PageLayout(segments=tuple(padded)), (3 * (third + 13) + 40) * device_pages),
    }


class CudaRig:
    """A CudaCopier on a fake device, steered through the device. `batches`: which form of that call its driver has.

    `pinnable`: how many slabs may be pinned; all when None. `pin_ahead` False: nobody pins but the copier itself. Where
    the copier needs its thread the clock is the wall's, and copies take no time of their own.
    """

    def __init__(
        self,
        *,
        layout: str = "page-major",
        page_bytes: int = 1000,
        device_pages: int = 24,
        frames: int = 32,
        frames_per_slab: int = 7,
        window_jobs: int = 1,
        window_bytes: int = 1 << 30,
        longest_copy_bytes: int = 1700,
        batch_copies: int = 5,
        batches: str | None = "cuMemcpyBatchAsync",
        pinnable: int | None = None,
        pin_ahead: bool = True,
        copier: type[CudaCopier] = CudaCopier,
        copy_s: float = 1e-4,
    ) -> None:
        self._batches = batches
        self.page_bytes = page_bytes
        self.device_pages = device_pages
        self.frames = frames
        threaded = pinnable is not None or not pin_ahead
        self.at_once = 1 if threaded else window_jobs  # a call that lasts as long as its copy is the only one
        self.clock: Clock = WallClock() if threaded else VirtualClock(100.0)
        self.gpu = FakeGpu(self.clock, copy_s=0.0 if threaded else copy_s)
        self._memory = np.full(8 * page_bytes * device_pages + 2 * GUARD_BYTES, GUARD, dtype=np.uint8)
        base = int(self._memory.ctypes.data) + GUARD_BYTES
        self.layout, self.device_bytes = layouts(page_bytes, device_pages, base)[layout]
        self.gpu.device_memory.append((base, self.device_bytes))
        self.slabs = Slabs(frames * page_bytes, page_bytes, slab_bytes=frames_per_slab * page_bytes)
        self._driver = FakeDriver(self.gpu, without=tuple(form for form in BATCH_FORMS if form != batches))
        self.runtime = DriverRuntime(self._driver.symbol, device=0, compute_stream=lambda: DEFAULT_STREAM)
        self.copier = copier(
            self.runtime,
            self.layout,
            device_pages,
            self.slabs,
            clock=self.clock,
            owner=self._memory,
            window_jobs=window_jobs,
            window_bytes=window_bytes,
            longest_copy_bytes=longest_copy_bytes,
            batch_copies=batch_copies,
        )
        if pinnable is not None:
            self.gpu.refuse("cuMemHostRegister_v2", OUT_OF_MEMORY, after=pinnable)
        while pin_ahead and self.copier.pin_next():
            pass

    def _device_pieces(self, page: int) -> list[tuple[int, int]]:
        return [(s.address + page * s.stride_bytes, s.page_bytes) for s in self.layout.segments]

    def read_device(self, page: int) -> bytes:
        return b"".join(ctypes.string_at(*piece) for piece in self._device_pieces(page))

    def write_device(self, page: int, data: bytes) -> None:
        _spread(self._device_pieces(page), data)

    def read_host(self, frame: int) -> bytes:
        return b"".join(ctypes.string_at(*piece) for piece in frame_pieces(frame, self.slabs, self.layout))

    def write_host(self, frame: int, data: bytes) -> None:
        _spread(frame_pieces(frame, self.slabs, self.layout), data)

    def guards_intact(self) -> bool:
        """Whatever belongs to no page: before, after and, in a padded layout, between."""
        outside = np.ones(self._memory.size, dtype=bool)
        base = int(self._memory.ctypes.data)
        for page in range(self.device_pages):
            for address, size in self._device_pieces(page):
                outside[address - base : address - base + size] = False
        return bool((self._memory[outside] == GUARD).all())

    def stall(self) -> None:
        self.gpu.stall()

    def until_started(self, jobs: int, timeout_s: float) -> bool:
        stats = self.copier.stats()
        return stats.in_flight - stats.queued >= jobs

    def resume(self) -> None:
        self.gpu.resume()

    def fail_next(self) -> None:
        with_batches = self._batches if self.copier.degraded is None else None
        self.gpu.refuse(with_batches or "cuMemcpyAsync", INVALID_VALUE)

    def close(self) -> None:
        self.resume()
        assert self.copier.close(30.0)
        assert not self.gpu.failures, self.gpu.failures
        if self.gpu.lost is None:
            assert not self.gpu.pinned
            assert not self.gpu.events, "events were not given back"
            assert list(self.gpu.streams) == [DEFAULT_STREAM]
        self.slabs.close()


def _spread(pieces: list[tuple[int, int]], data: bytes) -> None:
    assert len(data) == sum(size for _, size in pieces)
    at = 0
    for address, size in pieces:
        ctypes.memmove(address, data[at : at + size], size)
        at += size
