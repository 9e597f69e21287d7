"""As long as asked for: memory stays flat, the counters balance. The form of record is ten million events by hand:
`hostcache sim suite soak --events 10000000`."""

from __future__ import annotations

import pytest

from hostcache.errors import InvariantBroken
from hostcache.sim.play import Churn
from hostcache.sim.scenarios import GROWTH_BLOCKS, SOAK_EVENTS, MemoryUse, Played, flat, run_scenario
from hostcache.sim.suites import scenarios

(SOAK,) = scenarios("soak")


def soaked(events: int) -> Played:
    heard: list[int] = []
    played = run_scenario(SOAK, faults=True, events=events, progress=heard.append)
    assert played.run.log.events >= events
    assert len(heard) == len(played.memory) == 20
    assert played.proved[-1].startswith("memory flat")
    assert "counters balanced" in played.proved
    clients, stats = played.run.clients, played.run.fleet.stats()
    assert isinstance(clients, Churn)
    assert clients.visits == []
    assert clients.live == {}
    assert clients.sent == clients.ended == stats.served + stats.aborted
    assert played.run.fleet.watch.restores > events / 100
    return played


def test_a_short_soak_ends_balanced_and_flat() -> None:
    soaked(20_000)


@pytest.mark.slow
def test_the_soak_that_ci_runs() -> None:
    soaked(SOAK_EVENTS)


def use(events: int, blocks: int = 100_000, peak_bytes: int = 50 << 20) -> MemoryUse:
    return MemoryUse(events=events, blocks=blocks, peak_bytes=peak_bytes)


def test_growth_after_the_first_tenth_is_a_violation_and_before_it_is_none() -> None:
    assert "memory flat" in flat([use(5, blocks=1), use(10), use(50, blocks=101_000), use(100, blocks=103_000)])
    with pytest.raises(InvariantBroken, match="memory grew from 100000 blocks after 10 events"):
        flat([use(5), use(10), use(100, blocks=106_000 + GROWTH_BLOCKS)])
    with pytest.raises(InvariantBroken, match="peak_bytes"):
        flat([use(5), use(10), use(100, peak_bytes=64 << 20)])
