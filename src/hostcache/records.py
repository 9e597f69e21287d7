"""What a run writes down: frozen records and their JSONL. Knows nothing of servers, tables or charts.

One line is one record: `{"record": <kind>, "version": 1, <every field>}`. Reading is strict: an unknown kind, version
or field, a missing field and a value of the wrong type are refused with the line number, because a figure recomputed
from half a record would look like a measurement.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from hostcache.errors import HostCacheError

RECORD_VERSION = 1

Arm: TypeAlias = Literal["off", "on"]
Stage: TypeAlias = Literal["pressure", "no-pressure", "equivalence", "memory"]
Phase: TypeAlias = Literal["prime", "before", "window", "fixed"]
"""`prime`: an agent's first turn. `before`: a later one, started before the window opened. `window`: started in the
window, counted however late it ends. `fixed`: part of a closed list of turns (no window)."""
TwinRole: TypeAlias = Literal["fitted", "predicted", "informative", "not claimed"]
"""`fitted`: the coefficients may be chosen by it. `predicted`: they may not, and it is judged. `informative`: shown,
never judged. `not claimed`: the twin does not say that it reproduces this."""
TwinUnit: TypeAlias = Literal["", "s", "ms", "share", "tok/s", "bytes", "times"]


class RecordRefused(HostCacheError):
    """A line is not a record of this version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The first line of a run: what was asked, of what, with which inputs (name → sha256)."""

    KIND: ClassVar[str] = "run"

    form: Literal["quick", "full", "custom"]
    model: str
    seed: int
    workload: dict[str, int | float | str]
    environment: dict[str, int | float | str]
    inputs: dict[str, str]
    commands: tuple[str, ...]
    stages: tuple[str, ...]
    started_unix_s: float
    hostcache_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRecord:
    """One server process from start to stop, as the server itself described it.

    `opening` and `closing` are whole answers of /v1/stats; times are seconds on the run's clock.
    """

    KIND: ClassVar[str] = "arm"

    stage: Stage
    arm: Arm
    index: int
    command: tuple[str, ...]
    log: str
    model: str
    model_revision: str
    pool_tokens: int
    page_tokens: int
    host_cache_bytes: int
    window_s: float | None
    primed_s: float
    opened_s: float
    settled_s: float
    peak_rss_bytes: int | None
    opening: dict[str, Any]
    closing: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryNote:
    """One refusal that was waited out."""

    KIND: ClassVar[str] = "retry"

    status: int
    retry_after_s: float | None
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One turn of one agent. `duration_s` and `ttft_s` count from the first attempt, so waits and retries are in them.

    Token counts are the server's usage; None where the server did not say, which is not the same as 0.
    `resent_loss_tokens`: reply tokens (usage) that the client could not resend as they were.
    """

    KIND: ClassVar[str] = "turn"

    stage: Stage
    arm: Arm
    arm_index: int
    agent: int
    turn: int
    phase: Phase
    started_s: float
    ttft_s: float | None
    duration_s: float
    prompt_tokens: int
    completion_tokens: int
    hit_tokens: int | None
    device_tokens: int | None
    host_tokens: int | None
    recomputed: dict[str, int] | None
    first_miss: dict[str, Any] | None
    resent_loss_tokens: int
    reply_sha256: str
    retries: tuple[RetryNote, ...]
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedAnswer:
    """One greedy answer with the digest and top-two margin of the logits behind every token."""

    KIND: ClassVar[str] = "answer"

    token_ids: tuple[int, ...]
    digests: tuple[str, ...]
    margins: tuple[float, ...]
    ttft_s: float
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    recomputed: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EquivalenceRecord:
    """One conversation answered four times: cold, cold again on a fresh server, from the device, restored.

    An answer is None when the request failed; `error` says why. `kept_tokens`: with answers kept, what the follow-up
    found on the device of prompt and reply, `kept_expected_tokens` the whole pages there are; else None.
    `restore_submissions` is None when a write-back ran in the same bracket or the server does not say.
    """

    KIND: ClassVar[str] = "equivalence"

    conversation: int
    shape: Literal["plain", "answers", "compaction"]
    boundary: Literal["on", "before", "after", "inside"]
    tokens: int
    page_tokens: int
    prompt_sha256: str
    cold: TracedAnswer | None
    cold_again: TracedAnswer | None
    device: TracedAnswer | None
    restored: TracedAnswer | None
    kept_tokens: int | None
    kept_expected_tokens: int | None
    restores: int | None
    restore_submissions: int | None
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    """The last line: how the run ended. A file without it was cut short."""

    KIND: ClassVar[str] = "end"

    ended_unix_s: float
    outcome: Literal["finished", "interrupted", "failed"]
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinRow:
    """One published figure beside the simulated one (the mean over the seeds; None where none was simulated).

    `figure` names it among all; `row` and `quantity` are its parts. `agents` and `arm` place it on a curve, None where
    it belongs to none. `rel_error` is None for a published 0 and where nothing was simulated; shares are judged in
    points, so it says less of them. `within` is None without a tolerance. `cause` is empty unless it missed.
    """

    KIND: ClassVar[str] = "twin-row"

    figure: str
    row: str
    quantity: str
    agents: int | None
    arm: Arm | None
    unit: TwinUnit
    published: float
    simulated: float | None
    sd: float | None
    rel_error: float | None
    role: TwinRole
    predicted: bool
    tolerance: str | None
    within: bool | None
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinCoefficient:
    """One number of the device model. `fitted` is False for what was read off a published constant."""

    KIND: ClassVar[str] = "twin-coefficient"

    name: str
    value: float
    unit: str
    source: str
    fitted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinSummary:
    """The bars of the twin. `judged`: predicted figures that have a tolerance; `must_hold`: those of them that may not
    miss. `misses` and `must_hold_misses` name figures."""

    KIND: ClassVar[str] = "twin-summary"

    judged: int
    within: int
    needed_share: float
    seeds_needed: int
    must_hold: int
    misses: tuple[str, ...]
    must_hold_misses: tuple[str, ...]
    passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinRecord:
    """The twin of the published fleet: what was simulated, with which coefficients, and how it was judged.

    `commands`: the first makes this record. `wall_s` is None where the same bytes are wanted of every run.
    """

    KIND: ClassVar[str] = "twin"

    source: str
    seeds: tuple[int, ...]
    commands: tuple[str, ...]
    wall_s: float | None
    rows: tuple[TwinRow, ...]
    coefficients: tuple[TwinCoefficient, ...]
    summary: TwinSummary
    not_modelled: tuple[str, ...]
    unexplained: tuple[str, ...]
    hostcache_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One simulated answer: without the tier (`arm` off, 0 host bytes) or with it at one host size.

    Times are of served requests; None where the workload has no such figure. `turns` are served requests.
    `pays`: this size is worth having over the row above it, by the plan's own test; False for off. `price` is of the
    recomputed tokens.
    """

    KIND: ClassVar[str] = "plan-row"

    label: str
    arm: Arm
    host_bytes: int
    turns: int
    turns_per_hour: float | None
    avg_s: float | None
    p50_s: float | None
    p95_s: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    recomputed_tokens: int
    hit_share: float | None
    price: float | None
    refused: int
    restored_bytes: int
    written_bytes: int
    pays: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """What an owner asked and what the simulator answered. `rows`: off first, then host sizes, ascending.

    `pays_until_bytes` is the largest size that still paid over the one below it, None when no size paid; when it is
    the last of the ladder the plan has not seen the end. `verdict` is one sentence. `price_per_mtok` is in whatever
    currency was given; None gives no prices. `workload` and `device` are what was simulated, name → value.
    """

    KIND: ClassVar[str] = "plan"

    question: str
    verdict: str
    pays_until_bytes: int | None
    workload: dict[str, int | float | str]
    device: dict[str, int | float | str]
    pool_tokens: int
    page_tokens: int
    kv_bytes_per_token: int
    prefill_tok_s: float
    copy_bytes_per_s: float
    simulated_s: float | None
    price_per_mtok: float | None
    seed: int
    commands: tuple[str, ...]
    wall_s: float | None
    rows: tuple[PlanRow, ...]
    not_modelled: tuple[str, ...]
    hostcache_version: str


SegmentName: TypeAlias = Literal["before", "prime", "nopressure", "warmup", "steady", "recovery", "observe", "window",
                                 "rung", "compare", "after"]
"""`before` and `after` bracket a whole cell: the state that it started from and left. `prime`: everybody's first turn.
`window`: of an agent ramp's point. `rung`: of a ladder. `compare`: of an equivalence run."""
Role: TypeAlias = Literal["prime", "visit", "revisit", "probe", "cold", "cold-again", "reuse", "evict", "after-evict",
                          "decode", "restored", "control"]
