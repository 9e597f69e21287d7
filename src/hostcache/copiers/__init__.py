"""Who moves the bytes, and the memory they move to. Decides nothing about what is worth moving."""

from __future__ import annotations

from hostcache.copiers.faults import Delay, Fail, Fault, FaultAction, Hold, fault_at
from hostcache.copiers.memory import MachineMemory, available_bytes, check_quota, memory_limit, read_memory
from hostcache.copiers.slabs import Slabs
from hostcache.copiers.threads import CopierStats, DirectionStats, ThreadCopier

__all__ = [
    "CopierStats",
    "Delay",
    "DirectionStats",
    "Fail",
    "Fault",
    "FaultAction",
    "Hold",
    "MachineMemory",
    "Slabs",
    "ThreadCopier",
    "available_bytes",
    "check_quota",
    "fault_at",
    "memory_limit",
    "read_memory",
]
