"""The smallest device that evicts page by page: one queue of free pages, bytes that tell their page, and the real tier.

For tests, and for whoever asks what the tier would have made of a stream: requests come one after the other. A copy is
over at once, or when `complete` says so. Knows no tokens, no models, no time. `rig.py` has a device that evicts whole
conversations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from hostcache.errors import InvariantBroken
from hostcache.testing.rig import Visit, done
from hostcache.tier import (
    Accounting,
    History,
    HostCache,
    KeyChain,
    PageKey,
    Reason,
    Reservation,
    StoreJob,
    TierConfig,
    check_balance,
)


class PageRig:
    """`queue`: the free pages, next victim first. A request's pages join its young end when it is over, tails first.

    So the device alone is an LRU of `device_pages` pages, looked up a request at a time and touched tail first. Of a
    prompt that is larger the head stays; the rest passes through.

    `window`: pages so near to the head of the queue are written ahead of need; others as they leave. `eager`: every
    copy is over before the next event; else a page whose copy still runs when it is needed is waited for (`patient`) or
    its copy is given up.
    """

    def __init__(self, config: TierConfig, device_pages: int, *, history_entries: int, window: int = 0,
                 eager: bool = True, patient: bool = True) -> None:
        self.history = History(history_entries)
        self.cache = HostCache(config, history=self.history)
        self.accounting = Accounting(config.page_tokens, self.history, self.cache)
        self.device_pages, self.window, self.eager, self.patient = device_pages, window, eager, patient
        self.queue: dict[PageKey, bytes] = {}
        self.frames: dict[int, bytes] = {}
        self.jobs: dict[int, tuple[StoreJob, list[bytes]]] = {}
        self.overdue: set[int] = set()
        self.evicted = self.saved = self._visits = 0

    def serve(self, chain: KeyChain, contents: Sequence[bytes], *, prompt_tokens: int, fails: bool = False) -> Visit:
        """Serve a prompt: device, then host, then compute. `contents[i]`: what page i of the chain must hold.

        `fails`: the copy of what the host has fails. Raises InvariantBroken where a restored page is not the one asked
        for, or the account does not add up.
        """
        keys, limit = chain.keys, max(0, prompt_tokens - 1) // self.cache.config.page_tokens
        self._visits += 1
        account = self.accounting.open(str(self._visits), chain, prompt_tokens)
        device = next((i for i in range(limit) if keys[i] not in self.queue), limit)
        match = self.cache.lookup(chain, device, limit)
        answer = self.cache.reserve(match) if match.pages else None
        if answer is not None and not isinstance(answer, Reservation):
            raise InvariantBroken(f"{match.pages} pages were found and refused at once: {answer.reason.value}")
        here = sum(self.queue.pop(key, None) is not None for key in keys)
        self._make_room(len(keys) - here, here)
        restored = 0
        if answer is not None:
            for i, frame in enumerate(answer.frames.tolist(), start=device):
                if self.frames[frame] != contents[i]:
                    raise InvariantBroken(f"frame {frame} does not hold page {i} of the prompt")
            if fails:
                self.cache.abandon(answer, Reason.FAILED, copying=False)
                account.miss(Reason.FAILED)
            else:
                self.cache.commit(answer)
                restored = answer.pages
        self.cache.device_added(chain, 0, len(chain))
        report = self.accounting.settle(account, device_pages=device, host_pages=restored)
        check_balance(report)
        self.cache.touch(chain, device + restored)
        self._mark_end(chain)
        self.queue.update(zip(reversed(keys), reversed(contents), strict=True))
        self._make_room(0, 0)
        self.look_ahead()
        return Visit(device, restored, report)

    def look_ahead(self) -> None:
        if self.window and len(self.queue) + self.window > self.device_pages:
            near = list(islice(self.queue, self.window))
            self._submit(self.cache.plan_pages(near, now_s=0.0), self.queue)

    def complete(self, job_id: int, error: str | None = None) -> None:
        job, payloads = self.jobs.pop(job_id)
        for frame, payload in zip(job.frames.tolist(), payloads, strict=True):
            self.frames[frame] = payload if error is None else b"half a page"
        self.cache.settle(done(job_id, error))

    def clear(self) -> None:
        self.queue.clear()
        self.cache.device_cleared()

    def _mark_end(self, chain: KeyChain) -> None:
        """A conversation ended here: what is added behind it later is a return. The device keeps no snapshots."""
        snapshot = self.cache.new_job_id()
        self.cache.retain(snapshot, chain, pages=len(chain))
        self.cache.evicted(snapshot)

    def _make_room(self, want: int, held: int) -> None:
        """Evict until `want` pages fit beside those in the queue and the `held` ones, or the queue is empty."""
        gone: dict[PageKey, bytes] = {}
        while self.queue and self.device_pages - len(self.queue) - held < want:
            key = next(iter(self.queue))
            gone[key] = self.queue.pop(key)
        if not gone:
            return
        self._submit(self.cache.plan_pages(tuple(gone), now_s=0.0, at_once=True), gone)
        for job_id, (job, _) in list(self.jobs.items()):
            if any(key in gone for key in job.keys) and job_id not in self.overdue:
                if self.patient:
                    self.complete(job_id)
                else:
                    self.cache.expire(job_id, running=True)
                    self.overdue.add(job_id)
        self.cache.device_removed(tuple(gone)[::-1])
        self.evicted += len(gone)
        self.saved += sum(reason is None for reason in self.cache.held(tuple(gone)))

    def _submit(self, jobs: Iterable[StoreJob], source: dict[PageKey, bytes]) -> None:
        for job in jobs:
            self.jobs[job.job_id] = (job, [source[key] for key in job.keys])
            if self.eager:
                self.complete(job.job_id)
