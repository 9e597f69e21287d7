"""The connector's settings: from kv_connector_extra_config, and where that is silent from where every setting comes.

Same names as everywhere (`host_cache_bytes`, …). Knows nothing of vLLM: the extra config is a mapping.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hostcache.errors import ConfigError
from hostcache.settings import SETTINGS, Parser, Settings, settle
from hostcache.tier import Mode, TierConfig

WHERE = "kv_connector_extra_config"
SHARED = tuple(each.name for each in SETTINGS if each.name.startswith("host_cache_"))
"""Settings as everywhere: settings.py says what each is, its kinds and limits."""
KEEP_ON_RESET = "host_cache_keep_on_reset"
"""Of the plugin alone: true says that whoever resets vLLM's prefix cache has not changed the weights."""
KEYS = (*SHARED, KEEP_ON_RESET)
"""What may stand in the extra config."""


def _boolean(raw: Any, name: str) -> bool:
    value = raw if isinstance(raw, bool) else {"true": True, "false": False}.get(str(raw))
    if value is None:
        raise ConfigError(f"{name} is {raw!r}; give true or false")
    return value


_PARSE: dict[str, Parser] = {each.name: each.parse for each in SETTINGS if each.name in SHARED}
_PARSE[KEEP_ON_RESET] = _boolean


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """Settled. `host_cache_bytes` is the total over all ranks of one engine; times in seconds."""

    host_cache_bytes: int
    mode: Mode
    copy_budget_s: float
    restore_budget_s: float
    store_pace_s: float
    eviction: str
    keep_on_reset: bool = False

    @property
    def off(self) -> bool:
        """Nothing of the tier runs."""
        return self.host_cache_bytes == 0 or self.mode is Mode.OFF

    def tier(self, *, page_bytes: int, page_tokens: int) -> TierConfig:
        """`page_bytes`: of one block over all layers and all ranks."""
        return TierConfig(
            host_cache_bytes=self.host_cache_bytes, page_bytes=page_bytes, page_tokens=page_tokens, mode=self.mode,
            copy_budget_s=self.copy_budget_s, restore_budget_s=self.restore_budget_s, store_pace_s=self.store_pace_s,
            eviction=self.eviction)


def read(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The values in plain units. Raises ConfigError, in one line, for an unknown key or a bad value."""
    for key in extra:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key).lower().replace("-", "_"), KEYS, n=1, cutoff=0.6)
            way = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(KEYS)}"
            raise ConfigError(f"{key!r} in {WHERE} is not a setting; {way}")
    return {key: _PARSE[key](raw, f"{key} in {WHERE}") for key, raw in extra.items()}


def refuse_verify(value: str) -> None:
    """Raises ConfigError for anything but off: what is asked for and not done must be told, not ignored."""
    if value != "off":
        raise ConfigError(f"host_cache_verify is {value!r}; inside vLLM restored bytes are not compared yet: give off")


def from_extra(extra: Mapping[str, Any], *, environ: Mapping[str, str] | None = None) -> PluginConfig:
    """Extra config > environment > hostcache.toml > default. `environ` None reads the process's own."""
    values = read(extra)
    keep = values.pop(KEEP_ON_RESET, False)
    settings = settle(values, environ=environ).settings
    refuse_verify(settings.host_cache_verify)
    return PluginConfig(
        host_cache_bytes=settings.host_cache_bytes, mode=Mode(settings.host_cache_mode),
        copy_budget_s=settings.host_cache_copy_budget_ms / 1000,
        restore_budget_s=settings.host_cache_restore_budget_ms / 1000,
        store_pace_s=settings.host_cache_store_pace_ms / 1000, eviction=settings.host_cache_eviction,
        keep_on_reset=keep)


def to_extra(settings: Settings) -> dict[str, Any]:
    """Every shared key in plain units, so that no process of the server has to settle anything of its own."""
    return {key: getattr(settings, key) for key in SHARED}
