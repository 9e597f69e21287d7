"""Write-back for a device that evicts page by page: `plan_pages` against a device with one queue of free pages."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hostcache.testing.page_rig import PageRig
from hostcache.testing.rig import done, fingerprints
from hostcache.tier import Identity, Mode, PageKey, TierConfig, key_chain
from hostcache.tier import table as t

PAGE = 4
IDENTITY = Identity(model="pages", revision="1", dtype="none", layout="pages", page_tokens=PAGE)


class PageDevice(PageRig):
    """The rig for prompts of tokens."""

    def __init__(self, device_pages: int, host_pages: int, *, window: int = 4, eager: bool = True, patient: bool = True,
                 max_job_pages: int = 256, eviction: str = "scan-resistant") -> None:
        config = TierConfig(host_cache_bytes=host_pages, page_bytes=1, page_tokens=PAGE, mode=Mode.ON_PRESSURE,
                            max_job_pages=max_job_pages, eviction=eviction, quarantine_limit=1.0)
        super().__init__(config, device_pages, history_entries=4096, window=window, eager=eager, patient=patient)

    def visit(self, tokens: Sequence[int], *, fails: bool = False) -> tuple[int, int]:
        """(pages from the device, pages from the host)."""
        served = self.serve(key_chain(tokens, IDENTITY), fingerprints(tokens, PAGE), prompt_tokens=len(tokens),
                            fails=fails)
        return served.device, served.host


def talk(name: int, pages: int) -> list[int]:
    return [*([name] * (pages * PAGE)), name]


def test_what_the_queue_evicts_is_on_the_host_and_comes_back_whole() -> None:
    device = PageDevice(12, 64)
    for name in range(6):
        device.visit(talk(name, 5))
    assert device.evicted == device.saved == 5 * 6 - 12
    assert device.visit(talk(0, 5)) == (0, 5)
    assert device.visit(talk(0, 5)) == (5, 0)


def test_nothing_is_planned_for_pages_that_are_unknown_or_written_or_gone() -> None:
    device = PageDevice(8, 64)
    chain = key_chain(talk(1, 4), IDENTITY)
    assert device.cache.plan_pages(chain.keys, now_s=0.0) == []
    device.cache.device_added(chain, 0, 4)
    (job,) = device.cache.plan_pages([*reversed(chain.keys), chain.keys[3]], now_s=0.0)
    assert job.keys == chain.keys
    assert device.cache.plan_pages(chain.keys, now_s=0.0) == []
    device.cache.settle(done(job.job_id))
    device.cache.device_removed(chain.keys)
    assert device.cache.plan_pages(chain.keys, now_s=0.0) == []
    device.cache.check()


def test_the_tail_of_one_and_the_head_of_another_conversation_are_two_jobs_each_in_chain_order() -> None:
    device = PageDevice(12, 64)
    one, two = key_chain(talk(1, 4), IDENTITY), key_chain(talk(2, 3), IDENTITY)
    for chain in (one, two):
        device.cache.device_added(chain, 0, len(chain))
    jobs = device.cache.plan_pages([one.keys[3], one.keys[2], two.keys[0], two.keys[1]], now_s=0.0)
    assert [job.keys for job in jobs] == [one.keys[2:], two.keys[:2]]


def test_ahead_of_eviction_only_a_few_jobs_run_and_pages_that_leave_at_once_are_all_written() -> None:
    device = PageDevice(64, 64, max_job_pages=2)
    chain = key_chain(talk(1, 20), IDENTITY)
    device.cache.device_added(chain, 0, 20)
    ahead = device.cache.plan_pages(chain.keys[::-1], now_s=0.0)
    assert (len(ahead), [len(job.keys) for job in ahead]) == (4, [2] * 4)
    assert sum(len(job.keys) for job in device.cache.plan_pages(chain.keys[::-1], now_s=0.0, at_once=True)) == 12


def test_a_stem_is_always_let_in_even_for_the_last_of_its_own_tail() -> None:
    """Tails leave first and fill the host; their heads must not be kept out, or the tails would be worth nothing."""
    device = PageDevice(16, 4)
    chain = key_chain(talk(1, 8), IDENTITY)
    device.cache.device_added(chain, 0, 8)
    device.cache.touch(chain, 8)
    for i in range(7, -1, -1):
        for job in device.cache.plan_pages([chain.keys[i]], now_s=0.0, at_once=True):
            device.cache.settle(done(job.job_id))
        device.cache.device_removed([chain.keys[i]])
        device.cache.check()
    assert device.cache.lookup(chain, 0, 8).pages == 4
    assert device.cache.stats().counters.orphaned_pages == 0


def test_a_device_that_was_cleared_at_once_is_restored_from_the_host() -> None:
    device = PageDevice(12, 64)
    for name in range(4):
        device.visit(talk(name, 5))
    device.clear()
    device.cache.check()
    assert device.cache.stats().duplicate_pages == device.cache.stats().dirty_pages == 0
    assert device.visit(talk(0, 5)) == (0, 5)


def test_with_the_tier_off_no_page_is_planned() -> None:
    device = PageDevice(8, 0)
    device.visit(talk(1, 4))
    assert device.cache.plan_pages(key_chain(talk(1, 4), IDENTITY).keys, now_s=0.0, at_once=True) == []


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), max_size=30))
def test_runs_keep_every_page_once_and_each_page_behind_the_one_before_it(picks: list[tuple[int, int]]) -> None:
    table = t.PageTable()
    for name in range(4):
        table.add(key_chain(talk(name, 8), IDENTITY), 0, 8)
    chosen = [key_chain(talk(name, 8), IDENTITY).keys[at] for name, at in dict.fromkeys(picks)]
    slots = table.find(chosen)
    runs = table.runs(slots)
    assert sorted(np.concatenate([*runs, slots[:0]]).tolist()) == sorted(slots.tolist())
    for run in runs:
        assert (table.parent[run[1:]] == run[:-1]).all()


class PageByPage(RuleBasedStateMachine):
    @initialize(device=st.integers(14, 24), host=st.integers(1, 40), window=st.integers(0, 9), eager=st.booleans(),
                patient=st.booleans(), job=st.integers(1, 5), eviction=st.sampled_from(["scan-resistant", "lru"]))
    def start(self, device: int, host: int, window: int, eager: bool, patient: bool, job: int, eviction: str) -> None:
        self.device = PageDevice(device, host, window=window, eager=eager, patient=patient, max_job_pages=job,
                                 eviction=eviction)
        self.talks: list[list[int]] = [[]]
        self.seen: set[tuple[int, ...]] = set()
        self.told: set[PageKey] = set()
        assert self.device.cache.take_changes() == []

    @rule(at=st.integers(0, 50), cut=st.integers(0, 44), more=st.integers(1, 9), word=st.integers(0, 3),
          fails=st.sampled_from([False, False, True]))
    def go_on(self, at: int, cut: int, more: int, word: int, fails: bool) -> None:
        before = self.talks[at % len(self.talks)]
        tokens = [*(before[: len(before) - cut] if cut < len(before) else before)[:40], *[word] * more]
        limit = (len(tokens) - 1) // PAGE
        bound = next((i for i in range(limit) if tuple(tokens[: (i + 1) * PAGE]) not in self.seen), limit)
        assert sum(self.device.visit(tokens, fails=fails)) <= bound
        self.seen.update(tuple(tokens[: (i + 1) * PAGE]) for i in range(len(tokens) // PAGE))
        self.talks = [*self.talks[-11:], tokens]

    @rule()
    def idle(self) -> None:
        self.device.look_ahead()

    @precondition(lambda self: self.device.jobs)
    @rule(at=st.integers(0, 9), error=st.sampled_from([None, None, "bad"]))
    def complete(self, at: int, error: str | None) -> None:
        self.device.complete(list(self.device.jobs)[at % len(self.device.jobs)], error)

    @precondition(lambda self: len(self.talks) > 6)
    @rule(everything=st.booleans())
    def clear(self, everything: bool) -> None:
        self.device.clear()
        if everything:
            self.device.cache.forget()
            self.seen.clear()
            self.talks = [[]]

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "device"):
            self.device.cache.check()
            assert len(self.device.queue) <= self.device.device_pages
            for restorable, key in self.device.cache.take_changes():
                assert (key in self.told) is not restorable
                (self.told.add if restorable else self.told.remove)(key)
            table = self.device.cache._table
            live = table.live()
            assert self.told == set(table.keys_of(live[(table.state[live] == t.RESIDENT) & ~table.dead[live]]))

    def teardown(self) -> None:
        if not hasattr(self, "device"):
            return
        for job_id in list(self.device.jobs):
            self.device.complete(job_id)
        stats = self.device.cache.stats()
        assert (stats.pinned_pages, stats.live_reservations, stats.live_stores) == (0, 0, 0)
        assert stats.quarantined_frames == 0
        assert stats.free_frames + stats.resident_pages == stats.frames
        self.device.clear()
        self.device.cache.forget()
        assert self.device.cache.stats().free_frames == stats.frames


PageByPage.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPageByPage = PageByPage.TestCase


@pytest.mark.parametrize("window", [0, 4])
def test_with_or_without_looking_ahead_every_evicted_page_was_saved(window: int) -> None:
    device = PageDevice(20, 200, window=window)
    for turn in range(3):
        for name in range(8):
            device.visit(talk(name, 3 + 2 * turn))
            device.cache.check()
    assert device.evicted == device.saved > 50
    assert device.cache.stats().counters.orphaned_pages == 0
