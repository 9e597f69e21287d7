"""Events happen in order of time, or in the order that a chooser makes."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from hostcache.clock import VirtualClock
from hostcache.sim.loop import EventLog, Loop


class Scripted:
    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = list(choices)

    def choose(self, options: int) -> int:
        return self._choices.pop(0) % options if self._choices else 0


def loop_of(happened: list[str], *, choices: Sequence[int] | None = None, width: int = 1) -> Loop:
    clock = VirtualClock()
    loop = Loop(clock, EventLog(keep=True), chooser=None if choices is None else Scripted(choices), width=width)
    for due_s, name in ((2.0, "late"), (1.0, "first"), (1.0, "second"), (3.0, "last")):
        loop.at(due_s, name, lambda name=name: happened.append(f"{name} at {clock.now():g}"))  # type: ignore[misc]
    return loop


def test_events_happen_by_due_time_and_then_in_order_of_scheduling() -> None:
    happened: list[str] = []
    loop_of(happened).run()
    assert happened == ["first at 1", "second at 1", "late at 2", "last at 3"]


def test_an_event_chosen_early_moves_the_clock_and_those_it_overtook_happen_late() -> None:
    happened: list[str] = []
    loop_of(happened, choices=[2, 1], width=3).run()
    assert happened == ["late at 2", "second at 2", "first at 2", "last at 3"]


def test_a_cancelled_event_does_not_happen_and_is_not_counted() -> None:
    happened: list[str] = []
    loop = loop_of(happened)
    loop.at(1.5, "cancelled", lambda: happened.append("cancelled")).cancelled = True
    loop.run()
    assert "cancelled" not in happened
    assert loop.log.events == 4


def test_a_run_stops_before_the_first_event_after_its_end_and_after_so_many_events() -> None:
    happened: list[str] = []
    loop = loop_of(happened)
    loop.run(until_s=1.5)
    assert happened == ["first at 1", "second at 1"]
    assert loop.clock.now() == 1.0
    loop.run(events=1)
    assert len(happened) == 3
    loop.run()
    assert not loop.step()
    assert len(happened) == 4


def test_an_event_scheduled_in_the_past_is_due_at_once() -> None:
    happened: list[str] = []
    loop = loop_of(happened)
    loop.run(until_s=2.0)
    loop.at(0.5, "overdue", lambda: happened.append("overdue"))
    loop.run(events=1)
    assert happened[-1] == "overdue"
    assert loop.clock.now() == 2.0


@given(choices=st.lists(st.integers(0, 5), max_size=6), width=st.integers(1, 6))
def test_every_event_happens_once_in_any_order_and_time_never_goes_back(choices: list[int], width: int) -> None:
    happened: list[str] = []
    loop = loop_of(happened, choices=choices, width=width)
    loop.run()
    assert sorted(each.split()[0] for each in happened) == ["first", "last", "late", "second"]
    times = [float(each.split()[-1]) for each in happened]
    assert times == sorted(times)
    again: list[str] = []
    other = loop_of(again, choices=choices, width=width)
    other.run()
    assert again == happened
    assert other.log.digest == loop.log.digest
