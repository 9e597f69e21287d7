"""An arm is what the server says it is, and nothing that could differ between arms is left to chance."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest

from hostcache.bench.servers import ServerPlan, check_arm, peak_rss_bytes
from hostcache.errors import ServerError

ON = ServerPlan(model="m", pool_tokens=320, page_tokens=32, host_cache_bytes=1000, concurrency=16)
OFF = dataclasses.replace(ON, host_cache_bytes=0)
SAYS_ON: dict[str, Any] = {"host_cache": {"quota_bytes": 990}, "host_cache_config": {"host_cache_mode": "on-pressure"}}
SAYS_OFF: dict[str, Any] = {"host_cache": None, "host_cache_config": None}


def test_an_arm_that_is_what_was_asked_passes() -> None:
    check_arm(ON, SAYS_ON)
    check_arm(OFF, SAYS_OFF)


@pytest.mark.parametrize(("plan", "says", "why"), [
    (OFF, SAYS_ON, "off arm's server reports a host cache"),
    (ON, SAYS_OFF, "host_cache null"),
    (ON, {}, "host_cache null"),
    (ON, {**SAYS_ON, "host_cache": {"quota_bytes": 2000}}, "quota of 2000 bytes, asked for 1000"),
    (ON, {**SAYS_ON, "host_cache": {"quota_bytes": 0}}, "quota of 0"),
    (ON, {**SAYS_ON, "host_cache": {}}, "quota of None"),
    (ON, {**SAYS_ON, "host_cache_config": {"host_cache_mode": "off"}}, "mode 'off'"),
    (ON, {**SAYS_ON, "host_cache_config": None}, "mode None"),
])
def test_any_other_answer_fails_before_anything_is_measured(plan: ServerPlan, says: dict[str, Any], why: str) -> None:
    with pytest.raises(ServerError, match=why) as refused:
        check_arm(plan, says)
    assert "nothing was measured" in str(refused.value)


def test_both_arms_get_the_same_flags_but_for_the_quota() -> None:
    on, off = ON.flags(), OFF.flags()
    assert len(on) == len(off)
    assert [pair for pair in zip(on, off, strict=True) if pair[0] != pair[1]] == [("1000", "0")]
    assert {"--pool-tokens", "--page-tokens", "--host-cache-mode", "--concurrency", "--prefix-cache-entries"} <= {*on}


def test_peak_memory_is_read_of_a_living_process_and_unknown_of_none() -> None:
    assert (peak_rss_bytes(os.getpid()) or 0) > 1 << 20
    assert peak_rss_bytes(2**22 + 1) is None
