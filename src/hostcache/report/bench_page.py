"""The harness's document → the tables of a terminal, the Markdown of a repository, the one-file page of a browser.

Computes nothing but bins for drawings. The page loads nothing: styles, drawings and the few lines of script that turn
its sections into tabs are inside it; without the script every section is simply shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from hostcache.report.bench_tables import (
    Document,
    allowed,
    answers_table,
    cells_table,
    comparison_table,
    counters_tables,
    environment_tables,
    formulas_table,
    label,
    loads_table,
    readings_table,
    refusals_table,
    rungs_table,
    seconds,
    times,
    unprimed_table,
    verdicts_table,
)
from hostcache.report.charts import (
    Axis,
    Bar,
    Column,
    Group,
    Line,
    Part,
    Point,
    Rule,
    column_chart,
    horizontal_bars,
    legend,
    line_chart,
    line_legend,
    scatter_chart,
)
from hostcache.report.pages import bullets, commands, figure, headline, page
from hostcache.report.published_tables import Lookup, published_tables, ramp_points, ramp_ratios
from hostcache.report.tables import Table, as_html, as_markdown, as_text, number, share

_TITLE = "hostcache bench: what the servers did"
MARKS_MOST = 600
"""Dots of one arm in one drawing; of more, every n-th is drawn and the slowest all the same."""
_SLOWEST = 40


def bench_text(document: Document, published: Document | None = None) -> str:
    """What the command prints: no table of sentences. The summary is its last line."""
    beside_it = published_tables(document, published)[1:] if published else []
    compared = _some(comparison_table(document), readings_table(document, brief=True), unprimed_table(document))
    tables = as_text([cells_table(document), *_alone(document), *compared, *beside_it,
                      *_some(verdicts_table(document, brief=True))])
    refused = refusals_table(document)
    lines = [f"{row[0]}: {row[3]}" for row in refused.rows] if refused else []
    return f"{tables}\n" + "".join(f"{line}\n" for line in lines) + f"{summary_line(document)}\n"


def bench_markdown(document: Document, published: Document | None = None) -> str:
    beside_it = published_tables(document, published) if published else []
    parts = [f"# {_TITLE}\n\n{summary_line(document)}\n"]
    for heading, tables in (
            ("What ran", _some(cells_table(document), refusals_table(document))),
            ("Each run by itself", _alone(document)), ("Arms beside each other", _compared(document)),
            ("Beside the published benchmark", beside_it),
            ("Verdicts", _judged(document)), ("Counters", counters_tables(document)),
            ("Environment", [*environment_tables(document), formulas_table(document)])):
        if tables:
            parts.append(f"## {heading}\n\n{as_markdown(tables)}")
    ran = "\n".join(f"    {line}" for line in _commands(document))
    return "\n".join([*parts, f"## Commands\n\n{ran}\n"])


def bench_html(document: Document, published: Document | None = None) -> str:
    """The whole page. `published`: see `published_tables`; without it nothing is set beside anything."""
    look = Lookup(document)
    beside_it = published_tables(document, published) if published else []
    sections = [
        ("summary", "Summary", [
            f'<p class="lead">{escape(summary_line(document))}</p>', _headline(document, look, published),
            *_refused_list(document), as_html(cells_table(document)), *_wordy(_some(refusals_table(document)))]),
        ("figures", "Figures", [as_html(table) for table in _alone(document)]),
        ("arms", "Arms", [*_side_by_side([*_ramp_charts(look, published), *_source_charts(look)]),
                          *map(as_html, _compared(document))]),
        ("published", "Published", [
            '<p class="note">Two machines are not comparable in seconds, so ratios stand beside ratios.</p>',
            *_wordy(beside_it[:1]), *map(as_html, beside_it[1:])] if beside_it else []),
        ("latency", "Latency", _side_by_side(_latency_charts(document))),
        ("restores", "Restores", _side_by_side(_restore_charts(document))),
        ("counters", "Counters", [as_html(table) for table in counters_tables(document)]),
        ("verdicts", "Verdicts", _wordy(_judged(document))),
        ("environment", "Environment", [
            *_wordy([*environment_tables(document), formulas_table(document)]),
            f"<h2>The commands that made the records</h2>{commands(_commands(document))}"]),
    ]
    kept = [(name, title, [part for part in parts if part]) for name, title, parts in sections]
    kept = [section for section in kept if section[2]]
    tabs = "".join(
        f'<button type="button" role="tab" id="tab-{name}" aria-controls="panel-{name}" aria-selected="false" '
        f'tabindex="-1">{escape(title)}</button>' for name, title, _ in kept)
    panels = "\n".join(
        f'<section role="tabpanel" id="panel-{name}" aria-labelledby="tab-{name}" class="panel" tabindex="0">\n'
        + "\n".join(parts) + "\n</section>" for name, _, parts in kept)
    return page(_TITLE, f"<style>{_STYLE}</style><h1>{escape(_TITLE)}</h1>\n"
                        f'<div role="tablist" aria-label="Sections" class="tabs" hidden>{tabs}</div>\n{panels}\n'
                        f"<script>{_SCRIPT}</script>")


def _side_by_side(figures: Sequence[str]) -> list[str]:
    return [f'<div class="charts">{"".join(figures)}</div>'] if figures else []


def _wordy(tables: Iterable[Table]) -> list[str]:
    """Tables of sentences: they wrap and stand to the left."""
    return [f'<div class="wordy">{as_html(table)}</div>' for table in tables]


# --- words ----------------------------------------------------------------------------------------------------------


def summary_line(document: Document) -> str:
    cells = document["cells"]
    void = sum(cell["void"] for cell in cells)
    verdicts = [each["verdict"] for each in document["verdicts"]]
    judged = ", ".join(f"{verdicts.count(name)} {text}" for name, text in (
        ("pass", "passed"), ("miss", "missed"), ("not measured", "not measured"), ("void", "void"))
        if verdicts.count(name)) or "none were asked"
    claimed = sum(row["benefit"] == "measured" and bool(row["population"]) for row in document["comparison"]["rows"])
    return (f"{len(cells)} runs of {len({cell['cell'] for cell in cells})} cells, {void} void, "
            f"{len(document['comparison']['refused'])} refused for comparison; bars: {judged}; a benefit is claimed at "
            f"{claimed} of {sum(bool(row['population']) for row in document['comparison']['rows'])} compared points.")


def _alone(document: Document) -> list[Table]:
    return _some(loads_table(document), rungs_table(document), answers_table(document))


def _compared(document: Document) -> list[Table]:
    return _some(comparison_table(document), readings_table(document), unprimed_table(document))


def _judged(document: Document) -> list[Table]:
    return _some(verdicts_table(document))


def _some(*tables: Table | None) -> list[Table]:
    return [table for table in tables if table is not None]


def _commands(document: Document) -> list[str]:
    return list(dict.fromkeys(" ".join(cell["command"]) for cell in document["cells"]))


def _refused_list(document: Document) -> list[str]:
    void = [f"{label(cell)}: {reason['text']}" for cell in document["cells"] for reason in cell["reasons"]
            if reason["refuses"] == "cell"]
    return [f"<h2>Void: no figure of these counts</h2>{bullets(void)}"] if void else []


def _headline(document: Document, look: Lookup, published: Document | None) -> str:
    cells: list[tuple[str, str]] = []
    best = next((each for each in reversed(ramp_ratios(look, published)) if each["benefit"] == "measured"), None)
    if best is not None:
        where = f"at {best['part']} agents"
        cells.append((times(best["turns"]), f"the turns {where}{_published_note(best['turns_published'])}"))
        cells.append((times(best["average"]), f"lower average time{_published_note(best['average_published'])}"))
        cells.append((share(best["hits"][1]), f"of prompt tokens from cache {where}"))
    same = [cell["equivalence"] for cell in look.cells if cell["equivalence"]]
    if same:
        cells.append((f"{sum(each['identical'] for each in same)} of {sum(each['total'] for each in same)}",
                      "restored answers identical to cold"))
    verdicts = [each["verdict"] for each in document["verdicts"]]
    if verdicts:
        cells.append((f"{verdicts.count('pass')} of {len(verdicts)}", "bars passed"))
    return headline(cells) if cells else ""


def _published_note(value: float | None) -> str:
    return "" if value is None else f" ({times(value)} published)"


# --- the ramp -------------------------------------------------------------------------------------------------------


def _series(arm: str, baseline: str) -> str:
    return "off" if arm == baseline else "on"


def _ramp_charts(look: Lookup, published: Document | None) -> list[str]:
    points = ramp_points(look)
    if not points:
        return []
    arms = list(dict.fromkeys(cell["arm"] for cell in look.of("B5")))
    drawn = []
    for value, title, y, most, caption in (
            ("answered_s_mean", "Average time per turn", Axis(name="seconds", write=lambda value: f"{value:g}"), None,
             "Of the attempt that was answered, over the turns started in the window. Shorter is better."),
            ("hit_share", "Share of prompt tokens from cache",
             Axis(name="% of prompt tokens", write=lambda value: f"{100 * value:g}",
                  ticks=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0)), 1.0,
             "Total coverage: device and host together. What is missing to 100 % was computed again.")):
        write = share if value == "hit_share" else seconds
        known = {arm: {point["part"]: found for point in points
                       if (found := look.at(look.of("B5", arm), point["part"], value)) is not None} for arm in arms}
        lines = [Line(series=_series(arm, look.baseline), dashed=arm == look.baseline, points=tuple(
            Point(x=float(point["number"] or 0), y=known[arm][point["part"]],
                  label=f"{point['part']} agents, {arm}: {write(known[arm][point['part']])}")
            for point in points if point["part"] in known[arm])) for arm in arms]
        lines = [line for line in lines if line.points]
        if not lines:
            continue
        x = Axis(name="agents", write=lambda value: f"{value:g}",
                 ticks=tuple(float(point["number"] or 0) for point in points),
                 rows=tuple((f"tier {arm}", tuple(write(known[arm].get(point["part"])) for point in points))
                            for arm in arms))
        keys = line_legend([(_series(arm, look.baseline), arm == look.baseline, f"tier {arm}") for arm in arms])
        said = "; ".join(point.label for line in lines for point in line.points)
        drawn.append(figure(title, keys + line_chart(lines, name=f"Ramp: {title}", description=said, x=x, y=y,
                                                     y_most=most), caption))
    return [*drawn, *_ratio_chart(look, published)]


def _ratio_chart(look: Lookup, published: Document | None) -> list[str]:
    """Turns on ÷ off at each point, ours beside the published one."""
    ratios = [each for each in ramp_ratios(look, published) if each["turns"] is not None]
    if not ratios:
        return []
    groups = []
    for each in ratios:
        theirs = each["turns_published"]
        groups.append(Group(name=f"{each['part']} agents", columns=(
            Column(series="on", value=each["turns"], short=times(each["turns"]),
                   label=f"{each['part']} agents, this run: {times(each['turns'])}"),
            *([Column(series="off", value=theirs, short=times(theirs), hollow=True,
                      label=f"{each['agents']} agents, published: {times(theirs)}") if theirs else None]
              if published else []))))
    said = "; ".join(column.label for group in groups for column in group.columns if column is not None)
    keys = legend((("on", "this run"), *((("off hollow", "published"),) if published else ())))
    drawing = column_chart(groups, name="Turns with the tier over turns without", description=said, x_name="",
                           y=Axis(name="turns on ÷ off", write=lambda value: f"{value:g}×"),
                           level=Point(x=0, y=1.0, label="no difference", short="no difference"))
    return [figure("Turns on ÷ off", keys + drawing,
                   "Below the pool the tier must change nothing; above it the ratio is the gain.")]


def _source_charts(look: Lookup) -> list[str]:
    """Where the prompt tokens of each load's last point came from, one bar an arm."""
    drawn = []
    loads = [cell for cell in look.cells if cell["workload"] in ("agents", "rotate", "replay")]
    for name in dict.fromkeys(cell["cell"] for cell in loads):
        bars = []
        for arm in dict.fromkeys(cell["arm"] for cell in look.cells if cell["cell"] == name):
            cells = [cell for cell in look.cells if (cell["cell"], cell["arm"]) == (name, arm) and cell["points"]]
            if cells:
                last = cells[0]["points"][-1]
                bars += _source_bar(arm, last)
        if bars:
            told = "; ".join(f"{bar.name}: " + ", ".join(part.label for part in bar.parts) for bar in bars)
            keys = legend((("device", "from the device"), ("host", "restored from host"), ("recomputed", "recomputed")))
            drawn.append(figure(f"{name}: where the prompt tokens came from",
                                keys + horizontal_bars(bars, name=f"{name} prompt tokens by source", description=told,
                                                       longest=1.0),
                                "Share of the prompt tokens of the last point's main turns."))
    return drawn


