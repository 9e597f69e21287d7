"""Matrix files: what they settle to, and how every mistake in one is told."""

from __future__ import annotations

import sys

import pytest
from tests.bench.harness.matrices import AGENTS, ROTATE, arms, matrix_of

from hostcache.bench.harness.agents import AgentsParameters
from hostcache.bench.harness.equivalence import EquivalenceParameters
from hostcache.bench.harness.ladder import LadderParameters
from hostcache.bench.harness.matrix_check import estimate_s
from hostcache.bench.harness.matrix_file import matrix_text, parse_matrix, shipped
from hostcache.bench.harness.rotate import RotateParameters
from hostcache.errors import ConfigError

BEGIN = 'name = "m"\n[defaults]\norder = ["off", "on"]\n'
WHOLE = f"{BEGIN}{arms()}[cells.a]\n{ROTATE}"


def test_a_file_settles_to_runs_in_their_order_with_turns_that_pair() -> None:
    matrix = matrix_of(f'{BEGIN}{arms()}[cells.a]\n{ROTATE}order = ["off", "on", "on", "off"]\n[cells.b]\n{AGENTS}')
    assert [run.name for run in matrix.runs] == ["a off 1", "a on 1", "a on 2", "a off 2", "b off 1", "b on 1"]
    assert [run.spec.attempt for run in matrix.runs[:4]] == [1, 1, 2, 2]
    assert matrix.runs[0].workload == RotateParameters(
        clients=2, sessions=4, tokens=48, growth_tokens=4, reply_tokens=2, duration_s=0.05, nopressure_visits=0,
        recovery_idle_s=0, observe_idle_s=0, probe_tokens=0)
    assert isinstance(matrix.runs[4].workload, AgentsParameters)
    assert {(run.arm, run.target.tier) for run in matrix.runs} == {("off", "off"), ("on", "on")}


def test_defaults_are_laid_under_every_cell_and_tables_are_joined() -> None:
    matrix = matrix_of(f'name = "m"\nseed = 7\n{arms()}[defaults]\norder = ["off"]\nbars = {{ errors = 0 }}\n'
                       f"[cells.a]\n{ROTATE}bars = {{ ttft_p95_s = 2 }}\n"
                       f"[cells.b]\n{ROTATE}order = [\"on\"]\nseed = 9\n")
    a, b = matrix.runs
    assert a.spec.bars == {"errors": 0, "ttft_p95_s": 2}
    assert (a.spec.seed, b.spec.seed, b.arm) == (7, 9, "on")


def test_a_sweep_is_a_ramp_of_cells_the_easiest_first_in_every_arm() -> None:
    matrix = matrix_of(f"{BEGIN}{arms()}[cells.a]\n{ROTATE}sweep = {{ clients = [1, 3] }}\n")
    assert [run.name for run in matrix.runs] == ["a-1 off 1", "a-3 off 1", "a-1 on 1", "a-3 on 1"]
    assert {run.ramp for run in matrix.runs} == {"a"}
    assert [run.workload.clients for run in matrix.runs[:2]] == [1, 3]  # type: ignore[attr-defined]
    assert matrix.chosen(["a"], None).cells == ("a-1", "a-3")
    assert matrix.chosen(["a-3"], ["on"]).runs == (matrix.runs[3],)


def test_the_short_form_is_the_file_with_changes() -> None:
    text = (f"{WHOLE}[cells.b]\n{AGENTS}[quick]\nleave_out = [\"a\"]\n[quick.cells.b]\norder = [\"on\"]\n"
            "parameters = { points = [2] }\n")
    assert len(matrix_of(text).runs) == 4
    short = matrix_of(text, quick=True)
    assert [run.name for run in short.runs] == ["b on 1"]
    assert (short.form, short.runs[0].workload.points) == ("quick", (2,))  # type: ignore[attr-defined]
    assert short.runs[0].workload.prefix_tokens == 48  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"m\.toml has no \[quick\]; leave --quick out"):
        matrix_of(WHOLE, quick=True)


