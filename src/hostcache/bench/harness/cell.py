"""One arm of one cell, from an idle server to a file of records. Knows no workload and no figure.

`records.jsonl` is written line by line: the cell, then requests as they end, a segment when it closes, the end. A
file that was cut short anywhere is valid up to its last whole line: a segment without its record did not finish, a
cell without its end neither. `resume` keeps what finished and goes on.

Every cell is bracketed by the segments `before` and `after`: a scrape, one *control* request whose text nobody ever
sent, and a scrape. The control must hit nothing; what else the brackets show is the state the cell started from.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TextIO, TypeAlias

from hostcache import __version__
from hostcache.bench.demo import describe_machine
from hostcache.bench.harness.cellfile import RECORDS, Earlier, Place, cell_state
from hostcache.bench.harness.live import Screen, screen_for
from hostcache.bench.harness.load import (
    Cast,
    Client,
    Crew,
    Desk,
    LocalCrew,
    Question,
    beside,
    shares,
)
from hostcache.bench.harness.processes import Plan, working
from hostcache.bench.harness.target import NotConfirmed, Serving, Target
from hostcache.bench.harness.texts import CHARS_PER_TOKEN, Mode, Piece, Prompt, Texts
from hostcache.client.counters import Scrape, change, resets
from hostcache.client.openai import Capabilities, Heard, OpenAIClient
from hostcache.client.process import terminate_like_interrupt
from hostcache.clock import Clock, unix_time
from hostcache.errors import ConfigError, HostCacheError, ServerError
from hostcache.records import (
    CellRecord,
    EndRecord,
    Record,
    RecordWriter,
    RequestRecord,
    Role,
    SegmentName,
    SegmentRecord,
)
from hostcache.workload.corpora import LEAST_BYTES, build_corpus, read_corpus
from hostcache.workload.corpus import load_corpus

Kind: TypeAlias = Literal["rotate", "agents", "ladder", "equivalence", "replay"]
Stop: TypeAlias = Callable[[str, Sequence[Record]], str | None]
"""(ramp point, its records) → why the ramp ends here, or None."""

CONTROL_TOKENS = 256
CONTROL_REPLY_TOKENS = 8
SETTLE_S = 5.0
SETTLE_STEP_S = 0.05
_MOVING = ("written_bytes", "restored_bytes", "evicted_pages", "evicted_snapshots")


class Workload:
    """What a cell does: a frozen dataclass whose fields are the record's parameters."""

    __slots__ = ()
    KIND: ClassVar[Kind]
    NOT_IDENTITY: ClassVar[frozenset[str]] = frozenset()
    """Fields in which compared cells may differ."""

    def inputs(self) -> dict[str, str]:
        """Digests of the files that decide what is said, beside the corpus."""
        return {}

    def corpus_tokens(self) -> int:
        """How much text it wants to draw from."""
        return 0

    def keeps(self, finished: frozenset[Place]) -> frozenset[Place]:
        """Which finished segments of an interrupted run still count when it is resumed."""
        return frozenset()

    async def run(self, cell: Cell) -> None:
        """The segments between `before` and `after`."""
        raise NotImplementedError


class Playable(Protocol):
    """A workload that is played by clients, here or in other processes. `NAME`: in the catalogue."""

    NAME: ClassVar[str]

    def players(self, cast: Cast) -> Sequence[Client]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSpec:
    """What is measured. `salt` None: drawn anew, so that nothing of it can be in any cache. `bars`, `goals`, `goodput`
    (metric → ms) and `lag_bar_ms` are noted in the record and judged by its readers (bars.py, figures.py)."""

    cell: str
    arm: str
    workload: Workload
    attempt: int = 0
    seed: int = 0
    mode: Literal["auto", "ids", "text", "chat"] = "auto"
    corpus: str = "code"
    processes: int = 1
    salt: str | None = None
    bars: Mapping[str, Any] = field(default_factory=dict)
    goals: Mapping[str, Any] = field(default_factory=dict)
    lag_bar_ms: float | None = None
    goodput: Mapping[str, float] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()


