"""Small matrices for tests: on mock servers in processes of their own, and with nothing behind them."""

from __future__ import annotations

import argparse
import io
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hostcache.bench.harness import matrix_commands
from hostcache.bench.harness.matrix_file import Matrix, parse_matrix

PLAY = Path(__file__).with_name("matrix_play.py")
_MOCK = (sys.executable, "-m", "hostcache", "bench", "mock")
_QUICK = ("--device-blocks", "64", "--base-s", "0.0005", "--s-per-token", "0.000001", "--itl-s", "0", "--port",
          "{port}")

ROTATE = ('workload = "rotate"\nparameters = { clients = 2, sessions = 4, tokens = 48, growth_tokens = 4, '
          "reply_tokens = 2, duration_s = 0.05, nopressure_visits = 0, recovery_idle_s = 0, observe_idle_s = 0, "
          "probe_tokens = 0 }\n")
AGENTS = ('workload = "agents"\nparameters = { points = [1, 2, 3], prefix_tokens = 48, tool_tokens = 4, '
          "reply_tokens = 2, gap_min_s = 0, gap_max_s = 0.01, duration_s = 0.05 }\n")


def mock_command(*more: str) -> str:
    return shlex.join([*_MOCK, *more, *_QUICK])


def arms(off: Sequence[str] = (), on: Sequence[str] = ("--host-blocks", "512")) -> str:
    """Both arms, each a process of this Python."""
    return "\n".join(f'[arms.{arm}]\ncommand = """{mock_command(*flags)}"""\ntier = "{arm}"\n'
                     for arm, flags in (("off", off), ("on", on)))


def matrix_of(text: str, *, quick: bool = False) -> Matrix:
    return parse_matrix(text, file="m.toml", quick=quick)


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    matrix_commands.add_arguments(parser)
    return parser.parse_args(argv)


def run(*argv: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of `bench matrix`."""
    out, err = io.StringIO(), io.StringIO()
    code = matrix_commands.run(parsed(*argv), out=out, err=err, argv=argv)
    return code, out.getvalue(), err.getvalue()
