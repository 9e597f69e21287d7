"""A plan's record → the table of a terminal and the one-file page of a browser. Decides nothing: what pays, and until
which size, is in the record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from hostcache.records import PlanRecord, PlanRow
from hostcache.report.charts import Axis, Line, Point, Rule, line_chart, line_legend
from hostcache.report.pages import bullets, commands, figure, headline, page
from hostcache.report.tables import MISSING, Table, as_html, as_text, number, share, size

_TITLE = "hostcache sim plan: is a host-RAM tier worth its memory here?"


def plan_text(record: PlanRecord) -> str:
    """What the command prints: the verdict first."""
    limits = "\nNot modelled\n" + "\n".join(f"  {item}" for item in record.not_modelled) + "\n"
    return (f"{record.verdict}\n{record.question}\n{as_text([_served_table(record), _tokens_table(record)])}"
            f"{limits if record.not_modelled else ''}\n{_what_ran(record)}\n")


def plan_html(record: PlanRecord) -> str:
    """The whole page."""
    given = Table(title="What was given", columns=("", "value"), rows=tuple(_given(record)))
    body = [
        f"<h1>{escape(_TITLE)}</h1>", f'<p class="lead">{escape(record.verdict)}</p>',
        f"<p>{escape(record.question)}</p>", _headline(record), *_charts(record), "<h2>Figures</h2>",
        as_html(_served_table(record)), as_html(_tokens_table(record)), as_html(given),
        *([f"<h2>What is not modelled</h2>{bullets(record.not_modelled)}"] if record.not_modelled else []),
        f"<h2>The commands that make this page</h2>{commands(record.commands)}",
        f'<p class="note">{escape(_what_ran(record))}</p>',
    ]
    return page(_TITLE, "\n".join(body))


def _what_ran(record: PlanRecord) -> str:
    simulated = "" if record.simulated_s is None else f", {record.simulated_s / 3600:,.2f} h of traffic a row"
    took = "" if record.wall_s is None else f", in {record.wall_s:.1f} s"
    return f"hostcache {record.hostcache_version}, seed {record.seed}{simulated}{took}. Simulated, not measured."


def _given(record: PlanRecord) -> list[tuple[str, str]]:
    values = {
        "pool": f"{record.pool_tokens:,} tokens", "page": f"{record.page_tokens:,} tokens",
        "KV": f"{record.kv_bytes_per_token:,} bytes per token", "prefill": f"{record.prefill_tok_s:,.0f} tokens/s",
        "copy bandwidth": f"{record.copy_bytes_per_s / 1e9:,.2f} GB/s"}
    if record.price_per_mtok is not None:
        values["price"] = f"{record.price_per_mtok:g} per million tokens"
    return [*values.items(), *((key, str(value)) for key, value in {**record.workload, **record.device}.items())]


# --- tables ---------------------------------------------------------------------------------------------------------


def _served_table(record: PlanRecord) -> Table:
    def seconds(value: float | None) -> str:
        return number(value, 2)

    rows = tuple(
        (row.label, number(row.turns), number(row.turns_per_hour, 1), seconds(row.avg_s), seconds(row.p50_s),
         seconds(row.p95_s), seconds(row.ttft_p50_s), seconds(row.ttft_p95_s), number(row.refused), _pays(row))
        for row in record.rows)
    return Table(title="What was served", columns=(
        "host memory", "turns", "an hour", "avg s", "p50 s", "p95 s", "TTFT p50 s", "TTFT p95 s", "refused", "pays"),
        rows=rows, note="Pays: worth having over the row above it.")


def _tokens_table(record: PlanRecord) -> Table:
    priced = record.price_per_mtok is not None
    rows = tuple(
        (row.label, share(row.hit_share), number(row.device_tokens), number(row.host_tokens),
         number(row.recomputed_tokens), share(_recomputed_share(row)), *((number(row.price, 2),) if priced else ()),
         size(row.written_bytes), size(row.restored_bytes)) for row in record.rows)
    note = ("" if record.price_per_mtok is None
            else f"Price of the recomputed tokens at {record.price_per_mtok:g} per million.")
    return Table(title="Where the prompt tokens came from", columns=(
        "host memory", "hit share", "device", "host", "recomputed", "share", *(("price",) if priced else ()),
        "written back", "restored"), rows=rows, note=note)


def _pays(row: PlanRow) -> str:
    return MISSING if row.arm == "off" else "yes" if row.pays else "no"


def _recomputed_share(row: PlanRow) -> float | None:
    return row.recomputed_tokens / row.prompt_tokens if row.prompt_tokens else None


# --- the page -------------------------------------------------------------------------------------------------------


def _off(record: PlanRecord) -> PlanRow | None:
    return next((row for row in record.rows if row.arm == "off"), None)


def _ladder(record: PlanRecord) -> list[PlanRow]:
    return [row for row in record.rows if row.arm == "on" and row.host_bytes > 0]


def _headline(record: PlanRecord) -> str:
    off, on = _off(record), _ladder(record)
    if off is None or not on:
        return ""
    knee = next((row for row in on if row.host_bytes == record.pays_until_bytes), None)
    shown = knee or on[-1]
    cells = [(_short_size(knee.host_bytes) if knee else "none", "of host memory pays"),
             (f"{number(off.turns)} → {number(shown.turns)}", f"turns, {off.label} → {shown.label}"),
             (f"{share(_recomputed_share(off))} → {share(_recomputed_share(shown))}", "of prompt tokens recomputed")]
    if off.price is not None and shown.price is not None:
        cells.append((f"{number(off.price, 2)} → {number(shown.price, 2)}", "price of the recomputed tokens"))
    command = f"<p><code>{escape(record.commands[0])}</code></p>" if record.commands else ""
    return headline(cells) + command


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """One chart: what is drawn of a row, and how it is written on the axis and beside a point."""

    title: str
    series: str
    value: Callable[[PlanRow], float | None]
    write: Callable[[float], str]
    axis: Axis
    y_most: float | None
    caption: str


def _percent(value: float) -> str:
    return share(value)


def _short_size(count: float) -> str:
    return size(count).replace(".0 ", " ")


_TURNS = _Curve(
    title="Turns served", series="on", value=lambda row: float(row.turns), write=number, y_most=None,
    axis=Axis(name="turns", write=number), caption="In the same simulated time. More is better.")
_TIME = _Curve(
    title="Average time per turn", series="on", value=lambda row: row.avg_s,
    write=lambda value: number(value, 2, " s"), y_most=None,
    axis=Axis(name="seconds", write=lambda value: f"{value:g}"),
    caption="Every host size served the same turns. Shorter is better.")
_RECOMPUTED = _Curve(
    title="Prompt tokens recomputed", series="recomputed", value=_recomputed_share, write=_percent, y_most=1.0,
    axis=Axis(name="share of prompt tokens", write=lambda value: f"{100 * value:g} %",
              ticks=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
    caption="Compute that somebody pays for; new tokens, which no cache could have, are in it.")


def _charts(record: PlanRecord) -> list[str]:
    on = _ladder(record)
    same = len({row.turns for row in record.rows}) == 1 and all(row.avg_s is not None for row in record.rows)
    return [drawn for curve in (_TIME if same else _TURNS, _RECOMPUTED) if (drawn := _chart(record, on, curve))]


def _chart(record: PlanRecord, on: Sequence[PlanRow], curve: _Curve) -> str:
    points = [Point(x=float(row.host_bytes), y=value, short=curve.write(value),
                    label=f"{row.label}: {curve.write(value)}")
              for row in on if (value := curve.value(row)) is not None]
    if not points:
        return ""
    lines = [Line(series=curve.series, points=tuple(points))]
    entries = [(curve.series, False, "with the tier")]
    off = _off(record)
    without = curve.value(off) if off else None
    if without is not None:
        lines.append(Line(series="off", dashed=True, level=True, points=(
            Point(x=points[0].x, y=without, short=f"without the tier {curve.write(without)}",
                  label=f"without the tier: {curve.write(without)}"),)))
        entries.append(("off", True, "without the tier"))
    knee = record.pays_until_bytes
    rule = Rule(x=float(knee), text="pays up to here") if knee and any(p.x == knee for p in points) else None
    said = "; ".join(point.label for line in lines for point in line.points)
    drawing = line_chart(
        lines, name=curve.title, description=said, y=curve.axis, y_most=curve.y_most, log_x=True, rule=rule,
        x=Axis(name="host memory, logarithmic", write=_short_size, ticks=tuple(point.x for point in points)))
    return figure(curve.title, line_legend(entries) + drawing, curve.caption)
