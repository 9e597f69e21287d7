from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.copiers.virtual_rig import TORN, VirtualRig

from hostcache.copiers import (
    CopySpeed,
    Delay,
    Fail,
    FaultAction,
    Hold,
    Late,
    Twice,
    VirtualCopier,
    Wedge,
    fault_at,
    random_faults,
)
from hostcache.errors import ConfigError
from hostcache.testing import check_copier
from hostcache.tier.copying import Copier, CopyDone, CopyJob, Direction, Extent, extents

STORE, RESTORE = Direction.STORE, Direction.RESTORE
PATIENCE_S = 1000.0


def job(job_id: int, direction: Direction, pages: int = 1, *, at: int = 0) -> CopyJob:
    return CopyJob(job_id=job_id, direction=direction, extents=extents(range(at, at + pages), range(at, at + pages)))


def drain(copier: VirtualCopier) -> list[CopyDone]:
    told: list[CopyDone] = []
    while copier.wait(PATIENCE_S):
        told += copier.poll()
    return told


def times(dones: list[CopyDone]) -> list[tuple[int, float, float]]:
    """(job, start, end) on the rig's clock, which begins at 100 s."""
    return [(done.job_id, done.started_s - 100.0, done.finished_s - 100.0) for done in dones]


def rig_with(action: FaultAction, number: int = 0, *, lanes: int = 2) -> VirtualRig:
    return VirtualRig(lanes=lanes, fault=fault_at(number, action))


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_the_virtual_copier_keeps_the_copier_contract(lanes: int, jitter: float) -> None:
    """With two lanes a restore does not overtake stores, it passes beside: staged by restores four times as fast."""
    speed = CopySpeed(
        store_bytes_per_s=8e3, restore_bytes_per_s=32e3, submission_s=1e-6, extent_s=1e-6, jitter=jitter
    )
    report = check_copier(lambda: VirtualRig(lanes=lanes, speed=speed))
    assert not report.skipped
    assert len(report.passed) == 19


def test_it_is_a_copier_to_the_type_checker() -> None:
    copier: Copier = VirtualRig().copier
    assert copier.in_flight == 0


# Time


def test_jobs_of_one_lane_follow_each_other_without_a_gap_however_late_they_are_asked_for() -> None:
    rig = VirtualRig()
    for n in range(3):
        rig.copier.submit(job(n, STORE, 2))
    rig.clock.advance(50.0)
    assert times(rig.copier.poll()) == [(0, 0.0, 2.0), (1, 2.0, 4.0), (2, 4.0, 6.0)]


def test_two_lanes_run_side_by_side_and_one_lets_restores_go_first() -> None:
    ends = {}
    for lanes in (1, 2):
        rig = VirtualRig(lanes=lanes)
        rig.copier.submit(job(1, STORE, 2))
        rig.clock.advance(1.0)
        rig.copier.submit(job(2, STORE))
        rig.copier.submit(job(3, RESTORE, 2))
        ends[lanes] = times(drain(rig.copier))
    assert ends[1] == [(1, 0.0, 2.0), (3, 2.0, 2.5), (2, 2.5, 3.5)]
    assert ends[2] == [(3, 1.0, 1.5), (1, 0.0, 2.0), (2, 2.0, 3.0)]


def test_what_is_submitted_in_one_instant_competes_and_can_be_cancelled_until_the_poll() -> None:
    rig = VirtualRig(lanes=1)
    for n, direction in enumerate([STORE, STORE, RESTORE]):
        rig.copier.submit(job(n, direction))
    assert rig.copier.cancel(0)
    assert rig.copier.poll() == []
    assert not rig.copier.cancel(2)
    assert times(drain(rig.copier)) == [(2, 0.0, 0.25), (1, 0.25, 1.25)]


def test_next_due_names_starts_and_ends_and_is_none_when_nothing_will_ever_be_due() -> None:
    rig = VirtualRig()
    assert rig.copier.next_due_s is None
    rig.copier.submit(job(1, STORE))
    assert rig.copier.next_due_s == 100.0
    assert rig.copier.cancel(1)
    assert rig.copier.next_due_s is None
    rig.copier.submit(job(2, STORE))
    rig.copier.poll()
    assert rig.copier.next_due_s == 101.0
    assert rig.copier.wait(PATIENCE_S)
    assert rig.clock.now() == rig.copier.next_due_s == 101.0
    assert rig.copier.poll()
    assert rig.copier.next_due_s is None


