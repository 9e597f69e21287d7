"""The two banks: order of going, superseding, whose pages a prompt was served."""

from __future__ import annotations

import pytest

from hostcache.engine.banks import Banks, Kind, Snapshot
from hostcache.errors import InvariantBroken
from hostcache.tier import Identity, KeyChain, key_chain

IDENTITY = Identity(model="m", revision="r", dtype="d", layout="l", page_tokens=2)


def chain(*tokens: int) -> KeyChain:
    return key_chain(tokens, IDENTITY)


def add(banks: Banks, number: int, keys: KeyChain, kind: Kind = Kind.TURN, pages: tuple[int, ...] = ()) -> Snapshot:
    return banks.add(number, kind, keys, pages or tuple(range(10 * number, 10 * number + len(keys))))


def ids(snapshots: list[Snapshot]) -> list[int]:
    return [snapshot.id for snapshot in snapshots]


def test_the_least_recently_used_goes_first_over_both_banks() -> None:
    banks = Banks(4)
    first = add(banks, 1, chain(1, 2), Kind.PROMPT)
    add(banks, 2, chain(3, 4), Kind.TURN)
    add(banks, 3, chain(5, 6), Kind.PROMPT)
    banks.use(first)
    assert ids(banks.order()) == [2, 3, 1]
    assert banks.oldest(Kind.PROMPT).id == 3
    assert [view.order for view in banks.views()] == [(3, 1), (2,)]
    banks.check()


def test_a_longer_snapshot_of_the_same_conversation_supersedes_the_older_in_its_own_bank_only() -> None:
    banks = Banks(4)
    add(banks, 1, chain(1, 2, 3, 4))
    add(banks, 2, chain(1, 2, 3, 4), Kind.PROMPT)
    add(banks, 3, chain(1, 2, 9, 9))
    assert ids(banks.superseded_by(Kind.TURN, chain(1, 2, 3, 4, 5, 6))) == [1]
    assert ids(banks.superseded_by(Kind.TURN, chain(1, 2))) == []


def test_a_prompt_uses_the_snapshots_it_extends_before_one_it_only_shares_a_beginning_with() -> None:
    banks = Banks(4)
    add(banks, 1, chain(1, 2, 3, 4), pages=(7, 8))
    add(banks, 2, chain(1, 2, 5, 6), pages=(7, 9))
    assert ids(banks.serving([7, 8])) == [1]
    assert ids(banks.serving([7])) == [2], "of several that share these pages, the one used last"
    assert banks.serving([3]) == banks.serving([]) == []


def test_a_full_bank_takes_nothing_before_something_went() -> None:
    banks = Banks(1)
    only = add(banks, 1, chain(1, 2))
    assert banks.full(Kind.TURN)
    assert not banks.full(Kind.PROMPT)
    with pytest.raises(InvariantBroken):
        add(banks, 2, chain(3, 4))
    banks.remove(only)
    add(banks, 2, chain(3, 4))
    banks.check()
