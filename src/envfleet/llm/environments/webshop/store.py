"""A catalogue on disk: built once, shared by all processes of the machine.

Law: a store is a folder named after the digest of its source. It appears when it is complete and is
never changed. One process builds it while others that need it wait. Opening it maps its files;
products are read when they are used. `about.json` is written last and has the checksums of the
others: a store that was damaged since is built again.

`open_store` gives all environments of a process the same store, which closes with the last of them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import tempfile
import warnings
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from envfleet.errors import ConfigError, level_of_caller
from envfleet.llm.environments.base import Mode
from envfleet.llm.environments.webshop.catalogue import Product
from envfleet.llm.environments.webshop.goals import (
    ORDER_SEED,
    FilterGoals,
    Goal,
    GoalWriter,
    Numbers,
    goal_place,
    human_goal,
    pick,
    shuffled,
    synthetic_goal,
)
from envfleet.llm.environments.webshop.index import Index, IndexBuilder, label
from envfleet.llm.environments.webshop.mapped_files import bytes_of, mapped, saved
from envfleet.llm.environments.webshop.sources import Source
from envfleet.observe.progress import Progress, Silent, progress_on

VERSION = 2
"""Raise this whenever the files of a store change."""

CACHE_VARIABLE = "ENVFLEET_CACHE"
LONG = 20_000
"""From this many products on, building takes seconds and shows its progress."""

_open: WeakValueDictionary[Path, Store] = WeakValueDictionary()


class Store:
    """An opened catalogue."""

    def __init__(self, folder: Path) -> None:
        """Map the files in `folder`, which `build` made."""
        about = json.loads((folder / "about.json").read_text())
        self.folder = folder
        self.num_products: int = about["num_products"]
        self.num_goals: dict[str, int] = about["num_goals"]
        self.index = Index(folder, self.num_products)
        self._rows = bytes_of(folder / "products.bin")
        self._starts = mapped(folder / "product_starts.npy")
        self._goals = {kind: mapped(folder / f"{kind}_goals.npy") for kind in self.num_goals}
        self._goal_orders: dict[tuple[bool, FilterGoals | None, int], GoalOrder] = {}

    def product(self, number: int) -> Product:
        """The product of this number."""
        return Product.from_bytes(self._rows[self._starts[number] : self._starts[number + 1]])

    def goal(self, number: int, *, is_human: bool = False) -> Goal:
        """The goal of this number among the human or the synthetic ones."""
        product, which = self._goals[_store_kind(is_human)][number]
        make = human_goal if is_human else synthetic_goal
        return make(self.product(int(product)), int(which))

    def goals(
        self, *, is_human: bool = False, filter_goals: FilterGoals | None = None, limit: int = -1
    ) -> GoalOrder:
        """The goals of episodes, in order. A filter is called for every goal, once per process."""
        key = (is_human, filter_goals, limit)
        if key not in self._goal_orders:
            self._goal_orders[key] = self._goal_order(is_human, filter_goals, limit)
        return self._goal_orders[key]

    def _goal_order(
        self, is_human: bool, filter_goals: FilterGoals | None, limit: int
    ) -> GoalOrder:
        kind = _store_kind(is_human)
        if filter_goals is None and limit < 0:
            return GoalOrder(mapped(self.folder / f"{kind}_order.npy"))
        picked = pick(
            self.num_goals[kind],
            mapped(self.folder / f"{kind}_weights.npy"),
            lambda number: self.goal(number, is_human=is_human),
            filter_goals,
            limit,
        )
        return GoalOrder(picked[shuffled(len(picked), ORDER_SEED)])


@dataclass(frozen=True, slots=True)
class GoalOrder:
    """The numbers of goals in the order of episodes."""

    order: Numbers

    def __len__(self) -> int:
        return len(self.order)

    def number(self, seed: int, mode: Mode) -> int:
        """The number of an episode's goal."""
        if not len(self):
            raise ConfigError(
                "this catalogue has no goals: give attr_path (synthetic goals), or human_path with "
                "human_goals=True, or let filter_goals and limit_goals leave some"
            )
        return int(self.order[goal_place(seed, mode, len(self))])


def open_store(folder: Path) -> Store:
    """The store in this folder, one for the whole process."""
    store = _open.get(folder)
    if store is None:
        store = _open[folder] = Store(folder)
    return store


