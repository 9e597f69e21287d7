"""Copies on their way, as the scheduler knows them: from the order until every rank has ended it. Decides nothing.

    ordered → ended by every rank: handed out, once, with what became of it
            → *overdue* on some rank: its bytes are of no use any more, and it is here until every rank has ended it
    a save  fences its blocks: whoever is given one of them waits for it
    a load  has its pages on their way, so that nobody loads them twice; *given up*, they are not: the copy may run on
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hostcache.errors import InvariantBroken
from hostcache.tier import CopyDone, Direction, PageKey, Reservation
from hostcache.vllm_plugin.wire import JobEnd


@dataclass(slots=True, eq=False)
class Copy:
    """`reservation` and `request_id`: of a load. `left`: ranks that have not ended it. `leaving`: pages of a save that
    left the device meanwhile."""

    job_id: int
    direction: Direction
    blocks: tuple[int, ...]
    keys: tuple[PageKey, ...]
    left: int
    begun_s: float
    deadline_s: float
    at_once: bool = False
    leaving: int = 0
    reservation: Reservation | None = None
    request_id: str | None = None
    overdue: bool = False
    given_up: bool = False
    error: str | None = None
    late: bool = False
    copied_bytes: int = 0
    submissions: int = 0
    seconds: float = 0.0

    def done(self, now_s: float) -> CopyDone:
        return CopyDone(job_id=self.job_id, direction=self.direction, error=self.error, copied_bytes=self.copied_bytes,
                        submissions=self.submissions, submitted_s=self.begun_s, started_s=now_s - self.seconds,
                        finished_s=now_s)


class Copies:
    """After `deadline_s` a rank that has said nothing of a copy is not going to."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._jobs: dict[int, Copy] = {}
        self._fences: dict[int, int] = {}
        self._on_its_way: dict[PageKey, int] = {}

    def save(self, job_id: int, blocks: tuple[int, ...], keys: tuple[PageKey, ...], *, at_once: bool, now_s: float,
             deadline_s: float) -> None:
        self._jobs[job_id] = Copy(job_id, Direction.STORE, blocks, keys, self._ranks, now_s, deadline_s, at_once)
        if not at_once:
            self._fences.update(dict.fromkeys(blocks, job_id))

    def load(self, reservation: Reservation, blocks: tuple[int, ...], *, request_id: str, now_s: float,
             deadline_s: float) -> Copy:
        job_id, keys = reservation.job_id, reservation.keys
        copy = self._jobs[job_id] = Copy(job_id, Direction.RESTORE, blocks, keys, self._ranks, now_s, deadline_s,
                                         reservation=reservation, request_id=request_id)
        self._on_its_way.update(dict.fromkeys(keys, job_id))
        return copy

    # ---- what becomes of them

    def ended(self, end: JobEnd) -> Copy | None:
        """One rank has. The copy, when that was the last one."""
        copy = self._jobs.get(end.job_id)
        if copy is None:
            return None
        copy.left -= 1
        copy.error = copy.error or end.error
        copy.late = copy.late or end.late
        copy.copied_bytes += end.copied_bytes
        copy.submissions += end.submissions
        copy.seconds = max(copy.seconds, end.seconds)
        if copy.left:
            return None
        del self._jobs[copy.job_id]
        self._let_go(copy)
        return copy

    def overdue(self, job_id: int) -> Copy | None:
        """From now on, if it was not so already."""
        copy = self._jobs.get(job_id)
        if copy is None or copy.overdue:
            return None
        copy.overdue = True
        if copy.direction is Direction.STORE:
            self._let_go(copy)
        return copy

    def give_up(self, copy: Copy) -> bool:
        """Nobody waits for this load any more. False: nobody did."""
        if copy.given_up:
            return False
        copy.given_up = True
        self._let_go(copy)
        return True

    def unheard_of(self, now_s: float) -> list[Copy]:
        return [copy for copy in self._jobs.values() if now_s >= copy.deadline_s and not copy.overdue]

    def _let_go(self, copy: Copy) -> None:
        if copy.direction is Direction.STORE:
            _drop(self._fences, copy.blocks, copy.job_id)
        else:
            _drop(self._on_its_way, copy.keys, copy.job_id)

    # ---- fences

    def take_fence(self, block_id: int) -> int | None:
        """The save that still reads this block, which is somebody else's now."""
        return self._fences.pop(block_id, None)

    def drop_fences(self) -> None:
        self._fences.clear()

    # ---- questions

    def brings(self, key: PageKey) -> bool:
        return key in self._on_its_way

    @property
    def loading(self) -> list[Copy]:
        """Loads that somebody waits for."""
        return [copy for copy in self._jobs.values() if copy.reservation is not None and not copy.given_up]

    @property
    def pages_ahead(self) -> int:
        """Of all loads that may still move bytes."""
        return sum(len(copy.blocks) for copy in self._jobs.values() if copy.direction is Direction.RESTORE)

    @property
    def saving(self) -> dict[PageKey, Copy]:
        return {key: copy for copy in self._jobs.values() if copy.direction is Direction.STORE for key in copy.keys}

    @property
    def busy(self) -> bool:
        """The end of some copy is to be heard soon."""
        return any(not copy.overdue for copy in self._jobs.values())

    @property
    def keys(self) -> Iterable[PageKey]:
        return (key for copy in self._jobs.values() for key in copy.keys)

    @property
    def held(self) -> int:
        """Zero when nothing is under way."""
        return len(self._jobs) + len(self._on_its_way) + len(self._fences)

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def check(self) -> None:
        """Raises InvariantBroken. For tests."""
        for what, named in (("a fence", self._fences.values()), ("a page on its way", self._on_its_way.values())):
            if strays := set(named) - self._jobs.keys():
                raise InvariantBroken(f"{what} names jobs {sorted(strays)}, which are over")


def _drop(held: dict[Any, int], keys: Iterable[Any], job_id: int) -> None:
    for key in keys:
        if held.get(key) == job_id:
            del held[key]
