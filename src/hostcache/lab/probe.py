"""A probe as it is written down: what is asked, what is measured, what each answer would mean. Runs and seals nothing.

A YAML file with exactly the keys of the records below. Branches are conditions over figures (`lab.branches`); the names
they may use follow from the arms (`figure_names`), so a probe that could never be decided is refused while it is still
a file.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from hostcache.errors import ConfigError, MissingDependency
from hostcache.lab.branches import Branch, check_branch
from hostcache.lab.knee import Goal
from hostcache.lab.lru import Touch
from hostcache.lab.replay import Load

VERSION = 1
SHIPPED = Path(__file__).with_name("probes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeArm:
    """One server. `control`: with nothing to be served from, so that it must read 0 of 0. `requests`: the first ones of
    the slice; None: all.

    `fresh`: each of its requests has a filler of its own: a control on an engine whose prefix cache is always on.
    `tier`: what the server must say of itself; None: not asked. `host_tokens`: of the tier, for the model.
    """

    name: str
    control: bool
    requests: int | None
    start: tuple[str, ...]
    env: Mapping[str, str]
    url: str | None
    fresh: bool
    tier: str | None
    host_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """`loads`: one, or a ladder of open ones. `block_tokens`: the trace's blocks are taken for full ones of that size;
    None: as they are."""

    name: str
    hypothesis: str
    requests: int
    block_tokens: int | None
    trace_digest: str | None
    send: str
    words: int
    engine_block_tokens: int
    capacity_tokens: int
    touch: Touch
    max_tokens: int
    loads: tuple[Load, ...]
    goal: Goal | None
    arms: tuple[ProbeArm, ...]
    pairs: int
    budget_minutes: float
    branches: tuple[Branch, ...]
    does_not_prove: tuple[str, ...]
    prior_art: tuple[str, ...]
    retracts: tuple[Mapping[str, str], ...]
    cost_per_hour: float
    currency: str

    @property
    def measured(self) -> tuple[ProbeArm, ...]:
        return tuple(arm for arm in self.arms if not arm.control)

    def short(self, arm: ProbeArm) -> bool:
        """It has fewer requests than the trace's slice: run once, at the first load, and compared with nothing."""
        return arm.requests not in (None, self.requests)

    @property
    def swept(self) -> tuple[ProbeArm, ...]:
        """The arms of every pair, with the whole ladder."""
        return tuple(arm for arm in self.arms if not self.short(arm))

    @property
    def ladder(self) -> bool:
        return len(self.loads) > 1

    @property
    def runs(self) -> tuple[tuple[ProbeArm, int, int], ...]:
        """Arm, pair and point of the ladder, in the order in which they are run: short arms first, once; then the
        others, in turned order with every pair."""
        swept = [(arm, pair) for pair in range(self.pairs) for arm in (self.swept if pair % 2 == 0 else
                                                                       self.swept[::-1])]
        return (*((arm, 0, 0) for arm in self.arms if self.short(arm)),
                *((arm, pair, point) for arm, pair in swept for point in range(len(self.loads))))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def figure_names(probe: Probe) -> tuple[str, ...]:
    """Every figure that a branch may name."""
    names = ["bound", "possible", "lru", "optimum"]
    for arm in probe.arms:
        names += [f"{arm.name}_{what}" for what in ARM_FIGURES]
        if not arm.control:
            names += [f"{arm.name}_{what}" for what in MODEL_FIGURES]
        if probe.ladder and not probe.short(arm):
            names += [f"{arm.name}_{what}" for what in KNEE_FIGURES]
    names += [f"{a.name}_over_{b.name}" for a in probe.swept for b in probe.swept if a is not b]
    return tuple(names)


ARM_FIGURES = ("prompt_tokens", "cached_tokens", "device_tokens", "host_tokens", "hit_rate", "device_hit_rate",
               "requests", "failed", "seconds", "requests_per_s")
MODEL_FIGURES = ("model", "gap", "unexplained_tokens")
KNEE_FIGURES = ("goodput_knee", "throughput_knee")


