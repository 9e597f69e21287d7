"""Both sides put together from vLLM's configuration; the CUDA path on a device made of main memory."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace as Namespace
from typing import Any

import numpy as np
import pytest
from tests.copiers.fake_cuda import DEFAULT_STREAM, FakeDriver, FakeGpu
from tests.vllm_plugin import fakes
from tests.vllm_plugin.test_keys_layout_stats import Tensor

from hostcache.clock import WallClock
from hostcache.copiers.cuda import CudaCopier
from hostcache.copiers.cuda_runtime import CudaError, CudaRuntime, DriverRuntime
from hostcache.vllm_plugin import build
from hostcache.vllm_plugin.config import from_extra
from hostcache.vllm_plugin.wall import WorkerWall
from hostcache.vllm_plugin.wire import LoadOrder, Orders, StoreOrder

BLOCKS, LAYERS, BLOCK_BYTES = 12, 3, 4096
PATIENCE_S = 30.0


def configured(layers: list[str]) -> tuple[Namespace, Namespace]:
    """vLLM's configuration and its plan of the cache, as far as both sides read them."""
    vllm = Namespace(
        model_config=Namespace(model="m", revision=None, dtype="bfloat16", quantization=None),
        cache_config=Namespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        parallel_config=Namespace(tensor_parallel_size=1, world_size=1),
        device_config=Namespace(device_type="cuda"))
    spec = fakes.FullAttentionSpec(block_size=16, page_size_bytes=BLOCK_BYTES, dtype="bfloat16")
    cache = fakes.kv_cache_config(fakes.group(spec, layer_names=layers))
    cache.num_blocks = BLOCKS
    return vllm, cache


