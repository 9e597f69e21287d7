"""The tier in an engine of your own: one conversation is written back, evicted and restored. Needs numpy alone.

The "device" is an array of pages; a real engine would put its KV pool there.
"""

from __future__ import annotations

from random import Random

import numpy as np

from hostcache import CopyJob, History, HostCache, Identity, Pressure, Refused, TierConfig, key_chain
from hostcache.clock import WallClock
from hostcache.copiers import Slabs, ThreadCopier
from hostcache.tier import Direction, extents

PAGE_TOKENS, PAGE_BYTES, DEVICE_PAGES = 32, 1 << 16, 64


def main() -> None:
    clock = WallClock()
    device = np.zeros((DEVICE_PAGES, PAGE_BYTES), dtype=np.uint8)
    config = TierConfig(host_cache_bytes=16 << 20, page_bytes=PAGE_BYTES, page_tokens=PAGE_TOKENS)
    cache = HostCache(config, history=History(16 * config.frames))
    slabs = Slabs(config.host_cache_bytes, PAGE_BYTES)
    copier = ThreadCopier(device.ctypes.data, DEVICE_PAGES, PAGE_BYTES, slabs, clock=clock, owner=device)

    # A conversation of 40 pages was computed into device pages 0 to 39 and completed: snapshot 1.
    identity = Identity(model="my-model", revision="r1", dtype="float32", layout="page-major", page_tokens=PAGE_TOKENS)
    tokens = [Random(0).randrange(32_000) for _ in range(40 * PAGE_TOKENS)]
    chain = key_chain(tokens, identity)
    device[:40] = np.random.default_rng(0).integers(0, 256, (40, PAGE_BYTES), dtype=np.uint8)
    before = device[:40].copy()
    page_of = dict(zip(chain.keys, range(40), strict=True))
    cache.device_added(chain, 0, 40)
    cache.retain(1, chain, pages=40)
    print("no pressure:", len(cache.plan_writeback(Pressure(now_s=clock.now()))), "jobs")

    # Its eviction comes within reach: what the host lacks is copied in the background.
    for job in cache.plan_writeback(Pressure(now_s=clock.now(), victims=[1])):
        moves = extents([page_of[key] for key in job.keys], job.frames)
        copier.submit(CopyJob(job_id=job.job_id, direction=Direction.STORE, extents=moves))
    while copier.in_flight:
        copier.wait(timeout_s=1.0)
        for done in copier.poll():
            cache.settle(done)

    # It is evicted, and its pages are used for something else.
    print("evict:", cache.before_evict(1, stays=0, now_s=clock.now()))
    cache.evicted(1)
    cache.device_removed(chain.keys)
    device[:40] = 0

    # It returns. Its pages may go anywhere on the device: here to 20 and up.
    reservation = cache.reserve(cache.lookup(chain, 0, 39))  # the last token is always computed
    if isinstance(reservation, Refused):
        raise SystemExit(f"refused: {reservation.reason.value}")
    room = list(range(20, 20 + reservation.pages))
    moves = extents(room, reservation.frames)
    copier.submit(CopyJob(job_id=reservation.job_id, direction=Direction.RESTORE, extents=moves))
    while copier.in_flight:
        copier.wait(timeout_s=1.0)
        for done in copier.poll():
            cache.commit(reservation, done)
    cache.device_added(chain, 0, reservation.pages)
    cache.check()
    print("restored:", reservation.pages, "pages, equal:", bool((device[room] == before[: len(room)]).all()))

    copier.close(timeout_s=1.0)
    slabs.close()


if __name__ == "__main__":
    main()