def _source_bar(arm: str, point: Document) -> list[Bar]:
    values = point["values"]
    shares = [(series, values.get(f"{series}_share")) for series in ("device", "host", "recomputed")]
    if any(value is None for _, value in shares):
        return []
    parts = tuple(Part(series=series, label=f"{series} {share(value)}", short=share(value, 0), value=value)
                  for series, value in shares)
    return [Bar(name=f"tier {arm}", parts=parts, end_label=f"{share(values['hit_share'], 0)} hit")]


# --- latency --------------------------------------------------------------------------------------------------------


Row = Mapping[str, Any]


def _rows(cell: Document) -> list[Row]:
    columns = cell["requests"]["columns"]
    return [dict(zip(columns, row, strict=True)) for row in cell["requests"]["rows"]]


def _latency_charts(document: Document) -> list[str]:
    baseline = document["comparison"]["baseline"]
    drawn = []
    for name in dict.fromkeys(cell["cell"] for cell in document["cells"]):
        own = [cell for cell in document["cells"] if cell["cell"] == name]
        first: dict[str, Document] = {}
        for cell in sorted(own, key=lambda cell: (cell["void"], not allowed(cell), cell["attempt"])):
            first.setdefault(cell["arm"], cell)
        drawn += _scatter(name, first, baseline)
        drawn += _histogram(name, first, baseline)
    return drawn


