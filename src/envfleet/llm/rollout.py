"""A rollout: everybody is answered, turn by turn, until all episodes are over or time is up.

    reset ─► policy ─► parse ─► step ─┬─► ... up to max_turn times ─► caches and what they sum up to
               ▲──── those that go on ┘

The policy answers all live environments of a turn at once; whether chance or a model is behind it
makes no difference here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from envfleet.errors import ActionError
from envfleet.llm.entries import Cache
from envfleet.llm.parsing import parse_response
from envfleet.llm.policies import Policy
from envfleet.llm.settings import AgentProxy


class Stage(Protocol):
    """What a rollout needs of an `EnvStateManager`."""

    def reset(self, seed: int | None = None) -> list[Cache]:
        """Begin everybody's episode."""
        ...

    def step(self, all_env_inputs: Sequence[Mapping[str, Any]]) -> list[Cache]:
        """Play a turn; the caches of those that go on."""
        ...

    def get_rollout_states(self) -> list[Cache]:
        """All caches, with their metrics."""
        ...


@dataclass(frozen=True, slots=True)
class TagSummary:
    """What became of the environments of one tag, in the mean."""

    tag: str
    num_envs: int
    success: float
    reward: float
    """Of all turns of an episode together, without the penalty."""
    penalty: float
    num_actions: float
    num_turns: float
    num_failures: int
    """Environments that failed, of all of them: no mean."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A finished rollout."""

    caches: list[Cache]
    num_turns: int
    """How many times the policy was asked."""
    tags: tuple[TagSummary, ...]
    metrics: dict[str, float]
    """Every metric of the caches, per environment of its tag."""


def play(
    stage: Stage,
    policy: Policy,
    proxy: AgentProxy,
    *,
    seed: int | None = None,
    on_turn: Callable[[int, int], None] | None = None,
) -> Rollout:
    """Play one rollout.

    Args:
        stage: Usually an `EnvStateManager`.
        policy: Who answers.
        proxy: How answers are read, and how many turns there are.
        seed: Of the first group; the manager's next one unless given.
        on_turn: Called after each turn with its number, from 1, and how many go on.
    """
    live = [cache for cache in stage.reset(seed) if "failure" not in cache]
    num_turns = 0
    while live and num_turns < proxy.max_turn:
        live = stage.step(env_inputs(live, policy(live), proxy))
        num_turns += 1
        if on_turn is not None:
            on_turn(num_turns, len(live))
    caches = stage.get_rollout_states()
    return Rollout(caches, num_turns, tuple(summaries(caches)), mean_metrics(caches))


def env_inputs(
    caches: Sequence[Cache], responses: Iterable[str], proxy: AgentProxy
) -> list[dict[str, Any]]:
    """What `step` is given for these responses."""
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
    return [_env_input(one, said, proxy) for one, said in zip(caches, responses, strict=True)]


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


# ---- what caches sum up to ----------------------------------------------------------------------


def summaries(caches: Sequence[Cache]) -> Iterator[TagSummary]:
    """One per tag, in the order in which tags first appear."""
    by_tag: dict[str, list[Cache]] = {}
    for cache in caches:
        by_tag.setdefault(cache["tag"], []).append(cache)
    for tag, alike in by_tag.items():
        yield TagSummary(
            tag,
            len(alike),
            success=_mean(cache["metrics"][f"{tag}/success"] for cache in alike),
            reward=_mean(
                sum(turn.get("reward", 0.0) for turn in cache["history"]) for cache in alike
            ),
            penalty=_mean(cache["penalty"] for cache in alike),
            num_actions=_mean(cache["metrics"][f"{tag}/num_actions"] for cache in alike),
            num_turns=_mean(len(cache["history"]) - 1 for cache in alike),
            num_failures=sum("failure" in cache for cache in alike),
        )


def mean_metrics(caches: Sequence[Cache]) -> dict[str, float]:
    """Every metric, divided by how many environments of its tag there are.

    Who has not got it counts as zero, as an environment that was never asked would.
    """
    sums: dict[str, float] = {}
    num_envs: dict[str, int] = {}
    tag_of: dict[str, str] = {}
    for cache in caches:
        num_envs[cache["tag"]] = num_envs.get(cache["tag"], 0) + 1
        for key, value in cache["metrics"].items():
            sums[key] = sums.get(key, 0.0) + value
            tag_of[key] = cache["tag"]
    return {key: total / num_envs[tag_of[key]] for key, total in sums.items()}


def _mean(values: Iterator[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
