"""The mock server's prefix cache: which blocks of a prompt are on the device, which on the host. Pure logic.

A block is on the device, on the host, on both, or forgotten. Both tiers are LRU by block, touched from a prompt's end
to its start, so that its end leaves first and what stays is a usable prefix. A block that leaves the device goes to
the host; a host hit copies it back and leaves the host copy where it is. Knows no tokens' meaning, no time, no bytes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from hostcache.errors import InvariantBroken
from hostcache.tier import Reason, RequestReport

DIGEST_BYTES = 16


class BlockChain:
    """Digests of a token sequence's whole blocks, each over everything up to its end and the salt. Grows only."""

    def __init__(self, block_tokens: int, salt: str = "") -> None:
        self._step = 8 * block_tokens
        self._state = sha256(b"hostcache mock block\0" + salt.encode("utf-8", "replace") + b"\0")
        self._rest = b""
        self.digests: list[bytes] = []

    def extend(self, token_ids: Iterable[int]) -> None:
        """Raises OverflowError for an id beyond 63 bits."""
        data = self._rest + array("q", token_ids).tobytes()
        whole = len(data) - len(data) % self._step
        for at in range(0, whole, self._step):
            self._state.update(data[at : at + self._step])
            self.digests.append(self._state.digest()[:DIGEST_BYTES])
        self._rest = data[whole:]


@dataclass(slots=True)
class CacheCounters:
    """Blocks, but `lookups`, `hits`, `restores` and `stores`: those count requests. They only grow."""

    lookups: int = 0
    hits: int = 0
    restores: int = 0
    restored_blocks: int = 0
    stores: int = 0
    stored_blocks: int = 0
    device_evicted: int = 0
    host_evicted: int = 0
    peak_host_blocks: int = 0


class MockCache:
    """Two LRUs of block digests. `device_blocks` 0: nothing stays on the device. `host_blocks` 0: no host tier.

    Every digest ever seen is remembered, for the bound: 16 bytes and a set's entry each.
    """

    def __init__(self, *, block_tokens: int, device_blocks: int, host_blocks: int) -> None:
        self.block_tokens = block_tokens
        self.device_blocks = device_blocks
        self.host_blocks = host_blocks
        self.counters = CacheCounters()
        self._device: OrderedDict[bytes, None] = OrderedDict()
        self._host: OrderedDict[bytes, None] = OrderedDict()
        self._seen: set[bytes] = set()

    def admit(self, chain: Sequence[bytes], prompt_tokens: int) -> RequestReport:
        """Serve a prompt whose whole blocks are `chain`: the longest held prefix, never the last token, is a hit; then
        all of its blocks are on the device. device + host + recomputed = prompt tokens."""
        usable = chain[: max(0, prompt_tokens - 1) // self.block_tokens]
        device, restored = 0, []
        for digest in usable:
            if digest in self._device:
                device += 1
            elif digest in self._host:
                restored.append(digest)
            else:
                break
        served = device + len(restored)
        bound = served
        while bound < len(usable) and usable[bound] in self._seen:
            bound += 1
        if self.host_blocks and device < len(usable):
            self.counters.lookups += 1
        if restored:
            self.counters.hits += 1
            self.counters.restores += 1
            self.counters.restored_blocks += len(restored)
        for digest in reversed(restored):
            self._host.move_to_end(digest)
        self.retain(chain)
        lost = Reason.EVICTED if self.host_blocks else Reason.TIER_OFF
        recomputed = {
            Reason.NEW: (len(usable) - bound) * self.block_tokens,
            lost: (bound - served) * self.block_tokens,
            Reason.PARTIAL_PAGE: prompt_tokens - len(usable) * self.block_tokens,
        }
        first = Reason.PARTIAL_PAGE if served == len(usable) else lost if served < bound else Reason.NEW
        return RequestReport(
            prompt_tokens=prompt_tokens, device_tokens=device * self.block_tokens,
            host_tokens=len(restored) * self.block_tokens, bound_tokens=bound * self.block_tokens,
            recomputed={reason: tokens for reason, tokens in recomputed.items() if tokens},
            first_miss=(first, served * self.block_tokens) if prompt_tokens else None)

    def retain(self, chain: Sequence[bytes]) -> None:
        """These blocks were computed or used now."""
        self._seen.update(chain)
        for digest in reversed(chain):
            self._device[digest] = None
            self._device.move_to_end(digest)
        stored = 0
        while len(self._device) > self.device_blocks:
            digest, _ = self._device.popitem(last=False)
            self.counters.device_evicted += 1
            if not self.host_blocks:
                continue
            stored += digest not in self._host
            self._host[digest] = None
            self._host.move_to_end(digest)
            if len(self._host) > self.host_blocks:
                self._host.popitem(last=False)
                self.counters.host_evicted += 1
        if stored:
            self.counters.stores += 1
            self.counters.stored_blocks += stored
            self.counters.peak_host_blocks = max(self.counters.peak_host_blocks, len(self._host))

    def reset(self, *, keep_host: bool = False) -> None:
        """Forget all blocks; the counters go on. `keep_host`: as a server whose reset leaves its offload tier alone
        (vLLM issue 57727)."""
        self._device.clear()
        if not keep_host:
            self._host.clear()
            self._seen.clear()

    @property
    def on_device(self) -> int:
        return len(self._device)

    @property
    def on_host(self) -> int:
        return len(self._host)

    @property
    def on_both(self) -> int:
        return len(self._device.keys() & self._host.keys())

    def check(self) -> None:
        """Every invariant. Raises InvariantBroken."""
        for name, held, room in (("device", self._device, self.device_blocks), ("host", self._host, self.host_blocks)):
            if len(held) > room:
                raise InvariantBroken(f"the {name} holds {len(held)} blocks and has room for {room}")
            if not held.keys() <= self._seen:
                raise InvariantBroken(f"the {name} holds blocks that no prompt ever had")
