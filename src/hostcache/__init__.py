"""A write-back host-RAM tier for the KV cache of LLM conversations.

The public names live in `hostcache.tier` and are looked up on first use, so `import hostcache` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hostcache.tier import (
        BankView,
        Clean,
        Copier,
        CopyDone,
        CopyJob,
        Drop,
        History,
        HostCache,
        Identity,
        KeyChain,
        Match,
        Mode,
        Pressure,
        Refused,
        Reservation,
        StoreJob,
        TierConfig,
        TierStats,
        Wait,
        key_chain,
        within_reach,
    )

__version__ = "0.1.0"

__all__ = [
    "BankView",
    "Clean",
    "Copier",
    "CopyDone",
    "CopyJob",
    "Drop",
    "History",
    "HostCache",
    "Identity",
    "KeyChain",
    "Match",
    "Mode",
    "Pressure",
    "Refused",
    "Reservation",
    "StoreJob",
    "TierConfig",
    "TierStats",
    "Wait",
    "__version__",
    "key_chain",
    "within_reach",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("hostcache.tier"), name)
    raise AttributeError(f"module 'hostcache' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
