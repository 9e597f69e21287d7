"""`make test-gpu`: everything that only a machine with a CUDA device can show. Without one it fails and says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def why_not() -> str | None:
    """Why nothing here could run; None where it can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def main(arguments: list[str]) -> int:
    """pytest's exit code; 1 without a device. A run in which every test was skipped has shown nothing: 1 as well."""
    reason = why_not()
    if reason is not None:
        sys.stderr.write(f"test-gpu: {reason}, so nothing was tested; run it on a machine with an NVIDIA GPU\n")
        return 1
    counted = Counted()
    code = int(pytest.main(["-m", "gpu", "-s", *(arguments or [str(Path(__file__).parent.parent)])], plugins=[counted]))
    if code == 0 and not counted.passed:
        sys.stderr.write("test-gpu: no test ran\n")
        return 1
    return code


class Counted:
    """How many tests passed."""

    def __init__(self) -> None:
        self.passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