def test_a_cell_that_keeps_one_arm_has_no_goals() -> None:
    matrix = matrix_of(f"{WHOLE}goals = {{ turns = 3.1 }}\n")
    assert matrix.runs[0].bars.goals
    assert not matrix.chosen(None, ["on"]).runs[0].bars.goals
    assert matrix.chosen(["a"], None) == matrix


def test_presets_give_every_setting_that_could_differ_between_arms() -> None:
    matrix = matrix_of("""
        name = "m"
        [server]
        preset = "hostcache"
        model = "random:tiny"
        pool_tokens = 8192
        settings = { threads = 2 }
        [arms.off]
        host_cache_bytes = 0
        [arms.on]
        host_cache_bytes = "1GiB"
        env = { A = "b", L = "{prefix}/lib" }
        [arms.vllm]
        preset = "vllm"
        host_cache_bytes = 0
        extra = ["--max-model-len", "4096"]
        settings = { }
        [cells.a]
        order = ["off", "on"]
        server = { prefix_cache_entries = 6 }
        workload = "rotate"
    """.replace("        settings = { }\n", "").replace("settings = { threads = 2 }\n", ""))
    off, on = matrix.runs
    assert off.target.start[:6] == (sys.executable, "-m", "hostcache", "serve", "random:tiny", "--pool-tokens")
    assert off.target.start[off.target.start.index("--prefix-cache-entries") + 1] == "6"
    assert (off.target.tier, on.target.tier, on.target.quota_bytes) == ("off", "on", 1 << 30)
    assert on.target.command[:3] == ("env", "A=b", f"L={sys.prefix}/lib")
    assert (on.pool_tokens, on.settings and on.settings["prefix_cache_entries"]) == (8192, 6)


