"""The published fleet: its figures, which the twin may be fitted on, and whether a simulated one is near enough. Knows
nothing of how anything is simulated.

Figures, roles and tolerances are those of `published_fleet.json` beside this module. The judge takes them from there
and from nowhere else: a figure that says otherwise is not one of `figures()` and is refused.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any, Literal

from hostcache.errors import ConfigError
from hostcache.records import Arm, TwinRole, TwinRow, TwinSummary, TwinUnit

SEEDS_NEEDED = 8
WITHIN_NEEDED = 0.90
"""The share of the judged figures that has to be within tolerance."""
FEW = 10
"""A published median of fewer values than this is judged by the wider tolerance."""


# --- what was published ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFacts:
    """The machine and its settings. `cold_prefill_tok_s`: (prompt tokens, tokens per second) of single cold prompts."""

    pool_tokens: int
    kv_bytes_per_token: int
    page_tokens: int
    tail_bytes_per_snapshot: int
    prompt_bank_entries: int
    turn_bank_entries: int
    max_concurrency: int
    max_context_tokens: int
    prefill_batch_tokens: int
    host_quota_bytes: int
    copy_budget_s: float
    restore_budget_s: float
    store_pace_s: float
    copy_bytes_per_s_per_segment: float
    copy_bytes_per_s_batched: float
    cold_prefill_tok_s: tuple[tuple[int, float], ...]
    single_stream_decode_tok_s: tuple[float, float]
    six_streams_prose_tok_s: tuple[float, float]
    six_streams_code_tok_s: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWorkload:
    """The loop of one coding agent. One turn in `compaction_one_turn_in` shrinks the context to `compaction_share`."""

    start_tokens: int
    new_tokens_per_turn: int
    reply_tokens_per_turn: int
    tool_gap_s: tuple[float, float]
    window_s: float
    compaction_one_turn_in: int
    compaction_share: float
    backoff_first_s: float
    backoff_factor: float
    backoff_jitter: float
    backoff_cap_s: float
    backoff_max_retries: int
    front_door_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RotationWorkload:
    """Clients that revisit their sessions in turn, and a cold probe from the side."""

    gap_s: float
    new_tokens_per_visit: int
    reply_tokens_per_visit: int
    probe_prompt_tokens: int
    probe_decode_tokens: int
    probe_every_s: float
    window_off_s: float
    window_on_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRow:
    """K agents on one arm. `hit_share` is a share of prompt tokens."""

    agents: int
    arm: Arm
    turns: int
    avg_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    hit_share: float
    decode_p50_tok_s: float
    retries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RotationRow:
    """One rotation cell. `hit_share_on` is host hits over lookups that missed the device, cold probes included."""

    cell: str
    sessions: int
    tokens: int
    users: int
    revisits_off: int
    revisits_on: int
    window_off_s: float
    window_on_s: float
    ttft_p50_off_s: float
    ttft_p50_on_s: float
    ttft_p95_off_s: float
    ttft_p95_on_s: float
    decode_p50_off_tok_s: float
    decode_p50_on_tok_s: float
    hit_share_on: float
    restore_mean_ms: float
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueRow:
    """R4 with the tier on, on the build whose admission defers instead of refusing."""

    cell: str
    window_s: float
    served: int
    refused: int
    deferred: int
    ttft_p50_s: float
    ttft_p95_s: float
    hit_share_on: float
    restore_mean_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRow:
    """One conversation, cold and restored, as its client saw it. `bytes_restored` is None where none was published."""

    tokens: int
    cold_s: float
    restored_s: float
    bytes_restored: int | None


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far from the published value is still right: the larger of a share of it and an absolute distance.

    `above`, where given, is the whole test: the simulated value exceeds it.
    """

    text: str
    relative: float = 0.0
    absolute: float = 0.0
    above: float | None = None

    def holds(self, published: float, simulated: float) -> bool:
        if self.above is not None:
            return simulated > self.above
        allowed = max(self.relative * abs(published), self.absolute)
        # Decimal figures as floats: 0.964 - 0.954 is a hair over 0.01.
        return abs(simulated - published) <= allowed + 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One published figure. `parts`, for a ratio: the names of the figures above and below the line.

    `role` is `informative` for a predicted figure that has no tolerance; a fitted one without a tolerance stays
    `fitted`, since the coefficients may be chosen by it.
    """

    name: str
    row: str
    quantity: str
    agents: int | None
    arm: Arm | None
    unit: TwinUnit
    published: float
    role: TwinRole
    tolerance: Tolerance | None
    must_hold: bool
    parts: tuple[str, str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Everything in the file. `roles` is by row; `behaviour` is what was read of the engine, in words."""

    source: str
    fleet: FleetFacts
    agent_workload: AgentWorkload
    rotation_workload: RotationWorkload
    agents: tuple[AgentRow, ...]
    rotations: tuple[RotationRow, ...]
    requeue: RequeueRow
    restores: tuple[RestoreRow, ...]
    behaviour: Mapping[str, str]
    roles: Mapping[str, TwinRole]
    figures: tuple[Figure, ...]

    def agent_row(self, agents: int, arm: Arm) -> AgentRow:
        return next(row for row in self.agents if (row.agents, row.arm) == (agents, arm))

    def rotation_row(self, cell: str) -> RotationRow:
        return next(row for row in self.rotations if row.cell == cell)


