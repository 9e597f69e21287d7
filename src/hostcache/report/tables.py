"""Rows and columns, and how they are written: plain text, Markdown, HTML. Numbers arrive as numbers, leave as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from hostcache.sizes import format_size

MISSING = "–"
"""What is written where there is no number. An absent metric is never shown as 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The first column names the row; the others are right-aligned. `note` is shown below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"row {row[:1]} of {self.title!r} has {len(row)} cells, not {len(self.columns)}")


def number(value: float | None, digits: int = 0, unit: str = "") -> str:
    """`1,234.50 s`; a dash for None."""
    return MISSING if value is None else f"{value:,.{digits}f}{unit}"


def share(value: float | None, digits: int = 1) -> str:
    """A share as per cent."""
    return MISSING if value is None else f"{100 * value:.{digits}f} %"


def size(count: float | None) -> str:
    """Bytes in powers of 1024."""
    return MISSING if count is None else format_size(count)


def as_text(tables: Iterable[Table]) -> str:
    """For a terminal."""
    return "\n".join(_text(table) for table in tables)


def _text(table: Table) -> str:
    grid = [table.columns, *table.rows]
    widths = [max(len(row[i]) for row in grid) for i in range(len(table.columns))]
    lines = [f"\n{table.title}", *(_line(row, widths) for row in grid)]
    lines.insert(2, "  ".join("─" * width for width in widths))
    return "\n".join([*lines, *([table.note] if table.note else [])]) + "\n"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (cell.ljust(width) if i == 0 else cell.rjust(width)
                      for i, (cell, width) in enumerate(zip(row, widths, strict=True)))
    return "  ".join([first, *others]).rstrip()


def as_markdown(tables: Iterable[Table]) -> str:
    return "\n".join(_markdown(table) for table in tables)


def _markdown(table: Table) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    rule = "| " + " | ".join(["---", *["---:"] * (len(table.columns) - 1)]) + " |"
    note = f"\n{table.note}\n" if table.note else ""
    return "\n".join([f"**{table.title}**", "", line(table.columns), rule, *map(line, table.rows)]) + "\n" + note


def as_html(table: Table) -> str:
    """One table with its caption and scopes, ready for a page."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.columns)
    body = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (f'<div class="scroll"><table><caption>{escape(table.title)}</caption>\n<thead><tr>{head}</tr></thead>\n'
            f"<tbody>\n{body}\n</tbody></table></div>{note}")