class OneGpu:
    """A worker's device with the KV cache of three layers on it, blocks innermost (BLHNC) or layers innermost."""

    def __init__(self, *, block_first: bool) -> None:
        self.clock = WallClock()
        self.gpu = FakeGpu(self.clock)
        self.driver = FakeDriver(self.gpu)  # its calls are bound by their addresses: it must outlive the runtime
        self.memory = np.zeros(BLOCKS * LAYERS * BLOCK_BYTES, dtype=np.uint8)
        self.base = int(self.memory.ctypes.data)
        self.gpu.device_memory.append((self.base, self.memory.nbytes))
        self.between = BLOCK_BYTES if block_first else BLOCKS * BLOCK_BYTES
        self.stride = stride = LAYERS * BLOCK_BYTES if block_first else BLOCK_BYTES
        inner = (2, 32, BLOCK_BYTES // 4 // 64)
        strides = (inner[1] * inner[2], inner[2], 1)
        self.caches = {f"layer {i}": Tensor(self.base + i * self.between, (BLOCKS, *inner), (stride // 4, *strides))
                       for i in range(LAYERS)}
        self.vllm, self.cache = configured(list(self.caches))
        self.said: list[str] = []

    def runtime(self) -> CudaRuntime:
        return DriverRuntime(self.driver.symbol, device=0, compute_stream=lambda: DEFAULT_STREAM)

    def worker(self, **given: Any) -> WorkerWall:
        config = from_extra({"host_cache_bytes": 20 * LAYERS * BLOCK_BYTES}, environ={})
        side = build.worker_side(config, self.vllm, self.cache, self.caches, clock=self.clock, say=self.said.append,
                                 **{"cuda": self.runtime, **given})
        return WorkerWall(side, clock=self.clock, say=self.said.append)

    def fill(self, block: int, value: int) -> None:
        for layer in range(LAYERS):
            ctypes.memset(self.base + layer * self.between + block * self.stride, value, BLOCK_BYTES)

    def held(self, block: int) -> set[int]:
        return {byte for layer in range(LAYERS)
                for byte in ctypes.string_at(self.base + layer * self.between + block * self.stride, BLOCK_BYTES)}


@pytest.fixture(params=[True, False], ids=["block first", "layer first"])
def one(request: pytest.FixtureRequest) -> OneGpu:
    return OneGpu(block_first=request.param)


def step(clock: WallClock, worker: WorkerWall, orders: Orders) -> tuple[set[str], set[str], dict[int, str | None]]:
    """Of vLLM's worker, and then others until every job has ended."""
    told: set[str] = set()
    failed: set[str] = set()
    ends: dict[int, str | None] = {}
    wanted = {store.job_id for store in orders.stores} | {load.job_id for load in orders.loads}
    give_up_s = clock.now() + PATIENCE_S
    while not wanted <= ends.keys() and clock.now() < give_up_s:
        worker.before_forward(orders)
        worker.after_forward(orders)
        more, bad = worker.finished()
        told, failed = told | more, failed | bad
        report = worker.report()
        ends |= {} if report is None else {end.job_id: end.error for end in report.ends}
        orders = Orders(step=orders.step + 1)
    return told, failed, ends


def test_blocks_go_to_the_host_and_come_back_by_way_of_cuda(one: OneGpu) -> None:
    worker = one.worker()
    assert isinstance(worker.side.copier, CudaCopier)
    one.fill(3, 7)
    one.fill(4, 8)
    store = StoreOrder(job_id=1, blocks=(3, 4), frames=(5, 6), at_once=False)
    assert step(one.clock, worker, Orders(step=1, stores=(store,))) == (set(), set(), {1: None})
    one.fill(3, 0)
    one.fill(4, 0)
    load = LoadOrder(job_id=2, request_id="r", blocks=(9, 10), frames=(5, 6), budget_s=PATIENCE_S)
    assert step(one.clock, worker, Orders(step=50, loads=(load,))) == ({"r"}, set(), {2: None})
    assert (one.held(9), one.held(10), one.held(3)) == ({7}, {8}, {0})
    assert worker.close(PATIENCE_S)
    assert not one.gpu.pinned
    assert not one.gpu.failures
    assert one.said == []


def test_blocks_that_this_step_overwrites_are_saved_before_it_does(one: OneGpu) -> None:
    worker = one.worker()
    one.fill(3, 7)
    worker.before_forward(Orders(step=1, stores=(StoreOrder(job_id=1, blocks=(3,), frames=(5,), at_once=True),)))
    one.gpu.launch(0.0, lambda: one.fill(3, 9))  # the forward pass
    one.gpu.settle()
    load = LoadOrder(job_id=2, request_id="r", blocks=(9,), frames=(5,), budget_s=PATIENCE_S)
    assert step(one.clock, worker, Orders(step=2, loads=(load,)))[0] == {"r"}
    assert (one.held(9), one.held(3)) == ({7}, {9})
    assert worker.close(PATIENCE_S)


def test_vllm_serves_before_the_memory_is_pinned_and_all_of_it_is_in_the_end(one: OneGpu) -> None:
    worker = one.worker()
    worker.before_forward(Orders(step=1))
    assert one.gpu.calls("cuMemHostRegister_v2") == 0
    worker.before_forward(Orders(step=2, prepare=True))
    give_up_s = one.clock.now() + PATIENCE_S
    while sum(one.gpu.pinned.values()) < 20 * LAYERS * BLOCK_BYTES and one.clock.now() < give_up_s:
        worker.finished()
    assert sum(one.gpu.pinned.values()) == 20 * LAYERS * BLOCK_BYTES
    assert worker.close(PATIENCE_S)


def test_a_layout_that_is_not_known_leaves_a_rank_that_copies_nothing_and_says_so(one: OneGpu) -> None:
    one.cache.num_blocks = BLOCKS + 1
    worker = one.worker()
    assert worker.side.copier is None
    assert len(one.said) == 1
    assert "its outermost dimension is not the 13 blocks" in one.said[0]


def test_a_device_that_refuses_at_the_start_leaves_a_rank_that_copies_nothing_and_says_so(one: OneGpu) -> None:
    def refuses() -> CudaRuntime:
        raise CudaError("cuInit: no device", code=100, lost=True)

    worker = one.worker(cuda=refuses)
    assert worker.side.copier is None
    assert one.said == ["hostcache: this rank runs without the tier: cuInit: no device"]
    load = LoadOrder(job_id=2, request_id="r", blocks=(9,), frames=(5,), budget_s=1.0)
    told, failed, ends = step(one.clock, worker, Orders(step=1, loads=(load,)))
    assert (told, failed, list(ends)) == ({"r"}, {"r"}, [2])