@functools.cache
def published() -> Published:
    """The published fleet. Read once; nothing in it can be changed."""
    return parse(published_document())


def published_document() -> dict[str, Any]:
    """The file's content, for whoever shows it beside something else."""
    document: dict[str, Any] = json.loads(
        files("hostcache.sim").joinpath("published_fleet.json").read_text(encoding="utf-8"))
    return document


def figures() -> tuple[Figure, ...]:
    """Every published figure: agents, rotations, restores, ratios."""
    return published().figures


# --- the judge ------------------------------------------------------------------------------------------------------


def judge(figure: Figure, simulated: float | None, *, sd: float | None = None, cause: str = "") -> TwinRow:
    """One row of the twin. `cause` is kept where the figure missed. A predicted figure that was not simulated missed.

    Raises ConfigError for a figure that is not one of `figures()`, field for field.
    """
    if _by_name().get(figure.name) != figure:
        raise ConfigError(f"{figure.name!r} is not a published figure with that role and tolerance; take it from "
                          "hostcache.sim.published.figures()")
    within = None
    if figure.tolerance is not None:
        within = simulated is not None and figure.tolerance.holds(figure.published, simulated)
    if within is not False:
        cause = ""
    elif simulated is None:
        cause = cause or "not simulated"
    return TwinRow(
        figure=figure.name, row=figure.row, quantity=figure.quantity, agents=figure.agents, arm=figure.arm,
        unit=figure.unit, published=figure.published, simulated=simulated, sd=sd,
        rel_error=None if simulated is None or not figure.published else simulated / figure.published - 1,
        role=figure.role, predicted=figure.role == "predicted",
        tolerance=figure.tolerance.text if figure.tolerance else None, within=within,
        cause=cause or ("unexplained" if within is False else ""))


def judge_all(values: Mapping[str, Sequence[float]], causes: Mapping[str, str] | None = None) -> tuple[TwinRow, ...]:
    """Every published figure, in their order. `values`: by figure name, one value a seed; `causes`: of misses.

    Ratios are made here, of the means, so they cannot disagree with their parts. A figure without values has None.
    Raises ConfigError for a name that is no figure, or a ratio.
    """
    causes = causes or {}
    given = {figure.name for figure in figures() if figure.parts is None}
    for name in [*values, *(name for name in causes if name not in _by_name())]:
        if name not in given:
            raise ConfigError(f"{name!r} is not a published figure that is simulated; see hostcache.sim.published")
    means = {name: fmean(seeds) for name, seeds in values.items() if len(seeds)}
    rows = []
    for figure in figures():
        simulated, sd = means.get(figure.name), None
        if figure.parts is not None:
            above, below = (means.get(part) for part in figure.parts)
            simulated = above / below if above is not None and below else None
        elif simulated is not None and len(values[figure.name]) > 1:
            sd = stdev(values[figure.name])
        rows.append(judge(figure, simulated, sd=sd, cause=causes.get(figure.name, "")))
    return tuple(rows)