def read_probe(path: Path) -> Probe:
    """Raises ConfigError naming the key, MissingDependency without PyYAML. A name without a slash that is no file is
    looked for among the probes that are shipped."""
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise MissingDependency("probe files are YAML; pip install 'hostcache[lab]'") from None
    if not path.exists() and len(path.parts) == 1 and (shipped := SHIPPED / f"{path.stem}.yaml").exists():
        path = shipped
    try:
        text = path.read_text(encoding="utf-8")
        given = yaml.safe_load(text)
        twice = _twice(yaml.compose(text, Loader=yaml.SafeLoader))
    except OSError as error:
        known = ", ".join(sorted(each.stem for each in SHIPPED.glob("*.yaml")))
        raise ConfigError(f"probe {path} cannot be read: {error.strerror}; shipped are {known}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"probe {path} is no YAML: {' '.join(str(error).split())[:200]}") from None
    if twice is not None:
        raise ConfigError(f"{path.name}: the key {twice.value!r} of line {twice.start_mark.line + 1} stands there "
                          "already; YAML would keep the last one alone")
    return probe_of(given, where=path.name)


def _twice(root: Any) -> Any:
    """Of a tree of YAML nodes the first key that stands twice in one mapping, or None."""
    nodes, seen = [root], set()
    while nodes:
        node = nodes.pop()
        if id(node) in seen or not isinstance(getattr(node, "value", None), list):
            continue
        seen.add(id(node))
        keys = set()
        for each in node.value:
            if not isinstance(each, tuple):
                nodes.append(each)
                continue
            if isinstance(each[0].value, str):
                if each[0].value in keys:
                    return each[0]
                keys.add(each[0].value)
            nodes.append(each[1])
    return None


def probe_of(given: Any, *, where: str) -> Probe:
    """Of the file's content. Raises ConfigError."""
    top = _Section(given, where)
    if (version := top.whole("probe", low=0)) != VERSION:
        raise ConfigError(f"{where}: probe is version {version}; version {VERSION} is known")
    trace, bridge, engine = top.section("trace"), top.section("bridge"), top.section("engine")
    cost = top.section("cost", optional=True)
    loads, goal = _loads(top.section("load", optional=True))
    arms = top.mapping("arms")
    probe = Probe(
        name=top.text("name"), hypothesis=top.text("hypothesis"), requests=trace.whole("requests"),
        block_tokens=trace.whole("block_tokens", optional=True) or None,
        trace_digest=trace.text("digest", optional=True) or None,
        send=bridge.choice("send", ("ids", "text"), "ids"), words=bridge.whole("words", optional=True) or 2048,
        engine_block_tokens=engine.whole("block_tokens"), capacity_tokens=engine.whole("capacity_tokens"),
        touch=engine.choice("touch", get_args(Touch), "tail-first"),  # type: ignore[arg-type]  # one of Touch's
        max_tokens=engine.whole("max_tokens"), loads=loads, goal=goal,
        arms=tuple(_arm(name, _Section(body, f"{where}: arms.{name}")) for name, body in arms.items()),
        pairs=top.whole("pairs", optional=True) or 1, budget_minutes=top.number("budget_minutes"),
        branches=tuple(Branch(name=str(name), when=str(when)) for name, when in top.mapping("branches").items()),
        does_not_prove=top.texts("does_not_prove"), prior_art=top.texts("prior_art"),
        retracts=_retracts(top.sections("retracts")), cost_per_hour=cost.number("per_hour", optional=True),
        currency=cost.text("currency", optional=True) or "USD")
    for section in (top, trace, bridge, engine, cost):
        section.done()
    _check(probe, where)
    return probe


def _arm(name: str, body: _Section) -> ProbeArm:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(f"{body.where}: the name of an arm is lower-case letters, digits and _, since figures carry "
                          "it")
    start = body.texts("start")
    url = body.text("url", optional=True) or None
    if (url is None) == (not start):
        raise ConfigError(f"{body.where} has {'both' if start else 'neither'} a url and a start command; give one")
    if start and not any("{port}" in word for word in start):
        raise ConfigError(f"{body.where}: start has no {{port}}; say where the port goes")
    env = body.environment("env")
    if env and url is not None:
        raise ConfigError(f"{body.where} has a url and an env; a server that runs already keeps its own")
    arm = ProbeArm(name=name, control=body.flag("control"), requests=body.whole("requests", optional=True) or None,
                   start=start, env=env, url=url, fresh=body.flag("fresh"),
                   tier=body.choice("tier", ("on", "off"), "") or None,
                   host_tokens=body.whole("host_tokens", low=0, optional=True))
    body.done()
    return arm


def _loads(body: _Section) -> tuple[tuple[Load, ...], Goal | None]:
    at_once = body.whole("at_once", optional=True) or None
    factors = body.numbers("rate_factors")
    rest = {"drain_s": body.number("drain_s", optional=True) or Load().drain_s,
            "processes": body.whole("processes", optional=True) or 1}
    goal = body.section("goal", optional=True)
    asked = Goal(ttft_s=goal.number("ttft_s", optional=True) or None,
                 tpot_s=goal.number("tpot_s", optional=True) or None, share=goal.number("share", optional=True) or 0.9)
    goal.done()
    body.done()
    if factors and at_once:
        raise ConfigError(f"{body.where} is closed (at_once) and open (rate_factors); give one of the two")
    if not factors:
        if goal.given:
            raise ConfigError(f"{goal.where} is of a ladder of open loads; give rate_factors, or no goal")
        return (Load(at_once=at_once or 1, **rest),), None  # type: ignore[arg-type]
    if len(set(factors)) < len(factors):
        raise ConfigError(f"{body.where}: rate_factors are {factors}; a ladder is of different loads")
    return tuple(Load(at_once=None, rate_factor=each, **rest) for each in factors), asked  # type: ignore[arg-type]


def _retracts(given: Sequence[_Section]) -> tuple[Mapping[str, str], ...]:
    found = []
    for each in given:
        found.append({"certificate": each.text("certificate"), "why": each.text("why")})
        each.done()
    return tuple(found)


def _check(probe: Probe, where: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", probe.name):
        raise ConfigError(f"{where}: name is {probe.name[:60]!r}; letters, digits, . _ and - are needed, since a "
                          "folder carries it")
    if probe.budget_minutes <= 0:
        raise ConfigError(f"{where}: budget_minutes is {probe.budget_minutes:g}; give more than 0")
    if not probe.measured:
        raise ConfigError(f"{where}: every arm is a control; nothing would be measured")
    if probe.ladder and probe.requests < 2:
        raise ConfigError(f"{where}: requests is {probe.requests}; a ladder's loads are rates, which take 2 at least")
    if not probe.branches:
        raise ConfigError(f"{where}: there are no branches; say what each outcome would mean")
    for arm in probe.arms:
        if arm.requests is not None and arm.requests > probe.requests:
            raise ConfigError(f"{where}: arm {arm.name} has {arm.requests} requests, the trace is cut to "
                              f"{probe.requests}")
    names = figure_names(probe)
    for branch in probe.branches:
        check_branch(branch, names)


class _Section:
    """A mapping of which every key must be taken."""

    def __init__(self, given: Any, where: str) -> None:
        if not isinstance(given, dict):
            raise ConfigError(f"{where} is {str(given)[:40]!r}; keys and values are needed")
        self.where = where
        self.given = bool(given)
        self._given = given
        self._taken: set[Any] = set()

    def done(self) -> None:
        if strange := [key for key in self._given if key not in self._taken]:
            raise ConfigError(f"{self.where}: {strange[0]!r} is not known; known are "
                              f"{', '.join(sorted(self._taken))}")

    def section(self, key: str, *, optional: bool = False) -> _Section:
        return _Section(self._take(key, {} if optional else None), f"{self.where}: {key}")

    def sections(self, key: str) -> list[_Section]:
        return [_Section(each, f"{self.where}: {key}[{number}]") for number, each in enumerate(self._list(key))]

    def mapping(self, key: str, *, optional: bool = False) -> dict[str, Any]:
        value = self._take(key, {} if optional else None)
        if not isinstance(value, dict):
            raise self._wrong(key, value, "names with their values")
        return {str(name): each for name, each in value.items()}

    def environment(self, key: str) -> dict[str, str]:
        values = self.mapping(key, optional=True)
        if wrong := [each for each in values.values() if type(each) not in (str, int, float)]:
            raise self._wrong(key, wrong[0], "values that are texts (on, off, yes and no in quotes)")
        return {name: str(each) for name, each in values.items()}

    def text(self, key: str, *, optional: bool = False) -> str:
        value = self._take(key, "" if optional else None)
        if not isinstance(value, str) or not (value.strip() or optional):
            raise self._wrong(key, value, "a text")
        return " ".join(value.split())

    def texts(self, key: str) -> tuple[str, ...]:
        values = self._list(key)
        if wrong := [each for each in values if type(each) not in (str, int, float)]:
            raise self._wrong(key, wrong[0], "texts (on, off, yes and no in quotes)")
        return tuple(each if isinstance(each, str) else str(each) for each in values)

    def whole(self, key: str, *, low: int = 1, optional: bool = False) -> int:
        value = self._take(key, 0 if optional else None)
        if key in self._given and (type(value) is not int or not low <= value < 2**53):
            raise self._wrong(key, value, f"a whole number of at least {low}")
        return int(value)

    def number(self, key: str, *, optional: bool = False) -> float:
        value = self._take(key, 0.0 if optional else None)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise self._wrong(key, value, "a number of at least 0")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        values = self._list(key)
        if wrong := [each for each in values if type(each) not in (int, float)]:
            raise self._wrong(key, wrong[0], "numbers")
        return tuple(float(each) for each in values)

    def flag(self, key: str) -> bool:
        value = self._take(key, False)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def choice(self, key: str, known: Sequence[str], default: str) -> str:
        value = self._take(key, default)
        if isinstance(value, bool):  # YAML 1.1 reads on and off so
            value = "on" if value else "off"
        if key in self._given and value not in known:
            raise self._wrong(key, value, f"one of {', '.join(known)}")
        return str(value)

    def _list(self, key: str) -> list[Any]:
        value = self._take(key, [])
        if not isinstance(value, list):
            raise self._wrong(key, value, "a list")
        return value

    def _take(self, key: str, default: Any) -> Any:
        self._taken.add(key)
        if key not in self._given and default is None:
            raise ConfigError(f"{self.where}: {key} is missing")
        return self._given.get(key, default)

    def _wrong(self, key: str, value: Any, wanted: str) -> ConfigError:
        return ConfigError(f"{self.where}: {key} is {str(value)[:60]!r}; {wanted} is needed")
