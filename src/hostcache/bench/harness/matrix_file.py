"""A matrix file: cells, arms, bars and their order, read strictly. Starts nothing and measures nothing.

    [server]              what all arms' servers have in common      [arms.NAME]    what makes it this arm
    [defaults]            of every cell                              [cells.NAME]   workload, parameters, bars, goals
    [quick]               the same tables again, laid over the file when the short form is asked for; leave_out: cells

Whatever is not known, or of another type, is refused in one line with file, cell, field and value.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from hostcache.bench.harness.bars import Bars, parse_bars
from hostcache.bench.harness.catalogue import PLAYED
from hostcache.bench.harness.cell import CellSpec, Workload
from hostcache.bench.harness.equivalence import EquivalenceParameters
from hostcache.bench.harness.ladder import LadderParameters
from hostcache.bench.harness.parameters import from_table
from hostcache.bench.harness.summaries import GOODPUT_KEYS
from hostcache.bench.harness.target import Target, hostcache_target, vllm_target
from hostcache.errors import ConfigError
from hostcache.sizes import parse_size
from hostcache.testing.mock_config import SAYS as MOCK_FIELDS
from hostcache.testing.mock_config import MockConfig

VERSION = 1
WORKLOADS: Mapping[str, type[Workload]] = {
    **PLAYED, LadderParameters.NAME: LadderParameters, EquivalenceParameters.NAME: EquivalenceParameters}
Preset = Literal["hostcache", "vllm", "mock"]
Prompts = Literal["auto", "ids", "text", "chat"]

T = TypeVar("T")
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
_CELL_ONLY = ("workload", "parameters", "sweep", "answers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What the servers are thought to do; decides the estimated times and nothing else. `streams_tok_s`: decoding, all
    streams together."""

    start_s: float = 10.0
    prefill_tok_s: float = 500.0
    decode_tok_s: float = 30.0
    streams_tok_s: float = 100.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ConfigError(f"{field.name} is {getattr(self, field.name)}; give more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One arm of one cell, once. `turn`: the how-manieth of its arm, from 1; runs of one turn are pairs.

    `ramp`: the cell that was swept, empty where none was; `settings`: the server's, where hostcache itself is started
    (name → value as for `settings.settle`); `pool_tokens`: of its device, where the file says so.
    """

    cell: str
    ramp: str
    answers: str
    target: Target
    turn: int
    spec: CellSpec
    bars: Bars
    settings: Mapping[str, Any] | None
    pool_tokens: int | None

    @property
    def arm(self) -> str:
        return self.target.arm

    @property
    def name(self) -> str:
        return f"{self.cell} {self.arm} {self.turn}"

    @property
    def workload(self) -> Workload:
        return self.spec.workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A file, settled. `runs`: in the order in which they are made."""

    name: str
    about: str
    form: Literal["full", "quick"]
    text: str
    baseline: str
    speed: Speed
    runs: tuple[Run, ...]

    @property
    def digest(self) -> str:
        return sha256(self.text.encode()).hexdigest()

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.cell for run in self.runs))

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.arm for run in self.runs))

    def chosen(self, cells: Iterable[str] | None, arms: Iterable[str] | None) -> Matrix:
        """The same with some cells (or whole sweeps) and arms. A cell that keeps one arm has no goals. Raises
        ConfigError."""
        cells, arms = (None if names is None else tuple(names) for names in (cells, arms))
        known = {*self.cells, *(run.ramp for run in self.runs if run.ramp)}
        for flag, names, there in (("--cells", cells, known), ("--arms", arms, set(self.arms))):
            for name in names or ():
                if name not in there:
                    raise ConfigError(f"{flag} {name!r} is not in {self.name}; there are {', '.join(sorted(there))}")
        left = [run for run in self.runs if (cells is None or run.cell in cells or run.ramp in cells)
                and (arms is None or run.arm in arms)]
        if not left:
            raise ConfigError(f"nothing of {self.name} is left with these --cells and --arms; choose others")
        both = {cell for cell in self.cells if len({run.arm for run in left if run.cell == cell}) > 1}
        return dataclasses.replace(self, runs=tuple(run if run.cell in both else _without_goals(run) for run in left))