def summary(rows: Iterable[TwinRow], *, seeds: int) -> TwinSummary:
    """The bars: the share of judged figures within tolerance, all that must hold, at least eight seeds.

    What is judged comes from `figures()`: a predicted figure that `rows` lacks has missed. Raises ConfigError for a
    row given twice or one that is not what the judge says of its simulated value.
    """
    judged: dict[str, TwinRow] = {}
    for row in rows:
        figure = _by_name().get(row.figure)
        if figure is None or row.figure in judged or row != judge(figure, row.simulated, sd=row.sd, cause=row.cause):
            raise ConfigError(f"the row {row.figure!r} is given twice or is not what the judge says; make rows with "
                              "hostcache.sim.published.judge")
        judged[row.figure] = row
    asked = [figure for figure in figures() if figure.role == "predicted"]
    missed = [figure for figure in asked if figure.name not in judged or not judged[figure.name].within]
    must_hold_misses = tuple(figure.name for figure in missed if figure.must_hold)
    within = len(asked) - len(missed)
    return TwinSummary(
        judged=len(asked), within=within, needed_share=WITHIN_NEEDED, seeds_needed=SEEDS_NEEDED,
        must_hold=sum(figure.must_hold for figure in asked), misses=tuple(figure.name for figure in missed),
        must_hold_misses=must_hold_misses,
        passed=within >= WITHIN_NEEDED * len(asked) and not must_hold_misses and seeds >= SEEDS_NEEDED)


@functools.cache
def _by_name() -> Mapping[str, Figure]:
    return MappingProxyType({figure.name: figure for figure in figures()})


# --- reading the file -----------------------------------------------------------------------------------------------

REQUEUE = "R4 on, admission requeue"
MEASURED_BUILD = "R4 on, measured build"

_ROWS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "agentic_ramp K=8": ("K=8 off", "K=8 on"),
    "agentic_ramp K=16": ("K=16 off", "K=16 on"),
    "agentic_ramp K=32": ("K=32 off", "K=32 on"),
    "agentic_ramp K=48": ("K=48 off", "K=48 on"),
    "one restore row (54620)": ("restore 54620",),
    "restore 320840 and 1000007": ("restore 320840", "restore 1000007"),
    "one rotation row (R1)": ("R1 off", "R1 on"),
    "R2": ("R2 off", "R2 on"),
    "R3": ("R3 off", "R3 on"),
    "R4 with the admission requeue": ("R4 off", REQUEUE),
    "R5": ("R5 off", "R5 on"),
    "ratios on/off at K=32": ("ratio K=32",),
    "R4 on, measured build (135 served, 81 refused)": (MEASURED_BUILD,),
})
"""What each name of a role in the file stands for."""
_NO_ROW = ("p95 figures (informative)",
           "R5 as beyond the host quota: 24 x 300k tokens at 890 B/token are 6.4 GB")
"""Names under `not_to_claim` that are no rows of their own."""

_ROUNDS_TO_0 = Tolerance("rounds to 0", absolute=0.5)
_READ: Mapping[str, Mapping[str, Tolerance]] = MappingProxyType({
    "10 %": {"": Tolerance("±10 %", relative=0.10)},
    "20 %": {"": Tolerance("±20 %", relative=0.20)},
    "25 %": {"": Tolerance("±25 %", relative=0.25)},
    "1 point": {"": Tolerance("±1 point", absolute=0.01)},
    "4 points": {"": Tolerance("±4 points", absolute=0.04)},
    "1.5 points (host hits / device-miss lookups)": {"": Tolerance("±1.5 points", absolute=0.015)},
    "0 at K<=16; 25 % at K=32": {
        "K=8": _ROUNDS_TO_0, "K=16": _ROUNDS_TO_0, "K=32": Tolerance("±25 %", relative=0.25)},
    "18 % or 2, whichever is larger": {"": Tolerance("±18 % or ±2", relative=0.18, absolute=2)},
    "25 % or 0.2 s, whichever is larger; 40 % where the published value is a median of fewer than 10": {
        "many": Tolerance("±25 % or ±0.2 s", relative=0.25, absolute=0.2), "few": Tolerance("±40 %", relative=0.40)},
    "0 refused, served within 10 %, deferred > 0": {
        "refused": Tolerance("0 in every seed"), "served": Tolerance("±10 %", relative=0.10),
        "deferred": Tolerance("> 0", above=0.0)},
})
"""How each text of a tolerance in the file is read, by case. A text that is not here is refused, so neither side can
change alone."""


def parse(data: Mapping[str, Any]) -> Published:
    """The content of the file. Raises ConfigError where a role or tolerance is not one that this module knows."""
    roles = _roles(data)
    agents = tuple(_agent_row(row) for row in data["agentic_ramp"])
    rotations = tuple(_rotation_row(row) for row in data["rotation"])
    requeue = _requeue_row(data["rotation_requeue"])
    restores = tuple(
        RestoreRow(tokens=row["tokens"], cold_s=row["cold_s"], restored_s=row["restored_s"],
                   bytes_restored=row.get("bytes")) for row in data["restore"])
    return Published(
        source=data["source"], fleet=_fleet(data["fleet"]), agent_workload=_agent_workload(data["agent_workload"]),
        rotation_workload=_rotation_workload(data["rotation_workload"]), agents=agents, rotations=rotations,
        requeue=requeue, restores=restores,
        behaviour=MappingProxyType({key: text for key, text in data["engine_behaviour"].items() if key[0] != "_"}),
        roles=MappingProxyType(roles),
        figures=tuple(_Figures(data["twin_tolerances"], roles).all(agents, rotations, requeue, restores)))


