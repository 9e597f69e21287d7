"""The tier beside vLLM's scheduler: what is saved before its block is reused, what is restored. Copies nothing.

Holds the real `HostCache`; the bytes are with the workers, who get `Orders` each step and answer with `RankReport`s.

    a block     hashed by vLLM at allocation, *confirmed* once its step is over: only then the tier hears of it
                → near the head of the free queue: ordered to be saved (`on-pressure`); a *fence* remembers the job
                → handed out again (`_evicted`, told by the pool): what is not on the host is saved before the forward
    a request   `match` → (reservation) → `allocated` → (load) → `heard`: committed, or denied for good
                → scheduled: its account is settled → `finished`

No block is ever pinned for a store. Behind `wall.SchedulerWall`, which catches what is raised here and keeps what vLLM
was promised. Reads objects of vLLM by the names of their fields; imports nothing of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from hostcache.clock import Clock
from hostcache.errors import InvariantBroken
from hostcache.tier import (
    Account,
    Accounting,
    CopyDone,
    History,
    HostCache,
    Identity,
    KeyChain,
    Match,
    Mode,
    PageKey,
    Reason,
    Refused,
    RequestReport,
    Reservation,
    StoreJob,
    TierConfig,
)
from hostcache.vllm_plugin.copies import Copies, Copy
from hostcache.vllm_plugin.keys import GROUP_BYTES, extended, page_key
from hostcache.vllm_plugin.rates import Rates
from hostcache.vllm_plugin.wire import LoadOrder, Orders, RankReport, StoreOrder
from hostcache.vllm_plugin.wishes import NONE, Wishes, wishes_of

STEPS_AHEAD = 2
"""A block that could be handed out within so many steps is saved now: one to order the copy, one to make it."""

PATIENCE = 4.0
"""A rank that says nothing of a job for so many budgets is not going to: the job is given up here."""

MEASURED_TOKENS = 64
"""A step with fewer tokens than that beyond one a request is decoding and says little about the speed of a prefill."""

FILLING = 0.5
"""Share of the pool's blocks that hold something: from then on host memory is readied. Before it none is touched."""

TELL_EVERY_S = 2.0

CONFIRM_PAGES = 16
"""Pages that a running request has made are told to the tier so many at a time, and whatever there are when its prompt
or it itself is over: nobody can take them from it before."""

HISTORY_PAGES = 1 << 16