def _scatter(name: str, arms: Mapping[str, Document], baseline: str) -> list[str]:
    clouds, failed, thinned = [], [], False
    for arm, cell in arms.items():
        rows = [row for row in _rows(cell) if row["role"] != "evict"]
        seen = [row for row in rows if row["ttft_s"] is not None]
        kept = _thin(seen)
        thinned = thinned or len(kept) < len(seen)
        clouds.append(Line(series=_series(arm, baseline), dashed=arm == baseline, points=tuple(
            Point(x=row["t_s"], y=row["ttft_s"],
                  label=f"{arm}, {row['segment']} {row['part']}, {row['role']} of {row['session']} turn {row['turn']}: "
                        f"{seconds(row['ttft_s'])}") for row in kept)))
        failed += [Point(x=row["t_s"], y=0.0, label=f"{arm}, {row['session']} turn {row['turn']}: {row['outcome']}")
                   for row in rows if row["outcome"] != "ok"][:MARKS_MOST]
    if not any(cloud.points for cloud in clouds) and not failed:
        return []
    keys = legend([(f"{_series(arm, baseline)}{' hollow' if arm == baseline else ''}", f"{arm} (attempt "
                   f"{cell['attempt']}{', VOID' if cell['void'] else ''})") for arm, cell in arms.items()])
    drawing = scatter_chart(
        clouds, name=f"{name} TTFT over time", x=Axis(name="seconds since the run began", write=lambda at: f"{at:g}"),
        y=Axis(name="TTFT, seconds, from when it was due", write=lambda value: f"{value:g}"),
        rules=_rules(next(iter(arms.values()))), failed=failed,
        description=f"One dot a request of {', '.join(arms)}; crosses are requests that were not served.")
    note = f" Of more than {MARKS_MOST} requests an arm every n-th is drawn, and the slowest." if thinned else ""
    return [figure(f"{name}: TTFT over time", keys + drawing,
                   f"One dot a request. Crosses on the upper edge: not served.{note}")]


