"""Tests against real vLLM on the CPU: run by `make test-vllm` in an environment of its own.

Where vLLM is not installed nothing in this folder is collected, so that `make test` needs none of it. `make test-vllm`
imports vLLM before it asks pytest for anything: there a missing vLLM is an error, not a run without tests.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from tests.vllm.models import model

HAVE_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAVE_VLLM else ["test_*.py"]

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # GNU OpenMP spins while it waits: on a shared machine a second thread only costs
    "TORCHDYNAMO_DISABLE": "1",  # one compiled function of the embedding takes half a minute under tensor parallel
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and worker in this process: loads in seconds
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
if HAVE_VLLM:  # read when vLLM is imported, so before any test module is
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of vLLM and its packages are not ours to judge; those that our own modules cause stay errors."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.filterwarnings("default", r"error:::hostcache\..*"))


@pytest.fixture(scope="session")
def models_dir(pytestconfig: pytest.Config) -> Path:
    """Kept between runs: pytest's own cache folder, which `make clean` removes."""
    cache = pytestconfig.cache
    assert cache is not None
    return cache.mkdir("hostcache-models")


@pytest.fixture(scope="session")
def tiny_llama(models_dir: Path) -> Path:
    return model("tiny-llama", models_dir)


@pytest.fixture(scope="session")
def tiny_qwen2(models_dir: Path) -> Path:
    return model("tiny-qwen2", models_dir)


@pytest.fixture(scope="session")
def tiny_gemma2(models_dir: Path) -> Path:
    """Two cache groups: a model that runs without the tier."""
    return model("tiny-gemma2", models_dir)


@pytest.fixture(scope="session")
def smollm2(models_dir: Path) -> Path:
    return model("smollm2", models_dir)


@pytest.fixture(scope="session")
def server_environ() -> dict[str, str]:
    """For a server process: what this one has, but an engine in processes of its own, and vLLM's routes for development
    (resetting the prefix cache is one)."""
    environ = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    return {**environ, "VLLM_SERVER_DEV_MODE": "1"}
