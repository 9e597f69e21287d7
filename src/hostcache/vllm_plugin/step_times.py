"""What the plugin costs the scheduler, step by step, over the last steps that computed something. Reads no clock.

    own time    all that our calls took from the end of one step's planning to the end of the next one's
    interval    from one planning to the next, while there were requests all the time
    requests    those that the step computed something for
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

KEPT = 4096
"""Steps."""

QUANTILES = (0.5, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Seconds by quantile; of no step at all, 0."""

    own_s: dict[float, float]
    interval_s: dict[float, float]
    requests_peak: int


class _Ring:
    """The last KEPT values."""

    def __init__(self) -> None:
        self._values: npt.NDArray[np.float64] = np.zeros(KEPT)
        self._count = 0

    def add(self, value: float) -> None:
        self._values[self._count % KEPT] = value
        self._count += 1

    def held(self) -> npt.NDArray[np.float64]:
        return self._values[: self._count]


class StepTimes:
    """`spend` for each call, `step` when a step is planned, `rest` when there is no request left."""

    def __init__(self) -> None:
        self._own, self._interval, self._requests = _Ring(), _Ring(), _Ring()
        self._spent_s = 0.0
        self._last_s: float | None = None
        self.fresh = False
        """Steps were added since `report`."""

    def spend(self, seconds: float) -> None:
        self._spent_s += seconds

    def step(self, now_s: float, requests: int) -> None:
        """One is planned. Without requests nothing is computed in it: it is no step here, and the next has no interval
        before it."""
        spent_s, self._spent_s = self._spent_s, 0.0
        if not requests:
            self._last_s = None
            return
        self._own.add(spent_s)
        self._requests.add(requests)
        if self._last_s is not None:
            self._interval.add(now_s - self._last_s)
        self._last_s = now_s
        self.fresh = True

    def rest(self) -> None:
        self._last_s = None

    def report(self) -> StepReport:
        """Looks through all that is kept: some 0.1 ms, not for every step."""
        self.fresh = False
        requests = self._requests.held()
        return StepReport(own_s=_quantiles(self._own), interval_s=_quantiles(self._interval),
                          requests_peak=int(requests.max()) if len(requests) else 0)


def _quantiles(ring: _Ring) -> dict[float, float]:
    """Of the values themselves: the smallest one that at least this share is not above."""
    held = ring.held()
    if not len(held):
        return dict.fromkeys(QUANTILES, 0.0)
    places = {q: max(0, math.ceil(q * len(held)) - 1) for q in QUANTILES}
    values = np.partition(held, list(places.values()))
    return {q: float(values[place]) for q, place in places.items()}
