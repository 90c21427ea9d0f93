"""Real Ray clusters of several nodes on this machine, and trainers that collect on them."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from benchmarks.scale_model import Costs, predict
from benchmarks.workload import timed
from envfleet.cli.measure import Slice
from envfleet.learn.environments import opened
from envfleet.learn.node_envs import NodeEnvs
from envfleet.learn.node_fleet import Look
from envfleet.learn.options import PPOOptions
from envfleet.learn.ppo import PPOTrainer
from envfleet.learn.train_options import TrainOptions

HOST = "127.0.0.2"
"""Of the loopback interface; Ray replaces 127.0.0.1 by an address that others can reach."""
WAITER = "benchmarks.environments:Waiter"
JOIN_S = 60.0
"""Longest a node may take to join."""


class LocalCluster:
    """A head without cores, and nodes of one core each."""

    def __init__(self, nodes: int) -> None:
        from ray.cluster_utils import Cluster

        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._node: dict[str, Any] = {"node_ip_address": HOST, "object_store_memory": 100 << 20}
        head = {**self._node, "num_cpus": 0, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = str(self._cluster.address)
        self._nodes = [self._cluster.add_node(num_cpus=1, **self._node) for _ in range(nodes)]

    def add(self) -> None:
        """One more node."""
        self._nodes.append(self._cluster.add_node(num_cpus=1, **self._node))

    def kill(self) -> None:
        """End the last node, as a power failure would."""
        self._cluster.remove_node(self._nodes.pop(), allow_graceful=False)

    def close(self) -> None:
        """End all of it."""
        self._cluster.shutdown()


@contextmanager
def on_nodes(cluster: LocalCluster, env: str, num_envs: int, n_steps: int, **kwargs: Any) -> Any:
    """A trainer whose slots live on the nodes of a cluster."""
    options = TrainOptions(
        env,
        n_envs=num_envs,
        env_kwargs=kwargs,
        backend="serial",
        collect="node",
        ray_address=cluster.address,
    )
    with opened(options, PPOOptions(n_steps=n_steps)) as trainer:
        yield trainer


def nodes_of(trainer: PPOTrainer) -> int:
    """How many nodes take part."""
    assert isinstance(trainer.envs, NodeEnvs)
    return trainer.envs.num_workers


def grow(cluster: LocalCluster, trainer: PPOTrainer, nodes: int) -> None:
    """Add nodes until so many take part."""
    for _ in range(nodes - nodes_of(trainer)):
        cluster.add()
    limit_s = time.monotonic() + JOIN_S
    while nodes_of(trainer) < nodes:
        if time.monotonic() > limit_s:
            raise TimeoutError(f"{nodes_of(trainer)} of {nodes} nodes take part after {JOIN_S} s")
        trainer.collect()
    trainer.collect()  # the slots move


class Collecting:
    """Collects whole segments; nothing is learned from them."""

    def __init__(
        self, key: str, label: str, env: str, num_envs: int, n_steps: int, nodes: int = 0
    ) -> None:
        """On so many nodes; 0 takes two worker processes here."""
        self.key, self.label = key, label
        self._env, self._num_envs, self._n_steps, self._nodes = env, num_envs, n_steps, nodes
        self._undo = ExitStack()

    def open(self) -> None:
        """Start the workers."""
        if self._nodes:
            cluster = LocalCluster(self._nodes)
            self._undo.callback(cluster.close)
            how: Any = on_nodes(cluster, self._env, self._num_envs, self._n_steps)
        else:
            options = TrainOptions(
                self._env, n_envs=self._num_envs, backend="process", num_workers=2
            )
            how = opened(options, PPOOptions(n_steps=self._n_steps))
        self._trainer: PPOTrainer = self._undo.enter_context(how)

    def run(self, seconds: float) -> Slice:
        """Collect."""
        return timed(self._collect, seconds)

    def _collect(self) -> int:
        return self._trainer.collect().rewards.size

    def close(self) -> None:
        """Stop the workers."""
        self._undo.close()


def measured_and_predicted(seconds: float) -> Iterator[tuple[int, float, float]]:
    """Steps per second on 1, 2 and 4 nodes, and what the model says from the costs of one."""
    slots, n_steps, nap_s = 64, 16, 2e-3
    cluster = LocalCluster(1)
    try:
        with on_nodes(cluster, WAITER, slots, n_steps, nap_s=nap_s) as trainer:
            trainer.collect()
            costs = measured_costs(trainer, slots, n_steps)
            for nodes in (1, 2, 4):
                grow(cluster, trainer, nodes)
                found = timed(lambda: trainer.collect().rewards.size, seconds)
                said = predict(costs, nodes=nodes, cores=1, slots=slots, n_steps=n_steps)
                yield nodes, found.rate, said.rate
    finally:
        cluster.close()


def measured_costs(trainer: PPOTrainer, slots: int, n_steps: int) -> Costs:
    """What one iteration on one node is made of."""
    pool = trainer.envs.pool
    trips = []
    for _ in range(20):
        begun_s = time.perf_counter()
        list(pool.work([Look()]))
        trips.append(time.perf_counter() - begun_s)
    block = np.zeros(1 << 24, np.uint8)
    begun_s = time.perf_counter()
    pool.later(block).get().sum()
    byte_s = (time.perf_counter() - begun_s) / block.size
    before = dict(trainer.seconds)
    rounds = 3
    experience = [trainer.collect() for _ in range(rounds)][-1]
    spent = {name: now_s - before[name] for name, now_s in trainer.seconds.items()}
    steps = rounds * n_steps
    acting_s = spent["inference"] + spent["waiting"]
    state = trainer.state()
    sizes = [len(pickle.dumps(part)) for part in (state["slots"], state["policy"])]
    arrays = experience.obs[0], experience.actions, experience.rewards, experience.ended
    return Costs(
        env_s=spent["environments"] / (steps * slots),
        act_s=acting_s / steps,
        piece_s=float(np.median(trips)) / 2,
        round_trip_s=float(np.median(trips)),
        step_bytes=sum(one.nbytes for one in arrays) / experience.rewards.size,
        slot_bytes=sizes[0] / slots,
        weights_bytes=sizes[1],
        byte_s=byte_s,
    )