"""`prime`: first visit of a session. `revisit`: a later one of a session that was primed; `visit`: of one that was not.
`probe`: the lone decode probe beside a load. `evict`: sent only to push others out. `control`: must not hit."""
Outcome: TypeAlias = Literal["ok", "refused", "error", "aborted"]
"""`refused`: by backpressure until the retry budget was spent. `aborted`: the run stopped while it was on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRecord:
    """The first line of a cell's file: one arm of one cell of a matrix, or one run of `bench rotate` and its like.

    `salt` makes the cell's texts its own, so that no earlier run can have left them in a cache. `parameters` are all
    that decides what is sent. `identity` is their digest with corpus, model and seed: only cells of one identity are
    compared. `target`: what the server said of itself (engine, version, model, tier, and `arm_confirmed_by`).
    """

    KIND: ClassVar[str] = "cell"

    cell: str
    workload: Literal["rotate", "agents", "ladder", "equivalence", "replay"]
    arm: str
    attempt: int
    seed: int
    salt: str
    identity: str
    parameters: dict[str, Any]
    target: dict[str, Any]
    environment: dict[str, int | float | str]
    inputs: dict[str, str]
    command: tuple[str, ...]
    started_unix_s: float
    hostcache_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRecord:
    """What the server counted between two scrapes. Times are seconds on the run's monotonic clock.

    `opening` and `closing`: canonical counter → value (see client/adapters.py), an absent counter is absent here too.
    `raw_*`: the lines they were read from. `resets`: counters that went down or were created anew in between: then
    nothing can be said of this segment. `part`: the ramp's point, the rung; empty where there is one only.
    """

    KIND: ClassVar[str] = "segment"

    segment: SegmentName
    part: str
    window_s: float | None
    opened_s: float
    closed_s: float
    opening: dict[str, float]
    closing: dict[str, float]
    raw_opening: tuple[str, ...]
    raw_closing: tuple[str, ...]
    resets: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request of a cell, whatever became of it. Times are seconds on the run's monotonic clock.

    `due_s`: when it should have been sent, `sent_s`: when its first attempt was; the difference is the client's own
    lag. `first_token_s` and `ended_s` belong to the attempt that was answered, which began at `answered_attempt_s`.
    `chunk_s`: arrival of each chunk that carried text or tokens, as seconds after `first_token_s`, the first is 0.
    Token counts are the server's usage, None where it did not say, which is not the same as 0. `shared_tokens`: how
    much of the prompt was sent before in this cell, None where the client cannot know. `reason`: one line for
    whatever is not ok.
    """

    KIND: ClassVar[str] = "request"

    segment: SegmentName
    part: str
    role: Role
    client: int
    session: str
    turn: int
    due_s: float
    sent_s: float
    answered_attempt_s: float | None
    first_token_s: float | None
    ended_s: float
    chunk_s: tuple[float, ...]
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    device_tokens: int | None
    host_tokens: int | None
    recomputed: dict[str, int] | None
    shared_tokens: int | None
    max_tokens: int
    finish_reason: str | None
    prompt_sha256: str
    reply_sha256: str
    reply_ids: tuple[int, ...]
    retries: tuple[RetryNote, ...]
    outcome: Outcome
    reason: str | None


