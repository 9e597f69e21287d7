"""Two engines behind one address. Red: with `--data-parallel-size` engines get in each other's way, or share what they
must not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.vllm.server import BLOCK, SMALL, prompt, serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(500)]


def test_each_engine_restores_its_own_and_nothing_of_the_other(tiny_llama: Path, server_environ: dict[str, str],
                                                               tmp_path: Path) -> None:
    with serving(tiny_llama, log=tmp_path / "serve.log", ours=["--host-cache-bytes", "32MiB"],
                 theirs=[*SMALL, "--data-parallel-size", "2"], environ=server_environ) as server:
        for rank in (0, 1):
            here, there = ({"X-data-parallel-rank": str(each)} for each in (rank, 1 - rank))
            wanted = prompt(f"of {rank}", 10)
            cold = server.ask(wanted, headers=here)
            server.evict(f"on {rank}", headers=here)
            warm = server.ask(wanted, headers=here)
            other = server.ask(wanted, headers=there)
            assert (cold.cached, warm.cached, other.cached) == (0, 10 * BLOCK, 0)
            assert cold.tokens == warm.tokens == other.tokens
        now = server.metrics()
        assert [now[f"hostcache_cached_tokens_total{{source={source}}}"] for source in ("device", "host")] == [
            0, 2 * 10 * BLOCK]
        assert now["hostcache_quota_bytes{engine=0}"] == now["hostcache_quota_bytes{engine=1}"] > 0
