"""Checks for authors of environments: does a fleet run one exactly as a plain loop does?

    from envfleet.testing import FleetConformance

    class TestMyEnv(FleetConformance):
        def make_env(self):
            return MyEnv()

Each check takes a `Subject` and raises `AssertionError` with one sentence. `FleetConformance` has a
test method for each of them, which pytest (or any runner that finds methods by name) finds;
`check_env` runs all of them and returns a report. Nothing here needs pytest.
"""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np

from envfleet.testing.global_random import uses_global_random
from envfleet.testing.streams import (
    EnvLike,
    Streams,
    build_env,
    count_episodes,
    first_difference,
    fleet_driven,
    hand_driven,
    hand_driven_stream,
    slot_actions,
)
from envfleet.testing.values import value_difference

Env = gymnasium.Env[Any, Any]

MODES = ("next_step", "same_step", "disabled")
_EPISODES = 3
_PATIENCE = 200
"""Steps in which a slot may finish its three episodes before they are cut short."""
_CUT = 20
_CLOSE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The environment to check, and how much of it is run."""

    env: EnvLike
    num_envs: int = 3
    num_steps: int | None = None
    """Vector steps per run. None takes as many as three episodes need; if those need more than
    200 steps, every episode is cut at 20 by a `TimeLimit`, by hand and in the fleet alike."""
    seed: int = 0
    workers: tuple[int, ...] = (1, 2, 3)
    """Numbers of workers to compare; no more than there are slots."""
    deterministic: bool | None = None
    """True for an environment without randomness, False for one with it; None finds out by
    whether its ``np_random`` was drawn from."""
    step_timeout_s: float = 60.0
    """Deadline of one step (and reset) in a worker, so that a hang ends as a named error."""

    @functools.cached_property
    def plan(self) -> tuple[EnvLike, int]:
        """What is run, and for how many steps."""
        if self.num_steps is not None:
            return self.env, self.num_steps
        needed = 0
        for slot in range(self.num_envs):
            with closing(build_env(self.env)) as one:
                actions = slot_actions(one.action_space, slot)
                events = []
                for event in hand_driven_stream(
                    one, actions, _PATIENCE, self.seed + slot, "next_step"
                ):
                    events.append(event)
                    if count_episodes(events) == _EPISODES:
                        break
            if count_episodes(events) < _EPISODES:
                return _CutShort(self.env, _CUT), (_EPISODES + 1) * (_CUT + 1)
            needed = max(needed, events[-1].step)
        # two more, so that the first steps after the third reset are compared as well
        return self.env, needed + 2

    def by_hand(self, autoreset: str) -> Streams:
        """The reference."""
        env, num_steps = self.plan
        return hand_driven(env, self.num_envs, num_steps, self.seed, autoreset)

    def by_fleet(self, autoreset: str, **make_vec_kwargs: Any) -> Streams:
        """What a fleet makes of it."""
        env, num_steps = self.plan
        if make_vec_kwargs.get("backend") == "process":
            make_vec_kwargs.setdefault("step_timeout_s", self.step_timeout_s)
            make_vec_kwargs.setdefault("reset_timeout_s", self.step_timeout_s)
        return fleet_driven(env, self.num_envs, num_steps, self.seed, autoreset, **make_vec_kwargs)


@dataclass(frozen=True)
class _CutShort:
    """Builds the environment with a time limit; a class, so that every start method can send it."""

    env: EnvLike
    limit: int

    def __call__(self) -> Env:
        return gymnasium.wrappers.TimeLimit(build_env(self.env), self.limit)


# ---- the checks ----------------------------------------------------------------------------------


def check_observations_fit(subject: Subject) -> None:
    """Every observation lies in the observation space, as far as shape, dtype and keys go."""
    env, num_steps = subject.plan
    with closing(build_env(env)) as one:
        space, actions = one.observation_space, slot_actions(one.action_space, 0)
        obs, _ = one.reset(seed=subject.seed)
        for step in range(num_steps + 1):
            if not (space.contains(obs) or _fits_but_for_bounds(space, obs)):
                raise AssertionError(
                    f"step {step}: the observation {_shown(obs)} is not in observation_space "
                    f"{space}; a fleet lays out memory by that space, so correct one of them."
                )
            obs, _, terminated, truncated, _ = one.step(next(actions))
            if terminated or truncated:
                obs, _ = one.reset()


def check_same_seed_same_stream(subject: Subject) -> None:
    """Two runs with one seed are bit-equal."""
    first, second = subject.by_hand("next_step"), subject.by_hand("next_step")
    difference = first_difference(first, second)
    if difference is not None:
        raise AssertionError(
            f"two runs with the same seed differ: in slot {difference.slot}, step "
            f"{difference.step} {difference.field} was {_shown(difference.expected)}, then "
            f"{_shown(difference.got)}. Draw all randomness from self.np_random, call "
            "super().reset(seed=seed) in reset, and share nothing between instances."
        )


def check_slots_differ(subject: Subject) -> None:
    """Another seed gives another stream, unless the environment has no randomness."""
    if subject.deterministic:
        return
    env, num_steps = subject.plan
    streams, drew = [], False
    for seed in (subject.seed, subject.seed + 1):
        with closing(build_env(env)) as one:
            actions = slot_actions(one.action_space, 0)
            events = tuple(hand_driven_stream(one, actions, num_steps, seed, "next_step"))
            drew |= _has_drawn(one, seed)
        streams.append(Streams(source=f"seed {seed}", autoreset="next_step", slots=(events,)))
    if first_difference(*streams) is None and (drew or subject.deterministic is False):
        raise AssertionError(
            f"seeds {subject.seed} and {subject.seed + 1} give the same stream for the same "
            "actions, so every slot of a fleet would see the same episodes. Use the seed that "
            "reset receives; if the environment has no randomness, say deterministic = True."
        )


def check_no_global_random(subject: Subject) -> None:
    """The environment leaves the random state of the process alone."""
    env, num_steps = subject.plan
    found = uses_global_random(env, num_steps, subject.seed)
    if found is not None:
        raise AssertionError(found)


def check_streams(subject: Subject, **make_vec_kwargs: Any) -> None:
    """Law 1: the fleet's streams equal those of a loop over one environment, in each mode."""
    for autoreset in MODES:
        expected = subject.by_hand(autoreset)
        for num_workers in sorted({min(n, subject.num_envs) for n in subject.workers}):
            got = subject.by_fleet(autoreset, num_workers=num_workers, **make_vec_kwargs)
            _require_equal(expected, got)


