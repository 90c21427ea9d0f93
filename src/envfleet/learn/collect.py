"""Experience: segments of all slots, judged by the policy that made them.

Values and log-probabilities are worked out for all rows at once, here, wherever the slots were
stepped; rewards are scaled and episodes counted then too.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from envfleet.errors import SnapshotError
from envfleet.learn.advantages import successor_values
from envfleet.learn.agent import Agent
from envfleet.learn.checks import check_finals, check_obs, check_rewards
from envfleet.learn.inputs import Leaves
from envfleet.learn.judging import judged, worth
from envfleet.learn.normalise import RewardScaler, scaled
from envfleet.learn.options import PPOOptions
from envfleet.learn.segments import Behaviour, Segment, Start, Stepper

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]


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
    staleness: npt.NDArray[np.int64] | None = None
    """By how many updates the policy that stepped each slot was older than this one; None if it was
    this one everywhere."""
    weights: Floats | None = None
    """How much each row counts if an older policy took its action."""

    @property
    def age(self) -> dict[str, float]:
        """Figures about the policies that acted."""
        if self.staleness is None or self.weights is None:
            return {"staleness": 0.0, "staleness_max": 0, "importance_weight": 1.0}
        return {
            "staleness": float(self.staleness.mean()),
            "staleness_max": int(self.staleness.max()),
            "importance_weight": float(self.weights.mean()),
        }


class Collector:
    """Has slots stepped by a policy, and keeps what continues from one rollout to the next."""

    def __init__(self, stepper: Stepper, agent: Agent, options: PPOOptions, *, seed: int) -> None:
        """Reset all slots; after that, they only reset at the ends of episodes."""
        self._stepper, self._agent, self._times = stepper, agent, options.n_steps
        # always on the CPU: a run may go on on another device with the same noise
        self._generator = torch.Generator().manual_seed(seed)
        self._noise = deque[tuple[Tensor, Tensor]]()
        """Of coming segments, each with the state of the generator before it was drawn."""
        count = stepper.num_envs
        self._scaler = RewardScaler(count, options.gamma) if options.normalise_rewards else None
        self._returns, self._lengths = np.zeros(count), np.zeros(count, np.int64)
        self.begins_anew = False
        """Whether new episodes began at the last `load`."""
        self._reset(seed)

    def _reset(self, seed: int) -> None:
        agent = self._agent
        leaves, self._masks = self._stepper.reset(seed)
        self._obs = agent.normalised(leaves, learns=True)
        self._states = agent.fresh_states(self._stepper.num_envs)

    @property
    def seconds(self) -> dict[str, float]:
        """What the time of all rollouts went into."""
        return self._stepper.clock.seconds

    # ---- to continue exactly where it was --------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that the coming rollouts depend on, except the environments."""
        return {
            "generator": self._noise[0][0] if self._noise else self._generator.get_state(),
            "scaler": self._scaler and self._scaler.state(),
            "returns": self._returns.copy(),
            "lengths": self._lengths.copy(),
            "obs": tuple(leaf.copy() for leaf in self._obs),
            "masks": None if self._masks is None else self._masks.copy(),
            "states": self._states.clone(),
        }

    def slots(self) -> Any:
        """The environments' states, or None with a warning if they cannot be taken."""
        return self._stepper.take()

    def load(self, state: dict[str, Any], slots: Any) -> None:
        """Continue exactly where this state and these slots were taken."""
        self.begins_anew = False
        self._generator.set_state(state["generator"].cpu())
        self._noise.clear()
        if self._scaler is not None:
            self._scaler.load(state["scaler"])
        self._returns, self._lengths = state["returns"].copy(), state["lengths"].copy()
        self._obs = tuple(leaf.copy() for leaf in state["obs"])
        masks = state["masks"]
        if masks is not None and (masks.dtype != np.bool_ or len(masks) != self._stepper.num_envs):
            raise ValueError("its masks are no flags for each slot")
        self._masks = None if masks is None else masks.copy()
        self._states = state["states"].to(self._agent.device).clone()
        if slots is None:
            self._begin_anew()
        else:
            try:
                self._stepper.restore(slots)
            except SnapshotError as exc:
                self._begin_anew(str(exc))

    def _begin_anew(self, why: str = "the environments were not kept with this state") -> None:
        """New episodes everywhere, by seeds that follow from the state."""
        warnings.warn(
            f"{why}: new episodes begin in all slots",
            RuntimeWarning,
            stacklevel=2,
        )
        self.begins_anew = True
        drawn = torch.randint(1 << 31, (), generator=self._generator)
        self._reset(int(drawn))
        self._returns[:], self._lengths[:] = 0.0, 0
        if self._scaler is not None:
            self._scaler.begin_anew()

    # ---- the loop -------------------------------------------------------------------------------

    def collect(self) -> Experience:
        """Step every slot `n_steps` times; the observations are valid until the next call."""
        with self._stepper.clock.rollout(self._stepper.fleet):
            return self._collected()

    @torch.inference_mode()
    def _collected(self) -> Experience:
        before, times = self._states, self._times
        noise, *coming = self._drawn()
        segment = self._stepper.collect(Start(self._obs, self._masks, before, noise, tuple(coming)))
        self._obs = tuple(leaf[times].copy() for leaf in segment.obs)
        self._masks = None if segment.masks is None else segment.masks[times].copy()
        self._states = segment.states
        with np.errstate(over="ignore", invalid="ignore"):  # the results are checked
            return self._finished(segment, before)

    def _drawn(self) -> list[Tensor]:
        """The noise of this segment, and of those that may be begun before they are asked for."""
        shape, head = (self._times, self._stepper.num_envs), self._agent.policy.head
        while len(self._noise) <= self._stepper.ahead:
            before = self._generator.get_state()
            noise = head.noise(shape, self._generator).to(self._agent.device)
            self._noise.append((before, noise))
        drawn = [noise for _, noise in self._noise]
        self._noise.popleft()
        return drawn

    # ---- afterwards -----------------------------------------------------------------------------

    def _finished(self, segment: Segment, states: Tensor) -> Experience:
        check_rewards(segment.rewards, segment.valid)
        check_obs(segment.obs, segment.valid)
        begun_s = time.perf_counter()
        ended = segment.terminated | segment.truncated
        obs = tuple(leaf[:-1] for leaf in segment.obs)
        masks = None if segment.masks is None else segment.masks[:-1]
        actions = segment.drawn
        log_probs, values = judged(self._agent, obs, actions, masks, ended, states)
        slots = list(range(self._stepper.num_envs))
        last = worth(self._agent, self._obs, self._states, slots)
        finals = np.zeros_like(values)
        kept = segment.finals
        if kept.places:
            leaves = tuple(np.concatenate(parts) for parts in zip(*kept.leaves, strict=True))
            check_finals(kept.places, leaves, segment.valid)
            slots = [slot for _, slot in kept.places]
            found = worth(self._agent, leaves, torch.cat(kept.states), slots)
            finals[tuple(zip(*kept.places, strict=True))] = found
        self._stepper.clock.inference_s += time.perf_counter() - begun_s
        ends = segment.terminated, segment.truncated
        successors = successor_values(values, last, *ends, finals)
        return Experience(
            obs=obs,
            actions=actions,
            masks=masks,
            states=states.cpu().numpy(),
            log_probs=log_probs,
            values=values,
            rewards=scaled(self._scaler, segment.rewards, ended, segment.valid),
            successors=successors,
            ended=ended,
            valid=segment.valid,
            episodes=self._episodes(segment.rewards, ended, segment.valid),
            staleness=None if segment.behaviour is None else segment.behaviour.staleness,
            weights=_weights(log_probs, segment.behaviour),
        )

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


def _weights(log_probs: Floats, behaviour: Behaviour | None) -> Floats | None:
    """How likely each action is now, against what it was when it was drawn.

    Never more than 1, and exactly that where the policy is the same.
    """
    if behaviour is None:
        return None
    ratio = np.exp(np.minimum(log_probs - behaviour.log_probs, 0))
    return np.where(behaviour.staleness > 0, ratio, np.float32(1))
