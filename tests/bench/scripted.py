"""Records made by hand: small runs whose every figure can be worked out on paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from hostcache.records import (
    Arm,
    ArmRecord,
    EndRecord,
    EquivalenceRecord,
    Record,
    RunRecord,
    TracedAnswer,
    TurnRecord,
)

STAGES = ("pressure", "no-pressure", "equivalence")


def run_record(form: Literal["quick", "full", "custom"] = "full", stages: tuple[str, ...] = STAGES) -> RunRecord:
    return RunRecord(
        form=form, model="m", seed=0,
        workload={"agents": 2, "prefix_tokens": 100, "window_s": 10.0, "pool_tokens": 320, "host_cache_bytes": 1 << 30},
        environment={"cpu": "a <fast> one", "cpus": 2, "system": "Linux"}, inputs={"a.py": "00ff"},
        commands=("hostcache demo --full", "hostcache demo --from DIR"), stages=stages, started_unix_s=1.0,
        hostcache_version="0")


def end_record() -> EndRecord:
    return EndRecord(ended_unix_s=2.0, outcome="finished", detail="")


def stats(*, device: int = 0, host: int = 0, bound: int = 0, prompt: int = 0, evictions: int = 0,
          recomputed: Mapping[str, int] | None = None, tier: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"version": 1, "engine": {"device_evictions": evictions},
            "accounting": {"requests": 1, "prompt_tokens": prompt, "device_tokens": device, "host_tokens": host,
                           "bound_tokens": bound, "recomputed": dict(recomputed or {}), "bound_exact": True},
            "host_cache": None if tier is None else dict(tier)}


def tier(*, restores: int = 0, restored: int = 0, stored: int = 0, waits: int = 0,
         restore_s: float = 0.0) -> dict[str, Any]:
    return {"restores": restores, "restore_bytes": restored, "store_bytes": stored, "evict_waits": waits,
            "prefill_holds": 0, "restore_failures": 0, "restore_timeouts": 0, "evict_drops_uncached": 0,
            "restore_latency": {"sum_s": restore_s, "count": restores}}


def arm_record(arm: Arm, index: int, opening: dict[str, Any], closing: dict[str, Any], *,
               stage: Literal["pressure", "no-pressure"] = "pressure") -> ArmRecord:
    return ArmRecord(
        stage=stage, arm=arm, index=index, command=("hostcache", "serve"), log="log", model="m", model_revision="r",
        pool_tokens=320, page_tokens=32, host_cache_bytes=1 << 30 if arm == "on" else 0,
        window_s=10.0 if stage == "pressure" else None, primed_s=0.0, opened_s=100.0, settled_s=115.0,
        peak_rss_bytes=1 << 20, opening=opening, closing=closing)


def turn(arm: Arm, index: int, duration_s: float, **changes: Any) -> TurnRecord:
    base = TurnRecord(
        stage="pressure", arm=arm, arm_index=index, agent=0, turn=1, phase="window", started_s=101.0,
        ttft_s=duration_s / 2, duration_s=duration_s, prompt_tokens=100, completion_tokens=2,
        hit_tokens=64, device_tokens=64, host_tokens=0,
        recomputed={"new": 36}, first_miss=None, resent_loss_tokens=0, reply_sha256="same", retries=(), error=None)
    return dataclasses.replace(base, **changes)


def answer(tokens: Sequence[int] = (1, 2, 3), *, device: int = 0, host: int = 0, margins: Sequence[float] = (1, 1, 1),
           digests: Sequence[str] = ("a", "b", "c"), ttft_s: float = 1.0) -> TracedAnswer:
    return TracedAnswer(token_ids=tuple(tokens), digests=tuple(digests), margins=tuple(margins), ttft_s=ttft_s,
                        prompt_tokens=100, device_tokens=device, host_tokens=host, recomputed={"new": 1})


def row(**changes: Any) -> EquivalenceRecord:
    base = EquivalenceRecord(
        conversation=0, shape="plain", boundary="after", tokens=97, page_tokens=32, prompt_sha256="0",
        cold=answer(ttft_s=2.0), cold_again=answer(),
        device=answer(device=96), restored=answer(host=96, ttft_s=0.02), kept_tokens=None,
        kept_expected_tokens=None, restores=1, restore_submissions=1, error=None)
    return dataclasses.replace(base, **changes)


def pressure_records() -> list[Record]:
    """Off: turns of 4 and 6 s, half of the tokens hit. On: five turns of 1 s, 90 of 100 tokens hit."""
    off = [turn("off", 0, seconds, hit_tokens=50, device_tokens=50, recomputed={"evicted": 40, "new": 10})
           for seconds in (4.0, 6.0)]
    on = [turn("on", 1, 1.0, hit_tokens=90, device_tokens=30, host_tokens=60, recomputed={"new": 10}) for _ in range(5)]
    return [
        turn("off", 0, 9.0, phase="prime", started_s=10.0, turn=0), *off,
        turn("off", 0, 3.0, phase="before", started_s=99.0),
        arm_record("off", 0, stats(device=1000, prompt=5000, bound=2000, evictions=3),
                   stats(device=1100, prompt=5300, bound=2180, evictions=9, recomputed={"evicted": 80})),
        *on,
        arm_record("on", 1, stats(tier=tier(restores=2, restored=10, restore_s=1.0)),
                   stats(device=150, host=300, prompt=500, bound=450, evictions=4,
                         tier=tier(restores=7, restored=510, stored=100, restore_s=1.05))),
    ]


def calm_records(off: Sequence[float] = (10.0, 10.2, 10.1, 10.3), on: Sequence[float] = (10.1, 10.2),
                 **on_changes: Any) -> list[Record]:
    records: list[Record] = []
    for index, (arm, seconds) in enumerate([*((("off"), s) for s in off), *((("on"), s) for s in on)]):
        name: Arm = "on" if arm == "on" else "off"
        changes = on_changes if name == "on" else {}
        records += [
            turn(name, index, seconds, stage="no-pressure", phase="fixed", **changes),
            arm_record(name, index, *(stats(tier=tier() if name == "on" else None) for _ in range(2)),
                       stage="no-pressure")]
    return records


def whole_run(form: Literal["quick", "full", "custom"] = "full") -> list[Record]:
    return [run_record(form), *pressure_records(), *calm_records(), row(), end_record()]
