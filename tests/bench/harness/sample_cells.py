"""Small deterministic cells through the real record classes: what a run would have written, with known figures."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any, Literal

from hostcache.records import (
    CellRecord,
    EndRecord,
    Outcome,
    Record,
    RequestRecord,
    RetryNote,
    Role,
    SegmentName,
    SegmentRecord,
)

Workload = Literal["rotate", "agents", "ladder", "equivalence", "replay"]
PAGE = 32
FAMILY = "hostcache_restore_latency_seconds"
BOUNDS = ("0.001", "0.005", "0.02", "0.1", "+Inf")


def request(**changes: Any) -> RequestRecord:
    """A served revisit: 1,000 prompt tokens, 960 from the device, first token after 0.5 s, 5 tokens in 0.5 s."""
    due = changes.get("due_s", 10.0)
    base = RequestRecord(
        segment="window", part="8", role="revisit", client=0, session="s0", turn=1, due_s=due, sent_s=due,
        answered_attempt_s=due, first_token_s=due + 0.5, ended_s=due + 1.0, chunk_s=(0.0, 0.1, 0.25, 0.4, 0.5),
        prompt_tokens=1000, completion_tokens=5, cached_tokens=960, device_tokens=960, host_tokens=0,
        recomputed={"new": 8, "partial_page": 32}, shared_tokens=992, max_tokens=5, finish_reason="length",
        prompt_sha256="p", reply_sha256="r", reply_ids=(1, 2, 3, 4, 5), retries=(), outcome="ok", reason=None)
    return dataclasses.replace(base, **changes)


def cell(**changes: Any) -> CellRecord:
    base = CellRecord(
        cell="b5-agents", workload="agents", arm="off", attempt=1, seed=0, salt="salt off 1", identity="a1b2c3",
        parameters={"agents": 8, "window_s": 60}, target={"engine": "hostcache", "version": "0.1", "model": "smol",
                                                          "tier": None, "arm_confirmed_by": "the server's report"},
        environment={"cpu": "two <cores>", "cpus": 2, "memory_gib": 8.0}, inputs={"corpus": "c" * 64},
        command=("hostcache", "bench", "matrix", "seed.toml"), started_unix_s=1.0, hostcache_version="0.0.1")
    return dataclasses.replace(base, **changes)


def segment(name: SegmentName = "window", part: str = "8", **changes: Any) -> SegmentRecord:
    base = SegmentRecord(segment=name, part=part, window_s=60.0, opened_s=0.0, closed_s=70.0, opening={}, closing={},
                         raw_opening=(), raw_closing=(), resets=())
    return dataclasses.replace(base, **changes)


END = EndRecord(ended_unix_s=100.0, outcome="finished", detail="")


class Run:
    """Writes a cell as a server with a device and a host would have let it happen: the counters follow the requests."""

    def __init__(self, head: CellRecord) -> None:
        self.head, self.now = head, 0.0
        self.records: list[Record] = [head]
        self.counters: Counter[str] = Counter(
            dict.fromkeys(("prompt_tokens", "cached_tokens", "device_tokens", "host_tokens", "recomputed_tokens",
                           "generated_tokens", "requests", "evicted_pages"), 0))
        self.buckets = [0] * len(BOUNDS)
        self.restore_s = 0.0
        self.tier = bool((head.target["tier"] or {}).get("on"))
        if self.tier:
            self.counters.update(dict.fromkeys(("restores", "restore_failures", "restored_bytes", "written_bytes"), 0))
        self.random = Random(f"{head.cell} {head.arm} {head.attempt}")

    def scrape(self) -> tuple[dict[str, float], tuple[str, ...]]:
        totals = [sum(self.buckets[:i + 1]) for i in range(len(BOUNDS))]
        lines = tuple(f'{FAMILY}_bucket{{le="{bound}"}} {total}' for bound, total in zip(BOUNDS, totals, strict=True))
        lines = (*lines, f"{FAMILY}_sum {self.restore_s:.6f}", f"{FAMILY}_count {sum(self.buckets)}")
        values = {name: float(value) for name, value in self.counters.items()}
        return {**values, "quota_bytes": 1e6} if self.tier else values, lines if self.tier else ()

    def bracket(self, name: SegmentName, part: str, requests: Sequence[RequestRecord], window_s: float | None) -> None:
        opened, (opening, raw_opening) = self.now, self.scrape()
        for each in requests:
            self._count(each)
            self.records.append(each)
        self.now = max([opened + (window_s or 0.0), *(each.ended_s for each in requests)]) + 0.5
        closing, raw_closing = self.scrape()
        self.records.append(SegmentRecord(
            segment=name, part=part, window_s=window_s, opened_s=opened, closed_s=self.now, opening=opening,
            closing=closing, raw_opening=raw_opening, raw_closing=raw_closing, resets=()))
        self.now += 1.0

    def _count(self, each: RequestRecord) -> None:
        if each.outcome != "ok":
            return
        host = each.host_tokens or 0
        self.counters.update({
            "prompt_tokens": each.prompt_tokens or 0, "cached_tokens": each.cached_tokens or 0,
            "device_tokens": each.device_tokens or 0, "host_tokens": host, "requests": 1,
            "recomputed_tokens": (each.prompt_tokens or 0) - (each.cached_tokens or 0),
            "generated_tokens": each.completion_tokens or 0})
        if host or sum(count for reason, count in (each.recomputed or {}).items() if reason == "evicted"):
            self.counters["evicted_pages"] += 20
        if host:
            self.counters.update({"restores": 1, "restored_bytes": host * 100, "written_bytes": host * 100})
            slow = self.random.choice((0, 1, 1, 1, 2, 2, 3))
            self.buckets[slow] += 1
            self.restore_s += (0.0005, 0.003, 0.01, 0.05)[slow]

    def ask(self, name: SegmentName, part: str, role: Role, session: str, turn: int, due_s: float, *, prompt: int,
            shared: int, device: int = 0, host: int = 0, ttft_s: float, tokens: int = 20, itl_s: float = 0.02,
            client: int = 0, outcome: Outcome = "ok", refusals: int = 0, ids: Sequence[int] | None = None
            ) -> RequestRecord:
        lag = 0.0002 + 0.0006 * self.random.random()
        waits = tuple(RetryNote(status=429, retry_after_s=None, wait_s=0.5 * 2 ** i) for i in range(refusals))
        answered = due_s + lag + sum(wait.wait_s for wait in waits)
        first = answered + ttft_s * (0.9 + 0.2 * self.random.random())
        gaps = [itl_s * (0.8 + 0.4 * self.random.random()) for _ in range(tokens - 1)]
        chunks = [0.0]
        for gap in gaps:
            chunks.append(chunks[-1] + gap)
        said = tuple(ids if ids is not None else range(tokens))
        ok = outcome == "ok"
        lost = max(0, shared // PAGE * PAGE - device - host)
        return RequestRecord(
            segment=name, part=part, role=role, client=client, session=session, turn=turn, due_s=due_s,
            sent_s=due_s + lag, answered_attempt_s=answered if ok else None, first_token_s=first if ok else None,
            ended_s=first + chunks[-1] if ok else answered, chunk_s=tuple(chunks) if ok else (),
            prompt_tokens=prompt if ok else None, completion_tokens=tokens if ok else None,
            cached_tokens=device + host if ok else None, device_tokens=device if ok else None,
            host_tokens=host if ok else None,
            recomputed={"new": prompt - device - host - lost, **({"evicted": lost} if lost else {})} if ok else None,
            shared_tokens=shared, max_tokens=tokens, finish_reason="length" if ok else None,
            prompt_sha256=f"{self.head.salt} {session} {turn}",
            reply_sha256=hashlib.sha256(repr(said).encode()).hexdigest(), reply_ids=said if ok else (), retries=waits,
            outcome=outcome, reason=None if ok else "refused-429: 20 retries spent")

    def done(self) -> list[Record]:
        return [*self.records, END]


def head(name: str, workload: Workload, arm: str, attempt: int = 1, **changes: Any) -> CellRecord:
    tier = {"on": True, "kind": "hostcache", "quota_bytes": 1_000_000} if arm == "on" else {"on": False}
    return cell(cell=name, workload=workload, arm=arm, attempt=attempt, salt=f"salt {arm} {attempt}",
                identity=hashlib.sha256(name.encode()).hexdigest(), started_unix_s=attempt * 10.0 + (arm == "on"),
                target={"engine": "hostcache", "version": "0.1", "model": "smol", "tier": tier,
                        "page_tokens": PAGE, "arm_confirmed_by": "the server's report"},
                parameters={"workload": workload, "corpus": "prose"}, **changes)


def agents_cell(arm: str, attempt: int = 1, *, points: Sequence[int] = (8, 16, 32), window_s: float = 60.0,
                fits: int = 16, **changes: Any) -> list[Record]:
    """K agents a point; beyond `fits` of them a revisit's prefix is lost (off) or comes from the host (on)."""
    run = Run(head("b5-agents", "agents", arm, attempt, **changes))
    run.bracket("before", "", [], None)
    for agents in points:
        pressed = agents > fits
        part = str(agents)
        primes = [run.ask("prime", part, "prime", f"{part} a{i}", 0, run.now + 0.01 * i, prompt=600, shared=0,
                          ttft_s=0.4, client=i) for i in range(agents)]
        run.bracket("prime", part, primes, None)
        turns = []
        for i in range(agents):
            due, turn, prompt = run.now + run.random.uniform(0, 3), 1, 660
            while due < run.now + window_s:
                shared = prompt - 60
                whole = shared // PAGE * PAGE
                far = pressed and run.random.random() < 0.85
                device, held = (0, whole) if far else (whole, 0)
                lost = far and arm == "off"
                made = run.ask("window", part, "revisit", f"{part} a{i}", turn, due, prompt=prompt, shared=shared,
                               device=device, host=0 if lost else held, client=i,
                               refusals=1 if pressed and run.random.random() < 0.1 else 0,
                               ttft_s=(9.0 if lost else 0.6 if far else 0.25) * (1 + agents / 40),
                               itl_s=0.4 if lost else 0.02 * (1 + agents / 16))
                turns.append(made)
                due, turn, prompt = made.ended_s + run.random.uniform(1, 4), turn + 1, prompt + 60
        run.bracket("window", part, turns, window_s)
    run.bracket("after", "", [], None)
    return run.done()