def _roles(data: Mapping[str, Any]) -> dict[str, TwinRole]:
    """Row → role. Every row has exactly one."""
    found: dict[str, TwinRole] = {}
    listed: list[tuple[TwinRole, str]] = [
        *(("fitted", name) for name in data["twin_roles"]["fitted"]),
        *(("predicted", name) for name in data["twin_roles"]["predicted"]),
        *(("not claimed", name) for name in data["twin_tolerances"]["not_to_claim"] if name not in _NO_ROW)]
    for role, name in listed:
        for row in _ROWS.get(name, ()):
            if row in found:
                raise ConfigError(f"the published row {row!r} is {found[row]} and {role}; a row has one role")
            found[row] = role
        if name not in _ROWS:
            raise ConfigError(f"{name!r} is not a published row; known are {', '.join(_ROWS)}")
    if lacking := [row for rows in _ROWS.values() for row in rows if row not in found]:
        raise ConfigError(f"the published row {lacking[0]!r} has no role; roles are frozen, take the packaged file")
    return found


class _Figures:
    """Makes the figures: which quantities a row has and how each is judged."""

    def __init__(self, tolerances: Mapping[str, Any], roles: Mapping[str, TwinRole]) -> None:
        self._tolerances = tolerances
        self._roles = roles
        self._informative = frozenset(tolerances["informative"])

    def all(self, agents: Sequence[AgentRow], rotations: Sequence[RotationRow], requeue: RequeueRow,
            restores: Sequence[RestoreRow]) -> Iterator[Figure]:
        for agent_row in agents:
            yield from self._agents(agent_row)
        for rotation_row in rotations:
            yield from self._rotation_off(rotation_row)
            if rotation_row.cell == requeue.cell:
                yield from self._requeue(requeue)
                yield from self._rotation_on(rotation_row, MEASURED_BUILD)
            else:
                yield from self._rotation_on(rotation_row, f"{rotation_row.cell} on")
        for restore_row in restores:
            yield from self._restore(restore_row)
        yield from self._ratios({(row.agents, row.arm): row for row in agents})

    def _read(self, text: str, case: str = "") -> Tolerance | None:
        """None where the text says nothing of this case."""
        if text not in _READ:
            raise ConfigError(f"the tolerance {text!r} is not one that the judge knows; tolerances are frozen, take "
                              "the packaged file")
        return _READ[text].get(case)

    def _ttft(self, values: int) -> Tolerance | None:
        return self._read(self._tolerances["ttft_p50"], "few" if values < FEW else "many")

    def _figure(self, kind: str, row: str, quantity: str, value: float, unit: TwinUnit, tolerance: Tolerance | None,
                *, agents: int | None = None, arm: Arm | None = None, parts: tuple[str, str] | None = None) -> Figure:
        role = self._roles[row]
        if role == "not claimed":
            tolerance = None
        elif quantity in self._informative or (role == "predicted" and tolerance is None):
            role, tolerance = "informative", None
        must_hold = role == "predicted" and agents in (16, 32) and (
            quantity in ("turns", "avg_s") or (quantity == "hit_share" and arm == "on"))
        return Figure(
            name=f"{kind} {row} {quantity}".strip(), row=row, quantity=quantity, agents=agents, arm=arm, unit=unit,
            published=float(value), role=role, tolerance=tolerance, must_hold=must_hold, parts=parts)

    def _agents(self, row: AgentRow) -> Iterator[Figure]:
        allowed, ramp = self._tolerances["agents"], f"K={row.agents}"

        def figure(quantity: str, value: float, unit: TwinUnit, tolerance: Tolerance | None) -> Figure:
            return self._figure("agentic_ramp", f"{ramp} {row.arm}", quantity, value, unit, tolerance,
                                agents=row.agents, arm=row.arm)

        yield figure("turns", row.turns, "", self._read(allowed["turns"]))
        yield figure("avg_s", row.avg_s, "s", self._read(allowed["avg_s"]))
        yield figure("hit_share", row.hit_share, "share", self._read(allowed[f"hit_share_{row.arm}"]))
        yield figure("retries", row.retries, "", self._read(allowed["retries"], ramp))
        yield figure("ttft_p50", row.ttft_p50_s, "s", self._ttft(row.turns))
        yield figure("ttft_p95", row.ttft_p95_s, "s", None)
        yield figure("decode_p50", row.decode_p50_tok_s, "tok/s", None)

    def _rotation_off(self, row: RotationRow) -> Iterator[Figure]:
        def figure(quantity: str, value: float, unit: TwinUnit, tolerance: Tolerance | None) -> Figure:
            return self._figure("rotation", f"{row.cell} off", quantity, value, unit, tolerance, arm="off")

        yield figure("revisits", row.revisits_off, "", self._read(self._tolerances["rotations"]["revisits"]))
        yield figure("ttft_p50", row.ttft_p50_off_s, "s", self._ttft(row.revisits_off))
        yield figure("ttft_p95", row.ttft_p95_off_s, "s", None)
        yield figure("decode_p50", row.decode_p50_off_tok_s, "tok/s", None)

    def _rotation_on(self, row: RotationRow, name: str) -> Iterator[Figure]:
        allowed = self._tolerances["rotations"]

        def figure(quantity: str, value: float, unit: TwinUnit, tolerance: Tolerance | None) -> Figure:
            return self._figure("rotation", name, quantity, value, unit, tolerance, arm="on")

        yield figure("revisits", row.revisits_on, "", self._read(allowed["revisits"]))
        yield figure("hit_share", row.hit_share_on, "share", self._read(allowed["hit_share_on"]))
        yield figure("ttft_p50", row.ttft_p50_on_s, "s", self._ttft(row.revisits_on))
        yield figure("ttft_p95", row.ttft_p95_on_s, "s", None)
        yield figure("decode_p50", row.decode_p50_on_tok_s, "tok/s", None)
        yield figure("restore_mean_ms", row.restore_mean_ms, "ms", None)

    def _requeue(self, row: RequeueRow) -> Iterator[Figure]:
        allowed = self._tolerances["r4_requeue"]

        def figure(quantity: str, value: float, unit: TwinUnit, tolerance: Tolerance | None) -> Figure:
            return self._figure("rotation", REQUEUE, quantity, value, unit, tolerance, arm="on")

        yield figure("served", row.served, "", self._read(allowed, "served"))
        yield figure("refused", row.refused, "", self._read(allowed, "refused"))
        yield figure("deferred", row.deferred, "", self._read(allowed, "deferred"))
        yield figure("ttft_p50", row.ttft_p50_s, "s", self._ttft(row.served))
        # One smoke run of another build; the file gives its hit share no tolerance.
        yield figure("hit_share", row.hit_share_on, "share", None)
        yield figure("ttft_p95", row.ttft_p95_s, "s", None)
        yield figure("restore_mean_ms", row.restore_mean_ms, "ms", None)

    def _restore(self, row: RestoreRow) -> Iterator[Figure]:
        name = f"restore {row.tokens}"
        yield self._figure("", name, "restored_s", row.restored_s, "s", self._read(self._tolerances["restore"]))
        yield self._figure("", name, "cold_s", row.cold_s, "s", None)
        if row.bytes_restored is not None:
            yield self._figure("", name, "bytes", row.bytes_restored, "bytes", None)

    def _ratios(self, rows: Mapping[tuple[int, Arm], AgentRow]) -> Iterator[Figure]:
        off, on = rows[32, "off"], rows[32, "on"]
        tolerance = self._read(self._tolerances["ratios_k32"])
        # Each as it was published, the larger over the smaller: 20 % is not the same of a ratio and of its inverse.
        yield self._figure("", "ratio K=32", "turns_on_over_off", on.turns / off.turns, "times", tolerance, parts=(
            "agentic_ramp K=32 on turns", "agentic_ramp K=32 off turns"))
        yield self._figure("", "ratio K=32", "avg_s_off_over_on", off.avg_s / on.avg_s, "times", tolerance, parts=(
            "agentic_ramp K=32 off avg_s", "agentic_ramp K=32 on avg_s"))


