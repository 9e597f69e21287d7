"""The engine's core: requests in, events out, one step at a time. Single-threaded and deterministic; starts no thread.

A step is plan, run, settle: the scheduler says which tokens go through the model, the model writes them into the pool,
and what came out becomes tokens, text, snapshots and events. Write-backs start after the forward pass has returned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from hostcache.clock import Clock
from hostcache.engine.audit import TokenAudit
from hostcache.engine.banks import Kind
from hostcache.engine.device import DeviceCache, Verify
from hostcache.engine.interfaces import CausalModel, Row, Tokenizer
from hostcache.engine.live import Live, OnEvent, State
from hostcache.engine.pages import Hold
from hostcache.engine.requests import (
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    LogitTrace,
    SamplingParams,
    Usage,
)
from hostcache.engine.restores import Rates, Restores
from hostcache.engine.scheduler import PlannedRow, Scheduler
from hostcache.engine.stats import EngineStats, Histogram, StatsRecord, TransferStats
from hostcache.engine.text import AnswerText
from hostcache.errors import InvariantBroken, RequestRefused
from hostcache.tier import Accounting, History, HostCache, Identity, KeyChain, Mode, TierConfig, key_chain
from hostcache.tier.copying import Copier

if TYPE_CHECKING:
    import torch

QUARANTINE_PATIENCE_S = 30.0
"""How long a request may wait for pages that nothing but a copy which never ends keeps from it."""

LINGER_S = 0.05
"""The longest moment a step waits for copies before it goes on without them."""

LEAST_HISTORY = 1 << 16
"""Pages remembered by the books at least, so that a small pool without a tier has an exact bound too."""

PUBLISH_EVERY_S = 0.1
"""How old the published record may grow while nobody's request ends: taking it costs time at each step."""


class Log(Protocol):
    """One line of the structured log."""

    def __call__(self, event: str, *, level: str = "info", **fields: Any) -> None: ...


Sampler = Callable[["torch.Tensor", SamplingParams, Random], int]
"""One row of float32 logits → a token id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of one engine. `identity` is that of requests without a salt."""

    page_tokens: int
    slots: int
    bank_entries: int
    prefill_batch_tokens: int
    max_context: int
    identity: Identity
    seed: int = 0
    verify: Verify = Verify.OFF


@dataclass(slots=True)
class _Counters:
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0


