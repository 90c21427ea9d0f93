"""Environments on the nodes of a Ray cluster, stepped there by copies of the policy.

    policy, noise, states of the slots ──► a block of slots on each node ──► arrays, [time, slot]

Weights go out once per iteration, and each block's segment comes back as arrays, with the states of
its environments. So between iterations everything is here: a checkpoint asks no node for anything,
and the block of a node that is lost is collected again by another one, with the same result.

Law: which node steps a slot, and how many there are, changes nothing. Where observations are
normalised, statistics take a segment in when it is over; on one machine they do so at every step.
"""

from __future__ import annotations

import functools
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch

from envfleet.adapters.names import find
from envfleet.adapters.opening import env_functions
from envfleet.engine import Incident
from envfleet.engine.backends.ray.cluster import connect
from envfleet.errors import ConfigError
from envfleet.learn.agent import Agent
from envfleet.learn.inputs import Leaves
from envfleet.learn.node_fleet import Collected, Look, NodeFleet, SlotTask, Spaces
from envfleet.learn.options import PPOOptions
from envfleet.learn.rollout_clock import RolloutClock
from envfleet.learn.segments import Finals, Segment, Start
from envfleet.learn.train_options import TrainOptions
from envfleet.observe.events import Event
from envfleet.runs.nodes import NodePool, Place

__all__ = ["NodeEnvs", "NodeStepper", "opened_on_nodes"]

Flags = npt.NDArray[np.bool_]
SLOW = 2.0
"""A node that takes so many times as long as the median of all is named."""


@contextmanager
def opened_on_nodes(options: TrainOptions, ppo: PPOOptions) -> Iterator[NodeEnvs]:
    """Join the cluster and start a worker on each of its nodes, as at the start of a run."""
    if options.backend == "ray":
        raise ConfigError(
            "collect='node' keeps a fleet on each node, which cannot be one of backend='ray'; "
            "leave the backend out, or collect here with backend='ray'"
        )
    env_fns, _ = env_functions(find(options.env).source, options.n_envs, options.env_kwargs)
    build = functools.partial(NodeFleet, env_fns, options, ppo)
    with connect(options.ray_address), NodePool[Any, Any](build) as pool:
        yield NodeEnvs(pool, options.n_envs)


class NodeEnvs:
    """The slots of a run that live on nodes."""

    def __init__(self, pool: NodePool[Any, Any], num_envs: int) -> None:
        """Ask a node what the environments look like; the pool is not closed here."""
        self.pool, self.num_envs = pool, num_envs
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


