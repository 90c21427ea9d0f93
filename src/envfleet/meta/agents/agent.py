"""An agent: it acts for all slots in one batch, and learns from windows of trials.

What a slot remembers is a row of `AgentState`; noise comes from outside. So an action depends on
its own row only, and, from `MIN_ROWS` rows on, not even in its last bit on how many rows there are
(`rows_are_equal` checks this for the machine at hand).

An update takes T steps of B trials; an agent without memory gets windows of one step. The critics
aim at r_t + gamma (1 - term_t) V(o_{t+1}); the actor is judged by the critics as they were before
this update, and its loss moves nothing but the actor.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from torch import Tensor, nn

from envfleet.errors import ConfigError
from envfleet.meta.agents.acting import MIN_ROWS, ActingNetwork
from envfleet.meta.agents.algorithms import Algorithm, Choice, encoded, make_algorithm
from envfleet.meta.agents.networks import CriticNetwork, Networks, TrialMemory
from envfleet.meta.agents.options import PolicyOptions
from envfleet.meta.buffers import Windows

__all__ = ["MIN_ROWS", "AgentState", "OffPolicyAgent", "make_agent", "rows_are_equal"]

Array = npt.NDArray[np.float32]


@dataclass(slots=True)
class AgentState:
    """What is remembered of each row's trial; the first axis of every array is the row.

    `act` fills in the action. The reward is for the caller to fill in, after the step.
    """

    action: Array
    """The previous action as networks get it: one-hot if actions are discrete."""
    reward: Array
    """The previous reward."""
    hidden: Array
    """What the actor's memory keeps."""

    def __len__(self) -> int:
        return len(self.reward)

    def at(self, rows: Any) -> AgentState:
        """Some rows, as a copy."""
        return AgentState(
            np.array(self.action[rows]), np.array(self.reward[rows]), np.array(self.hidden[rows])
        )

    def put(self, rows: Any, other: AgentState) -> None:
        """Replace some rows by those of another state."""
        self.action[rows], self.reward[rows] = other.action, other.reward
        self.hidden[rows] = other.hidden

    def reset(self, rows: Any) -> None:
        """Remember nothing in these rows: a trial begins."""
        for array in (self.action, self.reward, self.hidden):
            array[rows] = 0