def rotate_cell(arm: str, attempt: int = 1, *, name: str = "b2-r3", sessions: int = 8, window_s: float = 60.0,
                fits: bool = False, **changes: Any) -> list[Record]:
    """Three users round-robin over the sessions, every revisit beyond the pool unless it `fits`. The off window is
    half as long, as in the published plan. Two sessions were never primed."""
    run = Run(head(name, "rotate", arm, attempt, **changes))
    window_s = window_s / 2 if arm == "off" else window_s
    run.bracket("before", "", [], None)
    run.bracket("prime", "", [run.ask("prime", "", "prime", f"s{i}", 0, run.now + i, prompt=1000, shared=0, ttft_s=0.7)
                              for i in range(sessions - 2)], None)
    sizes = dict.fromkeys((f"s{i}" for i in range(sessions)), 1000)
    visits: Counter[str] = Counter()
    for part, length in (("nopressure", 5.0), ("warmup", 5.0), ("steady", window_s), ("recovery", 5.0)):
        made = []
        for user in range(3):
            due, step = run.now + 0.1 * user, user
            while due < run.now + length:
                session = f"s{step % sessions}"
                primed = int(session[1:]) < sessions - 2
                visits[session] += 1
                role: Role = "revisit" if primed else "visit"
                first = not primed and visits[session] == 1
                shared = 0 if first else sizes[session]
                whole = shared // PAGE * PAGE
                far = not fits and part != "nopressure"
                lost = far and arm == "off"
                each = run.ask(part, "", role, session, visits[session], due,  # type: ignore[arg-type]
                               prompt=sizes[session] + 60, shared=shared, device=0 if far else whole,
                               host=whole if far and not lost else 0, client=user,
                               ttft_s=4.0 if lost or first else 0.35 if far else 0.3, itl_s=0.1 if lost else 0.03)
                sizes[session] += 60
                made.append(each)
                due, step = each.ended_s + 0.01, step + 3
        made.append(run.ask(part, "", "probe", f"probe {part}", 0, run.now + 1, prompt=230, shared=0,  # type: ignore[arg-type]
                            ttft_s=0.5, client=9))
        run.bracket(part, "", made, length)  # type: ignore[arg-type]
    run.bracket("after", "", [], None)
    return run.done()


