"""WebShop: the time of a search in a large catalogue, and its memory in many workers."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from benchmarks.rollouts import Managed, Rollouts
from benchmarks.startup_and_idle import memory_of_children
from envfleet.cli.measure import Slice
from envfleet.llm.environments.webshop import WebShopConfig, WebShopEnv
from envfleet.llm.environments.webshop.config import prepare_catalogue
from envfleet.llm.environments.webshop.store import Store
from envfleet.observe.progress import Progress

NUM_QUERIES = 300
NUM_WORKERS = 8


def built(num_products: int, progress: Progress) -> tuple[Path, float | None]:
    """The folder of a catalogue, and how long it took to build; None if it existed."""
    start_s = time.perf_counter()
    before = time.time()
    folder = prepare_catalogue(WebShopConfig(num_products=num_products), progress)
    is_new = (folder / "about.json").stat().st_mtime >= before
    return folder, time.perf_counter() - start_s if is_new else None


def size_of(folder: Path) -> int:
    """Bytes of all files of a catalogue."""
    return sum(file.stat().st_size for file in folder.iterdir())


def queries(store: Store) -> Iterator[str]:
    """Search terms: a whole instruction, a product's query, or four words of its title."""
    chance, num_goals = random.Random(0), store.num_goals["synthetic"]
    for number in range(NUM_QUERIES):
        goal = store.goal(chance.randrange(num_goals))
        words = goal.title.split()
        first = chance.randrange(max(1, len(words) - 4))
        yield (goal.text, goal.query, " ".join(words[first : first + 4]))[number % 3]


class Searching:
    """An environment that searches, shows the first page, and goes back."""

    key, label = "search", "envfleet, search"

    def __init__(self, num_products: int) -> None:
        self._config = WebShopConfig(num_products=num_products)
        self.times_s: list[float] = []
        """The time of every search: find the fifty best products and show the first ten."""

    def open(self) -> None:
        """Open the catalogue."""
        self._env = WebShopEnv(self._config)
        self._env.reset(seed=0)
        self._queries = cycle(list(queries(self._env.store)))

    def run(self, seconds: float) -> Slice:
        """Search."""
        env, clock, begun_s = self._env, time.perf_counter, time.perf_counter()
        times_s: list[float] = []
        while not times_s or clock() - begun_s < seconds:
            action = f"search[{next(self._queries)}]"
            start_s = clock()
            env.step(action)
            times_s.append(clock() - start_s)
            env.step("click[back to search]")
        self.times_s += times_s
        return Slice(len(times_s), sum(times_s))

    def close(self) -> None:
        """Release the catalogue."""
        del self._env


class Weighed:
    """Memory of spawned workers that shop, minus their memory before they opened the catalogue."""

    key = "memory"

    def __init__(self, num_products: int, num_turns: int, num_workers: int = NUM_WORKERS) -> None:
        self.label = f"envfleet, {num_workers} spawned workers"
        self._rollouts = Rollouts(
            {"Shop": num_workers},
            num_turns,
            {
                "Shop": {
                    "env_type": "webshop",
                    "max_actions_per_traj": num_turns,
                    "env_config": {"num_products": num_products},
                }
            },
            max_workers=num_workers,
            start_method="spawn",
        )
        self.extra_bytes: list[int] = []
        """The extra memory in each round."""

    def open(self) -> None:
        """Record the actions."""
        assert self._rollouts.recorded
        gc.collect()  # a catalogue mapped here would share its memory with the workers

    def run(self, seconds: float) -> Slice:
        """Start, measure the memory, shop, measure again."""
        shoppers = Managed(self._rollouts, self.key, self.label, use_multiprocessing=True)
        try:
            shoppers.open()
            before, start_s, count = memory_of_children(), time.perf_counter(), 0
            for _ in self._rollouts.recorded:
                count += shoppers.play()
            elapsed_s = time.perf_counter() - start_s
            self.extra_bytes.append(memory_of_children() - before)
        finally:
            shoppers.close()
        return Slice(count, elapsed_s)

    def close(self) -> None:
        """Nothing is left open."""
