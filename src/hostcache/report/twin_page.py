"""A twin's record → the tables of a terminal and the one-file page of a browser. Judges nothing and simulates nothing:
every verdict is in the record, only the order and the words are made here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from hostcache.records import Arm, TwinRecord, TwinRole, TwinRow
from hostcache.report.charts import Axis, Line, Point, line_chart, line_legend
from hostcache.report.pages import bullets, commands, figure, headline, page
from hostcache.report.tables import MISSING, Table, as_html, as_text, number, share

_TITLE = "hostcache sim twin: the published fleet beside its simulation"

_GROUPS: tuple[tuple[TwinRole, str, str], ...] = (
    ("predicted", "Predicted: no coefficient was chosen by these",
     "The only group that is judged. Errors of shares are in points."),
    ("fitted", "Fitted: the coefficients were chosen by these", "Shown with the same tolerances, not judged."),
    ("informative", "Informative: without a tolerance", "Published, simulated, not judged."),
    ("not claimed", "Not claimed", "The twin does not say that it reproduces these."),
)
_WORDS = {
    "turns": "turns served", "avg_s": "average turn", "hit_share": "hit share", "ttft_p50": "TTFT p50",
    "ttft_p95": "TTFT p95", "decode_p50": "decode p50", "restore_mean_ms": "restore mean", "restored_s": "restored",
    "cold_s": "cold", "turns_on_over_off": "turns, on ÷ off", "avg_s_off_over_on": "average turn, off ÷ on",
}
_UNITS = {"": "", "s": " s", "ms": " ms", "tok/s": " tok/s", "bytes": " B", "times": "×"}


def twin_text(record: TwinRecord) -> str:
    """What the command prints. The verdict is its last line."""
    lists = [f"\n{title}\n" + "\n".join(f"  {item}" for item in items) + "\n"
             for title, items in (("Not modelled", record.not_modelled), ("Unexplained", record.unexplained)) if items]
    tables = as_text([*_row_tables(record), *_coefficient_tables(record)])
    return f"{_what_ran(record)}\n{tables}{''.join(lists)}{_misses_text(record)}\n{_verdict(record)}\n"


def twin_html(record: TwinRecord) -> str:
    """The whole page."""
    misses = _misses(record)
    body = [
        f"<h1>{escape(_TITLE)}</h1>", f'<p class="lead">{escape(_verdict(record))}</p>', _headline(record),
        *([f"<h2>What missed, and why</h2>{bullets(misses)}"] if misses else []), *_charts(record),
        "<h2>All figures</h2>", *(as_html(table) for table in _row_tables(record)),
        "<h2>The device model</h2>", *(as_html(table) for table in _coefficient_tables(record)),
        *([f"<h2>What is not modelled</h2>{bullets(record.not_modelled)}"] if record.not_modelled else []),
        *([f"<h2>What is not explained</h2>{bullets(record.unexplained)}"] if record.unexplained else []),
        f"<h2>The commands that make this page</h2>{commands(record.commands)}",
        f'<p class="note">{escape(_what_ran(record))}</p>',
    ]
    return page(_TITLE, "\n".join(body))


# --- words ----------------------------------------------------------------------------------------------------------


def _what_ran(record: TwinRecord) -> str:
    took = "" if record.wall_s is None else f" in {record.wall_s:.1f} s"
    seeds = ", ".join(str(seed) for seed in record.seeds)
    return (f"hostcache {record.hostcache_version}, mean of {len(record.seeds)} seeds ({seeds}){took}. "
            f"Published: {record.source}.")


def _verdict(record: TwinRecord) -> str:
    bars = record.summary
    held = bars.must_hold - len(bars.must_hold_misses)
    text = (f"{bars.within} of {bars.judged} predicted figures are within tolerance "
            f"({share(bars.within / bars.judged if bars.judged else None)}; needed {share(bars.needed_share, 0)}), "
            f"and {held} of the {bars.must_hold} that may not miss hold")
    if len(record.seeds) < bars.seeds_needed:
        return f"Not judged: {text}, but over {len(record.seeds)} seeds where {bars.seeds_needed} are needed."
    return f"{'Passed' if bars.passed else 'MISSED'}: {text}."


def _misses(record: TwinRecord) -> list[str]:
    """Predicted figures that missed, in the order of the figures, those that may not miss marked."""
    by_name = {row.figure: row for row in record.rows}
    found = []
    for name in record.summary.misses:
        row = by_name.get(name)
        said = (f"{_name(row)}: {_value(row, row.simulated)} against {_value(row, row.published)} ({_error(row)}, "
                f"allowed {row.tolerance}). {_sentence(row.cause)}" if row else f"{name}: not simulated.")
        found.append(said + (" May not miss." if name in record.summary.must_hold_misses else ""))
    return found


def _misses_text(record: TwinRecord) -> str:
    misses = _misses(record)
    return "\nMissed\n" + "\n".join(f"  {miss}" for miss in misses) + "\n" if misses else ""


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".") if text else "Unexplained."


def _name(row: TwinRow) -> str:
    return f"{row.row}, {_WORDS.get(row.quantity, row.quantity)}"


def _value(row: TwinRow, value: float | None) -> str:
    if row.unit == "share":
        return share(value)
    return number(value, 0 if value is None else _digits(row, value), _UNITS[row.unit])


def _digits(row: TwinRow, value: float) -> int:
    if row.unit == "bytes" or (row.unit == "" and value.is_integer()):
        return 0
    if row.unit in ("", "ms", "tok/s"):
        return 1
    return 1 if abs(value) >= 100 else 3 if row.quantity == "restored_s" else 2


def _error(row: TwinRow) -> str:
    if row.simulated is None:
        return MISSING
    if row.unit == "share":
        return f"{100 * (row.simulated - row.published):+.1f} pt"
    return f"{row.simulated - row.published:+.1f}" if row.rel_error is None else f"{100 * row.rel_error:+.1f} %"


def _sd(row: TwinRow) -> str:
    if row.sd is None:
        return MISSING
    if row.unit == "share":
        return f"{100 * row.sd:.1f} pt"
    return number(row.sd, 0 if row.unit == "bytes" else max(1, _digits(row, row.sd)))


# --- tables ---------------------------------------------------------------------------------------------------------


def _row_tables(record: TwinRecord) -> list[Table]:
    return [_row_table(title, note, rows) for role, title, note in _GROUPS
            if (rows := [row for row in record.rows if row.role == role])]


def _row_table(title: str, note: str, rows: Sequence[TwinRow]) -> Table:
    verdicts = {True: "ok", False: "MISS", None: MISSING}
    judged = any(row.tolerance is not None for row in rows)
    return Table(
        title=title, note=note,
        columns=("figure", "published", "simulated", "sd", "error", *(("tolerance", "verdict") if judged else ())),
        rows=tuple((_name(row), _value(row, row.published), _value(row, row.simulated), _sd(row), _error(row),
                    *((row.tolerance or MISSING, verdicts[row.within]) if judged else ())) for row in rows))


def _coefficient_tables(record: TwinRecord) -> list[Table]:
    if not record.coefficients:
        return []
    return [Table(
        title="Coefficients", columns=("coefficient", "value", "unit", "", "source"),
        rows=tuple((each.name, f"{each.value:.6g}", each.unit, "fitted" if each.fitted else "read off", each.source)
                   for each in record.coefficients),
        note="Fitted: chosen by the fitted rows alone. Read off: a published constant or table.")]


# --- the page -------------------------------------------------------------------------------------------------------


def _headline(record: TwinRecord) -> str:
    bars = record.summary
    by_name = {(row.row, row.quantity): row for row in record.rows}
    cells = [(f"{bars.within} of {bars.judged}", "predicted figures within tolerance")]
    for quantity, text in (("turns_on_over_off", "the turns at 32 agents"),
                           ("avg_s_off_over_on", "shorter turns at 32 agents")):
        row = by_name.get(("ratio K=32", quantity))
        if row is not None and row.simulated is not None:
            cells.append((number(row.simulated, 1, "×"), f"{text} ({number(row.published, 1, '×')} published)"))
    command = f"<p><code>{escape(record.commands[0])}</code></p>" if record.commands else ""
    return headline(cells) + command


_ARMS: tuple[Arm, ...] = ("off", "on")


def _charts(record: TwinRecord) -> list[str]:
    """The two published curves with the simulated ones over them."""
    keys = line_legend((("off", True, "tier off, published"), ("off", False, "tier off, simulated"),
                        ("on", True, "tier on, published"), ("on", False, "tier on, simulated")))
    drawn = []
    for quantity, title, y, most, caption in (
            ("avg_s", "Average time per turn", Axis(name="seconds", write=lambda value: f"{value:g}"), None,
             "Send to last byte of the attempt that was served, over the turns started in the window. "
             "Shorter is better."),
            ("hit_share", "Share of prompt tokens from cache",
             Axis(name="% of prompt tokens", write=lambda value: f"{100 * value:g}",
                  ticks=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0)), 1.0,
             "Device and host together. What is missing to 100 % was computed again.")):
        by_arm = {arm: sorted((row for row in record.rows if row.agents and (row.quantity, row.arm) == (quantity, arm)),
                              key=lambda row: row.agents or 0) for arm in _ARMS}
        lines = [line for arm, rows in by_arm.items() for line in _curve(arm, rows)]
        if lines:
            said = "; ".join(point.label for line in lines for point in line.points)
            drawing = line_chart(lines, name=title, description=said, x=_agents_axis(by_arm), y=y, y_most=most)
            drawn.append(figure(title, keys + drawing,
                                f"{caption} Under the axis: published | simulated. The points named fitted were used "
                                "to choose coefficients; the others are predictions."))
    return drawn


def _curve(arm: Arm, rows: Sequence[TwinRow]) -> list[Line]:
    """The published line of one arm and the simulated one."""
    published = tuple(Point(x=float(row.agents or 0), y=row.published,
                            label=f"{row.row}, published {_value(row, row.published)}") for row in rows)
    simulated = tuple(Point(x=float(row.agents or 0), y=row.simulated,
                            label=f"{row.row}, simulated {_value(row, row.simulated)}")
                      for row in rows if row.simulated is not None)
    lines = [Line(series=arm, points=published, dashed=True), Line(series=arm, points=simulated)]
    return [line for line in lines if line.points]


def _agents_axis(by_arm: Mapping[Arm, Sequence[TwinRow]]) -> Axis:
    """One tick a number of agents, with its role where it was fitted, and both numbers of both arms under it."""
    counts = sorted({row.agents or 0 for rows in by_arm.values() for row in rows})
    fitted = {row.agents for rows in by_arm.values() for row in rows if row.role == "fitted"}
    texts = {arm: {row.agents: f"{_short(row, row.published)} | {_short(row, row.simulated)}" for row in rows}
             for arm, rows in by_arm.items()}
    return Axis(
        name="agents", ticks=tuple(float(count) for count in counts),
        write=lambda value: f"{value:g} (fitted)" if int(value) in fitted else f"{value:g}",
        rows=tuple((f"tier {arm}", tuple(texts[arm].get(count, MISSING) for count in counts)) for arm in by_arm))


def _short(row: TwinRow, value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{100 * value:.1f}" if row.unit == "share" else f"{value:.1f}"
