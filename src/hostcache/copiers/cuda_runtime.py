"""The little of CUDA that a copier needs, and NVIDIA's driver behind it. Knows nothing of jobs, pages or frames.

The driver is called through its C entry points. So there is one path whatever packages are installed, a batch goes over
as three arrays instead of a Python object a copy, and a refused call leaves no error behind for the framework to trip
over, as the runtime API does (its last error is sticky for the thread).

Facts from NVIDIA's driver API reference unless said otherwise: a wait refers to the record made last before it; a batch
needs a stream of its own, not the default one, and memory that is registered as a whole; priorities order kernels, not
copies. That one copy may not span two registrations is also what sgl-project/sglang pull request 36798 met.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hostcache.copiers.layout import Moves
from hostcache.errors import HostCacheError, MissingDependency


class CudaError(HostCacheError):
    """A call that CUDA refused. `lost`: the context is gone with all that ran in it; no call will work again."""

    def __init__(self, message: str, *, code: int, lost: bool) -> None:
        super().__init__(message)
        self.code = code
        self.lost = lost

    @property
    def unsupported(self) -> bool:
        """The driver knows the call and this device cannot do it: nothing was done."""
        return self.code == NOT_SUPPORTED

    @property
    def passing(self) -> bool:
        """Refused for the sake of a graph that is being captured: the same call works afterwards."""
        return self.code in _CAPTURE


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What the driver says of itself and the device. `copy_engines` above 1: both directions at the same time."""

    name: str
    driver_version: int
    copy_engines: int
    can_batch: bool


class CudaRuntime(Protocol):
    """Streams, events, copies and pinning of one device. Streams and events are handles, never 0 but for the default
    stream. Every call raises CudaError and nothing else; any of them may report an earlier, asynchronous failure.

    Calls may come from two threads, each inside `active()`.
    """

    @property
    def can_batch(self) -> bool: ...

    def active(self) -> AbstractContextManager[None]:
        """The device's context is current on this thread inside, and what was current before is so again after it."""
        ...

    def compute_stream(self) -> int:
        """The stream on which the framework launches now, on this thread."""
        ...

    def create_stream(self) -> int:
        """Of the lowest priority; never waits for the default stream by itself."""
        ...

    def destroy_stream(self, stream: int) -> None:
        """Returns at once; what is on it still runs."""
        ...

    def stream_idle(self, stream: int) -> bool:
        """Whether everything handed to it is over. The way to ask whether the device still lives."""
        ...

    def create_event(self, *, timed: bool) -> int: ...

    def record(self, event: int, stream: int) -> None: ...

    def over(self, event: int) -> bool:
        """Whether all that was on the stream at its last record is over; True when it was never recorded."""
        ...

    def elapsed_s(self, start: int, end: int) -> float:
        """Device time between two timed events, both over."""
        ...

    def destroy_event(self, event: int) -> None:
        """Returns at once; waits made on it still hold."""
        ...

    def wait(self, stream: int, event: int) -> None:
        """What comes on `stream` from now on waits, on the device, for the event's last record. The host does not."""
        ...

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        """Asynchronous for pinned memory. For pageable memory the call may last until the copy is over."""
        ...

    def copy_batch(self, moves: Moves, stream: int) -> None:
        """All of them in one call, in stream order as a whole, in no order among themselves. At least one."""
        ...

    def pin(self, address: int, size: int) -> None:
        """Lasts as long as touching and locking that memory does."""
        ...

    def unpin(self, address: int) -> None: ...


# cuda.h

