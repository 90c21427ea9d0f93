"""Environments on the nodes of a Ray cluster, stepped there by copies of the policy.

Weights go out once per iteration, and each block's segment comes back as arrays, with the states of
its environments. So between iterations everything is here: a checkpoint asks no node for anything,
and the block of a node that is lost is collected again by another one, with the same result.

Law: which node steps a slot, and how many there are, changes nothing. Where observations are
normalised, statistics take a segment in when it is over; on one machine they do so at every step.
With a staleness allowed, nodes go on while this process learns, so it depends on time which policy
acts, and each segment says how old its policy was. A staleness of 0 is the law again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium

from envfleet.adapters.names import find
from envfleet.adapters.opening import EnvWrapper, env_functions
from envfleet.engine import Incident
from envfleet.engine.backends.ray.cluster import connect
from envfleet.errors import ConfigError
from envfleet.learn.node_fleet import Look, NodeFleet, Spaces
from envfleet.learn.options import PPOOptions
from envfleet.learn.train_options import SlowNodes, TrainOptions
from envfleet.observe.events import Event
from envfleet.runs.nodes import NodePool

__all__ = ["NodeEnvs", "opened_on_nodes"]


@contextmanager
def opened_on_nodes(
    options: TrainOptions, ppo: PPOOptions, wrappers: Sequence[EnvWrapper]
) -> Iterator[NodeEnvs]:
    """Join the cluster and start a worker on each of its nodes, as at the start of a run."""
    if options.backend == "ray":
        raise ConfigError(
            "collect='node' keeps a fleet on each node, which cannot be one of backend='ray'; "
            "leave the backend out, or collect here with backend='ray'"
        )
    env_fns, _ = env_functions(
        find(options.env).source, options.n_envs, options.env_kwargs, wrappers
    )
    build = functools.partial(NodeFleet, env_fns, options, ppo)
    with connect(options.ray_address), NodePool[Any, Any](build) as pool:
        max_staleness = options.max_staleness if options.collect == "async" else 0
        yield NodeEnvs(pool, options.n_envs, max_staleness, options.slow_nodes)


class NodeEnvs:
    """The slots of a run that live on nodes."""

    def __init__(
        self,
        pool: NodePool[Any, Any],
        num_envs: int,
        max_staleness: int = 0,
        slow_nodes: SlowNodes = "wait",
    ) -> None:
        """Ask a node what the environments look like; the pool is not closed here."""
        self.pool, self.num_envs = pool, num_envs
        self.max_staleness, self.slow_nodes = max_staleness, slow_nodes
        [done] = pool.work([Look()])
        spaces: Spaces = done.result
        self.single_observation_space: gymnasium.Space[Any] = spaces.observation
        self.single_action_space: gymnasium.Space[Any] = spaces.action
        self.failures: list[Incident] = []

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Failures of environments so far."""
        return tuple(self.failures)

    @property
    def events(self) -> tuple[Event, ...]:
        """Every decision about nodes so far."""
        return tuple(self.pool.events)

    @property
    def num_workers(self) -> int:
        """Nodes that take part, those with several actors counted by these."""
        return len(self.pool.workers)

    @property
    def plan(self) -> str:
        """What runs where."""
        places = self.pool.workers.values()
        many = f"{len(places)} node{'s' if len(places) > 1 else ''}"
        cores = sum(one.cores for one in places)
        return (
            f"{self.num_envs} environments on {many} with {cores} cores: whole segments are "
            "collected there"
        )
