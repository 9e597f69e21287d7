"""How a page left: what the history's notes mean. A note packs a departure and the tick it happened at."""

from __future__ import annotations

from enum import IntEnum

from hostcache.tier.eviction import Rule
from hostcache.tier.reasons import Reason


class Departure(IntEnum):
    DISPLACED = 1
    """evicted from the host to make room"""
    KEPT_OUT = 2
    """never written: the host kept what it had"""
    NOT_WRITTEN = 3
    OPTED_OUT = 4
    FAILED = 5

    @property
    def reason(self) -> Reason:
        return _REASONS[self]

    @property
    def rule(self) -> Rule | None:
        """The rule that is to blame, if one is."""
        return _RULES.get(self)


_DEPARTURES = dict(enumerate(Departure, start=1))
_REASONS = {
    Departure.DISPLACED: Reason.EVICTED,
    Departure.KEPT_OUT: Reason.NOT_WRITTEN,
    Departure.NOT_WRITTEN: Reason.NOT_WRITTEN,
    Departure.OPTED_OUT: Reason.OPTED_OUT,
    Departure.FAILED: Reason.FAILED,
}
_RULES = {Departure.DISPLACED: Rule.DISPLACE, Departure.KEPT_OUT: Rule.KEEP}


def write_note(departure: Departure, tick: int) -> int:
    return tick << 3 | departure


def read_note(note: int) -> tuple[Departure, int]:
    return _DEPARTURES[note & 7], note >> 3
