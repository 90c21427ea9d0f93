"""Rows of a file, read where they are: only the position of each row is held, in 8 or 16 bytes.

Law: no call leaves a file open or mapped, so that any number of processes can read one file and the
system keeps one copy of it. A file that has changed since its rows were counted is an error.
"""

from __future__ import annotations

import functools
import gzip
import json
import mmap
import os
import re
import zlib
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from envfleet.errors import ConfigError
from envfleet.llm.extras import import_extra

Offsets = npt.NDArray[np.int64]

ENDINGS = (".json", ".jsonl", ".jsonl.gz", ".parquet")
"""Of files that can be read."""
BLOCK_LINES = 64
"""Lines that are compressed together: to read one takes about 0.1 ms."""
SCAN_BYTES = 1 << 22
_WHITE = np.frombuffer(b" \t\r\v\f", np.uint8)

# Up to the next bracket, with strings taken as a whole so that brackets in them do not count.
_TO_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+([\[\]{}])', re.DOTALL)


class RowList(Protocol):
    """Rows by number, with a name for each that errors use."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...
    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...
    def place(self, index: int, /) -> str:
        """The name of this row in errors."""


class OffsetRows:
    """JSON objects at known offsets of a file."""

    def __init__(self, path: Path, starts: Offsets, stops: Offsets) -> None:
        self._path, self._starts, self._stops = path, starts, stops
        self._as_counted = _identity(os.stat(path))

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        with self._opened() as descriptor:
            return self._row(descriptor, index)

    def __iter__(self) -> Generator[Mapping[str, Any], None, None]:
        with self._opened() as descriptor:
            for index in range(len(self)):
                yield self._row(descriptor, index)

    def _row(self, descriptor: int, index: int) -> Mapping[str, Any]:
        start, stop = int(self._starts[index]), int(self._stops[index])
        return _object(
            os.pread(descriptor, stop - start, start), functools.partial(self.place, index)
        )

    @contextmanager
    def _opened(self) -> Iterator[int]:
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            if _identity(os.fstat(descriptor)) != self._as_counted:
                raise ConfigError(
                    f"{self._path} has changed since its rows were counted; "
                    "start the processes that read it again"
                )
            yield descriptor
        finally:
            os.close(descriptor)

    def place(self, index: int) -> str:
        """The name of this row in errors."""
        with open(self._path, "rb") as file:
            before = file.read(int(self._starts[index]))
        num_before = before.count(b"\n")
        return f"{self._path}, line {num_before + 1}"


class CompressedRows:
    """Lines of JSON in memory, in compressed blocks."""

    def __init__(self, path: Path, blocks: list[bytes], numbers: array[int]) -> None:
        self._path, self._blocks, self._numbers = path, blocks, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        index = range(len(self))[index]
        lines = zlib.decompress(self._blocks[index // BLOCK_LINES]).split(b"\n")
        return _object(lines[index % BLOCK_LINES], functools.partial(self.place, index))

    def __iter__(self) -> Generator[Mapping[str, Any], None, None]:
        lines = (line for block in self._blocks for line in zlib.decompress(block).split(b"\n"))
        for index, line in enumerate(lines):
            yield _object(line, functools.partial(self.place, index))

    def place(self, index: int) -> str:
        """The name of this row in errors."""
        return f"{self._path}, line {self._numbers[index]}"


class TableRows:
    """Rows of an Arrow table."""

    def __init__(self, path: Path, table: Any) -> None:
        self._path, self._table = path, table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._table.slice(range(len(self))[index], 1).to_pylist()[0]
        return row

    def __iter__(self) -> Generator[Mapping[str, Any], None, None]:
        for batch in self._table.to_batches():
            yield from batch.to_pylist()

    def place(self, index: int) -> str:
        """The name of this row in errors."""
        return f"{self._path}, row {index}"


FileRows = OffsetRows | CompressedRows | TableRows


def file_rows(path: Path, columns: list[str] | None = None) -> FileRows:
    """The rows of a file, by the ending of its name; of a Parquet file only these columns."""
    ending = file_ending(path)
    if ending is None:
        raise ConfigError(f"{path} is none of {', '.join(ENDINGS)}")
    if ending == ".parquet":
        return parquet_rows(path, columns)
    if ending == ".jsonl.gz":
        return gzip_rows(path)
    return json_rows(path) if ending == ".json" else json_lines_rows(path)


def file_ending(path: Path) -> str | None:
    """Which of `ENDINGS` a file has."""
    return next((one for one in ENDINGS if path.name.lower().endswith(one)), None)


def json_lines_rows(path: Path) -> OffsetRows:
    """One JSON object on each line; blank lines do not count."""
    if os.path.getsize(path) == 0:
        nothing = np.zeros(0, np.int64)
        return OffsetRows(path, nothing, nothing)
    data = np.memmap(path, np.uint8, "r")
    ends = [
        np.flatnonzero(data[start : start + SCAN_BYTES] == ord("\n")) + start
        for start in range(0, len(data), SCAN_BYTES)
    ]
    stops = np.concatenate((*ends, [len(data)])).astype(np.int64)
    starts = np.concatenate(([0], stops[:-1] + 1)).astype(np.int64)
    is_row = stops > starts
    # Few lines begin with white space, and only those can be blank.
    for number in np.flatnonzero(is_row & np.isin(data[np.minimum(starts, len(data) - 1)], _WHITE)):
        is_row[number] = bool(data[starts[number] : stops[number]].tobytes().strip())
    return OffsetRows(path, starts[is_row], stops[is_row])


def json_rows(path: Path) -> OffsetRows:
    """A JSON list of objects; or lines of JSON, which some files with this ending hold."""
    if os.path.getsize(path) == 0:
        return json_lines_rows(path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        opening = data[: 1 << 16].lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        if opening == b"[":
            starts, stops = _objects_in_list(data, path)
            return OffsetRows(path, np.frombuffer(starts, np.int64), np.frombuffer(stops, np.int64))
    if opening == b"{":
        return json_lines_rows(path)
    raise ConfigError(f"{path}, line 1: a list of rows should begin with [, got {opening!r}")


def _objects_in_list(data: mmap.mmap, path: Path) -> tuple[array[int], array[int]]:
    starts, stops = array("q"), array("q")
    depth = last = 0
    for found in _TO_BRACKET.finditer(data):
        is_opening = found[1] in b"[{"
        if depth == 1 and data[last : found.start(1)].strip(b" \t\r\n,"):
            raise ConfigError(f"{path}: item {len(starts) + 1} of the list is no JSON object")
        depth += 1 if is_opening else -1
        if depth == 2 and is_opening:
            starts.append(found.start(1))
        elif depth == 1:
            last = found.end()
            if not is_opening:
                stops.append(last)
    if depth != 0:
        raise ConfigError(f"{path} is no complete JSON list: its brackets do not match")
    return starts, stops


def gzip_rows(path: Path) -> CompressedRows:
    """Lines of JSON in a gzip file, which can only be read from its beginning: held compressed."""
    blocks: list[bytes] = []
    numbers = array("q")
    pending: list[bytes] = []
    try:
        with gzip.open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not (line := line.strip()):
                    continue
                numbers.append(number)
                pending.append(line)
                if len(pending) == BLOCK_LINES:
                    blocks.append(zlib.compress(b"\n".join(pending), 1))
                    pending.clear()
    except (OSError, EOFError, zlib.error) as exc:
        raise ConfigError(f"{path} is no complete gzip file: {exc}") from exc
    if pending:
        blocks.append(zlib.compress(b"\n".join(pending), 1))
    return CompressedRows(path, blocks, numbers)


def parquet_rows(path: Path, columns: list[str] | None = None) -> TableRows:
    """A Parquet file, or some of its columns, read into memory."""
    install = "pip install 'envfleet[parquet]'"
    arrow = import_extra("pyarrow", wanted_by=str(path), install=install)
    parquet = import_extra("pyarrow.parquet", wanted_by=str(path), install=install)
    try:
        return TableRows(path, parquet.read_table(path, columns=columns))
    except arrow.ArrowException as exc:
        raise ConfigError(f"{path} cannot be read as a Parquet file: {exc}") from exc


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _object(text: bytes, place: Callable[[], str]) -> Mapping[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{place()} is no JSON object: {exc}") from exc
    if not isinstance(row, dict):
        raise ConfigError(f"{place()} is no JSON object but a {type(row).__name__}")
    return row
