"""The workloads by name: for tables that name one, and for processes that are told which to play."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hostcache.bench.harness.agents import AgentsParameters
from hostcache.bench.harness.equivalence import EquivalenceParameters
from hostcache.bench.harness.ladder import LadderParameters
from hostcache.bench.harness.parameters import from_table
from hostcache.bench.harness.replay import ProfileParameters, ReplayParameters
from hostcache.bench.harness.rotate import RotateParameters
from hostcache.errors import ConfigError

Played = RotateParameters | AgentsParameters | ProfileParameters | ReplayParameters

PLAYED: Mapping[str, type[Played]] = {
    each.NAME: each for each in (RotateParameters, AgentsParameters, ProfileParameters, ReplayParameters)
}
"""Workloads that are played by clients."""

Known = Played | LadderParameters | EquivalenceParameters

WORKLOADS: Mapping[str, type[Known]] = {
    **PLAYED, LadderParameters.NAME: LadderParameters, EquivalenceParameters.NAME: EquivalenceParameters,
}
"""All of them: a table may name any."""


def played(name: str, table: Mapping[str, Any], *, where: str = "parameters") -> Played:
    """The workload of that name with these parameters. Raises ConfigError."""
    if name not in PLAYED:
        raise ConfigError(f"{where}: no workload is named {name!r}; there are {', '.join(PLAYED)}")
    return from_table(PLAYED[name], table, where=where)
