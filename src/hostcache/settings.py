"""What may be set, and how a value is settled: flag, then environment, then hostcache.toml, then the default.

The only module that reads the environment. Knows names, kinds and limits; knows nothing of what a setting does.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import math
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hostcache.errors import ConfigError
from hostcache.sizes import format_size, parse_size

ENVIRONMENT_PREFIX = "HOSTCACHE_"
CONFIG_FILE = "hostcache.toml"

Parser = Callable[[Any, str], Any]
"""(raw value, the setting as its origin names it) → settled value; raises ConfigError. Raw values are text from a
flag or the environment, or what TOML made of the file."""


def _text(raw: Any, name: str) -> str:
    if not isinstance(raw, str) or not raw.strip():
        raise ConfigError(f"{name} is {raw!r}; give text that is not empty")
    return raw.strip()


def _integer(low: int, high: int | None = None) -> Parser:
    limits = f"of at least {low}" if high is None else f"between {low} and {high}"

    def parse(raw: Any, name: str) -> int:
        value: int | None = None
        if isinstance(raw, int) and not isinstance(raw, bool):
            value = raw
        elif isinstance(raw, str):
            try:
                value = int(raw)
            except ValueError:
                value = None
        if value is None or value < low or (high is not None and value > high):
            raise ConfigError(f"{name} is {raw!r}; give a whole number {limits}")
        return value

    return parse


def _number(raw: Any, name: str) -> float:
    value = math.nan
    if isinstance(raw, (int, float, str)) and not isinstance(raw, bool):
        try:
            value = float(raw)
        except ValueError:
            value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name} is {raw!r}; give a number of at least 0")
    return value


def _size(raw: Any, name: str) -> int:
    if not isinstance(raw, (int, str)) or isinstance(raw, bool):
        raise ConfigError(f"{name} is {raw!r}, which is not a size; write a number with a unit, for example 24GiB")
    return parse_size(raw, name=name)


def _share(raw: Any, name: str) -> float:
    value = math.nan
    try:
        if isinstance(raw, str) and raw.strip().endswith("%"):
            value = float(raw.strip()[:-1]) / 100
        elif isinstance(raw, (int, float, str)) and not isinstance(raw, bool):
            value = float(raw)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise ConfigError(f"{name} is {raw!r}; give a share above 0 % and up to 100 %, for example 50% or 0.5")
    return value


def _choice(*allowed: str) -> Parser:
    def parse(raw: Any, name: str) -> str:
        if not isinstance(raw, str) or raw not in allowed:
            raise ConfigError(f"{name} is {raw!r}; choose one of {', '.join(allowed)}")
        return raw

    return parse


def _device(raw: Any, name: str) -> str:
    text = raw if isinstance(raw, str) else ""
    if text not in ("auto", "cpu", "cuda") and not (text.startswith("cuda:") and text[5:].isdecimal()):
        raise ConfigError(f"{name} is {raw!r}; choose one of auto, cpu, cuda, cuda:0, cuda:1, …")
    return text


def _keys(raw: Any, name: str) -> str:
    keys = [key.strip() for key in raw.split(",")] if isinstance(raw, str) else []
    if not keys or not all(keys) or len(set(keys)) != len(keys):  # the value itself is a secret: never printed
        raise ConfigError(f"{name} must be a key, or several different keys with commas between; found an empty one, "
                          "the same one twice, or no text")
    return ",".join(keys)


def _setting(default: Any, parse: Parser, help_text: str, *, unit: str = "", unset: str = "",
             secret: bool = False) -> Any:
    return field(default=default, metadata={"parse": parse, "help": help_text, "unit": unit, "unset": unset,
                                            "secret": secret})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting, settled. The fields are the one table: the same name is the key in hostcache.toml, the flag
    (`--host-cache-bytes`) and the environment variable (`HOSTCACHE_HOST_CACHE_BYTES`)."""

    model: str = _setting(
        "smollm2", _text, "smollm2, a Hugging Face directory, a .gguf file, or random:tiny for seeded random weights")
    host: str = _setting("127.0.0.1", _text, "address to listen on; beyond loopback only with an API key")
    port: int = _setting(8000, _integer(0, 65535), "port to listen on; 0 takes a free one")
    api_key: str | None = _setting(
        None, _keys, "key that clients must send; several with commas between: each then has a cache of its own",
        unset="none asked for", secret=True)
    max_body_bytes: int = _setting(8 * 1024**2, _size, "largest request body that is read", unit="bytes")
    device: str = _setting("auto", _device, "auto, cpu, cuda or cuda:N")
    dtype: str = _setting("auto", _choice("auto", "float32", "bfloat16", "float16"),
                          "auto (float32 on a CPU, bfloat16 on a GPU), float32, bfloat16 or float16")
    threads: int | None = _setting(
        None, _integer(1), "CPU threads for the model", unset="one per core this process may use")
    seed: int = _setting(0, _integer(0), "seed of sampling (and of random weights)")
    max_context: int | None = _setting(
        None, _integer(1), "longest prompt and answer of one request", unit="tokens", unset="the model's")
    concurrency: int = _setting(16, _integer(1), "requests that run at the same time")
    prefill_batch_tokens: int = _setting(512, _integer(1), "prompt tokens computed in one step", unit="tokens")
    page_tokens: int = _setting(32, _integer(1), "tokens per page, the unit of sharing and copying", unit="tokens")
    pool_tokens: int | None = _setting(
        None, _integer(1), "size of the device pool", unit="tokens", unset="from memory_reservation, at most 65536")
    memory_reservation: float = _setting(
        0.5, _share, "share of the available memory for the device pool where pool_tokens is not set")
    prefix_cache_entries: int = _setting(
        24, _integer(1), "snapshots kept on the device in each of the two banks (prompts, turns)")
    host_cache_bytes: int = _setting(
        2 * 1024**3, _size, "host memory for the tier, over everything; 0: nothing of the tier runs", unit="bytes")
    host_cache_mode: str = _setting(
        "on-pressure", _choice("on-pressure", "on-retain", "on-evict", "off"),
        "when pages are written back: on-pressure, on-retain, on-evict or off")
    host_cache_copy_budget_ms: float = _setting(
        1000.0, _number, "longest wait for a write-back before an eviction", unit="ms")
    host_cache_restore_budget_ms: float = _setting(
        500.0, _number, "longest wait for a restore before the request is prefilled cold", unit="ms")
    host_cache_store_pace_ms: float = _setting(0.0, _number, "least time between two write-backs", unit="ms")
    host_cache_verify: str = _setting(
        "off", _choice("off", "sampled", "always"),
        "compare the digest of restored pages: off, sampled or always (then the tokens of each hit, too)")
    host_cache_eviction: str = _setting(
        "scan-resistant", _choice("scan-resistant", "lru"), "order of eviction on the host: scan-resistant or lru")
    front_door_slots: int | None = _setting(
        None, _integer(1), "generation requests let through at the same time", unset="concurrency")
    front_door_waiting: int | None = _setting(
        None, _integer(0), "requests that may wait for a slot; more get 429", unset="4 × the slots")
    front_door_wait_s: float = _setting(30.0, _number, "longest wait for a slot; then 429", unit="s")
    drain_s: float = _setting(30.0, _number, "time for running requests to finish after SIGTERM", unit="s")
    log_level: str = _setting("info", _choice("debug", "info", "warning", "error"),
                              "least level that is logged (one JSON line each, on stderr)")
    model_dir: str | None = _setting(
        None, _text, "where fetched models are kept", unset="hostcache below the user's cache directory")

    @property
    def api_keys(self) -> tuple[str, ...]:
        return tuple(self.api_key.split(",")) if self.api_key else ()

    @property
    def slots(self) -> int:
        """Slots of the front door."""
        return self.front_door_slots or self.concurrency

    @property
    def waiting(self) -> int:
        """Waiting places of the front door."""
        return 4 * self.slots if self.front_door_waiting is None else self.front_door_waiting

    @property
    def listens_on_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row of the table. `unset`: what a default of None means."""

    name: str
    default: Any
    parse: Parser
    help: str
    unit: str
    unset: str
    secret: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def default_text(self) -> str:
        return self.unset if self.default is None else self.show(self.default)

    def show(self, value: Any) -> str:
        """The value for people: sizes and shares in their own form, secrets hidden."""
        if value is None:
            return f"({self.unset})" if self.unset else "-"
        if self.secret:
            return f"({len(str(value).split(','))} set, not shown)"
        if self.unit == "bytes":
            return format_size(value).replace(" ", "") if value else "0"
        if self.parse is _share:
            return f"{value * 100:g}%"
        return f"{value:g}" if isinstance(value, float) else str(value)


SETTINGS: tuple[Setting, ...] = tuple(
    Setting(name=each.name, default=each.default, **{key: each.metadata[key] for key in ("parse", "unit", "unset",
                                                                                         "secret")},
            help=each.metadata["help"])
    for each in fields(Settings)
)
_BY_NAME = {setting.name: setting for setting in SETTINGS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The settings and, for each name, where its value came from: `flag`, `environment`, a file's path, `default`."""

    settings: Settings
    origins: Mapping[str, str]


