"""FramePool against a set of free frames, under any order of calls."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hostcache.errors import InvariantBroken
from hostcache.tier.pool import FramePool


def runs(frames: set[int]) -> int:
    return sum(frame - 1 not in frames for frame in frames)


class AgainstASet(RuleBasedStateMachine):
    @initialize(total=st.integers(0, 70))
    def start(self, total: int) -> None:
        self.pool = FramePool(total)
        self.free = set(range(total))
        self.taken: list[int] = []

    @rule(share=st.floats(0, 1), data=st.data())
    def take(self, share: float, data: st.DataObject) -> None:
        count = int(share * len(self.free))
        after = data.draw(st.one_of(st.none(), st.sampled_from(self.taken))) if self.taken else None
        frames = self.pool.take(count, after).tolist()
        assert len(set(frames)) == len(frames) == count
        assert set(frames) <= self.free
        if after is not None and count:
            behind = next((n for n in range(count + 1) if after + 1 + n not in self.free), count)
            assert frames[:behind] == list(range(after + 1, after + 1 + behind))
        self.free -= set(frames)
        self.taken += frames

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(self.taken), unique=True))
        self.pool.give_back(np.array(some, dtype=np.int64))
        self.free |= set(some)
        self.taken = [frame for frame in self.taken if frame not in set(some)]

    @rule(more=st.integers(1, 9))
    def ask_for_too_many(self, more: int) -> None:
        with pytest.raises(ValueError, match="are free"):
            self.pool.take(len(self.free) + more)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check(np.array(self.taken, dtype=np.int64))
        assert self.pool.free == len(self.free)

    @precondition(lambda self: hasattr(self, "pool"))
    @rule()
    def everything_left_can_be_taken_in_as_few_runs_as_there_are(self) -> None:
        frames = self.pool.take(self.pool.free)
        assert set(frames.tolist()) == self.free
        assert (np.diff(frames) != 1).sum() + bool(len(frames)) <= 2 * runs(self.free)
        self.pool.give_back(frames)


AgainstASet.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestAgainstASet = AgainstASet.TestCase


@given(st.permutations(range(24)), st.integers(1, 24))
def test_frames_given_back_in_any_order_join_to_one_run(order: list[int], share: int) -> None:
    pool = FramePool(24)
    pool.take(24)
    for at in range(0, 24, share):
        pool.give_back(np.array(order[at : at + share], dtype=np.int64))
        pool.check()
    assert pool.take(24).tolist() == list(range(24))


def test_a_frame_that_is_lost_or_held_twice_or_free_and_held_is_noticed() -> None:
    pool = FramePool(8)
    taken = pool.take(3)
    pool.check(taken)
    free = 7 if 7 not in taken else 0
    for wrong in (taken[:2], [*taken, taken[0]], [*taken[:2], free], [*taken, 8], [*taken[:2], taken[0]]):
        with pytest.raises(InvariantBroken, match="free or taken"):
            pool.check(np.array(wrong, dtype=np.int64))


def test_a_conversation_that_grows_stays_in_one_run_while_another_grows_too() -> None:
    pool = FramePool(256)
    ends: dict[str, int] = {}
    places: dict[str, list[int]] = {"a": [], "b": []}
    for _ in range(10):
        for name, frames in places.items():
            frames.extend(pool.take(5, ends.get(name)).tolist())
            ends[name] = frames[-1]
    for frames in places.values():
        assert frames == list(range(frames[0], frames[0] + 50))


def test_a_short_request_takes_the_tightest_hole_and_leaves_the_long_run_whole() -> None:
    pool = FramePool(40)
    pool.take(40)
    pool.give_back(np.array([3, 4, 5, 6, *range(20, 30)], dtype=np.int64))
    assert pool.take(3).tolist() == [3, 4, 5]
    assert pool.take(10).tolist() == list(range(20, 30))


def test_a_pool_of_nothing_answers_for_nothing() -> None:
    pool = FramePool(0)
    assert len(pool.take(0)) == 0
    with pytest.raises(ValueError, match="asked for 1 frames, 0 of 0"):
        pool.take(1)
    pool.check()
