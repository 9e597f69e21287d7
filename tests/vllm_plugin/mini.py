"""vLLM's scheduler and workers in small, driving the real two sides of the plugin, one step at a time.

What the plugin reads of vLLM has vLLM's names and order of calls. Memory holds, for each token, a digest of all tokens
up to it; a forward pass first reads what it attends to and raises `ForeignBytes` where anything else is there. Copies
take virtual time, and until a copy has ended its destination is torn.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from random import Random
from types import SimpleNamespace
from typing import Any

from hostcache.clock import VirtualClock
from hostcache.copiers import CopySpeed, Fault, VirtualCopier
from hostcache.tier import CopyJob, Direction, Identity, Mode, PageKey, TierConfig
from hostcache.tier.table import RESIDENT
from hostcache.vllm_plugin.keys import page_key
from hostcache.vllm_plugin.scheduler_side import SchedulerSide
from hostcache.vllm_plugin.stats import merged
from hostcache.vllm_plugin.wall import SchedulerWall, WorkerWall
from hostcache.vllm_plugin.worker_side import WorkerSide

BLOCK = 4
GROUP = b"\0\0\0\0"
TORN = (b"torn",) * BLOCK
STEP_S = 0.01
IDENTITY = Identity(model="mini", revision="1", dtype="none", layout="mini", page_tokens=BLOCK)


class ForeignBytes(AssertionError):
    pass


class Stuck(AssertionError):
    pass


@dataclass(slots=True, eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None


class HashMap:
    def __init__(self) -> None:
        self.blocks: dict[bytes, dict[int, Block]] = {}

    def __len__(self) -> int:
        return sum(bool(blocks) for blocks in self.blocks.values())

    def get_one_block(self, key: bytes) -> Block | None:
        return next(iter(self.blocks.get(key, {}).values()), None)


class Pool:
    """`queue`: free blocks, next victim first. Block 0 is never handed out."""

    enable_caching = True
    hash_block_size = BLOCK

    def __init__(self, count: int) -> None:
        self.blocks = [Block(i) for i in range(count)]
        self.queue: dict[int, Block] = {block.block_id: block for block in self.blocks[1:]}
        self.cached_block_hash_to_block = HashMap()
        self.metrics_collector: Any = None
        self.free_block_queue = self
        self.evicted: list[bytes] = []

    def iter_blocks_after(self, cursor: None) -> Iterator[Block]:
        return iter(self.queue.values())

    def get_cached_block(self, block_hash: bytes, groups: Sequence[int]) -> list[Block] | None:
        found = self.cached_block_hash_to_block.get_one_block(block_hash + GROUP)
        return None if found is None else [found]

    def take(self, count: int) -> list[Block]:
        taken = [self.queue.pop(i) for i in list(self.queue)[:count]]
        for block in taken:
            if block.block_hash is not None:
                self.evicted.append(block.block_hash)
            self.metrics_collector.on_block_evicted(block)
            self.drop_hash(block)
            block.ref_cnt = 1
            self.metrics_collector.on_block_allocated(block)
        return taken

    def drop_hash(self, block: Block) -> None:
        if block.block_hash is not None:
            del self.cached_block_hash_to_block.blocks[block.block_hash][block.block_id]
            block.block_hash = None

    def cache(self, block: Block, block_hash: bytes) -> None:
        if block.block_hash is None:
            block.block_hash = block_hash + GROUP
            self.cached_block_hash_to_block.blocks.setdefault(block.block_hash, {})[block.block_id] = block

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.queue.pop(block.block_id, None)
            block.ref_cnt += 1
            self.metrics_collector.on_block_accessed(block)

    def free_blocks(self, blocks: Sequence[Block]) -> None:
        first: list[Block] = []
        last: list[Block] = []
        for block in blocks:
            block.ref_cnt -= 1
            if not block.ref_cnt:
                (first if block.block_hash is None else last).append(block)
        rest = self.queue
        self.queue = {block.block_id: block for block in [*first, *rest.values(), *last]}

    def reset_prefix_cache(self) -> bool:
        if len(self.queue) != len(self.blocks) - 1:
            return False
        for block in self.blocks:
            self.drop_hash(block)
        self.metrics_collector.reset()
        return True


@dataclass(slots=True, eq=False)
class Request:
    request_id: str
    tokens: list[int]
    output: int
    salt: bytes = b""
    kv_transfer_params: Any = None
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    skip_reading_prefix_cache: bool = False
    num_preemptions: int = 0
    status: Any = field(default_factory=lambda: SimpleNamespace(name="WAITING"))
    blocks: list[Block] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    prompt: int = 0
    lookups: int = 0
    cached: int | None = None
    told: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)
        self.grow([])

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def grow(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        for token in self.tokens[len(self.digests) :]:
            last = self.digests[-1] if self.digests else self.salt
            self.digests.append(blake2b(last + bytes([token]), digest_size=8).digest())
        for at in range(len(self.block_hashes), len(self.tokens) // BLOCK):
            before = self.block_hashes[-1] if self.block_hashes else self.salt
            self.block_hashes.append(sha256(before + bytes(self.tokens[at * BLOCK : (at + 1) * BLOCK])).digest())

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt :]


class Memory:
    """One rank's: blocks and frames, each a digest a token."""

    def __init__(self, rank: int, blocks: int, frames: int) -> None:
        self.rank = rank
        self.device: list[tuple[bytes, ...]] = [TORN] * blocks
        self.host: list[tuple[bytes, ...]] = [TORN] * frames

    def begin(self, job: CopyJob) -> None:
        for block, frame in _pairs(job):
            if job.direction is Direction.STORE:
                self.host[frame] = TORN
            else:
                self.device[block] = TORN

    def finish(self, job: CopyJob, pages: int) -> None:
        for block, frame in _pairs(job)[:pages]:
            if job.direction is Direction.STORE:
                self.host[frame] = self.device[block]
            else:
                self.device[block] = self.host[frame]

    def compute(self, request: Request, count: int) -> None:
        start = request.num_computed_tokens
        for at in range(start):
            if self.device[request.blocks[at // BLOCK].block_id][at % BLOCK] != self._kv(request, at):
                raise ForeignBytes(f"request {request.request_id} reads token {at} in block {at // BLOCK}")
        for at in range(start, start + count):
            block_id = request.blocks[at // BLOCK].block_id
            held = list(self.device[block_id])
            held[at % BLOCK] = self._kv(request, at)
            self.device[block_id] = tuple(held)

    def _kv(self, request: Request, at: int) -> bytes:
        return bytes([self.rank]) + request.digests[at]


def _pairs(job: CopyJob) -> list[tuple[int, int]]:
    return [(e.device_page + i, e.frame + i) for e in job.extents for i in range(e.pages)]


class MiniVllm:
    """`faults`: one for each rank's copier. `page_s`: what copying a block takes. `scheduler`, `worker`, `copier`:
    what is to be tried in place of the usual ones."""

    def __init__(self, *, blocks: int = 24, host_pages: int = 64, chunk: int = 16, seqs: int = 4,
                 mode: Mode = Mode.ON_PRESSURE, ranks: int = 1, faults: Sequence[Fault | None] = (),
                 page_s: float = 0.001, copy_budget_s: float = 1.0, restore_budget_s: float = 1.0,
                 max_job_pages: int = 256, keep_on_reset: bool = False, clock: VirtualClock | None = None,
                 scheduler: type[SchedulerSide] = SchedulerSide, worker: type[WorkerSide] = WorkerSide,
                 copier: type[VirtualCopier] = VirtualCopier) -> None:
        self.clock = clock or VirtualClock()
        self.chunk, self.seqs, self.ranks = chunk, seqs, ranks
        self.pool = Pool(blocks)
        config = TierConfig(
            host_cache_bytes=host_pages, page_bytes=1, page_tokens=BLOCK, mode=mode, copy_budget_s=copy_budget_s,
            restore_budget_s=restore_budget_s, max_job_pages=max_job_pages, quarantine_limit=1.0)
        self.said: list[str] = []
        self.side = scheduler(config=config, identity=IDENTITY, ranks=ranks, step_tokens=chunk, clock=self.clock,
                              say=self.said.append, keep_on_reset=keep_on_reset, events=True)
        self.wall = SchedulerWall(self.side, clock=self.clock, say=self.said.append)
        self.told: set[bytes] = set()
        self.shown: dict[str, float] = {}
        """what /metrics would show"""
        self.wall.bind(self.pool)
        self.memories = [Memory(rank, blocks, config.frames) for rank in range(ranks)]
        speed = CopySpeed(store_bytes_per_s=1 / page_s, restore_bytes_per_s=1 / page_s)
        self.copiers = [
            copier(self.clock, device_pages=blocks, frames=max(1, config.frames), page_bytes=1, speed=speed,
                   rng=Random(rank), mover=self.memories[rank], fault=fault)
            for rank, fault in zip(range(ranks), [*faults, *[None] * ranks], strict=False)
        ]
        self.workers = [
            WorkerWall(worker(copier=each, clock=self.clock, copy_budget_s=copy_budget_s), clock=self.clock,
                       say=self.said.append)
            for each in self.copiers
        ]
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.done: dict[str, Request] = {}
        self.received: dict[str, int] = {}
        self.ready: set[str] = set()
        self.failed: set[str] = set()
        self.failing: set[str] = set()
        self.left = 0
        """pages whose last block was handed out"""
        self._ids = 0

    # ---- what a client does

    def add(self, tokens: Sequence[int], output: int = 3, *, salt: bytes = b"", wishes: Any = None) -> Request:
        self._ids += 1
        params = None if wishes is None else {"hostcache": wishes}
        request = Request(str(self._ids), list(tokens), output, salt, params)
        assert len(tokens) + output <= BLOCK * (len(self.pool.blocks) - 1)
        self.requests[request.request_id] = request
        self.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        loading = request.status.name == "LOADING"
        (self.running if request in self.running else self.waiting).remove(request)
        self._end(request, "FINISHED_ABORTED", keep_blocks=loading and request.request_id not in self.ready)

    def run(self, steps: int = 2000) -> None:
        """Until nothing is left to do."""
        for _ in range(steps):
            if not (self.waiting or self.running or self.wall.busy or self.side_waits):
                return
            self.step()
        raise Stuck(f"waiting {[r.request_id for r in self.waiting]}, running {[r.request_id for r in self.running]}")

    @property
    def side_waits(self) -> bool:
        return any(r.status.name == "FINISHED_ABORTED" and r.blocks for r in self.requests.values())

    def ask(self, tokens: Sequence[int], output: int = 3, *, salt: bytes = b"", wishes: Any = None) -> Request:
        request = self.add(tokens, output, salt=salt, wishes=wishes)
        self.run()
        return request

    def at_rest(self) -> None:
        assert not self.requests
        assert len(self.pool.queue) == len(self.pool.blocks) - 1
        assert self.wall.held == 0
        self.listen()
        if self.wall.side is None:
            assert not self.told
            return
        self.side.check()
        if self.side.off_reason is not None:
            assert not self.told
            return
        known, there = self.on_device()
        assert known <= there
        table = self.side.tier._table
        live = table.live()
        held = table.keys_of(live[(table.state[live] == RESIDENT) & ~table.dead[live]])
        assert {page_key(IDENTITY.digest, each) for each in self.told} == set(held)

    def on_device(self) -> tuple[set[PageKey], set[PageKey]]:
        """Pages that the tier believes to be in a block, and those that are."""
        table = self.side.tier._table
        hashes = self.pool.cached_block_hash_to_block.blocks
        there = {page_key(IDENTITY.digest, each[: -len(GROUP)]) for each, blocks in hashes.items() if blocks}
        return set(table.keys_of(table.on_device())), there

    # ---- a step, in vLLM's order

    def step(self) -> None:
        scheduled: dict[str, int] = {}
        preempted: set[str] = set()
        self._schedule_running(scheduled, preempted)
        if not preempted:
            self._schedule_waiting(scheduled)
        orders = self.wall.build(SimpleNamespace(
            num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()),
            preempted_req_ids=preempted))
        orders = pickle.loads(pickle.dumps(orders))
        evicted, self.pool.evicted = self.pool.evicted, []
        another = self.pool.cached_block_hash_to_block.get_one_block
        self.left += sum(another(each) is None for each in dict.fromkeys(evicted))
        for worker, memory in zip(self.workers, self.memories, strict=True):
            worker.before_forward(orders)
            for request_id, count in scheduled.items():
                memory.compute(self.requests[request_id], count)
            worker.after_forward(orders)
        self.clock.advance(STEP_S)
        for request_id, count in scheduled.items():
            self.requests[request_id].num_computed_tokens += count
        finished: set[str] = set()
        reports = []
        for worker in self.workers:
            ended, failed = worker.finished()
            self.failing |= failed
            for request_id in ended:
                self.received[request_id] = self.received.get(request_id, 0) + 1
                if self.received[request_id] == self.ranks:
                    del self.received[request_id]
                    finished.add(request_id)
            if (report := worker.report()) is not None:
                reports.append(pickle.loads(pickle.dumps(report)))
        self._update(scheduled, finished, reports)

    def listen(self) -> None:
        """Apply what the plugin tells of its contents, as a reader of vLLM's events would."""
        for restorable, block_hash in self.wall.take_events():
            (self.told.add if restorable else self.told.discard)(block_hash)

    def _update(self, computed: dict[str, int], finished: set[str], reports: list[Any]) -> None:
        for request_id in self.failing & finished:
            self.failing.discard(request_id)
            if self.requests[request_id].status.name == "LOADING":
                self.requests[request_id].num_computed_tokens = 0
                self.failed.add(request_id)
        for request_id in computed:
            request = self.requests.get(request_id)
            if request is None or request.num_computed_tokens < request.num_tokens:
                continue
            if len(request.answer) < request.output:
                request.grow([request.digests[-1][0] % 5])
            if len(request.answer) == request.output:
                self.running.remove(request)
                self._end(request, "FINISHED_LENGTH_CAPPED")
        self.wall.heard(reports)
        self.shown = merged(self.shown, self.wall.take_statistics())
        self.listen()
        for request_id in finished:
            request = self.requests[request_id]
            if request.status.name == "LOADING":
                self.ready.add(request_id)
            else:
                assert request.status.name == "FINISHED_ABORTED"
                self._free(request)
                del self.requests[request_id]

    def _schedule_running(self, scheduled: dict[str, int], preempted: set[str]) -> None:
        budget = self.chunk
        for request in list(self.running):
            if request not in self.running or not budget:
                continue
            count = min(budget, request.num_tokens - request.num_computed_tokens)
            while not self._allocate(request, count):
                victim = self.running.pop()
                self._free(victim)
                victim.num_computed_tokens, victim.num_preemptions = 0, victim.num_preemptions + 1
                victim.status.name = "PREEMPTED"
                self.waiting.insert(0, victim)
                preempted.add(victim.request_id)
                if victim is request:
                    break
            if request in self.running:
                scheduled[request.request_id] = count
                budget -= count

    def _schedule_waiting(self, scheduled: dict[str, int]) -> None:
        budget = self.chunk - sum(scheduled.values())
        for request in sorted(self.waiting, key=lambda each: not each.blocks):  # who holds blocks comes first
            if not budget or len(self.running) >= self.seqs:
                return
            if request.status.name == "LOADING":
                if request.request_id not in self.ready:
                    continue
                self._promote(request)
            if not request.num_computed_tokens:
                self._free(request)
                local = self._local(request)
                request.lookups += 1
                external = self.wall.match(request, len(local) * BLOCK)
                if external is None:
                    continue
                if external and request.skip_reading_prefix_cache:
                    external = 0
                start = len(local) * BLOCK + external
                count = 0 if external else min(budget, request.num_tokens - start)
                need = -(-(start + count) // BLOCK) - len(local)
                if need > len(self.pool.queue) - sum(not block.ref_cnt for block in local):
                    return
                self.pool.touch(local)
                request.blocks = [*local, *self.pool.take(need)]
                request.num_computed_tokens = start
                self.wall.allocated(request, [block.block_id for block in request.blocks], external)
                request.cached = start if request.cached is None else request.cached
                if external:
                    request.status.name = "LOADING"
                    continue
                self._cache(request, start + count)
            else:
                count = min(budget, request.num_tokens - request.num_computed_tokens)
                if not self._allocate(request, count):
                    return
                self.wall.allocated(request, [block.block_id for block in request.blocks], 0)
            self.waiting.remove(request)
            self.running.append(request)
            request.status.name = "RUNNING"
            scheduled[request.request_id] = count
            budget -= count

    def _promote(self, request: Request) -> None:
        self.ready.remove(request.request_id)
        request.status.name = "WAITING"
        if request.request_id in self.failed:
            self.failed.remove(request.request_id)
            request.cached = None
            assert request.num_computed_tokens == 0
        else:
            self._cache(request, request.num_computed_tokens)

    def _local(self, request: Request) -> list[Block]:
        found: list[Block] = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // BLOCK]:
            block = self.pool.cached_block_hash_to_block.get_one_block(block_hash + GROUP)
            if block is None:
                break
            found.append(block)
        return found

    def _allocate(self, request: Request, count: int) -> bool:
        need = -(-(request.num_computed_tokens + count) // BLOCK) - len(request.blocks)
        if need > len(self.pool.queue):
            return False
        if need > 0:
            request.blocks += self.pool.take(need)
        self._cache(request, request.num_computed_tokens + count)
        return True

    def _cache(self, request: Request, tokens: int) -> None:
        for block, block_hash in zip(request.blocks[: tokens // BLOCK], request.block_hashes, strict=False):
            self.pool.cache(block, block_hash)

    def _end(self, request: Request, status: str, *, keep_blocks: bool = False) -> None:
        request.status.name = status
        self.ready.discard(request.request_id)
        request.told = self.wall.finished(request, aborted=status == "FINISHED_ABORTED")
        self.done[request.request_id] = request
        if not keep_blocks:
            self._free(request)
            del self.requests[request.request_id]

    def _free(self, request: Request) -> None:
        self.pool.free_blocks(request.blocks[::-1])
        request.blocks = []


def cold(tokens: Sequence[int], output: int = 3, *, salt: bytes = b"") -> list[int]:
    """What the model answers."""
    request = Request("cold", list(tokens), output, salt)
    while len(request.answer) < output:
        request.grow([request.digests[-1][0] % 5])
    return request.answer
