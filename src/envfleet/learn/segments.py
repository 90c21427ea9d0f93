"""Segments: a fleet steps, the actor acts, and [time, slot] arrays fill up.

    act ─► send ─► recv ─► note ─┐      one half of the slots steps while the actor thinks about
     ▲                           │      the other, where there are slots and cores enough; which
     └───────────────────────────┘      slots form a half depends on their number only

Only acting is done in the loop. What a segment begins with and the policy say what comes of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from envfleet.adapters.gymnasium import FleetVectorEnv
from envfleet.engine import Batch
from envfleet.engine.machine import usable_cores
from envfleet.learn.agent import Agent
from envfleet.learn.fast.acting import QuickActor
from envfleet.learn.inputs import Leaves
from envfleet.learn.options import PPOOptions
from envfleet.learn.rollout_clock import RolloutClock
from envfleet.learn.slot_keeper import SlotKeeper

__all__ = ["Behaviour", "FleetStepper", "LastObservations", "Segment", "Start", "Stepper"]

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]
OVERLAP_FROM = 16
"""Slots for which halves overlap: with fewer, a second forward pass costs more than it hides."""
OVERLAP_CORES = 3
"""With fewer cores the policy takes one from the half that steps, which was measured slower."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a segment begins with, by slot."""

    obs: Leaves
    """As the networks get them."""
    masks: Flags | None
    states: Tensor
    """What the policy remembers."""
    noise: Tensor
    """The random numbers by which actions are drawn, [time, slot]."""
    coming: tuple[Tensor, ...] = ()
    """Those of the segments after it, for a stepper that runs ahead."""

    def of(self, slots: slice) -> Start:
        """The same for some of the slots."""
        return Start(
            tuple(leaf[slots] for leaf in self.obs),
            None if self.masks is None else self.masks[slots],
            self.states[slots].clone(),  # a view would travel with all that it is a view of
            self.noise[:, slots].contiguous(),
        )


@dataclass(slots=True)
class LastObservations:
    """Last observations of truncated episodes, and what was remembered there."""

    places: list[tuple[int, int]] = field(default_factory=list)
    """Step and slot of each, in this order."""
    leaves: list[Leaves] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The policies that acted in a segment, where these were older than the present one."""

    staleness: npt.NDArray[np.int64]
    """By how many updates, [slot]."""
    log_probs: npt.NDArray[np.float32]
    """Of the actions, by the policy that drew them; 0 where that is the present one."""


class Segment:
    """The arrays of one segment while they fill up; observations have one row more."""

    def __init__(self, start: Start, agent: Agent, pages: Array | None = None) -> None:
        """Begin with the first observations.

        Args:
            start: What it begins with.
            agent: Whose actions will be kept.
            pages: Where workers write observations in place, if they do.
        """
        times, slots, head = len(start.noise), len(start.states), agent.policy.head
        self.has_pages = pages is not None
        """Whether observations are written in place, by the workers that make them."""
        self.obs: Leaves = (
            tuple(np.empty((times + 1, *leaf.shape), leaf.dtype) for leaf in start.obs)
            if pages is None
            else (pages[: times + 1],)
        )
        for mine, leaf in zip(self.obs, start.obs, strict=True):
            mine[0] = leaf
        self.masks: Flags | None = None
        self._shape = times + 1, slots
        if start.masks is not None:
            self.mask(0, slice(None), start.masks)
        self.actions = torch.zeros((times, slots, *head.shape), dtype=head.dtype)
        self.drawn = self.actions.numpy()
        """What was drawn, as a tensor and as an array of the same memory."""
        self.rewards = np.zeros((times, slots))
        self.terminated, self.truncated = np.zeros((2, times, slots), np.bool_)
        self.valid = np.ones((times, slots), np.bool_)
        self.finals = LastObservations()
        self.states = start.states.clone()
        """What is remembered after the steps so far."""
        self.behaviour: Behaviour | None = None
        """Who acted, if that was not the present policy everywhere."""

    def see(self, step: int, half: slice, seen: Leaves) -> None:
        """Keep observations as the networks get them."""
        for mine, leaf in zip(self.obs, seen, strict=True):
            mine[step, half] = leaf

    def mask(self, step: int, half: slice, masks: Flags) -> None:
        """Keep a mask; before the first one all actions are allowed."""
        if self.masks is None:
            self.masks = np.ones((*self._shape, masks.shape[-1]), np.bool_)
        self.masks[step, half] = masks

    def page_after(self, step: int) -> int:
        """The fleet's page for the observations after this step; pages count from 1."""
        return step + 2 if self.has_pages else 0


