"""The twin: what it may look at, that its parts are as published, and that a small run is judged as it should be.

Whether the bars hold is `hostcache sim twin --strict`'s to say, not pytest's.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence

import pytest

from hostcache.sim import twin as twin_module
from hostcache.sim.published import published
from hostcache.sim.shape import Lane
from hostcache.sim.twin import (
    START,
    Cell,
    Coefficients,
    Measured,
    closed_form,
    copy_speed,
    fit_code,
    fit_prose,
    fleet_shape,
    harness_stream,
    measure,
    restored_s,
    six_streams,
    twin,
)
from hostcache.tier import Direction


def test_the_fleet_is_the_published_one() -> None:
    shape = fleet_shape(START, "on")
    assert (shape.pool_tokens, shape.page, shape.slots) == (2_200_000, 512, 16)
    assert (shape.prompt_entries, shape.turn_entries, shape.tail_bytes) == (24, 24, 2_922_816)
    assert shape.tier.host_cache_bytes == 24 << 30
    assert shape.tier.page_bytes == 512 * 890
    assert shape.lane is Lane.EXCLUSIVE
    assert fleet_shape(START, "off").tier.frames == 0


def test_the_fit_asks_for_no_cell_that_it_may_not_see() -> None:
    asked: set[str] = set()

    def runs(coefficients: Coefficients, tasks: Sequence[tuple[Cell, int]]) -> Sequence[Measured]:
        names = [f"K={cell.agents} {cell.arm}" if cell.agents else f"{cell.rotation} {cell.arm}" for cell, _ in tasks]
        asked.update(names)
        averages = {"K=8 off": 2.8, "K=8 on": 2.9, "K=48 off": 130.0, "K=48 on": 28.0}
        return [{"avg_s": averages.get(name, 0.0), "ttft_p50": 0.5, "decode_p50": 50.0, "revisits": 300.0}
                for name in names]  # fmt: skip

    fit_code(runs, rounds=2, seeds=1, progress=lambda line: None)
    fit_prose(runs, rounds=2, seeds=1, progress=lambda line: None)
    assert asked == {"K=8 off", "K=8 on", "K=48 off", "K=48 on", "R1 off", "R1 on"}
    assert {published().roles[name] for name in asked} == {"fitted"}


def test_no_predicted_row_is_named_where_coefficients_are_made() -> None:
    for function in (fit_code, fit_prose, closed_form, six_streams, twin_module._prose_steps):
        constants = {node.value for node in ast.walk(ast.parse(inspect.getsource(function)))
                     if isinstance(node, ast.Constant)}  # fmt: skip
        assert not constants & {16, 32, "R2", "R3", "R4", "R5", 320840, 1000007}


def test_what_needs_no_simulation_is_read_off_the_rows_that_may_be_fitted() -> None:
    found = closed_form(START)
    assert restored_s(found, 54_620) == pytest.approx(0.046)
    assert found.prefill_square_s == pytest.approx(1.0e-10, rel=0.01)
    step = six_streams(found, (100.0,), 2000)
    wall = 199 * step + 6 * (found.costs.setup_s(2000) + found.costs.prefill_s(0, 2000))
    assert 1200 / wall == pytest.approx(100.0)


def test_a_million_tokens_are_the_bytes_that_were_published() -> None:
    facts = published().fleet
    seconds = copy_speed(facts).seconds(Direction.RESTORE, 1_000_007 // 512 * 512 * 890, 1)
    assert seconds * facts.copy_bytes_per_s_per_segment == pytest.approx(893e6, rel=1e-3)


def test_gaps_are_the_draws_of_the_harness() -> None:
    one, again, other = (harness_stream("b5-agentic-on", "gap", client) for client in (3, 3, 4))
    first = round(one.uniform(5, 30), 3)
    assert first == round(again.uniform(5, 30), 3) != round(other.uniform(5, 30), 3)
    assert first == 12.277


def test_the_same_seed_measures_the_same_and_nothing_moves_where_eight_agents_fit() -> None:
    off, on, again = (measure(START, Cell(agents=8, arm=arm), 1) for arm in ("off", "on", "on"))
    assert on == again
    assert off["retries"] == on["retries"] == 0
    assert on["hit_share"] == pytest.approx(off["hit_share"], abs=0.001)


def test_a_short_twin_has_every_figure_and_is_shown_but_not_judged() -> None:
    record = twin(seeds=1, rounds=1, fit_seeds=1)
    assert not record.summary.passed
    assert record.summary.judged == 45
    missing = [row.figure for row in record.rows if row.simulated is None and row.role != "not claimed"]
    assert missing == []
    assert {row.role for row in record.rows if row.predicted} == {"predicted"}
    assert len({each.name for each in record.coefficients}) == 12
