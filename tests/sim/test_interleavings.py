"""Hypothesis makes the choices of a run: which event is next, out of those that could be."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostcache.sim.drill import run
from hostcache.sim.mischief import draw


class Drawn:
    """A chooser whose choices are Hypothesis's: it shrinks them towards the first candidate."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def choose(self, options: int) -> int:
        return self._data.draw(st.integers(0, options - 1))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
@given(number=st.integers(0, 10_000), data=st.data())
def test_no_order_of_events_breaks_an_invariant(number: int, data: st.DataObject) -> None:
    ran = run(draw(0, number), chooser=Drawn(data), most_events=150)
    assert ran.violation is None, f"run {number}, event {ran.events}: {ran.violation}"