NOT_READY = 600
NOT_SUPPORTED = 801
_LOST = frozenset((
    4,    # deinitialized
    46,   # device unavailable
    100,  # no device
    101,  # invalid device
    201,  # invalid context
    214,  # uncorrectable ECC error
    219,  # NVLink uncorrectable
    220,  # JIT compiler gone with the context
    226,  # contained ECC error
    700,  # illegal address
    702,  # launch timeout
    709,  # context is destroyed
    710,  # assert
    714, 715, 716, 717, 718, 719,  # hardware stack, instruction, alignment, address space, program counter, launch
    721,  # too many blocks, cooperative
    999,  # unknown
))  # fmt: skip
_CAPTURE = range(900, 909)
_STREAM_NON_BLOCKING = 1
_EVENT_DEFAULT = 0
_EVENT_DISABLE_TIMING = 2
_SRC_ACCESS_ORDER_STREAM = 1
_PREFER_OVERLAP_WITH_COMPUTE = 1
_CAPTURE_MODE_RELAXED = 2
_ATTRIBUTE_ASYNC_ENGINES = 40


class _Location(ctypes.Structure):
    _fields_ = (("type", c_uint), ("id", c_int))


class _MemcpyAttributes(ctypes.Structure):
    _fields_ = (("src_access_order", c_uint), ("src_hint", _Location), ("dst_hint", _Location), ("flags", c_uint))


