"""Agents: their networks, losses and gradients against plain computations; acting; resuming."""

import copy
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from envfleet.errors import ConfigError
from envfleet.learn.torch_setup import threads
from envfleet.meta.agents import AGENT_ARCHS, PolicyOptions, policy_options
from envfleet.meta.agents.agent import make_agent, rows_are_equal
from envfleet.meta.buffers import Windows
from envfleet.runs import checkpoint
from tests.unit.meta import agents_by_hand as by_hand

OBS_DIM, ACTION_DIM, NUM_CHOICES = 3, 2, 5
BOX, CHOICES = spaces.Box(-1, 1, (ACTION_DIM,)), spaces.Discrete(NUM_CHOICES)
SIZES = {
    "action_embedding_size": 4,
    "observ_embedding_size": 6,
    "reward_embedding_size": 5,
    "rnn_hidden_size": 7,
    "dqn_layers": (9, 8),
    "policy_layers": (10, 11),
}
MODELS = [
    ("mlp", True), ("gru", True), ("lstm", True), ("gru", False), ("lstm", False),
    ("gru-mlp", True), ("lstm-mlp", True),
]  # fmt: skip
KINDS = list(product(["sac", "td3", "sacd"], MODELS))


@pytest.fixture(autouse=True)
def _one_thread():
    with threads(1):
        yield


def agent_of(algo="sac", model=("lstm", True), seed=0, **options):
    made = {**SIZES, "algo_name": algo, "seq_model": model[0], "separate": model[1], **options}
    return make_agent(policy_options(made), OBS_DIM, CHOICES if algo == "sacd" else BOX, seed)


def windows(agent, seed=0, num_steps=6, num_windows=3):
    """Random windows, of which the last two end early; one step for agents without memory."""
    rng = np.random.default_rng(seed)
    steps = 1 if agent.arch is AGENT_ARCHS.Markov else num_steps
    shape = (steps, num_windows)
    if agent.is_discrete:
        actions = rng.integers(NUM_CHOICES, size=(*shape, 1)).astype(np.float32)
    else:
        actions = rng.uniform(-1, 1, (*shape, ACTION_DIM)).astype(np.float32)
    mask = np.ones(shape, np.float32)
    if steps > 1:
        mask[4:, -1] = mask[2:, -2] = 0
    return Windows(
        rng.standard_normal((steps + 1, num_windows, OBS_DIM), np.float32),
        actions,
        rng.standard_normal(shape, np.float32),
        (rng.random(shape) < 0.3).astype(np.float32),
        mask,
    )


def trained(agent, updates=3):
    """Away from the first weights, where last layers are almost 0, and from its targets."""
    for number in range(updates):
        agent.update(windows(agent, 100 + number))
    return agent


# ---- the table of architectures -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "arch", "of_actor", "of_critic"),
    [
        (("mlp", True), "markov", 3, 3 + 2),
        (("gru", True), "memory", 7 + 6, 7 + 15),
        (("lstm", False), "memory", 7 + 6, 7 + 15),
        (("lstm-mlp", True), "memory-markov", 3, 7 + 15),
    ],
)
def test_networks_get_what_their_architecture_says(model, arch, of_actor, of_critic):
    agent = agent_of(model=model)
    nets = agent.networks
    assert agent.arch == arch == AGENT_ARCHS(arch)
    assert nets.actor.body.layers[0].in_features == of_actor
    assert {one.layers[0].in_features for one in (nets.critic.first, nets.critic.second)} == {
        of_critic
    }
    assert [layer.out_features for layer in nets.actor.body.layers] == [10, 11, 2 * ACTION_DIM]
    assert [layer.out_features for layer in nets.critic.first.layers] == [9, 8, 1]
    if arch == "memory":
        assert nets.actor.shortcut.layer.in_features == OBS_DIM
    if arch != "markov":
        assert nets.critic.shortcut.layer.in_features == OBS_DIM + ACTION_DIM
        assert nets.critic_memory.recurrence.cells.input_size == 4 + 5 + 6
    has_own = arch == "memory" and model[1]
    assert (nets.actor_memory is not None) == has_own
    assert (nets.acting_memory is nets.critic_memory) == (arch == "memory" and not has_own) or (
        arch == "markov"
    )


