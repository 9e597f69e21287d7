"""`hostcache bench`: which measurement runs, what is printed, when a bar ends in exit 3; and the memory measurement."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hostcache.bench import memory
from hostcache.bench.cli import add_arguments
from hostcache.bench.measurements import MEASUREMENTS, run
from hostcache.bench.progress import PLAIN_EVERY_S, Progress
from hostcache.clock import VirtualClock
from hostcache.errors import ConfigError

MINI = (sys.executable, str(Path(__file__).parent / "mini_server.py"))


def nothing(name: str) -> ModuleType:
    """A module that measures nothing."""
    module = ModuleType(name)
    module.run = lambda **options: {"version": 1, "options": sorted(options)}  # type: ignore[attr-defined]
    module.table = lambda result: f"table of {name}"  # type: ignore[attr-defined]
    return module


def play(*words: str, met: bool = True) -> tuple[int, str, str]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    out, err = io.StringIO(), io.StringIO()
    scripted = {name: dataclasses.replace(each, judge=lambda _: [("speed", "at least 2", 1.5, met)])
                for name, each in MEASUREMENTS.items()}
    code = run(parser.parse_args(words), out=out, err=err, load=nothing, measurements=scripted)
    return code, out.getvalue(), err.getvalue()


def test_without_a_name_everything_is_measured() -> None:
    code, out, _ = play()
    assert code == 0
    assert [line.rsplit(".", 1)[1] for line in out.splitlines() if line.startswith("table of")] == [
        each.module for each in MEASUREMENTS.values()]


def test_one_name_measures_one_thing_and_shows_its_bars() -> None:
    code, out, _ = play("copy")
    assert (code, out) == (0, "table of hostcache.bench.copy_speed\n  pass  speed: 1.5 (at least 2)\n\n")


def test_a_missed_bar_ends_in_exit_3_under_strict_alone() -> None:
    assert play("copy", met=False)[0] == 0
    code, out, err = play("copy", "--strict", met=False)
    assert code == 3
    assert "MISS  speed" in out
    assert err.endswith("missed: speed\n")


def test_bars_that_a_table_shows_already_are_not_shown_twice() -> None:
    _, out, _ = play("bookkeeping")
    assert out == "table of hostcache.bench.bookkeeping\n\n"
    assert play("bookkeeping", "--strict", met=False)[0] == 3


@pytest.mark.parametrize(("name", "result", "met"), [
    ("copy", {"over_plain": {"restore": {"median": 0.86}}, "submissions": {"restore": 1}, "bytes_equal": True},
     [True, True, True]),
    ("copy", {"over_plain": {"restore": {"median": 0.84}}, "submissions": {"restore": 3}, "bytes_equal": False},
     [False, False, False]),
    ("engine", {"figures": {"prefill_ratio": 0.9, "decode_ratio": 2.0}, "missed": ["prefill_ratio"],
                "bars": {"prefill_ratio": 1.0, "decode_ratio": 1.5}}, [False, True]),
    ("bookkeeping", {"bars": [{"name": "a", "value": 6.0, "at_most": 5.0, "unit": "×", "verdict": "miss"}]}, [False]),
])
def test_each_measurements_bars_are_read_off_its_result(name: str, result: dict[str, Any], met: list[bool]) -> None:
    assert [each for _, _, _, each in MEASUREMENTS[name].judge(result)] == met


def test_json_holds_results_bars_and_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "new" / "bench.json"
    _, out, _ = play("copy", "--json", "--out", str(file))
    document = json.loads(out)
    assert document["copy"]["judged"] == [{"name": "speed", "bar": "at least 2", "value": 1.5, "verdict": "pass"}]
    assert "python" in document["environment"]
    assert json.loads(file.read_text()) == document
    with pytest.raises(ConfigError, match="never overwritten"):
        play("copy", "--out", str(file))


def test_memory_fills_the_quota_and_gives_both_servers_the_same_load() -> None:
    result = memory.run(model="mini:plain", quota_bytes=200_000, pool_tokens=640, prompt_tokens=320, err=io.StringIO(),
                        command=MINI)
    assert result["pages"] == 200
    assert result["prompts"] == 22  # 1.1 quotas of 200 pages, 10 pages a prompt
    assert result["filled_share"] >= 0.95
    assert result["growth_bytes"] == result["peak_rss_on_bytes"] - result["peak_rss_off_bytes"]
    assert "of the quota" in memory.table(result)


def test_memory_bars_allow_five_per_cent_and_metadata() -> None:
    def judged(growth: int, filled: float = 1.0) -> dict[str, bool]:
        result: dict[str, Any] = {"quota_bytes": 1000, "growth_bytes": growth, "growth_over_quota": growth / 1000,
                                  "metadata_allowance_bytes": 10, "filled_share": filled}
        return {what: met for what, _, _, met in memory.bars(result)}

    assert all(judged(1060).values())
    assert not judged(1061)["peak RSS, on − off, in quotas"]
    assert not judged(1000, 0.9)["quota filled by the load"]


def test_a_quota_that_the_corpus_cannot_fill_is_refused() -> None:
    with pytest.raises(ConfigError, match="smaller --quota"):
        memory.run(model="mini:plain", quota_bytes=1 << 30, pool_tokens=640, prompt_tokens=320, command=MINI)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_live_line_on_a_terminal() -> None:
    stream = Terminal()
    progress = Progress(stream, VirtualClock())
    progress.stage("a")
    progress.show("1 of 2")
    progress.show("2 of 2")
    progress.note("done")
    assert stream.getvalue() == ("\r\x1b[2Ka: starting the server\r\x1b[2Ka: 1 of 2\r\x1b[2Ka: 2 of 2\ndone\n")


def test_progress_is_a_plain_line_now_and_then_elsewhere() -> None:
    stream, clock = io.StringIO(), VirtualClock()
    progress = Progress(stream, clock)
    progress.stage("a", "x")
    for second in range(25):
        progress.show(str(second))
        clock.advance(1.0)
    assert stream.getvalue().splitlines() == ["a: x", "a: 0", f"a: {PLAIN_EVERY_S:.0f}", "a: 20"]
