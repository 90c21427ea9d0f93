"""Small learners, and what their buffers hold."""

from typing import Any

import numpy as np

from envfleet.meta import Learner, make_parallel_env

ENV = {
    "env_type": "meta",
    "env_name": "PointRobot-v0",
    "max_rollouts_per_task": 2,
    "num_train_tasks": 6,
    "num_eval_tasks": 3,
    "env_kwargs": {"max_episode_steps": 7},
}
POLICIES: dict[str, dict[str, Any]] = {
    "markov": {"seq_model": "mlp"},
    "memory": {"seq_model": "gru", "rnn_hidden_size": 8},
    "shared": {"seq_model": "lstm", "rnn_hidden_size": 8, "separate": False},
    "memory-markov": {"seq_model": "lstm-mlp", "rnn_hidden_size": 8},
    "td3": {"seq_model": "gru", "rnn_hidden_size": 8, "algo_name": "td3"},
}
DISCRETE: dict[str, Any] = {"seq_model": "gru", "rnn_hidden_size": 8, "algo_name": "sacd"}


def small(policy: str = "memory", *, seed: int = 0, **changed: Any) -> Learner:
    """A learner of short trials; `changed` are options of env, or whole sections."""
    sections = {name: changed.pop(name, None) for name in ("train", "eval")}
    env = ENV | changed
    chosen = DISCRETE if env["env_name"] == "GridNavi-v0" else POLICIES[policy]
    train = {"buffer_size": 2000, "num_updates_per_iter": 2, "batch_size": 4}
    return Learner(
        env_args=env,
        train_args=train | (sections["train"] or {}),
        eval_args={"log_tensorboard": False} | (sections["eval"] or {}),
        policy_args={**chosen, "dqn_layers": [8], "policy_layers": [8]},
        seed=seed,
    )


def manager(num_workers: int, backend: str = "serial", **changed: Any) -> Any:
    """Environments like those of `small`."""
    env = {**ENV, **changed}
    of_fleet = {name: changed[name] for name in ("step_timeout_s", "on_failure") if name in changed}
    return make_parallel_env(
        env["env_name"],
        env["max_rollouts_per_task"],
        num_workers,
        backend=backend,
        num_train_tasks=env["num_train_tasks"],
        num_eval_tasks=env["num_eval_tasks"],
        max_episode_steps=7,
        **of_fleet,
    )


def held(learner: Learner) -> dict[str, Any]:
    """All that a learner's buffer holds."""
    buffer = learner.policy_storage
    rows = buffer.num_steps + len(buffer)
    return {
        "obs": buffer._obs[:rows].copy(),
        "actions": buffer._actions[:rows].copy(),
        "rewards": buffer._rewards[:rows].copy(),
        "terms": buffer._terms[:rows].copy(),
        "lengths": [length for _, length in buffer._kept],
        "seen": dict(learner.tasks_seen),
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether they are equal, bit for bit."""
    return one.keys() == other.keys() and all(
        np.array_equal(one[name], other[name]) if isinstance(one[name], np.ndarray)
        else one[name] == other[name]
        for name in one
    )  # fmt: skip
