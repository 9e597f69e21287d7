"""demo.json → the tables of a terminal, the Markdown of a document, the one-file page of a browser.

`document` is what `hostcache demo` wrote: keys as in docs/, every figure already computed. Nothing is computed here
but the order and the words. The page loads nothing: styles and drawings are inside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from hostcache.report.charts import Bar, Part, horizontal_bars, legend
from hostcache.report.pages import commands, page
from hostcache.report.tables import MISSING, Table, as_html, as_markdown, as_text, number, share, size

Document = Mapping[str, Any]

_HEADLINE = "hostcache demo: the same engine with and without a host-RAM tier"


def demo_text(document: Document) -> str:
    """What the command prints."""
    return f"{_what_ran(document)}\n{as_text(demo_tables(document))}\n{_verdict(document)}\n"


def demo_markdown(document: Document) -> str:
    commands = "\n".join(f"    {command}" for command in document["commands"])
    tables = as_markdown(demo_tables(document))
    return f"# {_HEADLINE}\n\n{_what_ran(document)}\n\n{commands}\n\n{tables}\n{_verdict(document)}\n"


def demo_tables(document: Document) -> list[Table]:
    """The tables of the stages that ran, then the bars."""
    tables = []
    if document["pressure"]["windows"]:
        tables += [_pressure_table(document), _windows_table(document)]
    if document["no_pressure"]["servers"]:
        tables.append(_calm_table(document))
    if document["equivalence"]["rows"]:
        tables.append(_equivalence_table(document))
    return [*tables, _bars_table(document)]


def _what_ran(document: Document) -> str:
    work = document["workload"]
    machine = document["environment"]
    where = ", ".join(str(machine[key]) for key in ("cpu", "system") if key in machine)
    cores = f"{machine['cpus']} CPUs, " if "cpus" in machine else ""
    ended = "" if document["outcome"] == "finished" else f" The run was {document['outcome']}: {document['detail']}."
    return (f"{document['form']} form, model {work['model']}, {work['agents']} agents, {work['prefix_tokens']:,}-token "
            f"prefix of real code, windows of {work['window_s']:g} s, device pool {work['pool_tokens']:,} tokens in "
            f"both arms, host quota {size(work['host_cache_bytes'])} in the on arm. {cores}{where}.{ended}")


def _verdict(document: Document) -> str:
    verdicts = [bar["verdict"] for bar in document["bars"]]
    passed, missed = verdicts.count("pass"), verdicts.count("miss")
    shown = verdicts.count("shown, not judged")
    open_ones = len(verdicts) - passed - missed - shown - verdicts.count("not run")
    return (f"Bars: {passed} passed, {missed} missed, {shown} shown and not judged, {open_ones} not measured."
            + ("" if document["form"] == "full" else " Only `hostcache demo --full` is the form of record."))


def _pressure_table(document: Document) -> Table:
    arms = document["pressure"]["arms"]
    off, on = arms["off"], arms["on"]

    def row(name: str, write: Any, key: str, compared: str = "") -> tuple[str, ...]:
        return (name, write(off[key]), write(on[key]), compared)

    def seconds(value: float | None) -> str:
        return number(value, 2, " s")

    pressure = document["pressure"]
    times = number(pressure["turns_ratio"], 2, "×")
    reasons = sorted({*off["recomputed"], *on["recomputed"]})
    rows = [
        row("turns served in the windows", number, "turns", times if pressure["turns_ratio"] is not None else MISSING),
        row("average time per turn", seconds, "avg_s", number(pressure["avg_time_ratio"], 3, "×")),
        row("p95 time per turn", seconds, "p95_s"),
        row("TTFT p50", seconds, "ttft_p50_s"),
        row("TTFT p95", seconds, "ttft_p95_s"),
        row("prompt tokens", number, "prompt_tokens"),
        row("  from the device", number, "device_tokens"),
        row("  from host RAM", number, "host_tokens"),
        row("  recomputed", number, "recomputed_tokens"),
        *((f"    {reason}", number(off["recomputed"].get(reason, 0) if off["turns"] else None),
           number(on["recomputed"].get(reason, 0) if on["turns"] else None), "") for reason in reasons),
        row("recomputed share", share, "recomputed_share", number(pressure["recomputed_share_ratio"], 3, "×")),
        row("hit share", share, "hit_share"),
        row("hit share over the bound", lambda value: number(value, 4), "hit_share_over_bound"),
        row("restores", number, "restores"),
        row("restore mean", lambda value: number(value, 2, " ms"), "restore_mean_ms"),
        row("bytes moved", size, "bytes_moved"),
        row("retries", number, "retries"),
        row("errors", number, "errors"),
    ]
    note = ("Every time includes its waits and retries. "
            "The bound: what an infinite cache of whole pages would have served.")
    loss = (off["resent_loss_tokens"] or 0) + (on["resent_loss_tokens"] or 0)
    if loss:
        note += f" Lost by re-tokenization: {loss:,} reply tokens could not be resent as they were."
    if pressure["benefit"] != "measured":
        note += f" No ratio is given: {pressure['benefit']}."
    return Table(title="Pressure: agents whose working set exceeds the device pool",
                 columns=("", "tier off", "tier on", "on ÷ off"), rows=tuple(rows), note=note)


def _windows_table(document: Document) -> Table:
    rows = tuple(
        (f"{window['index'] + 1} {window['arm']}", number(window["turns"]), number(window["avg_s"], 2),
         number(window["p95_s"], 2), share(window["hit_share"]), number(window["hit_share_over_bound"], 4),
         number(window["device_evictions"]), number(window["restores"]), size(window["bytes_moved"]),
         number(window["retries"]), number(window["errors"]), size(window["peak_rss_bytes"]))
        for window in document["pressure"]["windows"])
    apart = [window["index"] + 1 for window in document["pressure"]["windows"]
             if window["usage_prompt_tokens"] != window["accounting"]["prompt_tokens"]]
    note = "The server's counters and the turns' own usage agree on the prompt tokens of every window."
    if apart:
        note = ("Prompt tokens by the server's counters and by the turns' usage differ in window "
                f"{', '.join(map(str, apart))}: a turn was settled between a scrape and its first token.")
    return Table(title="Each window, a fresh server process each, in the order run",
                 columns=("window", "turns", "avg s", "p95 s", "hit share", "of bound", "evictions", "restores",
                          "bytes moved", "retries", "errors", "peak RSS"), rows=rows, note=note)


def _calm_table(document: Document) -> Table:
    calm = document["no_pressure"]
    rows = tuple(
        (f"{server['index'] + 1} {server['arm']}", number(server["turns"]), number(server["work_s"], 3),
         size(server["bytes_moved"]), number(server["waits"]), number(server["errors"])) for server in calm["servers"])
    noise = calm["noise"]
    against = ", ".join(number(ratio, 4) for ratio in calm["aa_ratios"]) or MISSING
    note = (f"On ÷ off {number(calm['ratio'], 4)}; off against off {against}"
            + (f", either way round between {noise[0]:.4f} and {noise[1]:.4f}" if noise else "")
            + f". Outputs identical: {'yes' if calm['identical'] else 'no'}.")
    return Table(title="No pressure: the same turns on each server, pool twice the working set",
                 columns=("server", "turns", "seconds of work", "bytes moved", "waits", "errors"), rows=rows, note=note)


def _equivalence_table(document: Document) -> Table:
    same = document["equivalence"]
    rows = []
    for row in same["rows"]:
        verdict = row["verdict"].replace("_", "-") + (f": {row['reason']}" if row["reason"] else "")
        if row["divergence"] is not None:
            verdict += f" (token {row['divergence']}, margin {number(row['margin'], 7)})"
        rows.append((
            f"{row['conversation'] + 1} {row['shape']}, {row['boundary']}", number(row["tokens"]),
            number(row["device_tokens"]), number(row["host_tokens"]),
            {True: "yes", False: "NO", None: MISSING}[row["bit_for_bit"]],
            (row["restored_vs_cold"] or MISSING).replace("_", "-"), (row["cold_vs_cold"] or MISSING).replace("_", "-"),
            number(row["cold_ttft_s"], 2), number(row["restored_ttft_s"], 3),
            MISSING if not row["ttft_ratio"] else f"1/{1 / row['ttft_ratio']:.0f}", verdict))
    moves = same["submissions_per_restore"]
    copies = f" Submissions per restore: {moves['mean']:.2f} on average, {moves['max']:g} at most." if moves else ""
    note = (f"{same['identical']} of {same['total']} identical, {same['near_ties']} near-ties (margin under 0.0001, "
            f"counted as not identical), {same['refused']} refused for want of proof; cold against cold: "
            f"{same['cold_vs_cold_identical']} of {same['total']} identical.{copies}")
    return Table(title="Equivalence: is a restored conversation the retained one?",
                 columns=("conversation", "tokens", "device", "host", "= device hit, bit for bit", "= cold",
                          "cold = cold", "cold TTFT s", "restored s", "ratio", "verdict"), rows=tuple(rows), note=note)


def _bars_table(document: Document) -> Table:
    def value(bar: Mapping[str, Any]) -> str:
        found = bar["value"]
        if isinstance(found, bool):
            return "yes" if found else "no"
        return number(found, 4) if isinstance(found, float) else number(found)

    rows = tuple((bar["name"], bar["bar"], value(bar), bar["verdict"]) for bar in document["bars"])
    return Table(title="Bars", columns=("what", "bar", "value", "verdict"), rows=rows)


# --- the page -------------------------------------------------------------------------------------------------------


def demo_html(document: Document) -> str:
    """The whole of demo.html."""
    tables = "\n".join(as_html(table) for table in demo_tables(document))
    body = (
        f"<h1>{escape(_HEADLINE)}</h1>\n<p>{escape(_what_ran(document))}</p>\n"
        f"{_headline(document)}\n{_charts(document)}\n<h2>Figures</h2>\n{tables}\n<p>{escape(_verdict(document))}</p>\n"
        f"<h2>The commands that make this page</h2>\n{commands(document['commands'])}\n{_provenance(document)}")
    return page(_HEADLINE, body)


def _headline(document: Document) -> str:
    pressure = document["pressure"]
    if pressure["turns_ratio"] is None:
        return (f'<p class="headline">No benefit is reported: {escape(pressure["benefit"])}.</p>'
                if pressure["windows"] else "")
    cells = (
        (number(pressure["turns_ratio"], 1, "×"), "turns served"),
        (number(1 / (pressure["avg_time_ratio"] or 1), 1, "×"), "shorter average turn"),
        (share(pressure["hit_share_on"]), "of prompt tokens from cache"),
        (number(pressure["recomputed_share_ratio"], 2, "×"), "the recomputed share"),
    )
    command = escape(document["commands"][0])
    return ('<dl class="headline">' + "".join(f"<div><dt>{escape(text)}</dt><dd>{escape(value)}</dd></div>"
                                              for value, text in cells) + f"</dl><p><code>{command}</code></p>")


def _charts(document: Document) -> str:
    arms = [(name, document["pressure"]["arms"][name]) for name in ("off", "on")
            if document["pressure"]["arms"][name]["turns"]]
    if not arms:
        return ""
    seconds = [Bar(name=f"tier {name}", end_label=number(arm["avg_s"], 1, " s"),
                   parts=(Part(series=name, label=f"{arm['avg_s']:.2f} s per turn", short="", value=arm["avg_s"]),))
               for name, arm in arms]
    said = "; ".join(f"tier {name}: {number(arm['avg_s'], 2)} s over {arm['turns']} turns" for name, arm in arms)
    first = horizontal_bars(seconds, name="Average seconds per turn", description=said)
    figures = [_figure("Average seconds per turn", first,
                       "Wall time until the reply is complete, waits and retries included. Shorter is better.")]
    shares = [bar for name, arm in arms if (bar := _share_bar(name, arm)) is not None]
    if shares:
        told = "; ".join(f"{bar.name}: " + ", ".join(part.label for part in bar.parts) for bar in shares)
        drawing = horizontal_bars(shares, name="Prompt tokens by source", description=told, longest=1.0)
        keys = legend((("device", "from the device"), ("host", "restored from host RAM"), ("recomputed", "recomputed")))
        figures.append(_figure("Where the prompt tokens came from", keys + drawing,
                               "Share of the prompt tokens of the turns counted. "
                               "Recomputed tokens are compute that somebody pays for."))
    return "\n".join(figures)


def _share_bar(name: str, arm: Mapping[str, Any]) -> Bar | None:
    if arm["device_tokens"] is None or arm["host_tokens"] is None or not arm["prompt_tokens"]:
        return None
    parts = tuple(
        Part(series=series, label=f"{text} {share(count / arm['prompt_tokens'])}", value=count / arm["prompt_tokens"],
             short=share(count / arm["prompt_tokens"], 0))
        for series, text, count in (("device", "device", arm["device_tokens"]), ("host", "host", arm["host_tokens"]),
                                    ("recomputed", "recomputed", arm["recomputed_tokens"])))
    return Bar(name=f"tier {name}", parts=parts, end_label=f"{share(arm['hit_share'], 0)} hit")


def _figure(title: str, drawing: str, caption: str) -> str:
    return f"<figure><h2>{escape(title)}</h2>\n{drawing}\n<figcaption>{escape(caption)}</figcaption></figure>"


def _provenance(document: Document) -> str:
    work = "".join(f"<tr><th scope=\"row\">{escape(str(key))}</th><td>{escape(str(value))}</td></tr>"
                   for key, value in {**document["workload"], **document["environment"]}.items())
    inputs = "".join(f"<tr><th scope=\"row\">{escape(name)}</th><td><code>{escape(digest)}</code></td></tr>"
                     for name, digest in document["inputs"].items())
    servers = "\n".join(escape(f"{server['stage']} {server['index'] + 1} {server['arm']}: {server['command']}")
                        for server in document["servers"])
    return (f"<details><summary>Workload and machine (hostcache {escape(document['hostcache_version'])})</summary>"
            f'<div class="scroll"><table><tbody>{work}</tbody></table></div></details>\n'
            f"<details><summary>Inputs and their sha256</summary>"
            f'<div class="scroll"><table><tbody>{inputs}</tbody></table></div></details>\n'
            f"<details><summary>The servers, as started</summary><pre><code>{servers}</code></pre></details>")
