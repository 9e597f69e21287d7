"""Our curves beside two other simulators, where those are right; and where they are not, on small streams.

    libcachesim         LRU and Belady, one reference at a time. Its Belady always takes the newcomer in, so it is no
                        bound for a tier that may decline one
    kvcache-simulator   LRU and `optimal` over chained blocks, looked up by request, only leaves evicted: our tail-first
                        LRU and our optimum with bypass. It counts hits in the last half of a trace alone but optimizes
                        over all of it, so its `optimal` is no bound of what it reports

Both are optional; their tests are skipped without them. kvcache-simulator compiles its core with `c++` at first use.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hostcache.lab.lru import lru_hits, stack_distances
from hostcache.lab.opt import next_uses, optimal_depths, optimal_hits
from hostcache.lab.oracle import lru_curve, opt_curve
from hostcache.lab.stream import Stream, stream_of
from hostcache.workload.traces import open_trace

CONVERSATION = Path(__file__).resolve().parents[3] / "shared/data/mooncake_conversation_trace.jsonl.gz"
needs_trace = pytest.mark.skipif(not CONVERSATION.exists(), reason="the public traces are not beside the checkout")

Ids = NDArray[np.int32]
NEVER_USED_AGAIN = 2**63 - 1
NO_BYPASS = [0, 1, 0, 2, 0, 1]
"""One entry: who may decline keeps 0 and hits twice; who must take each newcomer in never hits."""
WINDOW = [2, 0, 1, 0, 2, 1, 2, 2, 1, 1]
"""Two entries, the last five references counted: FIFO holds all of them."""


def streams(distinct: int, size: int) -> st.SearchStrategy[Ids]:
    return st.lists(st.integers(0, distinct - 1), min_size=1, max_size=size).map(lambda ids: np.array(ids, np.int32))


@cache
def conversation(limit: int | None) -> Stream:
    return stream_of(open_trace(CONVERSATION), limit=limit)


def by_trying_everything(ids: Iterable[int], capacity: int, *, bypass: bool) -> int:
    """The most hits that any choice at any miss can give."""
    best = {frozenset[int](): 0}
    for each in ids:
        after: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            if each in held:
                choices, hits = [held], hits + 1  # noqa: PLW2901
            else:
                choices = [held | {each}] if len(held) < capacity else [held - {out} | {each} for out in held]
                choices += [held] if bypass else []
            for choice in choices:
                after[choice] = max(hits, after.get(choice, 0))
        best = after
    return max(best.values())


def fifo_hits(ids: Iterable[int], capacity: int) -> int:
    held: list[int] = []
    hits = 0
    for each in ids:
        if each in held:
            hits += 1
        else:
            held = [*held, each][-capacity:]
    return hits


# Our own, which need no peer ----------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(streams(5, 12), st.integers(1, 4), st.booleans())
@example(np.array(NO_BYPASS, np.int32), 1, True)
def test_no_choice_at_any_miss_beats_the_optimum(ids: Ids, capacity: int, bypass: bool) -> None:
    depths = optimal_depths(ids, 5, bypass=bypass)
    assert ((depths > 0) & (depths <= capacity)).sum() == by_trying_everything(ids.tolist(), capacity, bypass=bypass)


@settings(max_examples=100, deadline=None)
@given(streams(8, 60))
@example(np.array(WINDOW, np.int32))
def test_neither_fifo_nor_lru_beats_our_optimum_at_any_capacity(ids: Ids) -> None:
    lru, best = stack_distances(ids, 8), optimal_depths(ids, 8, bypass=True)
    for capacity in range(1, 10):
        most = ((best > 0) & (best <= capacity)).sum()
        assert fifo_hits(ids.tolist(), capacity) <= most
        assert ((lru > 0) & (lru <= capacity)).sum() <= most


# libcachesim --------------------------------------------------------------------------------------------------------

Simulated = Callable[[Sequence[int] | Ids, int, str], int]
"""ids, capacity in entries, the peer's name of a policy → hits"""


@pytest.fixture(scope="module")
def libcachesim() -> Simulated:
    peer: Any = pytest.importorskip("libcachesim", exc_type=ImportError,
                                    reason="pip install libcachesim==0.3.5 to compare with it")

    def hits(ids: Sequence[int] | Ids, capacity: int, policy: str) -> int:
        # Its hash table starts with two to the power of `hashpower` slots, by default 128 MB of them.
        held, asked, found = getattr(peer, policy)(cache_size=capacity, hashpower=12), peer.Request(obj_size=1), 0
        numbers = np.asarray(ids, dtype=np.int32)
        for at, (each, use) in enumerate(zip(numbers.tolist(), next_uses(numbers).tolist(), strict=True)):
            asked.obj_id, asked.clock_time = each + 1, at
            asked.next_access_vtime = use if use < len(numbers) else NEVER_USED_AGAIN
            found += held.get(asked)
        return found

    return hits


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=streams(12, 120))
def test_libcachesim_has_our_lru_and_our_optimum_without_bypass(libcachesim: Simulated, ids: Ids) -> None:
    for capacity in (1, 2, 3, 5, 8, 13):
        assert libcachesim(ids, capacity, "LRU") == lru_hits(ids, capacity)
        assert libcachesim(ids, capacity, "Belady") == optimal_hits(ids, capacity, bypass=False)


@needs_trace
@pytest.mark.parametrize(("limit", "capacities"), [(600, (64, 1024, 8000)), (None, (1000,))])
def test_libcachesim_has_our_curves_on_the_conversation_trace(libcachesim: Simulated, limit: int | None,
                                                              capacities: tuple[int, ...]) -> None:
    stream = conversation(limit)
    curves = {"LRU": lru_curve(stream), "Belady": opt_curve(stream, bypass=False)}
    for capacity in capacities:
        for policy in curves if limit else ("Belady",):  # a second for each, and LRU has another witness below
            assert libcachesim(stream.ids, capacity, policy) == curves[policy].hits(capacity)


