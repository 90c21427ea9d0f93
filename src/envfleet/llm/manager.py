"""`EnvStateManager`: many text environments, played turn by turn, each where it is played soonest.

    inputs ─► checked ─► requests ─ send ─► here and in workers ─ recv ─► replies ─► caches

Laws: caches, statuses, rewards and metrics are the same wherever environments live, even if workers
die. An environment that fails ends with a `failure` in its own cache, and no other is affected.
Wrong input is refused before any environment is stepped.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, Self

from envfleet.errors import ActionError, ConfigError, FleetClosed, OutOfOrder, level_of_caller
from envfleet.llm.manager_types import Cache, EnvEntry, EnvInWorker, EnvStatus
from envfleet.llm.metrics import add_metrics
from envfleet.llm.placement import PlacedEnvs
from envfleet.llm.settings import (
    Settings,
    Tag,
    UseMultiprocessing,
    read_settings,
    with_option,
)
from envfleet.llm.turns import (
    EpisodeFailure,
    EpisodeRequest,
    EpisodeSoFar,
    EpisodeStart,
    State,
    Turn,
    TurnReply,
    TurnRequest,
    history_state,
)
from envfleet.options import Count, SecondsOrZero, check

_VAL_SEED = 123
"""The first seed of validation, unless the configuration gives one."""


class EnvStateManager:
    """The environments of a configuration, in groups that share their seeds."""

    def __init__(self, config: Any, mode: str = "train") -> None:
        """Build every environment.

        Args:
            config: A mapping, an OmegaConf object, or the name or path of a YAML file.
            mode: "train" or "val": which block of `es_manager` to use.
        """
        self.settings: Settings = read_settings(config, mode)
        self.mode = mode
        self.group_size = self.settings.group_size
        tags = [tag for tag, groups in self.settings.groups for _ in range(groups)]
        self._tags: list[Tag] = [tag for tag in tags for _ in range(self.group_size)]
        self._seed_counter = 0
        self._done: list[list[tuple[Any, ...]]] = [[] for _ in self._tags]
        """The actions of each turn of each episode, to rebuild an environment in this process."""
        self._states: list[State] = ["" for _ in self._tags]
        self._answers: list[Any] = [None for _ in self._tags]
        self._placed = PlacedEnvs(self._tags, self.settings)
        self._placed.place(self.settings.use_multiprocessing)
        self._in_flight: dict[int, Mapping[str, Any]] = {}
        """Inputs of turns that have been sent and not received, by environment."""
        self._must_move = False
        """Whether an option has changed that decides where environments live."""
        self.envs: list[EnvEntry] = [self._entry(env_id) for env_id in range(len(self._tags))]
        self.rollout_cache: list[Cache] = []
        self._new_failures: dict[tuple[str, EpisodeFailure], list[EnvEntry]] = {}
        """Environments that have failed in this call, by tag and failure."""
        self._needs_reset = "there is no rollout yet"
        self._is_closed = False

    # ---- options --------------------------------------------------------------------------------

    @property
    def plan(self) -> str:
        """Where environments live and why, one line per kind."""
        return self._placed.plan

    @property
    def use_multiprocessing(self) -> UseMultiprocessing:
        """Whether environments live in workers: True, False, "auto", "threads" or "resets"."""
        return self.settings.use_multiprocessing

    @use_multiprocessing.setter
    def use_multiprocessing(self, value: UseMultiprocessing) -> None:
        """False moves all environments here at once; another value counts from the next reset."""
        if value is False:
            self._refuse_in_flight()
        self._change("use_multiprocessing", value)
        if value is False:
            failures = self._placed.move_all_here(self._episodes(), self._failed())
            self._show_where()
            for env_id, failure in failures.items():
                self._fail(self.envs[env_id], self.rollout_cache[env_id], failure)
            self._warn_of_failures()

    @property
    def max_workers(self) -> int:
        """How many workers or threads; another number counts from the next reset."""
        return self.settings.max_workers

    @max_workers.setter
    def max_workers(self, value: int | None) -> None:
        self._change("max_workers", value)
        self._must_move = True

    @property
    def sequential_env_types(self) -> list[str]:
        """Types that stay in this process; another list counts from the next reset."""
        return sorted(self.settings.sequential_env_types)

    @sequential_env_types.setter
    def sequential_env_types(self, value: Sequence[str]) -> None:
        self._change("sequential_env_types", value)
        self._must_move = True

    @property
    def format_penalty(self) -> float:
        """Added for a turn that names unknown actions or none; never above zero."""
        return self.settings.format_penalty

    @format_penalty.setter
    def format_penalty(self, value: float) -> None:
        self._change("format_penalty", value)

    def _change(self, name: str, value: Any) -> None:
        self._check_open()
        self.settings = with_option(self.settings, name, value)

    def worker_pids(self) -> list[int]:
        """Every other process that environments live in, or that begins episodes."""
        return self._placed.worker_pids()

    # ---- rollouts -------------------------------------------------------------------------------

    def reset(self, seed: int | None = None) -> list[Cache]:
        """Begin a rollout: every environment of group g with the seed `seed + g`.

        Without a seed, training starts at `seed.train` and moves on by the number of groups at
        every reset; validation starts at `seed.val` every time. Turns in flight are dropped.
        """
        self._check_open()
        first = self._first_seed(seed)
        self._needs_reset = "the last reset was interrupted"
        self._in_flight.clear()
        self._move()
        self._placed.refresh()
        requests = {
            entry["env_id"]: EpisodeRequest(first + entry["group_id"], self.mode)
            for entry in self.envs
        }
        caches: dict[int, Cache] = {}

        def forget() -> None:
            self.rollout_cache, self._new_failures = [], {}
            for entry in self.envs:
                entry["status"] = EnvStatus(seed=first + entry["group_id"])
            for turns in self._done:
                turns.clear()

        def on_reply(env_id: int, start: TurnReply) -> None:
            caches[env_id] = self._new_cache(self.envs[env_id], start)

        self._placed.begin(requests, forget, on_reply)
        self._show_where()
        self.rollout_cache = [caches[entry["env_id"]] for entry in self.envs]
        self._needs_reset = ""
        self._warn_of_failures()
        return self.rollout_cache

    def step(self, all_env_inputs: Sequence[Mapping[str, Any]]) -> list[Cache]:
        """Play one turn in some environments; the caches of those that go on, in input order."""
        self._refuse_in_flight()
        self.send(all_env_inputs)
        return self.recv() if self._in_flight else []

    def send(self, all_env_inputs: Sequence[Mapping[str, Any]]) -> None:
        """Start one turn in some environments; `recv` returns what comes of it.

        Environments in workers start at once, those of this process in `recv`.
        """
        self._check_open()
        if self._needs_reset:
            raise OutOfOrder(f"{self._needs_reset}; call reset first")
        inputs = self._checked(all_env_inputs)
        requests = {
            env_id: self._request(env_id, _action_texts(given["actions"]))
            for env_id, given in inputs.items()
        }
        with self._interruptible():
            self._placed.send(requests)
            self._in_flight |= inputs

    def recv(self, min_envs: int | None = None, timeout_s: float | None = None) -> list[Cache]:
        """Wait for turns in flight; the caches of those environments that go on.

        The caches of environments whose episodes have ended are in `rollout_cache` only.

        Args:
            min_envs: Wait for the turns of at least this many environments; None waits for all
                that are in flight.
            timeout_s: After this long return what is there, perhaps nothing; 0 does not wait. The
                turns of environments in this process are played in any case.

        Returns:
            Caches, in the order in which their environments were sent.
        """
        self._check_open()
        check("min_envs", min_envs, Count | None)
        check("timeout_s", timeout_s, SecondsOrZero | None)
        if not self._in_flight:
            raise OutOfOrder("recv has nothing to wait for: no turn is in flight. Call send first")
        with self._interruptible():
            replies = self._placed.recv(min_envs, timeout_s)
            going_on = []
            for env_id in [one for one in self._in_flight if one in replies]:
                turn, given = replies[env_id], self._in_flight.pop(env_id)
                assert isinstance(turn, Turn)
                if not self._record(self.envs[env_id], given, turn):
                    going_on.append(self.rollout_cache[env_id])
        self._warn_of_failures()
        return going_on

    @property
    def in_flight(self) -> list[int]:
        """Environments whose turn has been sent and not received, in the order of sending."""
        return list(self._in_flight)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """If the body raises, by Ctrl-C say, the rollout is over."""
        self._needs_reset = "the last step was interrupted"
        try:
            yield
        except BaseException:
            self._in_flight.clear()
            raise
        self._needs_reset = ""

    def _refuse_in_flight(self) -> None:
        if self._in_flight:
            raise OutOfOrder(
                f"the turns of environments {self.in_flight} are in flight; call recv first"
            )

    def get_rollout_states(self) -> list[Cache]:
        """Every cache of this rollout, finished or not, with its metrics."""
        self._check_open()
        if not self.rollout_cache:
            raise OutOfOrder("there is no rollout yet; call reset first")
        add_metrics(self.envs, self.rollout_cache, self.group_size)
        for entry, cache in zip(self.envs, self.rollout_cache, strict=True):
            if entry["tag"] == "MetamathQA":
                cache["correct_answer"] = self._answers[entry["env_id"]]
        return self.rollout_cache

    def render(self) -> list[Any]:
        """The current state of every environment."""
        self._check_open()
        if not self.rollout_cache:
            raise OutOfOrder("there is no rollout yet; call reset first")
        return [
            state[0] if isinstance(state, list) and len(state) == 1 else state
            for state in self._states
        ]

    def close(self) -> None:
        """Close every environment and end the workers; closing twice changes nothing."""
        self._is_closed = True
        self._in_flight.clear()
        self._placed.close()

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

    def _new_cache(self, entry: EnvEntry, start: TurnReply) -> Cache:
        assert isinstance(start, EpisodeStart)
        env_id = entry["env_id"]
        self._states[env_id], self._answers[env_id] = start.state, start.answer
        cache: Cache = {
            "env_id": env_id,
            "history": [
                {**history_state(start.state), "actions_left": entry["max_actions_per_traj"]}
            ],
            "group_id": entry["group_id"],
            "tag": entry["tag"],
            "penalty": 0,
        }
        if start.failure is not None:
            self._fail(entry, cache, start.failure)
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
            if env_id in self._in_flight:
                raise ActionError(f"the turn of environment {env_id} is in flight; call recv first")
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

    def _request(self, env_id: int, names: tuple[Any, ...]) -> TurnRequest:
        entry = self.envs[env_id]
        return TurnRequest(names, entry["max_actions_per_traj"] - entry["status"].num_actions)

    def _record(self, entry: EnvEntry, given: Mapping[str, Any], turn: Turn) -> bool:
        """Write a turn into its cache; True if the episode is over."""
        env_id, status = entry["env_id"], entry["status"]
        cache = self.rollout_cache[env_id]
        is_malformed = turn.num_valid != len(given["actions"]) or not turn.num_valid
        if is_malformed and turn.failure is None:  # the model is not to blame for a failure
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
        cache["history"].append({**history_state(self._states[env_id]), "actions_left": left})
        if turn.failure is not None:
            self._fail(entry, cache, turn.failure)
        elif turn.is_done:
            status.terminated, status.truncated = True, not turn.is_success
        elif left <= 0:
            status.terminated = status.truncated = True
        return status.terminated

    def _fail(self, entry: EnvEntry, cache: Cache, failure: EpisodeFailure) -> None:
        entry["status"].terminated = entry["status"].truncated = True
        cache["failure"] = {
            "doing": failure.doing,
            "error": failure.error,
            "turn": len(entry["status"].rewards),
        }
        self._new_failures.setdefault((entry["tag"], failure), []).append(entry)

    def _warn_of_failures(self) -> None:
        """Warn of environments that have failed in this call, once for each kind of failure."""
        failed, self._new_failures = self._new_failures, {}
        # sorted by id, because which came first depends on the workers
        alike = ((sorted(them, key=_env_id), *kind) for kind, them in failed.items())
        for (first, *others), tag, failure in sorted(alike, key=lambda group: _env_id(group[0][0])):
            too = f", and so do those of {len(others)} more of its kind" if others else ""
            warnings.warn(
                f"environment {first['env_id']} ({tag}, seed {first['status'].seed}) failed in "
                f"{failure.doing}: {failure.error}; its rollout ends here{too}",
                RuntimeWarning,
                stacklevel=level_of_caller(),
            )

    # ---- where environments live ----------------------------------------------------------------

    def _entry(self, env_id: int) -> EnvEntry:
        tag = self._tags[env_id]
        config = tag.env_type.config(tag.env_config)
        entry: EnvEntry = {
            "tag": tag.name,
            "group_id": env_id // self.group_size,
            "env_id": env_id,
            "env": EnvInWorker(config, "in a worker"),
            "config": config,
            "status": EnvStatus(),
            "max_actions_per_traj": tag.max_actions_per_traj,
        }
        self._show(entry)
        return entry

    def _show(self, entry: EnvEntry) -> None:
        """Put the environment and its configuration into an entry, or say where it is."""
        player = self._placed.local.players.get(entry["env_id"])
        if player is not None:
            entry["env"] = player.env
            entry["config"] = getattr(player.env, "config", entry["config"])
        elif not isinstance(entry["env"], EnvInWorker):
            tag = self._tags[entry["env_id"]]
            entry["config"] = tag.env_type.config(tag.env_config)
            entry["env"] = EnvInWorker(entry["config"], "in a worker")

    def _move(self) -> None:
        """Place all environments where the options say now."""
        if self._must_move:
            self._placed.close()
            self._placed = PlacedEnvs(self._tags, self.settings)
            self._must_move = False
        self._placed.place(self.settings.use_multiprocessing)

    def _show_where(self) -> None:
        for entry in self.envs:
            self._show(entry)

    def _episodes(self) -> dict[int, EpisodeSoFar]:
        """The episodes that go on, by environment."""
        episodes = {}
        for entry in self.envs if self.rollout_cache else ():
            env_id, status = entry["env_id"], entry["status"]
            if not status.terminated and status.seed is not None:
                turns, state = self._done[env_id], self._states[env_id]
                episodes[env_id] = EpisodeSoFar(status.seed, self.mode, turns, state)
        return episodes

    def _failed(self) -> set[int]:
        """Environments that have failed in this rollout."""
        return {cache["env_id"] for cache in self.rollout_cache if "failure" in cache}

    def _check_open(self) -> None:
        if self._is_closed:
            raise FleetClosed("this manager is closed; make a new one")


def _action_texts(actions: Sequence[Any]) -> tuple[str | None, ...]:
    """Actions as plain text, and None for an action that is not text and so names nothing.

    An object of another class may not be picklable, or may run code when it is unpickled.
    """
    return tuple(str.__str__(one) if isinstance(one, str) else None for one in actions)


def _env_id(entry: EnvEntry) -> int:
    return entry["env_id"]
