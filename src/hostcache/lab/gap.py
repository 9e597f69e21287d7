"""The distance between bound, model and engine, request by request, and which cause accounts for each. Runs nothing.

    bound          tokens of the prompts that an earlier one began with (any cache, any order)
    possible       of these, in whole blocks of the engine and without each prompt's last token     bound − granularity
    model          LRU at the capacity, in the order of touch                                       possible − capacity
    engine         what the requests were told                                                      model − gap

A cause is tested by asking what it would have given each request: it accounts for a request when it gives exactly what
that one was told and the model does not, and is tried only where it is right about more requests than the model: what
gives a few requests the same number by chance gives others a wrong one. Of several, the one that is right about most
requests is named, and the others beside it (`also`); where they are right about as many, the engine's own habit goes
first (`whole_prompts`):

    order_of_touch     LRU that hears of a request's blocks in another order
    generated_tokens   LRU whose capacity also holds the answers and the blocks that are not full: for as long as other
                       blocks, or given back first, as vLLM 0.32 does with what has no hash (v1/core/block_pool.py,
                       free_blocks)
    eviction_order     whole prompts leave, least recently used first, as this project's engine evicts
    granularity        LRU in blocks of another size
    concurrency        LRU by the times of the records: a block is there from its request's first token on, or from its
                       sending on; where no two requests overlap, this is `unanswered`: what the others left behind.
                       Also what lies between that which requests that were over had left and that which those on their
                       way may have left: which of two came first, nobody knows to the millisecond
    warm_start         LRU when the cache has just served the same requests
    bridge             LRU of what an engine sees through a bridge of k texts, for the k that is right most often; tried
                       where a request was told more than the others could have left it, and named where it is right
                       about most of those that the model is not right about

A request that was told more than all others together could have left it, sent as they were, in whole blocks and no more
than its own, was served from before the replay: `warm_start` (the bridge's gates leave no other reason); or from its
own blocks after it was preempted: `preemption`, for no more requests than the engine counted preemptions. What a
preemption did to others cannot be tested. What none accounts for is `unexplained`, in tokens, and by request.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from hostcache.errors import ConfigError
from hostcache.lab.lru import Touch, stack_distances
from hostcache.lab.oracle import seen_by_engine
from hostcache.lab.replayed import Replayed
from hostcache.lab.stream import Stream
from hostcache.workload.legacy_bridge import LEGACY_WORDS, collapsed_texts

PerRequest = npt.NDArray[np.int64]
UNEXPLAINED = "unexplained"
OTHER_SIZES = (16, 32, 64, 128, 256, 512)
"""Of an engine's blocks, in tokens, to try beside those that it is said to have."""


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
    """Tokens over all compared requests. `causes`: engine − model, net, by cause. `compared`: answered requests whose
    cached tokens are known; the others count nowhere but in `left_out`. With none of them, model and engine are 0 and
    say nothing, and the rest is of all requests."""

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
        self.whole = self._leading(np.ones_like(first))
        """all that could be served, had everything been there"""

    @property
    def bound(self) -> PerRequest:
        new = np.zeros(self.stream.references, dtype=np.bool_)
        new[np.unique(self.stream.ids, return_index=True)[1]] = True
        sums = np.concatenate(([0], np.cumsum(np.where(new, 0, self.stream.tokens), dtype=np.int64)))
        return np.asarray(sums[self.stream.starts[1:]] - sums[self.stream.starts[:-1]])

    @property
    def bound_tokens(self) -> int:
        return int(self.bound.sum())

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
            have = self._have(request, blocks, held)
            found[request] = have
            tokens = int(self.stream.input_tokens[request])
            mine = tuple(blocks)
            used = mine[:have]
            kept = set(used)
            held.update(used)  # in use, so they stay whoever leaves
            wanted = -(-min(tokens + 1, tokens + self.engine.max_tokens - 1) // self.engine.block_tokens) - have
            leaving = []
            for prompt in prompts:
                if self.engine.blocks - len(held) >= wanted:
                    break
                if not kept.issuperset(prompt):
                    leaving.append(prompt)
                    _let_go(held, prompt)
            for prompt in leaving:
                del prompts[prompt]
            _let_go(held, used)
            if not mine:
                continue
            for prompt in [each for each in prompts if each[0] == mine[0] and mine[: len(each)] == each]:
                del prompts[prompt]
                _let_go(held, prompt)
            if have:  # one that shares all of it was used again
                sharing = [each for each in prompts if each[0] == mine[0] and each[:have] == used]
                if sharing:
                    prompts.move_to_end(sharing[-1])
            prompts[mine] = None
            held.update(mine)
        return found * self.engine.block_tokens

    def by_times(self, records: Sequence[Replayed], *, from_sending: bool = False) -> PerRequest:
        """LRU whose lookups are at each record's sending, and whose touches are at its first token, or with them."""
        events = sorted([*((each.sent_s, 1, each.index) for each in records),
                         *((each.first_token_s, 0, each.index) for each in records
                           if each.first_token_s is not None and not from_sending)])
        served = {each.index for each in records if each.first_token_s is not None}
        held: OrderedDict[int, None] = OrderedDict()
        blocks = list(self._requests())
        found = np.zeros(self.stream.requests, dtype=np.int64)
        for _, is_lookup, request in events:
            touched = blocks[request]
            if is_lookup:
                found[request] = have = self._have(request, touched, held)
                if not from_sending or request not in served:
                    touched = touched[:have]
            order = reversed(touched) if self.engine.touch == "tail-first" else iter(touched)
            for block in order:
                held[block] = None
                held.move_to_end(block)
            while len(held) > self.engine.blocks:
                held.popitem(last=False)
        return found * self.engine.block_tokens

    def warm(self) -> Iterator[PerRequest]:
        """When the cache has just served the same requests."""
        again = Model(self.stream.repeated(), self.engine)
        yield again.lru()[self.stream.requests :]
        if self.engine.whole_prompts:
            yield again.whole_prompts()[self.stream.requests :]

    def through(self, texts: int) -> PerRequest:
        """When the prompts came through a bridge of so many texts."""
        seen = self.stream.through(collapsed_texts(self.stream.names, texts), why=f"in {texts} texts")
        return Model(seen, self.engine).lru()

    def left_by_others(self, records: Sequence[Replayed], *, over: bool = False) -> PerRequest:
        """The most of each prompt that requests sent before its own first token can have left, in any order; with
        `over`, those that had theirs when it was sent."""
        sent: dict[int, list[tuple[float, int]]] = {}
        blocks = list(self._requests())

        def there_s(each: Replayed) -> float:
            return _first_token_s(each) if over else each.sent_s

        for each in sorted(records, key=there_s):
            for block in blocks[each.index]:
                two = sent.setdefault(block, [])  # the first two that left it: one of them is not oneself
                if len(two) < 2 and (not two or two[0][1] != each.index):
                    two.append((there_s(each), each.index))
        hit = []
        for each in records:
            until_s = each.sent_s if over else _first_token_s(each)
            hit += [any(at_s <= until_s and index != each.index for at_s, index in sent[block])
                    for block in blocks[each.index]]
        return self._leading(np.array(hit, dtype=np.bool_))

    def _have(self, request: int, blocks: Sequence[int], held: Container[int]) -> int:
        loadable = int(self._firsts[self.view.starts[request + 1]] - self._firsts[self.view.starts[request]])
        return next((place for place in range(loadable) if blocks[place] not in held), loadable)

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
    for each, tokens in zip(records, stream.input_tokens.tolist(), strict=True):
        if each.prompt_tokens not in (None, tokens):
            raise ConfigError(f"request {each.index} had {each.prompt_tokens} prompt tokens by its server, the trace "
                              f"gives it {tokens}: it is of another trace, slice or --block-tokens, or the server adds "
                              "some")
    model = Model(stream, engine)
    base = model.lru()
    told = np.array([-1 if each.cached_tokens is None or each.outcome != "ok" else each.cached_tokens
                     for each in records], dtype=np.int64)
    known = told >= 0
    odd: list[Odd] = []
    net: Counter[str] = Counter()
    unexplained = 0
    differing = np.flatnonzero(known & (told != base)).tolist()
    if differing:
        left = model.left_by_others(records)
        most = np.maximum(model.possible, left)
        beyond = {index for index in differing if most[index] < told[index] <= model.whole[index]
                  and told[index] % engine.block_tokens == 0}
        over = model.left_by_others(records, over=True) if _overlap(records) else left
        unknown_order = {index for index in differing if over[index] <= told[index] <= left[index] != over[index]}
        would = list(_would(model, records))
        if (told > most).any():
            would += _bridge(model, told, np.array(differing))
        right = [(int((given[known] == told[known]).sum()), name, given) for name, given in would]
        likeliest = sorted((each for each in right if each[0] > int((base[known] == told[known]).sum())),
                           key=lambda each: (-each[0], not (engine.whole_prompts and each[1] == "eviction_order")))
        before = ("preemption", "warm_start") if len(beyond) <= (preemptions or 0) else ("warm_start",)
    for index in differing:
        engine_tokens, mine = int(told[index]), int(base[index])
        gives = [name for _, name, given in likeliest if given[index] == engine_tokens]
        if index in unknown_order:
            gives = [*(name for name in gives if name != "warm_start"), "concurrency",
                     *(name for name in gives if name == "warm_start")]
        fit = list(dict.fromkeys([*gives, *(before if index in beyond else ())]))
        cause = fit[0] if fit else UNEXPLAINED
        if not fit:
            unexplained += abs(engine_tokens - mine)
        net[cause] += engine_tokens - mine
        odd.append(Odd(index=index, possible=int(model.possible[index]), model=mine, engine=engine_tokens, cause=cause,
                       also=tuple(fit[1:])))
    these = known if known.any() else np.ones_like(known)
    possible, bound = int(model.possible[these].sum()), int(model.bound[these].sum())
    modelled = int(base[these].sum())
    return Gap(
        prompt_tokens=int(stream.input_tokens[these].sum()), bound=bound, possible=possible,
        model=int(base[known].sum()), engine=int(told[known].sum()), granularity=bound - possible,
        capacity=possible - modelled, causes=dict(sorted(net.items())), unexplained=unexplained,
        compared=int(known.sum()), left_out=int((~known).sum()), equal=int((told[known] == base[known]).sum()),
        odd=tuple(odd))


def _would(model: Model, records: Sequence[Replayed]) -> Iterator[tuple[str, PerRequest]]:
    for touch in get_args(Touch):
        if touch != model.engine.touch:
            yield f"order_of_touch ({touch})", model.lru(touch)
    yield "generated_tokens (given back first)", model.with_answers_given_back()
    yield "generated_tokens", model.with_answers()
    yield "eviction_order", model.whole_prompts()
    name = "concurrency" if _overlap(records) else "unanswered"
    yield name, model.by_times(records)
    yield name, model.by_times(records, from_sending=True)
    for size in OTHER_SIZES:
        if size != model.engine.block_tokens and not (size % model.stream.block_tokens
                                                      and model.stream.block_tokens % size):
            yield f"granularity (blocks of {size})", Model(model.stream, replace(model.engine, block_tokens=size)).lru()
    for given in model.warm():
        yield "warm_start", given


def _bridge(model: Model, told: PerRequest, differing: npt.NDArray[np.int64]) -> list[tuple[str, PerRequest]]:
    sizes = {LEGACY_WORDS, *np.geomspace(1, max(2, model.stream.distinct), 24).round().astype(int).tolist()}
    tried = [(f"bridge ({texts} texts)", model.through(texts)) for texts in sorted(sizes)]
    right = [int((given[differing] == told[differing]).sum()) for _, given in tried]
    return [tried[int(np.argmax(right))]] if 2 * max(right) > len(differing) else []


def _first_token_s(each: Replayed) -> float:
    return each.ended_s if each.first_token_s is None else each.first_token_s


def _overlap(records: Sequence[Replayed]) -> bool:
    ordered = sorted(records, key=lambda each: each.sent_s)
    return any(later.sent_s < each.ended_s for each, later in pairwise(ordered))


def _let_go(held: Counter[int], prompt: Sequence[int]) -> None:
    for block in prompt:
        held[block] -= 1
        if not held[block]:
            del held[block]