class Stepper(Protocol):
    """Environments, wherever they are, that are stepped by a policy for whole segments."""

    clock: RolloutClock
    ahead: int
    """How many segments it may begin before they are asked for."""

    @property
    def num_envs(self) -> int:
        """How many slots."""

    @property
    def fleet(self) -> Any:
        """What the clock asks for `timings` and `bounds`."""

    def reset(self, seed: int) -> tuple[Leaves, Flags | None]:
        """Reset slot i by `seed + i`; its observations, not normalised yet, and masks."""

    def collect(self, start: Start) -> Segment:
        """Step every slot `n_steps` times."""

    def take(self) -> Any:
        """The environments' states, or None with a warning if they cannot be taken."""

    def restore(self, slots: Any) -> None:
        """Bring the environments to those states.

        Raises:
            SnapshotError: They cannot be brought there.
        """


class FleetStepper:
    """A fleet that this process steps."""

    ahead = 0

    def __init__(
        self, envs: FleetVectorEnv, agent: Agent, options: PPOOptions, *, learns: bool = True
    ) -> None:
        """Prepare; nothing is stepped yet.

        Args:
            envs: The fleet.
            agent: Who acts.
            options: How many steps a segment has.
            learns: Whether statistics of observations take in every step at once. If not, `raw`
                keeps what they are to learn from.
        """
        self._envs, self._agent, self._times = envs, agent, options.n_steps
        pages = envs.fleet.pages
        if pages is not None and (len(pages) <= options.n_steps or not agent.sees_plainly(pages)):
            pages = None
        self._pages = pages
        self._learns = learns
        self._is_quick = QuickActor.can_be(agent.policy)
        self._takes_masks = agent.policy.head.takes_masks
        self._quick: QuickActor | None = None
        count = envs.num_envs
        overlaps = options.overlap
        if overlaps is None:
            overlaps = count >= OVERLAP_FROM and usable_cores() >= OVERLAP_CORES
        bounds = [0, count // 2, count] if overlaps and count > 1 else [0, count]
        self._halves = [slice(*pair) for pair in pairwise(bounds)]
        self._slots = [np.arange(half.start, half.stop) for half in self._halves]
        self._keeper = SlotKeeper(envs)
        self.clock = RolloutClock()
        self.raw: Leaves | None = None
        """Observations after each step as they came, if statistics are to learn from them later."""

    @property
    def num_envs(self) -> int:
        """How many slots."""
        return self._envs.num_envs

    @property
    def fleet(self) -> Any:
        """What is stepped."""
        return self._envs.fleet

    def reset(self, seed: int | list[int]) -> tuple[Leaves, Flags | None]:
        """Reset slot i by `seed + i`, or each by its own."""
        obs, infos = self._envs.reset(seed=seed)
        return self._agent.inputs.split(obs), self._agent.masks(obs, infos)

    def take(self) -> Any:
        """The environments' states, or None with a warning if they cannot be taken."""
        return self._keeper.take()

    def restore(self, slots: Any) -> None:
        """Bring the environments to those states."""
        self._envs.restore(slots)

    @torch.inference_mode()
    def collect(self, start: Start) -> Segment:
        """Step every slot; the observations are valid until the next call."""
        agent, segment = self._agent, Segment(start, self._agent, self._pages)
        self.raw = None
        if agent.normalises and not self._learns:
            self.raw = tuple(np.empty_like(leaf[1:]) for leaf in segment.obs)
        self._quick = None
        if self._is_quick and segment.masks is None:
            self._quick = QuickActor(
                agent.policy,
                segment.obs[0],
                start.noise,
                segment.actions,
                self._halves,
                agent.bounds,
            )
        if len(self._halves) == 1:
            self._fill(segment, start.noise)
        else:
            self._fill_by_halves(segment, start.noise)
        return segment

    def _fill(self, segment: Segment, noise: Tensor) -> None:
        fleet = self._envs.fleet
        for step in range(self._times):
            wanted = self._choose(segment, step, 0, noise)
            begun_s = time.perf_counter()
            batch = fleet.step(wanted, page=segment.page_after(step))
            self.clock.fleet_s += time.perf_counter() - begun_s
            self._note(segment, step, self._halves[0], batch)

    def _fill_by_halves(self, segment: Segment, noise: Tensor) -> None:
        """Act for one half of the slots while the other steps."""
        for index in range(len(self._halves)):
            self._send(segment, 0, index, noise)
        for step in range(self._times):
            for index in range(len(self._halves)):
                begun_s = time.perf_counter()
                batch = self._envs.recv(slots=self._slots[index])
                self.clock.fleet_s += time.perf_counter() - begun_s
                self._note(segment, step, self._halves[index], batch)
                if step + 1 < self._times:
                    self._send(segment, step + 1, index, noise)

    def _send(self, segment: Segment, step: int, index: int, noise: Tensor) -> None:
        wanted = self._choose(segment, step, index, noise)
        begun_s = time.perf_counter()
        self._envs.fleet.send(wanted, self._slots[index], page=segment.page_after(step))
        self.clock.fleet_s += time.perf_counter() - begun_s

    def _choose(self, segment: Segment, step: int, index: int, noise: Tensor) -> Any:
        """Actions for one half, as its environments take them."""
        begun_s = time.perf_counter()
        agent, half, wanted = self._agent, self._halves[index], None
        if self._quick is not None and segment.masks is None:
            wanted = self._quick.act(step, index)
        else:
            leaves = tuple(agent.tensor(leaf[step, half]) for leaf in segment.obs)
            allowed = None if segment.masks is None else agent.tensor(segment.masks[step, half])
            try:
                said, states = agent.policy.respond(leaves, segment.states[half], allowed)
            except RuntimeError:
                seen = tuple(leaf[step, half] for leaf in segment.obs)
                agent.inputs.refuse_outside(seen, self._slots[index].tolist())
                raise
            if agent.policy.state_size:
                segment.states[half] = states
            segment.actions[step, half] = agent.policy.head.sample(said, noise[step, half])
        if wanted is None:
            wanted = agent.fit(segment.drawn[step, half])
        self.clock.inference_s += time.perf_counter() - begun_s
        return wanted

    def _note(self, segment: Segment, step: int, half: slice, batch: Batch) -> None:
        """Keep what a step of one half brought."""
        segment.rewards[step, half] = batch.rewards
        if batch.has_events:
            segment.valid[step, half] = batch.valid
            segment.terminated[step, half] = batch.terminated
            segment.truncated[step, half] = batch.truncated
            self._note_ends(segment, step, half, batch)
        if batch.page != segment.page_after(step) or not batch.page:
            self._see(segment, step, half, batch.obs)
        if self._takes_masks:  # infos take time to put together
            masks = self._agent.masks(batch.obs, batch.infos)
            if masks is not None:
                segment.mask(step + 1, half, masks)

    def _see(self, segment: Segment, step: int, half: slice, obs: Any) -> None:
        leaves = self._agent.inputs.split(obs)
        if self.raw is not None:
            for mine, leaf in zip(self.raw, leaves, strict=True):
                mine[step, half] = leaf
        seen = self._agent.normalised(leaves, learns=self._learns)
        segment.see(step + 1, half, seen)

    def _note_ends(self, segment: Segment, step: int, half: slice, batch: Batch) -> None:
        finals = segment.finals
        truncated = np.flatnonzero(batch.truncated)
        if len(truncated):
            leaves = self._agent.look(batch.final_obs)
            finals.leaves.append(tuple(leaf[truncated] for leaf in leaves))
            finals.states.append(segment.states[half][truncated])
            finals.places += [(step, half.start + int(row)) for row in truncated]
        if self._agent.policy.state_size:
            ended = torch.from_numpy(batch.terminated | batch.truncated)
            segment.states[half][ended] = 0.0
