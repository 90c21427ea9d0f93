"""The options of a run with several agents, beside those of every training run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from envfleet.learn.train_options import FREE
from envfleet.options import Count, CountOrZero, option_class

Policies = Literal["shared", "per-group"]

AGENT_FREE = FREE | {"eval_games", "opening"}
"""Options that may change when a run goes on."""


@option_class
@dataclass(frozen=True, slots=True)
class AgentOptions:
    """How several agents learn, and how they are evaluated."""

    policies: Policies = "shared"
    """Shared: one policy plays all agents, which need the same spaces; per-group: one for each
    group, of the agents whose names differ in the number at their end."""
    eval_games: Count = 100
    """Games of an evaluation against each opponent, where agents act in turn; others play
    `eval_episodes` by themselves."""
    opening: CountOrZero = 4
    """Turns at the start of each of these games that are drawn by the policy's probabilities, so
    that games differ; later moves are the likeliest."""
