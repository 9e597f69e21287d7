"""Holds the import directions of docs/map.md by reading every module with `ast`; lazy and typing-only imports count."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src"

# Row by part. A part may import itself and the rows beneath it; never a neighbour in its row, never upward.
PARTS = {
    "leaves": 0,
    "tier": 1,
    "copiers": 2, "workload": 2, "client": 2, "frontdoor": 2, "testing": 2,
    "engine": 3, "sim": 3, "vllm_plugin": 3,
    "bench": 4, "lab": 4,
    "report": 5,
    "cli": 6,
}  # fmt: skip
LEAVES = {"errors", "clock", "folders", "records", "settings", "sizes"}
COMMANDS = {"cli", "doctor", "__main__"}
ROOT = "hostcache"  # the package's own __init__: version and public names

# Third-party packages, and the modules or parts that may import them (lazily or not). numpy may go anywhere.
THIRD_PARTY = {
    "torch": ("engine", "vllm_plugin", "copiers.cuda", "copiers.slabs", "bench"),
    "safetensors": ("engine",),
    "tokenizers": ("engine",),
    "jinja2": ("engine",),
    "gguf": ("engine",),
    "uvicorn": ("engine",),
    "uvloop": ("engine",),
    "httptools": ("engine",),
    "httpx": ("bench", "doctor"),
    "rich": ("bench.harness",),
    "transformers": ("bench",),
    "hypothesis": ("testing",),
    "numba": ("lab",),
    "yaml": ("lab",),
    "vllm": ("vllm_plugin", "bench.vllm.offload_spec"),
    "prometheus_client": ("vllm_plugin",),
}


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted((SRC / "hostcache").rglob("*.py")):
        name = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return found


MODULES = modules()


def part_of(module: str) -> str:
    """The part a module belongs to; KeyError for one that docs/map.md has no row for."""
    if module == ROOT:
        return ROOT
    top = module.split(".")[1]
    if top in LEAVES:
        return "leaves"
    if top in COMMANDS:
        return "cli"
    if top not in PARTS:
        raise KeyError(f"{module} belongs to no row; give {top!r} a row here and in docs/map.md")
    return top


def imports(module: str) -> Iterator[tuple[int, str]]:
    """(line, imported module) for every import statement, wherever it stands. Relative ones are refused elsewhere."""
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node.lineno, inner if inner in MODULES else node.module


def own_imports(module: str) -> Iterator[tuple[int, str]]:
    return ((line, name) for line, name in imports(module) if name.split(".")[0] == ROOT)


def may_import(importer: str, imported: str) -> bool:
    a, b = part_of(importer), part_of(imported)
    if a == b:
        return True
    if a == ROOT:
        return b == "tier"
    if b == ROOT:
        return PARTS[a] > PARTS["tier"]
    if a == "report":
        return b == "leaves"
    return PARTS[b] < PARTS[a]


def test_every_module_has_a_row() -> None:
    for module in MODULES:
        part_of(module)


def test_imports_point_down() -> None:
    wrong = [
        f"{module}:{line} imports {name}: {part_of(module)} may not know {part_of(name)}"
        for module in MODULES
        for line, name in own_imports(module)
        if not may_import(module, name)
    ]
    assert wrong == []


def test_imports_are_absolute_and_name_what_exists() -> None:
    wrong = [
        f"{module}:{node.lineno} imports relatively"
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    wrong += [
        f"{module}:{line} imports {name}, which is no module"
        for module in MODULES
        for line, name in own_imports(module)
        if name not in MODULES
    ]
    assert wrong == []


def test_no_module_is_part_of_an_import_cycle() -> None:
    graph = {module: {name for _, name in own_imports(module) if name != module} for module in MODULES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(error.args[1]))


def test_third_party_packages_are_imported_only_where_the_table_says() -> None:
    wrong = []
    for module in MODULES:
        inside = module.removeprefix("hostcache.")
        for line, name in imports(module):
            top = name.split(".")[0]
            if top in (ROOT, "numpy") or top in sys.stdlib_module_names:
                continue
            if not any(inside == place or inside.startswith(place + ".") for place in THIRD_PARTY.get(top, ())):
                wrong.append(f"{module}:{line} imports {name}")
    assert wrong == []


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("time", {"hostcache.clock"}),  # a second way to tell the time is a second clock
        ("pickle", set()),
        ("marshal", set()),
        ("shelve", set()),
        ("datetime", {"hostcache.clock", "hostcache.records"}),
    ],
)
def test_a_guarded_standard_module_is_imported_only_where_it_belongs(package: str, allowed: set[str]) -> None:
    users = {module for module in MODULES if any(name.split(".")[0] == package for _, name in imports(module))}
    assert users <= allowed


def test_the_environment_is_read_only_by_settings_and_cli() -> None:
    wrong = [
        f"{module}:{node.lineno} uses os.{node.attr}"
        for module, tree in MODULES.items()
        if module not in ("hostcache.settings", "hostcache.cli")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "putenv")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    ]
    wrong += [
        f"{module}:{node.lineno} takes environ out of os"
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and node.module == "os"
        and any(alias.name in ("environ", "getenv", "putenv") for alias in node.names)
    ]
    assert wrong == []


def test_randomness_is_an_argument() -> None:
    """`Random` and numpy's seeded generators are fine; the hidden global streams are not."""
    wrong = [
        f"{module}:{node.lineno} uses {ast.unparse(node)}"
        for module, tree in MODULES.items()
        for streams in [{"np.random", "numpy.random"} | ({"random"} & {name for _, name in imports(module)})]
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) in streams
        and node.attr not in ("Random", "Generator", "default_rng", "SeedSequence", "PCG64")
    ]
    wrong += [
        f"{module}:{node.lineno} takes {alias.name} out of random"
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "random"
        for alias in node.names
        if alias.name != "Random"
    ]
    assert wrong == []


LIGHT = sorted(
    module
    for module in MODULES
    if part_of(module) in ("leaves", "tier", "frontdoor", "report", ROOT)
    or (part_of(module) == "vllm_plugin" and module != "hostcache.vllm_plugin.connector")
    or module in ("hostcache.cli", "hostcache.engine.requests", "hostcache.engine.interfaces", "hostcache.copiers")
)


def test_the_light_modules_import_on_numpy_alone() -> None:
    """In a fresh interpreter where every heavy package refuses to be imported."""
    blocked = sorted(THIRD_PARTY)
    script = "import sys\n" + f"for name in {blocked!r}: sys.modules[name] = None\n"
    script += "".join(f"import {module}\n" for module in LIGHT)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_importing_hostcache_imports_not_even_numpy() -> None:
    script = "import sys, hostcache; print(sorted({'numpy', 'torch', 'asyncio'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
