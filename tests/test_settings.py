"""One table, four origins, one precedence; every bad value names itself and the way out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hostcache.errors import ConfigError
from hostcache.settings import SETTINGS, Settings, as_json, settle

GIB = 1024**3


def settled(directory: Path, *, flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None,
            toml: str | None = None, config: Path | None = None) -> tuple[Settings, dict[str, str]]:
    if toml is not None:
        (directory / "hostcache.toml").write_text(toml, encoding="utf-8")
    found = settle(flags, environ=environ or {}, directory=directory, config=config)
    return found.settings, dict(found.origins)


@pytest.mark.parametrize(("flag", "variable", "line", "value", "origin"), [
    ("3GiB", "2GiB", "1GiB", 3 * GIB, "flag"),
    ("3GiB", None, None, 3 * GIB, "flag"),
    (None, "2GiB", "1GiB", 2 * GIB, "environment"),
    (None, None, "1GiB", 1 * GIB, "file"),
    (None, None, None, 2 * GIB, "default"),
    ("0", "2GiB", None, 0, "flag"),
])
def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path, flag: str | None, variable: str | None,
                                                         line: str | None, value: int, origin: str) -> None:
    settings, origins = settled(
        tmp_path, flags={"host_cache_bytes": flag},
        environ={"HOSTCACHE_HOST_CACHE_BYTES": variable} if variable else {},
        toml=f'host_cache_bytes = "{line}"' if line else None)
    assert settings.host_cache_bytes == value
    assert origins["host_cache_bytes"] == (str(tmp_path / "hostcache.toml") if origin == "file" else origin)
    assert set(origins) == {each.name for each in SETTINGS}


def test_each_name_is_settled_on_its_own(tmp_path: Path) -> None:
    settings, origins = settled(tmp_path, flags={"port": "9000"}, environ={"HOSTCACHE_SEED": "5", "PATH": "/bin"},
                                toml='concurrency = 3\nmemory_reservation = 0.25\nhost = "localhost"')
    assert (settings.port, settings.seed, settings.concurrency) == (9000, 5, 3)
    assert (settings.memory_reservation, settings.host) == (0.25, "localhost")
    assert [origins[name] for name in ("port", "seed", "model")] == ["flag", "environment", "default"]


def test_config_names_another_file_and_must_exist(tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("port = 7\n", encoding="utf-8")
    assert settled(tmp_path, toml="port = 6", config=other)[0].port == 7
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        settled(tmp_path, config=tmp_path / "missing.toml")


@pytest.mark.parametrize(("name", "raw", "value"), [
    ("host_cache_bytes", "24GiB", 24 * GIB), ("host_cache_bytes", "512 MB", 512_000_000), ("host_cache_bytes", 7, 7),
    ("memory_reservation", "50%", 0.5), ("memory_reservation", "0.5", 0.5), ("memory_reservation", 1, 1.0),
    ("host_cache_copy_budget_ms", "1.5", 1.5), ("pool_tokens", "16_000", 16_000), ("device", "cuda:1", "cuda:1"),
    ("host_cache_mode", "on-evict", "on-evict"), ("api_key", "a, b", "a,b"), ("port", 0, 0),
])
def test_values_are_read_as_people_write_them(tmp_path: Path, name: str, raw: Any, value: Any) -> None:
    read = getattr(settled(tmp_path, flags={name: raw})[0], name)
    assert read == value
    assert type(read) is type(value)


BAD: list[tuple[str, Any]] = [
    ("host_cache_bytes", "24 gigs"), ("host_cache_bytes", "-1"), ("host_cache_bytes", True),
    ("host_cache_bytes", 1.5), ("memory_reservation", "0%"), ("memory_reservation", "101%"),
    ("memory_reservation", "half"), ("memory_reservation", "nan"), ("port", "70000"), ("port", "http"),
    ("port", -1), ("port", True), ("port", 80.0), ("concurrency", "0"), ("front_door_wait_s", "-3"),
    ("front_door_wait_s", "inf"), ("front_door_wait_s", "nan"), ("host_cache_mode", "sometimes"), ("model", " "),
    ("model", 3), ("device", "gpu"), ("device", "cuda:x"), ("log_level", "loud"), ("host_cache_eviction", "fifo"),
    ("max_context", "0"), ("seed", "0x10"),
]
# The environment holds text only.
WAYS = [(way, name, raw) for name, raw in BAD for way in ("flag", "environment", "file")
        if way != "environment" or isinstance(raw, str)]


@pytest.mark.parametrize(("way", "name", "raw"), WAYS)
def test_a_bad_value_is_one_line_with_its_name_and_itself(tmp_path: Path, way: str, name: str, raw: Any) -> None:
    toml = f"'{raw}'" if isinstance(raw, str) else str(raw).lower()
    given: dict[str, dict[str, Any]] = {
        "flag": {"flags": {name: raw}}, "environment": {"environ": {f"HOSTCACHE_{name.upper()}": raw}},
        "file": {"toml": f"{name} = {toml}"}}
    with pytest.raises(ConfigError) as caught:
        settled(tmp_path, **given[way])
    message = str(caught.value)
    shown = {"flag": "--" + name.replace("_", "-"), "environment": "HOSTCACHE_" + name.upper(), "file": name}[way]
    assert message.startswith(shown)
    assert str(raw).strip() in message
    assert "\n" not in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("kwargs", "near"), [
    ({"toml": "host-cache-bytes = 1"}, "did you mean host_cache_bytes"),
    ({"toml": "hostcachebytes = 1"}, "did you mean host_cache_bytes"),
    ({"toml": "[hostcache]\nport = 1"}, "host"),
    ({"environ": {"HOSTCACHE_HOST_CACHE_BYTE": "1"}}, "did you mean HOSTCACHE_HOST_CACHE_BYTES"),
    ({"environ": {"HOSTCACHE_COLOUR": "1"}}, "config show"),
    ({"flags": {"prot": "1"}}, "did you mean port"),
])
def test_an_unknown_name_is_refused_with_the_near_one(tmp_path: Path, kwargs: dict[str, Any], near: str) -> None:
    with pytest.raises(ConfigError, match="is not a setting") as caught:
        settled(tmp_path, **kwargs)
    assert near in str(caught.value)


@pytest.mark.parametrize("content", [b"port = ", b"port = 1\nport = 2", b"\xff\xfe"])
def test_a_file_that_is_no_toml_is_refused_by_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "hostcache.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"hostcache\.toml"):
        settled(tmp_path)


def test_settings_that_cannot_go_together_are_refused_with_both(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pool_tokens is 16, less than one page of 32"):
        settled(tmp_path, flags={"pool_tokens": "16"})


@pytest.mark.parametrize("keys", ["a,,b", "a,a", ",", ""])
def test_bad_keys_are_refused_without_being_shown(tmp_path: Path, keys: str) -> None:
    with pytest.raises(ConfigError, match="HOSTCACHE_API_KEY") as caught:
        settled(tmp_path, environ={"HOSTCACHE_API_KEY": keys.replace("a", "hush")})
    assert "hush" not in str(caught.value)


def test_a_key_is_never_shown() -> None:
    found = settle({"api_key": "hush,hush2"}, environ={})
    secret = next(each for each in SETTINGS if each.secret)
    assert secret.show(found.settings.api_key) == "(2 set, not shown)"
    assert "hush" not in str(as_json(found))


def test_the_front_door_follows_concurrency_until_it_is_set() -> None:
    assert (Settings(concurrency=3).slots, Settings(concurrency=3).waiting) == (3, 12)
    assert (Settings(front_door_slots=5).slots, Settings(front_door_slots=5).waiting) == (5, 20)
    assert Settings(front_door_waiting=0).waiting == 0


def test_every_default_passes_its_own_parser_and_every_row_has_help() -> None:
    for each in SETTINGS:
        if each.default is not None:
            assert each.parse(each.default, each.name) == each.default
        assert each.help
        assert each.default_text
    assert [each.name for each in SETTINGS] == [field.name for field in dataclasses.fields(Settings)]
