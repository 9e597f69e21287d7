"""The cases of users of other systems (O1, O2, O5–O8), on the real tier. O3 and O4 need an engine: tests/engine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hostcache.testing.rig import Rig, done
from hostcache.tier import (
    Identity,
    Match,
    Pressure,
    Reason,
    Refused,
    Reservation,
    TierConfig,
    key_chain,
)

PAGE = 16


def rig(*, device: int, host: int, **options: object) -> Rig:
    config = TierConfig(
        host_cache_bytes=host, page_bytes=1, page_tokens=PAGE,
        **{k: options.pop(k) for k in ("eviction", "mode", "max_job_pages") if k in options},  # type: ignore[arg-type]
    )
    return Rig(config, device, **options)  # type: ignore[arg-type]


def prompt(name: int, pages: int, rest: int = 1) -> list[int]:
    """`pages` whole pages of tokens of their own, and a rest that keeps the last page usable."""
    return [name * 1_000_000 + i for i in range(pages * PAGE + rest)]


def stored(r: Rig, tokens: list[int]) -> int:
    chain = r.chain(tokens)
    return r.cache.lookup(chain, 0, len(chain)).pages


@pytest.mark.parametrize("entries", [8, 7])
def test_o1_a_host_smaller_than_the_device_still_adds_hits(entries: int) -> None:
    r = rig(device=8, host=4, entries=entries, reach_pages=1, reach_entries=1)
    hits: list[tuple[int, int]] = []
    for turn in range(30):
        visit = r.visit(prompt(turn % 10, 1))
        r.check()
        hits.append((visit.device, visit.host))
    assert sum(device for device, _ in hits) == 0
    assert sum(host for _, host in hits[:10]) == 0
    assert sum(host for _, host in hits[10:]) == 20
    assert r.cache.stats().duplicate_pages >= 0


def test_o2_a_match_that_was_evicted_before_its_allocation_gets_shorter_and_never_foreign() -> None:
    r = rig(device=8, host=4)
    a = prompt(1, 4)
    r.visit(a)
    r.evict(next(iter(r.bank)))
    match = r.cache.lookup(r.chain(a), 0, 4)
    assert match.pages == 4

    # (a) allocated after all: C may take the frames first, then A restores what is left.
    reservation = r.cache.reserve(match)
    assert isinstance(reservation, Reservation)
    assert reservation.pages == 4
    r.visit(prompt(2, 4))
    r.evict(next(iter(r.bank)))
    r.check()
    assert stored(r, prompt(2, 4)) == 0
    assert stored(r, a) == 4
    # (b) cancelled: no pin remains, and storing C succeeds with exactly four evictions.
    r.cache.abandon(reservation, Reason.ABORTED, copying=False)
    assert r.cache.stats().pinned_pages == 0
    before = r.cache.stats().counters.host_evicted_pages
    r.visit(prompt(3, 4))
    r.evict(next(iter(r.bank)))
    r.check()
    assert stored(r, prompt(3, 4)) == 4
    assert r.cache.stats().counters.host_evicted_pages - before == 4
    # (c) the match alone protected nothing: it is refused, never an exception.
    assert r.cache.reserve(match) == Refused(reason=Reason.EVICTED)


def test_o5_a_write_that_never_completes_costs_its_pages_and_nothing_else() -> None:
    r = rig(device=40, host=11, eager=False)
    prefix = prompt(1, 10)
    r.visit(prefix)
    snapshot = next(iter(r.bank))
    (job,) = r.cache.plan_writeback(Pressure(now_s=0.0, victims=(snapshot,)))
    r.drop(snapshot)
    request = [*prefix[:160], *range(16)]
    match = r.cache.lookup(r.chain(request), 0, 10)
    assert (match.pages, match.pending) == (0, True)
    visit = r.visit(request)
    assert visit.host == 0
    assert visit.report.recomputed[Reason.NOT_READY] == 160
    assert r.cache.stats().free_frames == 1
    r.cache.expire(job.job_id, running=False)
    assert r.cache.stats().free_frames == 11
    r.check()
    (again,) = r.cache.plan_writeback(Pressure(now_s=1.0, victims=tuple(r.bank)))
    r.submit([again])
    r.pump()
    r.evict(next(iter(r.bank)))
    assert r.visit([*prefix[:160], *range(16)]).host == 10
    before = r.cache.stats()
    r.cache.settle(done(job.job_id))
    after = r.cache.stats()
    assert after.counters.late_completions == before.counters.late_completions + 1
    assert after.resident_pages == before.resident_pages
    r.check()


def test_o5_a_copy_that_still_runs_keeps_its_frames_until_it_is_heard_of() -> None:
    r = rig(device=40, host=40, eager=False)
    r.visit(prompt(1, 10))
    (job,) = r.cache.plan_writeback(Pressure(now_s=0.0, victims=tuple(r.bank)))
    r.cache.expire(job.job_id, running=True)
    assert r.cache.stats().quarantined_frames == 10
    r.check()
    r.cache.settle(done(job.job_id))
    assert (r.cache.stats().quarantined_frames, r.cache.stats().free_frames) == (0, 40)
    r.check()


def test_too_many_quarantined_frames_turn_the_tier_off_and_it_says_so() -> None:
    r = rig(device=40, host=20, eager=False)
    r.visit(prompt(1, 10))
    (job,) = r.cache.plan_writeback(Pressure(now_s=0.0, victims=tuple(r.bank)))
    r.cache.expire(job.job_id, running=True)
    assert r.cache.off_reason == "10 of 20 frames are held by copies that do not end"
    assert r.visit(prompt(1, 10)).device == 10
    r.check()


def test_o6_the_budget_holds_at_every_instant() -> None:
    r = rig(device=10_000, host=1200)
    sizes = {1: 62, 2: 366, 3: 2460, 4: 500, 5: 500}
    used: list[int] = []

    def offer(name: int) -> None:
        r.visit(prompt(name, sizes[name]))
        snapshot = next(iter(r.bank))
        while jobs := r.cache.plan_writeback(Pressure(now_s=0.0, victims=(snapshot,))):
            used.append(1200 - r.cache.stats().free_frames)
            r.submit(jobs)
            r.pump()
        r.evict(snapshot)
        r.check()

    offer(1)
    offer(2)
    assert used[-1] == 428
    before = len(used)
    offer(3)
    assert len(used) == before, "not a byte was allocated for what can never fit"
    assert [stored(r, prompt(n, sizes[n])) for n in (1, 2, 3)] == [62, 366, 0]
    offer(4)
    assert used[-1] == 928
    offer(5)
    assert [stored(r, prompt(n, sizes[n])) for n in (1, 2, 4, 5)] == [0, 0, 500, 500]
    counters = r.cache.stats().counters
    assert max(used) <= 1200
    assert counters.peak_frames <= 1200
    assert (used[-1], counters.stores_skipped, counters.host_evictions) == (1000, 1, 2)


def test_o6_with_budget_zero_nothing_is_copied() -> None:
    r = rig(device=4, host=0, reach_pages=4)
    for name in range(10):
        r.visit(prompt(name % 3, 2))
    assert r.cache.stats().counters.stores_issued == 0
    assert r.cache.lookup(r.chain(prompt(0, 2)), 0, 2) == Match(chain=r.chain(prompt(0, 2)), start=0, pages=0)
    assert {reason for report in r.reports for reason in report.recomputed} <= {
        Reason.NEW, Reason.PARTIAL_PAGE, Reason.TIER_OFF,
    }


def test_o7_sixty_side_calls_do_not_push_out_the_long_conversation() -> None:
    r = rig(device=4200, host=8192, entries=1, max_job_pages=4096)
    long = 4096
    name = iter(range(10, 1000))

    def side_calls(count: int) -> None:
        for _ in range(count):
            assert r.visit(prompt(next(name), 120)).host == 0

    r.visit(prompt(1, long))
    side_calls(10)
    assert r.visit(prompt(1, long + 1)).host == 4096
    side_calls(60)
    assert r.visit(prompt(1, long + 2)).host >= 4096
    r.check()


def lru_hits(visits: list[int], room: int) -> int:
    held: dict[int, None] = {}
    hits = 0
    for name in visits:
        hits += name in held
        held.pop(name, None)
        if len(held) == room:
            del held[next(iter(held))]
        held[name] = None
    return hits


def clairvoyant_hits(visits: list[int], room: int) -> int:
    held: set[int] = set()
    hits = 0
    for at, name in enumerate(visits):
        hits += name in held
        held.add(name)
        if len(held) > room:
            rest = visits[at + 1 :]
            held.remove(max(held, key=lambda n: rest.index(n) if n in rest else len(visits)))
    return hits


def test_o7_a_cycle_larger_than_the_host_keeps_a_share() -> None:
    each, visits = 64, [turn % 9 for turn in range(9 * 11)]
    assert (lru_hits(visits, 8), clairvoyant_hits(visits, 8)) == (0, 80)
    r = rig(device=each, host=8 * each, entries=1)
    hits = 0
    for name in visits:
        hits += r.visit(prompt(name, each)).host == each
        r.check()
    # The device holds a ninth conversation, so the tier could serve all 90 revisits; plain recency serves half of them.
    assert 60 <= hits <= 90


IDENTITIES = {
    1: Identity(model="m", revision="r", dtype="f32", layout="l", page_tokens=PAGE),
    2: Identity(model="m", revision="r", dtype="f32", layout="l", page_tokens=PAGE, adapter="X"),
    3: Identity(model="m", revision="r", dtype="f32", layout="l", page_tokens=PAGE, salt="X"),
    4: Identity(model="m", revision="r", dtype="f32", layout="l", page_tokens=PAGE, salt="ab", adapter="c"),
    5: Identity(model="m", revision="r", dtype="f32", layout="l", page_tokens=PAGE, salt="a", adapter="bc"),
    6: Identity(model="m", revision="r", dtype="bf16", layout="l", page_tokens=PAGE),
    7: Identity(model="m", revision="r", dtype="f32", layout="l", page_tokens=PAGE, parallel="2"),
}


def test_o8_only_equal_identities_share() -> None:
    tokens = list(range(49))
    for owner, identity in IDENTITIES.items():
        r = rig(device=8, host=8)
        r.identity = identity
        r.visit(tokens)
        r.evict(next(iter(r.bank)))
        for asker, other in IDENTITIES.items():
            match = r.cache.lookup(key_chain(tokens, other), 0, 3)
            assert match.pages * PAGE == (48 if asker == owner else 0), (owner, asker)


def test_o8_what_has_no_token_ids_has_no_key_and_matches_nothing() -> None:
    with pytest.raises(ValueError, match="token ids must be integers"):
        key_chain([-1] * 49, IDENTITIES[1])
    with pytest.raises(ValueError, match="token ids must be integers"):
        key_chain([0.5] * 49, IDENTITIES[1])  # type: ignore[list-item]
    r = rig(device=8, host=8)
    assert r.cache.lookup(key_chain([], IDENTITIES[1]), 0, 0).pages == 0


def test_o8_three_processes_derive_the_same_keys() -> None:
    script = (
        "from hostcache.tier import Identity, key_chain\n"
        "for a, s, d, p in [('', '', 'f32', '1'), ('X', '', 'f32', '1'), ('', 'X', 'f32', '1'),"
        " ('c', 'ab', 'f32', '1'), ('bc', 'a', 'f32', '1'), ('', '', 'bf16', '1'), ('', '', 'f32', '2'),"
        " ('é', '', 'f32', '1')]:\n"
        "    i = Identity(model='m', revision='r', dtype=d, layout='l', page_tokens=16, adapter=a, salt=s,"
        " parallel=p)\n"
        "    print([k.hex() for k in key_chain(range(49), i).keys])\n"
    )
    outputs = set()
    for seed in (None, "0", "random"):
        env = {"PYTHONPATH": ":".join(sys.path)} | ({"PYTHONHASHSEED": seed} if seed else {})
        outputs.add(subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, check=True).stdout)
    assert len(outputs) == 1
    assert len(next(iter(outputs)).splitlines()) == 8


def test_keys_are_the_published_bytes() -> None:
    """Pins the encoding: a change here orphans every stored page and must be a decision."""
    keys = key_chain(range(49), IDENTITIES[1]).keys
    assert [key.hex() for key in keys] == [
        "f0cdf8d28f09d4b287539d54cac8bb67",
        "203c5c2f8b8c7db3d796933cbbf6fb9c",
        "78c6bb7ace60405d769d5223e0b36a45",
    ]


