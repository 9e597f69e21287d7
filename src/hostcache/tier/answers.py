"""What the tier and its driver say to each other: frozen records without behaviour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hostcache.tier.keys import KeyChain, PageKey
from hostcache.tier.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Pages [start, start + pages) of the chain are on the host now. Protects nothing.

    `pending`: the page behind them is being written at this moment.
    """

    chain: KeyChain
    start: int
    pages: int
    pending: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Pages [start, start + pages) are pinned in `frames` until `commit` or `abandon`. Give the copy `job_id`."""

    job_id: int
    start: int
    pages: int
    keys: tuple[PageKey, ...]
    frames: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreJob:
    """Copy the device page of keys[i] into frames[i], for every i; keys are in chain order."""

    job_id: int
    keys: tuple[PageKey, ...]
    frames: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clean:
    """Evict it: all that leaves the device is on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Wait for these jobs, `budget_s` at most, and ask again. `jobs` are new and must be submitted first."""

    job_ids: tuple[int, ...]
    budget_s: float
    jobs: tuple[StoreJob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Evict it: `pages` of what leaves the device are lost, because of `reason`."""

    reason: Reason
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """`victims`: ids of the snapshots within reach of eviction, next first (see `within_reach`). Empty: no pressure."""

    now_s: float
    victims: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BankView:
    """One bank of the device: its snapshots' ids, next victim first, and how many entries it has room for."""

    order: Sequence[int]
    capacity: int
