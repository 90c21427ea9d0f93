"""Large JSON files read item by item: an array, an object, or lines.

Law: memory holds one item and one chunk of the file, as WebShop's full catalogue is one array of
several gigabytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from json.decoder import JSONDecoder
from pathlib import Path
from typing import Any, TextIO

from envfleet.errors import ConfigError

CHUNK = 1 << 20
MAX_PIECE = 64 << 20
"""An item with more characters than this is taken for an error in the file."""


def items_of(path: Path) -> Iterator[Any]:
    """Every item of a file: of a JSON array, or one per line if the name ends in .jsonl."""
    with _opened_stream(path) as file:
        if path.suffix == ".jsonl":
            yield from _json_lines(file, path)
        else:
            yield from _json_array(_Scanner(file, path))


def pairs_of(path: Path) -> Iterator[tuple[str, Any]]:
    """Every key and value of a file that is one JSON object."""
    with _opened_stream(path) as file:
        yield from _json_object(_Scanner(file, path))


@contextmanager
def _opened_stream(path: Path) -> Iterator[TextIO]:
    """A file in UTF-8, with or without a byte order mark."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is not the JSON it should be: {exc}") from exc


def _json_lines(file: TextIO, path: Path) -> Iterator[Any]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as exc:
                raise ConfigError(f"{path}:{number} is not JSON: {exc}") from exc


def _json_array(scanner: _Scanner) -> Iterator[Any]:
    scanner.expect("[")
    if scanner.peek() == "]":
        return
    while True:
        yield scanner.value()
        if scanner.expect(",]") == "]":
            return


def _json_object(scanner: _Scanner) -> Iterator[tuple[str, Any]]:
    scanner.expect("{")
    if scanner.peek() == "}":
        return
    while True:
        key = scanner.value()
        scanner.expect(":")
        yield str(key), scanner.value()
        if scanner.expect(",}") == "}":
            return


class _Scanner:
    """Reads values from a file, chunk by chunk."""

    def __init__(self, file: TextIO, path: Path) -> None:
        self._file, self._path = file, path
        self._text, self._at = "", 0
        self._decoder = JSONDecoder()

    def peek(self) -> str:
        """The next character that is not white space; "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at].isspace():
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read():
                return ""

    def expect(self, characters: str) -> str:
        """Skip one of these characters, and return it."""
        found = self.peek()
        if not found or found not in characters:
            wanted = " or ".join(repr(one) for one in characters)
            raise ConfigError(
                f"{self._path} is not the JSON it should be: {wanted} expected, "
                f"got {found or 'the end of the file'!r}"
            )
        self._at += 1
        return found

    def value(self) -> Any:
        """The next value."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as exc:
                is_hopeless = len(self._text) - self._at > MAX_PIECE
                if isinstance(exc, RecursionError) or is_hopeless or not self._read():
                    raise ConfigError(f"{self._path} is not the JSON it should be: {exc}") from exc
                continue
            # A number may go on in the next chunk; all other values have a closing character.
            if end == len(self._text) and self._read():
                continue
            self._at = end
            return value

    def _read(self) -> bool:
        """Read at least as much as is in the buffer, so that a long value is tried rarely."""
        more = self._file.read(max(CHUNK, len(self._text) - self._at))
        self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)
