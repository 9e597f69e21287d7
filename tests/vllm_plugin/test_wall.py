"""Mistakes of our own, in every call that vLLM makes: the tier ends with one line, every request is answered as if it
had never been there, and nothing stays held."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm_plugin.mini import MiniVllm, Request, cold
from tests.vllm_plugin.mistakes import OF_THE_SCHEDULER, OF_THE_WORKER, Trap, mistaken

from hostcache.clock import VirtualClock
from hostcache.copiers import Hold, VirtualCopier, fault_at
from hostcache.tier import CopyDone, Direction, HostCache, Match, Reason, Refused, Reservation
from hostcache.vllm_plugin.scheduler_side import SchedulerSide
from hostcache.vllm_plugin.worker_side import WorkerSide

BLOCK = 4
LINE = "a bug: RuntimeError: nobody thought of this; please report it"


def talk(name: int, pages: int = 8) -> list[int]:
    return [*[name] * (pages * BLOCK), name]


def warm(mini: MiniVllm) -> None:
    for name in range(6):
        mini.ask(talk(name))


def ask_all(mini: MiniVllm) -> None:
    """Two of each: the second one finds the first one's blocks on the device."""
    asked = [(mini.add(tokens), tokens) for name in range(6) for tokens in (talk(name), [*talk(name), 9])]
    mini.run()
    for request, tokens in asked:
        assert request.answer == cold(tokens)


@pytest.mark.parametrize("done_first", [False, True])
@pytest.mark.parametrize("passes", [0, 1, 4])
@pytest.mark.parametrize("name", OF_THE_SCHEDULER)
def test_a_mistake_beside_the_scheduler_ends_the_tier_and_no_request(name: str, passes: int, done_first: bool) -> None:
    trap = Trap()
    mini = MiniVllm(page_s=0.005, ranks=1 + passes % 2, scheduler=mistaken(SchedulerSide, trap, OF_THE_SCHEDULER))
    warm(mini)
    trap.set(name, passes=passes, done_first=done_first)
    ask_all(mini)
    assert trap.sprung
    assert mini.wall.why_off == LINE
    assert mini.said == [f"hostcache: the tier is off: {LINE}"]
    mini.at_rest()
    ask_all(mini)
    mini.at_rest()


@pytest.mark.parametrize("done_first", [False, True])
@pytest.mark.parametrize("passes", [0, 1, 4])
@pytest.mark.parametrize("name", OF_THE_WORKER)
def test_a_mistake_in_a_worker_ends_the_tier_and_no_request(name: str, passes: int, done_first: bool) -> None:
    trap = Trap()
    mini = MiniVllm(page_s=0.005, ranks=1 + passes % 2, worker=mistaken(WorkerSide, trap, OF_THE_WORKER))
    warm(mini)
    trap.set(name, passes=passes, done_first=done_first)
    ask_all(mini)
    assert trap.sprung
    assert mini.side.off_reason == LINE
    assert mini.said == [f"hostcache: this rank runs without the tier: {LINE}", f"hostcache: the tier is off: {LINE}"]
    mini.at_rest()
    before = mini.side.accounting.stats().recomputed.get(Reason.TIER_OFF, 0)
    ask_all(mini)
    assert mini.side.accounting.stats().recomputed.get(Reason.TIER_OFF, 0) > before
    mini.at_rest()


def test_a_mistake_when_the_pool_is_bound_is_no_obstacle() -> None:
    trap = Trap()
    trap.set("bind")
    mini = MiniVllm(scheduler=mistaken(SchedulerSide, trap, ["bind"]))
    ask_all(mini)
    assert mini.wall.why_off == LINE
    mini.at_rest()


@pytest.mark.parametrize("name", ["pool_reset", "reset"])
def test_a_mistake_in_a_reset_leaves_no_copy_that_could_be_found(name: str) -> None:
    trap = Trap()
    mini = MiniVllm(scheduler=mistaken(SchedulerSide, trap, ["pool_reset", "reset"]))
    warm(mini)
    trap.set(name)
    assert mini.pool.reset_prefix_cache()
    assert mini.wall.reset()
    assert mini.wall.why_off == LINE
    assert mini.ask(talk(0)).cached == 0
    mini.at_rest()


def test_asking_whether_there_is_work_left_may_fail_too() -> None:
    class Mistaken(SchedulerSide):
        @property
        def busy(self) -> bool:
            raise RuntimeError("nobody thought of this")

    mini = MiniVllm(scheduler=Mistaken)
    ask_all(mini)
    assert mini.wall.why_off == LINE
    mini.at_rest()


class RefusesAgain:
    """A tier that gives a reservation once."""

    def __init__(self, tier: HostCache) -> None:
        self._tier = tier
        self._given = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def reserve(self, match: Match) -> Reservation | Refused:
        if self._given:
            return Refused(reason=Reason.NO_ROOM)
        self._given = True
        return self._tier.reserve(match)


