"""Both text formats of /metrics, read strictly, and beside another parser."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as classic_families

from hostcache.client.exposition import CREATED, parse, read_exposition
from hostcache.errors import ServerError

CLASSIC = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def values(text: str, content_type: str) -> dict[str, float]:
    return {f"{sample.name}{dict(sample.labels)}": sample.value for sample in parse(text, content_type)}


def test_a_classic_text_is_read_with_everything_it_may_have() -> None:
    text = ('# HELP a_total what\n# TYPE a_total counter\na_total{x="1",y="q\\"\\\\\\n"} 3 1790000000000\n'
            '  a_total { x = "2", } 4.5e1\n\n# a comment\n# TYPE\nb{} +Inf\nc -7\nd NaN\n'
            '# TYPE h histogram\nh_bucket{le="+Inf"} 2\nh_sum 3\nh_count 2\n')
    samples = parse(text, CLASSIC)
    assert [(sample.name, sample.labels, sample.kind) for sample in samples] == [
        ("a_total", {"x": "1", "y": 'q"\\\n'}, "counter"), ("a_total", {"x": "2"}, "counter"), ("b", {}, "untyped"),
        ("c", {}, "untyped"), ("d", {}, "untyped"), ("h_bucket", {"le": "+Inf"}, "histogram"),
        ("h_sum", {}, "histogram"), ("h_count", {}, "histogram")]
    assert [sample.value for sample in samples[:4]] == [3, 45, math.inf, -7]
    assert math.isnan(samples[4].value)
    assert samples[0].line.startswith('a_total{x="1"')


def test_openmetrics_are_read_with_everything_they_may_have() -> None:
    text = ('# TYPE a counter\n# UNIT a tokens\n# HELP a what\na_total{x="1"} 3 1790000000.5 # {id="r 1"} 1 17.5\n'
            'a_created{x="1"} 1790000000\na_total{x="2 # "} 4\n# TYPE g gauge\ng_created 7\n# TYPE i info\n'
            'i_info{v="1"} 1\nloose 3\n# EOF\n')
    assert [(sample.name, sample.kind, sample.value) for sample in parse(text, OPENMETRICS)] == [
        ("a_total", "counter", 3), ("a_created", CREATED, 1790000000), ("a_total", "counter", 4),
        ("g_created", "unknown", 7), ("i_info", "info", 1), ("loose", "unknown", 3)]


def test_a_time_of_creation_is_told_from_a_gauge_that_is_named_like_one() -> None:
    text = ("# TYPE a_total counter\na_total 3\n# TYPE a_created gauge\na_created 1790000000\n"
            "# TYPE pods_created gauge\npods_created 12\n")
    assert [sample.kind for sample in parse(text, CLASSIC)] == ["counter", CREATED, "gauge"]


def test_a_family_without_a_sample_is_declared_under_the_name_its_samples_would_have() -> None:
    assert read_exposition("# TYPE a counter\n# TYPE b gauge\n# EOF\n", OPENMETRICS).families == {
        "a_total": "counter", "b": "gauge"}
    assert read_exposition("# TYPE a_total counter\n# TYPE b counter\n", CLASSIC).families == {
        "a_total": "counter", "b_total": "counter"}


def test_a_histogram_whose_name_ends_in_total_is_no_counter() -> None:
    text = "# TYPE vllm:iteration_tokens_total histogram\nvllm:iteration_tokens_total_sum 5\n"
    assert [sample.kind for sample in parse(text, CLASSIC)] == ["histogram"]
    assert [sample.kind for sample in parse(text + "# EOF\n", OPENMETRICS)] == ["histogram"]


@pytest.mark.parametrize(("text", "wrong"), [
    ("a", "no space behind it"), ("{a=\"b\"} 3", "no metric name"), ("a{b=c} 3", "NAME=\"VALUE\""),
    ("a{b=\"c\" 3", "NAME=\"VALUE\""), ("a{b=\"1\",b=\"2\"} 3", "stands twice"), ("a x", "no number"),
    ("a 0x10", "no number"), ("a 1_0", "no number"), ("a 3 4 5", "at most a timestamp"), ("a 3 1.5", "milliseconds"),
    ("a 3\na 4", "second time"), ("# TYPE a counter\n# TYPE a gauge", "declared twice"), ("# TYPE a money", "no type"),
])
def test_a_classic_text_that_is_wrong_is_refused_with_its_line(text: str, wrong: str) -> None:
    with pytest.raises(ServerError, match=r"line [12]: ") as error:
        parse(text, CLASSIC)
    assert wrong in str(error.value)


@pytest.mark.parametrize(("text", "wrong"), [
    ("a 3\n", "do not end in '# EOF'"), ("", "do not end in '# EOF'"), ("a 3\n# EOF\nb 4\n", "do not end in '# EOF'"),
    ("# EOF\n# EOF\n", "goes on"), ("a 3\n\n# EOF\n", "no empty lines"), ("# hello\n# EOF\n", "no free comments"),
    ("# TYPE a counter\na 3\n# EOF\n", "lacks a suffix"), ("# TYPE a counter\na_total -3\n# EOF\n", "at least 0"),
    ("# TYPE a counter\na_total NaN\n# EOF\n", "at least 0"),
    ("a 1\nb 2\na{x=\"1\"} 3\n# EOF\n", "goes on after another"),
    ("a 1\n# TYPE a gauge\n# EOF\n", "after its samples"),
])
def test_openmetrics_that_are_wrong_or_cut_short_are_refused(text: str, wrong: str) -> None:
    with pytest.raises(ServerError) as error:
        parse(text, OPENMETRICS)
    assert wrong in str(error.value)


LABELS = st.lists(st.text(max_size=6), min_size=2, max_size=2)


def metrics(counters: Iterable[tuple[list[str], int]], gauge: float, prefix: str = "") -> CollectorRegistry:
    class Collector:
        def collect(self) -> Iterable[Metric]:
            family = CounterMetricFamily(f"{prefix}prefix_cache_hits", "Hits.", labels=["engine", "model_name"])
            for labels, value in counters:
                family.add_metric(labels, value, created=1790000000.0)
            yield family
            histogram = HistogramMetricFamily(f"{prefix}iteration_tokens_total", "Tokens.")
            histogram.add_metric([], buckets=[("1.0", 2), ("+Inf", 3)], sum_value=7)
            yield histogram
            yield GaugeMetricFamily(f"{prefix}kv_cache_usage_perc", "Usage.", value=gauge)

    registry = CollectorRegistry()
    registry.register(Collector())
    return registry


def openmetrics_of(registry: CollectorRegistry) -> str:
    return str(generate_openmetrics(registry).decode())  # type: ignore[no-untyped-call]


@settings(max_examples=50)
@given(st.lists(st.tuples(LABELS, st.integers(0, 2**50)), max_size=4, unique_by=lambda each: tuple(each[0])),
       st.floats(allow_nan=False))
def test_what_the_python_client_writes_is_read_as_it_reads_it(counters: list[tuple[list[str], int]],
                                                              gauge: float) -> None:
    registry = metrics(counters, gauge)
    for text, content_type, families in (
            (generate_latest(registry).decode(), CLASSIC, classic_families),
            (openmetrics_of(registry), OPENMETRICS, openmetrics_families)):
        theirs = {f"{sample.name}{dict(sample.labels)}": sample.value for family in families(text)
                  for sample in family.samples}
        assert values(text, content_type) == theirs
        assert sum(sample.value for sample in parse(text, content_type) if sample.kind == "counter") == sum(
            value for _, value in counters)


def test_names_with_a_colon_come_back_where_the_python_client_wrote_underscores() -> None:
    registry = metrics([(["0", "m"], 3), (["1", "m"], 4)], 0.5, "vllm:")
    text = openmetrics_of(registry)
    samples = parse(text, OPENMETRICS)
    assert {(sample.name, sample.kind) for sample in samples if "hits" in sample.name} == {
        ("vllm:prefix_cache_hits_total", "counter"), ("vllm:prefix_cache_hits_created", CREATED)}
    assert {sample.name for sample in samples} == {
        sample.name for sample in parse(generate_latest(registry).decode(), CLASSIC)}


@given(st.text(max_size=200))
def test_no_text_whatever_makes_it_raise_anything_else(text: str) -> None:
    for content_type, whole in ((CLASSIC, text), (OPENMETRICS, text + "\n# EOF\n")):
        try:
            parse(whole, content_type)
        except ServerError as error:
            assert "\n" not in str(error)  # noqa: PT017
