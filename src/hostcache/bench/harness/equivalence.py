"""Is a restored answer the cold one? Asks conversations cold, from the device and restored, greedily, one at a time.

Each conversation is a part of its own, named after its tokens. Its segments, each with all conversations in turn:

    prime    cold         never sent before
             reuse        at once: from the device
    warmup   cold-again   once more computed in full: how far do two cold answers differ?
             (part evict) other text, until the device holds nothing of any of them
    compare  restored     alone between two scrapes, so that what the server counted there is this answer's proof

To be cold a second time takes `cache_salt` (keeps blocks apart) or /reset_prefix_cache; which of them really works here
is tried with a few short requests outside of all segments. A server with neither has no noise floor.

Where the server says that it has no tier, nothing is pushed out, as nothing comes back: `reuse` is what stands alone in
`compare`. Without a way to be cold again it is pushed out after all, and the last answer is `cold-again`.

`judge` reads the verdict off the records. An answer without proof of where its prompt came from is no comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from hostcache.bench.harness.cell import Cell, Kind, Workload
from hostcache.bench.harness.cellfile import Place
from hostcache.bench.harness.figures import cell_figures
from hostcache.bench.harness.ladder import check_fits, known_pool_tokens, pool_tokens_of, push_out
from hostcache.bench.harness.texts import Prompt
from hostcache.client.openai import Ask, Heard
from hostcache.client.stream import OK, WholeAnswer
from hostcache.client.wire import Broken, Connections
from hostcache.errors import BARS_MISSED, ConfigError
from hostcache.records import Record, RequestRecord, Role, SegmentName

Way: TypeAlias = Literal["cache_salt", "reset", "evict", "none"]
"""How a conversation can be cold a second time. `evict`: the last answer of it is."""
_ASKED_WAYS = ("auto", *get_args(Way))
Verdict: TypeAlias = Literal["identical", "different", "unproven"]

PAGE_UNKNOWN_TOKENS = 256
"""Boundaries where the server does not name its page: a multiple of every usual one."""
UNPROVEN = 1
"""Exit code: nothing differs, and nothing shows that anything was compared."""
_TRIAL_TOKENS = 512
_SALT = {"cache_salt": "hostcache-cold-again"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EquivalenceParameters(Workload):
    """`conversations` from `shortest_tokens` to `longest_tokens` in even ratios, one before, on and one after a page
    boundary in turn; a single one is the longest, uncut.

    `cold_again`: cache_salt, reset (of the whole server: everybody's prefixes are forgotten), evict (without a tier),
    none, or auto: the first of them that works. `boundary_tokens`: of a page, `pool_tokens`: what the device holds; 0:
    what the server says. `evict_pools`: how much other text pushes conversations out, in pools. `at_once`: how many of
    them each time; 0: all. The tier must hold so many and that text.
    """

    KIND: ClassVar[Kind] = "equivalence"
    NAME: ClassVar[str] = "equivalence"

    conversations: int = 8
    shortest_tokens: int = 200
    longest_tokens: int = 2000
    reply_tokens: int = 32
    evict_pools: float = 1.25
    pool_tokens: int = 0
    at_once: int = 0
    boundary_tokens: int = 0
    cold_again: str = "auto"

    def __post_init__(self) -> None:
        for name in ("conversations", "shortest_tokens", "reply_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; an equivalence run needs at least 1")
        if self.longest_tokens < self.shortest_tokens:
            raise ConfigError(f"longest_tokens is {self.longest_tokens}, below shortest_tokens {self.shortest_tokens}")
        for name in ("pool_tokens", "boundary_tokens", "at_once"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 0 or more")
        if not self.evict_pools > 0:
            raise ConfigError(f"evict_pools is {self.evict_pools}; without eviction nothing is restored")
        if self.cold_again not in _ASKED_WAYS:
            raise ConfigError(f"cold_again is {self.cold_again!r}; give one of {', '.join(_ASKED_WAYS)}")

    def corpus_tokens(self) -> int:
        return 2 * self.longest_tokens

    def keeps(self, finished: frozenset[Place]) -> frozenset[Place]:
        """Conversations that were asked in full."""
        whole = {part for segment, part in finished if segment == "compare"}
        return frozenset(place for place in finished if place[1] in whole)

    def lengths(self, page_tokens: int) -> tuple[int, ...]:
        """Of the conversations, all different, ascending but for what the boundaries move."""
        if self.conversations == 1:
            return (self.longest_tokens,)
        found: list[int] = []
        for number in range(self.conversations):
            share = number / (self.conversations - 1)
            wanted = self.shortest_tokens * (self.longest_tokens / self.shortest_tokens) ** share
            pages, beside = max(2, round(wanted) // page_tokens), (-1, 0, 1)[number % 3]
            found.append(next(tokens for more in count() if (tokens := (pages + more) * page_tokens + beside) > 0
                              and tokens not in found))
        return tuple(found)

    async def run(self, cell: Cell) -> None:
        pool = known_pool_tokens(cell, self.pool_tokens)
        lengths = self.lengths(self.boundary_tokens or int(cell.serving.described.get("page_tokens") or 0)
                               or PAGE_UNKNOWN_TOKENS)
        longest = max(lengths)
        check_fits(cell, longest + self.reply_tokens,
                   f"a conversation of {longest} tokens and a reply of {self.reply_tokens}", pool)
        if not _has_no_tier(cell):
            pool = pool_tokens_of(cell, self.pool_tokens)
        way = await self._way(cell, pool)
        last: Role = "cold-again" if way == "evict" else "reuse" if _has_no_tier(cell) else "restored"
        left = [_Conversation(cell, tokens, self.reply_tokens) for tokens in lengths
                if not cell.done("compare", str(tokens))]
        size = 1 if last == "reuse" else self.at_once or len(left)
        for at in range(0, len(left), max(size, 1)):
            await self._round(cell, left[at : at + size], way, last, pool)

    async def _round(self, cell: Cell, conversations: Sequence[_Conversation], way: Way, last: Role,
                     pool: int | None) -> None:
        for each in conversations:
            await each.ask("prime", "cold", *(() if last == "reuse" else ("reuse",)))
        if way == "reset":
            await reset_prefix_cache(cell)
        if way in ("cache_salt", "reset"):
            for each in conversations:
                await each.ask("warmup", "cold-again", extra=_SALT if way == "cache_salt" else None)
        if last != "reuse":
            part = f"evict {conversations[0].part}"
            async with cell.segment("warmup", part):
                await push_out(cell, cell.texts, part, pool_tokens=pool or 0, pools=self.evict_pools)
        for each in conversations:
            await each.ask("compare", last)

    async def _way(self, cell: Cell, pool: int | None) -> Way:
        """What makes this server compute a prompt again that it knows, tried with one of its own."""
        asked = self.cold_again
        if asked == "none":
            return "none"
        tokens = min(_TRIAL_TOKENS, *((room or 2 * _TRIAL_TOKENS) // 2 for room in (cell.limit_tokens, pool)))
        texts = cell.texts.with_salt(f"{cell.texts.salt}/trial")
        prompt = texts.prompt(texts.head(tokens, "trial"))
        await _found(cell, prompt)
        known = await _found(cell, prompt)
        if not known:
            cell.note("the server does not say what its cache serves, so nothing can prove that an answer was cold "
                      "(vLLM says it with --enable-prompt-tokens-details)" if known is None else
                      "a prompt that was sent twice found nothing in a cache: it may be off, or keep nothing so short")
            return "none"
        if asked in ("auto", "cache_salt") and await _found(cell, prompt, _SALT) == 0:
            return "cache_salt"
        if asked in ("auto", "reset") and await reset_prefix_cache(cell) and await _found(cell, prompt) == 0:
            return "reset"
        if asked in ("auto", "evict") and _has_no_tier(cell) and pool is not None:
            return "evict"
        tried = "neither cache_salt nor reset makes" if asked == "auto" else f"{asked} does not make"
        cell.note(f"the noise floor is unavailable: {tried} this server compute a prompt again")
        return "none"


class _Conversation:
    """One prompt, asked again and again."""

    def __init__(self, cell: Cell, tokens: int, reply_tokens: int) -> None:
        self.part = str(tokens)
        self._cell = cell
        self._reply_tokens = reply_tokens
        piece = cell.texts.head(tokens, "conversation", tokens)
        self._prompt = cell.texts.prompt(piece)
        self._tokens = cell.texts.tokens_of(piece)
        self._cold: Heard | None = None
        self._turn = 0

    async def ask(self, segment: SegmentName, *roles: Role, extra: Mapping[str, Any] | None = None) -> None:
        """In a segment of its own; an answer that differs from the first is told at once."""
        cell = self._cell
        async with cell.segment(segment, self.part):
            for role in roles:
                known = self._tokens if self._turn else 0
                heard = await cell.ask(self._prompt, role=role, session=f"c{self.part}", turn=self._turn,
                                       max_tokens=self._reply_tokens, extra=extra,
                                       shared_tokens=known if cell.texts.mode == "ids" else None)
                self._turn += 1
                cold = self._cold = self._cold or heard
                if cold.outcome == heard.outcome == "ok" and (place := _difference(cold, heard)):
                    cell.note(f"{self.part} tokens: the {role} answer differs from the cold one at {place}")


def _has_no_tier(cell: Cell) -> bool:
    """The server says so; one that says nothing may have one."""
    return (cell.serving.described.get("tier") or {}).get("on") is False


async def _found(cell: Cell, prompt: Prompt, extra: Mapping[str, Any] | None = None) -> int | None:
    """How many tokens of it came from a cache; None where it was not served or the server does not say."""
    chat = cell.texts.mode == "chat"
    heard = await cell.serving.client.ask(
        # With its id a token counts that is no text: half of a character, say.
        Ask(endpoint="chat" if chat else "completions", prompt=prompt, max_tokens=1, extra=extra or {},
            want_ids=cell.serving.capabilities.token_ids and not chat), model=cell.serving.model, rng=Random(0))
    return heard.usage.hit_tokens if heard.outcome == "ok" and heard.usage is not None else None


async def reset_prefix_cache(cell: Cell) -> bool:
    """Whether the server says that it forgot every prefix, those of an outer tier too."""
    key = cell.serving.target.api_key
    wires = Connections(cell.serving.url, clock=cell.clock,
                        headers={} if key is None else {"Authorization": f"Bearer {key}"})
    answer = WholeAnswer()
    try:
        await wires.exchange("POST", "/reset_prefix_cache?reset_external=true", answer, timeout_s=60.0, body=b"")
    except Broken:
        return False
    finally:
        await wires.close()
    return answer.status == OK


def _difference(one: Heard, other: Heard) -> str:
    """Where two answers part; empty where they do not."""
    if one.token_ids and other.token_ids:
        return "" if one.token_ids == other.token_ids else f"token {_parting(one.token_ids, other.token_ids)}"
    return "" if one.text == other.text else f"character {_parting(one.text, other.text)}"


def _parting(one: Sequence[object], other: Sequence[object]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# -- the verdict -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Comparisons that count, and how many of them were the same to the last token."""

    compared: int
    same: int

    def __str__(self) -> str:
        return f"{self.same} of {self.compared} identical" if self.compared else "none compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """`noise`: cold against cold. `lines`: for whoever reads the command's output, the first says it all."""

    verdict: Verdict
    restored: Tally
    device: Tally
    noise: Tally
    lines: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return {"identical": 0, "different": BARS_MISSED, "unproven": UNPROVEN}[self.verdict]


def judge(records: Iterable[Record]) -> Judgement:
    """The verdict of an equivalence cell, from its records alone.

    Different: a proven answer differs from a proven cold one, in a conversation whose own cold answers do not differ.
    Unproven: no restored answer of a server with a tier was compared, or nothing at all, or the run is no good.
    """
    every = list(records)
    figures = cell_figures(every)
    if figures["equivalence"] is None:
        raise ConfigError(f"the cell {figures['cell']!r} is a run of {figures['workload']}, not of equivalence")
    tier = (figures["target"].get("tier") or {}).get("on")
    made = _compared(every, figures)
    restored, device, noise = (made.tally(kind) for kind in ("restored", "device", "cold again"))
    broken = [reason["text"] for reason in figures["reasons"]
              if reason["refuses"] == "cell" and reason["code"] != "lag"]  # a late client changes no token
    if figures["outcome"] != "finished":
        broken.append(f"the run did not finish: {figures['outcome']}")
    verdict: Verdict = "identical"
    if device.same < device.compared or restored.same < restored.compared:
        verdict = "different"
    elif broken or not device.compared + restored.compared or (tier and not restored.compared):
        verdict = "unproven"
    no_tier = tier is False and not restored.compared
    lines = (f"{verdict}: {'the server has no tier' if no_tier else f'restored against cold {restored}'}; "
             f"from the device against cold {device}",
             f"noise floor, cold against cold: {noise}" if noise.compared else
             "noise floor, cold against cold: unavailable, nothing was provably cold a second time",
             *(["the server says that its prefix cache is off"] if figures["target"].get("prefix_caching") is False
               else []), *made.said(), *broken)
    return Judgement(verdict=verdict, restored=restored, device=device, noise=noise, lines=lines)


class _Count:
    """Comparisons by kind, and what is to be said of single conversations."""

    def __init__(self) -> None:
        self._same: dict[str, list[bool]] = {}
        self._said: dict[str, list[str]] = {}

    def add(self, kind: str, part: str, compared: Mapping[str, Any], why_not: str) -> None:
        """`compared`: same (None: it could not be), why."""
        same = compared["same"]
        if why_not or same is None:
            self._said.setdefault(f"{kind} not counted ({why_not or compared['why']})", []).append(part)
            return
        self._same.setdefault(kind, []).append(same)
        if not same:
            self._said.setdefault(f"{kind} differs ({compared['why']})", []).append(part)

    def tally(self, kind: str) -> Tally:
        found = self._same.get(kind, [])
        return Tally(compared=len(found), same=sum(found))

    def said(self) -> list[str]:
        return [f"{said}: {', '.join(parts)} tokens" for said, parts in self._said.items()]


def _compared(records: Sequence[Record], figures: Mapping[str, Any]) -> _Count:
    """Every comparison of a cell that has its proof. How answers differ is said by its figures."""
    answers: dict[tuple[str, str], dict[str, RequestRecord]] = {}
    for record in records:
        if isinstance(record, RequestRecord):
            answers.setdefault((record.part, record.session), {})[record.role] = record
    alone = {segment["part"]: segment["counters"] for segment in figures["segments"]
             if segment["segment"] == "compare"}
    page = figures["target"].get("page_tokens")
    tierless = (figures["target"].get("tier") or {}).get("on") is False
    made = _Count()
    for row in figures["equivalence"]["rows"]:
        part, said = row["part"], answers[row["part"], row["session"]]
        not_cold = _why_not_cold(said.get("cold"))
        # An answer for which nothing was found, where all of it was to be found, is a cold one too.
        again = "cold-again" if "cold-again" in said else "reuse"
        compared = row["cold_vs_cold" if again == "cold-again" else "device_vs_cold"]
        why_not = not_cold or _why_not_cold(said.get(again))
        if again == "cold-again" or not why_not:
            made.add("cold again", part, compared, why_not)
        if not why_not and compared["same"] is False:
            not_cold = "two cold answers differ here, so a difference says nothing"
        made.add("device", part, row["device_vs_cold"], not_cold or _why_not_device(said.get("reuse")))
        if "restored" in said or not tierless:
            why_not = _why_not_restored(said.get("restored"), alone.get(part, {}), page)
            made.add("restored", part, row["restored_vs_cold"], not_cold or why_not)
    return made


def _why_not_cold(answer: RequestRecord | None) -> str:
    """Why nobody can say that it was computed in full; empty where it was."""
    if answer is None or answer.outcome != "ok":
        return "there is no cold answer" if answer is None else f"{answer.role}: {answer.reason or answer.outcome}"
    if answer.cached_tokens is None:
        return f"the server does not say what the {answer.role} answer was served from"
    found = answer.cached_tokens
    return f"{found} tokens of the {answer.role} answer came from a cache" if found else ""


def _why_not_device(answer: RequestRecord | None) -> str:
    if answer is None or answer.outcome != "ok":
        return "it was not asked" if answer is None else f"{answer.role}: {answer.reason or answer.outcome}"
    if answer.cached_tokens is None:
        return "the server does not say what was served from a cache"
    if not answer.cached_tokens:
        return "nothing came from a cache"
    return f"{answer.host_tokens} tokens came from the host" if answer.host_tokens else ""


def _why_not_restored(answer: RequestRecord | None, counted: Mapping[str, float], page_tokens: object) -> str:
    """By the answer's own usage, else by what the server counted while it was the only one."""
    if answer is None or answer.outcome != "ok":
        return "it was not asked" if answer is None else f"{answer.role}: {answer.reason or answer.outcome}"
    if answer.host_tokens is not None:
        host, device = float(answer.host_tokens), float(answer.device_tokens or 0)
    else:
        if "restores" not in counted and "host_tokens" not in counted:
            return "the server does not say what was restored"
        host = max(counted.get("restores", 0.0), counted.get("host_tokens", 0.0)) if answer.cached_tokens else 0.0
        device = counted.get("device_tokens", 0.0)
    if not host:
        return "nothing was restored"
    if device >= (page_tokens if isinstance(page_tokens, int | float) else 1):
        return f"{device:.0f} tokens were still on the device"
    return ""