MISTAKES = [
    ("name = 3", r"m\.toml: name is 3; give a text"),
    ('name = "m"', r"m\.toml needs 'arms'"),
    ("name =", r"m\.toml is no TOML"),
    (f"{WHOLE}[extra]\nx = 1\n", r"m\.toml: 'extra' is not known"),
    (f"version = 2\n{WHOLE}", r"version is 2; this hostcache reads version 1"),
    (WHOLE.replace("[cells.a]", "[cells.A_b]"), r"cell 'A_b' becomes a folder"),
    (WHOLE.replace('"rotate"', '"rotation"'), r"cell a: workload is 'rotation'; give one of rotate, agents"),
    (WHOLE.replace('workload = "rotate"', ""), r"cell a: workload is ''; give one of"),
    (WHOLE.replace("clients = 2", "client = 2"), r"m\.toml: cell a: parameters: 'client' is no parameter"),
    (WHOLE.replace("clients = 2", "clients = 2.5"), r"cell a: parameters: clients is 2\.5; give a whole number"),
    (WHOLE.replace("clients = 2", "clients = 9"), r"m\.toml: cell a: 9 clients cannot share 4 sessions"),
    (f"{WHOLE}order = []\n", r"cell a: order is \[\]; name at least one arm"),
    (f'{WHOLE}order = ["of"]\n', r"cell a: order is \['of'\]; 'of' is no arm"),
    (f'{WHOLE}order = "off"\n', r"cell a: order is 'off'; give a list"),
    (f"{WHOLE}bars = {{ ttft = 3 }}\n", r"m\.toml: cell a: bar 'ttft' is not known; known are ttft_p95_s"),
    (f"{WHOLE}goals = {{ turns = true }}\n", r"cell a: goal 'turns' is True; give a number"),
    (f'{WHOLE}order = ["on"]\ngoals = {{ turns = 3 }}\n', r"cell a: goals is \['turns'\]; they are of an arm against"),
    (f"{WHOLE}goodput = {{ speed = 3 }}\n", r"cell a: goodput speed is 3; give milliseconds"),
    (f'{WHOLE}prompts = "words"\n', r"cell a: prompts is 'words'; give one of auto, ids, text, chat"),
    (f"{WHOLE}processes = 0\n", r"cell a: processes is 0; give at least 1"),
    (f"{WHOLE}sweep = {{ clients = 3 }}\n", r"cell a: sweep clients is 3; give a list of different numbers"),
    (f"{WHOLE}sweep = {{ clients = [1], tokens = [2] }}\n", r"sweep one parameter"),
    (f"{WHOLE}sweep = {{ clients = [1, 9] }}\n", r"cell a: 9 clients cannot share"),
    (f"{WHOLE}sweep = {{ clients = [1] }}\n[cells.a-1]\n{ROTATE}", r"a sweep makes another cell a-1"),
    (f"{WHOLE}server = {{ pool_tokens = 9 }}\n", r"cell a: .*arm off is no preset, so a cell cannot change its server"),
    (f"{WHOLE}[quick.cells.b]\nseed = 1\n", None),
    (WHOLE.replace("[cells.a]", '[arms.third]\nurl = "http://h"\ntier = "maybe"\n[cells.a]'),
     r"m\.toml: arm third: tier is 'maybe'"),
    (WHOLE.replace("[cells.a]", '[arms.third]\nurl = "http://h"\ncommand = "x"\n[cells.a]'),
     r"arm third has command and url; give one of"),
    (WHOLE.replace("[cells.a]", "[arms.third]\n[cells.a]"), r"arm third has neither preset, command nor url"),
    (WHOLE.replace("[cells.a]", '[arms.third]\npreset = "sglang"\n[cells.a]'), r"preset is 'sglang'; give one of"),
    (WHOLE.replace("[cells.a]", '[arms.third]\nurl = "http://h"\nquota = "1GiB"\n[cells.a]'), r"needs tier = \"on\""),
    (WHOLE.replace("[cells.a]", '[arms.third]\ncommand = "serve"\n[cells.a]'), r"m\.toml: arm third: .*no \{port\}"),
    (WHOLE.replace("[cells.a]", '[arms.third]\npreset = "mock"\nhost_blocks = "x"\n[cells.a]'),
     r"arm third: host_blocks is 'x'; give a whole number"),
    (WHOLE.replace("[cells.a]", '[arms.third]\npreset = "mock"\nblocks = 3\n[cells.a]'), r"'blocks' is not known"),
    (WHOLE.replace("[cells.a]", '[arms.third]\npreset = "hostcache"\nhost_cache_bytes = "lots"\n[cells.a]'),
     r"arm third: host_cache_bytes is 'lots', which is not a size"),
    (WHOLE.replace('tier = "off"', 'tier = "on"'), r"arm off is named off, and its server has its tier on"),
    (f'baseline = "of"\n{WHOLE}', r"baseline is 'of'; the arms are off, on"),
    (f"speed = {{ start_s = 0 }}\n{WHOLE}", r"start_s is 0"),
    (WHOLE.replace("[defaults]", "[defaults]\nparameters = { tokens = 3 }"), r"defaults has 'parameters'"),
    (WHOLE.replace("[cells.a]", "[cells]\na = 3\n[cells.b]"), r"cell a is 3; give a table"),
]


@pytest.mark.parametrize(("text", "why"), MISTAKES)
def test_every_mistake_is_one_line_with_file_cell_field_and_value(text: str, why: str | None) -> None:
    if why is None:  # a [quick] that is not asked for is not read
        matrix_of(text)
        why = r"quick: cell 'b' is not in the file; there are a"
    with pytest.raises(ConfigError, match=why) as told:
        matrix_of(text, quick="[quick" in text)
    assert "\n" not in str(told.value)
    assert str(told.value).startswith("m.toml")


def test_a_cell_may_change_its_server_but_not_switch_an_arm() -> None:
    text = """
        name = "m"
        [server]
        preset = "mock"
        [arms.off]
        host_blocks = 0
        [arms.on]
        host_blocks = 64
        [cells.a]
        order = ["off", "on"]
        workload = "rotate"
        server = { device_blocks = 99 }
    """
    assert [run.pool_tokens for run in matrix_of(text).runs] == [99 * 16] * 2
    switched = text.replace("device_blocks = 99", "host_blocks = 99")
    with pytest.raises(ConfigError, match=r"cell a: arm off is named off, and its server has its tier on"):
        matrix_of(switched)
    switched = switched.replace("arms.off", "arms.plain").replace('"off"', '"plain"')
    with pytest.raises(ConfigError, match=r"cell a: server host_blocks switches the tier of arm plain; an arm is the"):
        matrix_of(f'baseline = "plain"\n{switched}')


