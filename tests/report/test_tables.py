"""How numbers and rows are written."""

from __future__ import annotations

import pytest

from hostcache.report.tables import MISSING, Table, as_html, as_markdown, as_text, number, share, size


def test_numbers_carry_separators_digits_and_units() -> None:
    assert number(1234567) == "1,234,567"
    assert number(1.005, 1, " s") == "1.0 s"
    assert share(0.9534) == "95.3 %"
    assert size(1536) == "1.5 KiB"
    assert number(None) == share(None) == size(None) == MISSING
    assert number(0) == "0"


def test_a_row_with_a_missing_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="has 1 cells, not 2"):
        Table(title="t", columns=("a", "b"), rows=(("x",),))


def test_text_aligns_the_first_column_left_and_numbers_right() -> None:
    table = Table(title="t", columns=("name", "n"), rows=(("a", "1"), ("long one", "100")), note="note")
    assert as_text([table]) == "\nt\nname        n\n────────  ───\na           1\nlong one  100\nnote\n"


def test_markdown_and_html_escape_what_would_break_them() -> None:
    table = Table(title="<t>", columns=("a|b", "n"), rows=(("x\ny", "<1>"),))
    assert "a\\|b" in as_markdown([table])
    assert "| x y | <1> |" in as_markdown([table])
    assert "<caption>&lt;t&gt;</caption>" in as_html(table)
    assert "<td>&lt;1&gt;</td>" in as_html(table)