@dataclass(slots=True)
class PluginCounters:
    """Beside the tier's own. Pages, but for `steps_ns`."""

    evicted_pages: int = 0
    """confirmed pages whose last block vLLM handed out again"""
    saved_pages: int = 0
    """of these, on the host by then or by a copy that ended well"""
    lost_pages: int = 0
    saved_at_once_pages: int = 0
    """of the saved ones, by a copy the step had to wait for"""
    fenced_jobs: int = 0
    late_blocks: int = 0
    """blocks that were kept from the pool because a late load could still write them"""
    resets: int = 0
    restores_s: Counter[float] = field(default_factory=Counter)
    """how long a load that ended well took from its order to its end on every rank, to two digits → how many did"""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """All that is known of one request. `confirmed` pages were told to the tier, the next ones are at `confirm_at`
    tokens; `start` is the page its reservation begins with."""

    request: Any
    chain: KeyChain
    prompt_tokens: int = 0
    confirmed: int = 0
    confirm_at: int = 0
    running: bool = False
    computed_after: int = 0
    """Tokens computed once the step is over in which it was looked at last."""
    due: int = 0
    """The step in which to look at it next; 0: in every one that it is part of."""
    decoding: bool = False
    """All but its last token is computed once that step is over."""
    reservation: Reservation | None = None
    start: int = 0
    load: Copy | None = None
    denied: bool = False
    wait_until_s: float | None = None
    host_pages: int = 0
    """restored since it was last admitted"""
    account: Account | None = None
    settled: bool = False
    cause: Reason | None = None
    """why the last look offered less than the host holds, until there is an account to note it in"""
    wishes: Wishes = NONE
    report: RequestReport | None = None
    lost_tokens: int = 0
    """computed before it was preempted"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    step: int
    built_s: float
    tokens: int


class SchedulerSide:
    """`step_tokens`: the most that one step may compute. `keep_on_reset`: a reset of vLLM's pool says nothing about
    the weights, so that copies stay good (else they are dropped with it). `events`: keep what `take_events` tells."""

    def __init__(self, *, config: TierConfig, identity: Identity, ranks: int, step_tokens: int, clock: Clock,
                 say: Callable[[str], None], keep_on_reset: bool = False, events: bool = False) -> None:
        self.config = config
        self.history = History(max(HISTORY_PAGES, 16 * config.frames))
        self.tier = HostCache(config, history=self.history)
        self.accounting = Accounting(config.page_tokens, self.history, self.tier)
        self.counters = PluginCounters()
        self.rates = Rates()
        self.dirty = True
        """Something happened since the statistics were last taken."""
        self._identity = identity
        self._page = config.page_tokens
        self.ranks = ranks
        self._window = STEPS_AHEAD * -(-step_tokens // config.page_tokens)
        self._clock = clock
        self._say = say
        self._keep_on_reset = keep_on_reset
        self._off: str | None = None
        self._pool: Any = None
        self._live: dict[str, LiveRequest] = {}
        self._due: dict[str, LiveRequest] = {}
        """those to look at in every step"""
        self._calendar: dict[int, list[LiveRequest]] = {}
        """those that decode, by the step in which they could next have enough new pages"""
        self._copies = Copies(ranks)
        self._gone: list[tuple[int, bytes]] = []
        self._decided: list[bytes | None] = []
        self._eager: dict[PageKey, bytes] = {}
        self._unwanted: set[PageKey] = set()
        self._hashes: dict[PageKey, bytes] | None = {} if events else None
        self._told: set[PageKey] = set()
        if events:
            self.tier.take_changes()
        self._loads: list[LoadOrder] = []
        self._look = False
        self._prepared = False
        self._steps: list[_Step] = []
        self._step = 0

    # ---- the pool

    def bind(self, pool: Any) -> None:
        self._pool = pool
        self._decided = [None] * len(pool.blocks)

    def block_evicted(self, block: Any) -> None:
        self._gone.append((block.block_id, block.block_hash))

    def block_used(self, block: Any) -> None:
        self._decided[block.block_id] = None

    def pool_reset(self) -> None:
        """Every block lost its hash; none was in use, so nothing is being loaded."""
        self._gone.clear()
        self._copies.drop_fences()
        self._eager.clear()
        self._unwanted.clear()
        self._decided = [None] * len(self._decided)
        for live in self._live.values():
            live.confirmed = live.computed_after = live.due = 0
            live.running = live.decoding = False
        if self._keep_on_reset:
            self.tier.device_cleared()
        else:
            self._forget()

    def reset(self) -> bool:
        """Drop every copy. False while a request waits for one: it would be given what was to be dropped."""
        if self._copies.loading:
            return False
        self._forget()
        return True

    def _forget(self) -> None:
        for live in self._live.values():
            self._release(live)
        self.tier.forget(None)
        self.counters.resets += 1
        self.dirty = True

    # ---- a request

    def match(self, request: Any, local_tokens: int) -> int | None:
        """Tokens behind the first `local_tokens` that can be restored; None: ask again next step. Asked as often as
        vLLM likes; a positive answer holds until the request is allocated, over, or asked for with others local."""
        live = self._live_of(request)
        start = local_tokens // self._page
        if live.reservation is not None:
            if live.start == start and not live.denied:
                return live.reservation.pages * self._page
            self._release(live)
        if self._off is not None:
            self._note(live, Reason.TIER_OFF)
            return 0
        if live.denied or request.skip_reading_prefix_cache:
            return 0
        live.chain = extended(live.chain, request.block_hashes)
        limit = min((request.num_tokens - 1) // self._page, len(live.chain))
        live.cause = None
        if (cap := live.wishes.load_tokens) is not None and cap // self._page < limit:
            limit = cap // self._page
            self._note(live, Reason.OPTED_OUT)
        if start >= limit:
            return 0
        if self._copies.brings(live.chain.keys[start]):
            return None  # another request waits for the same pages, within its budget; then they are on the device
        found = self.tier.lookup(live.chain, start, limit)
        if found.pending and self._may_wait(live):
            return None
        if not found.pages:
            return 0
        copied_bytes = found.pages * self.config.page_bytes
        if self.rates.dearer(tokens=found.pages * self._page, copied_bytes=copied_bytes, bytes_ahead=self._bytes_ahead):
            self._note(live, Reason.DEARER)
            return 0
        return self._reserve(live, found)

    def _note(self, live: LiveRequest, reason: Reason) -> None:
        """The driver's reason for what it leaves on the host; before admission the last look's counts."""
        if live.account is None:
            live.cause = reason
        else:
            live.account.miss(reason)

    @property
    def _bytes_ahead(self) -> int:
        """That are being restored now."""
        return self.config.page_bytes * self._copies.pages_ahead

    def _may_wait(self, live: LiveRequest) -> bool:
        """For pages that are just being saved: no longer than a save may take."""
        now_s = self._clock.now()
        if live.wait_until_s is None:
            live.wait_until_s = now_s + self.config.copy_budget_s
        return now_s < live.wait_until_s

    def _reserve(self, live: LiveRequest, found: Match) -> int:
        answer = self.tier.reserve(found)
        if isinstance(answer, Refused):
            return 0
        live.reservation, live.start = answer, found.start
        return answer.pages * self._page

    def allocated(self, request: Any, block_ids: Sequence[int], external_tokens: int) -> None:
        """vLLM gave it these blocks: local ones first, then those for what it takes of the match. Where that cannot be
        given after all no load is ordered, and the request is computed."""
        live = self._due[request.request_id] = self._live_of(request)
        live.wait_until_s, live.due, live.decoding = None, 0, False
        live.prompt_tokens = request.num_tokens
        if live.account is None and not live.settled:
            live.chain = extended(live.chain, request.block_hashes)
            live.account = self.accounting.open(request.request_id, live.chain, request.num_tokens)
            if live.cause is not None:
                live.account.miss(live.cause)
        if not external_tokens:
            self._release(live)
            return
        pages = external_tokens // self._page
        if live.reservation is not None and pages < live.reservation.pages:
            self._release(live)
            self._reserve(live, Match(chain=live.chain, start=live.start, pages=pages))
        taken = live.reservation
        if taken is None or taken.pages != pages:
            self._release(live)
            self._deny(live, Reason.NOT_READY)
            return
        blocks = tuple(block_ids[live.start : live.start + pages])
        now_s = self._clock.now()
        budget_s = self.rates.patience_s(
            least_s=self.config.restore_budget_s, tokens=external_tokens,
            copied_bytes=pages * self.config.page_bytes, bytes_ahead=self._bytes_ahead)
        live.reservation = None
        live.load = self._copies.load(taken, blocks, request_id=request.request_id, now_s=now_s,
                                      deadline_s=now_s + PATIENCE * (budget_s + 1.0))
        self._loads.append(LoadOrder(job_id=taken.job_id, request_id=request.request_id, blocks=blocks,
                                     frames=tuple(taken.frames.tolist()), budget_s=budget_s))

    def finished(self, request: Any, *, aborted: bool) -> dict[str, Any] | None:
        """However it ended. Its blocks are freed after this. The answer: what it asked to be told, if anything."""
        live = self._live.pop(request.request_id, None)
        if live is None:
            return None
        self._due.pop(request.request_id, None)
        live.due = 0
        self.dirty = True
        self._release(live)
        if (job := live.load) is not None:
            self._give_up(job, Reason.ABORTED)
        if live.running:
            computed = request.num_computed_tokens - request.num_output_placeholders
            self._confirm(live, computed)
            if live.confirmed:
                snapshot = self.tier.new_job_id()  # marks where the conversation ended; the device keeps no snapshots
                self.tier.retain(snapshot, live.chain, pages=live.confirmed)
                self.tier.evicted(snapshot)
            self._look = self._off is None and self.config.mode is Mode.ON_PRESSURE
            if self._off is None and self.config.mode is Mode.ON_RETAIN:
                wanted = live.confirmed if (cap := live.wishes.store_tokens) is None else cap // self._page
                self._eager.update(zip(live.chain.keys[: min(wanted, live.confirmed)], request.block_hashes,
                                       strict=False))
        if live.account is not None:
            # Not scheduled once since it was admitted: what it was to be served it was not.
            live.report = self.accounting.abort(live.account, device_pages=0, host_pages=0)
        elif not live.settled and aborted:
            self.accounting.aborted_before_admission()
        if not live.wishes.asked:
            return None
        told: dict[str, Any] = {} if live.report is None else live.report.as_json()
        return told if live.wishes.refused is None else {**told, "refused": dict(live.wishes.refused)}

    # ---- a step

    def build(self, output: Any) -> Orders:
        """The orders of the step that vLLM has just planned. Called once a step, empty ones too."""
        now_s = self._clock.now()
        self._step += 1
        self._look = False
        loads, self._loads = tuple(self._loads), []
        for request_id in output.preempted_req_ids or ():
            if (live := self._live.get(request_id)) is not None:
                self._preempted(live)
        self._advance(output.num_scheduled_tokens)
        stores: list[StoreOrder] = []
        fences = self._see_off(stores, now_s) if self._gone else ()
        if self._off is None and self._pool is not None:
            if self.config.mode is Mode.ON_PRESSURE:
                self._look_ahead(stores, now_s)
            elif self._eager:
                self._write_eagerly(stores, now_s)
        if self._copies:
            self._watch(now_s)
        tokens = output.total_num_scheduled_tokens
        measured = tokens - len(output.num_scheduled_tokens) >= MEASURED_TOKENS
        if measured:
            self._steps.append(_Step(step=self._step, built_s=now_s, tokens=tokens))
        return Orders(step=self._step, stores=tuple(stores), loads=loads, fences=fences, idle=not tokens,
                      prepare=self._filling(), report_step=measured)

    def heard(self, reports: Sequence[RankReport]) -> None:
        """What the ranks say of a step that is over."""
        now_s = self._clock.now()
        for report in reports:
            self._measure(report.step, now_s)
            if report.off is not None:
                self.turn_off(report.off)
            for job_id in report.overdue:
                self._over_budget(job_id)
            for end in report.ends:
                if (copy := self._copies.ended(end)) is not None:
                    self._ended(copy, now_s)

    def take_events(self) -> list[tuple[bool, bytes]]:
        """Since the last call: vLLM's hashes of blocks that can be restored from now on (True), or no more."""
        told: list[tuple[bool, bytes]] = []
        if self._hashes is None:
            return told
        if self._off is not None:
            told = [(False, block_hash) for block_hash in self.told]
            self._told.clear()
            self.tier.take_changes()
            return told
        for restorable, key in self.tier.take_changes():
            told.append((restorable, self._hashes[key]))
            (self._told.add if restorable else self._told.discard)(key)
        if len(self._hashes) > 2 * self.config.frames + HISTORY_PAGES:  # those of pages that came and went
            wanted = self._told.union(self._copies.keys)
            self._hashes = {key: each for key, each in self._hashes.items() if key in wanted}
        return told

    @property
    def busy(self) -> bool:
        """vLLM must go on making steps: the end of a copy is to be heard, or blocks that have just been freed want a
        look before the next request comes and takes them."""
        return self._look or bool(self._eager) or self._copies.busy

    def worth_telling(self, now_s: float, told_s: float) -> bool:
        """Statistics cost as much as a step's decisions: told every two seconds, and when things come to rest."""
        return self.dirty and (now_s - told_s >= TELL_EVERY_S or not (self._live or self._copies))

    @property
    def off_reason(self) -> str | None:
        return self._off or self.tier.off_reason

    @property
    def pins(self) -> int:
        """What stays held when nothing is under way: pins of the tier, open requests, jobs."""
        counters = self.tier.stats().counters
        held = counters.pins_taken - counters.pins_released
        return held + len(self._live) + self._copies.held

    @property
    def live_requests(self) -> int:
        return len(self._live)

    @property
    def told(self) -> list[bytes]:
        """Hashes of the blocks that can be restored, as `take_events` told them."""
        return [] if self._hashes is None else [self._hashes[key] for key in self._told]

    def check(self) -> None:
        """The tier's invariants, and that every job has an owner. For tests."""
        self.tier.check()
        self._copies.check()
        for copy in self._copies.loading:
            live = self._live.get(copy.request_id or "")
            if live is None or live.load is not copy:
                raise InvariantBroken(f"load {copy.job_id} belongs to no live request")

    # ---- inside: requests

    def _live_of(self, request: Any) -> LiveRequest:
        live = self._live.get(request.request_id)
        if live is None:
            chain = KeyChain(identity=self._identity, keys=(), plain=())
            wishes = wishes_of(request.kv_transfer_params, request.num_tokens)
            live = self._live[request.request_id] = LiveRequest(request=request, chain=chain, wishes=wishes)
        return live

    def _release(self, live: LiveRequest) -> None:
        if live.reservation is not None:
            self.tier.abandon(live.reservation, Reason.ABORTED, copying=False)
            live.reservation = None

    def _filling(self) -> bool:
        """Once, when the pool has become half full."""
        if self._prepared or self._pool is None:
            return False
        self._prepared = len(self._pool.cached_block_hash_to_block) >= FILLING * len(self._pool.blocks)
        return self._prepared

    def _advance(self, scheduled: Mapping[str, int]) -> None:
        """Look at the requests of this step that may have news. One that decodes makes a token a step at most, so it
        has none before its time: a step of hundreds of such requests touches none of them."""
        for live in self._calendar.pop(self._step, ()):
            if live.due == self._step:
                live.due = 0
                self._due[live.request.request_id] = live
        for request_id, live in list(self._due.items()):
            if (count := scheduled.get(request_id)) is None:
                continue
            computed = live.request.num_computed_tokens
            live.computed_after = computed + count
            if computed >= live.confirm_at or not live.running:
                self._scheduled(live)
            if live.computed_after >= live.request.num_tokens:
                del self._due[request_id]
                live.decoding = True
                live.due = self._step + max(1, live.confirm_at - live.computed_after)
                self._calendar.setdefault(live.due, []).append(live)

    def _scheduled(self, live: LiveRequest) -> None:
        request = live.request
        computed = request.num_computed_tokens - request.num_output_placeholders
        if not live.running:
            live.running = True
            self._served(live, computed // self._page)
        self._confirm(live, computed)
        live.confirm_at = (live.confirmed + CONFIRM_PAGES) * self._page
        if live.prompt_tokens > computed:
            live.confirm_at = min(live.confirm_at, live.prompt_tokens)

    def _served(self, live: LiveRequest, pages: int) -> None:
        """It runs for the first time, or again: `pages` were cached, the last `host_pages` of them restored."""
        if live.account is not None:
            pages = min(pages, live.account.limit)
        host = min(live.host_pages, pages)
        self.dirty = True
        live.chain = extended(live.chain, live.request.block_hashes)
        self.tier.touch(live.chain, pages)
        if live.account is not None:
            live.report = self.accounting.settle(live.account, device_pages=pages - host, host_pages=host)
            live.account, live.settled = None, True
        elif live.lost_tokens:
            self.accounting.recovered(
                device_tokens=(pages - host) * self._page, host_tokens=host * self._page,
                recomputed_tokens=max(0, live.lost_tokens - pages * self._page))
            live.lost_tokens = 0

    def _confirm(self, live: LiveRequest, computed_tokens: int) -> None:
        pages = min(computed_tokens // self._page, len(live.request.block_hashes))
        if pages > live.confirmed:
            live.chain = extended(live.chain, live.request.block_hashes)
            if live.wishes.store_tokens is not None or self._unwanted:
                self._sort_out(live, pages)
            self.tier.device_added(live.chain, live.confirmed, pages)
            live.confirmed = pages

    def _sort_out(self, live: LiveRequest, pages: int) -> None:
        """Of the pages that are confirmed next: those that nobody wants saved. One request that does is enough."""
        cap = live.wishes.store_tokens
        wanted = max(live.confirmed, pages if cap is None else min(pages, cap // self._page))
        self._unwanted.difference_update(live.chain.keys[live.confirmed : wanted])
        others = live.chain.keys[wanted:pages]
        self._unwanted.update(
            key for key, state in zip(others, self.tier.held(others), strict=True) if state is not None)

    def _preempted(self, live: LiveRequest) -> None:
        """Its blocks are free, with all that the steps so far have computed in them."""
        if live.running:
            computed = live.request.num_tokens - 1 if live.decoding else live.computed_after
            self._confirm(live, computed)
            live.lost_tokens = max(live.lost_tokens, computed)
        live.confirmed = live.computed_after = live.host_pages = live.due = 0
        live.running = live.decoding = False
        self._due.pop(live.request.request_id, None)

    # ---- inside: blocks that leave, or are about to

    def _see_off(self, stores: list[StoreOrder], now_s: float) -> tuple[int, ...]:
        """Blocks handed out in this step. They hold their bytes until its forward pass."""
        gone, self._gone = self._gone, []
        fences: dict[int, None] = {}
        where: dict[PageKey, int] = {}
        hashes: dict[PageKey, bytes] = {}
        another = self._pool.cached_block_hash_to_block.get_one_block
        for block_id, block_hash in gone:
            self._decided[block_id] = None
            if (job_id := self._copies.take_fence(block_id)) is not None:
                fences[job_id] = None
            if another(block_hash) is None:  # else the page stays on the device, in another block
                key = self._key(block_hash)
                where.setdefault(key, block_id)
                hashes[key] = block_hash[:-GROUP_BYTES]
        keys = list(where)
        known = [key for key, state in zip(keys, self.tier.held(keys), strict=True)
                 if state is None and key not in self._unwanted]
        if self._off is None and self.config.mode is not Mode.OFF:
            jobs = self.tier.plan_pages(known, now_s=now_s, at_once=True)
            self._order(stores, jobs, where, hashes, now_s, at_once=True)
        self.tier.device_removed(keys[::-1])
        self._unwanted.difference_update(keys)
        self._count_departures(known)
        self.counters.fenced_jobs += len(fences)
        self.dirty = True
        return tuple(fences)

    def _count_departures(self, keys: list[PageKey]) -> None:
        self.counters.evicted_pages += len(keys)
        coming = self._copies.saving
        for key, state in zip(keys, self.tier.held(keys), strict=True):
            if state is None:
                self.counters.saved_pages += 1
            elif state is Reason.NOT_READY and key in coming:
                coming[key].leaving += 1
            else:
                self.counters.lost_pages += 1

    def _look_ahead(self, stores: list[StoreOrder], now_s: float) -> None:
        """Save what could be handed out before a copy ordered later would be over."""
        decided = self._decided
        near = [
            block
            for block in islice(self._pool.free_block_queue.iter_blocks_after(None), self._window)
            if block.block_hash is not None and decided[block.block_id] is not block.block_hash
        ]
        if near and self.tier.may_store(now_s):
            blocks = {self._key(block.block_hash): block for block in near}
            for key in self._unwanted & blocks.keys():
                block = blocks.pop(key)
                decided[block.block_id] = block.block_hash
            self._plan(blocks, stores, now_s)

    def _write_eagerly(self, stores: list[StoreOrder], now_s: float) -> None:
        """Pages of requests that have ended, while they are on the device."""
        found: dict[PageKey, Any] = {}
        for key, block_hash in list(self._eager.items()):
            cached = self._pool.get_cached_block(block_hash, [0])
            if cached is None:
                del self._eager[key]
            else:
                found[key] = cached[0]
        self._plan(found, stores, now_s)
        for key, block in found.items():
            if self._decided[block.block_id] is block.block_hash:
                self._eager.pop(key, None)

    def _plan(self, near: dict[PageKey, Any], stores: list[StoreOrder], now_s: float) -> None:
        """Ask the tier about these blocks; those it has decided about need not be asked about again."""
        jobs = self.tier.plan_pages(list(near), now_s=now_s)
        where = {key: block.block_id for key, block in near.items()}
        hashes = {key: block.block_hash[:-GROUP_BYTES] for key, block in near.items()}
        self._order(stores, jobs, where, hashes, now_s, at_once=False)
        through = self.tier.may_store(now_s)
        taken = {key for job in jobs for key in job.keys}
        for key, block in near.items():
            if through or key in taken:
                self._decided[block.block_id] = block.block_hash

    def _order(self, stores: list[StoreOrder], jobs: Sequence[StoreJob], where: dict[PageKey, int],
               hashes: dict[PageKey, bytes], now_s: float, *, at_once: bool) -> None:
        for job in jobs:
            blocks = tuple(where[key] for key in job.keys)
            if self._hashes is not None:
                self._hashes.update({key: hashes[key] for key in job.keys})
            deadline_s = now_s + PATIENCE * (PATIENCE * self.config.copy_budget_s + 1.0)
            self._copies.save(job.job_id, blocks, job.keys, at_once=at_once, now_s=now_s, deadline_s=deadline_s)
            stores.append(StoreOrder(job_id=job.job_id, blocks=blocks, frames=tuple(job.frames.tolist()),
                                     at_once=at_once))

    def _key(self, pool_hash: bytes) -> PageKey:
        return page_key(self._identity.digest, pool_hash[:-GROUP_BYTES])

    # ---- inside: copies that end, or do not

    def _ended(self, copy: Copy, now_s: float) -> None:
        """On every rank."""
        self.dirty = True
        done = copy.done(now_s)
        if copy.reservation is None:
            self.tier.settle(done)
            self._count_saved(copy, copy.leaving if copy.error is None and not copy.overdue else 0)
        elif copy.given_up:
            self.tier.settle(done)
        else:
            self._load_ended(copy, copy.reservation, done)

    def _load_ended(self, copy: Copy, reservation: Reservation, done: CopyDone) -> None:
        live = self._live[copy.request_id or ""]
        live.load = None
        if copy.error is None:
            self.tier.commit(reservation, done)
            live.host_pages = reservation.pages
            self.rates.saw_restore(done.copied_bytes, copy.seconds)
            self.counters.restores_s[float(f"{done.finished_s - done.submitted_s:.2g}")] += 1
        else:
            reason = Reason.LATE if copy.late else Reason.FAILED
            self.tier.abandon(reservation, reason, copying=False)
            self._deny(live, reason)

    def _over_budget(self, job_id: int) -> None:
        """Some rank's copy takes too long and may run on. Its frames are out of use until every rank has ended it."""
        copy = self._copies.overdue(job_id)
        if copy is None:
            return
        self.dirty = True
        if copy.reservation is None:
            self.tier.expire(job_id, running=True)
            self._count_saved(copy, 0)
            return
        self.counters.late_blocks += len(copy.blocks)
        live = self._live.get(copy.request_id or "")
        self._give_up(copy, Reason.LATE)
        if live is not None and live.load is copy:
            live.load = None
            self._deny(live, Reason.LATE)

    def _give_up(self, copy: Copy, reason: Reason) -> None:
        if copy.reservation is not None and self._copies.give_up(copy):
            self.tier.abandon(copy.reservation, reason, copying=True)

    def _deny(self, live: LiveRequest, reason: Reason) -> None:
        """Offered again it would fail again, and vLLM has no limit: this request is computed."""
        live.denied = True
        if live.account is not None:
            live.account.miss(reason)

    def _count_saved(self, copy: Copy, saved: int) -> None:
        self.counters.saved_pages += saved
        self.counters.saved_at_once_pages += saved if copy.at_once else 0
        self.counters.lost_pages += copy.leaving - saved
        copy.leaving = 0

    def _watch(self, now_s: float) -> None:
        """Jobs that a rank never spoke of again. Loads of such a rank cannot be reported as over: vLLM would wait."""
        for copy in self._copies.unheard_of(now_s):
            self._over_budget(copy.job_id)

    def turn_off(self, reason: str) -> None:
        """For good: nothing is found or saved any more; what is under way is still heard of."""
        if self._off is None:
            self._off = reason
            self._say(f"hostcache: the tier is off: {reason}")
            for live in self._live.values():
                self._release(live)
            self._eager.clear()

    def _measure(self, step: int, now_s: float) -> None:
        while self._steps and self._steps[0].step <= step:
            measured = self._steps.pop(0)
            if measured.step == step:
                self.rates.saw_prefill(measured.tokens, now_s - measured.built_s)
