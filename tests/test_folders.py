"""Where runs write."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostcache.errors import ConfigError
from hostcache.folders import new_folder, write_new


def test_each_run_has_the_next_free_folder_and_a_name_is_taken_once(tmp_path: Path) -> None:
    root = str(tmp_path / "runs")
    assert [new_folder(None, root).name for _ in range(3)] == ["001", "002", "003"]
    asked = new_folder(tmp_path / "a" / "b", root)
    assert new_folder(asked, root) == asked
    (asked / "kept").touch()
    with pytest.raises(ConfigError, match="exists and is not empty"):
        new_folder(asked, root)


def test_where_no_folder_can_be_made_one_line_says_so(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for asked, root in ((file / "run", "runs"), (None, str(file))):
        with pytest.raises(ConfigError, match=r"no folder can be made at .*file.*: Not a directory; give another"):
            new_folder(asked, root)


def test_a_new_file_is_whole_and_never_over_another(tmp_path: Path) -> None:
    path = tmp_path / "new"
    write_new(path, b"whole")
    with pytest.raises(FileExistsError):
        write_new(path, b"other")
    with pytest.raises(FileNotFoundError):
        write_new(tmp_path / "none" / "new", b"")
    assert path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [path]
