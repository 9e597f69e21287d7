"""What crosses between the scheduler's process and the workers', each step: frozen records, small, picklable.

Orders go to every rank alike; each rank answers for its own part of the bytes. A job id is the tier's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOrder:
    """Copy block blocks[i] into frame frames[i]. `at_once`: the blocks are overwritten by this step's forward pass, so
    the copy must be over before it, or is given up."""

    job_id: int
    blocks: tuple[int, ...]
    frames: tuple[int, ...]
    at_once: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """Copy frame frames[i] into block blocks[i], for a request that waits for it, `budget_s` at most."""

    job_id: int
    request_id: str
    blocks: tuple[int, ...]
    frames: tuple[int, ...]
    budget_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """One step's. `fences`: running stores whose blocks this step overwrites; they are waited for as if `at_once`.
    `unkept`: requests that wait for a load which will not come: they are told that it failed."""

    step: int
    stores: tuple[StoreOrder, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    fences: tuple[int, ...] = ()
    unkept: tuple[str, ...] = ()
    idle: bool = False
    """The step computes nothing."""
    prepare: bool = False
    """The pool fills: ready the host memory, before the first block has to be saved."""
    report_step: bool = False
    """The scheduler measures this step and wants to hear of its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """A job that can move no byte any more, on this rank. `late`: it was over its budget and never started."""

    job_id: int
    error: str | None
    copied_bytes: int
    submissions: int
    seconds: float
    late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """`overdue`: jobs given up while their copy may still run; each is in `ends` of a later report, if ever.
    `off`: this rank can copy nothing, now and later."""

    step: int
    ends: tuple[JobEnd, ...] = ()
    overdue: tuple[int, ...] = ()
    off: str | None = None