def _thin(rows: Sequence[Row]) -> list[Row]:
    if len(rows) <= MARKS_MOST:
        return list(rows)
    step = math.ceil(len(rows) / (MARKS_MOST - _SLOWEST))
    slowest = sorted(range(len(rows)), key=lambda i: -rows[i]["ttft_s"])[:_SLOWEST]
    return [rows[i] for i in sorted({*range(0, len(rows), step), *slowest})]


def _rules(cell: Document) -> list[Rule]:
    """Where each segment opened, named by its part or by itself."""
    opened = [each for each in cell["segments"] if each["opened_s"] is not None]
    if not opened or cell["workload"] in ("ladder", "equivalence"):
        return []
    began = opened[0]["opened_s"]
    return [Rule(x=each["opened_s"] - began,
                 text=" ".join(part for part in (each["segment"] if not each["part"] or each["segment"] != "window"
                                                 else "", each["part"]) if part))
            for each in opened if each["segment"] not in ("before", "after") and each["requests"]]


def _histogram(name: str, arms: Mapping[str, Document], baseline: str) -> list[str]:
    """TTFT of the main turns in bins of 1, 2, 5."""
    values = {arm: [row["ttft_s"] for row in _rows(cell) if row["ttft_s"] is not None and row["ttft_s"] > 0
                    and row["role"] in ("visit", "revisit") and row["segment"] in ("window", "steady")]
              for arm, cell in arms.items()}
    every = [value for found in values.values() for value in found]
    if not every:
        return []
    edges = _edges(min(every), max(every))
    groups = []
    for low, high in zip([0.0, *edges], edges, strict=False):
        inside = {arm: sum(low < value <= high for value in found) for arm, found in values.items()}
        groups.append(Group(name=f"≤ {high:g}", columns=tuple(
            Column(series=_series(arm, baseline), value=float(count), hollow=arm == baseline,
                   short=f"{count}" if count else "", label=f"{arm}, {low:g} to {high:g} s: {count}")
            for arm, count in inside.items())))
    said = "; ".join(column.label for group in groups for column in group.columns if column and column.value)
    keys = legend([(f"{_series(arm, baseline)}{' hollow' if arm == baseline else ''}", arm) for arm in values])
    return [figure(f"{name}: how long the first token took", keys + column_chart(
        groups, name=f"{name} TTFT histogram", description=said, x_name="TTFT, seconds", touching=True,
        y=Axis(name="turns", write=lambda value: f"{value:g}")),
        "Turns of the measured segments, from when they were due. Windows may differ in length; see the comparison.")]