def test_wait_moves_the_clock_to_the_next_end_or_by_its_timeout_or_not_at_all() -> None:
    rig = VirtualRig()
    assert not rig.copier.wait(5.0)
    assert rig.clock.now() == 100.0
    rig.copier.submit(job(1, STORE, 3))
    assert not rig.copier.wait(2.0)
    assert rig.clock.now() == 102.0
    assert rig.copier.wait(2.0)
    assert rig.clock.now() == 103.0


def test_the_destination_is_torn_while_it_is_copied_and_the_source_is_read_at_the_end() -> None:
    rig = VirtualRig()
    rig.write_device(0, b"12345678")
    rig.copier.submit(job(1, STORE))
    before = rig.read_host(0)
    rig.copier.poll()
    assert rig.read_host(0) == bytes([TORN]) * 8 != before
    rig.write_device(0, b"abcdefgh")
    assert drain(rig.copier)[0].error is None
    assert rig.read_host(0) == b"abcdefgh"


def test_a_copy_takes_its_fixed_costs_and_its_bytes() -> None:
    speed = CopySpeed(store_bytes_per_s=100.0, restore_bytes_per_s=200.0, submission_s=1.0, extent_s=0.25)
    assert speed.seconds(STORE, 50, 2) == 2.0
    assert speed.seconds(RESTORE, 50, 2) == 1.75
    assert speed.seconds(RESTORE, 0, 0) == 1.0


