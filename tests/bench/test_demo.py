"""`hostcache demo` end to end against real processes of the scripted mini-server: arms, folder, refusals, Ctrl-C."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hostcache.bench import demo
from hostcache.bench.demo import FULL, QUICK, add_arguments, differing, run, settle_sizes
from hostcache.bench.equivalence import equivalence_cases
from hostcache.errors import ConfigError, ServerError
from hostcache.records import ArmRecord, EndRecord, Record, TurnRecord, read_jsonl

HERE = Path(__file__).parent
MINI = (sys.executable, str(HERE / "mini_server.py"))
FAST = ("--window-s", "1", "--gap-min-s", "0.02", "--gap-max-s", "0.1", "--agents", "4", "--prefix-tokens", "320")


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def play(*words: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    out, err = io.StringIO(), io.StringIO()
    code = run(arguments(*words), out=out, err=err, page=lambda document: f"<html>{document['form']}</html>",
               command=MINI)
    return code, out.getvalue(), err.getvalue()


def test_a_whole_run_leaves_a_folder_whose_figures_follow_from_its_records(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, out, err = play("--model", "mini:plain", "--out", str(folder), "--json", "--strict", *FAST)
    figures = json.loads(out)
    assert code == 0, err
    assert figures["form"] == "custom"
    assert figures["outcome"] == "finished"
    pressure, calm, same = figures["pressure"], figures["no_pressure"], figures["equivalence"]
    assert pressure["benefit"] == "measured"
    assert pressure["errors"] == 0
    assert pressure["recomputed_share_ratio"] < 1
    assert pressure["hit_share_over_bound"] > 0.9
    for window in pressure["windows"]:
        assert window["usage_prompt_tokens"] == window["accounting"]["prompt_tokens"]
        assert window["peak_rss_bytes"] > 1 << 20
    assert (calm["bytes_moved"], calm["waits"], calm["identical"]) == (0, 0, True)
    assert (same["identical"], same["near_ties"], same["refused"], same["total"]) == (4, 0, 0, 4)
    assert {row["boundary"] for row in same["rows"]} == {"on", "before", "after"}
    assert all(row["kept_tokens"] == row["kept_expected_tokens"] for row in same["rows"])
    assert json.loads((folder / "demo.json").read_text()) == figures
    assert (folder / "demo.html").read_text() == "<html>custom</html>"
    assert len(list(folder.glob("*.log"))) == 2 + 3 + 3

    code, again, err = play("--from", str(folder), "--json")
    assert code == 0
    assert json.loads(again) == figures
    assert "follows from its records" in err

    changed = {**figures, "pressure": {**pressure, "turns_ratio": 9.9}}
    (folder / "demo.json").write_text(json.dumps(changed))
    code, _, err = play("--from", str(folder), "--json")
    assert code == 1
    assert "$.pressure.turns_ratio" in err


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """The pressure stage against a server that refuses two requests of five."""
    folder = tmp_path_factory.mktemp("busy") / "run"
    play("--model", "mini:busy", "--out", str(folder), "--stages", "pressure", *FAST)
    return list(read_jsonl(folder / "records.jsonl"))


def test_turns_count_by_when_they_started_and_every_agent_is_primed_before_the_window(busy: list[Record]) -> None:
    arms = {record.index: record for record in busy if isinstance(record, ArmRecord)}
    turns = [record for record in busy if isinstance(record, TurnRecord)]
    assert [arms[index].arm for index in sorted(arms)] == ["off", "on"]
    for turn in turns:
        arm = arms[turn.arm_index]
        assert arm.window_s is not None
        inside = arm.opened_s <= turn.started_s < arm.opened_s + arm.window_s
        assert (turn.phase == "window") == inside
        if turn.phase == "prime":
            assert turn.started_s + turn.duration_s <= arm.opened_s
        assert turn.started_s + turn.duration_s <= arm.settled_s
    assert sum(len(turn.retries) for turn in turns) > 0
    assert all(turn.duration_s >= sum(note.wait_s for note in turn.retries) for turn in turns)
    assert all(turn.error is None for turn in turns)
    assert sum(turn.phase == "prime" for turn in turns) == 2 * 4


def test_both_arms_hear_the_same_agents(busy: list[Record]) -> None:
    turns = [record for record in busy if isinstance(record, TurnRecord)]
    replies = {arm: {(turn.agent, turn.turn): turn.reply_sha256 for turn in turns if turn.arm == arm}
               for arm in ("off", "on")}
    shared = replies["off"].keys() & replies["on"].keys()
    assert len(shared) >= 8
    assert all(replies["off"][key] == replies["on"][key] for key in shared)


@pytest.mark.parametrize(("model", "said"), [
    ("mini:tier-dead", "host_cache null"), ("mini:broken", "mini: no such model")])
def test_an_arm_that_is_not_what_was_asked_fails_before_it_measures(tmp_path: Path, model: str, said: str) -> None:
    folder = tmp_path / "run"
    with pytest.raises(ServerError, match=said):
        play("--model", model, "--out", str(folder), "--stages", "no-pressure", *FAST)
    records = list(read_jsonl(folder / "records.jsonl"))
    assert not any(isinstance(record, TurnRecord) for record in records)
    last = records[-1]
    assert isinstance(last, EndRecord)
    assert last.outcome == "failed"
    assert json.loads((folder / "demo.json").read_text())["outcome"] == "failed"


@pytest.mark.parametrize(("model", "verdict", "reason"), [
    ("mini:drift", "different", "logits differ"), ("mini:forgetful", "refused", "nothing was restored")])
def test_a_tier_that_restores_badly_or_not_at_all_misses_its_bars(
        tmp_path: Path, model: str, verdict: str, reason: str) -> None:
    code, out, err = play("--model", model, "--out", str(tmp_path / "run"), "--stages", "equivalence", "--json",
                          "--strict")
    rows = json.loads(out)["equivalence"]["rows"]
    assert {row["verdict"] for row in rows} == {verdict}
    assert all(reason in row["reason"] for row in rows)
    assert code == 3
    assert "restored = device hit, bit for bit" in err


def test_ctrl_c_stops_the_servers_and_leaves_valid_files(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["--model", "mini:plain", "--out", str(folder), *FAST, "--window-s", "60"]
    program = ("import argparse, sys\nfrom hostcache.bench.demo import add_arguments, run\n"
               "parser = argparse.ArgumentParser(); add_arguments(parser)\n"
               f"sys.exit(run(parser.parse_args({words!r}), out=sys.stdout, err=sys.stderr, command={MINI!r}))")
    src = str(Path(demo.__file__).parents[2])
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, env={**os.environ, "PYTHONPATH": src})
    assert process.stderr is not None
    for line in process.stderr:
        if "primed" in line or "served" in line:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert json.loads(out)["outcome"] == "interrupted"
    last = list(read_jsonl(folder / "records.jsonl"))[-1]
    assert isinstance(last, EndRecord)
    assert last.outcome == "interrupted"
    assert not _running_with(folder)


def _running_with(folder: Path) -> list[str]:
    """Processes that still write to a log in `folder`."""
    holders = []
    for link in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if str(folder) in os.readlink(link):
                holders.append(str(link))
        except OSError:
            continue
    return holders


def test_without_a_name_runs_are_numbered_and_never_overwrite(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with pytest.raises(ServerError):
            play("--model", "mini:broken", "--stages", "equivalence")
    assert sorted(path.name for path in (tmp_path / "hostcache-demo").iterdir()) == ["001", "002"]
    with pytest.raises(ConfigError, match="never overwrite"):
        play("--out", str(tmp_path / "hostcache-demo" / "001"))


@pytest.mark.parametrize(("words", "said"), [
    (("--stages", "pressure,lunch"), "'lunch' is none of them"),
    (("--stages", ","), "--stages is ','"),
    (("--agents", "0"), "--agents is 0"),
    (("--window-s", "-1"), "--window-s is -1.0"),
    (("--host-cache-bytes", "lots"), "--host-cache-bytes is 'lots'"),
    (("--from", "/nowhere"), "has no records.jsonl"),
])
def test_a_wrong_flag_is_refused_in_one_line_before_anything_is_written(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said) as refused:
        play(*words)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_the_form_of_record_is_the_issues() -> None:
    form, sizes = settle_sizes(arguments("--full"))
    assert (form, sizes) == ("full", FULL)
    assert (FULL.agents, FULL.prefix_tokens, FULL.tool_tokens, FULL.reply_tokens) == (12, 2000, 64, 16)
    assert (FULL.gap_min_s, FULL.gap_max_s, FULL.window_s, FULL.pool_tokens) == (2.0, 12.0, 120.0, 16_000)
    assert FULL.order == ("off", "on", "on", "off")
    assert FULL.concurrency >= 12
    assert (FULL.equivalence, FULL.longest_tokens) == (20, 6000)
    assert FULL.calm_order.count("off") >= 3  # three off servers give the three A/A ratios


def test_the_quick_form_is_under_pressure_and_any_size_makes_it_custom() -> None:
    assert settle_sizes(arguments()) == ("quick", QUICK)
    working_set = QUICK.agents * (QUICK.prefix_tokens + 4 * (QUICK.tool_tokens + QUICK.reply_tokens))
    assert 0.4 <= QUICK.pool_tokens / working_set <= 0.5
    assert QUICK.pool_tokens % QUICK.page_tokens == 0
    form, sizes = settle_sizes(arguments("--agents", "20"))
    assert form == "custom"
    assert sizes.concurrency >= 20
    assert sizes.pool_tokens > QUICK.pool_tokens
    assert settle_sizes(arguments("--full", "--window-s", "5"))[0] == "custom"


def test_equivalence_covers_lengths_shapes_and_page_boundaries() -> None:
    cases = equivalence_cases(20, 6000, 16, 32)
    assert len(cases) == 20
    assert {(case.shape, case.boundary) for case in cases} == {
        (shape, boundary) for shape in ("plain", "answers", "compaction") for boundary in ("on", "before", "after")}
    for case in cases:
        assert case.tokens % 32 == {"on": 0, "before": 31, "after": 1}[case.boundary]
        if case.shape == "compaction":
            assert 0.6 * case.first_tokens < case.tokens <= 0.72 * case.first_tokens + 1
        if case.shape == "answers":
            assert case.first_tokens + 16 + 64 == case.tokens
    assert cases[-1].shape == "plain"
    assert 5968 <= cases[-1].tokens <= 6001
    assert min(case.first_tokens for case in cases) < 230


def test_differences_are_named_by_their_place() -> None:
    assert differing({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}], "c": 0}) == ["$.a[1].b", "$.c"]
    assert differing([1], [1, 2]) == ["$"]
