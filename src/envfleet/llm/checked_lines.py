"""Files of JSON lines, each with a checksum, that survive a torn last line.

    {"sum": "8b1f...", "data": {...}}

Law: a line is written by one `write` and never changed. A last line without its end was never
finished and counts as not written; any other line that is not as it was written is an error.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envfleet.errors import ConfigError


def as_line(data: Any) -> bytes:
    """One line of the file, with its end."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return f'{{"sum":"{zlib.crc32(text.encode()):08x}","data":{text}}}\n'.encode()


def read_lines(path: Path) -> Iterator[tuple[Any, int]]:
    """The data of every whole line, and where in the file its end is.

    Raises:
        ConfigError: A line is damaged.
    """
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield _data(line, f"{path}, line {number}"), end


def data_of(line: bytes) -> Any:
    """The data of one line.

    Raises:
        ValueError: The line is torn or damaged.
    """
    begin, _, rest = line.partition(b',"data":')
    text = rest[:-2]
    if begin != b'{"sum":"%08x"' % zlib.crc32(text) or rest[-2:] != b"}\n":
        raise ValueError("its checksum does not fit")
    return json.loads(text)


def _data(line: bytes, where: str) -> Any:
    try:
        return data_of(line)
    except ValueError as exc:
        raise ConfigError(
            f"{where} is damaged: {exc}. Restore the file, or delete this line"
        ) from exc
