"""Ladders: what one prompt costs cold, again, and after others pushed it out; and how fast 1, 3 and 6 streams decode.

A rung is one segment, its part says corpus and size (`prose 1000`), from the second pass on the pass too
(`prose 1000 pass 2`). It takes a few prompts that nobody ever sent (`samples`), one stream at a time:

    cold         computed in full
    reuse        the same prompt at once: from the device
    evict        other text, more than the pool holds, in pieces; sent once for all samples of the rung
    after-evict  the same prompt again: restored where there is a tier, computed again where there is none

A decode rung (`prose decode 3`) sends short prompts at the same moment and lets each answer run for `decode_tokens`.

A pass climbs all rungs with prompts of its own. All passes of a cell meet one server; to alternate arms, a matrix takes
several attempts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hostcache.bench.harness.cell import Cell, Kind, Workload, corpus_text
from hostcache.bench.harness.cellfile import Place
from hostcache.bench.harness.load import together
from hostcache.bench.harness.texts import CHARS_PER_TOKEN, Piece, Texts
from hostcache.errors import ConfigError
from hostcache.records import Role

FILLER_SHARE = 3
"""A piece of other text is this part of the pool: small enough to be admitted, large enough to be few."""
_LEAST_CORPUS_TOKENS = 4096
_TOKENIZED_CHARACTERS = 1 << 16
"""At once, so that no request is too large for its server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderParameters(Workload):
    """`sizes` or `streams` empty, or `evict_pools` 0, leave their rungs or roles out.

    `evict_pools`: how much other text pushes a prompt out, in pools. `pool_tokens`: what the device holds; 0: what the
    server says.
    """

    KIND: ClassVar[Kind] = "ladder"
    NAME: ClassVar[str] = "ladder"

    sizes: tuple[int, ...] = (200, 500, 1000, 2000)
    reply_tokens: int = 8
    samples: int = 3
    passes: int = 1
    evict_pools: float = 1.25
    pool_tokens: int = 0
    streams: tuple[int, ...] = (1, 3, 6)
    decode_prompt_tokens: int = 64
    decode_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("reply_tokens", "samples", "passes", "decode_prompt_tokens", "decode_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; a ladder needs at least 1")
        for name in ("evict_pools", "pool_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 0 or more")
        for name in ("sizes", "streams"):
            values = getattr(self, name)
            if any(value < 1 for value in values) or len(set(values)) < len(values):
                raise ConfigError(f"{name} are {', '.join(map(str, values))}; give different numbers of at least 1")
        if not self.sizes and not self.streams:
            raise ConfigError("a ladder without sizes and without streams has no rung; give some of either")

    def corpus_tokens(self) -> int:
        return max(_LEAST_CORPUS_TOKENS, 2 * max(self.sizes, default=0))

    def keeps(self, finished: frozenset[Place]) -> frozenset[Place]:
        """Every rung stands alone."""
        return finished

    async def run(self, cell: Cell) -> None:
        pool = self._pool(cell)
        self._check(cell, pool)
        corpora = await corpora_of(cell)
        for turn in range(self.passes):
            for kind, texts in corpora.items():
                for size in self.sizes:
                    await self._rung(cell, texts, kind, size, turn, pool)
            for kind, texts in corpora.items():
                for streams in self.streams:
                    await self._decode(cell, texts, kind, streams, turn)

    def _pool(self, cell: Cell) -> int | None:
        """None where nothing is pushed out and the server does not say. Raises ConfigError."""
        if self.sizes and self.evict_pools:
            return pool_tokens_of(cell, self.pool_tokens)
        return known_pool_tokens(cell, self.pool_tokens)

    def _check(self, cell: Cell, pool: int | None) -> None:
        """Raises ConfigError: a rung that silently stays out would make two ladders that are not the same."""
        longest = max(self.sizes, default=0) + self.reply_tokens
        decode = self.decode_prompt_tokens + self.decode_tokens if self.streams else 0
        check_fits(cell, longest, f"a rung of {max(self.sizes, default=0)} tokens and a reply of {self.reply_tokens}",
                   pool)
        check_fits(cell, decode, f"a decode rung of {self.decode_prompt_tokens} + {self.decode_tokens} tokens", pool)

    async def _rung(self, cell: Cell, texts: Texts, kind: str, size: int, turn: int, pool: int | None) -> None:
        part = f"{kind} {size}{_pass(turn)}"
        if cell.done("rung", part):
            return
        prompts = {f"{part} {i}": texts.head(size, "rung", kind, size, turn, i) for i in range(self.samples)}

        async def ask(role: Role, session: str, number: int) -> None:
            piece = prompts[session]
            known = 0 if role == "cold" else texts.tokens_of(piece)
            await cell.ask(texts.prompt(piece), role=role, session=session, turn=number, max_tokens=self.reply_tokens,
                           shared_tokens=known if texts.mode == "ids" else None)

        async with cell.segment("rung", part):
            for session in prompts:
                await ask("cold", session, 0)
                await ask("reuse", session, 1)
            if self.evict_pools and pool is not None:
                await push_out(cell, texts, f"{part} evict", pool_tokens=pool, pools=self.evict_pools)
                for session in prompts:
                    await ask("after-evict", session, 2)

    async def _decode(self, cell: Cell, texts: Texts, kind: str, streams: int, turn: int) -> None:
        part = f"{kind} decode {streams}{_pass(turn)}"
        if cell.done("rung", part):
            return

        async def one(stream: int, sample: int, due_s: float) -> None:
            head = texts.head(self.decode_prompt_tokens, "decode", kind, streams, turn, sample, stream)
            await cell.ask(texts.prompt(head), role="decode", session=f"{part} {sample}.{stream}", client=stream,
                           max_tokens=self.decode_tokens, due_s=due_s, shared_tokens=0 if texts.mode == "ids" else None)

        async with cell.segment("rung", part):
            for sample in range(self.samples):
                due_s = cell.clock.now()
                await together(one(stream, sample, due_s) for stream in range(streams))


