"""The distance between bound, model and engine, request by request, and which cause accounts for each. Runs nothing.

    bound          tokens of the prompts that an earlier one began with (any cache, any order)
    possible       of these, in whole blocks of the engine and without each prompt's last token     bound − granularity
    model          LRU at the capacity, in the order of touch                                       possible − capacity
    engine         what the requests were told                                                      model − gap

A cause is tested by asking what it would have given each request: it accounts for a request when it gives exactly what
that one was told and the model does not. Of several, the one that is right about most requests is named, and the others
beside it (`also`); where they are right about as many, the engine's own habit goes first (`whole_prompts`):

    order_of_touch     LRU that hears of a request's blocks in another order
    generated_tokens   LRU whose capacity also holds the answers and the blocks that are not full: for as long as other
                       blocks, or given back first, as vLLM 0.32 does with what has no hash (v1/core/block_pool.py,
                       free_blocks)
    eviction_order     whole prompts leave, least recently used first, as this project's engine evicts
    concurrency        LRU by the times of the records: a block is there from its request's first token on
    warm_start         told of more than any earlier prompt of this replay began with
    preemption         not tested: the engine counted preemptions, which are looked up twice

What none accounts for is `unexplained`, in tokens, and by request.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from hostcache.errors import ConfigError
from hostcache.lab.lru import Touch, stack_distances
from hostcache.lab.oracle import maximum, seen_by_engine
from hostcache.lab.replayed import Replayed
from hostcache.lab.stream import Stream

PerRequest = npt.NDArray[np.int64]
UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """A request whose engine and model differ. Tokens."""

    index: int
    possible: int
    model: int
    engine: int
    cause: str
    also: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Tokens over all compared requests. `causes`: engine − model, net, by cause. `compared`: requests whose cached
    tokens are known; the others count nowhere but in `left_out`."""

    prompt_tokens: int
    bound: int
    possible: int
    model: int
    engine: int
    granularity: int
    capacity: int
    causes: dict[str, int]
    unexplained: int
    """the sum of |engine − model| that no cause accounts for"""
    compared: int
    left_out: int
    equal: int
    odd: tuple[Odd, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Modelled:
    """The engine as it is modelled. `capacity_tokens`: of all tiers that keep what is evicted. `whole_prompts`: it is
    known to evict these, as hostcache's does."""

    block_tokens: int
    capacity_tokens: int
    touch: Touch
    max_tokens: int
    whole_prompts: bool = False

    @property
    def blocks(self) -> int:
        return self.capacity_tokens // self.block_tokens


class Model:
    """A stream as an engine sees it, and what each cause would have given. All in tokens a request."""

    def __init__(self, stream: Stream, engine: Modelled) -> None:
        self.stream = stream
        self.engine = engine
        self.view, may_hit = seen_by_engine(stream, engine.block_tokens)
        self._may_hit = may_hit
        self._firsts = np.concatenate(([0], np.cumsum(may_hit)))
        first = np.zeros(self.view.references, dtype=np.bool_)
        first[np.unique(self.view.ids, return_index=True)[1]] = True
        self.possible = self._leading(~first)

    @property
    def bound_tokens(self) -> int:
        return round(maximum(self.stream).tokens * int(self.stream.input_tokens.sum()))

    def lru(self, touch: Touch | None = None, blocks: int | None = None) -> PerRequest:
        depths = stack_distances(self.view.ids, self.view.distinct, starts=self.view.starts,
                                 touch=touch or self.engine.touch)
        return self._leading((depths > 0) & (depths <= (self.engine.blocks if blocks is None else blocks)))

    def with_answers(self) -> PerRequest:
        """LRU with a block of its own for each that answers and rests of prompts take."""
        ids: list[int] = []
        starts = [0]
        own = self.view.distinct
        for request, blocks in enumerate(self._requests()):
            end = int(self.stream.input_tokens[request]) + self.engine.max_tokens
            more = max(0, -(-end // self.engine.block_tokens) - len(blocks))
            ids += [*blocks, *range(own, own + more)]
            own += more
            starts.append(len(ids))
        depths = stack_distances(np.array(ids, dtype=np.int32), own, starts=np.array(starts, dtype=np.int64),
                                 touch=self.engine.touch)
        theirs = np.concatenate([depths[starts[r] : starts[r] + len(blocks)]
                                 for r, blocks in enumerate(self._requests())])
        return self._leading((theirs > 0) & (theirs <= self.engine.blocks))

    def with_answers_given_back(self) -> PerRequest:
        """LRU of a capacity that is smaller by the blocks that a request's answer and rest take while it runs."""
        ends = self.stream.input_tokens + self.engine.max_tokens
        more = int((-(-ends // self.engine.block_tokens) - np.diff(self.view.starts)).max())
        return self.lru(blocks=max(0, self.engine.blocks - more))

    def whole_prompts(self) -> PerRequest:
        """Prompts leave whole, least recently used first, one request after another."""
        held: Counter[int] = Counter()
        prompts: OrderedDict[tuple[int, ...], None] = OrderedDict()
        found = np.zeros(self.stream.requests, dtype=np.int64)
        for request, blocks in enumerate(self._requests()):
            loadable = int(self._firsts[self.view.starts[request + 1]] - self._firsts[self.view.starts[request]])
            have = 0
            while have < loadable and held[blocks[have]] > 0:
                have += 1
            found[request] = have
            tokens = int(self.stream.input_tokens[request])
            used = set(blocks[:have])
            wanted = -(-min(tokens + 1, tokens + self.engine.max_tokens - 1) // self.engine.block_tokens) - have
            for prompt in list(prompts):
                if self.engine.blocks - len(held.keys() | used) >= wanted:
                    break
                if not used.issuperset(prompt):
                    del prompts[prompt]
                    _let_go(held, prompt)
            mine = tuple(blocks)
            for prompt in [each for each in prompts if mine[: len(each)] == each]:
                del prompts[prompt]
                _let_go(held, prompt)
            if not mine:
                continue
            if have:  # one that shares all of it was used again
                sharing = [each for each in prompts if each[:have] == mine[:have]]
                if sharing:
                    prompts.move_to_end(sharing[-1])
            prompts[mine] = None
            held.update(mine)
        return found * self.engine.block_tokens

    def by_times(self, records: Sequence[Replayed]) -> PerRequest:
        """LRU whose lookups are at each record's sending, and whose touches are at its first token."""
        events = sorted([*((each.sent_s, 1, each.index) for each in records),
                         *((each.first_token_s, 0, each.index) for each in records if each.first_token_s is not None)])
        held: OrderedDict[int, None] = OrderedDict()
        blocks = list(self._requests())
        found = np.zeros(self.stream.requests, dtype=np.int64)
        for _, is_lookup, request in events:
            if is_lookup:
                loadable = int(self._firsts[self.view.starts[request + 1]] - self._firsts[self.view.starts[request]])
                have = 0
                while have < loadable and blocks[request][have] in held:
                    have += 1
                found[request] = have
                touched = blocks[request][:have]
            else:
                touched = blocks[request]
            order = reversed(touched) if self.engine.touch == "tail-first" else iter(touched)
            for block in order:
                held[block] = None
                held.move_to_end(block)
            while len(held) > self.engine.blocks:
                held.popitem(last=False)
        return found * self.engine.block_tokens

    def _requests(self) -> Iterator[list[int]]:
        ids, starts = self.view.ids.tolist(), self.view.starts.tolist()
        for request in range(self.stream.requests):
            yield ids[starts[request] : starts[request + 1]]

    def _leading(self, hit: npt.NDArray[np.bool_]) -> PerRequest:
        """(references,) → tokens of each request's leading hits that may be served."""
        missed = np.concatenate(([0], np.cumsum(~(hit & self._may_hit))))
        starts = self.view.starts
        before = missed[:-1] - np.repeat(missed[starts[:-1]], np.diff(starts))
        served = hit & self._may_hit & (before == 0)
        sums = np.concatenate(([0], np.cumsum(served)))
        return np.asarray((sums[starts[1:]] - sums[starts[:-1]]) * self.engine.block_tokens, dtype=np.int64)


def gap(stream: Stream, engine: Modelled, records: Sequence[Replayed], *, preemptions: int | None = None) -> Gap:
    """`stream`: exactly the requests of the records, in the trace's order. Raises ConfigError where they differ."""
    if [each.index for each in records] != list(range(stream.requests)):
        raise ConfigError(f"{len(records)} records of {stream.requests} requests; one each, in order, is needed")
    model = Model(stream, engine)
    base = model.lru()
    told = np.array([-1 if each.cached_tokens is None or each.outcome != "ok" else each.cached_tokens
                     for each in records], dtype=np.int64)
    known = told >= 0
    would = dict(_would(model, records)) if (told[known] != base[known]).any() else {}
    likeliest = sorted(would, key=lambda name: (-int((would[name][known] == told[known]).sum()),
                                                not (engine.whole_prompts and name == "eviction_order")))  # stable
    odd: list[Odd] = []
    net: Counter[str] = Counter()
    unexplained = 0
    for index in np.flatnonzero(known & (told != base)).tolist():
        engine_tokens, mine = int(told[index]), int(base[index])
        fit = [name for name in likeliest if would[name][index] == engine_tokens]
        cause = fit[0] if fit else None
        if cause is None and engine_tokens > model.possible[index]:
            cause = "warm_start"
        if cause is None and preemptions:
            cause = "preemption"
        if cause is None:
            cause = UNEXPLAINED
            unexplained += abs(engine_tokens - mine)
        net[cause] += engine_tokens - mine
        odd.append(Odd(index=index, possible=int(model.possible[index]), model=mine, engine=engine_tokens, cause=cause,
                       also=tuple(fit[1:])))
    possible, bound = int(model.possible.sum()), model.bound_tokens
    modelled = int(base[known].sum())
    return Gap(
        prompt_tokens=int(stream.input_tokens.sum()), bound=bound, possible=possible, model=modelled,
        engine=int(told[known].sum()), granularity=bound - possible, capacity=possible - int(base.sum()),
        causes=dict(sorted(net.items())), unexplained=unexplained, compared=int(known.sum()),
        left_out=int((~known).sum()), equal=int((told[known] == base[known]).sum()), odd=tuple(odd))


def _would(model: Model, records: Sequence[Replayed]) -> Iterator[tuple[str, PerRequest]]:
    for touch in get_args(Touch):
        if touch != model.engine.touch:
            yield f"order_of_touch ({touch})", model.lru(touch)
    yield "generated_tokens (given back first)", model.with_answers_given_back()
    yield "generated_tokens", model.with_answers()
    yield "eviction_order", model.whole_prompts()
    yield "concurrency", model.by_times(records)


def _let_go(held: Counter[int], prompt: Sequence[int]) -> None:
    for block in prompt:
        held[block] -= 1
        if not held[block]:
            del held[block]
