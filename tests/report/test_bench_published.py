"""Every table of the published benchmark, with this run's numbers beside its own as ratios."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.bench.harness.sample_cells import agents_cell, ladder_cell
from tests.report.bench_documents import published, troubled, whole

from hostcache.bench.harness.figures import bench_document
from hostcache.records import Record, RequestRecord, SegmentRecord
from hostcache.report.published_tables import Lookup, beside, kind_of, published_tables, ramp_ratios
from hostcache.report.tables import MISSING, Table

TABLES = {table.title: table for table in published_tables(whole(), published())}


def cell_of(table: Table, row: str, column: str) -> str:
    (found,) = [each for each in table.rows if each[0] == row]
    return found[table.columns.index(column)]


@pytest.mark.parametrize(("name", "kind"), [
    ("b1-overhead", "B1"), ("B1", "B1"), ("pilot", "Pilot"), ("b2_r3", "B2"), ("R4", "B2"), ("b3-recovery", "B3"),
    ("b4-sessions", "B4"), ("b5", "B5"), ("agents", "B5"), ("large-rung", "Large rung"), ("1m", "Large rung"),
    ("equivalence", "Equivalence"), ("something", "")])
def test_a_cell_is_known_by_its_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_every_table_of_section_7_is_there() -> None:
    assert list(TABLES) == [
        "Cells: the published benchmark and this run", "Restore against cold prefill", "Steady rotation R1 to R5",
        "No overhead: cold ladders", "A/B/A passes: the arms alternated", "No overhead: decode", "The agents' ramp",
        "The ramp as ratios, this run beside the published one"]


def test_the_overview_names_each_published_cell_and_what_this_run_says() -> None:
    table = TABLES["Cells: the published benchmark and this run"]
    assert [row[0] for row in table.rows] == ["B1", "Pilot", "B2", "B3", "B4", "B5", "Large rung", "Equivalence"]
    assert cell_of(table, "B4", "this run") == "not run"
    assert cell_of(table, "Equivalence", "this run").startswith("4 of 4 identical")
    assert "(no benefit claimed)" in cell_of(table, "B2", "this run")
    assert cell_of(table, "B2", "bars") == "0 of 1 passed"


def test_rotations_are_compared_as_rates_with_the_published_ratio() -> None:
    table = TABLES["Steady rotation R1 to R5"]
    assert [row[0] for row in table.rows] == ["R1", "R2", "R3", "R4", "R5"]
    # Published: 544 in 600 s over 112 in 300 s.
    columns = [i for i, name in enumerate(table.columns) if name == "published"]
    assert [table.rows[0][i] for i in columns] == ["2.43×", "3.66×", "98.6 %"]
    assert cell_of(table, "R2", "revisits on ÷ off") == "1.00×"
    assert cell_of(table, "R1", "restore mean").endswith(" ms")


def test_the_ladders_stand_beside_the_published_rungs_by_size_and_corpus() -> None:
    table = TABLES["No overhead: cold ladders"]
    assert [(row[0], row[1], row[6]) for row in table.rows] == [
        ("prose", "256", "19,734"), ("prose", "512", "69,343"), ("prose", "1,024", "134,578"),
        ("prose", "2,048", "650,943"), ("code", "256", "14,725"), ("code", "512", "65,775"),
        ("code", "1,024", "133,819"), ("code", "2,048", "510,215")]
    assert [row[7] for row in table.rows] == ["1.25×", "1.31×", "1.06×", "1.00×", "1.10×", "0.96×", "0.81×", "1.01×"]


def test_passes_show_each_pair_and_the_single_stream_decode() -> None:
    table = TABLES["A/B/A passes: the arms alternated"]
    assert [row[0] for row in table.rows if "decode" in row[0]] == ["1 single-stream decode", "2 single-stream decode"]
    assert len(table.rows) == 2 * (8 + 1)
    beside_it = {row[0]: row[-2:] for row in table.rows}
    assert beside_it["1 prose 256"] == ("2, 18,776", "0.92×")
    assert beside_it["2 prose 2048"] == ("3, 650,439", "0.99×")
    assert beside_it["2 code 2048"] == (MISSING, MISSING)
    assert beside_it["2 single-stream decode"] == ("pass 3", "1.08×")


def test_a_pass_that_was_not_run_is_named_with_what_was_published() -> None:
    document = bench_document([ladder_cell(arm) for arm in ("off", "on")])
    table = {table.title: table for table in published_tables(document, published())}[
        "A/B/A passes: the arms alternated"]
    assert [row[-2] for row in table.rows if row[0].startswith("not run")] == [
        "3, 16,592", "3, 91,383", "3, 167,018", "3, 650,439", "pass 3"]


def test_restores_align_the_largest_with_the_largest() -> None:
    table = TABLES["Restore against cold prefill"]
    assert table.rows[-1][0] == "3,000 tokens (equivalence)"
    assert [row[-1] for row in table.rows[-3:]] == ["180×", "159×", "249×"]


def test_the_ramp_stands_beside_the_published_points() -> None:
    table = TABLES["The agents' ramp"]
    assert [row[0] for row in table.rows] == ["8 off", "8 on", "16 off", "16 on", "32 off", "32 on"]
    assert table.rows[-1][-6:] == ("32 on", "264", "14.0 s", "1.11 s", "96.0 %", "38.0 s")
    ratios = ramp_ratios(Lookup(whole()), published())
    assert ratios[-1]["turns_published"] == pytest.approx(264 / 84)
    assert ratios[-1]["turns"] > 3


def renamed(records: list[Record], names: dict[str, str]) -> list[Record]:
    return [dataclasses.replace(record, part=names.get(record.part, record.part))
            if isinstance(record, SegmentRecord | RequestRecord) else record for record in records]


def test_a_scaled_ramp_is_matched_by_order_and_says_so() -> None:
    document = bench_document([renamed(agents_cell(arm, points=(8, 16)), {"8": "4", "16": "6"})
                               for arm in ("off", "on")])
    match, by = beside(Lookup(document), published())
    assert match == {"4": 8, "6": 16}
    assert "scaled" in by


@pytest.mark.parametrize("document", [troubled(), bench_document([])])
def test_what_was_not_run_or_not_allowed_leaves_the_published_rows_standing(document: dict[str, Any]) -> None:
    tables = {table.title: table for table in published_tables(document, published())}
    rotation = tables["Steady rotation R1 to R5"]
    assert {row[1] for row in rotation.rows} == {"not run"}
    assert all(MISSING in row for row in rotation.rows)
    assert len(tables["No overhead: cold ladders"].rows) == 8
