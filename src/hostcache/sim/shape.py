"""What a fleet is: sizes, limits, speeds. A frozen record, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hostcache.copiers.virtual import CopySpeed
from hostcache.errors import ConfigError
from hostcache.sim.costs import Costs
from hostcache.tier import TierConfig


class Lane(Enum):
    """How prefill and decode share the device."""

    EXCLUSIVE = "exclusive"
    """one request at a time is admitted, restored and prefilled to its end while decoding stands still"""
    CHUNKED = "chunked"
    """a step takes a chunk of prefill and one decode round of all streams"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    """Everything about a fleet that is not its workload. Sizes in tokens, pages or bytes; times in seconds."""

    tier: TierConfig
    costs: Costs
    speed: CopySpeed
    pool_tokens: int
    slots: int = 16
    prompt_entries: int = 24
    turn_entries: int = 24
    lane: Lane = Lane.CHUNKED
    chunk_tokens: int = 512
    door_slots: int = 16
    door_waiting: int = 64
    door_wait_s: float = 30.0
    hand_off: bool = False
    """The door counts those who wait for a slot of the engine; else all until they end."""
    reach_pages: int = 0
    """Snapshots are within reach of eviction while fewer device pages than this are free."""
    reach_entries: int = 2
    prompts_first: bool = False
    look_behind_match: bool = True
    """The host is asked also where the device has the beginning."""
    keep_restored: bool = False
    """What was restored becomes a snapshot of its own, in the bank it was in."""
    supersede: bool = True
    """A retained snapshot takes the place of those it continues."""
    reserve_reply: bool = True
    """Admission takes the pages of the whole reply; else decoding takes them one by one and may preempt."""
    look_ahead_tokens: int = 0
    tail_bytes: int = 0
    """Bytes of a snapshot that make sense only at exactly its frontier (0: it has none). See `tail_quota_bytes`."""
    tail_quota_bytes: int = 0
    replay_tokens: int = 128
    """Computed again behind a match that does not end at a frontier, in a fleet with tails."""
    lanes: int = 2
    """Copy lanes: 2 for one a direction."""

    def __post_init__(self) -> None:
        for name in ("slots", "chunk_tokens", "door_slots"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.pool_tokens < self.tier.page_tokens:
            raise ConfigError(f"a pool of {self.pool_tokens} tokens holds no page of {self.tier.page_tokens}; "
                              "give at least one page")

    @property
    def page(self) -> int:
        return self.tier.page_tokens

    @property
    def pool_pages(self) -> int:
        return self.pool_tokens // self.page
