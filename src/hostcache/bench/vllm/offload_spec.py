"""vLLM's own OffloadingConnector on the CPU: what it lacks there, a worker that copies. A baseline only.

vLLM 0.32 refuses its CPU spec where the device is a CPU too ("only supported on CUDA-alike and XPU GPUs",
v1/kv_offload/cpu/spec.py). Its manager, policy and metrics are used as they are. Named to vLLM by `spec_name` and
`spec_module_path`; the one module of the benchmarks that imports vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from hostcache.clock import WallClock
from hostcache.errors import ConfigError

THREADS = 2


class MemcpyOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """`cpu_bytes_to_use` as in vLLM's own spec."""

    _worker: MemcpyWorker | None

    def get_worker(self, kv_caches: Any) -> MemcpyWorker:
        if self._worker is None:
            if self.blocks_per_chunk != 1 or len(kv_caches.group_data_refs) != 1:
                raise ConfigError(f"this baseline copies one KV group, one block a chunk; the model has "
                                  f"{len(kv_caches.group_data_refs)} groups and {self.blocks_per_chunk} blocks a chunk")
            self._worker = MemcpyWorker([each.tensor.numpy() for each in kv_caches.tensors], self.num_chunks)
        return self._worker


class MemcpyWorker(OffloadingWorker):  # type: ignore[misc]
    """`device`: one array (blocks, bytes) a layer. Host memory is touched here, so that no copy meets a fresh page."""

    def __init__(self, device: Sequence[np.ndarray[Any, Any]], chunks: int) -> None:
        self._device = device
        self._host = [np.ones((chunks, layer.shape[1]), layer.dtype) for layer in device]
        self._pool = ThreadPoolExecutor(THREADS, "offload-copy")
        self._clock = WallClock()
        self._jobs: dict[int, Future[TransferResult]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, self._device, src_spec.block_ids, self._host, dst_spec.block_ids)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, self._host, src_spec.block_ids, self._device, dst_spec.block_ids)

    def _submit(self, job_id: int, sources: Sequence[np.ndarray[Any, Any]], source_ids: np.ndarray[Any, Any],
                targets: Sequence[np.ndarray[Any, Any]], target_ids: np.ndarray[Any, Any]) -> bool:
        def copy() -> TransferResult:
            started_s, moved = self._clock.now(), 0
            for first, behind in runs(source_ids, target_ids):
                at, to, count = int(source_ids[first]), int(target_ids[first]), behind - first
                for source, target in zip(sources, targets, strict=True):
                    target[to : to + count] = source[at : at + count]
                    moved += count * source.shape[1]
            return TransferResult(job_id, True, moved, self._clock.now() - started_s)

        self._jobs[job_id] = self._pool.submit(copy)
        return True

    def get_finished(self) -> list[TransferResult]:
        ended = [job for job, future in self._jobs.items() if future.done()]
        return [self._jobs.pop(job).result() for job in ended]

    def wait(self, job_ids: set[int]) -> None:
        wait([self._jobs[job] for job in job_ids if job in self._jobs])

    def shutdown(self) -> None:
        self._pool.shutdown()


def runs(sources: Sequence[int] | np.ndarray[Any, Any],
         targets: Sequence[int] | np.ndarray[Any, Any]) -> Iterator[tuple[int, int]]:
    """(first, behind the last) of every stretch in which both sides count up by one: one copy each."""
    if len(sources):
        breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
        edges = [0, *breaks.tolist(), len(sources)]
        yield from pairwise(edges)
