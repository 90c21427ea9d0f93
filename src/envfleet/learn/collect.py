"""Experience: the fleet steps, the actor acts, and [time, slot] arrays fill up.

    act ─► send ─► recv ─► note ─┐      one half of the slots steps while the actor thinks about
     ▲                           │      the other, where there are slots and cores enough; which
     └───────────────────────────┘      slots form a half depends on their number only

Only acting is done in the loop. Values and log-probabilities are worked out afterwards for all rows
at once, rewards are scaled and episodes counted then too.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from envfleet.adapters.gymnasium import FleetVectorEnv
from envfleet.engine import Batch
from envfleet.engine.machine import usable_cores
from envfleet.errors import SnapshotError
from envfleet.learn.advantages import successor_values
from envfleet.learn.agent import Agent
from envfleet.learn.checks import check_finals, check_obs, check_rewards
from envfleet.learn.fast.acting import QuickActor
from envfleet.learn.inputs import Leaves
from envfleet.learn.judging import judged, worth
from envfleet.learn.normalise import RewardScaler
from envfleet.learn.options import PPOOptions
from envfleet.learn.rollout_clock import RolloutClock
from envfleet.learn.slot_keeper import SlotKeeper

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
OVERLAP_FROM = 16
"""Slots for which halves overlap: with fewer, a second forward pass costs more than it hides."""
OVERLAP_CORES = 3
"""With fewer cores the policy takes one from the half that steps, which was measured slower."""


@dataclass(frozen=True, slots=True)
class Experience:
    """One iteration's experience, [time, slot]."""

    obs: Leaves
    """As the networks get them, one array for each part of an observation."""
    actions: Array
    masks: Flags | None
    """Which actions were allowed."""
    states: Floats
    """What the policy remembered before the first row, [slot, number]."""
    log_probs: Floats
    values: Floats
    rewards: Floats
    successors: Floats
    """The value of each row's successor."""
    ended: Flags
    valid: Flags
    """False where a row is no transition: its environment was lost."""
    episodes: list[tuple[float, int]]
    """Return and length of every episode that ended."""


@dataclass(slots=True)
class _Finals:
    """Last observations of truncated episodes, and what was remembered there."""

    places: list[tuple[int, int]] = field(default_factory=list)
    leaves: list[Leaves] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)


class _Store:
    """The arrays of one rollout while they fill up; observations have one row more."""

    def __init__(
        self,
        times: int,
        first: Leaves,
        actions: Tensor,
        masks: Flags | None,
        pages: Array | None,
    ) -> None:
        slots = len(first[0])
        self.has_pages = pages is not None
        """Whether observations are written in place, by the workers that make them."""
        self.obs: Leaves = (
            tuple(np.empty((times + 1, *leaf.shape), leaf.dtype) for leaf in first)
            if pages is None
            else (pages[: times + 1],)
        )
        for mine, leaf in zip(self.obs, first, strict=True):
            mine[0] = leaf
        self.masks: Flags | None = None
        self._shape = times + 1, slots
        if masks is not None:
            self.mask(0, slice(None), masks)
        self.actions, self.drawn = actions, actions.numpy()
        """What was drawn, as a tensor and as an array of the same memory."""
        self.rewards = np.zeros((times, slots))
        self.terminated, self.truncated = np.zeros((2, times, slots), np.bool_)
        self.valid = np.ones((times, slots), np.bool_)
        self.finals = _Finals()

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


