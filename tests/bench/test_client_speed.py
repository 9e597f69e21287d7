"""The client measured against a scripted server. Red: a cell is lost, or a bar is read wrongly."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from hostcache.bench import client_speed
from hostcache.bench.client_speed import Asked


def test_every_request_of_every_cell_is_reported() -> None:
    told: list[str] = []
    result = client_speed.run(window_s=0.2, repeats=1, cases=((50.0, 4), (20.0, 8)), progress=told.append)
    first, second = result["cells"]
    assert (first["requests"], first["errors"], first["chunks"]) == (10, 0, 4)
    assert (second["requests"], second["errors"], second["chunks"]) == (4, 0, 8)
    assert min(first["ttft_p50_s"], second["ttft_p50_s"]) >= client_speed.TTFT_S
    assert len(told) == 2
    assert len(client_speed.table(result).splitlines()) == 3


def judged(cells: Sequence[Asked]) -> list[bool]:
    result = client_speed.summed(cells, (cells[0].rate, cells[0].chunks))
    return [met for *_, met in client_speed.bars(result)]


@pytest.fixture
def asked() -> Asked:
    return Asked(rate=100.0, chunks=4, requests=10, errors=0, sent_s=0.1, ttft_p50_s=0.051, ttft_p99_s=0.06,
                 lag_p50_s=0.0, lag_p99_s=0.004, lag_bar_s=0.02, void=False)


def test_bars_ask_for_true_figures_below_the_limit_and_a_word_beyond_it(asked: Asked) -> None:
    beyond = dataclasses.replace(asked, rate=75.0, chunks=128, ttft_p50_s=0.4, lag_p99_s=0.3, void=True)
    assert judged([asked, beyond]) == [True, True, True]
    assert judged([dataclasses.replace(asked, ttft_p50_s=0.053), beyond]) == [False, True, True]
    assert judged([dataclasses.replace(asked, void=True), beyond]) == [False, True, True]
    assert judged([asked, dataclasses.replace(beyond, void=False)]) == [True, False, False]
