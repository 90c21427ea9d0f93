"""A rollout: a policy answers every environment, turn by turn, until all episodes are over.

    reset ─► policy ─► parse ─► step ─┬─► ... up to max_turn times ─► caches and their metrics
               ▲──── those that go on ┘

The policy answers all environments of a turn in one call; it may be a model or random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from envfleet.errors import ActionError
from envfleet.llm.manager_types import Cache
from envfleet.llm.metrics import TagSummary, mean_metrics, tag_summaries
from envfleet.llm.parsing import parse_response
from envfleet.llm.policies import Policy
from envfleet.llm.settings import AgentProxy


class ManagerLike(Protocol):
    """What a rollout needs of an `EnvStateManager`."""

    def reset(self, seed: int | None = None) -> list[Cache]:
        """Begin an episode in every environment."""
        ...

    def step(self, all_env_inputs: Sequence[Mapping[str, Any]]) -> list[Cache]:
        """Play a turn; the caches of the environments that go on."""
        ...

    def get_rollout_states(self) -> list[Cache]:
        """All caches, with their metrics."""
        ...


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """A finished rollout."""

    caches: list[Cache]
    num_turns: int
    """How many times the policy was asked."""
    tags: tuple[TagSummary, ...]
    metrics: dict[str, float]
    """The mean of every metric over the environments of its tag."""


def play_rollout(
    manager: ManagerLike,
    policy: Policy,
    proxy: AgentProxy,
    *,
    seed: int | None = None,
    on_turn: Callable[[int, int], None] | None = None,
) -> RolloutResult:
    """Play one rollout.

    Args:
        manager: Usually an `EnvStateManager`.
        policy: Gives the responses.
        proxy: How responses are parsed, and how many turns there are.
        seed: Of the first group; by default the manager's next one.
        on_turn: Called after each turn with its number, from 1, and how many environments go on.
    """
    live = [cache for cache in manager.reset(seed) if "failure" not in cache]
    num_turns = 0
    while live and num_turns < proxy.max_turn:
        live = manager.step(env_inputs(live, policy(live), proxy))
        num_turns += 1
        if on_turn is not None:
            on_turn(num_turns, len(live))
    caches = manager.get_rollout_states()
    return RolloutResult(caches, num_turns, tuple(tag_summaries(caches)), mean_metrics(caches))


def env_inputs(
    caches: Sequence[Cache], responses: Iterable[str], proxy: AgentProxy
) -> list[dict[str, Any]]:
    """The argument of `step` for these responses."""
    if isinstance(responses, str) or not isinstance(responses, Iterable):
        raise ActionError(
            "the policy must give a list with a response for each environment, "
            f"got {responses!r:.60}"
        )
    responses = list(responses)
    if len(responses) != len(caches):
        raise ActionError(
            f"the policy was asked about {len(caches)} environments and gave {len(responses)} "
            "responses; it has to give one for each, in their order"
        )
    return [_env_input(*pair, proxy) for pair in zip(caches, responses, strict=True)]


def _env_input(cache: Cache, response: Any, proxy: AgentProxy) -> dict[str, Any]:
    if not isinstance(response, str):
        raise ActionError(
            f"the policy's response to environment {cache['env_id']} must be text, "
            f"got {response!r:.60}"
        )
    parsed = parse_response(
        response,
        action_sep=proxy.action_sep,
        max_actions=proxy.max_actions_per_turn,
        enable_think=proxy.enable_think,
    )
    return {
        "env_id": cache["env_id"],
        "llm_response": parsed.llm_response,
        "llm_raw_response": response,
        "actions": list(parsed.actions),
    }
