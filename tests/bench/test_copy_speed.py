from __future__ import annotations

import json

import pytest

from hostcache.bench import copy_speed


@pytest.mark.parametrize("threads", [1, 2])
def test_every_way_is_measured_in_one_run_and_the_bytes_are_compared(threads: int) -> None:
    result = copy_speed.run(page_bytes=5000, pages=12, threads=threads, repeats=3)
    assert result["bytes_equal"]
    assert set(result["gb_per_s"]) == {"plain", "restore", "restore_per_page", "restore_scattered", "store"}
    assert {len(times) for times in result["seconds"].values()} == {3}
    assert result["submissions"]["restore_per_page"] == 12
    for spread in [*result["gb_per_s"].values(), *result["over_plain"].values()]:
        assert 0 < spread["min"] <= spread["median"] <= spread["max"]
    assert json.loads(json.dumps(result)) == result


def test_a_batched_restore_is_one_submission() -> None:
    assert copy_speed.run(page_bytes=4096, pages=64, repeats=1)["submissions"]["restore"] == 1


def test_the_table_shows_the_published_figures_beside_the_measured_ones() -> None:
    text = copy_speed.table(copy_speed.run(page_bytes=4096, pages=4, repeats=1))
    rows = {line[:24].strip(): line for line in text.splitlines()}
    assert rows["restore, batched"].endswith(" 57")
    assert rows["restore, a call a page"].endswith(" 17")
    assert "plain memory copy" in rows