def test_names_that_are_chosen_must_be_there() -> None:
    matrix = matrix_of(WHOLE)
    with pytest.raises(ConfigError, match=r"--cells 'b' is not in m; there are a"):
        matrix.chosen(["b"], None)
    with pytest.raises(ConfigError, match=r"--arms 'none' is not in m; there are off, on"):
        matrix.chosen(None, ["none"])


def test_a_file_that_cannot_be_read_names_those_that_ship() -> None:
    with pytest.raises(ConfigError, match=r"matrix 'nowhere\.toml' cannot be read \(No such file or directory\); "
                                          r"give a TOML file or one of mock, seed-full, seed-small"):
        matrix_text("nowhere.toml")


@pytest.mark.parametrize("name", sorted(shipped().keys() - {"vllm-cpu"}))
@pytest.mark.parametrize("quick", [False, True])
def test_a_shipped_matrix_answers_every_table_of_the_published_benchmark(name: str, quick: bool) -> None:
    text = shipped()[name]
    if quick and "[quick]" not in text:
        return
    matrix = parse_matrix(text, file=name, quick=quick)
    kinds = {type(run.workload) for run in matrix.runs}
    assert kinds == {RotateParameters, AgentsParameters, LadderParameters, EquivalenceParameters}
    assert all(run.answers for run in matrix.runs)
    assert all(estimate_s(run, matrix.speed) for run in matrix.runs)
    if name != "mock":
        wanted = {"b1", "pilot", "b2-r1", "b2-r2", "b2-r3", "b2-r4", "b2-r5", "b3", "b4", "b5", "large", "equivalence"}
        for each in wanted - ({"pilot"} if quick else set()):
            assert any(cell.startswith(each) for cell in matrix.cells), each


@pytest.mark.parametrize(("quick", "most_min"), [(False, 90), (True, 45)])
def test_the_scaled_matrix_is_thought_to_end_in_time(quick: bool, most_min: float) -> None:
    matrix = parse_matrix(shipped()["seed-small"], file="seed-small", quick=quick)
    assert sum(estimate_s(run, matrix.speed) or 0 for run in matrix.runs) / 60 < 0.9 * most_min


def test_the_scaled_ramp_fits_its_pool_at_first_and_exceeds_it_two_to_three_times_at_last() -> None:
    matrix = parse_matrix(shipped()["seed-small"], file="seed-small")
    sizes = [(count * run.workload.prefix_tokens / run.pool_tokens) for run in matrix.runs
             if isinstance(run.workload, AgentsParameters) and run.pool_tokens for count in run.workload.points]
    assert min(sizes) < 0.5
    assert 2 <= max(sizes) <= 3


@pytest.mark.parametrize("quick", [False, True])
def test_the_matrix_for_vllm_starts_both_arms_alike_and_has_the_ramp_and_the_equivalence(quick: bool) -> None:
    matrix = parse_matrix(shipped()["vllm-cpu"], file="vllm-cpu", quick=quick)
    assert {(run.cell, type(run.workload)) for run in matrix.runs} == {
        ("b5-agents", AgentsParameters), ("equivalence", EquivalenceParameters)}
    off, on = (next(run.target for run in matrix.runs if run.arm == arm) for arm in ("off", "on"))
    assert [pair for pair in zip(off.command, on.command, strict=True) if pair[0] != pair[1]] == [("0", str(2 << 30))]
    assert (off.tier, on.tier, on.quota_bytes) == ("off", "on", 2 << 30)
    assert all(run.answers and estimate_s(run, matrix.speed) for run in matrix.runs)
    sizes = [count * run.workload.prefix_tokens / (run.pool_tokens or 0) for run in matrix.runs
             if isinstance(run.workload, AgentsParameters) for count in run.workload.points]
    assert min(sizes) < 0.5
    assert 1.5 <= max(sizes) <= 3
    blocks = int(on.command[on.command.index("--num-gpu-blocks-override") + 1])
    assert {run.pool_tokens for run in matrix.runs} == {(blocks - 1) * 32}
