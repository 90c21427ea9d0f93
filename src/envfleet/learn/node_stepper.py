"""Has slots stepped on nodes, block by block, and joins what comes back.

    policy, noise, states of the slots ──► a block of slots on each node ──► arrays, [time, slot]

Law: a segment of a block follows from where it begins and from the policy that makes it, so a block
that is lost with its node is done again elsewhere with the same result, and counts once.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from envfleet.learn.agent import Agent
from envfleet.learn.inputs import Leaves
from envfleet.learn.node_envs import NodeEnvs
from envfleet.learn.node_fleet import Collected, SlotTask
from envfleet.learn.rollout_clock import RolloutClock
from envfleet.learn.segments import Behaviour, LastObservations, Segment, Start
from envfleet.runs.nodes import Done, Place

__all__ = ["NodeStepper"]

Flags = npt.NDArray[np.bool_]
SLOW = 2.0
"""A node that takes so many times as long as the median of the others is named."""
SKIP_S = 5.0
"""A node that takes less is not given up for being slow: it may just have started."""


@dataclass(slots=True)
class _SlotBlock:
    """Neighbouring slots, which one node takes from segment to segment."""

    slots: slice
    worker: int
    """The node's, which has their fleet."""
    begun: int
    """Segments that were begun, and so the number of the next one."""
    waiting: deque[_MadeSegment] = field(default_factory=deque)
    """What was collected and not asked for yet, one after another."""
    last: _MadeSegment | None = None
    """The newest of all; None if that is what all slots have in common."""
    staleness: int = 0
    """Of the segment that is under way."""

    def takes(self, done: Done[Collected]) -> None:
        """A segment is over."""
        self.worker = done.worker
        self.last = _MadeSegment(done.result, self.staleness)
        self.waiting.append(self.last)


@dataclass(frozen=True, slots=True)
class _MadeSegment:
    """What came of a segment of a block."""

    collected: Collected
    staleness: int

    @property
    def seconds(self) -> float:
        """How long the node was busy with it."""
        return sum(self.collected.seconds.values())


