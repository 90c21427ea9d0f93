"""What environments are wrapped in for training: by a flag, and by the recipes of families."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envfleet.cli import app
from envfleet.cli.command import UsageError
from envfleet.cli.train_args import read_train_args
from envfleet.learn import environments, wrappers
from envfleet.learn.ppo import PPOOptions
from envfleet.learn.recipes import recipe_for

LIMITS = """
import gymnasium

def limited(env):
    return gymnasium.wrappers.TimeLimit(env, 7)
"""


def asked(*words):
    given = ["train", *words]
    return read_train_args(app.build_parser(given).parse_args(given))


def test_a_wrapper_goes_around_every_environment_of_a_run(tmp_path):
    (tmp_path / "limits.py").write_text(LIMITS)
    found = asked("--env", "CartPole-v1", "--wrapper", f"{tmp_path}/limits.py:limited")
    options = found.options
    assert options.wrapper == f"{tmp_path}/limits.py:limited"
    for env in (environments.env_fn(options)(), environments.env_fn(options, render_mode=None)()):
        assert isinstance(env, gymnasium.wrappers.TimeLimit)
        assert env._max_episode_steps == 7
    with environments.opened(options, PPOOptions(n_steps=8, batch_size=64)) as trainer:
        assert trainer.collect().ended.any(0).all()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--env", "CartPole-v1", "--wrapper", "limited"), "module:function or file.py:function"),
        (("--env", "mpe2.simple_v3:parallel_env", "--wrapper", "math:sin"), "with one agent"),
    ],
)
def test_a_wrapper_that_cannot_be_is_refused(words, said):
    with pytest.raises(UsageError, match=said):
        asked(*words)


class Grid(gymnasium.Env):
    """Observes as MiniGrid's environments do."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (7, 7, 3), np.uint8),
            "direction": spaces.Discrete(4),
            "mission": spaces.Text(20),
        }
    )
    action_space = spaces.Discrete(7)


def test_families_have_recipes_that_say_what_they_leave_out(monkeypatch):
    grid = recipe_for("minigrid:MiniGrid-DoorKey-5x5-v0")
    assert grid is not None
    assert grid is recipe_for("BabyAI-GoToRedBall-v0")
    assert grid.wrapper == "envfleet.learn.wrappers:without_mission"
    assert "mission is left out" in grid.note
    seen: Any = wrappers.without_mission(Grid()).observation_space
    assert set(seen.spaces) == {"image", "direction"}
    pong = recipe_for("ale_py:ALE/Pong-v5")
    assert pong is not None
    assert pong.wrapper == "envfleet.learn.wrappers:atari"
    for recipe in (grid, pong):
        assert recipe.n_envs * recipe.options.n_steps % recipe.options.batch_size == 0
    assert recipe_for("somewhere:Else-v0") is None

    spec = gymnasium.envs.registration.EnvSpec("ALE/Stub-v5", lambda **_: Grid())
    monkeypatch.setitem(gymnasium.registry, "ALE/Stub-v5", spec)
    found = asked("--env", "ALE/Stub-v5", "--env-kwargs", '{"mode": 1}', "--wrapper", "none")
    assert found.options.env_kwargs == {"frameskip": 1, "mode": 1}
    assert found.options.wrapper is None
