"""What all trajectories of a rollout have in common, as data that can be sent to a worker."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from envfleet.llm.config import plain_config
from envfleet.llm.export import as_json
from envfleet.llm.extras import import_extra
from envfleet.llm.inference.options import InferenceOptions, read_options
from envfleet.llm.inference.types import GenerateRequest, Message, request_seed
from envfleet.llm.metrics import numbers_per_turn
from envfleet.llm.prompts import (
    TagPrompt,
    WritePrompt,
    format_grammar,
    prefill_of,
    tag_prompt,
    write_messages,
)
from envfleet.llm.rollout_options import (
    RewardFunction,
    RolloutOptions,
    load_function,
    read_rollout_options,
)
from envfleet.llm.settings import AgentProxy, Settings, Tag, read_agent_proxy, read_settings
from envfleet.llm.trajectories import Trajectory, TrajectoryFailure, TrajectoryTurn

IMAGES = "images"


@dataclass(frozen=True, slots=True)
class TrajectoryTask:
    """A trajectory to be played, or to be taken up where it stopped."""

    env_id: int
    group_id: int
    tag: str
    seed: int
    attempt: int = 0
    known: tuple[TrajectoryTurn, ...] = ()
    """Turns that have been played before."""
    is_begun: bool = False
    """Whether its begin has been noted."""

    def new_trajectory(self) -> Trajectory:
        """The trajectory before its first turn."""
        return Trajectory(
            env_id=self.env_id,
            group_id=self.group_id,
            tag=self.tag,
            seed=self.seed,
            attempt=self.attempt,
        )


@dataclass(frozen=True, slots=True)
class PlayRules:
    """How trajectories are played."""

    tags: Mapping[str, Tag]
    prompts: Mapping[str, TagPrompt]
    grammars: Mapping[str, str]
    proxy: AgentProxy
    options: RolloutOptions
    inference: InferenceOptions
    settings: Settings
    write: WritePrompt
    rewards: Mapping[str, RewardFunction]
    run_seed: int = 0
    started_s: float = 0.0
    """When the rollout began, by the monotonic clock that all processes share."""
    keep_image: Callable[[str, bytes], None] | None = None
    """Gets each image that the model saw, with its name in the run's folder."""
    prefill: str = field(default="")
    continues_tokens: bool = False
    """Whether the engine takes a conversation as tokens that only grow."""

    @property
    def mode(self) -> str:
        """Whether it is training or validation."""
        return self.settings.mode

    @property
    def format_penalty(self) -> float:
        """For an answer that does not name known actions only; never above zero."""
        return self.settings.format_penalty

    def request(
        self,
        trajectory: Trajectory,
        messages: tuple[Message, ...],
        so_far: tuple[int, ...] | None,
        timeout_s: float | None,
    ) -> GenerateRequest:
        """What the model is asked in the next turn of a trajectory."""
        number, env_id, attempt = len(trajectory.turns), trajectory.env_id, trajectory.attempt
        seed = request_seed(self.run_seed, env_id, number, attempt)
        return GenerateRequest(
            request_id=f"{env_id}.{attempt}.{number}",
            messages=messages,
            so_far=so_far,
            prefill=self.prefill,
            sampling=self.inference.sampling(seed, grammar=self.grammars[trajectory.tag]),
            timeout_s=timeout_s,
        )

    @staticmethod
    def plain(value: Any) -> Any:
        """The value as a journal gives it back, so that resuming makes no difference."""
        found = as_json(value)
        return tuple(found) if isinstance(value, list) else found

    def judge(self, trajectory: Trajectory) -> None:
        """Work out the metrics and the extra rewards of a trajectory that is over."""
        turns, tag = trajectory.turns, trajectory.tag
        numbers = numbers_per_turn({"info": turn.info} for turn in turns)
        found = {
            "success": float(trajectory.is_success),
            "num_actions": float(sum(len(turn.actions) for turn in turns)),
            **{key: sum(values) / len(turns) for key, values in numbers.items()},
        }
        trajectory.metrics = {f"{tag}/{key}": value for key, value in found.items()}
        for name, function in self.rewards.items():
            try:
                reward = float(function(trajectory))
                if not math.isfinite(reward):
                    raise ValueError(f"it gave {reward}, which is no finite number")
                trajectory.extra_rewards[name] = reward
            except Exception as exc:  # the user's own function
                error = f"the reward function {name} failed: {type(exc).__name__}: {exc}"
                failure = TrajectoryFailure(reason="env", error=error)
                trajectory.failure = trajectory.failure or failure


def read_rules(
    config: Any, mode: str, *, write: WritePrompt | None = None, rewards: Sequence[Any] = ()
) -> PlayRules:
    """Read the rules of rollouts from a configuration.

    Args:
        config: As for `EnvStateManager`.
        mode: "train" or "val".
        write: Writes the messages, in place of the one that the configuration names.
        rewards: Reward functions, besides those that the configuration names.
    """
    whole = plain_config(config)
    settings, proxy = read_settings(whole, mode), read_agent_proxy(whole)
    options, inference = read_rollout_options(whole), read_options(whole)
    tags = {tag.name: tag for tag, _ in settings.groups}
    about = whole["custom_envs"]
    prompts = {name: tag_prompt(tag, about[name], proxy) for name, tag in tags.items()}
    if write is None:
        write = write_messages
        if options.prompt is not None:
            write = load_function(options.prompt, "prompt")
    named = {one: load_function(one, "reward_functions") for one in options.reward_functions}
    named |= {_name_of(one): one for one in rewards}
    return PlayRules(
        tags=tags,
        prompts=prompts,
        grammars={name: format_grammar(one, proxy) for name, one in prompts.items()},
        proxy=proxy,
        options=options,
        inference=inference,
        settings=settings,
        write=write,
        rewards=named,
        prefill=prefill_of(proxy),
    )


def _name_of(function: Any) -> str:
    inner = function.func if isinstance(function, partial) else function
    return str(getattr(inner, "__qualname__", type(inner).__name__))


def write_image(folder: Path, name: str, data: bytes) -> None:
    """Keep an image in the folder of a run."""
    (folder / IMAGES).mkdir(exist_ok=True)
    (folder / name).write_bytes(data)


def save_images(rules: PlayRules, trajectory: Trajectory, state: Sequence[Any]) -> tuple[str, ...]:
    """Keep the images of a state, if there is a folder for them; their names."""
    if rules.keep_image is None:
        return ()
    image = import_extra("PIL.Image", wanted_by="an image as a state", install="pip install pillow")
    names = []
    turn = f"{trajectory.env_id}-{trajectory.attempt}-{len(trajectory.turns)}"
    for number, pixels in enumerate(state):
        names.append(f"{IMAGES}/{turn}-{number}.png")
        data = io.BytesIO()
        image.fromarray(pixels).save(data, "PNG")
        rules.keep_image(names[-1], data.getvalue())
    return tuple(names)
