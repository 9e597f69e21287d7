"""Where a run writes: a new folder each time, never over an earlier one; a new file with all of it, or none."""

from __future__ import annotations

import os
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


def part_of(path: Path) -> Path:
    """What is to be `path` has this name beside it until it is whole."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def give_name(part: Path, path: Path) -> None:
    """The file `part` is `path` too, at once. Raises FileExistsError where there is one, else OSError."""
    try:
        os.link(part, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if path.exists():
            raise FileExistsError(str(path)) from None
        part.rename(path)


def write_new(path: Path, data: bytes) -> None:
    """A new file with all of it, or none. Raises FileExistsError where there is one, else OSError."""
    part = part_of(path)
    try:
        part.write_bytes(data)
        give_name(part, path)
    finally:
        part.unlink(missing_ok=True)
