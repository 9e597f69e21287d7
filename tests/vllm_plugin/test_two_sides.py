"""The two sides of the plugin together, under a vLLM in small that checks every byte a forward pass reads."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.vllm_plugin.mini import BLOCK, ForeignBytes, MiniVllm, Request, cold
from tests.vllm_plugin.mistakes import OF_THE_SCHEDULER, OF_THE_WORKER, Trap, mistaken

from hostcache.copiers import Delay, Fail, FaultAction, Hold, Wedge, fault_at
from hostcache.tier import CopyJob, Direction, Mode, Reason
from hostcache.vllm_plugin.scheduler_side import SchedulerSide
from hostcache.vllm_plugin.wall import WorkerWall
from hostcache.vllm_plugin.worker_side import WorkerSide


def talk(name: int, pages: int) -> list[int]:
    return [*[name] * (pages * BLOCK), name]


def fill(mini: MiniVllm, names: range, pages: int = 8) -> None:
    for name in names:
        mini.ask(talk(name, pages))


@pytest.mark.parametrize("mode", [Mode.ON_PRESSURE, Mode.ON_EVICT, Mode.ON_RETAIN])
@pytest.mark.parametrize("ranks", [1, 2])
def test_evicted_prefixes_come_back_and_the_answers_are_the_cold_ones(mode: Mode, ranks: int) -> None:
    mini = MiniVllm(mode=mode, ranks=ranks)
    fill(mini, range(6))
    assert mini.side.tier.stats().counters.restores == 0
    for name in range(6):
        request = mini.ask(talk(name, 8))
        assert request.answer == cold(talk(name, 8))
        assert request.cached == 8 * BLOCK
    assert mini.side.counters.evicted_pages == mini.side.counters.saved_pages > 40
    assert mini.side.tier.stats().counters.restores == 6
    mini.at_rest()


def test_without_pressure_nothing_moves_and_nothing_is_held() -> None:
    mini = MiniVllm(blocks=100)
    fill(mini, range(8))
    counters = mini.side.tier.stats().counters
    assert (counters.stores_issued, counters.pins_taken, counters.store_bytes, counters.restores) == (0, 0, 0, 0)
    mini.at_rest()


def test_host_memory_is_readied_once_and_not_before_the_pool_is_half_full() -> None:
    readied: list[int] = []

    class Noting(WorkerSide):
        def __init__(self, **parts: Any) -> None:
            super().__init__(**{**parts, "prepare": lambda: readied.append(len(mini.pool.cached_block_hash_to_block))})

    mini = MiniVllm(blocks=100, worker=Noting)
    fill(mini, range(5))
    assert readied == []
    fill(mini, range(5, 20))
    assert [50 <= blocks < 60 for blocks in readied] == [True]
    mini.at_rest()


def test_looking_ahead_leaves_little_for_the_step_that_needs_the_blocks() -> None:
    mini = MiniVllm(blocks=40, chunk=16)
    fill(mini, range(12))
    assert mini.side.counters.saved_at_once_pages == 0
    on_evict = MiniVllm(blocks=40, chunk=16, mode=Mode.ON_EVICT)
    fill(on_evict, range(12))
    assert on_evict.side.counters.saved_at_once_pages == on_evict.side.counters.saved_pages > 40


def test_a_block_that_is_handed_out_while_it_is_being_saved_is_waited_for() -> None:
    mini = MiniVllm(page_s=0.02, seqs=1)
    for name in range(6):
        mini.add(talk(name, 8))
    mini.run()
    assert mini.side.counters.fenced_jobs > 0
    assert mini.side.counters.evicted_pages == mini.side.counters.saved_pages
    assert mini.ask(talk(0, 8)).answer == cold(talk(0, 8))


def test_a_save_that_does_not_end_is_given_up_and_its_frame_is_not_offered() -> None:
    hold = Hold()
    mini = MiniVllm(mode=Mode.ON_EVICT, faults=[fault_at(0, hold, direction=Direction.STORE)], copy_budget_s=0.2)
    fill(mini, range(6))
    assert mini.side.tier.quarantined > 0
    assert mini.side.counters.lost_pages > 0
    for name in range(6):
        assert mini.ask(talk(name, 8)).answer == cold(talk(name, 8))
    hold.release()
    mini.step()
    mini.step()
    assert mini.side.tier.quarantined == 0
    mini.at_rest()


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_load_is_computed_and_never_offered_to_that_request_again(after: int, ranks: int) -> None:
    fault = fault_at(0, Fail(after_pages=after), direction=Direction.RESTORE)
    mini = MiniVllm(ranks=ranks, faults=[fault])
    fill(mini, range(6))
    failed = mini.ask(talk(0, 8))
    assert failed.answer == cold(talk(0, 8))
    stats = mini.side.tier.stats().counters
    assert (stats.restores, stats.restore_failures) == (0, 1)
    assert mini.side.accounting.stats().recomputed[Reason.FAILED] > 0
    fill(mini, range(1, 6))
    assert mini.ask(talk(0, 8)).cached == 8 * BLOCK
    mini.at_rest()


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_of_a_load_that_is_late_stay_out_of_the_pool_until_it_can_write_no_more(ranks: int) -> None:
    hold = Hold()
    mini = MiniVllm(ranks=ranks, faults=[fault_at(0, hold, direction=Direction.RESTORE)], restore_budget_s=0.1)
    fill(mini, range(6))
    assert mini.ask(talk(0, 8)).answer == cold(talk(0, 8))
    assert len(mini.pool.queue) == len(mini.pool.blocks) - 1 - 8
    assert mini.side.tier.stats().counters.restore_timeouts == 1
    assert mini.side.accounting.stats().recomputed[Reason.LATE] > 0
    for name in range(6):
        assert mini.ask(talk(name, 4)).answer == cold(talk(name, 4))
    hold.release()
    mini.step()
    mini.step()
    mini.at_rest()


def test_a_restore_that_takes_longer_than_the_budget_but_less_than_computing_is_waited_for() -> None:
    mini = MiniVllm(page_s=0.02, restore_budget_s=0.05)
    fill(mini, range(6))
    fill(mini, range(6))
    before = mini.side.tier.stats().counters
    assert (before.restores, before.restore_timeouts) == (0, 6), "neither speed is known: the setting holds"
    mini.side.rates.saw_prefill(100, 10.0)
    assert mini.ask(talk(0, 8)).answer == cold(talk(0, 8))
    now = mini.side.tier.stats().counters
    assert (now.restores, now.restore_timeouts) == (1, 6)


def test_a_stuck_restore_is_given_up_by_then_all_the_same() -> None:
    hold = Hold()
    mini = MiniVllm(restore_budget_s=0.05, faults=[fault_at(0, hold, direction=Direction.RESTORE)])
    fill(mini, range(6))
    mini.side.rates.saw_prefill(100, 10.0)
    begun_s = mini.clock.now()
    request = mini.ask(talk(0, 8))
    assert request.answer == cold(talk(0, 8))
    computing_s = 8 * BLOCK * 0.1
    assert computing_s < mini.clock.now() - begun_s < computing_s + 0.5
    hold.release()
    mini.step()
    mini.step()
    mini.at_rest()


def test_what_is_on_the_device_waits_for_no_copy() -> None:
    mini = MiniVllm(blocks=40, page_s=0.05, restore_budget_s=10.0)
    fill(mini, range(10))
    loads = mini.add(talk(0, 8))
    mini.step()
    assert loads.status.name == "LOADING"
    here = mini.add(talk(9, 8))
    while here.request_id in mini.requests:
        mini.step()
    assert (here.lookups, here.cached, loads.status.name) == (1, 8 * BLOCK, "LOADING")
    mini.run()


def test_who_waits_for_the_load_of_another_waits_for_that_one_only() -> None:
    mini = MiniVllm(blocks=40, page_s=0.05, restore_budget_s=10.0)
    fill(mini, range(10))
    first, second = mini.add(talk(0, 8)), mini.add([*talk(0, 8), 3])
    while first.status.name != "LOADING" or first.request_id not in mini.ready:
        mini.step()
    mini.step()
    mini.step()
    assert second.cached == 8 * BLOCK
    mini.run()
    assert mini.side.tier.stats().counters.restores == 1


def test_a_hundred_turnovers_of_a_small_tier_lose_no_pin_and_no_page() -> None:
    mini = MiniVllm(blocks=10, host_pages=6, chunk=20, mode=Mode.ON_EVICT)
    for turn in range(1200):
        name = turn * 7 % 5
        assert mini.ask(talk(name, 2), 1).answer == cold(talk(name, 2), 1)
        if turn % 100 == 0:
            mini.at_rest()
    counters = mini.side.tier.stats().counters
    assert counters.store_pages > 100 * 6
    assert counters.restores > 100
    mini.at_rest()


def test_loads_behind_a_wedged_one_are_given_up_without_having_started() -> None:
    wedge = Wedge()
    mini = MiniVllm(blocks=40, faults=[fault_at(0, wedge, direction=Direction.RESTORE)], restore_budget_s=0.1)
    fill(mini, range(10))
    both = [mini.add(talk(0, 8)), mini.add(talk(1, 8))]
    mini.run()
    assert [request.answer for request in both] == [cold(talk(0, 8)), cold(talk(1, 8))]
    assert mini.side.tier.stats().counters.restore_timeouts == 2
    wedge.release()
    for _ in range(20):
        mini.step()
    mini.at_rest()


def test_a_rank_without_memory_turns_the_tier_off_and_every_request_is_answered() -> None:
    mini = MiniVllm()
    side = WorkerSide(copier=None, clock=mini.clock, copy_budget_s=1.0, off="no memory")
    mini.workers = [WorkerWall(side, clock=mini.clock, say=mini.said.append)]
    fill(mini, range(6))
    assert mini.side.off_reason == "no memory"
    assert mini.said == ["hostcache: the tier is off: no memory"]
    assert mini.ask(talk(0, 8)).answer == cold(talk(0, 8))
    mini.at_rest()


@pytest.mark.parametrize("when", range(8))
def test_a_request_that_is_aborted_at_any_point_leaves_nothing_behind(when: int) -> None:
    mini = MiniVllm(page_s=0.01)
    fill(mini, range(6))
    request = mini.add(talk(0, 8))
    for _ in range(when):
        mini.step()
    if request.request_id in mini.requests:
        mini.abort(request)
    mini.run()
    mini.at_rest()
    assert mini.side.accounting.open_accounts == 0


def test_several_requests_for_one_prefix_make_one_copy() -> None:
    mini = MiniVllm(blocks=40, page_s=0.01)
    fill(mini, range(10))
    several = [mini.add([*talk(0, 8), name]) for name in range(3)]
    mini.run()
    assert mini.side.tier.stats().counters.restores == 1
    assert [request.answer for request in several] == [cold([*talk(0, 8), name]) for name in range(3)]
    mini.at_rest()


def test_a_page_that_stays_in_another_block_is_not_taken_for_gone() -> None:
    mini = MiniVllm(blocks=40, chunk=40)
    twice = [mini.add([0] * (4 * BLOCK)), mini.add([0] * (4 * BLOCK))]  # the last token is always computed, so that
    mini.run()  # the second request has its last block to itself
    assert [request.cached for request in twice] == [0, 3 * BLOCK]
    for name in range(1, 60):
        mini.ask(talk(name, 1))
        known, there = mini.on_device()
        assert known == there
    mini.at_rest()


def test_preempted_requests_are_restored_and_counted_apart() -> None:
    mini = MiniVllm(blocks=20, seqs=6)
    asked = [mini.add(talk(name, 3), 24) for name in range(6)]
    mini.run()
    assert sum(request.num_preemptions for request in asked) > 0
    assert [request.answer for request in asked] == [cold(talk(name, 3), 24) for name in range(6)]
    stats = mini.side.accounting.stats()
    assert stats.recovery_host_tokens + stats.recovery_device_tokens > 0
    assert stats.prompt_tokens == 6 * len(talk(0, 3))
    mini.at_rest()
    assert mini.side.counters.evicted_pages == mini.side.counters.saved_pages == mini.left > 0


def test_a_prompt_prefilled_in_many_chunks_is_restored_to_its_last_full_block() -> None:
    mini = MiniVllm(blocks=40, chunk=6, host_pages=200)
    long = [*range(1, 100), 7]
    mini.ask(long)
    fill(mini, range(100, 110))
    assert mini.ask(long).cached == (len(long) - 1) // BLOCK * BLOCK


def test_a_reset_of_the_pool_forgets_every_copy_unless_the_weights_are_known_to_be_the_same() -> None:
    for keep in (False, True):
        mini = MiniVllm(keep_on_reset=keep)
        fill(mini, range(6))
        assert mini.pool.reset_prefix_cache()
        assert (mini.ask(talk(0, 8)).cached == 8 * BLOCK) is keep
        mini.at_rest()


def test_a_reset_of_the_connector_is_refused_while_a_request_waits_for_a_copy() -> None:
    mini = MiniVllm(page_s=0.01)
    fill(mini, range(6))
    mini.add(talk(0, 8))
    mini.step()
    assert not mini.wall.reset()
    mini.run()
    assert mini.wall.reset()
    fill(mini, range(1, 6))
    assert mini.side.tier.stats().resident_pages > 0
    mini.at_rest()


def test_another_salt_finds_nothing() -> None:
    mini = MiniVllm()
    fill(mini, range(6))
    assert mini.ask(talk(0, 8), salt=b"other").cached == 0


def test_the_books_agree_with_what_was_served() -> None:
    mini = MiniVllm()
    asked = [mini.ask(talk(name, 8)) for name in [*range(6), *range(6)]]
    stats = mini.side.accounting.stats()
    assert stats.device_tokens + stats.host_tokens == sum(request.cached or 0 for request in asked)
    assert stats.host_tokens == mini.side.tier.stats().counters.restore_pages * BLOCK


def test_foreign_bytes_would_be_noticed() -> None:
    mini = MiniVllm()
    fill(mini, range(6))
    mini.memories[0].host[:] = mini.memories[0].host[::-1]
    with pytest.raises(ForeignBytes):
        mini.ask(talk(0, 8))


class AnyOrder(RuleBasedStateMachine):
    """Requests, aborts, resets, faults and mistakes of ours in any order: every byte read is right, every answer cold,
    nothing stays."""

    @initialize(blocks=st.integers(14, 30), host=st.integers(1, 60), chunk=st.integers(3, 20), seqs=st.integers(1, 5),
                mode=st.sampled_from([Mode.ON_PRESSURE, Mode.ON_EVICT, Mode.ON_RETAIN]), ranks=st.integers(1, 2),
                page_s=st.sampled_from([0.0001, 0.004, 0.03]), budget=st.sampled_from([0.05, 5.0]),
                job=st.integers(1, 8), keep=st.booleans())
    def start(self, blocks: int, host: int, chunk: int, seqs: int, mode: Mode, ranks: int, page_s: float,
              budget: float, job: int, keep: bool) -> None:
        self.planned: list[FaultAction] = []
        self.stuck: list[Hold | Wedge] = []
        self.trap = Trap()
        self.mini = MiniVllm(blocks=blocks, host_pages=host, chunk=chunk, seqs=seqs, mode=mode, ranks=ranks,
                             faults=[self.fault] * ranks, page_s=page_s, copy_budget_s=budget, restore_budget_s=budget,
                             max_job_pages=job, keep_on_reset=keep,
                             scheduler=mistaken(SchedulerSide, self.trap, OF_THE_SCHEDULER),
                             worker=mistaken(WorkerSide, self.trap, OF_THE_WORKER))
        self.talks: list[list[int]] = [[1]]
        self.asked: list[tuple[Request, list[int], int]] = []

    def fault(self, job: CopyJob) -> FaultAction | None:
        if not self.planned:
            return None
        action = self.planned.pop(0)
        if isinstance(action, Hold | Wedge):
            self.stuck.append(action)
        return action

    @rule(at=st.integers(0, 50), cut=st.integers(0, 30), more=st.integers(1, 12), word=st.integers(0, 3),
          output=st.integers(1, 9))
    def ask(self, at: int, cut: int, more: int, word: int, output: int) -> None:
        before = self.talks[at % len(self.talks)]
        tokens = [*(before[: len(before) - cut] if cut < len(before) else before)[:30], *[word] * more]
        free = len(self.mini.pool.blocks) - 1 - self.mini.wall.late_blocks
        if -(-(len(tokens) + output) // BLOCK) > free:
            return
        self.asked.append((self.mini.add(tokens, output), tokens, output))
        self.talks = [*self.talks[-9:], tokens]

    @rule(count=st.integers(1, 12))
    def go_on(self, count: int) -> None:
        for _ in range(count):
            self.mini.step()

    @precondition(lambda self: self.mini.requests)
    @rule(at=st.integers(0, 9))
    def abort(self, at: int) -> None:
        live = [r for r in self.mini.requests.values() if not r.status.name.startswith("FINISHED")]
        if live:
            self.mini.abort(live[at % len(live)])

    @rule(kind=st.sampled_from(["fail", "delay", "hold", "wedge"]), pages=st.integers(0, 4))
    def go_wrong(self, kind: str, pages: int) -> None:
        if len(self.stuck) + len(self.planned) < 1:
            made: dict[str, FaultAction] = {"fail": Fail(after_pages=pages), "delay": Delay(seconds=0.08),
                                            "hold": Hold(), "wedge": Wedge()}
            self.planned.append(made[kind])

    @precondition(lambda self: self.trap.name is None)
    @rule(name=st.sampled_from([*OF_THE_SCHEDULER, *OF_THE_WORKER]), passes=st.integers(0, 9), late=st.booleans(),
          now=st.integers(0, 9))
    def make_a_mistake(self, name: str, passes: int, late: bool, now: int) -> None:
        if not now:
            self.trap.set(name, passes=passes, done_first=late)

    @precondition(lambda self: self.stuck)
    @rule()
    def release(self) -> None:
        self.stuck.pop().release()

    @rule(whole=st.booleans())
    def reset(self, whole: bool) -> None:
        if self.mini.pool.reset_prefix_cache() and whole:
            self.mini.wall.reset()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "mini") and self.mini.wall.side is not None:
            self.mini.side.check()

    def teardown(self) -> None:
        if not hasattr(self, "mini"):
            return
        self.planned.clear()
        self.trap.name = None
        for stuck in self.stuck:
            stuck.release()
        for _ in range(3):
            self.mini.step()
        self.mini.run()
        for _ in range(30):
            self.mini.step()
        self.mini.run()
        for request, tokens, output in self.asked:
            if request.status.name == "FINISHED_LENGTH_CAPPED":
                assert request.answer == cold(tokens, output)
        self.mini.at_rest()
        if self.mini.wall.side is not None:
            counters = self.mini.side.counters
            assert counters.evicted_pages == counters.saved_pages + counters.lost_pages
            assert self.mini.side.accounting.open_accounts == 0


AnyOrder.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrder = AnyOrder.TestCase
