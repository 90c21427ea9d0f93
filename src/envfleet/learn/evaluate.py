"""Evaluation on environments of its own, by fixed seeds, that leaves training as it was.

Episode i is reset with `seed + i` and has a memory of its own, so its return is the same whether
episodes are played one after another or side by side. An episode whose environment fails is lost,
and the others count: if several are played at once, the unfinished ones are then played one by
one, so that no other is lost with it.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from envfleet.adapters.gymnasium import FleetVectorEnv, make_vec
from envfleet.engine import Deadlines, ResetPlan
from envfleet.engine.options import StartMethod
from envfleet.errors import (
    ConfigError,
    DeadlineExceeded,
    EnvFailed,
    WorkerDied,
    level_of_caller,
)
from envfleet.learn.agent import Act
from envfleet.runs.callbacks import Evaluation, EvaluationStopped

EVALUATION_SEED = 1_000_000
"""Far from the seeds of training's first resets."""

MAX_STEPS = 100_000
"""The most steps of an episode: an environment without a time limit would never end."""


@dataclass(slots=True)
class _Game:
    """One episode while it is played."""

    number: int
    act: Act
    obs: Any
    info: dict[str, Any]
    total: float = 0.0
    steps: int = 0


@dataclass(slots=True)
class _Evaluation:
    """The episodes of an evaluation and their returns."""

    play: Callable[[], Act]
    episodes: int
    max_steps: int
    should_stop: Callable[[], bool]
    returns: dict[int, float] = field(default_factory=dict)
    lost: dict[int, Exception] = field(default_factory=dict)

    @property
    def left(self) -> list[int]:
        """The numbers of the episodes still to be played."""
        return [n for n in range(self.episodes) if n not in self.returns and n not in self.lost]

    def note(self, game: _Game, reward: float, *, is_over: bool) -> bool:
        """Count a step; True if the episode is over by it."""
        game.total += reward
        game.steps += 1
        if not is_over and game.steps == self.max_steps:
            warnings.warn(
                f"an evaluation episode was cut off after {self.max_steps} steps; give the "
                "environment a time limit",
                RuntimeWarning,
                stacklevel=4,
            )
            is_over = True
        if is_over:
            self.returns[game.number] = game.total
        return is_over

    def check(self) -> None:
        """Raise if the evaluation is to stop."""
        if self.should_stop():
            raise EvaluationStopped

    def result(self) -> Evaluation:
        """The returns by number; if there are none, the last failure."""
        if not self.returns:
            raise self.lost[max(self.lost)]
        return Evaluation(
            tuple(self.returns[number] for number in sorted(self.returns)),
            tuple(f"{type(why).__name__}: {why}" for _, why in sorted(self.lost.items())),
        )


