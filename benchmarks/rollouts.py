"""EnvStateManager as a contender: the same rollouts, with environments in different places.

Every contender of a row gets the same seeds and the same answers. A random policy with a fixed seed
gives the answers. They are recorded once, before any clock starts, so the policy's time is not
measured.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.limit import ANSWER_S
from benchmarks.workload import timed
from envfleet.cli.measure import Slice
from envfleet.llm.config import load_config
from envfleet.llm.manager import EnvStateManager
from envfleet.llm.manager_types import Cache

Inputs = list[dict[str, Any]]

NUM_ROLLOUTS = 4
"""Number of different rollouts, played in turn."""
_ACTIONS_PER_TURN = 3
_OFFERED = re.compile(r"You must choose from these actions:(.*)\.$", re.DOTALL)
_WORD = re.compile(r"[a-z]{3,}")


@dataclass(frozen=True)
class Rollouts:
    """The number of environments of each kind, and the number of turns."""

    counts: Mapping[str, int]
    """Number of environments by tag."""
    num_turns: int
    custom_envs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Tags added to the preset, or replacing its own."""
    max_workers: int = 2
    start_method: str | None = None

    @property
    def num_envs(self) -> int:
        """Number of environments of all tags."""
        return sum(self.counts.values())

    def config(self, use_multiprocessing: bool | str) -> dict[str, Any]:
        """The configuration of a manager."""
        config = load_config("base")
        block = {
            "env_groups": self.num_envs,
            "group_size": 1,
            "env_configs": {"tags": list(self.counts), "n_groups": list(self.counts.values())},
        }
        config["es_manager"] |= {
            "use_multiprocessing": use_multiprocessing,
            "max_workers": self.max_workers,
            "start_method": self.start_method,
            "train": block,
        }
        config["custom_envs"] |= self.custom_envs
        return config

    @cached_property
    def recorded(self) -> list[tuple[int, list[Inputs]]]:
        """For each rollout, its seed and the inputs of every turn."""
        with EnvStateManager(self.config(False)) as manager:
            return [self._record(manager, number) for number in range(NUM_ROLLOUTS)]

    def _record(self, manager: EnvStateManager, number: int) -> tuple[int, list[Inputs]]:
        chance, seed = random.Random(number), number * self.num_envs
        going_on, turns = manager.reset(seed=seed), []
        for _ in range(self.num_turns):
            turns.append([_answer(manager, cache, chance) for cache in going_on])
            going_on = manager.step(turns[-1])
        return seed, turns


def _answer(manager: EnvStateManager, cache: Cache, chance: random.Random) -> dict[str, Any]:
    """A random answer."""
    entry = manager.envs[cache["env_id"]]
    names = getattr(entry["config"], "action_lookup", None)
    state = cache["history"][-1]["state"]
    if names:
        actions = [chance.choice(list(names.values())) for _ in range(_ACTIONS_PER_TURN)]
    elif offered := _OFFERED.search(state):
        actions = [_shopping(offered.group(1).split(", "), state, chance)]
    else:
        actions = [f"{chance.randrange(50)} + {chance.randrange(50)}"]
    said = f"<answer>{' || '.join(actions)}</answer>"
    return {
        "env_id": cache["env_id"],
        "llm_response": said,
        "llm_raw_response": said,
        "actions": actions,
    }


def _shopping(offered: Sequence[str], state: str, chance: random.Random) -> str:
    """Search for words of the instruction if possible, otherwise click on a random item."""
    if any(action.startswith("search[") for action in offered):
        words = _WORD.findall(state.partition("\n")[0].lower())
        return f"search[{' '.join(chance.sample(words, min(4, len(words))))}]"
    return chance.choice(offered)


class Managed:
    """A manager that plays rollouts; without turns it only resets."""

    def __init__(
        self, rollouts: Rollouts, key: str, label: str, use_multiprocessing: bool | str
    ) -> None:
        self.key, self.label, self._use = key, label, use_multiprocessing
        self._rollouts = rollouts
        self.manager: EnvStateManager | None = None

    def open(self) -> None:
        """Build every environment, and start workers."""
        rollouts: Iterator[tuple[int, list[Inputs]]] = itertools.cycle(self._rollouts.recorded)
        self._next = rollouts
        self.manager = EnvStateManager(self._rollouts.config(self._use))

    def run(self, seconds: float) -> Slice:
        """Play whole rollouts."""
        return timed(self.play, seconds)

    def play(self) -> int:
        """Play one rollout and return the number of resets and turns."""
        assert self.manager is not None
        seed, turns = next(self._next)
        count = len(self.manager.reset(seed=seed))
        for inputs in turns:
            self.manager.step(inputs)
            count += len(inputs)
        return count

    @property
    def plan(self) -> list[str]:
        """Where it placed each kind of environment, and why."""
        if self.manager is None:
            return []
        return [f"{self.label} chose: {line}" for line in self.manager.plan.splitlines()]

    def close(self) -> None:
        """Close."""
        if self.manager is not None:
            self.manager.close()


class OneTurn(Managed):
    """Plays turns of endless episodes, without a reset in a slice."""

    def open(self) -> None:
        """Reset once."""
        super().open()
        assert self.manager is not None
        seed, (self._inputs,) = self._rollouts.recorded[0]
        self.manager.reset(seed=seed)

    def run(self, seconds: float) -> Slice:
        """Play turns, without a warm-up, because they mostly wait."""
        assert self.manager is not None
        steps, start_s = 0, time.perf_counter()
        while not steps or time.perf_counter() - start_s < seconds:
            steps += len(self.manager.step(self._inputs))
        return Slice(steps, time.perf_counter() - start_s)


class SeparateProcesses:
    """The limit: as many processes as there are workers, each with its own manager.

    The processes exchange only seeds. A rollout ends when the last of them has reset.
    """

    key = "separate"

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts, self._seed = rollouts, 0
        self.label = f"{rollouts.max_workers} processes that share nothing"
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def open(self) -> None:
        """Start them."""
        context = multiprocessing.get_context("fork")
        for share in self._shares():
            here, there = context.Pipe()
            process = context.Process(target=_begin, args=(there, share), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, seconds: float) -> Slice:
        """Reset again and again."""
        return timed(self.play, seconds)

    def play(self) -> int:
        """Reset all environments once."""
        for pipe, share in zip(self._pipes, self._shares(), strict=True):
            pipe.send(self._seed)
            self._seed += share.num_envs
        return sum(_heard(pipe) for pipe in self._pipes)

    def close(self) -> None:
        """Stop them."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def _shares(self) -> list[Rollouts]:
        workers = self._rollouts.max_workers
        return [
            replace(
                self._rollouts,
                counts={tag: count // workers for tag, count in self._rollouts.counts.items()},
            )
            for _ in range(workers)
        ]


def _begin(pipe: Connection, rollouts: Rollouts) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with EnvStateManager(rollouts.config(False)) as manager:
        while (seed := pipe.recv()) is not None:
            pipe.send(len(manager.reset(seed=seed)))


def _heard(pipe: Connection) -> int:
    if not pipe.poll(ANSWER_S):
        raise TimeoutError(f"a process did not answer for {ANSWER_S:g} s")
    count: int = pipe.recv()
    return count


def both_ways(rollouts: Rollouts, kind: Callable[..., Managed] = Managed) -> list[Managed]:
    """A manager that chooses placement itself, and one with all environments in this process."""
    return [
        kind(rollouts, "auto", "envfleet, auto", "auto"),
        kind(rollouts, "here", "envfleet, one process", False),
    ]