Record: TypeAlias = (RunRecord | ArmRecord | TurnRecord | EquivalenceRecord | EndRecord | TwinRecord | PlanRecord
                     | CellRecord | SegmentRecord | RequestRecord)

_LINES: dict[str, type[Any]] = {
    cls.KIND: cls
    for cls in (RunRecord, ArmRecord, TurnRecord, EquivalenceRecord, EndRecord, TwinRecord, PlanRecord, CellRecord,
                SegmentRecord, RequestRecord)
}
PARTS: tuple[type[Any], ...] = (RetryNote, TracedAnswer, TwinRow, TwinCoefficient, TwinSummary, PlanRow)
"""Records that appear inside others and have no line of their own."""


def kinds() -> Mapping[str, type[Any]]:
    """Every record that has a line of its own, by kind."""
    return types.MappingProxyType(_LINES)


def to_json(record: Record) -> dict[str, Any]:
    return {"record": record.KIND, "version": RECORD_VERSION, **dataclasses.asdict(record)}


def from_json(value: Mapping[str, Any]) -> Record:
    """Raises RecordRefused for whatever `to_json` of this version would not have written."""
    kind, version = value.get("record"), value.get("version")
    if version != RECORD_VERSION:
        raise RecordRefused(f"record version is {version!r}; this hostcache reads version {RECORD_VERSION}")
    if not isinstance(kind, str) or kind not in _LINES:
        raise RecordRefused(f"record kind is {kind!r}; known kinds are {', '.join(sorted(_LINES))}")
    fields = {name: field for name, field in value.items() if name not in ("record", "version")}
    record: Record = _build(_LINES[kind], fields, kind)
    return record