def _without_goals(run: Run) -> Run:
    return dataclasses.replace(run, spec=dataclasses.replace(run.spec, goals={}),
                               bars=dataclasses.replace(run.bars, goals=(), goal_parts=()))


def shipped() -> Mapping[str, str]:
    """The matrices that ship: name → text."""
    folder = files("hostcache.bench") / "matrices"
    return {each.name.removesuffix(".toml"): each.read_text(encoding="utf-8")
            for each in sorted(folder.iterdir(), key=lambda each: each.name) if each.name.endswith(".toml")}


def matrix_text(name: str) -> str:
    """Of a shipped matrix by its name, or of a file. Raises ConfigError."""
    ours = shipped()
    if name in ours:
        return ours[name]
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"matrix {name!r} cannot be read ({getattr(error, 'strerror', None) or 'no UTF-8'}); give a "
                          f"TOML file or one of {', '.join(ours)}") from error


def parse_matrix(text: str, *, file: str, quick: bool = False, api_key: str | None = None) -> Matrix:
    """`file`: its name, for errors. Raises ConfigError."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is no TOML: {error}") from error
    over = document.pop("quick", None)
    if quick and over is None:
        raise ConfigError(f"{file} has no [quick]; leave --quick out")
    if quick:
        document = _shortened(document, over, file)
    table = _Table(document, file)
    if (version := table.take("version", int, VERSION)) != VERSION:
        raise table.error("version", version, f"this hostcache reads version {VERSION}")
    name = table.take("name", str)
    common = table.take("server", dict, {})
    seed = table.take("seed", int, 0)
    baseline = table.take("baseline", str, "off")
    about = table.take("about", str, "")
    speed = _blamed(f"{file}: speed", partial(from_table, Speed, table.take("speed", dict, {}), where=f"{file}: speed"))
    arms = table.take("arms", dict)
    defaults = {"seed": seed, **table.take("defaults", dict, {})}
    cells = table.take("cells", dict)
    table.done()
    if misplaced := sorted(defaults.keys() & set(_CELL_ONLY)):
        raise ConfigError(f"{file}: defaults has {misplaced[0]!r}; that belongs into a cell")
    for kind, names in (("arm", arms), ("cell", cells)):
        if not names:
            raise ConfigError(f"{file} has no {kind}; give at least one [{kind}s.NAME]")
        for each, value in names.items():
            if not _NAME.fullmatch(each):
                raise ConfigError(f"{file}: {kind} {each!r} becomes a folder; use a-z, 0-9, '.' and '-'")
            if not isinstance(value, dict):
                raise ConfigError(f"{file}: {kind} {each} is {value!r}; give a table")
    if baseline not in arms:
        raise ConfigError(f"{file}: baseline is {baseline!r}; the arms are {', '.join(arms)}")
    servers: dict[str, _MakeServer] = {
        arm: partial(_server, arm, {**common, **own}, api_key=api_key, file=file) for arm, own in arms.items()}
    for make in servers.values():
        make({})  # an arm that no cell uses is read too
    runs = [run for cell, own in cells.items()
            for run in _cell(cell, _laid_over(defaults, own), servers, baseline, file)]
    for run, count in Counter((run.cell, run.arm, run.turn) for run in runs).items():
        if count > 1:
            raise ConfigError(f"{file}: a sweep makes another cell {run[0]}; rename one of them")
    return Matrix(name=name, about=" ".join(about.split()), form="quick" if quick else "full", text=text,
                  baseline=baseline, speed=speed, runs=tuple(runs))


# -- tables ----------------------------------------------------------------------------------------------------------


class _Table:
    """A TOML table whose fields are taken one by one; what nobody took is refused."""

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self._left = dict(table)
        self._known: list[str] = []
        self.where = where

    def take(self, name: str, kind: type[T], default: T | None = None) -> T:
        """Raises ConfigError for another type, and for nothing where there is no default."""
        self._known.append(name)
        if name not in self._left:
            if default is None:
                raise ConfigError(f"{self.where} needs {name!r}")
            return default
        value = self._left.pop(name)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.error(name, value, f"give {_WORDS[kind]}")
        made: T = value
        return made

    def maybe(self, name: str, kind: type[T]) -> T | None:
        """None where it is not given."""
        if name in self._left:
            return self.take(name, kind)
        self._known.append(name)
        return None

    def texts(self, name: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """A list of texts."""
        values = self.take(name, list, None if default is None else list(default))
        if not all(isinstance(each, str) for each in values):
            raise self.error(name, values, "give a list of texts")
        return tuple(values)

    def choice(self, name: str, default: str, choices: Iterable[str]) -> str:
        value = self.take(name, str, default)
        if value not in tuple(choices):
            raise self.error(name, value, f"give one of {', '.join(choices)}")
        return value

    def size(self, name: str, default: int | str | None = None) -> int:
        """Bytes."""
        self._known.append(name)
        value = self._left.pop(name, default)
        if value is None:
            raise ConfigError(f"{self.where} needs {name!r}")
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise self.error(name, value, "give a size, for example \"2GiB\"")
        return parse_size(value, name=f"{self.where}: {name}")

    def rest(self) -> dict[str, Any]:
        """All that is left."""
        left, self._left = self._left, {}
        return left

    def done(self) -> None:
        if self._left:
            name = min(self._left)
            raise ConfigError(f"{self.where}: {name!r} is not known; known are {', '.join(self._known)}")

    def error(self, name: str, value: object, way_out: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name} is {value!r}; {way_out}")


_WORDS: Mapping[type, str] = {str: "a text", int: "a whole number", float: "a number", dict: "a table", list: "a list",
                              bool: "true or false"}


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are joined, everything else is replaced."""
    return {**below, **{name: _laid_over(below[name], value)
                        if isinstance(value, dict) and isinstance(below.get(name), dict) else value
                        for name, value in above.items()}}