def _edges(least: float, most: float) -> list[float]:
    steps = [step * 10.0 ** power for power in range(-4, 5) for step in (1, 2, 5)]
    first = max((i for i, step in enumerate(steps) if step < least), default=0)
    last = next((i for i, step in enumerate(steps) if step >= most), len(steps) - 1)
    return [float(f"{step:.6g}") for step in steps[min(first + 1, last):last + 1]]


# --- restores -------------------------------------------------------------------------------------------------------


def _restore_charts(document: Document) -> list[str]:
    drawn = []
    for cell in document["cells"]:
        found = cell["restore_histogram"]
        if found is None or not allowed(cell):
            continue
        filled = [i for i, count in enumerate(found["counts"]) if count]
        if not filled:
            continue
        bins = range(max(0, filled[0] - 1), min(len(found["counts"]), filled[-1] + 2))
        groups = [Group(name=_bound(found["bounds_s"], i), columns=(
            Column(series="host", value=float(found["counts"][i]), short=f"{found['counts'][i]}" if found["counts"][i]
                   else "", label=f"{_bound(found['bounds_s'], i)}: {found['counts'][i]}"),)) for i in bins]
        said = "; ".join(f"{group.name}: {column.value:g}" for group in groups for column in group.columns if column)
        mean = "" if found["mean_s"] is None else f" Mean {number(1000 * found['mean_s'], 1, ' ms')}."
        drawn.append(figure(
            f"{label(cell)}: how long restores took", column_chart(
                groups, name=f"{label(cell)} restore histogram", description=said, x_name="how long a restore took",
                touching=True, y=Axis(name="restores", write=lambda value: f"{value:g}")),
            f"{found['n']:,} in the measured segments. Source: {found['source']}.{mean}"))
    return drawn


