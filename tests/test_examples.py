"""The examples run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_page_survives_eviction_in_an_engine_of_ones_own(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(root / "examples" / "own_engine.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "no pressure: 0 jobs",
        "evict: Clean()",
        "restored: 39 pages, equal: True",
    ]
