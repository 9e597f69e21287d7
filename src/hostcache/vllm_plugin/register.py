"""Tells vLLM the connector's name: the entry point `hostcache` of `vllm.general_plugins`, run in all its processes."""

from __future__ import annotations

import contextlib

CONNECTOR = "HostCacheConnector"
MODULE = "hostcache.vllm_plugin.connector"
ENTRY_POINT = "hostcache"
"""What VLLM_PLUGINS must name where it is set."""


def register() -> None:
    """May be called any number of times. Loads nothing of ours: vLLM imports MODULE when the connector is asked for."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # raised for a name that is registered already
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