class Cell:
    """A cell under way, as its workload sees it."""

    def __init__(self, spec: CellSpec, serving: Serving, texts: Texts, *, clock: Clock, folder: Path,
                 write: Callable[[Record], None], screen: Screen, stop: Stop | None,
                 earlier: Sequence[Record] = ()) -> None:
        self.spec = spec
        self.serving = serving
        self.texts = texts
        self.clock = clock
        self._folder = folder
        self._write = write
        self._screen = screen
        self._earlier = earlier
        self._stop = stop
        self._ears: list[Callable[[RequestRecord], None]] = []
        self._now: Place | None = None
        self._part: list[Record] = []
        self._desk = self._new_desk()

    @property
    def limit_tokens(self) -> int | None:
        """Longest prompt + answer; None where the server does not say."""
        return self.serving.limit_tokens

    def done(self, segment: SegmentName, part: str = "") -> bool:
        """An interrupted run finished it already."""
        return any(isinstance(record, SegmentRecord) and (record.segment, record.part) == (segment, part)
                   for record in self._earlier)

    def note(self, text: str) -> None:
        """One line for whoever watches."""
        self._screen.note(text)

    def stop(self, part: str) -> str | None:
        """Why a ramp ends after this point; None: it goes on."""
        measured = [record for record in self._earlier if getattr(record, "part", None) == part] or self._part
        reason = None if self._stop is None else self._stop(part, measured)
        if reason is not None:
            self.note(f"the ramp ends at {part}: {reason}")
        return reason

    @asynccontextmanager
    async def segment(self, name: SegmentName, part: str = "", *, window_s: float | None = None) -> AsyncIterator[None]:
        """Scrape, body, scrape, both with the server at rest; no record when the body raises."""
        if part != (self._now or ("", ""))[1]:
            self._part = []
        opening = await self.serving.adapter.scrape()  # at rest since the segment before closed
        opened_s = self.clock.now()
        self._now = name, part
        self._screen.segment(name, part, None if window_s is None else opened_s + window_s)
        yield
        closed_s = self.clock.now()
        closing = await self._settled()
        self._emit(SegmentRecord(
            segment=name, part=part, window_s=window_s, opened_s=opened_s, closed_s=closed_s,
            opening=dict(opening.counters), closing=dict(closing.counters), raw_opening=tuple(opening.raw),
            raw_closing=tuple(closing.raw), resets=tuple(resets(opening, closing))))

    async def ask(self, prompt: Prompt, *, role: Role, session: str, max_tokens: int, turn: int = 0, client: int = 0,
                  shared_tokens: int | None = None, due_s: float | None = None,
                  extra: Mapping[str, Any] | None = None) -> Heard:
        """One request of the current segment, due now unless said otherwise; its record is written in any case."""
        if self._now is None:
            raise RuntimeError("a request outside of a segment")
        segment, part = self._now
        question = Question(prompt=prompt, role=role, client=client, session=session, turn=turn,
                            due_s=self.clock.now() if due_s is None else due_s, max_tokens=max_tokens,
                            shared_tokens=shared_tokens, extra=extra or {})
        return await self._desk.ask(question, segment, part)  # type: ignore[arg-type]  # set by `segment` alone

    @contextlib.contextmanager
    def hearing(self, ear: Callable[[RequestRecord], None]) -> Iterator[None]:
        """Calls `ear` with each request's record as it comes."""
        self._ears.append(ear)
        try:
            yield
        finally:
            self._ears.remove(ear)

    @asynccontextmanager
    async def crew(self, workload: Playable, *, count: int, part: str = "") -> AsyncIterator[Crew]:
        """`count` clients of that workload, over as many processes as the cell was asked for."""
        hands = shares(count, self.spec.processes)
        casts = [Cast(part=part, count=count, mine=mine, texts=self.texts, limit_tokens=self.limit_tokens)
                 for mine in hands]
        if len(casts) == 1:
            yield LocalCrew(workload.players(casts[0]), self._new_desk())
            return
        can = self.serving.capabilities
        plans = [Plan(workload=workload.NAME, parameters=dataclasses.asdict(workload),  # type: ignore[call-overload]
                      cast=cast, url=self.serving.url, api_key=self.serving.target.api_key, model=self.serving.model,
                      ignore_eos=can.ignore_eos, want_ids=_want_ids(self.texts.mode, can),
                      silence_s=self.serving.target.silence_s) for cast in casts]
        async with working(plans, emit=self._emit, log_dir=self._folder) as crew:
            yield crew

    async def bracket(self, name: Literal["before", "after"], part: str = "") -> Heard:
        """The control request between two scrapes. Raises ServerError when the first of all requests is not served."""
        tokens = min(CONTROL_TOKENS, (self.limit_tokens or 4 * CONTROL_TOKENS) // 4)
        texts = self.texts.with_salt(secrets.token_hex(8))
        head = texts.head(tokens, "control")
        async with self.segment(name, part):
            heard = await self.ask(texts.prompt(head), role="control", session="control", shared_tokens=0,
                                   max_tokens=CONTROL_REPLY_TOKENS)
        if name == "before" and heard.outcome != "ok":
            raise ServerError(f"{self.serving.url} did not serve the first request ({heard.reason}); nothing was "
                              "measured")
        if self.texts.mode != "ids" and heard.usage is not None and heard.usage.prompt_tokens:
            assert isinstance(head, str)
            self.texts = Texts(self.texts.mode, self.texts.source, seed=self.texts.seed, salt=self.texts.salt,
                               chars_per_token=len(head) / heard.usage.prompt_tokens)
        return heard

    async def _settled(self) -> Scrape:
        """A scrape of a server that moves nothing any more, or that did not come to rest within SETTLE_S."""
        scrape = await self.serving.adapter.scrape()
        until_s = self.clock.now() + SETTLE_S
        while self.clock.now() < until_s:
            await self.clock.sleep_until(self.clock.now() + SETTLE_STEP_S)
            earlier, scrape = scrape, await self.serving.adapter.scrape()
            if not any(change(earlier, scrape, name) for name in _MOVING):
                break
        self._screen.counters(scrape)
        return scrape

    def _emit(self, record: Record) -> None:
        self._write(record)
        self._part.append(record)
        if isinstance(record, RequestRecord):
            self._screen.heard(record)
            for ear in self._ears:
                ear(record)

    def _new_desk(self) -> Desk:
        can = self.serving.capabilities
        return Desk(self.serving.client, model=self.serving.model, mode=self.texts.mode, seed=self.spec.seed,
                    clock=self.clock, emit=self._emit, ignore_eos=can.ignore_eos,
                    want_ids=_want_ids(self.texts.mode, can))


# -- running one -----------------------------------------------------------------------------------------------------


def run_cell(spec: CellSpec, target: Target, folder: Path, *, clock: Clock, err: TextIO, screen: Screen | None = None,
             resume: bool = False, stop: Stop | None = None) -> Path:
    """Measures one cell on a server of its own and returns the file of records. See `play_cell`."""

    async def play() -> Path:
        with terminate_like_interrupt():
            return await play_cell(spec, target, folder, clock=clock, err=err, screen=screen, resume=resume, stop=stop)

    return asyncio.run(play())


async def play_cell(spec: CellSpec, target: Target, folder: Path, *, clock: Clock, err: TextIO,
                    screen: Screen | None = None, resume: bool = False, stop: Stop | None = None) -> Path:
    """Opens the server, measures, closes it. A server that is not the arm leaves a record of that and nothing else.

    Raises what `measure` raises, and ServerError when there is no such server.
    """
    folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240  # before anything is timed
    screen = screen or screen_for(err, clock)
    try:
        screen.note(f"{spec.cell}, {spec.arm}: {'starting the server' if target.start else target.url}")
        async with target.serving(folder=folder, clock=clock) as serving:
            return await measure(spec, serving, folder, clock=clock, screen=screen, resume=resume, stop=stop)
    except NotConfirmed as refused:
        if cell_state(folder) == "absent":
            _write_refusal(spec, target, folder, refused)
        raise
    finally:
        screen.close()


async def measure(spec: CellSpec, serving: Serving, folder: Path, *, clock: Clock, screen: Screen,
                  resume: bool = False, stop: Stop | None = None) -> Path:
    """Measures one cell on a server that is up.

    Raises ConfigError for what cannot be measured there, ServerError when the server or a worker process is lost; the
    file then ends with the reason. `resume` goes on with an interrupted file of the same cell; without it the folder
    must have none.
    """
    path = folder / RECORDS
    if resume and cell_state(folder) == "finished":
        return path
    mode = _mode(spec, serving.capabilities)
    source, digests = await _source(spec, mode, serving.client)
    record = _cell_record(spec, serving, mode, {**digests, **spec.workload.inputs(), **spec.inputs})
    salt, part = record.salt, ""
    before: Sequence[Record] = ()
    if resume and path.exists():
        earlier = Earlier(path, spec.workload.keeps)
        earlier.check(record)
        writer, before = earlier.continued(record), earlier.records
        if before:  # what the earlier run sent may be in a cache by now
            part, salt = f"resumed {earlier.runs}", f"{earlier.first.salt}/{earlier.runs}"
    else:
        writer = RecordWriter(path)
        writer.write(record)
    texts = Texts(mode, source, seed=spec.seed, salt=salt)
    outcome: Literal["finished", "interrupted", "failed"] = "failed"
    detail = ""
    try:
        cell = Cell(spec, serving, texts, clock=clock, folder=folder, write=writer.write, screen=screen, stop=stop,
                    earlier=before)
        screen.cell(f"{spec.cell} · {spec.arm}", serving.described)
        async with beside(_watch(screen, serving, clock)):
            await cell.bracket("before", part)
            await spec.workload.run(cell)
            await cell.bracket("after")
        outcome = "finished"
    except (asyncio.CancelledError, KeyboardInterrupt):
        outcome, detail = "interrupted", "stopped by the user"
        raise
    except Exception as error:
        detail = " ".join(str(error).split()) or type(error).__name__
        raise
    finally:
        writer.write(EndRecord(ended_unix_s=unix_time(), outcome=outcome, detail=detail))
        writer.close()
    return path


async def _watch(screen: Screen, serving: Serving, clock: Clock) -> None:
    """Renews the screen; asks the server for its counters now and then where somebody sees them."""
    beat = 0
    while True:
        if screen.wants_counters and beat % 8 == 4:
            with contextlib.suppress(HostCacheError):
                screen.counters(await serving.adapter.scrape())
        screen.refresh()
        beat += 1
        await clock.sleep_until(clock.now() + 0.5)


# -- what is said ----------------------------------------------------------------------------------------------------


def _mode(spec: CellSpec, can: Capabilities) -> Mode:
    """Raises ConfigError when the server cannot be spoken to like that."""
    exact = can.completions and can.tokenize and can.token_ids
    if spec.mode == "auto":
        return "ids" if exact else "text" if can.completions else "chat"
    if spec.mode == "ids" and not exact:
        raise ConfigError("--prompts ids needs a server with /tokenize that takes and returns token ids; use text")
    if spec.mode == "text" and not can.completions:
        raise ConfigError("--prompts text needs a server with /v1/completions; use chat")
    if spec.mode == "chat" and not can.chat:
        raise ConfigError("--prompts chat needs a server with /v1/chat/completions; use text")
    return spec.mode


def _want_ids(mode: Mode, can: Capabilities) -> bool:
    return can.token_ids and mode != "chat"


async def _source(spec: CellSpec, mode: Mode, client: OpenAIClient) -> tuple[Piece, dict[str, str]]:
    """As much of the corpus as the workload wants, and the digest of what was read."""
    tokens = max(4096, spec.workload.corpus_tokens())
    text = corpus_text(spec.corpus, round(tokens * CHARS_PER_TOKEN))
    digests = {f"corpus {spec.corpus.rpartition('/')[2]}": sha256(text.encode()).hexdigest()}
    if mode != "ids":
        return text, digests
    ids: list[int] = []
    for at in range(0, len(text), 1 << 16):
        ids += await client.tokenize(text[at : at + (1 << 16)])
    return tuple(ids), digests


def corpus_text(name: str, characters: int) -> str:
    """`code`, `prose` or `both` of the standard library, or of a folder that `bench corpus` wrote: DIR, DIR:prose,
    DIR:both. The first `characters` of each. Raises ConfigError."""
    if name == "code":  # the same files as the demo's, read in a moment; prose has to be searched for
        return "\n".join(file.text for file in load_corpus().files)[:characters]
    folder, _, kind = name.rpartition(":") if ":" in name else ("", "", name)
    if kind not in ("code", "prose", "both"):
        folder, kind = name, "code"
    corpus = read_corpus(Path(folder)) if folder else build_corpus(most_bytes=max(characters, LEAST_BYTES))
    texts = [corpus.text(each) for each in _KINDS if kind in (each, "both")]
    return "\n".join(text[:characters] for text in texts)


_KINDS: tuple[Literal["code", "prose"], ...] = ("code", "prose")


# -- the first line --------------------------------------------------------------------------------------------------


def _cell_record(spec: CellSpec, serving: Serving, mode: Mode, inputs: Mapping[str, str]) -> CellRecord:
    can = serving.capabilities
    told = {"arm_confirmed_by": serving.confirmed_by, "url": serving.url, "command": list(serving.command),
            "log": serving.log, "token_ids": can.token_ids, "ignore_eos": can.ignore_eos,
            "limit_tokens": can.max_context}
    return _record(spec, {**serving.described, "model": serving.model, **told}, serving.model, mode, inputs)


def _record(spec: CellSpec, target: dict[str, Any], model: str, mode: str, inputs: Mapping[str, str]) -> CellRecord:
    parameters = {**dataclasses.asdict(spec.workload), "mode": mode,  # type: ignore[call-overload]
                  "corpus": spec.corpus.rpartition("/")[2]}
    run_id = secrets.token_hex(8)
    return CellRecord(
        cell=spec.cell, workload=spec.workload.KIND, arm=spec.arm, attempt=spec.attempt, seed=spec.seed,
        salt=spec.salt if spec.salt is not None else f"{spec.seed}/{spec.cell}/{spec.arm}/{spec.attempt}/{run_id}",
        identity=identity_of(spec, model, parameters, inputs),
        parameters=_jsonable({**parameters, "processes": spec.processes, **_judged_by(spec)}),
        target=_jsonable(target), environment={**describe_machine(), **{f"metadata.{name}": value for name, value
                                                                      in spec.metadata.items()}},
        inputs=dict(inputs), command=spec.command, started_unix_s=unix_time(), hostcache_version=__version__)


def _judged_by(spec: CellSpec) -> dict[str, Any]:
    """What a reader judges the cell by; only what was asked."""
    asked = {"bars": dict(spec.bars), "goals": dict(spec.goals), "goodput": dict(spec.goodput),
             "lag_bar_ms": spec.lag_bar_ms}
    return {name: value for name, value in asked.items() if value not in ({}, None)}


def identity_of(spec: CellSpec, model: str, parameters: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """One digest of all that decides what is said: cells with another one are not compared."""
    decisive = {name: value for name, value in parameters.items() if name not in spec.workload.NOT_IDENTITY}
    return sha256(json.dumps({"kind": spec.workload.KIND, "parameters": _jsonable(decisive), "inputs": dict(inputs),
                              "model": model, "seed": spec.seed}, sort_keys=True).encode()).hexdigest()


def _jsonable(value: dict[str, Any]) -> dict[str, Any]:
    """As it will be read back."""
    made: dict[str, Any] = json.loads(json.dumps(value))
    return made


def _write_refusal(spec: CellSpec, target: Target, folder: Path, refused: NotConfirmed) -> None:
    """A file that says which cell was refused and why."""
    model = str(refused.described.get("model") or target.model or "")
    told = {**refused.described, "arm_confirmed_by": None, "url": target.url, "command": list(target.command)}
    writer = RecordWriter(folder / RECORDS)
    writer.write(_record(spec, told, model, spec.mode, {**spec.workload.inputs(), **spec.inputs}))
    writer.write(EndRecord(ended_unix_s=unix_time(), outcome="failed", detail=str(refused)))
    writer.close()