def test_critics_of_discrete_actions_get_no_action_and_judge_all():
    nets = agent_of("sacd").networks
    assert nets.critic.shortcut.layer.in_features == OBS_DIM
    assert nets.critic.first.layers[-1].out_features == NUM_CHOICES
    assert nets.critic_memory.embeddings["action"].layer.in_features == NUM_CHOICES
    assert agent_of("sacd", ("mlp", True)).networks.critic.first.layers[0].in_features == OBS_DIM


def test_an_embedding_of_size_0_leaves_its_input_out():
    agent = agent_of(reward_embedding_size=0)
    assert list(agent.networks.critic_memory.embeddings) == ["action", "obs"]
    batch = windows(agent)
    changed = replace(batch, rewards=batch.rewards.copy())
    changed.rewards[0] += 5  # seen by the memory from the second observation on
    said = [_critics(agent, one) for one in (batch, changed)]
    assert torch.equal(*said)
    said = [_critics(agent_of(), one) for one in (batch, changed)]
    assert not torch.equal(*said)


def _critics(agent, batch):
    rewards = torch.from_numpy(batch.rewards)[..., None]
    before = torch.cat((torch.zeros_like(rewards[:1]), rewards))
    actions = torch.from_numpy(batch.actions)
    none = torch.zeros_like(actions[:1])
    return agent.networks.critic_memory(
        torch.cat((none, actions)), before, torch.from_numpy(batch.obs)
    )


def test_first_weights_are_drawn_as_documented():
    nets = agent_of(rnn_hidden_size=16).networks
    for name, value in nets.critic_memory.recurrence.cells.named_parameters():
        if "bias" in name:
            assert not value.any()
        else:
            size = min(value.shape)
            tall = value if value.shape[1] == size else value.T
            torch.testing.assert_close(tall.T @ tall, torch.eye(size), atol=1e-5, rtol=0)
    for body, bound in ((nets.actor.body, 1e-3), (nets.critic.first, 3e-3)):
        *inner, last = body.layers
        for layer in inner:
            assert (layer.bias == 0.1).all()
            most = layer.in_features**-0.5
            assert most * 0.8 < layer.weight.abs().max() <= most
        assert bound * 0.5 < last.weight.abs().max() <= bound
    assert not torch.equal(nets.critic.first.layers[0].weight, nets.critic.second.layers[0].weight)


def test_weights_follow_from_the_seed_alone():
    torch.manual_seed(1)
    one = agent_of(seed=4).state_dict()["networks"]
    before = torch.random.get_rng_state()
    torch.manual_seed(2)
    same, other = (agent_of(seed=seed).state_dict()["networks"] for seed in (4, 5))
    assert all(torch.equal(value, same[name]) for name, value in one.items())
    assert not all(torch.equal(value, other[name]) for name, value in one.items())
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), before)


# ---- losses and gradients -----------------------------------------------------------------------


@pytest.mark.parametrize(("algo", "model"), KINDS)
def test_losses_equal_those_computed_by_hand(algo, model):
    agent = trained(agent_of(algo, model, lr=0.01, tau=0.3))
    batch = windows(agent)
    draws = torch.Generator().manual_seed(1)
    noises = [torch.randn((*batch.mask.shape, ACTION_DIM), generator=draws) for _ in range(2)]
    left = list(noises)
    agent._draw = lambda shape: left.pop(0)
    found, entropy = agent.losses(batch)
    expected, mean_entropy = by_hand.losses(agent, batch, *(one.numpy() for one in noises))
    said = [found[name].item() for name in ("qf1_loss", "qf2_loss", "policy_loss")]
    np.testing.assert_allclose(said, expected, rtol=2e-4)
    assert (entropy is None) == (algo == "td3")
    if entropy is not None:
        assert entropy.item() == pytest.approx(mean_entropy, rel=2e-4)