def check_first_ready(subject: Subject) -> None:
    """Law 1 in any order: first-ready batches of single slots carry the same streams."""
    num_workers = min(2, subject.num_envs)
    for autoreset in MODES:
        expected = subject.by_hand(autoreset)
        got = subject.by_fleet(autoreset, backend="process", num_workers=num_workers, min_slots=1)
        _require_equal(expected, got)


def check_final_obs(subject: Subject) -> None:
    """Law 6: the final observation is a snapshot taken before the reset."""
    env, num_steps = subject.plan
    expected = hand_driven(env, 1, num_steps, subject.seed, "same_step")
    for backend in ("serial", "process"):
        got = fleet_driven(env, 1, num_steps, subject.seed, "same_step", backend=backend)
        for was, now in zip(expected.slots[0], got.slots[0], strict=True):
            found = value_difference(was.obs, now.obs) if was.ended else None
            if found is not None:
                raise AssertionError(
                    f"step {was.step}: final_obs{found.path} should be {_shown(found.expected)}, "
                    f"the episode's last observation, but backend={backend!r} gave "
                    f"{_shown(found.got)}."
                )


def check_built_in_worker(subject: Subject, start_method: str = "spawn") -> None:
    """A fresh process can build the environment, with nothing inherited from this one."""
    check = Subject(
        env=subject.plan[0],
        num_envs=1,
        num_steps=subject.plan[1],
        seed=subject.seed,
        step_timeout_s=subject.step_timeout_s,
    )
    expected = check.by_hand("next_step")
    try:
        got = check.by_fleet("next_step", backend="process", start_method=start_method)
    except Exception as exc:
        raise AssertionError(
            f"the environment does not run in a worker started by {start_method!r}: "
            f"{type(exc).__name__}: {exc}"
        ) from exc
    _require_equal(expected, got)


