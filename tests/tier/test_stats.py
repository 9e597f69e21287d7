"""What leaves the tier as numbers: every name is there, the text parses, and no counter goes down."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hostcache.testing.rig import Rig
from hostcache.tier import Reason, TierConfig, prometheus_text

SEED_NAMES = {
    "stores_issued", "stores_completed", "stores_failed", "stores_skipped", "lookups", "host_hits", "restores",
    "restore_failures", "restore_timeouts", "restore_bytes", "store_bytes", "evict_waits", "evict_drops_uncached",
    "device_evictions", "host_evictions", "copy_submissions", "resident_snapshots", "bytes_used", "quota_bytes",
}
"""Those of the issue that are the tier's own; prefill_holds and the latency histograms are the engine's."""


def busy() -> Rig:
    r = Rig(TierConfig(host_cache_bytes=900, page_bytes=100, page_tokens=4), 12, reach_pages=4)
    for turn in range(24):
        r.visit([turn % 5 * 100 + i for i in range(13)])
    return r


def families(r: Rig) -> dict[str, tuple[str, str, dict[str, float]]]:
    text = prometheus_text(r.accounting.stats(), r.cache.stats())
    return {
        family.name: (
            family.type,
            family.documentation,
            {sample.name + "".join(sample.labels.values()): sample.value for sample in family.samples},
        )
        for family in text_string_to_metric_families(text)
    }


def test_every_counter_of_the_seed_is_there_and_is_a_number() -> None:
    record = busy().cache.stats().as_json()
    assert set(record) >= SEED_NAMES
    assert all(isinstance(record[name], int) for name in SEED_NAMES)
    assert json.loads(json.dumps(record)) == record
    for name in ("stores_completed", "host_hits", "restores", "device_evictions", "host_evictions"):
        assert record[name] > 0, name


def test_bytes_are_pages_times_their_size_and_add_up() -> None:
    r = busy()
    record = r.cache.stats().as_json()
    assert record["quota_bytes"] == 900
    assert record["bytes_used"] == record["resident_bytes"] + record["filling_bytes"] + record["quarantined_bytes"]
    assert record["bytes_used"] == (record["frames"] - record["free_frames"]) * 100 <= record["peak_bytes"] <= 900
    assert record["duplicate_bytes"] <= record["resident_bytes"]
    assert record["store_bytes"] == record["store_pages"] * 100
    assert record["restore_bytes"] == record["restore_pages"] * 100


def test_the_text_parses_with_help_and_type_for_each_family() -> None:
    found = families(busy())
    assert len(found) > 25
    for name, (kind, text, samples) in found.items():
        assert name.startswith("hostcache_")
        assert kind in ("counter", "gauge"), name
        assert text.endswith("."), name
        assert samples, name


def test_total_stands_on_counters_and_on_nothing_else() -> None:
    r = busy()
    lines = prometheus_text(r.accounting.stats(), r.cache.stats()).splitlines()
    types = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE"))
    assert types
    for name, kind in types.items():
        assert name.endswith("_total") == (kind == "counter"), name
    helps = [line.split()[2] for line in lines if line.startswith("# HELP")]
    assert helps == list(types)


def test_the_numbers_of_the_text_are_those_of_the_records() -> None:
    r = busy()
    found = families(r)
    accounts, tier = r.accounting.stats(), r.cache.stats().as_json()
    assert found["hostcache_prompt_tokens"][2] == {"hostcache_prompt_tokens_total": accounts.prompt_tokens}
    assert found["hostcache_cached_tokens"][2] == {
        "hostcache_cached_tokens_totaldevice": accounts.device_tokens,
        "hostcache_cached_tokens_totalhost": accounts.host_tokens,
    }
    recomputed = found["hostcache_recomputed_tokens"][2]
    assert len(recomputed) == len(Reason)
    assert sum(recomputed.values()) == accounts.as_json()["recomputed_tokens"]
    assert accounts.prompt_tokens == accounts.device_tokens + accounts.host_tokens + sum(recomputed.values())
    for name in ("resident_bytes", "pinned_bytes", "dirty_bytes", "duplicate_bytes", "live_reservations"):
        assert found[f"hostcache_{name}"] [2] == {f"hostcache_{name}": tier[name]}
    for name in ("lookups", "restores", "store_bytes", "orphaned_pages"):
        assert found[f"hostcache_{name}"][2] == {f"hostcache_{name}_total": tier[name]}


def test_without_a_tier_the_accounts_alone_are_told() -> None:
    r = busy()
    names = {family.name for family in text_string_to_metric_families(prometheus_text(r.accounting.stats(), None))}
    assert "hostcache_prompt_tokens" in names
    assert not any(name.startswith("hostcache_quota") for name in names)


def test_a_record_is_of_its_moment_and_cannot_be_changed() -> None:
    r = busy()
    before = r.cache.stats()
    lookups = before.counters.lookups
    r.visit(list(range(13)))
    assert before.counters.lookups == lookups < r.cache.stats().counters.lookups
    with pytest.raises(FrozenInstanceError):
        before.frames = 0  # type: ignore[misc]


def test_no_counter_ever_goes_down() -> None:
    r = Rig(TierConfig(host_cache_bytes=6, page_bytes=1, page_tokens=4), 8, reach_pages=4)
    last: dict[str, float] = {}
    for turn in range(30):
        r.visit([turn * 7 % 4 * 100 + i for i in range(9)])
        for name, (kind, _, samples) in families(r).items():
            for sample, value in samples.items():
                assert kind != "counter" or value >= last.get(sample, 0), name
                last[sample] = value
