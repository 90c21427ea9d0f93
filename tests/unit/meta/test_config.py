"""Configurations of meta-RL: presets, changes, and mistakes that are named."""

from typing import Any

import pytest

from envfleet.errors import ConfigError
from envfleet.meta.agents.options import PolicyOptions
from envfleet.meta.config import load_config, preset_names, read_config, words
from envfleet.meta.registered import ENVIRONMENTS
from envfleet.meta.trial import make_env


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_configuration_of_an_environment_that_is_there(name):
    config = load_config(name)
    env: Any = make_env(
        config.env.env_name, config.env.max_rollouts_per_task, **config.env.task_args
    )
    assert env.unwrapped.eval_tasks
    if config.is_rl2:
        assert config.policy.n_steps % env.horizon_bamdp == 0  # whole trials
    env.close()


def test_every_environment_with_tasks_has_a_preset():
    named = {load_config(name).env.env_name for name in preset_names()}
    assert named == {f"{name}-v0" for name in ENVIRONMENTS if name[-2:] not in ("-P", "-V")}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("env.num_parallel_worker=4", "did you mean num_parallel_workers"),
        ("train.num_rollout_per_iter=4", "did you mean num_rollouts_per_iter"),
        ("policy.seq_mode=gru", "did you mean seq_model"),
        ("polcy.seq_model=gru", "did you mean policy"),
        ("train.num_iters=0", r"train\.num_iters must be a whole number of at least 1"),
        ("train.num_updates_per_iter=-1", r"train\.num_updates_per_iter must be"),
        ("env.env_type=atari", r"env\.env_type must be one of"),
        ("num_iters=3", "write section.key=value"),
        ("policy.sac.alpha=3", r"policy\.sac has no option 'alpha'"),
    ],
)
def test_a_mistake_is_one_sentence(change, text):
    with pytest.raises(ConfigError, match=text):
        load_config("point_robot/rnn", [change])


def test_a_mistake_in_a_file_names_the_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("env: {env_name: PointRobot-v0, num_tasks: many}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: env\.num_tasks must be a whole number"):
        load_config(path)
    path.write_text("env: [\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml is not YAML \(line 2\)"):
        load_config(path)
    with pytest.raises(ConfigError, match="did you mean point_robot/rl2"):
        load_config("point_robot/rl")
    with pytest.raises(ConfigError, match="no environment was named"):
        load_config(None)
    with pytest.raises(ConfigError, match="env_kwargs has num_tasks"):
        read_config({"env": {"env_name": "Wind-v0", "env_kwargs": {"num_tasks": 3}}})


def test_changes_are_over_the_file_and_flags_over_both():
    config = load_config(
        "point_robot/rnn",
        [
            "train.num_iters=5",
            "policy.lr=1e-3",
            "policy.dqn_layers=[8, 8]",
            "policy.sac.alpha_lr=1e-4",
        ],
        seed=3,
        num_parallel_workers=9,
    )
    assert (config.train.num_iters, config.run.seed, config.env.num_parallel_workers) == (5, 3, 9)
    assert config.policy.lr == 1e-3
    assert config.policy.dqn_layers == (8, 8)
    assert config.policy.sac.alpha_lr == 1e-4


def test_updates_keep_their_kind():
    for text, kind in (("1", int), ("1.0", float)):
        train: Any = load_config("point_robot/rnn", [f"train.num_updates_per_iter={text}"]).train
        assert type(train.num_updates_per_iter) is kind


def test_what_is_typed_for_an_option_is_read_back():
    for owner, name, value in (
        ("policy", "dqn_layers", [8, 8]),
        ("env", "oracle", True),
        ("env", "env_kwargs", {"max_episode_steps": 7}),
        ("train", "num_updates_per_iter", 0.5),
    ):
        (word,) = words(owner, name, value)
        config = load_config("point_robot/rnn", [word])
        found = getattr(getattr(config, owner), name)
        assert (list(found) if isinstance(found, tuple) else found) == value
    assert isinstance(load_config("point_robot/rnn").policy, PolicyOptions)
