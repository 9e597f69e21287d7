"""Is a restored conversation the retained one? Asks each conversation cold (twice), from the device, and restored.

One stream at a time, so that the batch has one shape. The device reference is taken at once after the prompt was
retained; the restored answer comes after other traffic has pushed it out of a pool that is really too small. What
each answer was served from is the server's own account of that request: a row without proof says nothing and is
refused by the judge (`bench.figures`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Literal

from hostcache.bench.rig import Rig, arm_record
from hostcache.bench.servers import RunningServer, ServerPlan
from hostcache.client.counters import delta
from hostcache.client.openai import Failure
from hostcache.errors import ConfigError
from hostcache.records import ArmRecord, EquivalenceRecord, TracedAnswer
from hostcache.workload.agents import COMPACTED_SHARE, stream

Shape = Literal["plain", "answers", "compaction"]
Boundary = Literal["on", "before", "after"]

SHORTEST_TOKENS = 200
FOLLOW_UP_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One conversation: `first_tokens` of code, then (shape) nothing, reply + `FOLLOW_UP_TOKENS` more, or the cut.

    The prompt that is compared has `tokens` tokens and ends on, one before or one after a page boundary.
    """

    number: int
    shape: Shape
    boundary: Boundary
    first_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EquivalencePlan:
    conversations: int
    longest_tokens: int
    reply_tokens: int
    page_tokens: int
    on: ServerPlan
    off: ServerPlan

    def cases(self) -> list[Case]:
        """Lengths in even ratios from 200 to `longest_tokens`; the longest is a plain one."""
        return equivalence_cases(self.conversations, self.longest_tokens, self.reply_tokens, self.page_tokens)


