"""What all tests share: where the repository is, and the gates of the markers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# A slow machine is no failure: time is never asserted.
settings.register_profile("timeless", deadline=None)
settings.load_profile("timeless")

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run: `gpu` without a CUDA device. (`vllm` files skip on import themselves.)"""
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    try:
        import torch

        missing = None if torch.cuda.is_available() else "no CUDA device"
    except ImportError:
        missing = "torch is not installed"
    if missing is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout: what holds src, docs and README.md."""
    return ROOT