def _pass(turn: int) -> str:
    return f" pass {turn + 1}" if turn else ""


# -- what both ladders and comparisons need --------------------------------------------------------------------------


def known_pool_tokens(cell: Cell, given: int) -> int | None:
    """What the server's device cache holds: as given, else as it says, else None."""
    said = cell.serving.described.get("pool_tokens")
    return given or (int(said) if said else None)


def pool_tokens_of(cell: Cell, given: int) -> int:
    """The same. Raises ConfigError where nobody says: then nobody knows how much pushes a prompt out."""
    pool = known_pool_tokens(cell, given)
    if pool is None:
        raise ConfigError(f"{cell.serving.url} does not say how many tokens its cache holds, so nobody knows how much "
                          "pushes a prompt out; give pool_tokens")
    return pool


def check_fits(cell: Cell, tokens: int, what: str, pool: int | None) -> None:
    """Raises ConfigError before anything of the workload is sent."""
    if cell.limit_tokens is not None and tokens > cell.limit_tokens:
        raise ConfigError(f"{what} exceed the server's limit of {cell.limit_tokens}; use smaller ones")
    if pool is not None and tokens > pool:
        raise ConfigError(f"{what} exceed the {pool} tokens that the device holds; use smaller ones, or a larger pool")


async def push_out(cell: Cell, texts: Texts, name: str, *, pool_tokens: int, pools: float) -> None:
    """Other text, `pools` times what the device holds: pieces of a third of it, each with one token of answer.

    Tokens are counted by the server's usage where it says them, else as they were cut.
    """
    longest = pool_tokens if cell.limit_tokens is None else cell.limit_tokens - 1
    size = max(1, min(-(-pool_tokens // FILLER_SHARE), longest))
    wanted, pushed = pools * pool_tokens, 0
    for number in range(2 * round(wanted / size) + 2):  # not without end on a server that refuses them
        if pushed >= wanted:
            return
        head = texts.head(size, "evict", name, number)
        heard = await cell.ask(texts.prompt(head), role="evict", session=f"{name} {number}", max_tokens=1,
                               shared_tokens=0 if texts.mode == "ids" else None)
        if heard.outcome == "ok":
            pushed += heard.usage.prompt_tokens if heard.usage is not None else size
    if pushed < wanted:
        cell.note(f"{name}: only {pushed} of {wanted:.0f} tokens were served, so not all may have been pushed out")


async def corpora_of(cell: Cell) -> dict[str, Texts]:
    """The cell's texts by corpus: `both` is taken apart into prose and code, in this order."""
    name = cell.spec.corpus
    folder, _, kind = name.rpartition(":") if ":" in name else ("", "", name)
    if kind != "both":
        return {kind if kind in ("prose", "code") else "code": cell.texts}
    characters = round(max(_LEAST_CORPUS_TOKENS, cell.spec.workload.corpus_tokens()) * CHARS_PER_TOKEN)
    found = {}
    for each in ("prose", "code"):
        text = corpus_text(f"{folder}:{each}" if folder else each, characters)
        source: Piece = text
        if cell.texts.mode == "ids":
            source = tuple([token for at in range(0, len(text), _TOKENIZED_CHARACTERS)
                            for token in await cell.serving.client.tokenize(text[at : at + _TOKENIZED_CHARACTERS])])
        found[each] = Texts(cell.texts.mode, source, seed=cell.texts.seed, salt=cell.texts.salt,
                            chars_per_token=cell.texts.chars_per_token)
    return found