def test_jitter_stays_in_its_bounds_and_comes_from_the_generator_given() -> None:
    spent: dict[int, list[float]] = {}
    for seed in (1, 1, 2):
        speed = CopySpeed(store_bytes_per_s=8.0, restore_bytes_per_s=8.0, jitter=0.25)
        rig = VirtualRig(speed=speed, seed=seed)
        for n in range(200):
            rig.copier.submit(job(n, STORE))
        took = [done.finished_s - done.started_s for done in drain(rig.copier)]
        assert 0.75 <= min(took) < 0.8
        assert 1.2 < max(took) <= 1.25
        assert spent.setdefault(seed, took) == took
    assert spent[1] != spent[2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"store_bytes_per_s": 0.0},
        {"restore_bytes_per_s": -1.0},
        {"store_bytes_per_s": math.nan},
        {"submission_s": -1e-9},
        {"extent_s": math.inf},
        {"jitter": 1.0},
    ],
)
def test_a_speed_that_cannot_be_is_refused_in_one_line(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as caught:
        CopySpeed(**{"store_bytes_per_s": 1.0, "restore_bytes_per_s": 1.0, **wrong})
    assert str(next(iter(wrong.values()))) in str(caught.value)


def test_three_lanes_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 copy lanes"):
        VirtualRig(lanes=3)


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_backlog_is_when_a_job_submitted_now_does_start(lanes: int) -> None:
    dice = Random(lanes)
    for trial in range(200):
        direction = dice.choice([STORE, RESTORE])
        rig = VirtualRig(lanes=lanes)
        for n in range(dice.randrange(6)):
            rig.copier.submit(job(n, dice.choice([STORE, RESTORE]), dice.randint(1, 5)))
            rig.clock.advance(dice.choice([0.0, 0.5, 3.0]))
            rig.copier.poll()
        expected_s = rig.clock.now() + rig.copier.backlog_s(direction)
        rig.copier.submit(job(99, direction))
        (done,) = [done for done in drain(rig.copier) if done.job_id == 99]
        assert done.started_s == expected_s, f"trial {trial}"


def test_a_backlog_behind_a_wedge_is_what_waits_there() -> None:
    rig = rig_with(Wedge())
    for n in range(3):
        rig.copier.submit(job(n, STORE))
    rig.copier.poll()
    assert rig.copier.backlog_s(STORE) == 3.0
    rig.clock.advance(10.0)
    rig.copier.poll()
    assert rig.copier.backlog_s(STORE) == 2.0
    assert rig.copier.backlog_s(RESTORE) == 0.0


def test_a_lane_that_ended_earlier_than_expected_has_no_backlog() -> None:
    rig = rig_with(Fail())
    rig.copier.submit(job(1, STORE, 5))
    assert rig.copier.wait(0.0)
    assert rig.copier.backlog_s(STORE) == 0.0


# Faults


def test_a_failed_job_says_so_after_the_pages_it_copied_and_in_their_time() -> None:
    rig = rig_with(Fail(error="cable", after_pages=2))
    for page in range(3):
        rig.write_device(page, bytes([page + 1]) * 8)
    rig.copier.submit(CopyJob(job_id=1, direction=STORE, extents=extents([0, 2, 1], [0, 1, 2])))
    (done,) = drain(rig.copier)
    assert (done.error, done.copied_bytes, done.submissions, done.finished_s) == ("cable", 16, 2, 102.0)
    assert [rig.read_host(frame)[0] for frame in range(3)] == [1, 3, TORN]


def test_a_job_that_fails_after_more_pages_than_it_has_copied_them_all() -> None:
    rig = rig_with(Fail(after_pages=9))
    rig.copier.submit(job(1, STORE, 2))
    (done,) = drain(rig.copier)
    assert (done.error, done.copied_bytes, done.submissions) == ("injected fault", 16, 1)


def test_what_a_fault_raises_is_its_jobs_error_in_one_line() -> None:
    def fault(job: CopyJob) -> FaultAction | None:
        if job.job_id == 1:
            raise OSError("no\ncable")
        return None

    rig = VirtualRig(fault=fault)
    for n in (1, 2):
        rig.copier.submit(job(n, STORE))
    told = {done.job_id: done.error for done in drain(rig.copier)}
    assert told == {1: "OSError: no cable", 2: None}


def test_a_delayed_job_moves_no_byte_before_its_time_and_keeps_its_lane_busy() -> None:
    rig = rig_with(Delay(seconds=5.0))
    before = rig.read_host(0)
    for n in (1, 2):
        rig.copier.submit(job(n, STORE))
    assert not rig.copier.wait(4.0)
    assert rig.read_host(0) == before
    assert not rig.copier.cancel(1)
    assert not rig.copier.wait(1.5)
    assert rig.read_host(0) == bytes([TORN]) * 8
    assert times(drain(rig.copier)) == [(1, 0.0, 6.0), (2, 6.0, 7.0)]


def test_a_held_job_lets_others_pass_and_copies_after_its_release() -> None:
    hold = Hold()
    rig = rig_with(hold)
    before = rig.read_host(0)
    rig.copier.submit(job(1, STORE))
    rig.copier.submit(job(2, STORE, at=4))
    assert times(drain(rig.copier)) == [(2, 0.0, 1.0)]
    assert rig.copier.in_flight == 1
    assert rig.copier.stats().held == 1
    assert rig.copier.next_due_s is None
    assert rig.read_host(0) == before
    now_s = rig.clock.now() - 100.0
    rig.copier.submit(job(3, STORE, at=4))
    rig.copier.poll()
    hold.release()
    assert times(drain(rig.copier)) == [(3, now_s, now_s + 1.0), (1, 0.0, now_s + 2.0)]
    assert rig.copier.stats().held == 0


def test_a_hold_released_before_its_job_starts_holds_nothing() -> None:
    hold = Hold()
    hold.release()
    rig = rig_with(hold)
    rig.copier.submit(job(1, STORE))
    rig.clock.advance(50.0)
    assert times(rig.copier.poll()) == [(1, 0.0, 1.0)]


def test_a_release_of_an_idle_lane_starts_its_copy_now() -> None:
    hold = Hold()
    rig = rig_with(hold)
    rig.copier.submit(job(1, STORE))
    assert not rig.copier.wait(7.0)
    hold.release()
    rig.clock.advance(0.5)
    rig.copier.submit(job(2, STORE))
    assert times(drain(rig.copier)) == [(1, 0.0, 8.0), (2, 8.0, 9.0)]


def test_a_release_is_not_felt_before_its_time_by_a_lane_that_was_not_looked_at() -> None:
    hold = Hold()
    rig = rig_with(hold)
    rig.copier.submit(job(1, STORE))
    rig.copier.poll()
    rig.copier.submit(job(2, STORE))
    rig.clock.advance(3.0)
    hold.release()
    assert times(drain(rig.copier)) == [(2, 0.0, 1.0), (1, 0.0, 4.0)]


def test_held_jobs_copy_in_the_order_of_their_release_before_what_waits() -> None:
    first, second = Hold(), Hold()
    rig = VirtualRig(fault=lambda asked: {1: first, 2: second}.get(asked.job_id))
    for n in range(1, 5):
        rig.copier.submit(job(n, STORE))
    rig.copier.poll()
    second.release()
    first.release()
    assert times(drain(rig.copier)) == [(3, 0.0, 1.0), (2, 0.0, 2.0), (1, 0.0, 3.0), (4, 3.0, 4.0)]


def test_a_wedge_released_a_moment_before_its_own_end_ends_no_later() -> None:
    wedge = Wedge(5.0)
    rig = rig_with(wedge)
    rig.copier.submit(job(1, STORE))
    assert not rig.copier.wait(5.5)
    wedge.release()
    assert times(drain(rig.copier)) == [(1, 0.0, 6.0)]


def test_a_wedge_stops_its_lane_amid_the_bytes_for_a_while() -> None:
    rig = rig_with(Wedge(5.0))
    for n, direction in enumerate([RESTORE, RESTORE, STORE], start=1):
        rig.copier.submit(job(n, direction, at=n))
    rig.copier.poll()
    assert rig.read_device(1) == bytes([TORN]) * 8
    assert times(drain(rig.copier)) == [(3, 0.0, 1.0), (1, 0.0, 5.25), (2, 5.25, 5.5)]


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_wedge_for_ever_leaves_its_lane_in_flight_with_nothing_due_until_it_is_released(lanes: int) -> None:
    wedge = Wedge()
    rig = rig_with(wedge, lanes=lanes)
    for n in (1, 2, 3):
        rig.copier.submit(job(n, STORE))
    assert not rig.copier.wait(PATIENCE_S)
    assert rig.copier.in_flight == 3
    assert rig.copier.next_due_s is None
    assert not rig.copier.cancel(1)
    assert rig.copier.cancel(2)
    assert rig.copier.in_flight == 2
    wedge.release()
    assert times(drain(rig.copier)) == [(1, 0.0, PATIENCE_S + 1.0), (3, PATIENCE_S + 1.0, PATIENCE_S + 2.0)]


def test_closing_over_a_wedge_waits_no_longer_than_it_may() -> None:
    wedge = Wedge()
    rig = rig_with(wedge)
    for n in (1, 2):
        rig.copier.submit(job(n, STORE))
    rig.copier.poll()
    assert not rig.copier.close(3.0)
    assert rig.clock.now() == 103.0
    assert (rig.copier.in_flight, rig.copier.stats().cancelled) == (1, 1)
    wedge.release()
    assert rig.copier.close(3.0)
    assert [done.job_id for done in rig.copier.poll()] == [1]


def test_closing_drops_what_was_submitted_in_the_same_instant_and_moves_no_clock() -> None:
    rig = VirtualRig()
    rig.copier.submit(job(1, STORE))
    assert rig.copier.close(3.0)
    assert rig.clock.now() == 100.0
    assert (rig.copier.in_flight, rig.copier.next_due_s, rig.mover.log) == (0, None, [])


def test_closing_ends_what_started_in_its_time_although_nobody_looked() -> None:
    rig = VirtualRig()
    for n in (1, 2, 3):
        rig.copier.submit(job(n, STORE))
    rig.clock.advance(1.5)
    assert rig.copier.close(PATIENCE_S)
    assert times(rig.copier.poll()) == [(1, 0.0, 1.0), (2, 1.0, 2.0)]
    assert rig.clock.now() == 102.0


def test_a_late_report_comes_after_the_copy_and_the_lane_does_not_wait_for_it() -> None:
    rig = rig_with(Late(seconds=5.0))
    rig.write_device(0, b"12345678")
    for n in (1, 2):
        rig.copier.submit(job(n, STORE, at=4 * (n - 1)))
    assert rig.copier.wait(PATIENCE_S)
    assert times(rig.copier.poll()) == [(2, 1.0, 2.0)]
    assert rig.read_host(0) == b"12345678"
    assert rig.copier.in_flight == 1
    assert rig.copier.next_due_s == 106.0
    assert times(drain(rig.copier)) == [(1, 0.0, 1.0)]
    assert rig.clock.now() == 106.0


def test_a_second_report_is_the_first_one_again_and_no_longer_in_flight() -> None:
    rig = rig_with(Twice(after_s=5.0))
    rig.copier.submit(job(1, STORE))
    assert rig.copier.wait(PATIENCE_S)
    first = rig.copier.poll()
    assert rig.copier.in_flight == 0
    assert rig.copier.wait(PATIENCE_S)
    assert rig.clock.now() == 106.0
    assert rig.copier.poll() == first
    assert rig.copier.next_due_s is None
    assert rig.copier.stats().store.jobs == 1


def test_random_faults_come_as_often_as_they_should_and_again_with_the_same_seed() -> None:
    asked = [job(n, STORE, 1 + n % 5) for n in range(20_000)]

    def kinds(seed: int) -> tuple[list[str], list[Hold | Wedge]]:
        stuck: list[Hold | Wedge] = []
        fault = random_faults(
            Random(seed), fail=0.02, delay=0.03, hold=0.04, wedge=0.05, late=0.06, twice=0.07, for_ever=0.5,
            up_to_s=3.0, stuck=stuck.append,
        )  # fmt: skip
        said = []
        for asked_job in asked:
            match fault(asked_job):
                case None:
                    said.append("none")
                case Fail() as fail:
                    assert 0 <= fail.after_pages <= asked_job.pages
                    said.append("fail")
                case Wedge() as wedge:
                    assert wedge.seconds is None or 0.0 <= wedge.seconds <= 3.0
                    said.append("for ever" if wedge.seconds is None else "wedge")
                case Delay(seconds=s) | Late(seconds=s) | Twice(after_s=s) as action:
                    assert 0.0 <= s <= 3.0
                    said.append(f"{type(action).__name__} {s}")
                case Hold():
                    said.append("hold")
        return said, stuck

    said, stuck = kinds(1)
    count = Counter(one.split()[0] for one in said)
    expected = {"fail": 0.02, "Delay": 0.03, "hold": 0.04, "wedge": 0.025, "for": 0.025, "Late": 0.06, "Twice": 0.07}
    assert set(count) == {"none", *expected}
    for kind, share in expected.items():
        assert count[kind] == pytest.approx(share * len(asked), rel=0.15), kind
    assert len(stuck) == count["hold"] + count["wedge"] + count["for"]
    assert kinds(1)[0] == said
    assert kinds(2)[0] != said


def test_without_a_fault_one_number_is_drawn_for_a_job() -> None:
    dice, same = Random(5), Random(5)
    fault = random_faults(dice)
    for n in range(10):
        assert fault(job(n, STORE)) is None
        same.random()
    assert dice.random() == same.random()


@pytest.mark.parametrize("wrong", [{"fail": -0.1}, {"late": 1.1}, {"hold": 0.6, "wedge": 0.6}, {"for_ever": 2.0},
                                   {"up_to_s": math.inf}, {"fail": math.nan}])  # fmt: skip
def test_faults_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        random_faults(Random(0), **wrong)  # type: ignore[arg-type]


# Any order of things

PIECES = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 16), st.integers(1, 4)), max_size=3)
STEPS = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from(Direction), PIECES),
    st.tuples(st.just("advance"), st.sampled_from([0.0, 0.125, 0.5, 1.0, 1.7, 20.0])),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.3, 2.0])),
    st.tuples(st.just("poll")),
    st.tuples(st.just("due")),
    st.tuples(st.just("cancel"), st.integers(0, 40)),
    st.tuples(st.just("release"), st.integers(0, 5)),
)


