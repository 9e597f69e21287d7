"""Who moves the bytes, and the memory they move to. Decides nothing about what is worth moving."""

from __future__ import annotations

from hostcache.copiers.faults import (
    Delay,
    Fail,
    Fault,
    FaultAction,
    Hold,
    Late,
    Twice,
    Wedge,
    fault_at,
    random_faults,
)
from hostcache.copiers.memory import MachineMemory, available_bytes, check_quota, memory_limit, read_memory
from hostcache.copiers.slabs import Slabs
from hostcache.copiers.threads import CopierStats, DirectionStats, ThreadCopier
from hostcache.copiers.virtual import CopySpeed, Mover, VirtualCopier

__all__ = [
    "CopierStats",
    "CopySpeed",
    "Delay",
    "DirectionStats",
    "Fail",
    "Fault",
    "FaultAction",
    "Hold",
    "Late",
    "MachineMemory",
    "Mover",
    "Slabs",
    "ThreadCopier",
    "Twice",
    "VirtualCopier",
    "Wedge",
    "available_bytes",
    "check_quota",
    "fault_at",
    "memory_limit",
    "random_faults",
    "read_memory",
]