def _shortened(document: Mapping[str, Any], over: Mapping[str, Any], file: str) -> dict[str, Any]:
    """The file with its [quick] laid over it, which changes cells and arms, leaves cells out and brings none."""
    over = dict(over)
    left_out = over.pop("leave_out", [])
    if not isinstance(left_out, list):
        raise ConfigError(f"{file}: quick: leave_out is {left_out!r}; give a list of cells")
    for kind, names in (("cell", [*over.get("cells", ()), *left_out]), ("arm", [*over.get("arms", ())])):
        for name in names:
            if name not in document.get(f"{kind}s", ()):
                raise ConfigError(f"{file}: quick: {kind} {name!r} is not in the file; there are "
                                  f"{', '.join(document.get(f'{kind}s', ()))}")
    whole = _laid_over(document, over)
    return {**whole, "cells": {name: cell for name, cell in whole.get("cells", {}).items() if name not in left_out}}


# -- arms ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    target: Target
    settings: Mapping[str, Any] | None
    pool_tokens: int | None


_MakeServer = Callable[[Mapping[str, Any]], _Server]
"""What a cell changes of the arm's table → the server."""


def _server(arm: str, own: Mapping[str, Any], over: Mapping[str, Any], *, api_key: str | None, file: str) -> _Server:
    server, where = {**own, **over}, f"{file}: arm {arm}"
    ways = [name for name in ("preset", "command", "url") if name in server]
    if len(ways) != 1:
        raise ConfigError(f"{where} has {' and '.join(ways) or 'neither preset, command nor url'}; give one of preset, "
                          "command, url")
    if over and ways != ["preset"]:
        raise ConfigError(f"{where} is no preset, so a cell cannot change its server ({', '.join(sorted(over))})")
    table = _Table(server, where)
    if ways == ["preset"]:
        made = _PRESETS[table.choice("preset", "", _PRESETS)](arm, table, api_key)
    else:
        made = _own_server(arm, table, api_key)
    table.done()
    tier = made.target.tier
    if arm in ("off", "on") and tier not in (arm, None):
        raise ConfigError(f"{where} is named {arm}, and its server has its tier {tier}; rename it, or switch the tier")
    return made


