"""Workers say what they have to say, or how they ended."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from hostcache.client.crew import Crew, WorkerLost, crew

_ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


def with_crew(tmp_path: Path, script: str, plans: list[dict[str, object]]) -> list[object]:
    """What each worker says first, and then to a second message."""
    async def run() -> list[object]:
        async with crew((sys.executable, "-c", script), plans, log_dir=tmp_path) as workers:
            heard = [await workers.hear() for _ in plans]
            workers.say(0, {"more": True})
            heard.append(await workers.hear())
            assert isinstance(workers, Crew)
            assert len(set(workers.pids)) == len(workers) == len(plans)
        return sorted(heard, key=str)

    return asyncio.run(run())


def test_each_worker_gets_its_plan_and_is_heard_by_number(tmp_path: Path) -> None:
    heard = with_crew(tmp_path, _ECHO, [{"plan": 0}, {"plan": 1}])
    assert heard == [(0, {"more": True}), (0, {"plan": 0}), (1, {"plan": 1})]
    assert not list(tmp_path.iterdir()), "nothing was said on stderr, so no log is left"


@pytest.mark.parametrize(("script", "says"), [
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL before its work was done"),
    ("raise SystemExit(4)", "ended with 4 before its work was done"),
    ("print('not json', flush=True)", "said what is no JSON"),
    ("print('{\"failed\": \"no bridge\"}', flush=True)", "worker 0: no bridge"),
], ids=["killed", "ended", "garbled", "failed"])
def test_a_worker_that_ends_or_fails_is_told_in_one_line(tmp_path: Path, script: str, says: str) -> None:
    with pytest.raises(WorkerLost, match=says):
        with_crew(tmp_path, script, [{"plan": 0}])


def test_what_a_worker_says_on_stderr_stays_in_its_log(tmp_path: Path) -> None:
    with pytest.raises(WorkerLost, match=r"worker-0\.log"):
        with_crew(tmp_path, "import sys; sys.exit('why it ended')", [{"plan": 0}])
    assert "why it ended" in (tmp_path / "worker-0.log").read_text()