def test_when_less_is_taken_than_was_offered_and_that_cannot_be_had_the_load_is_told_as_failed() -> None:
    mini = MiniVllm()
    warm(mini)
    mini.side.tier = RefusesAgain(mini.side.tier)  # type: ignore[assignment]
    request = Request("less", talk(0), 3)
    assert mini.wall.match(request, 0) == 8 * BLOCK
    mini.wall.allocated(request, [1, 2, 3], 3 * BLOCK)
    orders = mini.wall.build(SimpleNamespace(
        num_scheduled_tokens={}, total_num_scheduled_tokens=0, preempted_req_ids=()))
    assert (orders.loads, orders.unkept) == ((), ("less",))
    worker = mini.workers[0]
    worker.before_forward(orders)
    worker.after_forward(orders)
    assert worker.finished() == ({"less"}, {"less"})
    assert worker.finished() == (set(), set())
    assert mini.wall.match(request, 0) == 0, "it is not offered another"
    mini.wall.finished(request, aborted=True)
    assert mini.wall.why_off is None
    mini.at_rest()


def loading(mini: MiniVllm) -> Request:
    """A request that waits for its load, which was ordered and has not ended."""
    warm(mini)
    request = mini.add(talk(0))
    while request.status.name != "LOADING":
        mini.step()
    return request


def test_a_load_on_its_way_when_the_scheduler_side_fails_still_arrives() -> None:
    trap = Trap()
    mini = MiniVllm(page_s=0.02, scheduler=mistaken(SchedulerSide, trap, ["build"]))
    request = loading(mini)
    trap.set("build")
    mini.run()
    assert (request.answer, request.cached) == (cold(talk(0)), 8 * BLOCK)
    assert mini.wall.why_off == LINE
    mini.at_rest()


def test_blocks_of_a_load_that_cannot_be_stopped_stay_out_of_the_pool_when_the_scheduler_side_has_failed() -> None:
    trap, hold = Trap(), Hold()
    mini = MiniVllm(restore_budget_s=0.1, faults=[fault_at(0, hold, direction=Direction.RESTORE)],
                    scheduler=mistaken(SchedulerSide, trap, ["match"]))
    loading(mini)
    trap.set("match")
    ask_all(mini)
    assert mini.wall.why_off == LINE
    assert mini.wall.late_blocks == 8 == len(mini.pool.blocks) - 1 - len(mini.pool.queue)
    hold.release()
    mini.step()
    mini.step()
    mini.at_rest()


def test_blocks_of_a_load_that_cannot_be_stopped_stay_out_of_the_pool_when_the_worker_side_has_failed() -> None:
    trap, hold = Trap(), Hold()
    mini = MiniVllm(restore_budget_s=100.0, faults=[fault_at(0, hold, direction=Direction.RESTORE)],
                    worker=mistaken(WorkerSide, trap, ["finished"]))
    request = loading(mini)
    trap.set("finished")
    mini.run()
    assert request.answer == cold(talk(0))
    assert mini.wall.late_blocks == 8 == len(mini.pool.blocks) - 1 - len(mini.pool.queue)
    ask_all(mini)
    hold.release()
    mini.step()
    mini.step()
    mini.at_rest()


def test_a_request_that_leaves_while_its_load_fails_by_a_mistake_gives_its_blocks_back() -> None:
    trap = Trap()
    mini = MiniVllm(page_s=0.02, worker=mistaken(WorkerSide, trap, ["finished"]))
    request = loading(mini)
    mini.abort(request)
    trap.set("finished")
    mini.run()
    mini.at_rest()


def test_a_copier_that_raises_whatever_it_is_asked_keeps_no_request_waiting() -> None:
    class Broken(VirtualCopier):
        broken = False

        def poll(self) -> list[CopyDone]:
            if self.broken:
                raise RuntimeError("nobody thought of this")
            return super().poll()

        def cancel(self, job_id: int) -> bool:
            if self.broken:
                raise RuntimeError("nor of this")
            return super().cancel(job_id)

        def close(self, timeout_s: float) -> bool:
            if self.broken:
                raise RuntimeError("nor of that")
            return super().close(timeout_s)

    mini = MiniVllm(page_s=0.02, copier=Broken)
    request = loading(mini)
    Broken.broken = True
    mini.run()
    assert request.answer == cold(talk(0))
    assert mini.side.off_reason == LINE
    assert mini.wall.late_blocks == 8, "nobody can tell whether that copy still writes"
    ask_all(mini)


def test_after_a_mistake_the_gauges_are_at_zero_and_the_counters_stand() -> None:
    trap = Trap()
    mini = MiniVllm(scheduler=mistaken(SchedulerSide, trap, ["match"]))
    warm(mini)
    assert mini.shown["hostcache_resident_bytes"] > 0
    prompts = mini.shown["hostcache_prompt_tokens"]
    trap.set("match")
    ask_all(mini)
    assert mini.shown["hostcache_resident_bytes"] == mini.shown["hostcache_quota_bytes"] == 0
    assert mini.shown["hostcache_prompt_tokens"] == prompts


class Ticking(VirtualClock):
    """Each look at it takes a microsecond."""

    def now(self) -> float:
        self.advance(1e-6)
        return super().now()


def test_the_own_time_and_the_distance_of_steps_are_shown() -> None:
    mini = MiniVllm(blocks=100, clock=Ticking())
    for name in range(6):
        mini.add(talk(name), 40)
    mini.run()
    own, distance = (mini.shown[f"hostcache_{name}|0.5"] for name in ("step_seconds", "step_interval_seconds"))
    assert 2e-6 < own < 1e-3
    assert 0.01 < distance < 0.011
    assert mini.shown["hostcache_step_seconds|0.99"] >= own
    assert mini.shown["hostcache_running_requests_peak"] == 4