def evaluate(
    play: Callable[[], Act],
    env_fn: Callable[[], gymnasium.Env[Any, Any]],
    *,
    episodes: int,
    seed: int = EVALUATION_SEED,
    max_steps: int = MAX_STEPS,
    n_envs: int = 1,
    in_worker: bool = False,
    start_method: StartMethod | None = None,
    step_timeout_s: float | None = None,
    reset_timeout_s: float | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Play episodes in an environment of their own, or in several side by side.

    Raises the last failure if all episodes are lost, and `EvaluationStopped` if it should.

    Args:
        play: Called once per episode, for how to act in it.
        env_fn: Makes an environment.
        episodes: How many.
        seed: Of the first one.
        max_steps: Longest an episode may take.
        n_envs: How many are played at once; the returns are the same.
        in_worker: Play in worker processes even one at a time: an environment that takes its
            process along then costs the evaluation only.
        start_method: Of workers; None takes the fastest that is safe.
        step_timeout_s: Longest one step may take in a worker; None waits.
        reset_timeout_s: The same for a reset.
        should_stop: Asked before every step: True leaves the rest.
    """
    if episodes < 1 or n_envs < 1:
        raise ConfigError(
            f"evaluation needs an episode and an environment, got episodes={episodes} and "
            f"n_envs={n_envs}"
        )
    table = _Evaluation(play, episodes, max_steps, should_stop)
    width = n_envs
    while table.left:
        if n_envs == 1 and not in_worker:
            _evaluate_one_by_one(table, env_fn, seed)
            continue
        envs = make_vec(
            [env_fn] * min(width, len(table.left)),
            backend="process" if in_worker else "auto",
            start_method=start_method,
            autoreset="disabled",
            step_timeout_s=step_timeout_s,
            reset_timeout_s=reset_timeout_s,
        )
        with envs:
            try:
                _evaluate_side_by_side(table, envs, seed)
            except (EnvFailed, WorkerDied, DeadlineExceeded) as exc:
                if width == 1:
                    table.lost[table.left[0]] = exc
                width = 1
    return table.result()


class _EnvRaised(Exception):
    """Raised by an environment, not by the policy that acts in it."""

    def __init__(self, why: Exception | SystemExit) -> None:
        self.why = why if isinstance(why, Exception) else EnvFailed(0, "step", f"SystemExit: {why}")


@contextmanager
def _of_the_environment() -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as exc:
        raise _EnvRaised(exc) from exc


def _evaluate_one_by_one(
    table: _Evaluation, env_fn: Callable[[], gymnasium.Env[Any, Any]], seed: int
) -> None:
    """Play all that are left, or until an environment has failed."""
    env = env_fn()
    try:
        for number in table.left:
            _play_evaluation(table, number, env, seed)
    except _EnvRaised as exc:
        table.lost[table.left[0]] = exc.why
    finally:
        _close(env)


def _close(env: gymnasium.Env[Any, Any]) -> None:
    """Close it within a bounded time; its episodes have been played or lost by now."""

    def close() -> None:
        with suppress(Exception):
            env.close()

    closer = threading.Thread(target=close, name="envfleet-close", daemon=True)
    closer.start()
    limit_s = Deadlines().close_s
    closer.join(limit_s)
    if closer.is_alive():
        warnings.warn(
            f"the environment of the evaluation has not closed within {limit_s:g} s; it is left",
            RuntimeWarning,
            stacklevel=level_of_caller(),
        )


def _play_evaluation(
    table: _Evaluation, number: int, env: gymnasium.Env[Any, Any], seed: int
) -> None:
    with _of_the_environment():
        obs, info = env.reset(seed=seed + number)
    game, is_over = _Game(number, table.play(), obs, info), False
    while not is_over:
        table.check()
        action = game.act(game.obs, game.info)
        with _of_the_environment():
            game.obs, reward, terminated, truncated, game.info = env.step(action)
            # some give an array of one number, which the fleet takes too
            paid = float(np.asarray(reward).item())
        is_over = table.note(game, paid, is_over=bool(terminated or truncated))


def _evaluate_side_by_side(table: _Evaluation, envs: FleetVectorEnv, seed: int) -> None:
    """Play all that are left."""
    space, seen = envs.single_action_space, envs.single_observation_space
    left = deque(table.left)

    def begin(slot: int) -> _Game:
        number = left.popleft()
        batch = envs.fleet.reset([ResetPlan(seed=seed + number)], [slot])
        obs = next(iter(iterate(batch_space(seen, 1), batch.obs)))
        return _Game(number, table.play(), obs, batch.each_info[0])

    games = {slot: begin(slot) for slot in range(envs.num_envs)}
    while games:
        table.check()
        slots = list(games)
        actions = [game.act(game.obs, game.info) for game in games.values()]
        empty: Any = create_empty_array(space, len(slots))
        envs.send(concatenate(space, actions, empty), slots)
        batch = envs.recv(slots=slots)
        rows = iterate(batch_space(seen, len(slots)), batch.obs)
        ended = (batch.terminated | batch.truncated).tolist()
        for row, (slot, obs) in enumerate(zip(slots, rows, strict=True)):
            game = games[slot]
            game.obs, game.info = obs, batch.each_info[row]
            if table.note(game, float(batch.rewards[row]), is_over=ended[row]):
                del games[slot]
                if left:
                    games[slot] = begin(slot)
