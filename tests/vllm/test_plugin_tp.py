"""Two tensor-parallel ranks, each with its half of every block in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.vllm.engine import POOL, PROMPTS, SETTINGS, Engine

pytestmark = pytest.mark.vllm


def test_two_ranks_restore_the_same_and_the_failure_of_one_fails_the_load(tiny_llama: Path) -> None:
    engine = Engine(tiny_llama, blocks=POOL, extra=SETTINGS, connector="SecondRankFailsOnce", module="tests.vllm.drill",
                    tensor_parallel_size=2)
    try:
        # Without a cache the sum over ranks may be rounded otherwise than on one: cold is what these two say at first.
        cold = [engine.answers([tokens])[0] for tokens in PROMPTS[:12]]
        assert engine.side.tier.stats().counters.restores == 0
        outs = [engine.ask([tokens])[0] for tokens in PROMPTS[:12]]
        assert [list(out.outputs[0].token_ids) for out in outs] == cold
        counters = engine.side.tier.stats().counters
        assert (counters.restore_failures, counters.restores) == (1, 11)
        assert engine.side.config.page_bytes == 32 << 10  # of both ranks, as of one that has all
        engine.at_rest()
    finally:
        engine.close()