class NodeStepper:
    """Has all slots stepped on nodes; each node gets a block of slots by its cores."""

    def __init__(self, envs: NodeEnvs, agent: Agent, options: PPOOptions) -> None:
        """Prepare; nothing is stepped yet."""
        self._envs, self._pool, self._agent = envs, envs.pool, agent
        self._times = options.n_steps
        self.clock = RolloutClock()
        self.timings = {"env_s": 0.0, "wait_s": 0.0}
        self.bounds = [(0, envs.num_envs)]
        self._moments = itertools.count()
        self._moment = next(self._moments)
        self._slots: tuple[Any, ...] | None = None
        self._cut: list[tuple[slice, int]] = []
        """The blocks, and who steps each of them."""
        self._members: dict[int, Place] = {}
        self._warned: set[str] = set()

    @property
    def num_envs(self) -> int:
        """How many slots."""
        return self._envs.num_envs

    @property
    def fleet(self) -> Any:
        """What the clock asks: a node counts as one worker."""
        return self

    def reset(self, seed: int) -> tuple[Leaves, Flags | None]:
        """Reset slot i by `seed + i`."""
        self._slots = ()  # nothing is to be moved
        found = self._work(lambda slots: range(seed + slots.start, seed + slots.stop), None, None)
        leaves = zip(*(one.obs for one in found), strict=True)
        return tuple(np.concatenate(parts) for parts in leaves), _joined_masks(found, 0)

    def take(self) -> Any:
        """The environments' states, which came with the last segment."""
        return self._slots

    def restore(self, slots: Any) -> None:
        """Begin the next segment where these states were taken."""
        self._slots = tuple(slots)
        self._moment = next(self._moments)

    def collect(self, start: Start) -> Segment:
        """Step every slot; which node does it depends on the nodes that there are now."""
        begun_s = time.perf_counter()
        here = Start(start.obs, start.masks, start.states.cpu(), start.noise.cpu())
        agent = self._agent.state()
        policy = {name: one.cpu() for name, one in agent["policy"].items()}
        shared = self._pool.share((self._moment, {**agent, "policy": policy}))
        kept = self._slots

        def way(slots: slice) -> Any:
            return self._pool.later(None if kept is None else kept[slots])

        found = self._work(way, here, shared)
        self._note_time(found, time.perf_counter() - begun_s)
        return self._joined(start, found)

    # ---- blocks ----------------------------------------------------------------------------------

    def _work(
        self, way: Callable[[slice], Any], start: Start | None, shared: Any
    ) -> list[Collected]:
        self._deal()
        before, after = self._moment, next(self._moments)
        tasks = [
            SlotTask(block.start, block.stop, before, after, way(block), start and start.of(block))
            for block, _ in self._cut
        ]
        found: dict[int, Collected] = {}
        seconds: dict[int, float] = {}
        for done in self._pool.work(tasks, shared, [worker for _, worker in self._cut]):
            found[done.index], seconds[done.worker] = done.result, done.seconds
        in_order = [found[index] for index in range(len(tasks))]
        self._moment = after
        if start is not None:
            self._name_slow(seconds)
        self._note(in_order)
        return in_order

    def _deal(self) -> None:
        """Give each node a block of slots, by its cores, if the nodes are others than before."""
        self._pool.refresh()
        members = dict(sorted(self._pool.workers.items()))
        if members == self._members or (
            self._slots is None and members.keys() >= set(self._owners)
        ):
            return
        if self._members:
            before, now = len(self._members), len(members)
            why = f"the slots are dealt among {now} nodes, before among {before}"
            self._pool.tell("moved", f"{self.num_envs} slots", why)
        self._members = members
        total, count = sum(one.cores for one in members.values()), self.num_envs
        ends = np.cumsum([one.cores for one in members.values()]) * count / max(total, 1)
        edges = [0, *np.round(ends).astype(int).tolist()]
        self._cut = [
            (slice(first, last), worker)
            for first, last, worker in zip(edges, edges[1:], members, strict=False)
            if first < last
        ] or [(slice(0, count), -1)]

    @property
    def _owners(self) -> list[int]:
        return [worker for _, worker in self._cut]

    def _note(self, found: list[Collected]) -> None:
        """Keep what nodes said beside the arrays."""
        parts = [one.slots for one in found]
        whole = [part for part in parts if part is not None]
        self._slots = tuple(itertools.chain(*whole)) if len(whole) == len(parts) else None
        for one in found:
            self._envs.failures += one.incidents
            for text in one.warnings:
                if text not in self._warned:
                    self._warned.add(text)
                    warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _name_slow(self, seconds: dict[int, float]) -> None:
        typical = float(np.median(list(seconds.values())))
        for worker, spent_s in seconds.items():
            if len(seconds) > 2 and spent_s > SLOW * typical and worker in self._members:
                why = f"its block took {spent_s:.2f} s, the median is {typical:.2f} s"
                self._pool.tell("slow", str(self._members[worker]), why)

    def _note_time(self, found: list[Collected], spent_s: float) -> None:
        """The time of the slowest node counts; the rest was the way to it."""
        slowest = max((one.seconds for one in found), key=lambda parts: sum(parts.values()))
        self.clock.inference_s += slowest["inference"]
        self.clock.fleet_s += spent_s - slowest["inference"]
        before, waited_s = self.timings, sum(slowest.values()) - slowest["inference"]
        self.timings = {  # another one: the clock compares it with what it was
            "env_s": before["env_s"] + slowest["environments"],
            "wait_s": before["wait_s"] + waited_s,
        }

    # ---- results ---------------------------------------------------------------------------------

    def _joined(self, start: Start, found: list[Collected]) -> Segment:
        agent, segment = self._agent, Segment(start, self._agent)
        blocks = [block for block, _ in self._cut]
        raw = [np.concatenate(parts, 1) for parts in zip(*(one.obs for one in found), strict=True)]
        for mine, leaf in zip(segment.obs, agent.normalised(tuple(raw)), strict=True):
            mine[1:] = leaf
        if agent.normalises:
            agent.learn_from(tuple(leaf.reshape(-1, *leaf.shape[2:]) for leaf in raw))
        for block, one in zip(blocks, found, strict=True):
            segment.drawn[:, block] = one.actions
            segment.rewards[:, block] = one.rewards
            segment.terminated[:, block] = one.terminated
            segment.truncated[:, block] = one.truncated
            segment.valid[:, block] = one.valid
            if one.states is not None:
                segment.states[block] = one.states.to(agent.device)
        segment.masks = _joined_masks(found, 1)
        segment.finals = _joined_finals(blocks, [one.finals for one in found], agent.device)
        return segment


def _joined_masks(found: list[Collected], axis: int) -> Flags | None:
    """Masks side by side; where a block has none, all actions are allowed."""
    given = [one.masks for one in found if one.masks is not None]
    if not given:
        return None
    width = given[0].shape[-1]
    return np.concatenate(
        [
            np.ones((*_rows(one, axis), width), np.bool_) if one.masks is None else one.masks
            for one in found
        ],
        axis,
    )


def _rows(one: Collected, axis: int) -> tuple[int, ...]:
    """The shape of a block's masks but for their width: there is one row more than steps."""
    return (len(one.obs[0]),) if axis == 0 else (len(one.rewards) + 1, one.rewards.shape[1])


def _joined_finals(blocks: list[slice], found: list[Finals], device: torch.device) -> Finals:
    """Those of all blocks, by step and slot, as one fleet would have them."""
    rows = [
        (step, slot + block.start, tuple(leaf[row] for leaf in leaves), states[row])
        for block, finals in zip(blocks, found, strict=True)
        for (step, slot), leaves, states, row in _each(finals)
    ]
    rows.sort(key=lambda row: row[:2])
    if not rows:
        return Finals()
    leaves = tuple(np.stack(parts) for parts in zip(*(row[2] for row in rows), strict=True))
    states = torch.stack([row[3] for row in rows]).to(device)
    return Finals([row[:2] for row in rows], [leaves], [states])


def _each(finals: Finals) -> Iterator[tuple[tuple[int, int], Leaves, torch.Tensor, int]]:
    """Every last observation: its place, and where among which arrays it lies."""
    places = iter(finals.places)
    for leaves, states in zip(finals.leaves, finals.states, strict=True):
        for row in range(len(states)):
            yield next(places), leaves, states, row