@pytest.mark.parametrize(("algo", "model"), KINDS)
def test_each_loss_moves_its_own_networks_only(algo, model):
    agent = trained(agent_of(algo, model, reward_prediction=1.0))
    nets = agent.networks
    names = {id(value): name for name, value in nets.named_parameters()}

    def moved(loss):
        gradients: Any = torch.autograd.grad(
            loss, list(nets.parameters()), allow_unused=True, retain_graph=True
        )
        pairs = zip(nets.parameters(), gradients, strict=True)
        found = {names[id(value)] for value, gradient in pairs if gradient is not None}
        return {name.partition(".")[0] for name in found}, found

    losses, _ = agent.losses(windows(agent))
    assert not any(value.requires_grad for value in agent.targets.parameters())
    of_memory = {"critic_memory"} if nets.critic_memory is not None else set()
    of_actor = {"actor", "actor_memory"} if nets.actor_memory is not None else {"actor"}
    assert moved(losses["qf1_loss"])[0] == {"critic"} | of_memory
    assert not any("second" in name for name in moved(losses["qf1_loss"])[1])
    assert moved(losses["policy_loss"])[0] == of_actor
    if of_memory:
        found = moved(losses["reward_prediction_loss"])[0]
        assert found == of_memory | (of_actor - {"actor"})
    else:
        assert "reward_prediction_loss" not in losses
    assert all(value.requires_grad for value in nets.parameters())


def test_masked_steps_change_nothing():
    agent = trained(agent_of(reward_prediction=1.0))
    batch = windows(agent)
    other = copy.deepcopy(batch)
    for array in (other.actions, other.rewards, other.terms):
        array[batch.mask == 0] = 7
    other.obs[1:][batch.mask == 0] = -3
    results = []
    for one in (batch, other):
        agent._generator.manual_seed(0)
        results.append(agent.losses(one)[0])
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("algo", ["sac", "td3", "sacd"])
def test_updates_log_what_is_documented_and_targets_follow(algo, model):
    agent = agent_of(algo, model, tau=0.25)
    trained(agent, 1)
    before = copy.deepcopy(agent.targets.state_dict())
    logged = agent.update(windows(agent))
    assert agent.num_updates == 2
    keys = {"qf1_loss", "qf2_loss", "policy_loss", "q_grad_norm", "pi_grad_norm"}
    keys |= set() if algo == "td3" else {"policy_entropy", "alpha"}
    if model[0] != "mlp":
        keys |= {"q_rnn_grad_norm"} if model[1] else {"rnn_grad_norm"}
    if agent.arch is AGENT_ARCHS.Memory and model[1]:
        keys |= {"pi_rnn_grad_norm"}
    assert set(logged) == keys
    assert np.isfinite(list(logged.values())).all()
    now = agent.networks.state_dict()
    for name, value in agent.targets.state_dict().items():
        owner = name.partition(".")[0]
        is_shared = owner == "critic_memory" and not model[1]
        if is_shared or (owner.startswith("actor") and algo != "td3"):
            continue  # not used
        torch.testing.assert_close(value, 0.75 * before[name] + 0.25 * now[name])


def test_gradient_norms_are_means_over_parameters():
    agent = agent_of()
    logged = agent.update(windows(agent))
    parts = {
        "q_grad_norm": [agent.networks.critic, agent.networks.critic_memory],
        "pi_rnn_grad_norm": [agent.networks.actor_memory.recurrence],
    }
    for name, modules in parts.items():
        lengths = [value.grad.norm() for one in modules for value in one.parameters()]
        assert logged[name] == pytest.approx(torch.stack(lengths).mean().item(), rel=1e-5)


def test_the_weight_of_the_entropy_is_steered_or_given():
    steered = agent_of(sac={"alpha_lr": 0.1})
    alphas = [steered.update(windows(steered, number))["alpha"] for number in range(5)]
    assert alphas[0] < 1  # more entropy than -2 at first
    assert alphas == sorted(alphas, reverse=True)
    wanting = agent_of(sac={"alpha_lr": 0.1, "target_entropy": 50.0})
    assert wanting.update(windows(wanting))["alpha"] > 1
    given = agent_of(sac={"automatic_entropy_tuning": False, "entropy_alpha": 0.125})
    assert {given.update(windows(given, number))["alpha"] for number in range(2)} == {0.125}
    share = agent_of("sacd", sacd={"target_entropy": 0.5})
    assert share.algorithm.entropy.target == pytest.approx(0.5 * np.log(NUM_CHOICES))


