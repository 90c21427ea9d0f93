"""The options of a run with several agents, beside those of every training run.

They are here, and not in ``multiagent``, because the command line declares them without PettingZoo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from envfleet.learn.train_options import FREE
from envfleet.options import CountOrZero, option_class

Policies = Literal["shared", "per-group"]

AGENT_JOB = "agents"
"""The name of such runs in run.json."""
AGENT_FREE = FREE | {"opening"}
"""Options that may change when a run goes on."""


@option_class
@dataclass(frozen=True, slots=True)
class AgentOptions:
    """How several agents learn, and how they are evaluated."""

    policies: Policies = "shared"
    """Shared: one policy plays all agents, which need the same spaces; per-group: one for each
    group, of the agents whose names differ in the number at their end."""
    opening: CountOrZero = 4
    """Turns at the start of each game of an evaluation that are drawn by the policy's
    probabilities, so that games differ; later moves are the likeliest."""
