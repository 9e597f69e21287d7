"""Why a prompt token was computed although it perhaps need not have been. One word, one meaning."""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """Order is the order of reports."""

    NEW = "new"
    PARTIAL_PAGE = "partial_page"
    EVICTED = "evicted"
    NOT_WRITTEN = "not_written"
    NOT_READY = "not_ready"
    DEARER = "dearer"
    LATE = "late"
    FAILED = "failed"
    NO_ROOM = "no_room"
    IDENTITY = "identity"
    OPTED_OUT = "opted_out"
    TOO_SMALL = "too_small"
    TIER_OFF = "tier_off"
    FORGOTTEN = "forgotten"
    ABORTED = "aborted"


OUTSIDE_BOUND = frozenset({Reason.NEW, Reason.PARTIAL_PAGE, Reason.IDENTITY})
"""The reasons no cache could have helped: bound − served is the sum of all the others."""