class Engine:
    """Driven by `step` until it says that there is nothing to do. All calls on one thread, but `prepare`.

    `pool` is [pages, …] as `CausalModel` has it; `copier` moves pages between it and the tier's frames, None: no tier.
    """

    def __init__(self, config: EngineConfig, *, model: CausalModel, tokenizer: Tokenizer, pool: torch.Tensor,
                 sample: Sampler, clock: Clock, log: Log, tier: TierConfig, copier: Copier | None = None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._model = model
        self._pool = pool
        self._sample = sample
        self._clock = clock
        self._log = log
        self._copier = copier
        self._tier_config = tier if copier is not None else replace(tier, mode=Mode.OFF)
        pages = int(pool.shape[0])
        history = History(max(16 * max(tier.frames, pages), LEAST_HISTORY))
        self.tier = HostCache(self._tier_config, history=history)
        self.accounting = Accounting(config.page_tokens, history, self.tier)
        self.device = DeviceCache(pages=pages, bank_entries=config.bank_entries, tier=self.tier,
                                  config=self._tier_config, copier=copier, read_page=self._page_bytes,
                                  verify=config.verify)
        self.audit = TokenAudit(config.page_tokens, history.capacity) if config.verify is Verify.ALWAYS else None
        self.rates = Rates()
        self.restores = Restores(tier=self.tier, config=self._tier_config, device=self.device, copier=copier,
                                 rates=self.rates)
        self.scheduler = Scheduler(device=self.device, restores=self.restores, tier=self.tier,
                                   accounting=self.accounting, slots=config.slots,
                                   prefill_batch_tokens=config.prefill_batch_tokens, page_tokens=config.page_tokens,
                                   audit=self.audit)
        self._eos = frozenset(tokenizer.eos_ids) | frozenset(model.spec.eos_ids)
        self._requests: dict[str, Live] = {}
        self._outbox: list[tuple[Live, GenerationEvent]] = []
        self._submitted = 0
        self._count = _Counters()
        self._restore_latency = Histogram()
        self._store_latency = Histogram()
        self._stuck_since_s: float | None = None
        self._lingered: set[int] = set()
        self._published_s = clock.now()
        self._unpublished = False
        self.published = self.record()

    # ---- requests come and go

    def prepare(self, request: GenerationRequest, on_event: OnEvent) -> Live:
        """Check and key a request; changes nothing, so any thread may call it. Raises RequestRefused with the sizes."""
        self._check_fits(request)
        chain = self.prepare_chain(request.prompt, request.salt)
        text = AnswerText(self.tokenizer.stream(), request.sampling.stop)
        return Live(request=request, on_event=on_event, order=0, tokens=list(request.prompt), chain=chain, text=text,
                    prompt_tokens=len(request.prompt), rng=Random(), page_tokens=self.config.page_tokens)

    def prepare_chain(self, prompt: Sequence[int], salt: str) -> KeyChain:
        """The keys of a prompt's whole pages. Raises RequestRefused for what are no token ids."""
        identity = replace(self.config.identity, salt=salt) if salt else self.config.identity
        try:
            return key_chain(prompt, identity)
        except ValueError as error:
            raise RequestRefused(f"the prompt is not a list of token ids: {error}", param="prompt") from error

    def submit(self, request: GenerationRequest, on_event: OnEvent) -> None:
        """Queue a request. Raises RequestRefused for one that can never fit."""
        self.enqueue(self.prepare(request, on_event))

    def enqueue(self, live: Live) -> None:
        """Queue a prepared request: first come, first served."""
        request_id = live.request.request_id
        if request_id in self._requests:
            self.refuse(live, f"request id {request_id!r} is in use; ids are unique while they run")
            return
        self._submitted += 1
        live.order = self._submitted
        seed = live.request.sampling.seed
        live.rng = Random(f"{self.config.seed}/{live.order}" if seed is None else seed)
        self._requests[request_id] = live
        self.scheduler.enqueue(live)

    def abort(self, request_id: str) -> None:
        """The client left: pages, slot and pins are given back now. Unknown ids are ignored."""
        live = self._requests.get(request_id)
        if live is not None:
            self._abandon(live)
            self._count.aborted += 1
            self._emit(live, "", (), "abort")

    def fail_all(self, error: str) -> None:
        """Every request ends with `error`. The engine's state may be anything: nothing else is touched."""
        for live in list(self._requests.values()):
            del self._requests[live.request.request_id]
            self._count.failed += 1
            self._emit(live, "", (), "error", error=error)
        self.deliver()

    def abort_all(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)

    def refuse(self, live: Live, error: str) -> None:
        """End a prepared request that was never queued."""
        self._count.failed += 1
        self._emit(live, "", (), "error", error=error)

    def reset(self, *, weights_unchanged: bool) -> None:
        """Forget every cached prefix: on the device only, written back first as in any eviction, or everywhere."""
        if weights_unchanged:
            self.device.evict_all(self._clock.now())
        else:
            self.scheduler.forget_caches()
            self.device.forget_all()

    # ---- a step

    def step(self) -> bool:
        """Advance everything once. False: nothing happened, and nothing will before `wake_s` or a new call."""
        now_s = self._clock.now()
        heard, reports = self.device.hear(now_s)
        heard = heard or bool(reports)
        active = len(self.scheduler.active)
        plan = self.scheduler.plan(reports, now_s)
        if self._linger():
            more, reports = self.device.hear(self._clock.now())
            heard = heard or more or bool(reports)
            plan = self.scheduler.plan(reports, self._clock.now())
        if plan:
            logits = self._run(plan)
            self._settle(plan, logits, self._clock.now())
        started = self.device.write_back(self.scheduler.reach_pages, self._clock.now())
        self._give_up_what_is_stuck(bool(plan), now_s)
        worked = bool(plan or heard or started or active != len(self.scheduler.active))
        self._publish_when_due(worked)
        self.deliver()
        return worked

    @property
    def idle(self) -> bool:
        """No request is waiting or running."""
        return not self._requests

    @property
    def copies_on_their_way(self) -> int:
        return self.device.copies_on_their_way + len(self.restores.live)

    def wait_for_copies(self, timeout_s: float) -> bool:
        return self._copier is not None and self._copier.wait(timeout_s)

    @property
    def wake_s(self) -> float | None:
        """When a deadline passes that a step must see."""
        deadlines = (self.device.next_deadline_s, self.restores.next_deadline_s)
        return min((at for at in deadlines if at is not None), default=None)

    def _linger(self) -> bool:
        """A restore or an awaited write-back takes milliseconds, a forward pass with a prefill chunk much longer: wait
        a moment for copies that are new, once for each, so that their requests run in this step already."""
        awaited = {restore.reservation.job_id for restore in self.restores.live} | self.device.awaited_jobs
        fresh = awaited - self._lingered
        self._lingered = awaited
        return bool(fresh) and self.wait_for_copies(min(LINGER_S, self._tier_config.restore_budget_s))

    def _run(self, plan: Sequence[PlannedRow]) -> torch.Tensor:
        page_tokens = self.config.page_tokens
        rows = []
        for row in plan:
            start, stop = row.live.written, row.live.written + row.count
            rows.append(Row(tokens=row.live.tokens[start:stop], start=start,
                            pages=row.live.pages[: -(-stop // page_tokens)]))
        began_s = self._clock.now()
        logits = self._model.forward(rows, self._pool, page_tokens)
        prefilled = sum(row.count for row in plan if row.prefill)
        self.rates.saw_prefill(prefilled, self._clock.now() - began_s)
        self._count.steps += 1
        self._count.prefill_tokens += prefilled
        self._count.decode_tokens += sum(row.count for row in plan if not row.prefill)
        return logits

    def _settle(self, plan: Sequence[PlannedRow], logits: torch.Tensor, now_s: float) -> None:
        for row, logits_row in zip(plan, logits, strict=True):
            samples = row.samples
            self.scheduler.wrote(row)
            if samples:
                self._next_token(row.live, logits_row, now_s)

    def _next_token(self, live: Live, logits: torch.Tensor, now_s: float) -> None:
        sampling = live.request.sampling
        if live.report is None:
            self._settle_account(live)
        self.scheduler.retain_prompt(live, now_s)
        if live.recovering:
            device, host = (pages * self.config.page_tokens for pages in live.recovered)
            self.accounting.recovered(device_tokens=device, host_tokens=host,
                                      recomputed_tokens=len(live.tokens) - device - host)
            live.recovering = False
        token = self._sample(logits, sampling, live.rng)
        traces = (_trace(logits),) if live.request.trace_logits else ()
        live.tokens.append(token)
        ended: FinishReason | None = None
        if token in self._eos and not sampling.ignore_eos:
            text = live.text.flush()
            ended = "stop"
        else:
            text = live.text.push((token,))
            if live.answer_tokens >= sampling.max_tokens:
                text += live.text.flush()
                ended = "length"
        if live.text.stopped:
            ended = "stop"
        if ended is not None:
            self.scheduler.finish(live, now_s)
            del self._requests[live.request.request_id]
            self._count.finished += 1
        self._emit(live, text, (token,), ended, traces=traces)

    def _give_up_what_is_stuck(self, ran: bool, now_s: float) -> None:
        """Copies that were given up and never end keep their pages for ever. A request that would need those pages
        must be answered all the same."""
        progress = ran or self.copies_on_their_way or self.device.leaving
        if progress or not self._requests or not self.restores.late:
            self._stuck_since_s = None
            return
        self._stuck_since_s = now_s if self._stuck_since_s is None else self._stuck_since_s
        if now_s - self._stuck_since_s < QUARANTINE_PATIENCE_S:
            return
        self._stuck_since_s = None
        live = min(self._requests.values(), key=lambda other: other.order)
        held = self.device.pages.holds(Hold.LATE)
        self._abandon(live)
        self._count.failed += 1
        self._emit(live, "", (), "error",
                   error=f"{held} device pages are held by restores that never ended; restart the server")
        self._log("request_stuck", level="error", request_id=live.request.request_id, quarantined_pages=held)

    # ---- the end of a request

    def _abandon(self, live: Live) -> None:
        """Take it out, whatever its state. Its account is settled with what it was served."""
        if live.account is None:
            self.accounting.aborted_before_admission()
        elif live.report is None:
            live.report = self.accounting.abort(
                live.account, device_pages=live.device_pages, host_pages=live.host_pages).as_json()
        self.scheduler.drop(live)
        del self._requests[live.request.request_id]

    def _settle_account(self, live: Live) -> None:
        if live.account is None:
            raise InvariantBroken(f"request {live.request.request_id} runs without an account")
        live.report = self.accounting.settle(
            live.account, device_pages=live.device_pages, host_pages=live.host_pages).as_json()

    def _emit(self, live: Live, text: str, token_ids: tuple[int, ...], finish: FinishReason | None, *,
              error: str | None = None, traces: tuple[LogitTrace, ...] = ()) -> None:
        page_tokens = self.config.page_tokens
        known = live.report is not None
        usage = Usage(
            prompt_tokens=live.prompt_tokens, completion_tokens=live.answer_tokens,
            device_tokens=live.device_pages * page_tokens if known else 0,
            host_tokens=live.host_pages * page_tokens if known else 0, report=live.report or {})
        self._outbox.append((live, GenerationEvent(
            request_id=live.request.request_id, text=text, token_ids=token_ids, usage=usage, finish_reason=finish,
            error=error, logits=traces)))

    def deliver(self) -> None:
        """Hand out the events of this step, or of calls since the last one. They go out after the record of their step
        is published: who has the answer sees it counted."""
        outbox, self._outbox = self._outbox, []
        for live, event in outbox:
            try:
                live.on_event(event)
            except Exception as error:
                # The receiver is broken; nobody else may suffer for it.
                self._log("event_not_taken", level="error", request_id=event.request_id, error=repr(error))
                self.abort(event.request_id)

    # ---- checks and records

    def _check_fits(self, request: GenerationRequest) -> None:
        prompt, answer = len(request.prompt), request.sampling.max_tokens
        if not prompt:
            raise RequestRefused("the prompt is empty; send at least one token", param="prompt")
        if answer < 1:
            raise RequestRefused(f"max_tokens is {answer}; give at least 1", param="max_tokens")
        if prompt + answer > self.config.max_context:
            raise RequestRefused(
                f"prompt of {prompt} tokens + max_tokens {answer} = {prompt + answer} is over the context of "
                f"{self.config.max_context} tokens; shorten the prompt or lower max_tokens",
                code="context_length_exceeded", param="prompt")
        need = -(-(prompt + answer - 1) // self.config.page_tokens)
        pages = self.device.pages.count
        if need > pages:
            raise RequestRefused(
                f"prompt of {prompt} tokens + max_tokens {answer} needs {need} pages of {self.config.page_tokens} "
                f"tokens, the pool has {pages}; shorten the prompt, lower max_tokens or raise pool_tokens",
                code="context_length_exceeded", param="prompt")

    def _page_bytes(self, page: int) -> bytes:
        import torch

        return self._pool[page].contiguous().view(torch.uint8).numpy().tobytes()

    def _publish_when_due(self, worked: bool) -> None:
        """Before a last event goes out, once more when all is quiet, and every so often between."""
        self._unpublished = self._unpublished or worked
        ends = any(event.finish_reason is not None for _, event in self._outbox)
        now_s = self._clock.now()
        due = self._unpublished and (not worked or now_s - self._published_s >= PUBLISH_EVERY_S)
        if ends or due:
            self._publish()
            self._published_s = now_s
            self._unpublished = False

    def _publish(self) -> None:
        self._restore_latency.add(self.restores.seconds)
        self.restores.seconds.clear()
        self._store_latency.add(self.device.counters.store_seconds)
        self.device.counters.store_seconds.clear()
        self.published = self.record()

    def record(self) -> StatsRecord:
        """A frozen record of now."""
        device, banks, scheduler = self.device, self.device.banks, self.scheduler
        active, spec = scheduler.active, self._model.spec
        engine = EngineStats(
            model=spec.model_id, model_revision=spec.revision, page_tokens=self.config.page_tokens,
            pool_pages=device.pages.count, free_pages=device.pages.free, quarantined_pages=device.pages.quarantined,
            active_requests=len(active), waiting_requests=len(scheduler.waiting),
            restoring_requests=sum(live.state is State.RESTORING for live in active),
            deferred_admissions=scheduler.counters.deferred_admissions, prefix_waits=scheduler.counters.prefix_waits,
            preemptions=scheduler.counters.preemptions,
            slots=scheduler.slots, slots_used=len(active), max_context=self.config.max_context,
            bank_prompt_entries=banks.entries(Kind.PROMPT), bank_turn_entries=banks.entries(Kind.TURN),
            bank_capacity=banks.capacity, device_evictions=device.counters.evictions,
            requests_finished=self._count.finished, requests_aborted=self._count.aborted,
            requests_failed=self._count.failed, prefill_tokens=self._count.prefill_tokens,
            decode_tokens=self._count.decode_tokens, steps=self._count.steps)
        transfers = TransferStats(
            prefill_holds=scheduler.counters.prefill_holds,
            restore_submissions=self.restores.counters.submissions,
            store_submissions=device.counters.store_submissions, verify_failures=device.counters.verify_failures,
            pages_verified=device.counters.pages_verified,
            token_mismatches=0 if self.audit is None else self.audit.mismatches,
            restore_latency=self._restore_latency.frozen(), store_latency=self._store_latency.frozen())
        tier = self.tier.stats() if self.device.tier_on else None
        return StatsRecord(engine=engine, accounting=self.accounting.stats(), tier=tier, transfers=transfers,
                           tier_config=self._config_json())

    def _config_json(self) -> dict[str, Any]:
        tier = self._tier_config
        return {
            "host_cache_bytes": tier.host_cache_bytes, "host_cache_mode": tier.mode.value,
            "host_cache_copy_budget_ms": tier.copy_budget_s * 1000,
            "host_cache_restore_budget_ms": tier.restore_budget_s * 1000,
            "host_cache_store_pace_ms": tier.store_pace_s * 1000, "host_cache_verify": self.config.verify.value,
            "host_cache_eviction": tier.eviction, "frames": tier.frames, "page_bytes": tier.page_bytes,
            "page_tokens": tier.page_tokens, "max_job_pages": tier.max_job_pages,
        }

    def check(self) -> None:
        """Every invariant, of the tier too. Raises InvariantBroken."""
        self.device.check()
        self.scheduler.check()
        self.tier.check()
        holds = self.device.pages.holds
        used = sum(len(set(live.pages)) + len(live.claim) for live in self._requests.values())
        if used != holds(Hold.USE):
            raise InvariantBroken(f"requests hold {used} pages, the page table says {holds(Hold.USE)}")
        if self.restores.late_pages != holds(Hold.LATE):
            raise InvariantBroken(f"late restores hold {self.restores.late_pages} pages, not {holds(Hold.LATE)}")
        unsettled = sum(live.account is not None and live.report is None for live in self._requests.values())
        if unsettled != self.accounting.open_accounts:
            raise InvariantBroken(f"{self.accounting.open_accounts} accounts are open for {unsettled} requests")


def _trace(logits: torch.Tensor) -> LogitTrace:
    best = logits.topk(2).values
    return LogitTrace(digest=hashlib.sha256(logits.contiguous().cpu().numpy().tobytes()).hexdigest(),
                      margin=float(best[0] - best[1]))
