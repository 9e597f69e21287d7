"""Ids by order of first appearance, as runs: what a dictionary would say, in less memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hostcache.workload.trace_ids import KnownIds

IDS = st.integers(0, 30) | st.integers(2**63 - 2, 2**63 + 2) | st.integers(2**64 - 6, 2**64 - 1)
PROMPTS = st.lists(st.lists(IDS, max_size=8, unique=True), max_size=25)


@settings(max_examples=300, deadline=None)
@given(prompts=PROMPTS, together=st.integers(1, 6), recent=st.sampled_from([1, 3, 2**16]))
@example(prompts=[[2**64 - 1], [2**64 - 2, 0], [0, 1]], together=1, recent=1)
@example(prompts=[[5, 6, 7], [7], [6, 7]], together=3, recent=1)
def test_ranks_and_what_each_id_follows_are_those_of_a_dictionary(
    prompts: list[list[int]], together: int, recent: int
) -> None:
    ids, ranks, behind = KnownIds(recent=recent), dict[int, int](), dict[int, int | None]()
    torn = False
    for first in range(0, len(prompts), together):
        some = prompts[first : first + together]
        blocks = np.array([block for prompt in some for block in prompt], dtype=np.uint64)
        got = ids.add(blocks, np.cumsum([0, *map(len, some)]))
        assert got.tolist() == [ranks.setdefault(block, len(ranks)) for block in blocks.tolist()]
        assert len(ids) == len(ranks)
        changed = [block for prompt in some for before, block in zip([None, *prompt], prompt, strict=False)
                   if behind.setdefault(block, before) != before]
        torn = torn or bool(changed)
        assert (ids.torn is not None) == torn
        if changed:
            assert ids.torn == changed[0]


@pytest.mark.parametrize(("step", "bytes_"), [(1, 1), (3, 50)])
def test_ids_take_32_bytes_a_run_and_little_more_while_runs_are_merged(step: int, bytes_: int) -> None:
    """Of 1.2 million ids: prompts of 60 that are one run, or sixty."""
    ids, size = KnownIds(), 6_000
    starts = np.arange(0, size + 1, 60)
    tracemalloc.start()
    try:
        for first in range(0, 1_200_000, size):
            ids.add(np.arange(first, first + size, dtype=np.uint64) * np.uint64(step), starts)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(ids) == 1_200_000
    assert peak < 1_200_000 * bytes_ + 4_000_000
