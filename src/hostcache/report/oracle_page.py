"""An oracle's document → the tables of a terminal and the one-file page of a browser. Computes nothing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from html import escape
from typing import Any

from hostcache.report.charts import Axis, Line, Point, Rule, line_chart, line_legend
from hostcache.report.pages import commands, figure, headline, page
from hostcache.report.tables import Table, as_html, as_text, number, size

_TITLE = "hostcache lab oracle: what could any cache have held?"
_SERIES = {"lru": "off", "optimum": "on", "optimum without bypass": "host"}


def oracle_text(document: Mapping[str, Any]) -> str:
    return f"{_says(document)}\n{as_text(_tables(document))}\n"


def oracle_html(document: Mapping[str, Any]) -> str:
    most = document["max_hit_rate"]
    body = [f"<h1>{escape(_TITLE)}</h1>", f'<p class="lead">{escape(_says(document))}</p>',
            headline([(f"{most[name]:.4f}", f"at most, {text}") for name, text in _WAYS]),
            figure("Hit rate at every capacity", _chart(document), "In blocks. No policy, at no capacity, is above the "
                   "level line: each different block is computed at least once."),
            *(as_html(table) for table in _tables(document)),
            f"<h2>The command that makes this page</h2>{commands([shlex.join(document['command'])])}"]
    return page(_TITLE, "\n".join(body))


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
            (curve["policy"], *(_capacity(document, blocks) for blocks in curve["reaches"].values()))
            for curve in document["curves"]))
    tables = [bound, needed]
    if document["at"]:
        rows = tuple((f"{each['name']}, {_capacity(document, each['capacity_blocks'])}", policy,
                      *(f"{rates[name]:.6f}" for name, _ in _WAYS))
                     for each in document["at"] for policy, rates in each["hit_rate"].items())
        tables.append(Table(title="At the capacities given", rows=rows,
                            columns=("", "policy", *(text for _, text in _WAYS))))
    if document["two_tiers"]:
        tables.append(Table(title="Two tiers", columns=("", "device hits", "host hits", "hit rate"), rows=tuple(
            (each["policy"], number(each["device_hits"]), number(each["host_hits"]), f"{each['hit_rate']:.6f}")
            for each in document["two_tiers"])))
    return tables


def _capacity(document: Mapping[str, Any], blocks: int) -> str:
    tokens = blocks * document["block_tokens"]
    token_bytes = document["kv_bytes_per_token"]
    return f"{tokens:,} tokens" + ("" if token_bytes is None else f", {size(tokens * token_bytes)}")


def _chart(document: Mapping[str, Any]) -> str:
    block, most = document["block_tokens"], document["max_hit_rate"]["blocks"]
    lines = [Line(series="recomputed", level=True, points=(Point(
        x=1, y=most, label=f"the bound, {most:.6f}", short=f"{most:.4f}"),))]
    for curve in document["curves"]:
        points = [Point(x=blocks * block, y=rate, label=f"{curve['policy']}, {blocks * block:,} tokens: {rate:.6f}")
                  for blocks, rate in zip(curve["capacity_blocks"], curve["hit_rate"], strict=True) if blocks]
        lines.append(Line(series=_SERIES.get(curve["policy"].split(",")[0], "host"), points=tuple(points),
                          dashed="without" in curve["policy"]))
    marked = document["at"][:1]
    rule = Rule(x=marked[0]["capacity_tokens"], text=marked[0]["name"]) if marked else None
    drawing = line_chart(lines, name="Hit rate against capacity", description="One line a policy, and the bound.",
                         x=Axis(name="capacity in tokens", write=lambda value: f"{value:,.0f}"),
                         y=Axis(name="hit rate in blocks", write=lambda value: f"{value:.2f}"), log_x=True, rule=rule)
    names = ["the bound", *(curve["policy"] for curve in document["curves"])]
    return drawing + line_legend([(line.series, line.dashed, name) for line, name in zip(lines, names, strict=True)])
