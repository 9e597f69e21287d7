"""Where a run writes: a new folder each time, never over an earlier one."""

from __future__ import annotations

from pathlib import Path

from hostcache.errors import ConfigError


def new_folder(asked: Path | None, root: str) -> Path:
    """Make and return `asked`, or the next free `root`/NNN.

    Raises ConfigError when `asked` holds something already, or a folder cannot be made there.
    """
    try:
        return _made(asked, root)
    except OSError as why:
        raise ConfigError(f"no folder can be made at {asked or root}: {why.strerror}; give another one with --out"
                          ) from None


def _made(asked: Path | None, root: str) -> Path:
    if asked is not None:
        if asked.is_dir() and not any(asked.iterdir()):
            return asked
        if asked.exists():
            raise ConfigError(f"--out {asked} exists and is not empty; runs never overwrite: give a new folder")
        asked.mkdir(parents=True)
        return asked
    number = 1
    while True:
        folder = Path(root) / f"{number:03d}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
