"""`EnvStateManager`: many text environments, played turn by turn, wherever each one lives best.

    inputs ─► checked ─► orders ─► here and in workers at once ─► answers ─► caches, in input order

Laws: caches, statuses, rewards and metrics are the same wherever environments live and whatever
happens to workers meanwhile. An environment that fails ends with a `failure` in its own cache; the
others do not notice. Input that makes no sense is refused before anybody has moved.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any, Self

from envfleet.errors import ActionError, ConfigError, FleetClosed, OutOfOrder, level_of_caller
from envfleet.llm.entries import Cache, Elsewhere, Entry, EnvStatus
from envfleet.llm.metrics import sum_up
from envfleet.llm.pictures import seen
from envfleet.llm.places import Answer, Order, Standing, bring_home
from envfleet.llm.placing import Places
from envfleet.llm.settings import (
    Settings,
    Tag,
    UseMultiprocessing,
    read_settings,
    with_option,
)
from envfleet.llm.turns import Failure, Opening, State, Turn

_VAL_SEED = 123
"""Where validation begins if the configuration does not say."""


class EnvStateManager:
    """The environments of a configuration, in groups that share their seeds."""

    def __init__(self, config: Any, mode: str = "train") -> None:
        """Build every environment.

        Args:
            config: A mapping, an OmegaConf object, or the name or path of a YAML file.
            mode: "train" or "val": which block of `es_manager` counts.
        """
        self.settings: Settings = read_settings(config, mode)
        self.mode = mode
        self.group_size = self.settings.group_size
        tags = [tag for tag, groups in self.settings.groups for _ in range(groups)]
        self._tags: list[Tag] = [tag for tag in tags for _ in range(self.group_size)]
        self._seed_counter = 0
        self._done: list[list[tuple[Any, ...]]] = [[] for _ in self._tags]
        """The actions of each turn of each episode, to bring an environment back if it is lost."""
        self._states: list[State] = ["" for _ in self._tags]
        self._answers: list[Any] = [None for _ in self._tags]
        self._places = Places(self._tags, self.settings)
        self._places.settle(self.settings.use_multiprocessing)
        self._must_move = False
        """Whether options have changed that say where environments live."""
        self.envs: list[Entry] = [self._entry(env_id) for env_id in range(len(self._tags))]
        self.rollout_cache: list[Cache] = []
        self._untold: dict[tuple[str, Failure], list[Entry]] = {}
        """Who has failed in this call."""
        self._needs_reset = "there is no rollout yet"
        self._is_closed = False

    # ---- how it is played -----------------------------------------------------------------------

    @property
    def plan(self) -> str:
        """Where environments live and why, one line per kind."""
        return self._places.said

    @property
    def use_multiprocessing(self) -> UseMultiprocessing:
        """Whether environments live in workers: True, False, "auto", "threads" or "resets"."""
        return self.settings.use_multiprocessing

    @use_multiprocessing.setter
    def use_multiprocessing(self, value: UseMultiprocessing) -> None:
        """False brings everybody home at once, as they stand; others count from the next reset."""
        self._change("use_multiprocessing", value)
        if value is False:
            failures = self._places.come_home(self._orders_to_stand(), self._failed())
            self._show_where()
            for env_id, failure in failures.items():
                self._give_up(self.envs[env_id], self.rollout_cache[env_id], failure)
            self._tell_of_failures()

    @property
    def max_workers(self) -> int:
        """Workers or threads; another number counts from the next reset."""
        return self.settings.max_workers

    @max_workers.setter
    def max_workers(self, value: int | None) -> None:
        self._change("max_workers", value)
        self._must_move = True

    @property
    def sequential_env_types(self) -> list[str]:
        """Types that stay in this process; others count from the next reset."""
        return sorted(self.settings.sequential_env_types)

    @sequential_env_types.setter
    def sequential_env_types(self, value: Sequence[str]) -> None:
        self._change("sequential_env_types", value)
        self._must_move = True

    @property
    def format_penalty(self) -> float:
        """What is added for a turn that names what is not there, never above zero."""
        return self.settings.format_penalty

    @format_penalty.setter
    def format_penalty(self, value: float) -> None:
        self._change("format_penalty", value)

    def _change(self, name: str, value: Any) -> None:
        self._check_open()
        self.settings = with_option(self.settings, name, value)

    def worker_pids(self) -> list[int]:
        """Every process that environments live in, or are made in, apart from this one."""
        return self._places.worker_pids()

    # ---- rollouts -------------------------------------------------------------------------------

    def reset(self, seed: int | None = None) -> list[Cache]:
        """Begin a rollout: every environment of group g by `seed + g`.

        Without a seed, training goes on from `seed.train` by as many seeds as there are groups;
        validation begins at `seed.val` every time.
        """
        self._check_open()
        first = self._first_seed(seed)
        self._needs_reset = "the last reset was interrupted"
        self._move()
        self._places.refresh()
        orders = {
            entry["env_id"]: Order(first + entry["group_id"], self.mode, is_new=True)
            for entry in self.envs
        }
        caches: dict[int, Cache] = {}

        def forget() -> None:
            self.rollout_cache, self._untold = [], {}
            for entry in self.envs:
                entry["status"] = EnvStatus(seed=first + entry["group_id"])
            for turns in self._done:
                turns.clear()

        def open_one(env_id: int, opening: Answer) -> None:
            caches[env_id] = self._opened(self.envs[env_id], opening)

        self._places.begin(orders, self._go_on_here, forget, open_one)
        self._show_where()
        self.rollout_cache = [caches[entry["env_id"]] for entry in self.envs]
        self._needs_reset = ""
        self._tell_of_failures()
        return self.rollout_cache

    def step(self, all_env_inputs: Sequence[Mapping[str, Any]]) -> list[Cache]:
        """Play one turn of some environments; the caches of those that go on, in input order."""
        self._check_open()
        if self._needs_reset:
            raise OutOfOrder(f"{self._needs_reset}; call reset first")
        inputs = self._checked(all_env_inputs)
        orders = {
            env_id: self._order(env_id, named=_names(given["actions"]))
            for env_id, given in inputs.items()
        }
        self._needs_reset = "the last step was interrupted"
        answers = self._places.play(orders, self._standing, self._go_on_here)
        going_on = []
        for env_id, given in inputs.items():
            turn = answers[env_id]
            assert isinstance(turn, Turn)
            if not self._took(self.envs[env_id], given, turn):
                going_on.append(self.rollout_cache[env_id])
        self._needs_reset = ""
        self._tell_of_failures()
        return going_on

    def get_rollout_states(self) -> list[Cache]:
        """Every cache of this rollout, finished or not, with its metrics."""
        self._check_open()
        if not self.rollout_cache:
            raise OutOfOrder("there is no rollout yet; call reset first")
        sum_up(self.envs, self.rollout_cache, self.group_size)
        for entry, cache in zip(self.envs, self.rollout_cache, strict=True):
            if entry["tag"] == "MetamathQA":
                cache["correct_answer"] = self._answers[entry["env_id"]]
        return self.rollout_cache

    def render(self) -> list[Any]:
        """What every environment shows now."""
        self._check_open()
        if not self.rollout_cache:
            raise OutOfOrder("there is no rollout yet; call reset first")
        return [
            state[0] if isinstance(state, list) and len(state) == 1 else state
            for state in self._states
        ]

    def close(self) -> None:
        """Close every environment and end the workers; doing it twice changes nothing."""
        self._is_closed = True
        self._places.close()

    def __enter__(self) -> Self:
        """Use it in a `with` statement."""
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    # ---- parts of a reset -----------------------------------------------------------------------

    def _first_seed(self, seed: int | None) -> int:
        base, is_training = self.settings.seed, self.mode == "train"
        if seed is not None:
            if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
                raise ConfigError(f"seed must be a whole number from 0, got {seed!r:.60}")
            seed = int(seed)
            if is_training and base is not None:
                self._seed_counter = seed - base + 1
            return seed
        if not is_training:
            return _VAL_SEED if base is None else base
        if base is None:
            return random.SystemRandom().randint(0, 1_000_000)
        first = base + self._seed_counter
        self._seed_counter += self.settings.num_groups
        return first

    def _opened(self, entry: Entry, opening: Answer) -> Cache:
        assert isinstance(opening, Opening)
        env_id = entry["env_id"]
        self._states[env_id], self._answers[env_id] = opening.state, opening.answer
        cache: Cache = {
            "env_id": env_id,
            "history": [{**seen(opening.state), "actions_left": entry["max_actions_per_traj"]}],
            "group_id": entry["group_id"],
            "tag": entry["tag"],
            "penalty": 0,
        }
        if opening.failure is not None:
            self._give_up(entry, cache, opening.failure)
        return cache

    # ---- parts of a step ------------------------------------------------------------------------

    def _checked(self, inputs: Any) -> dict[int, Mapping[str, Any]]:
        if isinstance(inputs, str | Mapping) or not isinstance(inputs, Sequence):
            raise ActionError(
                f"step takes a list with a mapping for each environment, got {inputs!r:.60}"
            )
        found: dict[int, Mapping[str, Any]] = {}
        for given in inputs:
            if not isinstance(given, Mapping) or "env_id" not in given or "actions" not in given:
                raise ActionError(
                    f"an input is a mapping with env_id and actions, got {given!r:.60}"
                )
            env_id, actions = given["env_id"], given["actions"]
            if isinstance(env_id, bool) or not isinstance(env_id, Integral):
                raise ActionError(f"env_id must be a whole number, got {env_id!r:.60}")
            env_id = int(env_id)
            if not 0 <= env_id < len(self.envs):
                shown = env_id if abs(env_id) < 10**18 else "of so large a number"
                raise ActionError(
                    f"there is no environment {shown}; there are 0 to {len(self.envs) - 1}"
                )
            if env_id in found:
                raise ActionError(f"environment {env_id} was given two turns; give it one")
            if self.envs[env_id]["status"].terminated:
                raise ActionError(
                    f"the episode of environment {env_id} is over; step those that step returned"
                )
            if not isinstance(actions, list | tuple):
                raise ActionError(
                    f"the actions of environment {env_id} must be a list of names, "
                    f"got {actions!r:.60}"
                )
            found[env_id] = given
        return found

    def _order(self, env_id: int, named: tuple[Any, ...] | None) -> Order:
        entry = self.envs[env_id]
        status = entry["status"]
        assert status.seed is not None
        left = entry["max_actions_per_traj"] - status.num_actions
        return Order(status.seed, self.mode, named=named, left=left)

    def _took(self, entry: Entry, given: Mapping[str, Any], turn: Turn) -> bool:
        """Write a turn down; True if the episode is over."""
        env_id, status = entry["env_id"], entry["status"]
        cache = self.rollout_cache[env_id]
        is_malformed = turn.num_valid != len(given["actions"]) or not turn.num_valid
        if is_malformed and turn.failure is None:  # who answered is not to blame for a lost turn
            cache["penalty"] += self.settings.format_penalty
        status.num_actions += len(turn.actions)
        status.rewards.append(turn.reward)
        self._done[env_id].append(tuple(turn.actions))
        cache["history"][-1].update(
            actions=list(turn.actions),
            reward=turn.reward,
            info=turn.info,
            llm_response=given.get("llm_response", ""),
            llm_raw_response=given.get("llm_raw_response", ""),
        )
        left = entry["max_actions_per_traj"] - status.num_actions
        if turn.failure is None:
            self._states[env_id] = turn.state
        cache["history"].append({**seen(self._states[env_id]), "actions_left": left})
        if turn.failure is not None:
            self._give_up(entry, cache, turn.failure)
        elif turn.is_done:
            status.terminated, status.truncated = True, not turn.is_success
        elif left <= 0:
            status.terminated = status.truncated = True
        return status.terminated

    def _give_up(self, entry: Entry, cache: Cache, failure: Failure) -> None:
        entry["status"].terminated = entry["status"].truncated = True
        cache["failure"] = {
            "doing": failure.doing,
            "error": failure.error,
            "turn": len(entry["status"].rewards),
        }
        self._untold.setdefault((entry["tag"], failure), []).append(entry)

    def _tell_of_failures(self) -> None:
        """Warn of those that have failed in this call, once of all that failed alike."""
        untold, self._untold = self._untold, {}
        # by number: who was first depends on the workers
        alike = ((sorted(them, key=_env_id), *kind) for kind, them in untold.items())
        for (first, *others), tag, failure in sorted(alike, key=lambda group: _env_id(group[0][0])):
            too = f", and so do those of {len(others)} more of its kind" if others else ""
            warnings.warn(
                f"environment {first['env_id']} ({tag}, seed {first['status'].seed}) failed in "
                f"{failure.doing}: {failure.error}; its rollout ends here{too}",
                RuntimeWarning,
                stacklevel=level_of_caller(),
            )

    # ---- where environments live ----------------------------------------------------------------

    def _entry(self, env_id: int) -> Entry:
        tag = self._tags[env_id]
        config = tag.env_type.config(tag.env_config)
        entry: Entry = {
            "tag": tag.name,
            "group_id": env_id // self.group_size,
            "env_id": env_id,
            "env": Elsewhere(config, "in a worker"),
            "config": config,
            "status": EnvStatus(),
            "max_actions_per_traj": tag.max_actions_per_traj,
        }
        self._show(entry)
        return entry

    def _show(self, entry: Entry) -> None:
        """Have an entry hold the environment with its own configuration, or say where it is."""
        player = self._places.here.players.get(entry["env_id"])
        if player is not None:
            entry["env"] = player.env
            entry["config"] = getattr(player.env, "config", entry["config"])
        elif not isinstance(entry["env"], Elsewhere):
            tag = self._tags[entry["env_id"]]
            entry["config"] = tag.env_type.config(tag.env_config)
            entry["env"] = Elsewhere(entry["config"], "in a worker")

    def _move(self) -> None:
        """Have everybody live where the options say now."""
        if self._must_move:
            self._places.close()
            self._places = Places(self._tags, self.settings)
            self._must_move = False
        self._places.settle(self.settings.use_multiprocessing)

    def _show_where(self) -> None:
        for entry in self.envs:
            self._show(entry)

    def _go_on_here(self, env_id: int, order: Order, why: str) -> Answer:
        make: Callable[[], Any] = partial(Tag.make, self._tags[env_id])
        standing = self._standing(env_id)
        answer = bring_home(self._places.here, env_id, make, order, standing, why)
        self._show(self.envs[env_id])
        return answer

    def _standing(self, env_id: int) -> Standing:
        return self._done[env_id], self._states[env_id]

    def _orders_to_stand(self) -> dict[int, Order]:
        """What brings each environment whose episode goes on to where it stands."""
        if not self.rollout_cache:
            return {}
        return {
            entry["env_id"]: self._order(entry["env_id"], named=None).anew(
                self._standing(entry["env_id"])
            )
            for entry in self.envs
            if not entry["status"].terminated
        }

    def _failed(self) -> set[int]:
        """Who has failed in this rollout."""
        return {cache["env_id"] for cache in self.rollout_cache if "failure" in cache}

    def _check_open(self) -> None:
        if self._is_closed:
            raise FleetClosed("this manager is closed; make a new one")


def _names(actions: Sequence[Any]) -> tuple[str | None, ...]:
    """Actions as they may travel: plain text, and None for what is none and so names nothing.

    A player may say things that cannot be pickled, or that run code where they are unpickled.
    """
    return tuple(str.__str__(one) if isinstance(one, str) else None for one in actions)


def _env_id(entry: Entry) -> int:
    return entry["env_id"]