def _pair(values: Sequence[float]) -> tuple[float, float]:
    low, high = values
    return float(low), float(high)


def _fleet(data: Mapping[str, Any]) -> FleetFacts:
    bandwidth, six = data["copy_bandwidth_gb_s"], data["aggregate_decode_six_streams_tok_s"]
    return FleetFacts(
        pool_tokens=data["pool_tokens"], kv_bytes_per_token=data["kv_bytes_per_token"],
        page_tokens=data["page_tokens"], tail_bytes_per_snapshot=data["tail_bytes_per_snapshot"],
        prompt_bank_entries=data["banks"]["prompt"], turn_bank_entries=data["banks"]["turn"],
        max_concurrency=data["max_concurrency"], max_context_tokens=data["max_context_tokens"],
        prefill_batch_tokens=data["prefill_batch_tokens"], host_quota_bytes=data["host_quota_bytes"],
        copy_budget_s=data["copy_budget_ms"] / 1000, restore_budget_s=data["restore_budget_ms"] / 1000,
        store_pace_s=data["store_pace_ms"] / 1000,
        copy_bytes_per_s_per_segment=bandwidth["per_segment_calls"] * 1e9,
        copy_bytes_per_s_batched=bandwidth["batched_extents"] * 1e9,
        cold_prefill_tok_s=tuple((int(tokens), float(rate)) for tokens, rate in data["cold_prefill_tok_s"]),
        single_stream_decode_tok_s=_pair(data["single_stream_decode_tok_s"]),
        six_streams_prose_tok_s=_pair(six["prose"]), six_streams_code_tok_s=_pair(six["code"]))