def settle(flags: Mapping[str, Any] | None = None, *, environ: Mapping[str, str] | None = None,
           config: Path | None = None, directory: Path | None = None) -> Settled:
    """Flag > environment > file > default, per name. A flag of None counts as not given.

    `environ` None reads the process's own. `config` None reads hostcache.toml in `directory` (default: the working
    directory) where there is one. Raises ConfigError, in one line, for an unknown name or a bad value.
    """
    variables = os.environ if environ is None else environ
    found: dict[str, tuple[str, Any, str]] = {}
    for name, raw, origin in _from_file(config, directory or Path()):
        found[name] = (f"{name} in {origin}", raw, origin)
    for name, raw in _from_environment(variables):
        found[name] = (_BY_NAME[name].variable, raw, "environment")
    for name, raw in (flags or {}).items():
        if name not in _BY_NAME:
            raise ConfigError(f"{name!r} is not a setting{_near(name, _BY_NAME)}")
        if raw is not None:
            found[name] = (_BY_NAME[name].flag, raw, "flag")
    values = {name: _BY_NAME[name].parse(raw, label) for name, (label, raw, _) in found.items()}
    settings = Settings(**values)
    _check_together(settings)
    origins = {each.name: found[each.name][2] if each.name in found else "default" for each in SETTINGS}
    return Settled(settings=settings, origins=origins)