def equivalence_cases(count: int, longest_tokens: int, reply_tokens: int, page_tokens: int) -> list[Case]:
    if count < 1 or longest_tokens < SHORTEST_TOKENS:
        raise ConfigError(f"{count} conversations of up to {longest_tokens} tokens; "
                          f"give at least 1 of at least {SHORTEST_TOKENS}")
    shapes: tuple[Shape, ...] = ("plain", "answers", "compaction")
    boundaries: tuple[Boundary, ...] = ("on", "before", "after")
    cases = []
    for number in range(count):
        share = number / (count - 1) if count > 1 else 1.0
        length = round(SHORTEST_TOKENS * (longest_tokens / SHORTEST_TOKENS) ** share)
        place = count - 1 - number
        shape, boundary = shapes[place % 3], boundaries[(place + place // 3) % 3]
        first = length
        if shape == "compaction":
            length = int(length * COMPACTED_SHARE)
        whole = max(2, length // page_tokens) * page_tokens
        tokens = whole + {"on": 0, "before": -1, "after": 1}[boundary]
        if shape == "answers":
            first = tokens - reply_tokens - FOLLOW_UP_TOKENS
        elif shape == "plain":
            first = tokens
        cases.append(Case(number=number, shape=shape, boundary=boundary, first_tokens=max(first, 1), tokens=tokens))
    return cases


def pool_tokens_for(longest_tokens: int, reply_tokens: int, page_tokens: int) -> int:
    """A pool that just fits the longest conversation with its answer and a quarter more, so that the others push."""
    return -(-int((longest_tokens + 2 * reply_tokens + FOLLOW_UP_TOKENS) * 1.25) // page_tokens) * page_tokens


class _AnswerFailed(Exception):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class _Warm:
    """What the on server said of one case before eviction."""

    prompt: tuple[int, ...]
    device: TracedAnswer | None
    kept_tokens: int | None
    kept_expected_tokens: int | None
    error: str | None


async def run_equivalence(rig: Rig, plan: EquivalencePlan) -> None:
    cases = plan.cases()
    rows = await _on_server(rig, plan, cases)
    for attempt in ("cold", "cold_again"):
        rows = await _cold(rig, plan, rows, attempt)
    for row in rows:
        rig.write(row[1])


_Row = tuple[tuple[int, ...], EquivalenceRecord]


async def _on_server(rig: Rig, plan: EquivalencePlan, cases: Sequence[Case]) -> list[_Row]:
    rig.progress.stage("equivalence, tier on")
    async with rig.launcher.running(plan.on, name="equivalence-on") as server:
        started_s = rig.clock.now()
        opening = await server.client.stats()
        pieces, rest = await _pieces(rig, server, cases)
        warm = []
        for case, piece in zip(cases, pieces, strict=True):
            rig.progress.show(f"conversation {case.number + 1}/{len(cases)}, {case.tokens} tokens: from the device")
            warm.append(await _from_device(rig, plan, server, case, piece))
        rig.progress.show("pushing all of them out with other text")
        await _push_out(rig, server, rest)
        rows: list[_Row] = []
        for case, seen in zip(cases, warm, strict=True):
            rig.progress.show(f"conversation {case.number + 1}/{len(cases)}, {case.tokens} tokens: restored")
            rows.append((seen.prompt, await _restored(rig, plan, server, case, seen)))
        rig.write(_arm(rig, server, 0, started_s, opening, await server.client.stats()))
    return rows


def _arm(rig: Rig, server: RunningServer, index: int, started_s: float, opening: dict[str, Any],
         closing: dict[str, Any]) -> ArmRecord:
    return arm_record(server, stage="equivalence", index=index, window_s=None, primed_s=started_s, opened_s=started_s,
                      settled_s=rig.clock.now(), opening=opening, closing=closing)


async def _pieces(rig: Rig, server: RunningServer, cases: Sequence[Case]) -> tuple[list[list[int]], list[int]]:
    """A piece of code for each case, none overlapping another, and the rest for pushing out."""
    sources = await rig.sources(server.client, len(rig.corpus.files))
    stock = [token for source in sources for token in source]
    needed = [case.first_tokens + FOLLOW_UP_TOKENS for case in cases]
    least = sum(needed) + 2 * server.plan.pool_tokens
    if len(stock) < least:
        raise ConfigError(f"the corpus has {len(stock)} tokens, {least} are needed; "
                          "ask for fewer or shorter conversations")
    pieces, at = [], 0
    for count in needed:
        pieces.append(stock[at : at + count])
        at += count
    return pieces, stock[at:]


async def _ask(rig: Rig, server: RunningServer, prompt: Sequence[int], reply_tokens: int) -> TracedAnswer:
    outcome = await server.client.complete(prompt, model=server.model, max_tokens=reply_tokens,
                                           rng=stream(rig.seed, "equivalence"), trace_logits=True)
    if isinstance(outcome, Failure):
        raise _AnswerFailed(outcome.error)
    usage = outcome.usage
    if usage.device_tokens is None or usage.host_tokens is None or usage.recomputed is None:
        raise _AnswerFailed("the server does not report tokens by source; nothing proves what was served from where")
    return TracedAnswer(
        token_ids=outcome.token_ids, digests=outcome.digests, margins=outcome.margins, ttft_s=outcome.ttft_s,
        prompt_tokens=usage.prompt_tokens, device_tokens=usage.device_tokens, host_tokens=usage.host_tokens,
        recomputed=usage.recomputed)


async def _from_device(rig: Rig, plan: EquivalencePlan, server: RunningServer, case: Case,
                       piece: Sequence[int]) -> _Warm:
    first = tuple(piece[: case.first_tokens])
    kept = expected = None
    prompt = first[: case.tokens]
    try:
        answer = await _ask(rig, server, first, plan.reply_tokens)
        if case.shape == "answers":
            prompt = (*first, *answer.token_ids, *piece[case.first_tokens :])
            follow_up = await _ask(rig, server, prompt, plan.reply_tokens)
            kept = follow_up.device_tokens + follow_up.host_tokens
            # The reply's last token was sampled and never written, so it is in no page.
            expected = (len(first) + len(answer.token_ids) - 1) // plan.page_tokens * plan.page_tokens
        device = await _ask(rig, server, prompt, plan.reply_tokens)
    except _AnswerFailed as failed:
        return _Warm(prompt=prompt, device=None, kept_tokens=kept, kept_expected_tokens=expected, error=str(failed))
    return _Warm(prompt=prompt, device=device, kept_tokens=kept, kept_expected_tokens=expected, error=None)


async def _push_out(rig: Rig, server: RunningServer, rest: Sequence[int]) -> None:
    """Other text worth one and a quarter pools, in pieces of a third of it."""
    size = max(1, server.plan.pool_tokens // 3)
    for at in range(0, int(server.plan.pool_tokens * 1.25), size):
        outcome = await server.client.complete(rest[at : at + size], model=server.model, max_tokens=1,
                                               rng=stream(rig.seed, "push-out"))
        if isinstance(outcome, Failure):
            rig.progress.note(f"pushing out: {outcome.error}")


async def _restored(rig: Rig, plan: EquivalencePlan, server: RunningServer, case: Case,
                    seen: _Warm) -> EquivalenceRecord:
    restored, error = None, seen.error
    before = await server.client.stats()
    if error is None:
        try:
            restored = await _ask(rig, server, seen.prompt, plan.reply_tokens)
        except _AnswerFailed as failed:
            error = str(failed)
    after = await server.client.stats()
    restores = delta(before, after, "host_cache", "restores")
    return EquivalenceRecord(
        conversation=case.number, shape=case.shape, boundary=case.boundary, tokens=len(seen.prompt),
        page_tokens=plan.page_tokens, prompt_sha256=sha256(json.dumps(seen.prompt).encode()).hexdigest(),
        cold=None, cold_again=None, device=seen.device, restored=restored, kept_tokens=seen.kept_tokens,
        kept_expected_tokens=seen.kept_expected_tokens, restores=None if restores is None else int(restores),
        restore_submissions=_restore_submissions(before, after), error=error)


def _restore_submissions(before: dict[str, Any], after: dict[str, Any]) -> int | None:
    own = delta(before, after, "host_cache", "restore_submissions")
    if own is not None:
        return int(own)
    both, stores = (delta(before, after, "host_cache", name) for name in ("copy_submissions", "stores_issued"))
    return int(both) if both is not None and stores == 0 else None


async def _cold(rig: Rig, plan: EquivalencePlan, rows: list[_Row], attempt: str) -> list[_Row]:
    rig.progress.stage(f"equivalence, {attempt.replace('_', ' ')}, tier off")
    index = 1 if attempt == "cold" else 2
    filled: list[_Row] = []
    async with rig.launcher.running(plan.off, name=f"equivalence-{attempt.replace('_', '-')}") as server:
        started_s = rig.clock.now()
        opening = await server.client.stats()
        for prompt, row in rows:
            rig.progress.show(f"conversation {row.conversation + 1}/{len(rows)}, {row.tokens} tokens: {attempt}")
            try:
                answer = await _ask(rig, server, prompt, plan.reply_tokens)
                filled.append((prompt, _with_cold(row, attempt, answer)))
            except _AnswerFailed as failed:
                filled.append((prompt, replace(row, error=row.error or f"{attempt}: {failed}")))
        rig.write(_arm(rig, server, index, started_s, opening, await server.client.stats()))
    return filled


def _with_cold(row: EquivalenceRecord, attempt: str, answer: TracedAnswer) -> EquivalenceRecord:
    return replace(row, cold=answer) if attempt == "cold" else replace(row, cold_again=answer)