def _agent_workload(data: Mapping[str, Any]) -> AgentWorkload:
    backoff, compaction = data["backoff"], data["compaction"]
    return AgentWorkload(
        start_tokens=data["start_tokens"], new_tokens_per_turn=data["new_tokens_per_turn"],
        reply_tokens_per_turn=data["reply_tokens_per_turn"], tool_gap_s=_pair(data["tool_gap_s"]),
        window_s=data["window_s"], compaction_one_turn_in=compaction["one_turn_in"],
        compaction_share=compaction["to_fraction"], backoff_first_s=backoff["first_s"],
        backoff_factor=backoff["factor"], backoff_jitter=backoff["jitter"], backoff_cap_s=backoff["cap_s"],
        backoff_max_retries=backoff["max_retries"], front_door_slots=data["front_door"]["slots"])


def _rotation_workload(data: Mapping[str, Any]) -> RotationWorkload:
    probe = data["probe"]
    return RotationWorkload(
        gap_s=data["gap_s"], new_tokens_per_visit=data["new_tokens_per_visit"],
        reply_tokens_per_visit=data["reply_tokens_per_visit"], probe_prompt_tokens=probe["prompt_tokens"],
        probe_decode_tokens=probe["decode_tokens"], probe_every_s=probe["every_s"],
        window_off_s=data["revisits_off_windows_s"], window_on_s=data["revisits_on_windows_s"])


def _agent_row(row: Mapping[str, Any]) -> AgentRow:
    return AgentRow(
        agents=row["agents"], arm=_arm(row["arm"]), turns=row["turns"], avg_s=row["avg_s"],
        ttft_p50_s=row["ttft_p50"], ttft_p95_s=row["ttft_p95"], hit_share=row["hit_share"],
        decode_p50_tok_s=row["decode_p50"], retries=row["retries"])


def _arm(text: Literal["off", "on"]) -> Arm:
    if text not in ("off", "on"):
        raise ConfigError(f"the published arm is {text!r}; allowed are off and on")
    return text


def _rotation_row(row: Mapping[str, Any]) -> RotationRow:
    return RotationRow(
        cell=row["cell"], sessions=row["sessions"], tokens=row["tokens"], users=row["users"],
        revisits_off=row["revisits_off"], revisits_on=row["revisits_on"], window_off_s=row["window_off_s"],
        window_on_s=row["window_on_s"], ttft_p50_off_s=row["ttft_p50_off"], ttft_p50_on_s=row["ttft_p50_on"],
        ttft_p95_off_s=row["ttft_p95_off"], ttft_p95_on_s=row["ttft_p95_on"],
        decode_p50_off_tok_s=row["decode_p50_off"], decode_p50_on_tok_s=row["decode_p50_on"],
        hit_share_on=row["hit_share_on"], restore_mean_ms=row["restore_mean_ms"], note=row.get("note", ""))


def _requeue_row(row: Mapping[str, Any]) -> RequeueRow:
    return RequeueRow(
        cell=row["cell"], window_s=row["window_s"], served=row["served"], refused=row["refused"],
        deferred=row["deferred"], ttft_p50_s=row["ttft_p50"], ttft_p95_s=row["ttft_p95"],
        hit_share_on=row["hit_share_on"], restore_mean_ms=row["restore_mean_ms"])
