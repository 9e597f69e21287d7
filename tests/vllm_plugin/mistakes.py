"""Sides of the plugin that raise when a test says so: subclasses handed to the vLLM in small. Not a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from hostcache.vllm_plugin.scheduler_side import SchedulerSide
from hostcache.vllm_plugin.worker_side import WorkerSide

Side = TypeVar("Side", SchedulerSide, WorkerSide)

OF_THE_SCHEDULER = ("block_evicted", "block_used", "match", "allocated", "finished", "build", "heard", "take_events",
                    "worth_telling")
"""What vLLM calls in the course of a step."""
OF_THE_WORKER = ("before_forward", "after_forward", "finished", "report")


class Trap:
    """Raises in the call of `name` after `passes` ones that pass: before it does anything, or when it has."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.passes = 0
        self.done_first = False
        self.sprung = False

    def set(self, name: str, *, passes: int = 0, done_first: bool = False) -> None:
        self.name, self.passes, self.done_first, self.sprung = name, passes, done_first, False

    def step_on(self, name: str, done: bool) -> None:
        if self.name != name or self.done_first != done:
            return
        if self.passes:
            self.passes -= 1
            return
        self.name, self.sprung = None, True
        raise RuntimeError("nobody thought of\nthis")


def mistaken(side: type[Side], trap: Trap, names: Sequence[str]) -> type[Side]:
    """The side with a trap in each of these calls."""

    def method(name: str) -> Any:
        def call(self: Any, *args: Any, **named: Any) -> Any:
            trap.step_on(name, done=False)
            answer = getattr(side, name)(self, *args, **named)
            trap.step_on(name, done=True)
            return answer

        return call

    return type("Mistaken", (side,), {name: method(name) for name in names})
