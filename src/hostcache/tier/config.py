"""The tier's settings, settled once at the door. Reads no file and no environment."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hostcache.errors import ConfigError


class Mode(Enum):
    """When snapshots are written back."""

    ON_PRESSURE = "on-pressure"
    """as they come within reach of eviction (default)"""
    ON_RETAIN = "on-retain"
    """as soon as they are retained"""
    ON_EVICT = "on-evict"
    """when the engine is about to drop them, with a bounded wait"""
    OFF = "off"


EVICTIONS = ("scan-resistant", "lru")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """Sizes in bytes, times in seconds. `host_cache_bytes` is the total over everything the tier holds."""

    host_cache_bytes: int
    page_bytes: int
    page_tokens: int
    mode: Mode = Mode.ON_PRESSURE
    copy_budget_s: float = 1.0
    restore_budget_s: float = 0.5
    store_pace_s: float = 0.0
    max_job_pages: int = 256
    eviction: str = "scan-resistant"
    quarantine_limit: float = 0.25
    """Share of quarantined frames above which the tier turns itself off."""

    def __post_init__(self) -> None:
        for name in ("page_bytes", "page_tokens", "max_job_pages"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1")
        for name in ("host_cache_bytes", "copy_budget_s", "restore_budget_s", "store_pace_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 0 or more")
        if not 0 < self.quarantine_limit <= 1:
            raise ConfigError(f"quarantine_limit is {self.quarantine_limit}; give a share over 0, at most 1")
        if self.eviction not in EVICTIONS:
            raise ConfigError(f"eviction is {self.eviction!r}; choose one of {', '.join(EVICTIONS)}")

    @property
    def frames(self) -> int:
        """How many pages the quota holds; 0 when the tier is off."""
        return 0 if self.mode is Mode.OFF else self.host_cache_bytes // self.page_bytes
