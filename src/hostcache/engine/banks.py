"""The two banks of snapshots that stay on the device after a prompt or a turn, least recently used first.

Knows which pages a snapshot has and when it was last used; neither frees pages nor copies them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from hostcache.errors import InvariantBroken
from hostcache.tier import BankView, KeyChain


class Kind(Enum):
    PROMPT = "prompt"
    TURN = "turn"


@dataclass(slots=True, kw_only=True, eq=False)
class Snapshot:
    """`pages[i]` holds the page `chain.keys[i]`. `used` orders all snapshots: the greater, the later it was used."""

    id: int
    kind: Kind
    chain: KeyChain
    pages: tuple[int, ...]
    used: int


class Banks:
    """A snapshot: `add` → *held* → `remove`; `use` makes it the last to go."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._by_id: dict[int, Snapshot] = {}
        self._bank: dict[Kind, dict[int, Snapshot]] = {kind: {} for kind in Kind}  # least recently used first
        self._uses = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def entries(self, kind: Kind) -> int:
        return len(self._bank[kind])

    def full(self, kind: Kind) -> bool:
        return len(self._bank[kind]) >= self.capacity

    def add(self, snapshot_id: int, kind: Kind, chain: KeyChain, pages: tuple[int, ...]) -> Snapshot:
        """The caller has made place: at most `capacity` stay in a bank."""
        if self.full(kind):
            raise InvariantBroken(f"the {kind.value} bank holds {self.capacity} snapshots already; one must go first")
        self._uses += 1
        snapshot = Snapshot(id=snapshot_id, kind=kind, chain=chain, pages=pages, used=self._uses)
        self._by_id[snapshot_id] = self._bank[kind][snapshot_id] = snapshot
        return snapshot

    def remove(self, snapshot: Snapshot) -> None:
        del self._by_id[snapshot.id]
        del self._bank[snapshot.kind][snapshot.id]

    def use(self, snapshot: Snapshot) -> None:
        self._uses += 1
        snapshot.used = self._uses
        bank = self._bank[snapshot.kind]
        bank[snapshot.id] = bank.pop(snapshot.id)

    def superseded_by(self, kind: Kind, chain: KeyChain) -> list[Snapshot]:
        """Those of this bank that `chain` extends (or equals)."""
        return [s for s in self._bank[kind].values()
                if len(s.chain) <= len(chain) and s.chain.keys[-1] == chain.keys[len(s.chain) - 1]]

    def serving(self, pages: list[int]) -> list[Snapshot]:
        """Whose pages these leading pages of a prompt are: every snapshot the prompt extends; failing that, the one
        used last of those that the prompt shares all of these pages with."""
        whole = [s for s in self if len(s.pages) <= len(pages) and s.pages[-1] == pages[len(s.pages) - 1]]
        if whole or not pages:
            return sorted(whole, key=lambda s: s.used)
        depth = len(pages) - 1
        sharing = [s for s in self if len(s.pages) > depth and s.pages[depth] == pages[depth]]
        return [max(sharing, key=lambda s: s.used)] if sharing else []

    def order(self) -> list[Snapshot]:
        """Next victim first, over both banks."""
        return sorted(self, key=lambda s: s.used)

    def oldest(self, kind: Kind) -> Snapshot:
        return next(iter(self._bank[kind].values()))

    def views(self) -> list[BankView]:
        return [BankView(order=tuple(bank), capacity=self.capacity) for bank in self._bank.values()]

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._by_id.values())

    def check(self) -> None:
        if sum(len(bank) for bank in self._bank.values()) != len(self._by_id):
            raise InvariantBroken("a snapshot is in no bank, or in two")
        for kind, bank in self._bank.items():
            used = [s.used for s in bank.values()]
            if used != sorted(used) or len(bank) > self.capacity:
                raise InvariantBroken(f"the {kind.value} bank is over its capacity or out of order")
            for s in bank.values():
                if len(s.pages) != len(s.chain) or not s.pages or len(set(s.pages)) != len(s.pages):
                    raise InvariantBroken(f"snapshot {s.id} has {len(s.pages)} pages for {len(s.chain)} keys")