class NodeStepper:
    """Has all slots stepped on nodes; each node gets a block of slots by its cores.

    The policy has as many updates behind it as segments were asked for, so segment n is to be made
    by policy n. With a staleness allowed, a block that is done begins its next segments before they
    are asked for, by the newest policy that there is: segment n by policy n - staleness or later.
    """

    def __init__(self, envs: NodeEnvs, agent: Agent) -> None:
        """Prepare; nothing is stepped yet."""
        self._envs, self._pool, self._agent = envs, envs.pool, agent
        self.ahead = envs.max_staleness
        self.clock = RolloutClock()
        self.timings = {"env_s": 0.0, "wait_s": 0.0}
        self.bounds = [(0, envs.num_envs)]
        self._epoch = self._number = 0
        """How often the slots were set back, and how many segments were asked for since."""
        self._shared: Any = None
        self._slots: tuple[Any, ...] | None = None
        self._blocks: list[_SlotBlock] = []
        self._members: dict[int, Place] = {}
        self._is_uneven = False
        """Whether slots are to be dealt anew by speed."""
        self._slow: set[int] = set()
        """Members that took too long for their last block."""
        self._speeds: dict[int, float] = {}
        """Steps per second and core, by member, if slots are dealt by that."""
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
        self.restore(())  # nothing is to be moved
        self._deal()
        tasks = [
            SlotTask(
                block.slots.start,
                block.slots.stop,
                (self._epoch, -1),
                (self._epoch, 0),
                range(seed + block.slots.start, seed + block.slots.stop),
                None,
            )
            for block in self._blocks
        ]
        found: dict[int, Collected] = {}
        for done in self._pool.work(tasks, None, [block.worker for block in self._blocks]):
            found[done.index] = done.result
        in_order = [found[index] for index in range(len(tasks))]
        self._note(in_order)
        leaves = zip(*(one.obs for one in in_order), strict=True)
        return tuple(np.concatenate(parts) for parts in leaves), _joined_masks(in_order, 0)

    def take(self) -> Any:
        """The environments' states, which came with the last segment."""
        return self._slots

    def restore(self, slots: Any) -> None:
        """Begin the next segment where these states were taken."""
        self._pool.forget()
        self._slots = tuple(slots)
        self._epoch, self._number = self._epoch + 1, 0
        self._members, self._blocks = {}, []

    def collect(self, start: Start) -> Segment:
        """Step every slot; which node does it depends on the nodes that there are now."""
        begun_s, number = time.perf_counter(), self._number
        start = Start(
            start.obs,
            start.masks,
            start.states.cpu(),
            start.noise.cpu(),
            tuple(noise.cpu() for noise in start.coming),
        )
        agent = self._agent.state()
        policy = {name: one.cpu() for name, one in agent["policy"].items()}
        self._shared = self._pool.share(((self._epoch, number), {**agent, "policy": policy}))
        last = number + self.ahead if self._deal() else max(one.begun for one in self._blocks) - 1
        self._begin(start, last)
        while not all(block.waiting for block in self._blocks):
            done = self._pool.next()
            if done is not None:
                self._blocks[done.index].takes(done)
                self._begin(start, last)
            elif self._envs.slow_nodes == "skip":
                self._skip()
        pieces = [block.waiting.popleft() for block in self._blocks]
        self._number += 1
        self._note([one.collected for one in pieces])
        self._name_slow(pieces)
        self._note_time(pieces, time.perf_counter() - begun_s)
        return self._joined(start, pieces)

    # ---- blocks ----------------------------------------------------------------------------------

    def _begin(self, start: Start, last: int) -> None:
        """Have every block that is idle begin its next segment, up to number `last`."""
        for index, block in enumerate(self._blocks):
            is_idle = block.begun == self._number + len(block.waiting)
            if not is_idle or block.begun > last:
                continue
            block.staleness = ahead = block.begun - self._number
            mine, slots = start.of(block.slots), self._slots and self._slots[block.slots]
            if ahead:
                assert block.last is not None
                before = block.last.collected
                noise = start.coming[ahead - 1][:, block.slots].contiguous()
                mine, slots = self._start_after(before, mine, noise), before.slots
            task = SlotTask(
                block.slots.start,
                block.slots.stop,
                (self._epoch, block.begun),
                (self._epoch, block.begun + 1),
                self._pool.later(slots),
                mine,
                judges=ahead > 0,
            )
            block.begun += 1
            self._pool.give(index, task, self._shared, block.worker)

    def _start_after(self, before: Collected, start: Start, noise: torch.Tensor) -> Start:
        """What the segment behind this one begins with."""
        return Start(
            self._agent.normalised(tuple(leaf[-1] for leaf in before.obs)),
            None if before.masks is None else before.masks[-1],
            start.states if before.states is None else before.states,
            noise,
        )

    def _deal(self) -> bool:
        """Give each node a block of slots, by its cores, if the nodes are others than before.

        False if that has to wait: blocks that have begun different segments cannot be cut.
        """
        self._pool.refresh()
        members = dict(sorted(self._pool.workers.items()))
        owners = {block.worker for block in self._blocks}
        is_fixed = self._slots is None and members.keys() >= owners
        if (members == self._members and not self._is_uneven) or is_fixed:
            return True
        if any(block.begun > self._number for block in self._blocks):
            return False
        if self._is_uneven:
            why = "the slots are dealt by how fast nodes were"
            self._pool.tell("moved", f"{self.num_envs} slots", why)
        elif self._members:
            before, now = len(self._members), len(members)
            why = f"the slots are dealt among {now} nodes, before among {before}"
            self._pool.tell("moved", f"{self.num_envs} slots", why)
        self._members, self._is_uneven = members, False
        usual = float(np.median([*self._speeds.values()] or [1.0]))
        parts = [one.cores * self._speeds.get(no, usual) for no, one in members.items()]
        ends = np.cumsum(parts) * self.num_envs / max(sum(parts), 1e-9)
        edges = [0, *np.round(ends).astype(int).tolist()]
        cut = [
            (slice(first, last), worker)
            for first, last, worker in zip(edges, edges[1:], members, strict=False)
            if first < last
        ] or [(slice(0, self.num_envs), -1)]
        self._blocks = [_SlotBlock(slots, worker, self._number) for slots, worker in cut]
        return True

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

    def _name_slow(self, pieces: list[_MadeSegment]) -> None:
        """Name nodes that have become slow; have slots dealt by speed if that is wanted."""
        spent = {block.worker: one.seconds for block, one in zip(self._blocks, pieces, strict=True)}
        slow = set[int]()
        for worker, seconds in spent.items():
            others = [spent[other] for other in spent if other != worker]
            if not others or worker not in self._members:
                continue
            if seconds > SLOW * (typical := float(np.median(others))):
                slow.add(worker)
                if worker not in self._slow:
                    why = f"its block took {seconds:.2f} s, the median of others is {typical:.2f} s"
                    self._pool.tell("slow", str(self._members[worker]), why)
        if slow & self._slow and self._envs.slow_nodes == "rebalance":
            self._is_uneven = True
            self._speeds = {
                block.worker: (block.slots.stop - block.slots.start)
                / max(one.seconds * self._members[block.worker].cores, 1e-9)
                for block, one in zip(self._blocks, pieces, strict=True)
                if block.worker in self._members
            }
        self._slow = slow

    def _skip(self) -> None:
        """Have another node do what one takes too long for, and give that one nothing any more."""
        done = [block.waiting[0].seconds for block in self._blocks if block.waiting]
        if not done:
            return
        limit_s = max(SLOW * float(np.median(done)), SKIP_S)
        for index, (worker, seconds) in self._pool.under_way().items():
            if seconds <= limit_s or self._blocks[index].waiting or len(self._pool.workers) < 2:
                continue
            why = f"its block takes more than {limit_s:.2f} s, and others are done"
            self._pool.tell("slow", str(self._pool.workers[worker]), why)
            self._pool.expel(worker, why)

    def _note_time(self, pieces: list[_MadeSegment], spent_s: float) -> None:
        """The slowest node's time counts, as far as it was waited for; the rest was the way."""
        slowest = max(pieces, key=lambda one: one.seconds)
        seconds = slowest.collected.seconds
        part = min(1.0, spent_s / max(slowest.seconds, 1e-9))
        acting_s = seconds["inference"] * part
        self.clock.inference_s += acting_s
        self.clock.fleet_s += spent_s - acting_s
        before = self.timings
        self.timings = {  # another one: the clock compares it with what it was
            "env_s": before["env_s"] + seconds["environments"] * part,
            "wait_s": before["wait_s"] + slowest.seconds * part - acting_s,
        }

    # ---- results ---------------------------------------------------------------------------------

    def _joined(self, start: Start, pieces: list[_MadeSegment]) -> Segment:
        agent, segment = self._agent, Segment(start, self._agent)
        blocks, found = [block.slots for block in self._blocks], [one.collected for one in pieces]
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
        segment.behaviour = _behaviour(blocks, pieces, segment.rewards.shape)
        segment.masks = _joined_masks(found, 1)
        segment.finals = _joined_finals(blocks, [one.finals for one in found], agent.device)
        return segment


