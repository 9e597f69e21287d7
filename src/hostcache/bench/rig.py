"""What every stage of a demo needs: servers, clock, corpus, progress and where records go. Runs nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from random import Random
from typing import Any

from hostcache.bench.progress import Progress
from hostcache.bench.servers import Launcher, RunningServer
from hostcache.client.openai import Failure, OpenAIClient, Reply
from hostcache.clock import Clock
from hostcache.records import Arm, ArmRecord, Phase, Record, Stage, TurnRecord
from hostcache.workload.corpus import CodeCorpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    launcher: Launcher
    clock: Clock
    corpus: CodeCorpus
    progress: Progress
    write: Callable[[Record], None]
    seed: int

    async def sources(self, client: OpenAIClient, count: int) -> list[list[int]]:
        """Tokens of the first `count` files (or of all), as the server's own tokenizer cuts them."""
        return [await client.tokenize(file.text) for file in self.corpus.files[:count]]


def arm_record(server: RunningServer, *, stage: Stage, index: int, window_s: float | None, primed_s: float,
               opened_s: float, settled_s: float, opening: dict[str, Any], closing: dict[str, Any]) -> ArmRecord:
    return ArmRecord(
        stage=stage, arm=server.plan.arm, index=index, command=server.command, log=server.log, model=server.model,
        model_revision=str(closing.get("engine", {}).get("model_revision", "")), pool_tokens=server.plan.pool_tokens,
        page_tokens=server.plan.page_tokens, host_cache_bytes=server.plan.host_cache_bytes, window_s=window_s,
        primed_s=primed_s, opened_s=opened_s, settled_s=settled_s, peak_rss_bytes=server.peak_rss_bytes(),
        opening=opening, closing=closing,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlace:
    """Where a turn stands in the run."""

    stage: Stage
    arm: Arm
    arm_index: int
    agent: int
    turn: int
    phase: Phase
    started_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A turn's record, and the tokens to resend (None: it failed)."""

    record: TurnRecord
    resend: tuple[int, ...] | None


async def take_turn(server: RunningServer, place: TurnPlace, prompt: Sequence[int], *, reply_tokens: int,
                    rng: Random) -> Answered:
    """Send one turn and write down what came of it. A refused or broken turn is a record with an error."""
    outcome = await server.client.complete(prompt, model=server.model, max_tokens=reply_tokens, rng=rng)
    if isinstance(outcome, Failure):
        return Answered(record=_record(place, outcome, len(prompt), 0), resend=None)
    resend, loss = outcome.token_ids, 0
    if len(resend) != outcome.usage.completion_tokens:
        # A server that does not return ids: its text is cut again, and none of its tokens is known to survive that.
        resend, loss = tuple(await server.client.tokenize(outcome.text)), outcome.usage.completion_tokens
    return Answered(record=_record(place, outcome, len(prompt), loss), resend=resend)


def _record(place: TurnPlace, outcome: Reply | Failure, prompt_tokens: int, loss: int) -> TurnRecord:
    served = outcome if isinstance(outcome, Reply) else None
    usage = served.usage if served else None
    return TurnRecord(
        stage=place.stage, arm=place.arm, arm_index=place.arm_index, agent=place.agent, turn=place.turn,
        phase=place.phase, started_s=place.started_s,
        ttft_s=served.ttft_s if served else None,
        duration_s=outcome.duration_s,
        prompt_tokens=usage.prompt_tokens if usage else prompt_tokens,
        completion_tokens=usage.completion_tokens if usage else 0,
        hit_tokens=usage.hit_tokens if usage else None,
        device_tokens=usage.device_tokens if usage else None,
        host_tokens=usage.host_tokens if usage else None,
        recomputed=usage.recomputed if usage else None,
        first_miss=usage.first_miss if usage else None,
        resent_loss_tokens=loss,
        reply_sha256=sha256(repr(served.token_ids or served.text).encode()).hexdigest() if served else "",
        retries=outcome.retries,
        error=outcome.error if isinstance(outcome, Failure) else None,
    )
