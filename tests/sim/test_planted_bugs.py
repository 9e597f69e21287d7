"""Every planted bug is found by the shipped command, and tells what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.sim.planted import PLANTS, Plant, fuzz_of, plant

from hostcache.sim.fuzz import FOUND

SEEDS = (1, 2, 3)


@pytest.mark.parametrize("bug", PLANTS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Plant, tmp_path: Path) -> None:
    code, record = fuzz_of(plant(bug, tmp_path), "--runs", "200", "--seed", "1", "--no-shrink")
    assert code == FOUND, record
    assert any(words in record["failures"][0]["violation"] for words in bug.says), record["failures"][0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bug", PLANTS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found_under_any_seed(bug: Plant, seed: int, tmp_path: Path) -> None:
    code, record = fuzz_of(plant(bug, tmp_path), "--runs", "1000", "--seed", str(seed), "--no-shrink")
    assert code == FOUND, record
    assert record["runs"] <= 1000
    assert any(words in record["failures"][0]["violation"] for words in bug.says), record["failures"][0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_seeds_are_clean_without_a_planted_bug(seed: int) -> None:
    code, record = fuzz_of(None, "--runs", "1000", "--seed", str(seed), "--jobs", "2")
    assert code == 0, record["failures"]