def _build(cls: type[Any], value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise RecordRefused(f"{where} is {type(value).__name__}, not an object")
    hints = _hints(cls)  # type: ignore[arg-type]  # a class is hashable, whatever its metaclass says
    names = hints.keys()
    if unknown := sorted(set(value) - names):
        raise RecordRefused(f"{where} has the unknown field {unknown[0]!r}")
    if missing := sorted(names - set(value)):
        raise RecordRefused(f"{where} lacks the field {missing[0]!r}")
    return cls(**{name: _value(hints[name], value[name], f"{where}.{name}") for name in names})


@functools.cache
def _hints(cls: type[Any]) -> Mapping[str, Any]:
    """Field → type; resolving them takes longer than reading a record."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        for choice in args:
            try:
                return _value(choice, value, where)
            except RecordRefused:
                continue
        raise RecordRefused(f"{where} is {value!r}, which is none of the allowed types")
    if origin is Literal:
        if value in args:
            return value
        raise RecordRefused(f"{where} is {value!r}; allowed are {', '.join(map(repr, args))}")
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_value(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        return {key: _value(args[1], item, f"{where}[{key!r}]") for key, item in value.items()}
    if hint is type(None) and value is None:
        return None
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _build(hint, value, where)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint in (str, bool) and isinstance(value, hint):
        return value
    raise RecordRefused(f"{where} is {value!r}, which is not {getattr(hint, '__name__', hint)}")


class RecordWriter:
    """Appends records to a new file, each flushed as one whole line, so that an interrupted run stays readable."""

    def __init__(self, path: Path) -> None:
        """Raises FileExistsError: a run never overwrites another's records."""
        self._stream: IO[str] = path.open("x", encoding="utf-8")

    def write(self, record: Record) -> None:
        self._stream.write(json.dumps(to_json(record), separators=(",", ":"), allow_nan=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def write_jsonl(path: Path, records: Iterable[Record]) -> None:
    """Write a new file. Raises FileExistsError."""
    writer = RecordWriter(path)
    try:
        for record in records:
            writer.write(record)
    finally:
        writer.close()


def read_jsonl(path: Path) -> Iterator[Record]:
    """Records in file order. Raises RecordRefused naming file and line."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield from_json(json.loads(line))
            except (json.JSONDecodeError, AttributeError, RecordRefused) as error:
                raise RecordRefused(f"{path}, line {number}: {error}") from error