def as_json(settled: Settled) -> dict[str, dict[str, Any]]:
    """{name: {"value", "origin", "unit"}}; a secret's value is only told to be set (true) or not (null)."""
    values = dataclasses.asdict(settled.settings)
    return {
        each.name: {
            "value": (True if values[each.name] else None) if each.secret else values[each.name],
            "origin": settled.origins[each.name],
            "unit": each.unit or None,
        }
        for each in SETTINGS
    }


def _check_together(settings: Settings) -> None:
    if settings.pool_tokens is not None and settings.pool_tokens < settings.page_tokens:
        raise ConfigError(f"pool_tokens is {settings.pool_tokens}, less than one page of {settings.page_tokens} "
                          "tokens; raise pool_tokens or lower page_tokens")
    if settings.max_body_bytes == 0:
        raise ConfigError("max_body_bytes is 0, so no request could be read; give for example 8MiB")


def _from_environment(variables: Mapping[str, str]) -> list[tuple[str, str]]:
    named = {setting.variable: setting.name for setting in SETTINGS}
    for variable in sorted(variables):
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in named:
            raise ConfigError(f"environment variable {variable} is not a setting{_near(variable, named)}")
    return [(name, variables[variable]) for variable, name in named.items() if variable in variables]


def _from_file(config: Path | None, directory: Path) -> list[tuple[str, Any, str]]:
    path = directory / CONFIG_FILE if config is None else config
    if config is None and not path.is_file():
        return []
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read --config {path}: {error.strerror}; give the path of a TOML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text; save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for name in table:
        if name not in _BY_NAME:
            raise ConfigError(f"{name!r} in {path} is not a setting{_near(name, _BY_NAME)}")
    return [(name, raw, str(path)) for name, raw in table.items()]


def _near(name: str, known: Mapping[str, Any]) -> str:
    """The way out of a misspelling."""
    by_word = {each.removeprefix(ENVIRONMENT_PREFIX).lower(): each for each in known}
    word = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("-", "_")
    match = difflib.get_close_matches(word, by_word, n=1, cutoff=0.6)
    return f"; did you mean {by_word[match[0]]}?" if match else "; `hostcache config show` lists them all"
