"""`hostcache bench vllm` without vLLM: what a scrape proves, what follows from raw numbers, what is judged and said."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.bench.progress import Progress
from hostcache.bench.vllm import calm, fleet, ttft
from hostcache.bench.vllm.commands import FULL, QUICK, STAGES, add_arguments, chosen, run, settle_sizes, stages
from hostcache.bench.vllm.metrics import moved, moved_by_label, parse
from hostcache.bench.vllm.rig import ModelFacts, Rig, lines, model_facts
from hostcache.bench.vllm.servers import (
    BLOCK_TOKENS,
    NATIVE,
    OFF,
    ON,
    Arm,
    Launcher,
    Server,
    Shape,
    command,
    doubt_of,
    others,
)
from hostcache.client.openai import Failure, OpenAIClient, Reply, ReplyUsage
from hostcache.clock import WallClock
from hostcache.errors import ConfigError, MissingDependency, ServerError
from hostcache.vllm_plugin import support
from hostcache.workload.agents import AgentShape
from hostcache.workload.corpus import CodeCorpus, SourceFile

SHAPE = Shape(model_dir=Path("model"), token_bytes=46_080, pool_blocks=100, max_model_len=3200)
AGENT = AgentShape(prefix_tokens=100, tool_tokens=6, reply_tokens=4, gap_min_s=0.0, gap_max_s=1.0)

OFF_PAGE = 'vllm:external_prefix_cache_queries_total{engine="0",model_name="bench"} 0.0'
ON_PAGE = """# HELP hostcache_quota_bytes Host bytes.
# TYPE hostcache_quota_bytes gauge
hostcache_quota_bytes{engine="0",model_name="bench"} 2.68e+08
hostcache_cached_tokens_total{engine="0",model_name="bench",source="device"} 512.0
hostcache_cached_tokens_total{engine="0",model_name="bench",source="host"} 64.0
hostcache_lag_bucket{engine="0",le="+Inf"} 3.0
hostcache_nothing{engine="0"} NaN
vllm:external_prefix_cache_queries_total{engine="0",model_name="bench"} 104.0"""
NATIVE_PAGE = """vllm:kv_offload_load_bytes_total{engine="0",model_name="bench"} 0.0
vllm:external_prefix_cache_queries_total{engine="0",model_name="bench"} 104.0"""


# --- scrapes --------------------------------------------------------------------------------------------------------


def test_a_scrape_sums_over_labels_and_knows_absent_from_zero() -> None:
    page = parse(ON_PAGE)
    assert page.value("hostcache_cached_tokens_total") == 576
    assert page.value("hostcache_cached_tokens_total", source="host") == 64
    assert page.value("hostcache_cached_tokens_total", source="disk") is None
    assert page.value("hostcache_nothing") is None
    assert page.by_label("hostcache_cached_tokens_total", "source") == {"device": 512, "host": 64}
    assert page.flat("hostcache_") == {
        "hostcache_quota_bytes": 2.68e8, "hostcache_cached_tokens_total{source=device}": 512,
        "hostcache_cached_tokens_total{source=host}": 64}


def test_what_moved_between_two_scrapes() -> None:
    before, after = parse('a_total{source="x"} 2'), parse('a_total{source="x"} 5\na_total{source="y"} 1')
    assert moved(before, after, "a_total") == 4
    assert moved_by_label(before, after, "a_total", "source") == {"x": 3, "y": 1}
    assert moved(before, after, "b_total") is None
    with pytest.raises(ServerError, match=r"a_total went down from 6 to 2"):
        moved(after, before, "a_total")


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 10**12)))
def test_every_number_of_a_page_is_read_back(values: dict[str, int]) -> None:
    page = parse("\n".join(f'n_total{{which="{name}"}} {value}' for name, value in values.items()))
    assert page.by_label("n_total", "which") == values


@pytest.mark.parametrize(("arm", "page"), [(OFF, OFF_PAGE), (ON, ON_PAGE), (NATIVE, NATIVE_PAGE)])
def test_an_arm_is_believed_on_its_own_metrics_only(arm: Arm, page: str) -> None:
    assert doubt_of(arm, parse(page)) is None
    for other in {OFF_PAGE, ON_PAGE, NATIVE_PAGE} - {page}:
        assert doubt_of(arm, parse(other))


def test_a_tier_that_is_off_is_not_the_on_arm() -> None:
    assert "hostcache_quota_bytes 0" in str(doubt_of(ON, parse("hostcache_quota_bytes 0.0")))


def test_another_connector_must_have_been_asked() -> None:
    (arm,) = others(['peer={"kv_connector": "Peer"}'], [])
    assert "asked no external cache" in str(doubt_of(arm, parse(OFF_PAGE)))
    assert doubt_of(arm, parse(NATIVE_PAGE)) is None


# --- arms -----------------------------------------------------------------------------------------------------------


def test_all_arms_get_the_same_flags_and_environment() -> None:
    (peer,) = others(['peer={"kv_connector": "Peer"}'], ["peer:PEER_HOME=x=y"])
    commands = {arm.name: command(SHAPE, arm, 1 << 30, 8000) for arm in (OFF, ON, NATIVE, peer)}
    for name, words in commands.items():
        for flag in SHAPE.flags():
            assert flag in words
        for variable, value in SHAPE.environment().items():
            assert f"{variable}={value}" in words, name
    assert "--kv-transfer-config" not in commands["off"]
    assert "--host-cache-bytes" in commands["on"]
    assert "offload_spec" in commands["native"][-1]
    assert commands["peer"][-1] == '{"kv_connector": "Peer"}'
    assert "PEER_HOME=x=y" in commands["peer"]


@pytest.mark.parametrize(("text", "environment", "said"), [
    ("x", [], "NAME=JSON"), ("on={}", [], "new NAME"), ("x={", [], "no JSON object"), ("x=[]", [], "no JSON object"),
    ("x={}", ["y:A=1"], "a NAME that --other has"), ("x={}", ["x:A"], "NAME:KEY=VALUE"),
])
def test_a_wrong_other_arm_is_refused_in_one_line(text: str, environment: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        others([text], environment)


def test_kv_bytes_of_a_token_come_from_the_models_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576,
        "max_position_embeddings": 8192}), "utf-8")
    facts = model_facts(tmp_path)
    assert (facts.token_bytes, facts.max_context) == (46_080, 8192)
    with pytest.raises(ConfigError, match=r"config\.json does not describe a model"):
        model_facts(tmp_path / "nowhere")


# --- ttft -----------------------------------------------------------------------------------------------------------


def visit(kind: str, index: int, ttft_s: float, **more: Any) -> dict[str, Any]:
    """Of a prompt of two blocks and a tail; what it says of its sources is right unless `more` changes it."""
    warm = kind in ("again", "local", "identity again")
    host = kind in ("again", "identity again")
    return {"kind": kind, "prompt": index, "ttft_s": ttft_s, "duration_s": ttft_s + 0.1, "prompt_tokens": 72,
            "cached_tokens": 64 if warm else 0, "by_source": {"host" if host else "device": 64.0} if warm else {},
            "hostcache_by_source": {"host": 64.0} if host else {}, "recomputed": {}, "token_ids": [1, 2, index],
            "restored_bytes": 6.0e6 if host else 0.0, "restore_s": None, **more}


def measured(**changed: list[dict[str, Any]]) -> dict[str, Any]:
    off = [visit("cold", 0, 9.0), visit("cold", 1, 11.0),
           *(visit("again", at, 10.0, cached_tokens=0, by_source={}) for at in (0, 1)),
           *(visit("local", at, 0.2) for at in (0, 1)), visit("identity cold", 0, 3.0)]
    on = [visit("cold", 0, 10.0), visit("cold", 1, 10.0), visit("again", 0, 0.5), visit("again", 1, 0.4),
          visit("local", 0, 0.3), visit("local", 1, 0.4), visit("identity cold", 0, 3.0),
          visit("identity again", 0, 0.2)]
    native = [visit("cold", 0, 12.0), visit("cold", 1, 12.0), visit("again", 0, 0.5), visit("again", 1, 0.5),
              visit("local", 0, 0.3), visit("local", 1, 0.3)]
    arms = {name: {"arm": name, "visits": changed.get(name, visits), "first_visits_s": 20.0 + len(name)}
            for name, visits in (("off", off), ("on", on), ("native", native))}
    result = {"prompt_tokens": 72, "prompts": 2, "pool_tokens": 128, "kinds": {name: name for name in arms},
              "arms": arms, "plain_copy_bytes_s": 6.0e7}
    return {**result, "figures": ttft.figures(result)}


def verdicts(bars: list[tuple[str, str, float, bool]]) -> dict[str, bool]:
    return {what: met for what, _, _, met in bars}


def test_ttft_figures_follow_from_the_visits() -> None:
    result = measured()
    figured = result["figures"]
    assert figured["restored_over_cold"]["values"] == pytest.approx([0.5 / 9, 0.4 / 10])
    assert figured["copy_s"] == pytest.approx(0.1)
    assert figured["copy_rate_from"] == "a plain copy"
    assert figured["restored_bar_s"] == pytest.approx(1.25 * 0.35 + 0.1)
    assert figured["peers"]["native"]["pairs"] == pytest.approx([1.0, 0.8])
    assert figured["store_cost"]["on"]["cold"] == pytest.approx(1.0)
    assert figured["identity"] == {"prompts": 1, "same_as_cold": 1, "compared_with_off": 1, "same_as_off": 1}
    assert all(verdicts(ttft.bars(result)).values())
    shown = ttft.table(result)
    assert "cold ÷ restored" in shown
    assert "1 of 1" in shown
    assert "not proven" not in shown


def test_a_visit_without_proof_is_named_and_misses_a_bar() -> None:
    wrong = [visit("cold", 0, 9.0), visit("cold", 1, 9.0), visit("again", 0, 0.4, hostcache_by_source={"device": 64.0}),
             visit("again", 1, 0.4, cached_tokens=None), visit("local", 0, 0.3),
             visit("local", 1, 0.3, cached_tokens=32)]
    result = measured(on=wrong)
    assert result["figures"]["arms"]["on"]["doubts"] == [
        "again 1: 0 of 64 tokens came from the host", "again 2: the answer does not say how much of it was cached",
        "local 2: 32 tokens came from a cache, not 64"]
    assert not verdicts(ttft.bars(result))["ttft: visits whose source is not proven"]
    assert "not proven, on: again 1" in ttft.table(result)


def test_an_answer_that_differs_misses_its_bar() -> None:
    on = measured()["arms"]["on"]["visits"][:-1]
    result = measured(on=[*on, visit("identity again", 0, 0.2, token_ids=[9])])
    assert not verdicts(ttft.bars(result))["ttft: restored answers that differ from the cold ones"]


def test_being_slower_than_another_connector_misses() -> None:
    on = [each for each in measured()["arms"]["on"]["visits"] if each["kind"] != "again"]
    result = measured(on=[*on, visit("again", 0, 0.6), visit("again", 1, 0.6)])
    judged = verdicts(ttft.bars(result))
    assert not judged["ttft: restored, ours ÷ native"]
    assert judged["ttft: first visits (saving), ours ÷ native"]


@given(st.integers(1, 10_000))
def test_prompts_are_whole_blocks_and_a_tail(tokens: int) -> None:
    length = ttft.whole(tokens)
    assert length % BLOCK_TOKENS == ttft.TAIL_TOKENS
    assert length <= max(tokens, BLOCK_TOKENS + ttft.TAIL_TOKENS)


def test_compared_prompts_span_the_lengths() -> None:
    plan = ttft.TtftPlan(prompt_tokens=3000, prompts=5, identity=20, shortest_tokens=400)
    lengths = ttft.identity_lengths(plan)
    assert (len(lengths), lengths[0], lengths[-1]) == (20, 392, 2984)
    assert lengths == sorted(lengths)


def test_a_plain_copy_has_a_rate() -> None:
    assert ttft.plain_copy_bytes_s(WallClock(), 46_080) > 0


# --- fleet and grid -------------------------------------------------------------------------------------------------


def window(arm: str, turns: int, *, cached: int = 50, errors: int = 0, share: float = 0.0) -> dict[str, Any]:
    def turn(phase: str, error: str | None = None) -> dict[str, Any]:
        return {"phase": phase, "error": error, "duration_s": 2.0, "ttft_s": None if error else 1.0, "retries": 0,
                "prompt_tokens": 100, "completion_tokens": 4, "cached_tokens": None if error else cached}

    return {"arm": arm, "host_bytes": 0, "window_s": 10.0, "settled_after_s": 12.0, "share": share,
            "turns": [turn("prime"), turn("before"), *(turn("window") for _ in range(turns)),
                      *(turn("window", "HTTP 500") for _ in range(errors))]}


def whole_result(*windows: dict[str, Any]) -> dict[str, Any]:
    return {"agents": 8, "prefix_tokens": 100, "window_s": 10.0, "pool_tokens": 500, "working_bytes": 1 << 20,
            "windows": list(windows)}


def with_figures(result: dict[str, Any]) -> dict[str, Any]:
    return {**result, "figures": fleet.figures(result)}


def test_turns_are_compared_in_sums_and_in_pairs() -> None:
    result = with_figures(whole_result(window("off", 10), window("on", 40, cached=90), window("on", 50),
                                       window("off", 20)))
    figured = result["figures"]
    assert figured["turns_ratio"] == 3
    assert figured["pairs"] == [4, 2.5]
    assert figured["windows"][1]["hit_share"] == pytest.approx(0.9)
    assert all(verdicts(fleet.bars(result)).values())
    assert "3.00 (pairs 4.00, 2.50); 0 errors" in fleet.table(result)


def test_a_failed_turn_is_an_error_and_counts_for_nothing() -> None:
    result = with_figures(whole_result(window("off", 10), window("on", 40, errors=1)))
    assert result["figures"]["turns"] == {"off": 10, "on": 40}
    assert not verdicts(fleet.bars(result))["fleet: turns that failed"]


def test_nothing_served_gives_no_ratio() -> None:
    result = with_figures(whole_result(window("off", 0), window("on", 0)))
    assert result["figures"]["turns_ratio"] is None
    assert not verdicts(fleet.bars(result))["fleet: turns, on ÷ off"]
    assert "—" in fleet.table(result)


@pytest.mark.parametrize(("turns", "met"), [(8, True), (7, False)])
def test_harm_is_what_the_off_windows_alone_do_not_explain(turns: int, met: bool) -> None:
    result = whole_result(window("off", 9), window("on", turns, share=0.25), window("native", 1, share=0.25),
                          window("off", 11))
    result = {**result, "figures": fleet.grid_figures(result)}
    assert result["figures"]["noise"] == pytest.approx(0.2)
    judged = verdicts(fleet.grid_bars(result))
    assert judged["no-harm: turns, on at 0.25 of the working set ÷ off"] is met
    assert not any("native" in what for what in judged)
    assert "0.10" in fleet.grid_table(result)


def test_equal_off_windows_still_leave_some_noise() -> None:
    result = whole_result(window("off", 10), window("off", 10))
    assert fleet.grid_figures(result)["noise"] == fleet.LEAST_NOISE


def test_the_working_set_is_that_of_a_window_under_way() -> None:
    assert fleet.working_tokens(8, AGENT) == 8 * (100 + 4 * 10)


# --- calm -----------------------------------------------------------------------------------------------------------


def calm_result(on: list[float], off: list[float], *, own: float | None = 1e-4, interval: float | None = 0.5,
                still: float | None = 0.0, seen: float = 256) -> dict[str, Any]:
    runs = [{"arm": arm, "turns_per_s": rate, "tokens_per_s": 100.0, "wall_s": 9.0,
             "still": dict.fromkeys(calm.STILL, still)} for arm, rates in (("off", off), ("on", on)) for rate in rates]
    step = {"running": 256, "most_running_seen": seen, "peak_running": None, "own_s": {"0.5": own, "0.99": own},
            "interval_s": {"0.5": interval, "0.99": interval}}
    result = {"conversations": 4, "turns": 8, "pool_tokens": 1000, "runs": runs, "step": step}
    return {**result, "figures": calm.figures(result)}


def test_calm_within_the_off_runs_own_noise_passes() -> None:
    result = calm_result([0.95, 0.99], [1.0, 0.96, 1.02, 1.0])
    assert result["figures"]["noise"] == pytest.approx(1 - 0.96 / 1.02)
    assert result["figures"]["step_share"] == pytest.approx(2e-4)
    assert all(verdicts(calm.bars(result)).values())
    assert "median 100 µs" in calm.table(result)


def test_slower_than_the_noise_or_a_moved_byte_misses() -> None:
    assert not verdicts(calm.bars(calm_result([0.9], [1.0, 0.99])))["calm: throughput, on ÷ off"]
    assert not verdicts(calm.bars(calm_result([1.0], [1.0], still=32.0)))["calm: hostcache_store_bytes_total"]


def test_what_is_not_shown_is_never_taken_for_zero() -> None:
    result = calm_result([1.0], [1.0], own=None, interval=None, still=None)
    judged = verdicts(calm.bars(result))
    assert not judged["calm: hostcache_pins_taken_total"]
    assert not judged["calm: connector's time per step, median µs (not shown)"]
    assert not judged["calm: its share of the step (not shown)"]
    assert calm.table(result).count("not shown") >= 5


def test_the_step_gauges_are_read_by_their_names() -> None:
    page = parse('hostcache_step_seconds{quantile="0.5"} 0.0001\nhostcache_step_seconds{quantile="0.99"} 0.001\n'
                 'hostcache_step_interval_seconds{quantile="0.5"} 0.8\nhostcache_running_requests_peak 256')
    assert calm.step_gauges(page) == {"own_s": {"0.5": 0.0001, "0.99": 0.001}, "interval_s": {"0.5": 0.8, "0.99": None},
                                      "peak_running": 256}


def test_a_step_of_no_time_was_not_measured() -> None:
    assert calm.step_gauges(parse('hostcache_step_seconds{quantile="0.5"} 0.0'))["own_s"]["0.5"] is None


def test_too_few_requests_at_once_prove_nothing_of_a_step() -> None:
    assert not verdicts(calm.bars(calm_result([1.0], [1.0], seen=200)))["calm: requests running at once"]


# --- the command ----------------------------------------------------------------------------------------------------


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.set_defaults(json=False, strict=False, out=None, model="smollm2")
    return parser.parse_args(words)


def test_sizes_follow_the_form_and_the_flags() -> None:
    assert settle_sizes(arguments()) == FULL
    assert settle_sizes(arguments("--quick")) == QUICK
    sizes = settle_sizes(arguments("--window-s", "60", "--agents", "3", "--prompt-tokens", "200"))
    assert (sizes.window_s, sizes.grid_window_s, sizes.agents, sizes.shortest_tokens) == (60, 30, 3, 200)
    with pytest.raises(ConfigError, match="--agents is 0"):
        settle_sizes(arguments("--agents", "0"))


def test_every_stage_has_its_parts() -> None:
    assert tuple(stages(FULL, ("on",))) == STAGES


def test_an_unknown_stage_is_refused() -> None:
    assert chosen("calm, ttft", STAGES, "--stages") == ("ttft", "calm")
    with pytest.raises(ConfigError, match="'speed' is none of them"):
        chosen("speed", STAGES, "--stages")


@pytest.mark.skipif(support.installed() is not None, reason="vLLM is installed here")
def test_without_vllm_it_says_what_to_run() -> None:
    with pytest.raises(MissingDependency, match="make bench-vllm"):
        run(arguments(), out=io.StringIO(), err=io.StringIO())


def test_a_table_has_straight_columns() -> None:
    assert lines([["a", "bb"], ["ccc", "d"]]) == "a    bb\nccc   d"


# --- whole stages against a pretended vLLM --------------------------------------------------------------------------


class PretendedVllm:
    """Blocks in a pool, least recently used out first; with a connector what goes out is kept. Answers at once."""

    def __init__(self, shape: Shape, arm: Arm, *, fail_from: int | None = None) -> None:
        self.shape, self.arm, self.fail_from = shape, arm, fail_from
        self.pool: dict[tuple[int, ...], None] = {}
        self.host: set[tuple[int, ...]] = set()
        self.counters: Counter[str] = Counter()
        self.asked = 0

    async def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    async def complete(self, prompt: Sequence[int], *, model: str, max_tokens: int, rng: Random) -> Reply | Failure:
        await asyncio.sleep(0)
        self.asked += 1
        if self.fail_from is not None and self.asked > self.fail_from:
            return Failure(error="HTTP 500: EngineCore died", duration_s=0.01, retries=())
        cached = self.serve(tuple(prompt))
        usage = ReplyUsage(prompt_tokens=len(prompt), completion_tokens=max_tokens, hit_tokens=cached,
                           device_tokens=None, host_tokens=None, recomputed=None, first_miss=None)
        return Reply(text="", token_ids=tuple((sum(prompt) + at) % 251 for at in range(max_tokens)), digests=(),
                     margins=(), finish_reason="length", usage=usage, ttft_s=0.01, duration_s=0.02, retries=())

    def serve(self, prompt: tuple[int, ...]) -> int:
        keys = [prompt[:end] for end in range(BLOCK_TOKENS, len(prompt), BLOCK_TOKENS)]
        device = next((at for at, key in enumerate(keys) if key not in self.pool), len(keys))
        found = next((at for at, key in enumerate(keys) if at >= device and key not in self.host), len(keys))
        for key in reversed(keys):  # as in vLLM: the end of a prompt goes before its beginning
            self.pool.pop(key, None)
            self.pool[key] = None
        while len(self.pool) > self.shape.pool_blocks:
            gone = next(iter(self.pool))
            del self.pool[gone]
            if self.arm.kind != "off":
                self.host.add(gone)
                self.counters["hostcache_store_bytes_total"] += self.shape.token_bytes * BLOCK_TOKENS
        self.count(len(prompt), device * BLOCK_TOKENS, (found - device) * BLOCK_TOKENS)
        return found * BLOCK_TOKENS

    def count(self, prompt: int, device: int, host: int) -> None:
        self.counters.update({
            "vllm:prompt_tokens_total": prompt, 'vllm:prompt_tokens_cached_by_source_total{source="device"}': device,
            'vllm:prompt_tokens_cached_by_source_total{source="host"}': host})
        if self.arm.kind == "on":
            self.counters.update({
                "hostcache_prompt_tokens_total": prompt, 'hostcache_cached_tokens_total{source="device"}': device,
                'hostcache_cached_tokens_total{source="host"}': host, "hostcache_store_bytes_total": 0,
                "hostcache_restore_bytes_total": host * self.shape.token_bytes, "hostcache_pins_taken_total": 0})

    def page(self, _request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text="\n".join(f"{name} {value}" for name, value in self.counters.items()))


class PretendedLauncher(Launcher):
    fail_from: int | None = None

    @asynccontextmanager
    async def running(self, shape: Shape, arm: Arm, *, host_bytes: int, name: str) -> AsyncIterator[Server]:
        pretended = PretendedVllm(shape, arm, fail_from=self.fail_from)
        async with httpx.AsyncClient(base_url="http://vllm", transport=httpx.MockTransport(pretended.page)) as http:
            yield Server(shape=shape, arm=arm, host_bytes=host_bytes, command=name, log=f"{name}.log", http=http,
                         client=cast(OpenAIClient, pretended))


class FailingLauncher(PretendedLauncher):
    fail_from = 4


def played(stage: Callable[[Rig], Awaitable[dict[str, Any]]], launcher: type[Launcher] = PretendedLauncher,
           ) -> dict[str, Any]:
    """The result, after a trip through JSON."""
    def text(number: int) -> str:
        draw = Random(number)
        return "".join(chr(draw.randrange(32, 127)) for _ in range(2000))

    clock = WallClock()
    rig = Rig(launcher=launcher(log_dir=Path(), clock=clock), clock=clock, progress=Progress(io.StringIO(), clock),
              corpus=CodeCorpus(tuple(SourceFile(name=str(at), text=text(at), sha256="") for at in range(12))),
              model=ModelFacts(directory=Path("model"), token_bytes=8, max_context=4096), arms=(OFF, ON, NATIVE),
              seed=0)

    async def run_it() -> dict[str, Any]:
        return await stage(rig)

    result: dict[str, Any] = json.loads(json.dumps(asyncio.run(run_it()), allow_nan=False))
    return result


def test_the_ttft_stage_proves_every_visit_of_every_arm() -> None:
    plan = ttft.TtftPlan(prompt_tokens=300, prompts=3, identity=6, shortest_tokens=80)
    result = played(lambda rig: ttft.run(rig, plan))
    assert [arm["doubts"] for arm in result["figures"]["arms"].values()] == [[], [], []]
    assert result["figures"]["identity"] == {"prompts": 6, "same_as_cold": 6, "compared_with_off": 6, "same_as_off": 6}
    assert result["figures"]["arms"]["on"]["restored_bytes"] == 3 * 288 * 8
    judged = verdicts(ttft.bars(result))
    assert judged["ttft: visits whose source is not proven"]
    assert judged["ttft: restored answers that differ from the cold ones"]
    assert ttft.table(result)


def test_the_fleet_stage_counts_turns_of_the_window_alone() -> None:
    shape = AgentShape(prefix_tokens=200, tool_tokens=8, reply_tokens=4, gap_min_s=0.01, gap_max_s=0.02)
    plan = fleet.FleetPlan(agents=3, shape=shape, window_s=0.15, order=("off", "on"))
    result = played(lambda rig: fleet.run(rig, plan))
    for raw, counted in zip(result["windows"], result["figures"]["windows"], strict=True):
        assert [turn["turn"] for turn in raw["turns"] if turn["phase"] == "prime"] == [0, 0, 0]
        assert counted["turns"] == sum(turn["phase"] == "window" for turn in raw["turns"]) > 0
    off, on = result["figures"]["windows"]
    assert on["hit_share"] > 0.8
    assert off["errors"] == on["errors"] == 0
    assert fleet.table(result)


def test_an_agent_that_cannot_be_primed_ends_the_stage_in_one_line() -> None:
    plan = fleet.FleetPlan(agents=6, shape=AGENT, window_s=5.0, order=("off",))
    with pytest.raises(ServerError, match=r"could not be primed: .*EngineCore died; see fleet-0-off.log"):
        played(lambda rig: fleet.run(rig, plan), FailingLauncher)


def test_the_grid_gives_each_share_of_the_working_set() -> None:
    plan = fleet.GridPlan(agents=2, shape=AGENT, window_s=0.05, shares=(0.25, 2.0), arms=("on", "native"))
    result = played(lambda rig: fleet.run_grid(rig, plan))
    assert [(each["arm"], each["share"]) for each in result["windows"]] == [
        ("off", 0), ("on", 0.25), ("on", 2), ("native", 0.25), ("native", 2), ("off", 0)]
    assert result["windows"][2]["host_bytes"] == 2 * result["working_bytes"]
    assert fleet.grid_table(result)
    assert len(fleet.grid_bars(result)) == 3


def test_the_calm_stage_moves_nothing_and_says_which_gauges_are_missing() -> None:
    plan = calm.CalmPlan(conversations=2, turns=3, order=("off", "on", "off"), running=8, step_prompt_tokens=33,
                         step_reply_tokens=4,
                         shape=AgentShape(prefix_tokens=100, tool_tokens=6, reply_tokens=4, gap_min_s=0, gap_max_s=0))
    result = played(lambda rig: calm.run(rig, plan))
    assert [len(each["turns"]) for each in result["runs"]] == [6, 6, 6]
    assert result["figures"]["moved"] == [dict.fromkeys(calm.STILL, 0)]
    assert result["step"]["answers"] == 8
    assert verdicts(calm.bars(result))["calm: hostcache_pins_taken_total"]
    assert "median not shown" in calm.table(result)