def ladder_cell(arm: str, attempt: int = 1, *, name: str = "b1-overhead", **changes: Any) -> list[Record]:
    """Cold, reuse and after-evict rungs of prose and code, then decode at 1, 3 and 6 streams."""
    run = Run(head(name, "ladder", arm, attempt, **changes))
    run.bracket("before", "", [], None)
    noise = Random(f"{arm} {attempt}")
    for corpus in ("prose", "code"):
        for size in (256, 512, 1024, 2048):
            part, session = f"{corpus} {size}", f"{corpus} {size}"
            cold_s = size / 1500 * (0.98 + 0.04 * noise.random())
            whole = (size - 1) // PAGE * PAGE
            host = whole if arm == "on" else 0
            asked: list[RequestRecord] = []
            for turn, (role, device, back, ttft_s) in enumerate((
                    ("cold", 0, 0, cold_s), ("reuse", whole, 0, 0.05), ("evict", 0, 0, cold_s),
                    ("after-evict", 0, host, 0.06 if host else cold_s))):
                asked.append(run.ask(
                    "rung", part, role, session if role != "evict" else f"{session} filler",  # type: ignore[arg-type]
                    turn, asked[-1].ended_s + 0.1 if asked else run.now, prompt=size, device=device, host=back,
                    shared=0 if role in ("cold", "evict") else size - 1, ttft_s=ttft_s))
            run.bracket("rung", part, asked, None)
    for streams in (1, 3, 6):
        part = f"decode {streams}"
        run.bracket("rung", part, [run.ask("rung", part, "decode", f"{part} {i}", 0, run.now, prompt=100, shared=0,
                                           ttft_s=0.1, tokens=64, itl_s=0.02 * (1 + streams / 4), client=i)
                                   for i in range(streams)], None)
    return run.done()


