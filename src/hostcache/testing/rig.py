"""The smallest device that drives the real tier: one bank, whole conversations, bytes that tell their tokens.

For tests and examples: copies happen when `pump` says so, so that any order of events can be played, and every restored
page is compared with the fingerprint of the tokens it must hold. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

from hostcache.errors import InvariantBroken
from hostcache.tier import (
    Accounting,
    Clean,
    CopyDone,
    Direction,
    Drop,
    History,
    HostCache,
    Identity,
    KeyChain,
    PageKey,
    Pressure,
    Reason,
    RequestReport,
    Reservation,
    StoreJob,
    TierConfig,
    Wait,
    check_balance,
    key_chain,
    within_reach,
)
from hostcache.tier.answers import BankView


def fingerprints(tokens: Sequence[int], page_tokens: int) -> list[bytes]:
    """What each whole page must hold: a digest of all tokens up to its end."""
    data = np.asarray(tokens, dtype="<i4").tobytes()
    state, step, found = sha256(), 4 * page_tokens, []
    for at in range(0, len(data) - step + 1, step):
        state.update(data[at : at + step])
        found.append(state.digest())
    return found


@dataclass(slots=True)
class _Held:
    chain: KeyChain
    pages: int


@dataclass(slots=True)
class Visit:
    """What one visit got. Pages."""

    device: int
    host: int
    report: RequestReport


@dataclass(slots=True)
class Rig:
    """A device of `device_pages` pages and `entries` snapshots, least recently used goes first."""

    config: TierConfig
    device_pages: int
    entries: int = 1_000_000
    reach_pages: int = 0
    reach_entries: int = 0
    eager: bool = True
    """Complete every copy at once; else only `pump` does."""
    salt: str = ""

    def __post_init__(self) -> None:
        self.identity = Identity(
            model="rig", revision="1", dtype="none", layout="rig", page_tokens=self.config.page_tokens, salt=self.salt
        )
        self.history = History(max(1024, 16 * self.config.frames))
        self.cache = HostCache(self.config, history=self.history)
        self.accounting = Accounting(self.config.page_tokens, self.history, self.cache)
        self.now_s = 0.0
        self.pages: dict[PageKey, bytes] = {}
        self.refs: dict[PageKey, int] = {}
        self.frames: dict[int, bytes] = {}
        self.bank: dict[int, _Held] = {}
        self.jobs: dict[int, StoreJob] = {}
        self.sources: dict[int, tuple[bytes, ...]] = {}
        self.overdue: set[int] = set()
        self.reports: list[RequestReport] = []
        self._ids = 0

    identity: Identity = field(init=False)
    history: History = field(init=False)
    cache: HostCache = field(init=False)
    accounting: Accounting = field(init=False)
    now_s: float = field(init=False)
    pages: dict[PageKey, bytes] = field(init=False)
    refs: dict[PageKey, int] = field(init=False)
    frames: dict[int, bytes] = field(init=False)
    bank: dict[int, _Held] = field(init=False)
    jobs: dict[int, StoreJob] = field(init=False)
    sources: dict[int, tuple[bytes, ...]] = field(init=False)
    overdue: set[int] = field(init=False)
    """Jobs that were given up while their copy may still run."""
    reports: list[RequestReport] = field(init=False)
    _ids: int = field(init=False)

    # ---- a request

    def chain(self, tokens: Sequence[int]) -> KeyChain:
        return key_chain(tokens, self.identity)

    def visit(
        self,
        tokens: Sequence[int],
        *,
        store_pages: int | None = None,
        written: int | None = None,
        restore: Callable[[Reservation], Reason | None] = lambda reservation: None,
    ) -> Visit:
        """Serve a prompt: device, then host, then compute; retain it. `written`: positions a forward pass confirmed
        (default all). `restore` may say that the copy of a reservation fails, and why."""
        chain = self.chain(tokens)
        limit = max(0, len(tokens) - 1) // self.config.page_tokens
        account = self.accounting.open(str(self._ids), chain, len(tokens))
        prints = fingerprints(tokens, self.config.page_tokens)
        device = next((i for i in range(limit) if chain.keys[i] not in self.pages), limit)
        held = self._hold(chain, 0, device)
        host = self._restore(prints, chain, device, limit, restore, account.miss)
        total = (len(tokens) if written is None else written) // self.config.page_tokens
        self._compute(prints, chain, device + host, total)
        report = self.accounting.settle(account, device_pages=device, host_pages=host)
        check_balance(report)
        self.reports.append(report)
        self.cache.touch(chain, device + host)
        self._retain(chain, total, store_pages)
        self._let_go(chain, 0, held)
        self.step()
        return Visit(device, host, report)

    def step(self) -> None:
        """One idle step: plan write-backs, and when eager complete them."""
        self.submit(self.cache.plan_writeback(Pressure(now_s=self.now_s, victims=self.victims())))
        if self.eager:
            self.pump()

    def victims(self) -> tuple[int, ...]:
        return within_reach(
            [BankView(order=list(self.bank), capacity=self.entries)],
            frees=[(i, held.pages) for i, held in self.bank.items()],
            free_pages=self.device_pages - len(self.pages),
            reach_pages=self.reach_pages,
            reach_entries=self.reach_entries,
        )

    def submit(self, jobs: Sequence[StoreJob]) -> None:
        for job in jobs:
            self.jobs[job.job_id] = job
            self.sources[job.job_id] = tuple(self.pages[key] for key in job.keys)

    def pump(self, count: int | None = None) -> None:
        """Complete the oldest `count` copies (None: all)."""
        for job_id in list(self.jobs)[:count]:
            self.complete(job_id)

    def complete(self, job_id: int, error: str | None = None) -> None:
        job = self.jobs.pop(job_id)
        for frame, payload in zip(job.frames.tolist(), self.sources.pop(job_id), strict=True):
            self.frames[frame] = payload if error is None else b"half a page"
        self.cache.settle(done(job_id, error))

    # ---- the device

    def _restore(
        self,
        prints: list[bytes],
        chain: KeyChain,
        device: int,
        limit: int,
        restore: Callable[[Reservation], Reason | None],
        miss: Callable[[Reason], None],
    ) -> int:
        match = self.cache.lookup(chain, device, limit)
        if not match.pages:
            return 0
        answer = self.cache.reserve(match)
        if not isinstance(answer, Reservation):
            miss(answer.reason)
            return 0
        if (reason := restore(answer)) is not None:
            self.cache.abandon(answer, reason, copying=False)
            miss(reason)
            return 0
        if not self.make_room(answer.pages):
            self.cache.abandon(answer, Reason.NO_ROOM, copying=False)
            miss(Reason.NO_ROOM)
            return 0
        for i, frame in enumerate(answer.frames.tolist()):
            if self.frames[frame] != prints[device + i]:
                raise InvariantBroken(f"frame {frame} does not hold page {device + i} of the prompt")
        self.cache.commit(answer)
        self._publish(prints, chain, device, device + answer.pages)
        return answer.pages

    def _compute(self, prints: list[bytes], chain: KeyChain, start: int, stop: int) -> None:
        fresh = [i for i in range(start, stop) if chain.keys[i] not in self.pages]
        if fresh and not self.make_room(len(fresh)):
            raise ValueError(f"a prompt of {len(prints)} pages does not fit {self.device_pages} pages")
        self._publish(prints, chain, start, stop)

    def _publish(self, prints: list[bytes], chain: KeyChain, start: int, stop: int) -> None:
        for i in range(start, stop):
            self.pages[chain.keys[i]] = prints[i]
            self.refs[chain.keys[i]] = self.refs.get(chain.keys[i], 0)
        if stop > start:
            self.cache.device_added(chain, start, stop)

    def _retain(self, chain: KeyChain, pages: int, store_pages: int | None) -> None:
        self._hold(chain, 0, pages)
        for snapshot_id, held in list(self.bank.items()):
            if held.pages <= pages and held.chain.keys[: held.pages] == chain.keys[: held.pages]:
                self.drop(snapshot_id)
        self._ids += 1
        while len(self.bank) >= self.entries:
            self.evict(next(iter(self.bank)))
        self.bank[self._ids] = _Held(chain, pages)
        self.cache.retain(self._ids, chain, pages=pages, store_pages=store_pages)

    def _hold(self, chain: KeyChain, start: int, stop: int) -> int:
        for key in chain.keys[start:stop]:
            self.refs[key] += 1
        return stop

    def _let_go(self, chain: KeyChain, start: int, stop: int) -> None:
        gone = []
        for key in chain.keys[start:stop]:
            self.refs[key] -= 1
            if not self.refs[key]:
                del self.refs[key], self.pages[key]
                gone.append(key)
        if gone:
            self.cache.device_removed(gone)

    def make_room(self, want: int) -> bool:
        while self.device_pages - len(self.pages) < want and self.bank:
            self.evict(next(iter(self.bank)))
        return self.device_pages - len(self.pages) >= want

    def evict(self, snapshot_id: int) -> Clean | Drop:
        """Drop a snapshot from the device by the tier's protocol. When not eager every wait runs out."""
        held = self.bank[snapshot_id]
        stays = next((i for i in range(held.pages) if self.refs[held.chain.keys[i]] == 1), held.pages)
        answer = self.cache.before_evict(snapshot_id, stays=stays, now_s=self.now_s)
        if isinstance(answer, Wait):
            self.submit(answer.jobs)
            if self.eager:
                for job_id in answer.job_ids:
                    self.complete(job_id)
            else:
                for job_id in answer.job_ids:
                    self.cache.expire(job_id, running=True)
                    self.overdue.add(job_id)
            answer = self.cache.before_evict(snapshot_id, stays=stays, now_s=self.now_s, expired=True)
            if isinstance(answer, Wait):
                raise InvariantBroken(f"snapshot {snapshot_id} is asked to wait twice")
        self.drop(snapshot_id)
        return answer

    def drop(self, snapshot_id: int) -> None:
        held = self.bank.pop(snapshot_id)
        self.cache.evicted(snapshot_id)
        self._let_go(held.chain, 0, held.pages)

    def check(self) -> None:
        """The tier's invariants, the books, and the rig's own: the pool never overflows."""
        self.cache.check()
        check_balance(self.accounting.stats())
        if len(self.pages) > self.device_pages:
            raise InvariantBroken(f"{len(self.pages)} pages on a device of {self.device_pages}")


def done(job_id: int, error: str | None = None, direction: Direction = Direction.STORE) -> CopyDone:
    """A completion without times."""
    return CopyDone(
        job_id=job_id,
        direction=direction,
        error=error,
        copied_bytes=0,
        submissions=1,
        submitted_s=0.0,
        started_s=0.0,
        finished_s=0.0,
    )
