"""Agents that learn from replayed experience, with and without memory.

options.py      what an agent is: architecture, algorithm, sizes, rates
networks.py     actors, critics, and the memory that goes over a trial
algorithms.py   SAC, discrete SAC and TD3: how actions are drawn, and what critics and actors aim at
agent.py        an agent: acting for all slots in one batch, and updates
"""

from envfleet.meta.agents.options import AGENT_ARCHS, PolicyOptions, policy_options

__all__ = ["AGENT_ARCHS", "PolicyOptions", "policy_options"]
