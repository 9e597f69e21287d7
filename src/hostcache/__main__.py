"""`python -m hostcache`: the same as the console script."""

from __future__ import annotations

import sys

from hostcache.cli import main

if __name__ == "__main__":
    sys.exit(main())
