"""Makes a failing case of the fuzz small: leaves out what the failure does not need. Knows no violation by name.

Delta debugging (Zeller, Hildebrandt 2002) over the parts of a case, one list after the other, again and again until
nothing more can be left out or the budget is spent: choices, mischief, faults, clients' turns, knobs of the fleet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hostcache.sim.drill import Ran, run
from hostcache.sim.mischief import Case, Script, Step
from hostcache.sim.shape import Lane

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """The smallest failing case that was found, what it ran into, and how many runs that took."""

    case: Case
    ran: Ran
    runs: int


def shrink(case: Case, failed: Ran, *, most_events: int = 80_000) -> Shrunk:
    """`failed` is what came of `case`. Bounded by the events of all tries together."""
    return _Shrinker(case, failed, most_events).shrink()


class _Shrinker:
    def __init__(self, case: Case, failed: Ran, most_events: int) -> None:
        turns = zip(case.clients, failed.turns, strict=True)
        self._kind = _kind_of(failed)
        self._left = most_events
        self._runs = 0
        self._best = case
        self._ran = failed
        plain = replace(
            case,
            choices=failed.choices,
            clients=tuple(_unrolled(script, count) for script, count in turns),
            faults={job: fault for job, fault in case.faults.items() if job < failed.jobs},
            mischief=tuple(each for each in case.mischief if each.event <= failed.events),
        )
        self._try(plain)

    def shrink(self) -> Shrunk:
        before = None
        self._try(replace(self._best, choices={}))
        while before is not self._best and self._left > 0:
            before = self._best
            self._list(lambda case: [at for at, script in enumerate(case.clients) if script.steps], _with_clients)
            self._list(_turns, _with_turns)
            self._list(lambda case: case.mischief, lambda case, kept: replace(case, mischief=tuple(kept)))
            self._list(lambda case: sorted(case.faults.items()),
                       lambda case, kept: replace(case, faults=dict(kept)))  # fmt: skip
            self._list(lambda case: sorted((case.choices or {}).items()),
                       lambda case, kept: replace(case, choices=dict(kept)))  # fmt: skip
            self._sooner()
            self._knobs()
        ran = run(self._best, keep_log=True)
        return Shrunk(case=self._best, ran=ran, runs=self._runs)

    def _try(self, case: Case) -> bool:
        """Does it still fail in the same way? Then it is the case to go on with."""
        if self._left <= 0:
            return False
        # One that takes longer to fail is no gain.
        ran = run(case, most_events=self._ran.events + 20)
        self._runs += 1
        self._left -= max(ran.events, 20)
        if _kind_of(ran) != self._kind:
            return False
        self._best, self._ran = case, ran
        return True

    def _list(self, parts: Callable[[Case], Sequence[T]], rebuilt: Callable[[Case, Sequence[T]], Case]) -> None:
        """Leave out as many parts as possible: all, halves, quarters … single ones."""
        size = len(parts(self._best))
        while size:
            at = 0
            while at < len(kept := list(parts(self._best))):
                if not self._try(rebuilt(self._best, kept[:at] + kept[at + size :])):
                    at += size
            size = min(size // 2, len(parts(self._best)))

    def _sooner(self) -> None:
        """Let mischief be done as soon as it can be."""
        for at, each in enumerate(self._best.mischief):
            for event in (0, each.event // 2):
                if event < each.event:
                    moved = list(self._best.mischief)
                    moved[at] = replace(each, event=event)
                    if self._try(replace(self._best, mischief=tuple(moved))):
                        break

    def _knobs(self) -> None:
        """Set every knob of the fleet to its plainest value, where that changes nothing."""
        for name, value in _PLAIN.items():
            if getattr(self._best.shape, name) != value:
                self._try(replace(self._best, shape=replace(self._best.shape, **{name: value})))
        if self._best.width > 1:
            self._try(replace(self._best, width=1))
        if self._best.retries:
            self._try(replace(self._best, retries=0))


_PLAIN: dict[str, Any] = {
    "hand_off": False,
    "reserve_reply": True,
    "look_ahead_tokens": 0,
    "tail_bytes": 0,
    "lane": Lane.CHUNKED,
    "prompts_first": False,
    "supersede": True,
    "lanes": 2,
    "door_slots": 16,
    "door_waiting": 64,
    "door_wait_s": 30.0,
}


def _kind_of(ran: Ran) -> str | None:
    """A violation without its numbers."""
    return None if ran.violation is None else re.sub(r"\d+(\.\d+)?", "#", ran.violation)


def _unrolled(script: Script, turns: int) -> Script:
    steps = tuple(script.steps[at % len(script.steps)] for at in range(turns)) if script.steps else ()
    return replace(script, steps=steps, again=False)


def _with_clients(case: Case, kept: Sequence[int]) -> Case:
    scripts = enumerate(case.clients)
    return replace(case, clients=tuple(each if at in kept else replace(each, steps=()) for at, each in scripts))


def _turns(case: Case) -> list[tuple[int, Step]]:
    """Of all clients, their first turns first."""
    turns = [(at, client, step) for client, script in enumerate(case.clients) for at, step in enumerate(script.steps)]
    return [(client, step) for _, client, step in sorted(turns, key=lambda each: each[:2])]


def _with_turns(case: Case, kept: Sequence[tuple[int, Step]]) -> Case:
    return replace(case, clients=tuple(
        replace(script, steps=tuple(step for client, step in kept if client == number))
        for number, script in enumerate(case.clients)))  # fmt: skip


# --- what a person reads


_WHO = {
    "turn": "client", "retry": "client", "abort": "request", "preempt": "request", "release": "copy",
    "door-expires": "request", "restore-deadline": "request", "served": "request", "refused": "request",
    "aborted": "request", "placed": "request", "evict": "snapshot", "restore": "is over: copy",
    "store": "is over: copy",
}  # fmt: skip


def told(shrunk: Shrunk) -> list[str]:
    """The fleet, who asked for what, the faults, what happened, and the violation: a line each."""
    case = shrunk.case
    shape, tier = case.shape, case.shape.tier
    lines = [
        f"fleet: pages of {shape.page} tokens, {shape.pool_pages} on the device, {tier.frames} frames on the host, "
        f"mode {tier.mode.value}, {tier.eviction}",
        f"       {shape.slots} slots, banks of {shape.prompt_entries} prompts and {shape.turn_entries} turns, "
        f"store budget {tier.copy_budget_s} s, restore budget {tier.restore_budget_s} s, jobs of {tier.max_job_pages} "
        "pages at most",
    ]
    odd = [f"{name} {getattr(shape, name)}" for name, plain in _PLAIN.items() if getattr(shape, name) != plain]
    if odd:
        lines.append(f"       {', '.join(odd)}")
    for client, script in enumerate(case.clients):
        for step in script.steps:
            extra = "" if step.store_pages is None else f", stores {step.store_pages} pages at most"
            extra += ("" if step.load else ", loads nothing") + (", compacts first" if step.compacts else "")
            lines.append(f"client {client}: session {step.session}, hears {step.hears_tokens} tokens, "
                         f"asks for {step.reply_tokens}{extra}")  # fmt: skip
    lines += [f"copy {job + 1} in order of starts: {fault}" for job, fault in sorted(case.faults.items())]
    for each in case.mischief:
        whom = f" of one {each.state.value}" if each.state else ""
        lines.append(f"mischief: {each.kind.value}{whom} from event {each.event}")
    lines.append("events:")
    for line in shrunk.ran.lines:
        when, what, *rest = line.split(" ")
        if what == "copies":  # what it brought is told
            continue
        rest = [_WHO[what], *rest] if what in _WHO else rest
        lines.append(f"  {float(when):10.6f} s  {what} {' '.join(rest)}".rstrip())
    lines.append(f"violation: {shrunk.ran.violation}")
    return lines