def _bound(bounds: Sequence[float | None], i: int) -> str:
    bound = bounds[i]
    if bound is None:
        return f"> {_span(bounds[i - 1])}" if i else "any"
    return f"≤ {_span(bound)}"


def _span(value: float | None) -> str:
    return "?" if value is None else f"{1000 * value:g} ms" if value < 1 else f"{value:g} s"


_STYLE = """
main{max-width:80rem}.chart{max-width:52rem}
.tabs{display:flex;flex-wrap:wrap;gap:.25rem;margin:1rem 0 0;border-bottom:1px solid var(--rule);position:sticky;top:0;
background:var(--page);z-index:1}.tabs[hidden]{display:none}
.tabs button{font:inherit;color:var(--soft);background:none;border:0;border-bottom:3px solid transparent;
padding:.5rem .8rem;cursor:pointer}.tabs button:hover{color:var(--ink)}
.tabs button[aria-selected=true]{color:var(--ink);border-color:var(--on);font-weight:600}
:focus-visible{outline:2px solid var(--on);outline-offset:2px}.panel:focus{outline:none}
.panel:focus-visible{outline:1px dotted var(--rule)}
.mark.hollow{fill:var(--page);stroke-width:2}.mark.off.hollow{stroke:var(--off)}.mark.on.hollow{stroke:var(--on)}
.key.hollow{background:var(--page);border:2px solid var(--off)}
.dot.cloud{stroke-width:1.2;fill-opacity:.75}.dot.cloud.dashed{fill:none}
.cross{stroke:var(--recomputed);stroke-width:1.6;fill:none}
.chart .rule-text{font-size:11px}
td,td:last-child{white-space:nowrap}
.wordy td{white-space:normal;text-align:left;max-width:30rem;overflow-wrap:anywhere}.wordy thead th{text-align:left}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(34rem,100%),1fr));gap:0 2rem}
.charts figure{margin:1.25rem 0;min-width:0}
@media print{.tabs{display:none}.panel[hidden]{display:block}}
"""
_SCRIPT = """
(() => {
  const tabs = [...document.querySelectorAll('[role=tab]')];
  const show = (tab, focus) => {
    for (const each of tabs) {
      const on = each === tab;
      each.setAttribute('aria-selected', on);
      each.tabIndex = on ? 0 : -1;
      document.getElementById(each.getAttribute('aria-controls')).hidden = !on;
    }
    if (focus) tab.focus();
  };
  const named = () => tabs.find(each => '#' + each.id.slice(4) === location.hash) || tabs[0];
  tabs.forEach((tab, i) => {
    tab.addEventListener('click', () => {
      history.replaceState(null, '', '#' + tab.id.slice(4));
      show(tab, true);
    });
    tab.addEventListener('keydown', event => {
      const to = {ArrowRight: i + 1, ArrowLeft: i - 1 + tabs.length, Home: 0, End: tabs.length - 1}[event.key];
      if (to === undefined) return;
      event.preventDefault();
      tabs[to % tabs.length].click();
    });
  });
  addEventListener('hashchange', () => show(named(), false));
  document.querySelector('[role=tablist]').hidden = false;
  show(named(), false);
  scrollTo(0, 0);
})();
"""
