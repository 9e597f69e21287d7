"""The stories of the suites: each plays one mechanism through and says at every step what must be seen.

In fleets of `scenarios.fleet_shape`: pages of 16 tokens, whose pool others can crowd out in a few requests.
"""

from __future__ import annotations

from hostcache.sim.play import Play, Story
from hostcache.sim.requests import How, State
from hostcache.sim.scenarios import COSTS, PAGE
from hostcache.sim.stage import identity
from hostcache.tier import Mode, Reason
from hostcache.workload.conversations import Conversation


def crowd_out(play: Play, pages: int | None = None) -> Story:
    """Others take the device, a quarter of it at a time."""
    each = max(1, (play.fleet.shape.pool_pages if pages is None else pages) // 4)
    for _ in range(5):
        yield play.ask(play.conversation(each * PAGE - 1))


def no_pressure(play: Play) -> Story:
    talks = [play.conversation(3 * PAGE + 5) for _ in range(4)]
    for _ in range(4):
        for talk in talks:
            yield play.ask(talk, 4, hear=9)
    stats = play.fleet.cache.stats()
    play.prove("nothing was copied", (stats.counters.stores_issued, stats.counters.reservations) == (0, 0), always=True)
    play.prove("all came from the device", play.fleet.accounting.stats().host_tokens == 0, always=True)


def on_pages(play: Play) -> Story:
    fleet = play.fleet
    first = play.conversation(4 * PAGE + 1)
    yield play.ask(first)
    yield play.ask(play.conversation(2 * PAGE + 1))
    play.prove("nothing moves while pages are free", fleet.cache.stats().counters.stores_issued == 0)
    yield play.ask(play.conversation(4 * PAGE + 1))
    yield 0.1
    counters = fleet.cache.stats().counters
    play.prove("written back before it is evicted", counters.stores_completed > 0 and fleet.watch.evictions == 0)
    yield from crowd_out(play)
    play.prove("the eviction waited for nothing", fleet.stats().evict_wait_s == 0.0)
    again = play.ask(first)
    yield again
    play.prove("4 pages came back", again.host == 4 * PAGE)


def on_entries(play: Play) -> Story:
    talks = [play.conversation(PAGE + 1) for _ in range(48)]
    for talk in talks:
        yield play.ask(talk)
    yield 0.05
    play.prove("the pool was never short", play.fleet.memory.free_pages > play.fleet.shape.pool_pages // 2)
    play.prove("what the bank dropped was written back", play.fleet.cache.stats().counters.stores_completed >= 20)
    again = play.ask(talks[0])
    yield again
    play.prove("a session beyond the bank's entries came back", again.host == PAGE)


def restore(play: Play) -> Story:
    talk = play.conversation(10 * PAGE + 1)
    cold = play.ask(talk)
    yield cold
    yield from crowd_out(play)
    warm = play.ask(talk)
    yield warm
    play.prove("10 pages came back", (warm.device, warm.host) == (0, 10 * PAGE))
    saved = (cold.over.ttft_s or 0.0) - (warm.over.ttft_s or 0.0)
    play.prove("its first token came sooner", saved > 0.5 * COSTS.prefill_s(0, 10 * PAGE))
    once_more = play.ask(talk)
    yield once_more
    play.prove("then they are on the device", (once_more.device, once_more.host) == (10 * PAGE, 0))


def partial_restore(play: Play) -> Story:
    talk = play.conversation(6 * PAGE + 1)
    yield play.ask(talk, store_pages=4, hear=3 * PAGE)
    yield from crowd_out(play)
    again = play.ask(talk)
    yield again
    play.prove("4 of 6 pages came back, the rest was computed", (again.device, again.host) == (0, 4 * PAGE))
    head = play.conversation(2 * PAGE, head=talk, head_tokens=2 * PAGE)
    yield from crowd_out(play)
    yield play.ask(head)
    warm = play.ask(talk)
    yield warm
    play.prove("the device's head and the host's tail", (warm.device, warm.host) == (2 * PAGE, 7 * PAGE))


def growing(play: Play) -> Story:
    talk = play.conversation(3 * PAGE)
    for _ in range(4):
        written = talk.tokens + PAGE - 3 - 1
        yield play.ask(talk, PAGE - 3, hear=2 * PAGE - 5)
        yield from crowd_out(play)
        again = play.ask(talk)
        yield again
        play.prove("every turn came back to its last whole page", again.host == written // PAGE * PAGE)
        yield from crowd_out(play)


def compaction(play: Play) -> Story:
    talk = play.conversation(10 * PAGE)
    yield play.ask(talk, PAGE, hear=0)
    talk.compact(0.72)
    talk.hear(4 * PAGE)
    yield from crowd_out(play)
    again = play.ask(talk)
    yield again
    play.prove("what a compacted prompt still shares came back", again.host == int(11 * 0.72) * PAGE)


def last_sample(play: Play) -> Story:
    talk = play.conversation(3 * PAGE)
    yield play.ask(talk, PAGE, hear=2)
    yield from crowd_out(play)
    again = play.ask(talk)
    yield again
    play.prove("the page that ends in a fresh sample was not kept", again.host == 3 * PAGE, always=False)


def tails(play: Play) -> Story:
    talk = play.conversation(5 * PAGE + 7)
    yield play.ask(talk, 6, hear=20)
    yield from crowd_out(play)
    again = play.ask(talk)
    yield again
    play.prove("the tail led to the exact frontier", play.fleet.stats().tail_hits == 1)
    play.prove("5 whole pages and 13 tokens came back", again.host == 5 * PAGE + 13)


def preempted(play: Play) -> Story:
    long = [play.ask(play.conversation(4 * PAGE + 1), 5 * PAGE) for _ in range(3)]
    yield from long
    stats, books = play.fleet.stats(), play.fleet.accounting.stats()
    play.prove("one was preempted and all were served", stats.preemptions > 0 and stats.served == 3)
    recovered = books.recovery_device_tokens + books.recovery_host_tokens + books.recovery_recomputed_tokens
    play.prove("its recovery is counted apart", recovered > 0 and books.requests == 3)


def resumed(play: Play) -> Story:
    """A first visitor's pages are on the host; it is preempted at its second visit and comes back from there."""
    talk = play.conversation(6 * PAGE + 1)
    yield play.ask(talk)
    yield from crowd_out(play)
    second = play.ask(talk, 40)
    while second.state is not State.DECODING:
        yield 0.002
    if (live := second.live) is not None:
        play.fleet.preempt(live)
    others = [play.ask(play.conversation(4 * PAGE)) for _ in range(3)]
    yield second
    yield from others
    books = play.fleet.accounting.stats()
    play.prove("it went on from cached pages", books.recovery_device_tokens + books.recovery_host_tokens >= 6 * PAGE)
    play.prove("its answer is whole", second.over.reply_tokens == 40)


def deferred(play: Play) -> Story:
    first, second = (play.ask(play.conversation(6 * PAGE), PAGE) for _ in range(2))
    yield 0.01
    play.prove("the second waits for room", second.state is State.QUEUED)
    yield first
    yield second
    play.prove("deferred, then served", second.over.deferred and second.over.how is How.SERVED)


def door(play: Play) -> Story:
    asked = [play.ask(play.conversation(2 * PAGE), 30) for _ in range(6)]
    yield from asked
    hows = [each.over.how for each in asked]
    play.prove("two served, two refused at once, two after their wait",
               hows.count(How.SERVED) == 2 and hows[4:] == [How.REFUSED] * 2)  # fmt: skip
    wait = play.fleet.shape.door_wait_s
    waited = [each.over.ended_s - each.over.sent_s for each in asked[2:4]]
    play.prove("nobody waits longer than stated", max(waited) <= wait + 1e-9, always=True)


def too_large(play: Play) -> Story:
    asked = play.ask(play.conversation(40 * PAGE))
    fits = play.ask(play.conversation(8 * PAGE))
    yield asked
    yield fits
    play.prove("what can never fit is told so at once", asked.over.how is How.TOO_LARGE, always=True)
    play.prove("the next one is served", fits.over.how is How.SERVED, always=True)


def late_restore(play: Play) -> Story:
    talk = play.conversation(6 * PAGE + 1)
    yield play.ask(talk)
    yield from crowd_out(play)
    again = play.ask(talk)
    yield again
    budget = play.fleet.shape.tier.restore_budget_s
    ttft = again.over.ttft_s
    play.prove("computed after the budget", again.host == 0 and ttft is not None and ttft > budget)
    play.prove("no later than the budget and one step", ttft is not None and ttft < budget + 0.05)
    reasons = play.fleet.accounting.stats().recomputed
    play.prove("and the reason is late", reasons.get(Reason.LATE, 0) == 6 * PAGE)
    yield 1.0
    warm = play.ask(talk)
    yield warm
    play.prove("the next one finds what was computed", warm.device == 6 * PAGE)


def failed_restore(play: Play) -> Story:
    talk = play.conversation(6 * PAGE + 1)
    yield play.ask(talk)
    yield from crowd_out(play)
    again = play.ask(talk)
    yield again
    play.prove("computed after the copy failed", (again.device, again.host) == (0, 0))
    play.prove("and the reason is failed", play.fleet.accounting.stats().recomputed.get(Reason.FAILED, 0) == 6 * PAGE)
    yield from crowd_out(play)
    warm = play.ask(talk)
    yield warm
    play.prove("the host's copy is still good", warm.host == 6 * PAGE)


def failed_store(play: Play) -> Story:
    talk = play.conversation(6 * PAGE + 1)
    yield play.ask(talk)
    yield from crowd_out(play)
    again = play.ask(talk)
    yield again
    counters = play.fleet.cache.stats().counters
    play.prove("a failed write-back kept nothing", again.host == 0 and counters.stores_failed == 1)
    yield from crowd_out(play)
    warm = play.ask(talk)
    yield warm
    play.prove("the next one did", warm.host == 6 * PAGE)


def wedged_store(play: Play) -> Story:
    talk = play.conversation(6 * PAGE + 1)
    yield play.ask(talk)
    yield from crowd_out(play)
    stats = play.fleet.cache.stats()
    play.prove("its frames are set aside, not handed out", stats.quarantined_frames == 6)
    again = play.ask(talk)
    yield again
    play.prove("it was computed", (again.device, again.host) == (0, 0))
    yield 5.0
    stats = play.fleet.cache.stats()
    play.prove("the late word gave them back", stats.quarantined_frames == 0 and stats.counters.late_completions == 1)


def told_twice(play: Play) -> Story:
    talk = play.conversation(6 * PAGE + 1)
    yield play.ask(talk)
    yield from crowd_out(play)
    again = play.ask(talk)
    yield again
    yield 5.0
    counters = play.fleet.cache.stats().counters
    play.prove("the second word changed nothing", counters.late_completions >= 2 and again.host == 6 * PAGE)


def opt_outs(play: Play) -> Story:
    kept, unkept, unloaded = (play.conversation(4 * PAGE + 1) for _ in range(3))
    yield play.ask(kept)
    yield play.ask(unkept, store_pages=0)
    yield play.ask(unloaded)
    yield from crowd_out(play)
    one, two, three = play.ask(kept), play.ask(unkept), play.ask(unloaded, load=False)
    yield from (one, two, three)
    play.prove("only who wants it is stored", (one.host, two.host) == (4 * PAGE, 0))
    play.prove("who does not want a restore gets none", three.host == 0)
    reasons = play.fleet.accounting.stats().recomputed
    play.prove("opted_out is the reason", reasons.get(Reason.OPTED_OUT, 0) > 0)


def caps(play: Play) -> Story:
    for cap in (0, 1, 3, 9):
        talk = play.conversation(4 * PAGE + 1)
        yield play.ask(talk, store_pages=cap)
        yield from crowd_out(play)
        again = play.ask(talk)
        yield again
        play.prove(f"of a cap of {cap} pages {min(cap, 4)} came back", again.host == min(cap, 4) * PAGE)
        yield from crowd_out(play)


def visited_twice(play: Play) -> Story:
    talks = [play.conversation(2 * PAGE + 1) for _ in range(8)]
    for _ in range(3):
        for talk in talks:
            yield play.ask(talk)


def off(play: Play) -> Story:
    yield from visited_twice(play)
    counters = play.fleet.cache.stats().counters
    play.prove("nothing was copied", (counters.stores_issued, counters.reservations) == (0, 0), always=True)
    play.prove("tier_off is the reason", play.fleet.accounting.stats().recomputed.get(Reason.TIER_OFF, 0) > 0)


def one_frame(play: Play) -> Story:
    talks = [play.conversation(PAGE + 1) for _ in range(12)]
    asked = []
    for _ in range(3):
        for talk in talks:
            one = play.ask(talk)
            yield one
            asked.append(one)
    play.prove("a request hits one page at most", max(each.host for each in asked) <= PAGE, always=True)
    play.prove("one frame in use at most", play.fleet.cache.stats().counters.peak_frames <= 1, always=True)


def mode(play: Play) -> Story:
    talk = play.conversation(4 * PAGE + 1)
    yield play.ask(talk)
    yield 0.1
    counters = play.fleet.cache.stats().counters
    eager = play.fleet.shape.tier.mode is Mode.ON_RETAIN
    play.prove("written at once" if eager else "nothing written yet", (counters.stores_completed > 0) == eager)
    yield from crowd_out(play)
    waits = play.fleet.cache.stats().counters.evict_waits
    play.prove("evictions waited for nothing" if eager else "evictions waited for their copy", (waits == 0) == eager)
    again = play.ask(talk)
    yield again
    play.prove("it came back", again.host == 4 * PAGE)


def dearer(play: Play) -> Story:
    talk = play.conversation(4 * PAGE + 1)
    yield play.ask(talk)
    yield from crowd_out(play)
    again = play.ask(talk)
    yield again
    play.prove("what would cost more than it saves was computed", again.host == 0 and play.fleet.watch.restores == 0)
    play.prove("dearer is the reason", play.fleet.accounting.stats().recomputed.get(Reason.DEARER, 0) == 4 * PAGE)


def forgotten(play: Play) -> Story:
    there, away = play.conversation(4 * PAGE + 1), play.conversation(4 * PAGE + 1)
    yield play.ask(away)
    yield from crowd_out(play)
    yield play.ask(there)
    running = play.ask(play.conversation(6 * PAGE + 1), 20)
    yield 0.03
    play.fleet.forget()
    yield running
    for talk in (there, away):
        again = play.ask(talk)
        yield again
        play.prove("nothing of the old weights is served", (again.device, again.host) == (0, 0), always=True)
    play.prove("the running one ended well", running.over.how is How.SERVED, always=True)


def salts(play: Play) -> Story:
    mine = play.conversation(4 * PAGE + 1)
    yield play.ask(mine)
    yield from crowd_out(play)
    # The same tokens under another salt: a conversation draws by its number alone.
    other = Conversation(identity(PAGE, salt="other"), 1, start_tokens=1, head=mine, head_tokens=4 * PAGE + 1)
    foreign = play.ask(other)
    yield foreign
    play.prove("another salt shares nothing", (foreign.device, foreign.host) == (0, 0), always=True)
    again = play.ask(mine)
    yield again
    play.prove("the same one does", again.host == 4 * PAGE)


def side_calls(play: Play) -> Story:
    """O7 in small: a conversation that returns, and calls that never do."""
    talk = play.conversation(16 * PAGE + 1)
    yield play.ask(talk)
    for _ in range(10):
        yield play.ask(play.conversation(2 * PAGE))
    again = play.ask(talk)
    yield again
    play.prove("it came back", again.host == 16 * PAGE)
    for _ in range(60):
        yield play.ask(play.conversation(2 * PAGE))
    again = play.ask(talk)
    yield again
    play.prove("and once more after three times the host's size of side calls", again.host == 16 * PAGE)


def cycle(play: Play) -> Story:
    talks = [play.conversation(4 * PAGE + 1) for _ in range(9)]
    hits = 0
    for _ in range(11):
        for talk in talks:
            asked = play.ask(talk)
            yield asked
            hits += asked.host > 0
    play.prove("a cycle larger than the host keeps a share", hits >= 30)


# ---- concurrency: stories of many


def shared_prefix(play: Play) -> Story:
    head = play.conversation(12 * PAGE)
    talks = [play.conversation(12 * PAGE + 5, head=head, head_tokens=12 * PAGE) for _ in range(6)]
    yield play.ask(talks[0])
    yield from crowd_out(play)
    before = play.fleet.cache.stats().counters.reservations
    asked = [play.ask(talk) for talk in talks]
    yield from asked
    reservations = play.fleet.cache.stats().counters.reservations - before
    play.prove("six sharers, one copy", reservations == 1)
    play.prove("all hit the whole prefix", all(each.device + each.host == 12 * PAGE for each in asked))


def burst(play: Play) -> Story:
    talks = [play.conversation((2 + n % 5) * PAGE + 1) for n in range(20)]
    for _ in range(3):
        asked = [play.ask(talk, 6) for talk in talks]
        yield from asked
        play.prove("everyone was served", all(each.over.how is How.SERVED for each in asked), always=True)


def _leave_when(play: Play, talk: Conversation, state: State, seen: list[State]) -> Story:
    asked = play.ask(talk, 8)
    for _ in range(2000):
        if asked.state is state:
            seen.append(state)
            asked.leave()
            break
        if asked.state is State.ENDED:
            break
        yield 0.0005
    yield asked


def leaving(play: Play) -> Story:
    seen: list[State] = []
    talks = [play.conversation(6 * PAGE + 1) for _ in range(6)]
    for talk in talks:
        yield play.ask(talk)
    yield from crowd_out(play)
    for state in (State.RESTORING, State.COMPUTING, State.DECODING):
        yield from _leave_when(play, talks[0], state, seen)
        yield from crowd_out(play)
    crowd = [play.ask(play.conversation(6 * PAGE), 30) for _ in range(8)]
    for state in (State.WAITING, State.QUEUED):
        yield from _leave_when(play, talks[1], state, seen)
    yield from crowd
    play.prove("somebody left in every state", len(set(seen)) == 5)
    play.prove("whoever stayed was served", all(each.over.how is How.SERVED for each in crowd))
    again = play.ask(talks[0])
    yield again
    play.prove("what was left behind is still good", again.device + again.host == 6 * PAGE)


def storm(play: Play) -> Story:
    """More answers than pages: everybody is preempted sooner or later."""
    asked = [play.ask(play.conversation(3 * PAGE + n), 4 * PAGE) for n in range(8)]
    yield from asked
    play.prove("preempted often, served all", all(each.over.how is How.SERVED for each in asked), always=True)
    play.prove("and preemptions there were", play.fleet.stats().preemptions >= 3)


def resident_never_waits(play: Play) -> Story:
    """B3: a prefix on the device does not stand behind another's restore of the same prefix's rest."""
    head = play.conversation(4 * PAGE)
    long = play.conversation(14 * PAGE + 1, head=head, head_tokens=4 * PAGE)
    yield play.ask(long)
    yield from crowd_out(play)
    yield play.ask(head)
    restoring = play.ask(long)
    yield 0.0001
    short = play.ask(head)
    yield short
    yield restoring
    alone = COSTS.prefill_s(0, PAGE) + 3 * COSTS.step_s(2) + 0.01
    ttft = short.over.ttft_s
    play.prove("who has its prefix on the device does not wait", ttft is not None and ttft <= alone)
