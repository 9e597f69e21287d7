"""The frame of a one-file page: its head and its style. Loads nothing from anywhere; knows nothing of what it shows."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def page(title: str, body: str) -> str:
    """A whole HTML document. `body` is HTML."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n")


def figure(title: str, drawing: str, caption: str) -> str:
    """A drawing with its heading and caption; on a narrow screen a wide drawing scrolls inside its frame."""
    return (f'<figure><h2>{escape(title)}</h2>\n<div class="scroll">{drawing}</div>\n'
            f"<figcaption>{escape(caption)}</figcaption></figure>")


def headline(cells: Sequence[tuple[str, str]]) -> str:
    """(value, what it is) pairs, large."""
    return '<dl class="headline">' + "".join(
        f"<div><dt>{escape(text)}</dt><dd>{escape(value)}</dd></div>" for value, text in cells) + "</dl>"


def bullets(items: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def commands(lines: Sequence[str]) -> str:
    return f"<pre><code>{escape(chr(10).join(lines))}</code></pre>"


STYLE = """
:root{color-scheme:light dark;--page:#fcfcfb;--ink:#1d1d1b;--soft:#5d5c57;--rule:#d9d8d2;
--off:#8a8983;--on:#1f66b5;--device:#1f66b5;--host:#147565;--recomputed:#a94f10;--inside:#fff}
@media (prefers-color-scheme:dark){:root{--page:#161615;--ink:#ecebe6;--soft:#aaa9a2;--rule:#3a3a37;
--off:#8f8e88;--on:#6fa8e6;--device:#6fa8e6;--host:#4cc0aa;--recomputed:#ee9650;--inside:#161615}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:62rem;margin:0 auto;padding:1.5rem 1rem 4rem}h1{font-size:1.5rem;line-height:1.25}h2{font-size:1.15rem}
figure{margin:2rem 0}figure h2{margin:0 0 .25rem}figcaption,.note{color:var(--soft);font-size:.9rem}
.chart{display:block;width:100%;max-width:45rem;height:auto}.chart text{fill:var(--ink);font-size:15px}
.chart .inside{fill:var(--inside);font-weight:600}.axis{stroke:var(--rule);stroke-width:1}
.mark{stroke:var(--page);stroke-width:1.5}.off{fill:var(--off);background:var(--off)}.on{fill:var(--on);background:var(--on)}
.device{fill:var(--device);background:var(--device)}.host{fill:var(--host);background:var(--host)}
.recomputed{fill:var(--recomputed);background:var(--recomputed)}
.legend{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;list-style:none;margin:.25rem 0;padding:0;font-size:.9rem}
.key{display:inline-block;width:.8rem;height:.8rem;margin-right:.4rem;border-radius:2px}
dl.headline{display:flex;flex-wrap:wrap;gap:1rem 2.5rem;margin:1.5rem 0 .5rem}
dl.headline dt{color:var(--soft);font-size:.9rem}
dl.headline dd{margin:0;font-size:1.9rem;font-weight:600}dl.headline div{display:flex;flex-direction:column-reverse}
.scroll{overflow-x:auto}.scroll:has(table){margin-top:1.75rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}
caption{text-align:left;font-weight:600;padding-bottom:.4rem}
th,td{padding:.25rem .7rem;border-bottom:1px solid var(--rule);
text-align:right;vertical-align:top}th:first-child{text-align:left;font-weight:400;white-space:pre}
thead th{color:var(--soft);font-weight:400;white-space:nowrap}
td:last-child{white-space:normal}pre{overflow-x:auto;padding:.75rem;border:1px solid var(--rule);border-radius:4px}
details{margin:.75rem 0}summary{cursor:pointer}
.lead{font-size:1.15rem;font-weight:600;max-width:46rem}
.chart.lines{min-width:34rem}.chart.lines text{font-size:13px;font-variant-numeric:tabular-nums}
.chart.lines .tick,.chart.lines .axis-name,.chart.lines .rule-text{fill:var(--soft)}
.chart.lines .value{paint-order:stroke;stroke:var(--page);stroke-width:4px;stroke-linejoin:round}
.grid{stroke:var(--rule);stroke-width:1;opacity:.6}.rule{stroke:var(--soft);stroke-width:1;stroke-dasharray:2 3}
.line{fill:none;background:none;stroke-width:2.5}.line.dashed{stroke-dasharray:6 5}
.line.off,.dot.off{stroke:var(--off)}.line.on,.dot.on{stroke:var(--on)}
.line.host,.dot.host{stroke:var(--host)}.line.recomputed,.dot.recomputed{stroke:var(--recomputed)}
.line.off,.line.on,.line.host,.line.recomputed{fill:none}
.dot{stroke-width:2}.dot.dashed{fill:var(--page)}
.key-line{width:34px;height:12px;margin-right:.4rem;vertical-align:middle}
"""
