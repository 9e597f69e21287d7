"""What the documents claim, a test reads: every code name in docs/map.md, every counter, setting, target and link."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from pathlib import Path

import pytest

from hostcache import cli, errors
from hostcache.engine.stats import EngineStats, TransferStats
from hostcache.frontdoor import FrontDoorStats
from hostcache.settings import SETTINGS
from hostcache.tier import Accounting, History, HostCache, TierConfig

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

# Names in docs/map.md that are not ours: packages we stand on.
FOREIGN = {"torch", "numpy", "ast", "starlette", "httpx", "uvicorn"}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def code_names(page: str) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", without_blocks(text_of(page)))


def defined(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Names bound by these statements, also under `if` and `try`."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.If | ast.Try):
            found |= defined(node.body)
    return found


def members(cls: ast.ClassDef) -> set[str]:
    """What `Class.name` may say: its own statements, and attributes set on self in its methods."""
    own = set(defined(cls.body))
    for node in ast.walk(cls):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            own.add(node.attr)
    return own


@functools.cache
def known_names() -> frozenset[str]:
    """Modules (dotted, without `hostcache.`), their names, `Class.member`, and each of these by its last parts."""
    names = {"hostcache"}
    for path in (SRC / "hostcache").rglob("*.py"):
        module = (
            ".".join(path.relative_to(SRC / "hostcache").with_suffix("").parts).removesuffix("__init__").rstrip(".")
        )
        names |= {module, f"hostcache.{module}"}
        for name, node in defined(ast.parse(path.read_text(encoding="utf-8")).body).items():
            qualified = [
                name,
                *([f"{name}.{member}" for member in members(node)] if isinstance(node, ast.ClassDef) else []),
            ]
            for each in qualified:
                names |= {each, f"{module}.{each}", f"hostcache.{module}.{each}"}
    names |= {package for name in names if "." in name for package in [name.split(".")[0]]}
    return frozenset(names - {""})


def settings_fields() -> set[str]:
    return {setting.name for setting in SETTINGS}


@functools.cache
def source_words() -> frozenset[str]:
    words: set[str] = set()
    for path in (SRC / "hostcache").rglob("*.py"):
        words |= set(re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8")))
    return frozenset(words)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", text_of("Makefile"), flags=re.MULTILINE))


def exists(name: str) -> bool:
    """A code name of docs/map.md: a path, a make target, a command, a flag, or a name that the source defines."""
    bare = re.sub(r"\(.*\)$", "", name)
    if name.startswith("make "):
        return set(name.split()[1:]) <= make_targets()
    if name.startswith("hostcache "):
        return "cli" in known_names() and name.split()[1] in source_words()
    if name.startswith("--"):
        return name[2:].replace("-", "_") in settings_fields()
    if "/" in bare or bare.endswith((".py", ".md", ".toml")):
        return (ROOT / bare).exists() or (SRC / "hostcache" / bare).exists()
    return bare in known_names() or bare in FOREIGN


def test_every_code_name_in_the_map_exists() -> None:
    names = code_names("docs/map.md")
    assert len(names) > 20
    assert [name for name in names if not exists(name)] == []


def test_the_map_names_every_module() -> None:
    mapped = {re.sub(r"\(.*\)$", "", name) for name in code_names("docs/map.md")}
    modules = {
        path.relative_to(SRC / "hostcache").as_posix()
        for path in (SRC / "hostcache").rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }
    assert modules - mapped == set()


def rows(page: str, heading: str) -> list[str]:
    """The keys in the first column of the tables under a heading, up to the next one."""
    section = text_of(page).split(f"\n{heading}\n", 1)[1]
    section = re.split(r"^#", section, maxsplit=1, flags=re.MULTILINE)[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def names_of(record: type) -> set[str]:
    return {field.name for field in dataclasses.fields(record)}


def published() -> dict[str, set[str]]:
    """The keys of /v1/stats by section of docs/counters.md, from the records that fill it."""
    config = TierConfig(host_cache_bytes=1 << 20, page_bytes=1 << 10, page_tokens=16)
    cache = HostCache(config, history=History(16))
    accounting = Accounting(16, History(16), cache).stats().as_json()
    return {
        "## `accounting`": set(accounting),
        "### Reasons": set(accounting["recomputed"]),
        "## `host_cache`": set(cache.stats().as_json()) | names_of(TransferStats),
        "## `engine`": names_of(EngineStats) | {"uptime_s", "rss_bytes"},
        "## `front_door`": names_of(FrontDoorStats) - {"closed"} | {"draining"},  # the server's word for it
    }


@pytest.mark.parametrize("heading", list(published()))
def test_the_counters_page_defines_every_key_of_the_stats_once(heading: str) -> None:
    keys = rows("docs/counters.md", heading)
    assert set(keys) == published()[heading]
    assert len(keys) == len(set(keys))


def test_the_settings_and_their_page_state_the_same_keys_and_defaults() -> None:
    page = text_of("docs/configuration.md").split("## Per request")[0]
    stated = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ", page, flags=re.MULTILINE)
    assert sorted(name for name, _ in stated) == sorted(setting.name for setting in SETTINGS)
    defaults = dict(stated)
    for setting in SETTINGS:
        text = defaults[setting.name]
        if setting.default is None:
            assert text == setting.unset
        else:
            assert setting.parse(text, setting.name) == setting.default


def test_the_exit_codes_on_the_page_are_those_of_the_error_tree() -> None:
    table = text_of("docs/configuration.md").split("## Exit codes", 1)[1]
    stated = {int(code) for code in re.findall(r"^\| (\d+) \|", table, flags=re.MULTILINE)}
    tree = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.HostCacheError)
    ]
    assert stated == {0, errors.BARS_MISSED, cli.INTERRUPTED, *(kind.exit_code for kind in tree)}


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", without_blocks(text_of(page)))
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in local if not ((ROOT / page).parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_named_in_the_pages_exist(page: str) -> None:
    named = set(re.findall(r"`make ([a-z-]+)", text_of(page))) | set(
        re.findall(r"^make (?:\w+='[^']*' )*([a-z-]+)", text_of(page), flags=re.MULTILINE)
    )
    assert named <= make_targets()


@pytest.mark.parametrize("page", ["README.md", "SECURITY.md", "docs/map.md"])
def test_flags_named_in_the_pages_are_settings_or_words_of_a_command(page: str) -> None:
    flags = set(re.findall(r"(?<![\w-])--([a-z][a-z-]*)", text_of(page)))
    commands = "\n".join(
        path.read_text(encoding="utf-8")
        for path in (SRC / "hostcache").rglob("*.py")
        if "add_argument" in path.read_text("utf-8")
    )
    foreign = {"index-url", "extra-index-url", "kv-transfer-config"}  # of pip and vLLM
    unknown = {
        flag
        for flag in flags - foreign
        if flag.replace("-", "_") not in settings_fields() and f"--{flag}" not in commands
    }
    assert unknown == set()
