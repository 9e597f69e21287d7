"""The cases of users of other systems (O1 to O7), in a fleet on virtual time, with the stated values."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hostcache.clock import VirtualClock
from hostcache.copiers.faults import Fault, Hold, Late, fault_at
from hostcache.errors import InvariantBroken
from hostcache.sim.clients import Clients
from hostcache.sim.fleet import Fleet
from hostcache.sim.loop import EventLog, Loop
from hostcache.sim.play import Asked, Play, Story
from hostcache.sim.requests import How, Live, State
from hostcache.sim.scenarios import COSTS, PAGE, fleet_shape
from hostcache.sim.shape import FleetShape
from hostcache.sim.stage import Run, identity, simulate
from hostcache.tier import Direction, Mode, Reason

ONE_ENTRY = {"turn_entries": 1, "prompt_entries": 0}
"""The device keeps one conversation: the next one to end drops it."""


def played(
    shape: FleetShape, tell: Callable[[Play], Story], *, page: int = PAGE, check_every: int = 1,
    fault: Fault | None = None,
) -> Run:  # fmt: skip
    """The story told to its end, everything proved after every event (or so many)."""

    def make(fleet: Fleet, loop: Loop) -> Clients:
        return Play(fleet, loop, tell, identity=identity(page))

    run = simulate(shape, make, check_every=check_every, fault=fault)
    assert isinstance(run.clients, Play)
    run.clients.finished()
    return run


# ---- O1


@pytest.mark.parametrize(("reach", "least"), [(0, 20), (1, 14), (2, 14)])
def test_o1_a_host_smaller_than_the_device_still_adds_hits(reach: int, least: int) -> None:
    """Whoever writes ahead of eviction keeps duplicates for as long: `reach` pages of the device's share."""
    hits: list[tuple[int, int]] = []

    def tell(play: Play) -> Story:
        talks = [play.conversation(17) for _ in range(10)]
        for turn in range(30):
            asked = play.ask(talks[turn % 10])
            yield asked
            hits.append((asked.device // PAGE, asked.host // PAGE))

    run = played(fleet_shape(8, 4, reach_pages=reach), tell)
    assert sum(device for device, _ in hits) == 0
    assert sum(host for _, host in hits[:10]) == 0
    assert least <= sum(host for _, host in hits[10:]) <= 20
    assert run.fleet.cache.stats().duplicate_pages >= 0


# ---- O2


def o2(play: Play, *, offers: list[Asked]) -> Story:
    """A (4 pages) is on the host, which it fills; C (4 pages) is on the device, and has to go for A's return."""
    a, c = play.conversation(4 * PAGE + 1), play.conversation(4 * PAGE + 1)
    yield play.ask(a)
    yield play.ask(c)  # the device holds one of the two
    stats = play.fleet.cache.stats()
    assert (stats.resident_pages, stats.frames) == (4, 4)
    offers += [play.ask(a), play.ask(c)]


def test_o2a_a_match_whose_pages_are_wanted_by_another_store_is_shorter_or_whole_and_never_foreign() -> None:
    asked: list[Asked] = []

    def tell(play: Play) -> Story:
        yield from o2(play, offers=asked)
        yield from asked

    run = played(fleet_shape(6, 4), tell)
    first = asked[0]
    assert first.over.how is How.SERVED
    assert first.host in range(0, 5 * PAGE, PAGE)
    assert first.device + first.host + sum(run.fleet.accounting.stats().recomputed.values()) > 0
    assert run.fleet.cache.stats().pinned_pages == 0


@pytest.mark.parametrize("way", ["cancelled", "cancelled amid the copy", "deadline"])
def test_o2bc_a_match_that_comes_to_nothing_leaves_no_pin_and_the_next_store_finds_its_room(way: str) -> None:
    seen: dict[str, int] = {}

    def tell(play: Play) -> Story:
        cache = play.fleet.cache
        a, c = play.conversation(4 * PAGE + 1), play.conversation(4 * PAGE + 1)
        yield play.ask(a)
        yield play.ask(play.conversation(5 * PAGE), store_pages=0)
        assert cache.stats().resident_pages == 4
        again = play.ask(a)
        while again.state is not State.RESTORING:
            yield 0.0001
        assert cache.stats().pinned_pages == 4
        if way == "cancelled amid the copy":
            yield 0.0002
        if way != "deadline":
            again.leave()
        yield again
        yield 2.0  # the copy that was given up has ended
        assert (cache.stats().pinned_pages, cache.stats().live_reservations) == (0, 0)
        before = cache.stats().counters.host_evicted_pages
        yield play.ask(c)
        yield play.ask(play.conversation(5 * PAGE), store_pages=0)
        seen["evicted"] = cache.stats().counters.host_evicted_pages - before
        back = play.ask(c)
        yield back
        seen["back"] = back.host

    slow = fault_at(0, Late(seconds=1.0), direction=Direction.RESTORE)
    played(fleet_shape(6, 4), tell, fault=None if way == "cancelled" else slow)
    assert seen == {"evicted": 4, "back": 4 * PAGE}


# ---- O3


REJECTED = np.uint64(0xBAD)


class _Drafts(Fleet):
    """After every round two drafts stand behind the last confirmed token, in slots that were not confirmed; both are
    rejected by the next round."""

    def _produce(self, live: Live, count: int) -> None:
        super()._produce(live, count)
        if live.state is State.DECODING:
            for position in range(live.target - 1, live.target + 2):
                at = position // self.shape.page
                assert at >= live.published, "a draft was written into a page that others can find"
                if at < len(live.pages):
                    self.memory.prints[live.pages[at]] = REJECTED


class _CountsTheSample(_Drafts):
    """A driver that takes the token sampled last for one that was written."""

    def _publish(self, live: Live, tokens: int) -> None:
        super()._publish(live, tokens + (live.state is State.DECODING))


@pytest.mark.parametrize("kind", [Fleet, _Drafts, _CountsTheSample])
@pytest.mark.parametrize("round_tokens", [(1, 1), (1, 3)])
def test_o3_the_final_sampled_token_is_not_storable(kind: type[Fleet], round_tokens: tuple[int, int]) -> None:
    page = 4
    shape = fleet_shape(8, 64, costs=replace(COSTS, round_tokens=round_tokens), look_ahead_tokens=2)
    shape = replace(shape, tier=replace(shape.tier, page_tokens=page), pool_tokens=8 * page)
    hits: list[int] = []

    def tell(play: Play) -> Story:
        for prompt, reply, stored in ((3, 1, 0), (6, 2, 1)):
            talk = play.conversation(prompt)
            yield play.ask(talk, reply, hear=2)
            for _ in range(2):
                yield play.ask(play.conversation(7 * page), store_pages=0)
            chain = talk.turn(0).chain
            assert play.fleet.cache.lookup(chain, 0, len(chain)).pages == stored
            again = play.ask(talk)
            yield again
            assert again.device == 0
            hits.append(again.host)

    def run() -> None:
        clock, log = VirtualClock(), EventLog()
        loop = Loop(clock, log, after=lambda event: fleet.check())
        fleet = kind(shape, loop, clock)
        clients = Play(fleet, loop, tell, identity=identity(page))
        clients.start()
        loop.run()
        clients.finished()
        fleet.watch.at_rest()

    if kind is _CountsTheSample:
        with pytest.raises((AssertionError, InvariantBroken)):
            run()
        return
    run()
    assert hits == [0, 4]


# ---- O4


@pytest.mark.parametrize("look_ahead", [0, 3])
@pytest.mark.parametrize("reserve_reply", [True, False])
def test_o4_two_full_hits_that_together_fill_the_pool_both_finish(look_ahead: int, reserve_reply: bool) -> None:
    hits: list[int] = []
    both: list[int] = []

    def tell(play: Play) -> Story:
        fleet = play.fleet
        p, q = play.conversation(4096), play.conversation(4080)
        for talk in (p, q):
            yield play.ask(talk, 8)
        for _ in range(2):
            yield play.ask(play.conversation(500 * PAGE), store_pages=0)
        assert len(fleet.memory.find(p.turn(1).chain, 1)) == len(fleet.memory.find(q.turn(1).chain, 1)) == 0
        began = fleet.clock.now()
        asked = [play.ask(p, 8), play.ask(q, 8)]
        while any(each.state is not State.ENDED for each in asked):
            loaded = [each.live for each in asked if each.live is not None and len(each.live.pages)]
            both.append(len(loaded))
            moving = [live for live in loaded if live.state in (State.COMPUTING, State.DECODING, State.RESTORING)]
            assert len(moving) == len(loaded), "who holds pages can go on"
            yield 0.001
        hits.extend(each.host + each.device for each in asked)
        assert fleet.clock.now() - began < 200 * COSTS.step_s(2), "200 steps"
        assert fleet.memory.reclaimable == 511
        assert fleet.cache.stats().pinned_pages == 0

    shape = fleet_shape(511, 600, look_ahead_tokens=look_ahead, reserve_reply=reserve_reply,
                        tier={"max_job_pages": 512})
    run = played(shape, tell)
    assert hits[0] >= 4080
    assert hits[1] >= 4064
    assert run.fleet.stats().served == 6
    assert max(both) >= 1


# ---- O5


def test_o5_a_write_that_never_completes_costs_its_pages_and_nothing_else() -> None:
    def tell(play: Play) -> Story:
        fleet, cache = play.fleet, play.fleet.cache
        prefix = play.conversation(10 * PAGE + 1)
        yield play.ask(prefix)
        filler = play.ask(play.conversation(30 * PAGE), store_pages=0)  # drops the prefix: its write is given up
        yield filler
        before = cache.stats()
        assert (before.counters.stores_issued, before.quarantined_frames) == (1, 10)
        talk = play.conversation(176, head=prefix, head_tokens=160)
        sent, lookups = fleet.clock.now(), before.counters.lookups
        asked = play.ask(talk)
        yield asked
        started = asked.over.ttft_s
        assert started is not None
        assert started <= 0.050 + COSTS.prefill_s(0, 176) + 1e-9
        assert (asked.device, asked.host) == (0, 0)
        steps = (fleet.clock.now() - sent) / COSTS.step_s(1)
        assert cache.stats().counters.lookups - lookups <= 1 + steps
        yield play.ask(play.conversation(30 * PAGE), store_pages=0)
        again = play.ask(talk)
        yield again
        assert again.host == 160, "its own pages were stored afresh"
        quiet = cache.stats()
        assert fleet.clock.now() < 10.0
        yield 12.0
        late = cache.stats()
        assert late.counters.late_completions == quiet.counters.late_completions + 1
        assert late.quarantined_frames == 0, "the ten frames came back"
        assert late.resident_pages == quiet.resident_pages
        once_more = play.ask(talk)
        yield once_more
        assert once_more.device == 160

    shape = fleet_shape(32, 41, tier={"copy_budget_s": 0.05})
    played(shape, tell, fault=fault_at(0, Late(seconds=10.0), direction=Direction.STORE))


def test_o5_a_request_does_not_wait_for_a_write_that_still_runs() -> None:
    """On-retain: the prefix left the device while its copy is on the way."""

    def tell(play: Play) -> Story:
        prefix = play.conversation(10 * PAGE + 1)
        yield play.ask(prefix)
        yield play.ask(play.conversation(28 * PAGE), store_pages=0)
        asked = play.ask(play.conversation(176, head=prefix, head_tokens=160))
        yield asked
        assert asked.over.ttft_s is not None
        assert asked.over.ttft_s <= 0.05
        assert asked.host == 0

    run = played(fleet_shape(32, 44, tier={"copy_budget_s": 0.0, "mode": Mode.ON_RETAIN}), tell,
                 fault=fault_at(0, Hold(), direction=Direction.STORE))
    assert run.fleet.cache.stats().counters.restores == 0


# ---- O6


def test_o6_the_budget_holds_at_every_instant() -> None:
    sizes = {"x": 62, "y": 366, "z": 2460, "p": 500, "q": 500}
    kept: list[dict[str, int]] = []
    used: list[int] = []

    def tell(play: Play) -> Story:
        cache = play.fleet.cache
        talks = {name: play.conversation(pages * PAGE + 1) for name, pages in sizes.items()}
        prompts = {name: talk.turn(0) for name, talk in talks.items()}
        for name in ("x", "y", "z", "p", "q", ""):
            before = cache.stats()
            yield play.ask(talks[name]) if name else play.ask(play.conversation(1), store_pages=0)
            stats = cache.stats()
            used.append(stats.frames - stats.free_frames)
            assert stats.counters.host_evicted_pages >= before.counters.host_evicted_pages
            kept.append({each: cache.lookup(turn.chain, 0, len(turn.chain)).pages for each, turn in prompts.items()})

    shape = fleet_shape(3000, 1200, tier={"copy_budget_s": 2.0, "max_job_pages": 4096}, **ONE_ENTRY)
    run = played(shape, tell)
    assert used == [0, 62, 428, 428, 928, 1000]
    assert kept[3] == {"x": 62, "y": 366, "z": 0, "p": 0, "q": 0}
    assert kept[-1] == {"x": 0, "y": 0, "z": 0, "p": 500, "q": 500}
    counters = run.fleet.cache.stats().counters
    assert (counters.stores_skipped, counters.host_evictions) == (1, 2)
    assert counters.peak_frames <= 1200


def test_o6_with_budget_zero_nothing_is_copied() -> None:
    def tell(play: Play) -> Story:
        talks = [play.conversation(2 * PAGE + 1) for _ in range(3)]
        for turn in range(10):
            yield play.ask(talks[turn % 3])

    run = played(fleet_shape(4, 0, reach_pages=4), tell)
    assert run.fleet.cache.stats().counters.stores_issued == 0
    assert run.fleet.copier.stats().store.jobs == 0
    assert set(run.fleet.accounting.stats().recomputed) <= {Reason.NEW, Reason.PARTIAL_PAGE, Reason.TIER_OFF}


# ---- O7


def test_o7_sixty_side_calls_do_not_push_out_the_long_conversation() -> None:
    restored: list[int] = []

    def tell(play: Play) -> Story:
        long = play.conversation(65_536 + 1)
        for sides in (10, 60, 0):
            asked = play.ask(long, PAGE, hear=0)
            yield asked
            restored.append(asked.host // PAGE)
            for _ in range(sides):
                side = play.ask(play.conversation(1920))
                yield side
                assert side.host == 0

    tier = {"copy_budget_s": 2.0, "restore_budget_s": 2.0, "max_job_pages": 4096}
    played(fleet_shape(4200, 8192, tier=tier, **ONE_ENTRY), tell, check_every=20)
    assert restored[0] == 0
    assert restored[1] >= 4096
    assert restored[2] >= 4096


def test_o7_a_cycle_larger_than_the_host_keeps_a_share_where_plain_recency_keeps_none() -> None:
    each, hits = 64, dict.fromkeys(("scan-resistant", "lru"), 0)

    for eviction in hits:

        def tell(play: Play, eviction: str = eviction) -> Story:
            talks = [play.conversation(each * PAGE + 1) for _ in range(9)]
            for turn in range(9 * 11):
                asked = play.ask(talks[turn % 9])
                yield asked
                assert asked.device == 0
                hits[eviction] += asked.host > 0

        tier = {"copy_budget_s": 2.0, "eviction": eviction}
        played(fleet_shape(each + 2, 8 * each, tier=tier, **ONE_ENTRY), tell, check_every=10)
    sys.stdout.write(f"of 90 revisits: {hits}\n")
    assert 0 < hits["scan-resistant"] <= 90
