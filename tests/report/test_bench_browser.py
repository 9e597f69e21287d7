"""The report in a real browser: its tabs by mouse and keyboard, marks in every chart, silence on console and network.

Skipped where there is no Chromium.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.report.bench_documents import published, whole
from tests.report.browser import Browser, browser, find_browser

from hostcache.report.bench_page import bench_html

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine")
NAMES = ("summary", "figures", "arms", "published", "latency", "restores", "counters", "verdicts", "environment")
SHOWN = "[...document.querySelectorAll('[role=tabpanel]')].filter(each => each.offsetHeight).map(each => each.id)"
RIGHT, LEFT, HOME, END = ("ArrowRight", 39), ("ArrowLeft", 37), ("Home", 36), ("End", 35)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Browser, Path]]:
    folder = tmp_path_factory.mktemp("browser")
    file = folder / "bench.html"
    file.write_text(bench_html(whole(), published()), encoding="utf-8")
    assert PROGRAM is not None
    with browser(PROGRAM, folder / "profile") as opened:
        opened.goto(file.as_uri())
        yield opened, file


def test_each_tab_shows_its_section_alone_and_every_chart_in_it_has_visible_marks(page: tuple[Browser, Path]) -> None:
    opened, _ = page
    seen = 0
    for name in NAMES:
        opened.click(f"#tab-{name}")
        assert opened.value(SHOWN) == [f"panel-{name}"]
        assert opened.value(f"document.getElementById('tab-{name}').getAttribute('aria-selected')") == "true"
        marks = opened.value(
            f"[...document.querySelectorAll('#panel-{name} svg[role=img]')].map(drawing => "
            "[...drawing.querySelectorAll('rect.mark, circle.dot, path.cross')]"
            ".filter(mark => mark.getBoundingClientRect().width > 0 || +mark.dataset.value === 0).length)")
        assert all(count > 0 for count in marks), (name, marks)
        seen += len(marks)
    assert seen == opened.value("document.querySelectorAll('svg[role=img]').length") > 20


def test_the_keyboard_moves_through_the_tabs(page: tuple[Browser, Path]) -> None:
    opened, _ = page
    opened.click("#tab-summary")
    for key, name in ((RIGHT, "figures"), (RIGHT, "arms"), (LEFT, "figures"), (HOME, "summary"), (LEFT, "environment"),
                      (RIGHT, "summary"), (END, "environment")):
        opened.press(*key)
        assert opened.value("document.activeElement.id") == f"tab-{name}"
        assert opened.value(SHOWN) == [f"panel-{name}"]


def test_nothing_is_wider_than_the_page_but_what_scrolls_inside_it(page: tuple[Browser, Path]) -> None:
    opened, _ = page
    for width in (1300, 480):
        opened.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        for name in NAMES:
            opened.value(f"document.getElementById('tab-{name}').click()")
            assert opened.value("document.documentElement.scrollWidth") <= width, (name, width)


def test_an_address_with_a_section_opens_it(page: tuple[Browser, Path]) -> None:
    opened, file = page
    opened.goto("about:blank")
    opened.goto(f"{file.as_uri()}#verdicts")
    assert opened.value(SHOWN) == ["panel-verdicts"]
    assert opened.value("scrollY") == 0


def test_neither_console_nor_network_hears_anything_but_the_file(page: tuple[Browser, Path]) -> None:
    opened, file = page
    assert opened.complaints() == []
    assert {address.partition("#")[0] for address in opened.requests()} <= {file.as_uri(), "about:blank"}
    assert file.as_uri() in {address.partition("#")[0] for address in opened.requests()}