def check_infos_survive(subject: Subject) -> None:
    """Every info arrives from a worker with its keys and values."""
    expected = subject.by_hand("next_step")
    got = subject.by_fleet("next_step", backend="process", num_workers=1)
    for slot, (left, right) in enumerate(zip(expected.slots, got.slots, strict=True)):
        for was, now in zip(left, right, strict=True):
            found = value_difference(was.info, now.info, same_types=False)
            if found is not None:
                raise AssertionError(
                    f"slot {slot}, step {was.step}: info{found.path} is {_shown(found.expected)} "
                    f"in the environment, but {_shown(found.got)} when it arrives from a worker. "
                    "Put only what can be pickled into infos."
                )


def check_close(subject: Subject) -> None:
    """Closing works, twice, before and after use, by hand and in workers, and leaves no child."""
    from envfleet import make_vec

    env = subject.plan[0]
    with closing(build_env(env)) as alone:
        alone.reset(seed=subject.seed)
    build_env(env).close()
    before = set(multiprocessing.active_children())
    for backend in ("serial", "thread", "process"):
        for used in (False, True):
            envs = make_vec(env, subject.num_envs, backend=backend)
            if used:
                envs.reset(seed=subject.seed)
            start_s = time.monotonic()
            envs.close()
            envs.close()
            took_s = time.monotonic() - start_s
            if took_s > _CLOSE_S:
                raise AssertionError(f"close took {took_s:.1f} s with backend={backend!r}.")
            if not envs.closed:
                raise AssertionError(f"closed is False after close with backend={backend!r}.")
    left = set(multiprocessing.active_children()) - before
    if left:
        raise AssertionError(f"processes outlived close: {sorted(one.name for one in left)}.")


def _fits_but_for_bounds(space: gymnasium.Space[Any], obs: Any) -> bool:
    # values outside low and high travel well: only shape and dtype decide what memory can hold
    if isinstance(space, gymnasium.spaces.Dict):
        return (
            isinstance(obs, dict)
            and obs.keys() == space.spaces.keys()
            and all(_fits_but_for_bounds(inner, obs[key]) for key, inner in space.spaces.items())
        )
    if isinstance(space, gymnasium.spaces.Tuple):
        return (
            isinstance(obs, tuple | list)
            and len(obs) == len(space.spaces)
            and all(map(_fits_but_for_bounds, space.spaces, obs))
        )
    if isinstance(space, gymnasium.spaces.Box):
        array = np.asarray(obs)
        return array.shape == space.shape and np.can_cast(array.dtype, space.dtype, "same_kind")
    return space.contains(obs)


def _has_drawn(env: Env, seed: int) -> bool:
    # the property np_random would make a generator where the environment never wanted one
    generator = getattr(env.unwrapped, "_np_random", None)
    if generator is None:
        return False
    fresh, _ = gymnasium.utils.seeding.np_random(seed)
    return value_difference(fresh.bit_generator.state, generator.bit_generator.state) is not None


def _require_equal(expected: Streams, got: Streams) -> None:
    difference = first_difference(expected, got)
    if difference is not None:
        raise AssertionError(str(difference))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:120]} ... {text[-30:]}"


# ---- as a function -------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckResult:
    """One check's outcome."""

    name: str
    passed: bool
    message: str
    took_s: float


@dataclass(frozen=True)
class ConformanceReport:
    """What `check_env` found; true when everything passed."""

    results: tuple[CheckResult, ...]
    num_steps: int
    """Vector steps of each run; 0 if the environment cannot be run at all."""
    num_episodes: int
    """Episodes that every slot completed at least, in mode ``"next_step"``."""

    def __bool__(self) -> bool:
        """Whether all checks passed."""
        return not self.failures

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
        return tuple(result for result in self.results if not result.passed)

    def __str__(self) -> str:
        """One line per check."""
        return "\n".join(
            f"{'ok  ' if result.passed else 'FAIL'} {result.name}"
            + (f": {result.message}" if result.message else "")
            for result in self.results
        )

    def raise_if_failed(self) -> None:
        """Raise the first failure as `AssertionError`."""
        for result in self.failures:
            raise AssertionError(f"{result.name}: {result.message}")


