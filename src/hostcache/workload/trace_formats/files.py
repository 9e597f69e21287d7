"""A trace file's lines, numbered, whatever it is packed with. Knows no format: what is in a line is not read here."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from hostcache.errors import ConfigError

MAX_LINE_BYTES = 64 * 2**20
"""Of a line, and of a file that holds one session. A prompt of the greatest length has fewer ids than that."""

BREAKS = (EOFError, OSError, zlib.error, lzma.LZMAError)
"""What reading a cut or damaged file raises."""

_BUFFER_BYTES = 2**18
_BOM = b"\xef\xbb\xbf"


class TraceRefused(ConfigError):
    """A trace, or one row of it by number, that cannot be what it says it is."""

    def __init__(self, message: str, *, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


def refuse(path: Path, number: int, why: str) -> NoReturn:
    raise TraceRefused(f"{path.name} row {number}: {why}", row=number) from None


class _Xz(io.RawIOBase):
    """An xz file unpacked, all its streams. lzma.LZMAFile takes a damaged later one for the end of the file."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        into = memoryview(buffer)
        while True:
            more = b""
            if self._stream.eof:
                more = self._stream.unused_data
                while not more.lstrip(b"\0"):  # streams may be padded with zeros
                    more = self._raw.read(_BUFFER_BYTES)
                    if not more:
                        return 0
                self._stream, more = lzma.LZMADecompressor(lzma.FORMAT_XZ), more.lstrip(b"\0")
            elif self._stream.needs_input:
                more = self._raw.read(_BUFFER_BYTES)
                if not more:
                    raise EOFError("compressed file ended before the end of its stream")
            out = self._stream.decompress(more, len(into))
            if out:
                into[: len(out)] = out
                return len(out)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What the system says against `path`, as a refusal."""
    try:
        yield
    except OSError as why:
        raise TraceRefused(f"{path} cannot be read: {why.strerror}; give the path of a trace file") from None


def is_folder(path: Path) -> bool:
    """Raises TraceRefused."""
    with reading(path):
        return path.is_dir()


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """The file's bytes, unpacked where they begin as gzip or xz does. Raises TraceRefused."""
    with reading(path):
        if not path.exists():
            raise FileNotFoundError(0, "no file of that name")
        if not path.is_file():  # opening a pipe would wait for its writer
            raise OSError(0, "it is no regular file, and a trace is read more than once")
        raw = path.open("rb")
    with raw, unpacked(raw) as file:
        yield file


@contextmanager
def unpacked(raw: BinaryIO) -> Iterator[io.BufferedReader]:
    """The same for a file that is open and can go back to its start. What comes before a damaged place can be read."""
    magic = raw.read(2)
    raw.seek(0)
    if magic == b"\x1f\x8b":
        with gzip.GzipFile(fileobj=raw) as file:
            yield cast(io.BufferedReader, file)  # which reads lines and peeks as one
    elif magic == b"\xfd7":
        with io.BufferedReader(cast(Any, _Xz(raw)), _BUFFER_BYTES) as unxz:
            yield unxz
    else:
        yield cast(io.BufferedReader, raw)


def unmarked(text: bytes) -> bytes:
    """Without the byte order mark that some programs begin a file with."""
    return text.removeprefix(_BOM)


def lines(path: Path, file: io.BufferedReader, *, max_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """Each line with its number, from 1, its line end (LF or CRLF) still on it; a byte order mark is not.

    Empty lines may end a file, nowhere else. Raises TraceRefused.
    """
    number, empty = 0, 0
    while True:
        number += 1
        try:
            line = file.readline(max_bytes + 1)
        except BREAKS as why:
            refuse(path, number, f"the file ends or breaks here ({why}); fetch it again")
        if not line:
            return
        if len(line) > max_bytes:
            refuse(path, number, f"longer than {max_bytes} bytes; a trace has one request a line")
        if number == 1:
            line = unmarked(line)
        if not line.strip():
            empty = empty or number
            continue
        if empty:
            refuse(path, empty, "empty; a trace has one request a line")
        yield number, line