def test_libcachesims_belady_is_no_bound_for_a_tier_that_may_decline(libcachesim: Simulated) -> None:
    ids = np.array(NO_BYPASS, np.int32)
    assert libcachesim(NO_BYPASS, 1, "Belady") == by_trying_everything(NO_BYPASS, 1, bypass=False) == 0
    assert optimal_hits(ids, 1, bypass=True) == by_trying_everything(NO_BYPASS, 1, bypass=True) == 2


@needs_trace
def test_what_declining_is_worth_on_the_conversation_trace() -> None:
    stream = conversation(None)
    assert opt_curve(stream, bypass=False).hits(1000) / stream.references == pytest.approx(0.190620, abs=5e-7)
    assert opt_curve(stream).hits(1000) / stream.references == pytest.approx(0.190707, abs=5e-7)


# kvcache-simulator --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KvcacheSimulator:
    """One of its two backends. A block is one token to it, so that its hit tokens are hits."""

    modules: dict[str, Any]
    compiled: bool

    def counted(self, requests: Sequence[Sequence[int]], capacity: int, *, uncounted: int) -> dict[str, int]:
        """Hits by policy, in all requests but the first `uncounted`."""
        ids = list(chain.from_iterable(requests))
        starts = [0, *np.cumsum([len(each) for each in requests]).tolist()]
        trace = self.modules["trace"].TraceData(
            ids=ids, tokens=[1] * len(ids), request_starts=starts, block_size=1, request_count=len(requests),
            unique_raw_blocks=len(set(ids)), total_input_tokens=len(ids), average_input_tokens=1.0, parse_errors=0,
            skipped_records=0)
        policies = ["fifo", "lru", "optimal"]
        if self.compiled:
            found = self.modules["cpp_backend"].run_cpp_sweep(
                trace, capacities=[capacity], policies=policies, warmup_requests=uncounted).results
            results = {policy: found[policy, capacity] for policy in policies}
        else:
            plan = dataclasses.replace(self.modules["plan"].build_execution_plan(trace), warmup_requests=uncounted)
            results = {policy: self.modules["policies"].simulate_policy(plan, policy, capacity) for policy in policies}
        # It reports nothing for a cache that is not full by then, and says so here alone.
        assert {each.measurementMode for each in results.values()} == {"fixed_window"}
        return {policy: each.hitTokens for policy, each in results.items()}

    def hits(self, requests: Sequence[Sequence[int]], capacity: int) -> dict[str, int]:
        """Hits by policy, of all requests: it is first filled with blocks that never come back, uncounted."""
        top = 1 + max(chain.from_iterable(requests))
        return self.counted([*([top + each] for each in range(capacity)), *requests], capacity, uncounted=capacity)


@pytest.fixture(scope="module", params=["python", "c++"])
def kvcache_simulator(request: pytest.FixtureRequest) -> KvcacheSimulator:
    pytest.importorskip("kvcache_sim", reason="pip install kvcache-simulator==0.1.3 to compare with it")
    if request.param == "c++" and shutil.which("c++") is None:
        pytest.skip("kvcache-simulator compiles its core at first use; there is no c++ here")
    return KvcacheSimulator(compiled=request.param == "c++", modules={
        name: pytest.importorskip(f"kvcache_sim.{name}") for name in ("trace", "plan", "policies", "cpp_backend")})


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=streams(8, 60))
def test_kvcache_simulator_has_our_lru_and_our_optimum_where_requests_are_one_block(
        kvcache_simulator: KvcacheSimulator, ids: Ids) -> None:
    requests = [[each] for each in ids.tolist()]
    for capacity in (1, 2, 3, 5):
        assert kvcache_simulator.hits(requests, capacity) == {
            "fifo": fifo_hits(ids.tolist(), capacity), "lru": lru_hits(ids, capacity),
            "optimal": optimal_hits(ids, capacity, bypass=True)}


@needs_trace
@pytest.mark.parametrize(("limit", "capacities"), [(600, (256, 1024, 4000)), (None, (1000, 10_000))])
def test_kvcache_simulator_has_our_tail_first_lru_and_our_optimum_on_the_conversation_trace(
        kvcache_simulator: KvcacheSimulator, limit: int | None, capacities: tuple[int, ...]) -> None:
    """No capacity is less than the longest prompt, 247 blocks: there it evicts a block of the prompt it takes in."""
    if limit is None and not kvcache_simulator.compiled:
        pytest.skip("the whole trace takes its Python minutes")
    stream = conversation(limit)
    lru, best = lru_curve(stream, "tail-first"), opt_curve(stream)
    requests = [each.tolist() for each in np.split(stream.ids, stream.starts[1:-1])]
    for capacity in capacities:
        hits = kvcache_simulator.hits(requests, capacity)
        assert (hits["lru"], hits["optimal"]) == (lru.hits(capacity), best.hits(capacity))


def test_kvcache_simulators_optimal_is_beaten_by_its_own_fifo(kvcache_simulator: KvcacheSimulator) -> None:
    requests = [[each] for each in WINDOW]
    counted = kvcache_simulator.counted(requests, 2, uncounted=5)
    assert (counted["fifo"], counted["optimal"]) == (5, 4)
    # Over all that it optimizes it is optimal, and so are we.
    hits = kvcache_simulator.hits(requests, 2)
    assert hits["fifo"] == fifo_hits(WINDOW, 2) == 6
    assert hits["optimal"] == optimal_hits(np.array(WINDOW, np.int32), 2, bypass=True) == 6