def equivalence_cell(arm: str = "on", *, wrong: Sequence[int] = (), unproven: Sequence[int] = (),
                     **changes: Any) -> list[Record]:
    """Four conversations: cold, cold again, from the device, restored. `wrong`: whose restored answer differs at
    token 7. `unproven`: where nothing was restored."""
    run = Run(head("equivalence", "equivalence", arm, **changes))
    run.bracket("before", "", [], None)
    for i, size in enumerate((300, 700, 1500, 3000)):
        ids = [Random(i).randrange(1000) for _ in range(20)]
        other = [*ids[:7], ids[7] + 1, *ids[8:]]
        whole = (size - 1) // PAGE * PAGE
        part, cold_s = str(size), size / 1500
        roles: tuple[tuple[Role, int, int, float, list[int]], ...] = (
            ("cold", 0, 0, cold_s, ids), ("cold-again", 0, 0, cold_s, ids), ("reuse", whole, 0, 0.03, ids),
            ("restored", *((whole, 0) if i in unproven else (0, whole)), 0.04, other if i in wrong else ids))
        run.bracket("compare", part, [
            run.ask("compare", part, role, f"c{i}", turn, run.now + 3 * turn,
                    prompt=size, shared=0 if role.startswith("cold") else size - 1, device=device, host=host,
                    ttft_s=ttft_s, ids=said) for turn, (role, device, host, ttft_s, said) in enumerate(roles)], None)
    return run.done()


def whole_matrix() -> list[list[Record]]:
    """Every kind of cell, both arms, two attempts where the published bench took passes."""
    cells = [make(arm, attempt) for attempt in (1, 2) for make in (ladder_cell, agents_cell) for arm in ("off", "on")]
    for number in range(1, 6):
        cells += [rotate_cell(arm, name=f"b2-r{number}", sessions=6 + 2 * number, fits=number == 2)
                  for arm in ("off", "on")]
    cells += [rotate_cell(arm, name="pilot", sessions=12) for arm in ("off", "on")]
    cells += [rotate_cell("on", name="b3-recovery")]
    cells += [ladder_cell("on", name="large-rung"), equivalence_cell()]
    return cells
