"""The worker side of the vLLM plugin on a real device, as vLLM would have it built: torch's tensors, torch's stream."""

from __future__ import annotations

from typing import Any

import pytest
from tests.vllm_plugin.test_build import BLOCK_BYTES, BLOCKS, LAYERS, PATIENCE_S, configured, step

from hostcache.clock import WallClock
from hostcache.copiers.cuda import CudaCopier
from hostcache.vllm_plugin import build
from hostcache.vllm_plugin.config import from_extra
from hostcache.vllm_plugin.wall import WorkerWall
from hostcache.vllm_plugin.wire import LoadOrder, Orders, StoreOrder

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

CLOCK = WallClock()
SHAPE = (2, 32, BLOCK_BYTES // 2 // 64)


def layers(*, block_first: bool) -> dict[str, Any]:
    """The KV cache of three layers in one storage of float16."""
    elements = BLOCK_BYTES // 2
    memory = torch.zeros(BLOCKS * LAYERS * elements, dtype=torch.float16, device="cuda")
    between, stride = (elements, LAYERS * elements) if block_first else (BLOCKS * elements, elements)
    strides = (stride, SHAPE[1] * SHAPE[2], SHAPE[2], 1)
    return {f"layer {i}": memory.as_strided((BLOCKS, *SHAPE), strides, i * between) for i in range(LAYERS)}


@pytest.mark.parametrize("block_first", [True, False])
def test_blocks_are_saved_before_they_are_overwritten_and_come_back_before_they_are_read(block_first: bool) -> None:
    caches = layers(block_first=block_first)
    vllm, cache = configured(list(caches))
    config = from_extra({"host_cache_bytes": 20 * LAYERS * BLOCK_BYTES}, environ={})
    said: list[str] = []
    side = build.worker_side(config, vllm, cache, caches, clock=CLOCK, say=said.append)
    assert isinstance(side.copier, CudaCopier), said
    worker = WorkerWall(side, clock=CLOCK, say=said.append)
    for number, layer in enumerate(caches.values()):
        layer[3] = number + 1
        layer[4] = number + 11
    store = StoreOrder(job_id=1, blocks=(3, 4), frames=(5, 6), at_once=True)
    worker.before_forward(Orders(step=1, stores=(store,)))
    for layer in caches.values():  # the forward pass, launched without waiting on the host
        layer[3:5] = -1
    assert step(CLOCK, worker, Orders(step=2)) == (set(), set(), {})
    load = LoadOrder(job_id=2, request_id="r", blocks=(9, 10), frames=(5, 6), budget_s=PATIENCE_S)
    told, failed, ends = step(CLOCK, worker, Orders(step=3, loads=(load,)))
    assert (told, failed, ends[2]) == ({"r"}, set(), None)
    torch.cuda.synchronize()
    for number, layer in enumerate(caches.values()):
        assert bool((layer[9] == number + 1).all())
        assert bool((layer[10] == number + 11).all())
        assert bool((layer[3:5] == -1).all())
    assert worker.close(PATIENCE_S)
    assert said == []
