"""A fleet with a modelled device: the driver of the real HostCache, AdmissionQueue and Accounting. Read this first.

Only device time is modelled. A round of the engine, at each boundary between two steps of the device:

    1. completions    copies that are over are settled; a restore that came in time lets its request go on
    2. admission      each request at the head of the queue that finds a slot and pages is matched: device, then host
    3. write-back     the tier is told which snapshots are within reach of eviction and says what to copy now
    4. a step         prefill (alone in an exclusive lane, or a chunk of it beside decoding) and one decode round

Life of a request:  waiting (at the door) → queued → [restoring →] computing → decoding → ended
                    queued ← (its restore came too late, or it was preempted)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hostcache.clock import VirtualClock
from hostcache.copiers.faults import Fault
from hostcache.copiers.virtual import VirtualCopier
from hostcache.frontdoor import AdmissionQueue, Ticket, TicketState
from hostcache.sim.loop import Event, Loop
from hostcache.sim.memory import Memory, Pages, Place, Snapshot, place
from hostcache.sim.requests import How, Live, Outcome, State
from hostcache.sim.shape import FleetShape, Lane
from hostcache.sim.watch import Watch
from hostcache.tier import (
    Accounting,
    Clean,
    CopyDone,
    CopyJob,
    Direction,
    History,
    HostCache,
    KeyChain,
    Match,
    PageKey,
    Pressure,
    Reason,
    RequestReport,
    Reservation,
    StoreJob,
    Wait,
    extents,
    within_reach,
)
from hostcache.workload.agents import stream
from hostcache.workload.conversations import Frontier, Turn

PROMPT, TURN = "prompt", "turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStats:
    """Since the start. Seconds are device or copy time, not waiting."""

    served: int
    refused: int
    aborted: int
    deferred: int
    preemptions: int
    device_misses: int
    host_hits: int
    tail_hits: int
    tail_evictions: int
    prefill_s: float
    prefill_tokens: int
    decode_s: float
    evict_wait_s: float


@dataclass(slots=True)
class _Glide:
    """Decode rounds with nothing else to do, as one event: the same as one by one, for less."""

    began_s: float
    round_s: float
    rounds: int
    decoders: Sequence[tuple[Live, int]]
    event: Event | None = None

    @property
    def end_s(self) -> float:
        return self.began_s + self.rounds * self.round_s


class _Tails:
    """Which frontiers have their tail on the host: least recently written or used goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.evictions = 0
        self._kept: dict[Place, str] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def bank_of(self, chain: KeyChain, frontier: Frontier) -> str | None:
        """The bank its snapshot was evicted from. None: its tail is not here."""
        return self._kept.get(place(chain, frontier))

    def keep(self, snapshot: Snapshot) -> None:
        if not self.capacity:
            return
        where = place(snapshot.chain, snapshot.frontier)
        self._kept.pop(where, None)
        while len(self._kept) >= self.capacity:
            del self._kept[next(iter(self._kept))]
            self.evictions += 1
        self._kept[where] = snapshot.bank

    def clear(self) -> None:
        self._kept.clear()