@dataclass
class Story:
    """What came of a run: the reports with the time at which each was heard, and what was cancelled."""

    heard: list[tuple[float, CopyDone]] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)


def live(steps: list[tuple[object, ...]], seed: int, lanes: int, twice: float) -> Story:
    story = Story()
    stuck: list[Hold | Wedge] = []
    actions: dict[int, FaultAction | None] = {}
    draw = random_faults(
        Random(seed), fail=0.1, delay=0.1, hold=0.1, wedge=0.1, late=0.1, twice=twice, for_ever=0.3, stuck=stuck.append
    )

    def fault(asked: CopyJob) -> FaultAction | None:
        assert asked.job_id not in actions
        actions[asked.job_id] = draw(asked)
        return actions[asked.job_id]

    speed = CopySpeed(store_bytes_per_s=8, restore_bytes_per_s=20, submission_s=0.1, extent_s=0.01, jitter=0.2)
    rig = VirtualRig(lanes=lanes, speed=speed, fault=fault, seed=seed)
    copier, clock = rig.copier, rig.clock
    jobs: dict[int, CopyJob] = {}

    def check() -> None:
        told = {done.job_id for _, done in story.heard}
        assert copier.in_flight == len(jobs) - len(story.cancelled) - len(told)
        assert rig.guards_intact()

    def poll() -> None:
        story.heard += [(clock.now(), done) for done in copier.poll()]
        due_s = copier.next_due_s
        assert due_s is None or due_s > clock.now()

    for step in steps:
        match step:
            case ("submit", Direction() as direction, list(pieces)):
                number = len(jobs)
                jobs[number] = CopyJob(
                    job_id=number,
                    direction=direction,
                    extents=tuple(Extent(device_page=d, frame=f, pages=p) for d, f, p in pieces),
                )
                copier.submit(jobs[number])
            case ("advance", float(seconds)):
                clock.advance(seconds)
            case ("wait", float(seconds)):
                before_s = clock.now()
                news = copier.wait(seconds)
                assert clock.now() <= before_s + seconds + 1e-9
                count = len(story.heard)
                poll()
                assert news == (len(story.heard) > count)
            case ("due",):
                if (due_s := copier.next_due_s) is not None:
                    clock.advance(max(0.0, due_s - clock.now()))
                    poll()
            case ("cancel", int(number)):
                if copier.cancel(number):
                    assert number not in actions
                    story.cancelled.add(number)
            case ("release", int(number)):
                if number < len(stuck):
                    stuck[number].release()
            case _:
                poll()
        check()

    while (due_s := copier.next_due_s) is not None:
        clock.advance(max(0.0, due_s - clock.now()))
        poll()
        check()
    assert copier.in_flight == 0 or any(not one.released for one in stuck)
    while any(not one.released for one in stuck):
        for one in list(stuck):
            one.release()
        while copier.wait(PATIENCE_S):
            poll()
            check()
    assert copier.in_flight == 0
    assert copier.close(0.0)

    reports = Counter(done.job_id for _, done in story.heard)
    finished = {asked.job_id: pages for what, asked, pages in rig.mover.log if what == "finish"}
    assert set(reports) == set(finished) == set(actions) == set(jobs) - story.cancelled
    once: dict[int, CopyDone] = {}
    last_due_s = 0.0
    for heard_s, done in story.heard:
        action, asked = actions[done.job_id], jobs[done.job_id]
        due_s = done.finished_s
        if isinstance(action, Late):
            due_s += action.seconds
        elif isinstance(action, Twice) and done.job_id in once:
            due_s += action.after_s
        assert last_due_s <= due_s <= heard_s
        last_due_s = due_s
        assert reports[done.job_id] == (2 if isinstance(action, Twice) else 1)
        assert once.setdefault(done.job_id, done) == done
        assert done.submitted_s <= done.started_s <= done.finished_s <= heard_s
        pages = min(asked.pages, action.after_pages) if isinstance(action, Fail) else asked.pages
        assert finished[done.job_id] == pages
        assert done.copied_bytes == pages * rig.page_bytes
        assert (done.error is None) == (not isinstance(action, Fail))
        if not isinstance(action, Fail):
            assert done.submissions == len(asked.extents)
    stats = copier.stats()
    assert stats.cancelled == len(story.cancelled)
    for direction, said in ((STORE, stats.store), (RESTORE, stats.restore)):
        of_it = [done for done in once.values() if done.direction is direction]
        assert said.jobs == len(of_it)
        assert said.failed == sum(done.error is not None for done in of_it)
        assert said.copied_bytes == sum(done.copied_bytes for done in of_it)
        assert said.submissions == sum(done.submissions for done in of_it)
    for sides in ([STORE, RESTORE],) if lanes == 1 else ([STORE], [RESTORE]):
        calls = [(what, asked.job_id) for what, asked, _ in rig.mover.log if asked.direction in sides]
        assert [what for what, _ in calls] == ["begin", "finish"] * (len(calls) // 2)
        assert [number for _, number in calls[::2]] == [number for _, number in calls[1::2]]
        in_lane = [once[number] for what, number in calls if what == "finish"]
        for first, after in pairwise(in_lane):
            free_s = after.finished_s if isinstance(actions[after.job_id], Hold) else after.started_s
            assert first.finished_s <= free_s
    return story


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(STEPS, max_size=60),
    seed=st.integers(0, 2**32),
    lanes=st.sampled_from([1, 2]),
    twice=st.sampled_from([0.0, 0.1]),
)
def test_any_order_of_calls_and_faults_keeps_every_promise_and_a_seed_repeats_it(
    steps: list[tuple[object, ...]], seed: int, lanes: int, twice: float
) -> None:
    assert live(steps, seed, lanes, twice) == live(steps, seed, lanes, twice)


