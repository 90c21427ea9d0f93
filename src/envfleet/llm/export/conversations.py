"""Trajectories as conversations, and as the caches of `EnvStateManager`. Pure."""

from __future__ import annotations

from typing import Any

from envfleet.llm.inference.types import Message
from envfleet.llm.manager_types import Cache
from envfleet.llm.trajectories import Trajectory


def messages_of(trajectory: Trajectory) -> list[Message]:
    """The whole conversation, with each answer as it was kept."""
    return [
        message
        for turn in trajectory.turns
        for message in (*turn.new_messages, Message("assistant", turn.llm_response))
    ]


def chat_row(trajectory: Trajectory) -> dict[str, Any]:
    """A conversation in the form of OpenAI's chat files, with what is known of it as metadata."""
    failure = trajectory.failure
    return {
        "custom_id": f"env{trajectory.env_id}-attempt{trajectory.attempt}",
        "messages": [{"role": one.role, "content": one.content} for one in messages_of(trajectory)],
        "metadata": {
            "tag": trajectory.tag,
            "group_id": trajectory.group_id,
            "env_id": trajectory.env_id,
            "seed": trajectory.seed,
            "reward": trajectory.reward,
            "penalty": trajectory.penalty,
            "total_reward": trajectory.total_reward,
            "success": trajectory.is_success,
            "masked": trajectory.is_masked,
            "failure": None if failure is None else failure.reason,
        },
    }


def ragen_cache(trajectory: Trajectory) -> Cache:
    """A cache as `EnvStateManager.get_rollout_states` gives it; images are names of files."""
    history: list[dict[str, Any]] = []
    actions_left = 0
    for turn in trajectory.turns:
        history.append(
            {
                "state": turn.state,
                **({"images": list(turn.images)} if turn.images else {}),
                "actions_left": turn.actions_left,
                "actions": list(turn.actions),
                "reward": turn.reward,
                "info": dict(turn.info),
                "llm_response": turn.llm_response,
                "llm_raw_response": turn.prefill + turn.generation.text,
            }
        )
        actions_left = turn.actions_left - len(turn.actions)
    if trajectory.final_state is not None:
        history.append({"state": trajectory.final_state, "actions_left": actions_left})
    cache: Cache = {
        "env_id": trajectory.env_id,
        "history": history,
        "group_id": trajectory.group_id,
        "tag": trajectory.tag,
        "penalty": trajectory.penalty,
        "metrics": dict(trajectory.metrics),
    }
    if trajectory.failure is not None:
        cache["failure"] = {
            "doing": trajectory.failure.reason,
            "error": trajectory.failure.error,
            "turn": len(trajectory.turns),
        }
    return cache
