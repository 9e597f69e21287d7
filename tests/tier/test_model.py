"""The real tier against a model that never forgets, under any order of events and faults.

The model is a set of every page that ever existed. Whatever the tier does: what it restores holds exactly the bytes of
the tokens asked for (the rig compares fingerprints), the bound of every request is the model's answer, the books
balance, the invariants hold after every move, and when all is over no pin and no frame is missing.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hostcache.errors import InvariantBroken
from hostcache.testing.rig import Rig, done
from hostcache.tier import Mode, Reason, Refused, Reservation, TierConfig

PAGE = 4


class NeverForgets(RuleBasedStateMachine):
    @initialize(
        device=st.integers(12, 24),
        host=st.integers(1, 40),
        entries=st.integers(2, 6),
        mode=st.sampled_from([Mode.ON_PRESSURE, Mode.ON_RETAIN, Mode.ON_EVICT]),
        eviction=st.sampled_from(["scan-resistant", "lru"]),
        job=st.integers(1, 5),
        eager=st.booleans(),
    )
    def start(self, device: int, host: int, entries: int, mode: Mode, eviction: str, job: int, eager: bool) -> None:
        config = TierConfig(
            host_cache_bytes=host, page_bytes=1, page_tokens=PAGE, mode=mode, eviction=eviction,
            max_job_pages=job, quarantine_limit=1.0,
        )
        self.rig = Rig(config, device, entries=entries, reach_pages=6, reach_entries=1, eager=eager)
        self.seen: set[tuple[int, ...]] = set()
        self.talks: list[list[int]] = [[]]
        self.held: list[Reservation] = []
        self.drained: list[int] = []
        self.settled: list[int] = []
        self.told: set[bytes] = set()
        assert self.rig.cache.take_changes() == []

    # ---- traffic

    @rule(at=st.integers(0, 50), cut=st.integers(0, 44), more=st.integers(1, 9), word=st.integers(0, 3),
          store=st.one_of(st.none(), st.integers(0, 5)), unconfirmed=st.integers(0, 1))
    def talk(self, at: int, cut: int, more: int, word: int, store: int | None, unconfirmed: int) -> None:
        """Go on with a conversation, from its end or from somewhere before (compaction, a branch)."""
        before = self.talks[at % len(self.talks)]
        tokens = (before[: len(before) - cut] if cut < len(before) else before)[:40]
        tokens = [*tokens, *[word] * more]
        limit = (len(tokens) - 1) // PAGE
        bound = next((i for i in range(limit) if tuple(tokens[: (i + 1) * PAGE]) not in self.seen), limit)
        visit = self.rig.visit(tokens, store_pages=store, written=len(tokens) - unconfirmed)
        for i in range((len(tokens) - unconfirmed) // PAGE):
            self.seen.add(tuple(tokens[: (i + 1) * PAGE]))
        assert visit.report.bound_tokens == bound * PAGE
        assert (visit.device + visit.host) <= bound
        self.talks.append(tokens)
        if len(self.talks) > 12:
            del self.talks[0]

    @rule()
    def idle(self) -> None:
        self.rig.step()

    @precondition(lambda self: self.rig.bank)
    @rule(at=st.integers(0, 9))
    def evict(self, at: int) -> None:
        self.rig.evict(list(self.rig.bank)[at % len(self.rig.bank)])

    # ---- copies

    @precondition(lambda self: self.rig.jobs)
    @rule(at=st.integers(0, 9), error=st.sampled_from([None, None, "bad"]))
    def complete(self, at: int, error: str | None) -> None:
        job_id = list(self.rig.jobs)[at % len(self.rig.jobs)]
        self.rig.complete(job_id, error)
        self.settled.append(job_id)

    @precondition(lambda self: self.settled)
    @rule(at=st.integers(0, 99))
    def complete_again(self, at: int) -> None:
        before = self.rig.cache.stats()
        self.rig.cache.settle(done(self.settled[at % len(self.settled)]))
        after = self.rig.cache.stats()
        assert (after.resident_pages, after.pinned_pages, after.free_frames) == (
            before.resident_pages, before.pinned_pages, before.free_frames,
        )

    @precondition(lambda self: self.rig.jobs)
    @rule(at=st.integers(0, 9), running=st.booleans())
    def expire(self, at: int, running: bool) -> None:
        job_id = list(self.rig.jobs)[at % len(self.rig.jobs)]
        self.rig.cache.expire(job_id, running=running)
        if not running and job_id not in self.rig.overdue:
            del self.rig.jobs[job_id], self.rig.sources[job_id]
        self.rig.overdue.add(job_id)

    # ---- reservations that stay open for a while

    @rule(at=st.integers(0, 50), start=st.integers(0, 5), stale=st.booleans())
    def reserve(self, at: int, start: int, stale: bool) -> None:
        chain = self.rig.chain(self.talks[at % len(self.talks)])
        match = self.rig.cache.lookup(chain, start, len(chain))
        if stale:
            self.rig.step()
        if not match.pages:
            return
        answer = self.rig.cache.reserve(match)
        if isinstance(answer, Refused):
            assert answer.reason is Reason.EVICTED
        else:
            assert answer.pages <= match.pages
            self.held.append(answer)

    @precondition(lambda self: self.held)
    @rule(at=st.integers(0, 9), end=st.sampled_from(["commit", "abandon", "drain"]))
    def end(self, at: int, end: str) -> None:
        reservation = self.held.pop(at % len(self.held))
        if end == "commit":
            self.rig.cache.commit(reservation)
        else:
            self.rig.cache.abandon(reservation, Reason.LATE, copying=end == "drain")
            if end == "drain":
                self.drained.append(reservation.job_id)
        with pytest.raises(ValueError, match="exactly once"):
            self.rig.cache.commit(reservation)

    @precondition(lambda self: self.drained)
    @rule()
    def drain(self) -> None:
        self.rig.cache.settle(done(self.drained.pop()))

    @rule(everything=st.booleans())
    @precondition(lambda self: len(self.talks) > 8)
    def forget(self, everything: bool) -> None:
        for snapshot_id in list(self.rig.bank):
            self.rig.drop(snapshot_id)
        self.rig.cache.forget(None if everything else self.rig.identity)
        self.seen.clear()
        self.talks = [[]]

    # ---- proof

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check()
            for restorable, key in self.rig.cache.take_changes():
                assert (key in self.told) is not restorable
                (self.told.add if restorable else self.told.remove)(key)
            stats = self.rig.cache.stats()
            assert len(self.told) <= stats.resident_pages
            assert stats.counters.orphaned_pages == 0 or self.rig.config.host_cache_bytes < 40

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for reservation in self.held:
            self.rig.cache.abandon(reservation, Reason.ABORTED, copying=False)
        for job_id in self.drained:
            self.rig.cache.settle(done(job_id))
        self.rig.pump()
        for snapshot_id in list(self.rig.bank):
            self.rig.evict(snapshot_id)
            self.rig.pump()
        self.rig.check()
        stats = self.rig.cache.stats()
        assert (stats.pinned_pages, stats.live_reservations, stats.live_stores) == (0, 0, 0)
        assert (stats.quarantined_frames, stats.filling_pages) == (0, 0)
        assert stats.free_frames + stats.resident_pages == stats.frames
        assert self.rig.accounting.open_accounts == 0
        self.rig.cache.forget()
        assert self.rig.cache.stats().free_frames == stats.frames
        self.rig.check()


NeverForgets.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestNeverForgets = NeverForgets.TestCase


def test_the_rig_would_notice_foreign_bytes() -> None:
    """The check can fail: one flipped page on the host is caught at its restore."""
    rig = Rig(TierConfig(host_cache_bytes=8, page_bytes=1, page_tokens=PAGE), 8)
    tokens = list(range(17))
    rig.visit(tokens)
    rig.evict(next(iter(rig.bank)))
    frame = next(iter(rig.frames))
    rig.frames[frame] = b"foreign"
    with pytest.raises(InvariantBroken, match="does not hold page"):
        rig.visit(tokens)