def _hostcache(arm: str, table: _Table, api_key: str | None) -> _Server:
    model = table.take("model", str, "smollm2")
    quota, pool = table.size("host_cache_bytes"), table.take("pool_tokens", int)
    page, concurrency = table.take("page_tokens", int, 32), table.take("concurrency", int, 16)
    entries, settings = table.take("prefix_cache_entries", int, 24), table.take("settings", dict, {})
    extra = tuple(word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value)))
    own = {"model": model, "host_cache_bytes": quota, "pool_tokens": pool, "page_tokens": page,
           "concurrency": concurrency, "prefix_cache_entries": entries}
    if twice := sorted({"host", "port", "api_key", *own} & settings.keys()):
        raise table.error("settings", twice[0], "that is given elsewhere")
    target = hostcache_target(arm, model=model, pool_tokens=pool, page_tokens=page, host_cache_bytes=quota,
                              concurrency=concurrency, prefix_cache_entries=entries, extra=extra, api_key=api_key)
    return _Server(target=_named(target, table), settings={**own, **settings}, pool_tokens=pool)


def _vllm(arm: str, table: _Table, api_key: str | None) -> _Server:
    """`pool_tokens` is told to nobody: vLLM sizes its own; it is for the checks."""
    target = vllm_target(arm, model=table.take("model", str), host_cache_bytes=table.size("host_cache_bytes"),
                         extra=table.texts("extra", ()), command=table.texts("program", ()) or None, api_key=api_key)
    return _Server(target=_named(target, table), settings=None, pool_tokens=table.maybe("pool_tokens", int))


def _mock(arm: str, table: _Table, api_key: str | None) -> _Server:
    faults = table.texts("faults", ())
    given = {name: value for name in MOCK_FIELDS if (value := table.maybe(name, _mock_kind(name))) is not None}
    if "request_log" in given:
        given["request_log"] = Path(given["request_log"])
    try:
        config = MockConfig(**given)
    except ConfigError as error:
        raise ConfigError(f"{table.where}: {error}") from error
    words = [word for name, value in given.items() if value is not False
             for word in ((_flag(name),) if value is True else (_flag(name), str(value)))]
    start = (sys.executable, "-m", "hostcache", "bench", "mock", *words,
             *(word for fault in faults for word in ("--fault", fault)), "--port", "{port}")
    tier: Literal["on", "off"] = "on" if config.host_blocks else "off"
    target = Target(arm=arm, start=start, tier=None if config.style == "vllm" and not config.plugin else tier,
                    api_key=api_key)
    return _Server(target=_named(target, table), settings=None, pool_tokens=config.device_blocks * config.block_tokens)


def _mock_kind(name: str) -> type[Any]:
    default = {field.name: field.default for field in dataclasses.fields(MockConfig)}[name]
    return {"chunks": int, "request_log": str}.get(name, float if default is None else type(default))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


_PRESETS: Mapping[str, Callable[[str, _Table, str | None], _Server]] = {
    "hostcache": _hostcache, "vllm": _vllm, "mock": _mock}


def _own_server(arm: str, table: _Table, api_key: str | None) -> _Server:
    """An address, or a command of the user's own."""
    url, command = table.maybe("url", str), table.maybe("command", str)
    tier = table.maybe("tier", str)
    if tier not in ("on", "off", None):
        raise table.error("tier", tier, 'give "on" or "off": what the server must say of itself')
    quota = table.size("quota", 0) or None
    if quota is not None and tier != "on":
        raise table.error("quota", quota, 'it says how large the tier may be; it needs tier = "on"')
    try:
        words = tuple(shlex.split(command or ""))
    except ValueError as error:
        raise table.error("command", command, f"it cannot be split into words ({error})") from error
    model, pool = table.maybe("model", str), table.maybe("pool_tokens", int)
    try:
        target = Target(arm=arm, url=None if url is None else url.rstrip("/").removesuffix("/v1"), start=words,
                        tier=tier, quota_bytes=quota, model=model, api_key=api_key)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{table.where}: {error}") from error
    return _Server(target=_named(target, table), settings=None, pool_tokens=pool)


def _named(target: Target, table: _Table) -> Target:
    """With the environment that the file gives it. `{prefix}` in it is the folder of this Python's environment."""
    env = table.take("env", dict, {})
    for name, value in env.items():
        if not isinstance(value, str):
            raise table.error(f"env {name}", value, "give a text")
    if env and target.url is not None:
        raise table.error("env", sorted(env), "a server that runs already has its own")
    return dataclasses.replace(target, env={name: value.replace("{prefix}", sys.prefix) for name, value in env.items()})


# -- cells -----------------------------------------------------------------------------------------------------------


