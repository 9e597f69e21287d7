"""The plugin's numbers as one flat record of changes, for vLLM's own way of carrying statistics. Formats no text.

A name is a metric's, or `metric|label value`. Counters are what was added since the last record, gauges as they are; a
histogram's are `metric|observed value`, and how often it was observed since.
Imports nothing of vLLM: names and texts are known to the process that shows /metrics and holds no tier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hostcache.tier import Accounting, AccountingStats, Family, HostCache, families
from hostcache.vllm_plugin.scheduler_side import PluginCounters, SchedulerSide
from hostcache.vllm_plugin.step_times import StepReport, StepTimes

_OWN = {
    "evicted_pages": "Pages whose last block vLLM handed out again.",
    "evicted_saved_pages": "Of these, pages that were on the host, or got there: saved / evicted is the coverage.",
    "evicted_saved_at_once_pages": "Of the saved ones, pages whose step had to wait for the copy.",
    "evicted_lost_pages": "Of the evicted ones, pages that were not saved. Those that had no room are in it.",
    "fenced_stores": "Write-backs whose block was handed out before they were over: the step waited for them.",
    "late_blocks": "Blocks kept from the pool because a restore that was given up could still write them.",
    "resets": "Times every copy was dropped because vLLM's cache was reset.",
}


def metrics(side: SchedulerSide) -> Iterator[Family]:
    yield from families(side.accounting.stats(), side.tier.stats())
    yield from _own(side.counters)


def known() -> list[Family]:
    """Every metric there is, with values of nothing."""
    from hostcache.tier import History, TierConfig

    config = TierConfig(host_cache_bytes=0, page_bytes=1, page_tokens=1)
    history = History(1)
    cache = HostCache(config, history=history)
    nothing: AccountingStats = Accounting(1, history, cache).stats()
    return [*families(nothing, cache.stats()), *_own(PluginCounters()), *step_metrics(StepTimes().report())]


def step_metrics(report: StepReport) -> Iterator[Family]:
    for name, text, values in (
        ("step_seconds", "Time the plugin took of a scheduler step, over the last steps that computed something. The "
         "wait for copies in the workers is not in it.", report.own_s),
        ("step_interval_seconds", "From one such step to the next while there were requests. Idle time is not in it.",
         report.interval_s),
    ):
        yield Family(name=f"hostcache_{name}", kind="gauge", text=text, label="quantile",
                     samples={str(quantile): value for quantile, value in values.items()})
    yield Family(name="hostcache_running_requests_peak", kind="gauge", label="",
                 text="Most requests in one of these steps.", samples={"": report.requests_peak})


def _own(counters: PluginCounters) -> Iterator[Family]:
    values = (counters.evicted_pages, counters.saved_pages, counters.saved_at_once_pages, counters.lost_pages,
              counters.fenced_jobs, counters.late_blocks, counters.resets)
    for (name, text), value in zip(_OWN.items(), values, strict=True):
        yield Family(name=f"hostcache_{name}", kind="counter", text=text, label="", samples={"": value})
    yield Family(name="hostcache_restore_latency_seconds", kind="histogram", label="seconds",
                 text="From the order of a load to its end on every rank, of loads that ended well.",
                 samples={f"{seconds:g}": count for seconds, count in counters.restores_s.items()})


class Changes:
    """Remembers what was told already."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    def nothing_left(self) -> dict[str, float]:
        """Every gauge is at zero from now on; the counters stay."""
        gauges = {name: 0.0 for name, value in self._told.items() if value and is_gauge(name)}
        self._told.update(gauges)
        return gauges

    def take(self, now: Iterator[Family]) -> dict[str, float]:
        """Only what is not as it was; {} when nothing is."""
        changed: dict[str, float] = {}
        for family in now:
            for label, value in family.samples.items():
                name = f"{family.name}|{label}" if label else family.name
                before = self._told.get(name, 0)
                if value != before:
                    self._told[name] = value
                    changed[name] = value if family.kind == "gauge" else value - before
        return changed


GAUGES = frozenset(family.name for family in known() if family.kind == "gauge")
HISTOGRAMS = frozenset(family.name for family in known() if family.kind == "histogram")


def is_gauge(name: str) -> bool:
    """Of a name in a record, with its label value or without."""
    return name.partition("|")[0] in GAUGES


def is_histogram(name: str) -> bool:
    return name.partition("|")[0] in HISTOGRAMS


def merged(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Two records, the later one second."""
    both = dict(one)
    for name, value in other.items():
        both[name] = value if is_gauge(name) else both.get(name, 0) + value
    return both
