"""Figures of cells that were really run, against a mock server whose counters always add up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.bench.harness.on_mock import measure_on, read

from hostcache.bench.harness.figures import cell_figures, compare
from hostcache.bench.harness.rotate import RotateParameters
from hostcache.bench.harness.target import Target
from hostcache.testing.mock_server import MockConfig, MockServer

LOAD = RotateParameters(clients=2, sessions=8, tokens=300, reply_tokens=4, growth_tokens=16, duration_s=0.5,
                        recovery_idle_s=0.0, observe_idle_s=0.0, probe_every_s=0.2, probe_tokens=4)
PATIENT_S = 60.0
"""Other work on this machine is not what is tested."""


def run(style: Literal["hostcache", "vllm"], arm: str, folder: Path, **spec: Any) -> dict[str, Any]:
    """Two of the eight sessions fit on the device."""
    config = MockConfig(style=style, plugin=style == "vllm", device_blocks=48, base_s=0.001, s_per_token=1e-5,
                        itl_s=0.0, host_blocks=4096 if arm == "on" else 0, s_per_restored=0.0)

    async def measure() -> None:
        async with MockServer(config) as server:
            await measure_on(server, LOAD, folder, arm=arm, cell="b2-r3", **spec,
                             target=Target(arm=arm, url=server.url, tier=arm))  # type: ignore[arg-type]

    asyncio.run(measure())
    return cell_figures(read(folder), lag_bar_s=PATIENT_S)


@pytest.mark.parametrize("style", ["hostcache", "vllm"])
def test_a_measured_pair_is_clean_balanced_and_shows_its_benefit(style: Literal["hostcache", "vllm"],
                                                                  tmp_path: Path) -> None:
    cells = [run(style, arm, tmp_path / arm) for arm in ("off", "on")]
    for cell in cells:
        assert cell["reasons"] == []
        assert cell["state"]["start"]["verdict"] == "cold"
        assert cell["state"]["start"]["control"] == {"n": 2, "hit_share": 0.0}
        assert {each["balance"]["verdict"] for each in cell["segments"]} == {"balanced"}
        for each in cell["segments"]:
            assert each["counters"]["prompt_tokens"] == each["usage_prompt_tokens"]
    comparison = compare(cells)
    assert comparison["refused"] == []
    (row,) = comparison["rows"]
    assert row["benefit"] == "measured"
    assert row["values"]["hit_share"]["off"] == 0.0
    assert row["values"]["hit_share"]["on"] > 0.8
    assert row["paired"]["coverage_gain"] > 0.8


def test_a_second_run_of_one_salt_on_a_warm_server_is_found_out(tmp_path: Path) -> None:
    config = MockConfig(device_blocks=4096, base_s=0.0, s_per_token=0.0, itl_s=0.0)

    async def twice() -> None:
        async with MockServer(config) as server:
            for name in ("first", "second"):
                await measure_on(server, LOAD, tmp_path / name, arm="off", cell="b2-r3", salt="the same",
                                 target=Target(arm="off", url=server.url, tier="off"))

    asyncio.run(twice())
    first, second = (cell_figures(read(tmp_path / name), lag_bar_s=PATIENT_S) for name in ("first", "second"))
    assert first["reasons"] == []
    assert (second["void"], [reason["code"] for reason in second["reasons"]]) == (True, ["contaminated"])
