"""Configurations of meta-RL: presets, changes, and mistakes that are named."""

from typing import Any

import pytest

from envfleet.errors import ConfigError
from envfleet.meta import train
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
    has_tasks = config.env.env_name[:-3][-2:] not in ("-P", "-V")
    assert not has_tasks or env.unwrapped.eval_tasks
    if config.is_rl2:
        assert config.policy.n_steps % env.horizon_bamdp == 0  # whole trials
    env.close()


def test_every_environment_has_a_preset_with_a_memory_and_one_without():
    models = {
        (one.env.env_name, one.policy.seq_model == "mlp")
        for one in map(load_config, preset_names())
        if not one.is_rl2
    }
    assert models == {
        (f"{name}-v0", is_plain) for name in ENVIRONMENTS for is_plain in (True, False)
    }


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


BY_THE_ORIGINAL_S_KEYS = """
seed: 73
cuda: -1
env: {env_type: meta, env_name: PointRobotSparse-v0, max_rollouts_per_task: 2, num_tasks: 100,
      num_train_tasks: 80, num_eval_tasks: 20, oracle: false}
train: {num_iters: 500, num_init_rollouts_pool: 400, num_rollouts_per_iter: 25, buffer_size: 4e6,
        buffer_type: seq_vanilla, num_updates_per_iter: 1000, batch_size: 32, sampled_seq_len: -1,
        sample_weight_baseline: 0.0}
eval: {eval_stochastic: false, log_interval: 5, save_interval: -1, log_tensorboard: true}
policy:
  {seq_model: gru, separate: true, algo_name: td3, action_embedding_size: 0,
   observ_embedding_size: 32, reward_embedding_size: 8, rnn_hidden_size: 128, rnn_num_layers: 1,
   dqn_layers: [128, 128], policy_layers: [128, 128], lr: 0.0003, gamma: 0.9, tau: 0.005,
   sac: {automatic_entropy_tuning: true, entropy_alpha: 0.2, target_entropy: null, alpha_lr: 3e-4},
   sacd: {automatic_entropy_tuning: true, entropy_alpha: 0.1, target_entropy: 0.7, alpha_lr: 3e-4},
   td3: {exploration_noise: 0.1, target_noise: 0.2, target_noise_clip: 0.5}}
"""


def test_a_file_with_the_keys_of_the_original_is_read(tmp_path):
    path = tmp_path / "rnn.yml"
    path.write_text(BY_THE_ORIGINAL_S_KEYS)
    config = load_config(path)
    assert (config.run.seed, config.run.device) == (73, "cpu")
    assert load_config(path, cuda=1).run.device == "cuda:1"
    train_options: Any = config.train
    assert train_options.buffer_size == 4_000_000
    assert isinstance(config.policy, PolicyOptions)
    assert config.policy.sac.alpha_lr == 3e-4


@pytest.mark.parametrize("name", ["point_robot/mlp", "point_robot/rl2"])
def test_a_gpu_that_is_not_there_is_one_sentence(name, tmp_path):
    with pytest.raises(ConfigError, match="device 'cuda:99' cannot be used here; take the CPU"):
        train(load_config(name, cuda=99), tmp_path / "run")


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
