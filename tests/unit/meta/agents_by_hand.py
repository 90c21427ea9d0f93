"""The losses of an agent, step by step in plain numpy: what the library's are compared with."""

import numpy as np


def numbers(module):
    return {
        name: value.detach().numpy().astype(np.float64) for name, value in module.named_parameters()
    }


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def relu(x):
    return np.maximum(x, 0)


def through_layers(body, x):
    values, depth = numbers(body), len(body.layers)
    for index in range(depth):
        x = values[f"layers.{index}.weight"] @ x + values[f"layers.{index}.bias"]
        x = x if index == depth - 1 else relu(x)
    return x


def embed(embedding, x):
    values = numbers(embedding)
    return relu(values["layer.weight"] @ x + values["layer.bias"])


def memory_of(memory, actions, rewards, obs):
    """h_t for one trial: the cell's equations, one step after another."""
    cells = numbers(memory.recurrence.cells)
    size = memory.recurrence.size
    state, cell, found = np.zeros(size), np.zeros(size), []
    for t, seen in enumerate(obs):
        before = (actions[t - 1], [rewards[t - 1]]) if t else (np.zeros_like(actions[0]), [0.0])
        given = {"action": before[0], "reward": np.array(before[1]), "obs": seen}
        x = np.concatenate([embed(layer, given[name]) for name, layer in memory.embeddings.items()])
        of_input = cells["weight_ih_l0"] @ x + cells["bias_ih_l0"]
        of_state = cells["weight_hh_l0"] @ state + cells["bias_hh_l0"]
        if memory.recurrence.is_lstm:
            enter, keep, new, show = np.split(of_input + of_state, 4)
            cell = sigmoid(keep) * cell + sigmoid(enter) * np.tanh(new)
            state = sigmoid(show) * np.tanh(cell)
        else:
            (r, z, n), (hr, hz, hn) = np.split(of_input, 3), np.split(of_state, 3)
            keep = sigmoid(z + hz)
            state = (1 - keep) * np.tanh(n + sigmoid(r + hr) * hn) + keep * state
        found.append(state)
    return found


def actor_says(actor, remembered, obs):
    if actor.shortcut is None:
        return through_layers(actor.body, obs)
    return through_layers(actor.body, np.concatenate((remembered, embed(actor.shortcut, obs))))


def critic_says(critic, remembered, obs, action):
    x = obs if critic.is_discrete else np.concatenate((obs, action))
    if critic.shortcut is not None:
        x = np.concatenate((remembered, embed(critic.shortcut, x)))
    return through_layers(critic.first, x), through_layers(critic.second, x)


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def worth(agent, critic, remembered, obs, said, noise, *, is_target=False):
    """The value of what the actor does here, with the entropy; and that entropy."""
    name, options = agent.options.algo_name, agent.options
    if name == "sacd":
        chances = softmax(said)
        values = np.minimum(*critic_says(critic, remembered, obs, None))
        entropy = -(chances * np.log(chances)).sum()
        return (chances * values).sum() + agent.algorithm.entropy.value * entropy, entropy
    if name == "td3":
        action = np.tanh(said)
        if is_target:
            most = options.td3.target_noise_clip
            action = np.clip(action + np.clip(options.td3.target_noise * noise, -most, most), -1, 1)
        return min(critic_says(critic, remembered, obs, action))[0], None
    mean, log_std = np.split(said, 2)
    deviation = np.exp(np.clip(log_std, -20, 2))
    raw = mean + deviation * noise
    density = np.exp(-0.5 * ((raw - mean) / deviation) ** 2) / (deviation * np.sqrt(2 * np.pi))
    entropy = -(np.log(density) - np.log(1 - np.tanh(raw) ** 2)).sum()
    value = min(critic_says(critic, remembered, obs, np.tanh(raw)))[0]
    return value + agent.algorithm.entropy.value * entropy, entropy


def losses(agent, batch, target_noise, noise):
    """qf1_loss, qf2_loss, policy_loss, and the mean entropy."""
    nets, targets = agent.networks, agent.targets
    sums, count, entropies = np.zeros(3), 0, []
    for b in range(batch.mask.shape[1]):
        obs, rewards = batch.obs[:, b].astype(np.float64), batch.rewards[:, b]
        taken = batch.actions[:, b].astype(np.float64)
        actions = np.eye(agent.action_dim)[taken[:, 0].astype(int)] if agent.is_discrete else taken

        def remember(memory, trial=(actions, rewards, obs)):
            return [None] * len(trial[2]) if memory is None else memory_of(memory, *trial)

        of_critic, of_actor = remember(nets.critic_memory), remember(nets.acting_memory)
        follows = agent.algorithm.has_target_actor and not nets.is_shared
        of_next_actor = remember(targets.acting_memory) if follows else of_actor
        next_actor = targets.actor if agent.algorithm.has_target_actor else nets.actor
        of_target = of_critic if nets.is_shared else remember(targets.critic_memory)
        for t in range(len(rewards)):
            if not batch.mask[t, b]:
                continue
            said = actor_says(next_actor, of_next_actor[t + 1], obs[t + 1])
            after, _ = worth(
                agent, targets.critic, of_target[t + 1], obs[t + 1], said, target_noise[t, b],
                is_target=True,
            )  # fmt: skip
            goal = rewards[t] + agent.options.gamma * (1 - batch.terms[t, b]) * after
            values = critic_says(nets.critic, of_critic[t], obs[t], actions[t])
            if agent.is_discrete:
                values = [value[int(taken[t, 0])] for value in values]
            said = actor_says(nets.actor, of_actor[t], obs[t])
            now, entropy = worth(agent, nets.critic, of_critic[t], obs[t], said, noise[t, b])
            errors = [(float(np.squeeze(value)) - goal) ** 2 for value in values]
            sums += [*errors, -now]
            entropies.append(entropy)
            count += 1
    mean = None if entropies[0] is None else np.mean(entropies)
    return sums / count, mean
