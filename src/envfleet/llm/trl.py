"""Text environments for TRL's `GRPOTrainer`.

    with rollout_func(config) as play:
        GRPOTrainer(
            model,
            reward_funcs=env_reward,
            train_dataset=Dataset.from_list(start_prompts(config, 64)),
            rollout_func=play,
            args=GRPOConfig(...),
        ).train()

A prompt of the data set names an environment and a seed, so that all completions of one prompt
begin in the same state, as GRPO wants it. The conversation itself is written by the environment.
Law: completions are the tokens that the model drew and those it was shown between its answers,
never text that was tokenised again; `env_mask` tells which are which.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Self

from envfleet.errors import ConfigError, RolloutFailed
from envfleet.llm.export.rows import token_runs
from envfleet.llm.inference.manager import SharedLLMInferenceManager
from envfleet.llm.inference.transformers_engine import TransformersEngine
from envfleet.llm.inference.types import Engine
from envfleet.llm.play import Play
from envfleet.llm.play_rules import PlayRules, TrajectoryTask, read_rules
from envfleet.llm.seats import EnvSeats
from envfleet.llm.starts import read_start, start_texts
from envfleet.llm.token_prompts import TokenAsk, TokenPrompts
from envfleet.llm.trajectories import Trajectory, TrajectoryTurn

__all__ = ["RolloutFunc", "env_reward", "rollout_func", "start_prompts"]

MakeEngine = Callable[[Any], Engine]
_TOKENS = ("prompt_ids", "completion_ids", "logprobs", "env_mask")
_ABOUT = ("env_reward", "env_success", "env_tag")


def start_prompts(
    config: Any, num_prompts: int, *, mode: str = "train", seed: int | None = None
) -> list[dict[str, str]]:
    """Rows of a data set: which environment each group plays, and from which seed.

    Args:
        config: As for `EnvStateManager`; its tags take turns, as often as `n_groups` says.
        num_prompts: How many rows.
        mode: "train" or "val".
        seed: Of the first row, others follow; by default that of the configuration.
    """
    texts = start_texts(config, num_prompts, mode=mode, seed=seed)
    return [{"prompt": text} for text in texts]


def env_reward(
    completions: Sequence[Any], env_reward: Sequence[float | None], **_: Any
) -> list[float | None]:
    """A reward function for TRL: what the environments gave; None for trajectories that failed."""
    return list(env_reward)


def rollout_func(
    config: Any,
    *,
    mode: str = "train",
    engine: MakeEngine | None = None,
    rewards: Sequence[Any] = (),
) -> RolloutFunc:
    """What `GRPOTrainer(rollout_func=...)` takes.

    Args:
        config: As for `EnvStateManager`. `llm.temperature` must be that of the trainer, and
            `llm.max_tokens` is the most tokens of one answer.
        mode: "train" or "val".
        engine: Makes the engine that answers from the trainer, for each batch anew; it must take
            the tokens of a prompt, and report tokens. By default the trainer's own model answers
            in this process, one conversation at a time, which suits small models.
        rewards: Reward functions of finished trajectories, as for `ParallelRolloutManager`.
    """
    return RolloutFunc(read_rules(config, mode, rewards=rewards), engine or _own_model)


class RolloutFunc:
    """Plays the environments that prompts name with the model that is trained."""

    def __init__(self, rules: PlayRules, engine: MakeEngine) -> None:
        if rules.options.max_context_window != -1:
            raise ConfigError(
                "agent_proxy.max_context_window must be -1 for training: tokens that the model has "
                "seen cannot be taken out of a completion"
            )
        self._rules, self._engine = rules, engine
        self._seats: EnvSeats | None = None
        self._num_seats = 0
        self._num_played = 0
        self.trajectories: list[Trajectory] = []
        """Those of the last batch, to look at."""

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Play one episode for each prompt.

        Returns:
            `prompt_ids`, `completion_ids`, `logprobs` and `env_mask`, and for reward functions
            `env_reward`, `env_success` and `env_tag`.
        """
        wanted = float(trainer.args.temperature)
        if wanted != self._rules.inference.temperature:
            raise ConfigError(
                f"llm.temperature is {self._rules.inference.temperature:g} and the trainer's "
                f"temperature {wanted:g}; a model is trained on what it drew, so set both alike"
            )
        model, was_training = trainer.model, trainer.model.training
        tokenizer = trainer.processing_class
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        try:
            with SharedLLMInferenceManager(
                self._engine(trainer), options=self._rules.inference
            ) as llm:
                self.trajectories = self._play(prompts, trainer, llm, TokenPrompts(tokenizer))
        finally:
            model.train(was_training)
        return _columns(self.trajectories, tokenizer.eos_token_id)

    def _play(
        self,
        prompts: Sequence[Any],
        trainer: Any,
        llm: SharedLLMInferenceManager,
        tokens: TokenPrompts,
    ) -> list[Trajectory]:
        """One trajectory for each prompt; one that fails is played again, if options say so."""
        rules = replace(self._rules, run_seed=int(trainer.args.seed), started_s=time.monotonic())
        tasks = self._tasks(prompts, trainer.accelerator)
        options, played = rules.options, dict[int, Trajectory]()
        for attempt in range(options.max_attempts):
            waiting = _TrlTasks(replace(one, attempt=attempt) for one in tasks)
            ended = _TrlListener()
            Play(
                rules,
                self._seats_for(len(prompts)),
                TokenAsk(tokens, llm.submit),
                ended,
                waiting,
                max_live=len(prompts),
            ).run()
            played |= {one.env_id: one for one in ended.trajectories}
            failed = [one for one in ended.trajectories if one.failure is not None]
            if failed and options.on_failure == "raise":
                raise _trl_failure(failed[0])
            if not failed or options.on_failure == "mask":
                break
            again = {one.env_id for one in failed}
            tasks = [task for task in tasks if task.env_id in again]
        return [played[env_id] for env_id in sorted(played)]

    def _tasks(self, prompts: Sequence[Any], accelerator: Any) -> list[TrajectoryTask]:
        """With numbers that no other process and no other batch has, so that seeds differ."""
        first, step = self._num_played, int(accelerator.num_processes)
        self._num_played += len(prompts)
        groups = {prompt: number for number, prompt in enumerate(dict.fromkeys(map(str, prompts)))}
        found = []
        for place, prompt in enumerate(prompts):
            tag, seed = read_start(prompt, self._rules)
            env_id = (first + place) * step + int(accelerator.process_index)
            found.append(TrajectoryTask(env_id, groups[str(prompt)], tag, seed))
        return found

    def _seats_for(self, number: int) -> EnvSeats:
        """The environments, which last from batch to batch."""
        if self._seats is not None and self._num_seats < number:
            self.close()
        if self._seats is None:
            rules = self._rules
            may_leave = rules.options.use_parallel_rollout
            wish = rules.settings.use_multiprocessing if may_leave else False
            counts = dict.fromkeys(rules.tags, number)
            most = rules.settings.max_workers
            self._seats = EnvSeats(rules.tags, counts, rules.settings, wish, most)
            self._num_seats = number
        else:
            self._seats.refresh()
        return self._seats

    def close(self) -> None:
        """Close the environments; calling it twice changes nothing."""
        if self._seats is not None:
            self._seats.close()
        self._seats = None

    def __enter__(self) -> Self:
        """Use it in a `with` statement."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the environments."""
        self.close()