@pytest.mark.parametrize("algo", ["sac", "td3"])
def test_an_agent_without_memory_learns_to_copy_its_observation(algo):
    agent = agent_of(
        algo, ("mlp", True), lr=3e-3, gamma=0.0, dqn_layers=(32, 32), policy_layers=(32, 32),
        sac={"alpha_lr": 0.02},
    )  # fmt: skip
    rng = np.random.default_rng(0)
    ones = np.ones((1, 128), np.float32)
    for _ in range(300):
        obs = rng.uniform(-0.8, 0.8, (2, 128, OBS_DIM)).astype(np.float32)
        actions = rng.uniform(-1, 1, (1, 128, ACTION_DIM)).astype(np.float32)
        rewards = -np.square(actions - obs[:1, :, :2]).sum(-1)
        agent.update(Windows(obs, actions, rewards, ones, ones))
    actions, _ = agent.act(agent.initial_state(128), obs[0], deterministic=True)
    assert np.abs(actions - obs[0, :, :2]).mean() < 0.15  # 0.55 for an agent that knows nothing


# ---- acting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("algo", "model"), KINDS)
def test_acting_step_by_step_is_what_updates_see(algo, model):
    agent = trained(agent_of(algo, model, rnn_num_layers=2, lr=0.03))
    batch, nets = windows(agent_of(algo), num_steps=7), agent.networks
    act, said = agent.algorithm.act, []

    def heard(output, noise):
        said.append(output)
        return act(output, noise)

    agent.algorithm.act = heard
    actions = torch.from_numpy(batch.actions)
    if algo == "sacd":
        actions = torch.eye(NUM_CHOICES)[actions[..., 0].long()]
    state = agent.initial_state(3)
    for t, obs in enumerate(batch.obs):
        if t:
            state.action[:], state.reward[:] = actions[t - 1], batch.rewards[t - 1]
        _, state = agent.act(state, obs, deterministic=True)
    rewards, obs = torch.from_numpy(batch.rewards)[..., None], torch.from_numpy(batch.obs)
    with torch.no_grad():
        before = [torch.cat((torch.zeros_like(one[:1]), one)) for one in (actions, rewards)]
        remembered = nets.acting_memory and nets.acting_memory(*before, obs)
        expected = nets.actor(remembered, obs)
    found = torch.stack([one[:3] for one in said])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("algo", "model"), KINDS)
def test_rows_do_not_depend_on_other_rows(algo, model):
    assert rows_are_equal(trained(agent_of(algo, model, rnn_hidden_size=32, lr=0.03)))


def test_rows_that_do_depend_on_others_are_found():
    agent = agent_of()
    act = agent.algorithm.act
    agent.algorithm.act = lambda said, noise: act(said, noise) + 1e-6 * len(said)
    assert not rows_are_equal(agent)


def test_a_state_is_put_and_reset_by_rows():
    agent = agent_of()
    state = agent.initial_state(5)
    rng = np.random.default_rng(0)
    obs = rng.standard_normal((5, OBS_DIM))
    noise = np.stack([agent.noise(rng, 1)[0] for _ in range(5)])
    actions, state = agent.act(state, obs, noise)
    np.testing.assert_array_equal(state.action, actions)
    state.reward[:] = 1
    rows = [1, 3]
    some, after = agent.act(state.at(rows), obs[rows], noise[rows])
    whole, expected = agent.act(state, obs, noise)
    np.testing.assert_array_equal(some, whole[rows])
    state.put(rows, after)
    np.testing.assert_array_equal(state.hidden[rows], expected.hidden[rows])
    state.reset([3])
    for array in (state.hidden, state.action, state.reward):
        assert not array[3].any()
    assert state.hidden[1].any()
    assert len(state) == 5


def test_actions_are_within_bounds_and_noise_decides_them():
    rng = np.random.default_rng(0)
    obs = rng.standard_normal((64, OBS_DIM)) * 10
    for algo in ("sac", "td3"):
        agent = trained(agent_of(algo, td3={"exploration_noise": 1.0}))
        state = agent.initial_state(64)
        noise = agent.noise(rng, 64)
        first, again = (agent.act(state, obs, noise)[0] for _ in range(2))
        np.testing.assert_array_equal(first, again)
        assert np.abs(first).max() <= 1
        assert not np.array_equal(first, agent.act(state, obs, -noise)[0])


