"""What `hostcache` and its packages export: sorted, resolvable, and nothing more than is promised."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hostcache

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(
    ".".join(path.parent.relative_to(ROOT / "src").parts) for path in (ROOT / "src" / "hostcache").rglob("__init__.py")
)


def declared_names(package: str) -> list[str] | None:
    """`__all__` as written in the package's source, or None; read without importing."""
    tree = ast.parse((ROOT / "src" / Path(*package.split(".")) / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            assert node.value is not None
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


@pytest.mark.parametrize("package", PACKAGES)
def test_exported_names_are_sorted_unique_and_there(package: str) -> None:
    names = declared_names(package)
    if names is None:
        return
    assert names == sorted(set(names))
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("hostcache"):
            raise
        pytest.skip(f"{package} needs {error.name}")
    assert [name for name in names if not hasattr(module, name)] == []


def test_the_root_lists_its_public_names_and_refuses_others() -> None:
    assert set(hostcache.__all__) <= set(dir(hostcache))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = hostcache.no_such_name


def test_the_version_is_stated_once() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert config["project"]["dynamic"] == ["version"]
    assert f"## {hostcache.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "src" / "hostcache" / "py.typed").exists()


def test_the_module_form_and_the_script_are_one_command() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert config["project"]["scripts"] == {"hostcache": "hostcache.cli:main"}
    done = subprocess.run(
        [sys.executable, "-m", "hostcache", "--version"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, hostcache.__version__ in done.stdout) == (0, True), done.stderr


def test_the_root_hands_out_the_tiers_own_objects() -> None:
    tier = importlib.import_module("hostcache.tier")
    names = set(hostcache.__all__) - {"__version__"}
    assert [name for name in names if getattr(hostcache, name) is not getattr(tier, name)] == []
