"""What only a CUDA device can show of the copier: NVIDIA's driver instead of the fake, real races, real speed.

Nothing here judges a time: speeds are printed, bytes and order are asserted. `make test-gpu` runs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from tests.copiers.cuda_plants import ComputeDoesNotWait, RestoresDoNotWait, StoresDoNotWait

from hostcache.clock import WallClock
from hostcache.copiers.cuda import CudaCopier
from hostcache.testing import check_copier
from hostcache.tier.copying import CopyDone, CopyJob, Direction, extents

torch = pytest.importorskip("torch")
from tests.gpu.gpu_rig import GpuRig, device_seconds  # noqa: E402  needs torch

pytestmark = pytest.mark.gpu

PATIENCE_S = 60.0
CLOCK = WallClock()


def job(job_id: int, direction: Direction, pages: list[int], frames: list[int]) -> CopyJob:
    return CopyJob(job_id=job_id, direction=direction, extents=extents(pages, frames))


def drain(copier: CudaCopier) -> dict[int, CopyDone]:
    told: dict[int, CopyDone] = {}
    while copier.in_flight:
        assert copier.wait(PATIENCE_S), f"{copier.in_flight} in flight and nothing came"
        told |= {done.job_id: done for done in copier.poll()}
    assert all(done.error is None for done in told.values()), told
    return told


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    return lambda text: request.config.get_terminal_writer().line(f"    {text}")


@pytest.mark.parametrize("layout", ["page-major", "by layer"])
@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("window_jobs", [1, 3])
def test_the_copier_keeps_its_contract_on_this_device(layout: str, batches: bool, window_jobs: int) -> None:
    report = check_copier(lambda: GpuRig(layout=layout, batches=batches, window_jobs=window_jobs))
    assert not report.skipped


@pytest.mark.parametrize("layout", ["page-major", "by layer"])
def test_it_keeps_its_contract_on_this_device_with_pageable_slabs(layout: str) -> None:
    assert not check_copier(lambda: GpuRig(layout=layout, pinning=False)).skipped


def test_what_this_device_and_driver_are(say: Callable[[str], None]) -> None:
    rig = GpuRig()
    try:
        facts = rig.runtime.facts()
        batches = "with" if facts.can_batch else "without"
        say(f"{facts.name}, driver {facts.driver_version} {batches} batches, {facts.copy_engines} copy engines")
        assert rig.copier.degraded is None, rig.copier.degraded
    finally:
        rig.close()


ROUNDS = 60
_KERNEL_CYCLES = 10_000_000  # some milliseconds: far longer than the copy that must not overtake it


def wrong_bytes(copier: type[CudaCopier], direction: Direction, *, later: bool) -> int:
    """Rounds of `ROUNDS` in which a copy and a kernel on the same pages met in the wrong order.

    `later` False: the kernel was launched before the submit. True: after it, behind `compute_waits_for`.
    """
    rig = GpuRig(page_bytes=3 << 20, copier=copier, window_jobs=8, device_pages=24, frames=32)
    pages, wrong = list(range(8)), 0
    big = rig.device[0, :8]
    seen = torch.empty_like(big)
    try:
        for number in range(ROUNDS):
            old, new = 2 * number % 250, (2 * number + 1) % 250
            big.fill_(old)
            for frame in pages:
                rig.write_host(frame, bytes([new]) * rig.page_bytes)
            torch.cuda.synchronize()
            if later:
                rig.copier.submit(job(number, direction, pages, pages))
                assert rig.copier.compute_waits_for(number)
            else:
                torch.cuda._sleep(_KERNEL_CYCLES)
            if direction is Direction.STORE:
                big.fill_(new)
            else:
                seen.copy_(big)
            if not later:
                rig.copier.submit(job(number, direction, pages, pages))
            drain(rig.copier)
            torch.cuda.synchronize()
            if direction is Direction.STORE:
                stored = bytes([old if later else new]) * rig.page_bytes
                wrong += any(rig.read_host(frame) != stored for frame in pages)
            else:
                wrong += not bool((seen == (new if later else old)).all())
    finally:
        rig.close()
    return wrong


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("direction", list(Direction))
def test_copies_and_kernels_keep_their_order(direction: Direction, later: bool) -> None:
    assert wrong_bytes(CudaCopier, direction, later=later) == 0


@pytest.mark.parametrize(
    ("copier", "direction", "later"),
    [
        (StoresDoNotWait, Direction.STORE, False),
        (RestoresDoNotWait, Direction.RESTORE, False),
        (ComputeDoesNotWait, Direction.STORE, True),
        (ComputeDoesNotWait, Direction.RESTORE, True),
    ],
)
def test_without_the_wait_the_same_test_sees_wrong_bytes(
    copier: type[CudaCopier], direction: Direction, later: bool, say: Callable[[str], None]
) -> None:
    wrong = wrong_bytes(copier, direction, later=later)
    say(f"{copier.__name__}: wrong in {wrong} of {ROUNDS} rounds")
    assert wrong > 0


def test_the_host_does_not_wait_while_the_device_stands_still(say: Callable[[str], None]) -> None:
    """A call that waited would never come back: the gate opens after it."""
    for layout in ("page-major", "by layer"):
        rig = GpuRig(layout=layout, page_bytes=96 << 10, device_pages=512, frames=512, frames_per_slab=128, layers=32,
                     window_jobs=64)  # fmt: skip
        try:
            rig.stall()
            scattered = [(n * 37) % 512 for n in range(256)]
            start_s = CLOCK.now()
            for number, direction in enumerate(Direction):
                frames = list(range(256 * number, 256 * (number + 1)))
                rig.copier.submit(job(number, direction, scattered, frames))
            spent_s = CLOCK.now() - start_s
            assert rig.copier.poll() == []
            say(f"{layout}: submit of 256 scattered pages {spent_s / 2 * 1e6:.0f} µs on the host")
            rig.resume()
            drain(rig.copier)
        finally:
            rig.close()


@pytest.mark.parametrize("layout", ["page-major", "by layer"])
@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("scattered", [False, True])
def test_speed_of_copies(layout: str, batches: bool, scattered: bool, say: Callable[[str], None]) -> None:
    pages = 512
    rig = GpuRig(layout=layout, page_bytes=2 << 20, device_pages=pages, frames=pages, frames_per_slab=64, layers=32,
                 batches=batches, window_jobs=64)  # fmt: skip
    try:
        order = [(n * 37) % pages for n in range(pages)] if scattered else list(range(pages))
        told = []
        for direction in Direction:
            for number in range(6):
                rig.copier.submit(job(number, direction, order, list(range(pages))))
                drain(rig.copier)
            stats = rig.copier.stats()
            side = stats.store if direction is Direction.STORE else stats.restore
            speed = side.copied_bytes / side.busy_s / 1e9
            told.append(f"{direction.value} {speed:.1f} GB/s in {side.submissions // 6}")
        how = "batched" if batches else "one by one"
        say(f"{layout}, {'scattered' if scattered else 'neighbours'}, {how}: {', '.join(told)} copies a GiB")
    finally:
        rig.close()


@pytest.mark.parametrize("longest_mib", [4, 32, 256])
def test_what_a_store_costs_a_small_copy_of_the_engine(longest_mib: int, say: Callable[[str], None]) -> None:
    """An engine fetches each sampled token over the same link. How long does it wait while a store runs?"""
    pages = 1024
    rig = GpuRig(page_bytes=2 << 20, device_pages=pages, frames=pages, frames_per_slab=128, window_jobs=64,
                 longest_copy_bytes=longest_mib << 20)  # fmt: skip
    token = torch.zeros(64, dtype=torch.int64, device=rig.device.device)
    landed = torch.zeros(64, dtype=torch.int64).pin_memory()

    def fetch() -> float:
        start_s = CLOCK.now()
        landed.copy_(token, non_blocking=True)
        rig.compute.synchronize()
        return CLOCK.now() - start_s

    def shown(times: list[float]) -> str:
        times.sort()
        return f"median {times[len(times) // 2] * 1e6:.0f} µs, worst {times[-1] * 1e6:.0f} µs"

    try:
        alone = [fetch() for _ in range(200)]
        rig.copier.submit(job(1, Direction.STORE, list(range(pages)), list(range(pages))))
        beside = []
        while rig.copier.in_flight:
            beside.append(fetch())
            rig.copier.poll()
        say(f"copies of at most {longest_mib} MiB: alone {shown(alone)}; beside a 2 GiB store {shown(beside)}")
    finally:
        rig.close()


def test_what_copies_cost_kernels(say: Callable[[str], None]) -> None:
    """The same matrix products alone and beside copies in both directions."""
    pages = 1024
    rig = GpuRig(page_bytes=2 << 20, device_pages=pages, frames=pages, frames_per_slab=128, window_jobs=64)
    a = torch.randn(4096, 4096, device=rig.device.device, dtype=torch.float16)

    def work() -> None:
        for _ in range(50):
            torch.mm(a, a)

    try:
        work()
        alone_s = min(device_seconds(work) for _ in range(5))
        half = pages // 2
        rig.copier.submit(job(1, Direction.STORE, list(range(half)), list(range(half))))
        rig.copier.submit(job(2, Direction.RESTORE, list(range(half, pages)), list(range(half, pages))))
        beside_s = device_seconds(work)
        drain(rig.copier)
        say(f"50 matrix products: alone {alone_s * 1e3:.2f} ms, beside copies both ways {beside_s * 1e3:.2f} ms")
    finally:
        rig.close()


def test_slabs_are_pinned_in_steps(say: Callable[[str], None]) -> None:
    start_s = CLOCK.now()
    rig = GpuRig(page_bytes=2 << 20, device_pages=24, frames=1024, frames_per_slab=64)
    spent_s = CLOCK.now() - start_s
    try:
        assert rig.copier.degraded is None, rig.copier.degraded
        say(f"2 GiB in 16 slabs pinned in {spent_s:.2f} s, {spent_s / 16 * 1e3:.0f} ms a step")
    finally:
        rig.close()


def test_copies_and_pinning_do_not_spoil_a_graph_that_is_being_captured() -> None:
    rig = GpuRig(window_jobs=4)
    unpinned = GpuRig(pin_ahead=False)
    x = torch.zeros(1024, device=rig.device.device)
    failures: list[BaseException] = []

    def pin() -> None:
        try:
            while unpinned.copier.pin_next():
                pass
            assert unpinned.copier.degraded is None, unpinned.copier.degraded
        except BaseException as failure:
            failures.append(failure)

    try:
        rig.copier.submit(job(1, Direction.STORE, [0, 1], [0, 1]))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)
            thread = threading.Thread(target=pin)
            thread.start()
            thread.join()
            rig.copier.poll()
        assert failures == []
        graph.replay()
        torch.cuda.synchronize()
        assert bool((x == 1).all())
    finally:
        unpinned.close()
        rig.close()
