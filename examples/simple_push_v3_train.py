"""Train two opponents of MPE's simple_push, each with a policy of its own (advantage actor-critic).

    python examples/simple_push_v3_train.py [--steps 200000] [--num-envs 16]

Needs `pip install '.[train,multiagent]'`. The environments run in parallel; observations, rewards
and actions are dicts of agent to batch.
"""

import argparse

from mpe2 import simple_push_v3

from envfleet.multiagent import AsyncPettingZooVecEnv

ROLLOUT, DISCOUNT = 25, 0.95


def learner(space, actions):
    import torch
    from torch import nn

    def network(outputs):
        return nn.Sequential(nn.Linear(space.shape[0], 64), nn.Tanh(), nn.Linear(64, outputs))

    actor, critic = network(actions.n), network(1)
    parameters = [*actor.parameters(), *critic.parameters()]
    return actor, critic, torch.optim.Adam(parameters, lr=1e-3)


def main(steps, num_envs):
    import torch
    from torch.distributions import Categorical

    torch.set_num_threads(1)  # on networks as small as these, threads wait for each other
    torch.manual_seed(0)
    envs = AsyncPettingZooVecEnv([simple_push_v3.parallel_env] * num_envs)
    spaces = {name: envs.single_observation_space(name) for name in envs.agents}
    learners = {name: learner(spaces[name], envs.single_action_space(name)) for name in envs.agents}
    obs, _ = envs.reset(seed=0)
    for number in range(0, steps, ROLLOUT * num_envs):
        rollout: dict = {name: [] for name in envs.agents}
        for _ in range(ROLLOUT):
            seen = {name: torch.as_tensor(obs[name], dtype=torch.float32) for name in envs.agents}
            chosen = {name: Categorical(logits=learners[name][0](seen[name])) for name in seen}
            actions = {name: choice.sample() for name, choice in chosen.items()}
            obs, rewards, terminated, truncated, _ = envs.step(
                {name: action.numpy() for name, action in actions.items()}
            )
            for name, choice in chosen.items():
                ended = torch.as_tensor(terminated[name] | truncated[name])
                reward = torch.as_tensor(rewards[name], dtype=torch.float32)
                value = learners[name][1](seen[name])[:, 0]
                logs = choice.log_prob(actions[name]), choice.entropy()
                rollout[name].append((value, reward, ended, *logs))
        for name, (_, critic, optimiser) in learners.items():
            later = critic(torch.as_tensor(obs[name], dtype=torch.float32))[:, 0].detach()
            loss = torch.zeros(())
            for value, reward, ended, log_prob, entropy in reversed(rollout[name]):
                later = reward + DISCOUNT * later * ~ended
                gain = (later - value).detach()
                loss += (0.5 * (later - value) ** 2 - log_prob * gain - 0.01 * entropy).mean()
            optimiser.zero_grad()
            (loss / ROLLOUT).backward()
            optimiser.step()
        means = {
            name: torch.stack([step[1] for step in rollout[name]]).mean().item()
            for name in learners
        }
        shown = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
        print(f"{number + ROLLOUT * num_envs} steps, mean reward: {shown}")
    envs.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Two opponents of simple_push learn together.")
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--num-envs", type=int, default=16)
    given = parser.parse_args()
    main(given.steps, given.num_envs)
