"""Trials on the nodes of a Ray cluster: on each a fleet, and a copy of the agent.

    plans ─► pieces of neighbouring plans ─► a node plays each by `play_many` ─► rollouts, by number
    weights ─► the object store, once per call ─► every node

A trial depends on its plan and the weights only, so it does not matter which node plays it, or that
a piece is played again because its node was lost. Law: the rollouts are those of one machine, bit
for bit, if PyTorch computes the same bits on every node; that is checked on each, and a warning
names a node where it does not.
"""

from __future__ import annotations

import os
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from envfleet.engine.backends.ray.cluster import connect, need_ray
from envfleet.engine.incident import Incident
from envfleet.errors import level_of_caller
from envfleet.learn.torch_setup import threads
from envfleet.meta.agents.agent import OffPolicyAgent, make_agent
from envfleet.meta.agents.options import PolicyOptions
from envfleet.meta.collect import PlayedTrial, Seconds, TrialPlan, play_many
from envfleet.meta.parallel import ParallelEnvManager
from envfleet.observe.events import Event
from envfleet.runs.nodes import NodePool, Place

__all__ = ["NodeCollectors"]

PIECE_S = 3600.0
"""Longest that one piece may take. Steps have their own deadlines on the node."""


@dataclass(frozen=True, slots=True)
class _Piece:
    plans: Sequence[TrialPlan]
    deterministic: bool


@dataclass(frozen=True, slots=True)
class _PlayedPiece:
    trials: Sequence[PlayedTrial]
    parts: dict[str, float]
    """What the time went into."""
    num_processes: int
    incidents: tuple[Incident, ...]
    """New ones of the node's fleet."""
    bits: int
    """What the agent computes there, see `_bits`."""


class NodeCollectors:
    """Plays trials on all nodes of a cluster, in place of a `ParallelEnvManager`.

    Args:
        make: Makes the environments of a node, so many, in so many processes at most.
        policy: The agent that acts there; its weights come with the work.
        num_workers: Environments on all nodes together, shared out evenly.
        address: Of the cluster, as for `envfleet.engine.backends.ray.cluster.connect`.
    """

    def __init__(
        self,
        make: Callable[[int, int], ParallelEnvManager],
        policy: PolicyOptions,
        num_workers: int,
        address: str | None = None,
    ) -> None:
        self.num_workers = num_workers
        self.num_processes = 0
        """Worker processes of all nodes that have played."""
        self.incidents: list[Incident] = []
        self._processes: dict[int, int] = {}
        self._odd: set[int] = set()
        with ExitStack() as undo:
            undo.enter_context(connect(address))
            nodes = sum(
                one["Alive"] and one["Resources"].get("CPU", 0) >= 1 for one in need_ray().nodes()
            )
            self._each = -(-num_workers // max(1, nodes))
            each = self._each

            def build(place: Place) -> _NodePlayer:
                return _NodePlayer(make(each, place.cores), policy)

            self._pool: NodePool[_Piece, _PlayedPiece] = NodePool(build, deadline_s=PIECE_S)
            undo.callback(self._pool.close)
            self._undo = undo.pop_all()

    @property
    def events(self) -> Sequence[Event]:
        """Nodes that joined, left or were lost, and pieces that were played again."""
        return self._pool.events

    def play(
        self,
        actor: OffPolicyAgent,
        plans: Sequence[TrialPlan],
        *,
        deterministic: bool,
        seconds: Seconds,
    ) -> list[PlayedTrial]:
        """Play trials; the rollouts in the plans' order."""
        if not plans:
            return []
        begun_s, parts = time.perf_counter(), dict[str, float]()
        size = min(self._each, -(-len(plans) // max(1, len(self._pool.workers))))
        pieces = [
            _Piece(plans[first : first + size], deterministic)
            for first in range(0, len(plans), size)
        ]
        weights, bits = self._pool.share(actor.weights()), _bits(actor)
        done: dict[int, PlayedTrial] = {}
        for piece in self._pool.work(pieces, weights):
            found, place = piece.result, self._pool.workers.get(piece.worker)
            done |= {trial.number: trial for trial in found.trials}
            self.incidents += found.incidents
            self._processes[piece.worker] = found.num_processes
            for name, spent_s in found.parts.items():
                parts[name] = parts.get(name, 0.0) + spent_s
            if found.bits != bits and piece.worker not in self._odd:
                self._odd.add(piece.worker)
                warnings.warn(
                    f"PyTorch computes other last digits on {place} than here, so what is "
                    "collected there differs from what this machine would collect; use nodes with "
                    "the same processor and the same version of PyTorch for equal results",
                    RuntimeWarning,
                    stacklevel=level_of_caller(),
                )
        self.num_processes = sum(self._processes.values())
        seconds.shared(parts, max(1, len(self._pool.workers)), time.perf_counter() - begun_s)
        return [done[plan.number] for plan in plans]

    def close(self) -> None:
        """End what runs on the nodes, and the connection; may be called twice."""
        self._undo.close()


class _NodePlayer:
    """Lives on a node: environments, and the agent."""

    def __init__(self, manager: ParallelEnvManager, policy: PolicyOptions) -> None:
        self._manager = manager
        try:
            shape = manager.observation_space.shape
            assert shape is not None
            self._agent = make_agent(policy, shape[0], manager.action_space, seed=0)
        except BaseException:
            manager.close()
            raise
        self._num_incidents = 0

    def __call__(self, task: _Piece, shared: dict[str, Any]) -> _PlayedPiece:
        """Play the trials of a piece, with these weights."""
        seconds, agent, fleet = Seconds(), self._agent, self._manager.fleet
        agent.load_weights(shared)
        with threads():
            bits = _bits(agent)
            trials = play_many(
                self._manager,
                agent,
                task.plans,
                deterministic=task.deterministic,
                seconds=seconds,
            )
        incidents = tuple(fleet.incidents[self._num_incidents :])
        self._num_incidents += len(incidents)
        processes = sum(pid not in (None, os.getpid()) for pid in fleet.worker_pids())
        return _PlayedPiece(trials, seconds.parts, processes, incidents, bits)

    def close(self) -> None:
        """Close the environments."""
        self._manager.close()


def _bits(agent: OffPolicyAgent) -> int:
    """A checksum of what the agent does with some rows, down to the last bit."""
    rng, rows = np.random.default_rng(0), 16
    state = agent.initial_state(rows)
    obs = rng.standard_normal((rows, agent.obs_dim), np.float32)
    actions, after = agent.act(state, obs, deterministic=True)
    return zlib.crc32(after.hidden.tobytes(), zlib.crc32(actions.tobytes()))