class Collector:
    """Steps a fleet by a policy, and keeps what continues from one rollout to the next."""

    def __init__(
        self, envs: FleetVectorEnv, agent: Agent, options: PPOOptions, *, seed: int
    ) -> None:
        """Reset the fleet; after that, slots only reset at the ends of episodes."""
        self._envs, self._agent, self._times = envs, agent, options.n_steps
        pages = envs.fleet.pages
        if pages is not None and (len(pages) <= options.n_steps or not agent.sees_plainly(pages)):
            pages = None
        self._pages = pages
        self._is_quick = QuickActor.can_be(agent.policy)
        self._takes_masks = agent.policy.head.takes_masks
        self._quick: QuickActor | None = None
        # always on the CPU: a run may go on on another device with the same noise
        self._generator = torch.Generator().manual_seed(seed)
        count = envs.num_envs
        overlaps = options.overlap
        if overlaps is None:
            overlaps = count >= OVERLAP_FROM and usable_cores() >= OVERLAP_CORES
        bounds = [0, count // 2, count] if overlaps and count > 1 else [0, count]
        self._halves = [slice(*pair) for pair in pairwise(bounds)]
        self._slots = [np.arange(half.start, half.stop) for half in self._halves]
        self._scaler = RewardScaler(count, options.gamma) if options.normalise_rewards else None
        self._returns, self._lengths = np.zeros(count), np.zeros(count, np.int64)
        obs, infos = envs.reset(seed=seed)
        self._obs = agent.look(obs, learns=True)
        self._masks = agent.masks(obs, infos)
        self._states = agent.fresh_states(count)
        self._clock = RolloutClock()
        self._keeper = SlotKeeper(envs)

    @property
    def seconds(self) -> dict[str, float]:
        """What the time of all rollouts went into."""
        return self._clock.seconds

    # ---- to continue exactly where it was --------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that the coming rollouts depend on, except the environments."""
        return {
            "generator": self._generator.get_state(),
            "scaler": self._scaler and self._scaler.state(),
            "returns": self._returns.copy(),
            "lengths": self._lengths.copy(),
            "obs": tuple(leaf.copy() for leaf in self._obs),
            "masks": None if self._masks is None else self._masks.copy(),
            "states": self._states.clone(),
        }

    def slots(self) -> Any:
        """The environments' states, or None with a warning if they cannot be taken."""
        return self._keeper.take()

    def load(self, state: dict[str, Any], slots: Any) -> None:
        """Continue exactly where this state and these slots were taken."""
        self._generator.set_state(state["generator"].cpu())
        if self._scaler is not None:
            self._scaler.load(state["scaler"])
        self._returns, self._lengths = state["returns"].copy(), state["lengths"].copy()
        self._obs = tuple(leaf.copy() for leaf in state["obs"])
        masks = state["masks"]
        if masks is not None and (masks.dtype != np.bool_ or len(masks) != self._envs.num_envs):
            raise ValueError("its masks are no flags for each slot")
        self._masks = None if masks is None else masks.copy()
        self._states = state["states"].to(self._agent.device).clone()
        if slots is None:
            self._begin_anew()
        else:
            try:
                self._envs.restore(slots)
            except SnapshotError as exc:
                self._begin_anew(str(exc))

    def _begin_anew(self, why: str = "the environments were not kept with this state") -> None:
        """New episodes everywhere, by seeds that follow from the state."""
        warnings.warn(
            f"{why}: new episodes begin in all slots",
            RuntimeWarning,
            stacklevel=2,
        )
        agent = self._agent
        drawn = torch.randint(1 << 31, (), generator=self._generator)
        obs, infos = self._envs.reset(seed=int(drawn))
        self._obs = agent.look(obs, learns=True)
        self._masks = agent.masks(obs, infos)
        self._states = agent.fresh_states(self._envs.num_envs)
        self._returns[:], self._lengths[:] = 0.0, 0
        if self._scaler is not None:
            self._scaler.begin_anew()

    # ---- the loop -------------------------------------------------------------------------------

    def collect(self) -> Experience:
        """Step every slot `n_steps` times; the observations are valid until the next call."""
        with self._clock.rollout(self._envs.fleet):
            return self._collected()

    @torch.inference_mode()
    def _collected(self) -> Experience:
        times, slots, head = self._times, self._envs.num_envs, self._agent.policy.head
        noise = head.noise((times, slots), self._generator).to(self._agent.device)
        actions = torch.zeros((times, slots, *head.shape), dtype=head.dtype)
        store = _Store(times, self._obs, actions, self._masks, self._pages)
        self._quick = None
        if self._is_quick and store.masks is None:
            policy, bounds = self._agent.policy, self._agent.bounds
            self._quick = QuickActor(policy, store.obs[0], noise, actions, self._halves, bounds)
        states = self._states.clone()
        if len(self._halves) == 1:
            self._fill(store, noise)
        else:
            self._fill_by_halves(store, noise)
        self._obs = tuple(leaf[times].copy() for leaf in store.obs)
        self._masks = None if store.masks is None else store.masks[times].copy()
        with np.errstate(over="ignore", invalid="ignore"):  # the results are checked
            return self._finished(store, states)

    def _fill(self, store: _Store, noise: Tensor) -> None:
        fleet = self._envs.fleet
        for step in range(self._times):
            wanted = self._choose(store, step, 0, noise)
            begun_s = time.perf_counter()
            batch = fleet.step(wanted, page=store.page_after(step))
            self._clock.fleet_s += time.perf_counter() - begun_s
            self._note(store, step, self._halves[0], batch)

    def _fill_by_halves(self, store: _Store, noise: Tensor) -> None:
        """Act for one half of the slots while the other steps."""
        for index in range(len(self._halves)):
            self._send(store, 0, index, noise)
        for step in range(self._times):
            for index in range(len(self._halves)):
                begun_s = time.perf_counter()
                batch = self._envs.recv(slots=self._slots[index])
                self._clock.fleet_s += time.perf_counter() - begun_s
                self._note(store, step, self._halves[index], batch)
                if step + 1 < self._times:
                    self._send(store, step + 1, index, noise)

    def _send(self, store: _Store, step: int, index: int, noise: Tensor) -> None:
        wanted = self._choose(store, step, index, noise)
        begun_s = time.perf_counter()
        self._envs.fleet.send(wanted, self._slots[index], page=store.page_after(step))
        self._clock.fleet_s += time.perf_counter() - begun_s

    def _choose(self, store: _Store, step: int, index: int, noise: Tensor) -> Any:
        """Actions for one half, as its environments take them."""
        begun_s = time.perf_counter()
        agent, half, wanted = self._agent, self._halves[index], None
        if self._quick is not None and store.masks is None:
            wanted = self._quick.act(step, index)
        else:
            leaves = tuple(agent.tensor(leaf[step, half]) for leaf in store.obs)
            allowed = None if store.masks is None else agent.tensor(store.masks[step, half])
            try:
                said, states = agent.policy.respond(leaves, self._states[half], allowed)
            except RuntimeError:
                seen = tuple(leaf[step, half] for leaf in store.obs)
                agent.inputs.refuse_outside(seen, self._slots[index].tolist())
                raise
            if agent.policy.state_size:
                self._states[half] = states
            store.actions[step, half] = agent.policy.head.sample(said, noise[step, half])
        if wanted is None:
            wanted = agent.fit(store.drawn[step, half])
        self._clock.inference_s += time.perf_counter() - begun_s
        return wanted

    def _note(self, store: _Store, step: int, half: slice, batch: Batch) -> None:
        """Keep what a step of one half brought."""
        store.rewards[step, half] = batch.rewards
        if batch.has_events:
            store.valid[step, half] = batch.valid
            store.terminated[step, half] = batch.terminated
            store.truncated[step, half] = batch.truncated
            self._note_ends(store.finals, step, half, batch)
        if batch.page != store.page_after(step) or not batch.page:
            store.see(step + 1, half, self._agent.look(batch.obs, learns=True))
        if self._takes_masks:  # infos take time to put together
            masks = self._agent.masks(batch.obs, batch.infos)
            if masks is not None:
                store.mask(step + 1, half, masks)

    def _note_ends(self, finals: _Finals, step: int, half: slice, batch: Batch) -> None:
        truncated = np.flatnonzero(batch.truncated)
        if len(truncated):
            leaves = self._agent.look(batch.final_obs)
            finals.leaves.append(tuple(leaf[truncated] for leaf in leaves))
            finals.states.append(self._states[half][truncated])
            finals.places += [(step, half.start + int(row)) for row in truncated]
        if self._agent.policy.state_size:
            ended = torch.from_numpy(batch.terminated | batch.truncated)
            self._states[half][ended] = 0.0

    # ---- afterwards -----------------------------------------------------------------------------

    def _finished(self, store: _Store, states: Tensor) -> Experience:
        check_rewards(store.rewards, store.valid)
        check_obs(store.obs, store.valid)
        begun_s = time.perf_counter()
        ended = store.terminated | store.truncated
        obs = tuple(leaf[:-1] for leaf in store.obs)
        masks = None if store.masks is None else store.masks[:-1]
        actions = store.drawn
        log_probs, values = judged(self._agent, obs, actions, masks, ended, states)
        slots = list(range(self._envs.num_envs))
        last = worth(self._agent, self._obs, self._states, slots)
        finals = np.zeros_like(values)
        kept = store.finals
        if kept.places:
            leaves = tuple(np.concatenate(parts) for parts in zip(*kept.leaves, strict=True))
            check_finals(kept.places, leaves, store.valid)
            slots = [slot for _, slot in kept.places]
            found = worth(self._agent, leaves, torch.cat(kept.states), slots)
            finals[tuple(zip(*kept.places, strict=True))] = found
        self._clock.inference_s += time.perf_counter() - begun_s
        return Experience(
            obs=obs,
            actions=actions,
            masks=masks,
            states=states.cpu().numpy(),
            log_probs=log_probs,
            values=values,
            rewards=self._scaled(store.rewards, ended, store.valid),
            successors=successor_values(values, last, store.terminated, store.truncated, finals),
            ended=ended,
            valid=store.valid,
            episodes=self._episodes(store.rewards, ended, store.valid),
        )

    def _scaled(self, rewards: Array, ended: Flags, valid: Flags) -> Floats:
        if self._scaler is None:
            return rewards.astype(np.float32)
        return np.stack([self._scaler(*rows) for rows in zip(rewards, ended, valid, strict=True)])

    def _episodes(self, rewards: Array, ended: Flags, valid: Flags) -> list[tuple[float, int]]:
        """Returns and lengths of those that ended, in the order in which they did."""
        finished, first = list[tuple[float, int]](), 0
        for step in np.flatnonzero(ended.any(1)).tolist():
            self._returns += rewards[first : step + 1].sum(0)
            self._lengths += valid[first : step + 1].sum(0)
            first = step + 1
            for slot in np.flatnonzero(ended[step]).tolist():
                if valid[step, slot]:  # the episode of a lost environment has no true return
                    finished.append((float(self._returns[slot]), int(self._lengths[slot])))
                self._returns[slot], self._lengths[slot] = 0.0, 0
        self._returns += rewards[first:].sum(0)
        self._lengths += valid[first:].sum(0)
        return finished
