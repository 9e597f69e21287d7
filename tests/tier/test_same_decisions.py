"""What the tier decides is pinned: a long random history of calls and faults must give the answers it always gave.

Faster bookkeeping must not change a frame, a victim or a reason. Who changes a decision on purpose replaces the digest
and says so in the changelog.
"""

from __future__ import annotations

from hashlib import sha256
from random import Random

import pytest

from hostcache.testing.rig import Rig, done
from hostcache.tier import Accounting, History, HostCache, Mode, Reason, Reservation, TierConfig

PAGE = 4
DIGESTS = {
    "scan-resistant": "da87acffe3b415b4241165e3e9678e219853eaf9059dc83eebdd0d739b000cfe",
    "lru": "90737f8a0e4706297069082f20ceaa95f87933afabf35f892d650091c6abd31c",
}


class Story:
    """A device and a host of some size, and everything that can happen to them. `told` digests every answer."""

    def __init__(self, seed: int, eviction: str) -> None:
        self.random = Random(seed)
        pick = self.random.randrange
        self.longest = self.random.choice([40, 160])
        config = TierConfig(
            host_cache_bytes=pick(1, self.longest // 2), page_bytes=1, page_tokens=PAGE,
            mode=self.random.choice([Mode.ON_PRESSURE, Mode.ON_PRESSURE, Mode.ON_RETAIN, Mode.ON_EVICT]),
            eviction=eviction, max_job_pages=pick(1, 9), quarantine_limit=1.0,
        )
        self.rig = Rig(config, self.longest // 4 + 12 + pick(self.longest // 4), entries=pick(2, 7), reach_pages=6,
                       reach_entries=1, eager=pick(2) == 0)
        if pick(3) == 0:  # a history that overflows
            self.rig.history = History(pick(10, 200))
            self.rig.cache = HostCache(config, history=self.rig.history)
            self.rig.accounting = Accounting(PAGE, self.rig.history, self.rig.cache)
        self.talks: list[list[int]] = [[]]
        self.held: list[Reservation] = []
        self.drained: list[int] = []
        self.told = sha256()

    def tell(self, *answers: object) -> None:
        self.told.update(repr(answers).encode())

    def step(self) -> None:
        rig, pick = self.rig, self.random.randrange
        events = [self.talk] * 12 + [self.reserve, self.end, self.end, rig.step]
        if rig.jobs:
            events += [self.complete] * 6 + [self.expire]
        if rig.bank:
            events += [lambda: self.tell(rig.evict(list(rig.bank)[pick(len(rig.bank))]))] * 2
        if pick(40) == 0:
            events = [self.distrust, self.forget]
        events[pick(len(events))]()
        self.tell([(i, [key.hex() for key in job.keys], job.frames.tolist()) for i, job in rig.jobs.items()])
        self.tell(rig.cache.stats().as_json(), rig.accounting.stats().as_json(), len(rig.history))
        rig.check()

    def talk(self) -> None:
        pick = self.random.randrange
        before = self.random.choice(self.talks)
        tokens = before[: len(before) - pick(len(before) + 1) * pick(2)][: self.longest]
        tokens = [*tokens, *[pick(4)] * pick(1, self.longest // 3)]
        visit = self.rig.visit(tokens, store_pages=self.random.choice([None, None, None, pick(6)]),
                               written=len(tokens) - pick(2))
        self.tell(visit.device, visit.host, visit.report.as_json())
        self.talks = [*self.talks[-11:], tokens]

    def reserve(self) -> None:
        chain = self.rig.chain(self.random.choice(self.talks))
        match = self.rig.cache.lookup(chain, self.random.randrange(6), len(chain))
        answer = self.rig.cache.reserve(match)
        self.tell(match.pages, match.pending)
        if isinstance(answer, Reservation):
            self.tell(answer.job_id, answer.frames.tolist())
            self.held.append(answer)

    def end(self) -> None:
        if self.drained and self.random.randrange(2):
            self.rig.cache.settle(done(self.drained.pop()))
        if not self.held:
            return
        reservation = self.held.pop(self.random.randrange(len(self.held)))
        if (way := self.random.randrange(3)) == 0:
            self.rig.cache.commit(reservation)
        else:
            self.rig.cache.abandon(reservation, Reason.LATE, copying=way == 1)
            self.drained += [reservation.job_id] * (way == 1)

    def complete(self) -> None:
        self.rig.complete(self.random.choice(list(self.rig.jobs)), self.random.choice([None, None, "bad"]))

    def expire(self) -> None:
        rig, job_id = self.rig, self.random.choice(list(self.rig.jobs))
        running = self.random.randrange(2) == 0 or job_id in rig.overdue
        rig.cache.expire(job_id, running=running)
        if running:
            rig.overdue.add(job_id)
        else:
            del rig.jobs[job_id], rig.sources[job_id]

    def distrust(self) -> None:
        first = self.random.randrange(6)
        self.rig.cache.distrust(self.rig.chain(self.random.choice(self.talks)).keys[first : first + 5])

    def forget(self) -> None:
        for snapshot_id in list(self.rig.bank):
            self.rig.drop(snapshot_id)
        self.rig.cache.forget(self.random.choice([None, self.rig.identity]))
        self.talks = [[]]


@pytest.mark.parametrize("eviction", DIGESTS)
def test_a_random_history_of_calls_and_faults_gives_the_answers_it_always_gave(eviction: str) -> None:
    told = sha256()
    for seed in range(32):
        story = Story(seed, eviction)
        for _ in range(100):
            story.step()
        told.update(story.told.digest())
    assert told.hexdigest() == DIGESTS[eviction]
