"""What a stranger needs to prove his part against ours: contracts as functions, run by our own tests too."""

from __future__ import annotations

from hostcache.testing.contracts import ContractBroken, ContractReport, CopierRig, check_copier

__all__ = ["ContractBroken", "ContractReport", "CopierRig", "check_copier"]
