"""Runs a matrix in a process of its own, for tests that end it; takes what `bench matrix` takes."""

from __future__ import annotations

import argparse
import sys

from hostcache.bench.harness import matrix_commands
from hostcache.errors import HostCacheError


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    matrix_commands.add_arguments(parser)
    try:
        return matrix_commands.run(parser.parse_args(argv), out=sys.stdout, err=sys.stderr, argv=argv)
    except HostCacheError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
