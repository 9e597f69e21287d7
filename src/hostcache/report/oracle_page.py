"""An oracle's document → the tables of a terminal and the one-file page of a browser. Computes nothing."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from html import escape
from typing import Any

from hostcache.report.charts import Axis, Line, Point, Rule, line_chart, line_legend
from hostcache.report.pages import commands, figure, headline, page
from hostcache.report.tables import Table, as_html, as_text, number, size

_TITLE = "hostcache lab oracle: what could any cache have held?"
_SIZE = re.compile(r"(\d) ([KMGT]?i?B)\b")
_SERIES = {"lru": "off", "optimum": "on", "optimum without bypass": "on"}


def oracle_text(document: Mapping[str, Any]) -> str:
    return f"{_says(document)}\n{as_text(_tables(document))}\n"


def oracle_html(document: Mapping[str, Any]) -> str:
    most = document["max_hit_rate"]
    body = [f"<h1>{escape(_TITLE)}</h1>", f'<p class="lead">{escape(_says(document))}</p>',
            headline([*((f"{most[name]:.4f}", f"at most, {text}") for name, text in _WAYS), *_own_headline(document)]),
            figure("Hit rate at every capacity", _chart(document), _caption(document)),
            *(_SIZE.sub(r"\1&nbsp;\2", as_html(table)) for table in _tables(document)),
            f"<h2>The command that makes this page</h2>{commands([shlex.join(document['command'])])}"]
    return page(_TITLE, "\n".join(body))


def _own_headline(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    own = document["own_tier"]
    return [] if own is None else [(f"{own['hit_rate']['blocks']:.4f}", "hostcache's own tier, of blocks")]


def _caption(document: Mapping[str, Any]) -> str:
    token_bytes = document["kv_bytes_per_token"]
    sizes = ("--kv-bytes-per-token adds GiB." if token_bytes is None else f"A token is {token_bytes:,} bytes.")
    return ("No policy, at no capacity, is above the level line: each different block is computed at least once. "
            f"Points: what caches of the sizes given would have served. {sizes}")


_WAYS = (("blocks", "of blocks"), ("tokens", "of prompt tokens"), ("requests", "as a mean of requests"))


def _says(document: Mapping[str, Any]) -> str:
    most = document["max_hit_rate"]["blocks"]
    return (f"{document['trace']}: {document['requests']:,} requests name {document['references']:,} blocks of "
            f"{document['block_tokens']} tokens, {document['distinct']:,} of them different. No cache can hold more "
            f"than {most:.6f} of them.")


def _tables(document: Mapping[str, Any]) -> list[Table]:
    most = document["max_hit_rate"]
    bound = Table(title="The bound, counted three ways", columns=("", *(text for _, text in _WAYS)), rows=(
        ("an infinite cache", *(f"{most[name]:.6f}" for name, _ in _WAYS)),), note=(
            f"Floor of misses in blocks: {document['cold_miss_floor']:.6f}."))
    needed = Table(title="Capacity needed for a share of the bound", columns=(
        "policy", *(f"{float(share):.0%}" for share in document["curves"][0]["reaches"])), rows=tuple(
            (_named(curve["policy"]), *(_capacity(document, blocks) for blocks in curve["reaches"].values()))
            for curve in document["curves"]))
    tables = [bound, needed]
    if document["at"]:
        rows = tuple((f"{each['name']}, {_capacity(document, each['capacity_blocks'])}", _named(policy),
                      *(f"{rates[name]:.6f}" for name, _ in _WAYS))
                     for each in document["at"] for policy, rates in each["hit_rate"].items())
        tables.append(Table(title="At the capacities given", rows=rows,
                            columns=("", "policy", *(text for _, text in _WAYS))))
    if document.get("engine_blocks") is not None:
        tables.append(_engine_blocks(document["engine_blocks"]))
    if document["two_tiers"]:
        tables.append(_two_tiers(document))
    return tables


def _engine_blocks(found: Mapping[str, Any]) -> Table:
    rows = [("an infinite cache", "", number(found["max_hit_tokens"]), f"{found['max_hit_rate']:.6f}")]
    rows += [(f"LRU, {each['name']}", number(each["capacity_blocks"]), number(each["hit_tokens"]),
              f"{each['hit_rate']:.6f}") for each in found["lru"]]
    return Table(title=f"As an engine with blocks of {found['block_tokens']} tokens counts",
                 columns=("", "its blocks", "tokens held", "of prompt tokens"), rows=tuple(rows), note=(
                     f"Its prompts have {number(found['references'])} whole blocks, {number(found['distinct'])} of "
                     "them different. The last token of a prompt is always computed."))


def _named(policy: str) -> str:
    return policy.replace("lru", "LRU")


def _two_tiers(document: Mapping[str, Any]) -> Table:
    rows = [(_named(each["policy"]), number(each["device_hits"]), number(each["host_hits"]), f"{each['hit_rate']:.6f}")
            for each in document["two_tiers"]]
    note = ""
    if (own := document["own_tier"]) is not None:
        rows.append(("hostcache's own tier", number(own["device_hits"]), number(own["host_hits"]),
                     f"{own['hit_rate']['blocks']:.6f}"))
        missed = ", ".join(f"{number(pages)} {reason}" for reason, pages in own["missed"].items())
        note = (f"hostcache's own tier: its real code, driven over {number(own['requests'])} requests with "
                f"{number(own['references'])} pages of {own['page_tokens']} tokens, copies over at once, the device "
                f"touched {own['touch']}. At most {number(own['bound_hits'])} of these can be hits. Missed: {missed}.")
        if own["longer_than_device"]:
            note += f" {number(own['longer_than_device'])} prompts were longer than the device pool."
    return Table(title="Two tiers", columns=("", "device hits", "host hits", "hit rate"), rows=tuple(rows), note=note)


def _capacity(document: Mapping[str, Any], blocks: int) -> str:
    tokens = blocks * document["block_tokens"]
    token_bytes = document["kv_bytes_per_token"]
    return f"{tokens:,} tokens" + ("" if token_bytes is None else f", {size(tokens * token_bytes)}")


# The drawing --------------------------------------------------------------------------------------------------------

_DECADES = 4
"""Of capacity, up to the greatest drawn; further down nothing of use happens."""
_GIB = 1 << 30
_MOST_TICKS = 8


def _chart(document: Mapping[str, Any]) -> str:
    lines = [_bound(document), *_curves(document)]
    names = ["the bound", *(_named(curve["policy"]) for curve in document["curves"])]
    key = line_legend([(line.series, line.dashed, name) for line, name in zip(lines, names, strict=True)])
    rules = [Rule(x=each["capacity_tokens"], text=f"{name}, {_short(each['capacity_tokens'])}")
             for name, each in zip(("device pool", "pool and host"), document["at"], strict=False)
             if each["capacity_tokens"]]
    lines += _working_points(document)
    said = "; ".join(point.label for line in lines if line.marked for point in line.points)
    places = [point.x for line in lines if not line.level for point in line.points]
    written, bare = _ticks(min(places), max(places))
    ticks = tuple(sorted(written | bare))
    token_bytes = document["kv_bytes_per_token"]

    def write(tick: float) -> str:
        return _short(tick) if tick in written else ""

    rows = () if token_bytes is None else (
        ("GiB", tuple(_few(tick * token_bytes / _GIB) if tick in written else "" for tick in ticks)),)
    drawing = line_chart(lines, name="Hit rate against capacity", description=f"One line a policy. {said}.",
                         x=Axis(name="tokens" if rows else "capacity in tokens, logarithmic", write=write, ticks=ticks,
                                rows=rows),
                         y=Axis(name="hit rate in blocks", write=lambda value: f"{value:.2f}"), log_x=True, rules=rules)
    return key + drawing


def _bound(document: Mapping[str, Any]) -> Line:
    most = document["max_hit_rate"]["blocks"]
    return Line(series="recomputed", level=True, points=(
        Point(x=1, y=most, label=f"the bound, {most:.6f}", short=f"the bound {most:.4f}"),))


def _curves(document: Mapping[str, Any]) -> list[Line]:
    block = document["block_tokens"]
    blocks = [each for each in document["curves"][0]["capacity_blocks"] if each]
    marked = [each["capacity_blocks"] for each in document["at"] if each["capacity_blocks"]]
    least = min([min(max(blocks), document["distinct"]) / 10**_DECADES, *marked])
    return [Line(series=_SERIES.get(curve["policy"].split(",")[0], "on"), dashed="without" in curve["policy"],
                 marked=False, points=tuple(
                     Point(x=blocks * block, y=rate,
                           label=f"{_named(curve['policy'])}, {blocks * block:,} tokens: {rate:.6f}")
                     for blocks, rate in zip(curve["capacity_blocks"], curve["hit_rate"], strict=True)
                     if blocks and blocks >= least))
            for curve in document["curves"]]


def _working_points(document: Mapping[str, Any]) -> list[Line]:
    """What a cache of the sizes given would have served: the pool alone, and both tiers under each policy, at the
    capacity of both. Ours is drawn last, over the others."""
    device, *both = document["at"] or [None]
    found: list[tuple[str, bool, Point]] = []

    def mark(series: str, name: str, tokens: int, rate: float, *, hollow: bool) -> None:
        if tokens:
            found.append((series, hollow, Point(x=tokens, y=rate, short=f"{name} {rate:.4f}",
                                                label=f"{name} at {tokens:,} tokens: {rate:.6f}")))

    if device is not None:
        for policy, series in (("lru", "off"), ("optimum", "on")):
            rate = next(each for name, each in device["hit_rate"].items() if name.split(",")[0] == policy)
            mark(series, _named(policy), device["capacity_tokens"], rate["blocks"], hollow=True)
    for each in both:
        for tiers in document["two_tiers"]:
            mark("off", _named(tiers["policy"]), each["capacity_tokens"], tiers["hit_rate"], hollow=True)
        if (own := document["own_tier"]) is not None:
            mark("host", "hostcache", each["capacity_tokens"], own["hit_rate"]["blocks"], hollow=False)
    return [Line(series=series, dashed=hollow, points=(point,)) for series, hollow, point in found]


def _ticks(low: float, high: float) -> tuple[set[float], set[float]]:
    """(with a text, without): powers of ten, with 2 and 5 between where there are few; the other single digits."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    written, *fuller = ({float(step * 10**power) for power in powers for step in steps
                         if low / 1.25 <= step * 10**power <= high * 1.25} for steps in ((1,), (1, 2, 5), range(1, 10)))
    if len(written) < 3:
        written = fuller[0] or {low, high}
    while len(written) > _MOST_TICKS:
        written = set(sorted(written)[::2])
    return written, {tick for tick in fuller[1] - written if low <= tick <= high}


def _short(tokens: float) -> str:
    """`1.5M`."""
    tokens = float(f"{tokens:.3g}")
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= unit:
            return f"{_few(tokens / unit)}{name}"
    return f"{tokens:.0f}"


def _few(value: float) -> str:
    """Three digits or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
