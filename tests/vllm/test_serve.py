"""One real `hostcache vllm serve` process with the front door. Red: the shipped command is broken."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.vllm.server import BLOCK, SMALL, Server, prompt, serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

SLOTS, WAITING = 4, 12  # slots: what --max-num-seqs says


@pytest.fixture(scope="module")
def server(tiny_llama: Path, server_environ: dict[str, str],
           tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    ours = ["--host-cache-bytes", "64MiB", "--front-door", "--front-door-waiting", str(WAITING),
            "--front-door-wait-s", "60"]
    log = tmp_path_factory.mktemp("serve") / "serve.log"
    with serving(tiny_llama, log=log, ours=ours, theirs=SMALL, environ=server_environ) as running:
        yield running


def test_an_evicted_prompt_comes_back_from_the_host_with_the_same_answer(server: Server) -> None:
    wanted = prompt("returns", 10)
    cold = server.ask(wanted)
    assert cold.cached == 0
    server.evict("one")
    before = server.metrics()
    warm = server.ask(wanted)
    assert (warm.tokens, warm.cached) == (cold.tokens, 10 * BLOCK)
    after = server.metrics()

    def moved(name: str) -> float:
        return after[name] - before[name]

    assert moved("vllm:prompt_tokens_cached_by_source_total{source=host}") == 10 * BLOCK
    assert moved("hostcache_cached_tokens_total{source=host}") == 10 * BLOCK
    assert moved("hostcache_restore_latency_seconds_count") == moved("hostcache_restores_total") == 1
    assert 0 < moved("hostcache_restore_latency_seconds_sum") < 60
    assert moved("hostcache_prompt_tokens_total") == 10 * BLOCK + 1
    assert moved("hostcache_recomputed_tokens_total{reason=partial_page}") == 1


def test_another_salt_gets_nothing_of_it(server: Server) -> None:
    wanted = prompt("salted", 6)
    server.ask(wanted, cache_salt="one")
    assert server.ask(wanted, cache_salt="one").cached == 6 * BLOCK
    assert server.ask(wanted, cache_salt="two").cached == 0
    server.evict("two")
    assert server.ask(wanted, cache_salt="three").cached == 0
    assert server.ask(wanted, cache_salt="one").cached == 6 * BLOCK


def test_resetting_the_prefix_cache_clears_the_host_too(server: Server) -> None:
    wanted = prompt("forgotten", 10)
    server.ask(wanted)
    server.evict("three")
    assert httpx.post(f"{server.url}/reset_prefix_cache", timeout=30).status_code == 200
    assert server.ask(wanted).cached == 0


def test_200_requests_on_4_slots_are_answered_or_told_when_to_come_back(server: Server) -> None:
    async def burst() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=200,
                                     limits=httpx.Limits(max_connections=200)) as client:
            return await asyncio.gather(*(
                client.post("/v1/completions", json=server.body(prompt(f"burst {number % 20}", 1 + number % 5)))
                for number in range(200)))

    answers = asyncio.run(burst())
    assert {answer.status_code for answer in answers} == {200, 429}
    assert sum(answer.status_code == 200 for answer in answers) >= SLOTS + WAITING
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
        else:
            assert answer.json()["choices"][0]["finish_reason"] == "length"


def nothing_held(now: dict[str, float]) -> bool:
    return (now["vllm:num_requests_running"] == now["vllm:num_requests_waiting"] == now["vllm:kv_cache_usage_perc"] == 0
            and now["hostcache_live_pins"] == now["hostcache_live_reservations"] == 0
            and now["hostcache_pins_taken_total"] == now["hostcache_pins_released_total"] > 0)


def test_after_the_burst_nothing_is_held(server: Server) -> None:
    wanted = prompt("after", 3)
    assert server.ask(wanted).tokens == server.ask(wanted).tokens
    server.until(nothing_held, "nothing is held")
    assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200


def is_cut_short(server: Server, name: str, wanted: int = 440) -> bool:
    """Whether an answer ends with its client. On a quick machine one may be whole before the server hears of it."""
    before = server.metrics()["vllm:generation_tokens_total"]
    assert server.leave(prompt(name, 1), after=3, max_tokens=wanted) == 3
    now = server.until(nothing_held, "nothing is held")
    return now["vllm:generation_tokens_total"] - before < wanted


def test_clients_that_leave_in_mid_answer_or_while_they_wait_hold_nothing(server: Server) -> None:
    wanted = [prompt(f"leaves {number}", 10) for number in range(6)]
    cold = [server.ask(each) for each in wanted]
    assert any(is_cut_short(server, f"leaves soon {number}") for number in range(20)), "answered to its end for nobody"
    server.evict("while they are away")
    for each in wanted:  # their blocks are on the host: they wait for a copy, or for others
        server.leave(each, after=0, max_tokens=150)
    server.until(nothing_held, "nothing is held")
    assert [server.ask(each).tokens for each in wanted] == [each.tokens for each in cold]


def test_a_request_may_ask_where_its_tokens_came_from_and_refuse_the_tier(server: Server) -> None:
    wanted = prompt("reported", 10)
    server.ask(wanted)
    server.evict("before the report")

    def report(wishes: dict[str, object]) -> dict[str, Any]:
        body = server.body(wanted, kv_transfer_params={"hostcache": wishes})
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
        assert reply.status_code == 200
        told: dict[str, Any] = reply.json()["kv_transfer_params"]["hostcache"]
        return told

    refused = report({"load": False, "colour": "red"})
    assert (refused["host"], refused["recomputed"]["opted_out"]) == (0, 10 * BLOCK)
    assert list(refused["refused"]) == ["colour"]
    server.evict("after the report")
    assert report({})["host"] == 10 * BLOCK


def test_the_own_time_of_the_steps_is_shown(server: Server) -> None:
    now = server.until(lambda now: now.get("hostcache_step_interval_seconds{quantile=0.5}", 0) > 0, "steps were timed")
    assert 0 < now["hostcache_step_seconds{quantile=0.5}"] <= now["hostcache_step_seconds{quantile=0.99}"] < 1
    assert now["hostcache_running_requests_peak"] >= SLOTS - 1


def test_a_term_signal_ends_it_in_order(server: Server) -> None:
    """The last test of this file: the process that hostcache became is vLLM's own."""
    server.process.terminate()
    assert server.process.wait(60) == 0