_CALLS: dict[str, tuple[type, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuCtxGetStreamPriorityRange": (POINTER(c_int), POINTER(c_int)),
    "cuStreamCreateWithPriority": (POINTER(c_void_p), c_uint, c_int),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamQuery": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuEventDestroy_v2": (c_void_p,),
    "cuMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_void_p),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}
_BATCH = "cuMemcpyBatchAsync"
_BATCH_ARGUMENTS = (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p)
_BATCH_FORMS = (
    (f"{_BATCH}_v2", _BATCH_ARGUMENTS),  # CUDA 13
    (_BATCH, (*_BATCH_ARGUMENTS[:-1], POINTER(c_size_t), c_void_p)),  # CUDA 12.8, with the index of what failed
)

Symbols = Callable[[str], int | None]
"""Entry point's name → its address; None for one that the driver does not have."""


def driver_symbols(library: str = "libcuda.so.1") -> Symbols:
    """Those of the installed driver. Raises MissingDependency where there is none."""
    try:
        loaded = ctypes.CDLL(library)
    except OSError as refusal:
        raise MissingDependency(
            f"no NVIDIA driver: {library} cannot be loaded ({refusal}); install one or use the CPU copier"
        ) from None

    def symbol(name: str) -> int | None:
        found = getattr(loaded, name, None)
        return None if found is None else ctypes.cast(found, c_void_p).value

    return symbol


class DriverRuntime:
    """`CudaRuntime` over the driver API: the primary context of `device` (the framework's too), counted as the process
    sees devices. `compute_stream` is asked on the caller's thread for the framework's current stream.

    Batches where the driver has `cuMemcpyBatchAsync` (12.8 and later). They read their source in stream order, never
    ahead of it, in both directions, and prefer the copy engines to the multiprocessors.
    """

    def __init__(self, symbols: Symbols, *, device: int, compute_stream: Callable[[], int]) -> None:
        self._calls = {name: _bind(symbols(name), name, arguments) for name, arguments in _CALLS.items()}
        self._batch: Callable[..., Any] | None = None
        self._batch_tells_index = False
        for name, arguments in _BATCH_FORMS:
            if self._batch is None and (address := symbols(name)) is not None:
                self._batch = _bind(address, name, arguments)
                self._batch_tells_index = name == _BATCH
        self._compute_stream = compute_stream
        self._attributes = _MemcpyAttributes(
            src_access_order=_SRC_ACCESS_ORDER_STREAM, flags=_PREFER_OVERLAP_WITH_COMPUTE
        )
        self._first = c_size_t(0)
        self._call("cuInit", 0)
        ordinal, context = c_int(), c_void_p()
        self._call("cuDeviceGet", byref(ordinal), device)
        self._call("cuDevicePrimaryCtxRetain", byref(context), ordinal)
        self._device, self._context = ordinal, context
        with self.active():
            least, greatest = c_int(), c_int()
            self._call("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
        self._priority = least.value

    @property
    def can_batch(self) -> bool:
        return self._batch is not None

    def facts(self) -> DeviceFacts:
        name, version, engines = ctypes.create_string_buffer(256), c_int(), c_int()
        self._call("cuDeviceGetName", name, len(name), self._device)
        self._call("cuDriverGetVersion", byref(version))
        self._call("cuDeviceGetAttribute", byref(engines), _ATTRIBUTE_ASYNC_ENGINES, self._device)
        return DeviceFacts(
            name=name.value.decode(errors="replace"),
            driver_version=version.value,
            copy_engines=engines.value,
            can_batch=self.can_batch,
        )

    def release(self) -> None:
        """The last call: gives the context back."""
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Also: a graph capture that runs somewhere in the process neither forbids our calls nor is spoilt by them."""
        self._call("cuCtxPushCurrent_v2", self._context)
        mode = c_int(_CAPTURE_MODE_RELAXED)
        try:
            self._call("cuThreadExchangeStreamCaptureMode", byref(mode))
            try:
                yield
            finally:
                self._calls["cuThreadExchangeStreamCaptureMode"](byref(mode))
        finally:
            self._calls["cuCtxPopCurrent_v2"](byref(c_void_p()))

    def compute_stream(self) -> int:
        return self._compute_stream()

    def create_stream(self) -> int:
        return self._made("cuStreamCreateWithPriority", _STREAM_NON_BLOCKING, self._priority)

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def stream_idle(self, stream: int) -> bool:
        return self._ready("cuStreamQuery", stream)

    def create_event(self, *, timed: bool) -> int:
        return self._made("cuEventCreate", _EVENT_DEFAULT if timed else _EVENT_DISABLE_TIMING)

    def record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def over(self, event: int) -> bool:
        return self._ready("cuEventQuery", event)

    def elapsed_s(self, start: int, end: int) -> float:
        elapsed_ms = c_float()
        self._call("cuEventElapsedTime", byref(elapsed_ms), start, end)
        return elapsed_ms.value / 1000.0

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", event)

    def wait(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        self._call("cuMemcpyAsync", to, source, size, stream)

    def copy_batch(self, moves: Moves, stream: int) -> None:
        if self._batch is None:
            raise CudaError(f"{_BATCH}: this driver does not have it", code=NOT_SUPPORTED, lost=False)
        columns = [np.ascontiguousarray(column, dtype=np.int64) for column in (moves.to, moves.source, moves.size)]
        failed = c_size_t(_NO_INDEX)
        code = self._batch(
            *(column.ctypes.data for column in columns),
            len(moves),
            ctypes.addressof(self._attributes),
            ctypes.addressof(self._first),
            1,
            *((byref(failed),) if self._batch_tells_index else ()),
            stream,
        )
        if code:
            which = "" if failed.value >= len(moves) else f", copy {failed.value} of {len(moves)}"
            raise self._error(f"{_BATCH}{which}", code)

    def pin(self, address: int, size: int) -> None:
        self._call("cuMemHostRegister_v2", address, size, 0)

    def unpin(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    # The C side

    def _call(self, name: str, *arguments: object) -> None:
        code = self._calls[name](*arguments)
        if code:
            raise self._error(name, code)

    def _made(self, name: str, *arguments: object) -> int:
        handle = c_void_p()
        self._call(name, byref(handle), *arguments)
        return handle.value or 0

    def _ready(self, name: str, handle: int) -> bool:
        code = self._calls[name](handle)
        if code not in (0, NOT_READY):
            raise self._error(name, code)
        return bool(code == 0)

    def _error(self, what: str, code: int) -> CudaError:
        name = c_char_p()
        told = self._calls["cuGetErrorName"](code, byref(name)) == 0 and name.value
        label = name.value.decode(errors="replace") if told and name.value else "an error without a name"
        return CudaError(f"{what}: {label} ({code})", code=code, lost=code in _LOST)


_NO_INDEX = (1 << 64) - 1


def _bind(address: int | None, name: str, arguments: tuple[type, ...]) -> Callable[..., Any]:
    if not address:
        raise MissingDependency(f"the NVIDIA driver has no {name}; update it to 12.0 or later or use the CPU copier")
    return ctypes.CFUNCTYPE(c_int, *arguments)(address)  # calls release the GIL
