"""Running a matrix: the order, what a failure leaves, and that a process killed anywhere loses and repeats nothing."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bench.harness.matrices import AGENTS, PLAY, ROTATE, arms, matrix_of, parsed, run
from tests.bench.harness.on_mock import read
from tests.bench.harness.sample_cells import Run as Sample
from tests.bench.harness.sample_cells import cell, request

from hostcache.bench.harness import matrix_commands
from hostcache.bench.harness.cellfile import RECORDS, cell_state
from hostcache.bench.harness.commands import INTERRUPTED
from hostcache.bench.harness.matrix import Outcome, matrix_document, missed, play, slot_of
from hostcache.bench.harness.matrix_file import Matrix, Run, shipped
from hostcache.bench.harness.matrix_folder import FAILURE, LOCK, Asked, begin, begun, counted_files, locked
from hostcache.clock import VirtualClock, WallClock
from hostcache.errors import BARS_MISSED, ConfigError, ServerError
from hostcache.records import EndRecord, Record, RecordWriter, RequestRecord, SegmentRecord

BEGIN = 'name = "m"\n[defaults]\norder = ["off", "on"]\nlag_bar_ms = 10000\n'
BOTH = f"{BEGIN}{arms()}[cells.a]\n{ROTATE}[cells.b]\n{AGENTS}"


# -- with a scripted measurement ------------------------------------------------------------------------------------


class Killed(BaseException):
    """As good as SIGKILL: nothing catches it."""


def records(run: Run) -> list[Record]:
    """A short cell of two points."""
    made = Sample(cell(cell=run.cell, arm=run.arm, attempt=run.turn, workload=run.workload.KIND, identity=run.cell))
    for part in ("1", "2"):
        made.bracket("prime", part, [request(segment="prime", part=part, role="prime", cached_tokens=0, device_tokens=0,
                                             recomputed={"new": 1000}, shared_tokens=0)], None)
        made.bracket("window", part, [request(part=part, due_s=made.now + 1)], 60.0)
    return [*made.records, EndRecord(ended_unix_s=9.0, outcome="finished", detail="")]


class Measurement:
    """Writes a cell line by line, and dies when its lines are spent."""

    def __init__(self, lines: int | None = None) -> None:
        self.lines = lines
        self.finished: Counter[str] = Counter()
        self.went_on: list[str] = []

    def __call__(self, run: Run, attempt: Path, goes_on: bool) -> Path:
        path = attempt / RECORDS
        self._spend()  # before the file is there
        made = records(run)
        if goes_on:
            self.went_on.append(run.name)
            there = {(record.segment, record.part) for record in read(attempt) if isinstance(record, SegmentRecord)}
            assert there
            path.rename(attempt / f"records.interrupted-{len(list(attempt.iterdir()))}.jsonl")
        writer = RecordWriter(path)
        try:
            for record in made:
                self._spend()
                writer.write(record)
        finally:
            writer.close()
        self.finished[run.name] += 1
        return path

    def _spend(self) -> None:
        if self.lines is not None:
            if self.lines == 0:
                raise Killed
            self.lines -= 1


def played(matrix: Matrix, folder: Path, measure: Callable[[Run, Path, bool], Path] | None = None
           ) -> tuple[Outcome, str]:
    err = io.StringIO()
    clock = WallClock() if measure is None else VirtualClock()
    return play(matrix, folder, clock=clock, err=err, measure=measure), err.getvalue()


def test_every_run_is_made_in_its_order_and_a_second_call_makes_none(tmp_path: Path) -> None:
    matrix, measure = matrix_of(BOTH), Measurement()
    outcome, said = played(matrix, tmp_path, measure)
    assert outcome == Outcome(made=("a off 1", "a on 1", "b off 1", "b on 1"))
    assert "[3/4] b off 1: about" in said
    assert "left for all" in said
    assert counted_files(tmp_path) == [tmp_path / "runs" / cell / f"{arm}-1" / "attempt-1" / RECORDS
                                       for cell in ("a", "b") for arm in ("off", "on")]
    again, said = played(matrix, tmp_path, measure)
    assert again == Outcome(done=outcome.made)
    assert said == ""
    assert set(measure.finished.values()) == {1}


@settings(max_examples=10, deadline=None)
@given(deaths=st.lists(st.integers(0, 40), max_size=12))
def test_however_often_it_dies_no_run_is_lost_or_repeated_and_no_record_is_gone(deaths: list[int]) -> None:
    matrix = matrix_of(BOTH)
    with tempfile.TemporaryDirectory() as made:
        folder, finished, written = Path(made), Counter[str](), dict[str, int]()
        for lines in [*deaths, None]:
            measure = Measurement(lines)
            try:
                played(matrix, folder, measure)
            except Killed:
                assert lines is not None
            finished.update(measure.finished)
            # what was ever written is still there, whether or not it counts
            now = Counter(sha256(line).hexdigest() for path in folder.rglob("*.jsonl")
                          for line in path.read_bytes().splitlines())
            assert all(now[digest] >= count for digest, count in written.items())
            written = dict(now)
        assert finished == {run.name: 1 for run in matrix.runs}
        assert {path.parent.parent.name + path.parent.parent.parent.name for path in counted_files(folder)} == {
            "off-1a", "on-1a", "off-1b", "on-1b"}
        assert all(cell_state(path.parent) == "finished" for path in counted_files(folder))


def test_an_interrupted_run_goes_on_only_where_its_finished_parts_count(tmp_path: Path) -> None:
    matrix = matrix_of(BOTH)
    one = len(records(matrix.runs[0]))
    with pytest.raises(Killed):
        played(matrix, tmp_path, Measurement(one - 1))  # a rotation: nothing of it counts
    measure = Measurement(2 * (one + 1) + one - 1)  # two whole runs, then an agents' ramp without its end
    with pytest.raises(Killed):
        played(matrix, tmp_path, measure)
    assert measure.went_on == []
    last = Measurement()
    played(matrix, tmp_path, last)
    assert last.went_on == ["b off 1"]
    names = {run.name: [path.name for path in slot_of(tmp_path, run).attempts] for run in matrix.runs}
    assert names == {"a off 1": ["attempt-1", "attempt-2"], "a on 1": ["attempt-1"], "b off 1": ["attempt-1"],
                     "b on 1": ["attempt-1"]}


def test_what_cannot_be_gone_on_with_begins_anew_beside_it(tmp_path: Path) -> None:
    matrix = matrix_of(f"{BEGIN}{arms()}[cells.b]\n{AGENTS}").chosen(None, ["on"])
    with pytest.raises(Killed):
        played(matrix, tmp_path, Measurement(len(records(matrix.runs[0])) - 1))

    def changed(run: Run, attempt: Path, goes_on: bool) -> Path:
        if goes_on:
            raise ConfigError("it was made with another identity")
        return Measurement()(run, attempt, goes_on)

    outcome, said = played(matrix, tmp_path, changed)
    assert outcome.made == ("b on 1",)
    assert "cannot be gone on with, a new one begins: it was made with another identity" in said
    assert [path.parent.name for path in counted_files(tmp_path)] == ["attempt-2"]


@pytest.mark.parametrize("broken", [b"", b'{"record": "ce', b"\x00\x00\x00\n", b"nonsense\n{}\n"])
def test_records_that_say_nothing_are_left_where_they_are(tmp_path: Path, broken: bytes) -> None:
    matrix = matrix_of(BOTH).chosen(["b"], ["on"])
    attempt = slot_of(tmp_path, matrix.runs[0]).fresh()
    (attempt / RECORDS).write_bytes(broken)
    outcome, _ = played(matrix, tmp_path, Measurement())
    assert outcome.made == ("b on 1",)
    assert (attempt / RECORDS).read_bytes() == broken
    assert [path.parent.name for path in counted_files(tmp_path)] == ["attempt-2"]


def test_a_run_that_fails_is_noted_and_the_next_one_begins(tmp_path: Path) -> None:
    matrix, measure = matrix_of(BOTH), Measurement()

    def failing(run: Run, attempt: Path, goes_on: bool) -> Path:
        if run.name == "a on 1":
            raise ServerError("the server ended with 1 before it served: no memory")
        if run.name == "b off 1":
            raise ZeroDivisionError("division by zero")
        return measure(run, attempt, goes_on)

    outcome, said = played(matrix, tmp_path, failing)
    assert outcome.made == ("a off 1", "b on 1")
    assert outcome.failed == {"a on 1": "the server ended with 1 before it served: no memory",
                              "b off 1": "ZeroDivisionError: division by zero"}
    assert "[2/4] a on 1: failed: the server ended with 1" in said
    slot = slot_of(tmp_path, matrix.runs[1])
    assert slot.failure == "the server ended with 1 before it served: no memory"
    again, _ = played(matrix, tmp_path, measure)
    assert (again.done, again.made) == (("a off 1", "b on 1"), ("a on 1", "b off 1"))
    assert [path.name for path in slot.attempts] == ["attempt-1", "attempt-2"]
    assert (slot.attempts[0] / FAILURE).exists()


def test_a_sweep_ends_at_the_first_point_that_misses_a_bar_in_that_arm_alone(tmp_path: Path) -> None:
    matrix = matrix_of(f"{BEGIN}{arms()}[cells.a]\n{AGENTS}sweep = {{ prefix_tokens = [48, 56, 64] }}\n"
                       "bars = { ttft_p95_s = 1 }\n")

    def slow(run: Run, attempt: Path, goes_on: bool) -> Path:
        writer = RecordWriter(attempt / RECORDS)
        for record in records(run):
            late = isinstance(record, RequestRecord) and run.name == "a-56 off 1" and record.part == "2"
            writer.write(request(part="2", due_s=10.0, first_token_s=15.0) if late else record)
        writer.close()
        return attempt / RECORDS

    outcome, said = played(matrix, tmp_path, slow)
    assert outcome.made == ("a-48 off 1", "a-56 off 1", "a-48 on 1", "a-56 on 1", "a-64 on 1")
    assert list(outcome.ended) == ["a-64 off 1"]
    assert "a-64 off 1: not run, the ramp ended before it: a-56: ttft_p95_s: ttft_s_p95 5, wanted at most 1" in said
    assert played(matrix, tmp_path, slow)[0].ended == outcome.ended  # known from the folder alone


def test_a_sweep_does_not_go_on_past_a_point_that_failed(tmp_path: Path) -> None:
    swept = matrix_of(f"{BEGIN}{arms()}[cells.a]\n{AGENTS}sweep = {{ prefix_tokens = [48, 56] }}\n")

    def failing(run: Run, attempt: Path, goes_on: bool) -> Path:
        raise ServerError("no memory")

    outcome, _ = played(swept.chosen(None, ["on"]), tmp_path, failing)
    assert (outcome.failed, outcome.ended) == ({"a-48 on 1": "no memory"}, {"a-56 on 1": "a-48 did not finish"})


# -- the folder -----------------------------------------------------------------------------------------------------


def test_two_runs_in_one_folder_are_refused_and_a_killed_ones_lock_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("4194304\n")  # of a process that is no more
    with locked(tmp_path), pytest.raises(ConfigError, match=r"process \d+ runs the matrix in .*; wait for it, or"), \
            locked(tmp_path):
        pass
    holder = subprocess.Popen([sys.executable, "-c", "import sys; from pathlib import Path\n"
                               "from hostcache.bench.harness.matrix_folder import locked\n"
                               "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()",
                               str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"process {holder.pid} runs the matrix"), locked(tmp_path):
            pass
        holder.kill()
    with locked(tmp_path):
        pass


def test_what_was_asked_is_read_back_from_the_folder(tmp_path: Path) -> None:
    assert begun(tmp_path) is None
    asked = Asked(name="m.toml", sha256="x", quick=True, cells=("a",), arms=None)
    begin(tmp_path, BOTH, asked)
    assert begun(tmp_path) == (BOTH, asked)
    (tmp_path / "plan.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"plan\.json is no plan of a matrix"):
        begun(tmp_path)


# -- on real processes ----------------------------------------------------------------------------------------------


def matrix_file(folder: Path, text: str) -> str:
    path = folder / "m.toml"
    path.write_text(text)
    return str(path)


def test_an_arm_that_was_not_switched_fails_before_it_is_measured_and_the_others_are(tmp_path: Path) -> None:
    wrong = arms(off=("--host-blocks", "512"))
    file = matrix_file(tmp_path, f"{BEGIN}{wrong}[cells.a]\n{ROTATE}goals = {{ turns = 1.5 }}\n")
    out = tmp_path / "out"
    code, _, err = run(file, "--out", str(out))
    assert code == 1
    assert "a off 1: failed: arm not confirmed: off is to be without a tier, and the server reports one" in err
    assert "[2/2] a on 1: " in err
    off = read(out / "runs" / "a" / "off-1" / "attempt-1")
    assert [type(record).__name__ for record in off] == ["CellRecord", "EndRecord"]
    assert read(out / "runs" / "a" / "on-1" / "attempt-1")[-1].outcome == "finished"  # type: ignore[union-attr]
    document = matrix_document(out)
    assert [cell["void"] for cell in document["cells"]] == [True, False]
    assert [each["verdict"] for each in document["verdicts"]] == ["not measured"]
    assert run("--resume", str(out))[0] == 1  # tried again, and wrong again
    assert len(slot_of(out, matrix_of(f"{BEGIN}{wrong}[cells.a]\n{ROTATE}").runs[0]).attempts) == 2


def test_bars_that_are_missed_are_told_and_end_in_3_under_strict(tmp_path: Path) -> None:
    file = matrix_file(tmp_path, f"{BEGIN}{arms()}[cells.a]\n{ROTATE}bars = {{ ttft_p95_s = 0 }}\n")
    code, out, err = run(file, "--out", str(tmp_path / "out"), "--arms", "on", "--strict", "--api-key", "secret")
    assert code == BARS_MISSED
    assert not [path for path in (tmp_path / "out").rglob("*.*") if "secret" in path.read_text()]
    assert "miss: a on ttft_p95_s" in out
    assert "missed: a on ttft_p95_s (miss)" in err
    assert run("--resume", str(tmp_path / "out"))[0] == 0  # nothing is left to run; nobody is strict
    code, out, err = run("--resume", str(tmp_path / "out"), "--arms", "off", "--strict")
    assert code == BARS_MISSED  # the baseline's own slowness is what it is; that of the other arm still stands there
    assert "miss: a off ttft_p95_s" in out
    assert "a off ttft_p95_s" not in err.partition("missed:")[2]
    assert (tmp_path / "out" / "report.json").stat().st_size > 1000


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stderr is not None
    yield from process.stderr


def test_killed_at_random_points_and_resumed_it_has_every_run_once_and_every_record(tmp_path: Path) -> None:
    file = matrix_file(tmp_path, f"{BEGIN}{arms()}[cells.a]\n{ROTATE}[cells.b]\n{AGENTS}order = [\"on\"]\n")
    out, rng, ends = tmp_path / "out", Random(4), []
    finished: dict[Path, str] = {}
    kills = [(rng.randint(1, 14), how) for how in (signal.SIGKILL, signal.SIGINT, signal.SIGKILL)]
    for budget, how in [*kills, (10_000, signal.SIGKILL)]:
        where = ["--resume", str(out), file] if out.exists() else [file, "--out", str(out)]
        process = subprocess.Popen([sys.executable, str(PLAY), *where], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, text=True)
        with process:
            for number, _ in enumerate(lines_of(process)):
                if number == budget:
                    process.send_signal(how)
        ends.append(process.returncode)
        now = {path: sha256(path.read_bytes()).hexdigest() for path in counted_files(out)
               if cell_state(path.parent) == "finished"}
        assert finished.items() <= now.items()  # none repeated, none changed, none lost
        finished = now
    assert ends == [-signal.SIGKILL, INTERRUPTED, -signal.SIGKILL, 0]
    assert sorted(path.parent.parent.parent.name + path.parent.parent.name for path in finished) == [
        "aoff-1", "aon-1", "bon-1"]
    document = matrix_document(out)
    assert not missed(document)
    assert [(cell["outcome"], cell["state"]["start"]["verdict"]) for cell in document["cells"]] == [
        ("finished", "cold")] * 3
    ramp = next(cell for cell in document["cells"] if cell["cell"] == "b")
    assert [point["part"] for point in ramp["points"]] == ["1", "2", "3"]


def test_the_mock_matrix_runs_and_is_judged(tmp_path: Path) -> None:
    """The shipped file, shorter: one of its cells on both arms."""
    code, out, err = run("mock", "--quick", "--cells", "b5-agents", "--out", str(tmp_path / "out"))
    assert code == 0, err
    assert re.search(r"\[2/2\] b5-agents on 1: \d+ requests served", err)
    assert re.search(r"(pass|miss|void): b5-agents on 12 turns", out)
    assert "not measured" not in out


# -- the command ----------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_every_run_and_starts_nothing(tmp_path: Path) -> None:
    file = matrix_file(tmp_path, f"{BOTH}bars = {{ ttft_p95_s = 2 }}\nanswers = \"the ramp\"\n")
    code, out, err = run(file, "--dry-run", "--out", str(tmp_path / "out"))
    assert (code, err) == (0, "")
    for word in ("a: rotate, clients 2, sessions 4", "b: agents, points 1/2/3", "answers the ramp", "ttft_p95_s 2",
                 "hostcache bench mock --host-blocks 512", "{port}", "off 1 (about", "all that can be checked",
                 "4 runs of 2 cells, 0 finished; about"):
        assert word in out
    assert list(tmp_path.iterdir()) == [tmp_path / "m.toml"]
    code, out, _ = run(file, "--dry-run", "--json", "--cells", "a")
    assert code == 0
    assert out.count('"command"') == 2


TRAPS = [
    ('command = "/nowhere/serve {port}"', r"error: arm third: there is no program /nowhere/serve"),
    ('command = "FOLDER/serve {port}"', r"error: arm third: FOLDER/serve is there, but cannot be executed; chmod"),
    ('preset = "hostcache"\nmodel = "nothing"\npool_tokens = 512\nhost_cache_bytes = 0\ntier_says = 1', None),
    ('preset = "hostcache"\nmodel = "nothing"\npool_tokens = 512\nhost_cache_bytes = 0',
     r"error: arm third: model nothing does not exist"),
    ('preset = "hostcache"\nmodel = "random:tiny"\npool_tokens = 512\nhost_cache_bytes = 0\npage_tokens = 0',
     r"error: arm third in a: --page-tokens is 0"),
    ('preset = "hostcache"\nmodel = "random:tiny"\npool_tokens = 512\nhost_cache_bytes = 0\nsettings = { thread = 2 }',
     r"error: arm third in a: 'thread' is not a setting"),
    ('preset = "hostcache"\nmodel = "random:tiny"\npool_tokens = 32\nhost_cache_bytes = 0',
     r"error: cell a: 50 tokens at once do not fit the pool of 32 tokens"),
    ('preset = "hostcache"\nmodel = "random:tiny"\npool_tokens = 96\nhost_cache_bytes = 0',
     r"warning: cell a: its clients hold 100 tokens at once, the pool of arm third 96: some will wait"),
    ('url = "http://127.0.0.1:9"\ntier = "off"', r"warning: arm third: http://127\.0\.0\.1:9 does not answer now"),
    ('command = "FOLDER/x {port}"', r"warning: arm third: no tier is asked for, so nothing confirms it"),
]


@pytest.mark.parametrize(("arm", "why"), TRAPS)
def test_a_dry_run_finds_what_would_cost_a_night(tmp_path: Path, arm: str, why: str | None) -> None:
    (tmp_path / "serve").write_text("#!/bin/sh\n")
    third = arm.replace("FOLDER", str(tmp_path))
    file = matrix_file(tmp_path, f"{BEGIN}{arms()}[arms.third]\n{third}\n[cells.a]\n{ROTATE}order = [\"third\"]\n")
    if why is None:
        with pytest.raises(ConfigError, match="'tier_says' is not known"):
            run(file, "--dry-run")
        return
    code, out, _ = run(file, "--dry-run")
    assert re.search(why.replace("FOLDER", str(tmp_path)), out)
    assert code == (2 if "error" in why or str(tmp_path) + "/x" in out else 0)
    if code:
        with pytest.raises(ConfigError):
            run(file, "--out", str(tmp_path / "out"))
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("cell", "why"), [
    ('workload = "replay"\nparameters = { trace = "nowhere.jsonl" }', r"error: cell a: .*nowhere\.jsonl"),
    ('workload = "profile"\nparameters = { profile = "nowhere" }', r"error: cell a: .*nowhere"),
    (f'{AGENTS}corpus = "nowhere:prose"', r"error: cell a: .*nowhere"),
    (f'{AGENTS}goals = {{ turns = 2, parts = ["5"] }}', r"error: cell a: its goals are of the point 5, and the ramp "
                                                         r"has 1, 2, 3"),
])
def test_a_dry_run_finds_files_and_points_that_are_not_there(tmp_path: Path, cell: str, why: str) -> None:
    file = matrix_file(tmp_path, f"{BEGIN}{arms()}[cells.a]\n{cell}\n")
    code, out, _ = run(file, "--dry-run")
    assert code == 2
    assert re.search(why, out)


def test_a_dry_run_for_vllm_finds_a_model_that_is_not_there_and_flags_that_vllm_would_refuse(tmp_path: Path) -> None:
    """Where vLLM is not installed that is found too."""
    code, out, _ = run("vllm-cpu", "--dry-run", "--json")
    texts = {each["text"] for each in json.loads(out)["findings"]}
    assert code == 2
    assert any(text.startswith("model smollm2-hf is no directory here; `hostcache model export") for text in texts)
    assert all("smollm2-hf" in text or "the package vllm is not installed" in text for text in texts)
    text = shipped()["vllm-cpu"]
    for model, mistakes in ((str(tmp_path), 0), ("Qwen/Qwen3-8B", 0), ("./Qwen", 2)):
        file = tmp_path / "m.toml"
        file.write_text(text.replace("smollm2-hf", model))
        out = run(str(file), "--dry-run")[1]
        assert out.count("is no directory here") == mistakes
    file.write_text(text.replace('"--dtype", "float32"', '"--kv-offloading-size", "4"'))
    assert "error: arm on: " in run(str(file), "--dry-run")[1]


def test_a_dry_run_of_a_folder_says_what_is_finished(tmp_path: Path) -> None:
    file = matrix_file(tmp_path, BOTH)
    out = tmp_path / "out"
    out.mkdir()
    begin(out, BOTH, Asked(name="m.toml", sha256="x", quick=False, cells=None, arms=("on",)))
    played(matrix_of(BOTH).chosen(["a"], ["on"]), out, Measurement())
    _, said, _ = run("--resume", str(out), "--dry-run")
    assert "on 1 (finished)" in said
    assert "2 runs of 2 cells, 1 finished" in said
    code, said, _ = run(file, "--out", str(out), "--dry-run")
    assert code == 2
    assert "is not empty; runs never overwrite" in said or "it is not empty" in said


@pytest.mark.parametrize(("argv", "why"), [
    ((), r"name a matrix: a file, or one of mock, seed-full, seed-small"),
    (("--resume", "nowhere"), r"--resume nowhere has no matrix; give its file too"),
    (("mock", "--cells", "b9"), r"--cells 'b9' is not in mock"),
    (("mock", "--resume", "BEGUN"), r"mock is not the matrix in .*; leave it out"),
    (("--resume", "BEGUN", "--quick"), r"was begun without --quick"),
])
def test_arguments_that_do_not_go_together_are_refused(tmp_path: Path, argv: tuple[str, ...], why: str) -> None:
    begin(tmp_path, BOTH, Asked(name="m.toml", sha256="x", quick=False, cells=None, arms=None))
    with pytest.raises(ConfigError, match=why):
        run(*(word.replace("BEGUN", str(tmp_path)) for word in argv))


def test_a_shipped_matrix_is_printed_to_make_ones_own_of_it() -> None:
    assert run("mock", "--print") == (0, shipped()["mock"], "")
    assert parsed("mock", "--cells", "a, b").cells == ("a", "b")
    with pytest.raises(SystemExit):
        parsed("mock", "--cells", ",")
    assert matrix_commands.FAILED == 1
