"""The page table: a tree of pages, each on the device, on the host, or both."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hostcache.errors import InvariantBroken
from hostcache.tier import Identity, KeyChain, key_chain
from hostcache.tier import table as t
from hostcache.tier.table import PageTable

ID = Identity(model="m", revision="r", dtype="f32", layout="l", page_tokens=1)


def chain(tokens: list[int]) -> KeyChain:
    return key_chain(tokens, ID)


def resident(table: PageTable, tokens: list[int], first_frame: int = 0) -> t.Slots:
    """These pages are on the host only."""
    slots, _ = table.add(chain(tokens), 0, len(tokens))
    table.fill(slots, np.arange(first_frame, first_frame + len(slots)))
    table.ready(slots)
    return slots


def test_adding_is_idempotent_and_says_what_is_new() -> None:
    table = PageTable(4)
    slots, added = table.add(chain([1, 2, 3]), 0, 3)
    assert slots.tolist() == added.tolist()
    again, none = table.add(chain([1, 2, 3]), 0, 3)
    assert (again.tolist(), none.tolist()) == (slots.tolist(), [])
    longer, tail = table.add(chain([1, 2, 3, 4, 5]), 3, 5)
    assert longer.tolist() == tail.tolist()
    assert [int(table.parent[slot]) for slot in longer] == [int(slots[2]), int(longer[0])]
    assert table.keys_of(slots) == list(chain([1, 2, 3]).keys)


def test_columns_grow_and_keep_what_they_hold() -> None:
    table = PageTable(2)
    tokens = list(range(300))
    slots = resident(table, tokens)
    assert len(table) == 300
    assert table.find(chain(tokens).keys).tolist() == slots.tolist()
    assert table.frame[slots].tolist() == list(range(300))
    table.check()


def test_a_resident_run_ends_at_the_first_page_that_cannot_be_restored() -> None:
    table = PageTable()
    tokens = list(range(100))
    slots = resident(table, tokens)
    pages = chain([*tokens, 999])
    for start, stop in ((0, 101), (0, 100), (3, 20), (99, 101), (100, 101), (5, 5)):
        assert table.resident_run(pages, start, stop).tolist() == slots[start : min(stop, 100)].tolist()
    table.drop(slots[60:])
    assert len(table.resident_run(pages, 0, 101)) == 60
    assert len(table.resident_run(pages, 60, 101)) == 0


def test_only_the_tail_of_a_chain_can_be_evicted_and_then_the_page_before_it() -> None:
    table = PageTable()
    slots = resident(table, [1, 2, 3])
    order = []
    while (tail := table.oldest(t.ONCE)) is not None:
        order.append(tail)
        table.drop(np.array([tail]))
        table.detach(np.array([tail]))
        table.prune(np.array([tail]))
    assert order == slots.tolist()[::-1]
    assert len(table) == 0


def test_a_shared_head_can_be_evicted_only_after_every_branch() -> None:
    table = PageTable()
    slots = resident(table, [1, 2, 3])
    branch, _ = table.add(chain([1, 2, 9]), 2, 3)
    table.fill(branch, np.array([50]))
    table.ready(branch)
    assert table.host_children[slots[1]] == 2
    table.drop(slots[2:])
    assert table.oldest(t.ONCE) == branch[0]
    table.drop(branch)
    assert table.oldest(t.ONCE) == slots[1]


def test_a_pinned_page_stands_in_no_list() -> None:
    table = PageTable()
    slots = resident(table, [1, 2])
    table.pin(slots)
    table.pin(slots[:1])
    assert table.oldest(t.ONCE) is None
    table.unpin(slots)
    assert table.oldest(t.ONCE) == slots[1]
    table.check()


def test_worth_follows_where_the_page_is_and_whether_somebody_came_back() -> None:
    table = PageTable()
    slots = resident(table, [1])
    (slot,) = slots.tolist()
    assert table.worth(slot) == t.ONCE
    table.set_device(slots, True)
    assert table.worth(slot) == table.listed[slot] == t.DUPLICATE
    table.fate[slot] = t.LEAVING
    table.relist_all(slots)
    assert table.listed[slot] == t.ONCE
    table.returned[slot] = 1
    table.set_device(slots, False)
    assert table.listed[slot] == t.RETURNED
    assert table.fate[slot] == t.UNDECIDED


def test_the_oldest_goes_first_and_a_touched_page_is_young_again() -> None:
    table = PageTable()
    pages = [resident(table, [name], name) for name in range(4)]
    for tick, slots in enumerate(pages, start=1):
        table.touch(slots, tick)
    assert table.oldest(t.ONCE) == pages[0][0]
    table.touch(pages[0], 9)
    assert (table.oldest(t.ONCE), table.youngest(t.ONCE)) == (pages[1][0], pages[0][0])
    table.check()


def test_a_damaged_table_is_noticed() -> None:
    damage = (
        ("host_children", 7), ("parent", t.NONE), ("listed", t.RETURNED), ("frame", t.NONE), ("child", t.NONE),
        ("child", 0), ("next_sibling", 2), ("prev_sibling", 2), ("pins", 1), ("pins", -1), ("device", 1), ("dead", 1),
        ("state", t.FILLING), ("state", t.ABSENT), ("frontier", 1), ("known", 0), ("younger", 0), ("older", 2),
    )
    for column, value in damage:
        for at in (1, 2):
            table = PageTable()
            slots = resident(table, [1, 2, 3])
            lone = resident(table, [4], 3)
            table.mark_frontier(int(lone[0]))
            table.check()
            if getattr(table, column)[slots[at]] == value or (column in ("younger", "older") and at == 1):
                continue  # it was so before; or it stands in no list, where nobody reads this
            getattr(table, column)[slots[at]] = value
            with pytest.raises(InvariantBroken):
                table.check()


@pytest.mark.parametrize("wrong", ["missing", "foreign", "elsewhere"])
def test_a_damaged_index_is_noticed(wrong: str) -> None:
    table = PageTable()
    slots = resident(table, [1, 2, 3])
    key = chain([1, 2, 3]).keys[1]
    if wrong == "elsewhere":
        table.index[key] = int(slots[2])
    else:
        del table.index[key]
    if wrong == "foreign":
        table.index[chain([9]).keys[0]] = int(slots[1])
    with pytest.raises(InvariantBroken, match="live pages"):
        table.check()


def test_a_run_of_dead_pages_leaves_the_table_at_once_and_its_place_is_as_new() -> None:
    table = PageTable(8)
    slots = resident(table, [1, 2, 3, 4, 5])
    head, run = slots[:2], slots[2:]
    side, _ = table.add(chain([1, 2, 9]), 2, 3)
    table.set_device(side, True)
    assert table.ancestors(int(run[-1]), 99).tolist() == [*run[::-1].tolist(), *head[::-1].tolist()]
    assert table.ancestors(int(run[-1]), 2).tolist() == run[:0:-1].tolist()
    table.drop(run)
    assert table.detach(run[::-1]) == list(chain([1, 2, 3, 4, 5]).keys[:1:-1])
    table.prune(run[::-1])
    table.check()
    assert len(table) == 3
    assert list(table.children(int(head[1]))) == side.tolist()
    again, _ = table.add(chain([1, 2, 3, 4, 5]), 2, 5)
    table.set_device(again, True)
    assert sorted(again.tolist()) == sorted(run.tolist())
    table.check()


class AnyOrder(RuleBasedStateMachine):
    """Chains over three words, moved through every state; `check` compares tree, lists and columns after each move."""

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(2)
        self.frames = iter(range(10**6))
        self.pinned: list[t.Slots] = []
        self.tick = 0

    def known(self, data: st.DataObject, state: int, limit: int = 3) -> t.Slots:
        live = self.table.live()
        fitting = live[self.table.state[live] == state].tolist()
        chosen = data.draw(st.lists(st.sampled_from(fitting), unique=True, max_size=limit)) if fitting else []
        return np.array(chosen, dtype=np.int64)

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def compute(self, tokens: list[int]) -> None:
        pages = chain(tokens)
        start = next((i for i, slot in enumerate(self.table.find(pages.keys)) if slot == t.NONE), len(tokens))
        slots, _ = self.table.add(pages, start, len(tokens))
        self.table.set_device(slots, True)
        self.tick += 1
        self.table.touch(slots, self.tick)

    @rule(data=st.data(), works=st.booleans())
    def store(self, data: st.DataObject, works: bool) -> None:
        slots = self.known(data, t.ABSENT)
        slots = slots[self.table.device[slots] == 1]
        self.table.fill(slots, np.array([next(self.frames) for _ in slots], dtype=np.int64))
        if works:
            self.table.ready(slots)
        else:
            self.table.drop(slots)

    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        self.tick += 1
        self.table.touch(self.known(data, t.RESIDENT), self.tick)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        slots = self.known(data, t.RESIDENT)
        self.table.pin(slots)
        self.pinned.append(slots)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.table.unpin(self.pinned.pop(0))

    @rule(data=st.data())
    def leave_device(self, data: st.DataObject) -> None:
        slots = self.known(data, t.RESIDENT)
        self.table.set_device(slots, False)

    @rule(worth=st.sampled_from([t.DUPLICATE, t.ONCE, t.RETURNED]))
    def evict(self, worth: int) -> None:
        slot = self.table.oldest(worth)
        if slot is None:
            return
        assert not self.table.pins[slot]
        self.table.drop(np.array([slot]))
        if not self.table.device[slot] and self.table.child[slot] == t.NONE:
            self.table.detach(np.array([slot]))
            self.table.prune(np.array([slot]))
        elif not self.table.device[slot]:
            self.table.set_device(np.array([slot]), True)  # a child is left: as if it had been computed again

    @invariant()
    def holds(self) -> None:
        self.table.check()


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestAnyOrder = AnyOrder.TestCase


@given(st.lists(st.integers(0, 30), max_size=40))
def test_the_list_of_lone_pages_is_in_order_of_use(uses: list[int]) -> None:
    table = PageTable()
    last: dict[int, int] = {}
    for tick, name in enumerate(uses, start=1):
        slots = table.find(chain([name]).keys)
        if slots[0] == t.NONE:
            slots = resident(table, [name], name)
        table.touch(slots, tick)
        last.pop(name, None)
        last[name] = int(slots[0])
    order = []
    slot = table.oldest(t.ONCE)
    while slot is not None and slot != t.NONE:
        order.append(slot)
        slot = int(table.younger[slot])
    assert order == list(last.values())