def _behaviour(
    blocks: list[slice], pieces: list[_MadeSegment], shape: tuple[int, ...]
) -> Behaviour | None:
    """Who acted, if that was an older policy in some block."""
    if not any(one.staleness for one in pieces):
        return None
    staleness, log_probs = np.zeros(shape[1], np.int64), np.zeros(shape, np.float32)
    for block, one in zip(blocks, pieces, strict=True):
        staleness[block] = one.staleness
        if one.collected.log_probs is not None:
            log_probs[:, block] = one.collected.log_probs
    return Behaviour(staleness, log_probs)


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


def _joined_finals(
    blocks: list[slice], found: list[LastObservations], device: torch.device
) -> LastObservations:
    """Those of all blocks, by step and slot, as one fleet would have them."""
    rows = [
        (step, slot + block.start, tuple(leaf[row] for leaf in leaves), states[row])
        for block, finals in zip(blocks, found, strict=True)
        for (step, slot), leaves, states, row in _each(finals)
    ]
    rows.sort(key=lambda row: row[:2])
    if not rows:
        return LastObservations()
    leaves = tuple(np.stack(parts) for parts in zip(*(row[2] for row in rows), strict=True))
    states = torch.stack([row[3] for row in rows]).to(device)
    return LastObservations([row[:2] for row in rows], [leaves], [states])


def _each(finals: LastObservations) -> Iterator[tuple[tuple[int, int], Leaves, torch.Tensor, int]]:
    """Every last observation: its place, and where among which arrays it lies."""
    places = iter(finals.places)
    for leaves, states in zip(finals.leaves, finals.states, strict=True):
        for row in range(len(states)):
            yield next(places), leaves, states, row
