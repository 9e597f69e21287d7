"""A model whose KV are fingerprints, a copier that fails on request, an engine made of them: no weights, no threads.

Position i holds, in every layer, a 64-bit digest of tokens 0 … i (K) and the token itself (V). Each forward pass checks
every slot below its start: wrong, stale or foreign slots are seen at once. Logits are a pure function of the digest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hostcache.clock import VirtualClock
from hostcache.engine.device import Verify
from hostcache.engine.engine import Engine, EngineConfig
from hostcache.engine.interfaces import ModelSpec, Row
from hostcache.engine.requests import CacheHints, CacheLimits, GenerationEvent, GenerationRequest, SamplingParams
from hostcache.tier import Identity, Mode, TierConfig
from hostcache.tier.copying import CopyDone, CopyJob, Direction

VOCAB = 97
LAYERS = 2
_A = np.uint64(6364136223846793005)
_C = np.uint64(1442695040888963407)
_SHIFT = np.uint64(29)


def mix(digests: npt.NDArray[np.uint64], tokens: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """digest of tokens 0 … i from that of 0 … i-1 and token i."""
    with np.errstate(over="ignore"):
        grown = digests * _A + (tokens + np.uint64(1)) * _C
        mixed: npt.NDArray[np.uint64] = grown ^ (grown >> _SHIFT)
    return mixed


def digest_after(tokens: Sequence[int], start: int = 0) -> int:
    """The digest of all tokens, continued from `start`."""
    value = np.array([start], dtype=np.uint64)
    for token in tokens:
        value = mix(value, np.array([token], dtype=np.uint64))
    return int(value[0])


def logits_of(digest: int) -> torch.Tensor:
    with np.errstate(over="ignore"):
        spread = np.uint64(digest) * (np.arange(VOCAB, dtype=np.uint64) * np.uint64(2) + np.uint64(1))
    return torch.from_numpy((spread >> np.uint64(40)).astype(np.float32))


def greedy_answer(prompt: Sequence[int], count: int) -> list[int]:
    """What the model says, from first principles."""
    answer: list[int] = []
    digest = digest_after(prompt)
    for _ in range(count):
        token = int(logits_of(digest).argmax())
        answer.append(token)
        digest = digest_after([token], digest)
    return answer


def sample(logits: torch.Tensor, params: SamplingParams, rng: Random) -> int:
    if params.temperature == 0:
        return int(logits.argmax())
    return int(logits.topk(8).indices[rng.randrange(8)])


class FakeModel:
    def __init__(self, *, clock: VirtualClock | None = None, seconds_per_token: float = 0.0) -> None:
        self.spec = ModelSpec(
            architecture="fake", vocab_size=VOCAB, hidden_size=1, layers=LAYERS, heads=1, kv_heads=1, head_dim=1,
            intermediate_size=1, rope_theta=1.0, norm_eps=1e-5, max_position=1 << 20, tie_embeddings=True,
            model_id="fake", revision="r1")
        self.dtype = torch.int64
        self.device = torch.device("cpu")
        self.forwards = 0
        self.batches: list[list[tuple[int, int]]] = []
        """(tokens, start) of each row of each forward pass."""
        self.fail_next: str | None = None
        self._clock = clock
        self._seconds_per_token = seconds_per_token

    def forward(self, rows: Sequence[Row], pool: torch.Tensor, page_tokens: int) -> torch.Tensor:
        if self.fail_next is not None:
            message, self.fail_next = self.fail_next, None
            raise RuntimeError(message)
        self.forwards += 1
        self.batches.append([(len(row.tokens), row.start) for row in rows])
        if self._clock is not None:
            self._clock.advance(self._seconds_per_token * sum(len(row.tokens) for row in rows))
        return torch.stack([self._row(row, pool, page_tokens) for row in rows])

    def _row(self, row: Row, pool: torch.Tensor, page_tokens: int) -> torch.Tensor:
        stop = row.start + len(row.tokens)
        assert len(row.pages) == -(-stop // page_tokens), "a row names exactly the pages of its positions"
        assert len(set(row.pages)) == len(row.pages)
        view = pool.numpy().view(np.uint64)
        pages = np.asarray(row.pages)
        for layer in range(LAYERS):
            k = view[pages, layer, 0, 0, :, 0].reshape(-1)[: row.start] ^ np.uint64(layer)
            v = view[pages, layer, 1, 0, :, 0].reshape(-1)[: row.start]
            before = np.concatenate([np.zeros(1, dtype=np.uint64), k[:-1]]) if row.start else k
            wrong = np.flatnonzero(mix(before, v) != k)
            assert not wrong.size, f"slot {wrong[0]} of {row.start} holds a foreign or stale fingerprint"
        last = pages[(row.start - 1) // page_tokens] if row.start else 0
        digest = int(view[last, 0, 0, 0, (row.start - 1) % page_tokens, 0]) if row.start else 0
        for position, token in enumerate(row.tokens, row.start):
            digest = digest_after([token], digest)
            page, place = pages[position // page_tokens], position % page_tokens
            for layer in range(LAYERS):
                view[page, layer, 0, 0, place, 0] = np.uint64(digest) ^ np.uint64(layer)
                view[page, layer, 1, 0, place, 0] = np.uint64(token)
        return logits_of(digest)


class FakeTokenizer:
    eos_ids = (0,)
    vocab_size = VOCAB

    def encode(self, text: str) -> list[int]:
        return [1 + (ord(letter) - 97) % (VOCAB - 1) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(97 + token % 26) for token in token_ids)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode("".join(str(message["content"]) for message in messages))

    def stream(self) -> FakeStream:
        return FakeStream()


class FakeStream:
    def push(self, token_ids: Sequence[int]) -> str:
        return FakeTokenizer().decode(token_ids)

    def flush(self) -> str:
        return ""


@dataclass(slots=True)
class _Job:
    job: CopyJob
    submitted_s: float
    fate: str


class ScriptedCopier:
    """Copies in `poll`, in order of submission. `script(job)` says what becomes of a job as it is submitted:

    "copy": done at the next poll; "fail": half its pages copied, then an error; "hold": it runs, and is done only after
    `release`; "queue": it has not started, so that `cancel` takes it; "lose": runs and is never reported.
    """

    def __init__(self, pool: torch.Tensor, frames: int, clock: VirtualClock) -> None:
        self.pool = pool
        self.frames = torch.zeros((frames, *pool.shape[1:]), dtype=pool.dtype)
        self.script: Callable[[CopyJob], str] = lambda job: "copy"
        self.jobs: list[CopyJob] = []
        """All that were ever submitted."""
        self._clock = clock
        self._live: dict[int, _Job] = {}
        self.copied_pages = {Direction.STORE: 0, Direction.RESTORE: 0}

    def submit(self, job: CopyJob) -> None:
        assert job.job_id not in {old.job_id for old in self.jobs}
        self.jobs.append(job)
        self._live[job.job_id] = _Job(job=job, submitted_s=self._clock.now(), fate=self.script(job))

    def poll(self) -> list[CopyDone]:
        ended = [task for task in self._live.values() if task.fate in ("copy", "fail")]
        for task in ended:
            del self._live[task.job.job_id]
        return [self._end(task) for task in ended]

    def _end(self, task: _Job) -> CopyDone:
        job, left = task.job, task.job.pages if task.fate == "copy" else task.job.pages // 2
        copied = left
        for extent in job.extents:
            for i in range(min(extent.pages, left)):
                device, frame = self.pool[extent.device_page + i], self.frames[extent.frame + i]
                if job.direction is Direction.STORE:
                    frame.copy_(device)
                else:
                    device.copy_(frame)
            left -= min(extent.pages, left)
        self.copied_pages[job.direction] += copied
        return CopyDone(
            job_id=job.job_id, direction=job.direction, error=None if task.fate == "copy" else "injected fault",
            copied_bytes=copied * self.pool[0].nbytes, submissions=len(job.extents), submitted_s=task.submitted_s,
            started_s=task.submitted_s, finished_s=self._clock.now())

    def wait(self, timeout_s: float) -> bool:
        return any(task.fate in ("copy", "fail") for task in self._live.values())

    def cancel(self, job_id: int) -> bool:
        task = self._live.get(job_id)
        if task is None or task.fate != "queue":
            return False
        del self._live[job_id]
        return True

    def release(self, job_id: int | None = None, *, fate: str = "copy") -> None:
        """Held and queued jobs (or one of them) end at the next poll."""
        for number, task in self._live.items():
            if job_id in (None, number) and task.fate in ("hold", "queue"):
                task.fate = fate

    @property
    def held(self) -> list[int]:
        return [number for number, task in self._live.items() if task.fate in ("hold", "queue")]

    @property
    def in_flight(self) -> int:
        return len(self._live)

    def close(self, timeout_s: float) -> bool:
        return not self._live


@dataclass
class Rig:
    """An engine and everything behind it. `ask` queues a request, `run` steps until nothing happens any more."""

    engine: Engine
    model: FakeModel
    copier: ScriptedCopier | None
    clock: VirtualClock
    events: dict[str, list[GenerationEvent]] = field(default_factory=dict)
    log: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    asked: int = 0
    check_every_step: bool = True

    def ask(self, prompt: Sequence[int], max_tokens: int = 4, *, name: str | None = None, salt: str = "",
            limits: CacheLimits | None = None, hints: CacheHints | None = None, trace: bool = False,
            **sampling: Any) -> str:
        self.asked += 1
        name = name or f"r{self.asked}"
        params = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **sampling})
        self.events[name] = []
        self.engine.submit(GenerationRequest(
            request_id=name, prompt=tuple(prompt), sampling=params, salt=salt, limits=limits or CacheLimits(),
            hints=hints or CacheHints(), trace_logits=trace), self.events[name].append)
        return name

    def step(self, seconds: float = 0.0) -> bool:
        self.clock.advance(seconds)
        worked = self.engine.step()
        if self.check_every_step:
            self.engine.check()
        return worked

    def run(self, most: int = 2000, seconds: float = 0.0) -> int:
        """Steps until all is quiet. Jumps over waits that only a deadline ends. Returns the steps."""
        for count in range(most):
            if self.step(seconds):
                continue
            wake_s = self.engine.wake_s
            if wake_s is None:
                return count
            self.clock.advance(max(0.0, wake_s - self.clock.now()))
        raise AssertionError(f"still busy after {most} steps")

    def answer(self, name: str) -> list[int]:
        return [token for event in self.events[name] for token in event.token_ids]

    def text(self, name: str) -> str:
        return "".join(event.text for event in self.events[name])

    def last(self, name: str) -> GenerationEvent:
        return self.events[name][-1]

    def finished(self, name: str) -> bool:
        return bool(self.events[name]) and self.events[name][-1].finish_reason is not None

    def serve(self, prompt: Sequence[int], max_tokens: int = 4, **more: Any) -> GenerationEvent:
        """One request from beginning to end, its answer compared with first principles."""
        name = self.ask(prompt, max_tokens, **more)
        self.run()
        assert self.answer(name) == greedy_answer(prompt, max_tokens)
        return self.last(name)

    def assert_at_rest(self) -> None:
        """No request is left: neither pins nor pages in use, and every account balances."""
        record = self.engine.record()
        assert self.engine.idle
        assert record.engine.active_requests == record.engine.waiting_requests == 0
        assert self.engine.accounting.open_accounts == 0
        assert self.engine.restores.live == []
        if record.tier is not None:
            assert record.tier.live_reservations == self.engine.restores.late
        self.engine.check()

    def drain_pages(self) -> None:
        """Forget everything; then every page of the pool is free."""
        self.engine.reset(weights_unchanged=False)
        self.run()
        self.engine.check()
        assert self.engine.device.pages.free == self.engine.device.pages.count


def make_rig(*, pool_pages: int = 64, page_tokens: int = 4, frames: int = 256, slots: int = 4, bank_entries: int = 8,
             prefill_batch_tokens: int = 16, max_context: int | None = None, mode: Mode = Mode.ON_PRESSURE,
             copy_budget_s: float = 1.0, restore_budget_s: float = 0.5, verify: Verify = Verify.OFF, seed: int = 0,
             seconds_per_token: float = 0.0, max_job_pages: int = 256, eviction: str = "scan-resistant") -> Rig:
    clock = VirtualClock()
    model = FakeModel(clock=clock, seconds_per_token=seconds_per_token)
    pool = torch.zeros((pool_pages, LAYERS, 2, 1, page_tokens, 1), dtype=torch.int64)
    page_bytes = pool[0].nbytes
    tier = TierConfig(host_cache_bytes=frames * page_bytes, page_bytes=page_bytes, page_tokens=page_tokens, mode=mode,
                      copy_budget_s=copy_budget_s, restore_budget_s=restore_budget_s, max_job_pages=max_job_pages,
                      eviction=eviction)
    copier = ScriptedCopier(pool, tier.frames, clock) if tier.frames else None
    config = EngineConfig(
        page_tokens=page_tokens, slots=slots, bank_entries=bank_entries, prefill_batch_tokens=prefill_batch_tokens,
        max_context=max_context or pool_pages * page_tokens, seed=seed, verify=verify,
        identity=Identity(model="fake", revision="r1", dtype="int64", layout="fake", page_tokens=page_tokens))
    notes: list[tuple[str, dict[str, Any]]] = []

    def log(event: str, *, level: str = "info", **fields: Any) -> None:
        notes.append((event, {"level": level, **fields}))

    engine = Engine(config, model=model, tokenizer=FakeTokenizer(), pool=pool, sample=sample, clock=clock, log=log,
                    tier=tier, copier=copier)
    return Rig(engine=engine, model=model, copier=copier, clock=clock, log=notes)


def tokens(seed: int, count: int) -> list[int]:
    """A prompt: the same seed gives the same beginning, whatever the count."""
    rng = Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(count)]
