"""PPO that collects on the nodes of a real cluster: the same numbers, whatever becomes of nodes."""

import json
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from envfleet.cli import main
from envfleet.learn.environments import opened
from envfleet.learn.options import PPOOptions
from envfleet.learn.train_options import TrainOptions
from envfleet.observe.jsonl import read_lines
from envfleet.runs.checkpoint import load
from tests.ray_cluster import NODE, RayCluster

SHORT = PPOOptions(n_steps=32, n_epochs=2)
LONG_S = 60.0
ENDS = "tests.faults.node_envs:EndsIts"


@contextmanager
def third_node(cluster: RayCluster) -> Any:
    """One more node; it may end by itself."""
    node = cluster.nodes.add_node(**NODE)
    try:
        yield node
    finally:
        cluster.nodes.remove_node(node, allow_graceful=False)


def head_of(cluster: RayCluster) -> str:
    """The first node."""
    return str(cluster.nodes.list_all_nodes()[0].node_id)


def trained(ppo: PPOOptions, iterations: int, **options: Any) -> dict[str, Any]:
    chosen = TrainOptions(**{"env": "CartPole-v1", "n_envs": 6, "backend": "serial", **options})
    with opened(chosen, ppo) as trainer:
        trainer.train(iterations * ppo.n_steps * chosen.n_envs)
        assert trainer.env_steps == iterations * ppo.n_steps * chosen.n_envs
        return trainer.state()


def assert_same(one: dict[str, Any], other: dict[str, Any], tolerance: float = 0.0) -> None:
    for name, weight in one["policy"].items():
        assert torch.allclose(weight, other["policy"][name], rtol=0, atol=tolerance), name
    if not tolerance:
        mine, theirs = one["collector"], other["collector"]
        np.testing.assert_equal(mine["obs"], theirs["obs"])
        np.testing.assert_equal(mine["returns"], theirs["returns"])


def test_two_nodes_learn_what_one_machine_learns(ray_cluster: RayCluster) -> None:
    cut_off = {"env": "Pendulum-v1", "env_kwargs": {"max_episode_steps": 20}}
    cut_off["wrapper"] = "gymnasium.wrappers:NormalizeReward"
    at_once = {"collect": "async", "max_staleness": 0}
    assert_same(trained(SHORT, 3, **cut_off), trained(SHORT, 3, **at_once, **cut_off))
    # batches of other shapes: the last digits of matrix products may differ
    remembers = PPOOptions(n_steps=32, n_epochs=2, memory="lstm", memory_size=8)
    assert_same(trained(remembers, 3), trained(remembers, 3, collect="node"), 1e-5)


def trained_by_command(
    folder: Path, cluster: RayCluster, victims: dict[str, str], iterations: int, *flags: str
) -> list[dict[str, Any]]:
    """A run whose environments end an actor or a node, once each; its iterations."""
    kwargs = json.dumps({"folder": str(folder), "victims": victims})
    size = ["--n-envs", "6", "--n-steps", "32", "--n-epochs", "2", "--backend", "serial"]
    size += ["--num-episodes", str(iterations), "--eval-episodes", "1", "--no-tensorboard"]
    where = ["--ray-address", cluster.address, "--checkpoint-dir", str(folder / "run")]
    assert main(["train", ENDS, "--env-kwargs", kwargs, *size, *where, *flags]) == 0
    assert [(folder / what).exists() for what in victims.values()] == [True] * len(victims)
    lines = read_lines(folder / "run" / "metrics.jsonl")
    made = [one for one in lines if "policy_loss" in one]
    assert made[-1]["env_steps"] == iterations * 32 * 6
    return made


def test_three_nodes_of_which_one_is_lost_and_an_actor_too_learn_what_one_machine_learns(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    with third_node(ray_cluster) as node:
        victims = {head_of(ray_cluster): "actor", node.node_id: "node"}
        trained_by_command(tmp_path, ray_cluster, victims, 6, "--collect", "node")
    events = read_lines(tmp_path / "run" / "events.jsonl")
    assert {"joined", "lost", "again", "moved"} <= {line["kind"] for line in events}
    assert all(line["why"] for line in events)
    whole = trained(SHORT, 6, env=ENDS, env_kwargs={"folder": str(tmp_path), "victims": {}})
    assert_same(whole, load(tmp_path / "run" / "latest.pt", trust="own")["job"])


def test_nodes_go_on_while_the_policy_learns_and_what_is_lost_counts_once(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    flags = ["--collect", "async", "--max-staleness", "1"]
    victims = {head_of(ray_cluster): "actor"}
    made = trained_by_command(tmp_path, ray_cluster, victims, 5, *flags)
    assert [one["staleness_max"] for one in made][:2] == [0, 1]
    assert {one["staleness_max"] for one in made} == {0, 1}
    assert all(0 < one["importance_weight"] <= 1 for one in made)
    assert made[1]["importance_weight"] < 1
    kinds = {line["kind"] for line in read_lines(tmp_path / "run" / "events.jsonl")}
    assert {"joined", "lost", "again"} <= kinds


def test_slots_move_to_a_node_that_joins_and_a_run_goes_on_anywhere(
    ray_cluster: RayCluster,
) -> None:
    # what is annealed depends on how long the run is to be, and that is not known here
    ppo = PPOOptions(n_steps=32, n_epochs=2, normalise_rewards=True, anneal_learning_rate=False)
    chosen = TrainOptions("CartPole-v1", n_envs=6, backend="serial", collect="node")
    per_iteration, done = ppo.n_steps * chosen.n_envs, 2
    with opened(chosen, ppo) as trainer, third_node(ray_cluster):
        limit_s = time.monotonic() + LONG_S
        while not any(event.kind == "moved" for event in trainer.envs.events):
            assert time.monotonic() < limit_s, trainer.envs.events
            trainer.train(done * per_iteration)
            done += 1
        state = trainer.state()
    assert state["env_steps"] == (done - 1) * per_iteration
    with opened(replace(chosen, collect="here"), ppo) as here:
        here.load(state)
        here.train((done + 2) * per_iteration)
        assert_same(trained(ppo, done + 2), here.state())