CHECKS: dict[str, Callable[[Subject], None]] = {
    "observations fit the space": check_observations_fit,
    "same seed, same stream": check_same_seed_same_stream,
    "different slots, different streams": check_slots_differ,
    "no global random state": check_no_global_random,
    "same streams on serial": functools.partial(check_streams, backend="serial"),
    "same streams on thread": functools.partial(check_streams, backend="thread"),
    "same streams on process": functools.partial(check_streams, backend="process"),
    "same streams in any order": check_first_ready,
    "final observation is a snapshot": check_final_obs,
    "can be built in a worker": check_built_in_worker,
    "infos survive": check_infos_survive,
    "close works": check_close,
}


def check_env(
    env: EnvLike,
    *,
    num_envs: int = 3,
    num_steps: int | None = None,
    seed: int = 0,
    workers: tuple[int, ...] = (1, 2, 3),
    deterministic: bool | None = None,
    checks: Sequence[str] = tuple(CHECKS),
    raises: bool = True,
) -> ConformanceReport:
    """Run the checks of the kit on one environment.

    Args:
        env: a Gymnasium id, an `EnvSpec` or a function without arguments.
        num_envs: slots per fleet.
        num_steps: vector steps per run; None takes what three episodes need.
        seed: slot i gets ``seed + i``.
        workers: numbers of workers to compare.
        deterministic: True if the environment has no randomness, False if it has; None finds out.
        checks: names of the checks to run, as a report shows them; by default all.
        raises: False returns the report of a failed run instead of raising.

    Raises:
        AssertionError: the first check that failed, with the slot, step and field that differ.
    """
    subject = Subject(
        env=env,
        num_envs=num_envs,
        num_steps=num_steps,
        seed=seed,
        workers=workers,
        deterministic=deterministic,
    )
    results = []
    for name in checks:
        start_s, message = time.perf_counter(), ""
        try:
            CHECKS[name](subject)
        except AssertionError as exc:
            message = str(exc) or "failed"
        except Exception as exc:
            message = f"{type(exc).__name__}: {exc}"
        results.append(CheckResult(name, not message, message, time.perf_counter() - start_s))
    report = ConformanceReport(tuple(results), *_extent(subject))
    if raises:
        report.raise_if_failed()
    return report


def _extent(subject: Subject) -> tuple[int, int]:
    try:
        slots = subject.by_hand("next_step").slots
    except Exception:  # it cannot be run by hand either, as the report says
        return 0, 0
    return subject.plan[1], min(map(count_episodes, slots))


# ---- as a test class -----------------------------------------------------------------------------


class FleetConformance:
    """Tests for one environment: inherit, name the class ``Test...``, override `make_env`.

    The class attributes may be overridden too; they mean what they mean in `Subject`.
    """

    num_envs: ClassVar[int] = 3
    num_steps: ClassVar[int | None] = None
    seed: ClassVar[int] = 0
    workers: ClassVar[tuple[int, ...]] = (1, 2, 3)
    deterministic: ClassVar[bool | None] = None

    def make_env(self) -> Env:
        """Build the environment under test."""
        raise NotImplementedError(
            f"{type(self).__name__} has to override make_env and return a gymnasium.Env"
        )

    @property
    def subject(self) -> Subject:
        """What the tests run."""
        return Subject(
            env=_MakeEnv(type(self)),
            num_envs=self.num_envs,
            num_steps=self.num_steps,
            seed=self.seed,
            workers=self.workers,
            deterministic=self.deterministic,
        )


def _add_test(title: str, check: Callable[[Subject], None]) -> None:
    """Give `FleetConformance` a test method that is named after the title of a check."""

    def test(self: FleetConformance) -> None:
        check(self.subject)

    test.__name__ = f"test_{title.replace(',', '').replace(' ', '_')}"
    test.__qualname__ = f"FleetConformance.{test.__name__}"
    test.__doc__ = f"Check that {title}."
    setattr(FleetConformance, test.__name__, test)


for _title, _check in CHECKS.items():
    _add_test(_title, _check)


@dataclass(frozen=True)
class _MakeEnv:
    """Calls `make_env` on a new instance: the test runner's attributes stay out of workers."""

    test_class: type[FleetConformance]

    def __call__(self) -> Env:
        return self.test_class().make_env()