CALLS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 6), st.sampled_from(Direction), st.integers(0, 9)),
        st.tuples(st.integers(0, 6), st.just(None), st.integers(0, 15)),
    ),
    max_size=30,
)
"""Whole seconds after the call before; then a direction and pages, or None and the number of the job to cancel."""


def by_the_book(jobs: dict[int, tuple[float, Direction, int]], lanes: int) -> dict[int, tuple[float, float]]:
    """Start and end of each job, given when it was submitted: whenever a lane is free, its oldest, restores first."""
    ends: dict[int, tuple[float, float]] = {}
    for sides in ([RESTORE, STORE],) if lanes == 1 else ([RESTORE], [STORE]):
        left = {number: job for number, job in jobs.items() if job[1] in sides}
        free_s = 0.0
        while left:
            start_s = max(free_s, min(submitted_s for submitted_s, _, _ in left.values()))
            number = min(
                (number for number, (submitted_s, _, _) in left.items() if submitted_s <= start_s),
                key=lambda number: (sides.index(jobs[number][1]), number),
            )
            _, direction, pages = left.pop(number)
            free_s = start_s + pages * (0.25 if direction is RESTORE else 1.0)
            ends[number] = (start_s, free_s)
    return ends


@settings(max_examples=200, deadline=None)
@given(calls=CALLS, polls=st.lists(st.booleans(), min_size=30, max_size=30), lanes=st.sampled_from([1, 2]))
def test_without_faults_times_and_cancels_are_those_of_the_book_whenever_it_is_polled(
    calls: list[tuple[int, Direction | None, int]], polls: list[bool], lanes: int
) -> None:
    rig = VirtualRig(lanes=lanes)
    told: list[CopyDone] = []
    kept: dict[int, tuple[float, Direction, int]] = {}
    for number, (gap, direction, what) in enumerate(calls):
        if gap and polls[number]:
            rig.clock.advance(0.375)
            told += rig.copier.poll()
            rig.clock.advance(gap - 0.375)
        else:
            rig.clock.advance(gap)
        if direction is not None:
            rig.copier.submit(job(number, direction, what))
            kept[number] = (rig.clock.now(), direction, what)
        else:
            waits = what in kept and by_the_book(kept, lanes)[what][0] >= rig.clock.now()
            assert rig.copier.cancel(what) == waits
            if waits:
                del kept[what]
    told += drain(rig.copier)
    assert {done.job_id: (done.started_s, done.finished_s) for done in told} == by_the_book(kept, lanes)
    finishes = [done.finished_s for done in told]
    assert finishes == sorted(finishes)
    assert rig.copier.stats().store.busy_s == sum(pages for _, direction, pages in kept.values() if direction is STORE)
