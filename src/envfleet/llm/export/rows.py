"""Trajectories as rows of tokens for trainers. Pure.

    turn 0   prompt ids, answer ids
    turn 1   prompt ids = those of turn 0 + its answer + what the environment said;  answer ids
             └─ one row: the first prompt, then everything after it, with a mask of answer tokens

Law: a row is put together from ids that the engine reported. Where the prompt of a turn does not
begin with all tokens so far (a chat template that drops earlier thoughts, a context window), the
turn begins a row of its own, so that every token of a row was seen exactly as it stands there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envfleet.errors import ConfigError
from envfleet.llm.export.advantages import Normalisation, advantages_of
from envfleet.llm.trajectories import Trajectory, TrajectoryTurn


@dataclass(slots=True, kw_only=True)
class TokenRun:
    """Consecutive turns whose tokens follow on from each other."""

    first_turn: int
    num_turns: int
    prompt_ids: list[int]
    """Of the first turn."""
    completion_ids: list[int]
    """All that follows: answers, and what the environment said between them."""
    mask: list[int]
    """1 for each token of `completion_ids` that the model drew, else 0."""
    log_probs: list[float]
    """Of each token of `completion_ids`; 0 where the mask is 0."""
    model_version: str
    """Of the model that gave the first answer."""


def token_runs(trajectory: Trajectory, *, leaves_out: bool = False) -> list[TokenRun]:
    """The turns of a trajectory as few runs of tokens as can be; one, if templates only append.

    Args:
        trajectory: Of an engine that reports tokens.
        leaves_out: Leave out turns whose answers the engine could not report.

    Raises:
        ConfigError: The engine did not report tokens or log-probabilities.
    """
    runs: list[TokenRun] = []
    for turn in trajectory.turns:
        if leaves_out and turn.generation.token_ids is None:
            continue
        prompt, answer, log_probs = _tokens_of(trajectory, turn)
        run = runs[-1] if runs else None
        new = _continuation(run, prompt) if run is not None else None
        if run is None or new is None:
            run = TokenRun(
                first_turn=turn.number,
                num_turns=0,
                prompt_ids=list(prompt),
                completion_ids=[],
                mask=[],
                log_probs=[],
                model_version=turn.generation.model_version,
            )
            runs.append(run)
            new = ()
        run.num_turns += 1
        run.completion_ids += [*new, *answer]
        run.mask += [0] * len(new) + [1] * len(answer)
        run.log_probs += [0.0] * len(new) + list(log_probs)
    return runs


def training_rows(
    trajectories: Sequence[Trajectory], advantage: Normalisation = "mean_std"
) -> list[dict[str, Any]]:
    """One row per run of tokens, of all trajectories that are over and not masked.

    `input_ids`, `completion_mask` and `old_log_probs` are of one length; mask and log-probabilities
    are 0 for tokens that the model did not draw. Rows of one trajectory have its advantage. A turn
    whose answer has no tokens is left out, if the engine reported those of others.
    """
    tells = any(turn.generation.token_ids is not None for one in trajectories for turn in one.turns)
    return [
        {
            "input_ids": [*run.prompt_ids, *run.completion_ids],
            "completion_mask": [0] * len(run.prompt_ids) + run.mask,
            "old_log_probs": [0.0] * len(run.prompt_ids) + run.log_probs,
            "advantage": value,
            "model_version": run.model_version,
            "group_id": one.group_id,
            "env_id": one.env_id,
            "attempt": one.attempt,
            "tag": one.tag,
            "first_turn": run.first_turn,
            "num_turns": run.num_turns,
            "reward": one.total_reward,
        }
        for one, value in zip(trajectories, advantages_of(trajectories, advantage), strict=True)
        if value is not None
        for run in token_runs(one, leaves_out=tells)
    ]


def _continuation(run: TokenRun, prompt: Sequence[int]) -> Sequence[int] | None:
    """What a prompt adds to the tokens so far; None if it does not begin with them."""
    ends = len(run.prompt_ids), len(run.prompt_ids) + len(run.completion_ids)
    follows = (
        list(prompt[: ends[0]]) == run.prompt_ids
        and list(prompt[ends[0] : ends[1]]) == run.completion_ids
    )
    return prompt[ends[1] :] if follows else None


def _tokens_of(
    trajectory: Trajectory, turn: TrajectoryTurn
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    said = turn.generation
    given = {
        "ids of the prompt": said.prompt_ids,
        "ids of the answer": said.token_ids,
        "log-probabilities": said.log_probs,
    }
    missing = [name for name, value in given.items() if value is None]
    where = f"turn {turn.number} of environment {trajectory.env_id}"
    if said.prompt_ids is None or said.token_ids is None or said.log_probs is None:
        raise ConfigError(
            f"{where} has no {' and no '.join(missing)}: the engine did not report them, and text "
            "is never tokenised again; play the rollout with an engine that reports tokens, or "
            "take the form openai or ragen"
        )
    if len(said.token_ids) != len(said.log_probs):
        raise ConfigError(
            f"{where} has {len(said.token_ids)} tokens and {len(said.log_probs)} "
            "log-probabilities; the engine has to report one for each"
        )
    return said.prompt_ids, said.token_ids, said.log_probs
