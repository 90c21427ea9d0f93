"""What holds for every text environment, and what strangers may say to one."""

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from envfleet.llm.environments.base import TextEnv
from tests.gates import computes_within

HOSTILE: tuple[Any, ...] = (
    "",
    " ",
    "9**9**9",
    "9" * 1000,
    "(" * 1000,
    "-" * 999 + "1",
    "((" * 200 + "1" + "))" * 200,
    "1/" * 499 + "1",
    "__import__('os').system('echo')",
    "().__class__.__bases__[0]",
    "\x00\x1b[2J\u202e\ud800",
    "x" * 1_000_000,
    "(" * 1_000_000,
    " " * 1_000_000,
    "1+" * 500_000 + "1",
    None,
    3.5,
    float("nan"),
    -1,
    0,
    10**400,
    b"1",
    {"action": 1},
    [1],
    {1},
    object(),
    np.array([1, 2]),
    np.float64(1),
)


def played(env: TextEnv, seed: int, mode: str, actions: Sequence[Any]) -> list[Any]:
    """All that an episode shows, as far as the actions go."""
    shown: list[Any] = [env.reset(seed=seed, options={"mode": mode}), env.render("text")]
    for action in actions:
        step = env.step(action)
        shown += [step, env.render("text")]
        if step[2] or step[3]:
            break
    return shown


def assert_episode_is_of_its_seed(
    make: Callable[[], TextEnv], seed: int, mode: str, actions: Sequence[Any]
) -> None:
    """A used environment, a fresh one and a copy made in mid-episode show the same."""
    used = make()
    played(used, seed + 1, "train", actions)
    shown = played(used, seed, mode, actions)
    assert shown == played(make(), seed, mode, actions)

    half = make()
    before = played(half, seed, mode, actions[: len(actions) // 2])
    if half._is_running:
        copy = pickle.loads(pickle.dumps(half))
        rest = actions[len(actions) // 2 :]
        assert before == shown[: len(before)]
        for env in (half, copy):
            went_on: list[Any] = []
            for action in rest:
                step = env.step(action)
                went_on += [step, env.render("text")]
                if step[2] or step[3]:
                    break
            assert before + went_on == shown


def assert_answers_quickly(env: TextEnv, action: Any) -> tuple[str, float, bool, bool, dict]:
    """Whatever is said is answered, in text, within milliseconds."""
    with computes_within(0.05):
        said, reward, terminated, truncated, info = env.step(action)
    assert said in env.observation_space
    assert isinstance(reward, float)
    # Managers average every entry of an info.
    assert {type(value) for value in info.values()} == {bool}
    assert {"action_is_effective", "action_is_valid", "success"} <= info.keys()
    return said, reward, terminated, truncated, info