def _cell(name: str, cell: Mapping[str, Any], servers: Mapping[str, _MakeServer],
          baseline: str, file: str) -> list[Run]:
    """Its runs: arm after arm in its order, of a sweep each point, the easiest first."""
    where = f"{file}: cell {name}"
    table = _Table(cell, where)
    kind = WORKLOADS[table.choice("workload", "", WORKLOADS)]
    answers, order = table.take("answers", str, ""), table.texts("order")
    parameters, sweep = table.take("parameters", dict, {}), table.take("sweep", dict, {})
    bars, goals = table.take("bars", dict, {}), table.take("goals", dict, {})
    over, goodput = table.take("server", dict, {}), table.take("goodput", dict, {})
    spec: dict[str, Any] = {
        "seed": table.take("seed", int), "corpus": table.take("corpus", str, "code"),
        "mode": table.choice("prompts", "auto", get_args(Prompts)), "processes": table.take("processes", int, 1),
        "lag_bar_ms": table.maybe("lag_bar_ms", float), "goodput": goodput, "bars": bars, "goals": goals}
    table.done()
    if not order or (unknown := [arm for arm in order if arm not in servers]):
        raise table.error("order", list(order), f"{unknown[0]!r} is no arm" if order else "name at least one arm")
    if spec["processes"] < 1:
        raise table.error("processes", spec["processes"], "give at least 1")
    for metric, limit in goodput.items():
        if metric not in GOODPUT_KEYS or isinstance(limit, bool) or not isinstance(limit, int | float) or limit <= 0:
            raise table.error(f"goodput {metric}", limit, f"give milliseconds of any of {', '.join(GOODPUT_KEYS)}")
    if goals and (baseline not in order or len(set(order)) < 2):
        raise table.error("goals", sorted(goals), f"they are of an arm against {baseline!r}; order needs both")
    judged = _blamed(where, lambda: parse_bars(bars, goals))
    points = _points(name, parameters, sweep, table)
    workloads = {point: _blamed(where, partial(from_table, kind, given, where=f"{where}: parameters"))
                 for point, given in points.items()}
    made = {arm: _blamed(where, partial(_changed, arm, servers, over)) for arm in dict.fromkeys(order)}
    seen: Counter[str] = Counter()
    runs = []
    for arm in order:
        seen[arm] += 1
        for point, workload in workloads.items():
            runs.append(Run(
                cell=point, ramp=name if sweep else "", answers=answers, target=made[arm].target, turn=seen[arm],
                spec=CellSpec(cell=point, arm=arm, attempt=seen[arm], workload=workload, **spec), bars=judged,
                settings=made[arm].settings, pool_tokens=made[arm].pool_tokens))
    return runs


def _changed(arm: str, servers: Mapping[str, _MakeServer], over: Mapping[str, Any]) -> _Server:
    """The arm's server as the cell wants it. Raises ConfigError when that makes it another arm."""
    made = servers[arm](over)
    if made.target.tier != servers[arm]({}).target.tier:
        raise ConfigError(f"server {', '.join(sorted(over))} switches the tier of arm {arm}; an arm is the same in "
                          "every cell")
    return made


def _points(name: str, parameters: Mapping[str, Any], sweep: Mapping[str, Any],
            table: _Table) -> dict[str, dict[str, Any]]:
    """Cell name → its parameters: one, or one for each value of the swept parameter."""
    if not sweep:
        return {name: dict(parameters)}
    if len(sweep) != 1:
        raise table.error("sweep", dict(sweep), "sweep one parameter")
    ((swept, values),) = sweep.items()
    whole = isinstance(values, list) and values and all(isinstance(each, int | float) for each in values)
    if not whole or len(set(values)) < len(values):
        raise table.error(f"sweep {swept}", values, "give a list of different numbers")
    return {f"{name}-{value}": {**parameters, swept: value} for value in values}


def _blamed(where: str, make: Callable[[], T]) -> T:
    """What `make` gives; its errors say where they come from, once."""
    try:
        return make()
    except ConfigError as error:
        file = where.partition(": ")[0]
        text = str(error).removeprefix(f"{where}: ").removeprefix(f"{file}: ")
        raise ConfigError(f"{where}: {text}") from error
