"""The extra config speaks the language of every other setting, and nothing in it is ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hostcache.errors import ConfigError
from hostcache.settings import Settings, settle
from hostcache.tier import Mode
from hostcache.vllm_plugin.config import KEYS, SHARED, from_extra, read, to_extra


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no hostcache.toml here


def test_sizes_carry_units_and_times_become_seconds() -> None:
    settled = from_extra({"host_cache_bytes": "24GiB", "host_cache_mode": "on-evict",
                          "host_cache_restore_budget_ms": "250", "host_cache_copy_budget_ms": 2000}, environ={})
    assert settled.host_cache_bytes == 24 * 1024**3
    assert settled.mode is Mode.ON_EVICT
    assert (settled.restore_budget_s, settled.copy_budget_s) == (0.25, 2.0)


def test_what_is_not_given_comes_from_environment_file_and_default(tmp_path: Path) -> None:
    (tmp_path / "hostcache.toml").write_text('host_cache_mode = "on-retain"\nhost_cache_bytes = "1GiB"\n', "utf-8")
    settled = from_extra({"host_cache_eviction": "lru"}, environ={"HOSTCACHE_HOST_CACHE_BYTES": "3GiB"})
    assert (settled.eviction, settled.host_cache_bytes, settled.mode) == ("lru", 3 * 1024**3, Mode.ON_RETAIN)
    assert settled.store_pace_s == Settings().host_cache_store_pace_ms
    assert from_extra({"host_cache_bytes": 5}, environ={"HOSTCACHE_HOST_CACHE_BYTES": "3GiB"}).host_cache_bytes == 5


@pytest.mark.parametrize(("extra", "says"), [
    ({"host_cache_byte": 1}, "did you mean host_cache_bytes"),
    ({"host-cache-mode": "off"}, "did you mean host_cache_mode"),
    ({"HOST_CACHE_MODE": "off"}, "did you mean host_cache_mode"),
    ({"cpu_bytes_to_use": 1}, "the keys are host_cache_bytes"),
    ({"page_tokens": 16}, "not a setting"),  # a setting of the embedded engine's, with no meaning here
    ({"host_cache_bytes": "many"}, "host_cache_bytes in kv_connector_extra_config is 'many'"),
    ({"host_cache_bytes": -1}, "0 or more bytes"),
    ({"host_cache_bytes": True}, "not a size"),
    ({"host_cache_mode": "eager"}, "on-pressure, on-retain, on-evict, off"),
    ({"host_cache_restore_budget_ms": "soon"}, "number of at least 0"),
    ({"host_cache_keep_on_reset": "perhaps"}, "true or false"),
    ({"host_cache_keep_on_reset": 1}, "true or false"),
    ({"host_cache_verify": "always"}, "restored bytes are not compared yet"),
])
def test_a_wrong_key_or_value_is_refused_in_one_line_that_names_it(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_extra(extra, environ={})
    assert says in str(refused.value)
    assert next(iter(extra)) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_the_launcher_writes_reads_back_as_it_was_settled() -> None:
    settings = settle({"host_cache_bytes": "7GB", "host_cache_mode": "on-evict", "host_cache_store_pace_ms": "1.5",
                       "host_cache_eviction": "lru"}, environ={}).settings
    written = to_extra(settings)
    assert tuple(written) == SHARED
    assert read(written) == written
    settled = from_extra(written, environ={"HOSTCACHE_HOST_CACHE_BYTES": "1"})
    assert (settled.host_cache_bytes, settled.mode) == (7 * 1000**3, Mode.ON_EVICT)
    assert (settled.store_pace_s, settled.eviction) == (0.0015, "lru")


@pytest.mark.parametrize(("extra", "off"), [
    ({"host_cache_bytes": 0}, True), ({"host_cache_mode": "off"}, True), ({"host_cache_bytes": 1}, False),
])
def test_no_bytes_and_mode_off_are_the_same_off(extra: dict[str, Any], off: bool) -> None:
    settled = from_extra(extra, environ={})
    assert settled.off is off
    assert (settled.tier(page_bytes=1, page_tokens=32).frames == 0) is off


def test_the_tier_gets_the_same_values_and_the_size_of_a_block() -> None:
    tier = from_extra({"host_cache_bytes": "1MiB", "host_cache_eviction": "lru"}, environ={}).tier(
        page_bytes=4096, page_tokens=128)
    assert (tier.frames, tier.page_tokens, tier.eviction, tier.copy_budget_s) == (256, 128, "lru", 1.0)


@pytest.mark.parametrize(("given", "keeps"), [(True, True), ("true", True), (False, False), ("false", False)])
def test_who_resets_without_changing_weights_can_say_so(given: Any, keeps: bool) -> None:
    assert from_extra({"host_cache_keep_on_reset": given}, environ={}).keep_on_reset is keeps
    assert from_extra({}, environ={}).keep_on_reset is False


def test_the_page_about_vllm_names_every_key(root: Path) -> None:
    page = (root / "docs" / "vllm.md").read_text(encoding="utf-8")
    assert [key for key in KEYS if f"`{key}`" not in page] == []
