"""The source of a catalogue: WebShop's files, or the generator.

Law: `digest` changes whenever the products change, and does not read all of a large file.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from envfleet.errors import ConfigError
from envfleet.llm.environments.webshop.catalogue import Product, products_of
from envfleet.llm.environments.webshop.generator import VERSION, generate
from envfleet.llm.environments.webshop.json_stream import items_of, pairs_of

SAMPLE = 1 << 20
"""Bytes at both ends of a file that its digest covers, besides its size and time."""

Row = tuple[Any, Any, Any]


class Source(Protocol):
    """Gives the same products every time."""

    def digest(self) -> str:
        """Identifies its products."""

    def products(self, scratch: Path) -> Iterator[Product]:
        """Its products in order; `scratch` is a folder for temporary files."""

    def about(self) -> int | None:
        """How many products there are, if known."""


@dataclass(frozen=True, slots=True)
class GeneratedSource:
    """A generated catalogue."""

    num_products: int
    seed: int

    def digest(self) -> str:
        """A digest of the generator's version and options."""
        return _digest("generated", str(VERSION), str(self.num_products), str(self.seed))

    def products(self, scratch: Path) -> Iterator[Product]:
        """Products, generated one at a time."""
        return products_of(iter(generate(self.num_products, self.seed)))

    def about(self) -> int | None:
        """The number asked for."""
        return self.num_products


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """WebShop's own files."""

    items: Path
    attributes: Path | None = None
    human: Path | None = None
    num_products: int | None = None

    def digest(self) -> str:
        """A digest of size, time and both ends of each file; read again only if one changed."""
        return _digest_of_files(self, tuple(map(_stamp, self._paths)))

    def _look(self) -> str:
        return _digest("files", str(self.num_products), *map(_file_digest, self._paths))

    @property
    def _paths(self) -> tuple[Path | None, ...]:
        return self.items, self.attributes, self.human

    def products(self, scratch: Path) -> Iterator[Product]:
        """Products, read one at a time; a temporary database holds the other two files by id."""
        return products_of(self._rows(scratch / "rows.sqlite"))

    def about(self) -> int | None:
        """The number asked for, if any."""
        return self.num_products

    def _rows(self, scratch: Path) -> Iterator[Row]:
        with closing(sqlite3.connect(scratch)) as rows:
            rows.execute("pragma synchronous = off")
            find_attributes = _Lookup(rows, "attributes", self.attributes)
            find_human = _Lookup(rows, "human", self.human)
            for item in islice(items_of(self.items), self.num_products):
                row = item.get("product", item) if isinstance(item, dict) else {}
                asin = row.get("asin") if isinstance(row, dict) else None
                yield item, find_attributes(asin), find_human(asin)


class _Lookup:
    """The values of a JSON object by key, on disk: as a dict the full file would take gigabytes."""

    def __init__(self, rows: sqlite3.Connection, table: str, path: Path | None) -> None:
        self._find = f"select row from {table} where asin = ?"
        self._rows = rows
        rows.execute(f"create table {table} (asin text primary key, row text) without rowid")
        if path is not None:
            pairs = ((key, json.dumps(value)) for key, value in pairs_of(path))
            rows.executemany(f"insert or replace into {table} values (?, ?)", pairs)

    def __call__(self, asin: Any) -> Any:
        found = self._rows.execute(self._find, (asin,)).fetchone() if _is_key(asin) else None
        return json.loads(found[0]) if found else None


def _is_key(asin: Any) -> bool:
    return isinstance(asin, str) and asin.isprintable()


def locate(
    file_path: str | None, attr_path: str | None, human_path: str | None, dataset: str
) -> tuple[Path, Path | None, Path | None]:
    """The three files; one that is not named is looked for next to the products."""
    items = Path(str(file_path)).expanduser()
    if items.is_dir():
        items = _products_in(items, dataset)
    if not items.is_file():
        raise ConfigError(f"file_path: there is no file {items}")
    folders = (items.parent, items.parent.parent)
    size = items.stem.removeprefix("items_shuffle")
    attributes = _file_named("attr_path", attr_path) or _first_file(
        folder / name
        for folder in folders
        for name in (f"items_ins_v2{size}.json", "items_ins_v2.json", "items_ins_v2_1000.json")
    )
    human = _file_named("human_path", human_path) or _first_file(
        folder / "items_human_ins.json" for folder in folders
    )
    return items, attributes, human


def _products_in(folder: Path, dataset: str) -> Path:
    names = {
        "small": ("items_shuffle_1000.json", "small/items_shuffle_1000.json"),
        "full": ("items_shuffle.json", "full/items_shuffle.json"),
    }[dataset]
    found = _first_file(folder / name for name in (*names, "documents.jsonl"))
    if found is None:
        raise ConfigError(
            f"file_path: {folder} holds neither {' nor '.join(names)} nor documents.jsonl, which "
            f"is what dataset={dataset!r} looks for"
        )
    return found


def _file_named(key: str, path: str | None) -> Path | None:
    if path is None:
        return None
    named = Path(path).expanduser()
    if not named.is_file():
        raise ConfigError(f"{key}: there is no file {named}")
    return named


def _first_file(paths: Iterator[Path]) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


# The stamps are part of the cache key.
@lru_cache(maxsize=64)
def _digest_of_files(files: SourceFiles, stamps: tuple[tuple[int, int, int] | None, ...]) -> str:
    return files._look()


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    if path is None:
        return None
    about = path.stat()
    return about.st_ino, about.st_size, about.st_mtime_ns


def _file_digest(path: Path | None) -> str:
    if path is None:
        return "none"
    about = path.stat()
    with path.open("rb") as file:
        head = file.read(SAMPLE)
        file.seek(max(about.st_size - SAMPLE, 0))
        tail = file.read()
    ends = hashlib.blake2b(head + tail, digest_size=16).hexdigest()
    return f"{path.name} {about.st_size} {about.st_mtime_ns} {ends}"


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()