class OffPolicyAgent:
    """Networks, their targets and optimisers, and one of three algorithms."""

    def __init__(
        self,
        options: PolicyOptions,
        obs_dim: int,
        algorithm: Algorithm,
        seed: int,
        device: str = "cpu",
    ) -> None:
        """Use `make_agent`."""
        self.options, self.arch, self.algorithm = options, options.arch, algorithm
        self.obs_dim, self.action_dim = obs_dim, algorithm.action_dim
        self.is_discrete = algorithm.is_discrete
        self.device = torch.device(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = Networks(
                options, obs_dim, algorithm.output_dim, self.action_dim, self.is_discrete
            )
        self.networks = made.to(self.device)
        self.targets = copy.deepcopy(self.networks).requires_grad_(False)
        self._pairs = self._followed()
        self._is_shared = self.networks.is_shared
        groups: tuple[Iterable[Tensor], ...] = (
            (self.networks.parameters(),)
            if self._is_shared
            else (self.networks.of_critic(), self.networks.of_actor())
        )
        self._optimisers = [torch.optim.Adam(one, lr=options.lr, fused=True) for one in groups]
        # apart from the weights' generator, so that the first draws do not repeat them
        self._generator = torch.Generator(self.device).manual_seed(seed ^ 0x5EED)
        self.num_updates = 0
        self._acting: ActingNetwork | None = None  # made when the weights have changed

    # ---- acting ---------------------------------------------------------------------------------

    def noise(self, rng: np.random.Generator, num_steps: int) -> Array:
        """The noise of so many steps of one row, [num_steps, action_dim], for `act`."""
        return self.algorithm.noise(rng, num_steps)

    def initial_state(self, num_rows: int) -> AgentState:
        """What rows remember at the start of a trial: nothing."""
        memory = self.networks.acting_memory
        size = 0 if memory is None else memory.state_size
        return AgentState(
            np.zeros((num_rows, self.action_dim), np.float32),
            np.zeros(num_rows, np.float32),
            np.zeros((num_rows, size), np.float32),
        )

    @torch.inference_mode()
    def act(
        self,
        state: AgentState,
        obs: npt.NDArray[Any],
        noise: npt.NDArray[Any] | None = None,
        deterministic: bool = False,
    ) -> tuple[npt.NDArray[Any], AgentState]:
        """An action for each row, and what the rows remember after it.

        Args:
            state: What they remember, with the rewards of their last steps filled in.
            obs: Their observations, [rows, obs_dim].
            noise: Their rows of `noise`; not needed if deterministic.
            deterministic: Take the best actions.
        """
        num_rows = len(obs)
        if noise is None and not deterministic:
            raise ConfigError("act needs noise (`noise` draws it), or deterministic=True")
        if self._acting is None:
            nets = self.networks
            self._acting = ActingNetwork(nets.actor, nets.acting_memory, self.device)
        acting = self._acting
        said, after = acting(state.action, state.reward, obs, state.hidden)
        given = None if deterministic or noise is None else acting.rows(noise)
        chosen = self.algorithm.act(said, given)[:num_rows]
        actions: npt.NDArray[Any] = chosen.cpu().numpy()
        known: npt.NDArray[Any] = actions
        if self.is_discrete:
            known = np.eye(self.action_dim, dtype=np.float32)[actions]
        hidden = state.hidden if after is None else after[:num_rows].cpu().numpy()
        return actions, AgentState(known.copy(), state.reward.copy(), hidden)

    # ---- learning -------------------------------------------------------------------------------

    def update(self, batch: Windows) -> dict[str, float]:
        """Improve critics and actor by one step each; what there is to log of it."""
        losses, entropy = self.losses(batch)
        of_critics, of_actor = losses["qf1_loss"] + losses["qf2_loss"], losses["policy_loss"]
        of_memories = losses.get("reward_prediction_loss", 0.0) * self.options.reward_prediction
        for optimiser in self._optimisers:
            optimiser.zero_grad()
        loss = of_memories + of_critics * (0.5 if self._is_shared else 1.0) + of_actor
        loss.backward()  # type: ignore[no-untyped-call]
        norms = self._gradient_norms()
        for optimiser in self._optimisers:
            optimiser.step()
        self._follow()
        self.num_updates += 1
        self._acting = None
        figures = {**losses, **norms}
        found = torch.stack([value.detach() for value in figures.values()]).tolist()
        logged = dict(zip(figures, found, strict=True))
        if entropy is not None and self.algorithm.entropy is not None:
            logged["policy_entropy"] = entropy.item()
            self.algorithm.entropy.update(logged["policy_entropy"])
            logged["alpha"] = self.algorithm.entropy.value
        return logged

    def losses(self, batch: Windows) -> tuple[dict[str, Tensor], Tensor | None]:
        """The losses of critics and actor, and the mean entropy of its choices."""
        algorithm, nets, targets = self.algorithm, self.networks, self.targets
        obs, mask = self._tensor(batch.obs), self._tensor(batch.mask)[..., None]
        rewards, terms = (
            self._tensor(batch.rewards)[..., None],
            self._tensor(batch.terms)[..., None],
        )
        taken = self._tensor(batch.actions)
        actions = encoded(taken, self.action_dim, is_discrete=self.is_discrete)
        count = mask.sum().clamp(min=1.0)
        # what was done and given before each observation
        before = _shifted(actions), _shifted(rewards), obs

        def remembered(memory: TrialMemory | None) -> Tensor | None:
            return None if memory is None else memory(*before)

        of_critic = remembered(nets.critic_memory)
        # the shared memory learns what the critics need; the actor takes it as it is
        of_actor = _detached(of_critic) if nets.is_shared else remembered(nets.actor_memory)
        said = nets.actor(of_actor, obs)

        with torch.no_grad():
            next_said = said
            if algorithm.has_target_actor:
                known = of_actor if nets.is_shared else remembered(targets.actor_memory)
                next_said = targets.actor(known, obs)
            choice = algorithm.choose_for_target(next_said[1:], self._draw)
            known = of_critic if nets.is_shared else remembered(targets.critic_memory)
            worth = self._worth(targets.critic, _after_first(known), obs[1:], choice)
            goal = rewards + self.options.gamma * (1 - terms) * worth

        given = None if self.is_discrete else actions
        values = nets.critic(_before_last(of_critic), obs[:-1], given)
        errors = [algorithm.taken(value, actions) - goal for value in values]
        first, second = (((error * mask).square()).sum() / count for error in errors)

        choice = algorithm.choose(said[:-1], self._draw)
        with _frozen(nets.critic):
            worth = self._worth(nets.critic, _before_last(_detached(of_critic)), obs[:-1], choice)
        losses = {
            "qf1_loss": first,
            "qf2_loss": second,
            "policy_loss": -(worth * mask).sum() / count,
        }
        if self.options.reward_prediction and nets.critic_memory is not None:
            memories = [(nets.critic_memory, of_critic), (nets.actor_memory, of_actor)]
            losses["reward_prediction_loss"] = self._prediction_loss(
                memories, torch.cat((obs[:-1], actions, obs[1:]), -1), rewards, mask
            )
        entropies = algorithm.entropies(choice)
        return losses, None if entropies is None else (entropies.detach() * mask).sum() / count

    def _prediction_loss(
        self,
        known: list[tuple[TrialMemory | None, Tensor | None]],
        steps: Tensor,
        rewards: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """How badly memories at each step tell the reward of another step of their window."""
        lengths = mask.sum(0)[:, 0]
        draws = torch.rand(mask.shape[:2], generator=self._generator, device=self.device)
        others, windows = (draws * lengths).long(), torch.arange(len(lengths), device=self.device)
        asked, answers = steps[others, windows], rewards[others, windows]
        loss = torch.zeros((), device=self.device)
        for memory, remembered in known:
            if memory is not None and memory.predictor is not None and remembered is not None:
                told = memory.predictor(torch.cat((remembered[:-1], asked), -1))
                loss = loss + ((told - answers) * mask).square().sum() / mask.sum().clamp(min=1.0)
        return loss

    def _worth(
        self, critic: CriticNetwork, memory: Tensor | None, obs: Tensor, choice: Choice
    ) -> Tensor:
        values = critic(memory, obs, None if self.is_discrete else choice.actions)
        return self.algorithm.values(values[0], values[1], choice)

    def _draw(self, shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device)

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _gradient_norms(self) -> dict[str, Tensor]:
        """The mean length of the gradients of a part's parameters."""
        nets = self.networks
        parts = {"q_grad_norm": nets.of_critic(), "pi_grad_norm": nets.of_actor()}
        memories = {
            "rnn_grad_norm" if nets.is_shared else "q_rnn_grad_norm": nets.critic_memory,
            "pi_rnn_grad_norm": nets.actor_memory,
        }
        for name, memory in memories.items():
            if memory is not None:
                parts[name] = list(memory.recurrence.parameters())
        return {
            name: torch.stack(
                torch._foreach_norm([one.grad for one in part if one.grad is not None])
            ).mean()
            for name, part in parts.items()
        }

    def _followed(self) -> tuple[list[Tensor], list[Tensor]]:
        """Target parameters in use, and those that they follow."""

        def of(networks: Networks) -> list[Tensor]:
            is_used = self.algorithm.has_target_actor
            return networks.of_critic() + (networks.of_actor() if is_used else [])

        return of(self.targets), of(self.networks)

    @torch.no_grad()
    def _follow(self) -> None:
        followers, leaders = self._pairs
        torch._foreach_lerp_(followers, leaders, self.options.tau)

    # ---- acting elsewhere -----------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """What a copy of this agent needs to act as it does now."""
        return {name: value.cpu() for name, value in self.networks.state_dict().items()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Act as the agent that gave these weights; nothing else of it is taken over."""
        self.networks.load_state_dict(weights)
        self._acting = None

    # ---- keeping --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that goes on: networks, targets, optimisers, weight of the entropy, generator."""
        entropy = self.algorithm.entropy
        learned = None if entropy is None or entropy.optimiser is None else entropy
        return {
            "networks": copy.deepcopy(self.networks.state_dict()),
            "targets": copy.deepcopy(self.targets.state_dict()),
            "optimisers": [copy.deepcopy(one.state_dict()) for one in self._optimisers],
            "log_alpha": None if learned is None else learned.log.detach().clone(),
            "alpha_optimiser": None
            if learned is None or learned.optimiser is None
            else copy.deepcopy(learned.optimiser.state_dict()),
            "generator": self._generator.get_state(),
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become the agent that gave this state."""
        self.networks.load_state_dict(state["networks"])
        self.targets.load_state_dict(state["targets"])
        for optimiser, kept in zip(self._optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(kept)
        entropy = self.algorithm.entropy
        if entropy is not None and entropy.optimiser is not None:
            with torch.no_grad():
                entropy.log.copy_(state["log_alpha"])
            entropy.optimiser.load_state_dict(state["alpha_optimiser"])
        self._generator.set_state(state["generator"])
        self.num_updates = state["num_updates"]
        self._acting = None


def _shifted(values: Tensor) -> Tensor:
    return torch.cat((torch.zeros_like(values[:1]), values))


def _detached(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.detach()


def _before_last(values: Tensor | None) -> Tensor | None:
    return None if values is None else values[:-1]


def _after_first(values: Tensor | None) -> Tensor | None:
    return None if values is None else values[1:]


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    """What is computed meanwhile passes gradients on, but not to these parameters."""
    module.requires_grad_(False)
    try:
        yield
    finally:
        module.requires_grad_(True)


def make_agent(
    options: PolicyOptions,
    obs_dim: int,
    action_space: spaces.Space[Any],
    seed: int,
    device: str = "cpu",
) -> OffPolicyAgent:
    """An agent with fresh networks, whose weights follow from `seed` alone.

    Raises:
        ConfigError: The algorithm is not for such actions.
    """
    is_discrete = isinstance(action_space, spaces.Discrete)
    if is_discrete != (options.algo_name == "sacd"):
        fitting = "'sacd'" if is_discrete else "'sac' or 'td3'"
        raise ConfigError(
            f"algo_name={options.algo_name!r} is not for actions of {action_space}; set it to "
            f"{fitting}"
        )
    if isinstance(action_space, spaces.Discrete):
        if action_space.start != 0:
            raise ConfigError(f"discrete actions must start at 0, got {action_space}")
        action_dim = int(action_space.n)
    elif isinstance(action_space, spaces.Box) and len(action_space.shape) == 1:
        action_dim = action_space.shape[0]
    else:
        raise ConfigError(f"actions must be one list of numbers or discrete, got {action_space}")
    algorithm = make_algorithm(options, action_dim, is_discrete=is_discrete)
    return OffPolicyAgent(options, obs_dim, algorithm, seed, device)


def rows_are_equal(agent: OffPolicyAgent, most_rows: int = 64) -> bool:
    """Whether a row's action and memory are the same, bit for bit, for any other rows.

    Batches of up to `most_rows` rows are tried.
    """
    rng = np.random.default_rng(0)

    def random(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32)

    state = agent.initial_state(most_rows)
    for array in (state.action, state.reward, state.hidden):
        array[...] = random(*array.shape)
    obs, noise = random(most_rows, agent.obs_dim), random(most_rows, agent.action_dim)
    actions, after = agent.act(state, obs, noise)
    for count in sorted({*range(1, 10), 15, 16, 17, 31, 32, 33, most_rows - 1}):
        rows = rng.permutation(most_rows)[:count]
        some, kept = agent.act(state.at(rows), obs[rows], noise[rows])
        same = np.array_equal(some, actions[rows]) and np.array_equal(
            kept.hidden, after.hidden[rows]
        )
        if not same:
            return False
    return True