def prepare(source: Source, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The folder of a source's store, which is built if it is not there.

    Args:
        source: The products.
        cache: Where stores are kept; by default `default_cache()`.
        progress: Shows the progress; by default on a terminal, for a large catalogue.
    """
    cache = cache or default_cache()
    folder = cache / f"{source.digest()}-v{VERSION}"
    if damage_of(folder) is None:
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f"{folder.name}.lock"):
        if (damage := damage_of(folder)) is not None:
            if folder.exists():
                text = f"the WebShop catalogue {folder} is damaged ({damage}); it is built again"
                warnings.warn(text, RuntimeWarning, stacklevel=level_of_caller())
            _build_beside(source, folder, progress)
    return folder


def damage_of(folder: Path) -> str | None:
    """What keeps the store in this folder from being used; None if nothing does."""
    try:
        about = json.loads((folder / "about.json").read_text())
        for name, (size, time_ns, checksum) in about["files"].items():
            found = (folder / name).stat()
            if found.st_size != size:
                return f"{name} has {found.st_size:,} bytes instead of {size:,}"
            # reading gigabytes takes its time: a file that was not written to since is trusted
            if found.st_mtime_ns != time_ns and _checksum(folder / name) != checksum:
                return f"the checksum of {name} is another one"
    except OSError as exc:
        return f"{Path(exc.filename or folder).name} cannot be read: {exc.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "about.json cannot be read"
    return None


def default_cache() -> Path:
    """$ENVFLEET_CACHE, or envfleet in the user's cache folder."""
    told = os.environ.get(CACHE_VARIABLE)
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(told).expanduser() if told else users / "envfleet") / "webshop"


def build(source: Source, folder: Path, progress: Progress | None = None) -> None:
    """Write the files of a store into an empty folder; reads the source once."""
    about = source.about()
    progress = progress or (
        Silent() if about is not None and about < LONG else progress_on(sys.stderr)
    )
    index, goals, starts = IndexBuilder(folder), GoalWriter(), array("q", [0])
    try:
        with (
            (folder / "products.bin").open("wb") as rows,
            tempfile.TemporaryDirectory(dir=folder) as scratch,
            progress.bar("WebShop: building the catalogue", about or 0) as bar,
        ):
            for number, product in enumerate(source.products(Path(scratch))):
                starts.append(starts[-1] + rows.write(product.to_bytes()))
                index.add(product.searchable, labels_of(product))
                goals.add(number, product)
                if number % 1000 == 999:
                    bar.advance(1000)
            bar.note("writing the index")
            index.finish()
    finally:
        index.close()
    saved(folder / "product_starts.npy", np.array(starts, np.int64))
    found = {"num_products": len(starts) - 1, "num_goals": goals.finish(folder)}
    files = {path.name: _finished(path) for path in sorted(folder.iterdir())}
    with (folder / "about.json").open("w") as file:
        file.write(json.dumps({**found, "files": files}))
        file.flush()
        os.fsync(file.fileno())


def _finished(path: Path) -> tuple[int, int, int]:
    """Size, time and checksum of a file that is complete; it is on the disk then."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    found = path.stat()
    return found.st_size, found.st_mtime_ns, _checksum(path)


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            value = zlib.crc32(piece, value)
    return value


def labels_of(product: Product) -> Iterator[str]:
    """The labels by which the keywords <a>, <c> and <q> find a product."""
    yield label("c", product.category.lower())
    yield label("q", product.query)
    for attribute in product.attributes:
        yield label("a", attribute.lower())


def _build_beside(source: Source, folder: Path, progress: Progress | None) -> None:
    """Build under another name and rename, so that no process sees half a store."""
    # This process holds the lock, so these are of processes that died.
    for left in folder.parent.glob(f"{folder.name}.*.building"):
        shutil.rmtree(left, ignore_errors=True)
    unfinished = Path(
        tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".building", dir=folder.parent)
    )
    try:
        build(source, unfinished, progress)
        if folder.exists():  # a damaged one, which other processes may have mapped
            folder.rename(unfinished.with_suffix(".damaged.building"))
        unfinished.rename(folder)
    finally:
        for left in (unfinished, unfinished.with_suffix(".damaged.building")):
            shutil.rmtree(left, ignore_errors=True)


def _store_kind(is_human: bool) -> str:
    return "human" if is_human else "synthetic"


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Hold a lock, which the system releases if this process dies."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
