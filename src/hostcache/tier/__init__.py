"""The tier: what is kept on the host, when it is written, what it saves. Standard library and numpy; copies nothing."""

from hostcache.tier.accounting import Account, Accounting, AccountingStats, RequestReport, check_balance
from hostcache.tier.answers import BankView, Clean, Drop, Match, Pressure, Refused, Reservation, StoreJob, Wait
from hostcache.tier.cache import HostCache
from hostcache.tier.config import Mode, TierConfig
from hostcache.tier.copying import Copier, CopyDone, CopyJob, Direction, Extent, extents
from hostcache.tier.history import History
from hostcache.tier.keys import Identity, KeyChain, PageKey, chain_ids, key_chain
from hostcache.tier.reasons import Reason
from hostcache.tier.stats import Counters, Family, TierStats, families, prometheus_text
from hostcache.tier.writeback import within_reach

__all__ = [
    "Account",
    "Accounting",
    "AccountingStats",
    "BankView",
    "Clean",
    "Copier",
    "CopyDone",
    "CopyJob",
    "Counters",
    "Direction",
    "Drop",
    "Extent",
    "Family",
    "History",
    "HostCache",
    "Identity",
    "KeyChain",
    "Match",
    "Mode",
    "PageKey",
    "Pressure",
    "Reason",
    "Refused",
    "RequestReport",
    "Reservation",
    "StoreJob",
    "TierConfig",
    "TierStats",
    "Wait",
    "chain_ids",
    "check_balance",
    "extents",
    "families",
    "key_chain",
    "prometheus_text",
    "within_reach",
]