class Fleet:
    """`send` a turn; its outcome comes to `done`, on the loop. One thread, no waiting but in virtual time."""

    def __init__(
        self, shape: FleetShape, loop: Loop, clock: VirtualClock, *, seed: int = 0, fault: Fault | None = None
    ) -> None:
        self.shape = shape
        self.loop = loop
        self.clock = clock
        frames = shape.tier.frames
        history = History(max(1 << 16, 16 * frames))
        self.cache = HostCache(shape.tier, history=history)
        self.accounting = Accounting(shape.page, history, self.cache)
        banks = {PROMPT: shape.prompt_entries, TURN: shape.turn_entries}
        self.memory = Memory(shape.pool_pages, frames, banks, prompts_first=shape.prompts_first)
        self.copier = VirtualCopier(
            clock, device_pages=shape.pool_pages, frames=max(1, frames), page_bytes=shape.tier.page_bytes,
            speed=shape.speed, rng=stream(seed, "copier"), mover=self.memory, lanes=shape.lanes,
            fault=fault)  # fmt: skip
        self.door = AdmissionQueue(
            slots=shape.door_slots, waiting=shape.door_waiting, wait_s=shape.door_wait_s, clock=clock
        )
        self.watch = Watch(self)
        self.tails = _Tails(shape.tail_quota_bytes // shape.tail_bytes if shape.tail_bytes and frames else 0)
        self.queue: deque[Live] = deque()
        self.active: dict[int, Live] = {}
        self.waiting: dict[Ticket, Live] = {}
        self.stores: dict[int, Pages] = {}
        self.restores: dict[int, Live] = {}
        self.late: dict[int, Pages] = {}
        """Copies that were given up and may still run: job → device pages."""
        self._rng = stream(seed, "rounds")
        self._numbers = 0
        self._busy = False
        self._glide: _Glide | None = None
        self._plan_due = False
        self._changes = 0
        self._blocked_at: int | None = None
        self._copy_event: Event | None = None
        self._served = self._refused = self._aborted = self._deferred = self._preemptions = 0
        self._device_misses = self._host_hits = self._tail_hits = 0
        self._prefill_s = self._decode_s = self._evict_wait_s = 0.0
        self._prefill_tokens = 0

    # ---- the clients' side

    def send(self, turn: Turn, done: Callable[[Outcome], None]) -> Live | None:
        """A request arrives. None: it ended at once (refused, too large) and `done` has heard of it."""
        self._numbers += 1
        live = Live(self._numbers, turn, self.door.arrive(), self.clock.now(), done)
        self.watch.sent(live.number)
        if live.ticket.state is TicketState.REFUSED:
            self._tell(live, How.REFUSED)
            return None
        if -(-(turn.tokens + self.shape.look_ahead_tokens) // self.shape.page) > self.shape.pool_pages:
            self._leave_door(live)
            self._tell(live, How.TOO_LARGE)
            return None
        if live.ticket.state is TicketState.WAITING:
            self.waiting[live.ticket] = live
            live.deadline = self.loop.at(live.ticket.deadline_s, "door-expires", self._expire_door, live.number)
        else:
            self._enqueue(live)
        return live

    def abort(self, live: Live) -> None:
        """Its client leaves, at any moment. Nothing when it has ended."""
        if live.state is State.ENDED:
            return
        if live.state is State.WAITING:
            self._cancel_deadline(live)
            del self.waiting[live.ticket]
        elif live.state is State.QUEUED:
            self.queue.remove(live)
        elif live.state is State.RESTORING:
            self._give_up_restore(live, Reason.ABORTED)
        if live.account is None:
            self.accounting.aborted_before_admission()
        elif not live.account.settled:
            self._book(live, self.accounting.abort)
        self._end(live, How.ABORTED)

    def forget(self) -> None:
        """The weights changed: no tier may serve what it holds, and no running request may publish."""
        for live in list(self.active.values()):
            if live.state is State.RESTORING:
                self._give_up_restore(live, Reason.ABORTED)
                self._requeue(live)
            else:
                live.stale = True
        self.memory.unpublish_all()
        for snapshot in list(self.memory.snapshots.values()):
            self.memory.drop(snapshot)
        self.cache.forget(None)
        self.watch.forgot()
        self.tails.clear()
        self._changed()

    def preempt(self, live: Live) -> None:
        """Take everything from an active request; it queues again, ahead of the others."""
        if live.state not in (State.COMPUTING, State.DECODING):
            return
        self._preemptions += 1
        self._requeue(live)
        self._kick()

    def distrust(self, keys: Sequence[PageKey]) -> None:
        """The host's bytes of these pages were found wrong."""
        self.cache.distrust(keys)
        self.watch.distrusted(keys)

    def close(self, *, retry_after_s: float) -> None:
        """Let nobody in any more; who waits at the door is refused, the others go on."""
        for ticket in self.door.close(retry_after_s):
            self._tell(self.waiting.pop(ticket), How.REFUSED)

    def copier_changed(self) -> None:
        """A copy that stood still was let go: the copier has news at another time than it said."""
        self._follow_copier()

    # ---- a round

    def _kick(self) -> None:
        """There may be something to do. An idle engine begins at once, one that only decodes after its round."""
        if self._glide is not None:
            self._land(self._glide)
        elif not self._busy:
            self._busy = True
            self._round()

    def _round(self) -> None:
        self._settle_copies()
        self._admit()
        self._write_back()
        parts = self._choose_prefill()
        decoders: list[tuple[Live, int]] = []
        if self.shape.lane is Lane.CHUNKED or not (parts or self.restores):
            decoders = self._choose_decoders()
            parts = [part for part in parts if part[0].state is State.COMPUTING]  # one may have been preempted
        if not parts and not decoders:
            self._busy = False
            if self.queue and self._blocked_at != self._changes:
                self._kick()  # whoever was preempted left room for another
            return
        if not parts and (rounds := self._undisturbed(decoders)) > 1:
            self._glide = _Glide(self.clock.now(), self.shape.costs.round_s(len(decoders)), rounds, decoders)
            self._glide.event = self.loop.at(self._glide.end_s, "step", self._landed)
            return
        duration = sum(self._prefill_time(live, stop) for live, stop in parts)
        if decoders:
            decode_s = self.shape.costs.round_s(len(decoders))
            self._decode_s += decode_s
            duration += decode_s
        self.loop.at(self.clock.now() + duration, "step", lambda: self._stepped(parts, decoders), len(parts))

    def _stepped(self, parts: Sequence[tuple[Live, int]], decoders: Sequence[tuple[Live, int]]) -> None:
        for live, stop in parts:
            if live.state is State.COMPUTING:
                live.computed = stop
                self._publish(live, stop)
                if stop == live.target:
                    self._first_token(live)
        for live, count in decoders:
            if live.state is State.DECODING:
                self._produce(live, count)
        self._round()

    def _undisturbed(self, decoders: Sequence[tuple[Live, int]]) -> int:
        """Rounds until the first of them ends, where nothing that a round decides could differ in between."""
        first, last = self.shape.costs.round_tokens
        if first != last or not self.shape.reserve_reply or self.queue:
            return 1
        return min((live.turn.reply_tokens - live.produced) // last for live, _ in decoders)

    def _land(self, glide: _Glide) -> None:
        """End it with the round that is running now."""
        glide.rounds = min(glide.rounds, max(1, math.ceil((self.clock.now() - glide.began_s) / glide.round_s - 1e-9)))
        if glide.event is not None and glide.end_s < glide.event.due_s:
            glide.event.cancelled = True
            glide.event = self.loop.at(glide.end_s, "step", self._landed)

    def _landed(self) -> None:
        glide, self._glide = self._glide, None
        assert glide is not None
        self._decode_s += glide.rounds * glide.round_s
        self._stepped((), [(live, count * glide.rounds) for live, count in glide.decoders])

    def _choose_prefill(self) -> list[tuple[Live, int]]:
        """(request, up to which token) for the next step."""
        parts = []
        room = self.shape.chunk_tokens
        for live in self.active.values():
            if live.state is not State.COMPUTING:
                continue
            if self.shape.lane is Lane.EXCLUSIVE:
                return [(live, live.target)]
            stop = min(live.target, live.computed + room)
            parts.append((live, stop))
            room -= stop - live.computed
            if not room:
                break
        return parts

    def _prefill_time(self, live: Live, stop: int) -> float:
        seconds = self.shape.costs.prefill_s(live.computed, stop)
        self._prefill_tokens += stop - live.computed
        if not live.set_up:
            live.set_up = True
            seconds += self.shape.costs.setup_s(live.turn.prompt_tokens)
        self._prefill_s += seconds
        return seconds

    def _choose_decoders(self) -> list[tuple[Live, int]]:
        """(request, tokens it will get). Takes the pages they need, from others if it must."""
        chosen = []
        first, last = self.shape.costs.round_tokens
        for live in [each for each in self.active.values() if each.state is State.DECODING]:
            if live.state is not State.DECODING:
                continue  # preempted for one before it
            count = first + self._rng.getrandbits(last - first).bit_count()
            count = min(count, live.turn.reply_tokens - live.produced)
            if self._grow(live, live.target + count):
                chosen.append((live, count))
        return [each for each in chosen if each[0].state is State.DECODING]

    def _first_token(self, live: Live) -> None:
        if live.first_s is None:
            live.first_s = self.clock.now()
            self._book(live, self.accounting.settle)
            self._retain(live, PROMPT, live.turn.prompt_end)
        else:
            self.accounting.recovered(
                device_tokens=live.device_tokens, host_tokens=live.hit_tokens - live.device_tokens,
                recomputed_tokens=live.target - live.hit_tokens)  # fmt: skip
        live.state = State.DECODING
        if live.produced == 0:
            self._produce(live, 1)

    def _produce(self, live: Live, count: int) -> None:
        live.produced += min(count, live.turn.reply_tokens - live.produced)
        # The token sampled last has not been through the model: its position is not written (A3).
        live.computed = live.target - 1
        self._publish(live, live.computed)
        if live.produced >= live.turn.reply_tokens:
            self._retain(live, TURN, live.turn.turn_end)
            self._end(live, How.SERVED)

    def _book(self, live: Live, close: Callable[..., RequestReport]) -> None:
        """Its account is settled or aborted."""
        live.booked = (live.device_tokens, live.hit_tokens - live.device_tokens)
        self.watch.settled(live, close(live.account, device_pages=live.device_pages, host_pages=live.host_pages))

    # ---- admission

    def _admit(self) -> None:
        if self._blocked_at == self._changes:
            return
        self._blocked_at = None
        skipped: list[Live] = []
        exclusive = self.shape.lane is Lane.EXCLUSIVE
        while self.queue and len(self.active) < self.shape.slots:
            if exclusive and (self.restores or any(each.state is State.COMPUTING for each in self.active.values())):
                break  # one by one: the next is matched when the last one's prefill is over
            live = self.queue.popleft()
            if self._joins(live):
                self.watch.joins += 1
                skipped.append(live)
            elif not self._place(live):
                self.queue.appendleft(live)
                self._deferred += not live.deferred
                live.deferred = True
                break
        self.queue.extendleft(reversed(skipped))
        if self.queue:
            self._blocked_at = self._changes

    def _joins(self, live: Live) -> bool:
        """Its next missing page is on the way for another: it waits for that one copy (bounded by its deadline)."""
        if not self.restores:
            return False
        keys, limit = live.turn.chain.keys, self._limit(live)
        at = len(self.memory.find(live.turn.chain, limit))
        return at < limit and any(
            other.reservation is not None and keys[at] in other.reservation.keys for other in self.restores.values()
        )

    def _place(self, live: Live) -> bool:
        """Give it a slot and pages: the device's, the host's when they come, room for the rest. False: no room."""
        pages, hit, match = self._find(live)
        self.memory.hold(pages)
        need = self._pages_for(live) - len(pages)
        if not self._make_room(need):
            self._let_go(pages)
            return False
        self.watch.placed(live, pages)
        live.pages = np.concatenate((pages, self.memory.take(need)))
        live.published = live.device_pages = len(pages)
        live.host_pages = 0
        live.computed = live.hit_tokens = live.device_tokens = hit
        live.state = State.COMPUTING
        self.active[live.number] = live
        self.loop.log.note(f"{self.clock.now():.9f} placed {live.number} device {hit} of {live.target} tokens")
        if live.account is None:
            live.account = self.accounting.open(str(live.number), live.turn.chain, live.turn.prompt_tokens)
            self.watch.opened(live)
            if self.shape.hand_off:
                self._leave_door(live)
        if match is not None:
            self._device_misses += 1
            self._restore(live, match)
        self.cache.touch(live.turn.chain, live.published)
        return True

    def _find(self, live: Live) -> tuple[Pages, int, Match | None]:
        """Device pages, hit tokens, and what the host has behind them (None: the device has all there could be)."""
        chain, limit, page = live.turn.chain, self._limit(live), self.shape.page
        if not self.shape.tail_bytes:
            pages = self.memory.find(chain, limit)
            if len(pages) and (newest := self.memory.holding(int(pages[-1]))) is not None:
                self.memory.touch(newest)
            match = self.cache.lookup(chain, len(pages), limit) if live.load and live.turn.load else None
            return pages, len(pages) * page, match if len(pages) < limit else None
        for at, frontier in enumerate(reversed(live.turn.ancestors)):
            snapshot = self.memory.ending_at(chain, frontier)
            if snapshot is not None and frontier.tokens < live.target:
                self.memory.touch(snapshot)
                pages = snapshot.pages[: frontier.tokens // page]
                if at < 2:  # the last turn, or the prompt before its reply
                    return pages, frontier.tokens, None
                break
        else:
            pages, frontier = np.empty(0, dtype=np.int64), Frontier(tokens=0, print_=0)
        common = self.memory.find(chain, limit)
        if (partial := max(0, len(common) * page - self.shape.replay_tokens)) > frontier.tokens:
            pages, hit = common[: partial // page], partial
        else:
            hit = frontier.tokens
        asks = live.load and live.turn.load and (self.shape.look_behind_match or not hit)
        return pages, hit, self.cache.lookup(chain, len(pages), limit) if asks else None

    def _restore(self, live: Live, match: Match) -> None:
        """Start to bring back what the host has, where that is cheaper than to compute it."""
        pages, promised = self._usable(live, match)
        if promised <= live.hit_tokens:
            return
        page_bytes = self.shape.tier.page_bytes
        expected = self.copier.backlog_s(Direction.RESTORE) + self.shape.speed.seconds(
            Direction.RESTORE, pages * page_bytes, 1 + pages // 64
        )
        saved = self.shape.costs.prefill_s(live.hit_tokens, promised)
        if expected >= saved or expected >= self.shape.tier.restore_budget_s:
            self._miss(live, Reason.DEARER)
            return
        answer = self.cache.reserve(Match(chain=match.chain, start=match.start, pages=pages))
        if not isinstance(answer, Reservation):
            self._miss(live, answer.reason)
            return
        if answer.pages < pages:
            promised = (answer.start + answer.pages) * self.shape.page
            promised -= self.shape.replay_tokens if self.shape.tail_bytes else 0
        if promised <= live.hit_tokens:
            self.cache.abandon(answer, Reason.EVICTED, copying=False)
            self._miss(live, Reason.EVICTED)
            return
        target = live.pages[answer.start : answer.start + answer.pages]
        live.reservation = answer
        live.promised = promised
        live.state = State.RESTORING
        due_s = self.clock.now() + self.shape.tier.restore_budget_s
        live.deadline = self.loop.at(due_s, "restore-deadline", lambda: self._late(live), live.number)
        self.restores[answer.job_id] = live
        self._submit(answer.job_id, Direction.RESTORE, answer.keys, target, answer.frames)

    def _usable(self, live: Live, match: Match) -> tuple[int, int]:
        """(pages to restore, hit tokens then) of a match: up to a frontier whose tail is there, else less a replay."""
        page = self.shape.page
        total = match.start + match.pages
        if not self.shape.tail_bytes:
            return match.pages, total * page
        for frontier in reversed(live.turn.ancestors):
            if frontier.tokens // page > total or frontier.tokens >= live.target:
                continue
            if self.tails.bank_of(live.turn.chain, frontier) is not None:
                if frontier.tokens // page > match.start:
                    return frontier.tokens // page - match.start, frontier.tokens
                break
        hit = max(0, total * page - self.shape.replay_tokens)
        return max(0, hit // page - match.start), hit if hit // page > match.start else 0

    def _restored(self, live: Live, done: CopyDone) -> None:
        reservation = live.reservation
        assert reservation is not None
        self._cancel_deadline(live)
        live.reservation = None
        live.state = State.COMPUTING
        stop = reservation.start + reservation.pages
        if done.error is not None:
            self.cache.abandon(reservation, Reason.FAILED, copying=False)
            self._miss(live, Reason.FAILED)
            return
        self.watch.restored(live, reservation, done)
        self.cache.commit(reservation, done)
        live.computed = live.hit_tokens = live.promised
        self._publish_pages(live, stop)
        self.cache.touch(live.turn.chain, stop)
        self._host_hits += 1
        self._tail_hits += live.promised % self.shape.page > 0
        live.host_pages = reservation.pages
        if self.shape.keep_restored:
            for frontier in live.turn.ancestors:
                bank = self.tails.bank_of(live.turn.chain, frontier)
                if frontier.tokens == live.promised and bank is not None:
                    self._retain(live, bank, frontier)

    def _late(self, live: Live) -> None:
        """Its restore is over budget: compute instead. Pages that the copy may still touch are left to it."""
        if live.state is not State.RESTORING or live.reservation is None:
            return
        self._miss(live, Reason.LATE)
        if self._give_up_restore(live, Reason.LATE):
            live.state = State.COMPUTING
        else:
            live.load = False
            self._requeue(live)
        self._kick()

    def _give_up_restore(self, live: Live, reason: Reason) -> bool:
        """True: its copy will never run, and its pages are as good as any."""
        reservation = live.reservation
        assert reservation is not None
        live.reservation = None
        self._cancel_deadline(live)
        del self.restores[reservation.job_id]
        pages = live.pages[reservation.start : reservation.start + reservation.pages]
        stopped = self.copier.cancel(reservation.job_id)
        if stopped:
            self.watch.ended(reservation.job_id)
            self.memory.copied(pages)
        else:
            self.late[reservation.job_id] = pages
            self.watch.late_restores += 1
        self._changed()
        self.cache.abandon(reservation, reason, copying=not stopped)
        return stopped

    def _miss(self, live: Live, reason: Reason) -> None:
        """Pages that the host holds are not used, because of this."""
        assert live.account is not None
        live.account.miss(reason)
        self.watch.missed(live, reason)

    @staticmethod
    def _cancel_deadline(live: Live) -> None:
        if live.deadline is not None:
            live.deadline.cancelled = True
            live.deadline = None

    # ---- room

    def _limit(self, live: Live) -> int:
        """Pages of its prompt that may come from a cache: the last token is always computed."""
        return (live.target - 1) // self.shape.page

    def _pages_for(self, live: Live) -> int:
        tokens = live.turn.tokens if self.shape.reserve_reply else live.target + 1
        return -(-(tokens + self.shape.look_ahead_tokens) // self.shape.page)

    def _grow(self, live: Live, tokens: int) -> bool:
        """Pages up to `tokens`; for want of them the youngest request is preempted, in the end this one."""
        need = -(-tokens // self.shape.page) - len(live.pages)
        while need > 0 and not self._make_room(need):
            others = [each for each in self.active.values() if each.state in (State.COMPUTING, State.DECODING)]
            self.preempt(others[-1])
            if others[-1] is live:
                return False
        if need > 0:
            live.pages = np.concatenate((live.pages, self.memory.take(need)))
        return True

    def _make_room(self, pages: int) -> bool:
        """Evict snapshots until so many pages are free. False: requests and late copies hold too much."""
        if self.memory.free_pages >= pages:
            return True
        if self.memory.reclaimable < pages:
            return False
        while self.memory.free_pages < pages:
            victim = next(self.memory.victims(), None)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _evict(self, victim: Snapshot) -> None:
        stays = self.memory.stays(victim)
        with self.watch.making_room():
            answer = self.cache.before_evict(victim.number, stays=stays, now_s=self.clock.now())
        if isinstance(answer, Wait):
            self._submit_stores(answer.jobs)
            self._wait_for(answer.job_ids, answer.budget_s)
            answer = self.cache.before_evict(victim.number, stays=stays, now_s=self.clock.now(), expired=True)
        self.loop.log.note(f"{self.clock.now():.9f} evict {victim.number} {type(answer).__name__.lower()}")
        self.watch.evicted(victim, answer)
        if isinstance(answer, Clean):
            self.tails.keep(victim)
        self._drop(victim)

    def _drop(self, snapshot: Snapshot) -> None:
        self.cache.evicted(snapshot.number)
        self._gone(self.memory.drop(snapshot))

    def _retain(self, live: Live, bank: str, frontier: Frontier) -> None:
        """What it has published, up to a frontier, becomes a snapshot."""
        capacity = self.memory.capacity[bank]
        if live.stale or not capacity:
            return
        pages = min(live.published, frontier.tokens // self.shape.page)
        if self.shape.supersede:
            for earlier in (*live.turn.ancestors, *((live.turn.prompt_end,) if bank == TURN else ())):
                if (old := self.memory.ending_at(live.turn.chain, earlier)) is not None:
                    self._drop(old)
        while len(self.memory.banks[bank]) >= capacity:
            self._evict(next(iter(self.memory.banks[bank].values())))
        self._numbers += 1
        snapshot = Snapshot(self._numbers, bank, live.turn.chain.prefix(pages), live.pages[:pages].copy(), frontier)
        self.memory.add(snapshot)
        self.cache.retain(snapshot.number, live.turn.chain, pages=pages, store_pages=live.turn.store_pages)
        self._changed()

    # ---- pages

    def _publish(self, live: Live, tokens: int) -> None:
        """Its whole pages up to `tokens` are computed."""
        stop = min(tokens // self.shape.page, len(live.turn.chain))
        if stop > live.published:
            self.memory.prints[live.pages[live.published : stop]] = live.turn.prints[live.published : stop]
            self._publish_pages(live, stop)

    def _publish_pages(self, live: Live, stop: int) -> None:
        start, live.published = live.published, stop
        if not live.stale and stop > start:
            self.memory.publish(live.turn.chain, live.pages, start, stop)
            self.cache.device_added(live.turn.chain, start, stop)
            self.watch.published(live.turn.chain, start, stop)
            self._plan_due = True

    def _let_go(self, pages: Pages) -> None:
        self._gone(self.memory.release(pages))

    def _gone(self, keys: list[PageKey]) -> None:
        if keys:
            self.cache.device_removed(keys)
        self._changed()

    def _changed(self) -> None:
        """Pages, banks or slots are not what they were: who was deferred may try again, write-backs may be due."""
        self._changes += 1
        self._plan_due = True

    # ---- copies

    def _write_back(self) -> None:
        if not self._plan_due:
            return
        self._plan_due = False
        victims = within_reach(
            self.memory.views(), frees=self.memory.frees(), free_pages=self.memory.free_pages,
            reach_pages=self.shape.reach_pages, reach_entries=self.shape.reach_entries)  # fmt: skip
        with self.watch.making_room():
            jobs = self.cache.plan_writeback(Pressure(now_s=self.clock.now(), victims=victims))
        self._submit_stores(jobs)
        pace = self.shape.tier.store_pace_s
        if jobs and pace:
            self.loop.at(self.clock.now() + pace, "write-back", self._paced)

    def _paced(self) -> None:
        self._plan_due = True
        self._write_back()

    def _submit_stores(self, jobs: Iterable[StoreJob]) -> None:
        for job in jobs:
            where = self.memory.where
            pages = np.fromiter((where[key] for key in job.keys), dtype=np.int64, count=len(job.keys))
            self.stores[job.job_id] = pages
            self._submit(job.job_id, Direction.STORE, job.keys, pages, job.frames)

    def _submit(
        self, job_id: int, direction: Direction, keys: Sequence[PageKey], pages: Pages, frames: Pages
    ) -> None:
        job = CopyJob(job_id=job_id, direction=direction, extents=extents(pages, frames))
        self.loop.log.note(f"{self.clock.now():.9f} begin {direction.value} {job_id} of {len(pages)} pages")
        self.watch.submitted(job, keys, frames)
        self.memory.copying(pages)
        self.copier.submit(job)
        self._follow_copier()

    def _follow_copier(self) -> None:
        """One event stands for the copier's next news."""
        due = self.copier.next_due_s
        event = self._copy_event
        if event is not None and due == event.due_s and not event.cancelled:
            return
        if event is not None:
            event.cancelled = True
        self._copy_event = None if due is None else self.loop.at(due, "copies", self._copies_due)

    def _copies_due(self) -> None:
        self._copy_event = None
        self._settle_copies()
        self._write_back()
        if self.queue or any(live.state is State.COMPUTING for live in self.active.values()):
            self._kick()

    def _settle_copies(self) -> None:
        for done in self.copier.poll():
            self._settle(done)
        self._follow_copier()

    def _settle(self, done: CopyDone) -> None:
        self.loop.log.note(f"{done.finished_s:.9f} {done.direction.value} {done.job_id} {done.error or 'ok'}")
        with self.watch.settling(done):
            pages = self.stores.pop(done.job_id, None)
            if pages is None:
                pages = self.late.pop(done.job_id, None)
            if pages is not None:
                self.memory.copied(pages)
                self.cache.settle(done)
            elif (live := self.restores.pop(done.job_id, None)) is not None:
                assert live.reservation is not None
                at = live.reservation
                self.memory.copied(live.pages[at.start : at.start + at.pages])
                self._restored(live, done)
            else:
                self.cache.settle(done)  # told twice, or told of what was cancelled: the tier must not care
        self._changed()

    def _wait_for(self, job_ids: Sequence[int], budget_s: float) -> None:
        """Stand still until these stores are over, at most `budget_s`; those that are not by then are given up."""
        began = self.clock.now()
        deadline = began + budget_s
        while any(job_id in self.stores for job_id in job_ids) and self.clock.now() < deadline:
            self.copier.wait(deadline - self.clock.now())
            for done in self.copier.poll():
                self._settle(done)
        self._follow_copier()
        self._evict_wait_s += self.clock.now() - began
        self.watch.waited(self.clock.now() - began, budget_s)
        for job_id in job_ids:
            if (pages := self.stores.pop(job_id, None)) is None:
                continue
            # Only its frames are out of bounds while it runs: what it reads on the device is void already.
            self.memory.copied(pages)
            if stopped := self.copier.cancel(job_id):
                self.watch.ended(job_id)
            else:
                self.late[job_id] = pages[:0]
                self.watch.late_stores += 1
            self.cache.expire(job_id, running=not stopped)

    # ---- coming and going

    def _enqueue(self, live: Live) -> None:
        live.state = State.QUEUED
        self.queue.append(live)
        self._changed()
        self._kick()

    def _requeue(self, live: Live) -> None:
        """Back to the head of the queue with nothing in hand."""
        del self.active[live.number]
        self._let_go(live.pages)
        live.pages = np.empty(0, dtype=np.int64)
        live.published = live.computed = 0
        live.set_up = live.stale = False
        live.state = State.QUEUED
        self.queue.appendleft(live)

    def _end(self, live: Live, how: How) -> None:
        self._let_go(live.pages)
        live.pages = np.empty(0, dtype=np.int64)
        self.active.pop(live.number, None)
        if live.account is None or not self.shape.hand_off:
            self._leave_door(live)
        self._tell(live, how)
        if self.queue or self.active:
            self._kick()

    def _leave_door(self, live: Live) -> None:
        for ticket in self.door.end(live.ticket):
            if (promoted := self.waiting.pop(ticket, None)) is not None:
                self._cancel_deadline(promoted)
                self._enqueue(promoted)

    def _expire_door(self) -> None:
        for ticket in self.door.expire():
            self._tell(self.waiting.pop(ticket), How.REFUSED)

    def _tell(self, live: Live, how: How) -> None:
        live.state = State.ENDED
        self._served += how is How.SERVED
        self._refused += how is How.REFUSED
        self._aborted += how is How.ABORTED
        outcome = Outcome(
            number=live.number, how=how, sent_s=live.sent_s, first_s=live.first_s, ended_s=self.clock.now(),
            prompt_tokens=live.turn.prompt_tokens, reply_tokens=live.produced,
            device_tokens=live.booked[0], host_tokens=live.booked[1],
            retry_after_s=live.ticket.retry_after_s, deferred=live.deferred)  # fmt: skip
        came_from = f"{outcome.device_tokens} {outcome.host_tokens}"
        self.loop.log.note(f"{self.clock.now():.9f} {how.value} {live.number} {came_from}")
        self.watch.ended_request(outcome)
        live.done(outcome)

    # ---- what it looks like

    def stats(self) -> FleetStats:
        return FleetStats(
            served=self._served, refused=self._refused, aborted=self._aborted, deferred=self._deferred,
            preemptions=self._preemptions, device_misses=self._device_misses, host_hits=self._host_hits,
            tail_hits=self._tail_hits, tail_evictions=self.tails.evictions, prefill_s=self._prefill_s,
            prefill_tokens=self._prefill_tokens, decode_s=self._decode_s, evict_wait_s=self._evict_wait_s)  # fmt: skip

    def check(self) -> None:
        """Every invariant of tier, books, memory and of the fleet itself. Raises InvariantBroken."""
        self.watch.check()