def test_discrete_actions_are_drawn_by_their_probabilities():
    agent = trained(agent_of("sacd", ("mlp", True), lr=0.05))
    rng = np.random.default_rng(0)
    obs = np.repeat(rng.standard_normal((1, OBS_DIM)), 20_000, 0)
    actions, _ = agent.act(agent.initial_state(20_000), obs, agent.noise(rng, 20_000))
    shares = np.bincount(actions, minlength=NUM_CHOICES) / 20_000
    expected = by_hand.softmax(by_hand.actor_says(agent.networks.actor, None, obs[0]))
    np.testing.assert_allclose(shares, expected, atol=0.015)
    best, _ = agent.act(agent.initial_state(4), obs[:4], deterministic=True)
    assert best.tolist() == [expected.argmax()] * 4


def test_correlated_noise_keeps_its_deviation():
    noise = agent_of(sac={"noise_correlation": 0.9}).noise(np.random.default_rng(0), 20_000)
    assert noise.std() == pytest.approx(1, abs=0.05)
    assert np.corrcoef(noise[:-1, 0], noise[1:, 0])[0, 1] == pytest.approx(0.9, abs=0.01)
    plain = agent_of().noise(np.random.default_rng(0), 20_000)
    assert np.corrcoef(plain[:-1, 0], plain[1:, 0])[0, 1] == pytest.approx(0, abs=0.03)


# ---- resuming, and wrong input ------------------------------------------------------------------


@pytest.mark.parametrize(("algo", "model"), KINDS)
def test_a_loaded_agent_goes_on_bit_for_bit(tmp_path, algo, model):
    agent = trained(agent_of(algo, model, reward_prediction=0.5))
    checkpoint.save(tmp_path / "agent.pt", agent.state_dict())
    other = agent_of(algo, model, seed=9, reward_prediction=0.5)
    other.load_state_dict(checkpoint.load(tmp_path / "agent.pt"))
    logged = [[one.update(windows(one, number)) for number in range(2)] for one in (agent, other)]
    assert logged[0] == logged[1]
    for mine, yours in zip(agent.networks.parameters(), other.networks.parameters(), strict=True):
        assert torch.equal(mine, yours)
    assert other.num_updates == 5


def test_options_that_do_not_exist_or_fit_are_named():
    with pytest.raises(ConfigError, match="policy has no option 'rnn_size'"):
        policy_options({"rnn_size": 3})
    with pytest.raises(ConfigError, match=r"policy\.sac has no option 'alpha'"):
        policy_options({"sac": {"alpha": 3}})
    with pytest.raises(ConfigError, match=r"policy\.td3 must be a mapping, got 3"):
        policy_options({"td3": 3})
    with pytest.raises(ConfigError, match="seq_model must be one of"):
        policy_options({"seq_model": "transformer"})
    with pytest.raises(ConfigError, match="the memory would see nothing"):
        PolicyOptions(action_embedding_size=0, observ_embedding_size=0, reward_embedding_size=0)
    with pytest.raises(ConfigError, match="the actor has none"):
        PolicyOptions(seq_model="gru-mlp", separate=False)
    assert policy_options({"sac": None, "td3": {"target_noise": 0.3}}).td3.target_noise == 0.3


def test_algorithms_that_are_not_for_the_actions_are_errors():
    with pytest.raises(ConfigError, match="set it to 'sacd'"):
        make_agent(PolicyOptions(), OBS_DIM, CHOICES, 0)
    with pytest.raises(ConfigError, match="set it to 'sac' or 'td3'"):
        make_agent(PolicyOptions(algo_name="sacd"), OBS_DIM, BOX, 0)
    with pytest.raises(ConfigError, match="one list of numbers or discrete"):
        make_agent(PolicyOptions(), OBS_DIM, spaces.Box(-1, 1, (2, 2)), 0)
    with pytest.raises(ConfigError, match="must start at 0"):
        make_agent(PolicyOptions(algo_name="sacd"), OBS_DIM, spaces.Discrete(3, start=1), 0)
    agent = agent_of()
    with pytest.raises(ConfigError, match="act needs noise"):
        agent.act(agent.initial_state(4), np.zeros((4, OBS_DIM)))