def _own_model(trainer: Any) -> Engine:
    model = trainer.accelerator.unwrap_model(trainer.model)
    tokenizer = trainer.processing_class
    step = trainer.state.global_step
    return TransformersEngine(
        model,
        getattr(tokenizer, "tokenizer", tokenizer),
        model_version=f"step {step}",
        has_scaled_log_probs=True,  # TRL divides logits by its temperature
    )


class _TrlTasks:
    """A source of tasks that are all there from the beginning."""

    def __init__(self, tasks: Iterable[TrajectoryTask]) -> None:
        self._left = list(tasks)[::-1]

    def next(self) -> TrajectoryTask | None:
        return self._left.pop() if self._left else None

    @property
    def is_over(self) -> bool:
        return not self._left


class _TrlListener:
    """Keeps the trajectories that are over."""

    def __init__(self) -> None:
        self.trajectories: list[Trajectory] = []

    def begun(self, trajectory: Trajectory) -> None:
        pass

    def turned(self, trajectory: Trajectory, turn: TrajectoryTurn) -> None:
        pass

    def ended(self, trajectory: Trajectory) -> None:
        self.trajectories.append(trajectory)


def _trl_failure(one: Trajectory) -> Exception:
    assert one.failure is not None
    about = one.failure.reason, one.failure.error
    return RolloutFailed(one.env_id, one.tag, len(one.turns), *about)


def _columns(trajectories: Sequence[Trajectory], end_id: int) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {name: [] for name in (*_TOKENS, *_ABOUT)}
    for one in trajectories:
        runs = token_runs(one)
        if len(runs) > 1:
            raise ConfigError(
                f"the engine did not continue the tokens of environment {one.env_id}, so its "
                "completion would not be what the model saw; use one that takes prompt ids"
            )
        # one that failed before its first answer still needs a row; the mask keeps it out
        row = (
            (runs[0].prompt_ids, runs[0].completion_ids, runs[0].log_probs, runs[0].mask)
            if runs and runs[0].completion_ids
            else ([end_id], [end_id], [0.0], [0])
        )
        is_fine = one.failure is None
        about = (one.total_reward if is_fine else None, one.is_success, one.tag)
        for name, value in zip(found, (*row, *about), strict=True):
            found[name].append(value)
    return found
