"""The slots of a node: a fleet and a copy of the policy that collect whole segments there.

`NodeFleet` is the worker that `envfleet.runs.nodes` keeps on each node. Law: what comes of a
`SlotTask` follows from the task and the policy alone, so any node may be given it, and twice is as
good as once. The fleet that is kept from task to task only saves the way to where a task begins.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch

from envfleet.adapters.gymnasium import FleetVectorEnv, make_vec
from envfleet.engine import Incident
from envfleet.errors import SnapshotError
from envfleet.learn.agent import Agent
from envfleet.learn.inputs import Leaves
from envfleet.learn.judging import judged
from envfleet.learn.options import PPOOptions
from envfleet.learn.segments import FleetStepper, LastObservations, Segment, Start
from envfleet.learn.torch_setup import threads
from envfleet.learn.train_options import TrainOptions
from envfleet.runs.nodes import Later, Place

__all__ = ["Collected", "Look", "Moment", "NodeFleet", "SlotTask", "Spaces"]

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]
Moment = tuple[int, int]
"""How often the slots were set back, and how many segments they made since."""


@dataclass(frozen=True, slots=True)
class Look:
    """Ask what the environments look like."""


@dataclass(frozen=True, slots=True)
class Spaces:
    """What they look like."""

    observation: gymnasium.Space[Any]
    action: gymnasium.Space[Any]


@dataclass(frozen=True, slots=True)
class SlotTask:
    """Bring some slots to where a segment begins, and step them through it."""

    first: int
    last: int
    """The slots, as a half-open range."""
    moment: Moment
    """Where the segment begins: a fleet that was left there is there already."""
    moment_after: Moment
    """Where it ends."""
    way: Sequence[int] | Later
    """How else to get there: the seeds of resets, or the states of the environments."""
    start: Start | None
    """What the segment begins with; None resets only."""
    judges: bool = False
    """Whether to say how likely its actions were: another policy is going to learn from them."""

    @property
    def slots(self) -> slice:
        """Where they are among all slots."""
        return slice(self.first, self.last)


@dataclass(frozen=True, slots=True)
class Collected:
    """What came of a task."""

    obs: Leaves
    """After each step, as the environments gave them; after the reset, if that was all."""
    masks: Flags | None
    actions: Array
    rewards: Array
    terminated: Flags
    truncated: Flags
    valid: Flags
    finals: LastObservations
    states: torch.Tensor | None
    slots: tuple[Any, ...] | None
    """The states of the environments afterwards; None if they cannot be taken."""
    warnings: tuple[str, ...]
    incidents: tuple[Incident, ...]
    seconds: dict[str, float]
    """What the time went into on the node."""
    log_probs: npt.NDArray[np.float32] | None = None
    """Of the actions, if that was asked for."""


class NodeFleet:
    """One fleet and one policy on one node."""

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        options: TrainOptions,
        ppo: PPOOptions,
        place: Place,
    ) -> None:
        """Nothing is opened before the first task.

        Args:
            env_fns: One function per slot of the whole run.
            options: Of the run.
            ppo: How its policy is built, and how long segments are.
            place: Where this is.
        """
        self._env_fns, self._options, self._ppo, self._place = env_fns, options, ppo, place
        self._envs: FleetVectorEnv | None = None
        self._agent: Agent | None = None
        self._stepper: FleetStepper | None = None
        self._at: tuple[int, int, Moment] | None = None
        """First and last slot of the fleet, and the moment at which it was left."""
        self._version: Moment | None = None
        self._seen_incidents = 0

    def __call__(self, task: Look | SlotTask, shared: Any) -> Spaces | Collected:
        """Do one task; `shared` is a version and the state of the agent."""
        if isinstance(task, Look):
            env = self._env_fns[0]()
            try:
                return Spaces(env.observation_space, env.action_space)
            finally:
                env.close()
        with threads(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", RuntimeWarning)
            try:
                collected = self._reset(task) if task.start is None else self._collect(task, shared)
            except BaseException:
                self._at = None  # the fleet is somewhere in between
                raise
        texts = (str(one.message) for one in said if issubclass(one.category, RuntimeWarning))
        return replace(collected, warnings=tuple(texts))

    def close(self) -> None:
        """Close the fleet."""
        if self._envs is not None:
            self._envs.close()
            self._envs = None

    def _opened(self, task: SlotTask) -> FleetStepper:
        """A fleet of as many slots, wherever it is."""
        count = task.last - task.first
        if self._at is not None and self._at[:2] == (task.first, task.last):
            assert self._stepper is not None
            return self._stepper
        self.close()
        self._at, self._seen_incidents = None, 0
        options, workers = self._options, min(self._place.cores, count)
        backend, num_workers = options.backend, options.num_workers
        if backend == "auto":
            backend = "process" if workers > 1 or options.has_deadlines else "serial"
            num_workers = num_workers or (workers if backend == "process" else None)
        self._envs = envs = make_vec(
            list(self._env_fns[task.slots]),
            backend=backend,
            num_workers=None if num_workers is None else min(num_workers, count),
            **options.fleet,
            autoreset="same_step",
            rollout_steps=0 if self._ppo.normalise_obs else self._ppo.n_steps,
            rollout_floats="float32",
        )
        if self._agent is None:
            spaces = envs.single_observation_space, envs.single_action_space
            self._agent = Agent(*spaces, self._ppo, torch.device("cpu"), 0)
        self._stepper = FleetStepper(envs, self._agent, self._ppo, learns=False)
        return self._stepper

    def _reset(self, task: SlotTask) -> Collected:
        stepper = self._opened(task)
        assert not isinstance(task.way, Later)
        obs, masks = stepper.reset(list(task.way))
        obs = tuple(leaf.copy() for leaf in obs)
        slots = self._left(task, stepper)
        none, flags = np.zeros((0, 0)), np.zeros((0, 0), np.bool_)
        parts = (none, none, flags, flags, flags, LastObservations(), None)
        return Collected(obs, masks, *parts, slots, (), self._incidents(task), {})

    def _collect(self, task: SlotTask, shared: Any) -> Collected:
        start, at = task.start, self._at
        assert start is not None
        stepper = self._opened(task)
        assert self._agent is not None
        if at != (task.first, task.last, task.moment):
            slots = task.way.get() if isinstance(task.way, Later) else None
            if slots is None:
                raise SnapshotError(
                    "slots cannot be moved to another node: the states of these environments "
                    "cannot be taken. Train with --collect here"
                )
            stepper.restore(slots)
        version, agent = shared
        if version != self._version:
            self._agent.load(agent)
            self._version = version
        with stepper.clock.rollout(stepper.fleet):
            before = dict(stepper.clock.seconds)
            segment = stepper.collect(start)
        seconds = {name: now - before[name] for name, now in stepper.clock.seconds.items()}
        obs = tuple(leaf[1:] for leaf in segment.obs) if stepper.raw is None else stepper.raw
        log_probs = self._log_probs(segment, start) if task.judges else None
        slots = self._left(task, stepper)
        return Collected(
            obs=obs,
            masks=segment.masks,
            actions=segment.drawn,
            rewards=segment.rewards,
            terminated=segment.terminated,
            truncated=segment.truncated,
            valid=segment.valid,
            finals=segment.finals,
            states=segment.states if self._agent.policy.state_size else None,
            slots=slots,
            warnings=(),
            incidents=self._incidents(task),
            seconds=seconds,
            log_probs=log_probs,
        )

    @torch.inference_mode()
    def _log_probs(self, segment: Segment, start: Start) -> Any:
        """How likely this policy was to take the actions that it took."""
        assert self._agent is not None
        obs = tuple(leaf[:-1] for leaf in segment.obs)
        masks = None if segment.masks is None else segment.masks[:-1]
        ended = segment.terminated | segment.truncated
        return judged(self._agent, obs, segment.drawn, masks, ended, start.states)[0]

    def _left(self, task: SlotTask, stepper: FleetStepper) -> Any:
        """The states of the environments, and a note of where they are."""
        slots = stepper.take()
        self._at = task.first, task.last, task.moment_after
        return slots

    def _incidents(self, task: SlotTask) -> tuple[Incident, ...]:
        """New failures, by the slots of the run."""
        assert self._envs is not None
        new = self._envs.incidents[self._seen_incidents :]
        self._seen_incidents += len(new)
        first = task.first
        return tuple(
            replace(one, slot=one.slot + first, slots=tuple(slot + first for slot in one.slots))
            for one in new
        )
