"""Many actors and their interleavings, as shipped; and the properties that only many can break (A1, C1, C5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from tests.sim.runs import played

from hostcache.clock import VirtualClock
from hostcache.copiers.faults import Fault, Wedge, fault_at
from hostcache.copiers.virtual import CopySpeed
from hostcache.errors import HostCacheError, InvariantBroken
from hostcache.sim.clients import Clients
from hostcache.sim.fleet import PROMPT, Fleet
from hostcache.sim.loop import EventLog, Loop
from hostcache.sim.memory import Pages, Snapshot
from hostcache.sim.play import Asked, Churn, ChurnShape, Play, Story
from hostcache.sim.requests import How, Live
from hostcache.sim.scenarios import PAGE, Scenario, fleet_shape, run_scenario
from hostcache.sim.shape import FleetShape, Lane
from hostcache.sim.stage import Run, identity
from hostcache.sim.stories import burst, crowd_out
from hostcache.sim.suites import scenarios
from hostcache.tier import CopyJob, Direction, Mode

CONCURRENCY = scenarios("concurrency")


@pytest.mark.parametrize("scenario", CONCURRENCY, ids=lambda each: each.name)
@pytest.mark.parametrize("faults", [False, True], ids=["calm", "faults"])
def test_many_at_once_break_nothing(scenario: Scenario, faults: bool) -> None:
    assert "counters balanced" in played(scenario, faults=faults).proved


def test_any_of_the_next_events_may_come_first() -> None:
    """Another order of the same events is another run, and a right one."""
    scenario = next(each for each in CONCURRENCY if each.name == "interleaved-on-pressure")
    digests = {run_scenario(replace(scenario, width=width), check=False).run.log.digest for width in (1, 2, 4, 8)}
    assert len(digests) == 4


# ---- staging with another kind of fleet


def staged(
    kind: type[Fleet], shape: FleetShape, tell: Callable[[Play], Story], *, fault: Fault | None = None,
    check: bool = True, prepare: Callable[[Fleet], None] = lambda fleet: None,
) -> Run:  # fmt: skip
    """`simulate` with another kind of fleet."""
    clock, log = VirtualClock(), EventLog(keep=True)
    loop = Loop(clock, log, after=(lambda event: fleet.check()) if check else None)
    fleet = kind(shape, loop, clock, fault=fault)
    prepare(fleet)
    clients: Clients = Play(fleet, loop, tell, identity=identity(PAGE))
    clients.start()
    loop.run()
    fleet.check()
    fleet.watch.at_rest()
    return Run(fleet=fleet, clients=clients, log=log)


# ---- A1: no copy starts before the last writer or reader has ended


class _StoresTooEarly(Fleet):
    """The ordering removed: what a step is about to compute is published and retained as the step begins."""

    def _choose_prefill(self) -> list[tuple[Live, int]]:
        parts = super()._choose_prefill()
        for live, stop in parts:
            if stop == live.target and stop // PAGE > live.published:
                self._publish_pages(live, stop // PAGE)
                self._retain(live, PROMPT, live.turn.prompt_end)
                self._write_back()
        return parts

    def _stepped(self, parts: Sequence[tuple[Live, int]], decoders: Sequence[tuple[Live, int]]) -> None:
        for live, stop in parts:
            whole = stop // PAGE
            self.memory.prints[live.pages[:whole]] = live.turn.prints[:whole]
        super()._stepped(parts, decoders)


class _StoresThenComputes(_StoresTooEarly):
    """The same with the ordering in place: nothing is published before the step has ended."""

    def _choose_prefill(self) -> list[tuple[Live, int]]:
        return Fleet._choose_prefill(self)


def _there_and_back(play: Play) -> Story:
    for _ in range(3):
        talk = play.conversation(6 * PAGE + 1)
        yield play.ask(talk)
        yield from crowd_out(play)
        again = play.ask(talk)
        yield again
        assert again.host == 6 * PAGE


def test_a1_a_store_that_starts_before_its_pages_are_computed_goes_red() -> None:
    shape = fleet_shape(16, 64, tier={"mode": Mode.ON_RETAIN})
    staged(_StoresThenComputes, shape, _there_and_back)
    with pytest.raises(InvariantBroken):
        staged(_StoresTooEarly, shape, _there_and_back)


def _late_and_overtaken(play: Play) -> Story:
    """A restore is given up amid its copy; others compute meanwhile, and return from the host later."""
    first, others = play.conversation(6 * PAGE + 1), [play.conversation(5 * PAGE + 1) for _ in range(3)]
    yield play.ask(first)
    yield from crowd_out(play)
    late = play.ask(first)
    yield 0.06
    for talk in others:
        yield play.ask(talk)
    yield late
    yield 1.0
    yield from crowd_out(play)
    for talk in (first, *others):
        yield play.ask(talk)


def _unprotected(fleet: Fleet) -> None:
    """The ordering removed: pages are handed out again while a copy may still touch them."""

    def nothing(pages: Pages) -> None:
        del pages

    fleet.memory.copying = nothing  # type: ignore[method-assign]
    fleet.memory.copied = nothing  # type: ignore[method-assign]
    fleet.memory.check = lambda held, copying: None  # type: ignore[method-assign]


def test_a1_a_restore_into_pages_that_were_handed_out_again_goes_red() -> None:
    shape = fleet_shape(16, 64)

    def slow() -> Fault:
        return fault_at(0, Wedge(0.3), direction=Direction.RESTORE)

    staged(Fleet, shape, _late_and_overtaken, fault=slow())
    with pytest.raises(HostCacheError):
        staged(Fleet, shape, _late_and_overtaken, fault=slow(), prepare=_unprotected)


def _reads_at_once(fleet: Fleet) -> None:
    """The other extreme of a copy: it takes all it reads as it begins, not as it ends."""
    memory = fleet.memory
    begin, read = memory.begin, dict[int, Any]()

    def at_begin(job: CopyJob) -> None:
        source = memory.prints if job.direction is Direction.STORE else memory.host
        read[job.job_id] = [
            source[at : at + each.pages].copy() for each in job.extents
            for at in (each.device_page if job.direction is Direction.STORE else each.frame,)]  # fmt: skip
        begin(job)

    def at_finish(job: CopyJob, pages: int) -> None:
        target = memory.host if job.direction is Direction.STORE else memory.prints
        for each, values in zip(job.extents, read.pop(job.job_id), strict=True):
            count = min(pages, each.pages)
            pages -= count
            at = each.frame if job.direction is Direction.STORE else each.device_page
            target[at : at + count] = values[:count]

    memory.begin = at_begin  # type: ignore[method-assign]
    memory.finish = at_finish  # type: ignore[method-assign]


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("mode", [Mode.ON_PRESSURE, Mode.ON_RETAIN, Mode.ON_EVICT])
def test_a1_a_copy_may_read_at_any_moment_between_its_begin_and_its_end(mode: Mode, lanes: int) -> None:
    shape = fleet_shape(24, 64, tier={"mode": mode}, lanes=lanes, reach_pages=6, slots=4, door_slots=32,
                        speed=CopySpeed(store_bytes_per_s=2e3, restore_bytes_per_s=2e3))  # fmt: skip
    for prepare in (_reads_at_once, lambda fleet: None):
        run = staged(Fleet, shape, burst, prepare=prepare)
        assert run.fleet.watch.restores > 10


# ---- C1: what fits the pool completes


_REQUESTS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 40), st.sampled_from([0.0, 0.0, 0.001, 0.02, 0.1])),
    min_size=2, max_size=14)  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=_REQUESTS,
    pages=st.integers(14, 24),
    frames=st.sampled_from([0, 1, 8, 64]),
    reserve_reply=st.booleans(),
    look_ahead=st.sampled_from([0, 3]),
    lane=st.sampled_from(list(Lane)),
    speed=st.sampled_from([300.0, 1e3, 1e4]),
    mode=st.sampled_from([Mode.ON_PRESSURE, Mode.ON_RETAIN, Mode.ON_EVICT]),
)
def test_c1_any_mix_whose_largest_member_fits_the_pool_completes_in_a_bounded_number_of_steps(
    requests: list[tuple[int, int, float]], pages: int, frames: int, reserve_reply: bool, look_ahead: int, lane: Lane,
    speed: float, mode: Mode,
) -> None:  # fmt: skip
    asked: list[Asked] = []

    def tell(play: Play) -> Story:
        talks = [play.conversation(size * PAGE + 5) for size in (2, 4, 6, 8, 9)]
        for talk in talks[::2]:
            yield play.ask(talk)
        for which, reply, gap in requests:
            asked.append(play.ask(talks[which], reply))
            if gap:
                yield gap
        yield from asked

    shape = fleet_shape(pages, frames, reserve_reply=reserve_reply, look_ahead_tokens=look_ahead, lane=lane,
                        reach_pages=4, door_slots=64, tier={"mode": mode, "restore_budget_s": 0.02},
                        speed=CopySpeed(store_bytes_per_s=speed, restore_bytes_per_s=speed))  # fmt: skip
    run = staged(Fleet, shape, tell, check=False)
    assert all(each.over.how is How.SERVED for each in asked)
    steps = sum(line.split()[1] == "step" for line in run.log.lines)
    passes = 3 + len(requests) + run.fleet.stats().preemptions
    assert steps <= passes * (2 + 9 * PAGE // shape.chunk_tokens + 41)


# ---- C5: a store that can have its room gets it; one that cannot changes nothing


class _Judged(Fleet):
    """Looks at every eviction before and after."""

    refused = 0
    granted = 0

    def _evict(self, victim: Snapshot) -> None:
        before, lost = self.cache.stats(), self.watch.lost_pages
        super()._evict(victim)
        after = self.cache.stats()
        self.granted += after.counters.stores_issued > before.counters.stores_issued
        if self.watch.lost_pages == lost:
            return
        self.refused += 1
        if self.shape.tier.eviction == "lru":
            unpinned = before.frames - before.pinned_pages - before.quarantined_frames
            assert before.pinned_pages or len(victim.pages) > unpinned, "there was room enough"
        if after.counters.stores_issued == before.counters.stores_issued:
            assert after.counters.host_evicted_pages == before.counters.host_evicted_pages
            assert after.pinned_pages <= before.pinned_pages


@pytest.mark.parametrize("eviction", ["lru", "scan-resistant"])
@pytest.mark.parametrize("mode", [Mode.ON_PRESSURE, Mode.ON_EVICT])
def test_c5_whenever_enough_is_unpinned_a_store_succeeds_and_a_refused_one_changes_nothing(
    eviction: str, mode: Mode
) -> None:
    refusals = stores = 0
    for seed, frames in enumerate((4, 12, 24, 48)):
        clock, log = VirtualClock(), EventLog()
        loop = Loop(clock, log)
        tier = {"eviction": eviction, "mode": mode, "copy_budget_s": 5.0, "max_job_pages": 64}
        fleet = _Judged(fleet_shape(40, frames, slots=4, tier=tier), loop, clock)
        shape = ChurnShape(actors=8, start_tokens=(20, 160), hear_tokens=(5, 60), reply_tokens=(1, 12), turns=(2, 6),
                           gap_s=(0.01, 0.4), shared_tokens=2 * PAGE, compact=0.1)  # fmt: skip
        clients = Churn(fleet, loop, shape, identity=identity(PAGE), seed=seed, turns=120)
        clients.start()
        loop.run()
        fleet.check()
        refusals += fleet.refused
        stores += fleet.granted
    assert stores > 50
    assert eviction == "lru" or refusals > 0


def _options() -> Iterator[dict[str, Any]]:
    yield {"reserve_reply": True}
    yield {"reserve_reply": False}


@pytest.mark.parametrize("options", list(_options()), ids=["reserved", "growing"])
def test_c1_the_largest_prompt_that_fits_is_served_and_one_page_more_is_refused(options: dict[str, Any]) -> None:
    def tell(play: Play) -> Story:
        fits, too_large = play.ask(play.conversation(16 * PAGE - 1)), play.ask(play.conversation(16 * PAGE))
        yield fits
        yield too_large
        assert fits.over.how is How.SERVED
        assert too_large.over.how is How.TOO_LARGE

    staged(Fleet, fleet_shape(16, 16, **options), tell)
